"""Shards of random tokens, as the tests of the loader and of its files read them."""

from pathlib import Path

import numpy as np

from parts.data import TokenStream, find_shards, save_manifest
from parts.files import sha256

VOCAB = 1000
T = 16
SIZES = (1003, 517, 16, 5, 0, 1459)  # tokens of the shards: no multiple of T, and some shorter than a window
UNFINISHED = dict(next=dict(file=0, row=0, skip=0), files=[], shard_size=50)  # of a manifest


def write_shards(folder: Path, sizes=SIZES, split: str = "train", dtype=np.uint16, vocab_size=VOCAB) -> np.ndarray:
    """Shards of random tokens; returns all of them in one array."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, sum(sizes)).astype(dtype)
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        np.save(folder / f"x_{split}_{i:06d}.npy", part)
    return tokens


def with_manifest(folder: Path, **changes) -> Path:
    """The folder, with a manifest of its .npy shards beside them."""
    paths = sorted(folder.glob("*.npy"))
    entries = [dict(file=path.name, tokens=len(np.load(path)), sha256=sha256(path)) for path in paths]
    counts = dict(tokens=sum(entry["tokens"] for entry in entries), documents=1, bytes=1, skipped={})
    save_manifest(folder, dict(source="random", tokenizer="none", **counts, shards=entries) | changes)
    return folder


def open_stream(folder: Path, vocab_size: int = VOCAB) -> TokenStream:
    return TokenStream(find_shards(str(folder), "train"), vocab_size)
