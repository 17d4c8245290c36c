"""Starts that are not the first, and leftovers of those before."""

import subprocess
import sys
import time

import pytest

from parts.files import write_atomically
from tests.helpers import ROOT, gone, needs_proc, slow, steps_of


@pytest.mark.parametrize("stop_at", [slow(3), 4])
def test_a_stop_at_that_is_behind_the_run_is_an_error_that_names_both(short, run_dir, stop_at):
    short(stop_at=4)
    short.error(str(stop_at), "4", resume=True, stop_at=stop_at)
    short(resume=True, stop_at=5)
    assert steps_of(run_dir) == [2, 4, 5]
    short(resume=True)
    assert steps_of(run_dir) == [2, 4, 5, 6]


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
