"""Curves of one training run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

`y` is the unit of losses: "loss", nats per token, which two tokenizers do not share; or "bpb", bits per byte of text.
This file knows nothing of torch or models: it sees only the records of a log.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np

from parts.cli import UserError
from parts.files import replace_file
from parts.log import Records, newest_start, of_kind

POINTS = 200  # of a smoothed curve
# Okabe and Ito (2008): distinguishable by the colour-blind; marks tell runs apart in greyscale
COLORS = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
MARKS = "osD^v"
X_LABELS = dict(steps="step", tokens="millions of tokens", seconds="minutes of training")
UNITS = dict(loss="nats per token", bpb="bits per byte")
# On HellaSwag: there are four endings; the released weights as `hellaswag.py --style completion` scores them
ACCURACIES = {"chance": 25, "GPT-2 124M": 29.55}
GRAY = dict(color="gray", linewidth=0.8)
TITLES = dict(
    loss="Loss; marked: validation",
    score="HellaSwag: how often the right ending of four is the likeliest, lengths normalised (%, standard error)",
    norm="Gradient norm before clipping",
    rate="Learning rate",
)
Curve = tuple[np.ndarray, np.ndarray]  # x and y


def draw(runs: dict[str, Records], path: Path, x: str = "steps", y: str = "loss") -> None:
    """Draw {label: records} into `path`; do nothing before the first loss. See `picture`."""
    if any(has_loss(records) for records in runs.values()):
        replace_file(path, picture(runs, path.suffix[1:], x, y))


def picture(runs: dict[str, Records], kind: str, x: str = "steps", y: str = "loss") -> bytes:
    """Draw {label: records} as a "png", "svg" or "pdf". Raises UserError for a log without what `x` or `y` needs.

    Any thread may call this: it uses Figure itself, because pyplot's figures are global.
    """
    from matplotlib.figure import Figure  # slow to import (0.5 s)

    rows = [["loss", "loss"], ["norm", "rate"]]
    heights = [4, 2]  # in inches
    if any(of_kind(records, "hellaswag") for records in runs.values()):
        rows.insert(1, ["score", "score"])
        heights.insert(1, 3)
    figure = Figure((9, sum(heights)), layout="constrained")
    panels = figure.subplot_mosaic(rows, sharex=True, height_ratios=heights)
    alone = len(runs) == 1
    for i, (name, records) in enumerate(runs.items()):
        thin = dict(color=COLORS[i % len(COLORS)], linewidth=0.8)
        marked = thin | dict(marker=MARKS[i % len(MARKS)], markersize=4.5)
        label = name.lstrip("_").replace("$", r"\$")  # a leading _ would hide it, and $ begin a formula
        at = x_axis(records, x, name)

        steps, losses = curve(records, "val", y)
        if y == "bpb" and not len(losses):
            raise UserError(f'--y bpb: the log of {name} has no "bpb" in its val records; pass --y loss')
        if len(losses):
            best = losses.argmin()
            values = f"{losses[-1]:.3f} at the end, lowest {losses[best]:.3f} at step {steps[best]:,.0f}"
            panels["loss"].plot(at(steps), losses, label=f"{label}: {values}", **marked)
        if y == "loss":
            places, losses = smoothed(*curve(records, "train", "loss", at))
            start = 0 if alone else len(places) // 20  # the first steep fall would hide how several runs differ
            panels["loss"].plot(places[start:], losses[start:], **thin)
        if alone:
            mark_references(panels["loss"], records, at, y)

        if "score" in panels:
            places, scores = curve(records, "hellaswag", "acc_norm", at)
            _, errors = curve(records, "hellaswag", "acc_norm_stderr")
            panels["score"].errorbar(places, 100 * scores, 100 * errors, **marked)
        norms = curve(records, "train", "grad_norm", at)
        panels["norm"].plot(*norms, **thin, alpha=0.25)
        panels["norm"].plot(*smoothed(*norms), **thin)
        panels["rate"].plot(*curve(records, "train", "lr", at), **thin)
    label_panels(panels, x, y)
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    return content.getvalue()


def label_panels(panels: dict, x: str, y: str) -> None:
    """Give the panels their titles, axes and legend, and HellaSwag its references."""
    from matplotlib.ticker import AutoLocator, LogLocator, NullLocator

    for name, accuracy in ACCURACIES.items() if "score" in panels else ():
        panels["score"].axhline(accuracy, **GRAY, ls="--")
        panels["score"].text(0, accuracy, f"{name} {accuracy}%", va="bottom")
    for name, axes in panels.items():
        axes.set_title(TITLES[name], loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel(X_LABELS[x])
        axes.xaxis.set(major_formatter="{x:,.10g}")
        axes.grid(alpha=0.3)
        axes.tick_params(labelbottom=True)
    panels["loss"].set_ylabel(UNITS[y])
    # on a logarithmic axis the rest stays readable beside a spike or a steep fall
    for name, locator in dict(loss=AutoLocator(), norm=LogLocator(subs=(1, 2, 5))).items():
        panels[name].set_yscale("log")
        panels[name].yaxis.set(major_locator=locator, minor_locator=NullLocator(), major_formatter="{x:g}")
    if panels["loss"].get_legend_handles_labels()[1]:
        panels["loss"].legend(fontsize=9)
    panels["rate"].set_ylim(bottom=0)


def mark_references(axes, records: Records, at: Callable, y: str) -> None:
    """Mark a uniform guess's loss, and the steps at which an epoch ends, up to fifty."""
    start = newest_start(records)
    if y == "loss" and (uniform := start.get("uniform_loss")):
        label = f"if all tokens are equally likely: {uniform:.2f}"
        axes.axhline(uniform, **GRAY, ls="--", label=label)
    size = start.get("training_tokens")
    steps, tokens = curve(records, "train", "tokens")
    if size and len(tokens) and tokens[-1] <= 50 * size:
        ends = size * np.arange(1, tokens[-1] // size + 1)
        label = "the training text, read once more"
        for end in np.interp(ends, np.append(0, tokens), np.append(0, steps)):
            axes.axvline(at(end), **GRAY, ls=":", label=label)
            label = None


# ----------------------------------------------------------------------------------------------- from logs to points


def curve(records: Records, kind: str, key: str, at: Callable = lambda steps: steps) -> Curve:
    """Return `at(steps)` and a key's values in a log, by step, without null (a skipped step has no loss), nan and
    infinity. If a log has a step twice, the later record counts."""
    newest = {record["step"]: record.get(key) for record in of_kind(records, kind)}
    values = {step: value for step, value in sorted(newest.items()) if isinstance(value, int | float)}
    points = [(step, value) for step, value in values.items() if abs(value) < 1e30]  # matplotlib draws no larger number
    steps, values = np.array(points, float).reshape(-1, 2).T
    return at(steps), values


def has_loss(records: Records) -> bool:
    return any(len(curve(records, kind, "loss")[0]) for kind in ("train", "val"))


def x_axis(records: Records, x: str, name: str) -> Callable:
    """Return the function from steps to places on the x axis. Raises UserError if the log does not say it."""
    if x == "steps":
        return lambda steps: steps
    key = "dt_ms" if x == "seconds" else "tokens"
    steps, reached = curve(records, "train", key)
    if not len(steps):
        raise UserError(f'--x {x}: the log of {name} has no "{key}" in its train records; pass --x steps')
    # seconds of steps, without the pauses of a run that was stopped and resumed
    reached = np.cumsum(reached) / 6e4 if x == "seconds" else reached / 1e6
    return lambda at: np.interp(at, np.append(0, steps), np.append(0, reached))


def smoothed(x: np.ndarray, y: np.ndarray) -> Curve:
    """Return the medians of POINTS groups, at the first place of each: unlike an average they ignore a spike."""
    groups = [group for group in np.array_split(np.arange(len(y)), POINTS) if len(group)]
    return np.array([x[group[0]] for group in groups]), np.array([np.median(y[group]) for group in groups])
