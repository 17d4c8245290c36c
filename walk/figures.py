"""The walk's figures: 900 pixels wide, with units and a title that says what to see, legible in greyscale.

    with picture("clock", "what to see", "x (unit)", "y (unit)") as axes:
        axes.plot(...)
    curves("residual", "what to see", "x (unit)", "y (unit)", {"label": (x, y), ...})
    runs("run", "what to see", {"label": read_log(Path("out/tiny/log.jsonl")), ...})

First comes what several figures share, then a function for each figure, in the order of the page. They are written to
out/pictures/NAME.png; `walk/run.py --write` copies them to walk/. The file's metadata has the title and a few numbers
of everything that it shows, for walk/run.py to compare with those of the picture in walk/. This file knows nothing of
models, only of numbers.
"""

import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, PngImagePlugin

from bpe import try_tokenizer
from parts.curves import COLORS, picture as picture_of_runs
from walk.run import PICTURES

WIDTH = 9  # inches, at 100 dots
COLUMNS = 96  # of tokens.svg: Latin letters in a row
COLUMN = 9  # pixels of a letter
ROW = 24  # pixels of a row
# Accuracy on HellaSwag, lengths normalised. GPT-2: as `hellaswag.py --style completion` scores the released weights.
# GPT-3: Brown et al. 2020, table H.1, zero-shot.
PUBLISHED = {"GPT-2 124M": 0.2955, "GPT-2 XL": 0.4893, "GPT-3 Small": 0.337}
GREYS = ("#1b4f72", "#e69f00", "#b7d7ea", "#7f7f7f", "#f4e3b5")  # dark and light in turn, so that grey tells them apart


@contextmanager
def picture(name: str, title: str, x: str = "", y: str = "", height: float = 3.6, grid: tuple = (1, 1)) -> Iterator:
    """Yield one Axes, or a list of them in `grid` rows and columns; write the picture at the end."""
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
    """Return a picture's path."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    return PICTURES / name


def data_of(figure: Figure) -> str:
    """Describe a figure: a line with a few numbers for each curve, map and set of bars, and all texts."""
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
    """Return the largest size among numbers; as fractions of it the first, the last, the mean, and the mean size."""
    values = np.asarray(values, float).flatten()
    size = np.abs(values).max(initial=0)
    parts = values / (size or 1)
    few = (parts[0], parts[-1], parts.mean(), np.abs(parts).mean()) if len(parts) else ()
    return f"{size:#.4g} x ({', '.join(f'{part:.3f}' for part in few)})"


def plain_ticks(axes, values) -> None:
    """Make the x axis logarithmic, with these values in plain numbers."""
    axes.set_xscale("log")
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.minorticks_off()


def line_style(i: int, n: int) -> dict:
    """Return the style of line number `i`; its `n` points get marks if they are few."""
    style = dict(color=COLORS[i % len(COLORS)], linestyle="-" if i < len(COLORS) else "--")
    if n < 60:
        style |= dict(marker="o", markersize=4.5, markevery=max(n // 25, 1))
    return style


def curves(name: str, title: str, x: str, y: str, lines: dict[str, tuple], **scales) -> None:
    """Draw lines {label: (xs, ys)}; `scales` go to Axes.set, such as yscale="log"."""
    with picture(name, title, x, y) as axes:
        for i, (label, (xs, ys)) in enumerate(lines.items()):
            axes.plot(xs, ys, label=label, linewidth=1.5, **line_style(i, len(xs)))
        axes.set(**scales)
        if scales.get("xscale") == "log":
            plain_ticks(axes, sorted({x for xs, _ in lines.values() for x in xs}))


def side_by_side(name: str, title: str, x: str, units: dict[str, dict[str, tuple]]) -> None:
    """Draw a panel for each unit of y, with its lines {label: (xs, ys)}."""
    with picture(name, title, x, grid=(1, len(units))) as panels:
        for axes, (unit, lines) in zip(panels, units.items(), strict=True):
            for i, (label, (xs, ys)) in enumerate(lines.items()):
                axes.plot(xs, ys, label=label, **line_style(i, len(xs)))
            axes.set_ylabel(unit, fontsize=10)
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize=9.5)  # where no line ends


def runs(name: str, title: str, logs: dict[str, list], x: str = "steps") -> None:
    """Draw training runs {label: records of its log} as plot.py does, in a smaller file."""
    path = asset(f"{name}.png")
    path.write_bytes(picture_of_runs(logs, "png", x))
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


def tokens(tokenizers: dict, sentences: tuple[str, ...]) -> None:
    """The tokens of each sentence in each tokenizer {name: tokenizer}, as an SVG."""
    rows = []
    for sentence in sentences:
        for name, tok in tokenizers.items():
            rows.append(try_tokenizer.split_up(name, tok, sentence))
    asset("tokens.svg").write_text(svg_of(rows), encoding="utf-8")


def svg_of(results: list[tuple[str, list[str]]]) -> str:
    """Tokens as coloured boxes. The viewer's own fonts draw the letters, so none has to be installed here."""
    colors = try_tokenizer.COLORS
    parts = []
    y = 20  # the baseline of a line of text
    for title, pieces in results:
        parts.append(f'<text x="0" y="{y}" font-weight="bold" font-family="sans-serif">{escape(title)}</text>')
        x = 0
        y += 26
        for i, piece in enumerate(pieces):
            w = width(piece) * COLUMN
            if x and x + w > COLUMNS * COLUMN:
                x = 0
                y += ROW
            box = f'x="{x}" y="{y - 16}" width="{w}" height="{ROW - 2}" fill="{colors[i % len(colors)]}" stroke="#fff"'
            # textLength: East Asian fonts are not exactly two columns wide
            fit = f'x="{x}" y="{y}" textLength="{w}" lengthAdjust="spacingAndGlyphs"'
            parts.append(f"<rect {box}/><text {fit}>{escape(piece)}</text>")
            x += w
        y += 40
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -4 {COLUMNS * COLUMN + 20} {y - 20}"'
    style = 'width="900" font-family="monospace" font-size="15" style="background:#fff" xml:space="preserve">'
    # as well as xml:space: some browsers follow only one of the two and would drop the space that a token begins with
    lines = [f"{head} {style}", "<style>text { white-space: pre }</style>", *parts, "</svg>\n"]
    return "\n".join(lines)


