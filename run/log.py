"""What a run tells: log.jsonl, samples.txt, learning_curve.png, cards, the terminal, a tracker if one is asked for.

    {"step": 0, "kind": "run", "command": "train_gpt2.py", "parameters": 124475904, "versions": {...}, ...}
    {"step": 10, "kind": "train", "loss": 9.91, "lr": 8.4e-6, "grad_norm": 1.4, "dt_ms": 93.1, "tokens": 5242880, ...}
    {"step": 250, "kind": "val", "loss": 5.02, "bpb": 1.61}
    {"step": 9750, "kind": "target", "tokens": 4865392640, "hours": 1.43, "petaflop": 4163.1}  # --target_loss

The first rank writes; on the others every method does nothing. This file knows nothing of models, optimizers or data.
"""

import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from cli import UserError, explain, replace_file
from plot import draw, read_log
from run.card import write_card
from run.runtime import Runtime


class RunLog:
    """`records` are the lines of log.jsonl."""

    def __init__(self, out_dir: Path, rt: Runtime, config):
        """Raises UserError for a tracker that is not installed."""
        self.out_dir, self.rt = out_dir, rt
        self.records: list[dict] = []
        self.skipped_steps = 0  # of the whole run
        self._report, self._close_tracker = open_tracker(config) if rt.is_main else (None, None)
        self._bar: tqdm | None = None
        self._drawing: threading.Thread | None = None

    def cut(self, step: int) -> None:
        """Keep what was logged up to `step`: what a killed run logged after its checkpoint comes again."""
        if not self.rt.is_main:
            return
        path = self.out_dir / "log.jsonl"
        self.records = [r for r in read_log(path) if r["step"] <= step] if path.exists() else []
        self.skipped_steps = sum("skipped" in record for record in self.records)
        replace_file(path, "".join(json.dumps(record) + "\n" for record in self.records))
        samples = [sample_entry(record) for record in self.records if record["kind"] == "sample"]
        replace_file(self.out_dir / "samples.txt", "".join(samples))

    def append(self, record: dict) -> None:
        """One line. JSON has no NaN: a number that is not finite becomes null."""
        if not self.rt.is_main:
            return
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self.records.append(record)
        with open(self.out_dir / "log.jsonl", "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
        try:
            if self._report:
                self._report(record)
        except Exception as e:  # a server that is gone is no reason to end a run: log.jsonl has it all
            self.rt.print(f"warning: {self.out_dir} is no longer reported: {type(e).__name__}: {e}", file=sys.stderr)
            self._report = None

    def evaluation(self, step: int, kind: str, figures: dict) -> None:
        """Log an evaluation or a sample, show it, and draw the curve anew."""
        if not self.rt.is_main:
            return
        self.append({"step": step, "kind": kind, **figures})
        if kind == "sample":
            with open(self.out_dir / "samples.txt", "a", encoding="utf-8", errors="backslashreplace") as f:
                f.write(sample_entry(self.records[-1]))
        self.rt.print(f"step {step}: {describe(kind, figures)}")
        self.draw()

    def train_step(self, step: int, figures: dict, dt: float, n_targets: int, flops_per_token: float) -> None:
        """A training step of `dt` seconds, in the log and the progress bar. `figures`: loss, lr, grad_norm, tokens."""
        if not self.rt.is_main:
            return
        rate, peak = n_targets / dt, self.rt.peak_flops()
        mfu = rate * flops_per_token / peak if peak else None
        good = math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"])
        self.skipped_steps += not good
        self.append(
            {"step": step, "kind": "train", **figures, "dt_ms": round(dt * 1e3, 2), "tokens_per_sec": round(rate, 1),
             "mfu": mfu and round(mfu, 4), "memory_gib": round(self.rt.peak_memory() / 2**30, 3),
             "skipped_steps": self.skipped_steps}
            | ({} if good else {"skipped": True})
        )  # fmt: skip
        show_mfu = f", MFU {mfu:.0%}" if mfu else ""
        self._bar.set_postfix_str(f"loss {figures['loss']:.3f}, {rate:,.0f} tok/s{show_mfu}", refresh=False)
        try:
            self._bar.update(step - self._bar.n)
        except OSError:  # the run outlives its terminal: what nobody reads any more is dropped
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            with contextlib.suppress(RuntimeError, AssertionError):  # tqdm keeps its lock when it cannot write, and the
                tqdm.get_lock().release()  # thread that writes checkpoints would wait for it without end

    def say_how_long(self, steps_left: int, tokens_left: int) -> None:
        """After the first steps, of which the very first may have compiled. `tokens_left` is at most 0 if not known."""
        recent = [r for r in self.records if r["kind"] == "train" and r.get("dt_ms") and r.get("tokens_per_sec")][-8:]
        if recent:
            seconds = sum(r["dt_ms"] for r in recent) / 1e3
            rate = sum(r["tokens_per_sec"] * r["dt_ms"] for r in recent) / 1e3 / seconds
            # where it is known how many tokens are to come, they count: steps take longer as a batch ramps up
            left = duration(tokens_left / rate if tokens_left > 0 else seconds / len(recent) * steps_left)
            self.rt.print(f"about {left} to go at {rate:,.0f} tokens/s, plus evaluations")

    def start_bar(self, step: int, max_steps: int) -> None:
        hidden = not self.rt.is_main
        self._bar = tqdm(total=max_steps, initial=step, unit="step", disable=hidden, dynamic_ncols=True)

    def close(self) -> None:
        if self.rt.is_main:
            with contextlib.suppress(OSError):
                self._bar.close()
            self.draw(wait=True)
            if self._close_tracker:
                self._close_tracker()
            self._report = self._close_tracker = None

    def draw(self, wait: bool = False) -> None:
        """Draw learning_curve.png in a thread, so that no rank waits for it. One that finds the thread busy is left
        out; the last one is always drawn."""
        if self._drawing is not None and self._drawing.is_alive():
            if not wait:
                return
            self._drawing.join()
        records = list(self.records)

        def work() -> None:
            try:
                draw({self.out_dir.name: records}, self.out_dir / "learning_curve.png")
            except OSError as e:  # a full disk, say: no reason to end a run for a picture
                self.rt.print(f"warning: learning_curve.png is not drawn: {explain(e)}")

        self._drawing = threading.Thread(target=work, name="curve")  # Python waits for it at its end
        self._drawing.start()
        if wait:
            self._drawing.join()

    def card(self) -> Callable[[Path], None]:
        """What is in the log now; the result writes it, as a model card, into a directory."""
        name, records, curve = self.out_dir.name, list(self.records), self.out_dir / "learning_curve.png"
        return lambda directory: write_card(directory, name, records, curve)

    def val_losses(self) -> dict[int, float]:
        """{step: validation loss}"""
        return {r["step"]: r["loss"] for r in self.records if r["kind"] == "val" and r["loss"] is not None}

    def hours(self) -> float:
        """Of training alone, over all processes that the run has had."""
        return sum(r.get("dt_ms") or 0 for r in self.records if r["kind"] == "train") / 3.6e6

    def median_rate(self) -> float:
        """Tokens per second; nan before the first step."""
        rates = [r.get("tokens_per_sec") for r in self.records if r["kind"] == "train"]
        return statistics.median([rate for rate in rates if rate is not None] or [math.nan])


def sample_entry(record: dict) -> str:
    return f"--- step {record['step']}\n{record['text']}\n\n"


def describe(kind: str, figures: dict) -> str:
    if kind == "sample":
        return "sample: " + figures["text"].strip()[:300].replace("\n", "\n    ")
    numbers = (f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    return f"{kind} {', '.join(numbers)}"


def duration(s: float) -> str:
    return f"{s:.0f} s" if s < 180 else f"{s / 60:.0f} min" if s < 5400 else f"{s / 3600:.1f} h"


def about_machine(rt: Runtime) -> dict:
    """What the figures of a run depend on besides its constants."""
    commit = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    versions = dict(python=platform.python_version(), torch=torch.__version__)
    return dict(versions=versions, machine=f"{platform.machine()}, {rt.why}", commit=commit or None)


def open_tracker(config) -> tuple[Callable[[dict], None] | None, Callable[[], None] | None]:
    """Functions that pass a record on to tensorboard, wandb or trackio, and that end this; each is imported only when
    asked for. Raises UserError where it is not installed."""
    if config.report_to == "none":
        return None, None
    out_dir = Path(config.out_dir)
    try:
        if config.report_to == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(out_dir))
            close = writer.close
            put = lambda numbers, step: [writer.add_scalar(k, v, step) for k, v in numbers.items()]  # noqa: E731
        elif config.report_to == "wandb":
            import wandb

            wandb.init(project="gpt2", dir=str(out_dir), name=out_dir.name, config=asdict(config))
            put, close = lambda numbers, step: wandb.log(numbers, step=step), wandb.finish
        else:
            import trackio

            again = "allow" if config.resume else "never"
            trackio.init(project="gpt2", name=out_dir.name, config=asdict(config), resume=again)
            put, close = lambda numbers, step: trackio.log(numbers, step=step), trackio.finish
    except ImportError as e:
        raise UserError(f"--report_to {config.report_to}: {e}; pip install {config.report_to}") from e

    def report(record: dict) -> None:
        kind, step = record["kind"], record["step"]
        numbers = {f"{kind}/{k}": v for k, v in record.items() if type(v) in (int, float) and k != "step"}
        if numbers and kind != "run":
            put(numbers, step)

    return report, close
