"""The machine as a run sees it: batches on their way to the device."""

import threading
import time

import numpy as np
import pytest
import torch

from cli import UserError
from run.runtime import prefetch


def batches_of(n: int):
    return ([(torch.full((2,), i), torch.full((2,), -i))] for i in range(n))


def test_prefetch_changes_nothing():
    received = [micro[0].tolist() for [micro] in prefetch(batches_of(50), torch.device("cpu"))]
    assert received == [[i, i] for i in range(50)]


def test_prefetch_makes_tensors_of_arrays():
    arrays = [np.arange(6).reshape(2, 3) + i for i in range(3)]
    received = [micro for [micro] in prefetch(([(array,)] for array in arrays), torch.device("cpu"))]
    assert all(torch.equal(tensor, torch.from_numpy(a)) for (tensor,), a in zip(received, arrays, strict=True))


def test_prefetch_raises_errors_where_they_were_due():
    def failing():
        yield from batches_of(3)
        raise UserError("a broken shard")

    received = []
    with pytest.raises(UserError, match="a broken shard"):
        for batch in prefetch(failing(), torch.device("cpu")):
            received.append(batch)
    assert len(received) == 3


def test_prefetch_is_ahead_by_its_depth_and_ends_with_its_reader():
    made = []

    def counting():
        for batch in batches_of(100):
            made.append(batch)
            yield batch

    reader = prefetch(counting(), torch.device("cpu"), depth=3)
    next(reader)
    while len(made) < 5:  # one read, three waiting, one in the thread's hand
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 5
    reader.close()
    for thread in [t for t in threading.enumerate() if t.name == "prefetch"]:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_prefetch_copies_to_the_gpu_while_it_computes():
    device = torch.device("cuda")
    large = ([(torch.full((64, 1024), i), torch.full((64, 1024), -i))] for i in range(100))
    busy = torch.randn(2048, 2048, device=device)
    for i, [(idx, targets)] in enumerate(prefetch(large, device)):
        busy = busy @ busy.T / 2048
        assert idx.device.type == "cuda" and (idx == i).all() and (targets == -i).all()
