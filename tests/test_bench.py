"""Benchmarks: each command runs in small, `compare` computes what its formulas say, and wrong usage is one line."""

import importlib
import shlex
import statistics
import sys
from types import SimpleNamespace

import pytest

import bench
from tests.helpers import (
    assert_user_error,
    hellaswag_rows,
    log_of,
    needs_gpt2,
    needs_proc,
    read_json,
    succeed,
    text_file,
    write_json,
)


@pytest.fixture
def measure(tmp_path):
    """Run a benchmark on a CPU in small, in another process, and return the rows that it wrote to --json, by name."""

    def run(name: str, **kwargs) -> dict[str, dict]:
        options = dict(repeats=1, device="cpu", json=tmp_path / "figures.json") | kwargs
        result = succeed("bench.py", name, cwd=tmp_path, timeout=600, **options)
        rows = {row["name"]: row for row in read_json(tmp_path / "figures.json")["rows"]}
        assert all(f" {name} |" in result.stdout for name in rows)
        assert not [row["error"] for row in rows.values() if "error" in row]
        return rows

    return run


# -------------------------------------------------------------------------------------------------------- measuring

CPU = SimpleNamespace(device=SimpleNamespace(type="cpu"), synchronize=lambda: None, peak_flops=lambda: None)


def test_a_row_has_the_median_rate_its_spread_and_the_ratio_to_the_first(monkeypatch):
    from benchmarks.measure import markdown_table, rates

    seconds = [9, 9, 1, 0.5, 2, 0.25, 30, 0.125]  # in turn; the first round does not count
    clock = iter(t for elapsed in seconds for t in (0.0, elapsed))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    plain, ours = list(rates(dict(plain=bool, ours=bool), 3, CPU, dict(plain=6, ours=12), "things/s"))[-2:]
    assert (plain["rate"], plain["low"], plain["high"], plain["ratio"]) == (3.0, 0.2, 6.0, 1.0)
    assert (ours["rate"], ours["ratio"]) == (48.0, 48 / statistics.median([6, 3, 0.2]))
    assert " 3.0 things/s (0.2 to 6.0) |" in markdown_table([plain, ours])


def test_a_contestant_that_raises_is_a_row_and_the_others_go_on():
    from benchmarks.measure import built_late, rates

    theirs = built_late(importlib.import_module, "absent_package")
    rows = list(rates(dict(ours=bool, theirs=theirs), 2, CPU, 1, "x/s"))
    assert [row["name"] for row in rows] == ["theirs", "ours", "ours"]
    assert "absent_package" in rows[0]["error"]


@needs_proc
def test_peak_memory_counts_all_processes_of_a_command():
    from benchmarks.measure import peak_memory

    hold = "import time; block = bytearray(b'x' * 60_000_000); time.sleep(1)"
    child = f"import subprocess, sys; block = b'x' * 60_000_000; subprocess.run([sys.executable, '-c', {hold!r}])"
    assert 120e6 < peak_memory([sys.executable, "-c", child]) < 200e6


# ----------------------------------------------------------------------------------------------------------- the door


