"""Sharding: the same bytes as a plain loop, however the work is split; clear errors."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import fineweb
from bpe.tokenizer import Tokenizer
from cli import UserError
from corpus import sources
from corpus.order import find_shards, read_manifest
from corpus.shards import verify
from fineweb import Config
from tests.corpora import (
    SHARD,
    assert_shards,
    make_documents,
    options,
    plain_shards,
    run_here,
    shard_paths,
    write_parquet,
)
from tests.helpers import ROOT, arguments, assert_user_error, command, environment, run_inline, run_script, succeed

# ------------------------------------------------------------------------------------------------------- the same bytes


@pytest.mark.parametrize(
    "method, workers", [("fork", 1), ("spawn", 2), ("fork", 4), ("spawn", 1), ("fork", 2), ("spawn", 4)]
)
def test_shards_are_those_of_the_plain_loop(corpus, tokenizer, tmp_path, method, workers):
    folder, docs = corpus
    out_dir = tmp_path / "shards"
    result = succeed("fineweb.py", **options(folder, out_dir, tokenizer, workers=workers, start_method=method))
    tok = Tokenizer.load(tokenizer)
    expected = plain_shards(docs, tok)
    assert_shards(out_dir, expected)
    manifest = read_manifest(out_dir)
    assert manifest["tokens"] == sum(map(len, expected)) and manifest["documents"] == len(docs)
    assert manifest["bytes"] == sum(len(doc.encode()) for doc in docs) and manifest["skipped"] == {}
    for entry, path in zip(manifest["shards"], shard_paths(out_dir), strict=True):
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert manifest["tokenizer"] == tok.fingerprint == Tokenizer.load(out_dir / "tokenizer.json").fingerprint
    assert f"{manifest['tokens']:,} tokens in {len(expected)} shards" in result.stdout


def test_gpt2_shards_are_those_of_tiktoken(corpus, tmp_path):
    try:
        import tiktoken

        encoding = tiktoken.get_encoding("gpt2")
    except Exception as e:
        pytest.skip(f"the GPT-2 vocabulary is neither cached nor downloadable: {type(e).__name__}")
    folder, docs = corpus
    run_here(folder, tmp_path / "shards", "gpt2")
    tokens = [i for doc in docs for i in (50256, *encoding.encode_ordinary(doc))]
    assert np.concatenate([np.load(path) for path in shard_paths(tmp_path / "shards")]).tolist() == tokens


def test_limit_tokens_stops_at_exactly_that_token(corpus, tokenizer, tmp_path):
    folder, docs = corpus
    limit = 2 * SHARD + 777
    manifest = run_here(folder, tmp_path / "shards", tokenizer, limit_tokens=limit)
    assert_shards(tmp_path / "shards", plain_shards(docs, Tokenizer.load(tokenizer), limit=limit))
    assert manifest["tokens"] == limit


def test_a_vocabulary_beyond_16_bits_makes_uint32_shards(corpus, tmp_path):
    folder, docs = corpus
    tok = Tokenizer([], special_tokens={"<|endoftext|>": 70_000})
    tok.save(tmp_path / "wide.json")
    run_here(folder / "part_00.parquet", tmp_path / "shards", tmp_path / "wide.json", shard_size=10**6)
    tokens = np.load(find_shards(str(tmp_path / "shards"), "val")[0])
    expected = [i for doc in docs[:40] for i in (70_000, *tok.encode_ordinary(doc))]
    assert tokens.dtype == np.uint32 and tokens.tolist() == expected


def tokens_of(out_dir: Path) -> list[int]:
    return np.concatenate([np.load(out_dir / entry["file"]) for entry in read_manifest(out_dir)["shards"]]).tolist()


def test_all_formats_in_one_folder(tokenizer, tmp_path, monkeypatch):
    """Rows, row groups, lines and texts travel to the workers in different ways."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 20_000)
    docs, folder = [" ".join(doc.split()) + "." for doc in make_documents(120)], tmp_path / "docs"
    write_parquet(folder / "a.parquet", docs[:30], rows=5)
    write_parquet(folder / "b.parquet", docs[30:60], rows=1000)
    lines = "".join(json.dumps({"text": doc}) + "\n" for doc in docs[60:90])
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "d.txt").write_text("\n\n\n".join(docs[90:]))
    run_here(folder, tmp_path / "shards", tokenizer, shard_size=10_000)
    docs[90:-1] = [doc + "\n\n\n" for doc in docs[90:-1]]
    tok = Tokenizer.load(tokenizer)
    assert tokens_of(tmp_path / "shards") == [i for doc in docs for i in (tok.eot_token, *tok.encode_ordinary(doc))]


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k", r"\S+|\s+"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_long_text_has_the_tokens_that_it_has_as_a_whole(tmp_path, monkeypatch, pattern, end):
    """Whether its documents are shorter than a unit or longer."""
    monkeypatch.setattr(sources, "UNIT_BYTES", 3000)
    prose = (ROOT / "input.txt").read_text()[:40_000]
    text = (
        prose
        + "\n\n\n\n"
        + "中文也一样，\u3000没有空格的句子很长。\n\n\n" * 100
        + prose[:9000]
        + "\n" * 5000
        + "the end  \n"
    )
    docs = sources.documents(text.replace("\n", end))
    tok = Tokenizer.train(docs, 400, pattern)
    tok.save(tmp_path / "tokenizer.json")
    (tmp_path / "long.txt").write_bytes("".join(docs).encode())
    manifest = run_here(tmp_path / "long.txt", tmp_path / "shards", tmp_path / "tokenizer.json", shard_size=5000)
    assert tokens_of(tmp_path / "shards") == [i for doc in docs for i in (tok.eot_token, *tok.encode_ordinary(doc))]
    assert manifest["documents"] == len(docs) > 100


