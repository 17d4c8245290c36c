"""The loader: one order for every number of ranks, each window once an epoch, exact resumption, flat memory, and files
that change while they are read."""

import os
import random
import tracemalloc
from collections import deque
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from parts.data import IGNORED, Batches, TokenStream, permutation, to_inputs, training_batches, validation_batches
from tests.helpers import assert_refused, needs_proc
from tests.token_shards import T, open_stream, write_shards


@pytest.fixture
def stream(tmp_path) -> TokenStream:
    write_shards(tmp_path)
    return open_stream(tmp_path)


def all_tokens(stream: TokenStream) -> np.ndarray:
    return np.concatenate([np.load(path) for path in stream.paths])


class Counting:
    """A stream whose token i is i, so that a window shows where it begins."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def read_windows(self, starts: list[int], n: int) -> np.ndarray:
        return np.array([range(start, start + n) for start in starts], np.int64).reshape(-1, n)


# ---------------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_is_every_window_once_in_an_order_of_its_own(stream, shuffle):
    batches = Batches(stream, T, 7, shuffle)
    tokens = all_tokens(stream).tolist()
    n = (len(tokens) - 1) // T
    for epoch in (0, 1):
        windows = [tokens[i * T + batches.shift(epoch) :][: T + 1] for i in range(n)]
        if len(windows[-1]) < T + 1:
            windows[-1] = tokens[-T - 1 :]  # the last window ends where the text does
        seen = np.concatenate([*batches.micro_batches(epoch * n, n, 1)])
        assert seen.dtype == np.int64
        assert sorted(seen.tolist()) == sorted(windows)
        assert (seen.tolist() == windows) == (not shuffle)


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_a_slice_of_the_epochs_one_after_the_other(seed):
    n, length, micro_rows, world_size, position = map(random.Random(seed).randint, [1, 1, 1, 1, 0], [60, 8, 10, 5, 200])
    stream = Counting(n * length + 1)
    rows = 2 * micro_rows * world_size
    ranks = [Batches(stream, length, 3, True, rank, world_size) for rank in range(world_size)]
    epochs = [
        min(window * length + ranks[0].shift(epoch), (n - 1) * length)
        for epoch in range((position + rows) // n + 1)
        for window in permutation(n, 3, epoch).tolist()
    ]
    parts = [list(batches.micro_batches(position, rows, micro_rows)) for batches in ranks]
    assert len({len(part) for part in parts}) == 1, "every rank takes part in as many passes"
    found = np.concatenate([windows for part in parts for windows in part])[:, 0].tolist()
    assert found == epochs[position : position + rows], "the ranks' parts, one after the other, are the global batch"


def test_windows_are_cut_elsewhere_from_the_second_epoch_on_and_the_same_for_good():
    batches = Batches(Counting(50 * 16 + 9), 16, 1337, True)
    assert [batches.shift(epoch) for epoch in range(4)] == [0, 9, 13, 8], "older runs would resume with other data"
    assert {Batches(batches.stream, 16, 1337, False).shift(epoch) for epoch in range(40)} == {0}, "file order stays"


def test_the_permutation_is_fixed_by_seed_and_epoch_for_good():
    for n in (1, 2, 3, 1000, 65537):
        assert sorted(permutation(n, 1, 2).tolist()) == list(range(n))
    assert permutation(12, 1337, 0).tolist() == [10, 5, 1, 6, 11, 7, 8, 4, 0, 9, 2, 3], "older runs would not resume"
    assert len({tuple(permutation(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}) == 16


# ---------------------------------------------------------------------------------- validation, inputs and targets


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [0, 1, 1003])
def test_validation_scores_the_same_tokens_for_every_world_size(stream, world_size, max_tokens):
    tokens = all_tokens(stream)
    n = max_tokens or len(tokens) - 1
    scored = []
    for rank in range(world_size):
        for windows in validation_batches(stream, T, 5, max_tokens, rank, world_size):
            assert windows.shape == (5, T + 1)  # compiled code sees one shape
            assert windows.dtype == np.int64
            idx, targets = to_inputs(windows)
            keep = targets != IGNORED
            scored += zip(idx[keep].tolist(), targets[keep].tolist(), strict=True)
    assert sorted(scored) == sorted(zip(tokens[:n].tolist(), tokens[1 : n + 1].tolist(), strict=True))


# ------------------------------------------------------------------------------------------------------------ memory


@needs_proc
def test_what_is_read_is_no_memory_of_the_process(tmp_path):
    """A cluster would kill a process for 20 GB of shards that it had mapped."""
    np.save(tmp_path / "x_train_000000.npy", np.zeros(2**20, np.uint16))
    stream = open_stream(tmp_path)
    list(training_batches(Batches(stream, 1024, 1, True), 8, 0, 256, 8))
    assert "x_train_000000.npy" not in Path("/proc/self/maps").read_text()


def test_many_batches_take_no_more_memory_than_a_few(tmp_path):
    write_shards(tmp_path, (40_000, 20_000))
    batches = Batches(open_stream(tmp_path), T, 1, True)
    steps = training_batches(batches, 64, 0, 240, 16)  # four epochs
    tracemalloc.start()
    try:
        size = sum(windows.nbytes for windows in next(steps))
        deque(islice(steps, 2 * batches.n_windows // 64 - 1), maxlen=0)  # two epochs, whose orders are kept
        before = tracemalloc.get_traced_memory()[0]
        deque(steps, maxlen=0)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < size


# --------------------------------------------------------------------------------------- a file that changes under us


@pytest.mark.parametrize("left", [0, 100, 15_000])
def test_a_shard_that_is_cut_short_while_it_is_in_use_is_named(tmp_path, left):
    """Of a mapped file, the system would kill the process without a word."""
    write_shards(tmp_path, (10_000,))
    stream = open_stream(tmp_path)
    [path] = stream.paths
    os.truncate(path, left)
    assert_refused(str(path), stream.read, 9000, 17)
