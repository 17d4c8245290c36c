"""Curves: what is read from a damaged log, where points are drawn, and that no log stops a picture."""

import json
import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

import plot
from parts import curves
from parts.log import read_log
from tests.helpers import assert_user_error, json_values, log_of, table, write_lines


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


def run_of(loss: float, bpb: float = 0.1, **changes) -> list[dict]:
    """A log with that validation loss at its end."""
    start = run_record(data=dict(source="a.txt"), tokenizer="t", config={}) | changes
    train = [dict(step=step, kind="train", loss=1.0, tokens=10 ** (14 + step)) for step in (0, 1)]
    return [start, *train, dict(step=1, kind="val", loss=loss, bpb=bpb)]


# ------------------------------------------------------------------------------------------------ reading a log


def test_a_log_is_read_as_it_was_written(tmp_path, capsys):
    records = [run_record(), *train_records(5), dict(step=1, kind="sample", text="a\u2028b\x85c\x0bd")]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\r\n\n" for record in records)
    (tmp_path / "log.jsonl").write_text(text, encoding="utf-8-sig")
    assert read_log(tmp_path / "log.jsonl") == records
    assert not capsys.readouterr().err


def test_the_steep_start_of_a_curve_does_not_count_but_what_came_before_it():
    x = np.arange(101)
    assert curves.tail_of(x, x).tolist() == [0, *range(5, 101)]


DAMAGED = """
{"step": 3, "ki
null
["step"]
{"step": 3}
{"kind": "val"}
{"step": "3", "kind": "val"}
{"step": 1e400, "kind": "val"}
{"step": 3, "kind": null}
{"step": 3, "kind": "sample"}
{"step": 3, "kind": "val"}
{"step": 3, "kind": "train"}
"""
for key, value in json_values("""
config []
written null
data "a"
hub 1
command 5
commit []
tokens "many"
skipped_steps {}
dt_ms []
tokens_per_sec "9"
memory_gib "1"
loss "x"
bpb {}
text 1
"""):
    DAMAGED += json.dumps(dict(step=3, kind="run") | {key: value}) + "\n"
NO_TEXT = [b"\xff\xfe\x00", b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b', "kind": "val"}']


@pytest.mark.parametrize("line", [*NO_TEXT, *DAMAGED.strip().encode().splitlines()], ids=str)
def test_a_damaged_line_is_skipped_and_named_in_one_warning(tmp_path, capsys, line):
    good = [json.dumps(record).encode() for record in train_records(3)]
    (tmp_path / "log.jsonl").write_bytes(b"\n".join([*good[:2], line, *good[2:], line]))
    assert read_log(tmp_path / "log.jsonl") == train_records(3)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "log.jsonl" in warning and "line 3, 6" in warning


# ---------------------------------------------------------------------------------------------- where points are drawn


def test_smoothing_keeps_the_first_value_and_passes_over_a_lone_spike():
    y = np.concatenate([[9.0], np.ones(200)])
    y[100] = 50.0
    x, smooth = curves.smoothed(np.arange(201), y)
    assert x.tolist() == list(range(201)) and smooth[0] == 9.0 and set(smooth[3:]) == {1.0}


def test_a_long_curve_is_thinned_to_medians_at_their_first_step():
    n = 20 * curves.POINTS
    x, smooth = curves.smoothed(np.arange(n), np.repeat(np.arange(curves.POINTS), 20))
    assert x.tolist() == list(range(0, n, 20)) and smooth[:-17].tolist() == list(range(783)) and smooth[-1] == 790.5


AXES = """
steps | 1 | step | 4
tokens | 100 | tokens | 400
tokens | 300_000 | millions of tokens | 1.2
tokens | 3e8 | billions of tokens | 1.2
seconds | 500 | seconds of training | 2
seconds | 30_000 | minutes of training | 2
seconds | 18e5 | hours of training | 2
flops | 100 | FLOPs of training | 4000
flops | 1e14 | petaFLOPs of training | 4
flops | 1e17 | exaFLOPs of training | 4
"""  # the size of a step: tokens or milliseconds; 10 FLOPs per token


