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
ACCURACIES = {"chance": 0.25, "GPT-2 124M": 0.2955}
TITLES = dict(
    score="HellaSwag: how often the right ending of four is the likeliest, lengths normalised (%, standard error)",
    norm="Gradient norm before clipping (log)",
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

    heights = dict(loss=3.5, score=2.1, norm=1.6)  # of the rows, in inches
    if not any(of_kind(records, "hellaswag") for records in runs.values()):
        del heights["score"]
    rows = [[name, name] for name in heights]
    rows[-1] = ["norm", "rate"]  # side by side
    figure = Figure((9, sum(heights.values()) + 0.7 * len(rows)), dpi=100, layout="constrained")
    panels = figure.subplot_mosaic(rows, sharex=True, height_ratios=list(heights.values()))
    alone = len(runs) == 1
    for i, (name, records) in enumerate(runs.items()):
        color = COLORS[i % len(COLORS)]
        label = name.lstrip("_").replace("$", r"\$")  # a leading _ would hide it, and $ begin a formula
        marked = dict(color=color, marker=MARKS[i % len(MARKS)], markersize=4.5, linewidth=1.2)
        at = x_axis(records, x, name)

        steps, losses = curve(records, "val", y)
        if y == "bpb" and not len(losses):
            raise UserError(f'--y bpb: the log of {name} has no "bpb" in its val records; pass --y loss')
        if len(losses):
            best = losses.argmin()
            values = f"{losses[-1]:.3f} at the end, lowest {losses[best]:.3f} at step {steps[best]:,.0f}"
            panels["loss"].plot(at(steps), losses, label=f"{label}: {values}", **marked)
        if y == "loss":
            each = curve(records, "train", "loss", at)
            places, losses = smoothed(*each)
            start = 0 if alone else len(places) // 20  # the first steep fall would hide how several runs differ
            panels["loss"].plot(places[start:], losses[start:], color=color, linewidth=0.8)
            if alone:
                panels["loss"].set_yscale("log")
                panels["loss"].plot(*each, color=color, linewidth=0.8, alpha=0.25)
        if alone:
            mark_references(panels["loss"], records, at, y)

        if "score" in panels:
            places, scores = curve(records, "hellaswag", "acc_norm", at)
            _, errors = curve(records, "hellaswag", "acc_norm_stderr")
            panels["score"].errorbar(places, 100 * scores, 100 * errors, elinewidth=0.8, **marked)
        panels["norm"].set_yscale("log")  # the rest stays readable beside a spike
        norms = curve(records, "train", "grad_norm", at)
        panels["norm"].plot(*norms, color=color, linewidth=0.8, alpha=0.25)
        panels["norm"].plot(*smoothed(*norms), color=color, linewidth=1)
        panels["rate"].plot(*curve(records, "train", "lr", at), color=color, linewidth=1)
    label_panels(panels, x, y)
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    return content.getvalue()


def label_panels(panels: dict, x: str, y: str) -> None:
    """Give the panels their titles, axes and legend, and HellaSwag its references."""
    if "score" in panels:
        for name, accuracy in ACCURACIES.items():
            panels["score"].axhline(100 * accuracy, color="gray", linewidth=0.8, ls="--")
            panels["score"].text(0, 100 * accuracy, f"{name} {100 * accuracy:.4g}%", fontsize=8, va="bottom")
    for name, axes in panels.items():
        title = TITLES.get(name, f"Loss ({UNITS[y]}); marked: validation")
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel(X_LABELS[x], fontsize=9)
        axes.xaxis.set(major_formatter="{x:,.10g}")
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8.5, labelbottom=True)
        if axes.get_yscale() == "log":
            axes.yaxis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 5, 7))
            axes.yaxis.set(major_formatter="{x:g}", minor_formatter="")
    if panels["loss"].get_legend_handles_labels()[1]:
        panels["loss"].legend(fontsize=8.5, framealpha=0.85)
    panels["rate"].set_ylim(bottom=0)


def mark_references(axes, records: Records, at: Callable, y: str) -> None:
    """Mark a uniform guess's loss, and the steps at which an epoch ends, up to fifty."""
    start = newest_start(records)
    if y == "loss" and (uniform := start.get("uniform_loss")):
        label = f"if all tokens are equally likely: {uniform:.2f}"
        axes.axhline(uniform, color="gray", linewidth=0.8, ls="--", label=label)
    size = start.get("training_tokens")
    steps, tokens = curve(records, "train", "tokens")
    if size and len(tokens) and tokens[-1] <= 50 * size:
        ends = size * np.arange(1, tokens[-1] // size + 1)
        label = "the training text, read once more"
        for end in np.interp(ends, np.append(0, tokens), np.append(0, steps)):
            axes.axvline(at(end), color="gray", linewidth=0.8, ls=":", label=label)
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
