"""Evaluation during training: validation loss in nats per token and in bits per byte, and samples of text.

Both scripts that train use it. This file knows nothing of training, run directories or where batches come from.
"""

import math
from collections.abc import Iterable

import torch
from torch.nn import functional as F

from parts.cli import UserError
from parts.generation import generate
from parts.huggingface import exactly
from parts.runtime import Runtime


def validate(
    loss_fn: torch.nn.Module, batches: Iterable[tuple], token_bytes: torch.Tensor, rt: Runtime
) -> dict[str, float]:
    """Compute the mean loss in nats per token, bits per byte of text, and the number of tokens, over all ranks.

    `batches` yields what `loss_fn` takes, on the device, the targets second; a negative target is not scored.
    `token_bytes` (vocabulary,) says how many bytes of text each id encodes, so that bits per byte compare across
    tokenizers, as nats per token do not. Where a tokenizer cannot say it, all are 0, and bits per byte are left out.
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
    found = dict(loss=nats / tokens, tokens=int(tokens))
    if n_bytes:
        found["bpb"] = nats / math.log(2) / n_bytes
    return found


@torch.no_grad()
def loss_is_of_logits(model, ids: list[int]) -> bool:
    """Say whether the model's loss is the cross-entropy of its logits, which samples and HellaSwag take."""
    idx = torch.tensor([ids], device=model.lm_head.weight.device)  # (1, T)
    with exactly(model):
        loss = model(idx, idx)
        if not isinstance(loss, torch.Tensor):
            raise UserError("GPT.forward returned a tuple; return logits, and with targets the loss alone")
        plain = F.cross_entropy(model(idx)[0], idx[0])
    return not (loss - plain).abs() > 1e-4 * plain.abs()  # of nan nobody can say


def complete(model, tokenizer, prompt: str, max_tokens: int, rt: Runtime, seed: int | None) -> str:
    """Return a prompt with the text that `generate` adds, up to `<|endoftext|>`; "" on all ranks but the first. Where
    training has diverged, the reason in brackets: the run goes on to its own error.

    Uses a separate random number generator, so that sampling does not affect training. Without a seed each token is
    the likeliest.
    """
    if not rt.is_main:
        return ""
    eot = tokenizer.eot_token
    options = dict(
        generator=torch.Generator(rt.device).manual_seed(seed or 0),
        temperature=0.0 if seed is None else 1.0,
        top_k=50,
        stop_tokens={eot},
        suppress_tokens=tokenizer.unused_ids(model.config.vocab_size),
    )
    ids = tokenizer.encode_ordinary(prompt) or [eot or 0]
    with rt.autocast(cache=True):
        try:
            tokens = [token for [token] in generate(model, [ids], max_tokens, **options)]
        except UserError as e:
            return f"{prompt} [{e}]"
    return prompt + tokenizer.decode([token for token in tokens if token != eot])
