"""How a run ends and continues: signals, kills, terminals, two processes in one directory, a target."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import files
import train_gpt2
from cli import UserError
from run.checkpoint import ModelFiles, find_damage
from run.run import Run
from tests.helpers import SHORT, SMALL, assert_user_error, log_of, losses, start_script, steps_of, text_file


def start(tmp_path: Path, **changes) -> subprocess.Popen:
    if not (tmp_path / "text.txt").exists():
        text_file(tmp_path / "text.txt")
    options = SMALL | dict(data=tmp_path / "text.txt", out_dir=tmp_path / "run") | changes
    return start_script("train_gpt2.py", "tiny", **options)


def wait_for_steps(run: Path, n: int, process: subprocess.Popen) -> None:
    while not (run / "log.jsonl").exists() or (run / "log.jsonl").read_text().count('"train"') < n:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def signal_while_validating(monkeypatch, signum: int) -> None:
    real = train_gpt2.validate

    def validate(*args):
        os.kill(os.getpid(), signum)
        return real(*args)

    monkeypatch.setattr(train_gpt2, "validate", validate)


# ---- two processes, terminals, names


def test_a_second_process_in_one_run_directory_gets_one_line(train, tmp_path, monkeypatch):
    first = start(tmp_path, max_steps=100_000, eval_interval=0, sample_interval=0)
    wait_for_steps(tmp_path / "run", 2, first)
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    for word in ({}, dict(resume=True), dict(overwrite=True)):
        assert_user_error(train(**word), "another process", str(tmp_path / "run"))
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 143 and "Traceback" not in err


@pytest.mark.parametrize("closed", [pytest.param(["stdout"], marks=pytest.mark.slow), ["stdout", "stderr"]])
def test_a_run_outlives_the_readers_of_its_output(tmp_path, closed):
    process = start(tmp_path, max_steps=30, eval_interval=10, sample_interval=0, checkpoint_interval=10)
    wait_for_steps(tmp_path / "run", 2, process)
    for stream in closed:  # as `| head -1` does, and a terminal that goes away
        getattr(process, stream).close()
    if "stderr" not in closed:
        process.stderr.read()
    assert process.wait(60) == 0
    assert len(log_of(tmp_path / "run", "train")) == 30 and steps_of(tmp_path / "run")[-1] == 30


def test_what_was_ignored_when_a_run_began_stays_ignored(train, tmp_path, monkeypatch):
    signal_while_validating(monkeypatch, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert train(**SHORT | dict(eval_interval=2)).returncode == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert steps_of(tmp_path / "run")[-1] == 6


def test_names_and_prompts_that_are_not_utf_8_end_no_run(train, tmp_path):
    text_file(tmp_path / "caf\udce9.txt")
    options = SHORT | dict(data=tmp_path / "caf\udce9.txt", sample_interval=3, sample_prompt="\udcff")
    assert train(out="out\udce9", **options).returncode == 0
    assert steps_of(tmp_path / "out\udce9")[-1] == 6


# ---- signals


@pytest.mark.parametrize(
    "name, code",
    [("TERM", 143), *(pytest.param(name, code, marks=pytest.mark.slow) for name, code in (("HUP", 129), ("INT", 130)))],
)
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, name, code):
    process = start(tmp_path, max_steps=100_000, checkpoint_interval=0, eval_interval=0, sample_interval=0)
    wait_for_steps(tmp_path / "run", 3, process)
    process.send_signal(signal.Signals[f"SIG{name}"])
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err
    [step] = steps_of(tmp_path / "run")
    assert find_damage(tmp_path / "run" / f"step_{step:06d}") is None and step == losses(tmp_path / "run")[-1][0]


def test_no_evaluation_begins_after_a_signal(train, tmp_path, monkeypatch):
    real = Run.log_step

    def log_step(self, *figures):
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, *figures)

    monkeypatch.setattr(Run, "log_step", log_step)
    result = train(**SHORT | dict(eval_interval=4, sample_interval=4))
    assert result.returncode == 143 and f"--resume --out_dir {tmp_path / 'run'}\n" in result.stdout
    assert steps_of(tmp_path / "run")[-1] == 4
    assert not log_of(tmp_path / "run", "val") and not log_of(tmp_path / "run", "sample")


def test_a_signal_in_an_evaluation_ends_the_run_after_it_and_a_resume_makes_up_for_the_rest(
    train, tmp_path, monkeypatch
):
    options = SHORT | dict(eval_interval=2, sample_interval=2, checkpoint_interval=0)
    train(out="whole", **options)
    with monkeypatch.context() as context:
        signal_while_validating(context, signal.SIGTERM)
        assert train(**options).returncode == 143
    assert not log_of(tmp_path / "run", "sample") and steps_of(tmp_path / "run") == [2]
    assert train(**options | dict(resume=True)).returncode == 0
    texts = [[(r["step"], r["text"]) for r in log_of(tmp_path / out, "sample")] for out in ("whole", "run")]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and texts[0] == texts[1]


def test_a_signal_in_the_last_save_waits_for_it(train, tmp_path, monkeypatch):
    real = ModelFiles.copy

    def copy(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return real(self)

    monkeypatch.setattr(ModelFiles, "copy", copy)
    assert train(**SHORT | dict(checkpoint_interval=3, max_steps=3)).returncode == 143
    assert steps_of(tmp_path / "run") == [3] and find_damage(tmp_path / "run" / "step_000003") is None


# ---- what an interruption cut off


@pytest.mark.parametrize("cut_off", ["validate", "complete"])
def test_an_evaluation_that_was_cut_off_is_made_up_for_and_no_other_comes_twice(train, tmp_path, monkeypatch, cut_off):
    options = SHORT | dict(eval_interval=2, sample_interval=2)
    train(out="whole", **options)

    def crash(*args, **kwargs):
        raise UserError("the evaluation failed")

    with monkeypatch.context() as context:
        context.setattr(train_gpt2, cut_off, crash)
        assert_user_error(train(**options), "the evaluation failed")
    assert train(**options | dict(resume=True)).returncode == 0
    for kind, figure in (("val", "loss"), ("sample", "text")):
        whole, made_up = ([(r["step"], r[figure]) for r in log_of(tmp_path / o, kind)] for o in ("whole", "run"))
        assert made_up == whole


def test_what_a_killed_run_was_writing_goes_and_nothing_else(train, tmp_path):
    train(**SHORT)
    names = (".log.jsonl.123.tmp", ".config.json.9.tmp", ".notes.123.tmp", ".log.jsonl.mine.tmp")
    for name in names:
        (tmp_path / "run" / name).write_text("{")
    assert train(**SHORT | dict(max_steps=7, resume=True)).returncode == 0
    assert [name for name in names if (tmp_path / "run" / name).exists()] == [".notes.123.tmp", ".log.jsonl.mine.tmp"]


def test_a_run_killed_before_its_first_checkpoint_starts_again(train, tmp_path):
    process = start(tmp_path, **SHORT | dict(max_steps=100_000, checkpoint_interval=0))
    wait_for_steps(tmp_path / "run", 3, process)
    process.kill()
    process.communicate()
    assert train(**SHORT | dict(resume=True)).returncode == 0
    train(out="undisturbed", **SHORT)
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


def test_a_run_that_was_killed_between_two_logs_starts_again(train, tmp_path):
    train(**SHORT | dict(checkpoint_interval=0))
    (tmp_path / "run" / "log.jsonl").rename(tmp_path / "run" / "log.jsonl.1")
    assert train(**SHORT | dict(resume=True)).returncode == 0 and steps_of(tmp_path / "run") == [2, 4, 6]


# ---- a target


def test_a_target_loss_ends_the_run_with_a_checkpoint(train, tmp_path):
    options = dict(max_steps=100, checkpoint_interval=0, eval_interval=2, sample_interval=1000)
    result = train(**SHORT | options, target_loss=5.7)
    assert result.returncode == 0 and "--target_loss 0\n" in result.stdout  # what continues it
    last = log_of(tmp_path / "run", "val")[-1]
    assert last["loss"] <= 5.7 and last["step"] < 100 and steps_of(tmp_path / "run") == [last["step"]]
    assert all(r["loss"] > 5.7 for r in log_of(tmp_path / "run", "val")[:-1])
    assert [r["step"] for r in log_of(tmp_path / "run", "sample")] == [last["step"]]  # as at any run's end
    [target] = log_of(tmp_path / "run", "target")  # what it took
    tokens, operations = last["step"] * 256, log_of(tmp_path / "run", "run")[0]["flops_per_token"]
    assert (target["step"], target["tokens"]) == (last["step"], tokens) and target["hours"] > 0
    assert target["petaflop"] == pytest.approx(tokens * operations / 1e15)


def test_a_run_that_has_reached_its_target_adds_nothing_when_it_is_resumed(train, tmp_path):
    options = SHORT | dict(max_steps=100, eval_interval=2, sample_interval=2, target_loss=5.8)
    read = (tmp_path / "run" / "samples.txt").read_bytes
    train(**options)
    before, samples = ([log_of(tmp_path / "run", kind) for kind in ("train", "target", "val")], read())
    assert train(**options | dict(resume=True)).returncode == 0 and read() == samples
    assert [log_of(tmp_path / "run", kind) for kind in ("train", "target", "val")] == before and len(before[1]) == 1
