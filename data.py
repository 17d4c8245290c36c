"""Token shards and the order in which training reads them.

    text -> shards -> one long stream of tokens per split -> windows -> a seeded permutation -> batches

- shards: `*_val_*` and `*_train_*` as .npy (uint16 or uint32), or .bin of llm.c and modded-nanogpt
- window i is the tokens i*T .. (i+1)*T, both ends included: T inputs and, shifted by one, T targets. Windows may
  straddle two shards, so nothing is dropped between them
- batch: a pure function of (seed, position), where position counts the windows seen so far. Every rank takes its slice
  of the same global batch, so that the order depends neither on the number of ranks nor on interruptions
- text: `prepare_text` turns a .txt file into shards of the same kind, once

This file knows nothing of models, devices other than the one that batches go to, or optimizers.
"""

import glob
import hashlib
import json
import mmap
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from checkpoint import sha256, write_atomically
from model import IGNORE_INDEX
from runtime import UserError

BIN_MAGIC, BIN_HEADER = 20240520, 256  # llm.c: 256 int32 of header, magic, version, number of tokens, then uint16
SCAN_TOKENS = 2**25  # how many tokens of a split are checked before the first step; the others when they are read


def find_shards(data: str, split: str) -> list[Path]:
    """The shards of a split in a directory, or of a glob, in file order. Raises UserError when there are none."""
    if Path(data).is_dir():
        names = [p for end in ("npy", "bin") for p in Path(data).glob(f"*_{split}_*.{end}")]
    else:
        names = [Path(p) for p in glob.glob(data) if f"_{split}_" in Path(p).name]
    if not names:
        what = f"{data} holds no *_{split}_*.npy or .bin shard" if Path(data).is_dir() else f"there is no {data}"
        raise UserError(f"{what}; write shards with: python fineweb.py --out_dir {data}")
    return sorted(names)


def open_shard(path: Path) -> np.ndarray:
    """A shard's tokens as a read-only memory map (n,) of uint16 or uint32. Raises UserError for a damaged file."""
    try:
        if path.suffix == ".bin":
            header = np.fromfile(path, dtype="<i4", count=BIN_HEADER)
            if len(header) < BIN_HEADER or header[0] != BIN_MAGIC:
                raise ValueError(f"its header does not start with {BIN_MAGIC}")
            n = int(header[2])
            if path.stat().st_size != 4 * BIN_HEADER + 2 * n:
                raise ValueError(f"its header promises {n} tokens and its size does not fit them")
            return np.memmap(path, dtype="<u2", mode="r", offset=4 * BIN_HEADER, shape=(n,))
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
            raise ValueError(f"it holds {tokens.dtype} of shape {tokens.shape}, not a row of uint16 or uint32")
        return tokens
    except (ValueError, EOFError, OSError) as e:
        raise UserError(f"shard {path} cannot be read: {e}; write it again with fineweb.py") from e


