"""Turn text into shards of tokens: FineWeb-Edu, another dataset of the Hugging Face hub, or local files.

    python fineweb.py                                          # FineWeb-Edu sample-10BT -> edu_fineweb10B/
    python fineweb.py --dry_run                                # what that reads, writes and needs
    python fineweb.py --verify                                 # compare every shard with its checksum
    python fineweb.py --source roneneldan/TinyStories --out_dir stories       # a dataset: OWNER/NAME[/FOLDER or /GLOB]
    python fineweb.py --source "texts/*.jsonl.gz" --tokenizer tokenizer.json --out_dir text_shards    # local files

The idea is one line, ids = [eot, *encode(text)], for one document after the other, cut into shards of equal length
(`tokenize`). Everything else makes it fast and safe to interrupt:

    source -> files -> units (row groups, or lines of a few MB) -> tokens, by workers -> shards, by one writer

Writes OUT_DIR: NAME_val_000000.npy, NAME_train_000001.npy, ..., manifest.json, tokenizer.json and .tiktoken. Documents
keep the order of the source, whatever the number of workers. However a run ends, the same command resumes after the
last complete shard, and the shards come out byte for byte the same.

All of it runs on one machine. For a corpus that needs more, use datatrove: training reads its files as they are.
This file knows nothing of models, training or torch.
"""

import multiprocessing
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
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from tqdm import tqdm

from bpe.tokenizer import Tokenizer, cpu_count, splitter
from parts.cli import Count, Positive, Stopped, Tokens, UserError, counted, parse_args, script
from parts.data import new_manifest, read_manifest, summary
from parts.documents import Unit, documents_of, text_size, units_of
from parts.files import exclusive_lock, free_bytes
from parts.shards import Writer, load_tokenizer, shard_dtype, shard_name, verify
from parts.sources import Source, arriving, discard, find_source, left_out

UNITS_AHEAD = 3  # per worker: one that it tokenizes, the others queued or waiting for their turn to be written
TOKENS_PER_BYTE = 0.23  # of English text; for the plan, the progress bar and the default size of shards
RESUME = "give the same command again to resume"


