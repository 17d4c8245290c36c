"""Sources of text: which files a name, a folder, a glob or a dataset of the Hugging Face hub means, and their way to
this disk.

A folder means what the hub's dataset with these files would: its training split, one of its subsets. `datasets` says
so, and its builder, which a TextFile keeps, reads the file later. Files of the hub are downloaded
while others are read.

This file knows nothing of documents, tokens, models or torch.
"""

import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import glob, has_magic
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
AHEAD = 2  # files of the hub that are downloaded while one is read


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
