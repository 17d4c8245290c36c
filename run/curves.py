"""Curves of one training run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

`y` is what losses are shown in: "loss", nats per token, which two tokenizers do not share; or "bpb", bits per byte of
text. This file knows nothing of torch or models: it sees only the records of a log.
"""

import io
import math
import os
import statistics
from pathlib import Path

import numpy as np

from cli import UserError
from files import replace_file
from run.records import Records

Curves = dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]  # {(kind, key): (steps, values)}

POINTS = 800  # about the width of a panel in pixels: more points would not show
# Okabe and Ito (2008): distinguishable by the colour-blind. Dashes and marks keep runs apart in greyscale.
COLORS = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
LEGEND = dict(fontsize=8.5, title_fontsize=8.5, framealpha=0.85)
DRAWN = {"run": ("parameters", "flops_per_token", "uniform_loss"),
         "train": ("loss", "grad_norm", "lr", "tokens", "dt_ms", "skipped"), "val": ("loss", "bpb"),
         "hellaswag": ("acc_norm", "acc_norm_stderr", "gold_bpb", "gold_bpb_stderr")}  # fmt: skip
LOSS_IN = {"loss": "nats per token", "bpb": "bits per byte"}
SCORES = {  # key in a log: height of its panel in inches, title, factor
    "acc_norm": (2.1, "how often the right ending of four is the likeliest, lengths normalised", 100),
    "gold_bpb": (1.5, "what the right ending costs", 1),
}
CHANCE = 0.25  # HellaSwag has four endings
# Name, parameters, accuracy with lengths normalised. GPT-2: the released weights as `hellaswag.py --style completion`
# scores them. GPT-3: Brown et al. 2020, table H.1, zero-shot.
PUBLISHED = (
    ("GPT-2 124M", 124e6, 0.2955), ("GPT-2 XL", 1558e6, 0.4893), ("GPT-3 Small", 125e6, 0.337),
    ("GPT-3 Medium", 350e6, 0.436), ("GPT-3 Large", 760e6, 0.510), ("GPT-3 XL", 1300e6, 0.547),
)  # fmt: skip
# The largest unit of which the longest run lasts two names the axis.
UNITS = {
    "steps": [(1, "step")],
    "tokens": [(1e9, "billions of tokens"), (1e6, "millions of tokens"), (1, "tokens")],
    "seconds": [(3600, "hours of training"), (60, "minutes of training"), (1, "seconds of training")],
    "flops": [(1e18, "exaFLOPs of training"), (1e15, "petaFLOPs of training"), (1, "FLOPs of training")],
}  # fmt: skip


def curves_of(records: Records) -> Curves:
    """The values to draw, ordered by step, without null (a skipped step has no loss), nan and infinity."""
    found = {(kind, key): [] for kind, keys in DRAWN.items() for key in keys}
    for record in sorted(records, key=lambda record: record["step"]):
        for key in DRAWN.get(record["kind"], ()):
            if isinstance(value := record.get(key), int | float) and abs(value) < 1e30:  # more than matplotlib draws
                found[record["kind"], key].append((record["step"], value))
    return {what: tuple(np.array(points, float).reshape(-1, 2).T) for what, points in found.items()}


def has_loss(run: Curves) -> bool:
    return len(run["train", "loss"][0]) + len(run["val", "loss"][0]) > 0


def placed(run: Curves, x: str, label: str) -> Curves:
    """The run with positions on the x axis in place of steps. Raises UserError if the log lacks what `x` needs."""
    if x == "steps":
        return run
    key = "dt_ms" if x == "seconds" else "tokens"
    steps, reached = run["train", key]
    scale = run["run", "flops_per_token"][1][-1:] if x == "flops" else np.ones(1)
    if not len(steps) or not len(scale):
        lacking = f'"{key}" in its train records' if not len(steps) else '"flops_per_token" in its record "run"'
        raise UserError(f"--x {x}: the log of {label} has no {lacking}, like logs of earlier versions; use --x steps")
    # Summing the times of steps leaves out the pauses of a run that was stopped and resumed.
    reached = np.cumsum(reached) / 1e3 if x == "seconds" else reached * scale
    steps, reached = np.append(0, steps), np.append(0, reached)
    return {what: (np.interp(at, steps, reached), values) for what, (at, values) in run.items()}


