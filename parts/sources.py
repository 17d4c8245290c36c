"""Documents of the Hugging Face hub or of files, for the scripts that read text: fineweb.py and bpe/train.py.

    source -> files -> units -> documents

- source: files, folders, globs, or OWNER/NAME[/FOLDER or /GLOB] of a dataset on the hub
- file: .parquet, .jsonl or .txt, plain or compressed; those on the hub are downloaded shortly before they are used
- unit: a part of a file with about UNIT_BYTES of text, so that memory does not grow with the size of files
- document: a row, a line, or the text up to two blank lines

What is left out is counted and said, what is ambiguous is refused by name, and nothing is read twice.
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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from parts.cli import UserError, counted
from parts.files import identity, sha256

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
LARGEST_DOCUMENT = 2**27  # bytes; its tokens, and what finds them, need a worker's memory many times over
UNIT_BYTES = 2**22  # large against the cost of handing a unit to a process, small against its memory
SAMPLED = 2**18  # bytes at the beginning of a compressed file, to see how much text it holds
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
    left_out: tuple[tuple[str, str], ...] = ()  # (name of a file that is not read, why)


def find_source(patterns: tuple[str, ...], revision: str = "main") -> Source:
    """The files of local paths, folders and globs, or of a dataset of the hub at `revision`, each of them once.
    Raises UserError."""
    if len(patterns) == 1 and on_hub(patterns[0]):
        return hub_source(patterns[0], revision)
    files = []
    left_out = {}
    names = {}  # identity of a file -> the name under which it is read
    for pattern in patterns:
        readable_here = False
        for path, reason in local_paths(pattern):
            known = names.get(identity(path))
            if reason:
                left_out[str(path)] = reason
            elif known is None:
                names[identity(path)] = path
                stat = path.stat()
                files.append(SourceFile(str(path), stat.st_size, str(stat.st_mtime_ns)))
            elif known != path:
                left_out[str(path)] = f"the same file as {known}"
            readable_here = readable_here or not reason
        if not readable_here:
            raise UserError(
                f"{pattern or 'the empty name'}: no such file, or none whose name ends in {', '.join(KINDS)}; "
                "give files, a folder, a quoted glob, or OWNER/NAME of a dataset of the hub"
            )
    refuse_twins(files)
    return Source(files, left_out=tuple(left_out.items()))


def on_hub(pattern: str) -> bool:
    """True for OWNER/NAME, perhaps with more after it, unless a local file or folder has that name."""
    name = re.match(r"[\w-][\w.-]*/[\w-][\w.-]*(?=/|$)", pattern)
    here = os.path.exists(pattern) or glob.glob(pattern, recursive=True)
    return name is not None and not here and not kind_of(name[0])


def local_paths(pattern: str) -> list[tuple[Path, str]]:
    """(path, why it is not read or "") of all that a path, a folder (all below it) or a glob names, in order.
    Raises UserError for subsets of a dataset."""
    named = [pattern]
    if not os.path.exists(pattern):
        named = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    found = []
    for path in map(Path, named):
        if not path.is_dir():
            found.append((path, unreadable(path)))
            continue
        below = [(file, unreadable(file, hidden=True)) for file in sorted(paths_below(path))]
        if named == [pattern]:  # else a glob has chosen
            names = [file.relative_to(path).as_posix() for file, reason in below if not reason]
            refuse_subsets(str(path), names, subsets_of(card_of(path), names))
        found += below
    return found


def paths_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, in linked folders, too, and the hidden folders, which are not entered."""
    entered = set()
    for here, folders, names in os.walk(folder, onerror=raise_error, followlinks=True):
        entered.add(os.path.realpath(here))
        folders.sort()
        for name in [*folders]:
            place = os.path.join(here, name)
            hidden = name.startswith(".")
            if hidden or os.path.realpath(place) in entered:  # a link can lead back up
                folders.remove(name)
            if hidden:
                yield Path(place)
        yield from (Path(here, name) for name in names)


def raise_error(error: OSError) -> None:
    raise error


