"""This project's training step against the plain recipe, eager and compiled.

The plain recipe is what a short script does: PyTorch's fused attention, all logits at once in fp32, AdamW, the
vocabulary padded to a multiple of 128; on a GPU with TF32, bf16 autocast and fused AdamW, on a CPU in fp32 and again in
bf16. "this project" is the step of train_gpt2.py with its choices for this device: precision, torch.compile, attention,
chunked loss, the optimizer that can skip a step.

All make the same optimizer step on the same random tokens, without data loading and logging. Each contestant runs in a
new process, --turns times. A step that does not fit into memory is split into as few micro-batches as possible, and the
row says so. A GPU runs batches of 64 sequences, then of 16, where the optimizer's share is larger.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks.ladder import Rung, Step, measure_step, mfu, model_shape, padded, plain_step, random_tokens
from benchmarks.measure import Common, Size, failure, in_own_process, rate_row
from model import GPTWithLoss
from parts.cli import Count, Positive
from parts.data import to_inputs
from parts.optim import make_optimizer
from parts.runtime import Runtime
from train_gpt2 import RECIPES, build_model, resolve_config


@dataclass(frozen=True)
class Config(Common):
    batch_size: Count = 0  # sequences per step; 0 for 16, on a GPU 64 and 16
    size: Size = ""  # size of the model; tiny for a quick test
    turns: Positive = 2  # processes of each contestant, taken in turn, so that drift of the machine affects all alike


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    shape = model_shape(config.size, rt)
    shape["vocab_size"] = padded(shape["vocab_size"])
    if config.batch_size:
        batch_sizes = [config.batch_size]
    else:
        batch_sizes = [64, 16] if rt.device.type == "cuda" else [16]
    for batch_size in batch_sizes:
        print(f"{shape}, batch size {batch_size}", flush=True)
        yield from compare(shape, batch_size, config, rt)


def compare(shape: dict, batch_size: int, config: Config, rt: Runtime) -> Iterator[dict]:
    """A row after each process, with the ratio to the eager recipe once that has run."""
    turns: dict[str, list[dict]] = {}
    makers = contestants(shape, batch_size, rt)
    repeats = -(-config.repeats // config.turns)  # in each turn
    for _ in range(config.turns):
        for name, make in list(makers.items()):
            try:
                found = in_own_process(measure_step, make, batch_size, repeats, rt.device.type)
            except Exception as e:
                del makers[name]
                yield failure(f"{name}, B = {batch_size}", e)
                continue
            turns.setdefault(name, []).append(found)
            yield from rows_of(turns, batch_size, shape, rt)


def rows_of(turns: dict[str, list[dict]], batch_size: int, shape: dict, rt: Runtime) -> Iterator[dict]:
    n_tokens = batch_size * shape["n_positions"]
    seconds = {name: [s for turn in found for s in turn["seconds"]] for name, found in turns.items()}
    rates = {name: [n_tokens / s for s in found] for name, found in seconds.items()}
    eager = [rate for name in rates if "eager" in name for rate in rates[name]]
    for name, found in turns.items():
        row = rate_row(f"{name}, B = {batch_size}", rates[name], eager, "tokens/s")
        row["mfu"] = mfu(row["rate"], found[0]["flops"], rt)
        row["memory"] = max(turn["memory"] for turn in found)
        row["micro_batches"] = max(turn["n_micro"] for turn in found)
        row["seconds"] = seconds[name]
        yield row


def contestants(shape: dict, batch_size: int, rt: Runtime) -> dict[str, Callable]:
    """{name: function(rt) that builds a step}; on a GPU the most important first, since its time may run out."""
    if rt.device.type == "cuda":
        eager = Rung("plain, eager, bf16", tf32=True, bf16=True, attention="flash", fused=True)
        plain = [replace(eager, name="plain with torch.compile, bf16", compile=True), eager]
    else:
        eager = Rung("plain, eager, fp32", attention="flash")
        plain = [eager, replace(eager, name="plain with bf16 autocast", bf16=True)]
    found = {"this project": partial(project_step, shape, batch_size)}
    found |= {rung.name: partial(plain_step, rung, shape, batch_size) for rung in plain}
    return found


def project_step(shape: dict, batch_size: int, rt: Runtime) -> Step:
    """A step as train_gpt2.py makes it."""
    rt = Runtime.setup(rt.device.type, "auto", "auto")
    sizes = dict(shape)
    sizes["sequence_length"] = sizes.pop("n_positions")
    sizes["total_batch_size"] = batch_size * sizes["sequence_length"]
    requested = replace(RECIPES["gpt2"], **sizes, micro_batch_size=batch_size)
    config, model_config = resolve_config(requested, set(), None, rt)
    model = build_model(config, model_config, None).to(rt.device)
    loss_fn = rt.wrap(GPTWithLoss(model, rt.compiled(model.hidden)))
    optimizer = make_optimizer(model, config, rt)
    tokens = random_tokens(shape, batch_size, rt)  # (B, T + 1)

    def step(n_micro: int) -> torch.Tensor:
        total = torch.zeros((), device=rt.device)
        micros = tokens.chunk(n_micro)
        for windows in micros:
            with rt.autocast():
                loss = loss_fn(*to_inputs(windows)) / len(micros)
            optimizer.scale(loss).backward()
            total += loss.detach()
        grad_norm = optimizer.clip_grad_norm(config.grad_clip)
        optimizer.step(finite=grad_norm.isfinite())
        optimizer.zero_grad()
        return total

    return step, model.estimate_flops(config.sequence_length)