def test_a_document_of_a_million_blanks_is_a_document(tokenizer, tmp_path):
    docs, tok = ["one", "word " + " " * 10**6 + "x", "last"], Tokenizer.load(tokenizer)
    write_parquet(tmp_path / "docs.parquet", docs)
    run_here(tmp_path / "docs.parquet", tmp_path / "shards", tokenizer, shard_size=10**7)
    assert tokens_of(tmp_path / "shards") == [i for doc in docs for i in (tok.eot_token, *tok.encode_ordinary(doc))]


def test_documents_without_text_are_skipped_and_counted(tokenizer, tmp_path):
    tok, path = Tokenizer.load(tokenizer), tmp_path / "docs.jsonl"
    path.write_text('{"text": "one"}\n{"text": null}\n{broken\n[1]\n{"text": "a lone \\ud800 surrogate"}')
    manifest = run_here(path, tmp_path / "shards", tokenizer)
    texts = ["one", "a lone \ufffd surrogate"]
    assert tokens_of(tmp_path / "shards") == [i for text in texts for i in (tok.eot_token, *tok.encode_ordinary(text))]
    assert manifest["skipped"] == {"no text": 1, "broken line": 2} and manifest["documents"] == 2


# --------------------------------------------------------------------------------------------- what is wrong, in a line


def test_a_truncated_file_is_named_and_what_came_before_it_is_kept(corpus, tokenizer, tmp_path):
    (folder, docs), out_dir = corpus, tmp_path / "shards"
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    broken = copy / "part_09.parquet"
    broken.write_bytes(broken.read_bytes()[:-100])
    result = run_script("fineweb.py", **options(copy, out_dir, tokenizer))
    assert_user_error(result, "cannot read", "part_09.parquet", "cut short")
    complete = len(read_manifest(out_dir)["shards"])
    assert complete > 2
    shutil.copy(folder / broken.name, broken)
    result = succeed("fineweb.py", **options(copy, out_dir, tokenizer))
    assert f"resume  after {complete} complete shards" in result.stdout
    assert_shards(out_dir, plain_shards(docs, Tokenizer.load(tokenizer)))


def test_damage_inside_a_file_is_reported_by_its_worker(corpus, tokenizer, tmp_path):
    path = shutil.copy(corpus[0] / "part_00.parquet", tmp_path / "damaged.parquet")
    data = bytearray(Path(path).read_bytes())
    data[4:3000] = os.urandom(2996)
    Path(path).write_bytes(data)
    with pytest.raises(UserError, match="cannot read .*damaged.parquet"):
        run_here(path, tmp_path / "shards", tokenizer)


def test_a_compressed_file_that_is_cut_short(tokenizer, tmp_path):
    path = tmp_path / "docs.jsonl.gz"
    lines = "".join(json.dumps({"text": doc}) + "\n" for doc in make_documents(60))
    path.write_bytes(gzip.compress(lines.encode())[:-1000])
    with pytest.raises(UserError, match="cannot read .*docs.jsonl.gz"):
        run_here(path, tmp_path / "shards", tokenizer)


def test_a_source_without_documents(tokenizer, tmp_path):
    with pytest.raises(UserError, match="missing.parquet: no such file"):
        run_here("missing.parquet", tmp_path / "shards", tokenizer)
    assert not (tmp_path / "shards").exists()
    (tmp_path / "x.txt").touch()
    with pytest.raises(UserError, match="no document in .*x.txt; skipped: none"):
        run_here(tmp_path / "x.txt", tmp_path / "shards", tokenizer)


@pytest.mark.parametrize("change", [dict(shard_size=10_000), dict(text_field="id"), dict(limit_tokens=5), "tokenizer"])
def test_another_run_is_not_mixed_into_a_directory(corpus, tokenizer, tmp_path, change):
    (tmp_path / "manifest.json").write_text("{}")
    run_here(corpus[0] / "part_00.parquet", tmp_path / "shards", tokenizer)
    before = {path: path.read_bytes() for path in (tmp_path / "shards").glob("*")}
    if change == "tokenizer":
        Tokenizer.train(["another text"], 260).save(tmp_path / "other.json")
        tokenizer, change = tmp_path / "other.json", {}
    with pytest.raises(UserError, match="holds shards of a run with .* give another --out_dir"):
        run_here(corpus[0] / "part_00.parquet", tmp_path / "shards", tokenizer, **change)
    assert {path: path.read_bytes() for path in (tmp_path / "shards").glob("*")} == before


