"""Tokens that the recipe speedrun needs to the loss at which AdamW ends, on a model of one or five million parameters.

The recipe gpt2, AdamW with a cosine, first shows its best: learning rates and weight decays with one seed, then the
best of them with all --repeats seeds, whose mean final validation loss is the target. speedrun then trains with
`--target_loss` and a schedule for --fraction of those tokens: the figure is what it has read at the first of CHECKS
validations at or below the target. Then the same with each of its choices undone by itself, so that the table says
what each is worth; where the target is not reached, the last loss says by how much.

Architecture, data, their order and the batch at full size are the same for all, and every line is of complete runs of
train_gpt2.py. --data is a .txt (input.txt); --only cosine leaves out the other lines.
Not shown: that the same holds at 124M.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bpe.tokenizer import cpu_count
from cli import UserError
from run.runtime import Runtime
from train_gpt2 import RECIPES

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "1M": dict(n_layer=4, n_head=2, n_embd=128, sequence_length=64, vocab_size=1024, total_batch_size=1024),
    "5M": dict(n_layer=6, n_head=4, n_embd=256, sequence_length=64, vocab_size=1024, total_batch_size=1024),
}
ADAMW = {  # what the recipe gpt2 is tuned over
    f"gpt2, AdamW at {lr:g}, decay {decay:g}": ("gpt2", dict(max_lr=lr, min_lr=lr / 10, weight_decay=decay))
    for lr, decay in [(5e-4, 0.1), (1e-3, 0.1), (2e-3, 0.1), (3e-3, 0.1), (5e-3, 0.1), (1e-3, 0.4), (2e-3, 0.4)]
}
LINES = {  # what each line changes in speedrun
    "speedrun": {},
    "AdamW instead of Muon": dict(optimizer="adamw"),
    "Muon at 0.01, not 0.02": dict(muon_lr=0.01),
    "Muon at 0.04, not 0.02": dict(muon_lr=0.04),
    "the rest at 1e-3, not 3e-3": dict(max_lr=1e-3),
    "the rest at 6e-3, not 3e-3": dict(max_lr=6e-3),
    "the rest at 1e-2, not 3e-3": dict(max_lr=1e-2),
    "cosine": dict(lr_schedule="cosine"),
    "decay in the last quarter": dict(decay_fraction=0.25),
    "decay in the last three quarters": dict(decay_fraction=0.75),
}
CHECKS = 20  # validations of a run that may reach the target
Job = tuple[str, str, dict, int]  # name, recipe, constants that differ from the recipe's, seed


def run(config, rt: Runtime) -> list[dict]:
    seeds, lines = range(config.repeats), lines_of(config.only)
    with tempfile.TemporaryDirectory() as folder:
        trained = partial(train, config=config, device=rt.device.type, folder=Path(folder))
        grid = [(name, recipe, changes, 0) for name, (recipe, changes) in ADAMW.items()]
        tried = [trained(grid[0]), *side_by_side(trained, grid[1:], rt)]  # the first alone: it makes the tokens for all
        rows = [row(job[0], [log], config) for job, log in zip(grid, tried, strict=True)]
        best = min(range(len(grid)), key=lambda i: final_loss(tried[i]))
        logs = [tried[best], *side_by_side(trained, [(*grid[best][:3], seed) for seed in seeds[1:]], rt)]
        rows[best] = row(grid[best][0], logs, config)
        target = rows[best]["loss"]
        print(f"target: {target:.4f}, the mean of {len(logs)} seeds of {grid[best][0]}", flush=True)
        jobs = [(name, "speedrun", changes, seed) for name, changes in lines.items() for seed in seeds]
        logs = side_by_side(partial(trained, target=target), jobs, rt)
        for i, name in enumerate(lines):
            rows.append(row(name, logs[i * len(seeds) : (i + 1) * len(seeds)], config))
    return show(rows, config)


def lines_of(only: tuple[str, ...]) -> dict[str, dict]:
    """The lines that are asked for, after the first one, which the others compare with. Raises UserError."""
    if unknown := set(only) - set(LINES):
        raise UserError(f"--only {sorted(unknown)[0]!r}: the lines are {', '.join(map(repr, LINES))}")
    return {name: changes for name, changes in LINES.items() if not only or name in ("speedrun", *only)}


def side_by_side(function: Callable, jobs: list[Job], rt: Runtime) -> list:
    """One core each on a CPU, so that as many run as there are; a GPU is for one at a time."""
    with ThreadPoolExecutor(cpu_count() if rt.device.type == "cpu" else 1) as pool:
        return list(pool.map(function, jobs))


def train(job: Job, config, device: str, folder: Path, target: float = 0.0) -> list[dict]:
    """The log of one run with one seed. Raises UserError if it fails."""
    name, recipe, changes, seed = job
    out_dir = folder / f"{name} {seed}".replace("/", " ")
    steps = config.steps if recipe == "gpt2" else round(config.fraction * config.steps)
    constants = settings(recipe, changes, steps, SHAPES[config.parameters])
    if target:
        constants |= dict(target_loss=target, eval_interval=max(constants["max_steps"] // CHECKS, 1))
    constants |= dict(seed=seed, data=config.data or ROOT / "input.txt", out_dir=out_dir, device=device)
    words = [sys.executable, ROOT / "train_gpt2.py", recipe]
    words += [word for key, value in constants.items() for word in (f"--{key}", value)]
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    done = subprocess.run(list(map(str, words)), cwd=ROOT, env=os.environ | threads, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{name}: {done.stderr.strip().splitlines()[-1].removeprefix('error: ')}")
    log = [json.loads(line) for line in (out_dir / "log.jsonl").read_text().splitlines()]
    reached = next((f"{r['tokens']:,} tokens to the target, " for r in log if r["kind"] == "target"), "")
    print(f"  {name}, seed {seed}: {reached}{final_loss(log):.4f}", flush=True)
    return log


def settings(recipe: str, changes: dict, steps: int, shape: dict) -> dict:
    """The constants of a line: those of its recipe, cut down to `steps` steps."""
    warmup = steps * RECIPES[recipe].warmup_steps // RECIPES[recipe].max_steps
    found = shape | dict(tokenizer="train", eval_steps=50, hellaswag_interval=0, sample_interval=0)
    found |= dict(checkpoint_interval=0, warmup_steps=warmup, max_steps=steps, eval_interval=steps)
    return found | changes


def final_loss(log: list[dict]) -> float:
    return [record["loss"] for record in log if record["kind"] == "val"][-1]


def row(name: str, logs: list[list[dict]], config) -> dict:
    """Final losses of all seeds and, as fractions of gpt2's tokens, what each read to the target; None for never."""
    baseline = config.steps * SHAPES[config.parameters]["total_batch_size"]
    targets = [[record["tokens"] for record in log if record["kind"] == "target"] for log in logs]
    losses = [final_loss(log) for log in logs]
    fractions = [tokens[0] / baseline if tokens else None for tokens in targets]
    return dict(name=name, losses=losses, loss=statistics.mean(losses), fractions=fractions)


def show(rows: list[dict], config) -> list[dict]:
    shape = SHAPES[config.parameters]
    print(f"{shape}, {config.steps * shape['total_batch_size']:,} tokens\n{'':<34}tokens to the target; final loss")
    for r in rows:
        reached = [f for f in r["fractions"] if f is not None]
        needed = f"{len(reached)} of {len(r['losses'])} seeds"
        if len(reached) == len(r["losses"]):
            needed = f"{statistics.mean(reached):.1%} (at most {max(reached):.1%})"
        print(f"{r['name']:<34}{needed:<24}{r['loss']:.4f} ({', '.join(f'{loss:.4f}' for loss in r['losses'])})")
    return rows
