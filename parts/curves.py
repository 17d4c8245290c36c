"""Curves of one training run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

`y` is what losses are shown in: "loss", nats per token, which two tokenizers do not share; or "bpb", bits per byte of
text. This file knows nothing of torch or models: it sees only the records of a log.
"""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np

from parts.cli import UserError
from parts.files import replace_file
from parts.log import Records, newest_start, of_kind

POINTS = 800  # about the width of a panel in pixels: more points would not show
# Okabe and Ito (2008): distinguishable by the colour-blind; marks tell runs apart in greyscale
COLORS = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
MARKS = "osD^v"
GRAY = dict(color="gray", linewidth=0.8)
X_LABELS = dict(steps="step", tokens="millions of tokens", seconds="minutes of training")
UNITS = dict(loss="nats per token", bpb="bits per byte")
# On HellaSwag: there are four endings; the released weights as `hellaswag.py --style completion` scores them
ACCURACIES = {"chance": 0.25, "GPT-2 124M": 0.2955}
Curve = tuple[np.ndarray, np.ndarray]  # x and y


def draw(runs: dict[str, Records], path: Path, x: str = "steps", y: str = "loss") -> None:
    """Draw {label: records} and replace `path` in one step; do nothing before the first loss.

    Any thread may call this: it uses Figure itself, since pyplot's figures are global. Raises UserError for logs that
    lack what `x` or `y` needs.
    """
    from matplotlib.figure import Figure  # a slow import (0.5 s), which --help and the start of a run do not need

    if not any(map(has_loss, runs.values())):
        return
    heights = dict(loss=3.5, score=2.1, norm=1.6)  # of the rows, in inches
    if not any(of_kind(records, "hellaswag") for records in runs.values()):
        del heights["score"]
    rows = [[name, name] for name in heights]
    rows[-1] = ["norm", "rate"]  # side by side
    figure = Figure((9, sum(heights.values()) + 0.7 * len(rows)), dpi=100, layout="constrained")
    panels = figure.subplot_mosaic(rows, sharex=True, height_ratios=list(heights.values()))
    for i, (name, records) in enumerate(runs.items()):
        color = COLORS[i % len(COLORS)]
        label = name.lstrip("_").replace("$", r"\$")  # a leading _ would hide it, and $ begin a formula
        marked = dict(color=color, marker=MARKS[i % len(MARKS)], markersize=4.5, linewidth=1.2, label=label)
        at = x_axis(records, x, name)
        if y == "bpb" and not len(curve(records, "val", y)[0]):
            raise UserError(f'--y bpb: the log of {name} has no "bpb" in its val records; use --y loss')
        if len(runs) == 1:
            draw_loss(panels["loss"], records, at, y)
        else:
            draw_rival(panels["loss"], records, at, y, marked)
        if "score" in panels:
            draw_score(panels["score"], records, at, marked)
        norms = curve(records, "train", "grad_norm", at)
        panels["norm"].plot(*norms, color=color, alpha=0.25, linewidth=0.8)
        panels["norm"].plot(*smoothed(*norms), color=color, linewidth=1.2)
        panels["rate"].plot(*curve(records, "train", "lr", at), color=color, linewidth=1.2)
    titles = dict(
        loss=f"Loss ({UNITS[y]}); marked: validation",
        score="HellaSwag: how often the right ending of four is the likeliest, lengths normalised (%, standard error)",
        norm="Gradient norm before clipping (log)",
        rate="Learning rate",
    )
    for name, axes in panels.items():
        axes.set_title(titles[name], loc="left", fontsize=10, fontweight="bold")
        axes.set_xlabel(X_LABELS[x], fontsize=9)
        axes.xaxis.set(major_formatter="{x:,.10g}")
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8.5, labelbottom=True)
    panels["loss"].legend(fontsize=8.5, framealpha=0.85)
    panels["norm"].set_yscale("log")  # so that a spike shows and the rest stays readable
    panels["norm"].yaxis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 5, 7))
    panels["norm"].yaxis.set(major_formatter="{x:g}", minor_formatter="")
    panels["rate"].set_ylim(bottom=0)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    replace_file(path, picture.getvalue())


# ----------------------------------------------------------------------------------------------- from logs to points


def curve(records: Records, kind: str, key: str, at: Callable = lambda steps: steps) -> Curve:
    """`at(steps)` and the values of a key in a log, ordered by step, without null (a skipped step has no loss), nan and
    infinity. If a log has a step twice, the later record counts."""
    newest = {record["step"]: record.get(key) for record in of_kind(records, kind)}
    # matplotlib draws no larger number
    points = [(step, value) for step, value in sorted(newest.items()) if value is not None and abs(value) < 1e30]
    steps, values = np.array(points, float).reshape(-1, 2).T
    return at(steps), values


def has_loss(records: Records) -> bool:
    return any(len(curve(records, kind, "loss")[0]) for kind in ("train", "val"))


