"""Text to train on: documents of files, folders and datasets of the Hugging Face hub, and the rows of a small dataset.

`datasets` reads all of it, as a stream: parquet, JSON lines or arrays, .txt, CSV, Arrow, plain or compressed, from a
disk or from the hub. A folder means what the hub's dataset with these files would: its training split, one of its
subsets. A place in the stream is a small dict, from which another process continues.

In a .txt two blank lines, or <|endoftext|> on a line of its own, end a document.
This file knows nothing of tokens, shards, models or torch.
"""

import errno
import json
import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import glob, has_magic
from io import BufferedReader, StringIO
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

from parts.cli import UserError, counted
from parts.files import identity

KINDS = {
    ".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".jsonlines": "json", ".json": "json", ".txt": "text",
    ".csv": "csv", ".tsv": "csv", ".arrow": "arrow",
}  # fmt: skip  # and what `datasets` calls them
COMPRESSED = re.compile(r"\.(gz|zst|zstd|bz2|xz)$")
BATCH = 64  # documents that are read, encoded and written together: enough to keep the main thread idle
LONG = 100_000  # characters: a longer .txt most likely holds several documents
LINES = 4096  # of a .txt, read together
AHEAD = 2  # files of the hub that are downloaded while one is read
ENDOFTEXT = "<|endoftext|>"
COMPRESSION = 3  # bytes of text in a byte of a compressed file, about
LARGEST = 2**30  # characters of a document, or bytes of text in a row group, which is in memory as a whole
MAGIC = {
    b"PAR1": "parquet", b"ARROW1": "Arrow", b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2",
    b"\xfd7zXZ": "xz", b"PK\x03\x04": "a zip archive", b"%PDF": "PDF", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
    b"<!doctype html": "a web page", b"<html": "a web page", b"version https://git-lfs": "a pointer of Git LFS",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------ sources -> files


class TextFile(NamedTuple):
    builder: Any  # of `datasets`, which reads it
    path: str  # on this disk, or hf://datasets/OWNER/NAME@COMMIT/PATH
    read_in_place: bool = False  # a file of the hub: not downloaded as a whole

    @property
    def kind(self) -> str:
        return type(self.builder).__module__.split(".")[-1]

    @property
    def on_hub(self) -> bool:
        return self.path.startswith("hf://")


def find_files(source: tuple[str, ...], subset: str, split: str, revision: str) -> tuple[list[TextFile], list[str]]:
    """The files of all sources, in order, each once; and lines that say what is left out. Raises UserError."""
    if not source:
        raise UserError(
            "no source is named; give files, a folder, a quoted glob, or OWNER/NAME of a dataset of the hub"
        )
    files = []
    notes = []
    for name in source:
        if on_hub(name):
            files += files_of(load_builder(**hub_dataset(name, subset), revision=revision), name, split)
            continue
        paths = [name] if os.path.exists(name) else sorted(glob(os.path.expanduser(name), recursive=True))
        found = named_files(name, paths, split)
        for folder in filter(os.path.isdir, paths):
            of_folder = files_of(load_builder(folder, name=subset or None), folder, split)
            if of_folder[0].kind not in KINDS.values():
                known = sorted(filter(kind_of, glob(f"{folder}/**", recursive=True)))
                raise UserError(
                    f"{folder} would be read as {of_folder[0].kind}; give a glob of its texts, such as "
                    f"'{known[0] if known else 'FOLDER/*.jsonl'}'"
                )
            notes += left_out(folder, {os.path.realpath(file.path) for file in of_folder})
            found += of_folder
        if not found:
            raise UserError(
                f"{name or 'the empty name'}: no such file, or none whose name ends in {', '.join(KINDS)}; give files, "
                "a folder, a quoted glob, or OWNER/NAME of a dataset of the hub"
            )
        files += found
    once = {file.path if file.on_hub else identity(Path(file.path)): file for file in reversed(files)}
    if len(once) < len(files):
        notes.append(f"{counted(len(files) - len(once), 'file')} named more than once, and read once")
    return [*reversed(once.values())], notes


def on_hub(name: str) -> bool:
    """True for OWNER/NAME, perhaps with more after it, unless a local file or folder has that name."""
    found = re.match(r"[\w-][\w.-]*/[\w-][\w.-]*(?=/|$)", name)
    return found is not None and not kind_of(found[0]) and not os.path.exists(name) and not glob(name)


def hub_dataset(name: str, subset: str = "") -> dict:
    """OWNER/NAME[/FOLDER or /GLOB] as arguments of load_dataset."""
    owner, dataset, *inside = name.strip("/").split("/")
    inside = "/".join(inside)
    where = {}
    if inside:
        where = dict(data_files=inside) if has_magic(inside) or kind_of(inside) else dict(data_dir=inside)
    return dict(path=f"{owner}/{dataset}", name=subset or None) | where


def kind_of(name: str) -> str:
    return KINDS.get(Path(COMPRESSED.sub("", name)).suffix.lower(), "")


def load_builder(path: str, name: str | None = None, **options):
    """What `datasets.load_dataset` would read. Raises UserError for what is not there, and for a dataset of several
    subsets of which none is named."""
    import datasets  # a slow import, which --help does not need
    import fsspec.compression
    import pyarrow as pa

    datasets.config.TORCH_AVAILABLE = False  # else it imports torch, to ask which worker it is
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL + 1)  # it raises what it would say
    fsspec.compression.compr.setdefault("zstd", lambda file, **_: pa.CompressedInputStream(pa.PythonFile(file), "zstd"))
    with readable(path):
        try:
            builder = datasets.load_dataset_builder(path, name, **options)
        except ValueError as e:
            names = re.search(r"available configs: \[(.*?)\]", str(e))
            if names is None:
                raise
            raise UserError(f"{path} has several subsets; give --subset one of {names[1]}") from e
    if hasattr(builder.config, "sample_by"):  # a .txt: lines, from which `documents` are made
        vars(builder.config).update(sample_by="line", keep_linebreaks=True, encoding="utf-8-sig")
    return builder


