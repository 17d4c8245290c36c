"""The loader: one order for every number of ranks, each window once an epoch, exact resumption, flat memory, errors."""

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data import (
    Batches,
    TokenStream,
    find_shards,
    open_shard,
    permutation,
    prefetch,
    save_manifest,
    training_batches,
    validation_batches,
)
from model import IGNORE_INDEX
from runtime import UserError

VOCAB, T = 1000, 16
SIZES = (1003, 517, 16, 5, 1459)  # tokens of the shards: no multiple of T, and some shorter than a window


def write_shards(folder: Path, sizes=SIZES, split: str = "train", dtype=np.uint16) -> np.ndarray:
    """Shards of random tokens; returns all of them in one array."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, sum(sizes)).astype(dtype)
    for i, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        np.save(folder / f"x_{split}_{i:06d}.npy", part)
    return tokens


def write_bin(path: Path, tokens: np.ndarray) -> None:
    """A shard as llm.c writes it."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())


@pytest.fixture
def stream(tmp_path) -> TokenStream:
    write_shards(tmp_path)
    return TokenStream(find_shards(str(tmp_path), "train"), VOCAB)


def all_tokens(stream: TokenStream) -> np.ndarray:
    return np.concatenate([np.load(path) for path in stream.paths])


# ---------------------------------------------------------------------------------------------------------- the order


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_union_over_ranks_is_every_window_once_an_epoch(stream, world_size, shuffle):
    tokens, rows, epochs = all_tokens(stream).tolist(), 12, 2
    windows = (len(tokens) - 1) // T
    ranks = [Batches(stream, T, 7, shuffle, rank, world_size) for rank in range(world_size)]
    seen = []
    for position in range(0, epochs * windows, rows):  # the last batch goes on with the next epoch
        for batches in ranks:
            for idx, targets in batches.local(position, min(rows, epochs * windows - position), 4):
                assert idx.dtype == targets.dtype == torch.int64
                pairs = zip(idx.tolist(), targets.tolist(), strict=True)
                seen += [(x + y[-1:], y) for x, y in pairs if y[0] != IGNORE_INDEX]  # the rest is padding
    expected = sorted(tokens[i * T : i * T + T + 1] for i in range(windows))
    assert sorted(window for window, _ in seen[:windows]) == expected
    assert sorted(window for window, _ in seen[windows:]) == expected
    assert all(window[1:] == targets for window, targets in seen)
    in_file_order = [window for window, _ in seen[:windows]] == [tokens[i * T : i * T + T + 1] for i in range(windows)]
    assert in_file_order == (not shuffle)
    assert (seen[:windows] == seen[windows:]) == (not shuffle), "epochs have orders of their own"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_rows", [1, 2, 6, 24])
