"""Curves: what is read from a damaged log, where points are drawn, and that no log stops a picture."""

import json
import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

import plot
from parts import curves
from parts.log import read_log
from tests.helpers import assert_user_error, log_of, slow, write_lines


def train_records(n: int, **changes) -> list[dict]:
    """A smooth run of `n` steps as log.jsonl has it, with a validation at its end."""
    records = [
        dict(step=step, kind="train", loss=3 + 1 / step, lr=1e-3, grad_norm=1.0, dt_ms=500.0, tokens=100 * step)
        for step in range(1, n + 1)
    ]
    return [record | changes for record in records] + [dict(step=n, kind="val", loss=3.25, bpb=1.0)]


def hellaswag_records(n: int) -> list[dict]:
    return [dict(step=step, kind="hellaswag", acc_norm=0.27, acc_norm_stderr=0.02) for step in range(1, n + 1, 5)]


def run_record(**changes) -> dict:
    return dict(step=0, kind="run", parameters=124_439_808, flops_per_token=10.0, uniform_loss=7.625) | changes


def write_log(path, records) -> None:
    path.mkdir(parents=True, exist_ok=True)
    write_lines(path / "log.jsonl", records)


@pytest.fixture
def door(inline, monkeypatch, tmp_path):
    """Run plot.py in this process and in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: inline(plot.main, *args)


@pytest.fixture
def figures(monkeypatch) -> list[Figure]:
    """Those that were drawn, for what is in them: the file of a picture stays empty."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: drawn.append(self))
    return drawn


@pytest.fixture
def panels(figures, tmp_path):
    """Draw, and return the panels by name."""

    def run(runs: dict, *args) -> dict[str, Axes]:
        curves.draw(runs, tmp_path / "a.png", *args)
        return {axes.get_label(): axes for axes in figures[-1].axes}

    return run


def is_drawn(runs, path) -> bool:
    curves.draw(runs, path)
    return path.read_bytes().startswith(b"\x89PNG")


def words_of(drawn: Figure | Axes) -> str:
    return "\n".join(text.get_text() for text in drawn.findobj(Text))


def line_of(axes: Axes, label: str):
    """The line whose name in the legend begins with these words."""
    (line,) = [line for line in axes.lines if line.get_label().startswith(label)]
    return line


def points_of(line) -> list[tuple]:
    return [tuple(point) for point in line.get_xydata().tolist()]


def run_of(loss: float, bpb: float = 0.1) -> list[dict]:
    """A log with that validation loss at its end."""
    train = [dict(step=step, kind="train", loss=1.0, tokens=10 ** (14 + step)) for step in (0, 1)]
    return [*train, dict(step=1, kind="val", loss=loss, bpb=bpb)]


# ------------------------------------------------------------------------------------------------ reading a log


def test_a_log_is_read_as_it_was_written(tmp_path, capsys):
    records = [run_record(), *train_records(5), dict(step=1, kind="sample", text="a\u2028b\x85c\x0bd")]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\r\n\n" for record in records)
    (tmp_path / "log.jsonl").write_text(text, encoding="utf-8-sig")
    assert read_log(tmp_path / "log.jsonl") == records
    assert not capsys.readouterr().err


DAMAGED = [
    b'{"step": 3, "ki',
    b"null",
    b'["step"]',
    b'{"step": 3}',
    b'{"kind": "val"}',
    b'{"step": "3", "kind": "val"}',
    b'{"step": 1e400, "kind": "val"}',
    b'{"step": 3, "kind": null}',
    b"\xff\xfe\x00",
    b'{"step": ' + b"9" * 5000 + b', "kind": "val"}',
]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: str(line[:40]))
def test_damaged_lines_are_skipped_and_counted_in_one_warning(tmp_path, capsys, line):
    good = [json.dumps(record).encode() for record in train_records(3)]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([*good[:2], line, *good[2:], line]))
    assert read_log(tmp_path / "log.jsonl") == train_records(3)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "log.jsonl: skipped 2 damaged lines: 3, 6" in warning


# ---------------------------------------------------------------------------------------------- where points are drawn


def test_smoothing_keeps_the_first_value_and_passes_over_a_lone_spike():
    y = np.concatenate([[9.0], np.ones(200)])
    y[100] = 50.0
    x, smooth = curves.smoothed(np.arange(201), y)
    assert x.tolist() == list(range(201))
    assert smooth[0] == 9.0
    assert set(smooth[3:]) == {1.0}


