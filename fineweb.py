"""Turn text into shards of tokens: FineWeb-Edu, another dataset of the Hugging Face hub, or local files.

    python fineweb.py                                          # FineWeb-Edu sample-10BT -> edu_fineweb10B/
    python fineweb.py --dry_run                                # what that reads, writes and needs
    python fineweb.py --verify                                 # compare every shard with its checksum
    python fineweb.py --source roneneldan/TinyStories --out_dir stories       # a dataset: OWNER/NAME[/FOLDER or /GLOB]
    python fineweb.py --source corpus/*.jsonl.gz --tokenizer tokenizer.json --out_dir corpus_shards     # local files

The idea is one line, ids = [eot, *encode(text)], for one document after the other, cut into shards of equal length
(`tokenize`). Everything else makes it fast and safe to interrupt:

    source -> files -> units (row groups, or lines of a few MB) -> tokens, by workers -> shards, by one writer

Writes OUT_DIR: NAME_val_000000.npy, NAME_train_000001.npy, ..., manifest.json and tokenizer.json. Documents keep the
order of the source, whatever the number of workers. However a run ends, the same command resumes after the last
complete shard, and the shards come out byte for byte the same.

All of it runs on one machine. For a corpus that needs more, use datatrove: training reads its files as they are.
This file knows nothing of models, training or torch.
"""

import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

import numpy as np
from tqdm import tqdm

from bpe.tokenizer import Tokenizer, cpu_count, splitter, valid_unicode
from cli import Count, Positive, Stopped, Tokens, UserError, counted, parse_args, script
from corpus.encoders import Encode, choose_encoder, encoder, same_ids
from corpus.shards import load_tokenizer, save_manifest, shard_dtype, summary, verify
from corpus.sources import Source, SourceFile, Unit, arriving, discard, documents_of, find_source, text_size, units_of
from corpus.stream import open_shard, read_manifest
from files import exclusive_lock, flush, sha256

UNITS_AHEAD = 3  # per worker: one that it tokenizes, the others queued or waiting for their turn to be written
TOKENS_PER_BYTE = 0.23  # of English text; for the plan, the progress bar and the default size of shards
COMPARED = 2**13  # characters of each unit whose ids are compared with those of our own encoder
FORGET_AFTER = 256  # units, a GB at most: then a worker makes a new encoder, as gigatoken caches every word it has seen
RESUME = "give the same command again to resume"


@dataclass(frozen=True)
class Config:
    source: tuple[str, ...] = ("HuggingFaceFW/fineweb-edu/sample/10BT",)  # a hub dataset, or files, folders, globs
    revision: str = "main"  # branch, tag or commit of the hub dataset
    text_field: str = "text"  # column or JSON key that holds the text; in a .txt, two blank lines end a document
    tokenizer: str = "gpt2"  # gpt2, or a tokenizer.json
    out_dir: str = "edu_fineweb10B"  # directory for the shards
    encoder: Literal["auto", "gigatoken", "tiktoken", "own"] = "auto"  # all give the same ids; auto: the fastest here
    shard_size: Count = 0  # tokens per shard; the first is for validation; 0 for 100M, or a tenth of a small source
    limit_tokens: Tokens = 0  # stop after this many tokens; 0 for the whole source
    workers: Count = 0  # processes that read and tokenize; 0 for one per core
    downloads: Positive = 2  # files to download at the same time
    verify: bool = False  # check the shards in out_dir against their manifest, and write nothing
    dry_run: bool = False  # print what would be read and written, then stop


def main() -> None:
    config = parse_args(Config, description=__doc__)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    out_dir = Path(config.out_dir)
    if config.verify:
        print(f"{out_dir} is intact: {verify(out_dir)}")
    else:
        make_shards(config, out_dir)


def stop(signum, frame) -> None:
    raise Stopped(signum)