def width(text: str) -> int:
    """Columns of a text in a fixed-width font, in which East Asian characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def blocks() -> None:
    """A block of GPT-2, and one of the first transformer."""
    title = "Each block adds to the stream twice; GPT-2 normalizes what a branch reads, not the sum"
    attention, mlp = "attention: Q, K, V (B, H, T, D)", "MLP: (B, T, C) to (B, T, 4C), back"
    pre = ["x (B, T, C)", "LayerNorm", attention, "+", "LayerNorm ", mlp, "+ "]
    post = ["x (B, T, C)", attention, "+", "LayerNorm", mlp, "+ ", "LayerNorm "]
    forms = {"pre-norm: GPT-2": (pre, "+", 1.7), "post-norm: the first transformer": (post, "LayerNorm", 2.3)}
    with picture("blocks", title, height=4.4, grid=(1, 2)) as panels:
        for axes, (name, (parts, second, bend)) in zip(panels, forms.items(), strict=True):
            places = {part: (0.5, 0.04 + 0.15 * i) for i, part in enumerate(parts)}
            arrows = [(start, end, 0) for start, end in zip(parts[:-1], parts[1:], strict=True)]
            boxes(axes, name, places, arrows + [("x (B, T, C)", "+", bend), (second, "+ ", bend)])


def one_batch(good: list[float], bad: list[float]) -> None:
    """Losses of two runs on one batch, of which the second has a bug."""
    title = "A healthy model memorizes one batch; with the bug it learns only token frequencies"
    steps = range(len(good))
    lines = {"inputs and targets": (steps, good), "the bug: targets in another order each step": (steps, bad)}
    curves("one_batch", title, "step", "loss (nats per token, log)", lines, yscale="log")


def run(log: list[dict]) -> None:
    runs("run", "The curve of a run: in its first epoch training and validation are one line", {"tiny": log})


def attention_maps(heads: dict[str, np.ndarray], found: dict[str, tuple], words: list[str]) -> None:
    """Weights (T, T) of the heads that are `found`, {kind of token: (head, share, share in uniform attention)}."""
    title = "What three heads look at: row by row, the weights of a token (white is 0, black is 1)"
    labels = {}
    for kind, (head, share, uniform) in found.items():
        labels.setdefault(head, []).append(f"{kind}: {share:.2f}, uniform {uniform:.2f}")
    places = range(len(words))
    with picture("attention_maps", title, height=4.8, grid=(1, len(labels))) as panels:
        for i, (axes, (head, lines)) in enumerate(zip(panels, labels.items(), strict=True)):
            axes.imshow(heads[head], cmap="Greys", vmin=0, vmax=1, aspect="auto")
            axes.set_title("\n".join(lines), fontsize=9.5)
            axes.set_yticks(places, words if i == 0 else [""] * len(words), fontsize=8.5)
            axes.set_xticks(places, words, fontsize=8.5, rotation=90)
            axes.grid(False)


def sampling(draws: dict[str, dict[str, float]]) -> None:
    """A panel for each way of sampling {name: {token: percent}}."""
    title = "One distribution, and what three ways of sampling leave of it"
    with picture("sampling", title, "draws (%)", height=3, grid=(1, len(draws))) as panels:
        for axes, (name, shares) in zip(panels, draws.items(), strict=True):
            bars(axes, shares, "{:.0f}")
            axes.set_title(name, fontsize=10)


def parameters(rows: dict[str, dict[str, float]]) -> None:
    title = "The larger the model, the less of it is the table of tokens"
    with picture("parameters", title, "fraction of the parameters", height=2.8) as axes:
        stacked(axes, rows)


def first_loss(stds: list[float], measured: list[float]) -> None:
    """The first loss less ln V, for standard deviations of the initial embedding."""
    title = "The first loss exceeds ln V by half the variance of the logits"
    lines = {"768 std² / 2": (stds, [768 * std**2 / 2 for std in stds]), "measured, 4,096 tokens": (stds, measured)}
    curves("first_loss", title, "standard deviation of the initial embedding", "first loss less ln V (nats)", lines)


def residual(streams: dict[str, list[float]]) -> None:
    """Standard deviations {label: after each block}."""
    title = "Scaled, the stream ends with the same standard deviation at any depth; unscaled, it grows"
    lines = {name: (np.linspace(0, 1, len(stds)), stds) for name, stds in streams.items()}
    curves("residual", title, "depth (fraction of the layers)", "standard deviation of the stream", lines)


def schedules(rate: Callable, recipes: dict, lengths: dict) -> None:
    """Rates over their peak, of recipes and of wsd runs of several lengths {label: Config}, by rate(step, Config)."""

    def line(config, length: int) -> tuple:
        steps = np.unique(np.linspace(0, config.max_steps, 1000).astype(int))
        return steps / length, [rate(step, config) / config.max_lr for step in steps]

    longest = max(config.max_steps for config in lengths.values())
    recipes = {name: line(config, config.max_steps) for name, config in recipes.items()}
    lengths = {name: line(config, longest) for name, config in lengths.items()}
    title = "The schedules of two recipes (left); four wsd runs share a plateau, and each ends from it (right)"
    units = {"learning rate over its peak": recipes, "rate over its peak, four runs of wsd": lengths}
    side_by_side("recipes", title, "steps, as a fraction of the run", units)


def gradients(values: np.ndarray, lost: dict[float, float]) -> None:
    """How often each size occurs among gradients of any sign, times each factor of {factor: fraction that is lost}."""
    title = "In FP16 over a third of these gradients are lost without the loss scale"
    with picture("fp16", title, "log2 of a gradient's size", "gradients") as axes:
        for color, (factor, fraction) in zip(GREYS, lost.items(), strict=False):
            sizes = np.log2(np.maximum(np.abs(values * factor), 2.0**-40))
            axes.hist(sizes, 120, color=color, label=f"times {factor:,.0f}: {fraction:.1%} become zero")
        axes.axvline(-25, color="black", linestyle="--", label="below 2^-25 FP16 rounds to 0")
        axes.axvline(-14, color="black", linestyle=":", label="below 2^-14 FP16 loses precision")
        axes.legend(loc="upper left", fontsize=9.5)


def attention(kept: dict[int, dict[str, float]]) -> None:
    """MiB kept for the backward pass {T: {name: MiB}}."""
    title = "The formula keeps memory that grows with the square of T, the kernel with T"
    names = next(iter(kept.values()))
    lines = {name: (list(kept), [mib[name] for mib in kept.values()]) for name in names}
    unit = "kept for the backward pass (MiB, log)"
    curves("attention", title, "T (tokens, log)", unit, lines, xscale="log", yscale="log")


def peak(speeds: dict[str, float], percent: dict[str, float]) -> None:
    """Each rung's speed over that of fp32, and its percentage of the peak of its format."""
    title = "A faster format uses less of its peak, until less is read from memory"
    with picture("peak", title, height=3.6, grid=(1, 2)) as panels:
        bars(panels[0], speeds)
        bars(panels[1], percent, "{:.0f}%", GREYS[1])
        panels[0].set_xlabel("times the speed of fp32")
        panels[1].set(xlabel="of the format's peak (%)", yticklabels=[])


