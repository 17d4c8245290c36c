"""One run directory: what a run leaves behind, and what it continues from.

    OUT_DIR/   config.json, log.jsonl, samples.txt, learning_curve.png, step_NNNNNN/

A RunDirectory takes the lock and finds the checkpoint to resume from; no file changes before a Run (parts/run.py)
begins, when all else has been loaded. This file knows nothing of steps, losses or signals.
"""

import contextlib
import os
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

from parts.checkpoint import ADAPTER_FILES, MODEL_FILES, checkpoint_steps, load_train_state, newest_intact
from parts.cli import UserError, check_constants, printable
from parts.files import exclusive_lock, read_json, set_aside
from parts.log import newest_start, read_log
from parts.runtime import Runtime

FILES = ("config.json", "log.jsonl", "samples.txt", "learning_curve.png")  # besides checkpoints
NOT_RESUMED = {"resume", "overwrite", "out_dir", "price", "merge"}  # belong to one command, not to the run


def with_constants_of_run(config, args: list[str]):
    """With --resume, take every constant that the words `args` of the command line do not set from the earlier run.

    What was requested then is settled again, since the machine may differ, except for the threads: their number changes
    the last bits of every sum. Raises UserError.
    """
    if not config.resume:
        return config
    requested, settled = constants_of_run(Path(config.out_dir))
    constants = dict(requested)
    if "base" in settled:  # a run directory may have newer checkpoints than the one that was taken
        constants["base"] = settled["base"]
    if settled and "OMP_NUM_THREADS" not in os.environ:
        constants["threads"] = settled.get("threads", 0)
    names = {field.name for field in fields(config)}
    own = {}
    for name in (names - flags_set(args) - NOT_RESUMED) & constants.keys():
        value = constants[name]
        own[name] = tuple(value) if isinstance(value, list) else value
    for name in constants.keys() - names:
        if constants[name]:  # a feature that was on
            had = printable(f"--{name} {constants[name]}")
            print(
                f"warning: the run in {config.out_dir} had {had}, which this version does not know: "
                "it continues without",
                file=sys.stderr,
            )
    check_constants(type(config), own)
    return replace(config, **own)


def constants_of_run(out_dir: Path) -> tuple[dict, dict]:
    """The constants of the run in `out_dir` as requested, and as settled; two empty dicts without a run.

    The former are in config.json, the latter in the newest start of the log; both are in every checkpoint, for a
    config.json that is missing or damaged. Raises UserError if it is damaged and there is no intact checkpoint, OSError
    if it cannot be read.
    """
    path = out_dir / "config.json"
    damage = None
    try:
        constants = read_json(path)
        if isinstance(constants, dict) and "out_dir" in constants:
            log = out_dir / "log.jsonl"
            start = newest_start(read_log(log)) if log.exists() else {}
            # earlier versions kept what was settled in config.json, and here what had been requested instead
            return constants | start.get("written", {}), start.get("config", {})
        damage = UserError(f"{path} does not hold the constants of a run; choose another --out_dir")
    except FileNotFoundError:
        pass
    except UserError as e:
        damage = e
    checkpoint = newest_intact(out_dir)
    if checkpoint is None:
        if damage:
            raise damage
        return {}, {}
    print(f"warning: {path} is missing or damaged: taking the constants from {checkpoint}", file=sys.stderr)
    state = load_train_state(checkpoint)
    try:
        requested = state.get("requested") or state["written"]  # its name in earlier versions
        return dict(requested), dict(state["config"])
    except (LookupError, TypeError, ValueError) as e:
        raise UserError(f"{checkpoint}/train_state.pt holds no constants of a run; resume from another") from e


def flags_set(args: list[str]) -> set[str]:
    """The names of the constants that the words of a command line set."""
    options = (word[2:].partition("=")[0].replace("-", "_") for word in args if word.startswith("--"))
    return {name.removeprefix("no_") for name in options}


