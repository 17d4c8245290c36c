"""Text to train on: rows of files, the documents in them, and all rows of a small dataset.

    files (parts/sources.py finds them) -> rows, by the reader of each format -> documents

A reader yields the rows of one file and looks at nothing in them. A place in the stream is a file and a row, from which
another process continues: it reads the file again up to there, which costs little beside encoding.

In a .txt two blank lines, or <|endoftext|> on a line of its own, end a document; its line ends become \\n.
This file knows nothing of tokens, shards, models or torch.
"""

import csv
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from io import BufferedReader, StringIO, TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from parts.cli import UserError, counted
from parts.sources import COMPRESSED, arriving, files_below, find_files, in_hub, kind_of, readable

BATCH = 64  # documents that are read, encoded and written together: enough to keep the main thread idle
ENDOFTEXT = "<|endoftext|>"
COMPRESSION = 3  # bytes of text in a byte of a compressed file, about
START = dict(file=0, row=0)  # the place where a stream begins
# UTF-8, and yet not text: UTF-16 without a mark, a login page, a file that Git LFS has not fetched
NO_TEXT = re.compile(r".{0,999}\0|\s*<(!doctype )?html|version https://git-lfs", re.IGNORECASE | re.DOTALL)


# ----------------------------------------------------------------------------------------------------- files -> rows


def rows_in(path: str, column: str = "") -> Iterator:
    """Yield all rows of a file, only this column where others cost time. Raise UserError with file and row."""
    number = 0
    with readable(path), opened(path) as file:
        try:
            for number, row in enumerate(READERS[kind_of(path) or "json"](file, column), start=1):
                yield row
        except Exception as e:
            e.add_note(f"(row {number + 1:,})")
            raise


def opened(path: str):
    """Open a local or hub file for reading bytes, decompressed by its name."""
    import fsspec
    import pyarrow as pa

    if path.endswith((".zst", ".zstd")):  # fsspec would need another package
        return BufferedReader(pa.CompressedInputStream(pa.PythonFile(fsspec.open(path).open()), "zstd"))
    return fsspec.open(path, compression="infer")


def parquet_rows(file: BinaryIO, column: str) -> Iterator[dict]:
    import pyarrow.parquet as pq

    if not file.read(1):  # an empty file
        return
    with pq.ParquetFile(file) as content:
        columns = [column] if column in content.schema_arrow.names else None
        for batch in content.iter_batches(BATCH, columns=columns, use_threads=False):
            yield from batch.to_pylist()


def arrow_rows(file: BinaryIO, column: str) -> Iterator[dict]:
    """Read either of Arrow's formats, random access or stream."""
    import pyarrow as pa

    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    content = pa.ipc.open_file(file).read_all().to_batches() if is_file else pa.ipc.open_stream(file)
    for batch in content:
        if column in batch.schema.names:
            batch = batch.select([column])
        yield from batch.to_pylist()


def json_rows(file: BinaryIO, column: str) -> Iterator:
    """Read an array, or a row from each line. A line that is not JSON is a row of bytes."""
    lines = (line for line in file if line.strip())  # only \n ends a line: a string may hold Unicode's other ends
    first = next(lines, b"[]")
    if first.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
        yield from json.loads(first + file.read())
        return
    for line in chain([first], lines):
        try:
            row = json.loads(line)
        except ValueError:
            row = line
        yield row


def csv_rows(file: BinaryIO, column: str, delimiter: str = ",") -> Iterator:
    """Read a table. A row with more fields than columns stays a list: its text may continue in the next field."""
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    names = next(lines, [])
    for fields in filter(None, lines):  # a blank line is not a row
        yield fields if len(fields) > len(names) else dict(zip(names, fields))


def text_rows(file: BinaryIO, column: str) -> Iterator[dict]:
    for number, text in enumerate(documents(TextIOWrapper(file, "utf-8-sig"))):
        if not number:
            refuse_no_text(text)
        yield {column or "text": text}


READERS = dict(
    parquet=parquet_rows,
    arrow=arrow_rows,
    json=json_rows,
    csv=csv_rows,
    tsv=partial(csv_rows, delimiter="\t"),
    text=text_rows,
)


# ------------------------------------------------------------------------------------------------- rows -> documents


