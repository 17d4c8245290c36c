"""Token shards, and the order in which training reads them.

    shards -> one long stream of tokens per split -> windows -> a seeded permutation -> batches

- shards: flat arrays of uint16 or uint32, mapped into memory: `*_val_*` and `*_train_*` as .npy (ours, build-nanogpt's)
  or .bin (llm.c's, modded-nanogpt's), or the .ds files of datatrove
- window i is the slice [i*T : (i+1)*T + 1]: T inputs and, shifted by one, T targets. Windows may straddle two shards,
  so nothing is dropped between them. From the second epoch on all windows begin up to T - 1 tokens later
- a batch is a pure function of (seed, position), where position counts the windows seen so far. Every rank takes its
  slice of the same global batch, so that the order depends neither on the number of ranks nor on interruptions

Batches are NumPy arrays of windows, (rows, T + 1) int64; `to_inputs` cuts them into inputs and targets, wherever they
are by then. This file knows nothing of torch, models, tokenizers or devices; corpus/shards.py writes what it reads.
"""

import glob
import hashlib
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cli import UserError, read_json

BIN_MAGIC, BIN_HEADER = 20240520, 256  # llm.c: 256 int32 of header (magic, version 1, number of tokens), then uint16
SCAN_TOKENS = 2**25  # how many tokens of a split are checked before the first step; the others when they are read
RELEASE_AFTER = 512  # windows; reading one maps 64 KB of a file or more, which are given back after so many
IGNORED = -100  # a target that is not scored, as in PyTorch; fills what validation has no tokens for


# -------------------------------------------------------------------------------------------------------- the shards


def find_shards(data: str, split: str) -> list[Path]:
    """The shards of a split, "train" or "val", in a directory or a glob, in file order. Raises UserError for none.

    The name of a file says its split. The .ds files of datatrove have no such names: the first one is "val" then, and
    the others are "train".
    """
    pattern = f"{glob.escape(data)}/*" if os.path.isdir(data) else data
    paths = sorted(p for p in map(Path, glob.glob(pattern)) if p.suffix in LAYOUTS and not p.name.startswith("."))
    named = {s: [p for p in paths if re.search(rf"_{s}(_.*)?$", p.stem)] for s in ("train", "val")}
    found, unnamed = named[split], [p for p in paths if p.suffix == ".ds"]
    if unnamed and not any(named.values()):
        found = unnamed[:1] if split == "val" else unnamed[1:]
        if not found:
            raise UserError(
                f"{unnamed[0]} is the only .ds file, and so the validation split; for one to train on, too, give "
                "datatrove more tasks, or a max_tokens_per_file"
            )
    if not found:
        what = f"{data} holds no *_{split}_*.npy, .bin or .ds shard" if os.path.exists(data) else f"there is no {data}"
        raise UserError(f"--data {data}: {what}; write shards with: python fineweb.py --out_dir FOLDER")
    return found


def open_shard(path: Path) -> np.ndarray:
    """A shard's tokens as a read-only memory map (n,) of uint16 or uint32. Raises UserError for a damaged file."""
    try:
        if path.suffix not in LAYOUTS:
            raise ValueError(f"shards are {', '.join(LAYOUTS)} files")
        dtype, offset, shape = LAYOUTS[path.suffix](path)
        if len(shape) != 1 or dtype not in (np.dtype("<u2"), np.dtype("<u4")):
            raise ValueError(f"it holds {dtype} of shape {shape}, not a row of uint16 or uint32")
        # a file that is cut, or whose header is damaged, maps as well, and would fail in the middle of a run
        if path.stat().st_size != offset + shape[0] * dtype.itemsize:
            raise ValueError(f"it promises {shape[0]} tokens of {dtype.itemsize} bytes, and its size does not fit them")
        if shape[0] == 0:  # the system maps no empty file
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, mode="r", offset=offset, shape=shape)
    except Exception as e:  # a damaged header makes NumPy raise nearly anything, SyntaxError and TypeError included
        reason = e.strerror if isinstance(e, OSError) and e.strerror else e
        raise UserError(f"shard {path} cannot be read: {reason}; write it again") from e


def npy_layout(path: Path) -> tuple[np.dtype, int, tuple[int, ...]]:
    tokens = np.lib.format.open_memmap(path, mode="r")  # refuses pickled objects
    return tokens.dtype, tokens.offset, tokens.shape


def bin_layout(path: Path) -> tuple[np.dtype, int, tuple[int, ...]]:
    header = np.fromfile(path, "<i4", BIN_HEADER)  # fewer where the file is shorter
    if len(header) < BIN_HEADER or header[0] != BIN_MAGIC or header[1] != 1:
        raise ValueError(f"its header does not start with {BIN_MAGIC} and version 1")
    return np.dtype("<u2"), header.nbytes, (int(header[2]),)