class TokenStream:
    """The shards of one split as one long sequence of tokens, checked against the manifest and the vocabulary.

    Raises UserError if a shard is damaged, differs from `manifest.json`, or has a token >= vocab_size.
    """

    def __init__(self, paths: list[Path], vocab_size: int):
        self.paths, self.vocab_size = paths, vocab_size
        self.shards = [open_shard(path) for path in paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])  # first token of each shard, and the end
        self._check_manifest()
        share = max(SCAN_TOKENS // len(paths), 1)
        for start, shard in zip(self.starts, self.shards, strict=False):
            self.read(int(start), min(len(shard), share))
        self.release()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _check_manifest(self) -> None:
        manifest = read_manifest(self.paths[0].parent)
        counts = {entry["file"]: entry["tokens"] for entry in manifest.get("shards", [])}
        for path, shard in zip(self.paths, self.shards, strict=True):
            if path.name in counts and counts[path.name] != len(shard):
                raise UserError(
                    f"shard {path} has {len(shard)} tokens and manifest.json says {counts[path.name]}; it is truncated "
                    "or was written by another run: write it again with fineweb.py"
                )

    def read(self, start: int, n: int) -> np.ndarray:
        """Tokens start .. start + n as a new array, across shards where need be."""
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        parts = []
        while n > 0:
            part = self.shards[first][start - self.starts[first] :][:n]
            if len(part) and part.max() >= self.vocab_size:
                raise UserError(
                    f"shard {self.paths[first]} has token {part.max()}, but vocab_size is {self.vocab_size}; "
                    "was it written with another tokenizer?"
                )
            parts.append(part)
            start, n, first = start + len(part), n - len(part), first + 1
        return np.concatenate(parts)

    def release(self) -> None:
        """Give the pages that were read back to the system, so that resident memory stays flat."""
        for shard in self.shards:
            if hasattr(shard, "_mmap") and hasattr(mmap, "MADV_DONTNEED"):
                shard._mmap.madvise(mmap.MADV_DONTNEED)


class Batches:
    """The windows of a stream in their training order, and the share of one rank in every global batch."""

    def __init__(self, stream: TokenStream, sequence_length: int, seed: int, shuffle: bool, rank=0, world_size=1):
        self.stream, self.T, self.seed, self.shuffle = stream, sequence_length, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.windows = (len(stream) - 1) // sequence_length  # an epoch; the last target is the last token, or nearly
        if self.windows < 1:
            raise UserError(
                f"{stream.paths[0]} has {len(stream)} tokens, fewer than sequence_length + 1 = {sequence_length + 1}; "
                "give more text, or a smaller --sequence_length"
            )
        self._orders: dict[int, np.ndarray] = {}

    def order(self, epoch: int) -> np.ndarray:
        """The permutation of all windows in this epoch: a function of (seed, epoch)."""
        if epoch not in self._orders:
            while len(self._orders) >= 2:  # a batch spans two epochs at most, unless an epoch is tiny
                self._orders.pop(min(self._orders))
            order = np.arange(self.windows, dtype=np.uint32)
            if self.shuffle:
                np.random.Generator(np.random.PCG64([self.seed, epoch])).shuffle(order)
            self._orders[epoch] = order
        return self._orders[epoch]

    def global_batch(self, position: int, rows: int) -> list[int]:
        """The windows of a global batch of `rows` sequences that starts at `position`."""
        return [int(self.order(p // self.windows)[p % self.windows]) for p in range(position, position + rows)]

    def local(self, position: int, rows: int, micro_rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's micro-batches of that global batch: (idx, targets), each (micro_rows, T) int64."""
        share = rows // self.world_size
        windows = self.global_batch(position, rows)[self.rank * share : (self.rank + 1) * share]
        for i in range(0, share, micro_rows):
            yield self.pack(windows[i : i + micro_rows])

    def pack(self, windows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.stack([self.stream.read(w * self.T, self.T + 1) for w in windows])
        tokens = torch.from_numpy(tokens.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]


def validation_batches(
    stream: TokenStream, sequence_length: int, micro_rows: int, max_tokens: int, rank=0, world_size=1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Every token of a split once, as a target, in windows dealt out to the ranks; `max_tokens` > 0 is a limit.

    Yields (idx, targets) of one shape, (micro_rows, T) int64, so that compiled code sees no other; what is too short is
    padded with ignored targets. The union over ranks is the same for every world size.
    """
    T = sequence_length
    n = len(stream) - 1 if max_tokens <= 0 else min(len(stream) - 1, max_tokens)
    windows = range(-(-n // T))[rank::world_size]
    for i in range(0, len(windows), micro_rows):
        idx = torch.zeros(micro_rows, T, dtype=torch.long)
        targets = torch.full((micro_rows, T), IGNORE_INDEX)
        for row, w in enumerate(windows[i : i + micro_rows]):
            tokens = torch.from_numpy(stream.read(w * T, min(T, n - w * T) + 1).astype(np.int64))
            idx[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        yield idx, targets
    stream.release()


def prefetch(batches: Iterator, device: torch.device, depth: int = 2) -> Iterator:
    """Run an iterator of lists of tensor tuples `depth` items ahead in a thread, and move them to the device.

    On CUDA they go through pinned memory, asynchronously. An error of the thread is raised where its item was due.
    """
    items: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def put(item) -> None:
        while not stop.is_set():
            try:
                return items.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for batch in batches:
                if device.type == "cuda":
                    batch = [tuple(t.pin_memory() for t in micro) for micro in batch]
                put(batch)
                if stop.is_set():
                    return
            put(StopIteration())
        except BaseException as e:
            put(e)

    threading.Thread(target=work, name="prefetch", daemon=True).start()
    try:
        while not isinstance(item := items.get(), BaseException):
            yield [tuple(t.to(device, non_blocking=True) for t in micro) for micro in item]
        if not isinstance(item, StopIteration):
            raise item
    finally:
        stop.set()


def training_batches(
    batches: Batches, plan: Callable[[int], tuple[int, int]], start_step: int, max_steps: int, micro_rows: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """The micro-batches of each step; plan(step) is (position, rows) of its global batch."""
    for step in range(start_step, max_steps):
        position, rows = plan(step)
        yield list(batches.local(position, rows, micro_rows))
        if step % 64 == 63:
            batches.stream.release()


def read_manifest(directory: Path) -> dict:
    """`manifest.json` of a shard directory; {} where there is none. Raises UserError for a damaged one."""
    path = Path(directory) / "manifest.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is damaged: {e}; remove it, or write the shards again with fineweb.py") from e


def prepare_text(text_file: str, tokenizer: str, vocab_size: int, cache: Path) -> Path:
    """Shards of a text file: the first 90% of its characters to train on, the last 10% to validate. Made once.

    `tokenizer` is `train`, for a BPE of `vocab_size` tokens trained on the training part, or as in `load_tokenizer`.
    Returns the shard directory below `cache`, which also holds `tokenizer.json` and `manifest.json`.
    """
    from bpe.tokenizer import Tokenizer

    try:
        raw = Path(text_file).read_bytes()
        text = raw.decode()
    except FileNotFoundError:
        raise UserError(f"there is no {text_file}; --data takes a .txt file or a directory of shards") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{text_file} is not UTF-8 text ({e}); convert it, for instance with iconv") from None
    if not text.strip():
        raise UserError(f"{text_file} is empty; give a text with more than a few hundred words")
    wanted = f"train:{vocab_size}" if tokenizer == "train" else load_tokenizer(tokenizer).fingerprint
    key = hashlib.sha256(raw + wanted.encode()).hexdigest()[:16]
    directory = cache / f"{Path(text_file).stem}-{key}"
    if (directory / "manifest.json").exists():
        return directory
    split = int(len(text) * 0.9)
    parts = {"val": text[split:], "train": text[:split]}
    tok = Tokenizer.train([parts["train"]], vocab_size) if tokenizer == "train" else load_tokenizer(tokenizer)

    def fill(path: Path) -> None:
        shards = []
        for number, (name, part) in enumerate(parts.items()):
            ids = np.array([tok.eot_token] + tok.encode_ordinary(part), dtype=shard_dtype(len(tok)))
            file = path / f"text_{name}_{number:06d}.npy"
            np.save(file, ids)
            shards.append(dict(file=file.name, tokens=len(ids), sha256=sha256(file)))
        tok.save(path / "tokenizer.json")
        manifest = dict(source=Path(text_file).name, tokenizer=tok.fingerprint, shards=shards)
        (path / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")

    shutil.rmtree(directory, ignore_errors=True)
    write_atomically(directory, fill)
    return directory


def shard_dtype(n_vocab: int) -> type:
    return np.uint16 if n_vocab <= 2**16 else np.uint32


def load_tokenizer(name: str):
    """`gpt2`, or a tokenizer file or directory. Raises UserError."""
    from bpe.tokenizer import Tokenizer

    if name == "gpt2":
        return Tokenizer.from_tiktoken("gpt2")
    if not Path(name).exists():
        raise UserError(f"--tokenizer {name}: there is no such file; give gpt2, train, or a tokenizer.json")
    return Tokenizer.load(name)


def data_tokenizer(shards: Path, tokenizer: str):
    """The tokenizer of a shard directory: the one beside the shards, else `tokenizer`. Raises UserError if the shards
    were written with another one than asked for."""
    own = shards / "tokenizer.json"
    wanted = read_manifest(shards).get("tokenizer")
    if tokenizer in ("gpt2", "train"):
        tokenizer = str(own) if own.exists() else "gpt2"
    tok = load_tokenizer(tokenizer)
    if wanted and wanted != tok.fingerprint:
        raise UserError(f"{shards} was written with another tokenizer than {tokenizer}; use {own} or write it again")
    return tok
