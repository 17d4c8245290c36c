"""Which files a source names: local ones, or those of a dataset on the Hugging Face hub, which are downloaded.

    source -> files

- source: files, folders, globs, or OWNER/NAME[/FOLDER or /GLOB] of a dataset on the hub
- file: of a kind that parts/documents.py reads; those on the hub are downloaded shortly before they are used

What is left out is counted and said, what is ambiguous is refused by name, and nothing is read twice.
This file knows nothing of what is in the files.
"""

import errno
import glob
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from parts.cli import UserError, counted
from parts.documents import KINDS, kind_of
from parts.files import identity, sha256


class SourceFile(NamedTuple):
    name: str  # a local path, or the path in the dataset
    bytes: int
    version: str  # a local file: mtime in ns; a file of the hub: the hash of its content


class Source(NamedTuple):
    files: list[SourceFile]
    repo: str = ""  # OWNER/NAME on the hub; empty for local files
    commit: str = ""
    left_out: tuple[tuple[str, str], ...] = ()  # (name of a file that is not read, why)


def find_source(patterns: tuple[str, ...], revision: str = "main") -> Source:
    """The files of local paths, folders and globs, or of a dataset of the hub at `revision`, each of them once.
    Raises UserError."""
    if len(patterns) == 1 and on_hub(patterns[0]):
        return hub_source(patterns[0], revision)
    files = []
    left_out = {}
    names = {}  # identity of a file -> the name under which it is read
    for pattern in patterns:
        readable_here = False
        for path, reason in local_paths(pattern):
            known = names.get(identity(path))
            if reason:
                left_out[str(path)] = reason
            elif known is None:
                names[identity(path)] = path
                stat = path.stat()
                files.append(SourceFile(str(path), stat.st_size, str(stat.st_mtime_ns)))
            elif known != path:
                left_out[str(path)] = f"the same file as {known}"
            readable_here = readable_here or not reason
        if not readable_here:
            raise UserError(
                f"{pattern or 'the empty name'}: no such file, or none whose name ends in {', '.join(KINDS)}; "
                "give files, a folder, a quoted glob, or OWNER/NAME of a dataset of the hub"
            )
    refuse_twins(files)
    return Source(files, left_out=tuple(left_out.items()))


def on_hub(pattern: str) -> bool:
    """True for OWNER/NAME, perhaps with more after it, unless a local file or folder has that name."""
    name = re.match(r"[\w-][\w.-]*/[\w-][\w.-]*(?=/|$)", pattern)
    here = os.path.exists(pattern) or glob.glob(pattern, recursive=True)
    return name is not None and not here and not kind_of(name[0])


def local_paths(pattern: str) -> list[tuple[Path, str]]:
    """(path, why it is not read or "") of all that a path, a folder (all below it) or a glob names, in order.
    Raises UserError for subsets of a dataset."""
    named = [pattern]
    if not os.path.exists(pattern):
        named = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    found = []
    for path in map(Path, named):
        if not path.is_dir():
            found.append((path, unreadable(path)))
            continue
        below = [(file, unreadable(file, hidden=True)) for file in sorted(paths_below(path))]
        if named == [pattern]:  # else a glob has chosen
            names = [file.relative_to(path).as_posix() for file, reason in below if not reason]
            refuse_subsets(str(path), names, subsets_of(card_of(path), names))
        found += below
    return found


def paths_below(folder: Path) -> Iterator[Path]:
    """All files below a folder, in linked folders, too, and the hidden folders, which are not entered."""
    entered = set()
    for here, folders, names in os.walk(folder, onerror=raise_error, followlinks=True):
        entered.add(os.path.realpath(here))
        folders.sort()
        for name in [*folders]:
            place = os.path.join(here, name)
            hidden = name.startswith(".")
            if hidden or os.path.realpath(place) in entered:  # a link can lead back up
                folders.remove(name)
            if hidden:
                yield Path(place)
        yield from (Path(here, name) for name in names)


def raise_error(error: OSError) -> None:
    raise error


def unreadable(path: Path, hidden: bool = False) -> str:
    """Why a file is not read; "" for one that is, which may be hidden if somebody has named it."""
    if hidden and path.name.startswith("."):
        return "hidden"
    if not kind_of(path.name):
        return "of another kind"
    if not path.is_file():
        return "a link that leads nowhere" if path.is_symlink() else "no file"
    return ""