def test_shards_of_others_are_not_overwritten(corpus, tokenizer, tmp_path):
    np.save(tmp_path / "shards_train_000001.npy", np.zeros(5, np.uint16))
    out_dir = tmp_path / "shards"
    out_dir.mkdir()
    shutil.move(tmp_path / "shards_train_000001.npy", out_dir)
    with pytest.raises(UserError, match="is in no manifest.json"):
        run_here(corpus[0], out_dir, tokenizer)


def test_usage_errors_are_one_line(tokenizer, tmp_path):
    assert_user_error(run_script("fineweb.py", shard_size=0, tokenizer=tokenizer), "--shard_size must be in [1,")
    assert_user_error(run_script("fineweb.py", source="a.txt", tokenizer=tokenizer), "give an --out_dir")
    assert_user_error(run_script("fineweb.py", tokenizer="nowhere.json"), "nowhere.json")
    assert_user_error(run_script("fineweb.py", out_dir="", tokenizer=tokenizer), "is empty; give a directory")
    words = dict(source=tokenizer, out_dir=tokenizer, tokenizer=tokenizer)
    assert_user_error(run_script("fineweb.py", **words), "is a file; give a directory")
    assert_user_error(run_script("fineweb.py", verify=True, out_dir=tmp_path), "manifest.json")


def test_it_outlives_the_reader_of_its_output(corpus, tokenizer, tmp_path):
    out_dir = tmp_path / "shards"
    words = command("fineweb.py", **options(corpus[0], out_dir, tokenizer))
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=200) == 0
    assert_shards(out_dir, plain_shards(corpus[1], Tokenizer.load(tokenizer)))


def test_dry_run_says_what_it_needs_and_writes_nothing(corpus, tokenizer, tmp_path):
    result = succeed("fineweb.py", **options(corpus[0], tmp_path / "shards", tokenizer, dry_run=True))
    assert "12 files" in result.stdout and "are free" in result.stdout and "tokens" in result.stdout
    assert not (tmp_path / "shards").exists()


# ------------------------------------------------------------------------------------------------------------- --verify


@pytest.fixture
def written(corpus, tokenizer, tmp_path) -> Path:
    run_here(corpus[0] / "part_00.parquet", tmp_path / "shards", tokenizer, shard_size=5000)
    return tmp_path / "shards"


def test_verify_finds_whatever_is_wrong(written):
    assert "tokens in" in verify(written)
    path, manifest = find_shards(str(written), "train")[0], (written / "manifest.json").read_text()
    sound = path.read_bytes()

    def problem() -> str:
        with pytest.raises(UserError) as error:
            verify(written)
        path.write_bytes(sound)
        (written / "manifest.json").write_text(manifest)
        return str(error.value)

    path.write_bytes(sound[:-7] + bytes([sound[-7] ^ 1]) + sound[-6:])
    assert f"{path} is not what was written" in problem()
    path.write_bytes(sound[:-10])
    assert f"{path} cannot be read" in problem()
    path.unlink()
    assert f"{path} cannot be read" in problem()
    np.save(path, np.load(path)[:100])
    assert f"{path} has 100 tokens, and manifest.json says 5000" in problem()
    for key in ("tokens", "documents", "bytes"):
        changed = json.loads(manifest)
        changed[key] += 1
        (written / "manifest.json").write_text(json.dumps(changed))
        assert f"manifest.json counts {changed[key]} {key}" in problem()
    shutil.copy(path, written / "stray_train_000009.npy")
    assert "stray_train_000009.npy is not in manifest.json" in problem()
    (written / "stray_train_000009.npy").unlink()
    (written / "manifest.json").write_text("{ cut")
    assert "manifest.json cannot be read" in problem()
    (written / "manifest.json").write_text(json.dumps(json.loads(manifest) | dict(next={})))
    assert "is not complete" in problem()
    Tokenizer.train(["another text"], 260).save(written / "tokenizer.json")
    assert "tokenizer.json is another tokenizer" in problem()


# ----------------------------------------------------------------------------------------------------------- what it is


def test_importing_it_imports_no_torch():
    code = "import sys; sys.path.insert(0, '.'); import fineweb; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"torch", "datasets", "transformers", "model", "optim", "run", "train_gpt2"} & set(modules.split())


WRONG = ["0", "-1", "1", "1000000000000", "nan", "inf", "", "nonsense", "x" * 5000]


@pytest.mark.parametrize("name", [field.name for field in fields(Config) if field.name != "verify"])
def test_any_value_of_any_constant_is_taken_or_answered_in_a_line(
    corpus, tokenizer, tmp_path, capsys, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    given = dict(source=corpus[0] / "part_00.parquet", out_dir="shards", tokenizer=tokenizer)
    for value in WRONG if name not in ("dry_run", "keep_downloads") else [True]:
        words = arguments(**given | dict(dry_run=True) | {name: value})
        result = run_inline(fineweb.main, words, capsys, monkeypatch)
        if result.returncode:
            assert_user_error(result)
    assert not (tmp_path / "shards").exists()
