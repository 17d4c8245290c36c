"""Tokens for training: shards and their manifest, the stream that they form, and the order in which it is read.

    shards -> stream -> windows of T + 1 tokens -> a seeded permutation of them, one an epoch -> batches -> a rank's

The order is a pure function of (seed, epoch, step):

- window i is the slice [i*T : (i+1)*T + 1]: T inputs and, shifted by one, T targets. Windows may straddle two shards,
  so nothing is dropped between them. From the second epoch on, all windows begin up to T - 1 tokens later
- step s takes the windows from number s * batch_size on, counted through all epochs. Every rank takes its slice of the
  same global batch, so the order depends on neither the number of ranks, the micro-batch nor interruptions

Batches are NumPy arrays of windows, (rows, T + 1) int64; `to_inputs` cuts them into inputs and targets on any device.
This file knows nothing of text or models, and of a tokenizer only which ids it has.
"""

import glob
import hashlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock

import numpy as np

from parts.cli import UserError, counted
from parts.files import errors_name, read_json, replace_file

IGNORED = -100  # a target that is not scored, as in PyTorch; pads the last windows of validation

# --------------------------------------------------------------------------------------------------------------- shards

BIN_MAGIC = 20240520  # of llm.c
BIN_HEADER = 256  # int32: the magic number, version 1, the number of tokens, and zeros; uint16 tokens follow
Layout = tuple[np.dtype, int, tuple[int, ...]]  # dtype, offset in bytes, shape
SCANNED = 2**28  # splits up to this many tokens are wholly compared with the vocabulary at the start: a second


def find_shards(data: str, split: str) -> list[Path]:
    """Return the shards of a split, "train" or "val", in a directory or a glob, in file order; at least one."""
    if shards := shards_by_split(data)[split]:
        return shards
    raise UserError(
        f"--data {data} has no *_{split}_*.npy, .bin or .ds shard; write shards with fineweb.py, or try "
        "the included text: python train_gpt2.py tiny"
    )


def shards_by_split(data: str) -> dict[str, list[Path]]:
    """Return the token files in a directory or a glob, by split: "train" and "val".

    The last train or val between underscores in a name decides. datatrove's .ds files have no such names: the first one
    is then "val", and the others are "train".
    """
    pattern = f"{glob.escape(data)}/*" if os.path.isdir(data) else data
    shards = dict(train=[], val=[])
    unnamed = []
    for path in sorted(map(Path, glob.glob(pattern))):
        named = re.findall(r"_(train|val)(?=_)", f"_{path.stem}_")
        if path.suffix in LAYOUTS and named:
            shards[named[-1]].append(path)
        elif path.suffix == ".ds":
            unnamed.append(path)
    if len(unnamed) > 1 and not any(shards.values()):
        return dict(train=unnamed[1:], val=unnamed[:1])
    return shards


class Shard:
    """The tokens of one file, which stay on the disk until they are read.

    They are read and not mapped: where a mapped file is cut short, or its disk fails, the system kills the process
    without a word. What was read stays in the system's page cache, and does not count as memory of this process.
    """

    def __init__(self, path: Path):
        """Open the file. Raise UserError for any damage."""
        self.path = path
        try:
            self.dtype, self.offset, shape = LAYOUTS[path.suffix](path)
            if len(shape) != 1 or self.dtype not in ("<u2", "<u4"):
                raise ValueError(f"it holds {self.dtype} of shape {shape}, not a row of uint16 or uint32")
            [self.n_tokens] = shape
            size = self.dtype.itemsize
            if path.stat().st_size != self.offset + self.n_tokens * size:
                raise ValueError(f"its header says {self.n_tokens} tokens of {size} bytes, but the file size differs")
            self.file = open(path, "rb", buffering=0)
            self.lock = Lock()
        except Exception as e:  # a damaged header makes NumPy raise nearly anything, SyntaxError and TypeError included
            raise UserError(f"shard {path} cannot be read: {e}") from e

    def __len__(self) -> int:
        return self.n_tokens

    def read(self, start: int, n: int) -> np.ndarray:
        """Return the slice [start : start + n], fewer at the shard's end. Raise UserError if the file has shrunk."""
        size = self.dtype.itemsize
        n_bytes = max(min(n, self.n_tokens - start), 0) * size
        with errors_name(self.path), self.lock:  # a loop may read beside the thread of `prefetch`
            self.file.seek(self.offset + start * size)
            content = self.file.read(n_bytes)
        if len(content) < n_bytes:
            raise UserError(f"shard {self.path} was cut short while in use; write it again, then pass --resume")
        return np.frombuffer(content, self.dtype)


