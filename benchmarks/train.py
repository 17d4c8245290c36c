"""A training step of train_gpt2.py against the plain recipe, eager and compiled: tokens/s, MFU, memory.

The plain recipe is what a short script does, with the model and the optimizer of minimal.py: PyTorch's fused attention,
all logits at once in fp32, AdamW, the vocabulary padded to a multiple of 128; on a GPU with TF32, bf16 autocast and
fused AdamW, on a CPU in fp32 and again in bf16. "this project" is train_gpt2.py itself on shards of random tokens, with
its choices for this device: precision, torch.compile, attention, micro-batches, loss. It times its steps in its log,
and they include loading and logging.

All train models of one size on as many random tokens a step. Each contestant runs in a new process, --turns times. A
plain step that does not fit into memory is split into as few micro-batches as possible, and the row says so. A GPU runs
batches of 64 sequences, then of 16, where the optimizer's share is larger. Memory is the peak of the device's
allocator, on a CPU that of the process. MFU is known for graphics cards only.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np

from benchmarks.ladder import Rung, model_shape, padded, plain
from benchmarks.measure import Common, Size
from benchmarks.steps import measure_door, step_rates
from bpe.tokenizer import Tokenizer
from parts.cli import Count, Positive
from parts.runtime import Runtime


@dataclass(frozen=True)
class Config(Common):
    batch_size: Count = 0  # sequences per step; 0 for 16, on a GPU 64 and 16
    size: Size = ""  # size of the model; tiny for a quick test
    turns: Positive = 2  # processes of each contestant, taken in turn, so that drift of the machine affects all alike


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    shape = model_shape(config.size, rt)
    shape["vocab_size"] = padded(shape["vocab_size"])
    if config.batch_size:
        batch_sizes = [config.batch_size]
    else:
        batch_sizes = [64, 16] if rt.device.type == "cuda" else [16]
    with tempfile.TemporaryDirectory() as shards:
        write_random_shards(Path(shards), shape, max(batch_sizes))
        for batch_size in batch_sizes:
            print(f"{shape}, batch size {batch_size}", flush=True)
            yield from compare(shape, batch_size, shards, config, rt)


def compare(shape: dict, batch_size: int, shards: str, config: Config, rt: Runtime) -> Iterator[dict]:
    repeats = -(-config.repeats // config.turns)  # in each turn
    contestants = {}
    for rung in recipes(rt):
        contestants[f"{rung.name}, B = {batch_size}"] = plain(rung, shape, batch_size, repeats, rt)
    sizes = dict(shape)
    sequence_length = sizes.pop("n_positions")
    constants = dict(
        device=rt.device.type,
        data=shards,
        sequence_length=sequence_length,
        total_batch_size=batch_size * sequence_length,
        hellaswag_interval=0,
        **sizes,
    )
    ours = partial(measure_door, "train_gpt2.py", repeats, "gpt2", **constants)
    contestants[f"this project, B = {batch_size}"] = ours
    yield from step_rates(contestants, batch_size * sequence_length, "tokens/s", config.turns, rt)


def recipes(rt: Runtime) -> list[Rung]:
    if rt.device.type == "cuda":
        eager = Rung("plain, eager, bf16", tf32=True, bf16=True, attention="flash", fused=True)
        return [eager, replace(eager, name="plain with torch.compile, bf16", compile=True)]
    eager = Rung("plain, eager, fp32", attention="flash")
    return [eager, replace(eager, name="plain with bf16 autocast", bf16=True)]


def write_random_shards(folder: Path, shape: dict, batch_size: int) -> None:
    """Shards of random tokens, and a tokenizer with as many, which needs no download: nothing encodes or decodes."""
    rng = np.random.default_rng(0)
    n_tokens = batch_size * shape["n_positions"] + 1
    for name in ("random_val_000000.npy", "random_train_000001.npy"):
        np.save(folder / name, rng.integers(shape["vocab_size"], size=n_tokens, dtype=np.uint16))
    single = [bytes([i]) for i in range(256)]
    n_merges = shape["vocab_size"] - 257  # besides the bytes and <|endoftext|>
    Tokenizer(list(islice(product(single, single), n_merges))).save(folder / "tokenizer.json")
