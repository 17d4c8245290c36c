"""Text to train on: documents of files, folders and datasets of the Hugging Face hub, and the rows of a small dataset.

`datasets` reads all of it but plain text, as a stream: parquet, JSON lines or arrays, CSV, Arrow, plain or compressed,
from a disk or from the hub. A folder means what the hub's dataset with these files would: its training split, one of
its subsets. A place in the stream is a small dict, from which another process continues.

In a .txt two blank lines, or <|endoftext|> on a line of its own, end a document; its line ends become \n.
This file knows nothing of tokens, shards, models or torch.
"""

import json
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import glob, has_magic
from io import StringIO
from itertools import chain, islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

from parts.cli import Stopped, UserError, counted
from parts.files import identity

KINDS = {
    ".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".jsonlines": "json", ".json": "json", ".txt": "text",
    ".csv": "csv", ".arrow": "arrow",
}  # fmt: skip  # and what `datasets` calls them
COMPRESSED = re.compile(r"\.(gz|zst|zstd|bz2|xz)$")
BATCH = 64  # documents that are read, encoded and written together: enough to keep the main thread idle
LONG = 100_000  # characters: a longer .txt most likely holds several documents
AHEAD = 2  # files of the hub that are downloaded while one is read
ENDOFTEXT = "<|endoftext|>"
COMPRESSION = 3  # bytes of text in a byte of a compressed file, about
START = dict(file=0, state=None, lines=0)  # the place where a stream begins
# UTF-8, too, and yet no text: UTF-16 without a mark, a page that asks to log in, a file that Git LFS has not fetched
NO_TEXT = re.compile(r".{0,999}\0|\s*<(!doctype )?html|version https://git-lfs", re.IGNORECASE | re.DOTALL)


# ------------------------------------------------------------------------------------------------ sources -> files


class TextFile(NamedTuple):
    builder: Any  # of `datasets`, which reads it
    path: str  # on this disk, or hf://datasets/OWNER/NAME@COMMIT/PATH

    @property
    def kind(self) -> str:
        return type(self.builder).__module__.split(".")[-1]

    @property
    def on_hub(self) -> bool:
        return self.path.startswith("hf://")


def find_files(source: tuple[str, ...], subset: str, split: str, revision: str) -> tuple[list[TextFile], list[str]]:
    """The files of all sources, in order, each once; and lines that say what is left out. Raises UserError."""
    files = []
    notes = []
    for name in source or ("",):
        if on_hub(name):
            files += files_of(load_builder(**hub_dataset(name, subset), revision=revision), name, split)
            continue
        paths = [name] if os.path.exists(name) else sorted(glob(os.path.expanduser(name), recursive=True))
        folders = [path for path in paths if os.path.isdir(path)]
        named = [path for path in paths if os.path.isfile(path) and kind_of(path)]
        if not folders and not named:
            raise UserError(
                f"{name or 'the empty name'}: no such file, or none whose name ends in {', '.join(KINDS)}; give files, "
                "a folder, a quoted glob, or OWNER/NAME of a dataset of the hub"
            )
        by_kind = {kind_of(path): path for path in named}
        if len(by_kind) > 1:  # they may hold the same documents
            examples = ", ".join(by_kind.values())
            raise UserError(f"{name} has files of several kinds, such as {examples}; give a name or glob of one kind")
        for kind in by_kind:
            builder = load_builder(kind, data_files={split: named})
            files += [TextFile(builder, path) for path in named]
        for folder in folders:
            of_folder = files_of(load_builder(folder, subset), folder, split)
            notes += left_out(folder, [file.path for file in of_folder])
            files += of_folder
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
    where = dict(path=f"{owner}/{dataset}", name=subset or None)
    if inside:
        path = "/".join(inside)
        where["data_files" if has_magic(path) or kind_of(path) else "data_dir"] = path
    return where


def kind_of(name: str) -> str:
    return KINDS.get(Path(COMPRESSED.sub("", name)).suffix.lower(), "")


def load_builder(path: str, name: str | None = None, **options):
    """What `datasets.load_dataset` would read. Raises UserError for what is not there, and for a dataset of several
    subsets of which none is named."""
    import datasets  # a slow import, which --help does not need
    import pyarrow as pa
    from fsspec.compression import register_compression

    datasets.config.TORCH_AVAILABLE = False  # else it imports torch, to ask which worker it is
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL + 1)  # it raises what it would say
    register_compression(
        "zstd", lambda file, **_: pa.CompressedInputStream(pa.PythonFile(file), "zstd"), ["zst", "zstd"], force=True
    )
    with readable(path):
        try:
            builder = datasets.load_dataset_builder(path, name or None, **options)
        except ValueError as e:
            names = re.search(r"available configs: \[(.*?)\]", str(e))
            if names is None:
                raise
            raise UserError(f"{path} has several subsets; give --subset one of {names[1]}") from e
    if hasattr(builder.config, "keep_default_na"):  # a .csv: NA and None are words
        vars(builder.config).update(keep_default_na=False, na_values=[""])
    return builder


def files_of(builder, name: str, split: str) -> list[TextFile]:
    """The files of a split. Raises UserError for one that is not there."""
    found = {str(key): files for key, files in builder.config.data_files.items()}
    if any(part not in found for part in split.split("+")):
        raise UserError(f"{name} has no split {split}; give --split one of {', '.join(found)}")
    return [TextFile(builder, file) for part in split.split("+") for file in found[part]]


def left_out(folder: str, read: Iterable[str]) -> list[str]:
    """A line that says which files of a folder are not read, by their endings."""
    real = set(map(os.path.realpath, read))
    paths = [Path(path) for path in files_below(folder) if os.path.realpath(path) not in real]
    kinds = Counter(path.suffix or path.name for path in paths)
    found = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(9))
    return [f"{folder} without {counted(kinds.total(), 'file')} ({found})"] if kinds else []


def files_below(folder: str) -> Iterator[str]:
    """All files in a folder and its folders but hidden ones."""
    for here, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        yield from (f"{here}/{name}" for name in sorted(names) if name[0] != "." and os.path.isfile(f"{here}/{name}"))


@contextmanager
def readable(what: str, rows: int = 0) -> Iterator[None]:
    """Turn any error of the library, the network or a file into a UserError; each has its own classes."""
    try:
        yield
    except (UserError, Stopped):
        raise
    except Exception as e:
        if isinstance(e, OSError) and e.filename:  # the file system's own word: there is none, or no permission
            raise UserError(f"cannot read {e.filename}: {e.strerror}; check the path") from e
        reason = " ".join(str(e or type(e).__name__).split())[:300]
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
                if not line:
                    self.notes.extend(note for note in notes_on(path, texts) if note not in self.notes)
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


def notes_on(path: str, documents: list[str]) -> list[str]:
    """What a person should know about the documents at the start of a .txt, or all of it."""
    how = f"to end documents, write two blank lines or {ENDOFTEXT} on a line of its own"
    notes = []
    if len(documents) == 1 and len(documents[0]) > LONG:
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
    if not file.on_hub:
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