def ds_layout(path: Path) -> tuple[np.dtype, int, tuple[int, ...]]:
    """A .ds file is tokens alone: X.ds.metadata beside it says how many, and whether one has 2 bytes or 4.

    X.ds.index, the ends of documents, is not needed, since datatrove puts its `eos_token` there. It ends a document
    where our <|endoftext|> begins one, which is the same in one long stream: there is one between any two documents,
    also where one file ends and the next begins. Only the very first document has none before it.
    """
    _, size, n = ds_metadata(path)
    return np.dtype(f"<u{size}"), 0, (n,)


def ds_metadata(path: Path) -> tuple[str, int, int]:
    """(name of its tokenizer, bytes of a token, number of tokens) of a .ds file. Raises ValueError, or OSError."""
    metadata = path.with_name(f"{path.name}.metadata")
    if not metadata.exists():
        raise ValueError(f"there is no {metadata.name}; let datatrove write it (save_final_metadata=True)")
    with open(metadata, encoding="utf-8") as f:
        match = re.match(r"(.*)\|([24])\n(\d{1,18})(\n|$)", f.read(10_000))
    if not match:
        raise ValueError(f"{metadata.name} does not begin with the lines TOKENIZER|2, or |4, and NUMBER OF TOKENS")
    return match[1], int(match[2]), int(match[3])


LAYOUTS = {".npy": npy_layout, ".bin": bin_layout, ".ds": ds_layout}  # path -> dtype, offset in bytes, shape


def read_manifest(directory: Path) -> dict:
    """`manifest.json` of a shard directory; {} where there is none. Raises UserError for a damaged one.

    What is in it has its type: `shards` (dicts of `file`, `tokens`, perhaps `sha256`), `tokenizer`, and the counts.
    """
    path = Path(directory) / "manifest.json"
    try:
        manifest = read_json(path)
    except FileNotFoundError:
        return {}
    types = dict(shards=list, tokens=int, documents=int, bytes=int, skipped=dict, tokenizer=str, next=dict)
    if type(manifest) is not dict:  # `type`, because a bool is an int to isinstance
        wrong = ["content"]
    elif not (wrong := [key for key, kind in types.items() if key in manifest and type(manifest[key]) is not kind]):
        wrong += [f"shards[{i}]" for i, entry in enumerate(manifest.get("shards", [])) if not is_entry(entry)]
        wrong += [f"skipped[{key}]" for key, n in manifest.get("skipped", {}).items() if type(n) is not int]
    if wrong:
        raise UserError(f"{path} is damaged: {wrong[0]} is of a wrong type; remove it, or write the shards again")
    return manifest


def is_entry(entry: object) -> bool:
    """True for the description of a shard in a manifest. `file` is a plain name, so that nothing outside is opened."""
    if type(entry) is not dict or type(entry.get("file")) is not str or type(entry.get("tokens")) is not int:
        return False
    return Path(entry["file"]).name == entry["file"] != "" and type(entry.get("sha256", "")) is str


# -------------------------------------------------------------------------------------------------------- the stream


