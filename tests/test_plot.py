"""Curves: what is read from a damaged log, where points are drawn, and that no log stops a picture."""

import json
from statistics import median

import pytest

import plot
from parts.log import read_log
from tests.helpers import assert_user_error, write_lines


def train_records(n: int, **changes) -> list[dict]:
    """A smooth run of `n` steps as log.jsonl has it, with a validation at its end."""
    records = [
        dict(step=step, kind="train", loss=3 + 1 / step, lr=1e-3, grad_norm=1.0, dt_ms=500.0, tokens=100 * step)
        for step in range(1, n + 1)
    ]
    return [record | changes for record in records] + [dict(step=n, kind="val", loss=3.25, bpb=1.0)]


VALS = [dict(step=step, kind="val", loss=3.5 - step / 100, bpb=1.0) for step in (4, 8)]


def write_log(path, records) -> None:
    path.mkdir(exist_ok=True)
    write_lines(path / "log.jsonl", records)


@pytest.fixture
def door(inline, monkeypatch, tmp_path):
    """Run plot.py in this process and in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: inline(plot.main, *args)


@pytest.fixture
def panels(monkeypatch, door, tmp_path):
    """Draw {name: records} by plot.py, and return the panels by name."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: drawn.append(self))

    def run(runs: dict, *args) -> dict:
        for name, records in runs.items():
            write_log(tmp_path / name, records)
        assert door(*runs, *args).returncode == 0
        return {axes.get_label(): axes for axes in drawn[-1].axes}

    return run


def lines_of(axes, **style) -> list[list[tuple]]:
    """The points of the lines with a `marker`, or a `linestyle`."""
    found = []
    for line in axes.lines:
        if all(getattr(line, f"get_{name}")() == value for name, value in style.items()):
            found.append([tuple(point) for point in line.get_xydata().tolist()])
    return found


# ------------------------------------------------------------------------------------------------ reading a log


ODD_LINES = [
    b'{"step": 3, "ki', b"\xff\xfe\x00", b"[3]", b'{"stap": 3, "kind": "val"}', b'{"step": NaN, "kind": "val"}',
    b'{"step": "x"}', b'{"step": 1e999}', b"[" * 100_000,
]  # fmt: skip


@pytest.mark.parametrize("line", ODD_LINES)
def test_damaged_lines_are_skipped(tmp_path, line):
    records = [*train_records(3), dict(step=3, kind="sample", text="a\u2028b\x85c\x0bd")]
    good = [json.dumps(record, ensure_ascii=False).encode() for record in records]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([*good[:2], line, *good[2:], line]))
    assert read_log(tmp_path / "log.jsonl") == records


# ---------------------------------------------------------------------------------------------- where points are drawn


def test_figures_are_drawn_at_their_steps(panels):
    train = [r | dict(lr=r["step"] / 1000, grad_norm=1.0 + r["step"]) for r in train_records(9)]
    scores = [dict(step=step, kind="hellaswag", acc_norm=step / 20, acc_norm_stderr=0.02) for step in (5, 6)]
    runs = {"run": [*train[:-1], *VALS, *scores]}
    drawn = panels(runs)
    steps = range(1, 10)
    assert lines_of(drawn["loss"], marker="o") == [[(4, 3.46), (8, 3.42)]]
    assert [(step, 3 + 1 / step) for step in steps] in lines_of(drawn["loss"], marker="None")
    assert [(step, 1 + step) for step in steps] in lines_of(drawn["norm"])
    assert lines_of(drawn["rate"]) == [[(step, step / 1000) for step in steps]]
    (bars,) = drawn["score"].collections  # with standard errors
    assert [segment.tolist() for segment in bars.get_segments()] == [[[5, 23], [5, 27]], [[6, 28], [6, 32]]]
    assert lines_of(panels(runs, "--y", "bpb")["bpb"]) == [[(4, 1.0), (8, 1.0)]]
    both = panels(runs | {"other": train})["rate"].lines
    assert both[0].get_color() != both[1].get_color()


def test_a_long_curve_of_training_is_thinned_to_medians_which_ignore_a_spike(panels):
    records = train_records(4000)
    records[100] |= dict(loss=1e6)
    [points] = lines_of(panels({"run": records})["loss"], marker="None")
    losses = [record["loss"] for record in records[:-1]]
    assert points == [(i + 1, median(losses[i : i + 20])) for i in range(0, 4000, 20)]


AXES = [  # the axis; the size of a step, in tokens or in milliseconds; where step 4 is
    ("steps", 1, 4),
    ("tokens", 3e8, 1200),
    ("seconds", 30_000, 2),
]


@pytest.mark.parametrize("x, size, expected", AXES)
def test_an_evaluation_is_drawn_at_the_training_step_of_its_number(panels, x, size, expected):
    vals = [dict(step=step, kind="val", loss=1.0) for step in (0, 4)]
    train = [record | dict(tokens=record["step"] * size, dt_ms=size) for record in train_records(9)[:9]]
    train[1] |= dict(loss=None, grad_norm=None, skipped=True)  # its time counts
    records = [*vals, *train]
    for log in (records, records + records):  # somebody wrote a log twice: it is drawn once
        [points] = lines_of(panels({"run": log}, "--x", x)["loss"], marker="o")
        assert [x for x, _ in points] == pytest.approx([0, expected])


# -------------------------------------------------------------------------------------------------------- the door


@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_directory_and_a_log_are_drawn_and_no_earlier_picture_is_lost(door, tmp_path):
    names = ["two", "_hidden", "$\\frac{$", "字"]
    for name in names:
        write_log(tmp_path / name, train_records(20))
    picture = tmp_path / "curves.png"
    picture.write_text("mine")
    assert "curves.png.1" in door("two/log.jsonl", *names[1:], "--out", picture).stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "curves.png.1").read_text() == "mine"


@pytest.mark.parametrize("axis, missing", [("--x tokens", "tokens"), ("--x seconds", "dt_ms"), ("--y bpb", "bpb")])
def test_a_log_without_what_an_axis_needs_is_named_and_no_picture_is_touched(door, tmp_path, axis, missing):
    records = [{key: record[key] for key in record if key != missing} for record in train_records(5)]
    write_log(tmp_path / "old", records)
    (tmp_path / "plot.png").write_text("mine")
    assert_user_error(door("old", *axis.split()), axis, "old")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "plot.png"]


WRONG = [("absent", "absent"), ("empty", "empty"), ("run --out a.bmp", "a.bmp"), ("run --out dir.png", "dir.png"),
         ("run --out absent/a.png", "absent/a.png")]  # fmt: skip


@pytest.mark.parametrize("args, words", WRONG)
def test_wrong_usage_is_one_line(door, tmp_path, args, words):
    write_log(tmp_path / "run", train_records(3))
    write_log(tmp_path / "empty", [])
    (tmp_path / "dir.png").mkdir()
    assert_user_error(door(*args.split()), words)
