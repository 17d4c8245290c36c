"""Token shards and the order in which training reads them.

    text -> shards -> one long stream of tokens per split -> windows -> a seeded permutation -> batches

- shards: `*_val_*` and `*_train_*` as .npy (uint16 or uint32), or .bin of llm.c and modded-nanogpt
- window i is the tokens i*T .. (i+1)*T, both ends included: T inputs and, shifted by one, T targets. Windows may
  straddle two shards, so nothing is dropped between them
- batch: a pure function of (seed, position), where position counts the windows seen so far. Every rank takes its slice
  of the same global batch, so that the order depends neither on the number of ranks nor on interruptions
- manifest: `manifest.json` beside the shards says where they come from and what is in them; `verify` checks all of it
- text: `prepare_text` turns a .txt file into shards of the same kind, once

This file knows nothing of models, devices other than the one that batches go to, or optimizers. It imports torch where
batches are made and not before, so that processes that only write shards stay small.
"""

import glob
import hashlib
import io
import json
import mmap
import queue
import re
import shutil
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from runtime import UserError, flush, sha256, write_atomically

if TYPE_CHECKING:
    import torch

BIN_MAGIC, BIN_HEADER = 20240520, 256  # llm.c: 256 int32 of header, magic, version, number of tokens, then uint16
SCAN_TOKENS = 2**25  # how many tokens of a split are checked before the first step; the others when they are read
RELEASE_AFTER = 512  # windows; reading one maps 64 KB of a file into memory, which then are given back


