"""Documents of the Hugging Face hub or of files, for the scripts that read text: fineweb.py and bpe/train.py.

    source -> files -> units -> documents

- source: files, folders, globs, or OWNER/NAME[/FOLDER or /GLOB] of a dataset on the hub
- file: .parquet, .jsonl or .txt, plain or compressed; those on the hub are downloaded shortly before they are used
- unit: a part of a file with about UNIT_BYTES of text, so that memory does not grow with the size of files
- document: a row, a line, or the text up to two blank lines

This file knows nothing of tokens, shards, models or torch.
"""

import errno
import glob
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import lru_cache, partial
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq

from parts.cli import UserError
from parts.files import sha256

# The kinds of files, and how many bytes of English text a byte of each holds. A dataset of the hub often comes in
# several kinds: the first of them here is taken.
KINDS = {
    ".parquet": 1.55,  # of FineWeb-Edu's sample-10BT, 28 GB hold 10 billion of GPT-2's tokens
    ".jsonl": 0.95,
    ".jsonl.gz": 2.6,
    ".jsonl.zst": 3.0,
    ".json.gz": 2.6,
    ".txt": 1.0,
    ".txt.gz": 2.6,
    ".txt.zst": 3.0,
}
UNIT_BYTES = 2**22  # large against the cost of handing a unit to a process, small against its memory
AS_STREAM = dict(buffer_size=2**20, pre_buffer=False)  # by default the bytes of a whole row group are in memory

# Two blank lines, which end with \n or \r\n. Possessive, or a run of millions would be remembered for backtracking.
BLANK_LINES = re.compile(r"\n\r?\n(?:\r?\n)++")
AFTER_BLANK_LINES = re.compile(r"(?:(?<=\n\n\n)|(?<=\n\r\n\r\n))(?=[^\r\n])")


def kind_of(name: str) -> str:
    """`.jsonl.gz` of `a/b.jsonl.gz`; empty for a file of no kind that can be read."""
    for kind in KINDS:
        if name.endswith(kind):
            return kind
    return ""


# ------------------------------------------------------------------------------------------------ source -> files


class SourceFile(NamedTuple):
    name: str  # a local path, or the path in the dataset
    bytes: int
    version: str  # a local file: mtime in ns; a file of the hub: the hash of its content


class Source(NamedTuple):
    files: list[SourceFile]
    repo: str = ""  # OWNER/NAME on the hub; empty for local files
    commit: str = ""


def find_source(patterns: tuple[str, ...], revision: str = "main") -> Source:
    """The files of local paths, folders and globs, or of a dataset of the hub at `revision`. Raises UserError."""
    if len(patterns) == 1 and on_hub(patterns[0]):
        return hub_source(patterns[0], revision)
    files = []
    for pattern in patterns:
        for path in local_paths(pattern):
            stat = path.stat()
            files.append(SourceFile(str(path), stat.st_size, str(stat.st_mtime_ns)))
    return Source(files)


def on_hub(pattern: str) -> bool:
    """True for OWNER/NAME, perhaps with more after it, unless a local file or folder has that name."""
    name = re.match(r"[\w-][\w.-]*/[\w-][\w.-]*(?=/|$)", pattern)
    here = os.path.exists(pattern) or glob.glob(pattern, recursive=True)
    return name is not None and not here and not kind_of(name[0])


def local_paths(pattern: str) -> list[Path]:
    """The files of a path, a folder (with all below it) or a glob, sorted. Raises UserError."""
    named = [pattern]
    if not os.path.exists(pattern):
        named = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    found = []
    for path in map(Path, named):
        if path.is_dir():
            found += sorted(path.rglob("*"))
        else:
            found.append(path)
    files = [path for path in found if path.is_file() and kind_of(path.name)]
    if not files:
        raise UserError(
            f"{pattern or 'the empty name'}: no such file, or none whose name ends in {', '.join(KINDS)}; "
            "give files, a folder, a quoted glob, or OWNER/NAME of a dataset of the hub"
        )
    return files


