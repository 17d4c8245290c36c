"""Whole files: locks, atomic writes, checksums. A file or directory written here appears complete or not at all.

This file imports no torch and knows nothing of what the files hold, so a worker process that imports it stays small.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from parts.cli import UserError

LOCK_SECONDS = 10  # how long to wait for a process that is about to exit


def sha256(path: Path) -> str:
    with errors_name(path), open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def identity(path: Path) -> tuple:
    """Return the same for two names of one file, by links of either kind."""
    try:
        stat = os.stat(path)
    except OSError:  # a link that leads nowhere
        return (str(path),)
    return stat.st_dev, stat.st_ino


def free_bytes(path: Path) -> int:
    """Return the free space of the disk that `path` is on, or will be on."""
    nearest = next(p for p in (path, *path.resolve().parents) if p.exists())  # which may be a mount point
    return shutil.disk_usage(nearest).free


def flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError:  # Windows, and some file systems of networks and of users, cannot flush a directory
        if not path.is_dir():
            raise


@contextlib.contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Name `path` in errors of the block: a failed write names nothing, or a temporary file that nobody typed.

    On a full disk safetensors and torch.save raise errors of their own, which become OSErrors here.
    """
    try:
        yield
    except OSError as e:
        e.strerror = e.strerror or str(e)
        e.filename = str(path)
        raise
    except (RuntimeError, SafetensorError) as e:
        raise OSError(None, str(e).splitlines()[0], str(path)) from e


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: to a temporary file of this process, flushed to the disk and renamed over `path`."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with errors_name(path):
        try:
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
            if path.exists() and contents(path) == contents(temporary):
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
    """Raise UserError for a directory that `write_atomically` should not replace: the current one, or one that holds
    others, such as `out`."""
    if path.is_dir() and (Path.cwd().is_relative_to(path.resolve()) or any(file.is_dir() for file in path.iterdir())):
        raise UserError(f"{path} is the current directory or holds others; choose another name")


def contents(directory: Path) -> dict[str, str]:
    """Return {name: sha256} of a directory's files; {} if it is missing."""
    return {file.name: sha256(file) for file in directory.glob("*") if file.is_file()}


def set_aside(path: Path) -> Path:
    """Rename a file or directory to PATH.1, or the next number that is free; returns the new name.

    This is all that `--overwrite` does to old work: one rename, so that no interruption loses a part of it. Raises
    UserError for a directory that holds the current one: what is written to `.` would land in the old one.
    """
    if Path.cwd().is_relative_to(path.resolve()):
        raise UserError(f"{path} holds the current directory; choose another")
    n = 1
    while os.path.lexists(f"{path}.{n}"):
        n += 1
    return path.rename(f"{path}.{n}")


def remove_leftovers(directory: Path, *names: str) -> None:
    """Remove the unfinished files and directories of a killed process; `names` may be globs."""
    for name in names:
        for leftover in directory.glob(f".{name}.[0-9]*.tmp"):  # the process's number; else it is somebody's own
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def read_json(path: Path) -> dict:
    """Read the object in a JSON file. Raises OSError if it cannot be read, UserError if it is no object."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not JSON: {e}; pass another file") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; pass another file")
    return content


@contextlib.contextmanager
def exclusive_lock(lock: Path, what: str, seconds: float = 0) -> Iterator[None]:
    """Hold a lock file while the block runs, so that two processes do not write to one place.

    A killed process frees its lock, and we wait for one that is about to exit. Raises UserError if another process
    keeps it; `what` names the place, for instance "run directory out/tiny". Without locks in the file system the file
    itself is the lock, and somebody has to remove the file of a process killed on another host.
    """
    from filelock import FileLock, Timeout

    try:
        with errors_name(lock):
            held = FileLock(lock, timeout=seconds or LOCK_SECONDS).acquire()
    except Timeout:
        owner = " ".join(lock.read_text(errors="replace").split()) or "unknown"
        raise UserError(
            f"another process writes to the {what} (process and host: {owner}); wait, choose another directory, "
            f"or, if that process is gone, remove {lock}"
        ) from None
    with held:
        with errors_name(lock):
            lock.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
