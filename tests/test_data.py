"""The loader: one order for every number of ranks, each window once an epoch, exact resumption, flat memory."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import order as data
from corpus.order import (
    IGNORED,
    Batches,
    BatchPlan,
    TokenStream,
    permutation,
    to_inputs,
    training_batches,
    validation_batches,
)
from model import GPT, GPTConfig
from tests.helpers import ROOT
from tests.token_shards import VOCAB, T, open_stream, write_shards


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
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_union_over_ranks_is_every_window_once_an_epoch(stream, world_size, shuffle):
    tokens, rows, epochs = all_tokens(stream).tolist(), 12, 2
    n = (len(tokens) - 1) // T
    ranks = [Batches(stream, T, 7, shuffle, rank, world_size) for rank in range(world_size)]
    seen = []
    for position in range(0, epochs * n, rows):  # the last batch goes on with the next epoch
        for batches in ranks:
            for windows in batches.micro_batches(position, min(rows, epochs * n - position), 4):
                assert windows.dtype == np.int64 and windows.shape == (4, T + 1) and windows.flags.c_contiguous
                seen += [row for row in windows.tolist() if row != [IGNORED] * (T + 1)]
    in_file_order, later = ([tokens[i * T + s :][: T + 1] for i in range(n)] for s in (0, ranks[0].shift(1)))
    later[-1] = tokens[-T - 1 :] if len(later[-1]) < T + 1 else later[-1]  # the last window ends where the text does
    assert sorted(seen[:n]) == sorted(in_file_order)
    assert sorted(seen[n:]) == sorted(later)
    assert (seen[:n] == in_file_order) == (not shuffle)
    assert (seen[n:] == later) == (not shuffle), "epochs have orders of their own"


def test_from_the_second_epoch_on_windows_are_cut_elsewhere():
    batches = Batches(Counting(50 * 16 + 9), 16, 1337, True)
    shifts = [batches.shift(epoch) for epoch in range(40)]
    assert shifts[0] == 0 and len(set(shifts)) > 10 and set(shifts) <= set(range(16))
    assert shifts[:4] == [0, 9, 13, 8], "runs of an earlier version would resume with other data"
    assert {Batches(batches.stream, 16, 1337, False).shift(epoch) for epoch in range(40)} == {0}, "file order stays"
    for epoch, shift in enumerate(shifts):
        starts = sorted(batches.global_batch(50 * epoch, 50))
        assert starts == [min(16 * window + shift, 50 * 16 + 8 - 16) for window in range(50)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_rows", [1, 2, 6, 24])
def test_the_global_batch_depends_neither_on_ranks_nor_on_micro_batches(stream, world_size, micro_rows):
    rows, reference = 24, Batches(stream, T, 7, True)
    for step in (0, 3, 7, 8, 20):  # some of them across the end of an epoch
        [expected] = reference.micro_batches(step * rows, rows, rows)
        ranks = [Batches(stream, T, 7, True, rank, world_size) for rank in range(world_size)]
        parts = [list(batches.micro_batches(step * rows, rows, micro_rows)) for batches in ranks]
        assert len({len(part) for part in parts}) == 1, "every rank takes part in as many passes"
        together = np.concatenate([windows for part in parts for windows in part])
        assert np.array_equal(together[together[:, 0] != IGNORED], expected)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 40), st.integers(1, 5), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_a_batch_is_a_slice_of_the_epochs_one_after_the_other(n, length, rows, world_size, position):
    stream = Counting(n * length + 1)
    ranks = [Batches(stream, length, 3, True, rank, world_size) for rank in range(world_size)]
    epochs = [
        min(window * length + ranks[0].shift(epoch), (n - 1) * length)
        for epoch in range((position + rows) // n + 1)
        for window in permutation(n, 3, epoch).tolist()
    ]
    micro = [windows for batches in ranks for windows in batches.micro_batches(position, rows, 7)]
    found = [start for start in np.concatenate(micro)[:, 0].tolist() if start != IGNORED]
    assert found == epochs[position : position + rows], "the ranks' parts, one after the other, are the global batch"


def test_the_permutation_is_fixed_by_seed_and_epoch_for_good():
    for n in (1, 2, 3, 1000, 65537):
        assert sorted(permutation(n, 1, 2).tolist()) == list(range(n))
    assert permutation(12, 1337, 0).tolist() == [10, 5, 1, 6, 11, 7, 8, 4, 0, 9, 2, 3], (
        "runs of an earlier version would resume with other data"
    )
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_a_permutation_has_no_preference():
    """Every number comes first, and last, about equally often: chi-squared with 9 degrees of freedom, p = 1e-6."""
    ends = np.array([permutation(10, seed, 0)[[0, -1]] for seed in range(4000)])
    for column in ends.T:
        counts = np.bincount(column, minlength=10)
        assert ((counts - 400) ** 2 / 400).sum() < 46


@pytest.mark.parametrize("start", [0, 1, 9, 17, 29])
def test_resuming_at_any_step_continues_exactly(stream, start):
    rows = 12

    def steps(first: int) -> list[np.ndarray]:
        batches = Batches(stream, T, 7, True)
        return [w for step in training_batches(batches, lambda s: (s * rows, rows), first, 30, 4) for (w,) in step]

    expected = steps(0)
    resumed = steps(start)
    assert len(expected) == 90 and len(resumed) == 3 * (30 - start)
    assert all(np.array_equal(a, b) for a, b in zip(expected[3 * start :], resumed, strict=True))


def test_any_stretch_of_the_stream_reads_across_shards(stream):
    tokens, rng = all_tokens(stream), np.random.default_rng(1)
    for _ in range(300):
        start = int(rng.integers(len(tokens)))
        n = int(rng.integers(len(tokens) - start)) + 1
        assert np.array_equal(stream.read(start, n), tokens[start : start + n])


# --------------------------------------------------------------------------------------------- the plan of a batch ramp


def plan_in_steps(full: int, first: int, ramp: int, n: int) -> list[tuple[int, int]]:
    """The plan as a loop over its steps, up to step n: the position of each is the sum of the sizes before it."""
    first = min(max(first, 1), full)
    steps, position = [], 0
    for _ in range(n):
        size = full if position >= ramp else (first + (full - first) * position // ramp) // first * first
        steps.append((position, size))
        position += size
    return steps


@given(st.integers(1, 300), st.integers(0, 400), st.integers(0, 5000))
@settings(max_examples=300, deadline=None)
def test_a_batch_ramp_is_the_line_step_by_step(full, first, ramp):
    plan = BatchPlan(full, first, ramp)
    expected = plan_in_steps(full, first, ramp, 500)
    assert [plan(step) for step in range(500)] == expected
    assert plan(499) == expected[499]  # and in no order


@pytest.mark.parametrize("full, first, ramp", [(512, 32, 4 * 10**6), (512, 1, 10**6), (10**5, 7, 10**7), (3, 2, 10**5)])
def test_long_ramps_too(full, first, ramp):
    plan = BatchPlan(full, first, ramp)
    expected = plan_in_steps(full, first, ramp, 60_000)
    for step in [*range(0, 60_000, 97), *range(59_000, 60_000)]:
        assert plan(step) == expected[step]


def test_a_ramp_costs_as_much_as_it_has_sizes():
    plan = BatchPlan(512, 1, 10**15)  # a loop over its steps would not end
    assert plan(10**18) == (plan(10**18 - 1)[0] + 512, 512)
    assert len(plan.levels) == 512
    for (step, position, size), (next_step, next_position, next_size) in zip(
        plan.levels, plan.levels[1:], strict=False
    ):
        assert (next_step - step) * size == next_position - position and size < next_size


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2000), st.integers(1, 5), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_what_divides_every_size_pads_no_step(full, first, ramp, world_size, micro_rows):
    plan, batches = BatchPlan(full, first, ramp), Batches(Counting(5), 2, 0, False, 0, world_size)
    shapes = [
        [windows.shape[0] for windows in batches.micro_batches(0, size, micro_rows)]
        for size in {plan(step)[1] for step in range(2100)}
    ]
    sizes = {plan(step)[1] for step in range(2100)}
    fits = all(sum(rows) == -(-size // world_size) for size, rows in zip(sizes, shapes, strict=True))
    assert plan.divides_every_size(micro_rows, world_size) == fits


# ---------------------------------------------------------------------------------- validation, inputs and targets


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [0, 100, 1003])
def test_validation_scores_the_same_tokens_for_every_world_size(stream, world_size, max_tokens):
    tokens = all_tokens(stream)
    n = max_tokens or len(tokens) - 1
    scored = []
    for rank in range(world_size):
        for (windows,) in validation_batches(stream, T, 5, max_tokens, rank, world_size):
            assert windows.shape == (5, T + 1) and windows.dtype == np.int64  # compiled code sees one shape
            idx, targets = to_inputs(windows)
            keep = targets != IGNORED
            scored += zip(idx[keep].tolist(), targets[keep].tolist(), strict=True)
    assert sorted(scored) == sorted(zip(tokens[:n].tolist(), tokens[1 : n + 1].tolist(), strict=True))


def test_inputs_and_targets_are_the_same_of_arrays_and_tensors(stream):
    [windows] = Batches(stream, T, 7, True).micro_batches(0, 5, 8)
    idx, targets = to_inputs(windows)
    on_torch = to_inputs(torch.from_numpy(windows))
    assert np.array_equal(idx, on_torch[0].numpy()) and np.array_equal(targets, on_torch[1].numpy())
    assert np.array_equal(idx[:5, 1:], targets[:5, :-1]) and (idx >= 0).all() and (targets[5:] == IGNORED).all()


def test_padded_micro_batches_look_like_full_ones_to_compiled_code(stream):
    layouts = set()
    for rows in (8, 5):
        [windows] = Batches(stream, T, 7, True).micro_batches(0, rows, 8)
        tensors = to_inputs(torch.from_numpy(windows))
        layouts.add(tuple((t.shape, t.stride(), t.dtype) for t in tensors))
    assert len(layouts) == 1
    assert tensors[0].is_contiguous()


def test_padding_changes_no_loss(tmp_path):
    """25 tokens scored in padded rows, against the same tokens in rows of their own length."""
    assert IGNORED == torch.nn.CrossEntropyLoss().ignore_index
    tokens = write_shards(tmp_path, (26,)).astype(np.int64)
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, n_positions=T, vocab_size=VOCAB)).eval()
    one = torch.ones(())  # sums, not means
    [(windows,)] = validation_batches(open_stream(tmp_path), T, 5, 0)
    padded = model.loss(*to_inputs(torch.from_numpy(windows)), n_targets=one)
    rows = [torch.from_numpy(tokens[None, :17]), torch.from_numpy(tokens[None, 16:])]
    expected = sum(model.loss(*to_inputs(row), n_targets=one) for row in rows)
    torch.testing.assert_close(padded, expected, rtol=1e-6, atol=0)


# --------------------------------------------------------------------------------------------- what it knows nothing of


def test_reading_shards_needs_nothing_but_numpy_and_the_command_line(tmp_path):
    others = "torch tqdm regex tiktoken tyro pyarrow bpe model runtime shards sources".split()
    read = (
        "stream = data.TokenStream(data.find_shards(sys.argv[1], 'train'), 1000); b = data.Batches(stream, 16, 1, True)"
    )
    use = "next(data.training_batches(b, data.BatchPlan(8), 0, 9, 4)); next(data.validation_batches(stream, 16, 4, 0))"
    code = f"import sys, data; {read}; {use}; print([name for name in {others} if name in sys.modules])"
    write_shards(tmp_path)
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout == "[]\n", result.stderr


# ------------------------------------------------------------------------------------------------------------ memory


def resident_pages_of(name: str) -> int:
    """Bytes of the file `name` that are mapped and resident in this process, whatever else is."""
    total, counting = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:  # the head of a mapping: its address, and the file
            counting = line.endswith(name)
        elif counting and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="resident pages are counted in /proc, which only Linux has")
def test_resident_memory_is_flat(tmp_path, monkeypatch):
    np.save(tmp_path / "x_train_000000.npy", np.zeros(128 * 2**20, np.uint16))  # 256 MB
    stream = open_stream(tmp_path)
    batches, most = Batches(stream, 1024, 1, True), 0
    monkeypatch.setattr(data, "RELEASE_AFTER", 31)  # at most two batches of 32 windows
    for _ in training_batches(batches, lambda s: (s * 32, 32), 0, 512, 32):
        most = max(most, resident_pages_of("x_train_000000.npy"))
    assert 0 < most < 150 * 2**20  # a fault maps what the system has cached around it, up to 2 MB a window
    monkeypatch.setattr(data, "RELEASE_AFTER", 10**9)
    list(training_batches(batches, lambda s: (s * 32, 32), 0, 512, 32))
    # without a release they pile up, though the system may take some of them back by itself
    assert resident_pages_of("x_train_000000.npy") > most