def unreadable(path: Path, hidden: bool = False) -> str:
    """Why a file is not read; "" for one that is, which may be hidden if somebody has named it."""
    if hidden and path.name.startswith("."):
        return "hidden"
    if not kind_of(path.name):
        return "of another kind"
    if not path.is_file():
        return "a link that leads nowhere" if path.is_symlink() else "no file"
    return ""


def refuse_twins(files: list[SourceFile]) -> None:
    """Raises UserError for a.jsonl beside a.jsonl.gz: most likely one is the other, unpacked."""
    seen = {}
    for file in files:
        twin = seen.setdefault(file.name.removesuffix(kind_of(file.name)), file)
        if twin != file:
            raise UserError(
                f"{twin.name} and {file.name} may hold the same documents, in two formats; "
                "remove or rename one of them, or give a glob that leaves it out"
            )


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
    listed = [file for file in listed if stays_below(file.name)]
    inside = [file for file in listed if fnmatch(file.name, folder) or fnmatch(file.name, f"{folder}/*")]
    known = [file for file in inside if kind_of(file.name)]
    # all, if no name says so
    to_train = [file for file in known if re.search("(?<![a-z])train", file.name, re.IGNORECASE)] or known
    if not to_train:
        folders = sorted({os.path.dirname(file.name) or "." for file in listed if kind_of(file.name)})
        raise UserError(f"{repo} has no data file in {folder}; name a folder that has some: {', '.join(folders[:9])}")
    kinds = {kind_of(file.name) for file in to_train}
    kind = min(kinds, key=[*KINDS].index)  # each may hold the same documents: the first of KINDS
    files = sorted(file for file in to_train if kind_of(file.name) == kind)
    names = [file.name for file in files]
    if not glob.has_magic("".join(rest)):  # else a glob has chosen
        subsets = subsets_of(info.get("cardData"), names)
        if set().union(*subsets.values()) != set(names):  # the card does not say
            subsets = subsets_by_folder(names)
        refuse_subsets(repo, names, subsets)
    reasons = dict.fromkeys((file.name for file in inside), "of another kind")
    reasons |= dict.fromkeys((file.name for file in {*known} - {*to_train}), "of another split")
    for name in [*names, *filter(re.compile(r"README\.md$|\.").match, reasons)]:  # read, or nobody's data
        reasons.pop(name, None)
    return Source(files, repo, info["sha"], tuple(reasons.items()))


def subsets_of(card: dict, names: list[str]) -> dict[str, set[str]]:
    """{subset: those of the names that are in it}, as the card of a dataset lists them in `configs`."""
    subsets = {}
    for config in (card or {}).get("configs") or []:
        patterns = [re.compile(as_regex(pattern)) for pattern in patterns_of(config.get("data_files"))]
        files = {name for name in names if any(pattern.fullmatch(name) for pattern in patterns)}
        if files:
            subsets[config["config_name"]] = files
    return subsets


def subsets_by_folder(names: list[str]) -> dict[str, set[str]]:
    subsets = {}
    for name in names:
        subsets.setdefault(os.path.dirname(name), set()).add(name)
    return subsets


def refuse_subsets(dataset: str, names: list[str], subsets: dict[str, set[str]]) -> None:
    """Raises UserError for files that are several subsets of a dataset, such as a text raw and in tokens, unless one
    of them has all of these files, as a default may."""
    if len(subsets) < 2 or set(names) in subsets.values():
        return
    folders = subsets_by_folder(names)
    choices = [f"{dataset}/{folder or min(folders[folder])}" for folder in folders]
    if len(folders) == 1:
        choices = [f"{dataset}/{min(files)}" for files in subsets.values()]
    raise UserError(
        f"{dataset} has {len(subsets)} subsets, which may hold the same documents: {', '.join(choices[:9])}; "
        f"give one of them, or '{dataset}/*' if it is to be all"
    )


def card_of(folder: Path) -> dict:
    """What the card of a dataset says that was downloaded to a folder; {} without one."""
    card = folder / "README.md"
    if not card.is_file():
        return {}
    from huggingface_hub.repocard import metadata_load

    with suppress(Exception):  # any text may be in a README.md
        return metadata_load(card) or {}
    return {}


