"""A run in progress: what a training loop tells, and what it gets back.

The loop is in the script, as `train` in train_gpt2.py: it takes the steps, and tells the Run about them.

A Run reads metrics one step late on a GPU, so that the GPU never waits for the host. It writes checkpoints in the
background, and handles signals, steps with a non-finite gradient, and loss spikes. Every rank makes the same decisions,
because all of them follow from sums over the ranks.

This file never computes a loss or a gradient, and no function that does is passed to it.
"""

import json
import math
import shlex
import signal
import statistics
import sys
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from parts.checkpoint import (
    TRAIN_STATE,
    CheckpointWriter,
    Snapshot,
    copy_to_host,
    load_train_state,
    newest_intact,
    remove_after,
    remove_leftovers,
    rename_damaged,
)
from parts.cli import Stopped, UserError
from parts.directory import FILES, OF_A_COMMAND, RunDirectory
from parts.files import replace_file, set_aside
from parts.log import of_kind
from parts.report import RunLog, about_machine

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Run:
    """A run in progress. The loop reads `step`, the one under way or the last one taken, and `data_step`, the number of
    batches read, which is ahead of `step` by those that were skipped after spikes."""

    def __init__(self, directory: RunDirectory, config, files, optimizer, data_fingerprint: dict, facts: dict):
        """Start, or continue from `directory.checkpoint` with its optimizer and counters.

        `config` has the settled constants. `files` copies and restores the weights, which the caller has loaded
        already. `data_fingerprint` is what the order of the data depends on besides constants. `facts` go to the log:
        `parameters`; in pretraining also `flops_per_token`, for MFU, and `uniform_loss`, ln V, to compare the first
        loss with. Raises UserError before anything changes if a fixed constant or the fingerprint is not the
        checkpoint's, and on a rank whose fingerprint is not that of the first one.
        """
        self.directory = directory
        self.out_dir = directory.path
        self.rt = directory.rt
        # each rank has opened its own files, and on another node they may be others
        if data_fingerprint != self.rt.broadcast_from_main(lambda: data_fingerprint):
            raise UserError("the data here is not that of rank 0; copy the same files to all nodes")
        self.config = config
        self.files = files
        self.optimizer = optimizer
        self.data_fingerprint = data_fingerprint
        self.facts = facts
        self.flops_per_token = facts.get("flops_per_token", 0)
        self.max_steps = config.max_steps
        self.step = 0
        self.data_step = 0
        self.tokens = 0
        self._spikes = SpikeDetector(config.spike_threshold)
        changed = self._restore(directory.checkpoint) if directory.checkpoint else {}
        self.log = RunLog(directory, config)
        # what the log has of this step is not run again; evaluations that a kill cut off after the checkpoint are
        self._done, self.val_loss = self.rt.broadcast_from_main(lambda: self._prepare_directory(changed))
        self._writer = CheckpointWriter(self.out_dir, config.keep_checkpoints, directory.check)
        self._first_step = self.step  # of this process
        self._saved = self.step if directory.checkpoint else -1  # the last step with a checkpoint
        self._launched = deque()  # steps whose metrics have not been read yet
        self._spike = None  # (step, loss) of one that `steps` still has to undo
        self._bad_steps = 0  # in a row
        self._signum = 0  # of a signal to this rank
        self._stop = False  # a signal to any rank, or a checkpoint that could not be written

    def _prepare_directory(self, changed: dict) -> tuple[list[str], float]:
        """config.json, log.jsonl and samples.txt as they have to be before the first step; the first rank only.

        Returns the kinds of records that the log has of the step that was resumed, and its validation loss.
        """
        checkpoint = self.directory.checkpoint
        if self.directory.requested["overwrite"] and self.directory.holds_run():
            self.directory.start_over()
        remove_leftovers(self.out_dir, FILES)
        log = self.out_dir / "log.jsonl"
        if checkpoint:
            rename_damaged(newer_than=checkpoint)
        elif log.exists():
            old = set_aside(log)  # its steps will be taken again: do not mix old and new metrics, and lose neither
            self.rt.print(f"{self.out_dir} holds no checkpoint: starting from step 0; the earlier log is now {old}")
        config = asdict(self.config)
        replace_file(self.out_dir / "config.json", json.dumps(config, indent=2) + "\n")
        self.log.open(self.step)
        start = dict(
            step=self.step,
            kind="run",
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            **self.facts,
            config=config,
            written={name: value for name, value in self.directory.requested.items() if value != config[name]},
            **about_machine(self.rt),
            tokenizer=self.data_fingerprint.get("tokenizer"),
        )
        if checkpoint:
            start |= dict(resumed_from=str(checkpoint), changed=changed)
            notes = [f"; --{name} {old} is now {new}" for name, (old, new) in changed.items()]
            self.rt.print(f"resuming from {checkpoint}{''.join(notes)}")
        self.log.append(start)
        done = [record["kind"] for record in self.log.records if record["step"] == self.step]
        return done, self.log.val_losses().get(self.step, math.inf)

    # ---- the loop

    def __enter__(self) -> "Run":
        # what was ignored when we started, as nohup ignores SIGHUP, stays ignored
        heard = [s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        self._handlers = {s: signal.signal(s, self._remember) for s in heard}
        return self

    def __exit__(self, error_type, *_) -> None:
        try:
            if error_type is None:  # on an error the writer thread still finishes: Python joins it at exit
                self._writer.wait()
            self.log.close()
            self.directory.check()
            self._renew_card()
        finally:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
            self.directory.locks.close()
        if error_type is None and self._stops_wanted() > 0:
            raise Stopped(self._signum or signal.SIGTERM)

    def _remember(self, signum: int, frame) -> None:
        """A signal sets a flag, which is read once a step; a second Ctrl-C ends the process at once."""
        self._signum = signum  # ranks may get it in different steps: log_step makes them agree on one
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _stops_wanted(self) -> torch.Tensor:
        """The number of ranks that got a signal or could not write a checkpoint. All ranks call this together."""
        return self.rt.sum(torch.full((), float(self._signum != 0 or self._writer.failed), device=self.rt.device))

    def steps(self, batches: Iterator) -> Iterator[tuple[int, list]]:
        """(step, its micro-batches) until `max_steps`. After a spike `step` goes back, but the data does not.

        Raises Stopped after a signal, with a checkpoint of the last step.
        """
        while self.step < self.max_steps:
            self.step += 1
            self.data_step += 1
            self._done = []
            if not self._launched:  # none is under way: a step's time begins here, after evaluations and saves
                self._began = self.rt.mark_time()
            yield self.step, next(batches)
            if self.step == self.max_steps:
                self._read_steps()  # the last ones may hold a spike, and are then taken again
            if self._stop:
                self._stop_here()
            if self._spike:
                self._roll_back()

    def log_step(self, loss, grad_norm, lr: float, n_targets) -> None:
        """Hand over a step's metrics, scalar tensors that are the same on every rank, and read those that are ready:
        on a GPU the last step's, else this one's.

        What is read is logged and counted, and may change what follows: a spike, or a signal to any rank, waits for
        `steps` to act on it; too many bad steps in a row raise UserError. All ranks call this together, because it sums
        their signals.
        """
        # Reading a number now would let the GPU run dry: the host must be ahead, launching the kernels of the next step
        # while those of this one run. The count of targets is separate, since fp32 is exact only up to 2**24.
        metrics = torch.stack([loss, grad_norm, self._stops_wanted()])
        # the mark first: once a copy has arrived, the device has passed it
        self._launched.append(
            (self.step, lr, self.rt.mark_time(), self.rt.read_later(metrics), self.rt.read_later(n_targets))
        )
        self._read_steps(self.rt.steps_ahead)

    def catch_up_if_due(self, interval: int, kind: str = "", at_start: bool = False) -> bool:
        """Whether a save or an evaluation is due; if so, this waits for all that it depends on (see `catch_up`), and
        after a signal stops the run instead.

        True every `interval` steps and at the end, with `at_start` also before the first; never for 0. False if the log
        already has a record of this `kind`, and while a spike waits to be undone: spoilt weights are neither saved nor
        evaluated. All ranks call this together.
        """
        if interval == 0 or self._spike or kind in self._done:
            return False
        due = self.step % interval == 0 or self.step == self.max_steps
        if not due or (self.step == 0 and not at_start):
            return False
        self.catch_up()
        return self._spike is None

    def catch_up(self) -> None:
        """Wait until the metrics of all steps are read and the checkpoint under way is on the disk, because what comes
        next may take long, or fail. All ranks call this together.

        After a signal to any rank, saves this step and raises Stopped. If a spike shows only now, `save` and `record`
        do nothing, and `steps` undoes it.
        """
        self._read_steps()
        self._writer.wait()
        if self._stop or self._stops_wanted() > 0:
            self._stop_here()

    def save(self) -> None:
        """Copy everything that the next step depends on; the copy is written while training continues. All ranks call
        this, because a model that is sharded over them is gathered on the first one."""
        if self._spike or self.step == self._saved:
            return
        self._saved = self.step
        if not (self.rt.is_main or self.rt.mesh):  # not sharded: the other ranks have nothing to add
            return
        state = dict(
            step=self.step,
            data_step=self.data_step,
            tokens=self.tokens,
            optimizer=self.optimizer.state_dict(),
            spikes=self._spikes.state_dict(),
            identity=self.data_fingerprint,
            config=asdict(self.config),
            written=self.directory.requested,
        )
        files = self.files.copy()
        state = copy_to_host(state, self.rt.is_main)
        if self.rt.is_main:
            snapshot = Snapshot(self.step, [files, self.log.card()], state)
            self._writer.save(snapshot, self.log.val_losses(), self.rt.print)
            if not self.rt.writes_in_background:
                self._writer.wait()

    def record(self, kind: str, **metrics) -> None:
        """Log an evaluation or a sample of this step, print it, and redraw the curve."""
        if self._spike:
            return
        if kind == "val":
            self.val_loss = metrics["loss"]
        if kind in ("val", "hellaswag") and self.flops_per_token:
            metrics["flops"] = self.tokens * self.flops_per_token
        self.log.evaluation(self.step, kind, metrics)
        self._renew_card()

    def _renew_card(self) -> None:
        """Add what was measured since the checkpoint of this step to its card, unless an earlier process wrote that:
        somebody may have edited it."""
        checkpoint = self.out_dir / f"step_{self.step:06d}"
        if self.rt.is_main and self._first_step < self.step == self._saved and checkpoint.is_dir():
            self.log.card().write(checkpoint)

    def end_here(self) -> None:
        """Make this step the last one: save it, and log what it took to get here."""
        if self._spike:
            return
        self.max_steps = self.step
        self.save()
        if "target" not in self._done:
            milliseconds = sum(record.get("dt_ms") or 0 for record in of_kind(self.log.records, "train"))
            petaflop = self.tokens * self.flops_per_token / 1e15
            self.record("target", tokens=self.tokens, hours=milliseconds / 3.6e6, petaflop=petaflop)

    def print_results(self) -> None:
        """The last validation losses and the speed; all ranks may call this."""
        measured = [r for r in of_kind(self.log.records, "val") if None not in (r["loss"], r.get("bpb"))]
        if measured:
            val = measured[-1]
            self.rt.print(f"\nvalidation loss {val['loss']:.4f} nats per token, {val['bpb']:.4f} bits per byte")
        speed = f"{self.log.median_rate():,.0f} tokens/s, {self.rt.peak_memory() / 2**30:.2f} GiB at the peak"
        self.rt.print(f"{self.tokens:,} tokens in {self.step:,} steps, {speed}")

    # ---- reading the metrics of finished steps, and reacting to them

    def _read_steps(self, unread: int = 0) -> None:
        """Read metrics until those of at most `unread` steps are left, or one of them is a spike."""
        while len(self._launched) > unread and self._spike is None:
            self._read_step(*self._launched.popleft())

    def _read_step(self, step: int, lr: float, ended, read_metrics, read_n_targets) -> None:
        """Wait for a step, log it, and notice a stop, a spike or a bad step. Raises UserError after too many."""
        loss, grad_norm, stop = read_metrics()
        n_targets = read_n_targets()
        seconds = self.rt.seconds_between(self._began, ended)
        self._began = ended
        self.tokens += n_targets
        metrics = dict(loss=loss, lr=lr, grad_norm=grad_norm, tokens=self.tokens)
        if step == self._first_step + 1:
            self._compare_lr(lr)
        self.log.train_step(step, metrics, seconds, n_targets, self.flops_per_token)
        if step == 1 and "uniform_loss" in self.facts:
            self.rt.print(f"first loss {loss:.3f}; if all tokens are equally likely, {self.facts['uniform_loss']:.3f}")
        if stop > 0:
            self._stop = True  # acted on between steps, where all ranks have read the same metrics
        if math.isfinite(loss + grad_norm):
            self._bad_steps = 0
            if self._spikes.add(loss):
                self._spike = (step, loss)
        else:  # it has changed no weight, so it is no spike
            self._bad_steps += 1
        if self._bad_steps >= self.config.max_bad_steps:
            raise UserError(
                f"no finite loss or gradient in {self._bad_steps} steps, up to step {step}; "
                "lower --max_lr, or use --dtype float32, and --resume from the newest checkpoint"
            )

    def _compare_lr(self, lr: float) -> None:
        """A longer --max_steps stretches the schedule: say so if a rate that had fallen rises again."""
        trained = of_kind(self.log.records, "train")
        before = trained[-1].get("lr") if trained else None
        if before is not None and lr > 2 * before:
            self.rt.print(
                f"the learning rate rises from {before:.3g} at step {self._first_step} to {lr:.3g}, "
                f"because the schedule now spans {self.max_steps} steps (docs/resume.md)"
            )

    def _stop_here(self) -> None:
        """Save this step and raise Stopped; or raise the UserError of a checkpoint that could not be written."""
        self._read_steps()
        if self._spike:
            self._roll_back()
        try:
            self.save()
            self._writer.wait()
        finally:
            self.rt.barrier()  # torchrun ends every rank once one has ended
        self.rt.print(f"stopped after step {self.step}; give the same command with --resume to continue")
        raise Stopped(self._signum or signal.SIGTERM)

    def _roll_back(self) -> None:
        """After a spike: restore the newest checkpoint from before it.

        The data position is not rewound, so the batches since then are skipped, as in PaLM (Chowdhery et al. 2022,
        section 5.1). Without an earlier checkpoint the jump is accepted. Raises UserError if this does not help.
        """
        step, loss = self._spike
        self._spike = None  # from here on `record` and `save` work again
        self._writer.wait()
        before = step - self._spikes.PATIENCE  # the weights of the step before the first high loss are suspect, too
        self.directory.check()  # what is newer will be removed
        found = self.rt.broadcast_from_main(lambda: newest_intact(self.out_dir, before))
        if not found:
            self.rt.print(f"step {step}: the loss has jumped to {loss:.3f}, with no earlier checkpoint to roll back to")
            return self._spikes.accept()
        # newer checkpoints hold spoilt weights: a resume must not find them
        self.rt.broadcast_from_main(lambda: remove_after(found))
        median = self._spikes.median()
        data_step = self.data_step
        self._spikes.count(found)
        self.files.load(found)
        self._restore(found)
        self.data_step = data_step
        self._saved = self.step
        self._launched.clear()  # steps from after the jump
        self.log.cut(self.step)
        self.record("rollback", from_step=step, loss=loss, median=median)

    # ---- resuming

    def _restore(self, checkpoint: Path) -> dict:
        """Everything but the weights, as `save` stored it. Returns the constants that have changed since, {name: (old,
        new)}. Raises UserError for a state that is damaged or belongs to another run."""
        state = load_train_state(checkpoint)
        try:
            if int(checkpoint.name.removeprefix("step_")) != state["step"]:
                raise ValueError(f"it is of step {state['step']}")
            changed = self._changed_constants(state, checkpoint)
            self.optimizer.load_state_dict(state["optimizer"])
            self._spikes.load_state_dict(state["spikes"])
            self.step = int(state["step"])
            self.data_step = int(state["data_step"])
            self.tokens = int(state["tokens"])
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            reason = f"no {e}" if isinstance(e, KeyError) else str(e)
            raise UserError(f"{checkpoint}/{TRAIN_STATE} does not fit this run: {reason}; resume from another") from e
        return changed

    def _changed_constants(self, state: dict, checkpoint: Path) -> dict:
        """Compare what was requested now with what was requested then: a recipe's default that a checkpoint's sizes
        replaced is no change. Raises UserError for a constant that the data order or the model depends on."""
        for name, value in self.data_fingerprint.items():
            if state["identity"].get(name) != value:
                raise UserError(f"{checkpoint} was trained with another {name}; give that one, or another --out_dir")
        changed = {}
        for name, now in self.directory.requested.items():
            requested = state["written"].get(name)  # by a person or a recipe
            settled = state["config"].get(name)  # what it came to, for instance a micro_batch_size of 0 to 16
            if now in (requested, settled) or name in OF_A_COMMAND | {"init_from"}:
                continue
            if name in self.directory.fixed:
                raise UserError(f"{checkpoint} was trained with --{name} {settled}, not {now}; give another --out_dir")
            changed[name] = (settled, getattr(self.config, name))
        return changed


class SpikeDetector:
    """A spike is PATIENCE steps in a row with a loss more than `threshold` above the median of the good steps. There is
    none before MIN_LOSSES losses, and none if the threshold is 0."""

    WINDOW = 100  # a median over so many steps moves slowly
    MIN_LOSSES = 20  # one over fewer is noise
    PATIENCE = 3  # odd batches come singly, spikes do not
    MAX_RETURNS = 3  # a spike that recurs so often, each time on other data, is not caused by the data

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.losses = deque(maxlen=self.WINDOW)  # of good steps
        self.high = 0  # steps in a row
        self.returns = Counter()  # to each checkpoint

    def median(self) -> float:
        return statistics.median(self.losses)

    def add(self, loss: float) -> bool:
        """Add the loss of a step; returns True for a spike."""
        known = self.threshold > 0 and len(self.losses) >= self.MIN_LOSSES
        if known and loss > self.median() + self.threshold:
            self.high += 1
        else:  # high losses stay out of the median, or it would follow them
            self.high = 0
            self.losses.append(loss)
        return self.high >= self.PATIENCE

    def accept(self) -> None:
        """Treat the high losses as normal from here on."""
        self.losses.clear()
        self.high = 0

    def count(self, checkpoint: str) -> None:
        """Count a rollback. Raises UserError after too many to the same checkpoint: other data does not help then."""
        self.returns[checkpoint] += 1
        if self.returns[checkpoint] > self.MAX_RETURNS:
            raise UserError(
                f"the loss jumps again after {self.MAX_RETURNS} rollbacks to {checkpoint}, each with other data; "
                "lower --max_lr and --resume, or accept the jump with --spike_threshold 0"
            )

    def state_dict(self) -> dict:
        return dict(losses=list(self.losses), high=self.high)

    def load_state_dict(self, state: dict) -> None:
        self.losses = deque(map(float, state["losses"]), maxlen=self.WINDOW)
        self.high = int(state["high"])
