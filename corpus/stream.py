"""The shards of a split as one long stream of tokens.

    files -> memory-mapped arrays of uint16 or uint32 -> any slice of the stream, across files if need be

- .npy: ours and build-nanogpt's; .bin: llm.c's and modded-nanogpt's; .ds: datatrove's
- manifest.json, if there is one, lists the shards: one that is missing, truncated or from another run is refused
- pages that were read are released again, so resident memory stays flat over any number of batches

This file knows nothing of text, tokenizers or torch.
"""

import glob
import hashlib
import mmap
import os
import re
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np

from cli import UserError
from corpus.manifest import listed_shards

BIN_MAGIC = 20240520  # of llm.c
BIN_HEADER = 256  # int32: the magic number, version 1, the number of tokens, and zeros; uint16 tokens follow
Layout = tuple[np.dtype, int, tuple[int, ...]]  # dtype, offset in bytes, shape
RELEASE_AFTER = 512  # release mapped pages after this many windows; reading one maps 64 KB of a file or more


# -------------------------------------------------------------------------------------------------------- the shards


def find_shards(data: str, split: str) -> list[Path]:
    """The shards of a split, "train" or "val", in a directory or a glob, in file order. Raises UserError without any.

    The last _train or _val in the name of a file decides. datatrove's .ds files have no such names: the first one is
    then "val", and the others are "train".
    """
    pattern = f"{glob.escape(data)}/*" if os.path.isdir(data) else data
    paths = sorted(map(Path, glob.glob(pattern)))
    shards = {"train": [], "val": []}
    unnamed = []
    for path in paths:
        if path.suffix not in LAYOUTS:
            continue
        if named := re.findall(r"_(train|val)(?=_|$)", path.stem):
            shards[named[-1]].append(path)
        elif path.suffix == ".ds":
            unnamed.append(path)
    if not shards["train"] and not shards["val"]:
        shards = {"train": unnamed[1:], "val": unnamed[:1]}
    if shards[split]:
        return shards[split]
    if glob.glob(data):
        raise UserError(
            f"--data {data} holds no *_{split}_*.npy, .bin or .ds shard; give a folder of shards, or a plain text "
            f"as .txt; to make shards of .parquet, .jsonl or .txt: python fineweb.py --source '{data}' --out_dir FOLDER"
        )
    remedy = "write shards with fineweb.py, or start with one that needs no other data: python train_gpt2.py tiny"
    if data == "fineweb10B":  # of the recipe `record`
        remedy = "to get it: hf download kjj0/fineweb10B-gpt2 --repo-type dataset --local-dir fineweb10B (20 GB)"
    raise UserError(f"--data {data} does not exist; {remedy}")


def open_shard(path: Path) -> np.ndarray:
    """A shard's tokens as a read-only memory map (n,) of uint16 or uint32. Raises UserError for a damaged file."""
    try:
        dtype, offset, shape = LAYOUTS[path.suffix](path)
        if len(shape) != 1 or dtype not in ("<u2", "<u4"):
            raise ValueError(f"it holds {dtype} of shape {shape}, not a row of uint16 or uint32")
        # a truncated file, or one with a damaged header, maps as well, and would fail in the middle of a run
        [n] = shape
        if path.stat().st_size != offset + n * dtype.itemsize:
            raise ValueError(f"its header says {n} tokens of {dtype.itemsize} bytes, but the file size differs")
        if n == 0:  # the system refuses to map an empty file
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, mode="r", offset=offset, shape=shape)
    except Exception as e:  # a damaged header makes NumPy raise nearly anything, SyntaxError and TypeError included
        raise UserError(f"shard {path} cannot be read: {e}; write it again, or raise ulimit -n") from e


def npy_layout(path: Path) -> Layout:
    tokens = np.lib.format.open_memmap(path, mode="r")  # refuses pickled objects
    return tokens.dtype, tokens.offset, tokens.shape


def bin_layout(path: Path) -> Layout:
    header = np.fromfile(path, "<i4", BIN_HEADER)  # fewer if the file is shorter
    if header[:2].tolist() != [BIN_MAGIC, 1]:
        raise ValueError(f"its header does not start with {BIN_MAGIC} and version 1")
    return np.dtype("<u2"), header.nbytes, (int(header[2]),)


def ds_layout(path: Path) -> Layout:
    """A .ds file holds nothing but tokens: X.ds.metadata says how many, and whether each takes 2 bytes or 4.

    X.ds.index, the ends of documents, is not needed, as datatrove writes its `eos_token` there. It ends a document and
    our <|endoftext|> begins one, which is the same in one long stream: there is one between any two documents, even
    across files. Only the very first document has none before it.
    """
    _, size, n_tokens = ds_metadata(path)
    return np.dtype(f"<u{size}"), 0, (n_tokens,)