def undone(over: dict[str, list]) -> None:
    """Two panels, with the points {change: [(early, late) of each seed]} and a bar at their mean."""
    title = "By the end of an epoch only shuffling still matters much (a circle is a seed)"
    unit = "validation loss less the recipe's (nats)"
    with picture("undone", title, unit, height=4.2, grid=(1, 2)) as panels:
        panels[1].sharex(panels[0])
        for i, (axes, name) in enumerate(zip(panels, ("after 200 steps", "after an epoch of 718"), strict=True)):
            axes.set_title(name, fontsize=10)
            for y, seeds in enumerate(over.values()):
                points = [seed[i] for seed in seeds]
                axes.plot(points, [y] * len(points), "o", color="white", markeredgecolor="black", markersize=7)
                axes.plot(np.mean(points), y, "|", color="black", markersize=16, markeredgewidth=3)
            axes.axvline(0, color="black", linestyle=":")
            axes.set_yticks(range(len(over)), list(over) if i == 0 else [""] * len(over))
            axes.invert_yaxis()


def muon(values: dict[str, np.ndarray]) -> None:
    """The singular values of matrices {name: from the largest}."""
    title = "A gradient's singular values span two powers of ten; those of Muon's step are nearly equal"
    lines = {name: (range(1, 1 + len(s)), s / s[0]) for name, s in values.items()}
    curves("muon", title, "singular value, from the largest", "over the largest (log)", lines, yscale="log")


