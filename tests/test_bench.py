"""Benchmarks: that measuring itself is right, that each command runs, and that wrong usage is one line."""

import importlib
import os
import statistics
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import bench
from benchmarks.measure import Common, built_late, in_own_process, markdown_table, peak_memory, rates
from parts.cli import UserError
from tests.helpers import (
    ROOT,
    assert_user_error,
    hellaswag_rows,
    needs_gpt2,
    needs_proc,
    read_json,
    succeed,
    text_file,
    write_json,
)

CPU = SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None)
NOT_COMMANDS = ("__init__", "measure")
COMMANDS = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - set(NOT_COMMANDS))


@pytest.fixture
def measure(tmp_path):
    """Run a benchmark on a CPU in small, in another process, and return the rows that it wrote to --json, by name."""

    def run(name: str, **kwargs) -> dict[str, dict]:
        options = dict(repeats=1, device="cpu", json=tmp_path / "figures.json") | kwargs
        result = succeed("bench.py", name, cwd=tmp_path, timeout=600, **options)
        content = read_json(tmp_path / "figures.json")
        assert content["machine"]["torch"] == torch.__version__ and content["machine"]["device"]
        rows = {row["name"]: row for row in content["rows"]}
        assert all(f" {name} |" in result.stdout for name in rows)
        assert not [row["error"] for row in rows.values() if "error" in row]
        return rows

    return run


@pytest.fixture
def hellaswag_file(tmp_path):
    return hellaswag_rows(tmp_path / "hellaswag.jsonl")


@pytest.fixture
def alpaca_file(tmp_path):
    rows = [dict(instruction=f"Count to {i}.", input="", output=" ".join(map(str, range(i + 1)))) for i in range(40)]
    return write_json(tmp_path / "alpaca.json", rows)


# -------------------------------------------------------------------------------------------------------- measuring


def test_contestants_take_turns_are_built_in_the_first_and_are_timed_in_the_others():
    order = []
    build = lambda name: order.append(f"build {name}") or (lambda: order.append(name))  # noqa: E731
    rows = list(rates({name: built_late(build, name) for name in "ab"}, 2, CPU, 1, "things/s"))
    assert order == ["build a", "a", "build b", "b", "a", "b", "a", "b"]
    assert [row["name"] for row in rows] == ["a", "b", "a", "b"]


def test_a_row_has_the_median_rate_its_spread_and_the_ratio_to_the_first(monkeypatch):
    clock = iter(t for s in (9, 9, 1, 0.5, 2, 0.25, 30, 0.125) for t in (0.0, s))  # the first round does not count
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    plain, ours = last = list(rates(dict(plain=bool, ours=bool), 3, CPU, dict(plain=6, ours=12), "things/s"))[-2:]
    assert (plain["rate"], plain["low"], plain["high"], plain["ratio"]) == (3.0, 0.2, 6.0, 1.0)
    assert (ours["rate"], ours["ratio"]) == (48.0, 48 / statistics.median([6, 3, 0.2]))
    assert " 3.0 things/s (0.2 to 6.0) |" in markdown_table(last) and markdown_table([]) == "nothing to show\n"
    (*_, line) = markdown_table([dict(a=None, name="m", memory=3 * 2**29, n=12345, seconds=[0.5, 2.0])]).splitlines()
    assert line == "|   |    m | 1.50 GiB | 12,345 |  0.5, 2 |"


def test_a_contestant_that_raises_is_a_row_that_says_so_and_the_others_go_on():
    theirs = built_late(importlib.import_module, "absent_package")
    rows = list(rates(dict(ours=bool, theirs=theirs), 2, CPU, 1, "x/s"))
    assert [row["name"] for row in rows] == ["theirs", "ours", "ours"]
    assert "absent_package" in rows[0]["error"] and "absent_package" in markdown_table(rows)


def test_what_a_contestant_changes_in_its_own_process_stays_there(tmp_path):
    here = Path.cwd()
    in_own_process(os.chdir, tmp_path)
    assert Path.cwd() == here and in_own_process(os.getpid) != os.getpid()
    with pytest.raises(ValueError):
        in_own_process(int, "no number")


