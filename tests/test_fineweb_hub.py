"""Sharding what a hub has, which is busy, out of reach, or has changed."""

import shutil
import subprocess
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bpe.tokenizer import Tokenizer
from corpus.order import find_shards, read_manifest
from tests.corpora import assert_shards, has_more_shards, options, plain_shards, wait_until, write_parquet
from tests.helpers import assert_user_error, command, run_script, succeed
from tests.hub import Hub, hub_environment


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
