"""Tokens that the recipe speedrun needs to the loss at which AdamW ends, on a model of one or five million parameters.

The recipe gpt2, AdamW with a cosine, first shows its best: learning rates and weight decays with one seed, then the
best of them with all --repeats seeds, whose mean final validation loss is the target. speedrun then trains with a
schedule for --fraction of those tokens: the figure is what it has read at the first of CHECKS validations at or below
the target. Then the same with each of its choices undone by itself, so that the table says what each is worth; a line
that misses the target says by how much with its final loss.

Architecture, data, their order and the batch are the same for all. --only "cosine" leaves out the other lines.
Not shown: that the same holds at 124M.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from benchmarks import seeds
from benchmarks.seeds import SHAPES, Change, chosen, settings, shards_of, side_by_side, train
from cli import Range
from run.runtime import Runtime

ADAMW = {  # what the recipe gpt2 is tuned over
    f"gpt2, AdamW at {lr:g}, decay {decay:g}": dict(max_lr=lr, min_lr=lr / 10, weight_decay=decay)
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
Curve = list[tuple[int, float]]  # (tokens read, validation loss)


@dataclass(frozen=True)
class Config(seeds.Config):
    parameters: Literal["1M", "5M"] = "1M"  # the size of the model
    fraction: Annotated[float, Range(0.01, 1)] = 0.4  # tokens of speedrun's schedule, as a fraction of the baseline's


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    lines, repeats = chosen(LINES, config.only), range(config.repeats)
    shards = shards_of(config, SHAPES[config.parameters]["vocab_size"])
    one = partial(train_one, config=config, shards=shards, device=rt.device.type)
    tuned = {}
    for name, curve in zip(ADAMW, side_by_side(one, [(name, 0, 0.0) for name in ADAMW], rt), strict=True):
        tuned[name] = [curve]
        yield row(name, tuned[name], config)
    best = min(ADAMW, key=lambda name: tuned[name][0][-1][1])
    if config.repeats > 1:
        tuned[best] += side_by_side(one, [(best, seed, 0.0) for seed in repeats[1:]], rt)
    baseline = row(best, tuned[best], config)
    yield baseline
    print(f"target: {baseline['loss']:.4f}, the mean of {config.repeats} seeds of {best}", flush=True)
    curves = side_by_side(one, [(name, seed, baseline["loss"]) for name in lines for seed in repeats], rt)
    for name in lines:
        yield row(name, [next(curves) for _ in repeats], config, baseline["loss"])


def train_one(name: str, seed: int, target: float, config: Config, shards: str, device: str) -> Curve:
    """The losses of one run; it ends at the target, or after its only validation if there is none."""
    recipe, changes = ("gpt2", ADAMW[name]) if name in ADAMW else ("speedrun", LINES[name])
    steps = config.steps if recipe == "gpt2" else round(config.fraction * config.steps)
    training = settings(recipe, steps, SHAPES[config.parameters], seed, eval_steps=50, **changes)
    curve = []
    for tokens, loss in train(Change(), training, shards, Runtime.setup(device), CHECKS if target else 1):
        curve.append((tokens, loss))
        if loss <= target:
            break
    print(f"  {name}, seed {seed}: {curve[-1][1]:.4f} after {curve[-1][0]:,} tokens", flush=True)
    return curve


def row(name: str, curves: list[Curve], config: Config, target: float = 0.0) -> dict:
    """Final losses of all seeds and, as fractions of the baseline's tokens, what each read to the target."""
    baseline = config.steps * SHAPES[config.parameters]["total_batch_size"]
    losses = [curve[-1][1] for curve in curves]
    fractions = [curve[-1][0] / baseline if curve[-1][1] <= target else None for curve in curves]
    return dict(name=name, loss=statistics.mean(losses), losses=losses, fractions=fractions if target else None)
