"""Sharding what a hub has, which is busy, out of reach, or has changed."""

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import fineweb
from parts import documents, sources
from parts.data import read_manifest
from tests.corpora import (
    assert_shards,
    full_disk,
    options,
    run_here,
    wait_until,
)
from tests.helpers import assert_user_error, command, needs_proc, run_script, succeed, write_lines
from tests.hub import Hub, hub_environment


@pytest.fixture(scope="session")
def dataset(corpus, tmp_path_factory) -> Path:
    """The corpus as a dataset of the hub."""
    folder = tmp_path_factory.mktemp("dataset")
    shutil.copytree(corpus[0], folder / "sample" / "10BT")
    return folder


def test_a_busy_hub_that_drops_connections_gives_the_same_shards(corpus, dataset, tokenizer, tmp_path):
    out_dir = tmp_path / "shards"
    words = options("some/corpus/sample/10BT", out_dir, tokenizer)
    with Hub(dataset, busy=2, moods={"part_03.parquet": "cut", "part_08.parquet": "cut"}) as hub:
        env = hub_environment(hub.url, tmp_path / "home")
        result = succeed("fineweb.py", **words, env=env)
        words |= dict(source="no/body", out_dir=tmp_path / "other")
        assert_user_error(run_script("fineweb.py", **words, env=env), "no/body", "404")
    assert_shards(out_dir, corpus[1], tokenizer)
    assert read_manifest(out_dir)["commit"] == hub.COMMIT
    assert [status for _, _, status in hub.requests].count(429) == 2
    assert hub.hasty == 0
    downloads = Counter(path.rpartition("/")[2] for path, _, _ in hub.requests if path.startswith("/blob/"))
    assert len(downloads) == 12
    assert [name for name in downloads if downloads[name] > 1] == sorted(hub.moods)
    assert hub.most <= 2, "more connections at a time than asked for"
    assert "429" in result.stderr


@pytest.mark.parametrize("mood", ["stall", "cut"])
def test_a_killed_or_broken_download_continues_where_it_was(tokenizer, tmp_path, mood):
    """huggingface_hub writes 10 MB at a time: so many are not fetched again."""
    docs = [f"{i} " * 40_000 for i in range(250)]
    (tmp_path / "dataset").mkdir()
    write_lines(tmp_path / "dataset" / "docs.jsonl", [dict(text=doc) for doc in docs])
    out_dir = tmp_path / "shards"
    words = options("some/corpus", out_dir, tokenizer, limit_tokens=50_000, workers=1)
    with Hub(tmp_path / "dataset", moods={"docs.jsonl": mood}) as hub:
        env = hub_environment(hub.url, tmp_path / "home")
        if mood == "stall":
            process = subprocess.Popen(command("fineweb.py", **words), env=env, stdout=subprocess.DEVNULL)
            wait_until(lambda: sum(path.stat().st_size for path in out_dir.glob(".downloads/*")) >= 20 * 2**20)
            process.kill()
            process.wait()
        succeed("fineweb.py", **words, env=env)
    first, second = [span for path, span, _ in hub.requests if path.startswith("/blob/")]
    assert first is None
    assert int(second.removeprefix("bytes=").rstrip("-")) >= 10 * 2**20
    assert_shards(out_dir, docs[:20], tokenizer, limit=50_000)
    assert read_manifest(out_dir)["tokens"] == 50_000


@needs_proc
def test_fetched_files_are_deleted_once_they_are_used(corpus, tokenizer, tmp_path, monkeypatch):
    """An interrupted run keeps the one in use, and fetches none again."""
    fetched = []
    out_dir = tmp_path / "shards"
    names = sorted(path.name for path in corpus[0].iterdir())
    source = sources.Source([sources.SourceFile(name, 10**5, "") for name in names], "some/corpus", "its commit")

    def download(source, file, folder: Path) -> Path:
        if not (folder / file.name).exists():
            fetched.append(file.name)
            folder.mkdir(exist_ok=True)
            shutil.copy(corpus[0] / file.name, folder)
        return folder / file.name

    monkeypatch.setattr(documents, "UNIT_BYTES", 9000)  # several of a file
    monkeypatch.setattr(sources, "download", download)
    monkeypatch.setattr(fineweb, "find_source", lambda *_: source)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk(5))
        with pytest.raises(OSError):
            run_here("some/corpus", out_dir, tokenizer, downloads=1)
    in_use = names[read_manifest(out_dir)["next"]["file"]]
    assert in_use in fetched[1:]
    assert min(os.listdir(out_dir / ".downloads")) == in_use
    run_here("some/corpus", out_dir, tokenizer, downloads=1)
    assert fetched == names
    assert_shards(out_dir, corpus[1], tokenizer)