@needs_proc
def test_peak_memory_counts_all_processes_of_a_command():
    hold = "import time; block = bytearray(b'x' * 60_000_000); time.sleep(1)"
    child = f"import subprocess, sys; block = b'x' * 60_000_000; subprocess.run([sys.executable, '-c', {hold!r}])"
    assert 120e6 < peak_memory([sys.executable, "-c", child]) < 200e6
    with pytest.raises(RuntimeError, match="nonsense"):
        peak_memory([sys.executable, "-c", "raise SystemExit('nonsense')"])


# ----------------------------------------------------------------------------------------------------------- the door


@pytest.fixture
def door(inline, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *args: inline(bench.main, *args)


WRONG = """
racing
measure
--repeats 3
bpe --repeats 0
bpe --repeats 1e9
bpe --size tiny
bpe --json no/such/file.json
ladder --batch_size -1
bpe --data absent.txt"""


@pytest.mark.parametrize("line", WRONG.splitlines())  # the first one is empty
def test_wrong_usage_is_one_line(door, line):
    assert_user_error(door(*line.split()))


def test_the_commands_are_the_benchmarks_of_the_folder(door):
    assert COMMANDS == bench.NAMES
    assert_user_error(door("racing"), *COMMANDS)
    listed = door("--help").stdout
    assert all(f"    {name} " in listed for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(door, name):
    result = door(name, "--help")
    assert result.returncode == 0 and "--device" in result.stdout and len(result.stdout.splitlines()) > 9


def test_rows_are_kept_as_they_come_and_replace_earlier_ones(door, tmp_path, monkeypatch):
    def run(config, rt):
        yield dict(name="a", rate=1.0, unit="x/s")
        kept.append(read_json(tmp_path / "rows.json")["rows"])
        yield dict(name="a", rate=2.0, unit="x/s")
        if config.repeats == 1:
            raise UserError("the disk is gone")

    kept, stub = [], ModuleType("benchmarks.stub", "A stub.")
    stub.run, stub.Config = run, Common
    monkeypatch.setitem(sys.modules, "benchmarks.stub", stub)
    monkeypatch.setattr(bench, "NAMES", ["stub"])
    words = ["stub", "--device", "cpu", "--json", "rows.json", "--repeats"]
    assert_user_error(door(*words, 1), "the disk is gone")
    assert kept == [[dict(name="a", rate=1.0, unit="x/s")]]
    assert read_json(tmp_path / "rows.json")["rows"] == (rows := [dict(name="a", rate=2.0, unit="x/s")])
    first, about, table = door(*words, 2).stdout.split("\n", 2)
    assert first == "stub: A stub." and "torch" in about and table == "\n" + markdown_table(rows)


# ------------------------------------------------------------------------------------------- every command, in small


@needs_gpt2
def test_hellaswag_is_scored_by_all_contestants(measure, hellaswag_file):
    assert len(measure("hellaswag", size="tiny", rows=3, data=hellaswag_file)) == 4


@needs_gpt2
@pytest.mark.slow
def test_lora_and_peft_begin_with_the_same_loss(measure, alpaca_file):
    pytest.importorskip("peft")
    losses = {name: row["first_loss"] for name, row in measure("lora", size="tiny", data=alpaca_file).items()}
    assert losses["this project, torch.float32"] == pytest.approx(losses["peft, torch.float32"], abs=1e-3)


@pytest.mark.slow
def test_tokenizers_are_compared(measure, tmp_path):
    rows = measure("bpe", data=text_file(tmp_path / "text.txt", 20_000))
    assert {"training: tokenizers", "encoding: tiktoken", "peak memory: this project"} <= set(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, n_rows",
    [("ladder", dict(size="tiny", batch_size=4, sequence_length=16), 8), ("train", dict(size="tiny", batch_size=4), 3),
     ("sample", dict(size="tiny", new_tokens=3), 3), ("data", {}, 7)],
)  # fmt: skip
def test_every_contestant_has_a_row(measure, name, options, n_rows, request):
    if name == "data":
        request.getfixturevalue("gpt2_vocabulary")
    rows = list(measure(name, **options).values())
    assert len(rows) == n_rows
    if name == "ladder":
        assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * 8, abs=0.05)
    if name == "train":
        assert all(len(row["seconds"]) == 2 and row["ratio"] for row in rows)  # one of each turn


