"""The walk's small runs, of about a minute each, in out/walk/.

    tokenizer, stream = input_text()                   # input.txt in the tokens that tiny learns from it
    log = train_tiny("base", "--max_steps 300")        # the recipe tiny with an even smaller model; its log
    model = base_model()                               # that run's model, trained if missing
    python("sample.py out/walk/base --device cpu")     # what a script prints
    kill_tiny("killed", "--max_steps 300", step=150)   # a run that is killed
    val, train = finetune("r8", "--lora_dim 8")
    train_gpt2_in_small(seed=0, grad_clip=0.0)         # the recipe gpt2 with a quarter of a million parameters

Each runs a script in its own process, as a user does, except the last, which has to change the model.
"""

import json
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bpe.tokenizer import Tokenizer
from model import GPT, GPTConfig
from parts.checkpoint import open_model
from parts.data import Batches, TokenStream, find_shards, to_inputs, validation_batches
from parts.log import read_log
from parts.optim import learning_rate, make_optimizer
from parts.runtime import Runtime
from parts.shards import prepare_text
from train_gpt2 import RECIPES

RUNS = Path("out/walk")
TINY = "--n_embd 64 --sequence_length 64 --vocab_size 1024 --total_batch_size 1024 --weight_decay 0.1"
TINY += " --eval_interval 50 --sample_interval 0 --dtype float32 --device cpu --threads 1"


def python(words: str) -> str:
    """Return what `python words` prints."""
    RUNS.mkdir(parents=True, exist_ok=True)
    return subprocess.run([sys.executable, *shlex.split(words)], check=True, capture_output=True, text=True).stdout


def tiny(name: str, words: str) -> str:
    """Return the command of a run of tiny, smaller still, in out/walk/NAME; `words` change its constants."""
    return f"train_gpt2.py tiny --out_dir {RUNS / name} {TINY} {words}"


def train_tiny(name: str, words: str, start: str = "--overwrite") -> list[dict]:
    """Train such a run and return its log."""
    python(f"{tiny(name, words)} {start}")
    return read_log(RUNS / name / "log.jsonl")


