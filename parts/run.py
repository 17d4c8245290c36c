"""Bookkeeping for a training loop: logs steps, saves checkpoints, reacts to signals, and stops at a loss spike.

The loop is in the script, as `train` in train_gpt2.py, and needs six words of a Run:

    with run:                                           # opens the log, hears signals, waits for the last save
        for step, micro_batches in run.steps(batches):  # until max_steps or a signal
            ...                                         # one optimizer step
            run.log(loss, grad_norm, lr, n_targets)
            if run.due(checkpoint_interval):
                run.save()
            if run.due(eval_interval, "val"):
                run.record("val", loss=...)             # or run.end_here(), to make this step the last one

On a GPU metrics are read one step late, so that it never waits for the host, and checkpoints are written in the
background. Every rank makes the same decisions, because all of them follow from sums over the ranks.

This file never computes a loss or a gradient, and no function that does is passed to it.
"""

import json
import math
import os
import shlex
import signal
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from parts.card import write_card
from parts.checkpoint import (
    TRAIN_STATE,
    CheckpointWriter,
    copy_to_host,
    load_train_state,
    newest_intact,
    remove_leftovers,
    set_newer_aside,
)
from parts.cli import Stopped, UserError
from parts.directory import FILES, NOT_RESUMED, RunDirectory
from parts.files import replace_file, set_aside
from parts.log import of_kind
from parts.report import Report, about_machine
from parts.runtime import STOP_SIGNALS

EVALUATIONS = ("eval_interval", "hellaswag_interval", "sample_interval")


class Pending(NamedTuple):
    """A step whose metrics the device may still be computing."""

    step: int
    lr: float
    ended: object  # mark of the device's clock
    read_metrics: Callable[[], list[float]]  # waits for loss, grad_norm and the number of ranks that want to stop
    read_n_targets: Callable[[], int]


