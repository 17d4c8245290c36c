"""Which files a source means, and their way to this disk: files, folders, globs, datasets of the Hugging Face hub.

A folder means what the hub's dataset with these files would: its training split, one of its subsets. `datasets` says
so; it reads none of them. Files of the hub are downloaded while others are read.

One rule for links: a link to a file is read, a link to a folder is not followed, and no file is read twice.
This file knows nothing of what files hold.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import NamedTuple

from parts.cli import Stopped, UserError, counted
from parts.files import identity

KINDS = {
    ".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".jsonlines": "json", ".json": "json", ".txt": "text",
    ".csv": "csv", ".tsv": "tsv", ".arrow": "arrow",
}  # fmt: skip
COMPRESSED = re.compile(r"\.(gz|zst|zstd|bz2|xz)$")


# ------------------------------------------------------------------------------------------------ sources -> files


class TextFile(NamedTuple):
    path: str  # on this disk, or hf://datasets/OWNER/NAME@COMMIT/PATH

    @property
    def kind(self) -> str:
        return kind_of(self.path)

    @property
    def on_hub(self) -> bool:
        return self.path.startswith("hf://")


def find_files(
    source: tuple[str, ...], subset: str = "", split: str = "train", revision: str = "main"
) -> tuple[list[TextFile], list[str]]:
    """Find the files of all sources, in order, each once; also return notes. Raises UserError."""
    paths = []
    notes = []
    for name in source or ("",):
        if on_hub(name):
            with readable(name):
                paths += files_of(hub_dataset(name), name, subset, split, revision)
            continue
        found = expand(name)
        files = [path for path in found if os.path.isfile(path) and kind_of(path)]
        folders = [path for path in found if os.path.isdir(path) and (path == name or not os.path.islink(path))]
        if not files and not folders:
            raise UserError(
                f"{name or 'the empty name'}: no such file, or none whose name ends in {', '.join(KINDS)}; pass files, "
                "a folder, a quoted glob, or OWNER/NAME of a hub dataset"
            )
        paths += files
        kinds = sorted({kind_of(path) for path in files})
        if len(kinds) > 1:
            notes.append(f"{name} names files of several kinds, and all are read: {', '.join(kinds)}")
        notes += left_out(name, [path for path in found if path not in files + folders])
        for folder in folders:
            below, links = files_below(folder)
            chosen = files_of_folder(folder, below, subset, split)
            real = {*map(identity, map(Path, chosen))}
            notes += links + left_out(folder, [path for path in below if identity(Path(path)) not in real])
            paths += chosen
    files = [TextFile(path) for path in once(paths)]
    if len(files) < len(paths):
        notes.append(f"{counted(len(paths) - len(files), 'file')} named more than once, and read once")
    return files, notes


def on_hub(name: str) -> bool:
    """True for OWNER/NAME, perhaps with more after it, unless a local file or folder has that name."""
    found = re.match(r"[\w-][\w.-]*/[\w-][\w.-]*(?=/|$)", name)
    return found is not None and not kind_of(found[0]) and not expand(name)


def kind_of(name: str) -> str:
    return KINDS.get(Path(COMPRESSED.sub("", name)).suffix.lower(), "")


def expand(name: str) -> list[str]:
    """List what a path or a glob names, except hidden files; ** follows no links to folders."""
    if os.path.lexists(name) or not has_magic(name):
        return [name] if name and os.path.lexists(name) else []
    pattern = Path(name).expanduser()
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
    typed = set(pattern.parts)
    return sorted(str(path) for path in found if not any(part[0] == "." and part not in typed for part in path.parts))


def once(paths: Iterable[str]) -> list[str]:
    """Drop other names of files that come before, also by links of either kind."""
    first = {}
    for path in paths:
        first.setdefault(identity(Path(path)), path)
    return [*first.values()]


def hub_dataset(name: str) -> dict:
    """Turn OWNER/NAME[/FOLDER or /GLOB] into arguments of load_dataset."""
    owner, dataset, *inside = name.strip("/").split("/")
    where = dict(path=f"{owner}/{dataset}")
    if inside:
        path = "/".join(inside)
        where["data_files" if has_magic(path) or kind_of(path) else "data_dir"] = path
    return where


def files_of(where: dict, name: str, subset: str, split: str, revision: str | None = None) -> list[str]:
    """Ask `datasets` for the files of a split. Raises UserError where a subset or split has to be chosen."""
    import datasets  # a slow import, which files that are named do not need

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL + 1)  # it raises what it would say
    with TemporaryDirectory() as cache:  # it makes one, and nothing comes into it
        try:
            builder = datasets.load_dataset_builder(**where, name=subset or None, revision=revision, cache_dir=cache)
        except ValueError as e:
            names = re.search(r"available configs: \[(.*?)\]", str(e))
            if names is None:
                raise
            raise UserError(f"{name} has several subsets; pass --subset, or the files of one: {names[1]}") from e
    found = {str(key): files for key, files in builder.config.data_files.items()}
    if any(part not in found for part in split.split("+")):
        raise UserError(f"{name} has no split {split}; choose from {', '.join(found)}")
    return [file for part in split.split("+") for file in found[part]]


def files_of_folder(folder: str, below: list[str], subset: str, split: str) -> list[str]:
    """Ask `datasets` which of the files below a folder are meant.

    It sees a folder of empty files with these names, as it would follow links without end, and read [ and * in the
    folder's own name as a pattern.
    """
    with readable(folder), TemporaryDirectory() as names:
        for path in below:
            name = Path(names, os.path.relpath(path, folder))
            name.parent.mkdir(parents=True, exist_ok=True)
            if name.name == "README.md":  # the card lists subsets and splits
                shutil.copyfile(path, name)
            else:
                name.touch()
        chosen = files_of(dict(path=names), folder, subset, split)
        return [os.path.join(folder, os.path.relpath(path, os.path.realpath(names))) for path in chosen]


def files_below(folder: str) -> tuple[list[str], list[str]]:
    """List all files in a folder and its folders except hidden ones; also notes on links that are not read."""
    files = []
    notes = []
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        links = [name for name in folders if os.path.islink(f"{here}/{name}")]
        notes += [f"{here}/{name} is a link to a folder, and not followed" for name in links]
        for path in (f"{here}/{name}" for name in sorted(names) if name[0] != "."):
            if os.path.isfile(path):
                files.append(path)
            elif os.path.islink(path):
                notes.append(f"{path} is a link that leads nowhere")
    return files, notes


def left_out(name: str, paths: list[str]) -> list[str]:
    """Say which files of a folder or glob are not read, by their endings."""
    kinds = Counter(Path(path).suffix or Path(path).name for path in paths)
    found = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(9))
    return [f"{name} without {counted(kinds.total(), 'file')} ({found})"] if kinds else []


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn any error of a library, the network or a file into a UserError; each has its own classes."""
    try:
        yield
    except (UserError, Stopped):
        raise
    except Exception as e:
        raise unreadable(what, e) from e


def unreadable(what: str, e: Exception, row: int = 0) -> UserError:
    """Say in a line what cannot be read, and from which row on."""
    reason = " ".join(str(e or type(e).__name__).split())[:300]
    if isinstance(e, OSError) and e.filename:
        what = str(e.filename)
        reason = e.strerror
    if isinstance(e, OSError) and (on_hub(what) or what.startswith("hf://")):
        remedy = "check name and network, log in with `hf auth login`, set HF_ENDPOINT to a mirror, or pass local files"
    elif isinstance(e, PermissionError) and "/.cache" in what:
        remedy = "set HF_HOME to a folder that you may write"
    else:
        remedy = "check the path, get the file again, or leave it out"
    where = f"row {row:,} of {what}" if row else what
    return UserError(f"cannot read {where}: {reason}; {remedy}")


# ------------------------------------------------------------------------------------------------ files on this disk


def arriving(files: list[TextFile], folder: Path | None = None) -> Iterator[str]:
    """Yield the path of each file once it is on this disk. Files of the hub are downloaded to `folder`, or to the
    hub's cache, by one thread that is up to two files ahead."""
    if not any(file.on_hub for file in files):
        yield from (file.path for file in files)
        return
    arrived = Queue(maxsize=1)

    def download() -> None:
        for file in files:
            try:
                arrived.put(downloaded(file, folder))
            except UserError as e:
                arrived.put(e)

    Thread(target=download, daemon=True).start()  # a script that is stopped does not wait for it
    for _ in files:
        path = arrived.get()
        if isinstance(path, UserError):
            raise path
        yield path


def downloaded(file: TextFile, folder: Path | None) -> str:
    if not file.on_hub:
        return file.path
    with readable(file.path):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # they would garble ours
        repo, commit, name = in_hub(file)
        local_dir = folder and folder / repo
        return hf_hub_download(repo, name, repo_type="dataset", revision=commit, local_dir=local_dir)


def in_hub(file: TextFile) -> tuple[str, ...]:
    """Return (OWNER/NAME, commit, name in it) of a file of the hub."""
    return re.fullmatch(r"hf://datasets/([^@]+)@([^/]+)/(.*)", file.path).groups()


def discard(files: list[TextFile], folder: Path) -> None:
    """Delete the downloads of these files."""
    for file in files:
        if file.on_hub:
            repo, _, name = in_hub(file)
            (folder / repo / name).unlink(missing_ok=True)
