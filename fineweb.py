"""Turn text into shards of tokens: FineWeb-Edu, another dataset of the Hugging Face hub, or local files.

    python fineweb.py                                          # FineWeb-Edu sample-10BT -> edu_fineweb10B/
    python fineweb.py --dry_run                                # what that reads, writes and needs
    python fineweb.py --verify                                 # every shard against its checksum
    python fineweb.py --source roneneldan/TinyStories --out_dir stories       # a dataset: OWNER/NAME[/FOLDER or /GLOB]
    python fineweb.py --source corpus/*.jsonl.gz --tokenizer tokenizer.json --out_dir corpus_shards     # local files

    source -> files -> units (row groups, or lines of a few MB) -> tokens, by workers -> shards, by one writer

Writes OUT_DIR: NAME_val_000000.npy, NAME_train_000001.npy, ..., manifest.json and tokenizer.json. Documents stand in
the order of the source, each after an <|endoftext|>, whatever the number of workers. However a run ends, the same
command resumes after the last complete shard, and the result is the same to the byte.

One machine does all of it. For a corpus that outgrows one there is datatrove, whose files training reads as they are.
This file knows nothing of models or training, nor of torch.
"""

import errno
import multiprocessing
import os
import re
import shutil
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, BinaryIO, Literal

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from bpe.tokenizer import Tokenizer, cpu_count, splitter, valid_unicode
from cli import Positive, Range, Stopped, Tokens, UserError, flush, only_one, parse_args, script, sha256
from corpus import sources
from corpus.order import read_manifest
from corpus.shards import load_tokenizer, npy_header, save_manifest, shard_dtype, summary, verify
from corpus.sources import Source, SourceFile, Unit, documents_of, local_file, units_of

UNITS_AHEAD = 3  # for each worker: one under way, others that wait for it or for their turn to be written
TOKENS_PER_BYTE = 0.23  # of English text; this and the next are for the plan only
TOKENS_PER_SECOND = 5e6  # of one worker
RESUME = "give the same command again to resume"


@dataclass(frozen=True)
class Config:
    source: tuple[str, ...] = ("HuggingFaceFW/fineweb-edu/sample/10BT",)  # a dataset of the hub, or files or globs
    revision: str = "main"  # of the hub's dataset: a branch, a tag or a commit
    text_field: str = "text"  # the column, or the key, that holds a document; in a .txt two blank lines end one
    tokenizer: str = "gpt2"  # gpt2, or a tokenizer.json
    out_dir: str = "edu_fineweb10B"  # where shards go
    shard_size: Positive = 100_000_000  # tokens of a shard; the first shard is the validation split
    limit_tokens: Tokens = 0  # stop after so many tokens; 0 for the whole source
    workers: Annotated[int, Range(0, 1024)] = 0  # processes that read and tokenize; 0 for one on each core
    start_method: Literal["spawn", "fork"] = "spawn"  # of the workers; fork starts half a second faster, on Linux
    downloads: Annotated[int, Range(1, 64)] = 2  # files that are downloaded at the same time
    keep_downloads: bool = False  # keep downloaded files in OUT_DIR/.downloads instead of deleting them after use
    verify: bool = False  # check the shards of out_dir instead of writing any
    dry_run: bool = False  # say what would be read and written, and stop

    @property
    def limit(self) -> int:
        return self.limit_tokens or sys.maxsize


def main() -> None:
    config = parse_args(Config, description=__doc__)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without one
    out_dir = Path(config.out_dir)
    if config.verify:
        print(f"{out_dir} is sound: {verify(out_dir)}")
    else:
        make_shards(config, out_dir)


def stop(signum, frame) -> None:
    raise Stopped(signum)