def npy_layout(path: Path) -> Layout:
    tokens = np.lib.format.open_memmap(path, mode="r")  # refuses pickled objects
    return tokens.dtype, tokens.offset, tokens.shape


def bin_layout(path: Path) -> Layout:
    header = np.fromfile(path, "<i4", BIN_HEADER)  # fewer if the file is shorter
    if header[:2].tolist() == [BIN_MAGIC, 1]:
        return np.dtype("<u2"), header.nbytes, (int(header[2]),)
    if path.stem not in ("train", "val"):
        raise ValueError(f"its header does not start with {BIN_MAGIC} and version 1")
    if path.with_name("meta.pkl").exists():
        raise ValueError("nanoGPT's meta.pkl says that its tokens are characters; pass the .txt itself as --data")
    return np.dtype("<u2"), 0, (path.stat().st_size // 2,)  # nanoGPT's: tokens alone


def ds_layout(path: Path) -> Layout:
    """Read a .ds file's layout: it holds only tokens; X.ds.metadata has their number and size, 2 or 4 bytes.

    X.ds.index, the ends of documents, is not needed: datatrove writes its `eos_token` there. It ends a document and
    our <|endoftext|> begins one, which is the same in one long stream: there is one between any two documents, even
    across files. Only the very first document has none before it.
    """
    _, size, n_tokens = ds_metadata(path)
    return np.dtype(f"<u{size}"), 0, (n_tokens,)


def ds_metadata(path: Path) -> tuple[str, int, int]:
    """Return (name of its tokenizer, bytes of a token, number of tokens) of a .ds file. Raises UserError."""
    metadata = path.with_name(f"{path.name}.metadata")
    try:
        first, n_tokens = metadata.read_text(encoding="utf-8").splitlines()[:2]
        tokenizer, size = first.rsplit("|", 1)
        return tokenizer, int(size), int(n_tokens)
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {metadata}: {e}; let datatrove write it (save_final_metadata=True)") from e


LAYOUTS = {".npy": npy_layout, ".bin": bin_layout, ".ds": ds_layout}


# -------------------------------------------------------------------------------------------------------- the stream


class TokenStream:
    """The shards of one split, all in one directory, as one long sequence of tokens.

    Raises UserError for a shard that is damaged, or listed in manifest.json and missing, and for a token outside the
    vocabulary, the ids below `vocab_size` except `unused_ids`: on a GPU it would surface only as a
    device-side assert, or, if the model is padded to more ids, silently train. A split of up to SCANNED tokens is
    compared wholly, a larger split by the first 65,536 tokens of each shard.
    """

    def __init__(self, paths: list[Path], vocab_size: int, unused_ids: Sequence[int] = ()):
        self.paths = paths
        self.shards = [Shard(path) for path in paths]
        self.starts = [0, *accumulate(map(len, self.shards))]  # of each shard, and the end
        if len(self) < 2:
            raise UserError(f"{paths[0]} has {len(self)} tokens; a split needs at least two, an input and its target")
        for entry in read_manifest(paths[0].parent).get("shards", []):
            path = paths[0].with_name(entry["file"])
            if not path.exists():
                raise UserError(f"shard {path} is in manifest.json but missing; restore it, or write all again")
        for shard in self.shards:
            n = len(shard) if len(self) <= SCANNED else 2**16  # another tokenizer shows in any stretch of text
            for start in range(0, n, 2**16):
                tokens = shard.read(start, 2**16)
                foreign = (tokens >= vocab_size) | np.isin(tokens, unused_ids)
                if foreign.any():
                    raise UserError(
                        f"shard {shard.path} has token {tokens[foreign.argmax()]}, but its tokenizer has {vocab_size} "
                        "tokens; pass the shard's --tokenizer, or remove the shard"
                    )

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, n: int) -> np.ndarray:
        """Return the slice [start : start + n] as a new array (n,) int64."""
        return self.read_windows([start], n)[0]

    def read_windows(self, starts: list[int], n: int) -> np.ndarray:
        """Return the slice [start : start + n] for every start, as a new array (len(starts), n) int64."""
        out = np.empty((len(starts), n), np.int64)
        for row, start in zip(out, starts, strict=True):
            shard = bisect_right(self.starts, start) - 1  # the last one that begins at `start` or before
            begin = start - self.starts[shard]
            done = 0
            while done < n:  # over more than two shards if one is shorter than a window
                part = self.shards[shard].read(begin, n - done)
                row[done : done + len(part)] = part  # widened
                done += len(part)
                shard += 1
                begin = 0
        return out

    def digest(self) -> str:
        """Return 16 hexadecimal digits that identify these tokens in this order, wherever the shards are.

        A run that resumes compares them, since other data would break its order. They hash each shard's length, first
        and last tokens, since reading 20 GB takes too long.
        """
        total = hashlib.sha256()
        for shard in self.shards:
            ends = [shard.read(0, 4096), shard.read(max(len(shard) - 4096, 0), 4096)]
            ends = np.concatenate(ends).astype("<u4")  # the same for every dtype
            content = hashlib.sha256(ends.tobytes()).hexdigest()
            total.update(f"{len(shard)} {content}\n".encode())
        return total.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- windows, in their order