def refuse_twins(files: list[SourceFile]) -> None:
    """Raises UserError for a.jsonl beside a.jsonl.gz: most likely one is the other, unpacked."""
    seen = {}
    for file in files:
        twin = seen.setdefault(file.name.removesuffix(kind_of(file.name)), file)
        if twin != file:
            raise UserError(
                f"{twin.name} and {file.name} may hold the same documents, in two formats; "
                "remove or rename one of them, or give a glob that leaves it out"
            )


def hub_source(name: str, revision: str) -> Source:
    """The files of a dataset of the hub, of one kind, of its training split if it has one. Raises UserError."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    owner, dataset, *rest = name.strip("/").split("/")
    repo = f"{owner}/{dataset}"
    folder = "/".join(rest) or "*"
    with hub_errors(f"the list of files of {repo}"):  # as HfApi().dataset_info, which does not retry if the hub is busy
        url = f"{constants.ENDPOINT}/api/datasets/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        answer = http_backoff("GET", url, headers=build_hf_headers(), timeout=60, max_retries=2)
        hf_raise_for_status(answer)
        info = answer.json()
        listed = list(map(hub_file, info["siblings"]))
    listed = [file for file in listed if stays_below(file.name)]
    inside = [file for file in listed if fnmatch(file.name, folder) or fnmatch(file.name, f"{folder}/*")]
    known = [file for file in inside if kind_of(file.name)]
    # all, if no name says so
    to_train = [file for file in known if re.search("(?<![a-z])train", file.name, re.IGNORECASE)] or known
    if not to_train:
        folders = sorted({os.path.dirname(file.name) or "." for file in listed if kind_of(file.name)})
        raise UserError(f"{repo} has no data file in {folder}; name a folder that has some: {', '.join(folders[:9])}")
    kinds = {kind_of(file.name) for file in to_train}
    kind = min(kinds, key=[*KINDS].index)  # each may hold the same documents: the first of KINDS
    files = sorted(file for file in to_train if kind_of(file.name) == kind)
    names = [file.name for file in files]
    if not glob.has_magic("".join(rest)):  # else a glob has chosen
        subsets = subsets_of(info.get("cardData"), names)
        if set().union(*subsets.values()) != set(names):  # the card does not say
            subsets = subsets_by_folder(names)
        refuse_subsets(repo, names, subsets)
    reasons = dict.fromkeys((file.name for file in inside), "of another kind")
    reasons |= dict.fromkeys((file.name for file in {*known} - {*to_train}), "of another split")
    for name in [*names, *filter(re.compile(r"README\.md$|\.").match, reasons)]:  # read, or nobody's data
        reasons.pop(name, None)
    return Source(files, repo, info["sha"], tuple(reasons.items()))


def subsets_of(card: dict, names: list[str]) -> dict[str, set[str]]:
    """{subset: those of the names that are in it}, as the card of a dataset lists them in `configs`."""
    subsets = {}
    for config in (card or {}).get("configs") or []:
        patterns = [re.compile(as_regex(pattern)) for pattern in patterns_of(config.get("data_files"))]
        files = {name for name in names if any(pattern.fullmatch(name) for pattern in patterns)}
        if files:
            subsets[config["config_name"]] = files
    return subsets


def subsets_by_folder(names: list[str]) -> dict[str, set[str]]:
    subsets = {}
    for name in names:
        subsets.setdefault(os.path.dirname(name), set()).add(name)
    return subsets


def refuse_subsets(dataset: str, names: list[str], subsets: dict[str, set[str]]) -> None:
    """Raises UserError for files that are several subsets of a dataset, such as a text raw and in tokens, unless one
    of them has all of these files, as a default may."""
    if len(subsets) < 2 or set(names) in subsets.values():
        return
    folders = subsets_by_folder(names)
    choices = [f"{dataset}/{folder or min(folders[folder])}" for folder in folders]
    if len(folders) == 1:
        choices = [f"{dataset}/{min(files)}" for files in subsets.values()]
    raise UserError(
        f"{dataset} has {len(subsets)} subsets, which may hold the same documents: {', '.join(choices[:9])}; "
        f"give one of them, or '{dataset}/*' if it is to be all"
    )


def card_of(folder: Path) -> dict:
    """What the card of a dataset says that was downloaded to a folder; {} without one."""
    card = folder / "README.md"
    if not card.is_file():
        return {}
    from huggingface_hub.repocard import metadata_load

    with suppress(Exception):  # any text may be in a README.md
        return metadata_load(card) or {}
    return {}


def patterns_of(data_files: object) -> list[str]:
    """The patterns in `data_files` of a card: a text, a list of them, or a list of {split, path}."""
    if isinstance(data_files, str):
        return [data_files]
    if isinstance(data_files, dict):
        return patterns_of(data_files.get("path"))
    return [pattern for item in data_files or [] for pattern in patterns_of(item)]


def as_regex(pattern: str) -> str:
    """A glob of the hub, whose * does not cross a slash and whose ** does."""
    words = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(words.get(part) or re.escape(part) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))


def left_out(source: Source) -> str:
    """What a person should know of the files that are not read; "" if there are none."""
    by_reason = {}
    for name, reason in source.left_out:
        by_reason.setdefault(reason, []).append(name)
    parts = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - 9} more" if len(names) > 9 else ""
        parts.append(f"{counted(len(names), 'file')} ({reason}): {', '.join(names[:9])}{more}")
    return "; ".join(parts)


def stays_below(name: str) -> bool:
    """False for a path that leads out of the folder of downloads."""
    parts = Path(name).parts
    return ".." not in parts and "/" not in parts


def hub_file(entry: dict) -> SourceFile:
    """From an entry of the hub's list. Small files have the hash of git, large ones (LFS) that of their content."""
    lfs = entry.get("lfs") or {}
    return SourceFile(entry["rfilename"], entry["size"], lfs.get("sha256", entry["blobId"]))


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """Turn any error of the hub or the network into a UserError, but not that of a full disk.

    The classes of these errors have changed with the versions of huggingface_hub, so all are caught. By then it has
    retried: it waits as long as Retry-After says, and resumes broken connections.
    """
    from huggingface_hub.constants import ENDPOINT

    try:
        yield
    except Exception as e:
        if getattr(e, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise UserError(
            f"cannot get {what} from {ENDPOINT} ({reason}); check name and network, log in with `hf auth login`, "
            "set HF_ENDPOINT to a mirror, or give local files"
        ) from e


# ------------------------------------------------------------------------------------------------ files on this disk


def arriving(source: Source, folder: Path, first: int = 0, ahead: int = 0) -> Iterator[Path]:
    """The files from number `first` on, each as soon as it is on this disk. Raises UserError.

    Files of the hub are downloaded to `folder`: the one that is asked for, and meanwhile the `ahead` that follow.
    """
    files = source.files[first:]
    if not source.repo:
        for file in files:
            yield Path(file.name)
        return
    pool = ThreadPool(ahead + 1)  # daemon threads: a script that is stopped does not wait for them
    coming = deque()
    for file in files:
        coming.append(pool.apply_async(download, (source, file, folder)))
        if len(coming) > ahead:
            yield coming.popleft().get()
    for arrival in coming:
        yield arrival.get()


def download(source: Source, file: SourceFile, folder: Path) -> Path:
    """The path on this disk of a file of the hub.

    huggingface_hub does the work, but not by its `hf_hub_download`, which in 2.4.0 starts over after a kill, leaves the
    partial file, and accepts content with a wrong hash. Here a `.part` file is resumed, and the hash compared.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, disable_progress_bars

    path = folder / file.name
    part = path.with_name(f"{path.name}.{file.version[:8]}.part")  # of this content and no other
    checksum = file.version if len(file.version) == 64 else ""  # small files have a hash of another kind
    if path.is_file() and checksum and sha256(path) == checksum:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    disable_progress_bars()  # they would garble ours
    url = hf_hub_url(source.repo, file.name, repo_type="dataset", revision=source.commit)
    with hub_errors(file.name):
        with open(part, "ab") as f:
            http_get(url, f, headers=build_hf_headers(), resume_size=f.tell(), expected_size=file.bytes)
        if checksum and sha256(part) != checksum:
            part.unlink()
            raise OSError("it arrived damaged: its hash is not the hub's")
    part.replace(path)
    return path


def discard(source: Source, folder: Path, n: int) -> None:
    """Delete what was downloaded of the first n files."""
    if source.repo:
        for file in source.files[:n]:
            (folder / file.name).unlink(missing_ok=True)
