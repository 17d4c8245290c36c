"""Checkpoints: Hugging Face model directories that appear whole or not at all.

    OUT_DIR/step_000500/   the weights and their config, generation_config.json, tokenizer files, train_state.pt,
                           SHA256SUMS

A checkpoint is written to a hidden directory, flushed to the disk, and renamed. `SHA256SUMS` (check it by hand with
`sha256sum -c SHA256SUMS`) shows whether one was damaged later; files that people may edit are not listed in it.
Nothing is ever unpickled beyond plain tensors and containers.

MODEL, as every script takes it, is a checkpoint directory, a run directory (its newest intact checkpoint), or a hub id.
This file knows nothing of training: the state that it stores is a dict, which the caller fills and reads.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bpe.formats import TOKENIZER_FILES
from bpe.tokenizer import Tokenizer
from model import GPT, GPTConfig, WithoutWeights, agree, exactly, local_directory, question, read_config
from parts.cli import UserError
from parts.files import replace_file, sha256, write_atomically
from parts.generation import KVCache, next_logits

MODEL_FILES = ("model.safetensors", "config.json")
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")
TRAIN_STATE = "train_state.pt"  # what a resume needs besides the weights
SUMS = "SHA256SUMS"


# ------------------------------------------------------------------------------------------ which checkpoints there are


def checkpoint_steps(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every checkpoint of a run, oldest first."""
    names = {path: path.name.removeprefix("step_") for path in run_dir.glob("step_*") if path.is_dir()}
    return sorted((int(name), path) for path, name in names.items() if name.isdecimal())  # step_notes/ is not ours


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files: one is missing, or its checksum is not what was written. None if nothing
    is. Raises OSError for what is wrong with the disk, the network or permissions: the file may well be intact."""
    try:
        lines = (line.split("  ", 1) for line in (path / SUMS).read_text().splitlines())
        sums = {name: digest for digest, name in lines}
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
        return f"{SUMS} is missing"
    except ValueError:  # not UTF-8, or a name that no file can have
        return f"{SUMS} is unreadable"
    return None


def newest_intact(run_dir: Path) -> Path | None:
    """The newest intact checkpoint of a run; says on stderr which ones it skips."""
    for _, path in reversed(checkpoint_steps(run_dir)):
        damage = find_damage(path)
        if damage is None:
            return path
        print(f"warning: skipping the damaged checkpoint {path}: {damage}", file=sys.stderr)
    return None


# ---------------------------------------------------------------------------------------------------------- writing


def write_checkpoint(path: Path, save_weights: Callable[[Path], None], state: dict) -> None:
    """Write a checkpoint atomically: the files of `save_weights(directory)`, the state, and the sums of all of them."""

    def fill(directory: Path) -> None:
        save_weights(directory)
        torch.save(state, directory / TRAIN_STATE)
        # last, and of what is on the disk: a checkpoint without them was never complete
        sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(directory.iterdir())]
        replace_file(directory / SUMS, "".join(sums))

    write_atomically(path, fill)


def prune(run_dir: Path, keep: int, steps: set[int]) -> None:
    """Remove checkpoints except the newest `keep` and those of `steps`; 0 keeps all."""
    for step, path in checkpoint_steps(run_dir)[:-keep] if keep else []:
        if step not in steps:
            with suppress(OSError):  # on Windows another program may have it open: no reason to end a run
                # hidden first, so that a kill leaves a leftover and not a damaged checkpoint
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.{os.getpid()}.tmp")))


def save_model(directory: Path, model: GPT, tokenizer: Tokenizer) -> None:
    model.save_pretrained(directory, tokenizer.eot_token, tokenizer.unused_ids(model.config.vocab_size))
    tokenizer.save(directory, model.config.n_positions)


@torch.no_grad()
def notes_on(model: GPT) -> list[str]:
    """What is to be known about a model, perhaps a changed one, before it trains: nothing of a GPT-2.

    What needs its weights is asked of the model, a few tokens; all else of a narrow one. Raises UserError for a model
    whose checkpoints would load as another one.
    """
    narrow = model.narrow
    ids = question(narrow.config, 1024)
    answer = narrow.answer(ids)
    if not torch.equal(narrow.answer(ids[:16]), narrow.answer(ids[:16])):
        return ["the model draws random numbers in evaluations, too: nobody can check what its checkpoints compute"]
    remedy = "GPT(config) in model.py must build all of the model"
    with WithoutWeights():
        loaded = type(model)(model.config)
    try:
        loaded.load_state_dict(model.state_dict(), assign=True)
    except RuntimeError as e:
        raise UserError(f"a checkpoint of this model could not be loaded: {' '.join(str(e).split())}; {remedy}") from e
    row = question(model.config, 2)
    expected = model.answer(row)
    found = loaded.to(model.lm_head.weight.device).answer(row)
    if not agree(found, expected, 1e-4):
        difference = (found - expected).abs().max()
        raise UserError(
            f"a checkpoint of this model would load as another: logits differ by {difference:.2g}; {remedy}"
        )
    with exactly(narrow):
        notes = [*other_answers(narrow, ids, answer)]
    if not model.is_gpt2:
        notes.append(
            "this is not a GPT-2: its checkpoints load, resume, sample and score with this model.py; transformers, "
            "vLLM and llama.cpp will refuse them by name"
        )
    return notes


def other_answers(model: GPT, ids: list[int], answer: torch.Tensor) -> Iterator[str]:
    """Say where the project computes something else than forward(), which gives `answer` after the row `ids`."""
    device = model.lm_head.weight.device
    idx = torch.tensor([ids], device=device)
    few = idx[:, :16]
    logits = model(few)
    x = model.hidden(few)

    def loss(training: bool):
        model.train(training)
        found = model.loss_of_hidden(x, few)
        model.eval()
        return found, torch.nn.functional.cross_entropy(logits[0].float(), few[0])

    def cached():
        cache = KVCache(model, 1, len(ids))
        next_logits(model, [ids[:-1]], cache)
        return next_logits(model, [ids], cache)[0, ids].cpu(), answer

    def packed():  # as HellaSwag packs endings: two, of which the second does not see the first
        n = len(ids) // 3
        row = torch.cat([idx[:, : 2 * n], idx[:, n : 2 * n]], dim=1)
        positions = torch.tensor([[*range(2 * n), *range(n, 2 * n)]], device=device)
        mask = torch.ones(3 * n, 3 * n, dtype=torch.bool, device=device).tril()
        mask[2 * n :, n : 2 * n] = False
        return model.hidden(row, positions, mask[None, None])[:, 2 * n :], model.hidden(row[:, : 2 * n])[:, n:]

    def other_attention():
        attention = "naive" if model.config.attention == "flash" else "flash"
        other = type(model)(replace(model.config, attention=attention)).to(device)
        other.load_state_dict(model.state_dict())
        return other.answer(ids[:64]), model.answer(ids[:64])

    questions = {
        "forward() is not lm_head(hidden()), which is what samples take": lambda: (model.lm_head(x), logits),
        "lm_head is not its weight alone, which is what the loss and HellaSwag take": lambda: (
            torch.nn.functional.linear(x, model.lm_head.weight),
            model.lm_head(x),
        ),
        "the loss is not the cross-entropy of the logits: it is validated on and logged": partial(loss, False),
        "the loss is not the cross-entropy of the logits: it is trained on and logged": partial(loss, True),
        "with the cache of generation it computes something else: samples are not the model's": cached,
        "rows as HellaSwag packs them are not the model's: it has to heed `positions` and `mask`": packed,
        "--attention flash and naive differ, and samples and HellaSwag take flash": other_attention,
    }
    for note, ask in questions.items() if len(ids) > 2 else ():
        try:
            if agree(*ask(), 1e-4):
                continue
        except Exception as e:  # of code that takes other arguments
            note = f"{note} ({type(e).__name__}: {str(e).splitlines()[0]})"
        yield note


# ---------------------------------------------------------------------------------------------------------- reading


def load_train_state(path: Path) -> dict:
    """`train_state.pt` of a checkpoint: tensors and plain containers only, on the CPU. Raises UserError."""
    try:
        # weights_only: a pickle is a program, and a checkpoint may come from anywhere
        # mmap: ranks of one host share the pages, and read what they need
        return torch.load(path / TRAIN_STATE, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # a corrupt pickle can raise anything that its allowed classes can raise
        reason = str(e).partition("\n")[0] or type(e).__name__
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


def load_model(model: str, dropout: float = 0.0, attention: str = "flash", checked: bool = False) -> GPT:
    """GPT of a MODEL, in fp32 on the CPU. Raises UserError for what is missing, damaged, or not a GPT-2. `checked`: its
    checksums have just been compared, as those of a checkpoint to resume."""
    model = find_model(model)
    path = Path(model)
    # models of the hub and of --merge have no sums
    if not checked and (path / SUMS).exists() and (damage := find_damage(path)):
        raise UserError(f"{path} is damaged: {damage}; take another checkpoint, or write or download it again")
    with user_errors_of(model):
        return GPT.from_pretrained(model, dropout=dropout, attention=attention)


def model_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a MODEL. Raises UserError, also for one with more tokens than the model knows."""
    model = find_model(model)
    with user_errors_of(model):
        folder = local_directory(model, TOKENIZER_FILES)
        tokenizer = Tokenizer.load(folder)
    known = load_shape(model).vocab_size
    if len(tokenizer) > known:
        raise UserError(
            f"the tokenizer of {model} has {len(tokenizer)} tokens and its model {known}; "
            "copy the tokenizer.json that the model was trained with there"
        )
    return tokenizer