@pytest.mark.parametrize("x, row", table(AXES))
def test_an_evaluation_is_drawn_at_the_training_step_of_its_number(panels, x, row):
    size, label, expected = float(row[0]), row[1], float(row[2])
    vals = [dict(step=step, kind="val", loss=1.0) for step in (0, 4)]
    train = [record | dict(tokens=record["step"] * size, dt_ms=size) for record in train_records(9)[:9]]
    train[1] |= dict(loss=None, grad_norm=None, skipped=True)  # its time counts
    records = [run_record(), *vals, *train]
    for log in (records, records + records):  # somebody wrote a log twice: it is drawn once
        axes = panels({"run": log}, x)["loss"]
        each_step, _, validation = axes.lines[:3]
        assert axes.get_xlabel() == label and len(each_step.get_xdata()) == 8
        assert validation.get_xdata().tolist() == pytest.approx([0, expected])


def test_a_run_of_one_step_is_seen(panels):
    assert len(panels({"only validated": train_records(1)[1:]})["loss"].lines) == 3
    drawn = panels({"run": train_records(1)[:1]})
    for name in ("loss", "norm", "rate"):
        lines = [line for line in drawn[name].lines if len(line.get_xdata()) == 1]
        assert lines and all(line.get_marker() != "None" for line in lines), name


PUBLISHED = """
957_184
124_439_808 | GPT-2 124M 29.55% | GPT-3 Small 33.7%
354_823_168 | GPT-3 Medium 43.6%
774_030_080 | GPT-3 Large 51%
1_557_611_200 | GPT-2 XL 48.93% | GPT-3 XL 54.7%
"""


@pytest.mark.parametrize("parameters, names", table(PUBLISHED))
def test_published_models_are_those_of_the_runs_own_size(panels, parameters, names):
    records = [run_record(parameters=int(parameters)), *train_records(9), *hellaswag_records(9)]
    words = words_of(panels({"run": records})["acc_norm"]).split("\n")
    assert [word for word in words if word.startswith("GPT-")] == names


STYLE = "color linestyle linewidth alpha marker markersize markevery".split()


def shown(axes: Axes) -> str:
    """A panel in words: its titles, sizes of texts, its frame; the ends and the look of each line; its names."""
    legend = axes.get_legend()
    names = [*axes.texts, *(legend.texts if legend else ())]
    sizes = {text.get_fontsize() for text in (*names, axes._left_title, axes.yaxis.label, *axes.get_xticklabels())}
    said = [f"{axes.get_label()}: {axes.get_title('left')}\n{axes.get_ylabel()} | {axes.get_xlabel()}"]
    said.append(f"sizes {sorted(sizes)}, grid {axes.xaxis.get_gridlines()[0].get_alpha()}")
    said.append(f"{np.round([axes.get_xlim(), axes.get_ylim()], 3).tolist()} {axes.get_yscale()}")
    for line in axes.lines:
        ends = np.round(line.get_xydata()[[0, -1]], 3).tolist()
        said.append(" ".join([str(ends), *(str(getattr(line, f"get_{name}")()) for name in STYLE)]))
    for bars in axes.collections:
        said.append(f"bar {np.round(bars.get_segments()[0], 3).tolist()} {bars.get_linewidth()}")
    said += [f"{np.round(text.get_position(), 3).tolist()} {text.get_text()}" for text in names]
    return "\n".join(said) + "\n"


@pytest.mark.parametrize("norms", [(2.0, 2.4), (1.0, 100.0)])
def test_a_norms_axis_is_logarithmic_and_names_a_number(panels, norms):
    records = [record | dict(grad_norm=norm) for record, norm in zip(train_records(2), norms, strict=False)]
    axes = panels({"run": records})["norm"]
    axes.figure.draw_without_rendering()
    low, high = axes.get_ylim()
    assert axes.get_yscale() == "log" and any(low <= tick <= high for tick in axes.get_yticks())


def test_scores_without_errors_have_no_bars(panels):
    axes = panels({"a": [*train_records(2), dict(step=2, kind="hellaswag", acc_norm=0.27)]})["acc_norm"]
    assert "27 ± 0 at the end" in words_of(axes)


# ---------------------------------------------------------------------------------------------- runs against others


