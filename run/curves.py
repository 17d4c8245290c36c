"""Curves of one run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

    draw({"gpt2": read_log(Path("out/gpt2/log.jsonl"))}, Path("learning_curve.png"))

This file knows nothing of torch or models: all that it sees is the records of a log.
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

COLUMNS = 800  # about the pixels that a panel is wide: more points than that cannot be seen
# Okabe and Ito's colours (2008), which the colour-blind tell apart; so do dashes and marks on a grey print.
COLORS = ("#0072B2", "#E69F00", "#000000", "#D55E00", "#56B4E9", "#009E73", "#CC79A7")
DASHES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
LARGEST = 1e30  # matplotlib fails on axes beyond that
DRAWN = {"run": ("parameters", "flops_per_token"), "train": ("loss", "grad_norm", "lr", "tokens", "dt_ms", "skipped"),
         "val": ("loss",), "hellaswag": ("acc_norm", "acc", "n")}  # fmt: skip
CHANCE = 0.25  # HellaSwag has four endings
# Name, parameters, accuracy with lengths normalised. GPT-2: the released weights as `hellaswag.py --style completion`
# scores them. GPT-3: Brown et al. 2020, table H.1, zero-shot.
PUBLISHED = (
    ("GPT-2 124M", 124e6, 0.2955), ("GPT-2 XL", 1558e6, 0.4893), ("GPT-3 Small", 125e6, 0.337),
    ("GPT-3 Medium", 350e6, 0.436), ("GPT-3 Large", 760e6, 0.510), ("GPT-3 XL", 1300e6, 0.547),
)  # fmt: skip
SAME_SIZE = 1.25  # a published model is drawn beside a run that is smaller or larger by this factor at most
# The largest unit of which the longest run has two names the axis.
UNITS = {
    "steps": [(1, "step")],
    "tokens": [(1e12, "trillions of tokens"), (1e9, "billions of tokens"), (1e6, "millions of tokens"), (1, "tokens")],
    "seconds": [(86400, "days of training"), (3600, "hours of training"), (60, "minutes of training"),
                (1, "seconds of training")],
    "flops": [(1e21, "zettaFLOPs of training"), (1e18, "exaFLOPs of training"), (1e15, "petaFLOPs of training"),
              (1e12, "teraFLOPs of training"), (1, "FLOPs of training")],
}  # fmt: skip


def read_log(path: Path) -> Records:
    """The records of a log.jsonl, in its order: each a dict with a `kind` and a whole number as its `step`.

    Damaged lines, wherever they are, are left out; one warning on stderr names them. Raises UserError without a file.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: U+2028 and the like may stand inside a JSON string
    except FileNotFoundError:
        raise UserError(f"there is no {path}; give the directory of a run, or its log.jsonl") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory; give the directory of a run, or its log.jsonl") from None
    records, damaged = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
            if not is_record(record):
                raise ValueError("not a record")
            records.append(record)
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged.append(number)
    if damaged:
        which = ", ".join(map(str, damaged[:5])) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        print(f"warning: {path}: left out what is damaged: line {which}", file=sys.stderr, flush=True)
    return records


def is_record(record: dict) -> bool:
    """True for a step and a kind with what a record of that kind has. A number that was not finite is null."""
    kind, step = record["kind"], record["step"]
    if not isinstance(kind, str) or type(step) is not int or abs(step) > 1e15:
        return False
    numbers = [record.get(name) for name in ("loss", "dt_ms", "tokens_per_sec")]
    if not all(number is None or type(number) in (int, float) for number in numbers):
        return False
    needed = dict(train="loss", val="loss", sample="text").get(kind)
    return needed in (None, *record) and isinstance(record.get("text", ""), str)


