"""Checkpoints: Hugging Face model directories that appear whole or not at all.

    OUT_DIR/step_000500/   config.json, model.safetensors, generation_config.json, tokenizer files,
                           train_state.pt, metrics.json, SHA256SUMS

A checkpoint is written to a hidden directory, flushed to the disk, and renamed; `SHA256SUMS` (check it by hand with
`sha256sum -c SHA256SUMS`) then tells a sound one from one that was damaged later. Copying the state and writing the
copy happen in a background thread: training waits for the copy, where it is not ready, before it changes a weight, and
never for the disk. Nothing is ever unpickled beyond plain tensors and containers.

MODEL, as every script takes it, is a checkpoint directory, a run directory (its newest sound checkpoint), or a hub id.
This file knows nothing of training: the state that it stores is a dict that somebody else fills and reads.
"""

import json
import math
import pickle
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from model import GPT
from runtime import UserError, sha256, write_atomically

SUMS = "SHA256SUMS"


def checkpoint_steps(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint of a run, oldest first."""
    found = [(re.fullmatch(r"step_(\d+)", p.name), p) for p in Path(run_dir).glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, None if sizes and checksums are those that were written."""
    try:
        lines = (path / SUMS).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{SUMS} is missing or unreadable"
    if not lines:
        return f"{SUMS} is empty"
    for line in lines:
        digest, _, name = line.partition("  ")
        try:
            if sha256(path / name) != digest:
                return f"{name} is not what was written"
        except OSError:
            return f"{name or SUMS} is missing or unreadable"
    return None


def newest_sound(run_dir: Path, before: float = math.inf) -> Path | None:
    """The newest undamaged checkpoint of a run, of a step < `before`; says on stderr which ones it passes over."""
    for path in [path for step, path in reversed(checkpoint_steps(run_dir)) if step < before]:
        problem = damage(path)
        if problem is None:
            return path
        print(f"warning: passing over the damaged checkpoint {path}: {problem}", file=sys.stderr)
    return None


def remove_after(checkpoint: Path) -> None:
    """Remove the checkpoints of a run that are newer than this one, newest first."""
    for _, path in reversed(checkpoint_steps(checkpoint.parent)):
        if path == checkpoint:
            return
        shutil.rmtree(path)


class CheckpointWriter:
    """Writes the checkpoints of one run in the background, one at a time, and removes old ones.

    The newest `keep` stay, and the one with the lowest validation loss. An error of the thread sets `failed`, and is
    raised by the next `save` or by `wait`.
    """

    def __init__(self, run_dir: Path, keep: int):
        self.run_dir, self.keep = Path(run_dir), keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copied = threading.Event()
        self._copied.set()
        for leftover in self.run_dir.glob(".step_*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, step: int, copy: Callable[[], Callable], train_state: dict, metrics: dict, announce=print) -> None:
        """Start writing `step_NNNNNN`. `copy()` copies the weights and returns `export(dir)`, which writes the model
        and tokenizer files. It runs in the thread, and `train_state` is copied there: the caller may go on reading
        both, and calls `wait_for_copy` before it changes them. `announce` hears of the checkpoint once it is durable.
        """
        self.wait()
        path = self.run_dir / f"step_{step:06d}"

        def fill(directory: Path, export: Callable[[Path], None], state: dict):
            export(directory)
            torch.save(state, directory / "train_state.pt")
            (directory / "metrics.json").write_text(json.dumps({"step": step, **metrics}) + "\n")
            sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(directory.iterdir())]
            (directory / SUMS).write_text("".join(sums))

        stream = side_stream()

        def work():
            try:
                with torch.cuda.stream(stream):
                    export, state = copy(), snapshot(train_state)
                self._copied.set()
                write_atomically(path, lambda directory: fill(directory, export, state))
                self._prune()
                announce(f"saved {path}")
            except BaseException as e:
                self._error = e
            finally:
                self._copied.set()

        self._copied.clear()
        self._thread = threading.Thread(target=work, name="checkpoint writer")
        self._thread.start()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait_for_copy(self) -> None:
        """Until the checkpoint under way no longer needs the state that it was given."""
        self._copied.wait()

    def wait(self) -> None:
        """Until the checkpoint under way is on the disk. Raises UserError if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            kept = newest_sound(self.run_dir)
            raise UserError(
                f"a checkpoint could not be written to {self.run_dir}: {error}; "
                + (f"{kept} is intact: make room, then go on with --resume" if kept else "make room, then start again")
            ) from error

    def _prune(self) -> None:
        steps = checkpoint_steps(self.run_dir)
        losses = {path: _val_loss(path) for _, path in steps}
        best = min((p for _, p in steps if losses[p] is not None), key=losses.get, default=None)
        for _, path in steps[: -self.keep] if self.keep > 0 else []:
            if path != best:
                shutil.rmtree(path, ignore_errors=True)


def _val_loss(path: Path) -> float | None:
    try:
        return json.loads((path / "metrics.json").read_text()).get("val_loss")
    except (OSError, ValueError):
        return None


def side_stream():
    """A stream for copies that overlap with the computation to come and wait for that of before; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def snapshot(state):
    """A copy in CPU memory of the tensors of nested dicts and lists, which later steps do not change."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: snapshot(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(snapshot(value) for value in state)
    return state


def load_train_state(path: Path) -> dict:
    """`train_state.pt` of a checkpoint: tensors and plain containers only, on the CPU. Raises UserError."""
    try:
        return torch.load(Path(path) / "train_state.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as e:
        raise UserError(f"{path}/train_state.pt cannot be read: {e}; resume from an earlier checkpoint") from e


def find_model(model: str) -> str:
    """MODEL as a checkpoint directory or a hub id. Raises UserError for a directory that holds neither."""
    path = Path(model)
    if (path / "config.json").is_file() and list(path.glob("model*.safetensors")):
        return str(path)
    if path.is_dir():
        newest = newest_sound(path)
        if newest is None:
            raise UserError(f"{model} holds no checkpoint: neither model.safetensors nor a sound step_NNNNNN directory")
        return str(newest)
    if path.is_absolute() or model.count("/") > 1 or model.startswith((".", "out/")):
        raise UserError(f"there is no directory {model}; give a checkpoint, a run directory, or a hub id such as gpt2")
    return model


def load_model(model: str, dropout: float = 0.0, attention: str = "flash") -> GPT:
    """GPT of a MODEL, in fp32 on the CPU. Raises UserError for what is missing, damaged, or not a GPT-2."""
    model = find_model(model)
    path = Path(model)
    if (path / SUMS).exists() and (problem := damage(path)) is not None:
        other = newest_sound(path.parent)
        raise UserError(f"{path} is damaged: {problem}" + (f"; the newest sound one is {other}" if other else ""))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return GPT.from_pretrained(model, dropout=dropout, attention=attention)
    except ValueError as e:
        raise UserError(str(e)) from e
    except (OSError, RuntimeError) as e:  # huggingface_hub's own errors are OSErrors, those of its client RuntimeErrors
        raise UserError(
            f"{model} is no local directory, and could not be had from the hub ({type(e).__name__}); check the name, "
            f"or download it where there is a network: hf download {model}"
        ) from e


def load_tokenizer(model: str):
    """The tokenizer of a MODEL. Raises UserError."""
    from bpe.tokenizer import Tokenizer

    model = find_model(model)
    path = Path(model)
    if not path.is_dir():
        return Tokenizer.from_tiktoken("gpt2")
    if not (path / "tokenizer.json").exists() and not (path / "merges.txt").exists():
        raise UserError(f"{path} has no tokenizer.json; copy the tokenizer that the model was trained with there")
    return Tokenizer.load(path)
