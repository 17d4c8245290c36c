"""Score a model on HellaSwag (Zellers et al. 2019): which of four endings does it find likeliest?

    python hellaswag.py gpt2                            # MODEL: a checkpoint, a run directory (its newest), a hub id
    python hellaswag.py out/gpt2/step_019073 --limit 500 --show 3
    python hellaswag.py out/tiny --data hellaswag_val.jsonl --style harness --json scores.json
    python hellaswag.py gpt2 --adapter out/lora/adapter --control
    torchrun --standalone --nproc_per_node=8 hellaswag.py gpt2-xl

A row of the data, one of 10,042 in the validation split:

    {"ind": 27957, "activity_label": "Knitting", "ctx_a": "A woman is seated at a table.", "ctx_b": "she",
     "ctx": "A woman is seated at a table. she",
     "endings": ["is shown holding onto a pair of legs.", "is holding a long stick.",
                 "is knitting with pink yarn and needles.", "is playing a flute."], "label": 2}

ctx is ctx_a, whole sentences, and ctx_b, the start of the sentence that an ending completes. A person wrote
endings[label]; a language model wrote the others, which were kept because they fooled a classifier. People are right on
more than 95% of the rows, guessing on 25%. A language model does not see the four side by side: it says how likely each
one is after the context, the sum of log p(token | everything before it) over the ending's tokens. acc takes the ending
with the largest sum; acc_norm divides the sums by lengths first, because each further token costs probability.

Two common ways to turn a row into text and to measure lengths give different numbers:

- completion: context + " " + ending, lengths in tokens; as in nanoGPT-style scripts
- harness: EleutherAI's lm-evaluation-harness: activity label, no brackets, lengths in characters

GPT-2 124M scores 0.2859 and 0.2955 as completion, 0.2892 and 0.3114 in the harness.

Accuracy is a mean of zeros and ones, and for a small model it is noise for thousands of steps. gold_bpb keeps what
accuracy throws away: the bits that the right ending costs per byte of its text, averaged over rows. It improves from
the first steps on, and is comparable across tokenizers. --control scores every ending again, after the context of
another row: any accuracy above 0.25 that remains comes from the endings alone, not from reading the context.

We compute each context once, which halves the work: it and its four endings share one row of the model's input. Each
ending continues the positions of the context, and the mask lets a token see the context (segment 0) and its own
segment. Take five tokens of context x and endings a, b, c and d of 3, 2, 2 and 1 tokens. The last token of an ending is
scored but predicts nothing, so it is not an input, and d has no input at all:

    token         x0 x1 x2 x3 x4 | a0 a1 | b0 | c0 |
    position       0  1  2  3  4 |  5  6 |  5 |  5 |
    segment id     0  0  0  0  0 |  1  1 |  2 |  3 |

Training loops import this file, which knows nothing of training. It uses a model's `hidden`, `logits` and `config`, as
in model.py.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from parts.checkpoint import find_adapter, find_model, open_model
from parts.cli import Count, Positional, UserError, parse_args, script
from parts.files import replace_file, set_aside
from parts.huggingface import exactly, load_adapter
from parts.lora import merge, remove_lora
from parts.runtime import Runtime
from parts.texts import rows_of

HUB = "Rowan/hellaswag"  # only its `validation` split is scored
# padded tokens in a batch: what fits a CPU's caches, what keeps a GPU busy
BATCH_TOKENS = {"cpu": 2**9, "mps": 2**13, "cuda": 2**15}
CHUNK_LOGITS = 2**25  # logits in memory at once: 128 MB in fp32
Ids = list[int]  # of tokens


@dataclass(frozen=True)
class Config:
    model: Annotated[str, Positional]  # checkpoint directory, run directory, or hub id such as gpt2
    data: str = ""  # a local .jsonl in HellaSwag's format; empty: Rowan/hellaswag from the hub, downloaded once
    limit: Count = 0  # score only this many rows, from the first; 0 for all
    style: Literal["both", "completion", "harness"] = "both"  # how to turn a row into text, see above
    show: Count = 0  # print this many examples with the loss of each ending
    adapter: str = ""  # directory of a LoRA adapter for this model
    control: bool = False  # also score every ending after another row's context
    json: str = ""  # write scores and log-likelihoods to this .json; an older one becomes FILE.1
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # auto: 16 bits where the device has them
    threads: Count = 0  # CPU threads; 0 for PyTorch's number, which heeds OMP_NUM_THREADS


def main() -> None:
    config = parse_args(Config, description=__doc__)
    out = Path(config.json)
    if config.json and (out.suffix != ".json" or not out.parent.is_dir()):  # now, not an hour later
        raise UserError(f"--json {out} cannot be written; choose a .json name in an existing directory")
    rt = Runtime.setup(config.device, config.dtype, threads=config.threads)
    # the first rank chooses for all: a run that is still training may write a newer checkpoint at any moment
    model, tokenizer, folder = open_model(rt.broadcast_from_main(lambda: find_model(config.model)))
    if config.adapter:
        model = remove_lora(merge(load_adapter(model, find_adapter(config.adapter))))
    model.to(rt.device)
    rt.check_same([*model.parameters()], f"weights of {folder}")
    rows = load_rows(config.data, rt)[: config.limit or None]
    rt.print(f"{folder}: {model.num_params():,} parameters on {rt.description}; {len(rows):,} rows")

    variants = {"": rows}
    if config.control:
        variants[" control"] = with_other_contexts(rows)
    results = {}
    for style in STYLES if config.style == "both" else [config.style]:
        for name, variant in variants.items():
            task = prepare(variant, tokenizer, model.config, style)
            result = evaluate(model, task, rt, progress=True)
            if result["acc"] is None:
                raise UserError(f"{config.model} gives numbers that are not finite; choose another checkpoint")
            results[style + name] = result
            for number in range(min(config.show, len(rows))):
                rt.print(row_with_losses(task, result, number))
    for name, result in results.items():
        rt.print(f"{name:<19} {summary(result)}")
    if config.json and rt.is_main:
        scores = dict(
            model=str(folder),
            adapter=config.adapter,
            data=config.data or HUB,
            dtype=str(rt.dtype).removeprefix("torch."),
            styles=results,
        )
        if out.exists():
            print(f"the earlier {out} is now {set_aside(out)}")
        replace_file(out, json.dumps(scores, allow_nan=False) + "\n")


# ------------------------------------------------------------------------------------------------------------ data


def load_rows(data: str, rt: Runtime, option: str = "--data") -> list[dict]:
    """Read the rows of `data`, or else of the hub, which the first rank reads. Raises UserError, on all ranks alike;
    `option` is the flag that takes the file."""
    rows = rt.broadcast_from_main(lambda: rows_of(data or HUB, "validation", option))
    return [parse_row(row, f"row {i} of {data or HUB}") for i, row in enumerate(rows, start=1)]


def parse_row(row, where: str) -> dict:
    """Return a row with its label as an int: on the hub it is a string. Raises UserError for a malformed row."""
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        contexts = [row[name] for name in ("ctx", "ctx_a", "ctx_b", "activity_label")]
        endings = row["endings"]
        are_texts = all(isinstance(text, str) for text in contexts + endings)
        if are_texts and all(endings) and len(endings) == 4:
            return row | {"label": ["0", "1", "2", "3"].index(str(row["label"]))}
    raise UserError(
        f"{where} is not in HellaSwag's format: ctx, ctx_a, ctx_b, activity_label, four endings, a label from 0 to 3; "
        "fix or remove it"
    )


def with_other_contexts(rows: list[dict]) -> list[dict]:
    """Give each row the context of the row half a list away: neighbours may come from one article."""
    half = len(rows) // 2
    others = rows[half:] + rows[:half]
    return [other | dict(endings=row["endings"], label=row["label"]) for row, other in zip(rows, others, strict=True)]


# ------------------------------------------------------------------------------------------- from rows to tokens


def completion(row: dict) -> tuple[str, list[str]]:
    return row["ctx"], row["endings"]


def harness(row: dict) -> tuple[str, list[str]]:
    """Write the text of lm-evaluation-harness, task hellaswag, version 1."""
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return without_brackets(context), [without_brackets(ending) for ending in row["endings"]]


def without_brackets(text: str) -> str:
    """Remove the markup that WikiHow's articles left in the rows."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_apart(tokenizer, context: str, endings: list[str]) -> tuple[Ids, list[Ids]]:
    before = tokenizer.encode_ordinary(context)
    return before, [tokenizer.encode_ordinary(" " + ending) for ending in endings]


