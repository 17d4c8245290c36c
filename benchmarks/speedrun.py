"""Tokens that the recipe speedrun needs, against those of the recipe gpt2, on a model of a million parameters.

gpt2's optimizer, AdamW with a cosine, has four learning rates to show its best; speedrun has one setting, and then each
of its choices is undone by itself, so that the table says what each is worth. Architecture, data, their order and the
batch at full size are the same for all; speedrun and its variants get --fraction of the tokens. Every line is the
validation loss of complete runs of train_gpt2.py, once for each of --repeats seeds. --data is a .txt (input.txt).
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
from dataclasses import replace
from functools import partial
from pathlib import Path

from cli import UserError
from runtime import Runtime
from train_gpt2 import RECIPES, batch_plan

ROOT = Path(__file__).resolve().parent.parent
SHAPE = dict(n_layer=4, n_head=2, n_embd=128, sequence_length=64, vocab_size=1024, total_batch_size=2048)
LINES = {  # what each line changes in which recipe
    "gpt2, AdamW at 1e-3": ("gpt2", dict(max_lr=1e-3, min_lr=1e-4)),
    "gpt2, AdamW at 2e-3": ("gpt2", dict(max_lr=2e-3, min_lr=2e-4)),
    "gpt2, AdamW at 3e-3": ("gpt2", dict(max_lr=3e-3, min_lr=3e-4)),
    "gpt2, AdamW at 5e-3": ("gpt2", dict(max_lr=5e-3, min_lr=5e-4)),
    "speedrun": ("speedrun", {}),
    "AdamW instead of Muon": ("speedrun", dict(optimizer="adamw")),
    "Muon at 0.01, not 0.02": ("speedrun", dict(muon_lr=0.01)),
    "Muon at 0.04, not 0.02": ("speedrun", dict(muon_lr=0.04)),
    "the rest at 1e-3, not 3e-3": ("speedrun", dict(max_lr=1e-3)),
    "cosine": ("speedrun", dict(lr_schedule="cosine")),
    "decay in the last quarter": ("speedrun", dict(decay_fraction=0.25)),
    "decay in the last three quarters": ("speedrun", dict(decay_fraction=0.75)),
    "no batch ramp": ("speedrun", dict(batch_ramp=0)),
}


def run(config, rt: Runtime) -> list[dict]:
    runs = [(name, seed) for seed in range(config.repeats) for name in LINES]
    losses = {name: [] for name in LINES}
    with tempfile.TemporaryDirectory() as folder:
        loss_of = partial(final_loss, config=config, device=rt.device.type, folder=Path(folder))
        first = loss_of(runs[0])  # alone, because it trains the tokenizer for all
        # one core each on a CPU, so that as many run as there are; a GPU is for one at a time
        with ThreadPoolExecutor(os.cpu_count() if rt.device.type == "cpu" else 1) as pool:
            found = [first, *pool.map(loss_of, runs[1:])]
    for (name, _), loss in zip(runs, found, strict=True):
        losses[name].append(loss)
    return show(losses, config)


def final_loss(run: tuple[str, int], config, device: str, folder: Path) -> float:
    """The last validation loss of one line with one seed. Raises UserError if the run fails."""
    name, seed = run
    recipe, changes = LINES[name]
    out_dir = folder / f"{list(LINES).index(name)}-{seed}"
    constants = settings(recipe, changes, config.steps if recipe == "gpt2" else round(config.fraction * config.steps))
    constants |= dict(seed=seed, data=config.data or ROOT / "input.txt", out_dir=out_dir, device=device)
    words = [sys.executable, ROOT / "train_gpt2.py", recipe]
    words += [word for key, value in constants.items() for word in (f"--{key}", value)]
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    done = subprocess.run(list(map(str, words)), cwd=ROOT, env=os.environ | threads, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{name}: {done.stderr.strip().splitlines()[-1].removeprefix('error: ')}")
    records = map(json.loads, (out_dir / "log.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "val"][-1]


def settings(recipe: str, changes: dict, steps: int) -> dict:
    """The constants of a line: those of its recipe, cut down to the tokens of `steps` full batches."""
    tokens, T = steps * SHAPE["total_batch_size"], SHAPE["sequence_length"]
    warmup = steps * RECIPES[recipe].warmup_steps // RECIPES[recipe].max_steps
    found = SHAPE | dict(tokenizer="train", eval_steps=50, hellaswag_interval=0, sample_interval=0)
    found |= dict(checkpoint_interval=0, warmup_steps=warmup, batch_ramp=0)
    if RECIPES[recipe].batch_ramp:  # the same tokens in more steps, from a quarter of the batch on
        found |= dict(batch_ramp=tokens // 5, batch_ramp_from=SHAPE["total_batch_size"] // 4)
    found |= changes
    sizes = {key: value for key, value in found.items() if "batch" in key or "length" in key}
    steps = first_step_after(tokens // T, batch_plan(replace(RECIPES[recipe], **sizes)))
    return found | dict(max_steps=steps, eval_interval=steps)


def first_step_after(sequences: int, plan: Callable[[int], tuple[int, int]]) -> int:
    """The number of steps that read so many sequences; plan(step) is (sequences read before it, its batch)."""
    step = 0
    while plan(step)[0] < sequences:
        step += 1
    return step


def show(losses: dict[str, list[float]], config) -> list[dict]:
    """Print every line with its distance to the best that the recipe gpt2 has; returns the rows."""
    best = min(statistics.mean(losses[name]) for name, (recipe, _) in LINES.items() if recipe == "gpt2")
    print(f"{SHAPE}, {config.steps} steps\n{'':<34}{'tokens':>9}  validation loss, nats per token: mean (all seeds)")
    rows = []
    for name, values in losses.items():
        tokens = config.steps * SHAPE["total_batch_size"] * (1 if LINES[name][0] == "gpt2" else config.fraction)
        mean = statistics.mean(values)
        rows.append(dict(name=name, tokens=tokens, losses=values, mean=mean, over_best=mean - best))
        print(f"{name:<34}{tokens:>9,.0f}  {mean:.4f} {mean - best:+.4f} ({', '.join(f'{v:.4f}' for v in values)})")
    return rows