def hub_source(name: str, revision: str) -> Source:
    """The files of a dataset of the hub, of one kind, of its training split if it has one. Raises UserError."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    owner, dataset, *rest = name.strip("/").split("/")
    repo = f"{owner}/{dataset}"
    folder = "/".join(rest) or "*"
    with hub_errors(f"the list of files of {repo}"):  # as HfApi().dataset_info, which does not retry if the hub is busy
        url = f"{constants.ENDPOINT}/api/datasets/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        answer = http_backoff("GET", url, headers=build_hf_headers(), timeout=60, max_retries=2)
        hf_raise_for_status(answer)
        info = answer.json()
        listed = list(map(hub_file, info["siblings"]))
    known = [file for file in listed if kind_of(file.name) and stays_below(file.name)]
    files = [file for file in known if fnmatch(file.name, folder) or fnmatch(file.name, f"{folder}/*")]
    files = [file for file in files if re.search("(?<![a-z])train", file.name)] or files  # all, if no name says train
    if not files:
        folders = sorted({os.path.dirname(file.name) or "." for file in known})
        raise UserError(f"{repo} has no data file in {folder}; name a folder that has some: {', '.join(folders[:9])}")
    kinds = {kind_of(file.name) for file in files}
    kind = min(kinds, key=[*KINDS].index)  # each may hold the same documents: the first of KINDS
    files = sorted(file for file in files if kind_of(file.name) == kind)
    return Source(files, repo, info["sha"])


def stays_below(name: str) -> bool:
    """False for a path that leads out of the folder of downloads."""
    parts = Path(name).parts
    return ".." not in parts and "/" not in parts


def hub_file(entry: dict) -> SourceFile:
    """From an entry of the hub's list. Small files have the hash of git, large ones (LFS) that of their content."""
    lfs = entry.get("lfs") or {}
    return SourceFile(entry["rfilename"], entry["size"], lfs.get("sha256", entry["blobId"]))


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn any error of the hub or the network into a UserError, but not that of a full disk.

    The classes of these errors have changed with the versions of huggingface_hub, so all are caught. By then it has
    retried: it waits as long as Retry-After says, and resumes broken connections.
    """
    from huggingface_hub.constants import ENDPOINT

    try:
        yield
    except Exception as e:
        if getattr(e, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise UserError(
            f"cannot get {what} from {ENDPOINT} ({reason}); check name and network, log in with `hf auth login`, "
            "set HF_ENDPOINT to a mirror, or give local files"
        ) from e


def text_size(file: SourceFile, text_field: str) -> float:
    """About how many bytes of text a file holds: a local .parquet says it; for others, from their size and kind."""
    if kind_of(file.name) == ".parquet" and os.path.exists(file.name):
        with suppress(pa.ArrowException, OSError):  # a damaged file is an error when its turn comes
            metadata = pq.read_metadata(file.name)
            size = 0
            for group in map(metadata.row_group, range(metadata.num_row_groups)):
                for column in map(group.column, range(group.num_columns)):
                    if column.path_in_schema == text_field:
                        size += column.total_uncompressed_size
            return size
    return file.bytes * KINDS[kind_of(file.name)]


# ------------------------------------------------------------------------------------------------ files on this disk


def arriving(source: Source, folder: Path, first: int = 0, ahead: int = 0) -> Iterator[Path]:
    """The files from number `first` on, each as soon as it is on this disk. Raises UserError.

    Files of the hub are downloaded to `folder`: the one that is asked for, and meanwhile the `ahead` that follow.
    """
    files = source.files[first:]
    if not source.repo:
        for file in files:
            yield Path(file.name)
        return
    pool = ThreadPool(ahead + 1)  # daemon threads: a script that is stopped does not wait for them
    coming = deque()
    for file in files:
        coming.append(pool.apply_async(download, (source, file, folder)))
        if len(coming) > ahead:
            yield coming.popleft().get()
    for arrival in coming:
        yield arrival.get()


def download(source: Source, file: SourceFile, folder: Path) -> Path:
    """The path on this disk of a file of the hub.

    huggingface_hub does the work, but not by its `hf_hub_download`, which in 2.4.0 starts over after a kill, leaves the
    partial file, and accepts content with a wrong hash. Here a `.part` file is resumed, and the hash compared.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    path = folder / file.name
    part = path.with_name(f"{path.name}.{file.version[:8]}.part")  # of this content and no other
    checksum = file.version if len(file.version) == 64 else ""  # small files have a hash of another kind
    if path.is_file() and checksum and sha256(path) == checksum:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    disable_progress_bars()  # they would garble ours
    url = hf_hub_url(source.repo, file.name, repo_type="dataset", revision=source.commit)
    with hub_errors(file.name):
        with open(part, "ab") as f:
            http_get(url, f, headers=build_hf_headers(), resume_size=f.tell(), expected_size=file.bytes)
        if checksum and sha256(part) != checksum:
            part.unlink()
            raise OSError("it arrived damaged: its hash is not the hub's")
    part.replace(path)
    return path