@dataclass(frozen=True)
class Config:
    source: tuple[str, ...] = ("HuggingFaceFW/fineweb-edu/sample/10BT",)  # a hub dataset, or files, folders, globs
    revision: str = "main"  # branch, tag or commit of the hub dataset
    text_field: str = "text"  # column or JSON key that holds the text; in a .txt, two blank lines end a document
    tokenizer: str = "gpt2"  # gpt2, or a tokenizer.json
    out_dir: str = "edu_fineweb10B"  # directory for the shards
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
    tok = load_tokenizer(config.tokenizer)
    config = resolve_config(config, tok, out_dir)
    manifest = open_manifest(config, out_dir, tok)
    if "next" not in manifest:
        print(f"{out_dir} is complete, and the source is not read again: {summary(manifest)}")
        return
    # later shards come from the commit of the first ones
    source = find_source(config.source, manifest.get("commit") or config.revision)
    text_bytes = sum(text_size(file.name, file.bytes, config.text_field) for file in source.files)
    expected = min(int(text_bytes * TOKENS_PER_BYTE), config.limit_tokens)
    # by default leave most of a small source to train on
    config = replace(config, shard_size=manifest["shard_size"] or min(max(expected // 10, 1000), 100_000_000))
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
    """Fill in the constants that are 0, except for the shard_size of a new directory. Raises UserError for constants
    that contradict each other."""
    if not config.out_dir:
        raise UserError("--out_dir is empty; give a directory")
    if config.source != Config.source and config.out_dir == Config.out_dir:
        raise UserError(f"{out_dir} is for FineWeb-Edu; give an --out_dir for the shards of {config.source[0]}")
    if tok.eot_token is None:
        raise UserError(f"{config.tokenizer} has no <|endoftext|> to put before documents; train one with it")
    return replace(
        config,
        limit_tokens=config.limit_tokens or sys.maxsize,
        workers=config.workers or cpu_count(),
    )


def write_shards(config: Config, source: Source, manifest: dict, tok: Tokenizer, expected: int) -> None:
    """The pipeline: files -> units -> tokens -> shards. Fills in `manifest`."""
    out_dir = Path(config.out_dir)
    downloads = out_dir / ".downloads"
    begin = manifest["next"]
    shards = manifest["shards"]
    writer = Writer(out_dir, manifest, tok, config.shard_size, config.limit_tokens)
    if not shards:  # else others may be reading it
        tok.save(out_dir / "tokenizer.json")
    bar = tqdm(total=expected, initial=writer.n_tokens, unit="tok", unit_scale=True, disable=None, dynamic_ncols=True)
    with start_workers(config, tok) as submit, bar:
        paths = arriving(source, downloads, begin["file"], config.downloads - 1)
        units = units_from(begin, paths, config.text_field, splitter(tok.pattern).cut)
        for place, tokens, skipped in tokenized(units, submit, config.workers * UNITS_AHEAD):
            n_complete = len(shards)
            writer.write(place, tokens, skipped)
            bar.update(writer.n_tokens - bar.n)
            if len(shards) > n_complete:
                tqdm.write(f"{len(shards)} shards, {manifest['tokens']:,} tokens are on the disk")
                discard(source, downloads, manifest["next"]["file"])
            if writer.n_tokens == config.limit_tokens:
                break
        writer.end()
    shutil.rmtree(downloads, ignore_errors=True)


# ------------------------------------------------------------------------------------------------ units -> tokens


def tokenize(unit: Unit, text_field: str, tok: Tokenizer) -> tuple[np.ndarray, Counter]:
    """tokens = [eot, *encode(text)] for one document after the other of a unit, as one array (n,); and how many were
    skipped, for which reason."""
    tokens = []  # of arrays: in a list, an id would take eight bytes
    skipped = Counter()
    for text, reason in documents_of(unit, text_field):
        if text is None:
            skipped[reason] += 1
        else:
            tokens += [[tok.eot_token], tok.encode_to_numpy(text)]
    if unit.continued:  # its first document began in the unit before, with an eot there
        del tokens[0]
    return np.concatenate([[], *tokens], dtype=shard_dtype(len(tok)), casting="unsafe"), skipped


def units_from(begin: dict, paths: Iterator[Path], field: str, cut: re.Pattern | None) -> Iterator[tuple[dict, Unit]]:
    """(place, unit) of all units from the place `begin` on; `paths` starts with the file there.

    A place is a file and the number of a unit in it. Units are cut the same way every time, and those written before
    an interruption are cheap to skip: they are not tokenized.
    """
    for file, path in enumerate(paths, begin["file"]):
        for number, unit in enumerate(units_of(path, field, cut)):
            if file > begin["file"] or number >= begin["unit"]:
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
    for place, result in pending:
        yield place, *result.result()


@contextmanager
def start_workers(config: Config, tok: Tokenizer) -> Iterator[Callable[[Unit], Future]]:
    """Start the worker processes; yields a function that submits a unit to the next free one.

    Every process has its own pipe, and a thread that waits for its answers. The queues of ProcessPoolExecutor are
    shared: a process that is killed while writing to one never releases its lock, and the others hang.
    """
    context = multiprocessing.get_context("spawn")
    processes = []
    free = SimpleQueue()  # our ends of the pipes to workers that have nothing to do
    for _ in range(config.workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, tok, config), daemon=True)
        process.start()
        processes.append(process)
        theirs.close()
        free.put(ours)

    def ask(unit):
        connection = free.get()
        try:
            connection.send(unit)
            answer = connection.recv()
        except (EOFError, OSError):
            raise UserError(
                f"one of {config.workers} worker processes was killed, perhaps by the out-of-memory killer; "
                f"{RESUME}, with fewer --workers if memory was short"
            ) from None
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
        while True:
            unit = connection.recv()
            try:
                answer = tokenize(unit, config.text_field, tok)
            except Exception as e:
                answer = e
            connection.send(answer)


# ------------------------------------------------------------------------------------------------ the manifest


def open_manifest(config: Config, out_dir: Path, tok: Tokenizer) -> dict:
    """The manifest of an earlier run, or a new one. Raises UserError if `out_dir` holds something else.

    `next` is where the next shard begins: number of the file, number of the unit, tokens of it in the shard before.
    """
    manifest = read_manifest(out_dir)
    found = [*out_dir.glob(f"{shard_name(out_dir)}_*.npy"), *out_dir.glob("tokenizer.json")]
    if found and not manifest:
        raise UserError(f"{found[0]} is in no manifest.json; give another --out_dir, or remove it")
    if not manifest.get("shards"):  # nothing to continue, whatever the constants were
        manifest = {}
    constants = dict(
        source=" ".join(config.source),
        revision=config.revision,
        text_field=config.text_field,
        tokenizer=tok.fingerprint,
        dtype=np.dtype(shard_dtype(len(tok))).name,
        shard_size=config.shard_size or manifest.get("shard_size", 0),  # a resumed run keeps it
        limit_tokens=config.limit_tokens if config.limit_tokens < sys.maxsize else 0,
    )
    if not manifest:
        return new_manifest(**constants) | dict(next=dict(file=0, unit=0, skip=0))
    for key, value in constants.items():
        if manifest.get(key) != value:
            raise UserError(
                f"{out_dir} holds shards of a run with {key} {manifest.get(key)}, and now it is {value}; "
                "give another --out_dir, or remove that one"
            )
    return manifest


def with_files(manifest: dict, source: Source, out_dir: Path) -> dict:
    """The manifest with the files of the source. Raises UserError if a file that shards were made of has changed since,
    or another one comes before it: two versions of a source must not mix. Later files may still change."""
    files = [file._asdict() for file in source.files]
    if manifest["shards"] and "next" in manifest:
        used = manifest["files"][: manifest["next"]["file"] + 1]
        for then, now in zip_longest(used, files[: len(used)]):
            if then != now:
                raise UserError(
                    f"{then['name']} has changed since shards in {out_dir} were made, or a file before it was added "
                    f"or removed; restore it, or remove {out_dir} to start over"
                )
    return manifest | dict(commit=source.commit, files=files)


# ------------------------------------------------------------------------------------------------ the plan


def print_plan(config: Config, source: Source, manifest: dict, tokens: int) -> None:
    """Print what will be read and written, and the disk space it needs. Raises UserError if there is too little."""
    size = partial(tqdm.format_sizeof, suffix="B")
    out_dir = Path(config.out_dir)
    sizes = sorted(file.bytes for file in source.files)
    print(f"source  {manifest['source']}: {counted(len(sizes), 'file')}, {size(sum(sizes))}")
    if source.left_out:
        print(f"without {left_out(source)}")
    print(
        f"target  {out_dir}: about {tqdm.format_sizeof(tokens)} tokens, "
        f"in shards of {config.shard_size:,} {manifest['dtype']}"
    )
    if 0 < tokens <= config.shard_size:
        print(f"note    all of it would be validation; give --shard_size {-(-tokens // 10)} to leave some to train on")
    for_shards = max(tokens - manifest["tokens"], 0) * np.dtype(manifest["dtype"]).itemsize
    for_files = 0
    if source.repo:
        for_files = sum(sizes[-config.downloads - 1 :])  # the largest: one is being read, others ahead
    free = free_bytes(out_dir)
    print(f"disk    {size(for_shards)} for shards, {size(for_files)} for files under way; {size(free)} are free")
    if manifest["shards"]:
        print(f"resume  after {len(manifest['shards'])} complete shards, {manifest['tokens']:,} tokens")
    if for_shards + for_files > free:
        raise UserError(
            f"{out_dir} needs about {size(for_shards + for_files)}, and its disk has {size(free)} free; "
            "free some, give a smaller --limit_tokens, or an --out_dir on another disk"
        )


if __name__ == "__main__":
    script(main)