def test_a_long_curve_is_thinned_to_medians_at_their_first_step():
    n = 20 * curves.POINTS
    x, smooth = curves.smoothed(np.arange(n), np.repeat(np.arange(curves.POINTS), 20))
    assert x.tolist() == list(range(0, n, 20))
    assert smooth[:-17].tolist() == list(range(783))
    assert smooth[-1] == 790.5


def test_the_losses_of_a_run_are_drawn_at_their_steps(panels):
    vals = [dict(step=step, kind="val", loss=3.5 - step / 100, bpb=1.0) for step in (4, 8)]
    axes = panels({"run": [run_record(), *train_records(9)[:9], *vals]})["loss"]
    assert points_of(line_of(axes, "training, each step")) == [(step, 3 + 1 / step) for step in range(1, 10)]
    assert points_of(line_of(axes, "validation")) == [(4, 3.46), (8, 3.42)]
    assert line_of(axes, "validation").get_marker() == "o"
    assert line_of(axes, "validation").get_label() == "validation: 3.420 at the end"


def test_norms_and_rates_are_drawn_at_their_steps_without_smoothing_those_away(panels):
    records = [
        record | dict(lr=record["step"] / 1000, grad_norm=1.0 + record["step"]) for record in train_records(5)[:5]
    ]
    drawn = panels({"run": records})
    each_norm, _ = drawn["norm"].lines
    (rates,) = drawn["rate"].lines
    assert points_of(each_norm) == [(step, 1 + step) for step in range(1, 6)]
    assert points_of(rates) == [(step, step / 1000) for step in range(1, 6)]


def test_scores_are_drawn_with_their_standard_errors(panels):
    scores = [dict(step=step, kind="hellaswag", acc_norm=step / 20, acc_norm_stderr=0.02) for step in (5, 6)]
    axes = panels({"a": [*train_records(6), *scores]})["score"]
    (bars,) = axes.collections
    ends = [segment.tolist() for segment in bars.get_segments()]
    assert ends == [[[5, 23], [5, 27]], [[6, 28], [6, 32]]]
    assert "30 ± 2 at the end" in words_of(axes)


def run_with_passes(size: int | None) -> list[dict]:
    """900 tokens in 9 steps, from a text of this many; validation falls, then rises."""
    losses = enumerate((3.5, 3.2, 3.3), 1)
    vals = [dict(step=3 * i, kind="val", loss=loss, bpb=1.0) for i, loss in losses]
    return [run_record(training_tokens=size), *train_records(9)[:9], *vals]


@pytest.mark.parametrize("x, expected", [("steps", [2.5, 5, 7.5]), ("tokens", [250e-6, 500e-6, 750e-6])])
def test_each_pass_over_the_training_text_ends_at_a_dotted_line(panels, x, expected):
    axes = panels({"run": run_with_passes(250)}, x)["loss"]
    dotted = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert dotted == pytest.approx(expected)
    assert words_of(axes).count("read once more") == 1


@pytest.mark.parametrize("size", [None, 10, 901])
def test_no_pass_is_marked_where_none_was_complete_or_the_lines_would_hide_the_curve(panels, size):
    axes = panels({"run": run_with_passes(size)})["loss"]
    assert not [line for line in axes.lines if line.get_linestyle() == ":"]


def test_the_lowest_validation_loss_has_a_ring(panels):
    axes = panels({"run": run_with_passes(None)})["loss"]
    ring = line_of(axes, "lowest: 3.200 at step 6")
    assert points_of(ring) == [(6, 3.2)]
    assert ring.get_fillstyle() == "none"


AXES = [  # the size of a step, in tokens and in milliseconds; the label; where step 4 is
    ("steps", 1, "step", 4),
    ("tokens", 100, "millions of tokens", 4e-4),
    ("tokens", 3e8, "millions of tokens", 1200),
    ("seconds", 500, "minutes of training", 2 / 60),
    ("seconds", 30_000, "minutes of training", 2),
]


@pytest.mark.parametrize("x, size, label, expected", AXES)
def test_an_evaluation_is_drawn_at_the_training_step_of_its_number(panels, x, size, label, expected):
    vals = [dict(step=step, kind="val", loss=1.0) for step in (0, 4)]
    train = [record | dict(tokens=record["step"] * size, dt_ms=size) for record in train_records(9)[:9]]
    train[1] |= dict(loss=None, grad_norm=None, skipped=True)  # its time counts
    records = [run_record(), *vals, *train]
    for log in (records, records + records):  # somebody wrote a log twice: it is drawn once
        axes = panels({"run": log}, x)["loss"]
        assert axes.get_xlabel() == label
        assert len(line_of(axes, "training, each step").get_xdata()) == 8
        assert line_of(axes, "validation").get_xdata().tolist() == pytest.approx([0, expected])


