"""Ranks and launchers that are killed: the others end, and the next start loses nothing."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from parts.checkpoint import checkpoint_steps, find_damage
from tests.corpora import wait_until
from tests.helpers import ROOT, TORCHRUN, environment, gone, log_of, text_file, wait_for_steps
from tests.test_distributed import alone, args, same_losses

LONG = dict(max_steps=60, checkpoint_interval=10, eval_interval=60)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """What an undisturbed run of one process does."""
    folder = tmp_path_factory.mktemp("lost")
    text_file(folder / "text.txt")
    alone(folder, "long", **LONG)
    return folder


STARTED: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    """A test that fails ends the ranks that it has started."""
    yield
    while STARTED:
        if (process := STARTED.pop()).poll() is None:
            kill(process)


def torchrun(folder: Path, out: str, **changes) -> subprocess.Popen:
    """Start train_gpt2.py under torchrun, in a process group of its own."""
    options = ("--standalone", "--nproc_per_node=2", "--max-restarts=3")
    command = [*TORCHRUN, *options, str(ROOT / "train_gpt2.py"), *args(folder, out, **changes)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    STARTED.append(subprocess.Popen(command, env=environment(), start_new_session=True, **pipes))
    return STARTED[-1]


def workers(process: subprocess.Popen) -> list[int]:
    """Process ids of the ranks, which are the children of torchrun, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in children}
    ranks = {int(v.removeprefix(b"RANK=")): pid for pid, e in environments.items() for v in e if v.startswith(b"RANK=")}
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_save(run: Path, process: subprocess.Popen) -> None:
    while not list(run.glob(".step_000030*tmp/*")):
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.001)


MOMENTS = {
    "a step": lambda run, process: wait_for_steps(run, 25, process),
    "a save": wait_for_save,
    "an evaluation": lambda run, process: wait_for_steps(run, 60, process),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank, moment",
    [(0, "a step"), (1, "a step"), (0, "a save"), (1, "an evaluation")],
)
def test_torchrun_restarts_ranks_of_which_one_is_killed_and_nothing_is_lost(long_run, rank, moment):
    run = long_run / f"{rank} killed in {moment}"
    process = torchrun(long_run, run.name, resume=True, **LONG)
    MOMENTS[moment](run, process)
    os.kill(workers(process)[rank], signal.SIGKILL)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out[-3000:]
    assert len(log_of(run, "run")) == 2
    same_losses(run, long_run / "long")


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_a_checkpoint_when_their_launcher_is_stopped_or_killed(long_run, signum):
    run = long_run / f"launcher-{signum}"
    process = torchrun(long_run, run.name, **LONG | dict(max_steps=10**6))
    wait_for_steps(run, 25, process)
    ranks = workers(process)
    process.stdout.close()
    process.send_signal(signum)
    assert process.wait(120) != 0
    assert wait_until(lambda: all(map(gone, ranks)))
    step, path = checkpoint_steps(run)[-1]
    assert find_damage(path) is None
    assert step == log_of(run, "train")[-1]["step"] > 20


def kill(process: subprocess.Popen) -> None:
    """torchrun and its ranks, as when their machine fails."""
    for pid in [process.pid, *workers(process)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