def make_shards(config: Config, out_dir: Path) -> None:
    """Write the shards of `config.source`, or those that are missing. Raises UserError."""
    tok = load_tokenizer(config.tokenizer)
    config = settle(config, tok)
    manifest = open_manifest(config, out_dir, tok)
    if "next" not in manifest:
        return say(f"{out_dir} is complete: {summary(manifest)}")
    source = sources.find_source(config.source, manifest.get("commit") or config.revision)
    print_plan(config, source, with_files(manifest, source, out_dir), out_dir)
    if config.dry_run:
        return
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with only_one(out_dir / ".lock", f"shard directory {out_dir}"):
            manifest = with_files(open_manifest(config, out_dir, tok), source, out_dir)  # nobody else changes it now
            if "next" in manifest:  # else another process completed it while this one waited
                write_shards(config, source, manifest, out_dir, tok)
    except OSError as e:
        reason = "no space left on the disk of" if e.errno in (errno.ENOSPC, errno.EDQUOT) else f"{e.strerror or e}:"
        raise UserError(f"{reason} {out_dir}; {safe_shards(out_dir)}: mend that, then {RESUME}") from e
    except (KeyboardInterrupt, Stopped):
        print(f"stopped; {safe_shards(out_dir)}: {RESUME}", file=sys.stderr)
        raise
    say(f"{out_dir}: {summary(manifest)}")
    if len(manifest["shards"]) == 1:
        tenth = -(-manifest["tokens"] // 10)
        say(f"all of it is the validation split; for one to train on, too: --shard_size {tenth}")


def safe_shards(out_dir: Path) -> str:
    manifest = read_manifest(out_dir)
    return f"{len(manifest.get('shards', []))} complete shards with {manifest.get('tokens', 0):,} tokens are safe"


def settle(config: Config, tok: Tokenizer) -> Config:
    """The constants that are used. Raises UserError for those that do not fit together."""
    if not config.out_dir or Path(config.out_dir).is_file():
        raise UserError(f"--out_dir {config.out_dir!r} is {'a file' if config.out_dir else 'empty'}; give a directory")
    if config.source != Config.source and config.out_dir == Config.out_dir:
        raise UserError(f"{config.out_dir} is for FineWeb-Edu; give an --out_dir for the shards of {config.source[0]}")
    if tok.eot_token is None:
        raise UserError(f"{config.tokenizer} has no <|endoftext|> to put before documents; train one with it")
    return replace(config, workers=config.workers or cpu_count())


def write_shards(config: Config, source: Source, manifest: dict, out_dir: Path, tok: Tokenizer) -> None:
    """The pipeline: files -> units -> tokens -> shards. Fills in `manifest`."""
    downloads, begin = out_dir / ".downloads", manifest["next"]
    before = list(accumulate((file.bytes or 1 for file in source.files), initial=0))  # bytes before each file

    def is_safe(manifest: dict) -> None:
        entry, total = manifest["shards"][-1], f"{manifest['tokens']:,} of about {bar.total:,.0f}"
        say(f"{entry['file']}: {entry['tokens']:,} tokens; in all {total}, {manifest['documents']:,} documents")
        if "next" in manifest and not config.keep_downloads:
            sources.discard(source, downloads, manifest["next"]["file"])

    tok.save(out_dir / "tokenizer.json")
    with (
        start_workers(config, tok) as submit,
        tqdm(initial=manifest["tokens"], unit="tok", unit_scale=True, disable=None, dynamic_ncols=True) as bar,
        closing(Writer(config, out_dir, manifest, tok, is_safe)) as writer,
    ):
        paths = sources.arriving(source, downloads, begin["file"], config.downloads)
        units = units_from(begin, paths, config.text_field, splitter(tok.pattern).cut)
        for file, unit, tokens, skipped in tokenized(units, submit, config.workers * UNITS_AHEAD):
            done = (before[file] + (before[file + 1] - before[file]) * unit.done) / before[-1]  # fraction of the source
            bar.total = min((writer.n_tokens + len(tokens)) / done, config.limit)
            writer.write(file, unit, tokens, skipped)
            bar.update(writer.n_tokens - bar.n)
            if writer.n_tokens == config.limit:
                break
        writer.end()
    if not config.keep_downloads:
        shutil.rmtree(downloads, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ units -> tokens


def units_from(begin: dict, paths: Iterator[Path], field: str, cut: re.Pattern | None) -> Iterator[tuple[int, Unit]]:
    """(number of the file, unit) of all units from the place `begin` on; `paths` starts with the file there."""
    for file, path in enumerate(paths, begin["file"]):
        for unit in units_of(path, field, cut, begin["at"] if file == begin["file"] else 0):
            yield file, unit


def tokenized(units: Iterator, submit: Callable[[Unit], Future], ahead: int) -> Iterator[tuple]:
    """(number of the file, unit, tokens (n,), skipped documents) in the order of the units. At most `ahead` of them are
    under way: memory must not grow when writing is slower than tokenizing."""
    pending = deque()
    for file, unit in units:
        pending.append((file, unit._replace(content=b""), submit(unit)))  # only workers need its text
        if len(pending) == ahead:
            file, unit, result = pending.popleft()
            yield file, unit, *result.result()
    yield from ((file, unit, *result.result()) for file, unit, result in pending)


@contextmanager
def start_workers(config: Config, tok: Tokenizer) -> Iterator[Callable[[Unit], Future]]:
    """Start the worker processes; yields a function that has a unit tokenized by the next one that is free.

    Every process has a pipe of its own, and a thread that waits for its answers. The queues of ProcessPoolExecutor are
    shared: a process that is killed while it writes tokens to one keeps its lock, and all others wait for good.
    """
    context, free, processes = multiprocessing.get_context(config.start_method), SimpleQueue(), []
    for _ in range(config.workers):  # before there are threads, which a fork would not copy
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(theirs, ours, tok, config.text_field), daemon=True))
        processes[-1].start()
        theirs.close()
        free.put(ours)

    def ask(unit: Unit) -> tuple[np.ndarray, Counter]:
        connection = free.get()
        try:
            connection.send(unit)
            answer = connection.recv()
        except (EOFError, OSError):
            what = f"one of {config.workers} worker processes was ended, perhaps for lack of memory"
            raise UserError(f"{what}; {RESUME}, with fewer --workers if that was the reason") from None
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
        for process in processes:  # they hold nothing, and have nothing to do that is still needed
            process.kill()
            process.join()


