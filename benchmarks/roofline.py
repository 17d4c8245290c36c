"""How long a training step should take: its roofline, from the model's sizes and a card's two peaks. Runs nothing.

Each part of the step is bound by the matrix units or by the memory, so its shortest time is its operations over the
card's 16-bit peak, or its bytes over the bandwidth. Kernels reach a fraction of that, which is assumed here, close to
what is reported of an H100. If a part measures longer than its line here, it can be made faster.

The parts and the fractions are in pretraining/plan.py, also for `train_gpt2.py --dry_run`. Below the sum, the table has
what each change that we have not made would save.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.measure import Common, Size, model_sizes
from cli import UserError
from machine.runtime import Runtime, peaks
from model import GPTConfig
from pretraining.plan import LAUNCHES, REACHED, STEP, step_parts, token_flops


@dataclass(frozen=True)
class Config(Common):
    card: str = ""  # name of the card, as in machine/runtime.py; empty for this GPU, or H100
    size: Size = ""  # size of the model


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    card = config.card or "H100"
    if not config.card and rt.device.type == "cuda":
        card = torch.cuda.get_device_name(rt.device)
    known = peaks(card)
    if known is None:
        raise UserError(f"--card {card} is not in the table of machine/runtime.py; give another name, such as H100")
    flops, bandwidth = known  # per second
    shape = GPTConfig(vocab_size=50304, **model_sizes(config.size))
    print(f"{card}: {flops / 1e12:,.0f} TFLOP/s, {bandwidth / 1e9:,.0f} GB/s; {STEP:,} tokens per step")
    milliseconds = {}
    for name, (bound, work) in step_parts(shape, shape.n_positions).items():
        at_peak = 1e3 * work / (bandwidth if bound == "memory" else flops)
        milliseconds[name] = at_peak / REACHED[bound]
        yield dict(name=name, bound_by=bound, tera=work / 1e12, ms_at_peak=at_peak, ms=milliseconds[name])
    launches = 1e3 * LAUNCHES * shape.n_layer
    yield dict(name="launching kernels", bound_by="host", ms=launches)
    total = sum(milliseconds.values()) + launches
    least = 1e3 * STEP * token_flops(shape, shape.n_positions) / flops
    for name, saved in {"the step": 0.0, **savings(milliseconds)}.items():
        total -= saved
        yield dict(name=name, ms=total, tokens_per_second=round(1e3 * STEP / total), mfu=least / total)


def savings(ms: dict[str, float]) -> dict[str, float]:
    """{change: milliseconds that it would save}, from those of the parts."""
    return {
        # two of three reads and one of two writes then stay in the registers of the neighbouring products
        "and GELU within the products": ms["GELU"] * 3 / 5,
        "and gradients of biases and norms where their inputs are read anyway": ms["gradients of biases and norms"],
        "and gradients of q, k and v written in place": ms["gradients of q, k and v side by side"],
    }