def find_shards(data: str, split: str) -> list[Path]:
    """The shards of a split in a directory, or of a glob, in file order. Raises UserError when there are none."""
    paths = map(Path, glob.glob(f"{glob.escape(data)}/*" if Path(data).is_dir() else data))
    found = sorted(p for p in paths if re.search(rf"_{split}(_.*)?\.(npy|bin)$", p.name) and p.name[0] != ".")
    if not found:
        what = f"{data} holds no *_{split}_*.npy or .bin shard" if Path(data).is_dir() else f"there is no {data}"
        raise UserError(f"{what}; write shards with: python fineweb.py --out_dir {data}")
    return found


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

    Raises UserError if a shard is damaged, missing, differs from `manifest.json`, or has a token >= vocab_size.
    """

    def __init__(self, paths: list[Path], vocab_size: int):
        self.paths, self.vocab_size = paths, vocab_size
        self._maps = [open_shard(path) for path in paths]
        self.shards = [np.asarray(m) for m in self._maps]  # plain arrays: slicing a np.memmap is slow
        self._unreleased = 0
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards]).tolist()  # of each shard, and the end
        self._check_manifest()
        share = max(SCAN_TOKENS // len(paths), 1)
        for start, shard in zip(self.starts, self.shards, strict=False):
            if shard[:share].max(initial=0) >= vocab_size:
                self._refuse(start, share)
            self.release()

    def __len__(self) -> int:
        return self.starts[-1]

    def _check_manifest(self) -> None:
        directory = self.paths[0].parent
        listed = {entry["file"]: entry["tokens"] for entry in read_manifest(directory).get("shards", [])}
        if lost := [name for name in listed if not (directory / name).exists()]:
            raise UserError(f"shard {directory / lost[0]} is listed in manifest.json and missing; write it again")
        for path, shard in zip(self.paths, self.shards, strict=True):
            if listed and listed.get(path.name) != len(shard):
                found = f"{listed[path.name]} tokens" if path.name in listed else "no such shard"
                raise UserError(
                    f"shard {path} has {len(shard)} tokens and manifest.json says {found}; it is truncated "
                    "or was written by another run: write it again with fineweb.py, or remove it"
                )

    def read(self, start: int, n: int) -> np.ndarray:
        """Tokens start .. start + n as a new array (n,) int64."""
        return self.windows([start], n)[0]

    def windows(self, starts: list[int], n: int) -> np.ndarray:
        """Tokens start .. start + n of every start, as a new array (len(starts), n) int64, across shards where need be.

        Raises UserError for a token that the vocabulary does not have.
        """
        out = np.empty((len(starts), n), np.int64)
        self._unreleased += len(starts)
        if self._unreleased > RELEASE_AFTER:
            self.release()
        for row, start in zip(out, starts, strict=True):
            shard = bisect_right(self.starts, start) - 1
            begin = start - self.starts[shard]
            if begin + n <= len(self.shards[shard]):
                row[:] = self.shards[shard][begin : begin + n]
            else:
                self._read_across(row, shard, begin)
        if out.size and out.max() >= self.vocab_size:
            self._refuse(starts[int(out.max(1).argmax())], n)
        return out

    def _read_across(self, row: np.ndarray, shard: int, begin: int) -> None:
        done = 0
        while done < len(row):
            part = self.shards[shard][begin : begin + len(row) - done]
            row[done : done + len(part)] = part
            done, shard, begin = done + len(part), shard + 1, 0

    def _refuse(self, start: int, n: int) -> None:
        for path, shard, first in zip(self.paths, self.shards, self.starts, strict=False):
            part = shard[max(start - first, 0) : max(start + n - first, 0)]
            if len(part) and part.max() >= self.vocab_size:
                raise UserError(
                    f"shard {path} has token {part.max()}, but vocab_size is {self.vocab_size}; "
                    "was it written with another tokenizer?"
                )

    def release(self) -> None:
        """Give the pages that were read back to the system, so that resident memory stays flat."""
        self._unreleased = 0
        for shard in self._maps:
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
        """The permutation of all windows in this epoch, (windows,) uint32: a function of (seed, epoch)."""
        if epoch not in self._orders:
            while len(self._orders) >= 2:  # a batch spans two epochs at most, unless an epoch is tiny
                self._orders.pop(min(self._orders))
            self._orders[epoch] = (
                permutation(self.windows, self.seed, epoch) if self.shuffle else np.arange(self.windows)
            )
        return self._orders[epoch]

    def global_batch(self, position: int, rows: int) -> list[int]:
        """The windows of a global batch of `rows` sequences that starts at `position`."""
        batch = []
        while len(batch) < rows:
            epoch, at = divmod(position + len(batch), self.windows)
            batch += self.order(epoch)[at : at + rows - len(batch)].tolist()
        return batch

    def local(self, position: int, rows: int, micro_rows: int) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
        """This rank's micro-batches of that global batch: (idx, targets), each (micro_rows, T) int64.

        Every rank gets as many, of one shape; rows that are left over are padding, with ignored targets.
        """
        share = -(-rows // self.world_size)
        windows = self.global_batch(position, rows)[self.rank * share : (self.rank + 1) * share]
        for i in range(0, share, micro_rows):
            yield self.pack(windows[i : i + micro_rows], micro_rows)

    def pack(self, windows: list[int], rows: int) -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        from model import IGNORE_INDEX

        tokens = torch.from_numpy(self.stream.windows([w * self.T for w in windows], self.T + 1))  # (rows, T + 1)
        if len(windows) == rows:
            return tokens[:, :-1], tokens[:, 1:]
        idx = torch.zeros(rows, self.T, dtype=torch.long)
        targets = torch.full((rows, self.T), IGNORE_INDEX)
        idx[: len(windows)], targets[: len(windows)] = tokens[:, :-1], tokens[:, 1:]
        return idx, targets


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0 .. n-1 as (n,) uint32.

    Every number is put behind the random bits of PCG64, whose stream NumPy keeps for good, as it does not that of
    Generator.shuffle; sorting then is the permutation. It is also faster.
    """
    bits = max(n - 1, 1).bit_length()
    keys = np.random.PCG64([seed, epoch]).random_raw(n)
    keys >>= np.uint64(bits)
    keys <<= np.uint64(bits)
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()
    keys &= np.uint64(2**bits - 1)
    return keys.astype(np.uint32)


