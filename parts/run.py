"""Bookkeeping for a training loop: one run directory, its log, its checkpoints, and signals.

    OUT_DIR/   config.json, log.jsonl, samples.txt, learning_curve.png, step_NNNNNN/

The loop is in the script, as `train` in train_gpt2.py, and needs six words of a Run:

    with run:                           # opens the log; closes it at the end
        for step in run.steps():        # 1, 2, ... max_steps, or until a signal
            ...                         # one optimizer step
            run.log(loss, grad_norm, lr, n_targets)
            if run.due(checkpoint_interval):
                run.save()
            if run.due(eval_interval, "val"):
                run.record("val", loss=...)
            if ...:
                run.end()               # this step is the last one

The life of step 7 on a GPU, which never waits for the host (on a CPU `log` reads its own step at once):

    host    launch 7 - log(7): copies 7's metrics, reads 6's - launch 8 - log(8): copies 8's metrics, reads 7's
    GPU          ... step 6 ...| ........ step 7 ........ | ........ step 8 ........

`save` and `record` first read what is left. What was read is in log.jsonl, and decides: 20 steps in a row that were not
finite raise UserError; after a signal to any rank nothing more is due, and `steps` saves and raises Stopped. All ranks
decide alike, from sums over the ranks. This file never computes a loss or a gradient.
"""

import json
import math
import os
import shlex
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from parts.checkpoint import checkpoint_steps, load_train_state, newest_intact, prune, write_checkpoint
from parts.cli import Stopped, UserError
from parts.files import exclusive_lock, remove_leftovers, replace_file, set_aside
from parts.optim import plateau_end
from parts.report import Report, about_machine, import_tracker
from parts.runtime import STOP_SIGNALS, Runtime

FILES = ("config.json", "log.jsonl", "samples.txt", "learning_curve.png")  # besides checkpoints
# belong to one command, not to the run
NOT_RESUMED = {"resume", "overwrite", "out_dir", "dry_run", "price", "merge", "stop_at", "profile"}


# ------------------------------------------------------------------------------------------------------- constants


def continue_constants(config, flags: set[str], directory: "RunDirectory", fixed: tuple, automatic: dict):
    """Return the constants to continue a run with: `config`, those of the script and the command as they are now.

    A changed constant needs a flag; `fixed` constants may never change. A constant with its value in `automatic` was
    left to the script, and stays what it was in the run. Raises UserError.
    """
    notes = kept = new = ""
    for name, before in directory.state["config"].items():
        before = tuple(before) if isinstance(before, list) else before
        now = getattr(config, name, before)  # a constant that was removed changes nothing
        if name in NOT_RESUMED or now == before:
            continue
        if name in automatic and now == automatic[name]:
            config = replace(config, **{name: before})
        elif name in fixed:
            raise UserError(
                f"{directory.checkpoint} was trained with {flag(name, before)}; "
                f"pass that instead of {flag(name, now)}, or another --out_dir"
            )
        elif name not in flags:
            kept += f" {flag(name, before)}"
            new += f" {flag(name, now)}"
        else:
            notes += f"; --{name} {before} is now {now}"
    if kept:
        raise UserError(f"the run in {directory.path} had{kept}; pass that to continue with it, or{new} to change it")
    directory.changes = notes
    return config