class TokenStream:
    """The shards of one split as one long sequence of tokens, checked against the manifest and the vocabulary.

    Raises UserError if a shard is damaged, missing, differs from `manifest.json`, or has a token >= vocab_size.
    """

    def __init__(self, paths: list[Path], vocab_size: int):
        self.paths, self.vocab_size = paths, vocab_size
        self._maps = [open_shard(path) for path in paths]
        self.shards = [np.asarray(m) for m in self._maps]  # plain arrays: slicing a np.memmap is slow
        self._unreleased = 0  # windows read since the last release
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards]).tolist()  # of each shard, and the end
        if len(self) < 2:
            raise UserError(f"{paths[0]} has {len(self)} tokens; a split needs two at least, an input and its target")
        self._check_manifest()
        part = max(SCAN_TOKENS // len(paths), 1)
        for start, shard in zip(self.starts, self.shards, strict=False):
            if shard[:part].max(initial=0) >= vocab_size:  # another tokenizer shows in any stretch of text
                self._refuse(start, part)
            self.release()

    def __len__(self) -> int:
        return self.starts[-1]

    def _check_manifest(self) -> None:
        listed = listed_shards(self.paths)
        if lost := [path for path in listed if not os.path.exists(path)]:
            raise UserError(f"shard {lost[0]} is listed in manifest.json and missing; write it again")
        described = {path.parent for path in listed}  # a folder without a manifest has nothing to differ from
        for path, shard in zip(self.paths, self.shards, strict=True):
            if path.parent in described and listed.get(path, {}).get("tokens") != len(shard):
                found = f"{listed[path]['tokens']} tokens" if path in listed else "no such shard"
                raise UserError(
                    f"shard {path} has {len(shard)} tokens and manifest.json says {found}; it is truncated "
                    "or was written by another run: write it again with fineweb.py, or remove it"
                )

    def read(self, start: int, n: int) -> np.ndarray:
        """The slice [start : start + n] as a new array (n,) int64."""
        return self.read_windows([start], n)[0]

    def read_windows(self, starts: list[int], n: int) -> np.ndarray:
        """The slice [start : start + n] of every start, as a new array (len(starts), n) int64, across shards where need
        be.

        Raises UserError for a token that the vocabulary does not have.
        """
        out = np.empty((len(starts), n), np.int64)
        self._unreleased += len(starts)
        if self._unreleased > RELEASE_AFTER:
            self.release()
        for row, start in zip(out, starts, strict=True):
            shard = bisect_right(self.starts, start) - 1  # the last one that begins at `start` or before
            begin = start - self.starts[shard]
            if begin + n <= len(self.shards[shard]):
                row[:] = self.shards[shard][begin : begin + n]  # the only copy: from the file's pages, widened
            else:
                self._read_across(row, shard, begin)
        if out.size and out.max() >= self.vocab_size:  # a GPU would say no more than "assert"
            self._refuse(starts[int(out.max(1).argmax())], n)
        return out

    def _read_across(self, row: np.ndarray, shard: int, begin: int) -> None:
        done = 0
        while done < len(row):  # more than two shards where one is shorter than a window
            part = self.shards[shard][begin : begin + len(row) - done]
            row[done : done + len(part)] = part
            done, shard, begin = done + len(part), shard + 1, 0

    def _refuse(self, start: int, n: int) -> None:
        """Raise the UserError for the shard that has too large a token among these."""
        for path, shard, first in zip(self.paths, self.shards, self.starts, strict=False):
            part = shard[max(start - first, 0) : max(start + n - first, 0)]
            if len(part) and part.max() >= self.vocab_size:
                raise UserError(
                    f"shard {path} has token {part.max()}, but vocab_size is {self.vocab_size}; "
                    "was it written with another tokenizer?"
                )

    def release(self) -> None:
        """Give the pages that were read back to the system, so that resident memory stays flat.

        They stay in the system's cache of the file, and come back without the disk while there is room. Without this,
        whatever was read of 20 GB of shards counts as memory of this process, and a cluster ends it for that.
        """
        self._unreleased = 0
        for shard in self._maps:
            if hasattr(shard, "_mmap") and hasattr(mmap, "MADV_DONTNEED"):
                shard._mmap.madvise(mmap.MADV_DONTNEED)


def listed_shards(paths: list[Path]) -> dict[Path, dict]:
    """{path: its entry} of all shards in the manifests of the directories of `paths`."""
    folders = dict.fromkeys(path.parent for path in paths)
    return {folder / entry["file"]: entry for folder in folders for entry in read_manifest(folder).get("shards", [])}


def fingerprint(stream: TokenStream) -> str:
    """16 hexadecimal digits that tell these tokens in this order from others, wherever the shards lie.

    It rests on the checksums in the manifest; for a shard without one on its length and what it begins and ends with,
    because reading 20 GB takes too long. A run that resumes compares it: the order of other data would be another one.
    """
    digest, listed = hashlib.sha256(), listed_shards(stream.paths)
    for path, shard in zip(stream.paths, stream.shards, strict=True):
        ends = np.concatenate([shard[:4096], shard[-4096:]]).astype("<u4")  # the same for every dtype
        content = listed.get(path, {}).get("sha256") or hashlib.sha256(ends.tobytes()).hexdigest()
        digest.update(f"{len(shard)} {content}\n".encode())
    return digest.hexdigest()[:16]


# --------------------------------------------------------------------------------------------------------- the order


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0 .. n-1 as (n,) uint32.

    Every number is put below the random bits of PCG64, whose stream NumPy keeps for good, as it does not that of
    Generator.shuffle; sorting then is the permutation. It is also faster.
    """
    bits = max(n - 1, 1).bit_length()  # that a number below n takes
    keys = np.random.PCG64([seed, epoch]).random_raw(n)  # (n,) uint64
    keys >>= np.uint64(bits)
    keys <<= np.uint64(bits)  # the low bits are free
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()  # by the random bits; equal ones, which are rare, by number
    keys &= np.uint64(2**bits - 1)
    return keys.astype(np.uint32)


class Batches:
    """The windows of a stream in their training order, and the part of one rank in every global batch."""

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int, shuffle: bool, rank=0, world_size=1):
        self.stream, self.T, self.seed, self.shuffle = stream, sequence_length, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.n_windows = (len(stream) - 1) // sequence_length  # an epoch; fewer than T tokens at the end are left over
        if self.n_windows < 1:
            raise UserError(
                f"{stream.paths[0]} has {len(stream)} tokens, fewer than sequence_length + 1 = {sequence_length + 1}; "
                "give more text, or a smaller --sequence_length"
            )
        self._orders: dict[int, np.ndarray] = {}  # by epoch; 39 MB for 10B tokens in windows of 1024

    def order(self, epoch: int) -> np.ndarray:
        """All windows in the order of this epoch, (n_windows,): a function of (seed, epoch)."""
        if epoch not in self._orders:
            while len(self._orders) >= 2:  # a batch spans two epochs at most, unless an epoch is tiny
                self._orders.pop(min(self._orders))
            n = self.n_windows
            self._orders[epoch] = permutation(n, self.seed, epoch) if self.shuffle else np.arange(n)
        return self._orders[epoch]

    def shift(self, epoch: int) -> int:
        """How many tokens later windows begin in this epoch, 0 .. T-1: 0 in the first one.

        The first target of a window is predicted from one token, the last one from T. With windows that are cut at the
        same places in every epoch, these would be the same targets every time. For the recipe `tiny`, which reads its
        text several times, the shift is worth 0.03 bits per byte.
        """
        return int(np.random.PCG64([self.seed, epoch, 1]).random_raw()) % self.T if epoch and self.shuffle else 0

    def global_batch(self, position: int, rows: int) -> list[int]:
        """Where in the stream the windows begin of a global batch of `rows` sequences that starts at `position`."""
        starts, last = [], len(self.stream) - 1 - self.T  # where the last window that fits begins
        while len(starts) < rows:  # the end of an epoch and the beginning of the next may share a batch
            epoch, at = divmod(position + len(starts), self.n_windows)
            windows = self.order(epoch)[at : at + rows - len(starts)].tolist()
            starts += [min(window * self.T + self.shift(epoch), last) for window in windows]
        return starts

    def micro_batches(self, position: int, rows: int, micro_rows: int) -> Iterator[np.ndarray]:
        """This rank's part of that global batch, in arrays of one shape, (micro_rows, T + 1) int64.

        `rows` is a multiple of `micro_rows` times the number of ranks: all ranks take part in every exchange of
        gradients, so each of them needs as many micro-batches as the others.
        """
        if rows % (micro_rows * self.world_size):
            raise ValueError(f"{rows} rows are not a multiple of {self.world_size} ranks x {micro_rows}")
        own = rows // self.world_size
        starts = self.global_batch(position, rows)[self.rank * own : (self.rank + 1) * own]
        for i in range(0, own, micro_rows):
            yield self.stream.read_windows(starts[i : i + micro_rows], self.T + 1)  # T + 1: the last target, too


# -------------------------------------------------------------------------------------------------------- the batches


def training_batches(
    order: Batches, batch_size: int, first_step: int, n_steps: int, micro_batch_size: int
) -> Iterator[list[np.ndarray]]:
    """For each of `n_steps` steps the list of this rank's micro-batches, arrays of windows (micro_batch_size, T + 1).

    A step reads `batch_size` windows over all ranks, and steps count from 0: step s starts at window s * batch_size.
    """
    for step in range(first_step, first_step + n_steps):
        yield list(order.micro_batches(step * batch_size, batch_size, micro_batch_size))


def validation_batches(
    stream: TokenStream, sequence_length: int, micro_batch_size: int, limit: int, rank=0, world_size=1
) -> Iterator[np.ndarray]:
    """Every token of a split once, as a target, in windows dealt out to the ranks; `limit` > 0 is the most tokens.

    Yields micro-batches, all (micro_batch_size, T + 1) int64, so that compiled code sees one shape; what is too short
    ends in IGNORED. The union over ranks is the same for every world size.
    """
    T = sequence_length
    n = len(stream) - 1 if limit <= 0 else min(len(stream) - 1, limit)
    numbers = range(-(-n // T))[rank::world_size]  # of the windows that are this rank's
    for i in range(0, len(numbers), micro_batch_size):
        windows = np.full((micro_batch_size, T + 1), IGNORED, np.int64)  # a new array: the last one may be in transit
        for row, w in zip(windows, numbers[i : i + micro_batch_size], strict=False):
            tokens = stream.read(w * T, min(T, n - w * T) + 1)
            row[: len(tokens)] = tokens
        yield windows


def to_inputs(windows):
    """(idx, targets), each (rows, T), of windows (rows, T + 1): a NumPy array, or a tensor on any device.

    Each target is the token after its input. As an input IGNORED becomes token 0: it needs an embedding, and changes
    nothing, because no position looks ahead at it (attention is causal) and as a target it is not scored.
    """
    return windows[:, :-1].clip(0), windows[:, 1:]
