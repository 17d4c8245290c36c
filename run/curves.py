"""Curves of one training run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

    draw({"gpt2": read_log(Path("out/gpt2/log.jsonl"))}, Path("learning_curve.png"))

This file knows nothing of torch or models: it sees only the records of a log.
"""

import io
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cli import UserError, replace_file

Records = list[dict]
Curves = dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]  # {(kind, key): (steps, values)}

POINTS = 800  # about the width of a panel in pixels: more points would not show
# Okabe and Ito (2008): distinguishable by the colour-blind. Dashes and marks keep runs apart in greyscale.
COLORS = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
LARGEST = 1e30  # matplotlib fails on larger axes
DRAWN = {"run": ("parameters", "flops_per_token"), "train": ("loss", "grad_norm", "lr", "tokens", "dt_ms", "skipped"),
         "val": ("loss",), "hellaswag": ("acc_norm", "acc", "n")}  # fmt: skip
CHANCE = 0.25  # HellaSwag has four endings
# Name, parameters, accuracy with lengths normalised. GPT-2: the released weights as `hellaswag.py --style completion`
# scores them. GPT-3: Brown et al. 2020, table H.1, zero-shot.
PUBLISHED = (
    ("GPT-2 124M", 124e6, 0.2955), ("GPT-2 XL", 1558e6, 0.4893), ("GPT-3 Small", 125e6, 0.337),
    ("GPT-3 Medium", 350e6, 0.436), ("GPT-3 Large", 760e6, 0.510), ("GPT-3 XL", 1300e6, 0.547),
)  # fmt: skip
SAME_SIZE = 1.25  # published models are shown next to runs whose size is within this factor
# The largest unit of which the longest run lasts two names the axis.
UNITS = {
    "steps": [(1, "step")],
    "tokens": [(1e9, "billions of tokens"), (1e6, "millions of tokens"), (1, "tokens")],
    "seconds": [(3600, "hours of training"), (60, "minutes of training"), (1, "seconds of training")],
    "flops": [(1e18, "exaFLOPs of training"), (1e15, "petaFLOPs of training"), (1, "FLOPs of training")],
}  # fmt: skip


def read_log(path: Path) -> Records:
    """The records of a log.jsonl in file order, each a dict with a `kind` and an integer `step`.

    Skips damaged lines, with one warning on stderr that names them. Raises UserError if there is no such file.
    """
    if not Path(path).is_file():
        raise UserError(f"{path} does not exist; give the directory of a run, or its log.jsonl")
    records, damaged = [], []
    lines = enumerate(Path(path).read_bytes().split(b"\n"), 1)  # not splitlines, which also splits at U+2028
    for number, line in lines:
        try:
            records += [checked(json.loads(line.decode("utf-8-sig")))] if line.strip() else []
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged.append(number)
    if damaged:
        which = ", ".join(map(str, damaged))
        print(f"warning: {path}: skipped damaged lines: line {which}", file=sys.stderr, flush=True)
    return records


def checked(record: dict) -> dict:
    """`record`, if it has a step, a kind, and what that kind needs. Raises ValueError, KeyError or TypeError."""
    kind, step = record["kind"], record["step"]
    needed = record[dict(train="loss", val="loss", sample="text").get(kind, "step")]
    numbers = [record.get(name) for name in ("loss", "dt_ms", "tokens_per_sec")]  # null if they were not finite
    right = type(step) is int and abs(step) < 1e15 and isinstance(needed, str) == (kind == "sample")
    if not (right and isinstance(kind, str) and all(type(n) in (int, float, type(None)) for n in numbers)):
        raise ValueError(record)
    return record


def curves_of(records: Records) -> Curves:
    """Everything that is drawn, ordered by step, without null (a skipped step has no loss), nan and infinity."""
    found = {(kind, key): ([], []) for kind, keys in DRAWN.items() for key in keys}
    for record in sorted(records, key=lambda record: record["step"]):
        for key in DRAWN.get(record["kind"], ()):
            if isinstance(value := record.get(key), int | float) and abs(value) < LARGEST:
                found[record["kind"], key][0].append(record["step"])
                found[record["kind"], key][1].append(value)
    return {what: (np.array(steps, float), np.array(values, float)) for what, (steps, values) in found.items()}


def has_loss(run: Curves) -> bool:
    return len(run["train", "loss"][0]) + len(run["val", "loss"][0]) > 0


