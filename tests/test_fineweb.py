"""Sharding: the same bytes as a plain loop, however the work is split, interrupted or fetched; clear errors."""

import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cli
import fineweb
import sources
from bpe.tokenizer import Tokenizer
from cli import UserError
from data import find_shards, read_manifest
from fineweb import Config, make_shards
from shards import verify
from tests.helpers import ROOT, arguments, assert_user_error, command, environment, run_inline, run_script, succeed
from tests.hub import Hub, hub_environment

SHARD = 20_000  # tokens
QUICKLY = "fork" if sys.platform == "linux" else "spawn"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer.json with 600 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    text = (ROOT / "input.txt").read_text()
    Tokenizer.train([text[:100_000]], 600).save(path)
    return path


def make_documents(n: int, seed: int = 0) -> list[str]:
    """Pieces of prose of very different lengths, an empty one, other alphabets, and a special token as plain text."""
    text, rng = (ROOT / "input.txt").read_text(), random.Random(seed)
    docs = []
    for _ in range(n):
        start = rng.randrange(len(text) - 9000)
        docs.append(text[start : start + int(8000 * rng.random() ** 3)])
    docs[1], docs[2], docs[3] = "", "数据是一切的开始。\u3000 naïve 🙂", "ends <|endoftext|> early"
    return docs


def write_parquet(path: Path, docs: list, rows: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": pa.array(docs, pa.string()), "id": list(range(len(docs)))})
    pq.write_table(table, path, row_group_size=rows)
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, tokenizer) -> tuple[Path, list[str]]:
    """A folder of 12 parquet files, and their documents."""
    folder, docs = tmp_path_factory.mktemp("corpus"), make_documents(480)
    for i in range(12):
        write_parquet(folder / f"part_{i:02d}.parquet", docs[40 * i : 40 * (i + 1)], rows=15)
    return folder, docs


def plain_shards(
    docs: list[str], tok: Tokenizer, shard_size: int = SHARD, limit: int | None = None
) -> list[np.ndarray]:
    """The oracle: all tokens in a list, with the Python encoder, cut into pieces."""
    tokens = [i for doc in docs for i in (tok.eot_token, *tok.encode_ordinary(doc))][:limit]
    return [np.array(tokens[i : i + shard_size], np.uint16) for i in range(0, len(tokens), shard_size)]


def shard_paths(out_dir: Path) -> list[Path]:
    return find_shards(str(out_dir), "val") + find_shards(str(out_dir), "train")


def assert_shards(out_dir: Path, expected: list[np.ndarray]) -> None:
    """The files are those that np.save writes, and nothing else is left behind."""
    paths = shard_paths(out_dir)
    assert len(paths) == len(expected)
    for i, (path, tokens) in enumerate(zip(paths, expected, strict=True)):
        assert path.name.endswith(f"_{'train' if i else 'val'}_{i:06d}.npy")
        np.save(out_dir / "expected.npy", tokens)
        assert path.read_bytes() == (out_dir / "expected.npy").read_bytes(), path
        (out_dir / "expected.npy").unlink()
    assert not list(out_dir.glob(".*.tmp")) and not (out_dir / ".downloads").exists()


def options(source, out_dir, tokenizer, **kwargs) -> dict:
    words = dict(source=source, out_dir=out_dir, tokenizer=tokenizer, shard_size=SHARD, workers=2, start_method=QUICKLY)
    return words | kwargs


def run_here(source, out_dir, tokenizer, **kwargs) -> dict:
    """make_shards in this process; returns the manifest."""
    kwargs = dict(workers=1, shard_size=SHARD, start_method=QUICKLY) | kwargs
    source = source if isinstance(source, tuple) else (str(source),)
    make_shards(Config(source=source, tokenizer=str(tokenizer), out_dir=str(out_dir), **kwargs), Path(out_dir))
    return read_manifest(out_dir)


# ------------------------------------------------------------------------------------------------------ the same bytes


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


# -------------------------------------------------------------------------------------------------------- interruptions


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory) -> Path:
    """Enough to be at work for some seconds: 40 files of half a million characters."""
    folder = tmp_path_factory.mktemp("long")
    for i in range(40):
        write_parquet(folder / f"part_{i:02d}.parquet", make_documents(250, seed=i))
    return folder