@lru_cache(maxsize=2)  # a batch may span the end of one epoch and the beginning of the next
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of 0 .. n-1 as (n,) uint32: 39 MB for the windows of 1024 of 10B tokens.

    It is `argsort` of random numbers, of which NumPy guarantees those of PCG64 forever. Their high bits are sorted with
    the numbers 0 .. n-1 in the low ones: 0.80 s for 10B tokens, where a stable argsort takes 1.53 s.
    """
    bits = (n - 1).bit_length()  # enough for a number below n
    keys = np.random.PCG64([seed, epoch]).random_raw(n)  # (n,) uint64
    low = np.uint64(2**bits - 1)
    keys &= ~low
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    return (keys & low).astype(np.uint32)


class Batches:
    """The windows of a stream in their training order, and one rank's part of every global batch."""

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int, shuffle: bool, rank=0, world_size=1):
        self.stream = stream
        self.T = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.n_windows = (len(stream) - 1) // sequence_length  # an epoch; up to T tokens at the end are left over
        if self.n_windows < 1:
            raise UserError(
                f"{stream.paths[0]} has {len(stream)} tokens, fewer than "
                f"sequence_length + 1 = {self.T + 1}; add text, or choose a smaller --sequence_length"
            )

    def shift(self, epoch: int) -> int:
        """Return how many tokens later windows begin in this epoch, 0 .. T-1: 0 in the first one.

        A window's first target is predicted from one token, its last one from T: without the shift, a target would have
        the same context length in every epoch. The recipe `tiny` gains 0.03 bits per byte from it.
        """
        if epoch == 0 or not self.shuffle:
            return 0
        return int(np.random.PCG64([self.seed, epoch, 1]).random_raw()) % self.T

    def global_batch(self, position: int, batch_size: int) -> list[int]:
        """Return where the `batch_size` windows from number `position` on begin in the stream."""
        last = len(self.stream) - 1 - self.T  # where the last window that fits begins
        starts = []
        while len(starts) < batch_size:  # the end of an epoch and the beginning of the next may share a batch
            epoch, at = divmod(position + len(starts), self.n_windows)
            order = permutation(self.n_windows, self.seed, epoch) if self.shuffle else range(self.n_windows)
            windows = order[at : at + batch_size - len(starts)]
            shift = self.shift(epoch)
            starts += [min(int(window) * self.T + shift, last) for window in windows]
        return starts

    def micro_batches(self, position: int, batch_size: int, micro_batch_size: int) -> Iterator[np.ndarray]:
        """Yield this rank's part of that global batch, in arrays of one shape, (micro_batch_size, T + 1) int64.

        `batch_size` is a multiple of `micro_batch_size` times the number of ranks: all ranks take part in every
        exchange of gradients, so each of them needs as many micro-batches as the others.
        """
        own = batch_size // self.world_size
        first = self.rank * own
        starts = self.global_batch(position, batch_size)[first : first + own]
        for i in range(0, own, micro_batch_size):
            yield self.stream.read_windows(starts[i : i + micro_batch_size], self.T + 1)  # + 1: the last target


