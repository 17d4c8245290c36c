"""Everything that a run reports: log.jsonl, samples.txt, learning_curve.png, the terminal, and a tracker if asked for.

    {"step": 0, "kind": "run", "command": "train_gpt2.py", "parameters": 124475904, "versions": {...}, ...}
    {"step": 10, "kind": "train", "loss": 9.91, "lr": 8.4e-6, "grad_norm": 1.4, "dt_ms": 93.1, "tokens": 5242880, ...}
    {"step": 250, "kind": "val", "loss": 5.02, "bpb": 1.61, "flops": 1.1e17}
    {"step": 9750, "kind": "target", "tokens": 4865392640, "hours": 1.43, "petaflop": 4163.1}  # --target_loss

The first rank writes; on the others every method does nothing. This file knows nothing of models, optimizers or data.
"""

import contextlib
import importlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from cli import UserError, explain
from files import naming, replace_file
from machine.runtime import Runtime
from run.card import write_card
from run.curves import draw
from run.records import read_log

# each is imported only when asked for
TRACKERS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
LINE_SECONDS = 30  # between progress lines, where there is no terminal for a progress bar


class RunLog:
    """`records` are the lines of log.jsonl. Nothing is written before `open`."""

    def __init__(self, out_dir: Path, rt: Runtime, config):
        self.out_dir, self.rt, self.config, self.name = out_dir, rt, config, out_dir.resolve().name
        self.records: list[dict] = []
        self._report = self._close_tracker = None
        self._painter, self._drawing = ThreadPoolExecutor(1), None  # Python waits for it at exit

    def open(self, step: int) -> None:
        """Continue the log from `step`; start the tracker and the progress bar. Only the first rank calls this."""
        self.cut(step)
        if tracker := import_tracker(self.config.report_to):
            self._report, self._close_tracker = start_tracker(tracker, self.config, self.name, step)
        # None: it is drawn in a terminal
        self._bar = tqdm(total=self.config.max_steps, initial=step, unit="step", disable=None, dynamic_ncols=True)
        self._line_due = 0.0

    def cut(self, step: int) -> None:
        """Drop what was logged after `step`: steps that a killed run took after its checkpoint will be taken again."""
        if not self.rt.is_main:
            return
        path = self.out_dir / "log.jsonl"
        self.records = [as_json(r) for r in read_log(path) if r["step"] <= step] if path.exists() else []
        replace_file(path, "".join(json.dumps(record) + "\n" for record in self.records))
        samples = [sample_entry(record) for record in self.records if record["kind"] == "sample"]
        replace_file(self.out_dir / "samples.txt", "".join(samples))

    def append(self, record: dict) -> None:
        """Add a line."""
        if not self.rt.is_main:
            return
        self.records.append(record := as_json(record))
        # opened for each line: it is in the file when the step ends, and a kill cuts one line at most
        with naming(path := self.out_dir / "log.jsonl"), open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
        # trackers draw numbers alone: text and lists are in log.jsonl
        numbers = {f"{record['kind']}/{k}": v for k, v in record.items() if type(v) in (int, float) and k != "step"}
        try:
            if self._report and record["kind"] != "run":
                self._report(numbers, record["step"])
        except Exception as e:  # a lost server is no reason to end a run: log.jsonl has everything
            self.rt.print(f"warning: {self.config.report_to} has stopped: {type(e).__name__}: {e}", file=sys.stderr)
            self._report = None

    def evaluation(self, step: int, kind: str, figures: dict) -> None:
        """Log an evaluation or a sample, print it, and redraw the curve."""
        if not self.rt.is_main:
            return
        self.append({"step": step, "kind": kind, **figures})
        if kind == "sample":
            path = self.out_dir / "samples.txt"
            with naming(path), open(path, "a", encoding="utf-8", errors="backslashreplace") as f:
                f.write(sample_entry(self.records[-1]))
        self.rt.print(f"step {step}: {describe(kind, figures)}")
        self.draw()

    def train_step(self, step: int, figures: dict, seconds: float, n_targets: int, flops_per_token: float) -> None:
        """A training step in the log and the progress bar. `figures`: loss, lr, grad_norm, tokens."""
        if not self.rt.is_main:
            return
        rate, peak = n_targets / seconds, self.rt.peak_flops()
        mfu = rate * flops_per_token / peak if peak else None
        good = math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"])
        skipped = next((r["skipped_steps"] for r in reversed(self.records) if "skipped_steps" in r), 0)  # in the run
        self.append(
            {"step": step, "kind": "train", **figures, "dt_ms": round(seconds * 1e3, 2),
             "tokens_per_sec": round(rate, 1), "mfu": mfu and round(mfu, 4),
             "memory_gib": round(self.rt.peak_memory() / 2**30, 3), "skipped_steps": skipped + (not good)}
            | ({} if good else {"skipped": True})
        )  # fmt: skip
        shown = f"loss {figures['loss']:.3f}, {rate:,.0f} tok/s" + (f", MFU {mfu:.0%}" if mfu else "")
        if self._bar.disable:  # no terminal
            if time.monotonic() > self._line_due or step == self._bar.total:
                self._line_due = time.monotonic() + LINE_SECONDS
                self.rt.print(f"step {step} of {self._bar.total}: {shown}")
            return
        self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update(step - self._bar.n)  # the run outlives its terminal: tqdm drops what that refuses

    def close(self) -> None:
        if self.rt.is_main:
            self._bar.close()
            self._painter.submit(self._draw).result()  # with the last figures
            if self._close_tracker:
                self._close_tracker()

    def draw(self) -> None:
        """Draw learning_curve.png in a thread, so that no rank waits for it; skipped while the thread is busy."""
        if self._drawing is None or self._drawing.done():
            self._drawing = self._painter.submit(self._draw)

    def _draw(self) -> None:
        try:
            draw({self.name: list(self.records)}, self.out_dir / "learning_curve.png")
        except OSError as e:  # a full disk, for instance: no reason to end a run for a picture
            self.rt.print(f"warning: learning_curve.png is not drawn: {explain(e)}")

    def card(self) -> Callable[[Path], None]:
        """Copy the log as it is now; the result writes it into a directory as a model card."""
        name, records, curve = self.name, list(self.records), self.out_dir / "learning_curve.png"
        return lambda directory: write_card(directory, name, records, curve)

    def val_losses(self) -> dict[int, float]:
        """{step: validation loss}"""
        return {r["step"]: r["loss"] for r in self.records if r["kind"] == "val" and r["loss"] is not None}

    def last_loss(self) -> float:
        """The newest validation loss, else that of the last training step; nan for one that was not finite."""
        losses = [[r["loss"] for r in self.records if r["kind"] == kind] for kind in ("val", "train")]
        newest = next((found[-1] for found in losses if found), None)
        return math.nan if newest is None else newest

    def median_rate(self) -> float:
        """Tokens per second; nan before the first step."""
        rates = [r.get("tokens_per_sec") for r in self.records if r["kind"] == "train"]
        return statistics.median([rate for rate in rates if rate is not None] or [math.nan])