def position(run: Curves, x: str, label: str) -> Callable:
    """A function from steps to positions on the x axis. Raises UserError if the log lacks what `x` needs."""
    if x == "steps":
        return lambda steps: steps
    key = "dt_ms" if x == "seconds" else "tokens"
    steps, reached = run["train", key]
    scale = run["run", "flops_per_token"][1][-1:] if x == "flops" else np.ones(1)
    if not len(steps) or not len(scale):
        lacking = f'"{key}" in its train records' if not len(steps) else '"flops_per_token" in its record "run"'
        raise UserError(f"--x {x}: the log of {label} has no {lacking}, like logs of earlier versions; use --x steps")
    # Summing the times of steps leaves out the pauses of a run that was stopped and resumed.
    reached = np.cumsum(reached) / 1e3 if x == "seconds" else reached * scale
    return lambda wanted: np.interp(wanted, np.append(0, steps), np.append(0, reached))


def smoothed(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most POINTS points of a running median over 2% of the points on either side.

    Unlike an average it neither lags nor follows a spike.
    """
    groups = [group for group in np.array_split(np.arange(len(y)), POINTS) if len(group)]
    y = [float(np.median(y[group])) for group in groups]
    reaches = (min(len(y) // 50 + 1, i) for i in range(len(y)))  # shorter at first: a median would hide the first drop
    smooth = [statistics.median(y[i - r : i + r + 1]) for i, r in enumerate(reaches)]
    return np.array([x[group[0]] for group in groups]), np.array(smooth)


# ------------------------------------------------------------------------------------------------------- the picture


def draw(runs: dict[str, Records], path: Path, x: str = "steps") -> None:
    """Draw {label: records} and replace `path` in one step; do nothing before the first loss.

    Any thread may call this: it uses Figure itself, since pyplot's figures are global. Raises UserError for logs that
    lack what `x` needs.
    """
    from matplotlib.figure import Figure  # takes half a second, which --help and the start of a run do without

    runs = {plain(label): curves_of(records) for label, records in runs.items()}
    if not any(map(has_loss, runs.values())):
        return
    x_of = {label: position(run, x, label) for label, run in runs.items()}
    end = max(float(x_of[label](steps.max())) for label, run in runs.items() for steps, _ in run.values() if len(steps))
    unit, x_label = next((unit for unit in UNITS[x] if end >= 2 * unit[0]), UNITS[x][-1])
    at = {label: lambda steps, f=f: f(steps) / unit for label, f in x_of.items()}

    scored = any(len(run["hellaswag", "acc_norm"][0]) for run in runs.values())
    rows = {"loss": 3.5} | ({"score": 2.1} if scored else {}) | {"norm": 1.6}  # heights in inches
    figure = Figure(figsize=(9, sum(rows.values()) + 0.7 * len(rows)), dpi=100, layout="constrained")
    mosaic = [["norm", "rate"] if name == "norm" else [name, name] for name in rows]
    panels = figure.subplot_mosaic(mosaic, height_ratios=list(rows.values()))
    draw_loss(panels["loss"], runs, at)
    if scored:
        draw_hellaswag(panels["score"], runs, at)
    draw_norm_and_rate(panels["norm"], panels["rate"], runs, at)
    for axes in panels.values():
        axes.set_xlim(-0.01 * end / unit, 1.01 * max(end / unit, 1e-9))
        axes.xaxis.set(major_formatter="{x:,.10g}")
        axes.set_xlabel(x_label, fontsize=9)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8.5)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:] or "png")
    replace_file(path, picture.getvalue())


def look(i: int, n: int = 0) -> dict:
    """Colour and dash of run number `i`; for `n` points also a mark, at 25 of them at most."""
    mark = dict(marker=MARKS[i % len(MARKS)], markersize=4.5, markevery=max(n // 25, 1)) if n else {}
    return mark | dict(color=COLORS[i % len(COLORS)], linestyle=DASHES[i % len(DASHES)])


def draw_loss(axes, runs: dict[str, Curves], at: dict[str, Callable]) -> None:
    """Training loss, smoothed, with all single steps if there is only one run; validation loss with marks."""
    alone, tails, last = len(runs) == 1, [], {}
    for i, (label, run) in enumerate(runs.items()):
        x, losses = at[label](run["train", "loss"][0]), run["train", "loss"][1]
        if alone:
            axes.plot(x, losses, color=COLORS[0], alpha=0.25, linewidth=0.8, label="training, each step")
        name = "training, smoothed" if alone else None
        axes.plot(*smoothed(x, losses), color=COLORS[i % len(COLORS)], linewidth=1.5 if alone else 0.8, label=name)
        val_x, val = at[label](run["val", "loss"][0]), run["val", "loss"][1]
        last |= {label: val[-1]} if len(val) else {}
        name = ("validation" if alone else label) + (f": {last[label]:.3f} at the end" if label in last else "")
        style = look(i, len(val)) | (dict(color=COLORS[2]) if alone else {})  # unlike its own training loss
        axes.plot(val_x, val, linewidth=1.6, label=name, **style)
        # All runs first fall from the same height. They differ in what comes after 5% of their length.
        for xs, ys in (smoothed(x, losses), (val_x, val)):
            tails += ys[xs >= 0.95 * xs[0] + 0.05 * xs[-1]].tolist() if len(xs) else []
    margin = 0.05 * (max(tails) - min(tails)) or 0.1
    axes.set_ylim(min(tails) - margin, max(tails) + margin)
    best = min(last, key=last.get, default=None)
    reached = f"{last[best]:.3f}" + ("" if alone else f", reached by {best}") if last else "not measured yet"
    finish(axes, f"Validation loss: {reached}", "loss (nats per token)")
    legend(axes, loc="upper right", title=None if alone else "thin: training; marked: validation")


def draw_hellaswag(axes, runs: dict[str, Curves], at: dict[str, Callable]) -> None:
    """Accuracy in percent with its standard error; for comparison chance, and published models of the runs' sizes."""
    for i, (label, run) in enumerate(runs.items()):
        steps, accuracy = run["hellaswag", "acc_norm"]
        n = np.interp(steps, *run["hellaswag", "n"]) if len(run["hellaswag", "n"][0]) else np.inf  # answers
        error = np.sqrt(np.clip(accuracy * (1 - accuracy), 0, None) / np.maximum(n, 1))  # each is right (1) or not (0)
        name = label + (f": {accuracy[-1]:.1%} ± {error[-1]:.1%} at the end" if len(steps) else "")
        style = dict(look(i, len(steps)), elinewidth=0.8, label=name)
        axes.errorbar(at[label](steps), 100 * accuracy, 100 * error, **style)
    sizes = [size for run in runs.values() for size in run["run", "parameters"][1][-1:]]
    for name, accuracy in [*published(sizes), ("chance", CHANCE)]:
        axes.axhline(100 * accuracy, color="gray", linestyle="--", linewidth=0.8)
        # Curves start near chance on the left and end above it on the right: names go where curves do not.
        side = dict(x=0.995, ha="right", va="top") if name == "chance" else dict(x=0.005, ha="left", va="bottom")
        text = f"{name} {100 * accuracy:.4g}%"
        axes.text(y=100 * accuracy, s=text, fontsize=8, transform=axes.get_yaxis_transform(), **side)
    axes.margins(y=0.12)
    title = "HellaSwag: how often the right ending of four is the likeliest, lengths normalised, ± standard error"
    finish(axes, title, "accuracy (%)")
    legend(axes, loc="upper left", bbox_to_anchor=(0.16, 1))


def published(sizes: list[float]) -> list[tuple[str, float]]:
    """(name, accuracy) of the published models that are about as large as one of `sizes`, in parameters."""
    return [(name, acc) for name, n, acc in PUBLISHED if any(n / SAME_SIZE <= size <= n * SAME_SIZE for size in sizes)]


def draw_norm_and_rate(norm, rate, runs: dict[str, Curves], at: dict[str, Callable]) -> None:
    """The norm on a logarithmic axis, so that a spike shows and the rest stays readable."""
    for i, (label, run) in enumerate(runs.items()):
        (steps, norms), (rate_steps, rates) = run["train", "grad_norm"], run["train", "lr"]
        x, norms = at[label](steps[norms > 0]), norms[norms > 0]
        if len(runs) == 1:
            norm.plot(x, norms, color=COLORS[0], alpha=0.25, linewidth=0.8)
        norm.plot(*smoothed(x, norms), linewidth=1.2, **look(i))
        rate.plot(at[label](rate_steps), rates, linewidth=1.2, **look(i))
    if norm.dataLim.height > 0:
        low, high = norm.dataLim.intervaly
        wider = max(1.1, math.sqrt(3 * low / high))  # a range of a factor of three has at least one tick
        norm.set(yscale="log", ylim=(low / wider, high * wider))
        norm.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        norm.yaxis.set(major_formatter="{x:g}", minor_formatter="")
    rate.set_ylim(bottom=0)
    skipped = sum(len(run["train", "skipped"][0]) for run in runs.values())
    finish(norm, "Gradient norm before clipping" + (f"; {skipped:,} steps skipped" if skipped else ""), "norm (log)")
    finish(rate, "Learning rate", "")


def finish(axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", parse_math=False)
    axes.set_ylabel(unit, fontsize=9)


def legend(axes, **place) -> None:
    for text in axes.legend(fontsize=8.5, title_fontsize=8.5, framealpha=0.85, **place).get_texts():
        text.set_parse_math(False)  # the name of a directory may hold a $


def plain(label: str) -> str:
    """A label that any font can draw: one line, valid UTF-8, and no leading _, which hides it from a legend."""
    return " ".join(os.fsencode(label).decode(errors="replace").split()).lstrip("_")
