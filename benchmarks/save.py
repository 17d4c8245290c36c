"""What a checkpoint costs the training loop: written in the background, against the loop waiting for it.

GPT-2 124M, or --size, with AdamW's moments, is written to a directory below the current one, on its disk. It times in
turn: a step, and a checkpoint that the loop waits for, as a plain script does; a step, and `run.save()` alone, which
copies all that the checkpoint needs; a step while that copy is being written. Steps have 512 tokens, so that on a CPU
one sees how much writing competes with them for the cores.

    torchrun --standalone --nproc_per_node=2 bench.py save --shard full

shows what it costs to gather sharded weights on the first rank, which is a part of `run.save()`.
"""

import contextlib
import io
import itertools
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from benchmarks.measure import Common, Size, model_sizes, timed
from bpe.tokenizer import Tokenizer
from learning.optim import make_optimizer
from machine.runtime import Runtime
from machine.sharding import shard
from model import GPT, GPTConfig, GPTWithLoss
from run.checkpoint import ModelFiles
from run.directory import RunDirectory
from run.run import Run
from train_gpt2 import RECIPES


@dataclass(frozen=True)
class Config(Common):
    size: Size = ""  # size of the model; tiny for a quick test
    shard: Literal["none", "optimizer", "full"] = "none"  # with torchrun: what to shard, see machine/sharding.py


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    nowhere = io.StringIO()  # for what a run prints
    out_dir = rt.broadcast_from_main(lambda: tempfile.mkdtemp(prefix=".bench_", dir="."))
    constants = replace(RECIPES["gpt2"], out_dir=out_dir, max_steps=3 * config.repeats, keep_checkpoints=1)
    torch.manual_seed(0)  # every rank passes the same weights
    model = GPT(GPTConfig(**model_sizes(config.size), vocab_size=50304)).to(rt.device)
    try:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            sharded = Runtime.setup(rt.device.type, shard=config.shard)
            for name, seconds in save_in_turn(constants, model, sharded):
                yield dict(name=name, median=f"{statistics.median(seconds):.4f} s", seconds=seconds)
    finally:
        if rt.is_main:
            shutil.rmtree(out_dir)


def save_in_turn(constants, model: GPT, rt: Runtime) -> Iterator[tuple[str, list[float]]]:
    """(what was timed, all its seconds so far), after every timing. `rt` has the precision of a run."""
    loss_fn = GPTWithLoss(model)
    if rt.mesh:
        shard(loss_fn, model.transformer.h, rt)
    else:
        loss_fn = rt.wrap(loss_fn)
    optimizer = make_optimizer(model, constants, rt)
    step = training_step(loss_fn, optimizer, rt)
    step()  # makes the moments
    files = ModelFiles(model, Tokenizer.train(["a"], 257), rt.is_main)
    facts = dict(parameters=model.num_params(), flops_per_token=model.estimate_flops(model.config.n_positions))
    training = Run(RunDirectory(constants, rt), constants, files, optimizer, {}, facts)
    found = defaultdict(list)

    def add(name: str, work: Callable[[], object]) -> tuple[str, list[float]]:
        found[name].append(timed(work, rt))
        return name, found[name]

    def save_and_wait() -> None:
        training.save()
        training.catch_up()  # waits for the checkpoint to be on the disk

    one = torch.ones((), device=rt.device)
    with training:
        for number, _ in training.steps(itertools.repeat([])):
            yield add("a step during a write" if number % 3 == 0 else "a step", step)
            training.log_step(one, one, 0.0, torch.tensor(512))
            if number % 3 == 1:
                yield add("a checkpoint, waited for", save_and_wait)
            elif number % 3 == 2:
                yield add("run.save() alone", training.save)
            else:
                training.catch_up()


def training_step(loss_fn: torch.nn.Module, optimizer, rt: Runtime) -> Callable[[], None]:
    idx = torch.randint(50257, (1, 512), device=rt.device)  # (B, T)

    def step() -> None:
        with rt.autocast():
            loss = loss_fn(idx, idx)
        optimizer.scale(loss).backward()
        grad_norm = optimizer.clip_grad_norm(1.0)
        optimizer.step(finite=grad_norm.isfinite())
        optimizer.zero_grad()

    return step
