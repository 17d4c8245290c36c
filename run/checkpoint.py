"""Checkpoints: Hugging Face model directories that appear whole or not at all.

    OUT_DIR/step_000500/   config.json, model.safetensors, generation_config.json, tokenizer files,
                           train_state.pt, SHA256SUMS, and for people README.md, learning_curve.png

A checkpoint is written to a hidden directory, flushed to the disk, and renamed; `SHA256SUMS` (check it by hand with
`sha256sum -c SHA256SUMS`) then tells a sound one from one that was damaged later; what is for people to edit is not in
it. The weights are copied to host memory while training waits, 0.2 s for 124M on two cores; the copy is written in a
background thread while training goes on. Nothing is ever unpickled beyond plain tensors and containers.

MODEL, as every script takes it, is a checkpoint directory, a run directory (its newest sound checkpoint), or a hub id.
This file knows nothing of training: the state that it stores is a dict that somebody else fills and reads.
"""

import errno
import math
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from bpe.tokenizer import Tokenizer
from cli import UserError, explain, replace_file, sha256, write_atomically
from model import GPT, GPTConfig, read_config
from run import card
from run.sharding import copy_into, whole

SUMS = "SHA256SUMS"
WEIGHTS = {"model.safetensors": "config.json", "adapter_model.safetensors": "adapter_config.json"}  # and their config


# ------------------------------------------------------------------------------------------ which checkpoints there are


