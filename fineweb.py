"""Turn text into shards of tokens: FineWeb-Edu, another dataset of the Hugging Face hub, or local files.

    python fineweb.py                                          # FineWeb-Edu sample-10BT -> edu_fineweb10B/
    python fineweb.py --dry_run                                # what that reads, writes and needs
    python fineweb.py --verify                                 # every shard against its checksum
    python fineweb.py --source roneneldan/TinyStories --out_dir stories       # a dataset: OWNER/NAME[/FOLDER or /GLOB]
    python fineweb.py --source corpus/*.jsonl.gz --tokenizer tokenizer.json --out_dir corpus_shards     # local files
    srun --ntasks=8 python fineweb.py                          # 8 machines, each an eighth of the files

    source -> files -> units (row groups, or lines of a few MB) -> tokens, by workers -> shards, by one writer

Writes OUT_DIR: NAME_val_000000.npy, NAME_train_000001.npy, ..., manifest.json and tokenizer.json. Documents stand in
the order of the source, each behind an <|endoftext|>, whatever the number of workers. However a run ends, the same
command goes on behind the last complete shard, and the result is the same to the byte.

This file knows nothing of models or training; data.py reads what it writes.
"""

import _thread
import errno
import fnmatch
import glob
import hashlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from bpe.tokenizer import Tokenizer, cpu_count, splitter, valid_unicode
from cli import Stopped, UserError, flush, parse_args, script, sha256
from data import documents, load_tokenizer, npy_header, read_manifest, save_manifest, shard_dtype, summary, verify

KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".txt", ".txt.gz", ".txt.zst")
UNIT_BYTES = 2**22  # text of a unit: large against the cost of a message, small against the memory
SLOT_TOKENS = 2**21  # room for the tokens of a unit in shared memory; what is more goes through a pipe
LOCK_SECONDS = 10  # how long to wait for a run that is being stopped
SLOTS = 4  # for each worker: one is filled, others wait for their turn to be written
TOKENS_PER_SECOND = 5e6  # of one worker; this and the next are for the plan only
TOKENS_PER_BYTE = {".parquet": 0.35, ".gz": 0.6, ".zst": 0.7, ".jsonl": 0.22, ".txt": 0.23}  # of English files


@dataclass
class Config:
    source: tuple[str, ...] = ("HuggingFaceFW/fineweb-edu/sample/10BT",)  # a dataset of the hub, or files or globs
    revision: str = "main"  # of the hub's dataset: a branch, a tag or a commit
    text_field: str = "text"  # the column, or the key, that holds a document; in a .txt two blank lines end one
    tokenizer: str = "gpt2"  # gpt2, or a tokenizer.json
    out_dir: str = "edu_fineweb10B"  # where shards go
    shard_size: int = 100_000_000  # tokens of a shard; the first shard is the validation split
    limit_tokens: int = 0  # stop after so many tokens; 0 for the whole source
    workers: int = 0  # processes that read and tokenize; 0 for one on each core
    start_method: Literal["spawn", "fork"] = "spawn"  # of the workers; fork starts half a second faster, on Linux
    downloads: int = 2  # files that are fetched at the same time
    keep_downloads: bool = False  # keep fetched files in OUT_DIR/.downloads instead of deleting them after use
    rank: int = -1  # this machine's number when several share the files; -1 asks torchrun or SLURM, else 0
    world_size: int = 0  # how many machines share the files; 0 asks torchrun or SLURM, else 1
    verify: bool = False  # check the shards of out_dir instead of writing any
    dry_run: bool = False  # say what would be read and written, and stop

    @property
    def suffix(self) -> str:
        """In the names of what each of several machines has for itself."""
        return f"-{self.rank:03d}" if self.world_size > 1 else ""

    @property
    def limit(self) -> int:
        """This machine's part of limit_tokens."""
        n, rank, world_size = self.limit_tokens, self.rank, self.world_size
        return n * (rank + 1) // world_size - n * rank // world_size if n else sys.maxsize