def work(connection: Connection, other_end: Connection, tok: Tokenizer, text_field: str) -> None:
    """A worker process: units in, tokens out, until the main process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what a Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    other_end.close()  # a fork has it, and would keep the pipe open
    pa.set_cpu_count(1)
    encode = encoder(tok)
    with suppress(EOFError, OSError):
        while True:
            unit = connection.recv()
            try:
                answer = tokenize(unit, text_field, tok, encode)
            except Exception as e:
                answer = e
            connection.send(answer)


def tokenize(unit: Unit, text_field: str, tok: Tokenizer, encode: Callable) -> tuple[np.ndarray, Counter]:
    """The tokens (n,) of a unit, each document after an <|endoftext|>, and how many documents were skipped, and why."""
    eot, blocks, ids, skipped = np.array([tok.eot_token]), splitter(tok.pattern).blocks, [np.zeros(0, int)], Counter()
    for number, (text, reason) in enumerate(documents_of(unit, text_field)):
        if text is None:
            skipped[reason] += 1
            continue
        if number > 0 or not unit.continued:
            ids.append(eot)
        ids += map(encode, blocks(valid_unicode(text)))  # long texts in parts, so that no list of ids is long
    return np.concatenate(ids, dtype=shard_dtype(len(tok)), casting="unsafe"), skipped


def encoder(tok: Tokenizer) -> Callable[[str], np.ndarray]:
    """text -> ids (n,), through tiktoken where it can hold this vocabulary: it is several times as fast."""
    fast = None
    with suppress(ValueError):
        fast = tok.to_tiktoken().encode_to_numpy

    def encode(text: str) -> np.ndarray:
        with suppress(ValueError):  # its regular expressions give up on a million blanks
            if fast:
                return fast(text, disallowed_special=())
        return np.array(tok.encode_ordinary(text), np.uint32)

    return encode


# ------------------------------------------------------------------------------------------------ tokens -> shards


class Writer:
    """The one writer. A shard gets its name when it is complete and on the disk; then the manifest counts it, with the
    place in the source where the next one begins. What came later is written again after an interruption."""

    def __init__(self, config: Config, out_dir: Path, manifest: dict, tok: Tokenizer, is_safe: Callable[[dict], None]):
        self.config, self.out_dir, self.manifest, self.is_safe = config, out_dir, manifest, is_safe
        self.name, self.dtype = shard_name(out_dir), np.dtype(shard_dtype(len(tok)))
        self.eot, self.token_bytes = tok.eot_token, tok.token_bytes()
        self.file, self.filled, self.counts = None, 0, np.zeros(len(tok), np.int64)  # counts: of each id in this shard
        self.to_skip = manifest["next"]["skip"]  # tokens of the first unit that are in the shard before
        self.skipped = Counter(manifest["skipped"])
        self.background = ThreadPoolExecutor(1)
        self.finishing = self.background.submit(save_manifest, out_dir, manifest)
        self._remove_incomplete()

    @property
    def n_tokens(self) -> int:
        return self.manifest["tokens"] + self.filled

    def write(self, file: int, unit: Unit, tokens: np.ndarray, skipped: Counter) -> None:
        """Append the tokens of a unit, up to the limit, and complete the shards that they fill."""
        done, self.last_file = min(self.to_skip, len(tokens)), file
        self.to_skip -= done
        while done < len(tokens) and self.n_tokens < self.config.limit:
            part = tokens[done:][: min(self.config.shard_size - self.filled, self.config.limit - self.n_tokens)]
            self._append(part)
            done += len(part)
            if self.filled == self.config.shard_size:
                self._complete(dict(file=file, at=unit.at, skip=done))
        self.skipped += skipped

    def _append(self, part: np.ndarray) -> None:
        if self.file is None:
            number = len(self.manifest["shards"])
            self.path = self.out_dir / f"{self.name}_{'train' if number else 'val'}_{number:06d}.npy"
            self.file = open(self.path.with_name(f".{self.path.name}.tmp"), "wb")
            self.file.write(npy_header(0, self.dtype))  # as long as the one that replaces it
        self.file.write(part.data)
        self.filled += len(part)
        self.counts += np.bincount(part, minlength=len(self.counts))

    def _complete(self, place: dict | None) -> None:
        """Count the shard and finish it in the background. `place` is where the next begins; None: it is the last."""
        self.finishing.result()  # one at a time, and the manifest is this thread's again
        check_unchanged(self.manifest, self.last_file)
        self.file.seek(0)
        self.file.write(npy_header(self.filled, self.dtype))
        self.manifest["shards"].append(dict(file=self.path.name, tokens=self.filled))
        self.manifest["tokens"] += self.filled
        self.manifest["documents"] += int(self.counts[self.eot])
        self.manifest["bytes"] += int(self.counts @ self.token_bytes)
        self.manifest |= dict(skipped=dict(sorted(self.skipped.items())), next=place)
        if place is None:
            del self.manifest["next"]
        self.finishing = self.background.submit(self._finish, self.file, self.path)
        self.file, self.filled, self.counts[:] = None, 0, 0

    def _finish(self, file: BinaryIO, path: Path) -> None:
        """In the background, since workers would wait while the disk writes."""
        with file:
            file.flush()
            os.fsync(file.fileno())
        self.manifest["shards"][-1]["sha256"] = sha256(Path(file.name))
        Path(file.name).rename(path)
        flush(self.out_dir)
        save_manifest(self.out_dir, self.manifest)
        self.is_safe(self.manifest)

    def end(self) -> None:
        """Complete the last shard, and the manifest. Raises UserError if there is nothing in them."""
        if self.filled:
            self._complete(None)
        self.finishing.result()
        if not self.manifest["shards"]:
            raise UserError(f"no document in {self.manifest['source']}; skipped: {dict(self.skipped) or 'none'}")
        if self.manifest.pop("next", None):  # the source ended where a shard did
            self.manifest |= dict(skipped=dict(sorted(self.skipped.items())))
            save_manifest(self.out_dir, self.manifest)

    def close(self) -> None:
        """Let a complete shard be finished, and remove an incomplete one, which may have filled the disk."""
        self.background.shutdown()
        if self.file:
            self.file.close()
        self._remove_incomplete()

    def _remove_incomplete(self) -> None:
        for path in self.out_dir.glob(f".{self.name}_*.npy.tmp"):
            path.unlink()


def shard_name(out_dir: Path) -> str:
    """The part of a shard's name before _val_ or _train_, which cannot be mistaken for these."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", out_dir.resolve().name.removesuffix("_shards")).strip("-.") or "text"
    return name.replace("edu-fineweb10B", "edufineweb")