def measured_on(records: Records, y: str) -> str:
    """The text that a run validates on, and for y = "loss" its tokenizer: only runs with the same can be compared."""
    run = next((record for record in reversed(records) if record["kind"] == "run"), {})
    data = run.get("data") or (run.get("config") or {}).get("data")
    if y == "bpb" and isinstance(data, dict):
        return repr([data.get(key) for key in ("source", "bytes", "examples")])  # no tokenizer changes these
    return repr((data, run.get("tokenizer")))


def in_bits(run: Curves, label: str) -> Curves:
    """The run with validation losses in bits per byte, and no others. Raises UserError if the log lacks them."""
    if not len(run["val", "bpb"][0]):
        raise UserError(f'--y bpb: the log of {label} has no "bpb" in its val records; use --y loss')
    return run | {("val", "loss"): run["val", "bpb"], ("train", "loss"): (np.zeros(0), np.zeros(0))}


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


def draw(runs: dict[str, Records], path: Path, x: str = "steps", y: str = "loss", references=(), fan=None) -> list[str]:
    """Draw {label: records} and replace `path` in one step; do nothing before the first loss.

    `references` are entries of docs/reference.json that fit the first run, `fan` is that of a forecast (plot.py).
    Returns the sentences that --x flops prints. Any thread may call this: it uses Figure itself, since pyplot's figures
    are global. Raises UserError for logs that lack what `x` or `y` needs.
    """
    from matplotlib.figure import Figure  # a slow import (0.5 s), which --help and the start of a run do not need

    comparable = len({measured_on(records, y) for records in runs.values()}) == 1
    runs = {plain(label): curves_of(records) for label, records in runs.items()}
    if not any(map(has_loss, runs.values())):
        return []
    if y == "bpb":
        runs = {label: in_bits(run, label) for label, run in runs.items()}
    runs = {label: placed(run, x, label) for label, run in runs.items()}
    end = max(float(at.max()) for run in runs.values() for at, _ in run.values() if len(at))
    unit, x_label = next((unit for unit in UNITS[x] if end >= 2 * unit[0]), UNITS[x][-1])
    runs = {label: {what: (at / unit, v) for what, (at, v) in run.items()} for label, run in runs.items()}

    scored = [key for key in SCORES if any(len(run["hellaswag", key][0]) for run in runs.values())]
    rows = {"loss": 3.5} | {key: SCORES[key][0] for key in scored} | {"norm": 1.6}  # heights in inches
    figure = Figure(figsize=(9, sum(rows.values()) + 0.7 * len(rows)), dpi=100, layout="constrained")
    mosaic = [["norm", "rate"] if name == "norm" else [name, name] for name in rows]
    panels = figure.subplot_mosaic(mosaic, height_ratios=list(rows.values()))
    if fan is not None:
        tokens, low, _, high = fan.T
        panels["loss"].fill_between(tokens / unit, low, high, color="gray", alpha=0.3, label="forecast of the end, 90%")
    draw_loss(panels["loss"], runs, y, comparable)
    draw_references(panels["loss"], references, y, next(iter(runs.values())))
    said = draw_multipliers(panels["loss"], runs) if x == "flops" and comparable else []
    title = "thin: training; marked: validation" if len(runs) > 1 and y == "loss" else None
    panels["loss"].legend(loc="upper right", title=title, **LEGEND)
    for key in scored:
        draw_scores(panels[key], runs, key)
    draw_norm_and_rate(panels["norm"], panels["rate"], runs)
    for axes in panels.values():
        axes.set_xlim(-0.01 * end / unit, 1.01 * max(end / unit, 1e-9))
        axes.xaxis.set(major_formatter="{x:,.10g}")
        axes.set_xlabel(x_label, fontsize=9)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8.5)
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:] or "png")
    replace_file(path, picture.getvalue())
    return said


