"""Curves of one training run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

`y` is what losses are shown in: "loss", nats per token, which two tokenizers do not share; or "bpb", bits per byte of
text. This file knows nothing of torch or models: it sees only the records of a log.
"""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from parts.cli import UserError
from parts.files import replace_file
from parts.log import Records, newest_start

Curve = tuple[np.ndarray, np.ndarray]  # x and y: at first steps and values
Curves = dict[tuple[str, str], Curve]  # of a run: {(kind, key): curve}
Runs = dict[str, Curves]  # {label: curves}

POINTS = 800  # about the width of a panel in pixels: more points would not show
# Okabe and Ito (2008): distinguishable by the colour-blind
COLORS = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
LEGEND = dict(fontsize=8.5, title_fontsize=8.5, framealpha=0.85)
EACH_STEP = dict(color=COLORS[0], alpha=0.25, linewidth=0.8)
REFERENCE_LINE = dict(color="gray", linestyle="--", linewidth=0.8)
DRAWN = {
    "run": ("parameters", "uniform_loss"),
    "train": ("loss", "grad_norm", "lr", "tokens", "dt_ms", "skipped"),
    "val": ("loss", "bpb"),
    "hellaswag": ("acc_norm", "acc_norm_stderr", "gold_bpb", "gold_bpb_stderr"),
}
LOSS_IN = {"loss": "nats per token", "bpb": "bits per byte"}
SCORES = {  # key in a log: height of its panel in inches, title, factor, unit
    "acc_norm": (2.1, "how often the right ending of four is the likeliest, lengths normalised", 100, "accuracy (%)"),
    "gold_bpb": (1.5, "what the right ending costs", 1, "bits per byte"),
}
CHANCE = 0.25  # HellaSwag has four endings
# Name, parameters, accuracy with lengths normalised. GPT-2: the released weights as `hellaswag.py --style completion`
# scores them. GPT-3: Brown et al. 2020, table H.1, zero-shot.
PUBLISHED = (
    ("GPT-2 124M", 124e6, 0.2955),
    ("GPT-2 XL", 1558e6, 0.4893),
    ("GPT-3 Small", 125e6, 0.337),
    ("GPT-3 Medium", 350e6, 0.436),
    ("GPT-3 Large", 760e6, 0.510),
    ("GPT-3 XL", 1300e6, 0.547),
)


def curves_of(records: Records) -> Curves:
    """The values to draw, ordered by step, without null (a skipped step has no loss), nan and infinity.

    If a log has a step twice, the later record counts.
    """
    newest = {(record["kind"], record["step"]): record for record in records}
    points = {(kind, key): [] for kind, keys in DRAWN.items() for key in keys}
    for kind, step in sorted(newest):
        for key in DRAWN.get(kind, ()):
            value = newest[kind, step].get(key)
            if isinstance(value, int | float) and abs(value) < 1e30:  # more than matplotlib draws
                points[kind, key].append((step, value))
    return {what: np.array(found, float).reshape(-1, 2).T for what, found in points.items()}


def has(run: Curves, kind: str, key: str) -> bool:
    return run[kind, key][0].size > 0


def has_loss(run: Curves) -> bool:
    return has(run, "train", "loss") or has(run, "val", "loss")


def last(run: Curves, kind: str, key: str) -> float | None:
    """The newest value of a curve, None if it has no points."""
    return run[kind, key][1][-1] if has(run, kind, key) else None


def measured_on(records: Records, y: str) -> str:
    """The text that a run validates on, and for y = "loss" its tokenizer: only runs with the same can be compared."""
    start = newest_start(records)
    data = start.get("data")
    if y == "bpb" and isinstance(data, dict):
        return repr([data.get(key) for key in ("source", "bytes", "examples")])  # no tokenizer changes these
    return repr((data, start.get("tokenizer")))


# ------------------------------------------------------------------------------------------------ the units of the axes