def main() -> None:
    config = parse_args(Config, description=__doc__)
    config.rank, config.world_size = find_rank(config.rank, config.world_size)
    os.environ.pop("RANK", None)  # runtime.fail speaks for rank 0 only, but here every rank has files of its own
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
    check(config, tok)
    manifest = open_manifest(config, out_dir, tok)
    if "next" not in manifest:
        return print(f"{out_dir} is complete: {summary(manifest)}")
    source = find_source(config.source, manifest.get("commit") or config.revision)
    compare(manifest, source.identity(), out_dir)
    files = source.share(config.rank, config.world_size)
    if manifest["next"]["bytes"] != sum(file.bytes for file in files[: manifest["next"]["file"]]):
        raise UserError(f"files that shards of {out_dir} were made of have changed since; remove it, and start again")
    print_plan(config, source, files, manifest, out_dir)
    if config.dry_run:
        return
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with only_one(out_dir / f".lock{config.suffix}"):
            manifest = open_manifest(config, out_dir, tok) | source.identity()  # again: now nobody else changes it
            write_shards(config, source, files, manifest, out_dir, tok)
    except OSError as e:
        reason = "no space left on the disk of" if e.errno in (errno.ENOSPC, errno.EDQUOT) else f"{e.strerror or e}:"
        raise UserError(
            f"{reason} {out_dir}; {complete_shards(config, out_dir)}: mend that, and the same command goes on"
        ) from e
    except (KeyboardInterrupt, Stopped):
        print(f"stopped; {complete_shards(config, out_dir)}, and the same command goes on", file=sys.stderr)
        raise
    print(f"{out_dir}: {summary(manifest)}")
    if len(manifest["shards"]) == 1 and config.world_size == 1:
        tenth = -(-manifest["tokens"] // 10)
        print(f"all of it is the validation split; for one to train on, too: --shard_size {tenth}")


def write_shards(config: Config, source, files: list, manifest: dict, out_dir: Path, tok: Tokenizer) -> None:
    """The pipeline: files -> units -> tokens -> shards. Fills in `manifest`."""
    folder = out_dir / f".downloads{config.suffix}"
    tok.save(out_dir / "tokenizer.json")
    with closing(Workers(config, tok)) as workers, closing(Progress(config, files, manifest)) as progress:
        fetched = Fetched(config, source, files, folder, tok.pattern)
        shards = Shards(config, out_dir, manifest, tok, fetched, progress)
        for unit, tokens, skipped in workers.run(fetched.units(manifest["next"])):
            shards.write(unit, tokens, skipped)
            progress.show(unit, fetched.n_units[unit.file], shards)
            if shards.tokens == config.limit:
                break
        shards.close()
    if not config.keep_downloads:
        shutil.rmtree(folder, ignore_errors=True)


def check(config: Config, tok: Tokenizer) -> None:
    for name, least in dict(shard_size=1, downloads=1, limit_tokens=0, workers=0).items():
        if getattr(config, name) < least:
            raise UserError(f"--{name} must be at least {least}, and is {getattr(config, name)}")
    if Path(config.out_dir).is_file():
        raise UserError(f"--out_dir {config.out_dir} is a file; give a directory")
    if config.source != Config.source and config.out_dir == Config.out_dir:
        raise UserError(f"{config.out_dir} is for FineWeb-Edu; give an --out_dir for the shards of {config.source[0]}")
    if tok.eot_token is None:
        raise UserError(f"{config.tokenizer} has no <|endoftext|> to put before documents; train one with it")


def find_rank(rank: int, world_size: int) -> tuple[int, int]:
    """(rank, world_size) as given, else as torchrun or SLURM say, else (0, 1). Raises UserError."""
    for names in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank < 0 and world_size == 0 and all(name in os.environ for name in names):
            rank, world_size = (int(os.environ[name]) for name in names)
            print(f"rank {rank} of {world_size}, as {' and '.join(names)} say")
    rank, world_size = max(rank, 0), world_size or 1
    if not rank < world_size:
        raise UserError(f"--rank {rank} is not below --world_size {world_size}; ranks count from 0")
    return rank, world_size


@contextmanager
def only_one(path: Path):
    """Two runs into one directory would spoil each other's shards. The lock of a killed run is free again."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(path, timeout=LOCK_SECONDS):
            yield
    except Timeout:
        raise UserError(f"another fineweb.py writes to {path.parent}; wait for it, or give another --out_dir") from None


# ------------------------------------------------------------------------------------------------ what is to be read


class SourceFile(NamedTuple):
    name: str
    bytes: int  # 0 where the hub does not say
    sha256: str | None = None
    path: Path | None = None  # of a local file; None for one that is to be fetched


class Source(NamedTuple):
    files: list[SourceFile]
    repo: str = ""  # of the hub; empty for local files
    commit: str = ""

    def identity(self) -> dict:
        """What must stay the same between a run and the one that goes on with it."""
        names = json.dumps([file.name for file in self.files])
        return dict(commit=self.commit, files=len(self.files), files_sha256=hashlib.sha256(names.encode()).hexdigest())

    def share(self, rank: int, world_size: int) -> list[SourceFile]:
        """The files of one rank: neighbours, so that the shards of all ranks in turn have the order of the source."""
        n = len(self.files)
        if n < world_size:
            raise UserError(f"{n} files cannot be shared by {world_size} ranks; use at most --world_size {n}")
        return self.files[n * rank // world_size : n * (rank + 1) // world_size]


def find_source(source: tuple[str, ...], revision: str) -> Source:
    if len(source) == 1 and on_hub(source[0]):
        return hub_source(source[0], revision)
    paths = [path for pattern in source for path in local_files(pattern)]
    return Source([SourceFile(str(path), path.stat().st_size, None, path) for path in paths])


def on_hub(source: str) -> bool:
    """Is it OWNER/NAME, perhaps with more behind it, and no local file or folder?"""
    name = re.match(r"[\w-][\w.-]*/[\w-][\w.-]*(?=/|$)", source)
    here = os.path.exists(source) or glob.glob(source, recursive=True)
    return name is not None and not here and not name[0].endswith(KINDS)


def local_files(pattern: str) -> list[Path]:
    """The files of a path, a folder (with all below it) or a glob, sorted. Raises UserError."""
    exists = os.path.exists(pattern)
    found = [pattern] if exists else sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    files = [file for path in map(Path, found) for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [file for file in files if file.name.endswith(KINDS) and file.is_file()]
    if not files:
        raise UserError(
            f"--source {pattern}: {'it holds' if exists else 'there is'} no {', '.join(KINDS)} file; "
            "give files, a folder, a quoted glob, or OWNER/NAME of a dataset of the hub"
        )
    return files


def hub_source(source: str, revision: str) -> Source:
    """The files of a dataset of the hub at the commit that `revision` is now, those of its training split if it has
    one, of one kind. Raises UserError."""
    from huggingface_hub import HfApi

    owner, name, *rest = source.strip("/").split("/")
    repo, folder = f"{owner}/{name}", "/".join(rest)
    ask = lambda: HfApi().dataset_info(repo, revision=revision, files_metadata=True, timeout=60)  # noqa: E731
    info = patiently(ask, f"the file list of {repo}", attempts=3)
    found = [s for s in info.siblings or [] if s.rfilename.endswith(KINDS)]
    chosen = [s for s in found if any(fnmatch.fnmatch(s.rfilename, p) for p in (folder or "*", f"{folder}/*"))]
    chosen = [s for s in chosen if "train" in s.rfilename] or chosen
    chosen = next(filter(None, ([s for s in chosen if s.rfilename.endswith(kind)] for kind in KINDS)), [])
    if not chosen:
        folders = ", ".join(sorted({os.path.dirname(s.rfilename) or "." for s in found})[:9]) or "no folder"
        raise UserError(f"{repo} has no data file in {folder or '.'}; it has some in {folders}: add one to --source")
    chosen.sort(key=lambda s: s.rfilename)
    files = [SourceFile(s.rfilename, s.size or 0, getattr(s.lfs, "sha256", None)) for s in chosen]
    return Source(files, repo, info.sha)


def patiently(call: Callable, what: str, attempts: int = 6):
    """`call()`, and again where the hub is busy or a connection fails, after as long as the hub asks for.

    Raises UserError when that is no use.
    """
    from huggingface_hub import constants

    for attempt in range(attempts):
        try:
            return call()
        except Exception as e:
            of_network = isinstance(e, OSError) or type(e).__module__.startswith("httpx")
            if not of_network or getattr(e, "errno", 0) == errno.ENOSPC:
                raise
            response = getattr(e, "response", None)
            status = getattr(response, "status_code", 0)
            reason = f"HTTP {status}" if status else f"{type(e).__name__}: {e}".splitlines()[0]
            if status in (401, 403, 404):
                raise UserError(
                    f"{constants.ENDPOINT} does not give {what} ({reason}); check the name and --revision, log in with "
                    "`hf auth login`, or give local files that exist"
                ) from e
            if attempt == attempts - 1:
                raise UserError(
                    f"cannot get {what} from {constants.ENDPOINT} ({reason}); check the network, set HF_ENDPOINT to a "
                    "mirror, or give local files with --source. Complete shards are kept, and the same command goes on"
                ) from e
            after = response.headers.get("Retry-After", "") if response is not None else ""
            pause = int(after) if after.isdigit() else 2**attempt
            tqdm.write(f"{what}: {reason}; again in {pause} s", file=sys.stderr)
            time.sleep(pause)


def fetch(file: SourceFile, source: Source, folder: Path) -> Path:
    """The local path of a file; one of the hub is downloaded, from where an earlier attempt broke off (hf_hub_download
    would begin again)."""
    if file.path:
        return file.path
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    place = dict(repo_id=source.repo, filename=file.name, repo_type="dataset", revision=source.commit)
    path = folder / file.name
    if isinstance(cached := try_to_load_from_cache(**place), str):
        return Path(cached)
    if path.exists():  # it gets this name once it is whole
        return path
    disable_progress_bars()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")

    def get() -> None:
        with open(part, "ab") as f:
            if file.bytes and f.tell() > file.bytes:
                f.truncate(0)
            expected = dict(resume_size=f.tell(), expected_size=file.bytes or None)
            http_get(hf_hub_url(**place), f, headers=build_hf_headers(), **expected)
        if file.sha256 and sha256(part) != file.sha256:
            part.unlink()
            raise OSError(f"{file.name} arrived damaged")

    patiently(get, file.name)
    part.rename(path)
    return path


# ------------------------------------------------------------------------------------------------------------- units


class Unit(NamedTuple):
    """A part of a file that one worker reads at once; which parts there are follows from the file alone."""

    file: int  # its number among the files
    number: int  # of the unit in the file
    path: str
    start: int  # first row group, or first byte of the text
    end: int | None  # behind the last one; None is the end of the file
    row: int = 0  # where rows > 0: these rows of one row group, which is larger than a unit
    rows: int = 0


def units_of(path: Path, file: int, text_field: str, pattern: str) -> list[Unit]:
    """Cut a file into units of about UNIT_BYTES of text. Raises UserError if it is damaged or has no such field."""
    try:
        if path.suffix == ".parquet":
            parts = parquet_parts(path, text_field)
        elif is_text(path.name):
            parts = text_parts(path, lambda f, at: end_of_chunk(f, at, splitter(pattern).cut))
        else:
            check_keys(path, text_field)
            parts = text_parts(path, end_of_line)
    except (pa.ArrowException, OSError, ValueError) as e:
        raise unreadable(path, e) from e
    return [Unit(file, number, str(path), *part) for number, part in enumerate(parts)]


def unreadable(path: Path | str, e: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {e}; it is damaged or cut short: get it again, or leave it out")


def is_text(name: str) -> bool:
    return name.endswith((".txt", ".txt.gz", ".txt.zst"))


def parquet_parts(path: Path, text_field: str) -> list[tuple]:
    """Small row groups together, (first, behind the last); large ones in parts, (group, group + 1, row, rows)."""
    meta = pq.read_metadata(path)
    texts = [field.name for field in meta.schema.to_arrow_schema() if holds_text(field.type)]
    if text_field not in texts:
        remedy = f"--text_field one of {', '.join(texts)}" if texts else "another --source"
        raise UserError(f"{path} has no column {text_field!r} of text; give {remedy}")
    column = [meta.schema.column(i).path for i in range(len(meta.schema))].index(text_field)
    parts, start, size = [], 0, 0
    for group in range(meta.num_row_groups):
        rows, n_bytes = meta.row_group(group).num_rows, meta.row_group(group).column(column).total_uncompressed_size
        if start < group and size + n_bytes > UNIT_BYTES:
            parts.append((start, group))
            start, size = group, 0
        size += n_bytes
        if n_bytes > 2 * UNIT_BYTES:
            step = -(-rows // (n_bytes // UNIT_BYTES))
            parts += [(group, group + 1, row, step) for row in range(0, rows, step)]
            start, size = group + 1, 0
    return parts + ([(start, meta.num_row_groups)] if start < meta.num_row_groups else [])


def holds_text(column: pa.DataType) -> bool:
    column = column.value_type if pa.types.is_dictionary(column) else column
    return pa.types.is_string(column) or pa.types.is_large_string(column)


def text_parts(path: Path, find_end: Callable[[io.BufferedIOBase, int], int | None]) -> list[tuple]:
    """(first byte, behind the last)"""
    parts, start = [], 0
    with open_text(path) as f:
        while start is not None:
            end = find_end(f, start + UNIT_BYTES)
            parts.append((start, end))
            start = end
    return parts


def end_of_line(f, at: int) -> int | None:
    """Where the line ends that holds the byte before `at`; None at the end of the file."""
    f.seek(at - 1)
    return f.tell() if f.readline().endswith(b"\n") else None


def end_of_chunk(f, at: int, cut: re.Pattern | None) -> int | None:
    """The first place behind `at` where the text can be cut and its chunks, and so its tokens, stay the same.

    `cut` is the pattern of such places; None, where the tokenizer knows none, makes one unit of the whole file.
    """
    f.seek(at)
    window = b""
    while cut and (more := f.read(2**16)):
        window += more
        head = len(window) - len(window.lstrip(bytes(range(0x80, 0xC0))))  # the rest of a character that began before
        text = window[head:].decode(errors="ignore")
        if match := cut.search(text, 1):
            return at + head + len(text[: match.start()].encode())
        at, window = at + max(len(window) - 8, 0), window[-8:]
    return None


def check_keys(path: Path, text_field: str) -> None:
    with open_text(path) as f:
        line = next(filter(bytes.strip, f), b"{}")
    try:
        keys = json.loads(line).keys()
    except (ValueError, AttributeError):
        raise UserError(f"the first line of {path} is no JSON object, and every line has to be one") from None
    if keys and text_field not in keys:
        raise UserError(f"{path} has no {text_field!r} in its first line; give --text_field one of {', '.join(keys)}")


def open_text(path: Path | str) -> io.BufferedIOBase:
    """A text file, or what is in a compressed one, as bytes that can be read and sought forward."""
    compressed = str(path).endswith((".gz", ".zst"))
    return io.BufferedReader(Decompressed(path), 2**20) if compressed else open(path, "rb")


class Decompressed(io.RawIOBase):
    def __init__(self, path: Path | str):
        self.stream, self.at = pa.input_stream(str(path), compression="detect"), 0

    def readable(self) -> bool:
        return True

    seekable = readable

    def readinto(self, buffer) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        target = offset + (self.at if whence == os.SEEK_CUR else 0)
        while self.at < target and (skipped := len(self.stream.read(min(target - self.at, 2**20)))):
            self.at += skipped
        return self.at


class Fetched:
    """The files as they come to this disk, a few ahead of their use, and the units in them."""

    def __init__(self, config: Config, source: Source, files: list[SourceFile], folder: Path, pattern: str):
        self.config, self.source, self.files, self.folder, self.pattern = config, source, files, folder, pattern
        self.n_units: dict[int, int] = {}
        self._connections = threading.Semaphore(config.downloads)

    def units(self, begin: dict) -> Iterator[Unit | None]:
        """Units in their order, from where `begin` says; None while the next file is still on its way."""
        coming: dict[int, Future] = {}
        for i in range(begin["file"], len(self.files)):
            for j in range(i, min(i + self.config.downloads + 1, len(self.files))):
                coming[j] = coming.get(j) or in_thread(self._prepare, j)
            while not coming[i].done():
                yield None
            units = coming.pop(i).result()
            self.n_units[i] = len(units)
            yield from units[begin["unit"] if i == begin["file"] else 0 :]

    def _prepare(self, i: int) -> list[Unit]:
        with self._connections:
            path = fetch(self.files[i], self.source, self.folder)
        return units_of(path, i, self.config.text_field, self.pattern)

    def used(self, n: int) -> None:
        """Delete what was fetched of the first n files, whose tokens are all in complete shards."""
        for file in self.files[:n]:
            if not self.config.keep_downloads and not file.path:
                (self.folder / file.name).unlink(missing_ok=True)


def in_thread(work: Callable, *args) -> Future:
    """The result of `work` in a thread that, unlike one of an executor, does not keep a stopped process alive."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as e:
            future.set_exception(e)

    _thread.start_new_thread(run, ())  # a signal in the middle of Thread.start would leave a traceback on the terminal
    return future


# ----------------------------------------------------------------------------------------------------------- workers

CONTINUED = "continued"


class Worker:
    """Reads and tokenizes units, in a process of its own. A file stays open, since the next unit may be further on."""

    here: "Worker"  # the one of this process

    def __init__(self, memory, n_slots: int, tok: Tokenizer, text_field: str):
        self.slots = np.frombuffer(memory, shard_dtype(len(tok))).reshape(n_slots, -1)
        self.text_field, self.encode, self.blocks = text_field, encoder(tok), splitter(tok.pattern).blocks
        self.eot = np.array([tok.eot_token])
        self.path, self.file = None, None
        self.group, self.row, self.batches = None, 0, None  # how far into a row group that is read in parts

    def fill(self, unit: Unit, slot: int) -> tuple[int, bytes, Counter]:
        """Put the tokens of a unit into a slot: (how many, those for which there is no room, skipped documents)."""
        room, ids, skipped = self.slots[slot], [self.eot[:0]], Counter()
        try:
            for text, reason in self.documents(unit):
                if text is None:
                    skipped[reason] += 1
                    continue
                if reason != CONTINUED:
                    ids.append(self.eot)
                ids += map(self.encode, self.blocks(valid_unicode(text)))
        except (pa.ArrowException, OSError, ValueError) as e:
            raise unreadable(unit.path, e) from None
        tokens = np.concatenate(ids, dtype=room.dtype, casting="unsafe")
        n = min(len(tokens), len(room))
        room[:n] = tokens[:n]
        return n, tokens[n:].tobytes(), skipped

    def documents(self, unit: Unit) -> Iterator[tuple[str | None, str]]:
        """(text, "") of every document, (text, CONTINUED) of the rest of one, (None, reason) of one to be skipped."""
        if unit.path.endswith(".parquet"):
            for text in self._column(unit).to_pylist():
                yield text, "no text"
        elif is_text(unit.path):
            for i, text in enumerate(documents(self._bytes(unit).decode())):
                yield text, CONTINUED if i == 0 and unit.start > 0 else ""
        else:
            for line in self._bytes(unit).split(b"\n"):
                if line and not line.isspace():
                    yield text_of(line, self.text_field)

    def _column(self, unit: Unit) -> pa.Array | pa.ChunkedArray:
        if unit.path != self.path:
            self.path, self.file, self.group = unit.path, open_parquet(unit.path), None
        options = dict(columns=[self.text_field], use_threads=False)
        if not unit.rows:
            return self.file.read_row_groups(list(range(unit.start, unit.end)), **options).column(0)
        if self.group != unit.start or self.row > unit.row:
            self.batches = self.file.iter_batches(unit.rows, row_groups=[unit.start], **options)
            self.group, self.row = unit.start, 0
        for batch in self.batches:
            self.row += len(batch)
            if self.row > unit.row:
                return batch.column(0)
        raise ValueError(f"row group {unit.start} has fewer rows than it says")

    def _bytes(self, unit: Unit) -> bytes:
        if unit.path != self.path or self.file.tell() > unit.start:
            self.path, self.file = unit.path, open_text(unit.path)
        self.file.seek(unit.start)
        return self.file.read(-1 if unit.end is None else unit.end - unit.start)


def open_parquet(path: str) -> pq.ParquetFile:
    """Read it as a stream: by default the compressed bytes of a whole row group are in memory."""
    return pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False)