def ds_metadata(path: Path) -> tuple[str, int, int]:
    """(name of its tokenizer, bytes of a token, number of tokens) of a .ds file. Raises ValueError, or OSError."""
    metadata = path.with_name(f"{path.name}.metadata")
    if not metadata.exists():
        raise ValueError(f"there is no {metadata.name}; let datatrove write it (save_final_metadata=True)")
    match = re.match(r"(.*)\|([24])\n(\d{1,18})(\n|$)", metadata.read_text(encoding="utf-8"))
    if not match:
        raise ValueError(f"{metadata.name} does not begin with the lines TOKENIZER|2, or |4, and NUMBER OF TOKENS")
    return match[1], int(match[2]), int(match[3])


LAYOUTS = {".npy": npy_layout, ".bin": bin_layout, ".ds": ds_layout}


# -------------------------------------------------------------------------------------------------------- the stream


class TokenStream:
    """The shards of one split, all in one directory, as one long sequence of tokens, compared with the manifest and the
    vocabulary.

    Raises UserError if a shard is damaged, missing or differs from `manifest.json`, and for a token >= vocab_size when
    it is read: another tokenizer shows in any stretch of text.
    """

    def __init__(self, paths: list[Path], vocab_size: int):
        self.paths = paths
        self.vocab_size = vocab_size
        self._maps = [open_shard(path) for path in paths]
        self.shards = [np.asarray(m) for m in self._maps]  # plain arrays: slicing a np.memmap is slow
        self._unreleased = 0  # windows read since the last release
        self.starts = [0, *accumulate(map(len, self.shards))]  # of each shard, and the end
        if len(self) < 2:
            raise UserError(f"{paths[0]} has {len(self)} tokens; a split needs at least two, an input and its target")
        self._compare_with_manifest()
        for start, shard in zip(self.starts, self.shards, strict=False):
            self.read(start, min(len(shard), 2**16))  # another tokenizer shows in any stretch of text

    def __len__(self) -> int:
        return self.starts[-1]

    def _compare_with_manifest(self) -> None:
        listed = listed_shards(self.paths[0].parent)
        for path in listed:
            if not os.path.exists(path):
                raise UserError(f"shard {path} is listed in manifest.json but missing; write it again")
        for path, shard in zip(self.paths, self.shards, strict=True):
            said = f"{listed[path]['tokens']} tokens" if path in listed else "no such shard"
            if listed and said != f"{len(shard)} tokens":  # without a manifest there is nothing to differ from
                raise UserError(
                    f"shard {path} has {len(shard)} tokens, but manifest.json says {said}; "
                    "write it again with fineweb.py, or remove it"
                )

    def read(self, start: int, n: int) -> np.ndarray:
        """The slice [start : start + n] as a new array (n,) int64."""
        return self.read_windows([start], n)[0]

    def read_windows(self, starts: list[int], n: int) -> np.ndarray:
        """The slice [start : start + n] for every start, as a new array (len(starts), n) int64.

        Raises UserError for a token that is not in the vocabulary.
        """
        out = np.empty((len(starts), n), np.int64)
        self._unreleased += len(starts)
        if self._unreleased > RELEASE_AFTER:
            self.release()
        for row, start in zip(out, starts, strict=True):
            shard = bisect_right(self.starts, start) - 1  # the last one that begins at `start` or before
            begin = start - self.starts[shard]
            done = 0
            while done < n:  # over more than two shards if one is shorter than a window
                part = self.shards[shard][begin : begin + n - done]
                row[done : done + len(part)] = part  # the only copy: from the file's pages, widened
                done += len(part)
                shard += 1
                begin = 0
        if out.size and out.max() >= self.vocab_size:  # on a GPU this would surface only as a device-side assert
            window, i = np.unravel_index(out.argmax(), out.shape)
            shard = bisect_right(self.starts, starts[window] + i) - 1
            raise UserError(
                f"shard {self.paths[shard]} has token {out[window, i]}, but vocab_size is {self.vocab_size}; "
                "was it written with another tokenizer?"
            )
        return out

    def release(self) -> None:
        """Unmap the pages that were read.

        They stay in the system's page cache, and come back without disk reads while there is room. Otherwise everything
        ever read of 20 GB of shards would count as memory of this process, and a cluster might kill it for that.
        """
        self._unreleased = 0
        for shard in self._maps:
            if hasattr(shard, "_mmap") and hasattr(mmap, "MADV_DONTNEED"):
                shard._mmap.madvise(mmap.MADV_DONTNEED)

    def digest(self) -> str:
        """16 hexadecimal digits that identify these tokens in this order, wherever the shards are.

        A run that resumes compares them, since other data would break its order. They hash the checksums in the
        manifest; of a shard without one, its length, first and last tokens, since reading 20 GB takes too long.
        """
        listed = listed_shards(self.paths[0].parent)
        total = hashlib.sha256()
        for path, shard in zip(self.paths, self.shards, strict=True):
            if path in listed:
                content = listed[path]["sha256"]
            else:
                ends = np.concatenate([shard[:4096], shard[-4096:]]).astype("<u4")  # the same for every dtype
                content = hashlib.sha256(ends.tobytes()).hexdigest()
            total.update(f"{len(shard)} {content}\n".encode())
        return total.hexdigest()[:16]
