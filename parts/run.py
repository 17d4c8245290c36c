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
                run.record("val", loss=...)     # or run.end_here(), to make this step the last one

A run has one dict of constants, those that it computes with: in config.json for people, in every checkpoint for a
resume. On a GPU metrics are read one step late, so that it never waits for the host. Every rank makes the same
decisions, because all of them follow from sums over the ranks. This file never computes a loss or a gradient.
"""

import hashlib
import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from parts.checkpoint import (
    ADAPTER_FILES,
    MODEL_FILES,
    checkpoint_steps,
    load_train_state,
    newest_intact,
    prune,
    write_checkpoint,
)
from parts.cli import Stopped, UserError, counted
from parts.files import exclusive_lock, remove_leftovers, replace_file, set_aside
from parts.log import newest_start, of_kind, read_log
from parts.report import Report, about_machine
from parts.runtime import STOP_SIGNALS, Runtime

FILES = ("config.json", "log.jsonl", "samples.txt", "learning_curve.png")  # besides checkpoints
# belong to one command, not to the run
NOT_RESUMED = {"resume", "overwrite", "out_dir", "dry_run", "price", "merge", "stop_at", "profile"}


# ------------------------------------------------------------------------------------------------------- constants


def continue_constants(config, flags: set[str], directory: "RunDirectory", fixed: tuple, automatic: dict):
    """The constants to continue a run with: those of the script and of the command as they are now, in `config`.

    Where one differs from the run's, a flag has to name it, and `fixed` ones may not differ at all. One that has the
    value in `automatic` was left to the script, and stays what it was in the run. Raises UserError.
    """
    silent = []  # (name, in the run, now)
    notes = ""
    for name, before in directory.state["config"].items():
        before = tuple(before) if isinstance(before, list) else before
        now = getattr(config, name, None)
        if name in NOT_RESUMED or now == before:
            continue
        if not hasattr(config, name):
            notes += f"; {name} {before} is no constant of this version"
        elif name in automatic and now == automatic[name]:
            config = replace(config, **{name: before})
        elif name not in flags:
            silent.append((name, before, now))
        elif name in fixed:
            raise UserError(
                f"{directory.checkpoint} was trained with {flag(name, before)}, not {flag(name, now)}: its weights or "
                "the order of its data depend on it; choose another --out_dir"
            )
        else:
            notes += f"; --{name} {before} is now {now}"
    if silent:
        kept = " ".join(flag(name, before) for name, before, _ in silent)
        new = " ".join(flag(name, now) for name, _, now in silent if name not in fixed)
        what = ", ".join(f"{name} {before} and now has {now}" for name, before, now in silent)
        remedy = f"add {kept} to continue with the run's" + (f", {new} to change it" if new else "")
        raise UserError(f"the run in {directory.path} had {what}; {remedy}")
    directory.rt.print(f"resuming from {directory.checkpoint}{notes}")
    return config


def flag(name: str, value) -> str:
    """A constant as a word of the command line."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    values = value if isinstance(value, tuple) else [value]
    return " ".join([f"--{name}", *(shlex.quote(str(item)) for item in values)])


# ---------------------------------------------------------------------------------------------------- the directory