def draw(runs: dict[str, Records], path: Path, x: str = "steps") -> None:
    """Draw {label: records} into one picture, which replaces `path` once it is whole; nothing where there is no loss.

    May be called by any thread: it uses Figure itself, not pyplot, whose figures are global. Raises UserError for logs
    that do not say what `x` needs.
    """
    from matplotlib.figure import Figure  # half a second, which --help and the start of a training run save
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    runs = {label: figures_of(records) for label, records in runs.items()}
    if not any(map(has_loss, runs.values())):
        return
    x_of, x_label, end = common_axis(runs, x)
    hellaswag = any(len(run["hellaswag", "acc_norm"][0]) for run in runs.values())
    # all sizes in inches, not found by matplotlib, which would draw everything twice for that
    rows, gap, top, bottom = [3.5, 2.1, 1.6] if hellaswag else [3.5, 1.6], 0.72, 0.32, 0.48
    height = sum(rows) + gap * (len(rows) - 1) + top + bottom
    figure = Figure(figsize=(9, height), dpi=100)
    grid = figure.add_gridspec(
        len(rows), 2, height_ratios=rows, left=0.075, right=0.98, top=1 - top / height, bottom=bottom / height,
        hspace=gap * len(rows) / sum(rows), wspace=0.2,
    )  # fmt: skip
    wide = [figure.add_subplot(grid[row, :]) for row in range(len(rows) - 1)]
    norm, rate = (figure.add_subplot(grid[-1, column]) for column in (0, 1))
    draw_loss(wide[0], runs, x_of)
    if hellaswag:
        draw_hellaswag(wide[1], runs, x_of)
    draw_gradient_norm(norm, runs, x_of)
    draw_learning_rate(rate, runs, x_of)
    for axes in (*wide, norm, rate):
        axes.set_xlim(-0.01 * end, 1.01 * end)
        axes.xaxis.set_major_locator(MaxNLocator(7 if axes in wide else 4, steps=(1, 2, 2.5, 5, 10)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.set_xlabel(x_label, fontsize=9)
    picture = io.BytesIO()
    # the default level takes longer, for a file that is 4% smaller
    quick = dict(pil_kwargs=dict(compress_level=1)) if path.suffix == ".png" else {}
    figure.savefig(picture, format=path.suffix[1:] or "png", **quick)
    replace_file(path, picture.getvalue())


# ------------------------------------------------------------------------------------------------- from records to x


def figures_of(records: Records) -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """{(kind, key): (steps, values)} of all that is drawn, in the order of steps, without what cannot be drawn.

    That is null, as a skipped step has it for its loss, nan and infinity, and whatever else stands in a damaged log.
    """
    found = {(kind, key): ([], []) for kind, keys in DRAWN.items() for key in keys}
    for record in sorted(records, key=lambda record: record["step"]):
        for key in DRAWN.get(record["kind"], ()):
            if isinstance(value := record.get(key), int | float) and abs(value) < LARGEST:
                steps, values = found[record["kind"], key]
                steps.append(record["step"])
                values.append(value)
    return {what: (np.array(steps, float), np.array(values, float)) for what, (steps, values) in found.items()}


def has_loss(run: dict) -> bool:
    return any(len(run[kind, "loss"][0]) for kind in ("train", "val"))


def fact(run: dict, key: str) -> float:
    """A number of the newest record `run`, nan where there is none."""
    values = run["run", key][1]
    return values[-1] if len(values) else math.nan


def position(run: dict, x: str, label: str) -> Callable:
    """The function that turns steps into what they are drawn over. Raises UserError where the log does not say that."""
    if x == "steps":
        return lambda steps: steps
    # the time of a step is its own, so that a run that was stopped and resumed has only the time it trained
    key = "dt_ms" if x == "seconds" else "tokens"
    steps, reached = run["train", key]
    scale = fact(run, "flops_per_token") if x == "flops" else 1.0
    if not len(steps) or math.isnan(scale):
        lacking = f'"{key}" in its train records' if not len(steps) else '"flops_per_token" in its record "run"'
        raise UserError(f"--x {x}: the log of {label} has no {lacking}, as logs of earlier versions; use --x steps")
    reached = np.cumsum(reached) / 1e3 if x == "seconds" else reached * scale
    # an evaluation has no tokens of its own: it stands where the training step of its number stands
    return lambda wanted: np.interp(wanted, np.append(0, steps), np.append(0, reached))


def common_axis(runs: dict[str, dict], x: str) -> tuple[dict[str, Callable], str, float]:
    """({label: function that turns steps into x}, name of x, where the longest run ends), in a unit that suits it."""
    x_of = {label: position(run, x, label) for label, run in runs.items()}
    end = max(float(x_of[label](steps.max())) for label, run in runs.items() for steps, _ in run.values() if len(steps))
    size, name = next(((size, name) for size, name in UNITS[x] if end >= 2 * size), UNITS[x][-1])
    return {label: lambda steps, f=f: f(steps) / size for label, f in x_of.items()}, name, max(end / size, 1e-9)


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, lowest, median, highest) of the points in each of COLUMNS columns; columns without a point are left out."""
    if not len(x):
        return x, y, y, y
    column = np.floor((x - x.min()) / (np.ptp(x) or 1) * (COLUMNS - 1))
    order = np.lexsort((y, column))  # by column, and by y within it, so that the median of each stands in its middle
    x, y = x[order], y[order]
    first = np.flatnonzero(np.diff(column[order], prepend=-1))
    last = np.append(first[1:], len(y)) - 1
    return np.minimum.reduceat(x, first), y[first], y[(first + last) // 2], y[last]


def smoothed(y: np.ndarray) -> list[float]:
    """Running median over 2% of the points on either side: unlike an average it does not lag or follow a spike."""
    n, reach, y = len(y), len(y) // 50 + 1, y.tolist()
    reaches = (min(reach, i) for i in range(n))  # shorter at the beginning, or the first drop would vanish
    return [statistics.median(y[i - r : i + r + 1]) for i, r in enumerate(reaches)]


# -------------------------------------------------------------------------------------------------------- the panels


def look(i: int) -> dict:
    """Colour and dash of run number `i`."""
    return dict(color=COLORS[i % len(COLORS)], linestyle=DASHES[i % len(DASHES)])


def marked(i: int, n: int) -> dict:
    """The look of run `i` with a mark at its points, at 25 of `n` where there are more."""
    return dict(look(i), marker=MARKS[i % len(MARKS)], markersize=4.5, markevery=max(n // 25, 1))


def draw_loss(axes, runs: dict[str, dict], x_of: dict[str, Callable]) -> None:
    """Training loss, smoothed, and its raw range where there is room for it; validation loss with marks."""
    from matplotlib.lines import Line2D

    alone, lines, labels, curves, last = len(runs) == 1, [], [], [], {}
    for i, (label, run) in enumerate(runs.items()):
        steps, losses = run["train", "loss"]
        val_steps, val_losses = run["val", "loss"]
        x, low, median, high = thin(x_of[label](steps), losses)
        curves += [(x, smoothed(median)), (x_of[label](val_steps), val_losses)]
        axes.plot(*curves[-2], color=COLORS[i % len(COLORS)], linewidth=1.5 if alone else 0.8)
        # beside its own training loss a validation needs another colour; beside other runs each has its own
        style = marked(i, len(val_steps)) if not alone else marked(2, len(val_steps)) | {"linestyle": "-"}
        lines += axes.plot(*curves[-1], linewidth=1.6, **style)
        last |= {label: val_losses[-1]} if len(val_losses) else {}
        labels.append(("validation" if alone else label) + (f": {last[label]:.3f} at the end" if label in last else ""))
    if alone:
        band = axes.fill_between(x, low, high, color=COLORS[0], alpha=0.25, linewidth=0.8)
        curves += [(x, smoothed(low)), (x, smoothed(high))]
        keys = {"training, each step": band, "training, smoothed": Line2D([], [], color=COLORS[0])}
        title = f"{last[label]:.3f} after {val_steps[-1]:,.0f} steps" if last else "not measured yet"
        title = f"Validation loss: {title}"
    else:
        keys = {"training, smoothed": Line2D([], [], color="gray", linewidth=0.8),
                "validation": Line2D([], [], color="gray", marker="o", markersize=4.5)}  # fmt: skip
        best = min(last, key=last.get, default=None)
        title = f"Validation loss: {best} ends lowest, at {last[best]:.3f}" if last else "Training loss"
    legend(axes, [*keys.values(), *lines], [*keys, *labels], loc="upper right")
    leave_out_the_first_drop(axes, curves)
    finish(axes, title, "loss (nats per token)")


def leave_out_the_first_drop(axes, curves: list[tuple]) -> None:
    """All runs fall from the same height at once, and differ in what follows: show each from 5% of its length on."""
    tails = [np.asarray(y)[x >= x[0] + 0.05 * (x[-1] - x[0])] for x, y in curves if len(x)]
    low, high = min(map(np.min, tails)), max(map(np.max, tails))
    margin = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def draw_hellaswag(axes, runs: dict[str, dict], x_of: dict[str, Callable]) -> None:
    """Accuracy in percent with its standard error, chance, and published models of the runs' own sizes."""
    lines, labels = [], []
    for i, (label, run) in enumerate(runs.items()):
        shown = {"acc_norm": label} if len(runs) > 1 else {"acc_norm": "lengths normalised", "acc": "sums"}
        for j, (key, name) in enumerate(shown.items()):
            steps, accuracy = run["hellaswag", key]
            counted, n = run["hellaswag", "n"]
            n = np.interp(steps, counted, n) if len(n) else np.full(len(steps), np.nan)
            # of a mean of n answers, each of which is right (1) or wrong (0)
            error = np.sqrt(np.clip(accuracy * (1 - accuracy), 0, None) / np.maximum(n, 1))
            style = marked(i + j, len(steps))
            lines.append(axes.errorbar(x_of[label](steps), 100 * accuracy, 100 * error, elinewidth=0.8, **style))
            plus_minus = f" ± {error[-1]:.1%}" if len(steps) and math.isfinite(error[-1]) else ""
            labels.append(f"{name}: {accuracy[-1]:.1%}{plus_minus} at the end" if len(steps) else name)
    sizes = [fact(run, "parameters") for run in runs.values()]
    for name, _, accuracy in (*published(sizes), ("chance", None, CHANCE)):
        axes.axhline(100 * accuracy, color="gray", linestyle="--", linewidth=0.8)
        # curves begin near chance at the left and end above it at the right: names stand where they are not
        side = dict(x=0.995, ha="right", va="top") if accuracy == CHANCE else dict(x=0.005, ha="left", va="bottom")
        text = f"{name} {100 * accuracy:.4g}%"
        axes.text(y=100 * accuracy, s=text, fontsize=8, transform=axes.get_yaxis_transform(), **side)
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.06 * (high - low), high + 0.1 * (high - low))
    axes.yaxis.get_major_locator().set_params(nbins=5)
    legend(axes, lines, labels, loc="upper left", bbox_to_anchor=(0.16, 1), ncols=1 + (len(lines) > 4))
    finish(axes, "HellaSwag: how often the right ending of four is the likeliest, ± standard error", "accuracy (%)")


