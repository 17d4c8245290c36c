"""Look inside a model: what its parts read and return in a forward pass.

    with recorded(model) as seen:
        model(idx)
    seen["h.0.attn.c_attn"].output                     # (B, T, 3 C); the names are those of model.named_modules()

    heads = attention_weights(model, tokens)           # {"head 0 of block 0": (T, T)}
    strongest_heads(heads, words)                      # which of them attends most to four kinds of token

    mib, y = kept_for_backward(attention, q, k, v)     # what autograd keeps of a call

This file knows nothing of training or of figures.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Seen(NamedTuple):
    input: torch.Tensor
    output: torch.Tensor


@contextmanager
def recorded(model) -> Iterator[dict[str, Seen]]:
    """Yield {part of the model: what it read and returned in its last call}, filled while `with` lasts."""
    seen = {}

    def hook(name: str):  # PyTorch calls a hook with what a module has read and returned
        return lambda module, args, output: seen.update({name: Seen(args[0], output)})

    parts = {name.removeprefix("transformer."): module for name, module in model.named_modules()}
    hooks = [module.register_forward_hook(hook(name)) for name, module in parts.items()]
    try:
        yield seen
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def attention_weights(model, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Return the weights (T, T) of every head, a row for each query, from the queries and keys that the model used:
    its fused kernel never has all weights at once."""
    T, n_head = len(tokens), model.config.n_head
    with recorded(model) as seen:
        model(torch.tensor([tokens]))
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    found = {}
    for layer in range(model.config.n_layer):
        qkv = seen[f"h.{layer}.attn.c_attn"].output[0]  # (T, 3 C)
        q, k, _ = qkv.view(T, 3, n_head, -1).permute(1, 2, 0, 3)  # (H, T, D) each
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(later, -math.inf)
        for head, weights in enumerate(scores.softmax(-1)):
            found[f"head {head} of block {layer}"] = weights
    return found


def strongest_heads(heads: dict[str, torch.Tensor], words: list[str]) -> dict[str, tuple]:
    """Return {kind of token: (the head that attends most to it, the share it gets, its share in uniform attention)}.

    The first four tokens do not count as queries: they have too few to choose from.
    """
    T = len(words)
    starts = [i for i, word in enumerate(words) if word.startswith(" ")]
    kinds = {
        "the first token": lambda w: w[4:, 0].mean(),
        "starts of words": lambda w: w[4:, starts].sum(1).mean(),
        "the token before": lambda w: w.diagonal(-1)[3:].mean(),
        "itself": lambda w: w.diagonal()[4:].mean(),
    }
    uniform = torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
    found = {}
    for kind, share in kinds.items():
        head = max(heads, key=lambda name: share(heads[name]))
        found[kind] = head, share(heads[head]).item(), share(uniform).item()
    return found


def kept_for_backward(function: Callable, *args) -> tuple[float, torch.Tensor]:
    """Return the MiB that autograd keeps for the backward pass of function(*args), and what the function returns."""
    sizes = {}

    def keep(tensor):
        sizes[tensor.data_ptr()] = tensor.nbytes  # a tensor kept twice counts once
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function(*args)
    return sum(sizes.values()) / 2**20, result
