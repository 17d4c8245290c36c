"""Generation with a KV cache, for several prompts of different lengths at once.

    for tokens in generate(model, prompts, 100, top_k=50):      # one new token id for each prompt, step by step
        ...

`GPT.generate` computes the whole context for each new token, although only the last position is new: the keys and
values of all earlier ones stay the same, as long as no token changes its position. So a cache keeps them:

    prefill    one pass over the prompts, whose keys and values fill the cache
    decode     one token per sequence, which attends to the cached tokens of its sequence
    recompute  beyond the context, the window slides: every token gets another position and, as positions are learned,
               another key and value, so the whole cache is stale

This file knows nothing of tokenizers, files or devices. The tests compare its tokens with those of `GPT.generate`.

Shapes in comments: B sequences, T tokens, H heads, D channels of a head, V vocabulary.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from parts.cli import UserError


@torch.no_grad()
def generate(
    model,
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    stop_tokens: Collection[int] = (),
    suppress_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    **sampling,
) -> Iterator[list[int]]:
    """Continue several prompts, of any lengths, at once; yields the next token id of every sequence, step by step.

    `sampling` is what `sample_tokens` takes: temperature, top_k, top_p. A sequence that has produced one of the
    `stop_tokens` keeps yielding it; the generator ends when all have. The ids in `suppress_tokens`, such as those that
    are no token, are never chosen. Raises ValueError for an empty prompt, UserError if the model's logits are not
    finite.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt needs at least one token")
    sequences = [list(prompt) for prompt in prompts]
    ended = [False] * len(sequences)
    longest = max(map(len, sequences)) + max_new_tokens
    capacity = min(longest, model.config.n_positions)
    cache = KVCache(model, len(sequences), capacity)
    suppressed = torch.tensor(suppress_tokens, dtype=torch.long, device=model.lm_head.weight.device)
    for _ in range(max_new_tokens):
        training = model.training
        if training:  # between two tokens the caller may train, or begin another text
            model.eval()
        logits = next_logits(model, sequences, cache)  # (B, V)
        if training:
            model.train()
        if not logits.isfinite().all():  # a GPU would abort the process when it samples from them
            raise UserError("the model's logits are not finite; pass --dtype float32, or an earlier checkpoint")
        logits.index_fill_(1, suppressed, float("-inf"))
        chosen = sample_tokens(logits, generator=generator, **sampling).tolist()
        for i, sequence in enumerate(sequences):
            sequence.append(sequence[-1] if ended[i] else chosen[i])
            ended[i] = sequence[-1] in stop_tokens
        yield [sequence[-1] for sequence in sequences]
        if all(ended):
            break


def next_logits(model, sequences: list[list[int]], cache: "KVCache") -> Tensor:
    """Compute logits (B, V) of the token after each sequence, in the dtype of the weights or autocast, as fp32."""
    device = model.lm_head.weight.device
    if max(map(len, sequences)) > cache.capacity:  # recompute
        sequences = [sequence[-model.config.n_positions :] for sequence in sequences]
        cache = None
    elif not cache.is_empty:  # decode
        idx = torch.tensor([sequence[-1:] for sequence in sequences], device=device)  # (B, 1)
        positions = cache.lengths[:, None]
        x = model.hidden(idx, positions, cache.mask(), cache)  # (B, 1, C)
        cache.lengths += 1
        return model.logits(x[:, 0]).float()
    # padding on the right is harmless: under the causal mask no real token sees it
    idx = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)  # (B, T)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    x = model.hidden(idx.to(device), cache=cache)  # (B, T, C)
    if cache is not None:
        cache.lengths = lengths
        cache.is_empty = False
    batch = torch.arange(len(sequences), device=device)
    last = x[batch, lengths - 1]  # (B, C)
    return model.logits(last).float()


class KVCache:
    """Keys and values of every layer, (B, H, capacity, D) each, for B sequences that may be at different positions.

    `lengths` (B,) int64 counts the cached tokens of each sequence; positions past it hold stale data and are masked.
    """

    def __init__(self, model, batch_size: int, capacity: int):
        self.k: dict[int, Tensor] = {}  # made when a layer has its first keys, which say how many heads there are
        self.v: dict[int, Tensor] = {}
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=model.lm_head.weight.device)
        self.capacity = capacity
        self.is_empty = True

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, H, T, D), and return what their queries attend to.

        An empty cache takes whole prompts, which start at position 0 and attend to themselves. Later it takes one token
        per sequence, stored at the sequence's own position, which attends to all of (B, H, capacity, D) under `mask`.
        """
        if self.is_empty:
            room = (0, 0, 0, self.capacity - k.size(2))
            self.k[layer] = F.pad(k, room)
            self.v[layer] = F.pad(v, room)
            return k, v
        index = self.lengths[:, None, None, None].expand_as(k)
        self.k[layer].scatter_(2, index, k)  # one launch, where [batch, :, lengths] = k takes several
        self.v[layer].scatter_(2, index, v)
        return self.k[layer], self.v[layer]

    def mask(self) -> Tensor:
        """Return (B, 1, 1, capacity) bool: each sequence's own past, and the token that is being decoded."""
        positions = torch.arange(self.capacity, device=self.lengths.device)
        visible = positions <= self.lengths[:, None]  # (B, capacity)
        return visible[:, None, None]


def sample_tokens(logits, temperature=1.0, top_k=None, top_p=1.0, generator=None):
    """Choose an id (B,) int64 for each row of logits (B, V): greedy for temperature 0, else drawn from the `top_k`
    likeliest and the smallest set of ids with probability `top_p` or more (Holtzman et al. 2020, section 3.1)."""
    if temperature < 1e-3:  # dividing could overflow, and the likeliest id has all of the probability
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        k = min(top_k, logits.size(-1))
        kth = logits.topk(k).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p < 1:
        probs = F.softmax(logits, dim=-1)  # (B, V)
        probs, order = probs.sort(dim=-1, descending=True)
        before = probs.cumsum(dim=-1) - probs  # the probability of all likelier ids
        outside = before >= top_p  # they are enough already
        outside[:, 0] = False  # the likeliest stays, whatever top_p
        outside = outside.scatter(-1, order, outside)  # from the sorted order back to that of the ids
        logits = logits.masked_fill(outside, float("-inf"))
    probs = F.softmax(logits, dim=-1)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]
