"""Sharding that is interrupted, or whose source changes: nothing is lost, and nothing mixed."""

import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import fineweb
from bpe.tokenizer import Tokenizer
from parts.data import read_manifest
from tests.corpora import (
    assert_shards,
    count_shards,
    full_disk,
    has_more_shards,
    make_documents,
    options,
    plain_tokens,
    run_here,
    shard_paths,
    wait_until,
    write_parquet,
)
from tests.helpers import command, environment, files_of, needs_proc, prose, read_json, slow, stamps, start_script

# -------------------------------------------------------------------------------------------------------- interruptions


def test_a_run_that_ends_at_any_flush_goes_on_to_the_limit(tokenizer, tmp_path, monkeypatch):
    """Of a document that fills several shards."""
    source = tmp_path / "a.txt"
    source.write_text(prose(300))
    expected = plain_tokens([prose(300)], Tokenizer.load(tokenizer))[:25]
    for last in itertools.count(1):
        numbers = itertools.count(1)

        def fsync(fd: int, last=last, numbers=numbers) -> None:
            if next(numbers) == last:
                raise KeyboardInterrupt

        shard = partial(run_here, source, tmp_path / f"{last}", tokenizer, shard_size=10, limit_tokens=25)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(os, "fsync", fsync)
            shard()
            break
        shard()
        assert np.concatenate([np.load(path) for path in shard_paths(tmp_path / f"{last}")]).tolist() == expected
    assert last > 9  # shards, their names, manifests


@needs_proc
def test_a_shard_and_its_name_are_on_the_disk_before_the_manifest_lists_it(corpus, tokenizer, tmp_path, monkeypatch):
    """After a power failure the manifest must not list a file whose name was never written."""
    out_dir = tmp_path / "shards"
    flushed = set()
    named = set()

    def fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        flushed.add(path.name)
        if path == out_dir:
            named.update(file.name for file in out_dir.glob("*.npy"))
        if path.name.startswith(".manifest.json"):
            listed = {entry["file"] for entry in read_json(path)["shards"]}
            assert listed <= named
            assert {f".{name}.tmp" for name in listed} <= flushed

    monkeypatch.setattr(os, "fsync", fsync)
    run_here(corpus[0] / "part_00.parquet", out_dir, tokenizer)
    assert named


LONG_SHARD = 20_000  # tokens


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory) -> Path:
    """Enough to be at work for a second: 5 files of half a million characters."""
    folder = tmp_path_factory.mktemp("long")
    for i in range(5):
        write_parquet(folder / f"part_{i:02d}.parquet", make_documents(250, seed=i))
    return folder


@pytest.fixture(scope="session")
def long_shards(long_corpus, tokenizer, tmp_path_factory) -> Path:
    out_dir = tmp_path_factory.mktemp("long_shards") / "shards"
    run_here(long_corpus, out_dir, tokenizer, shard_size=LONG_SHARD)
    return out_dir


@pytest.fixture
def start(long_corpus, tokenizer, tmp_path, inline):
    """A function that starts the sharding of the long corpus with two workers, and one that does the rest here."""
    words = options(long_corpus, tmp_path / "shards", tokenizer, shard_size=LONG_SHARD)

    def finish() -> str:
        result = inline(fineweb.main, **words | dict(workers=1))
        assert result.returncode == 0, result.stderr
        return result.stdout

    return lambda: start_script("fineweb.py", **words), finish


def test_two_kills_at_random_moments_change_nothing(start, long_shards, tmp_path):
    out_dir = tmp_path / "shards"
    rng = random.Random(0)
    begin, finish = start
    for middle in (True, False):
        process = begin()
        if middle:  # of the work, however fast the machine is; else while it starts
            wait_until(partial(has_more_shards, out_dir, count_shards(out_dir) + 3, process))
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.communicate()
    killed = count_shards(out_dir)
    finish()
    assert 4 <= killed < count_shards(out_dir), "the kills came before or after the work"
    assert files_of(out_dir) == files_of(long_shards)