@pytest.fixture
def door(inline, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *args: inline(bench.main, *args)


WRONG = {
    "racing": ["racing"],
    "bpe --json no/such/file.json": ["no/such/file.json"],
    "bpe --data absent.txt": ["absent.txt"],
    "compare tiny 'tiny --seed 3'": ["--seed"],
    "compare tiny 'tiny --out_dir x'": ["--out_dir"],
    "compare tiny 'sample.py tiny'": ["sample.py"],
}


@pytest.mark.parametrize("line, words", WRONG.items())
def test_wrong_usage_is_one_line(door, tmp_path, line, words):
    assert_user_error(door(*shlex.split(line)), *words)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------- two commands over seeds

STUB = """
import json, pathlib, sys

def given(flag):
    return sys.argv[sys.argv.index(flag) + 1]

losses = LOSSES
out_dir = pathlib.Path(given("--out_dir"))
out_dir.mkdir(parents=True)
start = dict(step=0, kind="run", config=dict(max_steps=1), words=sys.argv[1:], data=dict(DATA), tokenizer="TOKENIZER")
val = dict(step=1, kind="val", loss=losses[int(given("--seed")) - 1], bpb=2.0, tokens=TOKENS)
(out_dir / "log.jsonl").write_text(json.dumps(start) + "\\n" + json.dumps(val))
"""


@pytest.fixture
def checkout(tmp_path):
    """checkout(name, losses of the seeds): the command of a script that ends at once, and a second time fails."""

    def make(name: str, losses: list, tokenizer="a", source="text", tokens=9) -> str:
        (tmp_path / name).mkdir()
        data = dict(source=source, tokenizer=tokenizer)
        text = STUB.replace("LOSSES", str(losses)).replace("DATA", str(data)).replace("TOKENIZER", tokenizer)
        text = text.replace("TOKENS", str(tokens))
        (tmp_path / name / "train_gpt2.py").write_text(text)
        return f"{name}/train_gpt2.py tiny"

    return make


def compared(door, tmp_path, *commands: str, seeds: int) -> list[dict]:
    result = door("compare", *commands, "--seeds", seeds, "--json", "rows.json")
    assert result.returncode == 0, result.stderr
    return read_json(tmp_path / "rows.json")["rows"]


def test_seeds_are_paired_and_the_standard_error_is_that_of_their_differences(door, checkout, tmp_path):
    pair = checkout("old", [3.0, 4.0, 5.0]), checkout("new", [3.5, 4.1, 5.3])
    *seeds, mean = compared(door, tmp_path, *pair, seeds=3)
    assert [row["difference"] for row in seeds] == pytest.approx([0.5, 0.1, 0.3])
    assert mean["difference"] == pytest.approx(0.3)
    assert mean["standard_error"] == pytest.approx(0.2 / 3**0.5)


def test_runs_with_different_tokenizers_are_compared_in_bits_per_byte(door, checkout, tmp_path):
    pair = checkout("old", [3.0]), checkout("new", [4.0], tokenizer="b")
    assert compared(door, tmp_path, *pair, seeds=1)[0]["difference"] == 0


@pytest.mark.parametrize(
    "other", [dict(losses=[3.0], source="another"), dict(losses=[3.0], tokens=8), dict(losses=[None])]
)
def test_runs_on_different_texts_and_runs_that_diverged_have_no_difference(door, checkout, other):
    assert_user_error(door("compare", checkout("old", [3.0]), checkout("new", **other), "--seeds", 1))


def test_a_comparison_trains_what_it_lacks_and_reads_the_rest(door, checkout, tmp_path):
    pair = checkout("old", [9.0, 9.0]), checkout("new", [7.5, 7.5])
    compared(door, tmp_path, *pair, seeds=1)
    *_, mean = compared(door, tmp_path, *pair, seeds=2)
    assert (mean["difference"], mean["standard_error"]) == (-1.5, 0)
    words = [log_of(path.parent, "run")[0]["words"] for path in tmp_path.glob("out/compare/*/log.jsonl")]
    assert sorted(found[found.index("--seed") + 1] for found in words) == ["1", "1", "2", "2"]


# ------------------------------------------------------------------------------------------- every command, in small


@needs_gpt2
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, n_rows",
    [
        ("data", {}, 7),
        ("hellaswag", dict(size="tiny", rows=3), 4),
        ("sample", dict(size="tiny", new_tokens=3), 3),
        ("train", dict(size="tiny", batch_size=4), 3),
        ("bpe", {}, 10),
        ("lora", dict(size="tiny", turns=1), 3),
        ("loss", dict(size="tiny", vocab_size=500, positions=64), 4),
        ("ladder", dict(size="tiny", batch_size=4, sequence_length=16), 8),
    ],
)
def test_a_command_has_a_row_for_each_contestant_and_these_compute_the_same(measure, tmp_path, name, options, n_rows):
    if name == "hellaswag":
        options |= dict(data=hellaswag_rows(tmp_path / "hellaswag.jsonl"))
    if name == "bpe":
        options = dict(data=text_file(tmp_path / "text.txt", 20_000))
    if name == "lora":
        alpaca = [dict(instruction=f"Count to {i}.", input="", output=f"{i} " * i) for i in range(40)]
        options |= dict(data=write_json(tmp_path / "alpaca.json", alpaca))
    rows = measure(name, **options).values()
    assert len(rows) == n_rows
    losses = [loss for row in rows if (loss := row.get("loss") or row.get("first_loss"))]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-2)