class Texts(NamedTuple):
    """A resumable stream of documents."""

    files: list[str]
    text_field: str
    first: list[str]  # documents of the first file

    def batches(self, place: dict = START, downloads: Path | None = None) -> Iterator[tuple[dict, list[str | None]]]:
        """Yield (the place where it begins, up to BATCH documents) from `place` on; None is a row without text."""
        row = place["row"]
        noted = False
        for number, path in enumerate(arriving(self.files[place["file"] :], downloads), place["file"]):
            rows = islice(rows_in(path, self.text_field), row, None)
            while texts := [text_of(found, self.text_field) for found in islice(rows, BATCH)]:
                if None in texts and not noted:
                    where = f"row {row + texts.index(None) + 1:,} of {path}"
                    warnings.warn(f"{where} gives no text; such rows are counted and skipped", stacklevel=2)
                    noted = True
                yield dict(file=number, row=row), texts
                row += len(texts)
            row = 0

    def sizes(self) -> list[int]:
        """Return the bytes of each file."""
        import fsspec

        with readable(self.files[0]):
            return [fsspec.filesystem("hf" if in_hub(file) else "file").size(file) for file in self.files]

    def text_bytes(self, sizes: list[int]) -> int:
        """Estimate the bytes of text in files of these sizes, all of the first one's kind."""
        ratio = 1
        if COMPRESSED.search(self.files[0]):
            ratio = COMPRESSION
        elif kind_of(self.files[0]) == "parquet" and sizes[0]:
            ratio = column_bytes(self.files[0], self.text_field) / sizes[0]
        return int(sum(sizes) * ratio)

    def commit(self) -> str:
        """Return the commit of a dataset of the hub; "" for anything else."""
        commits = {in_hub(file)[1:2] for file in self.files}
        return "".join(commits.pop()) if len(commits) == 1 else ""


def text_of(row, field: str) -> str | None:
    """Return a row's text; None for anything else, and for half a surrogate pair, which JSON may hold."""
    text = row.get(field) if isinstance(row, dict) else None
    with suppress(AttributeError, UnicodeEncodeError):
        text.encode()
        return text


def column_bytes(path: str, column: str) -> int:
    """Return the uncompressed bytes of a .parquet's column, by its row groups."""
    import pyarrow.parquet as pq

    with readable(path), opened(path) as file, pq.ParquetFile(file) as content:
        number = content.schema.names.index(column)
        groups = map(content.metadata.row_group, range(content.num_row_groups))
        return sum(group.column(number).total_uncompressed_size for group in groups)


def open_texts(
    source: tuple[str, ...], text_field: str = "text", subset: str = "", split: str = "train", revision: str = "main"
) -> Texts:
    """Open the documents of files, folders, globs or hub datasets, as `datasets.load_dataset` means subset, split and
    revision. Raise UserError for a missing source or field, and for a dataset's several subsets."""
    files = find_files(source, subset, split, revision)
    for file in files:
        rows = [row for row in islice(rows_in(file, text_field), BATCH) if isinstance(row, dict)]
        if rows:
            break
    if rows and not any(text_field in row for row in rows):
        raise UserError(f"{file} has no {text_field!r}; pass --text_field one of {', '.join(rows[0])}")
    texts = [text_of(row, text_field) for row in rows]
    first = [text for text in texts if text is not None]
    if kind_of(file) == "text":
        note_ends(file, first)
    return Texts(files, text_field, first)


# ------------------------------------------------------------------------------------------------------- plain text


def refuse_no_text(text: str) -> None:
    if NO_TEXT.match(text):
        raise ValueError(f"it begins with {text[:20]!r} and is not plain text")


def documents(lines: Iterable[str]) -> Iterator[str]:
    """Split the lines of a text, which end with \\n, into documents.

    A document ends with two or more blank lines, which belong to it, or before <|endoftext|> on a line of its own,
    which does not. Blank lines alone are not a document.
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


def note_ends(path: str, documents: list[str]) -> None:
    """Warn of <|endoftext|> inside the lines of a .txt."""
    if any(ENDOFTEXT in document for document in documents):
        message = f"{path} has {ENDOFTEXT} inside lines, where it is text; write it on a line of its own"
        warnings.warn(message, stacklevel=2)


def texts_of(text: str) -> list[str]:
    """Split a text into its documents."""
    return [*documents(StringIO(text))]


def plain_texts(folder: str) -> list[str]:
    """Read all UTF-8 files below a folder, whatever their names; warn of their number. Raise UserError if there are
    none."""
    texts = []
    paths = files_below(folder)
    for path in paths:
        with suppress(UnicodeDecodeError):
            text = Path(path).read_text(encoding="utf-8-sig")
            if text.strip() and not NO_TEXT.match(text):
                texts.append(text)
    if not texts:
        raise UserError(f"{folder} has no shards and no plain text (UTF-8); pass another folder")
    warnings.warn(f"{folder}: {len(texts):,} of {counted(len(paths), 'file')} read as text", stacklevel=2)
    return texts


# ---------------------------------------------------------------------------------------- rows of a small dataset


def rows_of(data: str, split: str = "train", option: str = "--data") -> list:
    """Read all rows of a file, a folder or a hub dataset; at least one. Raise UserError, which names the option."""
    try:
        files = [data] if os.path.isfile(data) else find_files((data,), split=split)  # a file of any name
        rows = [row for path in arriving(files) for row in rows_in(path)]
        if not rows:
            raise UserError(f"{data} has no rows; pass a file, a folder or OWNER/NAME")
        for number, row in enumerate(rows, start=1):
            if isinstance(row, bytes):
                raise UserError(f"row {number} of {data} is not JSON on one line; fix or remove it")
    except UserError as e:
        raise UserError(f"{option}: {e}") from e
    return rows
