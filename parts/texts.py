"""Text to train on: documents of files (parts/sources.py finds them), and the rows of a small dataset.

`datasets` reads all of it but plain text, as a stream: parquet, JSON lines or arrays, CSV, Arrow, plain or compressed.
A place in the stream is a small dict, from which another process continues.

In a .txt two blank lines, or <|endoftext|> on a line of its own, end a document; its line ends become \n.
This file knows nothing of tokens, shards, models or torch.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from parts.cli import UserError, counted
from parts.sources import (
    COMPRESSED,
    TextFile,
    arriving,
    files_below,
    find_files,
    hub_dataset,
    in_hub,
    kind_of,
    left_out,
    load_builder,
    on_hub,
    readable,
)

BATCH = 64  # documents that are read, encoded and written together: enough to keep the main thread idle
LONG = 100_000  # characters: a longer .txt most likely holds several documents
ENDOFTEXT = "<|endoftext|>"
COMPRESSION = 3  # bytes of text in a byte of a compressed file, about
START = dict(file=0, state=None, lines=0)  # the place where a stream begins
# UTF-8, too, and yet no text: UTF-16 without a mark, a page that asks to log in, a file that Git LFS has not fetched
NO_TEXT = re.compile(r".{0,999}\0|\s*<(!doctype )?html|version https://git-lfs", re.IGNORECASE | re.DOTALL)


# ------------------------------------------------------------------------------------------------ files -> documents


class Texts(NamedTuple):
    """A resumable stream of documents."""

    files: list[TextFile]
    text_field: str
    notes: list[str]  # what a person should know: what is left out, a .txt that is one document

    def batches(
        self, place: dict | None = None, downloads: Path | None = None
    ) -> Iterator[tuple[dict, list[str | None]]]:
        """(the place where it begins, up to BATCH documents), from `place` on; None is a row without text.

        A place is the number of a file, and the state of its stream or the first line in a .txt. Raises UserError.
        """
        place = place or START
        first = place["file"]
        for number, path in enumerate(arriving(self.files[first:], downloads), first):
            for within, batch in self.batches_of(self.files[number], path, place):
                yield START | dict(file=number) | within, batch
            place = START

    def batches_of(self, file: TextFile, path: str, place: dict) -> Iterator[tuple[dict, list[str | None]]]:
        """(its place in the file, a batch) of a file that is now at `path`."""
        if file.kind == "text":
            found = documents_of_file(path, place["lines"])
            while batch := list(islice(found, BATCH)):
                line = batch[0][0]
                texts = [text for _, text in batch]
                self.notes.extend(note for note in notes_on(path, texts, line) if note not in self.notes)
                yield dict(lines=line), texts
            return
        rows = 0
        stream = stream_of(file, path, self.text_field).with_format("arrow")
        if place["state"]:
            stream.load_state_dict(place["state"])
        state = stream.state_dict()
        tables = stream.iter(BATCH)
        while True:
            with readable(path, rows):
                table = next(tables, None)
                if table is None:
                    return
                texts = [text if isinstance(text, str) else None for text in table[self.text_field].to_pylist()]
            yield dict(state=state), texts
            rows += len(texts)
            state = stream.state_dict()

    def first_documents(self) -> list[str | None]:
        """A batch of the first file, of which no more is downloaded than that takes."""
        return next(self.batches_of(self.files[0], self.files[0].path, START), ({}, []))[1]

    def sizes(self) -> list[int]:
        """Bytes of each file."""
        import fsspec

        sizes = []
        for file in self.files:
            with readable(file.path):
                fs = fsspec.filesystem("hf" if file.on_hub else "file")
                sizes.append(fs.size(file.path))
        return sizes

    def text_bytes(self, sizes: list[int]) -> int:
        """About how many bytes of text files of these sizes hold: as many as the first .parquet has, or by name."""
        import fsspec
        import pyarrow.parquet as pq

        total = 0
        ratio = None
        for file, size in zip(self.files, sizes, strict=True):
            if file.kind != "parquet":
                total += size * (COMPRESSION if COMPRESSED.search(file.path) else 1)
                continue
            if ratio is None:  # by the list of its row groups
                with readable(file.path), fsspec.open(file.path) as f, pq.ParquetFile(f) as content:
                    number = content.schema.names.index(self.text_field)
                    groups = [content.metadata.row_group(i).column(number) for i in range(content.num_row_groups)]
                    ratio = sum(group.total_uncompressed_size for group in groups) / size
            total += size * ratio
        return int(total)

    def commit(self) -> str:
        """The commit of a dataset of the hub; "" for anything else."""
        commits = {in_hub(file)[1] if file.on_hub else "" for file in self.files}
        return commits.pop() if len(commits) == 1 else ""


def open_texts(
    source: tuple[str, ...], text_field: str = "text", subset: str = "", split: str = "train", revision: str = "main"
) -> Texts:
    """The documents of files, folders, globs or datasets of the hub, as `datasets.load_dataset` means subset, split and
    revision. Raises UserError for what is not there, has no such field, or is several subsets of a dataset."""
    files, notes = find_files(source, subset, split, revision)
    for file in {id(file.builder): file for file in reversed(files)}.values():  # the first of each builder
        if file.kind == "text":
            continue
        with readable(file.path):
            stream = stream_of(file, file.path)
            columns = stream.column_names or list(next(iter(stream), {text_field: ""}))
        if text_field not in columns:
            raise UserError(f"{file.path} has no {text_field!r}; give --text_field one of {', '.join(columns)}")
    return Texts(files, text_field, notes)


def stream_of(file: TextFile, path: str, column: str = ""):
    """The rows of one file, which is now at `path`, as a datasets.IterableDataset."""
    file.builder.config.data_files = {"train": [path]}
    if column and file.kind == "parquet":
        file.builder.config.columns = [column]
    return file.builder.as_streaming_dataset(split="train")


def documents_of_file(path: str, skip: int) -> Iterator[tuple[int, str]]:
    """`documents` of a .txt, from a line on."""
    import fsspec

    with readable(path), fsspec.open(path, "rt", encoding="utf-8-sig", compression="infer") as lines:
        for number, text in documents(islice(lines, skip, None), skip):
            if not number:
                refuse_no_text(path, text)
            yield number, text


def refuse_no_text(path: str, text: str) -> None:
    if NO_TEXT.match(text):
        raise UserError(f"{path} begins with {text[:20]!r} and is no plain text; convert it, or leave it out")


def documents(lines: Iterable[str], start: int = 0) -> Iterator[tuple[int, str]]:
    """(number of its first line, document) of the lines of a text, which end with \n; their first one is `start`.

    A document ends with two or more blank lines, which are a part of it, or before <|endoftext|> on a line of its own,
    which is not. Blank lines alone are no document.
    """
    document = []
    first = start
    blank = 0  # lines in a row
    after_end = False
    for number, line in enumerate(chain(lines, [ENDOFTEXT]), start):
        word = line.strip()
        if word and blank >= 2 or word == ENDOFTEXT:
            text = "".join(document)
            if text.strip():
                yield first, text
            document = []
        blank = 0 if word else blank + 1
        after_end = word == ENDOFTEXT or after_end and not word
        if not after_end:
            if not document:
                first = number
            document.append(line)


def notes_on(path: str, documents: list[str], line: int = 0) -> list[str]:
    """What a person should know about the documents of a .txt from `line` on, some or all."""
    how = f"to end documents, write two blank lines or {ENDOFTEXT} on a line of its own"
    notes = []
    if not line and len(documents) == 1 and len(documents[0]) > LONG:
        notes.append(f"{path} is one document; {how}")
    if any(ENDOFTEXT in document for document in documents):
        notes.append(f"{path} has {ENDOFTEXT} inside lines, where it is text; {how}")
    return notes


def texts_of(text: str) -> list[str]:
    """The documents of a text."""
    return [document for _, document in documents(StringIO(text))]


def plain_texts(folder: str) -> tuple[list[str], list[str]]:
    """The texts of all files below a folder that are UTF-8, whatever their names; and lines that say what is read and
    what is left out. Raises UserError if there are none."""
    texts = {}
    for path in map(Path, files_below(folder)):
        with suppress(UnicodeDecodeError):
            text = path.read_text(encoding="utf-8-sig")
            if text.strip() and not NO_TEXT.match(text):
                texts[path] = text
    if not texts:
        raise UserError(f"{folder} holds no file of plain text (UTF-8); give a folder that has some")
    kinds = Counter(path.suffix or path.name for path in texts)
    read = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(9))
    notes = [f"{folder}: {counted(len(texts), 'file')} read as text ({read})"]
    return [*texts.values()], notes + left_out(folder, texts)


# ---------------------------------------------------------------------------------------- rows of a small dataset


def rows_of(data: str, split: str = "train", option: str = "--data") -> list[dict]:
    """All rows of a file, a folder or a dataset of the hub; at least one. Raises UserError, which names the option."""
    try:
        with readable(data):
            if on_hub(data):
                load_builder(**hub_dataset(data))  # or a line that names the subsets
                import datasets

                rows = datasets.load_dataset(**hub_dataset(data), split=split).to_list()  # keeps a copy in its cache
            elif os.path.isdir(data) or kind_of(data) not in ("", "json") or COMPRESSED.search(data):
                files, notes = find_files((data,), "", split, "main")
                print(*(f"note: {note}\n" for note in notes), sep="", end="")
                rows = [row for file in files for row in stream_of(file, file.path)]
            else:
                rows = json_rows(data)
            if not rows:
                raise UserError(f"{data} has no rows; give a file, a folder or OWNER/NAME of the hub")
    except UserError as e:
        raise UserError(f"{option}: {e}") from e
    return rows


def json_rows(path: str) -> list[dict]:
    """The rows of a .json file, which holds a list, or of a .jsonl file, one a line. `datasets` needs one type for a
    key: it would turn 0 into "0" where other rows have a text."""
    text = Path(path).read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text, object_pairs_hook=unique)
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # a JSON string may hold other ends of lines
        if line := line.strip().removeprefix("\ufeff"):  # each line may have a mark, as from files joined
            try:
                rows.append(json.loads(line, object_pairs_hook=unique))
            except ValueError as e:
                raise UserError(f"{path} is not JSON in line {number}: {e}; correct it there") from None
    return rows


def unique(pairs: list[tuple[str, object]]) -> dict:
    """An object of JSON. Raises ValueError for a key that it has twice, of which `json` takes the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object has a key twice ({', '.join(key for key, _ in pairs)})")
    return found