# -------------------------------------------------------------------------------------------------------- the batches


def training_batches(
    batches: Batches, batch_size: int, first_step: int, n_steps: int, micro_batch_size: int
) -> Iterator[list[np.ndarray]]:
    """Yield for each of `n_steps` steps the list of this rank's micro-batches, (micro_batch_size, T + 1) int64 each.

    A step reads `batch_size` windows over all ranks, and steps count from 0: step s starts at window s * batch_size.
    """
    for step in range(first_step, first_step + n_steps):
        yield list(batches.micro_batches(step * batch_size, batch_size, micro_batch_size))


def validation_batches(
    stream: TokenStream, sequence_length: int, micro_batch_size: int, limit: int, rank=0, world_size=1
) -> Iterator[np.ndarray]:
    """Yield every token of a split once, as a target, in windows dealt to the ranks; at most `limit` tokens if > 0.

    All micro-batches are (micro_batch_size, T + 1) int64, so that compiled code sees one shape; short windows are
    padded with IGNORED. The union over ranks is the same for every world size.
    """
    T = sequence_length
    n = len(stream) - 1
    if limit > 0:
        n = min(n, limit)
    starts = range(0, n, T)[rank::world_size]  # of the windows that are this rank's
    for i in range(0, len(starts), micro_batch_size):
        windows = np.full((micro_batch_size, T + 1), IGNORED, np.int64)  # a new array: the last one may be in transit
        for window, start in zip(windows, starts[i : i + micro_batch_size], strict=False):
            tokens = stream.read(start, min(T, n - start) + 1)
            window[: len(tokens)] = tokens
        yield windows


def to_inputs(windows):
    """Return (idx, targets), each (B, T), of windows (B, T + 1): a NumPy array, or a tensor on any device.

    Each target is the token after its input. As an input IGNORED becomes token 0: it needs an embedding, and changes
    nothing, because no position looks ahead at it (attention is causal) and as a target it is not scored.
    """
    idx = windows[:, :-1].clip(0)
    targets = windows[:, 1:]
    return idx, targets


# ------------------------------------------------------------------------------------------------ manifest.json


def new_manifest(**constants) -> dict:
    return constants | dict(tokens=0, documents=0, bytes=0, skipped={}, shards=[])


def read_manifest(directory: Path) -> dict:
    """Read a shard directory's `manifest.json`; {} if there is none. Raise UserError if it is not JSON."""
    path = directory / "manifest.json"
    return read_json(path) if path.exists() else {}


def save_manifest(directory: Path, manifest: dict) -> None:
    """Replace the manifest; it is on the disk when this returns, and an interruption leaves the old one."""
    replace_file(directory / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def summary(manifest: dict) -> str:
    skipped = ", ".join(f"{n:,} ({reason})" for reason, n in manifest["skipped"].items())
    n_shards = counted(len(manifest["shards"]), "shard")
    return (
        f"{manifest['tokens']:,} tokens in {n_shards}, {manifest['documents']:,} documents, "
        f"{manifest['bytes'] / max(manifest['tokens'], 1):.2f} bytes per token, skipped documents: {skipped or 'none'}"
    )
