"""Find a source's files and bring them to this disk: files, folders, globs, datasets of the Hugging Face hub.

A folder or hub dataset means the same as to `datasets.load_dataset`: a split, a subset, one kind of files.
Files of the hub are downloaded while others are read.

A link to a file is read, a link to a folder is not followed, and no file is read twice.
This file knows nothing of the files' contents.
"""

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape, has_magic
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from parts.cli import Stopped, UserError
from parts.files import identity

KINDS = {
    ".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".jsonlines": "json", ".json": "json", ".txt": "text",
    ".csv": "csv", ".tsv": "tsv", ".arrow": "arrow",
}  # fmt: skip
COMPRESSED = re.compile(r"\.(gz|zst|zstd|bz2|xz)$", re.IGNORECASE)
AHEAD = 2  # hub files downloaded while one is read


# ------------------------------------------------------------------------------------------------ sources -> files


def find_files(source: tuple[str, ...], subset: str = "", split: str = "train", revision: str = "main") -> list[str]:
    """Find the files of all sources, in order, each once: paths, or hf://datasets/OWNER/NAME@COMMIT/PATH."""
    found = []
    for name in source:
        files = []
        for path in expand(name):
            if not os.path.isfile(path):
                files += files_of(path, subset, split, revision)
            elif kind_of(path):
                files.append(path)
        if not files:
            raise UserError(f"{name!r} does not exist or holds no {', '.join(KINDS)}; check it, or pass OWNER/NAME")
        found += files
    return once(found)


def on_hub(name: str) -> bool:
    """Return whether a name is OWNER/NAME, perhaps with more after it, and no local file or folder."""
    found = re.match(r"[\w-][\w.-]*/[\w-][\w.-]*(?=/|$)", name)
    return found is not None and not kind_of(found[0]) and not os.path.exists(found[0])


def kind_of(name: str) -> str:
    return KINDS.get(Path(COMPRESSED.sub("", name)).suffix.lower(), "")


def expand(name: str) -> list[str]:
    """List a name's paths: itself, or a glob's except hidden paths; ** follows no links to folders."""
    if on_hub(name) or os.path.exists(name):
        return [name]
    if not has_magic(name):
        return []
    pattern = Path(name)
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
    return without_links(path for path in found if not any(part[0] == "." for part in {*path.parts} - {*pattern.parts}))


def without_links(paths: Iterable[Path]) -> list[str]:
    """Sort paths without links to folders or to nothing, which a note names."""
    kept = []
    for path in sorted(map(str, paths)):
        if os.path.islink(path) and not os.path.isfile(path):
            warnings.warn(f"{path} is a link to a folder or to nothing; not read", stacklevel=2)
        else:
            kept.append(path)
    return kept


def once(paths: Iterable[str]) -> list[str]:
    """Drop repeated files, also under other names or by links of either kind."""
    first = {}
    for path in paths:
        first.setdefault(identity(Path(path)), path)
    return [*first.values()]


def files_of(name: str, subset: str, split: str, revision: str) -> list[str]:
    """Ask `datasets` for the files of a split of a folder or hub dataset; its errors name subsets to choose from."""
    import datasets  # a slow import, not needed for named files
    import huggingface_hub

    datasets.disable_progress_bars()
    huggingface_hub.logging.set_verbosity_error()  # of README files without settings
    where = dict(path=os.path.abspath(name))
    if on_hub(name):
        path, inside = re.fullmatch("([^/]+/[^/]+)/?(.*)", name).groups()
        part = "data_files" if has_magic(inside) or kind_of(inside) else "data_dir"
        where = {"path": path, part: inside or None}
    elif has_magic(name):  # it takes [ in a path for a pattern
        parent, folder = os.path.split(where["path"])
        where = dict(path=parent, data_dir=escape(folder))
    with readable(name), TemporaryDirectory() as cache:  # it makes one, and nothing comes into it
        builder = datasets.load_dataset_builder(**where, name=subset or None, revision=revision, cache_dir=cache)
    found = {str(key): files for key, files in builder.config.data_files.items()}
    wanted = split.split("+")
    if not {*wanted} <= found.keys():
        raise UserError(f"{name} has no split {split}; choose from {', '.join(found)}")
    files = [file for part in wanted for file in found[part]]
    kind = kind_of(files[0])
    if others := {kind_of(file) for file in files_below(name)} - {"", kind}:
        warnings.warn(f"{name}: only its {kind} files are read, not {', '.join(sorted(others))}", stacklevel=2)
    return files


def files_below(folder: str) -> list[str]:
    """List all files in a folder and its folders except hidden ones, each once; links to folders are not followed."""
    files = []

    def note_closed(e: OSError) -> None:
        if isinstance(e, PermissionError):
            warnings.warn(f"{e.filename} is not read: {e.strerror}", stacklevel=2)

    for here, folders, names in os.walk(folder, onerror=note_closed):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        shown = [*folders, *(name for name in names if name[0] != ".")]
        files += filter(os.path.isfile, without_links(Path(here, name) for name in shown))
    return once(files)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn any error of a library, the network or a file into a UserError; each has its own classes."""
    try:
        yield
    except (UserError, Stopped):
        raise
    except Exception as e:
        if type(e) is FileNotFoundError:
            raise UserError(f"{what} does not exist; check the path") from e
        reason = " ".join([str(e) or type(e).__name__, *getattr(e, "__notes__", [])])
        remedy = "check name, network and HF_ENDPOINT, or pass local files"
        if os.path.exists(what):
            remedy = "save it as UTF-8 text" if isinstance(e, UnicodeDecodeError) else "fix it, or pass other files"
        raise UserError(f"cannot read {what}: {reason[-300:]}; {remedy}") from e


# ------------------------------------------------------------------------------------------------ files on this disk


def arriving(files: list[str], folder: Path | None = None) -> Iterator[str]:
    """Yield the path of each file once it is on this disk. Files of the hub are downloaded, up to AHEAD of them while
    one is read: to the hub's cache, or to `folder`, where each is deleted once the next one is asked for."""
    threads = []
    for number, file in enumerate(files):
        for ahead in files[len(threads) : number + AHEAD + 1]:
            threads.append(Thread(target=fetch, args=(ahead, folder), daemon=True))  # a script that stops does not wait
            threads[-1].start()
        threads[number].join()
        path = downloaded(file, folder)  # at once, or with the error
        yield path
        if folder and in_hub(file):
            os.remove(path)


def fetch(file: str, folder: Path | None) -> None:
    with suppress(UserError):
        downloaded(file, folder)


def downloaded(file: str, folder: Path | None) -> str:
    if not in_hub(file):
        return file
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # they would garble ours
    repo, commit, name = in_hub(file)
    with readable(file):
        local_dir = folder and folder / repo
        return hf_hub_download(repo, name, repo_type="dataset", revision=commit, local_dir=local_dir)


def in_hub(file: str) -> tuple[str, ...]:
    """Return (OWNER/NAME, commit, name in it) of a file of the hub; () for a local one."""
    found = re.fullmatch(r"hf://datasets/([^@]+)@([^/]+)/(.*)", file)
    return found.groups() if found else ()
