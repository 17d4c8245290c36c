"""Ranks, launchers and nodes that are killed: the others end, and the next start loses nothing."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from parts.checkpoint import checkpoint_steps, find_damage
from tests.helpers import ROOT, TORCHRUN, environment, log_of, text_file, wait_for_steps
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


def torchrun(folder: Path, out: str, *options: str, prefix=(), **changes) -> subprocess.Popen:
    """Start train_gpt2.py under torchrun, in a process group of its own."""
    command = [*prefix, *TORCHRUN, *options, str(ROOT / "train_gpt2.py"), *args(folder, out, **changes)]
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
TWO = ("--standalone", "--nproc_per_node=2", "--max-restarts=3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank, moment",
    [(0, "a step"), (1, "a step"), (0, "a save"), (1, "an evaluation")],
)
def test_torchrun_restarts_ranks_of_which_one_is_killed_and_nothing_is_lost(long_run, rank, moment):
    run = long_run / f"{rank} killed in {moment}"
    process = torchrun(long_run, run.name, *TWO, resume=True, **LONG)
    MOMENTS[moment](run, process)
    os.kill(workers(process)[rank], signal.SIGKILL)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out[-3000:]
    assert "resuming from" in out
    same_losses(run, long_run / "long")


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_a_checkpoint_when_their_launcher_is_stopped_or_killed(long_run, signum):
    run = long_run / f"launcher-{signum}"
    process = torchrun(long_run, run.name, *TWO, **LONG | dict(max_steps=10**6))
    wait_for_steps(run, 25, process)
    ranks = workers(process)
    process.stdout.close()
    process.send_signal(signum)
    assert process.wait(120) != 0
    wait_for_end(ranks)
    step, path = checkpoint_steps(run)[-1]
    assert find_damage(path) is None
    assert step == log_of(run, "train")[-1]["step"] > 20


def wait_for_end(ranks: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def two_nodes():
    """Two network namespaces that share one cable, and nothing else."""
    names = ("gpt-node-0", "gpt-node-1")
    addresses = ("10.213.7.1", "10.213.7.2")
    if not shutil.which("ip") or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode:
        pytest.skip("network namespaces are not permitted here")
    subprocess.run(["ip", "netns", "add", names[1]], check=True)
    subprocess.run(["ip", "link", "add", "gptv0", "netns", names[0], "type", "veth", "peer", "name", "gptv1",
                    "netns", names[1]], check=True)  # fmt: skip
    for name, device, address in zip(names, ("gptv0", "gptv1"), addresses, strict=True):
        for words in (f"addr add {address}/30 dev {device}", f"link set {device} up", "link set lo up"):
            subprocess.run(["ip", "-n", name, *words.split()], check=True)
    yield list(zip(names, ("gptv0", "gptv1"), addresses, strict=True))
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=True)


def start_node(folder: Path, out: str, node: tuple[str, str, str], head: str, **changes) -> subprocess.Popen:
    """torchrun on one of `two_nodes`, as docs/gpu.md says; `head` is the address of the first."""
    name, device, address = node
    options = ("--nnodes=2", "--nproc_per_node=2", "--max-restarts=3", "--rdzv_id=7", "--rdzv_backend=c10d")
    is_host = f"--rdzv_conf=is_host={int(address == head)}"
    options += (f"--rdzv_endpoint={head}:29501", f"--local_addr={address}", is_host)
    settings = (f"GLOO_SOCKET_IFNAME={device}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
    prefix = ("ip", "netns", "exec", name, "env", *settings)
    return torchrun(folder, out, *options, prefix=prefix, micro_batch_size=2, resume=True, **LONG | changes)


def kill(process: subprocess.Popen) -> None:
    """torchrun and its ranks, as when their machine fails."""
    for pid in [process.pid, *workers(process)]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def end_well(run: Path, processes: list[subprocess.Popen]) -> None:
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(output[-3000:] for output in outputs)
    assert "resuming from" in outputs[0] + outputs[1]
    assert "4 ranks" in outputs[0] + outputs[1]
    same_losses(run, run.parent / "long")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 0])
def test_a_node_that_is_killed_and_comes_back_continues_with_the_other(long_run, two_nodes, killed):
    """Without the first node, where they meet, the second ends too, and both are started again."""
    run = long_run / f"node-{killed}-killed"
    head = two_nodes[0][2]
    nodes = [start_node(long_run, run.name, node, head) for node in two_nodes]
    wait_for_steps(run, 25, nodes[1 - killed])
    kill(nodes[killed])
    if killed == 0:
        assert nodes[1].communicate(timeout=60)
        assert nodes[1].returncode == 1
        nodes[1] = start_node(long_run, run.name, two_nodes[1], head)
    nodes[killed] = start_node(long_run, run.name, two_nodes[killed], head)
    end_well(run, nodes)
