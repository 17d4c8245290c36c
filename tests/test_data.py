"""The loader: one order for every number of ranks, each window once an epoch, exact resumption, flat memory, errors."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from cli import UserError
from data import (
    IGNORED,
    Batches,
    BatchPlan,
    TokenStream,
    find_shards,
    fingerprint,
    open_shard,
    permutation,
    read_manifest,
    to_inputs,
    training_batches,
    validation_batches,
)
from model import GPT, GPTConfig
from shards import save_manifest
from tests.helpers import ROOT

VOCAB, T = 1000, 16
SIZES = (1003, 517, 16, 5, 1459)  # tokens of the shards: no multiple of T, and some shorter than a window


def write_shards(folder: Path, sizes=SIZES, split: str = "train", dtype=np.uint16) -> np.ndarray:
    """Shards of random tokens; returns all of them in one array."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, sum(sizes)).astype(dtype)
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        np.save(folder / f"x_{split}_{i:06d}.npy", part)
    return tokens


def write_bin(path: Path, tokens: np.ndarray) -> None:
    """A shard as llm.c writes it."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())


def write_ds(path: Path, tokens: np.ndarray, tokenizer: str = "gpt2") -> None:
    """A shard as datatrove writes it."""
    path.write_bytes(tokens.astype(tokens.dtype.newbyteorder("<")).tobytes())
    path.with_name(path.name + ".index").write_bytes(np.array([len(tokens)], "<u8").tobytes())
    path.with_name(path.name + ".metadata").write_text(f"{tokenizer}|{tokens.itemsize}\n{len(tokens)}\n{len(tokens)} T")


def open_stream(folder: Path, vocab_size: int = VOCAB) -> TokenStream:
    return TokenStream(find_shards(str(folder), "train"), vocab_size)


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
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, sequence_length=T, vocab_size=VOCAB)).eval()
    one = torch.ones(())  # sums, not means
    [(windows,)] = validation_batches(open_stream(tmp_path), T, 5, 0)
    padded = model(*to_inputs(torch.from_numpy(windows)), n_targets=one)[1]
    rows = [torch.from_numpy(tokens[None, :17]), torch.from_numpy(tokens[None, 16:])]
    expected = sum(model(*to_inputs(row), n_targets=one)[1] for row in rows)
    torch.testing.assert_close(padded, expected, rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------------------------ kinds of shard


def test_shards_of_llm_c_are_read_as_they_are(tmp_path):
    tokens = write_shards(tmp_path)
    (tmp_path / "bin").mkdir()
    for i, part in enumerate(np.split(tokens, np.cumsum(SIZES)[:-1])):
        write_bin(tmp_path / "bin" / f"fineweb_train_{i:06d}.bin", part)
    write_bin(tmp_path / "bin" / "fineweb_val_000000.bin", tokens[:50])
    ours, theirs = open_stream(tmp_path), open_stream(tmp_path / "bin")
    assert np.array_equal(theirs.read(0, len(theirs)), tokens) and len(ours) == len(theirs)
    for step in range(5):
        [a], [b] = (Batches(s, T, 1, True).micro_batches(step * 8, 8, 8) for s in (ours, theirs))
        assert np.array_equal(a, b)
    assert find_shards(str(tmp_path / "bin"), "val") == [tmp_path / "bin" / "fineweb_val_000000.bin"]
    write_bin(tmp_path / "tiny_shakespeare_val.bin", tokens[:50])
    assert find_shards(str(tmp_path), "val") == [tmp_path / "tiny_shakespeare_val.bin"]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_shards_of_datatrove_are_read_as_they_are(tmp_path, dtype):
    tokens = np.random.default_rng(0).integers(0, np.iinfo(dtype).max // 2, 1000).astype(dtype)
    for i, part in enumerate(np.split(tokens, [200, 700])):
        write_ds(tmp_path / f"{i:05d}_00000_shuffled.ds", part)
    (tmp_path / "00000_stats.json").touch()
    stream = open_stream(tmp_path, 2**31)
    assert np.array_equal(stream.read(0, len(stream)), tokens[200:])
    assert find_shards(str(tmp_path), "val") == [tmp_path / "00000_00000_shuffled.ds"], "the first one validates"
    assert find_shards(f"{tmp_path}/0000[12]*", "val") == [tmp_path / "00001_00000_shuffled.ds"]


def test_endoftext_at_the_end_of_documents_is_our_stream_from_its_second_token_on(tmp_path):
    """datatrove puts it behind a document, we before: files of both, cut between documents, as one stream."""
    eot, rng = 0, np.random.default_rng(0)
    files = [[rng.integers(1, 99, n).astype(np.uint16) for n in sizes] for sizes in ((7,), (3, 9, 1), (5, 5), (2,))]
    for i, documents in enumerate(files):
        name = f"x_{'train' if i else 'val'}_{i:06d}"
        write_ds(tmp_path / f"{i:05d}.ds", np.concatenate([np.append(d, eot) for d in documents]).astype(np.uint16))
        np.save(tmp_path / f"{name}.npy", np.concatenate([np.insert(d, 0, eot) for d in documents]))
    ours = open_stream(tmp_path)
    theirs = TokenStream(find_shards(f"{tmp_path}/*.ds", "train"), VOCAB)
    assert ours.read(1, len(ours) - 1).tolist() + [eot] == theirs.read(0, len(theirs)).tolist()


def test_datatrove_itself(tmp_path):
    """Its own TokenizedFile, where it is installed."""
    tokenizer = pytest.importorskip("datatrove.pipeline.tokens.tokenizer", reason="datatrove is not installed")
    for token_size, rank in ((2, 0), (4, 1)):
        options = dict(tokenizer_name_or_path="gpt2", save_final_metadata=True, token_size=token_size)
        file = tokenizer.TokenizedFile(str(tmp_path), f"{rank:05d}_unshuffled.ds", **options)
        for document in ([5, 6, 7, 50256], [8, 50256]):
            file.write(document, None)
        file.close()
    stream = open_stream(tmp_path, 50257)
    assert stream.read(0, len(stream)).tolist() == [5, 6, 7, 50256, 8, 50256]
    assert stream.shards[0].dtype == np.uint32


def test_wide_ids_and_globs(tmp_path):
    tokens = write_shards(tmp_path, dtype=np.uint32)
    write_shards(tmp_path, (40,), "val")
    (tmp_path / ".x_train_000009.npy.tmp").touch()
    assert [path.name for path in find_shards(str(tmp_path), "val")] == ["x_val_000000.npy"]
    paths = find_shards(f"{tmp_path}/x_*_00000[0-2].npy", "train")
    assert np.array_equal(TokenStream(paths, VOCAB).read(0, sum(SIZES[:3])), tokens[: sum(SIZES[:3])])


# ------------------------------------------------------------------------------------------------------ the fingerprint


def with_manifest(folder: Path) -> Path:
    from cli import sha256

    paths = sorted(folder.glob("*.npy"))
    entries = [dict(file=path.name, tokens=len(np.load(path)), sha256=sha256(path)) for path in paths]
    save_manifest(folder, dict(shards=entries))
    return folder


@pytest.mark.parametrize("manifest", [True, False])
def test_a_fingerprint_knows_other_tokens_and_not_another_place(tmp_path, manifest):
    describe = with_manifest if manifest else lambda folder: folder
    write_shards(tmp_path / "a")
    before = fingerprint(open_stream(describe(tmp_path / "a")))
    (tmp_path / "a").rename(tmp_path / "b")
    assert fingerprint(open_stream(tmp_path / "b")) == before
    path = tmp_path / "b" / "x_train_000001.npy"
    sound = np.load(path)
    others = [sound[:-1], sound[::-1], np.append(sound[:-1], sound[-1] ^ 1), np.insert(sound[1:], 0, sound[0] ^ 1)]
    for other in others:
        np.save(path, other)
        assert fingerprint(open_stream(describe(tmp_path / "b"))) != before
    np.save(path, sound)
    assert fingerprint(open_stream(describe(tmp_path / "b"))) == before
    path.rename(tmp_path / "b" / "x_train_000009.npy")  # another order
    assert fingerprint(open_stream(describe(tmp_path / "b"))) != before


def test_a_manifest_lets_a_fingerprint_see_every_token(tmp_path):
    write_shards(tmp_path, (30_000,))
    before = fingerprint(open_stream(with_manifest(tmp_path)))
    tokens = np.load(tmp_path / "x_train_000000.npy")
    tokens[15_000] ^= 1
    np.save(tmp_path / "x_train_000000.npy", tokens)
    assert fingerprint(open_stream(with_manifest(tmp_path))) != before


# -------------------------------------------------------------------------------------------------------------- errors


def refused(folder: Path, vocab_size: int = VOCAB) -> str:
    with pytest.raises(UserError) as error:
        open_stream(folder, vocab_size)
    return str(error.value)


def test_damaged_shards_are_named(tmp_path):
    write_shards(tmp_path)
    path = tmp_path / "x_train_000001.npy"
    sound = path.read_bytes()
    for content in (
        sound[:-2],
        sound[:100],
        sound + b"\0\0",
        b"",
        b"\x93",
        b"\x93NUMPY",
        b"not an array",
        b"PK\3\4zip",
    ):
        path.write_bytes(content)
        assert f"shard {path} cannot be read" in refused(tmp_path)
    for array in (np.zeros(5, np.int64), np.zeros((5, 5), np.uint16), np.zeros(5, np.float32), np.zeros(5, ">u2")):
        np.save(path, array)
        assert f"shard {path} cannot be read: it holds {array.dtype} of shape" in refused(tmp_path)
    np.save(path, np.array([{}]), allow_pickle=True)
    assert f"shard {path} cannot be read" in refused(tmp_path)
    path.unlink()
    path.mkdir()
    assert f"shard {path} cannot be read" in refused(tmp_path)


def test_damaged_shards_of_llm_c_are_named(tmp_path):
    path = tmp_path / "x_train_000001.bin"
    for content in (b"", b"\0", bytes(1024), b"\x93NUMPY" * 200):
        path.write_bytes(content)
        assert f"shard {path} cannot be read: its header does not start with 20240520" in refused(tmp_path)
    write_bin(path, np.arange(100))
    path.write_bytes(path.read_bytes()[:-2])
    assert "promises 100 tokens" in refused(tmp_path)


def test_damaged_shards_of_datatrove_are_named(tmp_path):
    paths = [tmp_path / "00000.ds", tmp_path / "00001.ds"]
    for path in paths:
        write_ds(path, np.arange(100, dtype=np.uint16))
    metadata = tmp_path / "00001.ds.metadata"
    sound = metadata.read_bytes()
    for content in (b"", b"g", sound[:4], sound[:7], b"gpt2|3\n100\n", b"gpt2|2\n1e2\n", b"\xff|2\n100", sound * 10**5):
        metadata.write_bytes(content)
        if content != sound * 10**5:
            assert f"shard {paths[1]} cannot be read" in refused(tmp_path)
    open_stream(tmp_path)
    for content in (b"gpt2|2\n99\n", b"gpt2|4\n100\n"):
        metadata.write_bytes(content)
        assert "its size does not fit" in refused(tmp_path)
    metadata.unlink()
    assert "there is no 00001.ds.metadata" in refused(tmp_path)
    metadata.mkdir()
    assert f"shard {paths[1]} cannot be read" in refused(tmp_path)
    paths[1].unlink()
    assert "is the only .ds file, and so the validation split" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["npy", "bin", "ds"])
def test_a_flipped_bit_in_a_header_is_an_error_or_harmless(tmp_path, kind):
    tokens = np.arange(300, dtype=np.uint16)
    path = tmp_path / f"x_train_000000.{kind}"
    {"npy": np.save, "bin": write_bin, "ds": write_ds}[kind](path, tokens)
    damaged = path.with_name(path.name + ".metadata") if kind == "ds" else path
    sound = damaged.read_bytes()
    wrong = 0
    for place in range(min(len(sound), 16 if kind == "bin" else 128)):
        for bit in range(8):
            damaged.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :])
            try:
                found = open_shard(path)
            except UserError as e:
                assert str(path) in str(e)
                wrong += 1
            else:
                assert np.array_equal(found, tokens)
    assert wrong > 30


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
    assert open_stream(tmp_path, 5001).read(place, 1) == 5000
    monkeypatch.setattr(data, "SCAN_TOKENS", 5)  # one token of each shard
    if place in (0, 1003):
        assert refused(tmp_path) == message
    else:
        stream = open_stream(tmp_path)
        with pytest.raises(UserError) as error:
            list(training_batches(Batches(stream, T, 1, True), lambda s: (s * 8, 8), 0, 24, 8))
        assert str(error.value) == message


def test_shards_have_to_fit_the_manifest(tmp_path):
    write_shards(tmp_path)
    entries = [dict(file=path.name, tokens=n) for path, n in zip(sorted(tmp_path.glob("*")), SIZES, strict=True)]
    save_manifest(tmp_path, dict(shards=entries))
    open_stream(tmp_path)
    save_manifest(tmp_path, dict(shards=entries[:2] + [dict(entries[2], tokens=17)] + entries[3:]))
    assert "x_train_000002.npy has 16 tokens and manifest.json says 17" in refused(tmp_path)
    save_manifest(tmp_path, dict(shards=entries[:-1]))
    assert "x_train_000004.npy has 1459 tokens and manifest.json says no such shard" in refused(tmp_path)
    save_manifest(tmp_path, dict(shards=entries + [dict(file="x_train_000005.npy", tokens=5)]))
    assert "x_train_000005.npy is listed in manifest.json and missing" in refused(tmp_path)
    for name in ("n" * 5000, "a\0b", "\ud800", ".."):
        save_manifest(tmp_path, dict(shards=[dict(file=name, tokens=5)]))
        assert "manifest.json" in refused(tmp_path)


MALFORMED = {
    "empty": b"",
    "a byte": b"{",
    "not an object": b"[]",
    "a number": b"7",
    "not UTF-8": b'{"source": "\xff"}',
    "UTF-16": '{"shards": []}'.encode("utf-16"),
    "deep": b"[" * 100_000,
    "a deep object": b'{"a":' * 100_000,
    "a long number": b'{"tokens": ' + b"1" * 5000 + b"}",
    "shards is an object": b'{"shards": {}}',
    "a shard is a word": b'{"shards": ["x_train_000000.npy"]}',
    "a shard has no name": b'{"shards": [{"tokens": 5}]}',
    "a shard has no count": b'{"shards": [{"file": "x_train_000000.npy"}]}',
    "a count is a word": b'{"shards": [{"file": "x_train_000000.npy", "tokens": "5"}]}',
    "a count is a bool": b'{"shards": [{"file": "x_train_000000.npy", "tokens": true}]}',
    "an empty name": b'{"shards": [{"file": "", "tokens": 5}]}',
    "a name leads elsewhere": b'{"shards": [{"file": "../x_train_000000.npy", "tokens": 5}]}',
    "a checksum is a number": b'{"shards": [{"file": "x_train_000000.npy", "tokens": 5, "sha256": 5}]}',
    "tokens is NaN": b'{"tokens": NaN}',
    "tokenizer is null": b'{"tokenizer": null}',
    "skipped counts words": b'{"skipped": {"empty": "many"}}',
    "next is a list": b'{"next": []}',
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_manifest_is_named(tmp_path, content):
    write_shards(tmp_path, (50,))
    (tmp_path / "manifest.json").write_bytes(content)
    assert str(tmp_path / "manifest.json") in refused(tmp_path)


def test_a_manifest_may_have_a_byte_order_mark_and_may_not_be_a_directory(tmp_path):
    write_shards(tmp_path, (50,))
    (tmp_path / "manifest.json").write_bytes(b'\xef\xbb\xbf{"shards": [{"file": "x_train_000000.npy", "tokens": 50}]}')
    assert len(read_manifest(tmp_path)["shards"]) == 1
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").mkdir()
    assert str(tmp_path / "manifest.json") in refused(tmp_path)


def test_what_is_not_there_or_too_short(tmp_path):
    with pytest.raises(UserError, match="holds no \\*_train_\\*.npy, .bin or .ds shard; write shards with"):
        find_shards(str(tmp_path), "train")
    for nowhere in (str(tmp_path / "nowhere"), "", "n" * 5000, "[", "**/nowhere*"):
        with pytest.raises(UserError, match="there is no "):
            find_shards(nowhere, "train")
    write_shards(tmp_path, (1,))
    assert "has 1 tokens; a split needs two at least" in refused(tmp_path)
    write_shards(tmp_path, (T,))
    with pytest.raises(UserError, match="has 16 tokens, fewer than sequence_length \\+ 1 = 17"):
        Batches(open_stream(tmp_path), T, 1, True)


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