def published(sizes: list[float]) -> list[tuple[str, float, float]]:
    """The rows of PUBLISHED that are about as large as one of `sizes`, which are numbers of parameters."""
    return [row for row in PUBLISHED if any(1 / SAME_SIZE <= size / row[1] <= SAME_SIZE for size in sizes)]


def draw_gradient_norm(axes, runs: dict[str, dict], x_of: dict[str, Callable]) -> None:
    """On a logarithmic axis, where a spike shows and the rest stays readable."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    skipped = sum(len(run["train", "skipped"][0]) for run in runs.values())
    for i, (label, run) in enumerate(runs.items()):
        steps, norms = run["train", "grad_norm"]
        x, low, median, high = thin(x_of[label](steps[norms > 0]), norms[norms > 0])
        if len(runs) == 1:
            axes.fill_between(x, low, high, color=COLORS[0], alpha=0.25, linewidth=0.8)
        axes.plot(x, smoothed(median), linewidth=1.2, **look(i))
    if axes.dataLim.height > 0:
        low, high = axes.dataLim.intervaly
        wider = max(1.1, math.sqrt(3 * low / high))  # a factor of three holds one tick at least
        axes.set(yscale="log", ylim=(low / wider, high * wider))
        axes.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), minor_locator=NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    title = "Gradient norm before clipping" + (f"; {skipped:,} steps skipped" if skipped else "")
    finish(axes, title, "norm (log)")


def draw_learning_rate(axes, runs: dict[str, dict], x_of: dict[str, Callable]) -> None:
    for i, (label, run) in enumerate(runs.items()):
        steps, rates = run["train", "lr"]
        x, _, median, _ = thin(x_of[label](steps), rates)
        axes.plot(x, median, linewidth=1.2, **look(i))
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(nbins=4)
    finish(axes, "Learning rate", "")


def finish(axes, title: str, unit: str) -> None:
    # y is given, or matplotlib measures all labels twice to find it
    axes.set_title(plain(title), loc="left", y=1.01, fontsize=10, fontweight="bold", parse_math=False)
    axes.set_ylabel(unit, fontsize=9)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8.5)


def legend(axes, lines: list, labels: list[str], **place) -> None:
    for text in axes.legend(lines, list(map(plain, labels)), fontsize=8.5, framealpha=0.85, **place).get_texts():
        text.set_parse_math(False)  # the name of a directory may hold a $


def plain(text: str) -> str:
    """A label that any font takes: one line, and no bytes that were not UTF-8 in the name of a directory."""
    return " ".join(os.fsencode(text).decode(errors="replace").split()).lstrip("_")