def test_losses_in_bits_per_byte_are_those_of_validation_alone(panels):
    axes = panels({"run": train_records(5)}, "steps", "bpb")["loss"]
    assert points_of(line_of(axes, "validation")) == [(5, 1.0)]
    assert not [line for line in axes.lines if line.get_label().startswith("training")]


def test_a_run_that_was_only_validated_is_drawn(panels):
    assert points_of(line_of(panels({"run": train_records(1)[1:]})["loss"], "validation")) == [(1, 3.25)]


# ------------------------------------------------------------------------------------- what a curve is measured against


def test_accuracies_are_drawn_with_that_of_chance_and_of_gpt2(panels):
    axes = panels({"run": [*train_records(9), *hellaswag_records(9)]})["score"]
    dashed = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"]
    assert dashed == pytest.approx([25, 29.55])  # of four endings one is right
    assert "chance 25%" in words_of(axes)
    assert "GPT-2 124M 29.55%" in words_of(axes)


def test_a_run_alone_is_drawn_from_its_start_on_a_logarithmic_axis_with_the_loss_of_a_guess(panels):
    axes = panels({"run": [run_record(uniform_loss=7.625), *train_records(40)]})["loss"]
    assert axes.get_yscale() == "log"
    assert points_of(line_of(axes, "training, smoothed"))[0] == (1, 4.0)
    assert list(line_of(axes, "if all tokens are equally likely: 7.62").get_ydata()) == [7.625, 7.625]
    assert axes.get_ylim()[1] > 7.625


def test_several_runs_share_a_linear_axis_of_their_ends(panels):
    axes = panels({name: [run_record(), *train_records(40)] for name in "ab"})["loss"]
    assert axes.get_yscale() == "linear"
    assert 3.2 < axes.get_ylim()[1] < 4.0


@pytest.mark.parametrize("norms", [(2.0, 2.4), (1.0, 100.0)])
def test_a_norms_axis_is_logarithmic_and_names_a_number(panels, norms):
    records = [record | dict(grad_norm=norm) for record, norm in zip(train_records(2), norms, strict=False)]
    axes = panels({"run": records})["norm"]
    axes.figure.draw_without_rendering()
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert any(low <= tick <= high for tick in axes.get_yticks())


# ---------------------------------------------------------------------------------------------- runs against others


def look_of(line) -> tuple:
    return to_hex(line.get_color()), line.get_marker()


@pytest.mark.parametrize("n", [2, 7, 20])
def test_runs_of_one_length_are_told_apart_by_a_look_which_is_theirs_in_all_panels(panels, n):
    runs = {f"run {i:02d}": train_records(9) + hellaswag_records(9) for i in range(n)}
    drawn = panels(runs)
    looks = [look_of(line_of(drawn["loss"], name)) for name in runs]
    assert len(set(looks)) == n
    training = [to_hex(line.get_color()) for line in drawn["loss"].lines if line.get_marker() == "None"]
    assert training == [color for color, _ in looks]
    assert [to_hex(line.get_color()) for line in drawn["rate"].lines] == training
    assert [look_of(line) for line in drawn["score"].lines if line.get_marker() not in ("None", "|")] == looks


def test_a_few_runs_are_told_apart_in_greyscale_by_marks(panels):
    drawn = panels({f"run {i}": train_records(9) for i in range(5)})
    assert len({look_of(line_of(drawn["loss"], f"run {i}"))[1] for i in range(5)}) == 5


def test_all_panels_have_one_x_axis_and_hold_every_run(panels):
    fast = [record | dict(lr=0.5) for record in train_records(20)[:20]]
    drawn = panels({"slow": train_records(4) + hellaswag_records(4), "fast": fast})
    assert len({axes.get_xlim() for axes in drawn.values()}) == 1
    assert drawn["rate"].get_ylim()[0] == 0
    assert drawn["rate"].get_ylim()[1] > 0.5
    assert drawn["loss"].get_xlim()[1] > 20


def test_a_runs_own_training_and_validation_have_two_colours(panels):
    axes = panels({"run": train_records(9)})["loss"]
    assert line_of(axes, "validation").get_color() != line_of(axes, "training, smoothed").get_color()


@pytest.mark.parametrize(
    "y, unit, label", [("loss", "nats per token", "b: 0.250"), ("bpb", "bits per byte", "b: 0.200")]
)
def test_several_runs_are_drawn_in_either_unit(door, figures, tmp_path, y, unit, label):
    write_log(tmp_path / "a", run_of(0.3))
    write_log(tmp_path / "b", run_of(0.25, bpb=0.2))
    assert door("a", "b", "--x", "tokens", "--y", y).returncode == 0
    words = words_of(figures[0])
    assert unit in words
    assert f"{label} at the end" in words


