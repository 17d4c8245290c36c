"""The figures of the walk: 900 pixels wide, with a title that says what to see, with units, legible in greyscale.

    with picture("clock", "what to see", "x (unit)", "y (unit)") as axes:
        axes.plot(...)
    curves("residual", "what to see", "x (unit)", "y (unit)", {"label": (x, y), ...})
    runs("run", "what to see", {"label": read_log(Path("out/tiny/log.jsonl")), ...})

They are written to out/pictures/NAME.png; `walk/run.py --write` copies them to walk/. The file's metadata has the
title and a few numbers of everything that it shows, for walk/run.py to compare with those of the picture in walk/.
This file knows nothing of models, only of numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

from parts.curves import CHANCE, PUBLISHED, draw, line_style
from walk.run import PICTURES

WIDTH = 9  # inches, at 100 dots
GREYS = ("#1b4f72", "#e69f00", "#b7d7ea", "#7f7f7f", "#f4e3b5")  # dark and light in turn, so that grey tells them apart


@contextmanager
def picture(name: str, title: str, x: str = "", y: str = "", height: float = 3.6, grid: tuple = (1, 1)) -> Iterator:
    """One Axes, or a list of them in `grid` rows and columns, which is written at the end."""
    figure = Figure(figsize=(WIDTH, height), dpi=100, layout="constrained")
    panels = figure.subplots(*grid, squeeze=False).flatten().tolist()
    if len(title) > 100:
        raise ValueError(f"the title has {len(title)} characters, but there is room for 100: {title}")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes in panels:
        axes.set_xlabel(x, fontsize=10)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9.5)
    panels[0].set_ylabel(y, fontsize=10)
    yield panels[0] if len(panels) == 1 else panels
    for axes in panels:
        if axes.get_legend_handles_labels()[1] and axes.get_legend() is None:
            axes.legend(fontsize=9.5, framealpha=0.85)
    metadata = dict(Title=title, Data=data_of(figure))
    figure.savefig(asset(f"{name}.png"), metadata=metadata, pil_kwargs=dict(optimize=True))


def asset(name: str) -> Path:
    """The path of a picture."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    return PICTURES / name


def data_of(figure: Figure) -> str:
    """A line for each curve, map and set of bars of a figure, with a few of its numbers, and all its texts."""
    lines = []
    for axes in figure.axes:
        for curve in axes.lines:
            x, y = curve.get_data()
            lines.append(f"{curve.get_label()}: {len(y)} points, x {in_brief(x)}, y {in_brief(y)}")
        for drawn in axes.images:
            lines.append(f"{axes.get_title()}: map of {in_brief(drawn.get_array())}")
        boxes = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
        if boxes:
            widths = in_brief([box.width for box in boxes])
            heights = in_brief([box.height for box in boxes])
            lines.append(f"{axes.get_title()}: {len(boxes)} bars, {widths} wide, {heights} high")
        lines += [text.get_text() for text in axes.texts]
    return "\n".join(lines)


def in_brief(values) -> str:
    """The largest size among numbers; as fractions of it the first, the last, the mean, and the mean size."""
    values = np.asarray(values, float).flatten()
    size = np.abs(values).max(initial=0)
    parts = values / (size or 1)
    few = (parts[0], parts[-1], parts.mean(), np.abs(parts).mean()) if len(parts) else ()
    return f"{size:#.4g} x ({', '.join(f'{part:.3f}' for part in few)})"