class RunDirectory:
    """OUT_DIR while this process holds its lock; `checkpoint` is the one to resume from, or None.

    `config` has the constants as a person wrote them, and `fixed` names those that a resume must not change. Nothing
    but the lock file is written. Raises UserError rather than touch a run that nobody asked to resume or overwrite.
    """

    def __init__(self, config, rt: Runtime, fixed: tuple[str, ...] = ()):
        if config.resume and config.overwrite:
            raise UserError("--resume continues a run and --overwrite starts a new one; give one of them")
        self.path = Path(config.out_dir)
        self.rt = rt
        self.requested = asdict(config)
        self.fixed = fixed
        self.locks = contextlib.ExitStack()  # held until the end of the run
        self.checkpoint, of_main = rt.broadcast_from_main(lambda: (self._claim(config), self.requested))
        if self.requested != of_main:  # a different --max_lr would go unnoticed, a different --shard would deadlock
            raise UserError(
                "the constants here are not those of rank 0; "
                f"give all nodes the same command, and a disk on which they all see {self.path}"
            )

    def _claim(self, config) -> Path | None:
        """Lock OUT_DIR; with --resume, return its newest intact checkpoint. The first rank only."""
        unrelated = unrelated_file(self.path) if self.path.is_dir() and not self.holds_run() else ""
        if unrelated:
            raise UserError(f"{self.path} contains {unrelated} but no run; choose another --out_dir to keep it safe")
        self._lock()  # what is found from here on must not change under us
        if not config.resume:
            if self.holds_run() and not config.overwrite:
                raise UserError(
                    f"{self.path} already holds a run; pass --resume to continue it, "
                    "--overwrite to rename it and start again, or choose another --out_dir"
                )
            return None
        if with_constants_of_run(config, sys.argv[1:]) != config:
            raise UserError(
                f"the constants of {self.path} changed while we waited for its lock; give the same command again"
            )
        newest = newest_intact(self.path)
        # a run that has not begun is no error: a cluster can start and restart it with the same command
        if newest is None and checkpoint_steps(self.path):
            raise UserError(f"every checkpoint in {self.path} is damaged; pass --overwrite instead to start again")
        return newest

    def _lock(self) -> None:
        if self.path.is_symlink() and not self.path.exists():
            raise UserError(f"{self.path} links to {os.readlink(self.path)}, which does not exist; create it")
        self.path.mkdir(parents=True, exist_ok=True)
        # inside the directory, not next to it: containers may mount one disk under different names
        lock = self.path / ".lock"
        self.locks.enter_context(exclusive_lock(lock, f"run directory {self.path}"))
        self._locked = os.stat(lock)

    def check(self) -> None:
        """Raises UserError if OUT_DIR is not the directory that was locked any more. After somebody renamed it, another
        run may have begun there, and would lose its checkpoints to us."""
        if not self.rt.is_main:  # it has no lock
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._locked, os.stat(self.path / ".lock")):
                return
        raise UserError(f"{self.path} was renamed or removed during the run; continue it with --resume where it is now")

    def holds_run(self) -> bool:
        """A log alone counts as a run: if somebody deleted its checkpoints, its figures are all that is left."""
        return bool(checkpoint_steps(self.path)) or (self.path / "log.jsonl").exists()

    def start_over(self) -> None:
        """Rename the old run OUT_DIR.1, or the next free number, and continue in an empty OUT_DIR.

        It takes a single rename: a kill at any moment leaves the old run complete under one of the two names.
        """
        place = self.path.resolve()  # if OUT_DIR links to a larger disk, the old run and the new one both stay there
        if os.name == "nt":  # Windows renames no directory with an open file in it, so nobody can hold the lock then
            self.locks.close()
        old = set_aside(place)  # raises if it cannot be renamed, as a mount point: then nothing has changed
        self.rt.print(f"the earlier run is now {old}")
        # The lock file has moved along, still locked, so a process that opened it earlier does not get the lock. Unlink
        # it: then no process can open it any more, and the old run can be resumed under its new name.
        (old / ".lock").unlink(missing_ok=True)
        place.mkdir(exist_ok=True)
        self._lock()


def unrelated_file(out_dir: Path) -> str:
    """In a directory without a run: a file that a run would replace, or a subdirectory, as in / or a project; or ""."""
    with contextlib.suppress(UserError, OSError, TypeError):
        if "out_dir" in read_json(out_dir / "config.json"):  # ours: the run was killed before it began its log
            return ""
    for name in (*FILES, MODEL_FILES[0], ADAPTER_FILES[0]):
        if (out_dir / name).exists():
            return name
    for path in sorted(out_dir.iterdir()):
        if path.is_dir() and path.name != "lost+found" and not path.name.startswith("."):
            return path.name
    return ""
