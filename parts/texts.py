"""Text to train on: rows of files, the documents in them, and all rows of a small dataset.

    files (parts/sources.py finds them) -> rows, by the reader of each format -> documents

A reader yields the rows of one file and looks at nothing in them. A place in the stream is a file and a row, from which
another process continues: it reads the file again up to there, which costs little beside encoding.

In a .txt two blank lines, or <|endoftext|> on a line of its own, end a document; its line ends become \n.
This file knows nothing of tokens, shards, models or torch.
"""

import csv
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BufferedReader, StringIO, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from parts.cli import Stopped, UserError, counted
from parts.sources import (
    COMPRESSED,
    arriving,
    files_below,
    find_files,
    in_hub,
    kind_of,
    left_out,
    once,
    readable,
    unreadable,
)

BATCH = 64  # documents that are read, encoded and written together: enough to keep the main thread idle
LONG = 100_000  # characters: a longer .txt most likely holds several documents
ENDOFTEXT = "<|endoftext|>"
COMPRESSION = 3  # bytes of text in a byte of a compressed file, about
BOM = b"\xef\xbb\xbf"  # Windows' mark of UTF-8; each line has one where files were joined
START = dict(file=0, row=0)  # the place where a stream begins
# UTF-8, too, and yet no text: UTF-16 without a mark, a page that asks to log in, a file that Git LFS has not fetched
NO_TEXT = re.compile(r".{0,999}\0|\s*<(!doctype )?html|version https://git-lfs", re.IGNORECASE | re.DOTALL)


# ----------------------------------------------------------------------------------------------------- files -> rows


class Broken(str):
    """A row that cannot be read, while the rows after it can: the reason."""


def rows_in(path: str, column: str = "") -> Iterator:
    """Yield all rows of a file, with this column alone where others cost time. Raises UserError with file and row."""
    number = 0
    try:
        with opened(path) as file:
            for number, row in enumerate(READERS[kind_of(path) or "json"](file, column), start=1):
                yield row
    except (UserError, Stopped):
        raise
    except Exception as e:
        raise unreadable(path, e, number + 1) from e


def opened(path: str):
    """Open a file of this disk or the hub for reading bytes, decompressed by its name."""
    import fsspec
    import pyarrow as pa
    from fsspec.compression import register_compression

    def zstd(file, **_):
        return BufferedReader(pa.CompressedInputStream(pa.PythonFile(file), "zstd"))

    register_compression("zstd", zstd, ["zst", "zstd"], force=True)
    return fsspec.open(path, "rb", compression="infer")


def parquet_rows(file: BinaryIO, column: str) -> Iterator[dict]:
    import pyarrow.parquet as pq

    if not file.read(1):  # an empty file has no rows
        return
    with pq.ParquetFile(file) as content:
        for batch in content.iter_batches(BATCH, columns=[column] if column else None, use_threads=False):
            yield from batch.to_pylist()


def arrow_rows(file: BinaryIO, column: str) -> Iterator[dict]:
    """Read either form of Arrow's files, that of streams and that of random access."""
    import pyarrow as pa

    magic = file.read(6)
    if not magic:  # an empty file has no rows
        return
    if magic == b"ARROW1":
        content = pa.ipc.open_file(file)
        batches = map(content.get_batch, range(content.num_record_batches))
    else:
        file.seek(0)
        batches = pa.ipc.open_stream(file)
    for batch in batches:
        if column:
            batch = batch.select([name for name in batch.schema.names if name == column])
        yield from batch.to_pylist()


def json_rows(file: BinaryIO, column: str) -> Iterator:
    """Read an array, or a row from each line. A line that is not JSON is Broken, unless it is the first one."""
    first = next((line for line in file if line.removeprefix(BOM).strip()), b"")
    if first.removeprefix(BOM).lstrip().startswith(b"["):
        yield from parse(first + file.read())
        return
    read = 0
    for line in chain([first], file):  # they end at \n alone: a string may hold Unicode's other ends of lines
        if line.removeprefix(BOM).strip():
            try:
                row = parse(line)
            except (ValueError, RecursionError):
                if not read:
                    raise
                row = Broken("not JSON")
            yield row
            read += 1


