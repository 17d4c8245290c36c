"""Sharding: the same bytes as a plain loop, however the work is split; clear errors."""

import gzip
import hashlib
import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tqdm import tqdm

import fineweb
from bpe.tokenizer import Tokenizer
from parts import documents, sources
from parts.data import find_shards, read_manifest, save_manifest
from parts.shards import shard_dtype, verify
from tests.corpora import (
    assert_shards,
    make_documents,
    options,
    plain_tokens,
    run_here,
    shard_paths,
    write_parquet,
)
from tests.helpers import (
    assert_refused,
    assert_user_error,
    files_of,
    prose,
    run_script,
    succeed,
    text_file,
)
from tests.token_shards import UNFINISHED

# ------------------------------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize("workers", [1, 4])
def test_shards_are_those_of_the_plain_loop(corpus, tokenizer, tmp_path, workers):
    folder, docs = corpus
    out_dir = tmp_path / "shards"
    result = succeed("fineweb.py", **options(folder, out_dir, tokenizer, workers=workers))
    tok = Tokenizer.load(tokenizer)
    expected = assert_shards(out_dir, docs, tokenizer)
    manifest = read_manifest(out_dir)
    assert manifest["tokens"] == sum(map(len, expected))
    assert manifest["documents"] == len(docs)
    assert manifest["bytes"] == sum(len(doc.encode()) for doc in docs)
    assert manifest["skipped"] == {}
    assert manifest["commit"] == ""  # which only the hub has
    for entry, path in zip(manifest["shards"], shard_paths(out_dir), strict=True):
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["tokenizer"] == tok.fingerprint == Tokenizer.load(out_dir / "tokenizer.json").fingerprint
    assert f"{manifest['tokens']:,} tokens in {len(expected)} shards" in result.stdout


def test_a_vocabulary_beyond_16_bits_makes_uint32_shards(corpus, tmp_path):
    folder, docs = corpus
    tok = Tokenizer([], special_tokens={"<|endoftext|>": 2**16})
    tok.save(tmp_path / "wide.json")
    run_here(folder / "part_00.parquet", tmp_path / "shards", tmp_path / "wide.json", shard_size=10**6)
    tokens = np.load(find_shards(str(tmp_path / "shards"), "val")[0])
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == plain_tokens(docs[:40], tok)
    assert shard_dtype(2**16) == np.uint16


def tokens_of(out_dir: Path) -> list[int]:
    return np.concatenate([np.load(out_dir / entry["file"]) for entry in read_manifest(out_dir)["shards"]]).tolist()


