"""How many tokens, hours and dollars speedrun needs at 124M, from its share of gpt2's tokens at small sizes.

    python bench.py forecast                                  # from docs/share.jsonl, which bench.py share has trained
    python bench.py forecast --write --png forecast.png       # add it to docs/forecasts.json, and draw it

The share is that of `bench.py share`, at 80 tokens a parameter. Over size, ln(share) is a line in ln(parameters). The
hidden size tests that line: its share is forecast, with an interval, before it is trained. The line's end at 124M is
anchored on a published run. Intervals are 90%, Student's t over the seeds; they cover the noise of seeds, not a line
that bends on the way from half a million parameters to 124M. docs/forecast.md has figures, limits, and what was said.
"""

import datetime
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.measure import Device
from benchmarks.share import HIDDEN, RUNGS, Runs, parameters
from cli import NonNegative, UserError
from files import read_json, replace_file
from run.log import about_machine

Points = dict[int, np.ndarray]  # ln(share) of every seed, by parameters
# llm.c, October 2024 (docs/record.md): GPT-2 124M on FineWeb, AdamW, one seed, 140 ms a step on 8 H100
ANCHOR = dict(parameters=124_475_904, tokens=10.26e9, loss=3.2722, seconds_per_token=8 * 0.140 / 524_288)
TARGET = 3.28
# B and beta of B / D^beta: Hoffmann et al. 2022, approach 3; Besiroglu et al. 2024, who fitted the same runs again
PUBLISHED = ((410.7, 0.28), (2085.43, 0.3658))


@dataclass(frozen=True)
class Config:
    ledger: str = "docs/share.jsonl"  # the runs of bench.py share
    forecasts: str = "docs/forecasts.json"  # file with all forecasts, the newest one last
    write: bool = False  # add this one
    png: str = ""  # draw the share over size in this file
    price: NonNegative = 2.5  # dollars per hour of one H100
    device: Device = "auto"  # of nothing; every benchmark has it
    json: str = ""  # write the figures to this file


def run(config: Config, rt) -> Iterator[dict]:
    path = Path(config.forecasts)
    forecasts = read_json(path) if path.exists() else []
    said = forecasts[-1].get("hidden") if forecasts else None  # of the hidden size, before it was trained
    points = points_of(Runs(Path(config.ledger)))
    if len(points) < 2:
        raise UserError(f"{config.ledger} has two seeds of fewer than two sizes; train them with bench.py share")
    for n, shares in points.items():
        yield dict(name=f"share at {n:,} parameters", **interval_of(shares, points), seeds=np.exp(shares).tolist())
    hidden = parameters(HIDDEN.width)
    if said and hidden in points:
        measured = math.exp(points[hidden].mean())
        inside = "yes" if said["from"] <= measured <= said["to"] else "no"
        yield dict(name="hidden size, as forecast", **said, inside=inside)
    else:  # not trained yet: this is its forecast
        said = line_at(hidden, points, HIDDEN.seeds)
        yield dict(name=f"hidden size, {hidden:,} parameters", **said)
    if config.png:
        draw(points, said, Path(config.png))
    answer = at_124m(points, config.price)
    for what, found in answer.items():
        yield dict(name=f"124M to {TARGET} with speedrun, {what}", **found)
    if config.write:
        made = dict(
            date=str(datetime.date.today()),
            commit=about_machine(rt)["commit"],
            anchor=ANCHOR,
            target=TARGET,
            shares={n: interval_of(shares, points) for n, shares in points.items()},
            hidden=said,
            **answer,
        )
        replace_file(path, json.dumps([*forecasts, made], indent=1) + "\n")


def points_of(runs: Runs) -> Points:
    """The sizes with two seeds or more, all trained with the same batch."""
    points = {}
    for rung in [*RUNGS, HIDDEN]:
        shares = runs.log_shares(rung)
        if rung.batch == HIDDEN.batch and len(shares) > 1:
            points[parameters(rung.width)] = shares
    return points


# -------------------------------------------------------------------------------------------------------- statistics


def interval_of(shares: np.ndarray, points: Points) -> dict:
    """The share at one size. How far seeds are apart is taken from all sizes."""
    squares = sum(((other - other.mean()) ** 2).sum() for other in points.values())
    df = sum(len(other) - 1 for other in points.values())
    variance = squares / df
    return interval(shares.mean(), math.sqrt(variance / len(shares)), df)


def line_at(n: float, points: Points, seeds: float = math.inf) -> dict:
    """The share at n parameters, as the mean of so many seeds, on the line through all points."""
    y = np.concatenate(list(points.values()))
    x = np.log(np.repeat(list(points), list(map(len, points.values()))))  # of the size of each
    slope, offset = np.polyfit(x, y, deg=1)
    df = len(x) - 2
    variance = ((y - slope * x - offset) ** 2).sum() / df
    away = math.log(n) - x.mean()
    spread = ((x - x.mean()) ** 2).sum()
    of_line = 1 / len(x) + away**2 / spread  # variances of the line there and, below, of a mean of new seeds
    error = math.sqrt(variance * (of_line + 1 / seeds))
    return interval(slope * math.log(n) + offset, error, df)


def interval(mean: float, error: float, df: int) -> dict:
    """exp(mean), and where it lies with 90%."""
    reach = error * student_t(df)
    ends = {"from": mean - reach, "middle": mean, "to": mean + reach}
    return {name: math.exp(end) for name, end in ends.items()}


@cache
def student_t(df: int) -> float:
    """What Student's t stays below with 95%, to half a percent."""
    return float(np.quantile(np.random.default_rng(0).standard_t(df, 400_000), 0.95))


def at_124m(points: Points, price: float) -> dict:
    """Share, tokens, hours on one H100, and dollars to TARGET."""
    tokens = statistics.mean(map(tokens_of_gpt2, PUBLISHED))
    hours = tokens * ANCHOR["seconds_per_token"] / 3600
    of_gpt2 = dict(share=1.0, tokens=tokens, hours=hours, dollars=hours * price)
    share = line_at(ANCHOR["parameters"], points)
    answer = {}
    for what, amount in of_gpt2.items():
        answer[what] = {end: amount * value for end, value in share.items()}
    return answer


def tokens_of_gpt2(law: tuple[float, float]) -> float:
    """What gpt2 needs to TARGET, from what it needed to the anchor's loss: loss = constant + B / D^beta."""
    b, beta = law
    anchor = b / ANCHOR["tokens"] ** beta
    left = TARGET - ANCHOR["loss"] + anchor
    return (b / left) ** (1 / beta)


def draw(points: Points, said: dict, path: Path) -> None:
    """The share over size, and the hidden size as it was forecast."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="parameters", ylabel="tokens that speedrun needs (% of gpt2's)")
    bars = {f"{n:,} parameters": (n, interval_of(shares, points)) for n, shares in points.items()}
    # a little to the right, so that it does not cover what was measured later
    bars["the hidden size, as forecast"] = (1.05 * parameters(HIDDEN.width), said)
    for label, (n, found) in bars.items():
        low = 100 * found["from"]
        middle = 100 * found["middle"]
        high = 100 * found["to"]
        label += f": {middle:.0f}% ({low:.0f} to {high:.0f}%)"
        axes.errorbar(n, middle, [[middle - low], [high - middle]], fmt="o", capsize=5, label=label)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)
