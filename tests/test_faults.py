"""What goes wrong in long runs: full disks, damage, failed writes, kills; and what is logged."""

import json
import math
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from cli import UserError
from run import checkpoint
from run.checkpoint import CheckpointWriter, checkpoint_steps, damage, load_train_state, newest_intact
from run.directory import Run
from run.runtime import Runtime
from tests.helpers import assert_user_error, command, environment, log_of, succeed, weights

# ---- disks


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_gives_one_line_and_loses_no_checkpoint(train, tmp_path, small_disk):
    result = train(out="disk/run", sample_interval=0, keep_checkpoints=0, checkpoint_interval=1, eval_interval=0)
    assert_user_error(result, "o space left", "--resume", str(newest_intact(small_disk / "run")))
    steps = [step for step, _ in checkpoint_steps(small_disk / "run")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 1
    assert all(damage(path) is None for _, path in checkpoint_steps(small_disk / "run"))
    assert [p.name for p in (small_disk / "run").glob(".*")] == [".lock"]  # what did not fit is gone
    assert len(log_of(small_disk / "run", "train")) < 40  # it does not go on without being able to save
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    assert train(out="disk/run", keep_checkpoints=0, eval_interval=0, resume=True).returncode == 0


def test_a_disk_that_the_log_has_filled_gives_one_line(train, small_disk):
    (small_disk / "run").mkdir()
    train(out="disk/run", max_steps=1, keep_checkpoints=0)
    try:
        (small_disk / "ballast").write_bytes(bytes(8 * 2**20))
    except OSError:
        pass
    assert_user_error(train(out="disk/run", resume=True, max_steps=10), "o space left")
    assert damage(small_disk / "run" / "step_000001") is None


# ---- saving in the background


def test_training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(train, tmp_path, monkeypatch):
    """A write that waits for training to log another step would never end if training waited for it."""
    train(out="quick", max_steps=4, checkpoint_interval=2, eval_interval=0)
    real, waited = checkpoint.save_model, []

    def save_model(path, model, tokenizer):
        step = int(path.name.split(".")[1].removeprefix("step_"))
        deadline = time.time() + 60
        while step < 4 and len(log_of(tmp_path / "run", "train")) <= step and time.time() < deadline:
            time.sleep(0.001)
        waited.append(time.time() < deadline)
        real(path, model, tokenizer)

    monkeypatch.setattr(checkpoint, "save_model", save_model)
    monkeypatch.setattr(Runtime, "writes_in_background", True)  # as on a GPU
    assert train(max_steps=4, checkpoint_interval=2, eval_interval=0).returncode == 0
    assert waited == [True, True]
    for step in (2, 4):
        assert weights(tmp_path / "quick", step) == weights(tmp_path / "run", step)
        states = [load_train_state(tmp_path / out / f"step_{step:06d}") for out in ("quick", "run")]
        for a, b in zip(*(state["optimizer"]["optimizers"] for state in states), strict=True):
            for i in a["state"]:
                assert all(torch.equal(a["state"][i][key], b["state"][i][key]) for key in a["state"][i])


def test_on_a_cpu_a_step_does_not_compete_with_a_checkpoint(train, tmp_path, monkeypatch):
    real, found = Run.save, []

    def save(run):
        real(run)
        found.append(damage(run.out_dir / f"step_{run.step:06d}"))

    monkeypatch.setattr(Run, "save", save)
    train(max_steps=4, checkpoint_interval=2, eval_interval=0)
    assert found == [None, None]


def test_a_failed_write_is_known_before_the_next_save(tmp_path):
    def export(directory):
        raise OSError(28, "No space left on device", str(directory))

    writer = CheckpointWriter(tmp_path, 0)
    writer.save(1, export, {}, {})
    deadline = time.time() + 60
    while not writer.failed and time.time() < deadline:
        time.sleep(0.001)
    with pytest.raises(UserError, match="no space left"):
        writer.save(2, export, {}, {})


# ---- what is logged


def test_a_bad_step_is_counted_and_the_log_stays_json(train, tmp_path, monkeypatch):
    real, calls = torch.nn.utils.get_total_norm, []

    def poisoned(grads, *args):
        calls.append(0)
        if len(calls) in (2, 4):
            grads[0][0] = math.nan
        return real(grads, *args)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", poisoned)
    train(max_steps=5)
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [r["skipped_steps"] for r in records if r["kind"] == "train"] == [0, 1, 1, 2, 2]
    assert all(0 < r["memory_gib"] < 100 for r in records if r["kind"] == "train")
    assert [r["tokens"] for r in records if r["kind"] == "train"] == [256 * step for step in range(1, 6)]  # read, too
    train(max_steps=7, resume=True)
    assert log_of(tmp_path / "run", "train")[-1]["skipped_steps"] == 2


# ---- kills


@pytest.mark.slow
def test_two_hundred_kills_in_one_chain_lose_nothing(tmp_path):
    """SIGKILL while the tokenizer is trained, in saves, in pruning, in evaluations, while the log is rewritten, and at
    random moments: at the end are the weights, the figures and the log of a run that nobody disturbed."""
    succeed("train_gpt2.py", "tiny", out_dir=tmp_path / "undisturbed" / "run", timeout=1800, **CHAIN)
    run, rng, kills, announced = tmp_path / "killed" / "run", random.Random(1), Counter(), set()
    words = command("train_gpt2.py", "tiny", out_dir=run, resume=True, **CHAIN)
    for number in range(1000):
        kind = "training the tokenizer" if number < 20 else MOMENTS[number % len(MOMENTS)]
        has_come = moment(run, kind, rng) if kills.total() < 200 else lambda: False
        with open(tmp_path / "stdout", "w+") as out, open(tmp_path / "stderr", "w+") as errors:
            process = subprocess.Popen(words, env=environment(), stdout=out, stderr=errors)
            while process.poll() is None and not has_come():
                time.sleep(0.0003)
        if process.poll() is None:
            process.kill()
            kills[kind] += 1
        assert process.wait() in (0, -signal.SIGKILL), (tmp_path / "stderr").read_text()[-2000:]
        announced |= set(re.findall(r"saved (\S+)", (tmp_path / "stdout").read_text()))
        newest = max(announced, default=None)  # steps have six digits
        assert newest is None or damage(Path(newest)) is None, newest
        if process.returncode == 0:
            break
    print(dict(kills), len(announced), "announced checkpoints")
    assert kills.total() == 200 and all(kills[kind] >= 10 for kind in MOMENTS), kills
    assert_same_run(run, tmp_path / "undisturbed" / "run")


CHAIN = dict(max_steps=1200, checkpoint_interval=5, keep_checkpoints=2, eval_interval=10, eval_steps=2,
             sample_interval=50, sample_tokens=8, micro_batch_size=16, device="cpu", compile="off")  # fmt: skip
MOMENTS = ("in a save", "in pruning", "in an evaluation", "rewriting the log", "at random")


def moment(run: Path, kind: str, rng: random.Random) -> Callable[[], bool]:
    """A function that, asked again and again, says whether the moment to kill a run has come."""
    begun, delay, first = time.time(), rng.random(), []
    before = set(run.glob("step_*"))

    def after(happened: bool, seconds: float) -> bool:
        """`seconds` after something has happened for the first time"""
        if happened and not first:
            first.append(time.time())
        return bool(first) and time.time() >= first[0] + seconds

    def has_come() -> bool:
        if time.time() > begun + 60:  # a moment of milliseconds can be missed: another one will do
            return True
        if kind == "training the tokenizer":
            return after(any((run.parent / "cache").glob(".*.lock")), 0.7 * delay)
        if kind == "rewriting the log":
            return any(run.glob(".*.jsonl.*.tmp")) or any(run.glob(".samples.txt.*.tmp"))
        if kind == "at random":
            return time.time() > begun + 10 * delay
        if set(run.glob("step_*")) <= before:  # first a checkpoint, or the chain would never come to its end
            return False
        if kind == "in a save":
            return any(run.glob(".step_*.tmp/*"))
        if kind == "in pruning":
            return after(len(list(run.glob("step_*"))) > 3, 0.004 * delay)
        return after(is_evaluated(run / "log.jsonl"), 0.03 * delay)

    return has_come


def is_evaluated(log: Path) -> bool:
    """Whether the newest record is that of a step after which an evaluation is due."""
    with suppress(OSError, ValueError, IndexError):
        last = json.loads(log.read_bytes().splitlines()[-1])
        return last["kind"] == "train" and last["step"] % CHAIN["eval_interval"] == 0
    return False


def assert_same_run(one: Path, other: Path) -> None:
    """The same weights, bit for bit, and logs with the same figures, complete, every line of them JSON."""
    assert weights(one, 1200) == weights(other, 1200)
    assert [r["step"] for r in log_of(one, "train")] == list(range(1, 1201))
    figures_of = {"train": "step loss lr grad_norm tokens", "val": "step loss bpb", "sample": "step text"}
    for kind, names in figures_of.items():
        figures = [[[record[name] for name in names.split()] for record in log_of(run, kind)] for run in (one, other)]
        assert figures[0] == figures[1] and figures[0], kind
    for names in ("step_*", "samples.txt", ".step_*", ".log*", ".samples*"):
        assert [p.name for p in sorted(one.glob(names))] == [p.name for p in sorted(other.glob(names))]
    assert (one / "samples.txt").read_bytes() == (other / "samples.txt").read_bytes()