def checkpoint_steps(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint of a run, oldest first."""
    # 18 digits fit into 64 bits; step_notes/ and step_12.bak/ are not ours
    found = [(re.fullmatch(r"step_(\d{1,18})", p.name), p) for p in Path(run_dir).glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, None if all are there with the checksums that were written."""
    try:
        lines = (path / SUMS).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        refuse_to_judge(e)
        return f"{SUMS} is missing or unreadable"
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    # a list of sums that was cut at the end of a line is a valid list of fewer files
    needed = {"train_state.pt", *next((pair for pair in WEIGHTS.items() if pair[0] in sums), WEIGHTS)}
    if missing := sorted(needed - sums.keys()):
        return f"{SUMS} does not list {missing[0]}"
    for name, digest in sums.items():
        try:  # a second for each GB: cheaper than a week of training on weights with a flipped bit
            if sha256(path / name) != digest:
                return f"{name} is not what was written"
        except (OSError, ValueError) as e:
            refuse_to_judge(e)
            return f"{name or SUMS} is missing or unreadable"
    return None


def refuse_to_judge(e: Exception) -> None:
    """Raise UserError for an error of the disk, the network or permissions at this moment, which says nothing of a
    file: a sound checkpoint must not be taken for a damaged one."""
    if getattr(e, "errno", None) in (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE):
        raise UserError(
            f"{e.filename} cannot be read now: {e.strerror}; mend that, or move it away, and try again"
        ) from e


def newest_sound(run_dir: Path, before: float = math.inf) -> Path | None:
    """The newest undamaged checkpoint of a run, of a step < `before`; says on stderr which ones it passes over."""
    for path in [path for step, path in reversed(checkpoint_steps(run_dir)) if step < before]:
        problem = damage(path)
        if problem is None:
            return path
        print(f"warning: passing over the damaged checkpoint {path}: {problem}", file=sys.stderr)
    return None


def set_aside(newer_than: Path) -> None:
    """Rename the checkpoints that a resume passed over: they are damaged, and their steps will be taken again."""
    for _, path in reversed(checkpoint_steps(newer_than.parent)):
        if path == newer_than:
            return
        target = path.with_name(f"damaged_{path.name}")
        if target.exists():  # one of the same step, damaged earlier
            remove(target)
        path.rename(target)


def remove_after(checkpoint: Path) -> None:
    """Remove the checkpoints of a run that are newer than this one, newest first."""
    for _, path in reversed(checkpoint_steps(checkpoint.parent)):
        if path == checkpoint:
            return
        remove(path)


def remove(path: Path) -> None:
    """A file, a directory, or what links to one; what it links to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# ---------------------------------------------------------------------------------------------------------- writing


class CheckpointWriter:
    """Writes the checkpoints of one run in a background thread, one at a time, and removes old ones.

    The newest `keep` sound ones stay, and the one with the lowest validation loss. An error of the thread sets
    `failed`, and is raised by the next `save` or `wait`.
    """

    def __init__(self, run_dir: Path, keep: int):
        self.run_dir, self.keep = Path(run_dir), keep
        self.failed = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._sound: set[Path] = set()  # written or checked by this process, so that no file is hashed twice
        for leftover in [*self.run_dir.glob(".step_*.tmp"), *self.run_dir.glob(".step_*.old")]:
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, step: int, export: Callable[[Path], None], state: dict, val_losses: dict, announce=print) -> None:
        """Start writing `step_NNNNNN`: `export(dir)` writes the model's files, `state` becomes train_state.pt.

        Both are copies that nobody changes any more. `val_losses` is {step: loss}, from which the best checkpoint
        follows. `announce` hears of the new one when it is durable.
        """
        self.wait()
        path = self.run_dir / f"step_{step:06d}"

        def fill(directory: Path) -> None:
            export(directory)
            torch.save(state, directory / "train_state.pt")
            # the sums come last, and from the files: a checkpoint without them was never complete
            files = sorted(file for file in directory.iterdir() if file.name not in card.FILES)
            sums = [f"{sha256(file)}  {file.name}\n" for file in files]
            replace_file(directory / SUMS, "".join(sums))

        def work() -> None:
            try:
                write_atomically(path, fill)
                self._sound.add(path)
                announce(f"saved {path}")
                self._prune(path, val_losses)  # only now: at no moment are there fewer sound ones than before
            except BaseException as e:  # a thread has nobody to raise to; the loop asks for it
                self._error, self.failed = e, True

        self._thread = threading.Thread(target=work, name="checkpoint writer")
        self._thread.start()

    def wait(self) -> None:
        """Until the checkpoint under way is on the disk. Raises UserError if it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            kept = newest_sound(self.run_dir)
            raise UserError(
                f"a checkpoint could not be written to {self.run_dir}: {explain(error) or error!r}; "
                + (f"{kept} is intact: mend that, then give --resume" if kept else "mend that, then start again")
            ) from error

    def _prune(self, newest: Path, val_losses: dict[int, float]) -> None:
        """Remove what is neither new nor best. A damaged checkpoint does not count as one that is kept."""
        if not self.keep:
            return
        steps = [(step, path) for step, path in checkpoint_steps(self.run_dir) if path != newest]
        losses = {path: val_loss_at(step, val_losses) for step, path in steps}
        by_loss = sorted((path for path in losses if losses[path] is not None), key=losses.get)
        best = next(filter(self._is_sound, by_loss), None)
        kept = {newest, best}
        n_sound = 1  # the newest, which was just written
        for _, path in reversed(steps):
            if n_sound < self.keep and self._is_sound(path):
                kept.add(path)
                n_sound += 1
        # A damaged one newer than some that stay is left for a person to look at; those older than all that stay go.
        oldest_kept = min((step for step, path in steps if path in kept and path != best), default=math.inf)
        for step, path in steps:
            if path not in kept and (step < oldest_kept or path in self._sound):
                with suppress(OSError):
                    remove(path)

    def _is_sound(self, path: Path) -> bool:
        if path not in self._sound and damage(path) is None:
            self._sound.add(path)
        return path in self._sound


def val_loss_at(step: int, val_losses: dict[int, float]) -> float | None:
    """The validation loss of a step, or the last one before it; None if there is none."""
    earlier = [at for at in val_losses if at <= step]
    return val_losses[max(earlier)] if earlier else None


def snapshot(state, keep: bool = True):
    """A copy in host memory of the tensors of nested dicts and lists, which later steps do not change.

    Where tensors are divided over ranks, all ranks call this: each is gathered, copied and let go before the next one,
    so that no device ever holds more than one of them whole. Those with `keep` False get None for each.
    """
    if isinstance(state, torch.Tensor):
        gathered = whole(state := state.detach())
        return gathered.to("cpu", copy=gathered is state) if keep else None  # .cpu() of a CPU's tensor is no copy
    if isinstance(state, dict):
        return {key: snapshot(value, keep) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(snapshot(value, keep) for value in state)
    return state


def tied_once(model: GPT) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def filled(config: GPTConfig, state: dict[str, torch.Tensor]) -> GPT:
    """A GPT with these tensors, not copies of them, as its weights."""
    with torch.device("meta"):  # parameters without memory, which the tensors then replace
        gpt = GPT(config)
    gpt.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]}, assign=True)
    return gpt


def whole_model(model: GPT) -> GPT:
    """Of a model that is divided over ranks a copy with all weights on every rank, which each can then use by itself;
    one that is not divided as it is. All ranks call this together."""
    state = tied_once(model)
    gathered = {name: whole(tensor) for name, tensor in state.items()}
    return model if all(gathered[name] is state[name] for name in state) else filled(model.config, gathered)