def in_units(runs: Runs, x: str, y: str) -> tuple[Runs, str]:
    """The runs in the units of both axes, and the label of the x axis.

    Raises UserError if a log lacks what they need.
    """
    if y == "bpb":
        runs = {label: in_bits(run, label) for label, run in runs.items()}
    if x == "steps":
        return runs, "step"
    runs = {label: with_x_axis(run, x, label) for label, run in runs.items()}
    if x == "tokens":
        return {label: with_x(run, lambda tokens: tokens / 1e6) for label, run in runs.items()}, "millions of tokens"
    return {label: with_x(run, lambda seconds: seconds / 60) for label, run in runs.items()}, "minutes of training"


def with_x(run: Curves, change) -> Curves:
    """The run with change(x) in place of every x."""
    return {what: (change(x), values) for what, (x, values) in run.items()}


def in_bits(run: Curves, label: str) -> Curves:
    """The run with validation losses in bits per byte, and no others."""
    if not has(run, "val", "bpb"):
        raise UserError(f'--y bpb: the log of {label} has no "bpb" in its val records; use --y loss')
    nothing = np.zeros(0)
    return run | {
        ("val", "loss"): run["val", "bpb"],
        ("train", "loss"): (nothing, nothing),
    }


def with_x_axis(run: Curves, x: str, label: str) -> Curves:
    """The run with tokens or seconds on the x axis in place of steps."""
    key = "dt_ms" if x == "seconds" else "tokens"
    steps, reached = run["train", key]
    if not len(steps):
        raise UserError(f'--x {x}: the log of {label} lacks "{key}" in its train records; use --x steps')
    if x == "seconds":
        reached = np.cumsum(reached) / 1e3  # of the steps: without the pauses of a run that was stopped and resumed
    steps = np.append(0, steps)
    reached = np.append(0, reached)
    return with_x(run, lambda at: np.interp(at, steps, reached))


def end_of(runs: Runs) -> float:
    """The largest x."""
    return max(x.max(initial=0.0) for run in runs.values() for x, _ in run.values())


def smoothed(x: np.ndarray, y: np.ndarray) -> Curve:
    """At most POINTS points of a running median over 2% of the points on either side.

    Unlike an average it neither lags nor follows a spike.
    """
    groups = np.array_split(np.arange(len(y)), POINTS)
    groups = [group for group in groups if len(group)]
    medians = [np.median(y[group]) for group in groups]
    smooth = []
    for i in range(len(medians)):
        reach = min(len(medians) // 50 + 1, i)  # shorter at first: a median would hide the first drop
        smooth.append(np.median(medians[i - reach : i + reach + 1]))
    return np.array([x[group[0]] for group in groups]), np.array(smooth)


# ------------------------------------------------------------------------------------------------------- the picture


def draw(runs: dict[str, Records], path: Path, x: str = "steps", y: str = "loss") -> None:
    """Draw {label: records} and replace `path` in one step; do nothing before the first loss.

    Any thread may call this: it uses Figure itself, since pyplot's figures are global. Raises UserError for logs that
    lack what `x` or `y` needs.
    """
    from matplotlib.figure import Figure  # a slow import (0.5 s), which --help and the start of a run do not need

    validated_on = {measured_on(records, y) for records in runs.values()}
    curves = {}
    for label, records in runs.items():
        drawn = escape_label(label)
        curves[f"{drawn} ({len(curves) + 1})" if drawn in curves else drawn] = curves_of(records)
    if not any(map(has_loss, curves.values())):
        return
    curves, x_label = in_units(curves, x, y)

    scored = [key for key in SCORES if any(has(run, "hellaswag", key) for run in curves.values())]
    heights = {"loss": 3.5}  # of each row, in inches
    for key in scored:
        heights[key] = SCORES[key][0]
    heights["norm"] = 1.6
    height = sum(heights.values()) + 0.7 * len(heights)  # with titles and labels
    figure = Figure(figsize=(9, height), dpi=100, layout="constrained")
    mosaic = [[name, name] for name in heights]
    mosaic[-1] = ["norm", "rate"]  # side by side
    panels = figure.subplot_mosaic(mosaic, height_ratios=list(heights.values()))
    draw_loss(panels["loss"], curves, y, comparable=len(validated_on) == 1)
    title = "thin: training; marked: validation" if len(curves) > 1 and y == "loss" else None
    panels["loss"].legend(loc="upper right", title=title, **LEGEND)
    for key in scored:
        draw_scores(panels[key], curves, key)
    draw_norm_and_rate(panels["norm"], panels["rate"], curves)
    end = end_of(curves)
    for axes in panels.values():
        axes.set_xlim(-0.01 * end, 1.01 * max(end, 1e-9))
        axes.xaxis.set(major_formatter="{x:,.10g}")
        axes.set_xlabel(x_label, fontsize=9)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8.5)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    replace_file(path, picture.getvalue())