@pytest.fixture(scope="session")
def long_shards(long_corpus, tokenizer, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("long_shards") / "shards"
    succeed("fineweb.py", **options(long_corpus, out_dir, tokenizer, shard_size=100_000))
    return out_dir


def assert_same_files(out_dir: Path, expected: Path) -> None:
    assert [p.name for p in shard_paths(out_dir)] == [p.name for p in shard_paths(expected)]
    assert not list(out_dir.glob(".*.tmp"))
    for ours, theirs in zip(shard_paths(out_dir), shard_paths(expected), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    assert read_manifest(out_dir) == read_manifest(expected)


def count_shards(out_dir: Path) -> int:
    return len(list(out_dir.glob("*.npy")))


def has_more_shards(out_dir: Path, n: int, process: subprocess.Popen) -> bool:
    return count_shards(out_dir) > n or process.poll() is not None


def children_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found


def state_of(pid: int) -> str:
    """As proc(5) has it: R, S, Z, ...; X for one that is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"


def gone(pid: int) -> bool:
    return state_of(pid) in "ZX"


def wait_until(condition, timeout: float = 200.0) -> bool:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_five_kills_at_random_moments_change_nothing(long_corpus, long_shards, tokenizer, tmp_path, method):
    out_dir, rng, orphans = tmp_path / "shards", random.Random(method), []
    words = options(long_corpus, out_dir, tokenizer, shard_size=100_000, start_method=method)
    for attempt in range(5):
        process = subprocess.Popen(command("fineweb.py", **words), env=environment(), stdout=subprocess.DEVNULL)
        if attempt != 2:  # somewhere in the middle of the work, however fast the machine is; else while it starts
            wait_until(partial(has_more_shards, out_dir, count_shards(out_dir) + 3, process))
        time.sleep(rng.uniform(0, 0.1))
        orphans += children_of(process.pid)
        process.kill()
        process.wait()
    killed = count_shards(out_dir)
    assert wait_until(lambda: all(map(gone, orphans))), "workers outlive the process that started them"
    succeed("fineweb.py", **words)
    assert 16 <= killed < count_shards(out_dir), "the kills came before or after the work"
    assert_same_files(out_dir, long_shards)


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_in_good_order(long_corpus, long_shards, tokenizer, tmp_path, signum, code):
    out_dir = tmp_path / "shards"
    words = options(long_corpus, out_dir, tokenizer, shard_size=100_000)
    process = subprocess.Popen(
        command("fineweb.py", **words), env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert wait_until(partial(has_more_shards, out_dir, 1, process))
    process.send_signal(signum)
    assert process.wait(timeout=200) == code
    message = process.stderr.read()
    assert "the same command again to resume" in message and "Traceback" not in message
    result = succeed("fineweb.py", **words)
    assert "resume  after" in result.stdout
    assert_same_files(out_dir, long_shards)


@pytest.mark.parametrize("when", ["at work", "in the middle of an answer"])
def test_a_killed_worker_is_reported_and_loses_nothing(long_corpus, long_shards, tokenizer, tmp_path, when):
    out_dir = tmp_path / "shards"
    words = options(long_corpus, out_dir, tokenizer, shard_size=100_000)
    process = subprocess.Popen(
        command("fineweb.py", **words), env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert wait_until(partial(has_more_shards, out_dir, 1, process))
    workers = children_of(process.pid)
    if when != "at work":  # its tokens are more than a pipe holds, and nobody reads them
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: all(state_of(worker) == "S" for worker in workers))
    os.kill(workers[0], signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=200) == 2
    assert "error: one of 2 worker processes was ended" in process.stderr.read()
    assert all(map(gone, workers))
    succeed("fineweb.py", **words)
    assert_same_files(out_dir, long_shards)


def test_a_complete_directory_is_left_alone(long_corpus, long_shards, tokenizer):
    before = {path: path.stat().st_mtime_ns for path in long_shards.iterdir()}
    result = succeed("fineweb.py", **options(long_corpus, long_shards, tokenizer, shard_size=100_000))
    assert "is complete" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in long_shards.iterdir()} == before


def test_a_disk_that_is_full_costs_nothing_that_was_complete(corpus, tokenizer, tmp_path, monkeypatch):
    (folder, docs), out_dir = corpus, tmp_path / "shards"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", DiskFull(3))
        with pytest.raises(UserError, match="no space left .* 2 complete shards with 40,000 tokens are safe"):
            run_here(folder, out_dir, tokenizer)
    run_here(folder, out_dir, tokenizer)
    assert_shards(out_dir, plain_shards(docs, Tokenizer.load(tokenizer)))


def test_a_small_disk_is_reported_before_or_when_it_is_full(corpus, tokenizer, tmp_path):
    folder, docs = corpus
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        result = run_script("fineweb.py", **options(folder, disk / "shards", tokenizer, shard_size=10**6))
        assert_user_error(result, "needs about" if "needs" in result.stderr else "no space left")
        subprocess.run(["mount", "-o", "remount,size=1m", disk], check=True)
        filler = disk / "filler"
        filler.write_bytes(bytes(500_000))
        result = run_script("fineweb.py", **options(folder, disk / "shards", tokenizer))
        assert_user_error(result, "needs about" if "needs" in result.stderr else "no space left")
        subprocess.run(["mount", "-o", "remount,size=9m", disk], check=True)
        succeed("fineweb.py", **options(folder, disk / "shards", tokenizer))
        assert_shards(disk / "shards", plain_shards(docs, Tokenizer.load(tokenizer)))
    finally:
        subprocess.run(["umount", disk], check=False)


def test_two_runs_do_not_write_into_one_directory(corpus, tokenizer, tmp_path, monkeypatch):
    from filelock import FileLock

    monkeypatch.setattr(fineweb, "only_one", partial(cli.only_one, seconds=0.1))
    (tmp_path / "shards").mkdir()
    with FileLock(tmp_path / "shards" / ".lock"), pytest.raises(UserError, match="another process is writing to"):
        run_here(corpus[0], tmp_path / "shards", tokenizer)


def test_what_another_run_completed_meanwhile_is_left_alone(corpus, tokenizer, tmp_path, monkeypatch):
    """It held the lock when this one began, and then it was done."""

    @contextmanager
    def after_the_other(*args):
        with monkeypatch.context() as patch:
            patch.setattr(fineweb, "only_one", cli.only_one)
            run_here(corpus[0], tmp_path / "shards", tokenizer)
        before.update({path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.npy")})
        yield

    before = {}
    monkeypatch.setattr(fineweb, "only_one", after_the_other)
    run_here(corpus[0], tmp_path / "shards", tokenizer)
    assert before and {path: path.stat().st_mtime_ns for path in (tmp_path / "shards").glob("*.npy")} == before


# ------------------------------------------------------------------------------------------------- what has changed


class DiskFull:
    """As os.fsync: the disk is full when shard number `at` (from 1) is flushed; `meanwhile` is called before."""

    def __init__(self, at: int, meanwhile=lambda: None):
        self.left, self.meanwhile, self.fsync = at, meanwhile, os.fsync

    def __call__(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.left -= path.endswith(".npy.tmp")
        if self.left == 0 and path.endswith(".npy.tmp"):
            self.meanwhile()
            raise OSError(28, "No space left on device")
        self.fsync(fd)


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="asks /proc which file is flushed")


@pytest.fixture
def interrupted(corpus, tokenizer, tmp_path, monkeypatch):
    """(a copy of the corpus, two of its shards, how to resume): some files are used, one is in use."""
    copy, out_dir = tmp_path / "copy", tmp_path / "shards"
    shutil.copytree(corpus[0], copy)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", DiskFull(3))
        with pytest.raises(UserError, match="2 complete shards"):
            run_here(copy, out_dir, tokenizer)
    return copy, out_dir, partial(run_here, copy, out_dir, tokenizer)


@needs_proc
@pytest.mark.parametrize("number", [0, "under way"])
@pytest.mark.parametrize("change", ["content", "time", "size"])
def test_a_file_that_changed_after_it_was_used_is_refused(interrupted, number, change):
    copy, out_dir, resume = interrupted
    number = read_manifest(out_dir)["next"]["file"] if number == "under way" else number
    path = copy / f"part_{number:02d}.parquet"
    before, stat = {p: p.read_bytes() for p in out_dir.glob("*")}, path.stat()
    if change == "time":
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    else:
        write_parquet(path, make_documents(40, seed=7))
        if change == "size":
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UserError, match=f"{path} has changed since shards in .* start over"):
        resume()
    assert {p: p.read_bytes() for p in out_dir.glob("*")} == before
    with pytest.raises(UserError, match="is not complete"):
        verify(out_dir)


@needs_proc
def test_a_file_that_changed_before_it_was_used_may(interrupted, corpus, tokenizer):
    copy, out_dir, resume = interrupted
    number, docs, changed = read_manifest(out_dir)["next"]["file"] + 1, list(corpus[1]), make_documents(40, seed=7)
    write_parquet(copy / f"part_{number:02d}.parquet", changed, rows=15)
    resume()
    docs[40 * number : 40 * number + 40] = changed
    assert_shards(out_dir, plain_shards(docs, Tokenizer.load(tokenizer)))


@needs_proc
@pytest.mark.parametrize("change", ["add", "remove"])
def test_files_that_came_or_went_are_refused(interrupted, change):
    copy, _, resume = interrupted
    if change == "add":
        shutil.copy(copy / "part_11.parquet", copy / "part_12.parquet")
    else:
        (copy / "part_11.parquet").unlink()
    with pytest.raises(UserError, match="holds shards of other files"):
        resume()


@needs_proc
@pytest.mark.parametrize("change", ["rewritten", "removed"])
def test_a_file_that_changes_while_it_is_read_is_noticed(corpus, tokenizer, tmp_path, monkeypatch, change):
    """When the first shard is flushed, what is in the second one has been read."""
    path, fsync = tmp_path / "docs.parquet", os.fsync
    write_parquet(path, corpus[1], rows=15)

    def fsync_and_change(fd: int) -> None:
        fsync(fd)
        if path.exists():
            path.unlink() if change == "removed" else write_parquet(path, corpus[1][::-1], rows=15)

    monkeypatch.setattr(os, "fsync", fsync_and_change)
    with pytest.raises(UserError, match="docs.parquet"):
        run_here(path, tmp_path / "shards", tokenizer)
    assert len(read_manifest(tmp_path / "shards")["shards"]) <= 1


@needs_proc
def test_a_damaged_manifest_is_one_error(interrupted):
    """Whatever is missing in it, or of another type."""
    _, out_dir, resume = interrupted
    path = out_dir / "manifest.json"
    sound = json.loads(path.read_text())
    places = [{}, dict(file=1, unit=3, bytes=5, skip=0), dict(file="1", at=0, skip=0), dict(file=1, at=-1, skip=0)]
    needed = sound.keys() - {"next", "commit"}
    wrong = [{key: value for key, value in sound.items() if key != lost} for lost in needed]
    for content in [*wrong, *(sound | dict(next=place) for place in places), [1], 1, "x"]:
        path.write_text(json.dumps(content))
        with pytest.raises(UserError):
            resume(dry_run=True)
    for key in sound:
        for value in (None, -1, "x", [], {}, [1], {"a": 1}, 1e400):
            path.write_text(json.dumps(sound | {key: value}))
            with suppress(UserError):
                resume(dry_run=True)
    path.write_text(json.dumps(sound))
    resume()


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


# ------------------------------------------------------------------------------------------------------------ --verify


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


# ------------------------------------------------------------------------------------------------------------- the hub


@pytest.fixture(scope="session")
def dataset(corpus, tmp_path_factory) -> Path:
    """The corpus as a dataset of the hub, besides files that are not meant."""
    folder = tmp_path_factory.mktemp("dataset")
    shutil.copytree(corpus[0], folder / "sample" / "10BT")
    write_parquet(folder / "data" / "train-00000.parquet", ["another text"])
    write_parquet(folder / "data" / "test-00000.parquet", ["for a test"])
    (folder / "README.md").write_text("# a dataset")
    (folder / "license.txt").write_text("free")
    return folder


def test_a_busy_hub_that_drops_connections_gives_the_same_shards(corpus, dataset, tokenizer, tmp_path):
    out_dir = tmp_path / "shards"
    words = options("some/corpus/sample/10BT", out_dir, tokenizer)
    with Hub(dataset, busy=2, cut=("part_03.parquet", "part_08.parquet")) as hub:
        began = time.monotonic()
        result = succeed("fineweb.py", **words, env=hub_environment(hub.url, tmp_path / "home"))
        took = time.monotonic() - began
    assert_shards(out_dir, plain_shards(corpus[1], Tokenizer.load(tokenizer)))
    assert read_manifest(out_dir)["commit"] == hub.COMMIT
    assert [status for _, _, status in hub.requests].count(429) == 2 and took > 2, (
        "Retry-After asks for a second each time"
    )
    downloads = Counter(path.rpartition("/")[2] for path, _, _ in hub.requests if path.startswith("/blob/"))
    assert len(downloads) == 12 and [name for name in downloads if downloads[name] > 1] == sorted(hub.cut)
    assert hub.most <= 2, "more connections at a time than asked for"
    assert not list(out_dir.rglob("*.part")) and "429" in result.stderr


def test_a_killed_download_goes_on_from_where_it_was(corpus, dataset, tokenizer, tmp_path):
    out_dir = tmp_path / "shards"
    words = options("some/corpus/sample/10BT", out_dir, tokenizer, keep_downloads=True, workers=1)
    part = out_dir / ".downloads" / "sample" / "10BT" / "part_00.parquet.part"
    part.parent.mkdir(parents=True)
    whole = (dataset / "sample" / "10BT" / "part_00.parquet").read_bytes()
    part.write_bytes(whole[:5000])
    part.with_name("part_01.parquet.part").write_bytes(bytes(7000))  # of another file: the checksum will tell
    with Hub(dataset) as hub:
        succeed("fineweb.py", **words, env=hub_environment(hub.url, tmp_path / "home"))
    spans = {path.rpartition("/")[2]: span for path, span, _ in hub.requests if path.startswith("/blob/")}
    assert spans["part_00.parquet"] == "bytes=5000-" and spans["part_02.parquet"] is None
    assert len(list(part.parent.iterdir())) == 12
    shutil.rmtree(out_dir / ".downloads")
    assert_shards(out_dir, plain_shards(corpus[1], Tokenizer.load(tokenizer)))


def test_fetched_files_are_deleted_once_they_are_used(corpus, dataset, tokenizer, tmp_path):
    """An interrupted run keeps what it still needs, and does not fetch again what it is done with."""
    out_dir = tmp_path / "shards"
    words = options("some/corpus/sample/10BT", out_dir, tokenizer, shard_size=3000, downloads=1, workers=1)
    with Hub(dataset) as hub:
        env = hub_environment(hub.url, tmp_path / "home")
        process = subprocess.Popen(command("fineweb.py", **words), env=env, stdout=subprocess.DEVNULL)
        wait_until(partial(has_more_shards, out_dir, 25, process))
        process.kill()
        process.wait()
        first = read_manifest(out_dir)["next"]["file"]
        hub.requests.clear()
        succeed("fineweb.py", **words, env=env)
    fetched = {path.rpartition("/")[2] for path, _, _ in hub.requests if path.startswith("/blob/")}
    assert first > 0 and not fetched & {f"part_{i:02d}.parquet" for i in range(first)}
    assert_shards(out_dir, plain_shards(corpus[1], Tokenizer.load(tokenizer), 3000))


def test_the_training_split_of_a_dataset_is_chosen(dataset, tokenizer, tmp_path):
    with Hub(dataset) as hub:
        env = hub_environment(hub.url, tmp_path / "home")
        succeed("fineweb.py", **options("some/corpus", tmp_path / "shards", tokenizer), env=env)
        tok = Tokenizer.load(tokenizer)
        [shard] = find_shards(str(tmp_path / "shards"), "val")
        assert np.load(shard).tolist() == [tok.eot_token, *tok.encode_ordinary("another text")]
        result = run_script("fineweb.py", **options("some/corpus/nowhere", tmp_path / "other", tokenizer), env=env)
        assert_user_error(result, "no data file in nowhere", "sample/10BT")
        result = run_script("fineweb.py", **options("no/body", tmp_path / "other", tokenizer), env=env)
        assert_user_error(result, "no/body", "HTTP 404")


def test_no_network_is_one_line_and_loses_nothing(corpus, dataset, tokenizer, tmp_path):
    out_dir = tmp_path / "shards"
    words = options("some/corpus/sample/10BT", out_dir, tokenizer, shard_size=3000)
    nowhere = hub_environment("http://127.0.0.1:9", tmp_path / "home")
    assert_user_error(run_script("fineweb.py", **words, env=nowhere), "http://127.0.0.1:9", "HF_ENDPOINT")
    assert not out_dir.exists()


def test_another_content_under_the_same_commit_is_refused(corpus, dataset, tokenizer, tmp_path):
    """As a mirror that is out of date may have it: the hub's hashes tell."""
    shutil.copytree(dataset, tmp_path / "dataset")
    out_dir, folder = tmp_path / "shards", tmp_path / "dataset" / "sample" / "10BT"
    words = options("some/corpus/sample/10BT", out_dir, tokenizer, keep_downloads=True)
    sound = (folder / "part_07.parquet").read_bytes()
    (folder / "part_07.parquet").write_bytes(sound[:1000])
    with Hub(tmp_path / "dataset") as hub:
        env = hub_environment(hub.url, tmp_path / "home")
        assert_user_error(run_script("fineweb.py", **words, env=env), "cannot read", "part_07.parquet")
        assert len(read_manifest(out_dir)["shards"]) > 0
        write_parquet(folder / "part_00.parquet", ["another", "content"])
        assert_user_error(run_script("fineweb.py", **words, env=env), "part_00.parquet has changed")
        shutil.copy(dataset / "sample" / "10BT" / "part_00.parquet", folder)
        (folder / "part_07.parquet").write_bytes(sound)
        succeed("fineweb.py", **words, env=env)  # the damaged copy in .downloads is not taken for the sound file
    shutil.rmtree(out_dir / ".downloads")
    assert_shards(out_dir, plain_shards(corpus[1], Tokenizer.load(tokenizer)))


# --------------------------------------------------------------------------------------------------------- what it is


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
