"""Benchmarks: that measuring itself is right, that each command runs, and that wrong usage is one line."""

import importlib
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import bench
from benchmarks import compare
from benchmarks.measure import Common, built_late, markdown_table, peak_memory, rates
from benchmarks.steps import in_own_process, measure_step, step_rates
from parts.cli import UserError
from tests.helpers import (
    ROOT,
    SMALL,
    arguments,
    assert_user_error,
    column,
    command,
    environment,
    hellaswag_rows,
    log_of,
    n_logged,
    needs_gpt2,
    needs_proc,
    read_json,
    run_script,
    succeed,
    text_file,
    wait_for_steps,
    write_json,
)

CPU = SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None, peak_flops=lambda: None)
NOT_COMMANDS = {"__init__", "measure", "steps"}
COMMANDS = sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - NOT_COMMANDS)


@pytest.fixture
def measure(tmp_path):
    """Run a benchmark on a CPU in small, in another process, and return the rows that it wrote to --json, by name."""

    def run(name: str, **kwargs) -> dict[str, dict]:
        options = dict(repeats=1, device="cpu", json=tmp_path / "figures.json") | kwargs
        result = succeed("bench.py", name, cwd=tmp_path, timeout=600, **options)
        content = read_json(tmp_path / "figures.json")
        assert content["machine"]["torch"] == torch.__version__
        assert content["machine"]["device"]
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

    def build(name):
        order.append(f"build {name}")
        return lambda: order.append(name)

    rows = list(rates({name: built_late(build, name) for name in "ab"}, 2, CPU, 1, "things/s"))
    assert order == ["build a", "a", "build b", "b", "a", "b", "a", "b"]
    assert [row["name"] for row in rows] == ["a", "b", "a", "b"]


def test_a_row_has_the_median_rate_its_spread_and_the_ratio_to_the_first(monkeypatch):
    seconds = [9, 9, 1, 0.5, 2, 0.25, 30, 0.125]  # in turn; the first round does not count
    clock = iter(t for elapsed in seconds for t in (0.0, elapsed))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    plain, ours = list(rates(dict(plain=bool, ours=bool), 3, CPU, dict(plain=6, ours=12), "things/s"))[-2:]
    assert (plain["rate"], plain["low"], plain["high"], plain["ratio"]) == (3.0, 0.2, 6.0, 1.0)
    assert (ours["rate"], ours["ratio"]) == (48.0, 48 / statistics.median([6, 3, 0.2]))
    assert " 3.0 things/s (0.2 to 6.0) |" in markdown_table([plain, ours])


def test_a_table_shows_sizes_and_counts_as_people_read_them():
    row = dict(name="m", memory=3 * 2**29, n=12345, losses=[0.5, 2.0], mfu=None)
    (*_, line) = markdown_table([row, dict(name="failed", error="no")]).splitlines()[:-1]
    assert line == "|      m | 1.50 GiB | 12,345 | 0.5, 2 | n/a |       |"
    assert markdown_table([]) == "nothing to show\n"


def test_a_contestant_that_raises_is_a_row_that_says_so_and_the_others_go_on():
    theirs = built_late(importlib.import_module, "absent_package")
    rows = list(rates(dict(ours=bool, theirs=theirs), 2, CPU, 1, "x/s"))
    assert [row["name"] for row in rows] == ["theirs", "ours", "ours"]
    assert "absent_package" in rows[0]["error"]
    assert "absent_package" in markdown_table(rows)


def measured(seconds: list[float]) -> dict:
    return dict(seconds=seconds, flops=0, memory=1, micro_batch_size=1, first=1.0, losses=[1.0])


def test_steps_of_all_turns_count_and_one_that_fails_leaves_the_others_a_ratio():
    turns = dict(plain=[measured([1.0]), measured([3.0])], ours=[measured([0.5]), measured([0.5])])

    def take(name):
        return turns[name].pop(0)

    def fail():
        raise RuntimeError("no compiler\nmore")

    contestants = dict(plain=lambda: take("plain"), compiled=fail, ours=lambda: take("ours"))
    rows = list(step_rates(contestants, 6, "tokens/s", 2, CPU))
    assert [row["name"] for row in rows] == ["plain", "compiled", "ours", "plain", "ours"]
    assert rows[1]["error"] == "RuntimeError: no compiler"
    assert rows[-2]["rate"] == statistics.median([6 / 1, 6 / 3])
    assert rows[-1]["ratio"] == 12 / 4
    assert rows[-1]["seconds"] == [0.5, 0.5]


