"""Benchmarks: that measuring itself is right, that each command runs, and that wrong usage is one line."""

import importlib
import itertools
import os
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import bench
import lora_finetune
from benchmarks import gpu, roofline, save, sweep, tiny
from benchmarks.measure import Common, built_late, in_own_process, markdown_table, peak_memory, rates
from cli import UserError, parse_args
from finetuning.lora import TARGETS, trainable_parameters
from model import GPT, GPTConfig
from run.checkpoint import save_model
from tests.finetuning import ROWS, small_gpt
from tests.helpers import (
    ROOT,
    arguments,
    assert_user_error,
    gone,
    hellaswag_rows,
    needs_gpt2,
    needs_proc,
    prose,
    read_json,
    succeed,
    text_file,
    write_json,
)

CPU = SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None)
NOT_COMMANDS = ("__init__", "measure", "ideas")
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
        errors = [row["error"] for row in rows.values() if "error" in row]
        assert all("pip install gigatoken" in error for error in errors)  # it is optional
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
lab --seeds nan
save --size gpt4
roofline --card x
ladder --batch_size -1
bpe --data absent.txt
record nowhere
gpu
gpu --out here --only nonsense
sweep --lora_dims -1
sweep --adapter x --merge y"""


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


def test_saving_has_a_row_as_soon_as_something_is_timed(rt, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = save.run(save.Config(size="tiny", repeats=2, device="cpu"), rt)
    assert [(row["name"], len(row["seconds"])) for row in itertools.islice(rows, 3)] == [
        ("a step", 1), ("a checkpoint, waited for", 1), ("a step", 2)
    ]  # fmt: skip
    rows.close()


def test_the_roofline_counts_the_operations_that_mfu_counts_but_for_the_half_of_attention_that_is_masked(rt):
    rows = {row["name"]: row for row in roofline.run(roofline.Config(), rt)}
    with torch.device("meta"):
        counted = 65_536 * GPT(GPTConfig(vocab_size=50304)).estimate_flops(1024) / 1e12
    attention, step = rows["attention"]["tera"] * 12 / 7, rows["the step"]
    products = rows["products of the blocks"]["tera"] + rows["products of the head"]["tera"]
    assert products + attention == pytest.approx(counted, rel=1e-3)
    assert step["tokens_per_second"] == 477_320  # as the plan has it
    assert step["mfu"] == pytest.approx(counted / 989 / step["ms"] * 1e3)


@pytest.mark.slow
def test_a_checkpoint_of_a_divided_model_is_saved_in_both_ways(tmp_path):
    options = dict(size="tiny", repeats=2, shard="full", device="cpu", json=tmp_path / "figures.json")
    result = succeed("bench.py", "save", ranks=2, cwd=tmp_path, timeout=300, **options)
    assert result.stdout.count("run.save() alone") == 1  # one rank says it
    rows = read_json(tmp_path / "figures.json")["rows"]
    assert sorted(len(row["seconds"]) for row in rows) == [2, 2, 2, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]  # nothing stays


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, n_rows",
    [("ladder", dict(size="tiny", batch_size=4, sequence_length=16), 8), ("train", dict(size="tiny", batch_size=4), 3),
     ("sample", dict(size="tiny", new_tokens=3), 3), ("data", {}, 8)],
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


def test_windows_of_characters_score_each_one_once_after_a_character_of_context(small_tokenizer, tmp_path):
    text, total = prose(150), 0.0
    model, tokenizer = small_gpt(), small_tokenizer
    save_model(tmp_path, model, tokenizer)
    for start in range(0, 149, 40):  # the last window has 29
        ids = [tokenizer.encode(part) for part in (text[start], text[start + 1 : start + 41])]
        logits, n = model(torch.tensor([ids[0] + ids[1]]))[0, :-1], len(ids[1])
        total += torch.nn.functional.cross_entropy(logits[-n:], torch.tensor(ids[1]), reduction="sum").item()
    assert tiny.cold_start(str(tmp_path), text, 40) == pytest.approx(total / 149, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- the sweep


def test_a_command_line_repeats_the_constants():
    config = replace(sweep.Config(), lora_dim=2, targets=("c_fc", "c_attn"), rslora=True, max_lr=0.02, lora_dims=(1, 0))
    parsed = parse_args(lora_finetune.Config, sweep.command_line(config, lora_dim=16, out_dir="out/r16")[2:])
    wanted = dict(targets=("c_fc", "c_attn"), rslora=True, max_lr=0.02)
    assert parsed == lora_finetune.Config(lora_dim=16, out_dir="out/r16", **wanted)


def test_a_row_of_the_sweep_has_the_peak_the_median_and_the_best(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(bytes(4321))
    steps = [dict(kind="train", memory_gib=m, tokens_per_sec=r) for m, r in ((1.0, 1100), (2.5, 1300), (2.0, 1500))]
    vals = [dict(kind="val", loss=loss) for loss in (3.0, 1.0, 2.0)]
    row = sweep.summary_row("r = 2", 1234, 0.005, steps + vals, tmp_path)
    assert list(row.values()) == "r = 2|1,234|0.500%|2.50|1,300|3.0000|1.0000|2.0000|4,321".split("|")


@pytest.mark.slow
def test_the_sweep_compares_ranks_and_full_finetuning(small_tokenizer, tmp_path):
    model = small_gpt(n_positions=128)
    save_model(tmp_path / "base", model, small_tokenizer)
    options = dict(base=tmp_path / "base", data=write_json(tmp_path / "rows.json", ROWS), out_dir=tmp_path / "sweep")
    options |= dict(max_steps=2, eval_interval=1, sample_tokens=8, dtype="float32", device="cpu")
    succeed("bench.py", "sweep", "--lora_dims", "2", "0", json=tmp_path / "figures.json", **options)
    low, full = read_json(tmp_path / "figures.json")["rows"]
    assert (low["name"], low["trainable"]) == ("r = 2", f"{trainable_parameters(model, TARGETS, 2)[0]:,}")
    assert (full["name"], full["trainable"]) == ("full", f"{model.num_params():,}")
    assert low["loss before"] == full["loss before"] and low["repeated"] in (tmp_path / "sweep/sweep.md").read_text()
    assert float(full["final loss"]) < float(full["loss before"])
    assert (tmp_path / "sweep/sweep.png").read_bytes().startswith(b"\x89PNG")
    samples = (tmp_path / "sweep/samples.md").read_text()
    assert all(f"## {prompt}\n" in samples for prompt in sweep.PROMPTS)
    assert {samples.count(f"\n| {label} |") for label in ("base", "r = 2", "full")} == {len(sweep.PROMPTS)}


def test_repetition_is_the_fraction_of_three_words_that_occur_before():
    assert sweep.repeated("") == sweep.repeated("two words") == sweep.repeated("a b c d e") == 0
    assert sweep.repeated("a b c A B C") == pytest.approx(1 / 4)  # abc, bca, cab, and abc again
    assert sweep.repeated("go go go go go go") == pytest.approx(3 / 4)


# --------------------------------------------------------------------------------------------- all that one GPU answers

WRITE = (
    "import json, sys; f = open(sys.argv[1], 'w'); "
    "json.dump(dict(rows=[dict(name='x', rate=2.0, unit='tokens/s')]), f); f.close(); "
)
FAIL = "import sys; print('some words'); sys.exit('error: there is no data')"
HANG = WRITE + (
    "import subprocess, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); "
    "open('pid', 'w').write(str(p.pid)); print('measuring', flush=True); time.sleep(300)"
)


@pytest.fixture
def report(door, monkeypatch, tmp_path):
    """report.md of a `bench.py gpu` whose parts are lines of Python: report(dict(first=WRITE), "--minutes", 3)."""

    def run(parts: dict, *words) -> str:
        monkeypatch.setattr(gpu, "PARTS", {name: (f"part {name}", []) for name in parts})
        command = lambda name, config, figures: [sys.executable, "-c", parts[name], str(figures)]  # noqa: E731
        monkeypatch.setattr(gpu, "command", command)
        result = door("gpu", "--device", "cpu", "--out", "gpu", *map(str, words))
        assert result.returncode == (0 if {*parts.values()} == {WRITE} else 2)
        return (tmp_path / "gpu" / "report.md").read_text()

    return run


@needs_proc
def test_a_limit_in_the_middle_of_a_part_keeps_its_rows_and_ends_its_processes(report, tmp_path):
    text = report(dict(first=HANG, second=WRITE), "--minutes", 2 / 60)
    first, second = re.split("## part second", text)
    assert "| 2.0 tokens/s |" in first and "cut off after 2 s" in first and "measuring" in first
    assert "no time was left" in second
    assert gone(int((tmp_path / "gpu" / "pid").read_text()))


def test_a_part_that_fails_is_named_and_the_others_go_on(report):
    first, second = re.split("## part second", report(dict(first=FAIL, second=WRITE)))
    assert "**there is no data**" in first and "some words" in first and "| 2.0 tokens/s |" in second


def test_data_that_is_not_there_is_named_and_not_downloaded():
    assert "/nowhere/alpaca*.json" in gpu.command("lora", gpu.Config(data="/nowhere"), Path())


def test_a_part_alone_is_added_to_the_report_in_its_place(report):
    both = dict(first=WRITE, second=WRITE)
    assert "part first" not in report(both, "--only", "second")
    text = report(both, "--only", "first")
    assert 0 < text.index("part first") < text.index("part second")


@needs_gpt2
@pytest.mark.slow
def test_all_parts_of_the_report_of_a_gpu_run_on_a_cpu_in_small(door, tmp_path, hellaswag_file, alpaca_file):
    words = arguments(out="gpu", size="tiny", device="cpu", data=".", minutes=60)
    assert door("gpu", *words).returncode == 0
    for name in gpu.PARTS:
        part = read_json(tmp_path / "gpu" / f"{name}.json")
        assert not part["error"] and (part["rows"] or name == "tests"), part
        assert not any("error" in row for row in part["rows"])