def text_of(line: bytes, text_field: str) -> tuple[str | None, str]:
    try:
        text = json.loads(line.decode()).get(text_field)
    except (ValueError, AttributeError):
        return None, "broken line"
    return (text, "") if isinstance(text, str) else (None, "no text")


def encoder(tok: Tokenizer) -> Callable[[str], np.ndarray]:
    """text -> ids (n,), through tiktoken where it can hold this vocabulary."""
    try:
        encoding = tok.to_tiktoken()
    except ValueError:
        return lambda text: np.array(tok.encode_ordinary(text), np.uint32)
    return lambda text: encoding.encode_to_numpy(text, disallowed_special=())


def start_worker(*args) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what a Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    pa.set_cpu_count(1)
    Worker.here = Worker(*args)


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def fill(unit: Unit, slot: int) -> tuple[int, bytes, Counter]:
    return Worker.here.fill(unit, slot)


class Workers:
    """Processes that turn units into tokens, in shared memory."""

    def __init__(self, config: Config, tok: Tokenizer):
        self.n = config.workers or max(cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)
        context = multiprocessing.get_context(config.start_method)
        dtype = np.dtype(shard_dtype(len(tok)))
        memory = context.RawArray("B", self.n * SLOTS * SLOT_TOKENS * dtype.itemsize)
        self.slots = np.frombuffer(memory, dtype).reshape(self.n * SLOTS, -1)
        arguments = (memory, len(self.slots), tok, config.text_field)
        self.pool = ProcessPoolExecutor(self.n, context, start_worker, arguments)
        self.pool.submit(int)  # starts processes before there are threads, which a fork would not copy

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def run(self, units: Iterator[Unit | None]) -> Iterator[tuple[Unit, np.ndarray, Counter]]:
        """(unit, tokens, skipped documents) in the order of units; tokens (n,) hold until the next item.

        Raises UserError for a file that cannot be read.
        """
        free, pending, more = list(range(len(self.slots))), deque(), True
        try:
            while more or pending:
                unit = True
                while more and unit and free:
                    if (unit := next(units, END)) is END:
                        more = False
                    elif unit:
                        slot = free.pop()
                        pending.append((unit, slot, self.pool.submit(fill, unit, slot)))
                if not pending:
                    time.sleep(0.02)  # the file is still on its way
                    continue
                unit, slot, future = pending.popleft()
                n, rest, skipped = future.result()
                tokens = self.slots[slot, :n]
                yield unit, np.concatenate([tokens, np.frombuffer(rest, tokens.dtype)]) if rest else tokens, skipped
                free.append(slot)
        except BrokenProcessPool:
            raise UserError(
                f"one of {self.n} worker processes was ended, perhaps for lack of memory; the same command goes on, "
                "and needs less of it with fewer --workers"
            ) from None


