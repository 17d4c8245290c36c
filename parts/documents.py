"""What is in a file of text: documents for fineweb.py and bpe/train.py, and the rows of a small dataset.

    file -> units -> documents

- file: .parquet, .jsonl or .txt, plain or compressed
- unit: a part of a file with about UNIT_BYTES of text, so that memory does not grow with the size of files
- document: a row, a line, or the text up to two blank lines

What is left out is counted and said, and what is ambiguous is refused by name.
This file knows nothing of tokens, shards, models or torch.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from parts.cli import UserError, counted

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


# ------------------------------------------------------------------------------------------------ how much text it is


def text_size(name: str, n_bytes: int, text_field: str) -> float:
    """About how many bytes of text a file holds: a local one is asked; for others, from their `n_bytes` and kind."""
    kind = kind_of(name)
    # a file that is damaged or has no such column is an error when its turn comes
    with suppress(pa.ArrowException, OSError, ValueError):
        if kind == ".parquet" and os.path.exists(name):
            with pq.ParquetFile(name, **AS_STREAM) as file:
                groups = range(file.num_row_groups)
                return sum(group_text_size(file, Path(name), text_field, number) for number in groups)
        if kind.endswith((".gz", ".zst")) and os.path.exists(name):
            of_lines = KINDS[".txt" if kind.startswith(".txt") else ".jsonl"]
            return n_bytes * expansion(name) * of_lines
    return n_bytes * KINDS[kind]


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