@pytest.mark.parametrize("signum, code", [slow(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_in_good_order(start, long_shards, tmp_path, signum, code):
    out_dir = tmp_path / "shards"
    begin, finish = start
    process = begin()
    assert wait_until(partial(has_more_shards, out_dir, 1, process))
    process.send_signal(signum)
    assert process.wait(timeout=200) == code
    message = process.stderr.read()
    assert message.count("\n") == 1
    assert "Traceback" not in message
    finish()
    assert files_of(out_dir) == files_of(long_shards)
    before = stamps(out_dir)
    assert str(out_dir) in finish()  # it is complete, and left alone
    assert stamps(out_dir) == before


@pytest.mark.slow
def test_two_runs_at_once_do_not_write_into_one_directory(corpus, tokenizer, tmp_path):
    """The second one waits, and finds the shards complete, or gives up."""
    words = command("fineweb.py", **options(corpus[0], tmp_path / "shards", tokenizer, workers=1))
    runs = [subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL) for _ in range(2)]
    assert sorted(run.wait(timeout=200) for run in runs) in ([0, 0], [0, 2])
    assert_shards(tmp_path / "shards", corpus[1], tokenizer)


# ----------------------------------------------------------------------------------------------------- what has changed


@pytest.fixture
def interrupted(corpus, tokenizer, tmp_path, monkeypatch):
    """(a copy of the corpus, five of its shards, how to resume): some files are used, one is in use."""
    copy = tmp_path / "copy"
    out_dir = tmp_path / "shards"
    shutil.copytree(corpus[0], copy)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk(6))
        with pytest.raises(OSError, match="No space left"):  # which cli.script says in a line
            run_here(copy, out_dir, tokenizer)
    assert count_shards(out_dir) == 5
    assert read_manifest(out_dir)["next"]["file"] > 0
    return copy, out_dir, partial(run_here, copy, out_dir, tokenizer)


@needs_proc
@pytest.mark.parametrize("change", ["a used file less", "rows of another size"])
def test_a_source_that_changed_where_shards_are_made_costs_no_shard(interrupted, corpus, tokenizer, change):
    copy, out_dir, resume = interrupted
    under_way = copy / f"part_{read_manifest(out_dir)['next']['file']:02d}.parquet"
    if change == "a used file less":
        (copy / "part_00.parquet").unlink()
    else:
        write_parquet(under_way, docs_of(under_way), rows=7)
    resume()
    assert_shards(out_dir, corpus[1], tokenizer)


@needs_proc
def test_files_that_are_new_or_changed_before_they_were_read_follow_those_in_shards(interrupted, corpus, tokenizer):
    copy, out_dir, resume = interrupted
    number = read_manifest(out_dir)["next"]["file"] + 1
    docs = make_documents(40, seed=7)
    for name in ("a", f"part_{number:02d}", "part_12"):
        write_parquet(copy / f"{name}.parquet", docs, rows=15)
    resume()
    read = corpus[1][: 40 * number]
    unchanged = corpus[1][40 * number + 40 :]
    assert_shards(out_dir, [*read, *docs, *docs, *unchanged, *docs], tokenizer)


@needs_proc
def test_a_damaged_file_may_be_removed_and_costs_no_shard(interrupted, tokenizer):
    """The document that the last shard ends in is left as it is."""
    copy, out_dir, resume = interrupted
    before = {path: path.read_bytes() for path in shard_paths(out_dir)}
    number = read_manifest(out_dir)["next"]["file"]
    (copy / f"part_{number:02d}.parquet").unlink()
    manifest = resume()
    assert {path: path.read_bytes() for path in before} == before
    rest = [doc for file in sorted(copy.glob("part_*"))[number:] for doc in docs_of(file)]
    tokens = np.concatenate([np.load(out_dir / entry["file"]) for entry in manifest["shards"]]).tolist()
    expected = plain_tokens(rest, Tokenizer.load(tokenizer))
    assert tokens[-len(expected) :] == expected


def docs_of(path: Path) -> list[str]:
    return pq.read_table(path)["text"].to_pylist()