def test_an_evaluation_says_the_operations_until_then_and_a_run_its_tokenizer(train, run_dir):
    train(max_steps=6, eval_interval=3, sample_interval=0, checkpoint_interval=0)
    (start,) = log_of(run_dir, "run")
    assert start["tokenizer"] == start["data"]["tokenizer"]
    found = [(val["step"], val["flops"]) for val in log_of(run_dir, "val")]
    assert found == [(step, step * 256 * start["flops_per_token"]) for step in (3, 6)]


# -------------------------------------------------------------------------------------------------------- pictures


ODD = [None, math.inf, math.nan, 0, 1e300, 10**400]


def spoilt(record: dict, value) -> dict:
    return {key: record[key] if key in ("step", "kind") else value for key in record}


def test_no_value_in_a_log_stops_the_picture(tmp_path):
    intact = [*train_records(40), *hellaswag_records(40)]
    here_and_there = [spoilt(r, ODD[r["step"] // 2 % len(ODD)]) if r["step"] % 2 else r for r in intact]
    assert is_drawn({"run": here_and_there}, tmp_path / "a.png")
    runs = {str(number): [spoilt(record, value) for record in intact] for number, value in enumerate(ODD)}
    assert is_drawn({"intact": intact, **runs}, tmp_path / "b.png")


@pytest.mark.filterwarnings("ignore:Glyph")
def test_any_name_of_a_directory_can_be_drawn(tmp_path):
    labels = ["_hidden", "$\\frac{$", "字", "a\nb", ""]
    assert is_drawn({label: train_records(3) for label in labels}, tmp_path / "a.png")


def test_nothing_is_drawn_where_there_is_no_loss(tmp_path):
    curves.draw({"run": [run_record()]}, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------- the door


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), slow("pdf", b"%PDF"), slow("svg", b"<?xml")])
def test_a_directory_and_a_log_are_drawn_and_no_earlier_picture_is_lost(door, tmp_path, suffix, start):
    for name in ("one", "two"):
        write_log(tmp_path / name, train_records(20))
    picture = tmp_path / f"curves.{suffix}"
    picture.write_text("mine")
    assert f"curves.{suffix}.1" in door("one", "two/log.jsonl", "--out", picture).stdout
    assert picture.read_bytes().startswith(start)
    assert (tmp_path / f"curves.{suffix}.1").read_text() == "mine"


@pytest.mark.parametrize("axis, missing", [("--x tokens", "tokens"), ("--x seconds", "dt_ms"), ("--y bpb", "bpb")])
def test_a_log_that_does_not_say_what_an_axis_needs_is_refused_in_one_line(door, tmp_path, axis, missing):
    records = [{key: record[key] for key in record if key != missing} for record in train_records(5)]
    write_log(tmp_path / "old", records)
    assert_user_error(door("old", *axis.split()), f"{axis}: the log of old", f'"{missing}"', f"use {axis[:3]} ")


WRONG = [
    ("", "RUNS is missing; see --help"),
    ("absent", "absent is no file"),
    ("empty", "no loss"),
    ("a", "a/log.jsonl is no file"),
    ("run --out a.bmp", "a.bmp"),
    ("run --out dir.png", "dir.png"),
    ("run --out absent/a.png", "error: absent/"),
]


@pytest.mark.parametrize("args, words", WRONG)
def test_wrong_usage_is_one_line(door, tmp_path, args, words):
    write_log(tmp_path / "run", train_records(3))
    write_log(tmp_path / "empty", [])
    for name in ("dir.png", "a/log.jsonl"):
        (tmp_path / name).mkdir(parents=True)
    assert_user_error(door(*args.split()), words)


def test_a_refusal_leaves_the_earlier_picture_where_it_is(door, tmp_path):
    write_log(tmp_path / "run", train_records(5, tokens=None)[:5])
    (tmp_path / "plot.png").write_text("mine")
    assert_user_error(door("run", "--x", "tokens"), "--x tokens")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "run"]
    assert (tmp_path / "plot.png").read_text() == "mine"


def test_runs_whose_labels_look_alike_are_both_drawn(door, figures, tmp_path):
    for name in ("a", "_a"):
        write_log(tmp_path / name, train_records(5))
    assert door("a", "_a").returncode == 0
    labels = [label for label in words_of(figures[0]).splitlines() if "at the end" in label]
    assert len(labels) == 2