def encode_together(tokenizer, context: str, endings: list[str]) -> tuple[Ids, list[Ids]]:
    """Tokens of the context, and those that context and ending together have beyond it; spaces go to the ending."""
    before = tokenizer.encode_ordinary(context.rstrip())
    n = len(before)
    both = [tokenizer.encode_ordinary(f"{context} {ending}") for ending in endings]
    return before, [tokens[n:] or tokens[-1:] for tokens in both]  # a merge may cross: keep one token at least


LOGGED = ("acc", "acc_norm", "acc_norm_stderr", "gold_bpb", "gold_bpb_stderr", "n")  # by a training loop
STYLES = {  # texts of a row, their tokens, unit of length
    "completion": (completion, encode_apart, "token"),
    "harness": (harness, encode_together, "character"),
}


@dataclass(frozen=True)
class Packed:
    """One row of the model's input, as at the top: a context, some of its endings, and the tokens to score."""

    inputs: np.ndarray  # (3, T) tokens, positions, segment ids
    scored: np.ndarray  # (3, S) the position that predicts a token, that token, the id of its ending

    def __len__(self) -> int:
        return self.inputs.shape[1]


@dataclass(frozen=True)
class Task:
    """All rows in one style, ready to score; ending k of row i has the id 4 i + k."""

    style: str
    texts: list[tuple[str, list[str]]]  # context and endings
    labels: np.ndarray  # (N,)
    lengths: np.ndarray  # (N, 4), what acc_norm divides by
    n_bytes: np.ndarray  # (N,) of the right ending and the space before it
    packed: list[Packed]  # longest first