def files_of(builder, name: str, split: str) -> list[TextFile]:
    """The files of a split. Raises UserError for one that is not there."""
    found = {str(key): files for key, files in builder.config.data_files.items()}
    if any(part not in found for part in split.split("+")):
        raise UserError(f"{name} has no split {split}; give --split one of {', '.join(found)}")
    return [TextFile(builder, file) for part in split.split("+") for file in found[part]]


def named_files(name: str, paths: list[str], split: str) -> list[TextFile]:
    """The files that a name or a glob stands for. Raises UserError for files of several kinds, which may hold the same
    documents."""
    by_kind = defaultdict(list)
    for path in paths:
        if os.path.isfile(path) and kind_of(path):
            by_kind[kind_of(path), path.lower().endswith(".tsv")].append(path)
    if len(by_kind) > 1:
        examples = ", ".join(paths[0] for paths in by_kind.values())
        raise UserError(f"{name} has files of several kinds, such as {examples}; give a name or glob of one kind")
    return [
        TextFile(load_builder(kind, data_files={split: paths}, **(dict(sep="\t") if tabs else {})), path)
        for (kind, tabs), paths in by_kind.items()
        for path in paths
    ]


def left_out(folder: str, read: set[str]) -> list[str]:
    """Lines that say which files of a folder are not read, by their kind."""
    by_reason = Counter()
    sizes = Counter()
    for here, folders, names in os.walk(folder, followlinks=True):
        hidden = [name for name in [*folders, *names] if name.startswith(".")]
        by_reason["hidden"] += len(hidden)
        folders[:] = sorted(set(folders) - set(hidden))
        for path in (os.path.join(here, name) for name in sorted(set(names) - set(hidden))):
            is_read = os.path.realpath(path) in read
            sizes[is_read] += os.path.getsize(path) if os.path.exists(path) else 0
            by_reason[Path(path).suffix or Path(path).name] += not is_read
    parts = [f"{n} {reason}" for reason, n in by_reason.items() if n]
    most = "most of its bytes: " if sizes[False] > sizes[True] else ""
    return [f"{folder} without {most}{counted(by_reason.total(), 'file')} ({', '.join(parts[:9])})"] if parts else []


