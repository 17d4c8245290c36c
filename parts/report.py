"""Everything that a run reports: log.jsonl, samples.txt, learning_curve.png, the terminal, and a tracker if asked for.

    {"step": 0, "kind": "run", "command": "train_gpt2.py", "parameters": 124475904, "versions": {...}, ...}
    {"step": 10, "kind": "train", "loss": 9.91, "lr": 8.4e-6, "grad_norm": 1.4, "dt_ms": 93.1, "tokens": 5242880, ...}
    {"step": 250, "kind": "val", "loss": 5.02, "bpb": 1.61, "tokens": 10485760, "sequence_length": 1024, ...}
    {"step": 9750, "kind": "target", "tokens": 4865392640}  # --target_loss is reached

The first rank writes; on the others every method does nothing. This file knows nothing of models, optimizers or data.
"""

import contextlib
import importlib
import json
import math
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from parts.cli import UserError, counted
from parts.curves import draw
from parts.files import errors_name, replace_file
from parts.log import Records, newest_start, of_kind, read_log
from parts.runtime import Runtime

LINE_SECONDS = 30  # between progress lines, where there is no terminal for a progress bar
NOISE = 0.005  # nats: a smaller difference of two validation losses means nothing


class Report:
    """`records` are the lines of log.jsonl. Nothing is written before `open`."""

    def __init__(self, out_dir: Path, config, rt: Runtime, run_info: dict):
        self.out_dir = out_dir
        self.rt = rt
        self.config = config
        self.run_info = run_info
        self.name = out_dir.resolve().name
        self._peak_flops = rt.peak_flops()
        self.records: Records = []
        self._track = self._close_tracker = None

    def open(self, step: int) -> None:
        """Continue the log from `step`: steps that a killed run took after its checkpoint will be taken again. Start
        the tracker and the progress bar. Only the first rank calls this."""
        log = self.out_dir / "log.jsonl"
        earlier = read_log(log) if log.exists() else []
        self.records = [record for record in earlier if record["step"] <= step]
        # the trackers' name for this run, from start to start
        self.run_info["id"] = newest_start(self.records).get("id") or uuid.uuid4().hex
        if self.config.report_to != "none":
            try:
                self._track, self._close_tracker = start_tracker(self.config, self.name, self.run_info["id"], step)
            except Exception as e:  # each tracker raises its own
                raise UserError(f"--report_to {self.config.report_to}: {e}; log in, or pass --report_to none") from e
        replace_file(log, "".join(json.dumps(record) + "\n" for record in self.records))
        replace_file(self.out_dir / "samples.txt", "".join(map(sample_entry, of_kind(self.records, "sample"))))
        trained = of_kind(self.records, "train")
        self._skipped_steps = trained[-1]["skipped_steps"] if trained else 0
        # a line now and then where stderr is no terminal
        self._bar = tqdm(total=self.config.max_steps, initial=step, unit="step", disable=None, dynamic_ncols=True)
        self._line_due = 0.0

    def append(self, record: dict) -> None:
        """Add a line to the log, and its numbers to the tracker, which draws no text and no lists. Only the first rank
        calls this."""
        record = json.loads(json.dumps(record), parse_constant=lambda name: None)  # JSON has no NaN: it becomes null
        self.records.append(record)
        add_text(self.out_dir / "log.jsonl", json.dumps(record) + "\n")
        if self._track and record["kind"] != "run":
            numbers = {f"{record['kind']}/{key}": value for key, value in record.items() if type(value) in (int, float)}
            self._ask_tracker(self._track, numbers, record["step"])

    def _ask_tracker(self, call: Callable, *args) -> None:
        """Call a tracker. A lost server is no reason to end a run: log.jsonl has everything."""
        try:
            call(*args)
        except Exception as e:
            self.rt.print(f"note: {self.config.report_to} has stopped: {type(e).__name__}: {e}", file=sys.stderr)
            self._track = None

    def evaluation(self, step: int, kind: str, metrics: dict) -> None:
        """Log an evaluation or a sample, and print it."""
        if not self.rt.is_main:
            return
        self.append(dict(step=step, kind=kind, **metrics))
        if kind == "sample":
            add_text(self.out_dir / "samples.txt", sample_entry(self.records[-1]))
        self.rt.print(f"step {step}: {describe(kind, metrics)}")

    def train_step(self, step: int, metrics: dict, seconds: float, n_targets: int) -> None:
        """Log a training step, and move the progress bar. `metrics`: loss, lr, grad_norm, tokens."""
        if not self.rt.is_main:
            return
        rate = n_targets / seconds
        mfu = rate * self.run_info.get("flops_per_token", 0) / (self._peak_flops or math.inf)
        self._skipped_steps += not math.isfinite(metrics["loss"] + metrics["grad_norm"])
        record = dict(
            step=step,
            kind="train",
            **metrics,
            dt_ms=round(seconds * 1e3, 2),
            tokens_per_sec=round(rate, 1),
            mfu=round(mfu, 4) or None,
            memory_gib=round(self.rt.peak_memory() / 2**30, 3),
            skipped_steps=self._skipped_steps,
        )
        self.append(record)
        if step == 1 and "uniform_loss" in self.run_info:
            guess = self.run_info["uniform_loss"]
            self.rt.print(f"first loss {metrics['loss']:.3f}; a uniform guess scores {guess:.3f}")
        shown = f"loss {metrics['loss']:.3f}, {rate:,.0f} tok/s" + (f", MFU {mfu:.0%}" if mfu else "")
        if not self._bar.disable:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(step - self._bar.n)  # the run outlives its terminal: tqdm drops what that refuses
        elif time.monotonic() > self._line_due or step == self._bar.total:
            self._line_due = time.monotonic() + LINE_SECONDS
            left = tqdm.format_interval((self._bar.total - step) * seconds)
            self.rt.print(f"step {step} of {self._bar.total}: {shown}, {left} left")

    def close(self) -> None:
        """Draw learning_curve.png, and end the tracker."""
        if not self.rt.is_main:
            return
        self._bar.close()
        try:
            if of_kind(self.records, "train"):
                draw({self.name: self.records}, self.out_dir / "learning_curve.png")
        except Exception as e:  # no picture is a reason to hide the error that ended a run
            self.rt.print(f"note: learning_curve.png is not drawn: {e!r}")
        if self._close_tracker:
            self._ask_tracker(self._close_tracker)

    def val_losses(self) -> dict[int, float]:
        """Return {step: validation loss} of validations on as many tokens, in contexts of the same length, as the
        newest one: on others the same weights have another loss."""
        vals = [val for val in of_kind(self.records, "val") if val.get("loss") is not None]
        return {val["step"]: val["loss"] for val in vals if measure(val) == measure(vals[-1])}

    def print_results(self) -> bool:
        """Print the tokens read, the median speed, the final losses, and where validation was lowest. Return False for
        a run that diverged: training and validation end above the first loss and a uniform guess."""
        trained = of_kind(self.records, "train")
        if not trained:
            return True
        speed = statistics.median(step["tokens_per_sec"] for step in trained)
        memory = f"{self.rt.peak_memory() / 2**30:.2f} GiB at the peak"
        n_steps = counted(trained[-1]["step"], "step")
        if self._skipped_steps:
            n_steps += f", {self._skipped_steps:,} of them skipped as not finite"
        self.rt.print(f"\n{trained[-1]['tokens']:,} tokens in {n_steps}; {speed:,.0f} tokens/s, {memory}")
        newest = [step["loss"] for step in trained[-max(len(trained) // 20, 1) :] if step["loss"] is not None]
        loss = statistics.fmean(newest) if newest else math.nan
        self.rt.print(f"training loss {loss:.4f} nats per token, mean of {counted(len(newest), 'step')}")
        losses = self.val_losses()
        best = last = 0
        if losses:
            *_, last = losses
            best = min(losses, key=losses.get)
            gap = losses[last] - loss
            side = "below" if gap < 0 else "above"
            bpb = of_kind(self.records, "val")[-1].get("bpb")
            unit = f" ({bpb:.4f} bits per byte)" if bpb else ""
            self.rt.print(f"validation loss {losses[last]:.4f}{unit} at step {last}, {abs(gap):.2f} {side} training")
        # one alone says little: a training loss may be a sum with others, and validation of a memorized text is high;
        # random weights start slightly above a guess
        first = max(trained[0]["loss"] or 0, self.run_info.get("uniform_loss", 0))
        if not newest or min(loss, losses.get(last, math.inf)) > first + 1:
            self.rt.print(f"\nthe run diverged; lower its learning rates, now --max_lr {self.config.max_lr:g}")
            return False
        # a loss above a guess is no better; in finetuning nobody guesses
        if losses and losses[best] + NOISE < min(losses[last], self.run_info.get("uniform_loss", math.inf)):
            checkpoint = self.out_dir / f"step_{best:06d}"
            take = f"; take {checkpoint}" if checkpoint.exists() else ""
            self.rt.print(f"validation rose after step {best} ({losses[best]:.4f}){take}")
        return True


def measure(val: dict) -> tuple:
    return val.get("tokens"), val.get("sequence_length")


def add_text(path: Path, text: str) -> None:
    """Append to a file that is opened each time: the text is in it at once, and a kill cuts one line at most."""
    with errors_name(path), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def sample_entry(record: dict) -> str:
    return f"--- step {record['step']}\n{record['text']}\n\n"


def describe(kind: str, metrics: dict) -> str:
    if kind == "sample":
        return "sample: " + metrics["text"].strip()[:300].replace("\n", "\n    ")
    if kind == "target":
        return f"target reached after {metrics['tokens']:,} tokens"
    words = [f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, float) and name != "flops"]
    return f"{kind} {', '.join(words)}"


def about_machine(rt: Runtime) -> dict:
    """Describe what the metrics of a run depend on besides its constants."""
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, or a download without its history
        git = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip() or None
    return dict(
        versions=dict(python=platform.python_version(), torch=torch.__version__),
        machine=f"{platform.machine()}, {rt.description}",
        ranks=rt.world_size,
        commit=commit,
    )


def import_tracker(report_to: str):
    """Import a tracker; None for "none". Raises UserError if it is not installed."""
    if report_to == "none":
        return None
    try:
        return importlib.import_module("torch.utils.tensorboard" if report_to == "tensorboard" else report_to)
    except ImportError as e:
        raise UserError(f"--report_to {report_to}: {e}; pip install {report_to}") from e


def start_tracker(config, name: str, run_id: str, step: int) -> tuple[Callable, Callable]:
    """Return two functions: one reports {name: number} of a step, one ends this."""
    tracker = import_tracker(config.report_to)
    if config.report_to == "tensorboard":
        writer = tracker.SummaryWriter(config.out_dir)

        def report(numbers: dict, step: int) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

        return report, writer.close
    own = dict(id=run_id, dir=config.out_dir) if config.report_to == "wandb" else {}
    tracker.init(project="gpt2", name=name, config=asdict(config), resume="allow" if step else "never", **own)
    return lambda numbers, step: tracker.log(numbers, step=step), tracker.finish
