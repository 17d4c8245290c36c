"""Scoring HellaSwag: batched with shared contexts, against one example at a time, with a random model of 124M.

Both sides tokenize, score the same rows in the completion style, and add up the losses of endings. The plain loop is
the usual script: the context with each of the four endings, four padded rows at a time, all logits. fp32 for both, then
the 16-bit format that is fast on this device for both. On a GPU the plain loop takes 500 rows and counts as if it had
gone on at that rate. --data FILE.jsonl, by default downloaded; --rows limits both sides.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.measure import fast_dtype, interleave, model_sizes, table
from bpe.tokenizer import Tokenizer
from corpus.shards import load_tokenizer
from hellaswag import evaluate, load_rows, prepare
from model import GPT, GPTConfig
from run.runtime import Runtime


def run(config, rt: Runtime) -> list[dict]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**model_sizes(config.size))).to(rt.device).eval()
    tokenizer = load_tokenizer("gpt2")
    rows = load_rows(config.data, rt)
    rows = rows[: config.rows or (len(rows) if rt.device.type == "cuda" else 40)]
    few = rows[:500]
    half = replace(rt, dtype=fast_dtype(rt))
    contestants = {}
    for name, runtime in {"fp32": rt, str(half.dtype).removeprefix("torch."): half}.items():
        contestants[f"one row at a time, {name}"] = partial(score_one_by_one, model, tokenizer, few, runtime)
        contestants[f"this project, {name}"] = partial(score_together, model, tokenizer, rows, runtime)
    seconds = interleave(contestants, config.repeats, rt)
    for name in seconds:
        if name.startswith("one row"):  # as if it had scored all of them
            seconds[name] = [s * len(rows) / len(few) for s in seconds[name]]
    return table(seconds, len(rows), "rows/s")


def quick(config, rt: Runtime) -> list[dict]:
    """All rows once as they are scored here, and a few one at a time, in the precision of a run."""
    model, tokenizer = GPT(GPTConfig(**model_sizes(config.size))).to(rt.device).eval(), load_tokenizer("gpt2")
    rows, half = load_rows(config.data, rt), replace(rt, dtype=fast_dtype(rt))
    rows = rows[: config.rows or (20 if config.size == "tiny" else None)]
    few = rows[: max(len(rows) // 50, 10)]
    plain = interleave({"plain": partial(score_one_by_one, model, tokenizer, few, half)}, 1, rt)["plain"]
    ours = interleave({"ours": partial(score_together, model, tokenizer, rows, half)}, 1, rt)["ours"]
    found = {"one row at a time": [s * len(rows) / len(few) for s in plain], "this project": ours}
    return [row | dict(rows=len(rows)) for row in table(found, len(rows), "rows/s")]


def score_together(model: GPT, tokenizer: Tokenizer, rows: list[dict], rt: Runtime) -> dict:
    return evaluate(model, prepare(rows, tokenizer, model.config, "completion"), rt)


@torch.no_grad()
def score_one_by_one(model: GPT, tokenizer: Tokenizer, rows: list[dict], rt: Runtime) -> list[list[float]]:
    """Summed losses of the four endings of each row, as a plain loop computes them."""
    losses = []
    for row in rows:
        context = tokenizer.encode_ordinary(row["ctx"])
        endings = [tokenizer.encode_ordinary(" " + ending) for ending in row["endings"]]
        idx = torch.zeros(4, len(context) + max(map(len, endings)), dtype=torch.long)  # (4, T)
        scored = torch.zeros(idx.shape)
        for k, ending in enumerate(endings):
            idx[k, : len(context) + len(ending)] = torch.tensor(context + ending)
            scored[k, len(context) : len(context) + len(ending)] = 1
        idx, scored = idx.to(rt.device), scored.to(rt.device)
        with rt.autocast():
            logits = model(idx)  # (4, T, V)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), idx[:, 1:].flatten(), reduction="none")
        losses.append((loss.view(4, -1) * scored[:, 1:]).sum(dim=1).tolist())
    return losses