class ModelFiles:
    """The weights of a whole model and its tokenizer, as a run saves and restores them.

    Where the model is divided over ranks, all of them call both methods, and the one with `keep` has the copies.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, keep: bool = True):
        self.model, self.tokenizer, self.keep = model, tokenizer, keep

    def copy(self) -> Callable[[Path], None]:
        """Copy the weights as they are now, to host memory; the result writes the copy into a directory."""
        state = snapshot(tied_once(self.model), self.keep)  # (name: fp32 tensor), 0.5 GB for 124M
        copy = filled(self.model.config, state) if self.keep else None
        return lambda directory: save_model(directory, copy, self.tokenizer)

    def load(self, directory: Path) -> None:
        """Put the weights of a checkpoint into the model, in place."""
        state = load_model(str(directory)).state_dict()
        for name, tensor in tied_once(self.model).items():
            copy_into(tensor, state[name])


def save_model(directory: Path, model: GPT, tokenizer: Tokenizer) -> None:
    model.save_pretrained(directory, tokenizer.eot_token, len(tokenizer))
    tokenizer.save(directory)


# ---------------------------------------------------------------------------------------------------------- reading


def load_train_state(path: Path) -> dict:
    """`train_state.pt` of a checkpoint: tensors and plain containers only, on the CPU. Raises UserError."""
    try:
        # weights_only: a pickle is a program, and a checkpoint may come from anywhere
        state = torch.load(Path(path) / "train_state.pt", map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged pickle can make anything happen that its few allowed classes can
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{path}/train_state.pt cannot be read: {reason}; resume from an earlier checkpoint") from e
    if not isinstance(state, dict):
        raise UserError(f"{path}/train_state.pt holds a {type(state).__name__}; resume from an earlier checkpoint")
    return state


def find_model(model: str) -> str:
    """MODEL as a checkpoint directory or a hub id. Raises UserError for a directory that holds neither."""
    if not model:
        raise UserError("the model's name is empty; give a checkpoint, a run directory, or a hub id such as gpt2")
    path = Path(model)
    if (path / "config.json").is_file() and [*path.glob("model.safetensors"), *path.glob("model-*-of-*.safetensors")]:
        return str(path)
    if path.is_dir():
        newest = newest_sound(path)
        if newest is None:
            raise UserError(f"{model} holds no checkpoint: neither model.safetensors nor a sound step_NNNNNN directory")
        return str(newest)
    # a typo in a path must not become a request to the hub
    local = path.is_absolute() or model.count("/") > 1 or model.startswith((".", "out/"))
    if local or not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", model):
        raise UserError(f"there is no directory {model}; give a checkpoint, a run directory, or a hub id such as gpt2")
    return model


@contextmanager
def user_errors_of(model: str) -> Iterator[None]:
    """Turn what can go wrong in reading a MODEL into UserErrors."""
    try:
        with warnings.catch_warnings():  # what transformers warns of is no news to whoever gives a path
            warnings.simplefilter("ignore")
            yield
    except ValueError as e:
        raise UserError(str(e)) from e
    except Exception as e:  # of the network, the hub's client, or a server that answers nonsense: all have their own
        if Path(model).is_dir() or isinstance(e, UserError):
            raise
        raise UserError(
            f"{model} is no local directory, and could not be had from the hub ({type(e).__name__}); check the name, "
            f"or download it where there is a network: hf download {model}"
        ) from e


def load_shape(model: str) -> GPTConfig:
    """The sizes of a MODEL, without its weights. Raises UserError."""
    model = find_model(model)
    with user_errors_of(model):
        return read_config(model)


def load_model(model: str, dropout: float = 0.0, attention: str = "flash") -> GPT:
    """GPT of a MODEL, in fp32 on the CPU. Raises UserError for what is missing, damaged, or not a GPT-2."""
    model = find_model(model)
    path = Path(model)
    if (path / SUMS).exists() and (problem := damage(path)) is not None:
        other = newest_sound(path.parent)
        raise UserError(f"{path} is damaged: {problem}" + (f"; the newest sound one is {other}" if other else ""))
    with user_errors_of(model):
        return GPT.from_pretrained(model, dropout=dropout, attention=attention)


def model_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a MODEL. Raises UserError."""
    model = find_model(model)
    path = Path(model)
    if path.is_dir() and not (path / "tokenizer.json").exists() and not (path / "merges.txt").exists():
        raise UserError(f"{path} has no tokenizer.json; copy the tokenizer that the model was trained with there")
    try:
        # models of the hub that read_config takes all have GPT-2's vocabulary
        return Tokenizer.load(path) if path.is_dir() else Tokenizer.from_tiktoken("gpt2")
    except ValueError as e:
        raise UserError(str(e)) from None
