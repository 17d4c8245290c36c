"""Evaluation during training: validation loss in nats per token and in bits per byte, and samples of text.

Both scripts that train use it. This file knows nothing of training, run directories or where batches come from.
"""

import math
from collections.abc import Iterable

import torch

from learning.generation import generate


def validate(forward: torch.nn.Module, batches: Iterable[tuple], token_bytes: torch.Tensor, rt) -> dict:
    """Mean loss in nats per token, and bits per byte of text, over the micro-batches of all ranks.

    `batches` yields what `forward` takes, on the device, the targets second; a negative target is not scored.
    `token_bytes` (vocabulary,) says how many bytes of text each id encodes, so that bits per byte compare across
    tokenizers, as nats per token do not.
    """
    module = getattr(forward, "module", forward)  # without DDP, which has nothing to exchange here
    was_training = module.training
    module.eval()
    # sums over millions of tokens need fp64, which MPS does not have
    totals = torch.zeros(3, dtype=torch.float64, device="cpu" if rt.device.type == "mps" else rt.device)
    with torch.no_grad(), rt.autocast():
        for micro in batches:
            targets = micro[1]
            nats = module(*micro, n_targets=1)  # the sum, not the mean
            scored = targets >= 0
            n_bytes = torch.where(scored, token_bytes[targets.clamp(min=0)], 0).sum()
            totals += torch.stack([nats, scored.sum().to(nats), n_bytes.to(nats)]).to(totals)
    module.train(was_training)
    nats, tokens, n_bytes = rt.sum(totals).tolist()
    return dict(loss=nats / tokens, bpb=nats / math.log(2) / max(n_bytes, 1))


def complete(model, tokenizer, prompts: list[str], max_tokens: int, rt, seed: int, **options) -> list[str]:
    """The text that `generate` with `options` adds to each prompt, up to `<|endoftext|>`; all prompts at once.

    Uses a separate random number generator, so that sampling does not affect training.
    """
    generator = torch.Generator(rt.device).manual_seed(seed)
    ids = [tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token or 0] for prompt in prompts]
    options |= dict(stop_token=tokenizer.eot_token, n_tokens=len(tokenizer), generator=generator)
    with rt.autocast():
        rows = zip(*generate(model, ids, max_tokens, **options), strict=True)
        return [tokenizer.decode([t for t in row if t != tokenizer.eot_token]) for row in rows]
