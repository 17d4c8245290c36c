"""Text to shards, and shards to batches.

Sharding compares, with GPT-2's tokens and two processes each: the loop that everybody writes (`Pool(2).imap` over
load_dataset, into an array, without files and checksums); calling tiktoken and discarding the tokens; reading alone;
and fineweb.py from start to end with files, checksums and manifest, by tiktoken and by gigatoken (pip install
gigatoken). The text is that of --data, eight times over under different names.
Reading takes 64 x 1,024 tokens at a time from 100 shards of 2M tokens: whole shards converted in file order, as short
scripts do, against windows in the order of one permutation. Copying to int64 alone shows what is left to gain.
"""

import contextlib
import io
import itertools
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

import fineweb
from benchmarks.measure import ROOT, Common, peak_memory, rates, timed
from bpe.formats import get_encoding
from cli import UserError
from corpus.order import Batches, training_batches
from corpus.sources import documents_of, units_of
from corpus.stream import TokenStream, find_shards
from machine.runtime import Runtime, prefetch

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
        "2 processes that only call encode_ordinary_batch": partial(in_two, encode_texts, texts),
        "2 processes that only read the documents": partial(in_two, read_documents, files),
        "fineweb.py, from start to end": partial(make_shards, files, folder / "shards", "tiktoken"),
        "fineweb.py --encoder gigatoken": partial(make_shards, files, folder / "shards", "gigatoken"),
    }
    yield from rates(contestants, config.repeats, rt, n, "tokens/s")
    command = [sys.executable, fineweb.__file__, "--source", *files, "--out_dir", str(folder / "memory")]
    command += ["--workers", "2", "--encoder", "tiktoken", "--shard_size", "100_000_000"]
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
            copy.symlink_to(file.resolve())
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


def in_two(work: Callable[[list], None], items: list) -> None:
    halves = items[::2], items[1::2]
    processes = [multiprocessing.Process(target=work, args=(half,)) for half in halves]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def encode_texts(texts: list[str]) -> None:
    for i in range(0, len(texts), 1000):
        gpt2().encode_ordinary_batch(texts[i : i + 1000], num_threads=1)


def read_documents(files: list[str]) -> None:
    for file in files:
        for unit in units_of(Path(file), "text"):
            for _ in documents_of(unit, "text"):
                pass


def make_shards(files: list[str], out_dir: Path, encoder: str) -> None:
    shutil.rmtree(out_dir, ignore_errors=True)
    constants = dict(source=tuple(files), out_dir=str(out_dir), workers=2, encoder=encoder, shard_size=10**8)
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
    source = np.load(paths[0])[: B * (T + 1)]
    steps = 400
    contestants = {
        "the plain loader: whole shards, file order": partial(read_plainly, paths, steps),
        "this project, shuffled": lambda: read(stream, steps, shuffle=True),
        "this project, file order": lambda: read(stream, steps, shuffle=False),
        "this project, shuffled, in the thread": lambda: read(stream, steps, shuffle=True, in_thread=True),
        "copying to int64 and nothing else": lambda: [source.astype(np.int64) for _ in range(steps)],
    }
    yield from rates(contestants, config.repeats, rt, steps * B * T, "tokens/s")
    paths = empty_shards(folder / "empty")
    start_up = timed(lambda: read(TokenStream(paths, 50304), 1, shuffle=True), rt)
    yield dict(name="start-up, from 100 shards of 100M tokens to the first batch", rate=start_up, unit="s")


def read_plainly(paths: list[Path], steps: int) -> None:
    """A shard is read as a whole and converted; batches are slices of it."""
    shards = itertools.cycle(paths)
    tokens = torch.empty(0)
    position = 0
    for _ in range(steps):
        if position + B * T + 1 > len(tokens):
            shard = np.load(next(shards)).astype(np.int32)
            tokens = torch.tensor(shard, dtype=torch.long)
            position = 0
        piece = tokens[position : position + B * T + 1]
        piece[:-1].view(B, T)  # idx
        piece[1:].view(B, T)  # targets
        position += B * T


def read(stream: TokenStream, steps: int, shuffle: bool, in_thread: bool = False) -> None:
    batches = training_batches(Batches(stream, T, 0, shuffle), B, 0, steps, B)
    if in_thread:
        batches = prefetch(batches, torch.device("cpu"))
    for _ in batches:
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