END = object()


# ------------------------------------------------------------------------------------------------ shards and manifest


class Shards:
    """The one writer. A shard gets its name when it is complete and on the disk; then the manifest counts it, with the
    place in the source behind it. What came later is written again after an interruption."""

    def __init__(self, config: Config, out_dir: Path, manifest: dict, tok: Tokenizer, fetched: Fetched, progress):
        self.config, self.out_dir, self.manifest = config, out_dir, manifest
        self.fetched, self.progress = fetched, progress
        self.name = shard_name(config, out_dir)
        self.dtype, self.eot = np.dtype(shard_dtype(len(tok))), tok.eot_token
        self.token_bytes = tok.token_bytes()
        self.file, self.filled, self.often = None, 0, np.zeros(len(tok), np.int64)  # often: of each id in this shard
        self.skipped = Counter(manifest["skipped"])
        self.finishing: Future | None = None
        for leftover in out_dir.glob(f".{self.name}_*.tmp"):
            leftover.unlink()
        save_manifest(out_dir, manifest, config.suffix)

    @property
    def tokens(self) -> int:
        return self.manifest["tokens"] + self.filled

    def write(self, unit: Unit, tokens: np.ndarray, skipped: Counter) -> None:
        """Append the tokens of a unit, up to the limit, and complete the shards that they fill."""
        begin, shard_size = self.manifest["next"], self.config.shard_size
        done = begin["skip"] if (unit.file, unit.number) == (begin["file"], begin["unit"]) else 0
        while done < len(tokens) and self.tokens < self.config.limit:
            part = tokens[done:][: min(shard_size - self.filled, self.config.limit - self.tokens)]
            self._append(part)
            done += len(part)
            if self.filled == shard_size:
                n_bytes = sum(f.bytes for f in self.fetched.files[: unit.file])
                self._complete(dict(file=unit.file, bytes=n_bytes, unit=unit.number, skip=done))
        self.skipped += skipped

    def _append(self, part: np.ndarray) -> None:
        if self.file is None:
            number = len(self.manifest["shards"])
            split = "val" if number == 0 and self.config.rank == 0 else "train"
            self.path = self.out_dir / f"{self.name}_{split}_{number:06d}.npy"
            self.file = open(self.path.with_name(f".{self.path.name}.tmp"), "w+b")
            header = npy_header(self.config.shard_size, self.dtype)
            self.file.write(header)
            self.hash = hashlib.sha256(header)
        self.file.write(part.data)
        self.hash.update(part.data)
        self.filled += len(part)
        self.often += np.bincount(part, minlength=len(self.often))

    def _complete(self, following: dict) -> None:
        """Count the shard, and have it finished in the background once the one before is."""
        self._wait()
        self.manifest["shards"].append(dict(file=self.path.name, tokens=self.filled, sha256=self.hash.hexdigest()))
        self.manifest["tokens"] += self.filled
        self.manifest["documents"] += int(self.often[self.eot])
        self.manifest["bytes"] += int(self.often @ self.token_bytes)
        self.manifest |= dict(skipped=dict(sorted(self.skipped.items())), next=following)
        self.finishing = in_thread(self._finish, self.file, self.path, json.loads(json.dumps(self.manifest)))
        self.file, self.filled, self.often[:] = None, 0, 0

    def _finish(self, file, path: Path, manifest: dict) -> None:
        with file:
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).rename(path)
        flush(self.out_dir)
        save_manifest(self.out_dir, manifest, self.config.suffix)
        self.fetched.used(manifest["next"]["file"])
        self.progress.shard(manifest)

    def _wait(self) -> None:
        if self.finishing:
            self.finishing.result()

    def close(self) -> None:
        """Complete the last shard, and the manifest. Raises UserError if there is nothing in them."""
        if self.filled:
            self.file.seek(0)
            self.file.write(npy_header(self.filled, self.dtype))
            self.file.seek(0)
            self.hash = hashlib.file_digest(self.file, "sha256")
            self._complete(self.manifest["next"])
        self._wait()
        if not self.manifest["shards"]:
            raise UserError(
                f"there is no document in {self.manifest['source']}; skipped: {dict(self.skipped) or 'none'}"
            )
        self.manifest |= dict(skipped=dict(sorted(self.skipped.items())))
        del self.manifest["next"]
        save_manifest(self.out_dir, self.manifest, self.config.suffix)


