"""One run directory: what a training loop leaves behind, and what it goes on from.

    OUT_DIR/   config.json, log.jsonl, samples.txt, learning_curve.png, step_NNNNNN/

The loop itself is in the script; it does the step and tells a Run about it:

    run = Run.open(config, rt, fixed)                # the lock, and the checkpoint to resume from, if any
    run.begin(config, files, optimizer, ...)         # everything is known to work: from here on the directory changes
    with run:
        for step, batch in run.steps(batches):
            ...                                      # forward, backward, clip, step
            run.log_step(loss, grad_norm, lr, n_targets)
            if run.due(config.checkpoint_interval):
                run.save()
            if run.due(config.eval_interval, "val"):
                run.record("val", ...)

Behind these calls: figures that are read one step late on a GPU, so that it never waits for the host; checkpoints in
the background; signals; steps with a non-finite gradient; loss spikes and the way back from them. Every rank comes to
the same decisions, because they rest on sums over the ranks alone.

This file never computes a loss or a gradient, and is handed no function that does.
"""

import contextlib
import json
import math
import re
import shutil
import signal
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from cli import Stopped, UserError, only_one, read_json, replace_file
from run.checkpoint import (
    WEIGHTS,
    CheckpointWriter,
    checkpoint_steps,
    load_train_state,
    newest_sound,
    remove,
    remove_after,
    set_aside,
    snapshot,
)
from run.log import RunLog, about_machine
from run.runtime import Runtime