def patterns_of(data_files: object) -> list[str]:
    """The patterns in `data_files` of a card: a text, a list of them, or a list of {split, path}."""
    if isinstance(data_files, str):
        return [data_files]
    if isinstance(data_files, dict):
        return patterns_of(data_files.get("path"))
    return [pattern for item in data_files or [] for pattern in patterns_of(item)]


def as_regex(pattern: str) -> str:
    """A glob of the hub, whose * does not cross a slash and whose ** does."""
    words = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(words.get(part) or re.escape(part) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))


def left_out(source: Source) -> str:
    """What a person should know of the files that are not read; "" if there are none."""
    by_reason = {}
    for name, reason in source.left_out:
        by_reason.setdefault(reason, []).append(name)
    parts = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - 9} more" if len(names) > 9 else ""
        parts.append(f"{counted(len(names), 'file')} ({reason}): {', '.join(names[:9])}{more}")
    return "; ".join(parts)


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
    """About how many bytes of text a file holds: a local one is asked; for others, from their size and kind."""
    kind = kind_of(file.name)
    with suppress(pa.ArrowException, OSError):  # a damaged file is an error when its turn comes
        if kind == ".parquet" and os.path.exists(file.name):
            return parquet_text_size(Path(file.name), text_field)
        if kind.endswith((".gz", ".zst")) and os.path.exists(file.name):
            of_lines = KINDS[".txt" if kind.startswith(".txt") else ".jsonl"]
            return file.bytes * expansion(file.name) * of_lines
    return file.bytes * KINDS[kind]


def parquet_text_size(path: Path, text_field: str) -> int:
    with pq.ParquetFile(path, **AS_STREAM) as file:
        names = [file.schema.column(i).path for i in range(len(file.schema))]
        if text_field not in names:
            return 0
        return sum(group_text_size(file, path, text_field, number) for number in range(file.num_row_groups))


def group_text_size(file: pq.ParquetFile, path: Path, text_field: str, group: int) -> int:
    """How many bytes of text the rows of a group have. The file says how many it stores, which is as much unless they
    are numbers of texts in a dictionary: then a text may be stored once and occur in every row."""
    names = [file.schema.column(i).path for i in range(len(file.schema))]
    chunk = file.metadata.row_group(group).column(names.index(text_field))
    if numbered(chunk):
        return sum(int(lengths_of(rows).sum()) for rows in numbered_rows(file, path, text_field, group))
    return chunk.total_uncompressed_size


def expansion(name: str) -> float:
    """How many bytes a byte of a compressed file becomes, from its beginning."""
    n_bytes = 0
    codec = "gzip" if name.endswith(".gz") else "zstd"
    with open(name, "rb") as file, pa.CompressedInputStream(pa.PythonFile(file), codec) as stream:
        while file.tell() < SAMPLED and n_bytes < 256 * SAMPLED and (block := stream.read(SAMPLED)):
            n_bytes += len(block)
        return n_bytes / max(file.tell(), 1)


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
    line: int = 1  # number of its first line


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
        check_text_column(file, path, text_field)
        for number in range(file.num_row_groups):
            n_bytes = group_text_size(file, path, text_field, number)
            if n_bytes <= 2 * UNIT_BYTES:
                yield Unit(path, number)
                continue
            n_rows = max(file.metadata.row_group(number).num_rows * UNIT_BYTES // n_bytes, 1)
            for rows in numbered_rows(file, path, text_field, number, n_rows):
                yield from row_units(path, rows)


def numbered(chunk: pq.ColumnChunkMetaData) -> bool:
    """Whether all rows of a column are numbers of texts in a dictionary."""
    if not any("DICTIONARY" in encoding for encoding in chunk.encodings):
        return False
    of_dictionary = chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset)
    # a number takes 4 bytes at most; what is larger holds texts for which the dictionary had no room
    return not of_dictionary or chunk.total_compressed_size - of_dictionary <= 5 * chunk.num_values + 100