def check_unchanged(manifest: dict, last: int) -> None:
    """Raises UserError if a local file that is in the shard under way, up to number `last`, changed meanwhile."""
    for entry in manifest["files"][manifest["next"]["file"] : last + 1]:
        path = Path(entry["name"])
        if not manifest["commit"] and not (path.exists() and local_file(path)._asdict() == entry):
            raise UserError(f"{path} changed while it was read; leave it as it is, and give the same command again")


# ------------------------------------------------------------------------------------------------ the manifest


def open_manifest(config: Config, out_dir: Path, tok: Tokenizer) -> dict:
    """The manifest of a run that was begun, or a new one. Raises UserError where `out_dir` holds something else.

    `next` is where the next shard begins: number of the file, place of the unit, tokens of it in the shard before.
    """
    identity = dict(
        source=" ".join(config.source), revision=config.revision, text_field=config.text_field,
        tokenizer=tok.fingerprint, dtype=np.dtype(shard_dtype(len(tok))).name, shard_size=config.shard_size,
        limit_tokens=config.limit_tokens,
    )  # fmt: skip
    if not (manifest := read_manifest(out_dir)):
        if found := list(out_dir.glob(f"{shard_name(out_dir)}_*.npy")):
            raise UserError(f"{found[0]} is in no manifest.json; give another --out_dir, or remove the shards there")
        return identity | dict(tokens=0, documents=0, bytes=0, skipped={}, shards=[], next=dict(file=0, at=0, skip=0))
    for key, value in identity.items():
        if manifest.get(key) != value:
            was = f"{out_dir} holds shards of a run with {key} {manifest.get(key)}"
            raise UserError(f"{was}, and now it is {value}; give another --out_dir, or remove that one")
    if not is_well_formed(manifest):
        raise UserError(f"{out_dir}/manifest.json is damaged, or of an earlier version; remove {out_dir} to start over")
    for path in (out_dir / entry["file"] for entry in manifest["shards"]):
        if not path.exists():
            raise UserError(f"{path} is missing; put it back, or remove {out_dir} to start over")
    return manifest