def prepare(rows: list[dict], tokenizer, model_config, style: str) -> Task:
    """Turn rows into text and tokens."""
    to_text, encode, unit = STYLES[style]
    texts = [to_text(row) for row in rows]
    labels = [row["label"] for row in rows]
    lengths = []
    n_bytes = []
    packed = []
    for i, (context, endings) in enumerate(texts):
        before, after = encode(tokenizer, context, endings)
        if not before:  # the first token needs a token before it
            before = [tokenizer.eot_token or 0]
        measured = after if unit == "token" else endings
        lengths.append([len(ending) for ending in measured])
        n_bytes.append(len(f" {endings[labels[i]]}".encode(errors="replace")))
        packed += fit(before, after, 4 * i, model_config.n_positions)
    packed.sort(key=len, reverse=True)
    return Task(style, texts, np.array(labels), np.array(lengths), np.array(n_bytes), packed)


def fit(context: Ids, endings: list[Ids], first: int, window: int) -> list[Packed]:
    """All four endings in one row if each fits after the context. Otherwise each ending alone, its context cut from the
    left, and an ending longer than the window in pieces. `first` is the id of the first ending."""
    if len(context) + max(map(len, endings)) - 1 <= window:
        return [pack(context, endings, first)]
    packed = []
    for k, ending in enumerate(endings):
        for start in range(0, len(ending), window):
            piece = ending[start : start + window]
            before = context + ending[:start]
            before = before[-(window + 1 - len(piece)) :]
            packed.append(pack(before, [piece], first + k))
    return packed


def pack(context: Ids, endings: list[Ids], first: int) -> Packed:
    """Put a context and its endings side by side, as in the picture at the top."""
    n = len(context)
    tokens = list(context)
    positions = list(range(n))
    segment_ids = [0] * n
    logit_positions = []
    targets = []
    ending_ids = []
    for k, ending in enumerate(endings):
        inputs = ending[:-1]
        start = len(tokens)
        # the context's last token predicts the ending's first one, and each of its tokens the next
        logit_positions += [n - 1, *range(start, start + len(inputs))]
        targets += ending
        ending_ids += [first + k] * len(ending)
        tokens += inputs
        positions += range(n, n + len(inputs))
        segment_ids += [k + 1] * len(inputs)
    return Packed(
        inputs=np.array([tokens, positions, segment_ids]),
        scored=np.array([logit_positions, targets, ending_ids]),
    )


# --------------------------------------------------------------------------------------------------------- scoring


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    rt: Runtime,
    batch_tokens: int = 0,
    progress: bool = False,
) -> dict:
    """Score all rows; every rank returns what `score` does. `batch_tokens` of 0 is what suits the device.

    It may run in the middle of training: `model` is the plain module, and its mode is restored, so that its compiled
    and distributed wrappers notice nothing.
    """
    batch_tokens = batch_tokens or BATCH_TOKENS[rt.device.type]
    packed = task.packed[rt.rank :: rt.world_size]
    sums = np.zeros(task.lengths.size)
    bar = tqdm(
        total=sum(map(len, packed)),
        unit="tok",
        unit_scale=True,
        desc=task.style,
        disable=None if progress and rt.is_main else True,  # None: show it in a terminal
    )
    training = model.training
    model.eval()
    with rt.autocast(cache=True), bar:
        for batch in batches(packed, batch_tokens):
            inputs, scored = collate(batch)
            logit_positions, targets, ending_ids = scored
            found = log_likelihoods(model, inputs, logit_positions, targets).cpu().numpy()
            sums += np.bincount(ending_ids.numpy(), weights=found, minlength=len(sums))
            bar.update(sum(map(len, batch)))
    model.train(training)
    sums = rt.sum(torch.from_numpy(sums))
    return score(task, sums.cpu().numpy())