def as_json(record: dict) -> dict:
    """JSON has no NaN: a number that is not finite becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def sample_entry(record: dict) -> str:
    return f"--- step {record['step']}\n{record['text']}\n\n"


def describe(kind: str, figures: dict) -> str:
    if kind == "sample":
        return "sample: " + figures["text"].strip()[:300].replace("\n", "\n    ")
    numbers = (f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items() if k != "flops")
    return f"{kind} {', '.join(numbers)}"


def about_machine(rt: Runtime) -> dict:
    """What the figures of a run depend on besides its constants."""
    commit = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, or a download without its history
        git = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    machine = f"{platform.machine()}, {rt.description}"
    return dict(versions=versions, machine=machine, ranks=rt.world_size, commit=commit or None)


def import_tracker(report_to: str):
    """The module of a tracker, None for "none". Raises UserError if it is not installed."""
    try:
        return importlib.import_module(TRACKERS[report_to]) if report_to in TRACKERS else None
    except ImportError as e:
        raise UserError(f"--report_to {report_to}: {e}; pip install {report_to}") from e


def start_tracker(tracker, config, name: str, step: int) -> tuple[Callable[[dict, int], object], Callable[[], object]]:
    """Two functions: one reports {name: number} of a step, one ends this. Figures after `step` will come again."""
    if config.report_to == "tensorboard":
        writer, newest = tracker.SummaryWriter(config.out_dir, purge_step=step + 1), step

        def report(numbers: dict, step: int) -> None:
            nonlocal newest
            if step < newest:  # after a roll-back, too: the next file of events says that those of later steps are void
                writer.close()
                writer.purge_step = step + 1
            newest = step
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

        return report, writer.close
    again = "allow" if config.resume else "never"
    own = dict(dir=config.out_dir) if config.report_to == "wandb" else dict(resume=again)
    tracker.init(project="gpt2", name=name, config=asdict(config), **own)
    return lambda numbers, step: tracker.log(numbers, step=step), tracker.finish
