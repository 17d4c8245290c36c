"""How long a training step should take: its roofline, from the model's sizes and a card's two peaks. Runs nothing.

Each part of the step is bound by the matrix units or by the memory, so its shortest time is its operations over the
card's 16-bit peak, or its bytes over the bandwidth. Kernels reach a fraction of that: those of one profiled step of
124M on an H200. If a part measures longer than its line here, it can be made faster.

The parts and the fractions are in pretraining/plan.py, also for `train_gpt2.py --dry_run`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.measure import Common, Size, model_sizes
from cli import UserError
from machine.runtime import Runtime, peaks
from model import GPTConfig
from pretraining.plan import REACHED, STEP, step_parts, token_flops


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
    total = 0.0
    for name, (bound, work) in step_parts(shape, shape.n_positions).items():
        at_peak = 1e3 * work / (bandwidth if bound == "memory" else flops)
        expected = at_peak / REACHED[bound]
        total += expected
        yield dict(name=name, bound_by=bound, tera=work / 1e12, ms_at_peak=at_peak, ms=expected)
    least = 1e3 * STEP * token_flops(shape, shape.n_positions) / flops
    yield dict(name="the step", ms=total, tokens_per_second=round(1e3 * STEP / total), mfu=least / total)