def validation_batches(
    stream: TokenStream, sequence_length: int, micro_rows: int, max_tokens: int, rank=0, world_size=1
) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    """Every token of a split once, as a target, in windows dealt out to the ranks; `max_tokens` > 0 is a limit.

    Yields (idx, targets) of one shape, (micro_rows, T) int64, so that compiled code sees no other; what is too short is
    padded with ignored targets. The union over ranks is the same for every world size.
    """
    import torch

    from model import IGNORE_INDEX

    T = sequence_length
    n = len(stream) - 1 if max_tokens <= 0 else min(len(stream) - 1, max_tokens)
    windows = range(-(-n // T))[rank::world_size]
    for i in range(0, len(windows), micro_rows):
        idx = torch.zeros(micro_rows, T, dtype=torch.long)
        targets = torch.full((micro_rows, T), IGNORE_INDEX)
        for row, w in enumerate(windows[i : i + micro_rows]):
            tokens = torch.from_numpy(stream.read(w * T, min(T, n - w * T) + 1))
            idx[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        yield idx, targets


def prefetch(batches: Iterator, device: "torch.device", depth: int = 2) -> Iterator:
    """Run an iterator of lists of tensor tuples `depth` items ahead in a thread, and move them to the device.

    On CUDA the thread copies them through pinned memory, on a stream of its own, so that they arrive while the device
    computes. An error of the thread is raised where its item was due. Close the iterator if you leave it early.
    """
    import torch

    items: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(item) -> None:
        while not stop.is_set():
            try:
                return items.put(item, timeout=0.1)
            except queue.Full:
                continue

    def move(batch: list[tuple]) -> tuple[list[tuple], "torch.cuda.Event | None"]:
        if stream is None:
            return [tuple(t.to(device) for t in micro) for micro in batch], None
        with torch.cuda.stream(stream):
            moved = [tuple(t.pin_memory().to(device, non_blocking=True) for t in micro) for micro in batch]
            return moved, stream.record_event()

    def work() -> None:
        try:
            for batch in batches:
                put(move(batch))
                if stop.is_set():
                    return
            put(StopIteration())
        except BaseException as e:
            put(e)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := items.get(), BaseException):
            batch, copied = item
            if copied is not None:
                torch.cuda.current_stream(device).wait_event(copied)
                for t in (t for micro in batch for t in micro):
                    t.record_stream(torch.cuda.current_stream(device))  # its memory is in use until this stream is done
            yield batch
        if not isinstance(item, StopIteration):
            raise item
    finally:
        stop.set()
        thread.join()  # a thread that is inside torch when Python ends aborts the process


def training_batches(
    batches: Batches, plan: Callable[[int], tuple[int, int]], start_step: int, max_steps: int, micro_rows: int
) -> "Iterator[list[tuple[torch.Tensor, torch.Tensor]]]":
    """The micro-batches of each step; plan(step) is (position, rows) of its global batch."""
    for step in range(start_step, max_steps):
        position, rows = plan(step)
        yield list(batches.local(position, rows, micro_rows))


# --------------------------------------------------------------------------------------------------- the manifest


def read_manifest(directory: Path, suffix: str = "") -> dict:
    """`manifest.json` of a shard directory; {} where there is none. Raises UserError for a damaged one."""
    path = Path(directory) / f"manifest{suffix}.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is damaged: {e}; remove it, or write the shards again with fineweb.py") from e


def save_manifest(directory: Path, manifest: dict, suffix: str = "") -> None:
    """Replace the manifest, which is on the disk when this returns; an interruption leaves the old one."""
    path = Path(directory) / f"manifest{suffix}.json"
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(manifest, indent=2) + "\n")
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def merge_manifests(directory: str) -> None:
    """One manifest.json for the shards that several ranks have written. Raises UserError if something is missing."""
    parts = [read_manifest(Path(directory), p.stem[8:]) for p in sorted(Path(directory).glob("manifest-*.json"))]
    ranks, world_size = [part["rank"] for part in parts], parts[0]["world_size"] if parts else 1
    if ranks != list(range(world_size)):
        raise UserError(f"{directory} has the manifests of ranks {ranks} of {world_size}; copy all of them there")
    for part in parts:
        if "next" in part:
            raise UserError(f"rank {part['rank']} is not done; give its command again, and merge after that")
        if other := [k for k in ("commit", "files_sha256", "tokenizer", "text_field") if part[k] != parts[0][k]]:
            raise UserError(f"ranks 0 and {part['rank']} differ in {other[0]}; write the shards of one of them again")
    merged = parts[0] | dict(rank=0, world_size=1, shards=[entry for part in parts for entry in part["shards"]])
    merged |= {key: sum(part[key] for part in parts) for key in ("tokens", "documents", "bytes")}
    merged |= dict(skipped=dict(sum((Counter(part["skipped"]) for part in parts), Counter())))
    save_manifest(Path(directory), merged)
    print(f"{directory}: {summary(merged)}")


def summary(manifest: dict) -> str:
    skipped = ", ".join(f"{n:,} ({reason})" for reason, n in manifest["skipped"].items())
    return (
        f"{manifest['tokens']:,} tokens in {len(manifest['shards'])} shards, {manifest['documents']:,} documents, "
        f"{manifest['bytes'] / max(manifest['tokens'], 1):.2f} bytes per token, skipped documents: {skipped or 'none'}"
    )