def make_shards(config: Config, out_dir: Path) -> None:
    """Write the shards of `config.source`, or those that are missing. Raises UserError."""
    try:
        tok = load_tokenizer(config.tokenizer)
    except UserError as e:  # a plan needs no vocabulary
        if not config.dry_run or config.tokenizer != "gpt2":
            raise
        print(f"note    {e}")
        tok = Tokenizer([])
    config = resolve_config(config, tok, out_dir)
    manifest = open_manifest(config, out_dir, tok)
    if "next" not in manifest:
        return print(f"{out_dir} is complete: {summary(manifest)}")
    try:
        source = find_source(config.source, manifest.get("commit") or config.revision)
    except UserError as e:  # the plan of the default source needs no network
        if not config.dry_run or config.source != Config.source:
            raise
        print(f"note    {e}")
        source = Source(14 * [SourceFile("train.parquet", 2 * 10**9, "")], config.source[0])  # about what it has
    text_bytes = sum(text_size(file, config.text_field) for file in source.files)
    expected = min(int(text_bytes * TOKENS_PER_BYTE), config.limit_tokens)  # a rough figure; 0 if unknown
    default = min(100_000_000, max((expected or sys.maxsize) // 10, 1000))  # leaves most of a small source to train on
    config = replace(config, shard_size=config.shard_size or default)
    print_plan(config, source, with_files(manifest, source, out_dir), expected)
    if config.dry_run:
        return
    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive_lock(out_dir / ".lock", f"shard directory {out_dir}"):
            manifest = with_files(open_manifest(config, out_dir, tok), source, out_dir)  # nobody else changes it now
            if "next" in manifest:  # else another process completed it while this one waited
                write_shards(config, source, manifest, tok, expected)
    except (KeyboardInterrupt, Stopped):
        print(f"stopped after {len(manifest['shards'])} complete shards; {RESUME}", file=sys.stderr)
        raise
    print(f"{out_dir}: {summary(manifest)}")


def resolve_config(config: Config, tok: Tokenizer, out_dir: Path) -> Config:
    """The constants of the run; the default shard_size of a new directory is settled later. Raises UserError for
    constants that contradict each other."""
    if not config.out_dir or Path(config.out_dir).is_file():
        raise UserError(f"--out_dir {config.out_dir!r} is {'a file' if config.out_dir else 'empty'}; give a directory")
    if config.source != Config.source and config.out_dir == Config.out_dir:
        raise UserError(f"{config.out_dir} is for FineWeb-Edu; give an --out_dir for the shards of {config.source[0]}")
    if tok.eot_token is None:
        raise UserError(f"{config.tokenizer} has no <|endoftext|> to put before documents; train one with it")
    config = replace(config, workers=config.workers or cpu_count(), limit_tokens=config.limit_tokens or sys.maxsize)
    before = read_manifest(out_dir).get("shard_size")  # a resumed run keeps it
    known = before if isinstance(before, int) and 0 < before <= 10**9 else 0
    return replace(config, shard_size=config.shard_size or known, encoder=choose_encoder(config.encoder, tok))


def write_shards(config: Config, source: Source, manifest: dict, tok: Tokenizer, expected: int) -> None:
    """The pipeline: files -> units -> tokens -> shards. Fills in `manifest`."""
    out_dir, begin = Path(config.out_dir), manifest["next"]
    downloads = out_dir / ".downloads"
    if not manifest["shards"]:  # else others may be reading it
        tok.save(out_dir / "tokenizer.json")
    writer = Writer(config, out_dir, manifest, tok)
    bar = tqdm(total=expected, initial=writer.n_tokens, unit="tok", unit_scale=True, disable=None, dynamic_ncols=True)
    with start_workers(config, tok) as submit, bar:
        paths = arriving(source, downloads, begin["file"], config.downloads - 1)
        units = units_from(begin, paths, config.text_field, splitter(tok.pattern).cut)
        for place, tokens, skipped in tokenized(units, submit, config.workers * UNITS_AHEAD):
            n_complete = len(manifest["shards"])
            writer.write(place, tokens, skipped)
            bar.update(writer.n_tokens - bar.n)
            if len(manifest["shards"]) > n_complete:
                tqdm.write(f"{len(manifest['shards'])} shards, {manifest['tokens']:,} tokens are on the disk")
                discard(source, downloads, manifest["next"]["file"])
            if writer.n_tokens == config.limit_tokens:
                break
        writer.end()
    shutil.rmtree(downloads, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ units -> tokens


def tokenize(unit: Unit, text_field: str, tok: Tokenizer, encode: Encode) -> tuple[np.ndarray, Counter]:
    """`[eot, *encode(text)]` for every document of a unit, as one array (n,); and how many were skipped, and why."""
    eot, blocks = np.array([tok.eot_token]), splitter(tok.pattern).blocks
    ids, skipped = [np.zeros(0, int)], Counter()
    for number, (text, reason) in enumerate(documents_of(unit, text_field)):
        if text is None:
            skipped[reason] += 1
            continue
        if number == 0 and not same_ids(encode, tok, valid_unicode(text[:COMPARED])):
            what = f"the encoder's ids differ from ours in {unit.path}, and perhaps in complete shards"
            raise UserError(f"{what}; remove the shards, and give --encoder own")
        if number > 0 or not unit.continued:  # a long document continues from the unit before, without another eot
            ids.append(eot)
        for block in blocks(valid_unicode(text)):  # a long text in parts, so that no list of ids is long
            ids.append(encode(block))
    return np.concatenate(ids, dtype=shard_dtype(len(tok)), casting="unsafe"), skipped


def units_from(begin: dict, paths: Iterator[Path], field: str, cut: re.Pattern | None) -> Iterator[tuple[dict, Unit]]:
    """(place, unit) of all units from the place `begin` on; `paths` starts with the file there.

    A place is a file and the number of a unit in it. Units are cut the same way every time, and those written before
    an interruption are cheap to skip: they are not tokenized.
    """
    for file, path in enumerate(paths, begin["file"]):
        for number, unit in enumerate(units_of(path, field, cut)):
            if (file, number) >= (begin["file"], begin["unit"]):
                yield dict(file=file, unit=number), unit


def tokenized(units: Iterator, submit: Callable[[Unit], Future], ahead: int) -> Iterator[tuple]:
    """(place, tokens (n,), skipped documents) in the order of the units.

    At most `ahead` of them are under way: memory must not grow when writing is slower than tokenizing.
    """
    pending = deque()
    for place, unit in units:
        pending.append((place, submit(unit)))
        if len(pending) == ahead:
            place, result = pending.popleft()
            yield place, *result.result()
    yield from ((place, *result.result()) for place, result in pending)


@contextmanager
def start_workers(config: Config, tok: Tokenizer) -> Iterator[Callable[[Unit], Future]]:
    """Start the worker processes; yields a function that submits a unit to the next free one.

    Every process has its own pipe, and a thread that waits for its answers. The queues of ProcessPoolExecutor are
    shared: a process that is killed while writing to one never releases its lock, and the others hang.
    """
    context, free, processes = multiprocessing.get_context("spawn"), SimpleQueue(), []
    for _ in range(config.workers):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(theirs, tok, config), daemon=True))
        processes[-1].start()
        theirs.close()
        free.put(ours)

    def ask(unit: Unit) -> tuple[np.ndarray, Counter]:
        connection = free.get()
        try:
            connection.send(unit)
            answer = connection.recv()
        except (EOFError, OSError):
            what = f"one of {config.workers} worker processes was killed, perhaps by the out-of-memory killer"
            raise UserError(f"{what}; {RESUME}, with fewer --workers if memory was short") from None
        finally:
            free.put(connection)
        if isinstance(answer, Exception):
            raise answer
        return answer

    threads = ThreadPoolExecutor(config.workers)
    try:
        yield partial(threads.submit, ask)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:  # they hold no state, and their work is no longer needed
            process.kill()
            process.join()


def work(connection: Connection, tok: Tokenizer, config: Config) -> None:
    """A worker process: units in, tokens out, until the main process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what a Ctrl-C means
    with suppress(EOFError, OSError):
        for n in count():
            unit = connection.recv()
            if n % FORGET_AFTER == 0:
                encode = encoder(tok, config.encoder)
            try:
                answer = tokenize(unit, config.text_field, tok, encode)
            except Exception as e:
                answer = e
            connection.send(answer)


# ------------------------------------------------------------------------------------------------ tokens -> shards


class Writer:
    """The only writer. It fills one shard in memory, and lists it in the manifest once it is complete and on the disk,
    with the place in the source where the next one begins. After an interruption, writing resumes from that place."""

    def __init__(self, config: Config, out_dir: Path, manifest: dict, tok: Tokenizer):
        self.out_dir, self.manifest, self.limit = out_dir, manifest, config.limit_tokens
        self.shard = np.empty(min(config.shard_size, config.limit_tokens), shard_dtype(len(tok)))
        self.filled = 0  # tokens in it
        self.eot, self.token_bytes = tok.eot_token, tok.token_bytes()
        self.counts = np.zeros(len(tok), np.int64)  # of each id in this shard
        # tokens of the first unit that are in the previous shard; None once the end of that shard has been checked
        self.to_skip = manifest["next"]["skip"] if manifest["shards"] else None
        self.skipped = Counter(manifest["skipped"])
        for leftover in out_dir.glob(".*.tmp"):  # shards and manifests that a killed run was writing
            leftover.unlink()
        save_manifest(out_dir, manifest)

    @property
    def n_tokens(self) -> int:
        return self.manifest["tokens"] + self.filled

    def write(self, place: dict, tokens: np.ndarray, skipped: Counter) -> None:
        """Append the tokens of the unit at `place`, up to the limit, and complete the shards that they fill."""
        if self.to_skip is not None:
            self._check_seam(tokens)
        done, self.to_skip = self.to_skip or 0, None
        tokens = tokens[: done + self.limit - self.n_tokens]
        while done < len(tokens):
            part = tokens[done : done + len(self.shard) - self.filled]
            self.shard[self.filled : self.filled + len(part)] = part
            self.counts += np.bincount(part, minlength=len(self.counts))
            self.filled += len(part)
            done += len(part)
            if self.filled == len(self.shard):
                self._complete(place | dict(skip=done))
        self.skipped += skipped

    def _check_seam(self, tokens: np.ndarray) -> None:
        """Raises UserError unless the last shard ends with the first `to_skip` of `tokens`, the unit at `next`: the
        manifest may be damaged, or the source edited."""
        last = open_shard(self.out_dir / self.manifest["shards"][-1]["file"])
        held = tokens[: self.to_skip][-len(last) :]
        if not 0 < self.to_skip <= len(tokens) or not np.array_equal(held, last[-len(held) :]):
            what = f"the last shard of {self.out_dir} does not end where `next` in manifest.json says"
            raise UserError(f"{what}: the manifest is damaged, or the source has changed; remove {self.out_dir}")

    def _complete(self, place: dict | None) -> None:
        """Make the shard durable, then list it. `place` is where the next one begins; None if this was the last."""
        number, tokens = len(self.manifest["shards"]), self.shard[: self.filled]
        path = self.out_dir / f"{shard_name(self.out_dir)}_{'train' if number else 'val'}_{number:06d}.npy"
        part = path.with_name(f".{path.name}.tmp")
        with open(part, "wb") as f:
            np.save(f, tokens)
            f.flush()
            os.fsync(f.fileno())
        self.manifest["shards"].append(dict(file=path.name, tokens=len(tokens), sha256=sha256(part)))
        part.rename(path)
        flush(self.out_dir)
        self.manifest["tokens"] += len(tokens)
        self.manifest["documents"] += int(self.counts[self.eot])
        self.manifest["bytes"] += int(self.counts @ self.token_bytes)
        self.filled, self.counts[:] = 0, 0
        self._save(place)

    def _save(self, place: dict | None) -> None:
        self.manifest |= dict(skipped=dict(sorted(self.skipped.items())), next=place)
        if place is None:
            del self.manifest["next"]
        save_manifest(self.out_dir, self.manifest)

    def end(self) -> None:
        """Complete the last shard, and the manifest. Raises UserError if there is nothing in them."""
        if self.to_skip is not None:  # no unit came: `next` is past the end of the source
            self._check_seam(np.zeros(0, int))
        if self.filled:
            self._complete(None)
        if not self.manifest["shards"]:
            found = f"no document in {self.manifest['source']}; skipped: {dict(self.skipped) or 'none'}"
            raise UserError(f"{found}; name the key of the text with --text_field, or give another --source")
        if "next" in self.manifest:  # the source ended where a shard did
            self._save(None)


def shard_name(out_dir: Path) -> str:
    """The part of a shard's name before _val_ or _train_, which cannot be mistaken for these."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", out_dir.resolve().name.removesuffix("_shards")).strip("-.") or "text"
    return name.replace("edu-fineweb10B", "edufineweb")


# ------------------------------------------------------------------------------------------------ the manifest


def open_manifest(config: Config, out_dir: Path, tok: Tokenizer) -> dict:
    """The manifest of an earlier run, or a new one. Raises UserError if `out_dir` holds something else.

    `next` is where the next shard begins: number of the file, number of the unit, tokens of it in the shard before.
    """
    identity = dict(
        source=" ".join(config.source), revision=config.revision, text_field=config.text_field,
        tokenizer=tok.fingerprint, dtype=np.dtype(shard_dtype(len(tok))).name, shard_size=config.shard_size,
        limit_tokens=config.limit_tokens if config.limit_tokens < sys.maxsize else 0,
    )  # fmt: skip
    beginning = dict(file=0, unit=0, skip=0)
    manifest = read_manifest(out_dir)
    if not manifest and (found := list(out_dir.glob(f"{shard_name(out_dir)}_*.npy"))):
        raise UserError(f"{found[0]} is in no manifest.json; give another --out_dir, or remove the shards there")
    if not manifest.get("shards"):  # nothing to continue, whatever the constants were
        return identity | dict(tokens=0, documents=0, bytes=0, skipped={}, shards=[], next=beginning)
    for key, value in identity.items():
        if manifest.get(key) != value:
            was = f"{out_dir} holds shards of a run with {key} {manifest.get(key)}"
            raise UserError(f"{was}, and now it is {value}; give another --out_dir, or remove that one")
    return manifest


def with_files(manifest: dict, source: Source, out_dir: Path) -> dict:
    """The manifest with the files of the source. Raises UserError if a file that shards were made of has changed since:
    two versions of a source must not mix. Files that have not been read yet only need to have the same names."""
    files = [file._asdict() for file in source.files]
    if manifest["shards"] and "next" in manifest:
        used, before = manifest["next"]["file"] + 1, manifest["files"]
        then, now = (known[:used] + [file["name"] for file in known[used:]] for known in (before, files))
        if then != now:
            other = next(file["name"] for file in (*before, *files) if file not in before or file not in files)
            what = f"{other} has changed since shards in {out_dir} were made, or was added or removed"
            raise UserError(f"{what}; restore it, or remove {out_dir} to start over")
    return manifest | dict(commit=source.commit, files=files)


# ------------------------------------------------------------------------------------------------ the plan


def print_plan(config: Config, source: Source, manifest: dict, tokens: int) -> None:
    """Print what will be read and written, and the disk space it needs. Raises UserError if there is too little."""
    size, sizes = partial(tqdm.format_sizeof, suffix="B"), sorted(file.bytes for file in source.files)
    out_dir = Path(config.out_dir)
    for_shards = max(tokens - manifest["tokens"], 0) * np.dtype(manifest["dtype"]).itemsize
    for_files = sum(sizes[-config.downloads - 1 :]) if source.repo else 0  # the one being read, and those ahead
    free = shutil.disk_usage(next(path for path in (out_dir, *out_dir.resolve().parents) if path.exists())).free
    commit = f" at {source.commit[:12]}" if source.commit else ""
    print(f"source  {manifest['source']}{commit}: {counted(len(sizes), 'file')}, {size(sum(sizes))}")
    print(f"target  {out_dir}: about {tokens:,} tokens, in shards of {config.shard_size:,} {manifest['dtype']}")
    if 0 < tokens <= config.shard_size:  # 0 is unknown
        print(f"note    all of it would be validation; give --shard_size {-(-tokens // 10)} to leave some to train on")
    print(f"disk    {size(for_shards)} for shards, {size(for_files)} for files under way; {size(free)} are free")
    if manifest["shards"]:
        print(f"resume  after {len(manifest['shards'])} complete shards, {manifest['tokens']:,} tokens")
    if for_shards + for_files > free:
        what = f"{out_dir} needs about {size(for_shards + for_files)}, and its disk has {size(free)} free"
        raise UserError(f"{what}; free some, give a smaller --limit_tokens, or an --out_dir on another disk")


if __name__ == "__main__":
    script(main)
