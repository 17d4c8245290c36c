"""What goes wrong in long runs: full disks, damage, failed writes; and what is logged."""

import subprocess
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from parts import checkpoint
from parts.checkpoint import CheckpointWriter, find_damage, load_train_state
from parts.files import errors_name
from parts.runtime import Runtime
from tests.helpers import assert_refused, assert_user_error, log_of, steps_of, weights

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
    run = small_disk / "run"
    result = train.result(out="disk/run", sample_interval=0, keep_checkpoints=0, checkpoint_interval=1, eval_interval=0)
    assert_user_error(result, "no space left on the disk of", "--resume")
    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))
    assert steps
    assert not any(map(find_damage, run.glob("step_*")))
    assert [p.name for p in run.glob(".*")] == [".lock"]  # what did not fit is gone
    assert len(log_of(run, "train")) < 40  # it does not go on without being able to save
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    train(out="disk/run", keep_checkpoints=0, eval_interval=0, resume=True)
    with suppress(OSError):  # now so full that not even a line fits into the log
        (small_disk / "ballast").write_bytes(bytes(60 * 2**20))
    train.error("no space left on the disk of", out="disk/run", resume=True, max_steps=50)
    assert find_damage(run / "step_000040") is None
    for save in (save_file, torch.save):  # their own errors have no number
        with pytest.raises(OSError, match="No space left"), errors_name(run):
            save(dict(x=torch.zeros(2**20)), run / "x")


def test_a_system_that_grants_no_more_threads_gives_one_line(train, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    train.error("no more threads", "ulimit -u")


# ---- saving in the background


def test_training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(
    train, tmp_path, run_dir, monkeypatch
):
    """A write that waits for training to log another step would never end if training waited for it."""
    train(out="quick", max_steps=4, checkpoint_interval=2, eval_interval=0)
    real = checkpoint.save_model
    waited = []

    def save_model(path, model, tokenizer):
        step = int(path.name.split(".")[1].removeprefix("step_"))
        deadline = time.time() + 60
        while step < 4 and len(log_of(run_dir, "train")) <= step and time.time() < deadline:
            time.sleep(0.001)
        waited.append(time.time() < deadline)
        real(path, model, tokenizer)

    monkeypatch.setattr(checkpoint, "save_model", save_model)
    monkeypatch.setattr(Runtime, "writes_in_background", True)  # as on a GPU
    train(max_steps=4, checkpoint_interval=2, eval_interval=0)
    assert waited == [True, True]
    for step in (2, 4):
        assert weights(tmp_path / "quick", step) == weights(run_dir, step)
        states = [load_train_state(tmp_path / out / f"step_{step:06d}") for out in ("quick", "run")]
        moments = [[one["state"] for one in state["optimizer"]["optimizers"]] for state in states]
        torch.testing.assert_close(*moments, rtol=0, atol=0)


def test_a_failed_write_is_known_before_the_next_save(tmp_path):
    def write(directory):
        raise OSError(28, "No space left on device", str(directory))

    writer = CheckpointWriter(tmp_path, 0)
    files = SimpleNamespace(write=write)
    writer.save(tmp_path / "step_000001", files, {}, {})
    deadline = time.time() + 60
    while not writer.failed and time.time() < deadline:
        time.sleep(0.001)
    assert_refused("no space left", writer.save, tmp_path / "step_000002", files, {}, {})