def plain_ticks(axes, values) -> None:
    """A logarithmic x axis with these values on it, in plain numbers."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.minorticks_off()


def curves(name: str, title: str, x: str, y: str, lines: dict[str, tuple], **scales) -> None:
    """Lines {label: (xs, ys)} with marks; `scales` as Axes.set takes them, such as yscale="log"."""
    with picture(name, title, x, y) as axes:
        for i, (label, (xs, ys)) in enumerate(lines.items()):
            axes.plot(xs, ys, label=label, linewidth=1.5, **line_style(i, len(xs) if len(xs) < 60 else 0))
        axes.set(**scales)
        if scales.get("xscale") == "log":
            plain_ticks(axes, sorted({x for xs, _ in lines.values() for x in xs}))


def side_by_side(name: str, title: str, x: str, units: dict[str, dict[str, tuple]]) -> None:
    """A panel for each unit of y, with its lines {label: (xs, ys)}."""
    with picture(name, title, x, grid=(1, len(units))) as panels:
        for axes, (unit, lines) in zip(panels, units.items(), strict=True):
            for i, (label, (xs, ys)) in enumerate(lines.items()):
                axes.plot(xs, ys, label=label, **line_style(i, len(xs) if len(xs) < 60 else 0))
            axes.set_ylabel(unit, fontsize=10)
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=9.5)  # where no line ends


def runs(name: str, title: str, logs: dict[str, list], x: str = "steps") -> None:
    """Curves of training runs {label: records of its log}, as plot.py draws them, in a smaller file."""
    path = asset(f"{name}.png")
    draw(logs, path, x)
    lines = []
    for label, log in logs.items():
        for kind in ("train", "val"):
            losses = [record["loss"] for record in log if record["kind"] == kind]
            lines.append(f"{label}, {kind}: {len(losses)} points, {in_brief(losses)}")
    info = PngImagePlugin.PngInfo()
    info.add_text("Title", title)
    info.add_text("Data", "\n".join(lines))
    Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(path, optimize=True, pnginfo=info)


def bars(axes, values: dict[str, float], form: str = "{:,.3g}", color: str = GREYS[0]) -> None:
    """Horizontal bars {label: length}, each with its number."""
    drawn = axes.barh(list(values), list(values.values()), color=color)
    axes.bar_label(drawn, [" " + form.format(value) for value in values.values()], fontsize=9.5)
    axes.set_xlim(0, 1.18 * max(values.values()))
    axes.invert_yaxis()


def stacked(axes, rows: dict[str, dict[str, float]]) -> None:
    """A bar for each row {label: {part: length}}, with its parts side by side."""
    left = np.zeros(len(rows))
    for color, part in zip(GREYS, next(iter(rows.values())), strict=False):
        width = np.array([row[part] for row in rows.values()])
        axes.barh(list(rows), width, left=left, label=part, color=color, edgecolor="black", linewidth=0.5)
        left += width
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=5, fontsize=9.5)


# --------------------------------------------------------------------------------------- each for one station


def boxes(axes, title: str, places: dict[str, tuple], arrows: list[tuple]) -> None:
    """Text in boxes {text: (x, y)}, and arrows (from, to, bend) between them."""
    axes.set(xlim=(0, 1), ylim=(0, 1))
    axes.axis("off")
    axes.set_title(title, fontsize=10)
    drawn = {}
    for text, at in places.items():
        box = dict(boxstyle="round", facecolor="white" if len(text.strip()) < 13 else GREYS[2], edgecolor="black")
        drawn[text] = axes.text(*at, text.strip(), ha="center", va="center", fontsize=9, bbox=box, zorder=3)
    for start, end, bend in arrows:
        ends = dict(patchA=drawn[start].get_bbox_patch(), patchB=drawn[end].get_bbox_patch(), shrinkA=0, shrinkB=1)
        style = dict(arrowstyle="->", connectionstyle=f"arc3,rad={bend}", **ends)
        axes.annotate("", places[end], places[start], arrowprops=style, zorder=4)


def blocks(title: str) -> None:
    """A block of GPT-2, and one of the first transformer."""
    attention, mlp = "attention: Q, K, V (B, H, T, D)", "MLP: (B, T, C) to (B, T, 4C), back"
    pre = ["x (B, T, C)", "LayerNorm", attention, "+", "LayerNorm ", mlp, "+ "]
    post = ["x (B, T, C)", attention, "+", "LayerNorm", mlp, "+ ", "LayerNorm "]
    forms = {"pre-norm: GPT-2": (pre, "+", 1.7), "post-norm: the first transformer": (post, "LayerNorm", 2.3)}
    with picture("blocks", title, height=4.4, grid=(1, 2)) as panels:
        for axes, (name, (parts, second, bend)) in zip(panels, forms.items(), strict=True):
            places = {part: (0.5, 0.04 + 0.15 * i) for i, part in enumerate(parts)}
            arrows = [(start, end, 0) for start, end in zip(parts[:-1], parts[1:], strict=True)]
            boxes(axes, name, places, arrows + [("x (B, T, C)", "+", bend), (second, "+ ", bend)])


def bypass(title: str) -> None:
    places = {"x (in)": (0.5, 0.06), "W (out, in), frozen": (0.25, 0.45), "A (r, in), random": (0.72, 0.3)}
    places |= {"B (out, r), zero at first": (0.72, 0.62), "+": (0.5, 0.9)}
    arrows = [("x (in)", "W (out, in), frozen"), ("x (in)", "A (r, in), random"), ("W (out, in), frozen", "+")]
    arrows += [("A (r, in), random", "B (out, r), zero at first"), ("B (out, r), zero at first", "+")]
    with picture("bypass", title, height=2.9) as axes:
        boxes(axes, "y = W x + (alpha / r) B A x", places, [(*arrow, 0) for arrow in arrows])


def memory(title: str, gb: dict[str, dict[str, float]], cards: tuple[int, ...]) -> None:
    """A bar for each model {name: {kind: GB}}, and a line for each size of card."""
    with picture("memory", title, "GB on one GPU, AdamW", height=2.9) as axes:
        stacked(axes, gb)
        axes.set_xlim(0, 1.1 * max(cards))
        for card in cards:
            axes.axvline(card, color="black", linestyle=":")
            axes.text(card + 0.5, 0, f"{card} GB", fontsize=9)


def gradients(title: str, labels: dict[str, np.ndarray]) -> None:
    """How often each size occurs among the gradients {label: of any sign}."""
    with picture("fp16", title, "log2 of a gradient's size", "gradients") as axes:
        for color, (label, values) in zip(GREYS, labels.items(), strict=False):
            sizes = np.log2(np.maximum(np.abs(values), 2.0**-40))
            axes.hist(sizes, 120, color=color, label=label)
        axes.axvline(-25, color="black", linestyle="--", label="below 2^-25 FP16 rounds to 0")
        axes.axvline(-14, color="black", linestyle=":", label="below 2^-14 FP16 loses precision")
        axes.legend(loc="upper left", fontsize=9.5)


def resumed_run(title: str, whole: dict[int, float], resumed: dict[int, float], killed: int, checkpoint: int) -> None:
    """The losses {step: loss} of a run that was interrupted after step `killed` over those of one that was not."""
    with picture("resume", title, "step", "training loss (nats)") as axes:
        axes.plot(list(whole), list(whole.values()), linewidth=4, color=GREYS[2], label="not interrupted")
        axes.plot(list(resumed), list(resumed.values()), linewidth=1.2, color="black", label="killed, then resumed")
        axes.axvline(killed, color=GREYS[1], label="kill -9")
        axes.axvline(checkpoint, color="gray", linestyle=":", label="the checkpoint it continues from")


def losses_by_rank(title: str, ranks: tuple[int, ...], found: dict[str, list[list[float]]]) -> None:
    """Losses {rule: for each rank, those of all seeds}."""
    with picture("alpha", title, "rank (log)", "validation loss (nats per answer token)") as axes:
        for i, (rule, losses) in enumerate(found.items()):
            labels = [f"{rule}, a line for each seed"] + [""] * (len(losses[0]) - 1)
            axes.plot(ranks, losses, label=labels, **line_style(i, len(ranks)))
        plain_ticks(axes, ranks)


def order_of_windows(title: str, epochs: dict, ranks: dict) -> None:
    """Each epoch (steps, rows) in colours; white lines separate the ranks of each step."""
    label = "row of the global batch; white lines separate ranks"
    with picture("order", title, "step", label, 4.2, grid=(1, 4)) as panels:
        for axes, (name, epoch) in zip(panels, epochs.items(), strict=True):
            drawn = axes.imshow(epoch.T, aspect="auto", cmap="viridis", interpolation="nearest")
            axes.set_title(name, fontsize=10)
            axes.grid(False)
            for step, n in enumerate(ranks[name]):
                axes.hlines(np.arange(1, n) * 32 / n - 0.5, step - 0.5, step + 0.5, color="white", linewidth=3)
        panels[-1].figure.colorbar(drawn, label="number of the window in the text")


def bits_of_formats(title: str, formats: dict[str, tuple]) -> None:
    with picture("bits", title, "bit: s sign, e exponent, m mantissa", height=2.9) as axes:
        for row, (exponent, mantissa) in enumerate(formats.values()):
            for at, letter in enumerate("s" + "e" * exponent + "m" * mantissa):
                color = {"s": "black", "e": GREYS[0], "m": GREYS[2]}[letter]
                axes.barh(row, 0.9, left=at, color=color, edgecolor="black", linewidth=0.5)
                ink = "black" if letter == "m" else "white"
                axes.text(at + 0.45, row, letter, ha="center", va="center", fontsize=9.5, color=ink)
        axes.set_yticks(range(len(formats)), formats)
        axes.invert_yaxis()
        axes.grid(False)


def attention_maps(title: str, maps: dict[str, np.ndarray], words: list[str]) -> None:
    """Weights (T, T) of each head, of two rows and as many columns as it takes."""
    columns, places = len(maps) // 2, range(len(words))
    with picture("attention_maps", title, height=8.4, grid=(2, columns)) as panels:
        for i, (axes, (name, weights)) in enumerate(zip(panels, maps.items(), strict=True)):
            axes.imshow(weights, cmap="Greys", vmin=0, vmax=1, aspect="auto")
            axes.set_title(name, fontsize=10)
            axes.set_yticks(places, words if i % columns == 0 else [""] * len(words), fontsize=9)
            axes.set_xticks(places, words if i >= columns else [""] * len(words), fontsize=9, rotation=90)
            axes.grid(False)


def hellaswag_errors(title: str, rows: np.ndarray) -> None:
    with picture("error", title, "rows of HellaSwag (log)", "accuracy (%)") as axes:
        axes.axhline(100 * CHANCE, color="black", linestyle=":", label="chance")
        for i, (name, _, p) in enumerate(PUBLISHED[:3]):
            error = 200 * np.sqrt(p * (1 - p) / rows)
            at = rows * (0.97 + 0.03 * i)
            axes.errorbar(at, [100 * p] * len(rows), error, capsize=4, label=name, **line_style(i, 7))
        plain_ticks(axes, rows)
        axes.set_ylim(18, 68)
        axes.legend(ncols=4, loc="upper right", fontsize=9.5)


def hellaswag_runs(title: str, scores: dict[str, list]) -> None:
    """A panel for each task, with the accuracy over steps, two standard errors, of a log's records of hellaswag."""
    unit = "accuracy (%), ± 2 standard errors"
    with picture("hellaswag", title, "step", unit, height=3.8, grid=(1, len(scores))) as panels:
        for i, (axes, (name, records)) in enumerate(zip(panels, scores.items(), strict=True)):
            keys = ("step", "acc_norm", "acc_norm_stderr")
            steps, accuracy, error = (np.array([record[key] for record in records]) for key in keys)
            axes.errorbar(steps, 100 * accuracy, 200 * error, capsize=3, label=name, **line_style(i, 12))
            axes.axhline(100 * CHANCE, color="black", linestyle=":", label="chance")
            axes.set_ylim(15, 45)
        panels[-1].axhline(100 * PUBLISHED[0][2], color="gray", linestyle="--", label="GPT-2 124M, all rows")


def differences(title: str, columns: dict[str, dict[str, list]]) -> None:
    """A panel for each column, with the points {change: [difference of each seed]} and a bar at their mean."""
    unit = "validation loss less the recipe's (nats)"
    with picture("undone", title, unit, height=4.2, grid=(1, len(columns))) as panels:
        for axes in panels[1:]:
            axes.sharex(panels[0])
        for axes, (name, rows) in zip(panels, columns.items(), strict=True):
            axes.set_title(name, fontsize=10)
            for y, over in enumerate(rows.values()):
                axes.plot(over, [y] * len(over), "o", color="white", markeredgecolor="black", markersize=7)
                axes.plot(np.mean(over), y, "|", color="black", markersize=16, markeredgewidth=3)
            axes.axvline(0, color="black", linestyle=":")
            axes.set_yticks(range(len(rows)), list(rows) if axes is panels[0] else [""] * len(rows))
            axes.invert_yaxis()
