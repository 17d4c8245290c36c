"""Scoring HellaSwag: batched with shared contexts, against one example at a time, with a random model of 124M.

Both sides tokenize, score the same rows in the completion style, and add up the losses of endings. The plain loop is
the usual script: it repeats the context for each of the four endings, pads the four rows, and computes all logits. Both
run in fp32, then in the 16-bit format that is fast on this device. The plain loop scores at most 500 rows, which is
enough for its rate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.measure import Common, Size, fast_dtype, model_sizes, rates
from hellaswag import evaluate, load_rows, prepare
from model import GPT, GPTConfig
from parts.cli import Count
from parts.runtime import Runtime
from parts.shards import load_tokenizer


@dataclass(frozen=True)
class Config(Common):
    data: str = ""  # a .jsonl of HellaSwag; downloaded if empty
    size: Size = ""  # size of the model; tiny for a quick test
    rows: Count = 0  # rows that both sides score; 0 for 40 on a CPU, all on a GPU


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**model_sizes(config.size))).to(rt.device).eval()
    tokenizer = load_tokenizer("gpt2")
    rows = load_rows(config.data, rt)
    if config.rows or rt.device.type != "cuda":
        rows = rows[: config.rows or 40]
    few = rows[:500]
    half = replace(rt, dtype=fast_dtype(rt))
    contestants = {}
    n_scored = {}
    for dtype, runtime in {"fp32": rt, str(half.dtype).removeprefix("torch."): half}.items():
        plain, ours = f"one row at a time, {dtype}", f"this project, {dtype}"
        contestants[plain] = partial(score_one_by_one, model, tokenizer, few, runtime)
        contestants[ours] = partial(score_together, model, tokenizer, rows, runtime)
        n_scored |= {plain: len(few), ours: len(rows)}
    yield from rates(contestants, config.repeats, rt, n_scored, "rows/s")


def score_together(model: GPT, tokenizer, rows: list[dict], rt: Runtime) -> dict:
    return evaluate(model, prepare(rows, tokenizer, model.config, "completion"), rt)


@torch.no_grad()
def score_one_by_one(model: GPT, tokenizer, rows: list[dict], rt: Runtime) -> list[list[float]]:
    """Summed losses of the four endings of each row, as a plain loop computes them."""
    losses = []
    for row in rows:
        context = tokenizer.encode_ordinary(row["ctx"])
        endings = [tokenizer.encode_ordinary(" " + ending) for ending in row["endings"]]
        idx = torch.zeros(4, len(context) + max(map(len, endings)), dtype=torch.long)  # (4, T)
        scored = torch.zeros(idx.shape)
        for k, ending in enumerate(endings):
            end = len(context) + len(ending)
            idx[k, :end] = torch.tensor(context + ending)
            scored[k, len(context) : end] = 1
        idx = idx.to(rt.device)
        scored = scored.to(rt.device)
        with rt.autocast():
            logits = model(idx)  # (4, T, V)
        logits = logits[:, :-1].flatten(0, 1).float()
        loss = F.cross_entropy(logits, idx[:, 1:].flatten(), reduction="none").view(4, -1)
        losses.append((loss * scored[:, 1:]).sum(dim=1).tolist())
    return losses
