"""Sharding: the same bytes as a plain loop, however the work is split; clear errors."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tqdm import tqdm

import fineweb
from bpe.tokenizer import Tokenizer
from parts.data import find_shards, read_manifest, save_manifest
from tests.corpora import (
    assert_shards,
    make_documents,
    options,
    plain_tokens,
    run_here,
    shard_paths,
    write_parquet,
)
from tests.helpers import assert_refused, assert_user_error, files_of, succeed, text_file, write_lines
from tests.token_shards import UNFINISHED

# ------------------------------------------------------------------------------------------------------- the same bytes


def test_shards_are_those_of_the_plain_loop(corpus, tokenizer, tmp_path):
    folder, docs = corpus
    out_dir = tmp_path / "shards"
    result = succeed("fineweb.py", **options(folder, out_dir, tokenizer))
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
    assert f"{manifest['tokens']:,} " in result.stdout


@pytest.mark.parametrize("largest, dtype", [(2**16 - 1, np.uint16), (2**16, np.uint32)])
def test_a_vocabulary_beyond_16_bits_makes_uint32_shards(corpus, tmp_path, largest, dtype):
    folder, docs = corpus
    tok = Tokenizer([], special_tokens={"<|endoftext|>": largest})
    tok.save(tmp_path / "wide.json")
    run_here(folder / "part_00.parquet", tmp_path / "shards", tmp_path / "wide.json", shard_size=10**6)
    tokens = np.load(find_shards(str(tmp_path / "shards"), "val")[0])
    assert tokens.dtype == dtype
    assert tokens.tolist() == plain_tokens(docs[:40], tok)


def test_all_kinds_in_one_run_are_the_tokens_of_their_documents(tokenizer, tmp_path):
    docs = make_documents(90)
    write_parquet(tmp_path / "a.parquet", docs[:30], rows=5)
    write_lines(tmp_path / "b.jsonl", [dict(text=doc) for doc in [*docs[30:70], None, *docs[70:]]])
    (tmp_path / "c.txt").write_text("one\n\n\ntwo")
    files = tuple(str(tmp_path / name) for name in ("a.parquet", "b.jsonl", "c.txt"))
    manifest = run_here(files, tmp_path / "shards", tokenizer, shard_size=10_000)
    tokens = np.concatenate([np.load(path) for path in shard_paths(tmp_path / "shards")])
    assert tokens.tolist() == plain_tokens([*docs, "one\n\n\n", "two"], Tokenizer.load(tokenizer))
    assert sum(manifest["skipped"].values()) == 1


# --------------------------------------------------------------------------------------------- what is wrong, in a line


def test_a_truncated_file_is_named_and_what_came_before_it_is_kept(corpus, tokenizer, tmp_path, capsys):
    folder, docs = corpus
    out_dir = tmp_path / "shards"
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    broken = copy / "part_09.parquet"
    broken.write_bytes(broken.read_bytes()[:-100])
    assert_refused("part_09.parquet", run_here, copy, out_dir, tokenizer)
    complete = len(read_manifest(out_dir)["shards"])
    assert complete > 2  # which units were still under way is a matter of time
    shutil.copy(folder / broken.name, broken)
    run_here(copy, out_dir, tokenizer)
    assert f" {complete} " in capsys.readouterr().out
    assert_shards(out_dir, docs, tokenizer)


def test_a_source_without_documents_is_named_with_its_rows(tokenizer, tmp_path):
    (tmp_path / "x.txt").touch()
    (tmp_path / "y.jsonl").write_text('{"text": null}\n' * 2)
    for source, words in (("missing.parquet", ""), ("x.txt", ""), ("y.jsonl", ".* 2 ")):
        assert_refused(source + words, run_here, tmp_path / source, tmp_path / f"of {source}", tokenizer)
    assert not (tmp_path / "of missing.parquet").exists()


def test_another_run_is_not_mixed_into_a_directory(corpus, tokenizer, tmp_path):
    source = corpus[0] / "part_00.parquet"
    out_dir = tmp_path / "shards"
    run_here(source, out_dir, tokenizer)
    before = files_of(out_dir)
    other = tmp_path / "other.json"
    Tokenizer.train(["another text"], 260).save(other)
    assert_refused(str(out_dir), run_here, source, out_dir, other)
    assert_refused(str(out_dir), run_here, source, out_dir, tokenizer, shard_size=10_000)
    assert files_of(out_dir) == before


def test_shards_of_others_are_not_overwritten(corpus, tokenizer, tmp_path):
    out_dir = tmp_path / "shards"
    out_dir.mkdir()
    for name in ("tokenizer.json", "shards_train_000001.npy"):
        (out_dir / name).touch()
        assert_refused(name, run_here, corpus[0], out_dir, tokenizer)


WRONG = [
    (dict(tokenizer="train"), ["train"]),
    (dict(source="a.txt"), ["--out_dir"]),
    (dict(tokenizer="nowhere.json"), ["nowhere.json"]),
    (dict(source="a.txt", out_dir="a.txt"), ["a.txt"]),
]


@pytest.mark.parametrize("changes, words", WRONG)
def test_usage_errors_are_one_line(tokenizer, tmp_path, inline, monkeypatch, changes, words):
    monkeypatch.chdir(tmp_path)
    text_file(Path("a.txt"))
    assert_user_error(inline(fineweb.main, **dict(tokenizer=tokenizer) | changes), *words)


def test_dry_run_says_what_it_needs_and_writes_nothing(corpus, tokenizer, tmp_path, capsys):
    limits = dict(shard_size=10**7, limit_tokens=12_345)
    run_here(corpus[0], tmp_path / "shards", tokenizer, dry_run=True, **limits)
    printed = capsys.readouterr().out
    size = tqdm.format_sizeof(sum(file.stat().st_size for file in corpus[0].iterdir()), "B")
    for said in (str(corpus[0]), size, "12.3k", "24.7kB"):
        assert said in printed
    assert not (tmp_path / "shards").exists()


def test_a_small_corpus_is_mostly_for_training_by_the_tokens_of_its_first_documents(tokenizer, tmp_path):
    docs = make_documents(100)
    pq.write_table(pa.table({"text": docs, "n": range(100)}), tmp_path / "docs.parquet", compression="zstd")
    manifest = run_here(tmp_path / "docs.parquet", tmp_path / "shards", tokenizer, shard_size=0)
    expected = len(plain_tokens(docs, Tokenizer.load(tokenizer)))
    assert manifest["shards"][0]["tokens"] == manifest["shard_size"] == pytest.approx(expected / 10, rel=0.15)
    assert run_here(tmp_path / "docs.parquet", tmp_path / "shards", tokenizer, shard_size=0) == manifest


# ------------------------------------------------------------------------------------------------------------- --verify


@pytest.fixture
def written(corpus, tokenizer, tmp_path) -> Path:
    run_here(corpus[0] / "part_00.parquet", tmp_path / "shards", tokenizer, shard_size=5000)
    return tmp_path / "shards"


@pytest.mark.parametrize("words", ["train_000001.npy", "train_000009.npy", "manifest.json", "shards", "tokenizer.json"])
def test_verify_finds_whatever_is_wrong(written, inline, words):
    assert inline(fineweb.main, verify=True, out_dir=written).returncode == 0
    shard = find_shards(str(written), "train")[0]
    match words:
        case "train_000001.npy":
            content = shard.read_bytes()
            shard.write_bytes(content[:-7] + b"\xff" + content[-6:])
            assert_user_error(inline(fineweb.main, verify=True, out_dir=written), words)
            shard.unlink()
        case "train_000009.npy":
            shutil.copy(shard, written / "stray_train_000009.npy")
        case "manifest.json":
            (written / "manifest.json").write_text("{ cut")
        case "shards":
            save_manifest(written, read_manifest(written) | UNFINISHED)
        case "tokenizer.json":
            Tokenizer.train(["abc"], 260).save(written / "tokenizer.json")
    assert_user_error(inline(fineweb.main, verify=True, out_dir=written), words)