class Run:
    """A run in progress. `step` is the one under way, or the last one taken."""

    def __init__(self, directory: RunDirectory, config, files, optimizer, data_fingerprint: dict, run_info: dict):
        """A new run, or one that continues from `directory.checkpoint`, with its optimizer and counters. Nothing is
        written before `with`.

        `config` has the settled constants. `files` copies the weights, which the caller has loaded already.
        `data_fingerprint` is what the order of the data depends on besides constants. `run_info` goes to the log:
        `parameters`, `data`, `base`; in pretraining also `flops_per_token`, for MFU, and `uniform_loss`, ln V, to
        compare the first loss with. Raises UserError if a fixed constant or the fingerprint is not the checkpoint's,
        and on a rank that differs from the first one in constants, precision or data.
        """
        self.directory = directory
        self.rt = directory.rt
        self.config = config
        self.files = files
        self.optimizer = optimizer
        self.data_fingerprint = data_fingerprint
        self._compare_with_rank_0()
        self.max_steps = config.max_steps
        self.step = 0
        self.tokens = 0
        self._watch = LossWatch(config.spike_threshold)
        resumed = {}
        if directory.checkpoint:
            changed = self._restore(directory.checkpoint)
            resumed = dict(resumed_from=str(directory.checkpoint), changed=changed)
        self.report = Report(directory, config, run_info | resumed)
        self.val_loss = math.inf
        self._done: list[str] = []  # the kinds of records that the log has of this step
        self._writer = CheckpointWriter(directory.path, config.keep_checkpoints, directory.check)
        self._saved = self.step if directory.checkpoint else -1  # the last step with a checkpoint
        self._taken = 0  # steps, by this process
        self._pending: deque[Pending] = deque()
        self._signum = 0  # of a signal to this rank
        self._stop = False  # all ranks know of a signal to any of them, or of a checkpoint that could not be written

    def _compare_with_rank_0(self) -> None:
        """Each rank has settled its constants and opened its files by itself, and on another node they may differ."""
        own = asdict(self.config) | dict(dtype=str(self.rt.dtype), compile=self.rt.compile)
        del own["threads"]
        for mine, what in (own, "the constants"), (self.data_fingerprint, "the data"):
            of_main = self.rt.broadcast_from_main(lambda mine=mine: mine)
            for name in of_main:
                if mine[name] != of_main[name]:
                    raise UserError(
                        f"{what} here are not those of rank 0: {name} is {mine[name]}, and there {of_main[name]}; "
                        "give constants that all ranks can use, such as --dtype, and copy the same files to all nodes"
                    )

    def _prepare_directory(self) -> tuple[list[str], float]:
        """config.json, log.jsonl and samples.txt as they have to be before the first step; the first rank only.

        Returns the kinds of records that the log has of the step that was resumed, and its validation loss.
        """
        out_dir = self.directory.path
        checkpoint = self.directory.checkpoint
        if self.directory.requested["overwrite"] and self.directory.holds_run():
            self.directory.start_over()
        remove_leftovers(out_dir, FILES)
        log = out_dir / "log.jsonl"
        if checkpoint:
            set_newer_aside(out_dir, self.step, "damaged")  # the resume skipped them; their steps will be taken again
        elif log.exists():
            old = set_aside(log)  # its steps will be taken again: do not mix old and new metrics, and lose neither
            self.rt.print(f"{out_dir} holds no checkpoint: starting from step 0; the earlier log is now {old}")
        replace_file(out_dir / "config.json", json.dumps(self.directory.requested, indent=2) + "\n")
        self.report.open(self.step)
        start = dict(
            step=self.step,
            kind="run",
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            **self.report.run_info,
            config=asdict(self.config),
            **about_machine(self.rt),
            tokenizer=self.data_fingerprint.get("tokenizer"),
        )
        if checkpoint:
            changed = self.report.run_info["changed"]
            notes = [f"; --{name} {old} is now {new}" for name, (old, new) in changed.items()]
            self.rt.print(f"resuming from {checkpoint}{''.join(notes)}")
        self.report.append(start)
        done = [record["kind"] for record in self.report.records if record["step"] == self.step]
        return done, self.report.val_losses().get(self.step, math.inf)

    # ---- the loop

    def __enter__(self) -> "Run":
        # skip evaluations that the log already has; run those that a kill prevented
        self._done, self.val_loss = self.rt.broadcast_from_main(self._prepare_directory)
        # what was ignored when we started, as nohup ignores SIGHUP, stays ignored
        heard = [s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        for signum in heard:
            self.directory.locks.callback(signal.signal, signum, signal.signal(signum, self._on_signal))
        return self

    def _on_signal(self, signum: int, frame) -> None:
        """Set a flag that `log` reads once a step; a second Ctrl-C interrupts at once. Before the first step of this
        process there is nothing to save, and compiling it may take minutes: end at once."""
        if not self._taken:
            os.write(2, b"stopped before the first step\n")  # print may have been interrupted, and is not reentrant
            os._exit(128 + signum)
        self._signum = signum  # ranks may get it in different steps: `log` makes them agree on one
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, error_type, error, _) -> None:
        ended_well = error_type in (None, Stopped)
        try:
            if ended_well:  # on an error the writer thread still finishes: Python joins it at exit
                self._writer.wait()
            self.report.close()
            self.directory.check()
            if ended_well and self.rt.is_main and self._taken and self._saved == self.step:
                write_card(self._checkpoint(), self.report.name, self.report.records)
        finally:
            self.directory.locks.close()  # and restore the handlers of signals
        if error_type is None and self._stops_wanted() > 0:
            raise Stopped(self._signum or signal.SIGTERM)
        if self._signum and error_type not in (None, Stopped, UserError):
            raise Stopped(self._signum) from error  # of a compiler, for instance, that got the signal, too

    def _checkpoint(self) -> Path:
        """Where the checkpoint of this step is, or would be."""
        return self.directory.path / f"step_{self.step:06d}"

    def _stops_wanted(self) -> torch.Tensor:
        """The number of ranks that got a signal or could not write a checkpoint. All ranks call this together."""
        return self.rt.sum(torch.full((), float(self._signum != 0 or self._writer.failed), device=self.rt.device))

    def steps(self, batches: Iterator) -> Iterator[tuple[int, list]]:
        """(step, its micro-batches) until `max_steps`. Raises Stopped after a signal, with a checkpoint of the last
        step."""
        while self.step < self.max_steps:
            self.step += 1
            self._done = []
            if not self._pending:  # a step's time begins here, after evaluations and saves, or where the last one ended
                self._began = self.rt.mark_time()
            yield self.step, next(batches)
            if self.step == self.max_steps:
                self._read_pending()
            if self._stop:
                self._stop_here()

    def log(self, loss, grad_norm, lr: float, n_targets) -> None:
        """Hand over a step's metrics, scalar tensors that are the same on every rank, and read those that are ready: on
        a GPU the last step's, else this one's. All ranks call this together, because it sums their signals.

        Reading logs and counts a step; a signal to any rank then ends `steps`. Raises UserError after a loss spike, or
        too many bad steps in a row.
        """
        # Reading a number now would let the GPU run dry: the host must be ahead, launching the kernels of the next step
        # while those of this one run. The count of targets is separate, since fp32 is exact only up to 2**24.
        metrics = torch.stack([loss, grad_norm, self._stops_wanted()])
        # record the mark before the copies: when a copy has arrived, the device has passed the mark
        ended = self.rt.mark_time()
        read_n_targets = (lambda: n_targets) if isinstance(n_targets, int) else self.rt.read_later(n_targets)
        self._pending.append(Pending(self.step, lr, ended, self.rt.read_later(metrics), read_n_targets))
        self._taken += 1
        self._read_pending(self.rt.steps_ahead)

    def due(self, interval: int, kind: str = "", at_start: bool = False) -> bool:
        """Whether a save or an evaluation is due: every `interval` steps and at the end, with `at_start` also before
        the first; never for 0. False if the log already has a record of this `kind`, and once the run is to stop."""
        if interval == 0 or kind in self._done or self._stop:
            return False
        if self.step == 0:
            return at_start
        return self.step % interval == 0 or self.step == self.max_steps

    def save(self) -> None:
        """Copy everything that the next step depends on; the copy is written while training continues, but before an
        evaluation of this step, which may fail. All ranks call this, because a model that is sharded over them is
        gathered on the first one.

        Waits for the metrics of all steps, and for the checkpoint under way. While the loss is high nothing is saved,
        unless the run ends here: the next steps tell a spike from an odd batch.
        """
        self._read_pending()
        self._writer.wait()
        if self.step == self._saved:
            return
        if self._watch.high and self.step < self.max_steps:
            self.rt.print(f"step {self.step}: no checkpoint while the loss is high")
            return
        self._saved = self.step
        if not (self.rt.is_main or self.rt.mesh):  # not sharded: the other ranks have nothing to add
            return
        state = dict(
            step=self.step,
            tokens=self.tokens,
            optimizer=self.optimizer.state_dict(),
            spikes=self._watch.state_dict(),
            identity=self.data_fingerprint,
            config=asdict(self.config),
            requested=self.directory.requested,
        )
        files = self.files.copy()
        state = copy_to_host(state, self.rt.is_main)
        if self.rt.is_main:
            self._writer.save(self._checkpoint(), files, state, self.report.val_losses(), self.rt.print)
            self.report.draw()
            evaluates = any(self.due(getattr(self.config, name, 0)) for name in EVALUATIONS)
            if evaluates or not self.rt.writes_in_background:
                self._writer.wait()

    def record(self, kind: str, **metrics) -> None:
        """Log an evaluation or a sample of this step, and print it. Waits for the metrics of all steps, so that the log
        has them first. All ranks call this together, because it sums their signals, as `log` does."""
        self._read_pending()
        self._stop = self._stop or bool(self._stops_wanted() > 0)
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
            milliseconds = sum(record.get("dt_ms") or 0 for record in of_kind(self.report.records, "train"))
            petaflop = self.tokens * self.report.run_info["flops_per_token"] / 1e15
            self.record("target", tokens=self.tokens, hours=milliseconds / 3.6e6, petaflop=petaflop)

    # ---- reading the metrics of finished steps, and reacting to them

    def _read_pending(self, unread: int = 0) -> None:
        """Wait for and log steps until the metrics of at most `unread` are left. Raises UserError after a spike or too
        many bad steps, on all ranks alike."""
        while len(self._pending) > unread:
            pending = self._pending.popleft()
            loss, grad_norm, stops_wanted = pending.read_metrics()
            n_targets = pending.read_n_targets()
            seconds = self.rt.seconds_between(self._began, pending.ended)
            self._began = pending.ended
            self.tokens += n_targets
            metrics = dict(loss=loss, lr=pending.lr, grad_norm=grad_norm, tokens=self.tokens)
            self.report.train_step(pending.step, metrics, seconds, n_targets)
            self._stop = self._stop or stops_wanted > 0
            self._watch.add(loss, grad_norm)
            if self._watch.bad == self.config.max_bad_steps:
                raise UserError(
                    f"no finite loss or gradient in {self._watch.bad} steps, up to step {pending.step}; "
                    "lower --max_lr, or use --dtype float32, and --resume from the newest checkpoint"
                )
            if self._watch.is_spike:
                self._raise_spike(pending.step, loss)

    def _raise_spike(self, step: int, loss: float) -> None:
        """Raise the UserError that says how to continue from before a spike. Checkpoints since then are renamed, so
        that a resume does not find them: the weights of the step before the first high loss are suspect, too."""
        self._writer.wait()
        self.directory.check()

        before = step - LossWatch.PATIENCE

        def find_good() -> Path | None:
            good = newest_intact(self.directory.path, before)
            set_newer_aside(self.directory.path, step=before - 1, why="spoilt")
            return good

        good = self.rt.broadcast_from_main(find_good)
        jump = f"step {step}: the loss has jumped from a median of {self._watch.median():.3f} to {loss:.3f}"
        lower = f"--max_lr {self.config.max_lr / 2:g}"
        if good is None:
            raise UserError(f"{jump}, and there is no checkpoint from before it; start again with --overwrite {lower}")
        raise UserError(
            f"{jump}; the newest checkpoint from before it is {good}: give the same command with --resume {lower}, "
            "or with --resume --spike_threshold 0 to accept the jump"
        )

    def _stop_here(self) -> None:
        """Save this step and raise Stopped; or raise the UserError of a checkpoint that could not be written."""
        self.max_steps = self.step
        try:
            self.save()
            self._writer.wait()
        finally:
            self.rt.barrier()  # torchrun ends every rank once one has ended
        self.rt.print(f"stopped after step {self.step}; give the same command with --resume to continue")
        raise Stopped(self._signum or signal.SIGTERM)

    # ---- resuming

    def _restore(self, checkpoint: Path) -> dict:
        """Everything but the weights, as `save` stored it. Returns the constants that have changed since, {name: (old,
        new)}. Raises UserError for a state that is damaged or belongs to another run."""
        state = load_train_state(checkpoint)
        try:
            if int(checkpoint.name.removeprefix("step_")) != state["step"]:
                raise ValueError(f"it is of step {state['step']}")
            changed = self._changed_constants(state, checkpoint)
            self.optimizer.load_state_dict(state["optimizer"], state["step"])
            self._watch.load_state_dict(state["spikes"])
            self.step = int(state["step"])
            self.tokens = int(state["tokens"])
            skipped = int(state.get("data_step", self.step)) - self.step
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as e:
            reason = f"no {e}" if isinstance(e, KeyError) else str(e)
            raise UserError(f"{checkpoint}/{TRAIN_STATE} does not fit this run: {reason}; resume from another") from e
        if skipped:  # by a version that went back after a spike
            self.rt.print(f"note: {skipped} batches that were skipped after a loss spike are read from here on")
        return changed

    def _changed_constants(self, state: dict, checkpoint: Path) -> dict:
        """Compare what was requested now with what was requested then: a recipe's default that a checkpoint's sizes
        replaced is no change. Raises UserError for a constant that the data order or the model depends on."""
        for name, value in self.data_fingerprint.items():
            # earlier versions did not store the fingerprint of the validation data
            if state["identity"].get(name, value if name == "validation" else None) != value:
                raise UserError(f"{checkpoint} was trained with another {name}; give that one, or another --out_dir")
        requested = state.get("requested") or state["written"]  # its name in earlier versions
        changed = {}
        for name, now in self.directory.requested.items():
            settled = state["config"].get(name)  # what it came to, for instance a micro_batch_size of 0 to 16
            if now in (requested.get(name), settled) or name in NOT_RESUMED | {"init_from"}:
                continue
            if name in self.directory.fixed:
                raise UserError(f"{checkpoint} was trained with --{name} {settled}, not {now}; give another --out_dir")
            changed[name] = (settled, getattr(self.config, name))
        return changed