def parse(text: bytes):
    return json.loads(text.decode("utf-8-sig"), object_pairs_hook=unambiguous)


def unambiguous(pairs: list[tuple[str, object]]) -> dict:
    """Make an object of JSON, without a key that it has twice: which value is meant would be a guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        found = {key: value for key, value in pairs if counts[key] == 1}
    return found


def csv_rows(file: BinaryIO, column: str, delimiter: str = ",") -> Iterator:
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    names = next(lines, [])
    for fields in filter(None, lines):  # a blank line is no row
        many = len(fields) > len(names)
        yield Broken("more fields than columns") if many else dict(zip(names, fields))


def tsv_rows(file: BinaryIO, column: str) -> Iterator:
    return csv_rows(file, column, "\t")


def text_rows(file: BinaryIO, column: str) -> Iterator[dict]:
    for number, text in enumerate(documents(TextIOWrapper(file, "utf-8-sig"))):
        if not number:
            refuse_no_text(text)
        yield {column or "text": text}


READERS = dict(parquet=parquet_rows, arrow=arrow_rows, json=json_rows, csv=csv_rows, tsv=tsv_rows, text=text_rows)


# ------------------------------------------------------------------------------------------------- rows -> documents


class Texts(NamedTuple):
    """A resumable stream of documents."""

    files: list[str]
    text_field: str
    first: list[str]  # documents of the first file
    notes: list[str]  # what a person should know: what is left out, a .txt that is one document

    def batches(
        self, place: dict | None = None, downloads: Path | None = None
    ) -> Iterator[tuple[dict, list[str | None]]]:
        """Yield (the place where it begins, up to BATCH documents) from `place` on; None is a row without text.

        A place is the number of a file, and of a row in it. Raises UserError.
        """
        place = place or START
        skipped = place["row"]
        for number, path in enumerate(arriving(self.files[place["file"] :], downloads), place["file"]):
            rows = islice(enumerate(rows_in(path, self.text_field)), skipped, None)
            skipped = 0
            while batch := list(islice(rows, BATCH)):
                first = batch[0][0]
                texts = [self.text_of(row, f"row {n + 1:,} of {path}") for n, row in batch]
                if kind_of(path) == "text":
                    self.notes.extend(note for note in notes_on(path, texts, first) if note not in self.notes)
                yield dict(file=number, row=first), texts

    def text_of(self, row, place: str) -> str | None:
        """Return the text of a row; None, and note the first place, for a row without text."""
        text = row.get(self.text_field) if isinstance(row, dict) else None
        if is_text(text):
            return text
        reason = row if isinstance(row, Broken) else "no text"
        if not any(note.startswith(reason) for note in self.notes):
            self.notes.append(f"{reason} in {place}; such rows are counted and left out")
        return None

    def sizes(self) -> list[int]:
        """Return the bytes of each file."""
        import fsspec

        sizes = []
        for file in self.files:
            with readable(file):
                fs = fsspec.filesystem("hf" if in_hub(file) else "file")
                sizes.append(fs.size(file))
        return sizes

    def text_bytes(self, sizes: list[int]) -> int:
        """Estimate the bytes of text in files of these sizes: by name, or as many as the first .parquet has."""
        import pyarrow.parquet as pq

        total = 0
        ratio = None
        for file, size in zip(self.files, sizes, strict=True):
            if kind_of(file) != "parquet" or not size:
                total += size * (COMPRESSION if COMPRESSED.search(file) else 1)
                continue
            if ratio is None:  # by the list of its row groups
                with readable(file), opened(file) as f, pq.ParquetFile(f) as content:
                    number = content.schema.names.index(self.text_field)
                    groups = [content.metadata.row_group(i).column(number) for i in range(content.num_row_groups)]
                    ratio = sum(group.total_uncompressed_size for group in groups) / size
            total += size * ratio
        return int(total)

    def commit(self) -> str:
        """Return the commit of a dataset of the hub; "" for anything else."""
        commits = {in_hub(file)[1:2] for file in self.files}
        return "".join(commits.pop()) if len(commits) == 1 else ""


def open_texts(
    source: tuple[str, ...], text_field: str = "text", subset: str = "", split: str = "train", revision: str = "main"
) -> Texts:
    """Open the documents of files, folders, globs or hub datasets, as `datasets.load_dataset` means subset, split and
    revision. Raises UserError for a missing source or field, and for several subsets of a dataset."""
    files, notes = find_files(source, subset, split, revision)
    rows = []
    for file in files:
        if rows := list(islice(rows_in(file, text_field), BATCH)):
            break
    rows = [row for row in rows if isinstance(row, dict)]
    if rows and not any(text_field in row for row in rows):
        keys = next(rows_in(file))
        raise UserError(f"{file} has no {text_field!r}; pass --text_field one of {', '.join(keys)}")
    texts = [row.get(text_field) for row in rows]
    return Texts(files, text_field, list(filter(is_text, texts)), notes)


def is_text(value) -> bool:
    """Tell whether a value is text that UTF-8 can write: JSON may hold half a character."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


