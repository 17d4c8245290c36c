"""Curves of one training run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

`y` is what losses are shown in: "loss", nats per token, which two tokenizers do not share; or "bpb", bits per byte of
text. This file knows nothing of torch or models: it sees only the records of a log.
"""

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from parts.cli import UserError
from parts.files import replace_file
from parts.log import Records, newest_start, of_kind

POINTS = 800  # about the width of a panel in pixels: more points would not show
# Okabe and Ito (2008): distinguishable by the colour-blind; marks and dashes tell runs apart in greyscale
COLORS = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
MARKS = "osD^vPX"
DASHES = ("-", "--", "-.", ":")
LEGEND = dict(fontsize=8.5, title_fontsize=8.5, framealpha=0.85)
EACH_STEP = dict(color=COLORS[0], alpha=0.25, linewidth=0.8)
REFERENCE_LINE = dict(color="gray", linestyle="--", linewidth=0.8)
X_LABELS = dict(steps="step", tokens="millions of tokens", seconds="minutes of training")
RIVALS = dict(loss="thin: training; marked: validation", bpb=None)
LOSS_IN = {"loss": "nats per token", "bpb": "bits per byte"}
SCORES = {  # key in a log: height of its panel in inches, title, factor, unit
    "acc_norm": (
        2.1,
        "HellaSwag: how often the right ending of four is the likeliest, lengths normalised, ± standard error",
        100,
        "accuracy (%)",
    ),
    "gold_bpb": (1.5, "HellaSwag: what the right ending costs, ± standard error", 1, "bits per byte"),
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
Curve = tuple[np.ndarray, np.ndarray]  # x and y


def draw(runs: dict[str, Records], path: Path, x: str = "steps", y: str = "loss") -> None:
    """Draw {label: records} and replace `path` in one step; do nothing before the first loss.

    Any thread may call this: it uses Figure itself, since pyplot's figures are global. Raises UserError for logs that
    lack what `x` or `y` needs.
    """
    from matplotlib.figure import Figure  # a slow import (0.5 s), which --help and the start of a run do not need

    if not any(map(has_loss, runs.values())):
        return
    heights = {"loss": 3.5}  # of the rows, in inches
    for key, (height, *_) in SCORES.items():
        if any(len(curve(records, "hellaswag", key)[0]) for records in runs.values()):
            heights[key] = height
    heights["norm"] = 1.6
    rows = [[name, name] for name in heights]
    rows[-1] = ["norm", "rate"]  # side by side
    size = (9, sum(heights.values()) + 0.7 * len(rows))  # with titles and labels
    figure = Figure(size, dpi=100, layout="constrained")
    panels = figure.subplot_mosaic(rows, height_ratios=list(heights.values()))
    alone = len(runs) == 1
    labels = []
    for look, (name, records) in zip(looks(len(runs)), runs.items(), strict=True):
        label = escape_label(name)
        labels.append(f"{label} ({len(labels) + 1})" if label in labels else label)
        if y == "bpb" and not len(curve(records, "val", y)[0]):
            raise UserError(f'--y bpb: the log of {name} has no "bpb" in its val records; use --y loss')
        at = x_axis(records, x, name)
        if alone:
            draw_loss(panels["loss"], records, at, y)
        else:
            draw_rival(panels["loss"], records, at, y, dict(label=labels[-1], **look))
        for key in SCORES.keys() & panels.keys():
            draw_score(panels[key], records, at, key, dict(label=labels[-1], **look))
        if alone:
            panels["norm"].plot(*curve(records, "train", "grad_norm", at), **EACH_STEP)
        draw_norm_and_rate(panels["norm"], panels["rate"], records, at, look)
    if "acc_norm" in panels:
        draw_published(panels["acc_norm"], [newest_start(records).get("parameters") for records in runs.values()])
    skipped = sum(len(curve(records, "train", "skipped")[0]) for records in runs.values())
    titles = {key: (title, unit) for key, (_, title, _, unit) in SCORES.items()}
    titles["loss"] = f"Validation loss: {verdict(runs, labels, y)}", f"loss ({LOSS_IN[y]})"
    titles["norm"] = "Gradient norm before clipping" + (f"; {skipped:,} steps skipped" if skipped else ""), "norm (log)"
    titles["rate"] = "Learning rate", ""
    for key, axes in panels.items():
        label_axes(axes, *titles[key], X_LABELS[x])
    scale_axes(panels, alone)
    panels["loss"].legend(loc="upper right", title=None if alone else RIVALS[y], **LEGEND)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:])
    replace_file(path, picture.getvalue())


