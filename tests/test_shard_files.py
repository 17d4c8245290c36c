"""The files that the loader reads: kinds of shard, what a fingerprint knows of them, errors for damaged ones."""

from pathlib import Path

import numpy as np
import pytest

from cli import UserError
from corpus import order as data
from corpus.order import (
    Batches,
    TokenStream,
    find_shards,
    fingerprint,
    open_shard,
    read_manifest,
    training_batches,
)
from corpus.shards import save_manifest
from tests.token_shards import SIZES, VOCAB, T, open_stream, write_shards


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
            list(training_batches(Batches(stream, T, 1, True), 8, 0, 24, 8))
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