def batches(packed: list[Packed], batch_tokens: int) -> Iterator[list[Packed]]:
    """Yield consecutive rows, of similar lengths, in batches of at most `batch_tokens` tokens, padding included."""
    start = 0
    while start < len(packed):
        stop = start + max(batch_tokens // len(packed[start]), 1)  # the longest comes first
        yield packed[start:stop]
        start = stop


def collate(batch: list[Packed]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, positions and segment ids of all rows (3, B, T), and what is scored (3, S), with positions in the
    flattened batch. Padding has segment id -1, which no other segment sees."""
    T = max(map(len, batch))
    inputs = torch.zeros(3, len(batch), T, dtype=torch.long)
    inputs[2] = -1
    scored = []
    for b, row in enumerate(batch):
        inputs[:, b, : len(row)] = torch.from_numpy(row.inputs)
        shifted = row.scored + [[b * T], [0], [0]]
        scored.append(torch.from_numpy(shifted))
    return inputs, torch.cat(scored, dim=1)


def log_likelihoods(model: nn.Module, inputs, logit_positions, targets) -> torch.Tensor:
    """Compute the fp32 log-likelihoods (S,) of the tokens to score, from what `collate` returns: inputs (3, B, T),
    logit_positions (S,) and targets (S,)."""
    device = model.lm_head.weight.device
    idx, positions, segment_ids = inputs.to(device)  # (B, T) each
    logit_positions = logit_positions.to(device)
    targets = targets.to(device)
    query = segment_ids[:, :, None]
    key = segment_ids[:, None, :]
    T = idx.size(1)
    causal = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    mask = causal & ((key == query) | (key == 0))  # (B, T, T)
    x = model.hidden(idx, positions, mask[:, None])  # (B, T, C)
    x = x.flatten(0, 1)[logit_positions].float()  # (S, C)
    # We compute logits only where a token is scored, a chunk at a time, and always in fp32: GPT-2's are around -100,
    # where neighbouring bf16 numbers are 0.5 apart.
    chunk = CHUNK_LOGITS // model.config.vocab_size  # at least 32: model.py takes no more than 2**20 tokens
    losses = []
    with exactly(model):  # not TF32, to which a GPU may round: it keeps 11 of their 24 bits
        for xc, tc in zip(x.split(chunk), targets.split(chunk), strict=True):
            logits = model.logits(xc)  # (chunk, V)
            losses.append(F.cross_entropy(logits, tc, reduction="none"))
    return -torch.cat(losses)


def score(task: Task, sums: np.ndarray) -> dict:
    """Return acc, acc_norm and gold_bpb with their standard errors, the number of rows n, and each row's
    log-likelihoods and two predictions. The means are None if a log-likelihood is not finite."""
    sums = sums.reshape(-1, 4)  # (N, 4)
    with np.errstate(divide="ignore", invalid="ignore"):  # an ending may be nothing but brackets
        normalized = sums / task.lengths
    predictions = sums.argmax(axis=1)
    predictions_norm = normalized.argmax(axis=1)
    nats = -sums[np.arange(len(sums)), task.labels]
    values = dict(  # (N,) each
        acc=predictions == task.labels,
        acc_norm=predictions_norm == task.labels,
        gold_bpb=nats / math.log(2) / task.n_bytes,
    )
    result = dict(n=len(sums))
    finite = np.isfinite(sums).all()
    for name, of_rows in values.items():
        error = of_rows.std() / math.sqrt(max(len(sums) - 1, 1))  # of the mean: n - 1, not n, as the mean is estimated
        result[name] = float(of_rows.mean()) if finite else None
        result[f"{name}_stderr"] = float(error) if finite else None
    return result | dict(
        normalized_by=STYLES[task.style][2],
        log_likelihoods=sums.tolist(),
        predictions=predictions.tolist(),
        predictions_norm=predictions_norm.tolist(),
    )


# ------------------------------------------------------------------------------------------------------------- output


def summary(result: dict) -> str:
    """Describe the three scores, each with its standard error."""
    units = dict(acc="", acc_norm=f" (per {result['normalized_by']})", gold_bpb="")
    scores = [f"{name} {result[name]:.4f} ± {result[name + '_stderr']:.4f}{unit}" for name, unit in units.items()]
    return "   ".join([*scores, f"N {result['n']:,}"])


def row_with_losses(task: Task, result: dict, number: int) -> str:
    """Show a row with each ending's loss, total and per unit of length; > marks the prediction, * the right one."""
    context, endings = task.texts[number]
    lines = [f"\n{task.style}, row {number + 1}: {context}", f"    sum     per {result['normalized_by']}"]
    for k, ending in enumerate(endings):
        loss = -result["log_likelihoods"][number][k]
        per_unit = loss / max(task.lengths[number, k], 1)
        predicted = ">" if k == result["predictions_norm"][number] else " "
        right = "*" if k == task.labels[number] else " "
        lines.append(f"{predicted}{right} {loss:<7.2f} {per_unit:<10.4f} {ending}")
    return "\n".join(lines)


if __name__ == "__main__":
    script(main)