def shard_name(config: Config, out_dir: Path) -> str:
    """What shards are called before _val_ or _train_, and cannot be mistaken for these."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", out_dir.resolve().name.removesuffix("_shards")).strip("-.") or "text"
    return name.replace("edu-fineweb10B", "edufineweb") + config.suffix


def open_manifest(config: Config, out_dir: Path, tok: Tokenizer) -> dict:
    """The manifest of a run that was begun, or a new one. Raises UserError where `out_dir` holds something else."""
    identity = dict(
        source=" ".join(config.source), revision=config.revision, text_field=config.text_field,
        tokenizer=tok.fingerprint, dtype=np.dtype(shard_dtype(len(tok))).name, shard_size=config.shard_size,
        limit_tokens=config.limit_tokens, rank=config.rank, world_size=config.world_size,
    )  # fmt: skip
    if manifest := read_manifest(out_dir, config.suffix):
        compare(manifest, identity, out_dir)
        for path in (out_dir / entry["file"] for entry in manifest["shards"]):
            if not path.exists():
                raise UserError(f"{path} is missing; put it back, or remove {out_dir} and start again")
        return manifest
    begin = dict(file=0, bytes=0, unit=0, skip=0)  # behind what is complete: file, bytes before it, unit, token in it
    if found := list(out_dir.glob(f"{shard_name(config, out_dir)}_*.npy")):
        raise UserError(f"{found[0]} belongs to no manifest.json; give another --out_dir, or remove the shards there")
    return identity | dict(tokens=0, documents=0, bytes=0, skipped={}, shards=[], next=begin)


def compare(manifest: dict, identity: dict, out_dir: Path) -> None:
    for key, value in identity.items():
        if key in manifest and manifest[key] != value:
            raise UserError(
                f"{out_dir} holds shards of a run with {key} {manifest[key]}, and now it is {value}; "
                "give another --out_dir, or remove that one"
            )


def complete_shards(config: Config, out_dir: Path) -> str:
    manifest = read_manifest(out_dir, config.suffix)
    return f"{len(manifest.get('shards', []))} complete shards with {manifest.get('tokens', 0):,} tokens are safe"


# ------------------------------------------------------------------------------------------------ what it tells people


def print_plan(config: Config, source: Source, files: list[SourceFile], manifest: dict, out_dir: Path) -> None:
    """Say what will be read and written, and what that needs. Raises UserError where the disk is too small."""
    rates = [TOKENS_PER_BYTE[next(kind for kind in TOKENS_PER_BYTE if f.name.endswith(kind))] for f in files]
    tokens = min(sum(f.bytes * rate for f, rate in zip(files, rates, strict=True)), config.limit)
    left = max(tokens - manifest["tokens"], 0)
    n_workers = config.workers or cpu_count()
    for_shards = left * np.dtype(manifest["dtype"]).itemsize
    sizes = sorted((f.bytes for f in files if not f.path), reverse=True)
    for_files = sum(sizes if config.keep_downloads else sizes[: config.downloads + 2])
    free = shutil.disk_usage(next(path for path in (out_dir, *out_dir.resolve().parents) if path.exists())).free
    commit = f" at {source.commit[:12]}" if source.commit else ""
    print(f"source  {manifest['source']}{commit}: {len(files)} files, {size(sum(f.bytes for f in files))}")
    print(f"target  {out_dir}: about {tokens:,.0f} tokens, in shards of {config.shard_size:,} {manifest['dtype']}")
    print(f"disk    {size(for_shards)} for shards, {size(for_files)} for files under way; {size(free)} are free")
    print(f"time    about {duration(left / n_workers / TOKENS_PER_SECOND)} with {n_workers} workers and a fast network")
    if manifest["shards"]:
        print(f"resume  behind {len(manifest['shards'])} complete shards, {manifest['tokens']:,} tokens")
    if for_shards + for_files > free:
        raise UserError(
            f"{out_dir} needs about {size(for_shards + for_files)}, and its disk has {size(free)} free; free some, "
            "give a smaller --limit_tokens, or an --out_dir on another disk"
        )


def size(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def duration(s: float) -> str:
    return f"{s:.0f} s" if s < 90 else f"{s / 60:.0f} min" if s < 5400 else f"{s / 3600:.1f} h"


class Progress:
    """A bar for the shard, one for all, and a line for each complete shard."""

    def __init__(self, config: Config, files: list[SourceFile], manifest: dict):
        self.limit, self.before = config.limit, np.cumsum([0] + [f.bytes or 1 for f in files])  # bytes before each file
        self.began, self.first, self.left = time.monotonic(), manifest["tokens"], 0.0
        options = dict(unit="tok", unit_scale=True, disable=None, dynamic_ncols=True)
        self.all = tqdm(desc="all", initial=self.first, **options)
        self.shard_bar = tqdm(desc="shard", total=config.shard_size, leave=False, **options)

    def close(self) -> None:
        self.shard_bar.close()
        self.all.close()

    def show(self, unit: Unit, n_units: int, shards: Shards) -> None:
        begin, end = self.before[unit.file : unit.file + 2]
        part = (begin + (end - begin) * (unit.number + 1) / n_units) / self.before[-1]  # of the source, that is done
        self.rate = (shards.tokens - self.first) / (time.monotonic() - self.began)
        self.left = min(shards.tokens / part, self.limit) - shards.tokens
        self.all.total = shards.tokens + self.left
        n_documents = shards.manifest["documents"] + int(shards.often[shards.eot])
        self.all.set_postfix_str(f"{n_documents:,} documents", refresh=False)
        self.all.update(shards.tokens - self.all.n)
        self.shard_bar.update(shards.filled - self.shard_bar.n)

    def shard(self, manifest: dict) -> None:
        rate = (manifest["tokens"] - self.first) / (time.monotonic() - self.began)
        entry = manifest["shards"][-1]
        tqdm.write(
            f"{entry['file']}: {entry['tokens']:,} tokens; in all {manifest['tokens']:,}, {manifest['documents']:,} "
            f"documents, {rate / 1e6:.1f}M tokens/s, {duration(self.left / rate)} left"
        )


if __name__ == "__main__":
    script(main)