def with_files(manifest: dict, source: Source, out_dir: Path) -> dict:
    """The manifest with the files of the source as they are now. Raises UserError if those that complete shards were
    made of are not what they were then: two versions of a source must not mix."""
    files = [file._asdict() for file in source.files]
    before = manifest.get("files", files)
    if [entry["name"] for entry in before] != [entry["name"] for entry in files]:
        raise UserError(f"{out_dir} holds shards of other files than those of the source now; give another --out_dir")
    used = manifest["next"]["file"] + 1 if "next" in manifest and manifest["shards"] else 0
    if changed := [now["name"] for then, now in zip(before[:used], files, strict=False) if then != now]:
        what = f"{changed[0]} has changed since shards in {out_dir} were made of it"
        raise UserError(f"{what}; put back what it was, or remove {out_dir} to start over")
    return manifest | dict(commit=source.commit, files=files)


def is_well_formed(manifest: dict) -> bool:
    """Has it the counts and, if it is not complete, what is needed to resume?"""
    place, files, names = manifest.get("next"), manifest.get("files"), set(SourceFile._fields)
    fits = {"tokens", "documents", "bytes", "skipped", "shards"} <= manifest.keys()
    if fits and place is not None:
        fits = place.keys() == {"file", "at", "skip"} and all(type(n) is int and n >= 0 for n in place.values())
        fits = fits and type(files) is list and all(type(file) is dict and file.keys() == names for file in files)
    return fits


# ------------------------------------------------------------------------------------------------ what it tells people


def say(line: str) -> None:
    """Print without tearing the bar. A run outlives the reader of its output, such as `| head`."""
    try:
        tqdm.write(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_plan(config: Config, source: Source, manifest: dict, out_dir: Path) -> None:
    """Say what will be read and written, and what that needs. Raises UserError where the disk is too small."""
    size = partial(tqdm.format_sizeof, suffix="B")
    text_bytes = sum(file.bytes * sources.KINDS[sources.kind_of(file.name)] for file in source.files)
    tokens = min(text_bytes * TOKENS_PER_BYTE, config.limit)
    left = max(tokens - manifest["tokens"], 0)
    for_shards = left * np.dtype(manifest["dtype"]).itemsize
    sizes = sorted((file.bytes for file in source.files), reverse=True)
    for_files = sum(sizes if config.keep_downloads else sizes[: config.downloads + 2]) if source.repo else 0
    free = shutil.disk_usage(next(path for path in (out_dir, *out_dir.resolve().parents) if path.exists())).free
    commit = f" at {source.commit[:12]}" if source.commit else ""
    time = tqdm.format_interval(left / config.workers / TOKENS_PER_SECOND)
    say(f"source  {manifest['source']}{commit}: {len(sizes)} files, {size(sum(sizes))}")
    say(f"target  {out_dir}: about {tokens:,.0f} tokens, in shards of {config.shard_size:,} {manifest['dtype']}")
    say(f"disk    {size(for_shards)} for shards, {size(for_files)} for files under way; {size(free)} are free")
    say(f"time    about {time} with {config.workers} workers and a fast network")
    if manifest["shards"]:
        say(f"resume  after {len(manifest['shards'])} complete shards, {manifest['tokens']:,} tokens")
    if for_shards + for_files > free:
        what = f"{out_dir} needs about {size(for_shards + for_files)}, and its disk has {size(free)} free"
        raise UserError(f"{what}; free some, give a smaller --limit_tokens, or an --out_dir on another disk")


if __name__ == "__main__":
    script(main)