class LossWatch:
    """Counts steps in a row that are not finite (`bad`), and those with a loss more than `threshold` above the median
    of the good ones (`high`). PATIENCE high ones are a spike; none before MIN_LOSSES losses, or if the threshold is 0.
    """

    WINDOW = 100  # a median over so many steps moves slowly
    MIN_LOSSES = 20  # one over fewer is noise
    PATIENCE = 3  # odd batches come singly, spikes do not

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.losses = deque(maxlen=self.WINDOW)  # of good steps
        self.high = 0
        self.bad = 0

    def add(self, loss: float, grad_norm: float) -> None:
        if not math.isfinite(loss + grad_norm):  # it has changed no weight, so it is no spike
            self.bad += 1
            return
        self.bad = 0
        known = self.threshold > 0 and len(self.losses) >= self.MIN_LOSSES
        if known and loss > self.median() + self.threshold:
            self.high += 1
        else:  # high losses stay out of the median, or it would follow them
            self.high = 0
            self.losses.append(loss)

    @property
    def is_spike(self) -> bool:
        return self.high >= self.PATIENCE

    def median(self) -> float:
        return statistics.median(self.losses)

    def state_dict(self) -> dict:
        return dict(losses=list(self.losses), high=self.high)

    def load_state_dict(self, state: dict) -> None:
        losses = list(map(float, state["losses"]))
        if not all(map(math.isfinite, losses)) or not 0 <= int(state["high"]) < self.PATIENCE:
            raise ValueError("its losses are not those of a run")
        self.losses = deque(losses, maxlen=self.WINDOW)
        self.high = int(state["high"])