def test_the_global_batch_depends_neither_on_ranks_nor_on_micro_batches(stream, world_size, micro_rows):
    rows, reference = 24, Batches(stream, T, 7, True)
    for step in (0, 3, 7, 8, 20):  # some of them across the end of an epoch
        [(expected, _)] = reference.local(step * rows, rows, rows)
        ranks = [Batches(stream, T, 7, True, rank, world_size) for rank in range(world_size)]
        micro_batches = [list(batches.local(step * rows, rows, micro_rows)) for batches in ranks]
        assert len({len(part) for part in micro_batches}) == 1, "every rank takes part in as many passes"
        parts = [idx[targets[:, 0] != IGNORE_INDEX] for part in micro_batches for idx, targets in part]
        assert torch.equal(torch.cat(parts), expected)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 40), st.integers(1, 5), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_a_batch_is_a_slice_of_the_epochs_one_after_the_other(windows, length, rows, world_size, position):
    stream = TokenStream.__new__(TokenStream)
    stream.starts = [0, windows * length + 1]
    batches = Batches(stream, length, 3, True)
    epochs = [w for epoch in range((position + rows) // windows + 1) for w in permutation(windows, 3, epoch).tolist()]
    assert batches.global_batch(position, rows) == epochs[position : position + rows]
    shares = []
    for rank in range(world_size):
        local = Batches(stream, length, 3, True, rank, world_size)
        local.pack = lambda windows, _: shares.extend(windows)
        list(local.local(position, rows, 7))
    assert shares == epochs[position : position + rows]


def test_a_permutation_follows_from_seed_and_epoch_for_good():
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

    def steps(first: int) -> list[torch.Tensor]:
        batches = Batches(stream, T, 7, True)
        return [
            idx for micro in training_batches(batches, lambda s: (s * rows, rows), first, 30, 4) for idx, _ in micro
        ]

    expected = steps(0)
    resumed = steps(start)
    assert len(expected) == 90 and len(resumed) == 3 * (30 - start)
    assert all(torch.equal(a, b) for a, b in zip(expected[3 * start :], resumed, strict=True))


def test_any_stretch_of_the_stream_reads_across_shards(stream):
    tokens, rng = all_tokens(stream), np.random.default_rng(1)
    for _ in range(300):
        start = int(rng.integers(len(tokens)))
        n = int(rng.integers(len(tokens) - start)) + 1
        assert np.array_equal(stream.read(start, n), tokens[start : start + n])


# --------------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [0, 100, 1003])
def test_validation_scores_the_same_tokens_for_every_world_size(stream, world_size, max_tokens):
    tokens = all_tokens(stream)
    n = max_tokens or len(tokens) - 1
    scored = []
    for rank in range(world_size):
        for idx, targets in validation_batches(stream, T, 5, max_tokens, rank, world_size):
            assert idx.shape == targets.shape == (5, T)  # compiled code sees one shape
            keep = targets != IGNORE_INDEX
            scored += zip(idx[keep].tolist(), targets[keep].tolist(), strict=True)
    assert sorted(scored) == sorted(zip(tokens[:n].tolist(), tokens[1 : n + 1].tolist(), strict=True))


# ------------------------------------------------------------------------------------------------------ kinds of shard


def test_shards_of_llm_c_are_read_as_they_are(tmp_path):
    tokens = write_shards(tmp_path)
    (tmp_path / "bin").mkdir()
    for i, part in enumerate(np.split(tokens, np.cumsum(SIZES)[:-1])):
        write_bin(tmp_path / "bin" / f"fineweb_train_{i:06d}.bin", part)
    write_bin(tmp_path / "bin" / "fineweb_val_000000.bin", tokens[:50])
    ours = TokenStream(find_shards(str(tmp_path), "train"), VOCAB)
    theirs = TokenStream(find_shards(str(tmp_path / "bin"), "train"), VOCAB)
    assert np.array_equal(theirs.read(0, len(theirs)), tokens) and len(ours) == len(theirs)
    for step in range(5):
        [(a, _)], [(b, _)] = (Batches(s, T, 1, True).local(step * 8, 8, 8) for s in (ours, theirs))
        assert torch.equal(a, b)
    assert find_shards(str(tmp_path / "bin"), "val") == [tmp_path / "bin" / "fineweb_val_000000.bin"]
    write_bin(tmp_path / "tiny_shakespeare_val.bin", tokens[:50])
    assert find_shards(str(tmp_path), "val") == [tmp_path / "tiny_shakespeare_val.bin"]


def test_wide_ids_and_globs(tmp_path):
    tokens = write_shards(tmp_path, dtype=np.uint32)
    write_shards(tmp_path, (40,), "val")
    (tmp_path / ".x_train_000009.npy.tmp").touch()
    assert [path.name for path in find_shards(str(tmp_path), "val")] == ["x_val_000000.npy"]
    paths = find_shards(f"{tmp_path}/x_*_00000[0-2].npy", "train")
    assert np.array_equal(TokenStream(paths, VOCAB).read(0, sum(SIZES[:3])), tokens[: sum(SIZES[:3])])


# -------------------------------------------------------------------------------------------------------------- errors


def refused(folder: Path, vocab_size: int = VOCAB) -> str:
    with pytest.raises(UserError) as error:
        TokenStream(find_shards(str(folder), "train"), vocab_size)
    return str(error.value)


def test_damaged_shards_are_named(tmp_path):
    write_shards(tmp_path)
    path = tmp_path / "x_train_000001.npy"
    sound = path.read_bytes()
    for content in (sound[:-2], sound[:100], b"", b"\x93NUMPY", b"not an array"):
        path.write_bytes(content)
        assert f"shard {path} cannot be read" in refused(tmp_path)
    for array in (np.zeros(5, np.int64), np.zeros((5, 5), np.uint16), np.zeros(5, np.float32)):
        np.save(path, array)
        assert f"shard {path} cannot be read: it holds {array.dtype} of shape" in refused(tmp_path)
    path.unlink()
    path = tmp_path / "x_train_000001.bin"
    for content in (b"", bytes(1024), sound):
        path.write_bytes(content)
        assert "does not start with 20240520" in refused(tmp_path)
    write_bin(path, np.arange(100))
    path.write_bytes(path.read_bytes()[:-2])
    assert "promises 100 tokens" in refused(tmp_path)


@pytest.mark.parametrize("place", [0, 1002, 1003, 1519, 2990])
def test_tokens_of_another_tokenizer_are_found_at_once_or_when_they_are_read(tmp_path, monkeypatch, place):
    tokens = write_shards(tmp_path)
    tokens[place] = 5000
    for path, part in zip(find_shards(str(tmp_path), "train"), np.split(tokens, np.cumsum(SIZES)[:-1]), strict=True):
        np.save(path, part)
        if 5000 in part:
            culprit = path
    message = f"shard {culprit} has token 5000, but vocab_size is 1000; was it written with another tokenizer?"
    assert refused(tmp_path) == message
    assert TokenStream(find_shards(str(tmp_path), "train"), 5001).read(place, 1) == 5000
    monkeypatch.setattr(data, "SCAN_TOKENS", 5)  # one token of each shard
    if place in (0, 1003):
        assert refused(tmp_path) == message
    else:
        stream = TokenStream(find_shards(str(tmp_path), "train"), VOCAB)
        with pytest.raises(UserError) as error:
            list(training_batches(Batches(stream, T, 1, True), lambda s: (s * 8, 8), 0, 24, 8))
        assert str(error.value) == message


def test_shards_have_to_fit_the_manifest(tmp_path):
    write_shards(tmp_path)
    entries = [dict(file=path.name, tokens=n) for path, n in zip(sorted(tmp_path.glob("*")), SIZES, strict=True)]
    save_manifest(tmp_path, dict(shards=entries))
    TokenStream(find_shards(str(tmp_path), "train"), VOCAB)
    save_manifest(tmp_path, dict(shards=entries[:2] + [dict(entries[2], tokens=17)] + entries[3:]))
    assert "x_train_000002.npy has 16 tokens and manifest.json says 17" in refused(tmp_path)
    save_manifest(tmp_path, dict(shards=entries[:-1]))
    assert "x_train_000004.npy has 1459 tokens and manifest.json says no such shard" in refused(tmp_path)
    save_manifest(tmp_path, dict(shards=entries + [dict(file="x_train_000005.npy", tokens=5)]))
    assert "x_train_000005.npy is listed in manifest.json and missing" in refused(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in refused(tmp_path)


def test_what_is_not_there_or_too_short(tmp_path):
    with pytest.raises(
        UserError, match="holds no \\*_train_\\*.npy or .bin shard; write shards with: python fineweb.py"
    ):
        find_shards(str(tmp_path), "train")
    with pytest.raises(UserError, match="there is no .*nowhere"):
        find_shards(str(tmp_path / "nowhere"), "train")
    write_shards(tmp_path, (T,))
    with pytest.raises(UserError, match="has 16 tokens, fewer than sequence_length \\+ 1 = 17"):
        Batches(TokenStream(find_shards(str(tmp_path), "train"), VOCAB), T, 1, True)


# ----------------------------------------------------------------------------------------------- memory, prefetching


def resident_file_pages() -> int:
    """Bytes of files that are mapped into this process and in memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssFile")


@pytest.mark.skipif(sys.platform != "linux", reason="resident pages are counted in /proc, which only Linux has")
def test_resident_memory_is_flat(tmp_path, monkeypatch):
    np.save(tmp_path / "x_train_000000.npy", np.zeros(128 * 2**20, np.uint16))  # 256 MB
    stream = TokenStream(find_shards(str(tmp_path), "train"), VOCAB)
    batches, before, most = Batches(stream, 1024, 1, True), resident_file_pages(), 0
    for _ in training_batches(batches, lambda s: (s * 32, 32), 0, 512, 32):
        most = max(most, resident_file_pages())
    assert most - before < 64 * 2**20
    monkeypatch.setattr(data, "RELEASE_AFTER", 10**9)
    list(training_batches(batches, lambda s: (s * 32, 32), 0, 512, 32))
    assert resident_file_pages() - before > 128 * 2**20, "without a release they pile up, which this test would see"


def batches_of(n: int):
    return ([(torch.full((2,), i), torch.full((2,), -i))] for i in range(n))


def test_prefetch_changes_nothing():
    received = [micro[0].tolist() for [micro] in prefetch(batches_of(50), torch.device("cpu"))]
    assert received == [[i, i] for i in range(50)]


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
    for _ in range(200):
        if len(made) == 5:  # one read, three waiting, one in the thread's hand
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(made) == 5
    reader.close()
    for thread in [t for t in threading.enumerate() if t.name == "prefetch"]:
        thread.join(timeout=5)
        assert not thread.is_alive()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_prefetch_copies_to_the_gpu_while_it_computes():
    device = torch.device("cuda")
    large = ([(torch.full((64, 1024), i), torch.full((64, 1024), -i))] for i in range(100))
    busy = torch.randn(2048, 2048, device=device)
    for i, [(idx, targets)] in enumerate(prefetch(large, device)):
        busy = busy @ busy.T / 2048
        assert idx.device.type == "cuda" and (idx == i).all() and (targets == -i).all()


def test_the_manifest_is_replaced_as_a_whole(tmp_path):
    for i in range(3):
        save_manifest(tmp_path, dict(tokens=i))
        assert json.loads((tmp_path / "manifest.json").read_text()) == dict(tokens=i)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    with pytest.raises(UserError, match="cannot be read"):
        open_shard(tmp_path / "manifest.npy")
