"""What goes wrong in long runs: full disks, damage, failed writes; and what is logged."""

import subprocess
from contextlib import suppress

import pytest

from parts.checkpoint import find_damage
from tests.helpers import assert_user_error, log_of, steps_of

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
    assert_user_error(result, str(run))
    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))
    assert steps
    assert not any(map(find_damage, run.glob("step_*")))
    assert [p.name for p in run.glob(".*")] == [".lock"]  # what did not fit is gone
    assert len(log_of(run, "train")) < 40  # it does not go on without being able to save
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    options = dict(out="disk/run", keep_checkpoints=0, eval_interval=0, sample_interval=0, checkpoint_interval=1)
    train(**options, resume=True)
    with suppress(OSError):  # now so full that not even a line fits into the log
        (small_disk / "ballast").write_bytes(bytes(60 * 2**20))
    train.error(str(run), **options, resume=True, max_steps=50)
    assert find_damage(run / "step_000040") is None
