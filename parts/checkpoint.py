"""Checkpoints: Hugging Face model directories that appear whole or not at all.

    OUT_DIR/step_000500/   the weights and their config, generation_config.json, tokenizer files, train_state.pt,
                           SHA256SUMS; the last one of a run also README.md and learning_curve.png

A checkpoint is written to a hidden directory, flushed to the disk, and renamed. `SHA256SUMS` (check it by hand with
`sha256sum -c SHA256SUMS`) shows whether one was damaged later; files that people may edit are not listed in it.
The weights are copied to host memory while training waits, 0.2 s for 124M on two cores; a background thread writes the
copy while training continues. Nothing is ever unpickled beyond plain tensors and containers.

MODEL, as every script takes it, is a checkpoint directory, a run directory (its newest intact checkpoint), or a hub id.
This file knows nothing of training: the state that it stores is a dict, which the caller fills and reads.
"""

import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only

from bpe.formats import TOKENIZER_FILES
from bpe.tokenizer import Tokenizer
from model import GPT, GPTConfig, local_directory, read_config
from parts.cli import UserError, explain
from parts.files import replace_file, set_aside, sha256, write_atomically
from parts.sharding import unsharded

MODEL_FILES = ("model.safetensors", "config.json")
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
TRAIN_STATE = "train_state.pt"  # what a resume needs besides the weights
SUMS = "SHA256SUMS"


# ------------------------------------------------------------------------------------------ which checkpoints there are