@contextmanager
def readable(what: str, rows: int | None = None) -> Iterator[None]:
    """Turn any error of the library, the network or a file into a UserError; each has its own classes."""
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as e:
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = " ".join(str(e or type(e).__name__).split())[:300]
        if kind_of(what) == "json" and os.path.isfile(what):
            reason = json_problem(what) or reason
        where = f"{what} after row {rows:,}" if rows else what
        if on_hub(what) or what.startswith("hf://"):
            remedy = (
                "check name and network, log in with `hf auth login`, set HF_ENDPOINT to a mirror, or give local files"
            )
        else:
            remedy = "it is damaged, cut short or of another kind: get it again, or leave it out"
        raise UserError(f"cannot read {where}: {reason}; {remedy}") from e


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

        A place is the number of a file, the state of its stream, and the lines to skip from there. Raises UserError.
        """
        place = place or dict(file=0, state=None, lines=0)
        paths = arriving(self.files[place["file"] :], downloads)
        for number, path in enumerate(paths, place["file"]):
            file = self.files[number]
            stream = stream_of(file, path, self.text_field).with_format("arrow")
            if place["state"]:
                stream.load_state_dict(place["state"])
            if file.kind == "text":
                batches = batches_of_lines(stream, path, place["lines"], self.notes)
            else:
                batches = batches_of_rows(stream, path, self.text_field)
            for state, lines, batch in batches:
                yield dict(file=number, state=state, lines=lines), batch
            place = dict(state=None, lines=0)

    def first_documents(self) -> list[str | None]:
        """A batch of the first file, of which no more is downloaded than that takes."""
        first = self._replace(files=[file._replace(read_in_place=True) for file in self.files[:1]])
        return next(first.batches(), ({}, []))[1]

    def sizes(self) -> list[int]:
        """Bytes of each file."""
        return [size_of(file.path) for file in self.files]

    def text_bytes(self) -> int:
        """About how many bytes of text the files hold: as much as the first .parquet has, else by their names."""
        total = 0
        ratio = None
        for file, size in zip(self.files, self.sizes(), strict=True):
            if file.kind == "parquet":
                ratio = ratio or parquet_ratio(file.path, self.text_field, size)
                total += size * ratio
            else:
                total += size * (COMPRESSION if COMPRESSED.search(file.path) else 1)
        return int(total)

    def identities(self) -> list[dict]:
        """For each file its name and what changes with its content."""
        stats = [None if file.on_hub else os.stat(file.path) for file in self.files]  # a file of a commit never changes
        return [
            dict(name=file.path) | (dict(bytes=stat.st_size, version=str(stat.st_mtime_ns)) if stat else {})
            for file, stat in zip(self.files, stats, strict=True)
        ]

    def commit(self) -> str:
        """The commit of a dataset of the hub; "" for anything else."""
        commits = {in_hub(file)[1] if file.on_hub else "" for file in self.files}
        return commits.pop() if len(commits) == 1 else ""


def size_of(path: str) -> int:
    import fsspec

    with readable(path):
        return fsspec.url_to_fs(path)[0].size(path) if "://" in path else os.path.getsize(path)


def parquet_ratio(path: str, column: str, size: int) -> float:
    """Bytes of text for each byte of a .parquet, of which only the list of its row groups is read."""
    import fsspec
    import pyarrow.parquet as pq

    with readable(path), fsspec.open(path) as f, pq.ParquetFile(f) as file:
        number = [file.schema.column(i).path for i in range(len(file.schema))].index(column)
        groups = [file.metadata.row_group(group).column(number) for group in range(file.num_row_groups)]
        return sum(group.total_uncompressed_size for group in groups) / size


def open_texts(
    source: tuple[str, ...], text_field: str = "text", subset: str = "", split: str = "train", revision: str = "main"
) -> Texts:
    """The documents of files, folders, globs or datasets of the hub, as `datasets.load_dataset` means subset, split and
    revision. Raises UserError for what is not there, has no such field, or is several subsets of a dataset."""
    files, notes = find_files(source, subset, split, revision)
    checked = []
    for file in files:
        if file.kind == "text" or file.builder in checked:
            continue
        checked.append(file.builder)
        with readable(file.path):
            stream = stream_of(file, file.path)
            columns = stream.column_names or list(next(iter(stream), {text_field: ""}))
            texts = [name for name in columns if not stream.features or is_text(stream.features[name])]
        if text_field not in texts:
            remedy = f"--text_field one of {', '.join(texts)}" if texts else "another file"
            raise UserError(f"{file.path} has no {text_field!r} of text; give {remedy}")
    return Texts(files, text_field, notes)


def is_text(feature) -> bool:
    return getattr(feature, "dtype", "").endswith("string")


def stream_of(file: TextFile, path: str, column: str = ""):
    """The rows of one file, which is now at `path`, as a datasets.IterableDataset."""
    if os.path.exists(path):
        refuse_foreign(file.kind, path, column)
    file.builder.config.data_files = {"train": [path]}
    if column and file.kind == "parquet":
        file.builder.config.columns = [column]
    return file.builder.as_streaming_dataset(split="train")


def batches_of_rows(stream, path: str, text_field: str) -> Iterator[tuple[dict, int, list[str | None]]]:
    """(state of the stream, 0, the texts of up to BATCH rows)."""
    rows = 0
    state = stream.state_dict()
    tables = stream.iter(BATCH)
    while True:
        with readable(path, rows):
            table = next(tables, None)
            if table is None:
                return
            texts = [text if isinstance(text, str) else None for text in table[text_field].to_pylist()]
        yield state, 0, texts
        rows += len(texts)
        state = stream.state_dict()


def batches_of_lines(stream, path: str, skip: int, notes: list[str]) -> Iterator[tuple[dict, int, list[str]]]:
    """(state of the stream and the lines to skip from there, up to BATCH documents) of a .txt."""
    starts = deque()  # (number of a line, state of the stream before it) of the lines that were read together

    def lines() -> Iterator[str]:
        number = 0
        state = stream.state_dict()
        tables = stream.iter(LINES)
        while True:
            with readable(path, number):
                table = next(tables, None)
                if table is None:
                    return
                texts = table["text"].to_pylist()
            starts.append((number, state))
            yield from texts if number else texts[skip:]
            number += len(texts)
            state = stream.state_dict()

    batch = []
    n = 0  # documents
    for first, text in documents(lines(), skip):
        n += 1
        if len(text) > LARGEST:
            raise UserError(
                f"{path} has a document of more than {LARGEST / 1e9:.1f} GB; split it, or leave the file out"
            )
        if not batch:
            while len(starts) > 1 and starts[1][0] <= first:
                starts.popleft()
            place = starts[0][1], first - starts[0][0]
        batch.append(text)
        if len(batch) == BATCH:
            yield *place, batch
            batch = []
    if batch:
        yield *place, batch
    if n == 1 and len(text) > LONG and skip == 0:
        notes.append(one_document(path))


def documents(lines: Iterable[str], start: int = 0) -> Iterator[tuple[int, str]]:
    """(number of its first line, document) of the lines of a text, which end with \\n; their first one is `start`.

    A document ends with two or more blank lines, which are a part of it, or before <|endoftext|> on a line of its own,
    which is not. Blank lines alone are no document.
    """
    document = []
    first = start
    blank = 0  # lines in a row
    has_text = False
    after_end = False
    for number, line in enumerate(lines, start):
        word = line.strip()
        if word and blank >= 2 or word == ENDOFTEXT:
            if has_text:
                yield first, "".join(document)
            document = []
            has_text = False
        blank = 0 if word else blank + 1
        if word == ENDOFTEXT or after_end and not word:
            after_end = True
            continue
        after_end = False
        if not document:
            first = number
        document.append(line)
        has_text = has_text or bool(word)
    if has_text:
        yield first, "".join(document)


def one_document(path: str) -> str:
    return f"{path} is one document; to end documents in it, write two blank lines or {ENDOFTEXT} on a line of its own"


def texts_of(text: str) -> list[str]:
    """The documents of a text, whose lines end with \\n, \\r\\n or, if all do, with \\r."""
    if "\n" not in text:
        text = text.replace("\r", "\n")
    return [document for _, document in documents(StringIO(text, newline="\n"))]


def plain_texts(folder: str) -> tuple[list[str], list[str]]:
    """The texts of all files below a folder that are UTF-8, whatever their names; and lines that say what is read and
    what is left out. Raises UserError if there are none."""
    texts = {}
    for here, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(here, name) for name in sorted(names) if not name.startswith(".")):
            with suppress(UnicodeDecodeError):
                content = path.read_bytes() if path.is_file() else b""
                if not kind_inside(content) and (text := content.decode("utf-8-sig")).strip():
                    texts[path] = text
    if not texts:
        raise UserError(f"{folder} holds no file of plain text (UTF-8); give a folder that has some")
    kinds = Counter(path.suffix or path.name for path in texts)
    read = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(9))
    notes = [f"{folder}: {counted(len(texts), 'file')} read as text ({read})"]
    return [*texts.values()], notes + left_out(folder, set(map(os.path.realpath, texts)))


# ------------------------------------------------------------------------------------------------ files on this disk


def arriving(files: list[TextFile], folder: Path | None) -> Iterator[str]:
    """The paths of the files, each as soon as it is on this disk. Those of the hub are downloaded to `folder`, or to
    its cache: the one that is asked for, and meanwhile AHEAD that follow."""
    pool = ThreadPool(AHEAD + 1)  # daemon threads: a script that is stopped does not wait for them
    coming = deque()
    for file in files:
        coming.append(pool.apply_async(downloaded, (file, folder)))
        if len(coming) > AHEAD:
            yield coming.popleft().get()
    while coming:
        yield coming.popleft().get()


def downloaded(file: TextFile, folder: Path | None) -> str:
    if not file.on_hub or file.read_in_place:
        return file.path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # they would garble ours
    repo, commit, name = in_hub(file)
    with readable(file.path):
        local_dir = folder and folder / repo
        return hf_hub_download(repo, name, repo_type="dataset", revision=commit, local_dir=local_dir)


def in_hub(file: TextFile) -> tuple[str, ...]:
    """(OWNER/NAME, commit, name in it) of a file of the hub."""
    return re.fullmatch(r"hf://datasets/([^@]+)@([^/]+)/(.*)", file.path).groups()


def discard(files: list[TextFile], folder: Path) -> None:
    """Delete what was downloaded of these files."""
    for file in files:
        if file.on_hub:
            repo, _, name = in_hub(file)
            (folder / repo / name).unlink(missing_ok=True)


def refuse_foreign(kind: str, path: str, text_field: str) -> None:
    """Raises UserError for a file that is not what its name says, and for one with more text in a row group than fits
    into memory."""
    with readable(path), open(path, "rb") as f:
        found = kind_inside(f.read(1000))
    if found.lower() != kind and found and not COMPRESSED.search(path):
        raise UserError(f"{path} is {found}, and not what its name says; rename it, convert it or leave it out")
    if kind == "parquet" and (size := largest_group(path, text_field)) > LARGEST:
        raise UserError(
            f"{path} has {size / 1e9:.1f} GB of text in one row group, and the most is {LARGEST / 1e9:.1f}; "
            "write it with smaller row groups, or leave it out"
        )


def kind_inside(content: bytes) -> str:
    """What the first bytes of a file say that it is; "" for plain text."""
    for magic, kind in MAGIC.items():
        if content[:30].lower().startswith(magic.lower()):
            return kind
    start = content[:1000]
    return "UTF-16, or not text" if start.count(0) > len(start) // 10 and not start.startswith(b"\xff\xff") else ""


def largest_group(path: str, column: str) -> int:
    """Bytes of text in the largest row group of a .parquet. A text that repeats is stored once, so a group whose rows
    take less than 6 bytes each is read to see."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    largest = 0
    with readable(path), pq.ParquetFile(path) as file:
        names = [file.schema.column(i).path for i in range(len(file.schema))]
        for group in range(file.num_row_groups if column in names else 0):
            chunk = file.metadata.row_group(group).column(names.index(column))
            size = chunk.total_uncompressed_size
            texts = chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset)
            if chunk.num_values * size > LARGEST and chunk.total_compressed_size - texts < 6 * chunk.num_values:
                with pq.ParquetFile(path, read_dictionary=[column]) as numbers:
                    batches = numbers.iter_batches(2**16, row_groups=[group], columns=[column])
                    rows = [batch.column(0) for batch in batches]
                size = sum(pc.sum(pc.binary_length(row.dictionary).take(row.indices)).as_py() or 0 for row in rows)
            largest = max(largest, size)
    return largest