def test_without_its_first_contestant_a_comparison_has_rates_and_no_ratio():
    def fail():
        raise MemoryError

    *_, row = step_rates(dict(plain=fail, ours=lambda: measured([0.5])), 6, "tokens/s", 1, CPU)
    assert row["rate"] == 12
    assert row["ratio"] is None


def test_a_step_that_is_out_of_memory_is_split_until_it_fits():
    def make(rt):
        def step(n_micro):
            if n_micro < 4:
                raise torch.OutOfMemoryError("too large")
            return torch.tensor(float(n_micro))

        return step, 7.0

    found = measure_step(make, 16, 2, "cpu")
    assert found["micro_batch_size"] == 4
    assert found["losses"] == [4.0, 4.0, 4.0]
    assert len(found["seconds"]) == 2
    with pytest.raises(UserError, match="smaller --size"):
        measure_step(make, 2, 2, "cpu")


def test_what_a_contestant_changes_in_its_own_process_stays_there(tmp_path):
    here = Path.cwd()
    in_own_process(os.chdir, tmp_path)
    assert Path.cwd() == here
    assert in_own_process(os.getpid) != os.getpid()
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


WRONG = [
    "",
    "racing",
    "measure",
    "--repeats 3",
    "bpe --repeats 0",
    "bpe --repeats 1e9",
    "bpe --size tiny",
    "bpe --json no/such/file.json",
    "ladder --batch_size -1",
    "bpe --data absent.txt",
    "compare tiny",
    "compare tiny tiny --seeds 0",
]


@pytest.mark.parametrize("line", WRONG)
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
    assert result.returncode == 0
    assert "--json" in result.stdout
    assert len(result.stdout.splitlines()) > 9


def test_rows_are_kept_as_they_come_and_replace_earlier_ones(door, tmp_path, monkeypatch):
    kept = []

    def run(config, rt):
        yield dict(name="a", rate=1.0, unit="x/s")
        kept.append(read_json(tmp_path / "rows.json")["rows"])
        yield dict(name="a", rate=2.0, unit="x/s")
        if config.repeats == 1:
            raise UserError("the disk is gone")

    stub = ModuleType("benchmarks.stub", "A stub.")
    stub.run = run
    stub.Config = Common
    monkeypatch.setitem(sys.modules, "benchmarks.stub", stub)
    monkeypatch.setattr(bench, "NAMES", ["stub"])
    words = ["stub", "--device", "cpu", "--json", "rows.json", "--repeats"]
    assert_user_error(door(*words, 1), "the disk is gone")
    assert kept == [[dict(name="a", rate=1.0, unit="x/s")]]
    rows = read_json(tmp_path / "rows.json")["rows"]
    assert rows == [dict(name="a", rate=2.0, unit="x/s")]
    first, about, table = door(*words, 2).stdout.split("\n", 2)
    assert first == "stub: A stub."
    assert "torch" in about
    assert table == "\n" + markdown_table(rows)


# ------------------------------------------------------------------------------------------- two commands over seeds


@pytest.fixture
def words(tmp_path):
    """words(max_steps): a command that trains a small model."""
    text = text_file(tmp_path / "text.txt")

    def make(max_steps: int) -> str:
        changes = dict(max_steps=max_steps, eval_interval=max_steps, checkpoint_interval=0, sample_interval=0)
        constants = SMALL | changes | dict(data=text)
        return " ".join(["tiny", *arguments(**constants)])

    return make


def runs_of(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("out/compare/*/log.jsonl"))