def numbered_rows(
    file: pq.ParquetFile, path: Path, text_field: str, group: int, n_rows: int = 2**16
) -> Iterator[pa.DictionaryArray]:
    """The rows of a group in batches, as numbers of texts in a dictionary, so that one that repeats is in memory once;
    `file` is the same file, whose metadata are read once."""
    with pq.ParquetFile(path, metadata=file.metadata, read_dictionary=[text_field], **AS_STREAM) as opened:
        for batch in opened.iter_batches(n_rows, row_groups=[group], columns=[text_field], use_threads=False):
            yield batch.column(0)


def lengths_of(rows: pa.Array) -> np.ndarray:
    """(n,) int64: the bytes of each row, 0 for a null."""
    if isinstance(rows, pa.DictionaryArray):
        of_texts = lengths_of(rows.dictionary)
        return np.append(of_texts, 0)[rows.indices.fill_null(len(of_texts)).to_numpy(zero_copy_only=False)]  # null: 0
    return pc.binary_length(rows).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def row_units(path: Path, rows: pa.Array) -> Iterator[Unit]:
    """Units of whole rows, of up to 2 * UNIT_BYTES of text unless a row has more. Raises UserError for a larger row
    than LARGEST_DOCUMENT."""
    lengths = lengths_of(rows)
    refuse_larger(path, int(lengths.max(initial=0)))
    ends = lengths.cumsum()
    start = 0
    while start < len(rows):
        before = ends[start] - lengths[start]
        end = max(int(np.searchsorted(ends, before + 2 * UNIT_BYTES, "right")), start + 1)
        yield Unit(path, rows[start:end].dictionary_decode().to_pylist())
        start = end


def refuse_larger(path: Path, n_bytes: int) -> None:
    """Raises UserError for a document of more than LARGEST_DOCUMENT."""
    if n_bytes > LARGEST_DOCUMENT:
        raise UserError(
            f"{path} has a document of {n_bytes / 2**20:,.0f} MB or more, and the most is {LARGEST_DOCUMENT >> 20} MB; "
            "split it, or leave the file out"
        )


def check_text_column(file: pq.ParquetFile, path: Path, text_field: str) -> None:
    """Raises UserError if there is no column `text_field` of text."""
    is_text = re.compile(r"(dictionary<values=)?(large_)?string").match
    texts = [field.name for field in file.schema_arrow if is_text(str(field.type))]
    if text_field not in texts:
        remedy = f"--text_field one of {', '.join(texts)}" if texts else "another file"
        raise UserError(f"{path} has no column {text_field!r} of text; give {remedy}")


def stream_units(path: Path, place: Callable[[bytes], int]) -> Iterator[Unit]:
    """Parts of a text, plain or compressed, cut at the first place in each block; `place` finds it, or returns 0.
    Raises UserError if there is none for more than LARGEST_DOCUMENT."""
    with pa.input_stream(path) as stream:  # its name says how it is compressed
        unit = Unit(path, b"")
        blocks = []  # of the unit, joined once
        size = 0
        while block := stream.read(UNIT_BYTES):
            end = place(block) if size else 0  # never in the first block, whose unit would be tiny
            if end:
                unit = unit._replace(content=b"".join([*blocks, block[:end]]))
                yield unit
                unit = Unit(path, b"", first=False, line=unit.line + unit.content.count(b"\n"))
                blocks = []
                size = 0
            blocks.append(block[end:])
            size += len(block) - end
            refuse_larger(path, size - 2 * UNIT_BYTES)  # these may be other documents
        if size:
            yield unit._replace(content=b"".join(blocks))


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
            yield from documents_of_lines(unit, text_field)