def hellaswag_errors(rows: np.ndarray) -> None:
    title = "Two standard errors: 500 rows hardly tell GPT-2 124M from GPT-3 Small; all 10,042 do"
    with picture("error", title, "rows of HellaSwag (log)", "accuracy (%)") as axes:
        axes.axhline(25, color="black", linestyle=":", label="chance")
        for i, (name, p) in enumerate(PUBLISHED.items()):
            error = 200 * np.sqrt(p * (1 - p) / rows)
            at = rows * (0.97 + 0.03 * i)
            axes.errorbar(at, [100 * p] * len(rows), error, capsize=4, label=name, **line_style(i, 7))
        plain_ticks(axes, rows)
        axes.set_ylim(18, 68)
        axes.legend(ncols=4, loc="upper right", fontsize=9.5)


def bypass() -> None:
    title = "LoRA: a bypass of rank r beside each frozen matrix"
    places = {"x (in)": (0.5, 0.06), "W (out, in), frozen": (0.25, 0.45), "A (r, in), random": (0.72, 0.3)}
    places |= {"B (out, r), zero at first": (0.72, 0.62), "+": (0.5, 0.9)}
    arrows = [("x (in)", "W (out, in), frozen"), ("x (in)", "A (r, in), random"), ("W (out, in), frozen", "+")]
    arrows += [("A (r, in), random", "B (out, r), zero at first"), ("B (out, r), zero at first", "+")]
    with picture("bypass", title, height=2.9) as axes:
        boxes(axes, "y = W x + (alpha / r) B A x", places, [(*arrow, 0) for arrow in arrows])


def overfitting(held_out: dict[str, tuple], trained: dict[str, tuple]) -> None:
    """Losses {label: (epochs, losses)} on held-out rows, and on those that a run trains on."""
    title = "Full finetuning gets worse on new rows while its loss on its own falls to 1; r = 1 does not"
    units = {"held-out rows (nats per answer token)": held_out, "the rows it trains on (the same unit)": trained}
    side_by_side("overfitting", title, "epochs", units)


def chinese(log: list[dict]) -> None:
    runs("chinese", "40,000 characters, read five times: training falls below validation", {"bpe/manual.txt": log})


def five_curves(found: dict[str, tuple]) -> None:
    """A panel for each run {name: ([(step, training loss)], [(step, validation loss)])}."""
    title = "Five runs, and what their two lines tell"
    with picture("curves", title, "step", "loss (nats)", height=2.6, grid=(1, len(found))) as panels:
        for axes, (name, (train, val)) in zip(panels, found.items(), strict=True):
            axes.plot(*zip(*train, strict=True), color=GREYS[2], linewidth=1, label="training")
            axes.plot(*zip(*val, strict=True), color=GREYS[0], linewidth=1.8, label="held out")
            axes.set(xlim=(0, 120), ylim=(0, 8))
            axes.set_title(name, fontsize=10)
            axes.legend(fontsize=8)
            if axes is not panels[0]:
                axes.set_yticklabels([])