def test_all_formats_in_one_folder(tokenizer, tmp_path, monkeypatch):
    """Rows, row groups, lines and texts travel to the workers in different ways."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 20_000)
    docs = [" ".join(doc.split()) + "." for doc in make_documents(120)]
    folder = tmp_path / "docs"
    write_parquet(folder / "a.parquet", docs[:30], rows=5)
    write_parquet(folder / "b.parquet", docs[30:60], rows=1000)
    docs[60] = "a lone \ud800 surrogate"
    lines = "".join(json.dumps({"text": doc}) + "\n" for doc in docs[60:90])
    docs[60] = "a lone \ufffd surrogate"
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "d.txt").write_text("\n\n\n".join(docs[90:]))
    run_here(folder, tmp_path / "shards", tokenizer, shard_size=10_000)
    docs[90:-1] = [doc + "\n\n\n" for doc in docs[90:-1]]
    assert tokens_of(tmp_path / "shards") == plain_tokens(docs, Tokenizer.load(tokenizer))


@pytest.mark.parametrize("continued", [0, 1])
def test_a_unit_is_its_documents_each_after_the_token_that_ends_one(tokenizer, continued):
    tok = Tokenizer.load(tokenizer)
    unit = documents.Unit(Path("x"), ["one", None, "two"], continued=continued)
    tokens, skipped = fineweb.tokenize(unit, "text", tok)
    assert tokens.tolist() == plain_tokens(["one", "two"], tok)[continued:]
    assert skipped == {"no text": 1}


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", r"\S+|\s+"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_long_text_has_the_tokens_that_it_has_as_a_whole(tmp_path, monkeypatch, pattern, end):
    """Whether its documents are shorter than a unit or longer."""
    monkeypatch.setattr(documents, "UNIT_BYTES", 3000)
    english = prose(40_000)
    chinese = "中文也一样，\u3000没有空格的句子很长。\n\n\n" * 100
    text = english + "\n\n\n\n" + chinese + english[:9000] + "\n" * 5000 + "the end  \n"
    docs = documents.documents(text.replace("\n", end))
    tok = Tokenizer.train(docs, 400, pattern)
    tok.save(tmp_path / "tokenizer.json")
    (tmp_path / "long.txt").write_bytes("".join(docs).encode())
    manifest = run_here(tmp_path / "long.txt", tmp_path / "shards", tmp_path / "tokenizer.json", shard_size=5000)
    assert tokens_of(tmp_path / "shards") == plain_tokens(docs, tok)
    assert manifest["documents"] == len(docs) > 100


# --------------------------------------------------------------------------------------------- what is wrong, in a line


def test_a_truncated_file_is_named_and_what_came_before_it_is_kept(corpus, tokenizer, tmp_path):
    folder, docs = corpus
    out_dir = tmp_path / "shards"
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    broken = copy / "part_09.parquet"
    broken.write_bytes(broken.read_bytes()[:-100])
    result = run_script("fineweb.py", **options(copy, out_dir, tokenizer))
    assert_user_error(result, "cannot read", "part_09.parquet", "cut short")
    complete = len(read_manifest(out_dir)["shards"])
    assert complete > 2  # which units were still under way is a matter of time
    shutil.copy(folder / broken.name, broken)
    result = succeed("fineweb.py", **options(copy, out_dir, tokenizer))
    assert f"after {complete} complete shards" in result.stdout
    assert_shards(out_dir, docs, tokenizer)


def test_a_source_without_documents(tokenizer, tmp_path):
    def refused(words: str, path: Path) -> None:
        assert_refused(words, run_here, path, tmp_path / path.name.replace(".", "_"), tokenizer)

    refused("missing.parquet", Path("missing.parquet"))
    assert not (tmp_path / "missing_parquet").exists()
    (tmp_path / "x.txt").touch()
    refused("no document in .*x.txt; skipped: none", tmp_path / "x.txt")
    (tmp_path / "x.jsonl").write_text('{"text": null}\n{"text": 7}\n')
    refused("{'no text': 2}; name .* --text_field", tmp_path / "x.jsonl")


@pytest.mark.parametrize("change", [dict(shard_size=10_000), dict(text_field="id"), dict(limit_tokens=5), "tokenizer"])
def test_another_run_is_not_mixed_into_a_directory(corpus, tokenizer, tmp_path, change):
    run_here(corpus[0] / "part_00.parquet", tmp_path / "shards", tokenizer)
    before = files_of(tmp_path / "shards")
    if change == "tokenizer":
        Tokenizer.train(["another text"], 260).save(tmp_path / "other.json")
        tokenizer = tmp_path / "other.json"
        change = {}
    assert_refused(
        "give another --out_dir", run_here, corpus[0] / "part_00.parquet", tmp_path / "shards", tokenizer, **change
    )
    assert files_of(tmp_path / "shards") == before


def test_shards_of_others_are_not_overwritten(corpus, tokenizer, tmp_path):
    out_dir = tmp_path / "shards"
    out_dir.mkdir()
    for name in ("tokenizer.json", "shards_train_000001.npy"):
        (out_dir / name).touch()
        assert_refused(f"{name} is in no manifest.json", run_here, corpus[0], out_dir, tokenizer)


WRONG = [
    (dict(shard_size=-1), ["--shard_size must be in [0,"]),
    (dict(tokenizer="train"), ["no tokenizer at train; give gpt2, a tokenizer.json, or the OUT of python"]),
    (dict(source="a.txt"), ["give an --out_dir"]),
    (dict(tokenizer="nowhere.json"), ["nowhere.json"]),
    (dict(out_dir=""), ["is empty; give a directory"]),
    (dict(source="a.txt", out_dir="a.txt"), ["Not a directory; fix that, or give another path"]),
    (dict(verify=True, out_dir="."), ["manifest.json"]),
]


@pytest.mark.parametrize("changes, words", WRONG)
def test_usage_errors_are_one_line(tokenizer, tmp_path, inline, monkeypatch, changes, words):
    monkeypatch.chdir(tmp_path)
    text_file(Path("a.txt"))
    assert_user_error(inline(fineweb.main, **dict(tokenizer=tokenizer) | changes), *words)


def test_dry_run_says_what_it_needs_and_writes_nothing(corpus, tokenizer, tmp_path):
    words = options(corpus[0], tmp_path / "shards", tokenizer, dry_run=True, shard_size=10**7, limit_tokens=12_345)
    result = succeed("fineweb.py", **words)
    size = tqdm.format_sizeof(sum(file.stat().st_size for file in corpus[0].iterdir()), "B")
    for said in (
        f"{corpus[0]}: 12 files, {size}\n",
        "about 12.3k tokens, in shards of 10,000,000 uint16\n",
        "24.7kB for shards, 0.00B for files under way",
        "are free",
    ):
        assert said in result.stdout
    assert "all of it would be validation; give --shard_size 1235 to" in result.stdout
    assert not (tmp_path / "shards").exists()


def test_compressed_parquet_is_estimated_by_its_text_and_a_small_corpus_is_mostly_for_training(tokenizer, tmp_path):
    docs = make_documents(100)
    pq.write_table(pa.table({"text": docs, "n": range(100)}), tmp_path / "docs.parquet", compression="zstd")
    [file] = sources.find_source((str(tmp_path / "docs.parquet"),)).files
    n_bytes = sum(len(doc.encode()) for doc in docs)
    assert documents.text_size(file.name, file.bytes, "text") == pytest.approx(n_bytes, rel=0.05)
    assert documents.text_size(file.name, file.bytes, "absent") > 0, "an estimate; the error comes with its turn"
    manifest = run_here(tmp_path, tmp_path / "shards", tokenizer, shard_size=0)
    expected = int(documents.text_size(file.name, file.bytes, "text") * fineweb.TOKENS_PER_BYTE)
    assert manifest["shards"][0]["tokens"] == manifest["shard_size"] == expected // 10
    assert run_here(tmp_path, tmp_path / "shards", tokenizer, shard_size=0) == manifest


def test_a_million_blanks_have_their_ids_where_tiktoken_gives_up(tokenizer):
    tok = Tokenizer.load(tokenizer)
    text = "x" + " " * 10**6 + "y"
    assert tok.encode_to_numpy(text).tolist() == tok.encode(text)


# ----------------------------------------------------------------------------------------- documents in, documents out


def lines(*docs, key: str = "text") -> bytes:
    return "".join(json.dumps({"id": n, key: doc}, ensure_ascii=False) + "\n" for n, doc in enumerate(docs)).encode()


def parquet(docs: list, key: str = "text", **options) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": range(len(docs)), key: docs}), buffer, **options)
    return buffer.getvalue().to_pybytes()


def zst(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


class Link(NamedTuple):
    to: str


A = lines("one", "two", "three")
B = lines("four", "five")
ARRAY = json.dumps([{"text": "one"}, {"text": "two"}])
OVER_LINES = json.dumps({"text": "one"}, indent=1) + "\n"
WORDS = pa.array(["one", "two", "one", None]).dictionary_encode()
HIDDEN = {"a.jsonl": (A, 3), ".b.jsonl": (B, 2), ".git/c.jsonl": (B, 2)}
SUFFIXES = {"a.jsonl": (A, 3), "b.csv": (b"text\none\n", 1), "c.JSONL": (B, 2), "d.ndjson": (B, 2)}
NESTED = {"a.jsonl": (A, 3), "x/b.jsonl": (B, 2), "x/y/c.jsonl": (B, 2)}
LINKED = {"x/a.jsonl": (A, 3), "../elsewhere/b.jsonl": (B, 2), "y": (Link("../elsewhere"), 0)}
OTHER_KEY = {"a.jsonl": (A, 3), "b.jsonl": (lines("one", key="body"), 1)}
TWINS = {"a.jsonl": (A, 3), "a.jsonl.gz": (gzip.compress(A), 3)}
KINDS = {"a.jsonl": (A, 3), "b.parquet": (parquet(["x"]), 1), "c.txt": (b"x\n\n\ny", 2)}

# {what: (files, expected)}: {file: (its content, or a link, and how many documents are in it)}, and how many come out,
# or the words of the error
INPUTS = {
    "other suffixes": (SUFFIXES, 3),
    "hidden files and folders": (HIDDEN, 3),
    "a link to a file": ({"a.jsonl": (A, 3), "b.jsonl": (Link("a.jsonl"), 3)}, 3),
    "a link to a folder": (LINKED, 5),
    "a link that leads nowhere": ({"a.jsonl": (A, 3), "b.jsonl": (Link("nowhere"), 0)}, 3),
    "an array": ({"a.jsonl": (ARRAY.encode(), 2)}, "a.jsonl begins with"),
    "an array over lines": ({"a.jsonl": (ARRAY.replace("}, ", "},\n").encode(), 2)}, "a.jsonl begins with"),
    "commas after objects": ({"a.jsonl": (A.replace(b"\n", b",\n"), 3)}, "a.jsonl has a comma .* line 1;"),
    "objects over lines": ({"a.jsonl": (OVER_LINES.encode() * 2, 2)}, "a.jsonl has 6 broken lines and 0 documents"),
    "an object around rows": ({"a.jsonl": (f'{{"data": {ARRAY}}}'.encode(), 2)}, "a.jsonl has no key 'text'"),
    "a byte order mark": ({"a.jsonl": (b"\xef\xbb\xbf" + A, 3)}, 3),
    "a mark in each line": ({"a.jsonl": (A.replace(b"{", b"\xef\xbb\xbf{"), 3)}, 3),
    "line ends of Windows": ({"a.jsonl": (A.replace(b"\n", b"\r\n"), 3)}, 3),
    "blank lines, no last end": ({"a.jsonl": (A.replace(b"\n", b"\n \n").rstrip(), 3)}, 3),
    "other line separators": ({"a.jsonl": (lines("a\u2028b\x85c", "d\x0ce"), 2)}, 2),
    "gzip of many members": ({"a.jsonl.gz": (gzip.compress(A) + gzip.compress(B), 5)}, 5),
    "zstd of many frames": ({"a.jsonl.zst": (zst(A) + zst(B), 5)}, 5),
    "gzip cut short": ({"a.jsonl.gz": (gzip.compress(A)[:-5], 3)}, "a.jsonl.gz: Truncated"),
    "nulls and numbers": ({"a.jsonl": (lines("one", None, 5), 3)}, 1),
    "nulls in parquet": ({"a.parquet": (parquet(["one", None, "two"]), 3)}, 2),
    "numbers of words": ({"a.parquet": (parquet(WORDS), 4)}, 3),
    "groups of rows": ({"a.parquet": (parquet(["one"] * 50, row_group_size=3), 50)}, 50),
    "empty texts": ({"a.jsonl": (lines("", "one", " "), 3), "b.jsonl": (b"", 0)}, 3),
    "special tokens in texts": ({"a.jsonl": (lines("a<|endoftext|>b", "<|endoftext|>"), 2)}, 2),
    "mixed keys": ({"a.jsonl": (lines("one") + lines("two", key="body"), 2)}, 1),
    "another key": (OTHER_KEY, "b.jsonl has no key 'text'"),
    "another column": ({"a.parquet": (parquet(["one"], "body"), 1)}, "a.parquet has no column 'text'"),
    "some broken lines": ({"a.jsonl": (A + b"{\n" + B + b'{"text": "cut', 7)}, 5),
    "mostly broken lines": ({"a.jsonl": (A + b"{\n" * 4, 7)}, "4 broken lines and 3 documents .* is line 4;"),
    "a text in two formats": (TWINS, "a.jsonl and .*a.jsonl.gz may hold the same documents"),
    "many formats": (KINDS, 6),
    "paragraphs of Windows": ({"a.txt": (b"x\r\n\r\ny\r\n\r\n\r\nz", 2)}, 2),
    "UTF-16": ({"a.txt": ("one two".encode("utf-16"), 1)}, "a.txt is not UTF-8"),
    "C4": ({"c4-train.00000.json.gz": (gzip.compress(lines("one", "two")), 2)}, 2),
    "the Pile": ({"00.jsonl.zst": (zst(b'{"text": "one", "meta": {"set": "x"}}\n'), 1)}, 1),
}


class Inline:
    """A worker in this process."""

    def __init__(self, config: fineweb.Config, tok: Tokenizer):
        self.config = config
        self.tok = tok

    def __enter__(self):
        return self.submit

    def __exit__(self, *_):
        pass

    def submit(self, unit: documents.Unit) -> Future:
        done = Future()
        done.set_result(fineweb.tokenize(unit, self.config.text_field, self.tok))
        return done


@pytest.fixture
def shards_of(tokenizer, tmp_path, monkeypatch):
    """shards_of(files, patterns) writes the files to a folder, and shards of what the patterns name there; returns the
    manifest, and how many documents are in files that are named as left out."""
    monkeypatch.setattr(fineweb, "start_workers", Inline)
    folder = tmp_path / "folder"

    def make(files: dict, patterns=("",)) -> tuple[dict, int]:
        for name, (content, _) in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Link):
                path.symlink_to(content.to)
            else:
                path.write_bytes(content)
        source = tuple(f"{folder}/{pattern}" for pattern in patterns)
        manifest = run_here(source, tmp_path / "shards", tokenizer)
        named = [name for name, _ in sources.find_source(source).left_out]
        return manifest, sum(n for name, (_, n) in files.items() if any(map((folder / name).is_relative_to, named)))

    return make


@pytest.mark.parametrize("what", INPUTS)
def test_documents_come_out_or_are_named_as_left_out(shards_of, what):
    """Each is in the shards, or counted by reason, or in a file that is named; or the error names its file."""
    files, expected = INPUTS[what]
    if isinstance(expected, str):
        assert_refused(expected, shards_of, files)
        return
    manifest, in_files_left_out = shards_of(files)
    documents_in = sum(n for _, n in files.values())
    assert manifest["documents"] == expected
    assert documents_in == expected + sum(manifest["skipped"].values()) + in_files_left_out


PATTERNS = [[""], ["**"], ["*"], ["**/*"], ["x/b.jsonl", "", "x"], ["*.jsonl", "*/*"]]


@pytest.mark.parametrize("patterns", PATTERNS, ids=str)
def test_nested_documents_come_out_once_whatever_the_patterns(shards_of, patterns):
    manifest, _ = shards_of(NESTED, patterns)
    assert manifest["documents"] == 7


def test_what_is_left_out_is_printed(shards_of, capsys):
    shards_of(HIDDEN | SUFFIXES)
    printed = capsys.readouterr().out
    for name in [".b.jsonl", ".git", "b.csv", "c.JSONL", "d.ndjson"]:
        assert f"/{name}" in printed


# ------------------------------------------------------------------------------------------------------------- --verify


@pytest.fixture
def written(corpus, tokenizer, tmp_path) -> Path:
    run_here(corpus[0] / "part_00.parquet", tmp_path / "shards", tokenizer, shard_size=5000)
    return tmp_path / "shards"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "is not what was written": flip,
    "cannot be read": lambda path: path.unlink(),
    "has 100 tokens, but manifest.json says 5000": lambda path: np.save(path, np.load(path)[:100]),
    "manifest.json does not list it": lambda path: shutil.copy(path, path.with_name("stray_train_000009.npy")),
    "manifest.json cannot be read": lambda path: path.with_name("manifest.json").write_text("{ cut"),
    "is not complete": lambda path: save_manifest(path.parent, read_manifest(path.parent) | UNFINISHED),
    "another tokenizer": lambda path: Tokenizer.train(["abc"], 260).save(path.with_name("tokenizer.json")),
}


@pytest.mark.parametrize("message, damage", DAMAGE.items(), ids=DAMAGE)
def test_verify_finds_whatever_is_wrong(written, message, damage):
    assert "tokens in" in verify(written)
    damage(find_shards(str(written), "train")[0])
    assert_refused(message, verify, written)
