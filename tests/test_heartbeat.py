"""Ranks that stand still or end are noticed by the others; those that are merely slow are not lost."""

import queue
import threading

import pytest
import torch.distributed as dist

from cli import explain
from run import heartbeat


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def ends(monkeypatch):
    """What the process would end with."""
    said = queue.Queue()

    monkeypatch.setattr(heartbeat, "end", lambda rank, problem: said.put((rank, problem)))
    return said


def test_a_rank_that_stands_still_is_named_by_the_others(store, ends):
    alive = threading.Event()
    peer = store.clone()

    def other_rank():
        while not alive.wait(0.02):
            peer.add("beat 1", 1)

    thread = threading.Thread(target=other_rank)
    thread.start()
    heartbeat.watch_ranks(store, 0, 2, beat=0.1, patience=0.5)
    with pytest.raises(queue.Empty):
        ends.get(timeout=1.5)  # three times its patience
    alive.set()
    thread.join()
    rank, problem = ends.get(timeout=30)
    assert rank == 0 and "rank 1" in problem


def test_a_rank_without_torchrun_ends(store, ends):
    class Gone:
        def clone(self):
            return self

        def add(self, key, n):
            raise dist.DistNetworkError("the connection was closed")

    heartbeat.watch_ranks(Gone(), 3, 8, beat=0.02, patience=60.0)
    rank, problem = ends.get(timeout=30)
    assert rank == 3 and "torchrun" in problem


def test_a_rank_whose_node_was_cut_off_ends(ends):
    answer = threading.Event()

    class CutOff:
        def clone(self):
            return self

        def add(self, key, n):
            answer.wait(60)
            return 1

    heartbeat.watch_ranks(CutOff(), 3, 8, beat=0.02, patience=0.2)
    rank, problem = ends.get(timeout=30)
    answer.set()
    assert rank == 3 and "cannot be reached" in problem


@pytest.mark.parametrize(
    "error, words",
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:537] Connection closed by peer [::1]:7. See the logs"), "by peer"),
        (RuntimeError("[../third_party/gloo/buffer.cc:72] Timed out waiting 600000ms for recv operation"), "600000ms"),
        (dist.DistBackendError("NCCL error, remote process exited\nncclRemoteError: A call failed"), "remote process"),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), "0 bytes"),
    ],
)
def test_an_exchange_with_a_rank_that_is_gone_is_one_line(error, words):
    assert words in explain(error) and "--resume" in explain(error)
    assert "ncclRemoteError" not in explain(error) and "pair.cc" not in explain(error)


def test_an_exchange_of_tensors_that_do_not_match_is_a_mistake_with_a_traceback():
    assert explain(RuntimeError("[gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4")) is None
