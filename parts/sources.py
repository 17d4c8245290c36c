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
from contextlib import contextmanager, suppress
from glob import has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from parts.cli import Stopped, UserError, counted
from parts.files import identity

KINDS = {
    ".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".jsonlines": "json", ".json": "json", ".txt": "text",
    ".csv": "csv", ".tsv": "tsv", ".arrow": "arrow",
}  # fmt: skip
COMPRESSED = re.compile(r"\.(gz|zst|zstd|bz2|xz)$")
AHEAD = 2  # files of the hub that are downloaded while one is read


# ------------------------------------------------------------------------------------------------ sources -> files


def find_files(
    source: tuple[str, ...], subset: str = "", split: str = "train", revision: str = "main"
) -> tuple[list[str], list[str]]:
    """Find the files of all sources, in order, each once: paths, or hf://datasets/OWNER/NAME@COMMIT/PATH. Also return
    notes. Raises UserError."""
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
        kinds = sorted({kind_of(path) for path in files})
        if len(kinds) > 1:
            notes.append(f"{name} names files of several kinds, and all are read: {', '.join(kinds)}")
        notes += left_out(name, found, files + folders)
        paths += files
        for folder in folders:
            below, links = files_below(folder)
            chosen = files_of_folder(folder, below, subset, split)
            notes += links + left_out(folder, below, chosen)
            paths += chosen
    files = once(paths)
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


def left_out(name: str, found: list[str], read: list[str]) -> list[str]:
    """Say which files of a folder or glob are not read, by their endings."""
    read = {*map(os.path.normpath, read)}
    kinds = Counter(Path(path).suffix or Path(path).name for path in found if os.path.normpath(path) not in read)
    said = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(9))
    return [f"{name} without {counted(kinds.total(), 'file')} ({said})"] if kinds else []


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
    """Say in a line what cannot be read, and at which row."""
    reason = " ".join(str(e or type(e).__name__).split())[:300]
    where = f"row {row:,} of {what}" if row else what
    remedy = "check the path, get the file again, or leave it out"
    if isinstance(e, OSError) and (what.startswith("hf://") or on_hub(what)):
        remedy = "check name, network, HF_ENDPOINT and HF_HOME, log in with `hf auth login`, or pass local files"
    return UserError(f"cannot read {where}: {reason}; {remedy}")


# ------------------------------------------------------------------------------------------------ files on this disk


def arriving(files: list[str], folder: Path | None = None) -> Iterator[str]:
    """Yield the path of each file once it is on this disk. Files of the hub are downloaded to `folder`, or to the
    hub's cache, up to AHEAD of them while one is read."""
    threads = []
    for number, file in enumerate(files):
        for ahead in files[len(threads) : number + AHEAD + 1]:
            threads.append(Thread(target=fetch, args=(ahead, folder), daemon=True))  # a script that stops does not wait
            threads[-1].start()
        threads[number].join()
        yield downloaded(file, folder)  # at once, or with the error


def fetch(file: str, folder: Path | None) -> None:
    with suppress(UserError):
        downloaded(file, folder)


def downloaded(file: str, folder: Path | None) -> str:
    if not in_hub(file):
        return file
    with readable(file):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # they would garble ours
        repo, commit, name = in_hub(file)
        local_dir = folder and folder / repo
        return hf_hub_download(repo, name, repo_type="dataset", revision=commit, local_dir=local_dir)


def in_hub(file: str) -> tuple[str, ...]:
    """Return (OWNER/NAME, commit, name in it) of a file of the hub; () for a local one."""
    found = re.fullmatch(r"hf://datasets/([^@]+)@([^/]+)/(.*)", file)
    return found.groups() if found else ()


def discard(files: list[str], folder: Path) -> None:
    """Delete the downloads of these files."""
    for repo, _, name in filter(None, map(in_hub, files)):
        (folder / repo / name).unlink(missing_ok=True)