def discard(source: Source, folder: Path, n: int) -> None:
    """Delete what was downloaded of the first n files."""
    if source.repo:
        for file in source.files[:n]:
            (folder / file.name).unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ files -> units


class Unit(NamedTuple):
    """A part of a file: what a worker process turns into tokens at once."""

    path: Path
    content: int | list[str | None] | bytes  # number of a row group to read, its rows, or whole lines or a text
    first: bool = True  # of its file
    continued: bool = False  # its first document began in the unit before


def units_of(path: Path, text_field: str, cut: re.Pattern | None = None) -> Iterator[Unit]:
    """The units of a file, the same ones every time.

    `cut` matches where a document in a .txt may be cut without harm; None cuts it between documents only.
    Raises UserError if the file is damaged or has no such field.
    """
    with readable(path):
        if kind_of(path.name) == ".parquet":
            yield from parquet_units(path, text_field)
        elif is_txt(path):
            for unit in stream_units(path, partial(end_of_match, pattern=cut or AFTER_BLANK_LINES)):
                yield unit._replace(continued=cut is not None and not unit.first)
        else:
            yield from stream_units(path, lambda block: block.find(b"\n") + 1)


def is_txt(path: Path) -> bool:
    return kind_of(path.name).startswith(".txt")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn any error in reading a file into a UserError."""
    try:
        yield
    except UnicodeDecodeError as e:
        raise UserError(
            f"{path} is not UTF-8 at {e.object[: e.start + 4][-30:]!r}; save it as UTF-8, or leave it out"
        ) from e
    except (pa.ArrowException, OSError, ValueError, EOFError) as e:
        raise UserError(
            f"cannot read {path}: {e}; it is damaged, cut short or of another kind: get it again, or leave it out"
        ) from e


def parquet_units(path: Path, text_field: str) -> Iterator[Unit]:
    """One unit per row group, for the workers to read. A large group is read here, in parts: a group can only be read
    from its first row on, so every worker would read all of it."""
    with pq.ParquetFile(path, **AS_STREAM) as file:
        column = text_column(file, path, text_field)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            n_bytes = group.column(column).total_uncompressed_size
            if n_bytes <= 2 * UNIT_BYTES:
                yield Unit(path, number)
                continue
            rows = max(group.num_rows * UNIT_BYTES // n_bytes, 1)
            for batch in file.iter_batches(rows, row_groups=[number], columns=[text_field], use_threads=False):
                yield Unit(path, batch.column(0).to_pylist())


def text_column(file: pq.ParquetFile, path: Path, text_field: str) -> int:
    """The number of the column `text_field`. Raises UserError if there is none with text."""
    is_text = re.compile(r"(dictionary<values=)?(large_)?string").match
    texts = [field.name for field in file.schema_arrow if is_text(str(field.type))]
    if text_field not in texts:
        remedy = f"--text_field one of {', '.join(texts)}" if texts else "another file"
        raise UserError(f"{path} has no column {text_field!r} of text; give {remedy}")
    columns = map(file.schema.column, range(len(file.schema)))
    return [column.path for column in columns].index(text_field)


def stream_units(path: Path, place: Callable[[bytes], int]) -> Iterator[Unit]:
    """Parts of a text, plain or compressed, cut at the first place in each block; `place` finds it, or returns 0."""
    with pa.input_stream(path) as stream:  # its name says how it is compressed
        first = True
        unit = b""
        while block := stream.read(UNIT_BYTES):
            end = place(block) if unit else 0  # never in the first block, whose unit would be tiny
            if end:
                unit += block[:end]
                yield Unit(path, unit, first)
                first = False
                unit = b""
            unit += block[end:]
        if unit:
            yield Unit(path, unit, first)


def end_of_match(block: bytes, pattern: re.Pattern) -> int:
    """Where the first match ends, in bytes; 0 if there is none."""
    text = block.decode("utf-8", "surrogateescape")  # the first 3 bytes may end a character of the previous block
    match = pattern.search(text, 4)
    if not match:
        return 0
    return len(text[: match.end()].encode("utf-8", "surrogateescape"))


# ------------------------------------------------------------------------------------------------ units -> documents


def documents_of(unit: Unit, text_field: str) -> Iterator[tuple[str | None, str]]:
    """(text, "") of every document, and (None, reason) of one to be skipped. Raises UserError for a damaged file."""
    with readable(unit.path):
        if not isinstance(unit.content, bytes):
            for text in texts_of(unit, text_field):
                yield text, "no text" if text is None else ""
        elif is_txt(unit.path):
            for text in documents(decode(unit.content, unit.first)):
                yield text, ""
        else:
            for line in unit.content.split(b"\n"):  # not splitlines: a JSON string may hold U+2028
                if line.strip():
                    yield text_of(line, text_field)


def decode(content: bytes, first: bool = True) -> str:
    """The text of UTF-8, without the byte order mark of Windows, which only the first part of a file may have.

    Raises UnicodeDecodeError, for UTF-16 too: without a mark, English in it is valid UTF-8, every other byte a 0.
    """
    start = content[:1000]
    if start.count(0) > len(start) // 10:
        raise UnicodeDecodeError("utf-8", content, content.index(0), len(content), "it may be UTF-16")
    return content.decode("utf-8-sig" if first else "utf-8")


def documents(text: str) -> list[str]:
    """The pieces of a text that two or more blank lines separate; with those lines, so that they join to the text."""
    ends = [match.end() for match in BLANK_LINES.finditer(text)]
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)]) if start < end]


def text_of(line: bytes, text_field: str) -> tuple[str | None, str]:
    """(text, "") of a line of a .jsonl, or (None, reason)."""
    try:
        text = json.loads(line.decode("utf-8-sig")).get(text_field)
    except (ValueError, AttributeError, RecursionError):
        return None, "broken line"
    if not isinstance(text, str):
        return None, "no text"
    return text, ""


def texts_of(unit: Unit, text_field: str) -> list[str | None]:
    """The rows of a unit of a .parquet, read now if it names a row group."""
    if isinstance(unit.content, list):
        return unit.content
    file = open_parquet(unit.path, unit.path.stat().st_mtime_ns)
    rows = file.read_row_group(unit.content, columns=[text_field], use_threads=False)
    return rows.column(0).to_pylist()


@lru_cache(maxsize=1)
def open_parquet(path: Path, changed: int) -> pq.ParquetFile:
    """Keep a file open for its next units: reading its list of 700 row groups takes longer than reading one of them."""
    return pq.ParquetFile(path, **AS_STREAM)


# ---------------------------------------------------------------------------------------- rows of a small dataset


def file_rows(path: str, option: str = "--data") -> list:
    """The rows of a .json file, which holds a list, or of a .jsonl file, one per line; at least one.

    Raises UserError, which names the line that is not JSON; `option` is the flag that takes the file.
    """
    remedy = f"{option} takes a .json or .jsonl file of rows"
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (ValueError, OSError) as e:  # ValueError: not UTF-8
        raise UserError(f"{path} cannot be read as text: {e}; {remedy}") from None
    rows = []
    number = 1  # of the line
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:  # a line of .jsonl ends at \n alone: a JSON string may hold the other line separators of Unicode
            for number, line in enumerate(text.split("\n"), start=1):  # noqa: B007 - the error below names the line
                if line.strip():
                    rows.append(json.loads(line))
    except (ValueError, RecursionError) as e:
        number += getattr(e, "lineno", 1) - 1
        raise UserError(f"{path} is not JSON in line {number}: {getattr(e, 'msg', e)}; correct it there") from None
    if not rows:
        raise UserError(f"{path} has no rows; {remedy}")
    return rows


def hub_rows(repo: str, split: str, option: str = "--data") -> list[dict]:
    """All rows of a split of a dataset on the hub. Raises UserError, which names the option that takes a local file.

    `datasets` does the work: it keeps a copy in its cache, retries when the network fails, and follows HF_ENDPOINT.
    """
    import datasets  # a slow import (0.6 s), which --help and local files do not need

    try:
        return datasets.load_dataset(repo, split=split).to_list()
    except Exception as e:  # of the network, the hub, the library or the data: each has its own classes
        raise UserError(
            f"cannot load the split {split} of {repo} from the hub: {e}; "
            f"check the network, set HF_ENDPOINT to a mirror, or give a local file with {option}"
        ) from e
