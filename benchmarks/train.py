"""This project's training step against the plain recipe, eager and compiled.

The plain recipe is what a short script does: PyTorch's fused attention, all logits at once in fp32, AdamW; on a GPU
with TF32, bf16 autocast and fused AdamW, on a CPU in fp32 and again in bf16. "this project" is the step of
train_gpt2.py with the choices that it makes on this device: precision, torch.compile, attention and its kernel, chunked
loss, padded vocabulary, the optimizer that can skip a step. FP8 is measured where the GPU has it.

The same optimizer step on the same random tokens for all, data loading and logging left out for all. Each contestant
is a process of its own, and all have two turns. What does not fit into the memory makes its step in micro-batches, as
few as possible, and says so. A GPU is measured with 16 sequences, where the optimizer's step weighs much, and with 64.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from benchmarks.ladder import Rung, measure_step, mfu, model_shape, plain_step, random_tokens
from benchmarks.measure import in_own_process, table
from corpus.order import to_inputs
from learning.optim import make_optimizer
from model import GPT, Loss
from run.runtime import Runtime
from train_gpt2 import RECIPES, prepare
from train_gpt2 import model_shape as shape_of

TURNS = 2  # processes of each contestant, not in a row, so that a drifting machine hits all alike


def run(config, rt: Runtime) -> list[dict]:
    shape, cuda = model_shape(config.size, rt), rt.device.type == "cuda"
    batch_sizes = [config.batch_size] if config.batch_size else [16, 64] if cuda else [16]
    return [row for batch_size in batch_sizes for row in compare(shape, batch_size, config.repeats, rt)]


def quick(config, rt: Runtime) -> list[dict]:
    """Both batch sizes, the one that matters first, in a single turn each: half the processes of `run`."""
    shape = model_shape(config.size, rt)
    batch_sizes = [config.batch_size] if config.batch_size else [4] if config.size == "tiny" else [64, 16]
    return [row for batch_size in batch_sizes for row in compare(shape, batch_size, config.repeats, rt, n_turns=1)]


def compare(shape: dict, batch_size: int, repeats: int, rt: Runtime, n_turns: int = TURNS) -> list[dict]:
    """Print and return the table of all contestants at one batch size."""
    found = {name: [] for name in contestants(shape, batch_size, rt)}
    for _ in range(n_turns):
        for name, make in contestants(shape, batch_size, rt).items():
            found[name].append(in_own_process(measure_step, make, batch_size, -(-repeats // n_turns), rt.device.type))
    print(f"{shape}, batch size {batch_size}")
    seconds = {name: [s for turn in turns for s in turn["seconds"]] for name, turns in found.items()}
    rows = table(seconds, batch_size * shape["n_positions"], "tokens/s")
    for row, (name, turns) in zip(rows, found.items(), strict=True):
        used, n_micro = mfu(row["rate"], turns[0]["flops"], rt), max(turn["n_micro"] for turn in turns)
        memory = max(turn["memory"] for turn in turns)
        row |= dict(batch_size=batch_size, mfu=used, memory=memory, n_micro=n_micro, seconds=seconds[name])
        parts = f", in {n_micro} micro-batches" if n_micro > 1 else ""
        print(f"{name}: MFU {f'{used:.1%}' if used else 'n/a'}, {memory / 2**30:.2f} GiB{parts}")
    return rows


def contestants(shape: dict, batch_size: int, rt: Runtime) -> dict[str, Callable]:
    """{name: function(rt) that builds a step}, the plain recipe first."""
    if rt.device.type == "cuda":
        eager = Rung("plain, eager, bf16", tf32=True, bf16=True, attention="flash", fused=True)
        plain = [eager, replace(eager, name="plain with torch.compile, bf16", compile=True)]
    else:
        eager = Rung("plain, eager, fp32", attention="flash")
        plain = [eager, replace(eager, name="plain with bf16 autocast", bf16=True)]
    found = {rung.name: partial(plain_step, rung, shape, batch_size) for rung in plain}
    found["this project"] = partial(project_step, False, shape, batch_size)
    if rt.device.type == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        found["this project, FP8"] = partial(project_step, True, shape, batch_size)
    return found


def project_step(fp8: bool, shape: dict, batch_size: int, rt: Runtime) -> tuple[Callable[[int], torch.Tensor], float]:
    """(function that makes one optimizer step in so many micro-batches and returns its loss, FLOPs per token), as
    train_gpt2.py does it."""
    rt = Runtime.setup(rt.device.type, "auto", "auto")
    vocab_size = -(-shape["vocab_size"] // 128) * 128
    sizes = dict(vocab_size=vocab_size, n_layer=shape["n_layer"], n_head=shape["n_head"], n_embd=shape["n_embd"])
    sizes |= dict(sequence_length=shape["n_positions"])
    config = replace(RECIPES["gpt2"], **sizes, micro_batch_size=batch_size, fp8=fp8)
    model = GPT(shape_of(config, "gpt2", None, rt)).to(rt.device)
    prepare(model, config, rt)
    forward = rt.wrap(Loss(model))
    optimizer = make_optimizer(model, config, rt)
    tokens = random_tokens(shape, batch_size, rt)  # (B, T + 1)

    def step(n_micro: int) -> torch.Tensor:
        total = torch.zeros((), device=rt.device)
        batch = [to_inputs(windows) for windows in tokens.chunk(n_micro)]
        n_targets = sum((targets >= 0).sum() for _, targets in batch)
        for idx, targets in batch:
            with rt.autocast():
                loss = forward(idx, targets, n_targets=n_targets)
            optimizer.scale(loss).backward()
            total += loss.detach()
        grad_norm = optimizer.clip_grad_norm(config.grad_clip)
        optimizer.step(finite=grad_norm.isfinite())
        return total

    return step, model.estimate_flops(config.sequence_length)