class RunDirectory:
    """OUT_DIR while this process holds its lock. `checkpoint` is the one to resume from, or None, and `state` what it
    stores besides the weights: the `config` of its run among it.

    Nothing but the lock file is written. Raises UserError rather than touch a run that nobody asked to resume or to
    overwrite, and on a rank whose constants or code are not those of the first one.
    """

    def __init__(self, config, rt: Runtime):
        self.path = Path(config.out_dir)
        self.rt = rt
        self.locks = ExitStack()  # held until the end of the run
        self.overwrite = config.overwrite
        self.checkpoint = rt.broadcast_from_main(lambda: self._claim(config))
        root = Path(__file__).resolve().parent.parent
        files = sorted(path for folder in (".", "parts", "bpe") for path in root.glob(f"{folder}/*.py"))
        settled = dict(dtype=str(rt.dtype), compile=rt.compile, torch=torch.__version__)
        settled["code"] = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        compare_with_rank_0(asdict(config) | settled, rt)
        self.state = load_train_state(self.checkpoint) if self.checkpoint else {}

    def _claim(self, config) -> Path | None:
        """Lock OUT_DIR; if the run is to continue, return its newest intact checkpoint. The first rank only."""
        if config.resume and config.overwrite:
            raise UserError("--resume continues a run and --overwrite starts a new one; give one of them")
        theirs = {path.name for path in self.path.glob("[!.]*") if path.is_dir()} - {"lost+found"}
        theirs |= {name for name in (*FILES, MODEL_FILES[0], ADAPTER_FILES[0]) if (self.path / name).exists()}
        # what a run would replace, or a directory, as in / or a project, unless a run was killed before its first line
        began = "config.json" in theirs and '"out_dir"' in (self.path / "config.json").read_text(errors="replace")
        if theirs and not began and not self.holds_run():
            raise UserError(f"{self.path} contains {min(theirs)} but no run; choose another --out_dir to keep it safe")
        self._lock()  # what is found from here on must not change under us
        log = self.path / "log.jsonl"
        restarted = any(os.environ.get(f"{name}_RESTART_COUNT", "0") != "0" for name in ("TORCHELASTIC", "SLURM"))
        if config.overwrite and restarted and log.exists() and newest_start(read_log(log)).get("job") == job_id():
            self.overwrite = False  # the first start of this job has done that
        elif not config.resume:
            if self.holds_run() and not config.overwrite:
                raise UserError(
                    f"{self.path} already holds a run; pass --resume to continue it, "
                    "--overwrite to rename it and start again, or choose another --out_dir"
                )
            return None
        newest = newest_intact(self.path)
        # a run that has not begun is no error: a cluster can start and restart it with the same command
        if newest is None and checkpoint_steps(self.path):
            raise UserError(f"every checkpoint in {self.path} is damaged; pass --overwrite instead to start again")
        return newest

    def _lock(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        # inside the directory, not next to it: containers may mount one disk under different names
        self.locks.enter_context(exclusive_lock(self.path / ".lock", f"run directory {self.path}"))

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


def compare_with_rank_0(own: dict, rt: Runtime) -> None:
    """Each rank has its constants, code and files from its own node. Raises UserError where they differ."""
    for name, value in rt.broadcast_from_main(lambda: own).items():
        if own[name] != value:
            raise UserError(
                f"{name} here is {own[name]}, and on rank 0 {value}; give all nodes the same command, code and files"
            )


def job_id() -> str:
    """What SLURM or torchrun call all starts of one job; "" for a process that nobody restarts.

    When SLURM starts a job again, its torchrun has another id. Without --rdzv_id, that of every torchrun is `none`.
    """
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"none of process {os.getppid()}" if job == "none" else job


# ---------------------------------------------------------------------------------------------------------- the run


class Run:
    """A run in progress. `step` is the one under way, or the last one taken."""

    def __init__(
        self, directory: RunDirectory, config, save_weights, optimizer, data_fingerprint: dict, run_info: dict
    ):
        """A new run, or one that continues from `directory.checkpoint`, with its optimizer and counters. Nothing is
        written before `with`.

        `config` has the constants that the run computes with. `save_weights(path)` writes the weights, which the caller
        has loaded already, into a directory. `data_fingerprint` is what the order of the data depends on besides
        constants. `run_info` goes to the log: `parameters`, `data`, `base`; in pretraining also `flops_per_token`, for
        MFU, and `uniform_loss`, ln V, to compare the first loss with. Raises UserError if the fingerprint is not the
        checkpoint's, and on a rank that differs from the first one in data, weights or moments.
        """
        self.directory = directory
        self.rt = directory.rt
        self.config = config
        self.save_weights = save_weights
        self.optimizer = optimizer
        self.data_fingerprint = data_fingerprint
        self.max_steps = config.max_steps
        self.step = 0
        self.tokens = 0
        self.val_loss = math.inf
        compare_with_rank_0(data_fingerprint, self.rt)
        if stop_at := getattr(config, "stop_at", 0):
            self.max_steps = min(self.max_steps, stop_at)
        if directory.checkpoint:
            self._restore(directory.checkpoint)
            run_info = run_info | dict(resumed_from=str(directory.checkpoint))
        self._compare_weights()
        self.report = Report(directory.path, config, self.rt, run_info)
        self._done: list[str] = []  # the kinds of records that the log has of this step
        self._saved = self.step if directory.checkpoint else -1  # the last step with a checkpoint
        self._began = None  # mark of the clock, at the beginning of the first step that is not read yet
        self._pending = None  # of the last step: its number, lr, targets, metrics on the host, and mark of its end
        self._bad_steps = 0  # in a row, not finite
        self._signum = 0  # of a signal to this rank
        self._stop = False  # all ranks know of a signal to any of them

    def _compare_weights(self) -> None:
        """Raises UserError, on all ranks alike, if one has other weights or moments than the first. Ranks that have
        drifted apart would train on, and average gradients that belong to different models."""
        if self.rt.world_size == 1:
            return
        tensors = [p for group in self.optimizer.param_groups() for p in group["params"]]
        state = tree_leaves(self.optimizer.state_dict())
        tensors += [value for value in state if isinstance(value, torch.Tensor) and value.is_floating_point()]
        total = sum(tensor.detach().double().sum().item() for tensor in tensors)
        differs = total != self.rt.broadcast_from_main(lambda: total)
        n_others = self.rt.sum(torch.tensor(float(differs), device=self.rt.device)).item()
        if n_others:
            raise UserError(
                f"{counted(int(n_others), 'rank')} with other weights or moments than rank 0 at step {self.step}; "
                "check that all nodes have the same files and no faulty memory, then --resume from the newest one"
            )

    def _restore(self, checkpoint: Path) -> None:
        """Everything but the weights, as `save` stored it. Raises UserError for a state that is damaged, or of another
        run."""
        state = self.directory.state
        try:
            self.step = int(state["step"])
            self.tokens = int(state["tokens"])
            of_run = self.data_fingerprint | state["identity"]  # early versions stored less
            for name, value in self.data_fingerprint.items():
                if of_run[name] != value:
                    raise UserError(
                        f"{checkpoint} was trained with another {name}; give that one, or another --out_dir"
                    )
            self.optimizer.load_state_dict(state["optimizer"])
        except (LookupError, ValueError, RuntimeError) as e:
            raise UserError(f"{checkpoint}/train_state.pt does not fit this run: {e}; resume from another") from e
        is_finished = self.step == self.config.max_steps == state["config"].get("max_steps", self.step)
        if self.max_steps <= self.step and not is_finished:
            raise UserError(
                f"a run to step {self.max_steps} is not beyond step {self.step} of {checkpoint}; give a larger "
                "--max_steps or --stop_at"
            )

    # ---- the loop

    def __enter__(self) -> "Run":
        # skip evaluations that the log already has; run those that a kill prevented
        self._done, self.val_loss = self.rt.broadcast_from_main(self._prepare_directory)
        return self

    def _prepare_directory(self) -> tuple[list[str], float]:
        """config.json, log.jsonl and samples.txt as they have to be before the first step; the first rank only.

        Returns the kinds of records that the log has of the step that was resumed, and its validation loss.
        """
        out_dir = self.directory.path
        if self.directory.overwrite and self.directory.holds_run():
            self.directory.start_over()
        remove_leftovers(out_dir, *FILES, "step_*")
        log = out_dir / "log.jsonl"
        for step, path in reversed(checkpoint_steps(out_dir)):
            if step > self.step:  # damaged: the resume skipped it, and its step will be taken again
                set_aside(path, path.with_name(f"damaged_{path.name}"))
        if self.directory.checkpoint is None and log.exists():
            old = set_aside(log)  # its steps will be taken again: do not mix old and new metrics, and lose neither
            self.rt.print(f"{out_dir} holds no checkpoint: starting from step 0; the earlier log is now {old}")
        elif self.step == self.config.max_steps:
            self.rt.print(f"the run has taken all of its {self.step} steps; a larger --max_steps continues it")
        replace_file(out_dir / "config.json", json.dumps(asdict(self.config), indent=2) + "\n")
        self.report.open(self.step)
        start = dict(
            step=self.step,
            kind="run",
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            job=job_id(),
            **self.report.run_info,
            config=asdict(self.config),
            **about_machine(self.rt),
            tokenizer=self.data_fingerprint.get("tokenizer"),
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
        """The steps until `max_steps`, or until a signal: then it saves, and raises Stopped."""
        first = self.step + 1
        while self.step < self.max_steps:
            self.step += 1
            self._done = []
            if self._pending is None:  # a step's time begins here, after evaluations and saves, or where the last ended
                self._began = self.rt.mark_time()
            yield self.step
            if self.step == first:
                # from here on: before, there is nothing to save, and the default ends the process
                for signum in STOP_SIGNALS:
                    if signal.getsignal(signum) != signal.SIG_IGN:  # as nohup ignores SIGHUP
                        self.directory.locks.callback(signal.signal, signum, signal.signal(signum, self._on_signal))
                self.optimizer.check_resumable()  # now, and not after the night
            if self.step == self.max_steps:
                self._read_pending()
            if self._stop:
                self.max_steps = self.step
                self.save()
                self.rt.barrier()  # torchrun ends every rank once one has ended
                self.rt.print(f"stopped after step {self.step}; give the same command with --resume to continue")
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
        """The number of ranks that got a signal. All ranks call this together."""
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
                "lower --max_lr, or use --dtype float32, and --resume from the newest checkpoint"
            )

    def due(self, interval: int, kind: str = "", at_start: bool = False) -> bool:
        """Whether a save or an evaluation is due: every `interval` steps and at the end, with `at_start` also before
        the first; never for 0. False if the log already has a record of this `kind`, and once the run is to stop."""
        if interval == 0 or kind in self._done or self._stop:
            return False
        if self.step == 0:
            return at_start
        return self.step % interval == 0 or self.step == self.max_steps

    def save(self) -> None:
        """Write a checkpoint of this step: everything that the next one depends on. It is on the disk when this
        returns. All ranks call this, the first one writes, and the others wait for it in their next exchange."""
        self._read_pending()
        if self.step == self._saved:
            return
        if self._bad_steps:
            self.rt.print(f"step {self.step}: no checkpoint after a step that was not finite")
            return
        self._compare_weights()
        self._saved = self.step
        if not self.rt.is_main:
            return
        path = self.directory.path / f"step_{self.step:06d}"
        state = dict(
            step=self.step,
            tokens=self.tokens,
            optimizer=self.optimizer.state_dict(),
            identity=self.data_fingerprint,
            config=asdict(self.config),
        )
        write_checkpoint(path, self.save_weights, state)
        self.rt.print(f"saved {path}")  # durable: from here on it survives a power failure
        # only now: at no moment are there fewer checkpoints than before
        prune(self.directory.path, self.config.keep_checkpoints, self.report.val_losses())

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

    def end_here(self) -> None:
        """Make this step the last one: save it, and log what it took to get here."""
        self.max_steps = self.step
        self.save()
        if "target" not in self._done:
            seconds = sum(record.get("dt_ms") or 0 for record in of_kind(self.report.records, "train")) / 1e3
            petaflop = self.tokens * self.report.run_info["flops_per_token"] / 1e15
            self.record("target", tokens=self.tokens, hours=seconds / 3600, petaflop=petaflop)
