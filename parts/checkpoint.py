"""Checkpoints: Hugging Face model directories that appear whole or not at all.

    OUT_DIR/step_000500/   the weights and their config, generation_config.json, tokenizer files, train_state.pt,
                           SHA256SUMS of weights and train_state.pt

A checkpoint is written to a hidden directory, flushed to the disk, and renamed. A resume compares the sums and passes
over a damaged one; so does `sha256sum -c SHA256SUMS`. Nothing is unpickled beyond plain tensors and containers.

MODEL, as every script takes it, is a checkpoint directory, a run directory (its newest checkpoint), or a hub id.
This file knows nothing of training: the state that it stores is a dict, which the caller fills and reads.
"""

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from bpe.tokenizer import Tokenizer
from model import GPT
from parts.cli import UserError
from parts.files import replace_file, sha256, write_atomically
from parts.huggingface import FACTORS, SETTINGS, is_gpt2, read_config, read_model, snapshot, write_model

WEIGHTS = "model.safetensors"
TRAIN_STATE = "train_state.pt"  # what a resume needs besides the weights
SUMS = "SHA256SUMS"


# ---------------------------------------------------------------------------------------------------------- finding


def checkpoint_steps(run_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, directory) of every checkpoint of a run, oldest first."""
    names = {path: path.name.removeprefix("step_") for path in run_dir.glob("step_*") if path.is_dir()}
    return sorted((int(name), path) for path, name in names.items() if name.isdecimal())  # step_notes/ is not ours


def find_damage(path: Path) -> str | None:
    """Return a checkpoint's damage: a missing file, or one whose sum has changed; None if it is intact. Raises OSError
    for errors of the disk or the network: the file may well be intact."""
    try:
        lines = (path / SUMS).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return f"{SUMS} is missing"
    for line in lines:
        digest, _, name = line.partition("  ")
        if not (path / name).is_file():
            return f"{name} is missing"
        if sha256(path / name) != digest:  # a second per GB
            return f"{name} is not what was written"
    return None


def newest_intact(run_dir: Path) -> Path | None:
    """Return a run's newest intact checkpoint; one note names each that it skips."""
    for _, path in reversed(checkpoint_steps(run_dir)):
        damage = find_damage(path)
        if damage is None:
            return path
        print(f"note: skipping the damaged checkpoint {path}: {damage}", file=sys.stderr)
    return None


# ---------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(path: Path, save_weights: Callable[[Path], None], state: dict) -> None:
    """Write a checkpoint atomically: the files of `save_weights(directory)`, the state, and the sums of both."""

    def fill(directory: Path) -> None:
        save_weights(directory)
        torch.save(state, directory / TRAIN_STATE)
        names = [name for name in (WEIGHTS, FACTORS, TRAIN_STATE) if (directory / name).exists()]
        sums = [f"{sha256(directory / name)}  {name}\n" for name in names]
        replace_file(directory / SUMS, "".join(sums))

    write_atomically(path, fill)


def prune(run_dir: Path, keep: int, steps: set[int]) -> None:
    """Remove checkpoints except the newest `keep` and those of `steps`; 0 keeps all."""
    for step, path in checkpoint_steps(run_dir)[:-keep] if keep else []:
        if step not in steps:
            with suppress(OSError):  # on Windows another program may have it open: no reason to end a run
                # hidden first, so that a kill leaves a leftover and not a damaged checkpoint
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.{os.getpid()}.tmp")))


def save_model(directory: Path, model: GPT, tokenizer: Tokenizer, ids: tuple[int, ...] | None = None) -> None:
    """Write a model with its tokenizer. `ids` are what is_gpt2 compares on; a document end in the middle exposes models
    that mask by document."""
    if ids and tokenizer.eot_token is not None:
        middle = len(ids) // 2
        ids = (*ids[:middle], tokenizer.eot_token, *ids[middle + 1 :])
    unused = tokenizer.unused_ids(model.config.vocab_size)
    write_model(directory, model, is_gpt2(model, ids), tokenizer.eot_token, unused)
    tokenizer.save(directory, model.config.n_positions)


# ---------------------------------------------------------------------------------------------------------- reading


def load_train_state(path: Path) -> dict:
    """Read `train_state.pt` of a checkpoint: tensors and plain containers only, on the CPU. Raises UserError."""
    try:
        # weights_only: a pickle is a program, and a checkpoint may come from anywhere
        # mmap: ranks of one host share the pages, and read what they need
        return torch.load(path / TRAIN_STATE, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # a corrupt pickle can raise anything that its allowed classes can raise
        raise UserError(f"{path}/{TRAIN_STATE} cannot be read ({e!r:.100}); resume from an earlier checkpoint") from e


def open_model(model: str | Path) -> tuple[GPT, Tokenizer, Path]:
    """Read a MODEL and its tokenizer, in fp32 on the CPU; also return its directory. Raises UserError for what is
    missing, damaged or does not fit."""
    folder = find_model(str(model))
    return read_model(folder), read_tokenizer(folder), folder


def find_model(model: str) -> Path:
    """Find the directory of a MODEL: a run's newest checkpoint, or the hub's files, which are downloaded once. Raises
    UserError."""
    path = Path(model)
    if model and path.is_dir():
        candidates = [path, *(checkpoint for _, checkpoint in reversed(checkpoint_steps(path)))]
        for folder in candidates:
            if (folder / "config.json").is_file() and any(folder.glob("model*.safetensors")):
                return folder
        raise UserError(
            f"{path} holds no checkpoint yet and no model.safetensors; pass a run or checkpoint directory "
            "(an adapter: --adapter)"
        )
    # a typo in a path must not become a request to the hub, where anybody could own that name; the hub's client refuses
    # more than one slash, and one in front
    if not model or path.exists() or model.startswith((".", "out/")):
        raise UserError(f"{model!r} is not a directory; pass a checkpoint, run directory or hub id such as gpt2")
    return snapshot(model)


def find_adapter(adapter: str) -> Path:
    """Find an adapter's directory: the one given; or the newest checkpoint of a run, or else its adapter/, which is
    older than the checkpoints of a resumed run. Raises UserError."""
    path = Path(adapter)
    for folder in (path, *(checkpoint for _, checkpoint in reversed(checkpoint_steps(path))), path / "adapter"):
        if (folder / SETTINGS).is_file():
            return folder
    raise UserError(f"{adapter} holds no adapter_config.json; pass an adapter such as out/lora/adapter")


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a model's directory. Raises UserError, also for more tokens than the model has."""
    try:
        tokenizer = Tokenizer.load(folder)
    except ValueError as e:
        raise UserError(str(e)) from e
    known = read_config(folder).vocab_size
    if len(tokenizer) > known:
        raise UserError(
            f"the tokenizer of {folder} has {len(tokenizer)} tokens, its model {known}; copy the model's own there"
        )
    return tokenizer
