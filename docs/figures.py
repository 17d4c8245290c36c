"""The look of the walk's figures: 900 pixels wide, a title that says what to see, units, legible in grey.

    with picture("05_residual", "what to see", "x (unit)", "y (unit)") as axes:
        axes.plot(...)
    curves("05_residual", "what to see", "x (unit)", "y (unit)", {"label": (x, y), ...})
    bars("03_sizes", "what to see", "x (unit)", {"label": 3.0, ...})
    runs("12_runs", {"label": read_log(Path("out/tiny/log.jsonl")), ...})

They are written to ASSETS as walk_NAME.png. This file knows nothing of models: it is handed numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from run.curves import draw, look

ASSETS = Path(__file__).resolve().parent.parent / "assets"
WIDTH = 9  # inches, at 100 dots
GREYS = ("#1b4f72", "#e69f00", "#b7d7ea", "#7f7f7f", "#f4e3b5")  # dark and light in turn, so that grey tells them apart


@contextmanager
def picture(name: str, title: str, x: str = "", y: str = "", height: float = 3.6, grid: tuple = (1, 1)) -> Iterator:
    """One Axes, or a list of them in `grid` rows and columns, which is written at the end."""
    figure = Figure(figsize=(WIDTH, height), dpi=100, layout="constrained")
    panels = figure.subplots(*grid, squeeze=False).flatten().tolist()
    if len(title) > 100:
        raise ValueError(f"the title has {len(title)} letters, and room is for 100: {title}")
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
    figure.savefig(asset(f"{name}.png"), pil_kwargs=dict(optimize=True))


def asset(name: str) -> Path:
    """Where a picture goes that is not drawn here."""
    ASSETS.mkdir(parents=True, exist_ok=True)
    return ASSETS / f"walk_{name}"


def curves(name: str, title: str, x: str, y: str, lines: dict[str, tuple], **scales) -> None:
    """Lines {label: (xs, ys)} with marks; `scales` as Axes.set takes them, such as yscale="log"."""
    with picture(name, title, x, y) as axes:
        for i, (label, (xs, ys)) in enumerate(lines.items()):
            axes.plot(xs, ys, label=label, linewidth=1.5, **look(i, len(xs) if len(xs) < 60 else 0))
        axes.set(**scales)
        if scales.get("xscale") == "log":  # where the points are, in plain numbers
            ticks = sorted({x for xs, _ in lines.values() for x in xs})
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()


def runs(name: str, logs: dict[str, list], x: str = "steps") -> None:
    """Curves of training runs {label: records of its log}, as plot.py draws them, in a smaller file."""
    path = asset(f"{name}.png")
    draw(logs, path, x)
    Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(path, optimize=True)


def bars(name: str, title: str, x: str, values: dict[str, float], form: str = "{:,.1f}") -> None:
    """Horizontal bars {label: length}, each with its number."""
    with picture(name, title, x, height=0.9 + 0.42 * len(values)) as axes:
        drawn = axes.barh(list(values), list(values.values()), color=GREYS[0])
        axes.bar_label(drawn, [" " + form.format(value) for value in values.values()], fontsize=9.5)
        axes.set_xlim(0, 1.18 * max(values.values()))
        axes.invert_yaxis()
