"""How a run ends and continues: signals, kills, terminals, two processes in one directory, a target."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from filelock import FileLock

from parts.checkpoint import find_damage
from tests.corpora import wait_until
from tests.helpers import (
    SHORT,
    column,
    command,
    during_validation,
    environment,
    impatient,
    log_of,
    losses,
    small_args,
    spoil_gradients,
    start_script,
    steps_of,
    text_file,
    wait_for_steps,
)


def start(tmp_path: Path, **changes) -> subprocess.Popen:
    return start_script("train_gpt2.py", *small_args(tmp_path, **changes))


def samples(run: Path) -> str:
    return (run / "samples.txt").read_text()


# ---- two processes, terminals, names


def test_a_run_outlives_the_readers_of_its_output(short, run_dir, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout, monkeypatch.context() as context:
        context.setattr(sys, "stdout", stdout)
        short()
    assert steps_of(run_dir)[-1] == 6


def test_what_was_ignored_when_a_run_began_stays_ignored(short, run_dir, monkeypatch):
    during_validation(monkeypatch, lambda: signal.raise_signal(signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        short(eval_interval=2)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert steps_of(run_dir)[-1] == 6


def test_names_and_prompts_that_are_not_utf_8_end_no_run(train, tmp_path):
    text_file(tmp_path / "caf\udce9.txt")
    options = SHORT | dict(data=tmp_path / "caf\udce9.txt", sample_interval=3, sample_prompt="\udcff")
    train(out="out\udce9", **options)
    assert steps_of(tmp_path / "out\udce9")[-1] == 6


# ---- signals


def test_while_a_run_goes_on_no_other_enters_its_directory(train, run_dir, monkeypatch):
    run_dir.mkdir()
    with FileLock(run_dir / ".lock"):
        impatient(monkeypatch)
        for word in ({}, dict(resume=True), dict(overwrite=True)):
            train.error(str(run_dir), **word)
    assert [path.name for path in run_dir.iterdir()] == [".lock"]


@pytest.mark.slow
@pytest.mark.parametrize("name, code", [("TERM", 143), ("HUP", 129), ("INT", 130), ("USR1", 138)])
def test_a_signal_ends_the_run_with_a_checkpoint_and_until_then_no_other_process_enters(
    train, tmp_path, run_dir, monkeypatch, name, code
):
    process = start(tmp_path, max_steps=100_000, checkpoint_interval=0, eval_interval=0, sample_interval=0)
    wait_for_steps(run_dir, 3, process)
    impatient(monkeypatch)
    train.error(str(run_dir), resume=True)
    process.send_signal(signal.Signals[f"SIG{name}"])
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    [step] = steps_of(run_dir)
    assert find_damage(run_dir / f"step_{step:06d}") is None
    assert step == losses(run_dir)[-1][0]


def test_no_evaluation_begins_after_a_signal(short, run_dir, monkeypatch):
    spoil_gradients(monkeypatch, lambda step: step == 4 and signal.raise_signal(signal.SIGTERM), 0.0)
    result = short.result(eval_interval=4, sample_interval=4)
    assert result.returncode == 143
    assert "--resume" in result.stdout
    assert steps_of(run_dir)[-1] == 4
    assert not log_of(run_dir, "val")
    assert not log_of(run_dir, "sample")


def test_a_signal_in_an_evaluation_ends_the_run_after_it(short, run_dir, monkeypatch):
    during_validation(monkeypatch, lambda: signal.raise_signal(signal.SIGTERM))
    assert short.result(eval_interval=2, sample_interval=2, checkpoint_interval=0).returncode == 143
    assert column(run_dir, "val", "step") == [2]
    assert not log_of(run_dir, "sample")
    assert steps_of(run_dir) == [2]


def test_a_signal_in_the_last_save_waits_for_it(short, run_dir, monkeypatch):
    real = torch.save

    def save(state, file):
        signal.raise_signal(signal.SIGINT)
        return real(state, file)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    monkeypatch.setattr(torch, "save", save)
    assert short.result(checkpoint_interval=3, max_steps=3).returncode == 130
    assert steps_of(run_dir) == [3]
    assert find_damage(run_dir / "step_000003") is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_to_the_group_before_the_first_step_ends_the_run_at_once(tmp_path, run_dir, name):
    """While it compiles: the workers that compile get the signal, too."""
    args = small_args(tmp_path, compile="on", n_layer=1)
    fresh = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "compiled"))
    process = subprocess.Popen(
        command("train_gpt2.py", *args), env=fresh, start_new_session=True, stdout=PIPE, stderr=PIPE, text=True
    )
    assert wait_until(lambda: any((tmp_path / "compiled").glob("*/*")))  # code that is being compiled
    os.killpg(process.pid, signal.Signals[f"SIG{name}"])
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "Traceback" not in err
    assert not steps_of(run_dir)


def test_an_error_after_a_signal_is_put_down_to_the_signal(short, run_dir, monkeypatch):
    """A compiler that is a child of ours got the signal, too."""

    def fail():
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("g++ was terminated")

    during_validation(monkeypatch, fail)
    result = short.result(eval_interval=3)
    assert result.returncode == 143
    assert steps_of(run_dir) == [2]


# ---- what an interruption cut off


def test_interrupted_evaluation_runs_once_on_resume(train, tmp_path, monkeypatch):
    options = SHORT | dict(eval_interval=2, sample_interval=2)
    train(out="whole", **options)

    def crash(*args, **kwargs):
        raise OSError("DISK")

    for cut_off in ("val", "sample"):
        with monkeypatch.context() as context:
            if cut_off == "val":
                during_validation(context, crash)
            else:
                context.setattr(torch, "multinomial", crash)
            train.error("DISK", out=cut_off, **options)
        train(out=cut_off, resume=True, **options)
        assert losses(tmp_path / cut_off) == losses(tmp_path / "whole")
        assert samples(tmp_path / cut_off) == samples(tmp_path / "whole")


def test_what_a_killed_run_was_writing_goes_and_nothing_else(short, run_dir):
    short()
    names = (".log.jsonl.123.tmp", ".config.json.9.tmp", ".notes.123.tmp", ".log.jsonl.mine.tmp")
    for name in names:
        (run_dir / name).write_text("{")
    short(max_steps=7, resume=True)
    assert [name for name in names if (run_dir / name).exists()] == [".notes.123.tmp", ".log.jsonl.mine.tmp"]


# ---- a target


def test_a_target_loss_ends_the_run_with_a_checkpoint_and_a_resume_adds_nothing(train, run_dir):
    options = SHORT | dict(max_steps=100, checkpoint_interval=0, eval_interval=2, sample_interval=1000)
    train(**options, target_loss=5.7)
    *before, last = log_of(run_dir, "val")
    assert last["loss"] <= 5.7
    assert all(val["loss"] > 5.7 for val in before)
    assert steps_of(run_dir) == column(run_dir, "sample", "step") == [last["step"]]  # as at any run's end
    [target] = log_of(run_dir, "target")  # what it took
    assert (target["step"], target["tokens"]) == (last["step"], last["step"] * 256)
    logged = [log_of(run_dir, kind) for kind in ("train", "target", "val")]
    train(**options, target_loss=5.7, resume=True)
    assert [log_of(run_dir, kind) for kind in ("train", "target", "val")] == logged


# ---- a full disk


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
    run = small_disk / "run"
    options = dict(out="disk/run", keep_checkpoints=0, eval_interval=0, sample_interval=0, checkpoint_interval=1)
    train.error(str(run), **options)
    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))
    assert steps
    assert not any(map(find_damage, run.glob("step_*")))
    assert [p.name for p in run.glob(".*")] == [".lock"]  # what did not fit is gone
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    train(**options, resume=True)
    with suppress(OSError):  # now so full that not even a line fits into the log
        (small_disk / "ballast").write_bytes(bytes(60 * 2**20))
    train.error(str(run), **options, resume=True, max_steps=50)
    assert find_damage(run / "step_000040") is None