FILES = ("config.json", "log.jsonl", "samples.txt", "learning_curve.png")  # besides checkpoints
MOVING = ".overwritten.part"  # where --overwrite collects the run before
OLD_RUN = ".overwritten"  # where --overwrite keeps the run before, until this one has a checkpoint
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Run:
    """See the top. Attributes for the loop: `step`, the last one taken; `data_step`, which counts the batches read and
    is ahead of `step` by those that were left out after a spike; `checkpoint`, a Path to go on from, or None."""

    @classmethod
    def open(cls, config, rt: Runtime, fixed: tuple[str, ...] = ()) -> "Run":
        """Take the lock of `config.out_dir` and find the checkpoint to resume from; nothing else is changed yet.

        `fixed` names the constants that a resume must not change. Raises UserError rather than overwrite a run.
        """
        run = cls(config, rt, fixed)
        if config.resume and config.overwrite:
            raise UserError("--resume continues the run and --overwrite replaces it; give one of them")
        rt.on_main(run._lock)  # first: what is found below must not change under us
        found = rt.on_main(run._find_checkpoint)
        run.checkpoint = Path(found) if found else None
        # nodes without a shared disk: better one line now than a rank that waits for the others forever
        seen = run.checkpoint is None or run.checkpoint.is_dir()
        if (n := int(rt.sum(torch.tensor(int(seen), device=rt.device)))) < rt.world_size:
            where = "put --out_dir where all nodes see it"
            raise UserError(f"{run.checkpoint} is seen by {n} of {rt.world_size} ranks; {where}")
        return run

    def __init__(self, config, rt: Runtime, fixed: tuple[str, ...]):
        self.rt, self.written, self.fixed = rt, asdict(config), fixed  # written: the constants as a person wrote them
        self.out_dir = Path(config.out_dir)
        self.checkpoint: Path | None = None
        self.step = self.data_step = self.tokens = 0
        self._locks = contextlib.ExitStack()  # held from `open` to the end of the `with` block

    def _lock(self) -> None:
        if self.out_dir.exists() and not self.out_dir.is_dir():
            raise UserError(f"--out_dir {self.out_dir} is a file; give a directory")
        try:
            self.out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"--out_dir {self.out_dir} cannot be made: {e.strerror}; give another one") from e
        self._locks.enter_context(only_one(self.out_dir / ".lock", f"run directory {self.out_dir}"))

    def _find_checkpoint(self) -> str:
        """The newest sound checkpoint with --resume, else "". Raises UserError for a run that would be lost."""
        steps = checkpoint_steps(self.out_dir)
        moving = self.out_dir / MOVING
        if moving.exists() and not self.written["overwrite"]:
            what = f"an --overwrite was interrupted while it moved the run to {moving}"
            raise UserError(f"{what}; give --overwrite again, or move those files back to {self.out_dir}")
        # a log counts as a run: where checkpoints were deleted by hand, its figures are all that is left
        holds_run = bool(steps) or (self.out_dir / "log.jsonl").exists()
        if not holds_run and (strange := not_of_a_run(self.out_dir)):
            raise UserError(
                f"{self.out_dir} holds no run, but {strange}, which is not ours to replace; give another one"
            )
        if holds_run and not (self.written["resume"] or self.written["overwrite"]):
            remedies = "--resume continues it, --overwrite replaces it, --out_dir avoids it"
            raise UserError(f"{self.out_dir} already holds a run; {remedies}")
        # "" with --resume is a run that has not begun: the line that a cluster repeats is the line that starts it
        newest = newest_sound(self.out_dir) if self.written["resume"] else None
        if self.written["resume"] and steps and newest is None:
            raise UserError(
                f"no checkpoint of {self.out_dir} is undamaged; give --overwrite instead of --resume to start again"
            )
        return str(newest or "")

    # ---- from here on the directory changes

    def begin(self, config, files, optimizer, identity: dict, facts: dict) -> None:
        """Start, or go on from `checkpoint`: optimizer and counters are put back where they were.

        `config` are the constants that run, settled; `files` copies and restores the weights, which the caller has
        already loaded; `identity` says what the order of the data depends on besides constants; `facts` go to the log
        (`parameters`, `flops_per_token` for MFU, perhaps `planned_tokens` in all, and `uniform_loss`, ln V, to compare
        the first loss with). Raises UserError for a constant of `fixed` or an identity that is not the checkpoint's,
        before anything is changed.
        """
        self.config, self.files, self.optimizer, self.identity, self.facts = config, files, optimizer, identity, facts
        self.max_steps = config.max_steps
        self._spikes = SpikeDetector(config.spike_threshold)
        changed = self._restore(self.checkpoint) if self.checkpoint else {}
        self.log = RunLog(self.out_dir, self.rt, config)  # the last thing that can be missing: a tracker
        self.rt.on_main(lambda: self._open_directory(changed))
        self._writer = CheckpointWriter(self.out_dir, config.keep_checkpoints)
        self.first_step = self.step
        # what an interruption has cut off between a checkpoint and the evaluations of its step is made up for
        self._done = self.rt.on_main(lambda: [r["kind"] for r in self.log.records if r["step"] == self.step])
        self.val_loss = self.rt.on_main(lambda: self.log.val_losses().get(self.step))  # if the log has one of this step
        self._saved = self.step if self.checkpoint else -1  # the last step with a checkpoint; no step is saved twice
        self._launched: deque[tuple] = deque()  # steps that the device may still be working at
        self._spike_at: tuple | None = None
        self._bad_steps = self._signum = 0
        self._stop = False  # after a signal on any rank
        self._left_step = False  # gone back after a spike: nothing more is due in this step
        self._paused = False  # something other than a step took time

    def _open_directory(self, changed: dict) -> None:
        """config.json, log.jsonl and samples.txt as they have to be before the first step; the first rank only."""
        for path in self.out_dir.glob(".*.tmp"):  # what a run was writing when it was killed; the lock says it is gone
            if re.fullmatch(rf"\.({'|'.join(map(re.escape, FILES))})\.\d+\.tmp", path.name):
                path.unlink()
        if self.written["overwrite"]:
            self._set_old_run_aside()
        if self.checkpoint:
            set_aside(newer_than=self.checkpoint)
        replace_file(self.out_dir / "config.json", json.dumps(asdict(self.config), indent=2) + "\n")
        if not self.checkpoint and (self.out_dir / "log.jsonl").exists():
            # its steps come again, with other figures: they must not end up in one log, nor be lost
            kept = next(p for i in range(1, 10**6) if not (p := self.out_dir / f"log.{i}.jsonl").exists())
            (self.out_dir / "log.jsonl").rename(kept)
            self.rt.print(f"{self.out_dir} holds no checkpoint: starting from step 0; the earlier log is now {kept}")
        self.log.cut(self.step)
        words = [Path(sys.argv[0]).name, *sys.argv[1:]]
        first = dict(command=" ".join(words), **self.facts, config=asdict(self.config), **about_machine(self.rt))
        resumed = dict(resumed_from=str(self.checkpoint), changed=changed) if self.checkpoint else {}
        self.log.append({"step": self.step, "kind": "run", **first, **resumed})
        if self.checkpoint:
            notes = "".join(f"; --{name} {old} is now {new}" for name, (old, new) in changed.items())
            self.rt.print(f"resuming from {self.checkpoint}{notes}")

    def _set_old_run_aside(self) -> None:
        """Move exactly what a run writes into a folder that goes once this run has a checkpoint of its own.

        If such a folder is there, the attempt since then never had one, and its files can go. It gets its name when all
        is in it, so that a kill in between leaves files of the old run in two places, and none of them is deleted.
        """
        names = re.compile(r"(damaged_)?step_\d+|log\.\d+\.jsonl")
        found = [path for path in self.out_dir.iterdir() if path.name in FILES or names.fullmatch(path.name)]
        old, moving = self.out_dir / OLD_RUN, self.out_dir / MOVING
        if old.exists() and any(old.iterdir()) and not moving.exists():
            for path in found:
                remove(path)
            return
        moving.mkdir(exist_ok=True)
        for path in found:
            path.rename(moving / path.name)
        if old.exists():
            old.rmdir()  # an empty one
        moving.rename(old)

    # ---- the loop

    def __enter__(self) -> "Run":
        # what was ignored when we came, as nohup ignores SIGHUP, stays ignored
        heard = [s for s in STOP_SIGNALS if signal.getsignal(s) != signal.SIG_IGN]
        self._handlers = {s: signal.signal(s, self._remember) for s in heard}
        self.log.start_bar(self.step, self.max_steps)
        self._clock = time.perf_counter()
        return self

    def __exit__(self, error_type, *_) -> None:
        # an error leaves the checkpoint under way to its thread, which Python waits for; and it keeps the old run
        try:
            if error_type is None:
                self._writer.wait()
                if self._saved > 0:
                    self._forget_old_run()
            self.log.close()
            self._renew_card()
        finally:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
            self._locks.close()
        if error_type is None and self._is_asked_to_stop():
            raise Stopped(self._signum or signal.SIGTERM)

    def _remember(self, signum: int, frame) -> None:
        """A signal is a flag, read once a step; a second Ctrl-C ends the process at once."""
        self._signum = signum  # ranks may notice in different steps: log_step has them agree on one
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def steps(self, batches: Iterator) -> Iterator[tuple[int, list]]:
        """(step, its micro-batches) until `max_steps`. After a spike `step` goes back, and the data goes on."""
        while self.step < self.max_steps:
            self.step, self.data_step = self.step + 1, self.data_step + 1
            self._left_step = False
            # other dropout in every step and on every rank, and the same again after an interruption
            torch.manual_seed(self.config.seed + self.step * self.rt.world_size + self.rt.rank)
            if self._paused:  # evaluations do not count towards a step's time
                self._paused, self._clock = False, time.perf_counter()
            yield self.step, next(batches)
            if self.step == self.max_steps:
                self._catch_up()  # the last steps may still hold a spike, and so be taken again

    def log_step(self, loss, grad_norm, lr: float, n_targets) -> None:
        """Note a step's figures: scalar tensors that are the same on every rank.

        They are read when the device has come so far, on a GPU during the next step. May leave the step: Stopped after
        a signal, UserError after too many bad steps, a return to an earlier checkpoint after a spike.
        """
        stop = self.rt.sum(loss.new_full((), self._signum != 0 or self._writer.failed))  # of any rank
        # One tensor, one copy to the host. Asking for a number now would let the GPU run dry: the host has to be ahead,
        # launching the kernels of the next step while those of this one run.
        figures = torch.stack([loss, grad_norm, n_targets.to(loss), stop])
        self._launched.append((self.step, lr, self.rt.read_later(figures)))
        self._catch_up(self.rt.steps_ahead)

    def due(self, interval: int, kind: str = "") -> bool:
        """Every `interval` steps, and at the end; never for 0, nor where the log has a record of this `kind` already.

        True only once all steps until now are known to be good, and the checkpoint under way, if any, is on the disk:
        what follows may fail, or take long.
        """
        if not interval or self._left_step or (self.step % interval and self.step != self.max_steps):
            return False
        if not self.step or self._has(kind) or (kind and self._is_asked_to_stop()):
            return False
        self._catch_up()  # weights that a spike has spoilt are neither saved nor evaluated
        if self._left_step:
            return False
        self._writer.wait()
        self._paused = True
        return True

    def _is_asked_to_stop(self) -> bool:
        """By a signal to any rank; all ranks ask together."""
        return bool(self.rt.sum(torch.tensor(float(self._signum != 0), device=self.rt.device)))

    def _has(self, kind: str) -> bool:
        """Whether the log has a record of this kind for this step, from before an interruption."""
        return self.step == self.first_step and kind in self._done

    def save(self) -> None:
        """Copy everything that the next step depends on; the copy is written while training goes on. All ranks call
        this, as a model that is divided over them is gathered for the first one."""
        if self.step == self._saved:
            return
        state = dict(
            step=self.step, data_step=self.data_step, tokens=self.tokens, optimizer=self.optimizer.state_dict(),
            spikes=self._spikes.state_dict(), identity=self.identity, config=asdict(self.config), written=self.written,
        )  # fmt: skip
        self._saved = self.step
        # what is divided over ranks is gathered by all of them together; one writes
        if self.rt.is_main or self.rt.mesh:
            write_files, state = self.files.copy(), snapshot(state, self.rt.is_main)
        if self.rt.is_main:
            losses, write_card = self.log.val_losses(), self.log.card()
            export = lambda directory: [write(directory) for write in (write_files, write_card)]  # noqa: E731
            self._writer.save(self.step, export, state, losses, self._announce)

    def _announce(self, line: str) -> None:
        self._forget_old_run()
        self.rt.print(line)

    def _forget_old_run(self) -> None:
        if self.rt.is_main:
            shutil.rmtree(self.out_dir / OLD_RUN, ignore_errors=True)

    def record(self, kind: str, **figures) -> None:
        """Log an evaluation or a sample of this step, show it, and draw the curve anew."""
        self.log.evaluation(self.step, kind, figures)
        self._renew_card()

    def _renew_card(self) -> None:
        """Put what was measured since then into the card of this step's checkpoint, unless it is of an earlier start:
        somebody may have edited it."""
        checkpoint = self.out_dir / f"step_{self.step:06d}"
        if self.rt.is_main and self.first_step < self.step == self._saved and checkpoint.is_dir():
            self.log.card()(checkpoint)

    def end_here(self) -> None:
        """Let this step be the last one, with a checkpoint, and log what it took to come here."""
        self.max_steps = self.step
        self.save()
        if not self._has("target"):
            operations = self.tokens * self.facts["flops_per_token"]
            self.record("target", tokens=self.tokens, hours=self.log.hours(), petaflop=operations / 1e15)

    # ---- the figures of finished steps, and what follows from them

    def _catch_up(self, unread: int = 0) -> None:
        """Read steps until at most `unread` are under way; then do what they call for."""
        while len(self._launched) > unread and self._spike_at is None:
            self._read_step(*self._launched.popleft())
        if self._spike_at is not None:
            self._roll_back(*self._spike_at)
            self._spike_at = None
        elif self._stop:
            while self._launched:  # none of them was a spike yet, and the run ends here
                self._read_step(*self._launched.popleft())
            try:
                self.save()
                self._writer.wait()
            finally:
                self.rt.barrier()  # torchrun ends every rank once one has ended
            raise Stopped(self._signum or signal.SIGTERM)

    def _read_step(self, step: int, lr: float, read) -> None:
        """Wait for a step, log it, and notice a stop, a spike or a bad step. Raises UserError after too many."""
        loss, grad_norm, n_targets, stop = read()
        # from one figure that arrived to the next: what a step takes when host and device overlap
        now = time.perf_counter()
        dt, self._clock = now - self._clock, now
        good = math.isfinite(loss) and math.isfinite(grad_norm)
        self.tokens += int(n_targets)
        figures = dict(loss=loss, lr=lr, grad_norm=grad_norm, tokens=self.tokens)
        self.log.train_step(step, figures, dt, int(n_targets), self.facts["flops_per_token"])
        if step == 1 and "uniform_loss" in self.facts:
            uniform = self.facts["uniform_loss"]
            self.rt.print(f"first loss {loss:.3f}; ln V, with all tokens equally likely, is {uniform:.3f}")
        if step == self.first_step + 10 < self.max_steps:
            self.log.say_how_long(self.max_steps - step, self.facts.get("planned_tokens", 0) - self.tokens)
        self._stop = self._stop or stop > 0
        if good and self._spikes.add(loss):  # a loss that is not finite changed no weight, so it is no spike
            self._spike_at = (step, loss)
        self._bad_steps = 0 if good else self._bad_steps + 1
        if self._bad_steps >= self.config.max_bad_steps:
            self._writer.wait()
            newest = self.rt.on_main(lambda: str(newest_sound(self.out_dir) or ""))
            raise UserError(
                f"no finite loss or gradient in {self._bad_steps} steps, up to step {step}; "
                f"{f'the last checkpoint is {newest}' if newest else 'there is no checkpoint yet'}: lower --max_lr, or "
                "use --dtype float32, and --resume"
            )

    def _roll_back(self, step: int, loss: float) -> None:
        """After a spike: put everything where it was at the newest checkpoint from before it.

        Reading goes on where it is, so that all data since then is left out, as in PaLM (Chowdhery et al. 2022, section
        5.1). Where there is no checkpoint yet, the jump is accepted. Raises UserError if this does not help.
        """
        self._writer.wait()
        self.rt.barrier()  # no rank looks for a checkpoint that another one is still writing
        before = self._spikes.suspect(step)
        found = self.rt.on_main(lambda: str(newest_sound(self.out_dir, before) or ""))
        if not found:
            self.rt.print(f"step {step}: the loss has jumped to {loss:.3f}, with no earlier checkpoint to go back to")
            return self._spikes.accept()
        if self.rt.is_main:  # newer ones hold spoilt weights: a resume must not find them
            remove_after(Path(found))
        self.rt.barrier()
        median, data_step = self._spikes.median(), self.data_step
        self._spikes.count(found)
        self.files.load(Path(found))
        self._restore(Path(found))
        self.data_step, self._saved, self._left_step = data_step, self.step, True
        self._launched.clear()  # steps from after the jump
        self._done = []  # what the log had of the step that this process began with is cut off with the rest
        self.log.cut(self.step)
        self.record("rollback", from_step=step, loss=loss, median=median)

    def _restore(self, checkpoint: Path) -> dict:
        """Everything but the weights, as `save` stored it. Returns the constants that have changed since, {name: (old,
        new)}. Raises UserError for a state that is damaged or belongs to another run."""
        state = load_train_state(checkpoint)
        try:
            changed = self._compare(state, checkpoint)
            self.optimizer.load_state_dict(state["optimizer"])
            self._spikes.load_state_dict(state["spikes"])
            self.step, self.data_step, self.tokens = (int(state[key]) for key in ("step", "data_step", "tokens"))
            if not (
                f"step_{self.step:06d}" == checkpoint.name and self.step <= self.data_step < 2**62 and self.tokens >= 0
            ):
                raise ValueError(f"step {self.step}, after {self.data_step} batches with {self.tokens} tokens")
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as e:
            reason = f"no {e}" if isinstance(e, KeyError) else str(e)
            raise UserError(f"{checkpoint}/train_state.pt does not fit this run: {reason}; resume from another") from e
        return changed

    def _compare(self, state: dict, checkpoint: Path) -> dict:
        """What a person wrote now against what was written then: a recipe's default that a checkpoint's sizes replaced
        is no change. Raises UserError for a constant that the order of the data or the model depends on."""
        for name, value in self.identity.items():
            if state["identity"].get(name) != value:
                raise UserError(
                    f"{checkpoint} was trained with another {name}; give the same one, or start a run of its own in "
                    "another --out_dir"
                )
        changed = {}
        for name, now in self.written.items():
            # written: by a person or a recipe; settled: what it came to, e.g. micro_batch_size 0 -> 16
            then, settled = state["written"].get(name), state["config"].get(name)
            if now == then or now == settled or name in ("resume", "overwrite", "out_dir"):
                continue
            if name in self.fixed:
                raise UserError(f"{checkpoint} was trained with --{name} {settled}, not {now}; --resume keeps it")
            changed[name] = (settled, getattr(self.config, name))
        return changed


