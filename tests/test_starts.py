"""Starts that are not the first: what a launcher starts again continues what its job began, and leftovers go."""

import os
import subprocess
import sys
import time

import pytest

from parts.files import write_atomically
from tests.helpers import ROOT, gone, needs_proc, slow, steps_of


def restarts(monkeypatch, **environment) -> None:
    """The environment of a process as a launcher starts it; names of torchrun without TORCHELASTIC_ in front."""
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "RUN_ID", "RESTART_COUNT"):
        full = name if name.startswith("SLURM") else f"TORCHELASTIC_{name}"
        monkeypatch.delenv(full, raising=False)
        if name in environment:
            monkeypatch.setenv(full, environment[name])


def test_a_job_that_slurm_starts_again_continues_although_its_torchrun_has_another_id(short, run_dir, monkeypatch):
    restarts(monkeypatch, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="0", RUN_ID="a", RESTART_COUNT="0")
    short(overwrite=True)
    restarts(monkeypatch, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1", RUN_ID="b", RESTART_COUNT="0")
    assert "resuming from" in short(overwrite=True).stdout
    assert not (run_dir.parent / "run.1").exists()
    restarts(monkeypatch, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="1", RUN_ID="b", RESTART_COUNT="0")
    assert "resuming from" not in short(overwrite=True).stdout
    assert (run_dir.parent / "run.1").exists()


def test_the_name_that_torchrun_gives_every_job_is_no_name_of_one(short, run_dir, monkeypatch):
    restarts(monkeypatch, RUN_ID="none", RESTART_COUNT="0")
    short(overwrite=True)
    restarts(monkeypatch, RUN_ID="none", RESTART_COUNT="1")
    assert "resuming from" in short(overwrite=True).stdout
    monkeypatch.setattr(os, "getppid", lambda: 1)  # another torchrun, whose first start died early
    assert "resuming from" not in short(overwrite=True).stdout
    assert (run_dir.parent / "run.1").exists()


@pytest.mark.parametrize("stop_at", [slow(3), 4])
def test_a_stop_at_that_is_behind_the_run_is_an_error_that_names_both(short, run_dir, stop_at):
    short(stop_at=4)
    short.error(f"step {stop_at} is not beyond step 4", resume=True, stop_at=stop_at)
    short(resume=True, stop_at=5)
    assert steps_of(run_dir) == [2, 4, 5]
    short(resume=True)
    assert "has taken all of its 6 steps" in short(resume=True, stop_at=3).stdout


def test_what_a_killed_process_was_writing_beside_a_directory_goes_and_nothing_else(tmp_path):
    for name in (".adapter.4711.tmp", ".adapter.mine.tmp", ".other.4711.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    write_atomically(tmp_path / "adapter", lambda path: (path / "file").write_text("x"))
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", ".adapter.mine.tmp", ".other.4711.tmp"}


@pytest.mark.slow
@needs_proc
def test_a_run_of_a_comparison_ends_when_the_comparison_is_killed():
    child = "import os, time; print(os.getpid(), file=open(2, 'w', closefd=False), flush=True); time.sleep(100)"
    code = (
        f"import sys; from benchmarks.compare import run_to_its_end; run_to_its_end([sys.executable, '-c', {child!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    pid = int(process.stderr.readline())
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(pid)