def checkpoint_steps(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint of a run, oldest first."""
    checkpoints = []
    for path in run_dir.glob("step_*"):
        match = re.fullmatch(r"step_(\d{1,18})", path.name)  # 18 digits fit into 64 bits; step_notes/ is not ours
        if match and path.is_dir():
            checkpoints.append((int(match[1]), path))
    return sorted(checkpoints)


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files: one is missing, or its checksum is not what was written. None if nothing
    is. Raises UserError for any other error, of the disk, the network or permissions: the file may well be intact."""
    name = SUMS
    try:
        sums = {line[66:]: line[:64] for line in (path / SUMS).read_text().splitlines()}  # "digest  name"
        weights = ADAPTER_FILES if ADAPTER_FILES[0] in sums else MODEL_FILES
        for name in (*weights, TRAIN_STATE):  # SHA256SUMS cut at a line break would look complete
            if name not in sums:
                return f"{SUMS} does not list {name}"
        for name, digest in sums.items():  # a second per GB: cheaper than a week of training with a flipped bit
            if "/" in name or not (path / name).is_file():  # or the sums of a stranger would have us read any file
                return f"{name} is missing"
            if sha256(path / name) != digest:
                return f"{name} is not what was written"
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return f"{name} is missing"
    except ValueError:  # not UTF-8, or a name that no file can have
        return f"{name} is unreadable"
    except OSError as e:
        raise UserError(f"{path / name} cannot be read now: {e.strerror}; fix that, or move it away") from e
    return None


def newest_intact(run_dir: Path, before: float = math.inf) -> Path | None:
    """The newest intact checkpoint of a run, of a step < `before`; says on stderr which ones it skips."""
    for step, path in reversed(checkpoint_steps(run_dir)):
        if step < before:
            damage = find_damage(path)
            if damage is None:
                return path
            print(f"warning: skipping the damaged checkpoint {path}: {damage}", file=sys.stderr)
    return None


def set_newer_aside(run_dir: Path, step: int, why: str) -> None:
    """Rename the checkpoints of a run after `step` to WHY_step_NNNNNN, so that no resume finds them. They are not
    removed: a person may want to know what has damaged or spoilt them."""
    newer = [path for number, path in checkpoint_steps(run_dir) if number > step]
    for path in reversed(newer):  # the newest first: an interruption leaves no gap
        target = path.with_name(f"{why}_{path.name}")
        if target.exists():  # one of the same step, earlier
            set_aside(target)
        path.rename(target)


def delete(path: Path) -> None:
    """Delete a file, a directory, or a link to one, but not what it links to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_leftovers(run_dir: Path, files: tuple[str, ...]) -> None:
    """Remove what a killed process left unfinished: hidden checkpoints and hidden `files` of the run directory."""
    names = "|".join([r"((damaged|spoilt)_)?step_\d+", "adapter", r"README\.md", *map(re.escape, files)])
    for path in (*run_dir.glob(".*"), *run_dir.glob("step_*/.*")):  # in a checkpoint: a card
        if re.fullmatch(rf"\.({names})\.\d+\.(tmp|old)", path.name):
            delete(path)


# ---------------------------------------------------------------------------------------------------------- writing


class CheckpointWriter:
    """Writes the checkpoints of one run in a background thread, one at a time, and removes old ones.

    Keeps the newest `keep` intact ones, and the one with the lowest validation loss; 0 keeps all. The next `save` or
    `wait` raises what went wrong in the thread.
    """

    def __init__(self, run_dir: Path, keep: int, check: Callable[[], None] = lambda: None):
        self.run_dir = run_dir
        self.keep = keep
        self.check = check  # raises UserError if run_dir is not ours any more
        self._thread = ThreadPoolExecutor(1)  # one, because writes would only compete; Python waits for it at exit
        self._under_way: Future | None = None
        self._intact: set[Path] = set()  # written or checked by this process, so that no file is hashed twice

    def save(self, path: Path, files, state: dict, val_losses: dict[int, float], announce: Callable = print) -> None:
        """Start writing the checkpoint `path`, after the one under way: two copies would take twice the host memory.

        `files` and `state` are copies that nobody changes. `val_losses` is {step: loss}, to find the best checkpoint.
        `announce` gets a line once the new one is durable.
        """
        self.wait()
        self._under_way = self._thread.submit(self._write, path, files, state, val_losses, announce)

    def _write(self, path: Path, files, state: dict, val_losses: dict[int, float], announce: Callable) -> None:
        def write(directory: Path) -> None:
            files.write(directory)
            torch.save(state, directory / TRAIN_STATE)
            # last, and of what is on the disk: a checkpoint without them was never complete
            sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(directory.iterdir())]
            replace_file(directory / SUMS, "".join(sums))
            self.check()  # from here on an older one of this step would be replaced

        try:
            write_atomically(path, write)
        except Exception:
            self.check()  # that the directory is gone explains any other error
            raise
        self._intact.add(path)
        announce(f"saved {path}")  # durable: from here on it survives a power failure
        if self.keep:
            self._prune(val_losses)  # only now: at no moment are there fewer intact ones than before

    @property
    def failed(self) -> bool:
        """Whether `wait` would raise an error that is already known; does not block."""
        return self._under_way is not None and self._under_way.done() and self._under_way.exception() is not None

    def wait(self) -> None:
        """Wait until the checkpoint under way is on the disk. Raises UserError if it could not be written."""
        if self._under_way is None:
            return
        error = self._under_way.exception()
        self._under_way = None
        if error is not None:
            raise UserError(
                f"a checkpoint could not be written to {self.run_dir}: {explain(error) or repr(error)}; "
                "fix that, then --resume from the newest intact one"
            ) from error

    def _prune(self, val_losses: dict[int, float]) -> None:
        """Remove checkpoints that are neither new nor best. Damaged ones do not count, and stay for a person to see."""
        checkpoints = checkpoint_steps(self.run_dir)
        for _, path in checkpoints:
            if path not in self._intact and find_damage(path) is None:
                self._intact.add(path)
        intact = [(step, path) for step, path in checkpoints if path in self._intact]
        losses = {}
        for step, path in intact:
            measured = [at for at in val_losses if at <= step]
            if measured:
                losses[path] = val_losses[max(measured)]  # of its step, or the last one before it
        best = min(losses, key=losses.get, default=None)  # several may share one loss: the oldest was measured
        for _, path in intact[: -self.keep]:
            if path != best:
                self.check()
                with suppress(OSError):  # on Windows another program may have it open: no reason to end a run
                    # hidden first, so that a kill leaves a leftover and not a damaged checkpoint
                    delete(path.rename(path.with_name(f".{path.name}.{os.getpid()}.old")))


def copy_to_host(state, keep: bool = True):
    """Copy the tensors in nested dicts and lists to host memory, where later steps do not change them.

    If tensors are sharded over ranks, all ranks call this: each tensor is gathered, copied and released before the next
    one, so that no device ever holds more than one of them unsharded. Ranks with `keep` False get None for each.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor | None:
        tensor = tensor.detach()
        whole = unsharded(tensor)
        is_copy = whole is not tensor
        return whole.to("cpu", copy=not is_copy) if keep else None  # .cpu() of a CPU's tensor does not copy

    return tree_map_only(torch.Tensor, copy, state)


def state_dict_without_head(model: GPT) -> dict[str, torch.Tensor]:
    # the head is the embedding: gathered or copied under both names, it would take its memory twice
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def gpt_from_state(config: GPTConfig, state: dict[str, torch.Tensor]) -> GPT:
    """A GPT with these tensors, not copies of them, as its weights."""
    with torch.device("meta"):  # parameters without memory, which the tensors then replace
        gpt = GPT(config)
    gpt.load_state_dict(state | {"lm_head.weight": state["transformer.wte.weight"]}, assign=True)  # tied again
    return gpt


def unsharded_copy(model: GPT) -> GPT:
    """An unsharded copy of a model that is sharded over ranks, for each rank to use by itself; any other model as it
    is. All ranks call this together."""
    state = state_dict_without_head(model)
    gathered = {name: unsharded(tensor) for name, tensor in state.items()}
    if all(gathered[name] is state[name] for name in state):
        return model
    return gpt_from_state(model.config, gathered)


@dataclass(frozen=True)
class ModelFiles:
    """The weights of a model and its tokenizer, as a run saves them. If the model is sharded over ranks, all of them
    call `copy`, and the one with `keep` has the copies."""

    model: GPT
    tokenizer: Tokenizer
    keep: bool = True

    def copy(self) -> "ModelFiles | None":
        """The same files of the weights as they are now, copied to host memory; None without `keep`."""
        state = copy_to_host(state_dict_without_head(self.model), self.keep)  # (name: fp32 tensor), 0.5 GB for 124M
        if not self.keep:
            return None
        return ModelFiles(gpt_from_state(self.model.config, state), self.tokenizer)

    def write(self, directory: Path) -> None:
        save_model(directory, self.model, self.tokenizer)


def save_model(directory: Path, model: GPT, tokenizer: Tokenizer) -> None:
    model.save_pretrained(directory, tokenizer.eot_token, tokenizer.unused_ids(model.config.vocab_size))
    tokenizer.save(directory, model.config.n_positions)


# ---------------------------------------------------------------------------------------------------------- reading


def load_train_state(path: Path) -> dict:
    """`train_state.pt` of a checkpoint: tensors and plain containers only, on the CPU. Raises UserError."""
    try:
        # weights_only: a pickle is a program, and a checkpoint may come from anywhere
        state = torch.load(path / TRAIN_STATE, map_location="cpu", weights_only=True)
        if type(state) is not dict:
            raise ValueError(f"it holds a {type(state).__name__}")
        return state
    except Exception as e:  # a corrupt pickle can raise anything that its allowed classes can raise
        reason = [*str(e).splitlines(), type(e).__name__][0]
        raise UserError(f"{path}/{TRAIN_STATE} cannot be read: {reason}; resume from an earlier checkpoint") from e


def find_model(model: str) -> str:
    """Resolve MODEL to a checkpoint directory or a hub id. Raises UserError for a directory without a model."""
    path = Path(model)
    weights = ("model.safetensors", "model-*-of-*.safetensors", "pytorch_model*.bin")  # model.py refuses the last
    if (path / "config.json").is_file() and any([*path.glob(pattern)] for pattern in weights):
        return str(path)
    if model and path.is_dir():
        if newest := newest_intact(path):
            return find_model(str(newest))
        raise UserError(
            f"{path} holds no model: no model.safetensors and no intact step_NNNNNN; to use an adapter, give the "
            "model that it was trained on, and its directory as --adapter"
        )
    # a typo in a path must not become a request to the hub, where anybody could own that name; the pattern takes one
    # slash at most, and none in front
    local = path.exists() or model.startswith((".", "out/"))
    if local or not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", model):
        raise UserError(
            f"{model or 'an empty name'} is not a directory; "
            "give a checkpoint, a run directory, or a hub id such as gpt2"
        )
    return model


@contextmanager
def user_errors_of(model: str) -> Iterator[None]:
    """Turn what can go wrong in reading a MODEL into UserErrors."""
    try:
        yield
    except ValueError as e:
        raise UserError(str(e)) from e
    except Exception as e:  # the network, the hub's client and a broken server each raise their own
        if Path(model).is_dir() or isinstance(e, UserError):
            raise
        raise UserError(
            f"{model} is not a local directory and could not be downloaded from the hub ({type(e).__name__}); "
            f"check the name, or download it where there is a network: hf download {model}"
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
    if (path / SUMS).exists() and (damage := find_damage(path)):  # models of the hub and of --merge have no sums
        newest = newest_intact(path.parent)
        remedy = f"the newest intact one is {newest}" if newest else "write or download it again"
        raise UserError(f"{path} is damaged: {damage}; {remedy}")
    with user_errors_of(model):
        return GPT.from_pretrained(model, dropout=dropout, attention=attention)


def model_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a MODEL. Raises UserError, also for one with more tokens than the model knows."""
    model = find_model(model)
    with user_errors_of(model):
        folder = local_directory(model, TOKENIZER_FILES)
        # somebody may have fetched the weights of OpenAI's models alone; all of these have one tokenizer
        openai = re.fullmatch(r"(openai-community/)?gpt2(-medium|-large|-xl)?", model) and not os.path.isdir(model)
        weights_alone = openai and not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
        tokenizer = Tokenizer.load("gpt2" if weights_alone else folder)
    known = load_shape(model).vocab_size
    if len(tokenizer) > known:
        raise UserError(
            f"the tokenizer of {model} has {len(tokenizer)} tokens and its model {known}; "
            "copy the tokenizer.json that the model was trained with there"
        )
    return tokenizer