def documents_of_lines(unit: Unit, text_field: str) -> Iterator[tuple[str | None, str]]:
    """Those of a .jsonl. Raises UserError for lines that are another kind of file, which would be skipped in silence:
    an array, objects of several lines, objects without this key, or most of anything else."""
    content = unit.content.lstrip(b"\xef\xbb\xbf \t\r\n")
    one_a_line = "write one object a line, with no brackets or commas around it"
    if unit.first and content.startswith(b"["):
        raise UserError(f"{unit.path} begins with [, so it is one JSON array and not one object a line; {one_a_line}")
    documents = 0
    broken = []  # numbers of lines
    keys = []  # of the objects before the first document
    lines = unit.content.split(b"\n")  # not splitlines: a JSON string may hold U+2028
    for number, line in enumerate(lines, unit.line):
        if not line.strip():
            continue
        text, reason = text_of(line, text_field)
        documents += text is not None
        if reason == "no text" and not documents:
            keys += json.loads(line.decode("utf-8-sig"))
        if reason == "broken line":
            broken.append(number)
            if line.rstrip().endswith(b",") and text_of(line.rstrip()[:-1], text_field)[1] != reason:
                raise UserError(f"{unit.path} has a comma after the object in line {number}; {one_a_line}")
        yield text, reason
    if len(broken) > documents + (not unit.first):  # the last unit of a file that was cut short may be one broken line
        raise UserError(
            f"{unit.path} has {counted(len(broken), 'broken line')} and {counted(documents, 'document')} from line "
            f"{unit.line} on, the first broken one is line {broken[0]}; {one_a_line}, or leave the file out"
        )
    if unit.first and keys and not documents and text_field not in keys:
        found = ", ".join([*dict.fromkeys(keys)][:9])
        raise UserError(f"{unit.path} has no key {text_field!r}; give --text_field one of {found}, or another file")


def decode(content: bytes, first: bool = True) -> str:
    """The text of UTF-8, without the byte order mark of Windows, which only the first part of a file may have.

    Raises UnicodeDecodeError, for UTF-16 too: without a mark, English in it is valid UTF-8, every other byte a 0.
    """
    if first and content.startswith(b"version https://git-lfs.github.com/spec/"):
        raise ValueError("it is a pointer of Git LFS, and not the file itself")
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
        text = parse(line.decode("utf-8-sig")).get(text_field)
    except (ValueError, AttributeError, RecursionError):
        return None, "broken line"
    if not isinstance(text, str):
        return None, "no text"
    return text, ""


def parse(text: str):
    """json.loads, which takes the last of two values of a key. Raises ValueError for these, too."""
    return json.loads(text, object_pairs_hook=unique)


def unique(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {max(keys, key=keys.count)!r} twice")
    return found


def texts_of(unit: Unit, text_field: str) -> list[str | None]:
    """The rows of a unit of a .parquet, read now if it names a row group."""
    if isinstance(unit.content, list):
        return unit.content
    file = open_parquet(unit.path, text_field, unit.path.stat().st_mtime_ns)
    rows = file.read_row_group(unit.content, columns=[text_field], use_threads=False).column(0).combine_chunks()
    refuse_larger(unit.path, int(lengths_of(rows).sum()))  # if some rows are numbers, and others are not
    return rows.dictionary_decode().to_pylist()


@lru_cache(maxsize=1)
def open_parquet(path: Path, text_field: str, changed: int) -> pq.ParquetFile:
    """Keep a file open for its next units: reading its list of 700 row groups takes longer than reading one of them."""
    return pq.ParquetFile(path, read_dictionary=[text_field], **AS_STREAM)


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
            rows = parse(text)
        elif path.endswith(".json") and (keys := keys_of(text)):
            raise UserError(f"{path} is one object ({', '.join(keys[:5])}) and not a list of rows; save the list alone")
        else:  # a line of .jsonl ends at \n alone: a JSON string may hold the other line separators of Unicode
            for number, line in enumerate(text.split("\n"), start=1):  # noqa: B007 - the error below names the line
                if line := line.strip().removeprefix("\ufeff"):  # each line may have a mark, as from files joined
                    rows.append(parse(line))
    except (ValueError, RecursionError) as e:
        number += getattr(e, "lineno", 1) - 1
        raise UserError(f"{path} is not JSON in line {number}: {getattr(e, 'msg', e)}; correct it there") from None
    if not rows:
        raise UserError(f"{path} has no rows; {remedy}")
    return rows


def keys_of(text: str) -> list[str]:
    """The keys of a text that is one JSON object; [] for any other text, such as objects in lines."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [*content] if isinstance(content, dict) else []


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