def test_seeds_are_paired_and_the_standard_error_is_that_of_their_differences(door, tmp_path, monkeypatch):
    losses = {("a", 1): 3.0, ("b", 1): 3.5, ("a", 2): 4.0, ("b", 2): 4.1, ("a", 3): 5.0, ("b", 3): 5.3}
    order = []

    def trained(command, words, seed, out_dir):
        order.append((command, seed))
        val = dict(step=1, kind="val", loss=losses[command, seed], bpb=1.0)
        return [dict(step=0, kind="run", data="text"), val]

    monkeypatch.setattr(compare, "trained", trained)
    result = door("compare", "a", "b", "--seeds", 3, "--json", "rows.json")
    assert result.returncode == 0
    assert order == list(losses)
    *seeds, mean = read_json(tmp_path / "rows.json")["rows"]
    assert [row["difference"] for row in seeds] == pytest.approx([0.5, 0.1, 0.3])
    assert mean["difference"] == pytest.approx(0.3)
    assert mean["standard_error"] == pytest.approx(0.2 / 3**0.5)


def record_of(tokenizer: str, source="text", loss=3.0) -> list[dict]:
    start = dict(step=0, kind="run", data=dict(source=source, tokenizer=tokenizer), tokenizer=tokenizer)
    return [start, dict(step=1, kind="val", loss=loss, bpb=loss / 2)]


def test_losses_per_token_are_compared_only_if_the_tokens_are_the_same():
    assert compare.losses([record_of("a"), record_of("a", loss=4.0)]) == [3.0, 4.0]
    assert compare.losses([record_of("a"), record_of("b", loss=4.0)]) == [1.5, 2.0]
    with pytest.raises(UserError, match="different texts"):
        compare.losses([record_of("a"), record_of("a", source="another")])
    with pytest.raises(UserError, match="diverged"):
        compare.losses([record_of("a"), record_of("a") + [dict(step=2, kind="val", loss=None, bpb=None)]])


STUB = """
import json, pathlib, sys

def write(loss):
    out_dir = pathlib.Path(sys.argv[sys.argv.index("--out_dir") + 1])
    out_dir.mkdir(parents=True)
    start = dict(step=0, kind="run", config=dict(max_steps=1), words=sys.argv[1:])
    val = dict(step=1, kind="val", loss=loss, bpb=1.0)
    (out_dir / "log.jsonl").write_text(json.dumps(start) + "\\n" + json.dumps(val))

"""


