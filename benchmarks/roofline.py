"""What a training step should take: its roofline, from the model's sizes and a card's two peaks. Nothing is run.

A part of the step is bound by the matrix units or by the memory. So its shortest time is its operations over the card's
16-bit peak, or its bytes over the bandwidth. Kernels reach a fraction of that, which is an assumption: near what is
reported of an H100. Where a measured part takes longer than its line here, there is something to find.

Counted is the compiled step of train_gpt2.py in bf16 autocast, with one micro-batch: fp32 residuals and weights, the
loss in chunks, AdamW. Below the sum is what each change that has not been made would save.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch

from benchmarks.measure import Common, Size, model_sizes
from cli import Positive, Range, UserError
from learning.loss import chunk_size
from model import GPT, GPTConfig
from run.runtime import Runtime, peaks

Fraction = Annotated[float, Range(0.01, 1)]


@dataclass(frozen=True)
class Config(Common):
    card: str = ""  # its name, as in run/runtime.py; this GPU, or H100
    size: Size = ""  # of the model
    batch_size: Positive = 64  # sequences of 1,024 tokens
    matrix: Fraction = 0.64  # of the 16-bit peak, in matrix products
    attention: Fraction = 0.25  # of the 16-bit peak, in causal attention with heads of 64 channels
    memory: Fraction = 0.92  # of the bandwidth
    busy: Fraction = 0.965  # of the time in which a kernel runs at all


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    card = config.card or (torch.cuda.get_device_name(rt.device) if rt.device.type == "cuda" else "H100")
    if (found := peaks(card)) is None:
        raise UserError(f"--card {card} is not in the table of run/runtime.py; give another name, such as H100")
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304, **model_sizes(config.size)))
    tokens, milliseconds = config.batch_size * model.config.n_positions, {}
    print(f"{card}: {found[0] / 1e12:,.0f} TFLOP/s, {found[1] / 1e9:,.0f} GB/s; {tokens:,} tokens a step")
    for name, (bound, work) in parts(model, tokens).items():
        at_peak = 1e3 * work / found[bound == "memory"]
        milliseconds[name] = at_peak / getattr(config, bound)
        yield dict(name=name, bound_by=bound, tera=work / 1e12, ms_at_peak=at_peak, ms=milliseconds[name])
    total = sum(milliseconds.values()) / config.busy
    least = 1e3 * tokens * model.estimate_flops(model.config.n_positions) / found[0]
    yield dict(name="the step", ms=total, tokens_per_second=round(1e3 * tokens / total), mfu=least / total)
    for name, saved in savings(milliseconds).items():
        total -= saved
        yield dict(name=f"and {name}", ms=total, tokens_per_second=round(1e3 * tokens / total), mfu=least / total)


def parts(model: GPT, tokens: int) -> dict[str, tuple[str, float]]:
    """{name: (bound, operations or bytes)} of a step. A number has 2 bytes in bf16, 4 in fp32 (residuals, weights)."""
    c, N = model.config, model.num_params()
    L, C, V = c.n_layer, c.n_embd, c.vocab_size
    a_block = tokens * L * C  # numbers of one activation as wide as the residual stream, in all blocks
    sums = -(-tokens // chunk_size(tokens, V, "cuda")) * V * C  # numbers that the chunks of the loss add
    return {
        # 2 operations a weight and token forward, 4 backward
        "products of the blocks": ("matrix", 6 * tokens * 12 * L * C * C),
        "products of the head": ("matrix", 6 * tokens * V * C),
        # 2 products forward, 5 backward, of T^2 C operations each: half of the square is masked
        "attention": ("attention", 7 * a_block * c.n_positions),
        # twice a block: read residual and branch, write the sum and its norm; backward one more is read
        "norms and residuals": ("memory", 2 * a_block * (4 + 2 + 4 + 2 + 2 + 4 + 4 + 4 + 2)),
        # 4 C wide: read, write; backward two are read
        "GELU": ("memory", 4 * a_block * (2 + 2 + 2 + 2 + 2)),
        # the outputs of four products, (3 + 1 + 4 + 1) C wide, and inputs and gradients of two norms are read again
        "gradients of biases and norms": ("memory", a_block * (9 * 2 + 2 * (2 + 4))),
        "gradients of q, k and v side by side": ("memory", 3 * a_block * (2 + 2)),
        # read for the sum of exponentials, read again, gradients written
        "loss": ("memory", tokens * V * (2 + 2 + 2)),
        # AdamW (4 read, 3 written), the norm, clipping, casts of weights and gradients; embeddings
        "optimizer, casts, embeddings": ("memory", N * (7 * 4 + 4 + 8 + 6 + 6) + sums * 12 + tokens * C * 24),
    }


def savings(ms: dict[str, float]) -> dict[str, float]:
    """{change: milliseconds that it would save}, of those that `parts` take."""
    return {
        # twice the peak; but a second layout of the gradients of logits is made, 2 of the 6 bytes that the loss moves
        "the head in FP8": ms["products of the head"] / 2 - ms["loss"] / 3,
        # two of three reads and one of two writes are then registers of the products beside it
        "GELU within the products": ms["GELU"] * 3 / 5,
        "gradients of biases and norms where their inputs are read anyway": ms["gradients of biases and norms"],
        "gradients of q, k and v written in place": ms["gradients of q, k and v side by side"],
    }
