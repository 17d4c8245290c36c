"""Benchmarks: that measuring itself is right, that each command runs, and that wrong usage is one line."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from benchmarks import ablate, gpu, speedrun
from benchmarks.measure import in_own_process, interleave, machine, peak_memory, table
from cli import UserError
from run.runtime import Runtime
from tests.helpers import ROOT, arguments, assert_user_error, environment, run_inline, succeed, text_file

CPU = SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None)
COMMANDS = [
    "ladder",
    "train",
    "bpe",
    "data",
    "hellaswag",
    "lora",
    "sample",
    "save",
    "speedrun",
    "tried",
    "ablate",
    "gpu",
]
needs_gpt2 = pytest.mark.usefixtures("gpt2_vocabulary")


@pytest.fixture(scope="module")
def gpt2_vocabulary():
    import tiktoken

    try:
        tiktoken.get_encoding("gpt2")
    except Exception as e:
        pytest.skip(f"GPT-2's vocabulary is not to be had here: {type(e).__name__}")


@pytest.fixture
def measure(tmp_path):
    """Run a benchmark on a CPU in small, in a process of its own, and return the rows that it wrote to --json."""

    def run(name: str, **kwargs) -> list[dict]:
        options = dict(repeats=1, device="cpu", json=tmp_path / "figures.json") | kwargs
        succeed("bench.py", name, cwd=tmp_path, timeout=600, **options)
        content = json.loads((tmp_path / "figures.json").read_text())
        assert content["benchmark"] == name and content["machine"]["torch"] == torch.__version__
        return content["rows"]

    return run


@pytest.fixture
def hellaswag_file(tmp_path):
    """Rows of an invented HellaSwag."""
    endings = ["drinks it.", "sings to the moon.", "counts every tile of the roof.", "sleeps."]
    row = dict(activity_label="Tea", ctx_a="A woman makes tea.", ctx_b="she", ctx="A woman makes tea. she", label=0)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | dict(ind=i, endings=endings)) + "\n" for i in range(5)))
    return path


@pytest.fixture
def alpaca_file(tmp_path):
    rows = [dict(instruction=f"Count to {i}.", input="", output=" ".join(map(str, range(i + 1)))) for i in range(40)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    return path


# -------------------------------------------------------------------------------------------------------- measuring


def test_contestants_take_turns_and_the_first_round_does_not_count():
    order = []
    seconds = interleave({name: lambda name=name: order.append(name) for name in "abc"}, 3, CPU)
    assert order == list("abc") * 4
    assert {name: len(values) for name, values in seconds.items()} == dict(a=3, b=3, c=3)


def test_a_table_has_medians_spread_and_ratios_to_the_first(capsys):
    first, second = table({"plain": [1.0, 2.0, 30.0], "ours": [0.5, 0.25, 0.125]}, work=6, unit="things/s")
    assert (first["rate"], first["low"], first["high"], first["ratio"]) == (3.0, 0.2, 6.0, 1.0)
    assert (second["rate"], second["ratio"]) == (24.0, statistics.median([1, 2, 30]) / 0.25)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_what_a_contestant_changes_in_its_own_process_stays_there(tmp_path):
    here = Path.cwd()
    in_own_process(os.chdir, tmp_path)
    assert Path.cwd() == here and in_own_process(os.getpid) != os.getpid()


def test_an_error_of_a_contestant_comes_back_as_it_is():
    with pytest.raises(ValueError, match="no number"):
        in_own_process(int, "no number")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_counts_all_processes_of_a_command():
    hold = "import time; block = bytearray(b'x' * 60_000_000); time.sleep(1)"
    child = f"import subprocess, sys; block = b'x' * 60_000_000; subprocess.run([sys.executable, '-c', {hold!r}])"
    assert 120e6 < peak_memory([sys.executable, "-c", child]) < 200e6


def test_a_command_that_fails_has_no_peak():
    with pytest.raises(RuntimeError, match="nonsense"):
        peak_memory([sys.executable, "-c", "raise SystemExit('nonsense')"])


def test_the_machine_is_described():
    assert set(machine(CPU)) == {"device", "threads", "torch", "python"} and machine(CPU)["device"]


# ----------------------------------------------------------------------------------------------------------- the door


@pytest.fixture
def door(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda *args: run_inline(bench.main, list(args), capsys, monkeypatch)


@pytest.mark.parametrize(
    "args",
    [[], ["racing"], ["--repeats", "3"], ["bpe", "--repeats", "0"], ["bpe", "--repeats", "1e9"], ["bpe", "--x", "1"],
     ["bpe", "--json", "no/such/file.json"], ["bpe", "--fraction", "nan"], ["bpe", "--size", "gpt4"],
     ["bpe", "--batch_size", "-1"], ["bpe", "--data", "absent.txt"]],
    ids=str,
)  # fmt: skip
def test_wrong_usage_is_one_line(door, args):
    assert_user_error(door(*args))


def test_the_error_names_the_commands(door):
    assert_user_error(door("racing"), *COMMANDS)


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=str)
def test_every_command_explains_itself(door, args):
    result = door(*args)
    assert result.returncode == 0 and "--repeats" in result.stdout and len(result.stdout.splitlines()) > 15


# ------------------------------------------------------------------------------------------- every command, in small


@needs_gpt2
def test_hellaswag_is_scored_by_all_contestants(measure, hellaswag_file):
    rows = measure("hellaswag", size="tiny", rows=3, data=hellaswag_file)
    assert {row["name"].split(",")[0] for row in rows} == {"one row at a time", "this project"}
    assert all(row["rate"] > 0 for row in rows)


@needs_gpt2
def test_lora_and_peft_begin_with_the_same_loss(measure, alpaca_file):
    pytest.importorskip("peft")
    losses = {row["name"]: row["first_loss"] for row in measure("lora", size="tiny", data=alpaca_file)}
    assert losses["this project, torch.float32"] == pytest.approx(losses["peft, torch.float32"], abs=1e-3)


def test_tokenizers_are_compared(measure, tmp_path):
    rows = measure("bpe", data=text_file(tmp_path / "text.txt", 20_000))
    assert {"tokenizers", "this project", "tiktoken", "memory of this project"} <= {row["name"] for row in rows}


def test_a_checkpoint_is_saved_in_both_ways(measure, tmp_path):
    seconds = {row["name"]: row["seconds"] for row in measure("save", size="tiny", repeats=2)}
    assert sorted(map(len, seconds.values())) == [2, 2, 2, 4] and min(map(min, seconds.values())) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]  # nothing stays


@pytest.mark.slow
def test_a_checkpoint_of_a_divided_model_is_saved_in_both_ways(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = dict(size="tiny", repeats=2, shard="full", device="cpu", json=tmp_path / "figures.json")
    command = [*torchrun, str(ROOT / "bench.py"), "save", *arguments(**options)]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("run.save() alone") == 1  # one rank says it
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert sorted(len(row["seconds"]) for row in rows) == [2, 2, 2, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.slow
def test_every_rung_of_the_ladder_is_measured(measure, tmp_path):
    rows = measure("ladder", size="tiny", batch_size=4)
    assert [row["name"] for row in rows][:2] == ["fp32, all by hand", "flash attention"] and len(rows) == 8
    assert all(row["first"] > 0 and row["loss"] == pytest.approx(rows[0]["loss"], abs=0.05) for row in rows)
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_training_steps_are_compared(measure):
    rows = measure("train", size="tiny", batch_size=4)
    assert [row["name"] for row in rows] == ["plain, eager, fp32", "plain with bf16 autocast", "this project"]
    assert all(len(row["seconds"]) == 2 for row in rows)  # one of each turn


@pytest.mark.slow
def test_generation_is_compared(measure):
    rows = measure("sample", size="tiny", new_tokens=3)
    assert len(rows) == 4 and all(row["rate"] > 0 for row in rows)


@pytest.mark.slow
@needs_gpt2
def test_sharding_and_reading_are_compared(measure):
    rows = {row["name"]: row["rate"] for row in measure("data")}
    assert rows["peak memory"] > 10 and rows["fineweb.py, from start to end"] > 0 and rows["start-up"] > 0


def test_tokens_to_the_target_are_fractions_of_those_of_the_baseline():
    reached = [dict(kind="val", loss=4.0), dict(kind="val", loss=3.0), dict(kind="target", tokens=2560)]
    config = SimpleNamespace(steps=10, parameters="1M")  # 10,240 tokens
    row = speedrun.row("speedrun", [reached, reached[:1]], config)
    assert row == dict(name="speedrun", losses=[3.0, 4.0], loss=3.5, fractions=[0.25, None])


def test_lines_of_the_speedrun_are_chosen_by_name():
    assert list(speedrun.lines_of(("cosine",))) == ["speedrun", "cosine"]
    assert speedrun.lines_of(()) == speedrun.LINES
    with pytest.raises(UserError, match="'no cosine'.*'cosine'"):
        speedrun.lines_of(("cosine", "no cosine"))


@pytest.mark.slow
def test_every_line_of_the_speedrun_is_trained(measure):
    rows = measure("speedrun", steps=12)
    assert len(rows) == len(speedrun.ADAMW) + len(speedrun.LINES)
    assert all(0 < row["loss"] < 10 and len(row["losses"]) == 1 for row in rows)


@pytest.mark.slow
@needs_gpt2
def test_all_parts_of_the_report_of_a_gpu_run_on_a_cpu_in_small(tmp_path, hellaswag_file, alpaca_file):
    hellaswag_file.rename(tmp_path / "hellaswag.jsonl")
    alpaca_file.rename(tmp_path / "alpaca.json")
    options = dict(out="gpu", size="tiny", device="cpu", repeats=1, new_tokens=3, data=".", minutes=60)
    succeed("bench.py", "gpu", cwd=tmp_path, timeout=3600, **options)
    report = json.loads((tmp_path / "gpu" / "report.json").read_text())
    assert list(report["parts"]) == list(gpu.PARTS) and not report["left_out"]
    assert {name: part["error"] for name, part in report["parts"].items() if part["error"]} == {}
    assert all(part["rows"] for part in report["parts"].values())
    assert not [row for part in report["parts"].values() for row in part["rows"] if row.get("ok") is False]
    for name in ("train.png", "ladder.png"):
        assert (tmp_path / "gpu" / name).read_bytes().startswith(b"\x89PNG")


def test_every_change_of_the_ablation_trains_another_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = SimpleNamespace(data=str(text_file(tmp_path / "text.txt")), steps=10, repeats=1)
    losses = {row["name"]: row["mean"] for row in ablate.run(config, Runtime.setup("cpu", "float32"))}
    assert all(0 < loss < 8 for loss in losses.values())
    same = [name for name, loss in losses.items() if loss == losses["the recipe"]]
    assert same == ["the recipe"]