def x_axis(records: Records, x: str, name: str) -> Callable:
    """The function from steps to places on the x axis. Raises UserError if the log does not say it."""
    if x == "steps":
        return lambda steps: steps
    key = "dt_ms" if x == "seconds" else "tokens"
    steps, reached = curve(records, "train", key)
    if not len(steps):
        raise UserError(f'--x {x}: the log of {name} lacks "{key}" in its train records; use --x steps')
    # seconds are those of the steps: without the pauses of a run that was stopped and resumed
    reached = np.cumsum(reached) / 6e4 if x == "seconds" else reached / 1e6
    return lambda at: np.interp(at, np.append(0, steps), np.append(0, reached))


def smoothed(x: np.ndarray, y: np.ndarray) -> Curve:
    """At most POINTS points of a running median over 2% of the points on either side.

    Unlike an average it neither lags nor follows a spike.
    """
    groups = [group for group in np.array_split(np.arange(len(y)), POINTS) if len(group)]
    medians = [np.median(y[group]) for group in groups]
    smooth = []
    for i in range(len(medians)):
        reach = min(len(medians) // 50 + 1, i)  # shorter at first: a median would hide the first drop
        smooth.append(np.median(medians[i - reach : i + reach + 1]))
    return np.array([x[group[0]] for group in groups]), np.array(smooth)


def passes(records: Records) -> np.ndarray:
    """The steps after which the training text had been read as a whole once, twice, ...; none if the log does not say
    how long it is, or after fifty, which would hide the curves."""
    size = newest_start(records).get("training_tokens")
    steps, tokens = curve(records, "train", "tokens")
    if not size or not len(tokens) or tokens[-1] > 50 * size:
        return np.zeros(0)
    return np.interp(size * np.arange(1, tokens[-1] // size + 1), np.append(0, tokens), np.append(0, steps))


# -------------------------------------------------------------------------------------------------------- the panels


def draw_loss(axes, records: Records, at: Callable, y: str) -> None:
    """The losses of a run alone, on a logarithmic axis from where it starts."""
    if y == "loss":
        x, losses = curve(records, "train", "loss", at)
        axes.plot(x, losses, color=COLORS[0], alpha=0.25, linewidth=0.8, label="training, each step")
        axes.plot(*smoothed(x, losses), color=COLORS[0], linewidth=1.5, label="training, smoothed")
        if uniform := newest_start(records).get("uniform_loss"):
            axes.axhline(uniform, **GRAY, ls="--", label=f"if all tokens are equally likely: {uniform:.2f}")
    steps, losses = curve(records, "val", y)
    if len(losses):
        label = f"validation: {losses[-1]:.3f} at the end"
        axes.plot(at(steps), losses, "o-", color=COLORS[2], markersize=4.5, label=label)
        best = losses.argmin()
        label = f"lowest: {losses[best]:.3f} at step {steps[best]:,.0f}"
        axes.plot(at(steps[best]), losses[best], "o", color=COLORS[3], markersize=11, fillstyle="none", label=label)
    label = "the training text, read once more"
    for step in passes(records):
        axes.axvline(at(step), **GRAY, ls=":", label=label)
        label = None
    axes.set_yscale("log")
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    if axes.get_ylim()[1] > 10 * axes.get_ylim()[0]:  # else the labels would touch
        axes.yaxis.get_minor_locator().set_params(subs=(2, 5))


def draw_rival(axes, records: Records, at: Callable, y: str, marked: dict) -> None:
    """The losses of one of several runs: thin of training, marked of validation."""
    if y == "loss":
        x, losses = smoothed(*curve(records, "train", "loss", at))
        start = len(x) // 20  # all begin with the same steep fall, next to which their differences would not show
        axes.plot(x[start:], losses[start:], linewidth=0.8, color=marked["color"])
    x, losses = curve(records, "val", y, at)
    end = f": {losses[-1]:.3f} at the end" if len(losses) else ""
    axes.plot(x, losses, **marked | dict(label=marked["label"] + end))


def draw_score(axes, records: Records, at: Callable, marked: dict) -> None:
    """The accuracy on HellaSwag with its standard error, beside those of ACCURACIES."""
    for name, accuracy in ACCURACIES.items():
        axes.axhline(100 * accuracy, **GRAY, ls="--")
        axes.text(0, 100 * accuracy, f"{name} {100 * accuracy:.4g}%", fontsize=8, va="bottom")
    x, scores = curve(records, "hellaswag", "acc_norm", at)
    _, errors = curve(records, "hellaswag", "acc_norm_stderr")
    if len(x):
        label = f"{marked['label']}: {100 * scores[-1]:.4g} ± {100 * errors[-1]:.2g} at the end"
        axes.errorbar(x, 100 * scores, 100 * errors, elinewidth=0.8, **marked | dict(label=label))
        axes.legend(loc="upper left", bbox_to_anchor=(0.16, 1), fontsize=8.5, framealpha=0.85)