# ---------------------------------------------------------------------------------------- rows of a small dataset


def rows_of(data: str, split: str = "train", option: str = "--data") -> list[dict]:
    """All rows of a file, a folder or a dataset of the hub; at least one. Raises UserError, which names the option.

    A file of JSON is read here and not by `datasets`, which needs one type for a key: it would turn 0 into "0" where
    other rows have a text, and take the last of two values of a key.
    """
    if not on_hub(data) and not os.path.isdir(data) and kind_of(data) in ("", "json") and not COMPRESSED.search(data):
        rows = json_rows(data, option)
    else:
        rows = rows_of_library(data, split, option)
    if not rows:
        raise UserError(f"{data} has no rows; {option} takes a file, a folder or OWNER/NAME of the hub, with rows")
    return rows


def rows_of_library(data: str, split: str, option: str) -> list[dict]:
    try:
        if on_hub(data):
            where = hub_dataset(data)
            load_builder(**where)
            import datasets

            return datasets.load_dataset(**where, split=split).to_list()  # keeps a copy in its cache
        files, _ = find_files((data,), "", split, "main")
        return [row for file in files for row in stream_of(file, file.path)]
    except Exception as e:  # of the network, the hub, the library or the data: each has its own classes
        reason = " ".join(str(e).split())[:300]
        remedy = f"check the network, set HF_ENDPOINT to a mirror, or give a local file with {option}"
        raise UserError(f"cannot load the split {split} of {data}: {reason}; {remedy}") from e


