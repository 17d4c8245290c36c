"""Evaluation during training: validation loss in nats per token and in bits per byte, and samples of text.

Both scripts that train use it. This file knows nothing of training, run directories or where batches come from.
"""

import math
from collections.abc import Iterable

import torch

from parts.cli import UserError
from parts.generation import generate
from parts.runtime import Runtime


def validate(
    loss_fn: torch.nn.Module, batches: Iterable[tuple], token_bytes: torch.Tensor, rt: Runtime
) -> dict[str, float]:
    """Mean loss in nats per token, and bits per byte of text, over the micro-batches of all ranks.

    `batches` yields what `loss_fn` takes, on the device, the targets second; a negative target is not scored.
    `token_bytes` (vocabulary,) says how many bytes of text each id encodes, so that bits per byte compare across
    tokenizers, as nats per token do not.
    """
    module = getattr(loss_fn, "module", loss_fn)  # without DDP, which has nothing to exchange here
    was_training = module.training
    module.eval()
    # sums over millions of tokens need fp64, which MPS does not have
    device = "cpu" if rt.device.type == "mps" else rt.device
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad(), rt.autocast(cache=True):
        for micro_batch in batches:
            targets = micro_batch[1]
            nats = module(*micro_batch, n_targets=1)  # the sum, not the mean
            scored = targets >= 0
            n_bytes = torch.where(scored, token_bytes[targets.clamp(min=0)], 0).sum()
            found = (nats, scored.sum(), n_bytes)
            totals += torch.stack([value.to(totals) for value in found])
    module.train(was_training)
    nats, tokens, n_bytes = rt.sum(totals).tolist()
    return dict(loss=nats / tokens, bpb=nats / math.log(2) / max(n_bytes, 1))


def complete(model, tokenizer, prompts: list[str], max_tokens: int, rt: Runtime, seed: int, **options) -> list[str]:
    """The text that `generate` with `options` adds to each prompt, up to `<|endoftext|>`; all prompts at once. Where
    there is none, because training has diverged, the reason in brackets: the run goes on to its own error.

    Uses a separate random number generator, so that sampling does not affect training.
    """
    eot = tokenizer.eot_token
    generator = torch.Generator(rt.device).manual_seed(seed)
    ids = [tokenizer.encode_ordinary(prompt) or [eot or 0] for prompt in prompts]
    options |= dict(stop_tokens={eot}, suppress_tokens=tokenizer.unused_ids(model.config.vocab_size))
    with rt.autocast(cache=True):
        steps = generate(model, ids, max_tokens, generator=generator, **options)
        try:
            texts = list(zip(*steps, strict=True))  # from the tokens of each step to those of each prompt
        except UserError as e:
            return [f" [{e}]" for _ in prompts]
    return [tokenizer.decode([token for token in text if token != eot]) for text in texts]
