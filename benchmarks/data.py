"""Text to shards, and shards to batches.

Sharding compares, with GPT-2's tokens and two processes or threads: the loop that everybody writes (`Pool(2).imap` over
load_dataset, into an array, without files and checksums); calling tiktoken and discarding the tokens; and fineweb.py
from start to end, with files, checksums and manifest. The text is that of --data, eight times over under different
names.
Reading takes 64 x 1,024 tokens at a time from 100 shards of 2M tokens, in the order of one permutation and in that of
the files.
"""

import contextlib
import io
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

import fineweb
from benchmarks.measure import ROOT, Common, peak_memory, rates, timed
from bpe.formats import get_encoding
from parts.cli import UserError
from parts.data import Batches, TokenStream, find_shards, training_batches
from parts.runtime import Runtime

B, T = 64, 1024  # sequences of a batch, and their tokens


@dataclass(frozen=True)
class Config(Common):
    data: str = ""  # folder of .parquet files; if empty, they are made from input.txt


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        yield from shard_figures(config, rt, Path(folder))
        yield from loader_figures(config, rt, Path(folder))


# ---------------------------------------------------------------------------------------------------------- sharding


def shard_figures(config: Config, rt: Runtime, folder: Path) -> Iterator[dict]:
    import datasets

    files = parquet_files(config.data, folder)
    cache = str(folder / "cache")
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
    texts = list(rows["text"])
    n = sum(map(len, gpt2().encode_ordinary_batch(texts))) + len(texts)
    contestants = {
        "the plain loop: Pool(2).imap over load_dataset": partial(plain_loop, rows, n),
        "2 processes that only call encode_ordinary_batch": partial(encode_in_two, texts),
        "fineweb.py, from start to end": partial(make_shards, files, folder / "shards"),
    }
    yield from rates(contestants, config.repeats, rt, n, "tokens/s")
    command = [sys.executable, fineweb.__file__, "--source", *files, "--out_dir", str(folder / "memory")]
    command += ["--workers", "2", "--shard_size", "100_000_000"]
    peak = peak_memory(command)
    yield dict(name="peak memory of all processes of fineweb.py, shards of 100M tokens", rate=peak / 2**20, unit="MiB")


def parquet_files(source: str, folder: Path) -> list[str]:
    """Every file eight times, under different names. Raises UserError if there are none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not source:
        text = (ROOT / "input.txt").read_text()
        pieces = [text[i : i + 2000] for i in range(0, len(text), 2000)]
        pq.write_table(pa.table({"text": pieces}), folder / "input.parquet", row_group_size=1000)
    files = sorted(Path(source or folder).rglob("*.parquet"))
    if not files:
        raise UserError(f"--data {source}: there is no .parquet file below it; give another folder")
    copies = []
    for i in range(8):
        for file in files:
            copy = folder / f"copy_{i}_{file.name}"
            shutil.copy(file, copy)  # a link would be the same file, which is read once
            copies.append(str(copy))
    return copies


def plain_loop(rows, n: int) -> None:
    buffer = np.empty(n, np.uint16)
    used = 0
    with multiprocessing.Pool(2) as pool:
        for tokens in pool.imap(plain_tokens, rows, chunksize=16):
            buffer[used : used + len(tokens)] = tokens
            used += len(tokens)
    assert used == n


def plain_tokens(row: dict) -> np.ndarray:
    ids = gpt2().encode_ordinary(row["text"])
    tokens = np.array([gpt2().eot_token, *ids])
    assert (0 <= tokens).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def encode_in_two(texts: list[str]) -> None:
    halves = texts[::2], texts[1::2]
    processes = [multiprocessing.Process(target=encode, args=(half,)) for half in halves]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def encode(texts: list[str]) -> None:
    for i in range(0, len(texts), 1000):
        gpt2().encode_ordinary_batch(texts[i : i + 1000], num_threads=1)


def make_shards(files: list[str], out_dir: Path) -> None:
    shutil.rmtree(out_dir, ignore_errors=True)
    constants = dict(source=tuple(files), out_dir=str(out_dir), workers=2, shard_size=10**8)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        fineweb.make_shards(fineweb.Config(**constants), out_dir)


@cache
def gpt2():
    try:
        return get_encoding("gpt2")
    except ValueError as e:
        raise UserError(str(e)) from None


# ---------------------------------------------------------------------------------------------------------- the loader


def loader_figures(config: Config, rt: Runtime, folder: Path) -> Iterator[dict]:
    rng = np.random.default_rng(0)
    for path in shard_paths(folder):
        np.save(path, rng.integers(0, 50257, 2_000_000, dtype=np.uint16))
    paths = find_shards(str(folder), "train")
    stream = TokenStream(paths, 50304)
    steps = 400
    contestants = {
        "reading, file order": partial(read, stream, steps, shuffle=False),
        "reading, shuffled": partial(read, stream, steps, shuffle=True),
    }
    yield from rates(contestants, config.repeats, rt, steps * B * T, "tokens/s")
    paths = empty_shards(folder / "empty")
    start_up = timed(lambda: read(TokenStream(paths, 50304), 1, shuffle=True), rt)
    yield dict(name="start-up, from 100 shards of 100M tokens to the first batch", rate=start_up, unit="s")


def read(stream: TokenStream, steps: int, shuffle: bool) -> None:
    for _ in training_batches(Batches(stream, T, 0, shuffle), B, 0, steps, B):
        pass


def empty_shards(folder: Path) -> list[Path]:
    """100 shards of 100M tokens, all zero, for which a file system that knows holes needs no room."""
    folder.mkdir()
    paths = shard_paths(folder)
    for path in paths:
        np.lib.format.open_memmap(path, "w+", np.uint16, (10**8,))
    return paths


def shard_paths(folder: Path) -> list[Path]:
    return [folder / f"x_train_{i:06d}.npy" for i in range(100)]
