"""Whole files: locks, atomic writes, checksums. A file or directory written here appears complete or not at all.

This file imports no torch and knows nothing of what the files hold; a worker process that imports it stays small.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from parts.cli import TemporaryError, UserError

LOCK_SECONDS = 10  # how long to wait for a process that is about to exit


def sha256(path: Path) -> str:
    with errors_name(path), open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def identity(path: Path) -> tuple:
    """The same for two names of one file, by links of either kind."""
    try:
        stat = os.stat(path)
    except OSError:  # a link that leads nowhere
        return (str(path),)
    return stat.st_dev, stat.st_ino


def free_bytes(path: Path) -> int:
    """The free space of the disk that `path` is on, or will be on."""
    nearest = next(p for p in (path, *path.resolve().parents) if p.exists())  # which may be a mount point
    return shutil.disk_usage(nearest).free


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open a directory
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:  # some file systems, of networks and of users, cannot flush a directory
        if not (path.is_dir() and e.errno in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)):
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Raise OSErrors with the path in them, also for the disk errors that safetensors and torch.save report as text.

    A failed write, for example to a full disk, names nothing, and the name of a temporary file tells nobody what could
    not be written.
    """
    try:
        yield
    except OSError as e:
        if e.errno is None and not isinstance(e, TimeoutError):  # NumPy says only how much it could not write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from e
        if not e.filename or str(e.filename).endswith(".tmp"):
            e.filename = str(path)
        raise
    except Exception as e:
        found = re.search(r"\(os error (\d+)\)|unexpected pos", str(e))
        if found is None:
            raise
        number = int(found[1] or errno.ENOSPC)
        raise OSError(number, os.strerror(number), str(path)) from e


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: to a temporary file of this process, flushed to the disk and renamed over `path`."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with errors_name(path):
            part.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            flush(part)
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    flush(path.parent)


def write_atomically(path: Path, fill: Callable[[Path], None]) -> None:
    """Make the directory `path` atomically: fill a hidden one next to it, flush it to the disk, and rename it.

    An older one is set aside first, unless it has the same files already: then it stays. Whatever interrupts this, the
    old one stays complete, and `path` is never partial.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove_leftovers(path.parent, path.name)
    try:
        with errors_name(path):
            temporary.mkdir(parents=True)
            fill(temporary)
            if contents(path) == contents(temporary):
                return
            for file in temporary.iterdir():
                flush(file)
            flush(temporary)
        if path.exists():
            print(f"the earlier {path} is now {set_aside(path)}")
        temporary.rename(path)
        flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_folders(path: Path) -> None:
    """Raises UserError for a directory that `write_atomically` should not replace: one that holds others, as `out`, or
    the current one."""
    here = Path.cwd()
    if path.is_dir() and (path.resolve() in (here, *here.parents) or any(file.is_dir() for file in path.iterdir())):
        raise UserError(f"{path} is the current directory or holds others; choose another name")


def contents(directory: Path) -> dict[str, str]:
    """{name: sha256} of the files in a directory, which may not be there."""
    return {file.name: sha256(file) for file in directory.glob("*") if file.is_file()}


def set_aside(path: Path, name: Path | None = None) -> Path:
    """Rename a file or directory to `name`, by default PATH.1, or the next number that is free; returns the new name.

    This is all that `--overwrite` does to old work: one rename, so that no interruption can lose a part of it, and
    nothing is deleted. Raises UserError for a directory that holds the current one, which would move under our feet.
    """
    here = Path.cwd()
    if path.resolve() in (here, *here.parents):
        raise UserError(f"cannot rename {path.resolve()}, which holds the current directory; choose another one")
    n = 0
    target = name or path
    while os.path.lexists(target):
        n += 1
        target = Path(f"{name or path}.{n}")
    return path.rename(target)


def remove_leftovers(directory: Path, *names: str) -> None:
    """Remove what a killed process left of files and directories that it was writing there; `names` may be globs."""
    for name in names:
        for leftover in directory.glob(f".{name}.[0-9]*.tmp"):  # the number of the process; else somebody's own
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises OSError if it cannot be read, UserError if it is not one."""
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, and no object")
        return content
    except (ValueError, RecursionError) as e:  # ValueError: not Unicode, not JSON, or a number of 5,000 digits
        raise UserError(f"{path} cannot be read as JSON: {e}; it is damaged, or another kind of file") from None


@contextlib.contextmanager
def exclusive_lock(lock: Path, what: str, seconds: float | None = None) -> Iterator[None]:
    """Hold a lock file while the block runs, so that two processes do not write to one place.

    A killed process frees its lock, and we wait for one that is about to exit. Raises UserError if another process
    keeps it: `what` names the place, for instance "run directory out/tiny". Where the file system has no locks, the
    file itself is the lock, and one that a killed process left behind on another host has to be deleted by hand.
    """
    from filelock import FileLock, Timeout

    try:
        with errors_name(lock):
            held = FileLock(lock, timeout=LOCK_SECONDS if seconds is None else seconds).acquire()
    except Timeout:
        owner = " ".join(lock.read_text(errors="replace").split()) or "unknown"
        raise TemporaryError(
            f"another process is writing to the {what} (process and host: {owner}); wait until it ends, or use another "
            f"directory; if that process is gone, delete {lock}"
        ) from None
    with held:
        if str(os.getpid()) not in lock.read_text().split():  # without locks of the system, the library wrote it
            with errors_name(lock):
                lock.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
