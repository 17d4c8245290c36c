"""Sharding what a hub has, which is busy or out of reach."""

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from parts.data import read_manifest
from tests.corpora import assert_shards, options
from tests.helpers import start_script, succeed
from tests.hub import Hub, hub_environment


@pytest.fixture(scope="session")
def hub_folder(corpus, tmp_path_factory) -> Path:
    """The corpus as a dataset of the hub."""
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(corpus[0], folder / "corpus/sample/10BT")
    return folder


def test_a_busy_hub_gives_the_same_shards_from_few_connections(corpus, hub_folder, tokenizer, tmp_path):
    """Retry-After is honoured, and the commit is written down."""
    out_dir = tmp_path / "shards"
    words = options("some/corpus", out_dir, tokenizer)
    with Hub(hub_folder, busy={"README.md": 2, "part_05.parquet": 2}, delay=0.1) as hub:
        env = hub_environment(hub.url, tmp_path / "home")
        succeed("fineweb.py", **words, env=env)
    assert_shards(out_dir, corpus[1], tokenizer)
    assert read_manifest(out_dir)["commit"] == hub.COMMIT
    assert [status for *_, status in hub.requests].count(429) == 4
    assert hub.hasty <= 2  # for each file huggingface_hub asks once before it begins to wait
    whole = Counter(path for _, path, span, _ in hub.requests if path.startswith("/blob/") and not span)
    assert len(whole) == 12
    assert set(whole.values()) == {1}
    assert hub.most <= 3


@pytest.mark.slow
def test_a_killed_run_keeps_the_files_that_it_needs_and_fetches_no_used_one_again(
    corpus, hub_folder, tokenizer, tmp_path
):
    out_dir = tmp_path / "shards"
    words = options("some/corpus", out_dir, tokenizer, workers=1)
    with Hub(hub_folder, delay=0.02) as hub:
        env = hub_environment(hub.url, tmp_path / "home")
        process = start_script("fineweb.py", env=env, **words)
        while len(list(out_dir.glob("*.npy"))) < 3 and process.poll() is None:
            pass
        process.kill()
        process.communicate()
        before = len(hub.requests)
        in_use = read_manifest(out_dir)["next"]["file"]
        succeed("fineweb.py", **words, env=env)
    again = {Path(path).name for _, path, span, _ in hub.requests[before:] if path.startswith("/blob/") and not span}
    assert not again & {f"part_{n:02d}.parquet" for n in range(in_use)}
    assert_shards(out_dir, corpus[1], tokenizer)
    assert not os.path.exists(out_dir / ".downloads")