# ------------------------------------------------------------------------------------------------------- plain text


def refuse_no_text(text: str) -> None:
    if NO_TEXT.match(text):
        raise ValueError(f"it begins with {text[:20]!r} and is no plain text")


def documents(lines: Iterable[str]) -> Iterator[str]:
    """Split the lines of a text, which end with \n, into documents.

    A document ends with two or more blank lines, which are a part of it, or before <|endoftext|> on a line of its own,
    which is not. Blank lines alone are no document.
    """
    document = []
    blank = 0  # lines in a row
    after_end = False
    for line in chain(lines, [ENDOFTEXT]):
        word = line.strip()
        if word and blank >= 2 or word == ENDOFTEXT:
            text = "".join(document)
            if text.strip():
                yield text
            document = []
        blank = 0 if word else blank + 1
        after_end = word == ENDOFTEXT or after_end and not word
        if not after_end:
            document.append(line)


def notes_on(path: str, documents: list[str], before: int = 0) -> list[str]:
    """Say what a person should know about documents of a .txt; `before` counts those that precede them."""
    how = f"to end documents, write two blank lines or {ENDOFTEXT} on a line of its own"
    notes = []
    if not before and len(documents) == 1 and len(documents[0]) > LONG:
        notes.append(f"{path} is one document; {how}")
    if any(ENDOFTEXT in document for document in documents):
        notes.append(f"{path} has {ENDOFTEXT} inside lines, where it is text; {how}")
    return notes


def texts_of(text: str) -> list[str]:
    """Split a text into its documents."""
    return [*documents(StringIO(text))]


def plain_texts(folder: str) -> tuple[list[str], list[str]]:
    """Read all files below a folder that are UTF-8, whatever their names; also say what is read and what is left out.
    Raises UserError if there are none."""
    texts = {}
    paths, notes = files_below(folder)
    paths = once(paths)
    for path in paths:
        with suppress(UnicodeDecodeError):
            text = Path(path).read_text(encoding="utf-8-sig")
            if text.strip() and not NO_TEXT.match(text):
                texts[path] = text
    if not texts:
        raise UserError(f"{folder} holds no file of plain text (UTF-8); pass a folder that has some")
    notes.append(f"{folder}: {len(texts):,} of {counted(len(paths), 'file')} read as text")
    return [*texts.values()], notes + left_out(folder, paths, [*texts])


# ---------------------------------------------------------------------------------------- rows of a small dataset


def rows_of(data: str, split: str = "train", option: str = "--data") -> list:
    """Read all rows of a file, a folder or a dataset of the hub; at least one. Raises UserError, which names the
    option."""
    try:
        files, notes = [data], []  # of any name
        if not os.path.isfile(data):
            files, notes = find_files((data,), split=split)
        rows = []
        for path in arriving(files):
            for number, row in enumerate(rows_in(path), start=1):
                if isinstance(row, Broken):
                    notes.append(f"row {number:,} of {path} left out ({row})")
                else:
                    rows.append(row)
        print(*(f"note: {note}\n" for note in notes), sep="", end="")
        if not rows:
            raise UserError(f"{data} has no rows; pass a file, a folder or OWNER/NAME of the hub")
    except UserError as e:
        raise UserError(f"{option}: {e}") from e
    return rows
