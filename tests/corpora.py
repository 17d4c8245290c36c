"""Documents, the folders that they lie in, and the shards that they make; no test in itself."""

import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bpe.tokenizer import Tokenizer
from fineweb import Config, make_shards
from parts.data import find_shards, read_manifest
from tests.helpers import prose

SHARD = 20_000  # tokens


def make_documents(n: int = 60, seed: int = 0) -> list[str]:
    """Pieces of prose of very different lengths, an empty one, other alphabets, all ends of lines, a special token."""
    text = prose()
    rng = random.Random(seed)
    docs = []
    for _ in range(n):
        start = rng.randrange(len(text) - 9000)
        docs.append(text[start : start + int(8000 * rng.random() ** 3)])
    docs[1:4] = ["", "数据是一切的开始。\u3000 naïve 🙂", "ends <|endoftext|> early"]
    docs[4] = "a line\u2028the same\x85line\r of JSON\x0c"
    return docs


def write_parquet(path: Path, docs: list, rows: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"text": pa.array(docs, pa.string()), "id": list(range(len(docs)))})
    pq.write_table(table, path, row_group_size=rows)
    return path


def plain_tokens(docs: list[str], tok: Tokenizer) -> list[int]:
    """The oracle: all tokens in a list, with the Python encoder."""
    return [i for doc in docs for i in (tok.eot_token, *tok.encode_ordinary(doc))]


def plain_shards(docs: list[str], tok: Tokenizer, limit: int | None) -> list[np.ndarray]:
    tokens = plain_tokens(docs, tok)[:limit]
    return [np.array(tokens[i : i + SHARD], np.uint16) for i in range(0, len(tokens), SHARD)]


def shard_paths(out_dir: Path) -> list[Path]:
    return find_shards(str(out_dir), "val") + find_shards(str(out_dir), "train")


def assert_shards(out_dir: Path, docs: list[str], tokenizer: Path, limit: int | None = None) -> list[np.ndarray]:
    """The files hold the plain loop's tokens, and nothing else is left behind."""
    expected = plain_shards(docs, Tokenizer.load(tokenizer), limit)
    paths = shard_paths(out_dir)
    assert len(paths) == len(expected)
    for i, (path, tokens) in enumerate(zip(paths, expected, strict=True)):
        assert path.name.endswith(f"_{'train' if i else 'val'}_{i:06d}.npy")
        found = np.load(path)
        assert found.dtype == tokens.dtype
        assert np.array_equal(found, tokens), path
    assert not list(out_dir.glob(".*.tmp"))
    assert not (out_dir / ".downloads").exists()
    return expected


def options(source, out_dir, tokenizer, **kwargs) -> dict:
    words = dict(source=source, out_dir=out_dir, tokenizer=tokenizer, shard_size=SHARD, workers=2)
    return words | kwargs


def run_here(source, out_dir, tokenizer, **kwargs) -> dict:
    """make_shards in this process; returns the manifest."""
    kwargs = dict(workers=1, shard_size=SHARD) | kwargs
    source = source if isinstance(source, tuple) else (str(source),)
    make_shards(Config(source=source, tokenizer=str(tokenizer), out_dir=str(out_dir), **kwargs), Path(out_dir))
    return read_manifest(out_dir)


def full_disk(at: int, fsync=os.fsync):
    """An os.fsync for which the disk is full when shard number `at` (from 1) is flushed."""
    flushed = []

    def flush(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        flushed.extend([path] if path.endswith(".npy.tmp") else [])
        if path.endswith(".npy.tmp") and len(flushed) == at:
            raise OSError(28, "No space left on device")
        fsync(fd)

    return flush


def count_shards(out_dir: Path) -> int:
    return len(list(out_dir.glob("*.npy")))


def has_more_shards(out_dir: Path, n: int, process: subprocess.Popen) -> bool:
    return count_shards(out_dir) > n or process.poll() is not None


def wait_until(condition, timeout: float = 200.0) -> bool:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