def escape_label(label: str) -> str:
    """A label that can be drawn: one line, valid UTF-8, no leading _, which would hide it, and no $ of a formula."""
    valid = os.fsencode(label).decode(errors="replace")
    return " ".join(valid.split()).lstrip("_").replace("$", r"\$")


def with_colors(runs: Runs) -> Iterator[tuple]:
    """(colour, label, curves) of each run: in all panels the same colour, and no two runs have one."""
    from matplotlib import colormaps  # a slow import, as in `draw`

    colors = COLORS
    if len(runs) > len(COLORS):
        colors = colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
    for color, (label, run) in zip(colors, runs.items(), strict=False):
        yield color, label, run


def line_style(color, n_points: int) -> dict:
    """Of a curve with marks, at 25 of its points at most."""
    return dict(color=color, marker="o", markersize=4.5, markevery=max(n_points // 25, 1))


def label_axes(axes, title: str, unit: str) -> None:
    for line in axes.lines:
        if len(line.get_xdata()) == 1 and line.get_marker() == "None":
            line.set_marker(".")  # or a run of one step would show nothing
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel(unit, fontsize=9)


# -------------------------------------------------------------------------------------------------------- the panels


def draw_loss(axes, runs: Runs, y: str, comparable: bool) -> None:
    """Smoothed training loss, over that of every step if there is only one run; validation loss with marks. The title
    names the best run if all were validated on the same data."""
    alone = len(runs) == 1
    ends = {}  # {name: the last validation loss}
    tails = []  # the losses that the axis is scaled to
    for color, name, run in with_colors(runs):
        training = smoothed(*run["train", "loss"])
        validation = run["val", "loss"]
        style = line_style(color, len(validation[0]))
        if alone:
            axes.plot(*run["train", "loss"], **EACH_STEP, label="training, each step")
            axes.plot(*training, linewidth=1.5, color=COLORS[0], label="training, smoothed")
            style["color"] = COLORS[2]  # unlike its own training loss
        else:
            axes.plot(*training, linewidth=0.8, color=color)
        label = "validation" if alone else name
        end = last(run, "val", "loss")
        if end is not None:
            ends[name] = end
            label += f": {end:.3f} at the end"
        axes.plot(*validation, linewidth=1.6, label=label, **style)
        tails.extend(tail_of(*training))
        tails.extend(tail_of(*validation))
    low, high = min(tails), max(tails)
    margin = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    label_axes(axes, f"Validation loss: {verdict(ends, alone, comparable)}", f"loss ({LOSS_IN[y]})")
    if alone and has(run, "train", "loss"):
        draw_start(axes, run)


def tail_of(x: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """What follows the first 5%: all runs begin with the same steep fall, and differ after it. Keeps a loss
    that was measured before the first step (x = 0), as finetuning has."""
    if not len(x):
        return losses
    return losses[(x >= 0.95 * x[0] + 0.05 * x[-1]) | (x == 0)]


def verdict(ends: dict[str, float], alone: bool, comparable: bool) -> str:
    if not comparable:
        return "on different data or tokens, not comparable"
    if not ends:
        return "not measured yet"
    best = min(ends, key=ends.get)
    return f"{ends[best]:.3f}" if alone else f"{ends[best]:.3f}, reached by {best}"


def draw_start(axes, run: Curves) -> None:
    """Mark where a run starts: ln V, the loss of a uniform guess, and the loss of the first batch, before training."""
    from matplotlib.ticker import MaxNLocator

    uniform = last(run, "run", "uniform_loss")
    lowest = axes.get_ylim()[0]
    if uniform is None or lowest <= 0:
        return
    first = run["train", "loss"][1][0]
    axes.axhline(uniform, **REFERENCE_LINE)
    label = f"before the first step: {first:.2f} (ln V is {uniform:.2f})"
    axes.plot(0, first, "D", color=COLORS[3], label=label)
    axes.set_yscale("log")  # runs differ in their ends
    axes.set_ylim(lowest, 1.05 * max(first, uniform))
    axes.yaxis.set_major_locator(MaxNLocator(9, steps=(1, 2, 5, 10)))
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="")


def draw_scores(axes, runs: Runs, key: str) -> None:
    """A score of HellaSwag with its standard error; for accuracies also chance and published models."""
    _, title, scale, unit = SCORES[key]
    for color, label, run in with_colors(runs):
        x, score = run["hellaswag", key]
        error = scale * np.abs(run["hellaswag", f"{key}_stderr"][1])
        if len(error) != len(x):
            error = 0 * x
        score = scale * score
        if len(x):
            label += f": {score[-1]:.4g} ± {error[-1]:.2g} at the end"
        axes.errorbar(x, score, error, elinewidth=0.8, label=label, **line_style(color, len(x)))
    if key == "acc_norm":
        # Curves start near chance on the left and end above it on the right: names go where curves do not.
        for name, accuracy in published(runs):
            draw_accuracy(axes, name, accuracy, x=0.005, ha="left", va="bottom")
        draw_accuracy(axes, "chance", CHANCE, x=0.995, ha="right", va="top")
    axes.margins(y=0.12)
    label_axes(axes, f"HellaSwag: {title}, ± standard error", unit)
    axes.legend(loc="upper left", bbox_to_anchor=(0.16, 1), **LEGEND)


def published(runs: Runs) -> list[tuple[str, float]]:
    """(name, accuracy) of the published models that are about as large as one of the runs."""
    sizes = [last(run, "run", "parameters") or 0 for run in runs.values()]
    return [(name, accuracy) for name, n, accuracy in PUBLISHED if any(0.8 <= size / n <= 1.25 for size in sizes)]


def draw_accuracy(axes, name: str, accuracy: float, **place) -> None:
    """A line across the panel, with its name."""
    percent = 100 * accuracy
    axes.axhline(percent, **REFERENCE_LINE)
    axes.text(
        y=percent,
        s=f"{name} {percent:.4g}%",
        fontsize=8,
        transform=axes.get_yaxis_transform(),  # x in parts of the width, y in percent
        **place,
    )


def draw_norm_and_rate(norm, rate, runs: Runs) -> None:
    """The norm on a logarithmic axis, so that a spike shows and the rest stays readable."""
    skipped = 0
    for color, _, run in with_colors(runs):
        x, norms = run["train", "grad_norm"]
        x = x[norms > 0]
        norms = norms[norms > 0]
        if len(runs) == 1:
            norm.plot(x, norms, **EACH_STEP)
        norm.plot(*smoothed(x, norms), linewidth=1.2, color=color)
        rate.plot(*run["train", "lr"], linewidth=1.2, color=color)
        skipped += len(run["train", "skipped"][0])
    if norm.dataLim.height > 0:
        norm.set_yscale("log")
        norm.yaxis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 5, 7))
        norm.yaxis.set(major_formatter="{x:g}", minor_formatter="")
    rate.set_ylim(bottom=0)
    title = "Gradient norm before clipping"
    if skipped:
        title += f"; {skipped:,} steps skipped"
    label_axes(norm, title, "norm (log)")
    label_axes(rate, "Learning rate", "")
