"""The files that the loader reads: kinds of shard, what a digest knows of them, errors for damaged ones."""

from pathlib import Path

import numpy as np
import pytest

from parts.cli import UserError
from parts.data import Batches, Shard, TokenStream, find_shards
from parts.shards import verify
from tests.helpers import assert_refused
from tests.token_shards import SIZES, T, open_stream, with_manifest, write_shards


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


# ------------------------------------------------------------------------------------------------------ kinds of shard


def test_shards_of_llm_c_are_read_as_they_are(tmp_path):
    tokens = write_shards(tmp_path)
    (tmp_path / "bin").mkdir()
    for i, part in enumerate(np.split(tokens, np.cumsum(SIZES)[:-1])):
        write_bin(tmp_path / "bin" / f"fineweb_train_{i:06d}.bin", part)
    write_bin(tmp_path / "bin" / "fineweb_val_000000.bin", tokens[:50])
    theirs = open_stream(tmp_path / "bin")
    assert np.array_equal(theirs.read(0, len(theirs)), tokens)
    assert find_shards(str(tmp_path / "bin"), "val") == [tmp_path / "bin" / "fineweb_val_000000.bin"]


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


# ----------------------------------------------------------------------------------------------------------- the digest


def test_a_digest_knows_other_tokens_and_not_another_place(tmp_path):
    write_shards(tmp_path / "a")
    before = open_stream(tmp_path / "a").digest()
    (tmp_path / "a").rename(tmp_path / "b")
    assert open_stream(tmp_path / "b").digest() == before
    path = tmp_path / "b" / "x_train_000001.npy"
    intact = np.load(path)
    for other in (intact[:-1], np.append(intact[:-1], intact[-1] ^ 1), np.insert(intact[1:], 0, intact[0] ^ 1)):
        np.save(path, other)
        assert open_stream(tmp_path / "b").digest() != before
    np.save(path, intact)
    path.rename(tmp_path / "b" / "x_train_000009.npy")  # another order
    assert open_stream(tmp_path / "b").digest() != before


def test_a_digest_is_what_it_was_in_every_version(tmp_path):
    write_shards(tmp_path, (30_000,))
    assert open_stream(tmp_path).digest() == "baaf530aa0b97514", "older runs would not resume"


# -------------------------------------------------------------------------------------------------------------- errors


def refused(folder: Path, use=open_stream) -> str:
    with pytest.raises(UserError) as error:
        use(folder)
    return str(error.value)


@pytest.mark.parametrize("suffix, write", [("npy", np.save), ("bin", write_bin)])
def test_damaged_shards_are_named(tmp_path, suffix, write):
    path = tmp_path / f"x_train_000001.{suffix}"
    write(path, np.arange(100, dtype=np.uint16))
    intact = path.read_bytes()
    flipped = intact[:8] + b"6" + intact[9:]  # the length of NumPy's header, or of llm.c's tokens
    for content in (intact[:-2], intact[:100], intact + b"\0\0", b"", flipped, bytes(1024)):
        path.write_bytes(content)
        assert str(path) in refused(tmp_path)
    path.unlink()
    path.mkdir()
    assert str(path) in refused(tmp_path)


OTHER_ARRAYS = [np.zeros(5, np.int64), np.zeros((5, 5), np.uint16), np.zeros(5, ">u2"), np.array([{}])]


@pytest.mark.parametrize("array", OTHER_ARRAYS, ids=lambda array: array.dtype)
def test_arrays_of_other_kinds_are_named(tmp_path, array):
    np.save(tmp_path / "x_train_000001.npy", array, allow_pickle=True)
    assert str(tmp_path / "x_train_000001.npy") in refused(tmp_path)


def test_damaged_shards_of_datatrove_are_named(tmp_path):
    paths = [tmp_path / "00000.ds", tmp_path / "00001.ds"]
    for path in paths:
        write_ds(path, np.arange(100, dtype=np.uint16))
    open_stream(tmp_path)
    metadata = tmp_path / "00001.ds.metadata"
    for content in (b"", b"gpt2", b"gpt2|3\n100\n", b"gpt2|2\n1e2\n", b"gpt2|2\n99\n", b"gpt2|4\n100\n"):
        metadata.write_bytes(content)
        assert str(paths[1]) in refused(tmp_path)
    metadata.unlink()
    assert metadata.name in refused(tmp_path)


@pytest.mark.parametrize("place", [0, 2**16 - 1, 2**16, 2**16 + 4999, 2**16 + 5000])
def test_a_token_of_another_tokenizer_is_refused_wherever_it_stands(tmp_path, place):
    """7 is a gap of the vocabulary, 10 is past its end."""
    for token in (7, 10):
        tokens = np.zeros(2**16 + 5001, np.uint16)
        tokens[place] = token
        for i, part in enumerate(np.split(tokens, [2**16 + 5000])):
            np.save(tmp_path / f"x_train_{i:06d}.npy", part)
        paths = find_shards(str(tmp_path), "train")
        assert TokenStream(paths, 11, [3]).read(place, 1) == token
        culprit = paths[place // (2**16 + 5000)]
        assert_refused(f"{culprit}.* {token}", TokenStream, paths, 10, [3, 7])


def test_in_a_large_split_a_token_at_the_start_of_a_shard_is_refused(tmp_path):
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        file.seek(2 * (2**16 - 1))
        file.write(b"\x88\x13")
        file.truncate(2 * (2**28 + 1))  # no other block of it is on the disk
    assert_refused(f"{path}.*5000", open_stream, tmp_path, 5000)


# ------------------------------------------------------------------------------------------------------- the manifest


def test_a_shard_of_the_manifest_that_is_missing_is_named(tmp_path):
    write_shards(tmp_path)
    with_manifest(tmp_path)
    open_stream(tmp_path)
    (tmp_path / "x_train_000002.npy").unlink()
    assert "x_train_000002.npy" in refused(tmp_path)


KINDS = [b"", b"[]", b"[" * 100_000]


@pytest.mark.parametrize("content", KINDS, ids=lambda content: str(content)[:30])
def test_a_manifest_of_another_kind_is_named(tmp_path, content):
    write_shards(tmp_path, (50,))
    (tmp_path / "manifest.json").write_bytes(content)
    for use in (open_stream, verify):
        assert str(tmp_path / "manifest.json") in refused(tmp_path, use)


def test_what_is_not_there_or_too_short(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("book.docx", "x_val_000001.npy"):
        (tmp_path / name).touch()
        assert_refused(name, find_shards, str(tmp_path / name), "train")
    assert_refused(str(tmp_path), find_shards, str(tmp_path), "train")
    for nowhere in ("n" * 5000, "[", "**/nowhere*"):
        assert_refused("--data", find_shards, nowhere, "train")
    write_shards(tmp_path, (1,))
    assert str(tmp_path) in refused(tmp_path)
    write_shards(tmp_path, (2,))
    assert len(open_stream(tmp_path)) == 2
    write_shards(tmp_path, (T,))
    assert_refused("16.*17", Batches, open_stream(tmp_path), T, 1, True)


def test_tokens_of_nanogpt_are_read_by_their_names_but_for_characters(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    for name in ("train", "val"):
        tokens.tofile(tmp_path / f"{name}.bin")
        [path] = find_shards(str(tmp_path), name)
        assert Shard(path).read(0, 1000).tolist() == tokens.tolist()
    (tmp_path / "meta.pkl").touch()
    assert_refused("val.bin", Shard, tmp_path / "val.bin")