def not_of_a_run(out_dir: Path) -> str:
    """A file in a directory without a run that a run would replace, "" for none."""
    with contextlib.suppress(UserError, FileNotFoundError, TypeError):
        if "out_dir" in read_json(out_dir / "config.json"):  # constants, of a run that was killed as it began its log
            return ""
    return next((name for name in (*FILES, *WEIGHTS) if (out_dir / name).exists()), "")


class SpikeDetector:
    """Notices a loss that has jumped: PATIENCE steps in a row that lie `threshold` above the median of the good ones.

    One such step alone is an odd batch, and passes by itself. Nothing is a spike while the median rests on fewer than
    MIN_LOSSES losses, or with a threshold of 0.
    """

    # A median over 100 steps moves slowly, one over fewer than 20 says little. Odd batches come singly, spikes do not.
    # And what three rounds of other data do not cure is not in the data.
    WINDOW, MIN_LOSSES, PATIENCE, MAX_RETURNS = 100, 20, 3, 3

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.losses: deque[float] = deque(maxlen=self.WINDOW)
        self.high = 0  # steps in a row
        self.returns: Counter[str] = Counter()

    def median(self) -> float:
        return statistics.median(self.losses)

    def add(self, loss: float) -> bool:
        """Take note of a step's loss; True for a spike."""
        if 0 < self.threshold and self.MIN_LOSSES <= len(self.losses) and loss > self.median() + self.threshold:
            self.high += 1
        else:  # high losses stay out of the median, or it would follow them
            self.high = 0
            self.losses.append(loss)
        return self.high >= self.PATIENCE

    def suspect(self, step: int) -> int:
        """The first step that may have spoilt the weights, if the spike was noticed at `step`: the one before the first
        high loss.
        """
        return step - self.PATIENCE

    def accept(self) -> None:
        """Let the high losses be the normal ones from here on."""
        self.losses.clear()
        self.high = 0

    def count(self, checkpoint: str) -> None:
        """Raises UserError for one return too many to the same checkpoint: other data then does not help."""
        self.returns[checkpoint] += 1
        if self.returns[checkpoint] > self.MAX_RETURNS:
            raise UserError(
                f"the loss jumps again after {self.MAX_RETURNS} returns to {checkpoint}, each with other data; lower "
                "--max_lr and --resume, or accept the jump with --spike_threshold 0"
            )

    def state_dict(self) -> dict:
        return dict(losses=list(self.losses), high=self.high)

    def load_state_dict(self, state: dict) -> None:
        self.losses = deque(map(float, state["losses"]), maxlen=self.WINDOW)
        self.high = int(state["high"])