def flag(name: str, value) -> str:
    """Return a constant as a word of the command line."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    values = value if isinstance(value, tuple) else [value]
    return " ".join([f"--{name}", *(shlex.quote(str(item)) for item in values)])


# ---------------------------------------------------------------------------------------------------- the directory


class RunDirectory:
    """OUT_DIR while this process holds its lock. `checkpoint` is the one to resume from, or None; `state` is its
    train_state.pt, with the run's `config`.

    It writes the lock file alone. Raises UserError rather than touch a run without --resume or --overwrite.
    """

    def __init__(self, config, rt: Runtime):
        self.path = Path(config.out_dir)
        self.rt = rt
        self.locks = ExitStack()  # held until the end of the run
        self.changes = ""  # of constants, for the line of a resume
        self.checkpoint = rt.broadcast_from_main(lambda: self._claim(config))
        self.state = load_train_state(self.checkpoint) if self.checkpoint else {}

    def _claim(self, config) -> Path | None:
        """Lock OUT_DIR; if the run is to continue, return its newest intact checkpoint. The first rank only."""
        if config.resume and config.overwrite:
            raise UserError("--resume continues a run and --overwrite starts a new one; pass one of them")
        import_tracker(config.report_to)  # fail before anything changes
        # what a run would replace, or a directory, as in / or a project
        theirs = sorted(path.name for path in self.path.glob("[!.]*") if path.is_dir() or path.name in FILES)
        if theirs and not self.holds_run():
            raise UserError(f"{self.path} contains {theirs[0]} but no run; choose another --out_dir")
        self._lock()  # what is found from here on must not change under us
        if self.holds_run() and not config.resume and not config.overwrite:
            raise UserError(
                f"{self.path} already holds a run; pass --resume to continue it, "
                "--overwrite to rename it and start again, or choose another --out_dir"
            )
        if not config.resume:
            return None
        newest = newest_intact(self.path)
        # a run that has not begun is no error: a cluster can start and restart it with the same command
        if newest is None and checkpoint_steps(self.path):
            raise UserError(f"every checkpoint in {self.path} is damaged; pass --overwrite to start again")
        return newest

    def _lock(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # inside the directory, not next to it: containers may mount one disk under different names
        self.locks.enter_context(exclusive_lock(self.path / ".lock", f"run directory {self.path}"))

    def holds_run(self) -> bool:
        """Say whether a run is here: a log alone counts, also one set aside, as its figures may be all that is left."""
        return bool(checkpoint_steps(self.path)) or any(self.path.glob("log.jsonl*"))

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


# ---------------------------------------------------------------------------------------------------------- the run


class Run:
    """A run in progress. `step` is the one under way, or the last one taken."""

    def __init__(
        self, directory: RunDirectory, config, save_weights, optimizer, data_fingerprint: dict, run_info: dict
    ):
        """Make a new run, or continue from `directory.checkpoint` with its optimizer and counters. Nothing is written
        before `with`.

        `config` has the constants that the run computes with. `save_weights(path)` writes the weights, which the caller
        has loaded already, into a directory. The order of the data depends on `data_fingerprint` and on constants.
        `run_info` goes to the log: `parameters`, `data`, `base`; in pretraining also `flops_per_token`, for MFU, and
        `uniform_loss`, ln V, to compare the first loss with. Raises UserError if the fingerprint is not the
        checkpoint's, and on all ranks if one has other weights or moments than the first.
        """
        self.directory = directory
        self.rt = directory.rt
        self.config = config
        self.save_weights = save_weights
        self.optimizer = optimizer
        self.data_fingerprint = data_fingerprint
        self.max_steps = min(config.max_steps, getattr(config, "stop_at", 0) or config.max_steps)
        self.step = 0
        self.tokens = 0
        self.val_loss = math.inf  # the newest validation loss of this process, or the one logged at the resumed step
        if directory.checkpoint:
            self._restore(directory.checkpoint)
            run_info = run_info | dict(resumed_from=str(directory.checkpoint))
        digest = torch.tensor(zlib.crc32(json.dumps([data_fingerprint, torch.__version__]).encode()))
        self.rt.check_same([digest], "data, tokenizer or PyTorch")
        self._compare_ranks()
        self.report = Report(directory.path, config, self.rt, run_info)
        self._done: list[str] = []  # kinds of records that the log has of this step
        self._saved = self.step if directory.checkpoint else -1  # the last step with a checkpoint
        self._began = None  # mark of the clock, at the beginning of the first step that is not read yet
        self._pending = None  # of the last step: its number, lr, targets, metrics on the host, and mark of its end
        self._bad_steps = 0  # in a row, not finite
        self._signum = 0  # of a signal to this rank
        self._stop = False  # all ranks know of a signal to any of them

    def _compare_ranks(self) -> None:
        """Compare one sum of weights and moments with rank 0's. Ranks that have drifted apart would train on, and
        average gradients of different models."""
        leaves = tree_leaves([self.optimizer.param_groups(), self.optimizer.state_dict()])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        self.rt.check_same(tensors, f"weights or moments at step {self.step}")

    def _restore(self, checkpoint: Path) -> None:
        """Restore everything but the weights. Raises UserError for other data, another optimizer, or no steps left."""
        state = self.directory.state
        self.step = state["step"]
        self.tokens = state["tokens"]
        for name, value in self.data_fingerprint.items():
            if state["identity"][name] != value:
                raise UserError(f"{checkpoint} was trained with another {name}; pass its --data, or a new --out_dir")
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (LookupError, ValueError, RuntimeError) as e:  # of an optimizer that was edited
            raise UserError(f"{checkpoint}/train_state.pt does not fit this optimizer: {e}; restore it") from e
        if self.max_steps < self.step or self.max_steps == self.step < self.config.max_steps:
            raise UserError(
                f"step {self.max_steps} is not after step {self.step} of {checkpoint}; raise --max_steps or --stop_at"
            )
        self.rt.print(f"resuming from {checkpoint}{self.directory.changes}")

    # ---- the loop

    def __enter__(self) -> "Run":
        # skip evaluations that the log already has; run those that a kill prevented
        self._done, self.val_loss = self.rt.broadcast_from_main(self._prepare_directory)
        return self

    def _prepare_directory(self) -> tuple[list[str], float]:
        """Prepare log.jsonl, samples.txt and config.json for the first step; the first rank only.

        Returns the kinds of records that the log has of the step that was resumed, and its validation loss.
        """
        out_dir = self.directory.path
        if self.config.overwrite and self.directory.holds_run():
            self.directory.start_over()
        remove_leftovers(out_dir, *FILES, "step_*")
        for step, path in checkpoint_steps(out_dir):
            if step > self.step:  # damaged: the resume passed over it, and its step will be taken again
                self.rt.print(f"the damaged {path} is now {set_aside(path)}")
        log = out_dir / "log.jsonl"
        if self.directory.checkpoint is None and log.exists():
            old = set_aside(log)  # its steps will be taken again: do not mix old and new metrics, and lose neither
            self.rt.print(f"{out_dir} holds no checkpoint: starting from step 0; the earlier log is now {old}")
        elif self.step == self.config.max_steps:
            self.rt.print(f"the run is complete at step {self.step}; raise --max_steps to continue")
        self.report.open(self.step)  # before config.json, which alone would not be known as a run
        replace_file(out_dir / "config.json", json.dumps(asdict(self.config), indent=2) + "\n")
        start = dict(
            step=self.step,
            kind="run",
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            **self.report.run_info,
            config=asdict(self.config),
            **about_machine(self.rt),
            tokenizer=self.data_fingerprint["tokenizer"],
        )
        self.report.append(start)
        done = [record["kind"] for record in self.report.records if record["step"] == self.step]
        return done, self.report.val_losses().get(self.step, math.inf)

    def __exit__(self, error_type, error, _) -> None:
        try:
            self.report.close()
        finally:
            self.directory.locks.close()  # and restore the handlers of signals
        if self._signum and error_type not in (Stopped, UserError):
            raise Stopped(self._signum) from error  # of a compiler, for instance, that got the signal, too

    def steps(self) -> Iterator[int]:
        """Yield the steps until `max_steps`, or until a signal: then save, and raise Stopped."""
        first = self.step + 1
        while self.step < self.max_steps:
            self.step += 1
            self._done = []
            if self._pending is None:  # a step's time begins here, after evaluations and saves, or where the last ended
                self._began = self.rt.mark_time()
            yield self.step
            if self.step == first:  # before, there is nothing to save, and the default ends the process
                for signum in STOP_SIGNALS:
                    if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup ignores SIGHUP
                        self.directory.locks.callback(signal.signal, signum, signal.signal(signum, self._on_signal))
            if self.step == self.max_steps:
                self._read_pending()
            if self._stop:
                self.max_steps = self.step
                self.save()
                self.rt.barrier()  # torchrun ends every rank once one has ended
                self.rt.print(f"stopped after step {self.step}; pass --resume to continue")
                raise Stopped(self._signum or signal.SIGTERM)
        if self.step < self.config.max_steps:  # --stop_at, to be continued
            self.save()

    def _on_signal(self, signum: int, frame) -> None:
        self._signum = signum  # ranks may get it in different steps: `log` makes them agree on one
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C interrupts at once

    def log(self, loss, grad_norm, lr: float, n_targets: int) -> None:
        """Hand over a step's metrics, scalar tensors that are the same on every rank, and read those that are ready: on
        a GPU the last step's, else this one's. All ranks call this together, because it sums their signals.

        Raises UserError after too many steps in a row that were not finite.
        """
        # Reading a number now would let the GPU run dry: the host must be ahead, launching the kernels of the next step
        # while those of this one run.
        metrics = torch.stack([loss, grad_norm, self._n_signals()]).to("cpu", non_blocking=True)
        ours = (self.step, lr, n_targets, metrics, self.rt.mark_time())  # when this mark is passed, they have arrived
        self._read_pending()
        self._pending = ours
        if not self.rt.steps_ahead:
            self._read_pending()

    def _n_signals(self) -> torch.Tensor:
        """Count the ranks that got a signal. All ranks call this together."""
        return self.rt.sum(torch.full((), float(self._signum != 0), device=self.rt.device))

    def _read_pending(self) -> None:
        """Wait for the metrics of the last step, and log them. Raises UserError after too many bad steps."""
        if self._pending is None:
            return
        step, lr, n_targets, metrics, ended = self._pending
        self._pending = None
        seconds = self.rt.seconds_between(self._began, ended)
        self._began = ended
        loss, grad_norm, n_signals = metrics.tolist()
        self.tokens += n_targets
        self._stop = self._stop or n_signals > 0
        self._bad_steps = 0 if math.isfinite(loss + grad_norm) else self._bad_steps + 1
        metrics = dict(loss=loss, lr=lr, grad_norm=grad_norm, tokens=self.tokens)
        self.report.train_step(step, metrics, seconds, n_targets)
        if self._bad_steps == self.config.max_bad_steps:
            raise UserError(
                f"no finite loss or gradient in {self._bad_steps} steps, up to step {step}; "
                "lower --max_lr, or pass --dtype float32, and --resume"
            )

    def due(self, interval: int, kind: str = "", at_start: bool = False, is_last: bool = False) -> bool:
        """Say whether a save or an evaluation is due: every `interval` steps and at the end, which `is_last` says too;
        with `at_start` also before the first; never for 0. False if the log already has a record of this `kind`, and
        once the run is to stop."""
        if interval == 0 or kind in self._done or self._stop:
            return False
        if self.step == 0:
            return at_start
        return is_last or self.step % interval == 0 or self.step == self.max_steps

    def save(self) -> None:
        """Write a checkpoint of this step: everything that the next one depends on. It is on the disk when this
        returns. All ranks call this, the first one writes, and the others wait for it in their next exchange."""
        self._read_pending()
        if self.step == self._saved:
            return
        params = [p for group in self.optimizer.param_groups() for p in group["params"]]
        if self._bad_steps and not all(p.isfinite().all() for p in params):  # a step that is skipped changes none
            self.rt.print(f"note: weights are not finite at step {self.step}: no checkpoint")
            return
        self._compare_ranks()
        self._saved = self.step
        if not self.rt.is_main:
            return
        out_dir = self.directory.path
        path = out_dir / f"step_{self.step:06d}"
        state = dict(
            step=self.step,
            tokens=self.tokens,
            optimizer=self.optimizer.state_dict(),
            identity=self.data_fingerprint,
            config=asdict(self.config),
        )
        write_checkpoint(path, self.save_weights, state)
        self.rt.print(f"saved {path}")  # durable: from here on it survives a power failure
        steps = [step for step, _ in checkpoint_steps(out_dir)]
        losses = self.report.val_losses()
        best = sorted((step for step in steps if step in losses), key=losses.get)[:1]
        plateau = [step for step in steps if step <= plateau_end(self.config)][-1:]  # another decay can begin there
        keep = {*best, *plateau}
        prune(out_dir, self.config.keep_checkpoints, keep)  # only now: there are never fewer than before

    def record(self, kind: str, **metrics) -> None:
        """Log an evaluation or a sample of this step, and print it. Waits for the metrics of all steps, so that the log
        has them first. All ranks call this together, because it sums their signals, as `log` does."""
        self._read_pending()
        self._stop = self._stop or bool(self._n_signals() > 0)
        if kind == "val":
            self.val_loss = metrics["loss"]
        if kind in ("val", "hellaswag") and "flops_per_token" in self.report.run_info:
            metrics["flops"] = self.tokens * self.report.run_info["flops_per_token"]
        self.report.evaluation(self.step, kind, metrics)

    def end(self) -> None:
        """Make this step the last one: save it, and log that the target is reached."""
        self.max_steps = self.step
        self.save()
        if "target" in self._done:
            self.rt.print(f"the target was reached at step {self.step}")
        else:
            self.record("target", tokens=self.tokens)