def kill_tiny(name: str, words: str, step: int) -> int:
    """Start such a run, kill it once its log has `step`, and return the log's last step."""
    path = RUNS / name / "log.jsonl"
    path.unlink(missing_ok=True)  # of an earlier try
    command = [sys.executable, *shlex.split(tiny(name, words)), "--overwrite"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not path.exists() or not any(record["step"] == step for record in read_log(path)):
        if process.poll() is not None:
            raise RuntimeError(f"the run ended before step {step}")
        time.sleep(0.1)
    process.kill()
    process.wait()
    return read_log(path)[-1]["step"]


def base_model() -> GPT:
    """Return the model of station 6, which other stations also use."""
    if not (RUNS / "base").exists():
        train_tiny("base", "--max_steps 300")
    return open_model(RUNS / "base")[0]


# ---------------------------------------------------------------------------------------------- input.txt, and its rows


def input_text(split: str = "train") -> tuple[Tokenizer, TokenStream]:
    """Return the 1,024 tokens that tiny learns from input.txt, and its text in these tokens."""
    folder = prepare_text("input.txt", "train", 1024, Path("out/cache"))
    return Tokenizer.load(folder), TokenStream(find_shards(str(folder), split), vocab_size=1024)


def write_endings(path: str, n_rows: int = 400) -> None:
    """Write rows in HellaSwag's format from the last tenth of input.txt, on which no model here trains: the start of
    a sentence, its ending, and those of three others."""
    english = Path("input.txt").read_text(encoding="utf-8")
    held_out = " ".join(english[len(english) * 9 // 10 :].split())
    sentences = [s.split(" ") for s in re.findall(r"[A-Z][^.?!:]{50,110}[.?!]", held_out)][:n_rows]
    endings = [" ".join(words[5:]) for words in sentences]
    draw_from = random.Random(0)
    lines = []
    for i, words in enumerate(sentences):
        four = [endings[i], *draw_from.sample(endings[:i] + endings[i + 1 :], 3)]
        order = draw_from.sample(range(4), 4)
        start = " ".join(words[:5])
        row = dict(ctx=start, ctx_a=start, ctx_b="", activity_label="A sentence")
        lines.append(json.dumps(row | dict(label=order.index(0), endings=[four[k] for k in order])) + "\n")
    Path(path).write_text("".join(lines), encoding="utf-8")


def write_instructions(path: str, n_rows: int = 400) -> None:
    """Write rows to finetune on: the first words of a sentence of input.txt, and its rest as the answer."""
    text = " ".join(Path("input.txt").read_text(encoding="utf-8").split())
    sentences = [sentence.split(" ") for sentence in re.findall(r"[A-Z][^.?!]{60,160}[.?!]", text)[:n_rows]]
    rows = [dict(instruction="Go on.", input=" ".join(w[:5]), output=" ".join(w[5:])) for w in sentences]
    Path(path).write_text(json.dumps(rows), encoding="utf-8")


def finetune(name: str, words: str) -> tuple[list, list]:
    """Return [(epoch, loss)] of validation and, as means of an epoch, of training.

    The base is out/walk/base128 and the rows are out/walk/rows.json: 360 to train on, and 40 held out."""
    files = f"--base {RUNS}/base128 --data {RUNS}/rows.json --out_dir {RUNS / name} --overwrite"
    words += " --batch_size 16 --dtype float32 --device cpu --threads 1 --sample_interval 0"
    python(f"lora_finetune.py {files} {words}")
    log = read_log(RUNS / name / "log.jsonl")
    val = [(r["step"] * 16 / 360, r["loss"]) for r in log if r["kind"] == "val"]
    train = [(r["step"] * 16 / 360, r["loss"]) for r in log if r["kind"] == "train"]
    means = [(train[i][0], np.mean([loss for _, loss in train[i - 22 : i]])) for i in range(22, len(train))]
    return val, means


# ---------------------------------------------------------------------------------------------- the recipe in small

SIZES = dict(n_layer=4, n_head=2, n_embd=64, vocab_size=1024)
IN_SMALL = replace(RECIPES["gpt2"], **SIZES, sequence_length=32, total_batch_size=512, max_steps=718, warmup_steps=28)
IN_SMALL = replace(IN_SMALL, max_lr=3e-3, min_lr=3e-4)


def train_gpt2_in_small(seed: int, change: Callable = lambda model: None, **constants) -> tuple[float, float]:
    """Return the validation loss after 200 steps and after 718, an epoch of input.txt. `change` edits the untrained
    model; `constants` replace those of IN_SMALL."""
    config = replace(IN_SMALL, seed=seed, **constants)
    (_, stream), (_, val) = input_text("train"), input_text("val")
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SIZES, n_positions=32))
    change(model)
    optimizer = make_optimizer(model, config, Runtime.setup("cpu", "float32"))
    order = Batches(stream, 32, seed, config.shuffle)
    losses = {}
    for step in range(1, 719):
        windows = torch.from_numpy(next(order.micro_batches(16 * (step - 1), 16, 16)))
        model(*to_inputs(windows)).backward()
        norm = optimizer.clip_grad_norm(config.grad_clip)
        optimizer.set_lr(learning_rate(step, config) / config.max_lr)
        optimizer.step(finite=norm.isfinite())
        optimizer.zero_grad()
        if step in (200, 718):
            losses[step] = validation_loss(model, val)
    return losses[200], losses[718]


@torch.no_grad()
def validation_loss(model, stream: TokenStream) -> float:
    """Return nats per token of the whole split."""
    total, n_targets = 0.0, 0
    for rows in validation_batches(stream, 32, 64, 0):
        x, y = to_inputs(torch.from_numpy(rows))
        total += model(x, y, n_targets=1).item()
        n_targets += (y >= 0).sum().item()
    return total / n_targets
