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
from parts.log import Records, of_kind

POINTS = 200  # of a smoothed curve
# Okabe and Ito (2008): distinguishable by the colour-blind
COLORS = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
X_LABELS = dict(steps="step", tokens="millions of tokens", seconds="minutes of training")
TITLES = dict(
    loss="Loss, nats per token; dots: validation",
    bpb="Validation loss, bits per byte",
    score="HellaSwag, accuracy in % with its standard error; dashed: chance, GPT-2 124M",
    norm="Gradient norm before clipping",
    rate="Learning rate",
)
REFERENCES = (25, 29.55)  # HellaSwag has four endings; the released weights by `hellaswag.py gpt2 --style completion`
Curve = tuple[np.ndarray, np.ndarray]  # x and y


def draw(runs: dict[str, Records], path: Path) -> None:
    replace_file(path, picture(runs, path.suffix[1:]))


def picture(runs: dict[str, Records], kind: str, x: str = "steps", y: str = "loss") -> bytes:
    """Draw {label: records} as a "png", "svg" or "pdf". Raises UserError for a log without what `x` or `y` needs.

    Any thread may call this: it uses Figure itself, because pyplot's figures are global.
    """
    from matplotlib.figure import Figure  # slow to import (0.5 s)
    from matplotlib.ticker import AutoLocator, NullLocator

    names = [y, "norm", "rate"]
    if any(of_kind(records, "hellaswag") for records in runs.values()):
        names.insert(1, "score")
    figure = Figure((9, 2.5 * len(names)), layout="constrained")
    panels = figure.subplot_mosaic([[name] for name in names], sharex=True)
    for i, (name, records) in enumerate(runs.items()):
        thin = dict(color=COLORS[i % len(COLORS)], linewidth=0.8)
        dots = thin | dict(marker="o", markersize=4)
        at = x_axis(records, x, name)
        trained, train_losses = smoothed(*curve(records, "train", "loss", at))
        validated, losses = curve(records, "val", y, at)
        if not len(losses) and (y == "bpb" or not len(trained)):
            raise UserError(f"--y {y}: the log of {name} has none; pass another run, or another --y")
        label = name.lstrip("_").replace("$", r"\$")  # a leading _ would hide it, and $ begin a formula
        if len(losses):
            label += f": {losses[-1]:.3f} at the end, lowest {losses.min():.3f}"
        panels[y].plot(validated, losses, label=label, **dots)
        if y == "loss":
            panels[y].plot(trained, train_losses, **thin)
        if "score" in panels:
            places, scores = curve(records, "hellaswag", "acc_norm", at)
            _, errors = curve(records, "hellaswag", "acc_norm_stderr")
            panels["score"].errorbar(places, 100 * scores, 100 * errors, **dots)
            for accuracy in REFERENCES:
                panels["score"].axhline(accuracy, color="gray", linestyle="--")
        panels["norm"].plot(*curve(records, "train", "grad_norm", at), **thin, alpha=0.5)
        panels["rate"].plot(*curve(records, "train", "lr", at), **thin)

    for name, axes in panels.items():
        axes.set_title(TITLES[name], loc="left", fontsize=10)
        axes.grid(alpha=0.3)
    axes.set_xlabel(X_LABELS[x])
    # on a logarithmic axis the end stays readable beside the first steep fall, or a spike
    panels["norm"].set_yscale("log")
    panels[y].set_yscale("log")
    panels[y].yaxis.set(major_locator=AutoLocator(), minor_locator=NullLocator(), major_formatter="{x:g}")
    panels[y].legend()
    content = io.BytesIO()
    figure.savefig(content, format=kind)
    return content.getvalue()


# ----------------------------------------------------------------------------------------------- from logs to points


def curve(records: Records, kind: str, key: str, at: Callable = lambda steps: steps) -> Curve:
    """Return `at(steps)` and a key's values in a log, by step, without null (a skipped step has no loss), nan and
    infinity. If a log has a step twice, the later record counts."""
    values = {record["step"]: record.get(key) for record in of_kind(records, kind)}
    # matplotlib draws no larger number
    points = [(step, y) for step, y in sorted(values.items()) if isinstance(y, int | float) and abs(y) < 1e30]
    steps, values = np.array(points, float).reshape(-1, 2).T
    return at(steps), values


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