def json_rows(path: str, option: str) -> list[dict]:
    """The rows of a .json file, which holds a list, or of a .jsonl file, one a line. Raises UserError, which names the
    line that is not JSON."""
    remedy = f"{option} takes a file of rows, such as .json, .jsonl, .csv or .parquet"
    try:
        content = Path(path).read_bytes()
        text = content.decode("utf-8-sig")
    except (ValueError, OSError) as e:  # ValueError: not UTF-8
        foreign = kind_inside(content) if isinstance(e, UnicodeDecodeError) else ""
        raise UserError(f"{path} cannot be read{foreign and f': it is {foreign}' or f': {e}'}; {remedy}") from None
    rows = []
    number = 1  # of the line
    try:
        if foreign := kind_inside(content):
            raise UserError(f"{path} is {foreign}; {remedy}")
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
    return rows


def json_problem(path: str) -> str:
    """The first line of a .jsonl that is not JSON, and why; "" if there is none."""
    import pyarrow as pa

    with suppress(OSError, pa.ArrowException), BufferedReader(pa.input_stream(path)) as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.lstrip(b"\xef\xbb\xbf ").startswith(b"["):
                return ""
            try:
                json.loads(line or "null")
            except (ValueError, RecursionError) as e:
                return f"line {number} is not JSON, {e}"
    return ""


def keys_of(text: str) -> list[str]:
    """The keys of a text that is one JSON object; [] for any other text, such as objects in lines."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [*content] if isinstance(content, dict) else []


def parse(text: str):
    """json.loads, which takes the last of two values of a key. Raises ValueError for these, too."""
    return json.loads(text, object_pairs_hook=unique)


def unique(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {max(keys, key=keys.count)!r} twice")
    return found