RIVALS = """
{} | loss | reached by b
{"data": {"source": "b.txt"}} | loss | not comparable
{"tokenizer": "u"} | loss | not comparable
{"tokenizer": "u", "data": {"source": "a.txt", "tokenizer": "u"}, "bpb": 0.2} | bpb | reached by a
"""


@pytest.mark.parametrize("change, cells", table(RIVALS))
def test_a_winner_is_named_only_among_runs_that_can_be_compared(door, figures, tmp_path, change, cells):
    y, verdict = cells
    write_log(tmp_path / "a", run_of(0.3))
    write_log(tmp_path / "b", run_of(0.25, **json.loads(change)))
    assert door("a", "b", "--x", "tokens", "--y", y).returncode == 0
    words = words_of(figures[0])
    assert verdict in words and curves.LOSS_IN[y] in words
    assert ("thin: training" in words) == (y == "loss")


def test_an_evaluation_says_the_operations_until_then_and_a_run_its_tokenizer(train, run_dir):
    train(max_steps=6, eval_interval=3, sample_interval=0, checkpoint_interval=0)
    (start,) = log_of(run_dir, "run")
    assert start["tokenizer"] == start["data"]["tokenizer"]
    found = [(val["step"], val["flops"]) for val in log_of(run_dir, "val")]
    assert found == [(step, step * 256 * start["flops_per_token"]) for step in (3, 6)]


# -------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("value", [None, math.inf, 0, -1, 1e300, 10**400, "word"])
def test_no_figure_of_a_log_stops_the_picture(tmp_path, value):
    intact = [run_record(), *train_records(8), *hellaswag_records(8)]
    spoilt = [{key: r[key] if key in ("step", "kind") else value for key in r} for r in intact]
    once = [bad if bad["step"] == 6 else good for good, bad in zip(intact, spoilt, strict=True)]
    assert is_drawn({"run": once}, tmp_path / "a.png")
    assert is_drawn({"spoilt": spoilt, "intact": intact}, tmp_path / "b.png")


@pytest.mark.filterwarnings("ignore:Glyph")
def test_any_name_of_a_directory_can_be_drawn(tmp_path):
    labels = ["_hidden", "$\\frac{$", "字", "a\nb", "\udcff", ""]
    assert is_drawn({label: train_records(3) for label in labels}, tmp_path / "a.png")


def test_nothing_is_drawn_where_there_is_no_loss(tmp_path):
    curves.draw({"run": [run_record()]}, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------- the door


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_a_directory_and_a_log_are_drawn_and_no_earlier_picture_is_lost(door, tmp_path, suffix, start):
    for name in ("one", "two"):
        write_log(tmp_path / name, train_records(20))
    picture = tmp_path / f"curves.{suffix}"
    assert door("one", "two/log.jsonl", "--out", picture).returncode == 0
    earlier = picture.read_bytes()
    assert earlier.startswith(start)
    assert f"curves.{suffix}.1" in door("one", "--out", picture).stdout
    assert (tmp_path / f"curves.{suffix}.1").read_bytes() == earlier


@pytest.mark.parametrize(
    "axis, missing", [("--x tokens", "tokens"), ("--y bpb", "bpb")]
)
def test_a_log_that_does_not_say_what_an_axis_needs_is_refused_in_one_line(door, tmp_path, axis, missing):
    write_log(tmp_path / "old", train_records(5, tokens=None if "tokens" in axis else 1)[:5])
    assert_user_error(door("old", *axis.split()), f"{axis}: the log of old", f'"{missing}"', f"use {axis[:3]} ")


WRONG = """
absent | absent does not exist
empty | no loss
a | a directory, not a log
run --out a.bmp | a.bmp
run --out dir.png | dir.png
run --out absent/a.png | error: absent/a.png
"""


@pytest.mark.parametrize("args, words", [("", ["no run"]), *table(WRONG)])
def test_wrong_usage_is_one_line(door, tmp_path, args, words):
    write_log(tmp_path / "run", train_records(3))
    write_log(tmp_path / "empty", [])
    for name in ("dir.png", "a/log.jsonl"):
        (tmp_path / name).mkdir(parents=True)
    assert_user_error(door(*args.split()), *words)