def verify(directory: Path) -> str:
    """Check files, counts, checksums, ids and tokenizer against the manifest; returns its summary. Raises UserError."""
    manifest = read_manifest(directory)
    if not manifest:
        ranks = (
            "merge those of its ranks first" if list(directory.glob("manifest-*.json")) else "nothing to compare with"
        )
        raise UserError(f"there is no {directory}/manifest.json: {ranks}")
    if "next" in manifest:
        raise UserError(f"{directory} is not complete: {summary(manifest)}; the command that began it goes on")
    tok = load_tokenizer(str(directory / "tokenizer.json"))
    problems = [] if tok.fingerprint == manifest["tokenizer"] else [f"{directory}/tokenizer.json is another tokenizer"]
    listed = {entry["file"] for entry in manifest["shards"]}
    strays = [p for split in ("train", "val") for p in directory.glob(f"*_{split}_*.npy") if p.name not in listed]
    problems += [f"{path} is not in manifest.json" for path in sorted(strays)]
    totals = Counter()
    with ThreadPoolExecutor() as pool:
        checks = pool.map(lambda entry: check_shard(directory / entry["file"], entry, tok), manifest["shards"])
        for problem, counts in tqdm(checks, total=len(listed), unit="shard", disable=None):
            problems += [problem] if problem else []
            totals += counts
    wrong = [k for k in ("tokens", "documents", "bytes") if totals[k] != manifest.get(k, totals[k])]
    if wrong and not problems:
        problems.append(f"manifest.json counts {manifest[wrong[0]]} {wrong[0]}, and there are {totals[wrong[0]]}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}; remove {directory} and write it again, or copy the sound file there")
    return summary(manifest)


def check_shard(path: Path, entry: dict, tok) -> tuple[str, Counter]:
    """(what is wrong with a shard or "", its counts)"""
    try:
        tokens = open_shard(path)
    except UserError as e:
        return str(e), Counter()
    if len(tokens) != entry["tokens"]:
        return f"shard {path} has {len(tokens)} tokens, and manifest.json says {entry['tokens']}", Counter()
    if sha256(path) != entry["sha256"]:
        return f"shard {path} is not what was written: its sha256 differs from manifest.json", Counter()
    often = np.zeros(0, np.int64)  # how often each id occurs
    for i in range(0, len(tokens), 2**22):
        here = np.bincount(tokens[i : i + 2**22], minlength=len(often))
        here[: len(often)] += often
        often = here
    if len(often) > len(tok):
        return f"shard {path} has token {len(often) - 1}, and its tokenizer only {len(tok)}", Counter()
    n_bytes = int(often @ tok.token_bytes()[: len(often)])
    return "", Counter(tokens=len(tokens), documents=int(often[tok.eot_token : tok.eot_token + 1].sum()), bytes=n_bytes)


# ----------------------------------------------------------------------------------------------- text and tokenizers


def documents(text: str) -> list[str]:
    """The pieces of a text that two or more blank lines separate; with those lines, so that they join to the text."""
    return [piece for piece in re.split(r"(?<=\n\n\n)(?!\n)", text) if piece]


def prepare_text(text_file: str, tokenizer: str, vocab_size: int, cache: Path) -> Path:
    """Shards of a text file: the first 90% of its characters to train on, the last 10% to validate. Made once.

    `tokenizer` is `train`, for a BPE of `vocab_size` tokens trained on the training part, or as in `load_tokenizer`.
    Two blank lines end a document. Returns the shard directory below `cache`, which also holds `tokenizer.json` and
    `manifest.json`.
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
    if tok.eot_token is None:
        raise UserError(f"--tokenizer {tokenizer} has no <|endoftext|> to start documents with; train one that has")

    def fill(path: Path) -> None:
        shards = []
        for number, (name, part) in enumerate(parts.items()):
            ids = [i for document in documents(part) for i in (tok.eot_token, *tok.encode_ordinary(document))]
            file = path / f"text_{name}_{number:06d}.npy"
            np.save(file, np.array(ids, dtype=shard_dtype(len(tok))))
            shards.append(dict(file=file.name, tokens=len(ids), sha256=sha256(file)))
        tok.save(path / "tokenizer.json")
        manifest = dict(source=Path(text_file).name, tokenizer=tok.fingerprint, shards=shards)
        (path / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")

    shutil.rmtree(directory, ignore_errors=True)
    write_atomically(directory, fill)
    return directory


def npy_header(n: int, dtype: np.dtype) -> bytes:
    """What np.save writes before the data of an array (n,); as long for every n."""
    header = io.BytesIO()
    fields = dict(descr=np.lib.format.dtype_to_descr(dtype), fortran_order=False, shape=(n,))
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()


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