def look(i: int, n: int = 0) -> dict:
    """Colour and dash of run number `i`; for `n` points also a mark, at 25 of them at most."""
    mark = dict(marker=MARKS[i % len(MARKS)], markersize=4.5, markevery=max(n // 25, 1)) if n else {}
    return mark | dict(color=COLORS[i % len(COLORS)], linestyle=DASHES[i % len(DASHES)])


def draw_loss(axes, runs: dict[str, Curves], y: str, comparable: bool) -> None:
    """Smoothed training loss, over that of every step if there is only one run; validation loss with marks. The title
    names the best run if all were validated on the same data."""
    alone, tails, last = len(runs) == 1, [], {}
    for i, (label, run) in enumerate(runs.items()):
        (x, losses), (val_x, val) = run["train", "loss"], run["val", "loss"]
        if alone:
            axes.plot(x, losses, color=COLORS[0], alpha=0.25, linewidth=0.8, label="training, each step")
        name = "training, smoothed" if alone else None
        axes.plot(*smoothed(x, losses), color=COLORS[i % len(COLORS)], linewidth=1.5 if alone else 0.8, label=name)
        last |= {label: val[-1]} if len(val) else {}
        name = ("validation" if alone else label) + (f": {last[label]:.3f} at the end" if label in last else "")
        style = look(i, len(val)) | (dict(color=COLORS[2]) if alone else {})  # unlike its own training loss
        axes.plot(val_x, val, linewidth=1.6, label=name, **style)
        # All runs begin with the same steep fall. Scale the axis to what follows the first 5%, where they differ.
        for xs, ys in (smoothed(x, losses), (val_x, val)):
            tails += ys[xs >= 0.95 * xs[0] + 0.05 * xs[-1]].tolist() if len(xs) else []
    margin = 0.05 * (max(tails) - min(tails)) or 0.1
    axes.set_ylim(min(tails) - margin, max(tails) + margin)
    best = min(last, key=last.get, default=None)
    reached = f"{last[best]:.3f}" + ("" if alone else f", reached by {best}") if last else "not measured yet"
    said = reached if comparable else "on different data or tokens, not comparable"
    finish(axes, f"Validation loss: {said}", f"loss ({LOSS_IN[y]})")
    if alone and len(losses):
        draw_start(axes, run)


def draw_start(axes, run: Curves) -> None:
    """Mark where a run starts: ln V, the loss of a uniform guess, and the loss of its first batch, before any training.
    The axis on the right is the same in bits per byte of the validation text."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    for uniform in run["run", "uniform_loss"][1][-1:] if axes.get_ylim()[0] > 0 else ():
        first = run["train", "loss"][1][0]
        axes.axhline(uniform, color="gray", linestyle="--", linewidth=0.8)
        axes.plot(0, first, "D", color=COLORS[3], label=f"before the first step: {first:.2f} (ln V is {uniform:.2f})")
        axes.set(yscale="log", ylim=(axes.get_ylim()[0], 1.05 * max(first, uniform)))  # log: runs differ in their ends
    scales, (nats, bits) = [axes], (run["val", key][1][-1:] for key in ("loss", "bpb"))
    if len(nats) and len(bits) and nats > 0 and bits > 0:
        scales += [axes.secondary_yaxis("right", functions=(lambda y: y * bits / nats, lambda y: y * nats / bits))]
        scales[1].set_ylabel("bits per byte", fontsize=9)
        scales[1].tick_params(labelsize=8.5)
    for scale in scales:
        scale.yaxis.set(major_locator=MaxNLocator(9, steps=(1, 2, 5, 10)), minor_locator=NullLocator())
        scale.yaxis.set(major_formatter="{x:g}")


def draw_references(axes, references, y: str, run: Curves) -> None:
    """Known runs, up to the tokens that `run` has read: a line for one seed, a band from lowest to highest for more."""
    x, tokens = run["train", "tokens"]
    for i, entry in enumerate(known for known in references if y in known and len(x)):
        n = np.linspace(entry["tokens"][0], max(min(entry["tokens"][-1], tokens[-1]), entry["tokens"][0]), POINTS)
        losses = np.array([np.interp(n, entry["tokens"], losses) for losses in entry[y]])  # (runs, POINTS)
        at = np.interp(n, tokens, x)
        axes.fill_between(at, losses.min(axis=0), losses.max(axis=0), color="gray", alpha=0.4)
        axes.plot(at, losses.mean(axis=0), DASHES[i % len(DASHES)], color="gray", label=entry["name"])


def draw_multipliers(axes, runs: dict[str, Curves]) -> list[str]:
    """For each other run, draw and say how many times its FLOPs the first run needs to reach its last loss. The first
    run's curve is interpolated in log-log."""
    measured, said = [(label, *run["val", "loss"]) for label, run in runs.items() if len(run["val", "loss"][0])], []
    for b, x, values in measured[1:]:
        a, flops, losses = measured[0]
        flops, losses, loss = flops[flops > 0], losses[flops > 0], values[-1]
        reached = losses <= loss
        if not reached.any():
            said.append(f"{b} ends at {loss:.4f}, which {a} does not reach: that is beyond {a}'s curve")
            continue
        pair = [reached.argmax(), max(reached.argmax() - 1, 0)]  # the losses around it, rising, as np.interp wants them
        needed = float(np.exp(np.interp(np.log(loss), np.log(losses[pair]), np.log(flops[pair]))))
        axes.plot([x[-1], needed], [loss] * 2, color="gray", linewidth=1)
        axes.text(needed, loss, f" x {needed / x[-1]:.2f}", fontsize=8.5)
        said.append(f"{b} ends at {loss:.4f}; to reach that, {a} needs {needed / x[-1]:.2f} times its FLOPs")
    return said


def draw_scores(axes, runs: dict[str, Curves], key: str) -> None:
    """A score of HellaSwag with its standard error; for accuracies also chance and published models."""
    _, title, scale = SCORES[key]
    for i, (label, run) in enumerate(runs.items()):
        (x, score), (known, error) = run["hellaswag", key], run["hellaswag", f"{key}_stderr"]
        error = np.abs(np.interp(x, known, error)) if len(known) else 0 * x
        name = label + (f": {scale * score[-1]:.4g} ± {scale * error[-1]:.2g} at the end" if len(x) else "")
        axes.errorbar(x, scale * score, scale * error, elinewidth=0.8, label=name, **look(i, len(x)))
    sizes = [size for run in runs.values() for size in run["run", "parameters"][1][-1:]]
    of_one_size = [(name, acc) for name, n, acc in PUBLISHED if any(0.8 <= size / n <= 1.25 for size in sizes)]
    for name, accuracy in [*of_one_size, ("chance", CHANCE)] if key == "acc_norm" else []:
        axes.axhline(100 * accuracy, color="gray", linestyle="--", linewidth=0.8)
        # Curves start near chance on the left and end above it on the right: names go where curves do not.
        side = dict(x=0.995, ha="right", va="top") if name == "chance" else dict(x=0.005, ha="left", va="bottom")
        text = f"{name} {100 * accuracy:.4g}%"
        axes.text(y=100 * accuracy, s=text, fontsize=8, transform=axes.get_yaxis_transform(), **side)
    axes.margins(y=0.12)
    finish(axes, f"HellaSwag: {title}, ± standard error", "accuracy (%)" if key == "acc_norm" else "bits per byte")
    axes.legend(loc="upper left", bbox_to_anchor=(0.16, 1), **LEGEND)


def draw_norm_and_rate(norm, rate, runs: dict[str, Curves]) -> None:
    """The norm on a logarithmic axis, so that a spike shows and the rest stays readable."""
    for i, run in enumerate(runs.values()):
        x, norms = run["train", "grad_norm"]
        x, norms = x[norms > 0], norms[norms > 0]
        if len(runs) == 1:
            norm.plot(x, norms, color=COLORS[0], alpha=0.25, linewidth=0.8)
        norm.plot(*smoothed(x, norms), linewidth=1.2, **look(i))
        rate.plot(*run["train", "lr"], linewidth=1.2, **look(i))
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
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel(unit, fontsize=9)


def plain(label: str) -> str:
    """A label that can be drawn: one line, valid UTF-8, no leading _, which would hide it, and no $ of a formula."""
    return " ".join(os.fsencode(label).decode(errors="replace").split()).lstrip("_").replace("$", r"\$")