@pytest.fixture
def two_checkouts(tmp_path) -> tuple[str, str]:
    """Two commands; what they start ends at once, and a second time in the same directory fails."""
    for name, loss in (("old", 9.0), ("new", 7.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_gpt2.py").write_text(STUB + f"write(loss={loss})\n")
    return "old/train_gpt2.py tiny", "new/train_gpt2.py tiny"


def test_a_command_in_another_checkout_is_run_there(door, two_checkouts):
    result = door("compare", *two_checkouts, "--seeds", 2)
    assert "|   mean | 9.0000 | 7.5000 |    -1.5000 |         0.0000 |" in result.stdout


def test_a_comparison_trains_what_it_lacks_and_reads_the_rest(door, two_checkouts, tmp_path):
    one_seed = door("compare", *two_checkouts, "--seeds", 1)
    assert one_seed.stdout.count(": training") == 2
    assert ": complete" not in one_seed.stdout
    two_seeds = door("compare", *two_checkouts, "--seeds", 2)
    assert two_seeds.stdout.count(": training") == 2
    assert two_seeds.stdout.count(": complete") == 2
    words = [log_of(run, "run")[0]["words"] for run in runs_of(tmp_path)]
    seeds = [found[found.index("--seed") + 1] for found in words]
    assert sorted(seeds) == ["1", "1", "2", "2"]
    assert all(found[:2] == ["tiny", "--resume"] for found in words)


@pytest.mark.slow
@needs_proc
@pytest.mark.slow
def test_an_interrupted_run_saves_its_step_and_the_same_command_resumes_it(door, tmp_path, words):
    n_steps = 100
    pair = [f"{words(n_steps)} --weight_decay 0.5"] * 2
    line = command("bench.py", "compare", *pair, seeds=1)
    process = subprocess.Popen(line, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not runs_of(tmp_path):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    [run] = runs_of(tmp_path)
    wait_for_steps(run, 2, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 128 + signal.SIGTERM
    taken = n_logged(run)
    assert 2 <= taken < n_steps
    process.communicate()
    result = door("compare", *pair, "--seeds", 1)
    assert f"{column(run, 'val', 'loss')[-1]:.4f}" in result.stdout
    starts = log_of(run, "run")
    assert [start["step"] for start in starts] == [0, taken]
    assert starts[0]["config"]["seed"] == 1
    assert starts[0]["config"]["weight_decay"] == 0.5
    assert column(run, "train", "step") == list(range(1, n_steps + 1))


REFUSED = {
    "tiny --seed 3": "--seed",
    "tiny --out_dir x": "--out_dir",
    "sample.py tiny": "training script",
    "absent/train_gpt2.py tiny": "training script",
    'tiny "': "quotes",
}


@pytest.mark.parametrize("line, word", REFUSED.items())
def test_a_command_that_cannot_be_compared_is_refused_before_anything_is_trained(door, tmp_path, line, word):
    assert_user_error(door("compare", "tiny", line), word)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_a_training_script_refuses_is_the_one_line_of_the_comparison(tmp_path):
    result = run_script("bench.py", "compare", "tiny --nonsense 1", "tiny", cwd=tmp_path)
    assert_user_error(result, "--nonsense")


# ------------------------------------------------------------------------------------------- every command, in small


@needs_gpt2
def test_hellaswag_is_scored_by_all_contestants(measure, hellaswag_file):
    assert len(measure("hellaswag", size="tiny", rows=3, data=hellaswag_file)) == 4


@needs_gpt2
@pytest.mark.slow
def test_lora_and_peft_begin_with_the_same_loss(measure, alpaca_file):
    pytest.importorskip("peft")
    rows = measure("lora", size="tiny", turns=1, data=alpaca_file)
    losses = {name: row["first_loss"] for name, row in rows.items()}
    assert losses["this project, float32"] == pytest.approx(losses["peft, float32"], abs=1e-3)


@pytest.mark.slow
def test_tokenizers_are_compared(measure, tmp_path):
    rows = measure("bpe", data=text_file(tmp_path / "text.txt", 20_000))
    assert {"training: tokenizers", "encoding: tiktoken", "peak memory: this project"} <= set(rows)


@pytest.mark.slow
def test_every_form_of_the_loss_computes_the_same(measure):
    rows = measure("loss", size="tiny", vocab_size=500, positions=64).values()
    losses = [row["loss"] for row in rows]
    assert len(losses) == 4
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-2)
    assert all(row["memory"] and row["ms"] for row in rows)


@pytest.mark.slow
def test_every_rung_computes_the_same(measure):
    rows = measure("ladder", size="tiny", batch_size=4, sequence_length=16).values()
    losses = [row["loss"] for row in rows]
    assert losses == pytest.approx([losses[0]] * 8, abs=0.05)
    assert all(row["over_first"] and row["over_before"] for row in rows)


@pytest.mark.slow
def test_a_rung_that_this_machine_cannot_make_is_a_row_that_says_why(tmp_path):
    options = dict(size="tiny", batch_size=4, sequence_length=16, repeats=1, device="cpu", json=tmp_path / "rows.json")
    result = succeed("bench.py", "ladder", cwd=tmp_path, env=environment(CXX="/nonexistent/g++"), **options)
    *others, last = read_json(tmp_path / "rows.json")["rows"]
    assert "/nonexistent/g++" in last["error"]
    assert len([row["over_first"] for row in others]) == 7
    assert "/nonexistent/g++" in result.stdout


@pytest.mark.slow
def test_the_training_script_is_measured_against_the_plain_step(measure):
    rows = measure("train", size="tiny", batch_size=4)
    assert [name.split(",")[0] for name in rows] == ["plain", "plain with bf16 autocast", "this project"]
    for row in rows.values():
        assert len(row["seconds"]) == 2  # one of each turn
        assert row["ratio"]
        assert row["memory"]
        assert row["mfu"] is None  # of a CPU
        assert row["losses"][0] == pytest.approx(6.93, abs=0.1)  # ln 1024: random tokens, random weights


@needs_gpt2
@pytest.mark.slow
def test_shards_and_batches_are_timed(measure):
    assert len(measure("data")) == 7


@pytest.mark.slow
def test_generation_is_timed(measure):
    assert len(measure("sample", size="tiny", new_tokens=3)) == 3