# ----------------------------------------------------------------------------------------------- from logs to points


def curve(records: Records, kind: str, key: str, at: Callable = lambda steps: steps) -> Curve:
    """`at(steps)` and the values of a key in a log, ordered by step, without null (a skipped step has no loss), nan and
    infinity. If a log has a step twice, the later record counts."""
    newest = {record["step"]: record.get(key) for record in of_kind(records, kind)}
    points = []
    for step, value in sorted(newest.items()):
        if is_number(value):
            points.append((step, value))
    steps, values = np.array(points, float).reshape(-1, 2).T
    return at(steps), values


def is_number(value) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e30  # matplotlib draws no more


def has_loss(records: Records) -> bool:
    return any(curve(records, kind, "loss")[0].size for kind in ("train", "val"))


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
    groups = np.array_split(np.arange(len(y)), POINTS)
    groups = [group for group in groups if len(group)]
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
    if not (is_number(size) and size > 0 and len(tokens)) or tokens[-1] > 50 * size:
        return np.zeros(0)
    return np.interp(size * np.arange(1, tokens[-1] // size + 1), np.append(0, tokens), np.append(0, steps))


def measured_on(records: Records, y: str) -> str:
    """The text that a run validates on, and for y = "loss" its tokenizer: only runs with the same can be compared."""
    start = newest_start(records)
    data = start.get("data")
    if y == "bpb" and isinstance(data, dict):
        return repr([data.get(key) for key in ("source", "bytes", "examples")])  # no tokenizer changes these
    return repr((data, start.get("tokenizer")))


def escape_label(label: str) -> str:
    """A label that can be drawn: one line, valid UTF-8, no leading _, which would hide it, and no $ of a formula."""
    valid = os.fsencode(label).decode(errors="replace")
    return " ".join(valid.split()).lstrip("_").replace("$", r"\$")


def looks(n: int) -> list[dict]:
    """Colour, mark and dashes of n runs, the same in all panels."""
    from matplotlib import colormaps  # slow, as in `draw`

    colors = COLORS if n <= len(COLORS) else colormaps["turbo"](np.linspace(0.05, 0.95, n))
    return [dict(color=colors[i], marker=MARKS[i % 7], linestyle=DASHES[i % 4]) for i in range(n)]


# -------------------------------------------------------------------------------------------------------- the panels


def marked(points: np.ndarray) -> dict:
    return dict(markersize=4.5, markevery=len(points) // 25 + 1)


def draw_loss(axes, records: Records, at: Callable, y: str) -> None:
    """The losses of a run alone, from where it starts, on a logarithmic axis if the log says what a guess costs."""
    x, training = curve(records, "train", "loss", at)
    if y == "loss" and len(training):
        axes.plot(x, training, **EACH_STEP, label="training, each step")
        axes.plot(*smoothed(x, training), linewidth=1.5, color=COLORS[0], label="training, smoothed")
    steps, losses = curve(records, "val", y)
    if len(losses):
        label = f"validation: {losses[-1]:.3f} at the end"
        axes.plot(at(steps), losses, "o-", color=COLORS[2], linewidth=1.6, **marked(losses), label=label)
        best = losses.argmin()
        label = f"lowest: {losses[best]:.3f} at step {steps[best]:,.0f}"
        axes.plot(at(steps[best]), losses[best], "o", color=COLORS[3], markersize=11, fillstyle="none", label=label)
    label = "the training text, read once more"
    for step in passes(records):
        axes.axvline(at(step), color="gray", linestyle=":", linewidth=1, label=label)
        label = None
    uniform = newest_start(records).get("uniform_loss")
    if y == "loss" and len(training) and is_number(uniform) and uniform > 0:
        axes.axhline(uniform, **REFERENCE_LINE)
        label = f"before the first step: {training[0]:.2f} (ln V is {uniform:.2f})"
        axes.plot(0, training[0], "D", color=COLORS[3], label=label)
        axes.set_yscale("log")  # runs differ in their ends
        axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")


def draw_rival(axes, records: Records, at: Callable, y: str, look: dict) -> None:
    """The losses of one of several runs."""
    if y == "loss":
        axes.plot(*smoothed(*curve(records, "train", "loss", at)), linewidth=0.8, color=look["color"])
    x, losses = curve(records, "val", y, at)
    end = f": {losses[-1]:.3f} at the end" if len(losses) else ""
    axes.plot(x, losses, linewidth=1.6, **marked(losses), **look | dict(label=look["label"] + end))


def verdict(runs: dict[str, Records], labels: list[str], y: str) -> str:
    if len({measured_on(records, y) for records in runs.values()}) > 1:
        return "on different data or tokens, not comparable"
    ends = {}  # {label: the last validation loss}
    for label, records in zip(labels, runs.values(), strict=True):
        losses = curve(records, "val", y)[1]
        if len(losses):
            ends[label] = losses[-1]
    if not ends:
        return "not measured yet"
    best = min(ends, key=ends.get)
    return f"{ends[best]:.3f}" if len(runs) == 1 else f"{ends[best]:.3f}, reached by {best}"


def draw_score(axes, records: Records, at: Callable, key: str, look: dict) -> None:
    """A score of HellaSwag with its standard error."""
    scale = SCORES[key][2]
    steps, scores = curve(records, "hellaswag", key)
    known = dict(zip(*curve(records, "hellaswag", f"{key}_stderr"), strict=True))
    errors = np.array([abs(known.get(step, 0)) for step in steps])
    if len(steps):
        label = f"{look['label']}: {scale * scores[-1]:.4g} ± {scale * errors[-1]:.2g} at the end"
        style = look | marked(scores) | dict(label=label)
        axes.errorbar(at(steps), scale * scores, scale * errors, elinewidth=0.8, **style)
        place = dict(bbox_to_anchor=(0.16, 1)) if key == "acc_norm" else {}  # accuracies rise, bits fall
        axes.legend(loc="upper left" if place else "upper right", **place, **LEGEND)


def draw_published(axes, parameters: list) -> None:
    """Lines of chance and of the published models about as large as one of the runs. Curves start near chance on the
    left and end above it on the right: names go where curves do not."""
    sizes = list(filter(is_number, parameters))
    lines = [(name, p, 0.005, "left", "bottom") for name, n, p in PUBLISHED if any(0.8 <= s / n <= 1.25 for s in sizes)]
    for name, p, x, ha, va in [*lines, ("chance", CHANCE, 0.995, "right", "top")]:
        axes.axhline(100 * p, **REFERENCE_LINE)
        place = dict(transform=axes.get_yaxis_transform(), ha=ha, va=va)  # x in parts of the width, y in percent
        axes.text(x, 100 * p, f"{name} {100 * p:.4g}%", fontsize=8, **place)


def draw_norm_and_rate(norm, rate, records: Records, at: Callable, look: dict) -> None:
    style = dict(color=look["color"], linestyle=look["linestyle"], linewidth=1.2)
    x, norms = curve(records, "train", "grad_norm", at)
    x, norms = x[norms > 0], norms[norms > 0]
    norm.plot(*smoothed(x, norms), **style)
    rate.plot(*curve(records, "train", "lr", at), **style)


def label_axes(axes, title: str, unit: str, x_label: str) -> None:
    for line in axes.lines:
        if len(line.get_xdata()) == 1 and line.get_marker() == "None":
            line.set_marker(".")  # or a run of one step would show nothing
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel(unit, fontsize=9)
    axes.set_xlabel(x_label, fontsize=9)
    axes.xaxis.set(major_formatter="{x:,.10g}")
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8.5)


def scale_axes(panels: dict, alone: bool) -> None:
    """One x axis for all; the norm on a logarithmic axis, so that a spike shows and the rest stays readable."""
    panels["loss"].margins(x=0.01)
    for axes in panels.values():
        axes.set_xlim(panels["loss"].get_xlim())
    for key in SCORES.keys() & panels.keys():
        panels[key].margins(y=0.12)
    if not alone:
        show_ends(panels["loss"])
    norm = panels["norm"]
    if norm.dataLim.height > 0:
        norm.set_yscale("log")
        norm.yaxis.get_major_locator().set_params(subs=(1, 1.5, 2, 3, 5, 7))
        norm.yaxis.set(major_formatter="{x:g}", minor_formatter="")
    panels["rate"].set_ylim(bottom=0)


def show_ends(axes) -> None:
    """Scale the losses of several runs to what follows the first 5%: all begin with the same steep fall, and differ
    after it. Keeps a loss that was measured before the first step, as finetuning has."""
    lines = [(x, losses) for x, losses in (line.get_data() for line in axes.lines) if len(x)]
    tails = np.concatenate([losses[(x >= 0.95 * x[0] + 0.05 * x[-1]) | (x == 0)] for x, losses in lines])
    margin = 0.05 * np.ptp(tails) or 0.1
    axes.set_ylim(tails.min() - margin, tails.max() + margin)
