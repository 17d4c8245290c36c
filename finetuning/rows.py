"""Conversations as finetuning reads them: rows of a file or of the hub, examples, micro-batches.

    row -> messages -> tokens, and which of them are answers -> examples of at most T tokens -> micro-batches

- a row has instruction, input and output, or a chat as `messages`; `messages_of` is the place for another format
- an example is a conversation, or a window of a long one; only its answers are targets
- micro-batches hold examples of about one length, so that few of their tokens are padding
- the global batch of a step is a function of seed and step, whatever the number of ranks and of interruptions

This file knows nothing of torch, models or devices; how a conversation is written is in finetuning/chat.py.
"""

import json
import math
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cli import UserError
from corpus.order import IGNORED, permutation
from corpus.sources import hub_rows
from finetuning.chat import check_messages, clean, pieces

# -------------------------------------------------------------------------------------------------- rows to messages


def load_rows(data: str) -> list[list[dict]]:
    """The conversations of --data: a file, or the split `train` of a dataset of the hub. Raises UserError."""
    if not on_hub(data):
        return read_rows(data)
    rows = hub_rows(data, "train")
    return [messages_of(row, f"row {number} of {data}") for number, row in enumerate(rows, start=1)]


def on_hub(data: str) -> bool:
    """True for OWNER/NAME, unless a local file has that name."""
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", data) and Path(data).suffix not in (".json", ".jsonl")
    return bool(is_name) and not os.path.exists(data)


def read_rows(path: str) -> list[list[dict]]:
    """The conversations of a .json or .jsonl file, as messages. Raises UserError that names the row and the field."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no {path}; --data takes a .json or .jsonl file of rows") from None
    except (UnicodeDecodeError, OSError) as e:
        raise UserError(f"{path} is not a text file ({e}); --data takes a .json or .jsonl file of rows") from None
    rows, line = [], 0
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:  # a line of .jsonl ends at \n alone: JSON may hold the other line separators of Unicode
            for line, row in enumerate(text.split("\n"), start=1):  # noqa: B007 - the line of an error
                rows += [json.loads(row)] if row.strip() else []
    except (ValueError, RecursionError) as e:
        what = getattr(e, "msg", e)
        raise UserError(
            f"{path} is not JSON in line {line or getattr(e, 'lineno', 1)}: {what}; correct it there"
        ) from None
    return [messages_of(row, f"row {number} of {path}") for number, row in enumerate(rows, start=1)]


def messages_of(row, where: str) -> list[dict]:
    """One row as messages. Raises UserError for a field that is missing or is no text."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}; a row is an object with instruction, input and output")
    if "messages" in row:
        try:
            check_messages(row["messages"])
        except ValueError as e:
            raise UserError(f"{where}: {e}; correct it there") from None
        return row["messages"]
    said = {"input": ""} | {field: text for field, text in row.items() if text is not None}  # null is as good as absent
    for field in ("instruction", "input", "output"):
        if not isinstance(said.get(field), str):
            what = "is no text" if field in said else "is missing"
            raise UserError(f"{where}: {field} {what}; rows have instruction, input and output, or messages")
    user = " ".join(filter(None, (said["instruction"].strip(), said["input"].strip())))
    return [dict(role="user", content=user), dict(role="assistant", content=said["output"])]


# ------------------------------------------------------------------------------------------------ messages to examples


class Example(NamedTuple):
    """Inputs and targets of one conversation, or of a window of a long one; -100 where no answer is predicted."""

    idx: np.ndarray  # (T,) int32
    targets: np.ndarray  # (T,) int32


def encode_rows(rows: list[list[dict]], tokenizer, sequence_length: int) -> tuple[list[Example], dict[str, int]]:
    """Examples of all rows with something asked and answered, and how many rows were empty or long.

    A row longer than `sequence_length` becomes windows that overlap by half; each of its answer tokens is a target in
    one of them.
    """
    full = [row for row in rows if row and all(clean(m["content"], tokenizer) for m in row)]
    full = [row for row in full if any(m["role"] == "assistant" for m in row)]
    full = [pieces(row, tokenizer) for row in full]
    # all texts in one call, which shares them out to threads; no text can hold a special token any more
    ids = iter(tokenizer.encode_batch([text for row in full for text, _ in row], disallowed_special=()))
    examples, counts = [], dict(empty=len(rows) - len(full), long=0, longest=0)
    for row in full:
        tokens, scored = [], []
        for _, is_answer in row:
            part = next(ids) + [tokenizer.eot_token] * is_answer
            tokens += part
            scored += [is_answer] * len(part)
        tokens = np.array(tokens, dtype=np.int32)
        targets = np.where(scored, tokens, IGNORED)[1:].astype(np.int32)  # shifted: the next token of each
        counts["longest"] = max(counts["longest"], len(targets))
        counts["long"] += len(targets) > sequence_length
        examples += windows(tokens[:-1], targets, sequence_length)
    return examples, counts


def windows(idx: np.ndarray, targets: np.ndarray, T: int) -> list[Example]:
    """Parts of at most T tokens, each half a window further, that score every target once."""
    parts = [Example(idx[:T], targets[:T])]
    for end in range(T + T // 2, len(idx) + T // 2, T // 2):  # the last one may be shorter by less than half a window
        part = targets[end - T : end].copy()
        part[: T - T // 2] = IGNORED  # scored in the window before
        parts.append(Example(idx[end - T : end], part))
    return [part for part in parts if (part.targets >= 0).any()]


def split_rows(rows: list, val_rows: int, seed: int) -> tuple[list, list]:
    """(training rows, validation rows), chosen by the seed alone; at most a tenth is held out."""
    order = permutation(len(rows), seed, 2**31)  # an epoch that training never comes to
    n_val = min(val_rows, len(rows) // 10)
    return [rows[i] for i in order[n_val:]], [rows[i] for i in order[:n_val]]


# -------------------------------------------------------------------------------------------------- batches of examples


epoch_order = lru_cache(maxsize=2)(permutation)  # a batch may reach from one epoch into the next


def global_batch(examples: list[Example], step: int, batch_size: int, seed: int) -> list[Example]:
    """The examples of step 0, 1, ...: a function of seed and step alone. Every epoch is another permutation of all."""
    n, positions = len(examples), range(step * batch_size, (step + 1) * batch_size)
    return [examples[epoch_order(n, seed, position // n)[position % n]] for position in positions]


def cut_by_length(lengths: list[int], limit: int, cost: int) -> list[range]:
    """Cut ascending lengths into micro-batches with the fewest padded tokens plus `cost` for each; optimal, by dynamic
    programming. None has more than `limit` tokens, unless it is a single example."""
    best, cuts = [0], [0]  # for the first n examples: the lowest price, and where their last micro-batch begins
    for end in range(1, len(lengths) + 1):
        best.append(math.inf)
        cuts.append(end - 1)
        for start in range(end - 1, -1, -1):
            size = (end - start) * lengths[end - 1]  # tokens, each row padded to the longest, which is the last
            if size > limit and start < end - 1:
                break
            if best[start] + size + cost < best[end]:
                best[end], cuts[end] = best[start] + size + cost, start
    parts, end = [], len(lengths)
    while end:  # from the last micro-batch back to the first
        parts.append(range(cuts[end], end))
        end = cuts[end]
    return parts


def collate(examples: list[Example]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(idx (B, T), targets (1, M), places (1, M)), int64: padded inputs, and the M targets with where they belong.
    The 1 is a batch dimension, which everything has that is called as a model is.

    Padding is on the right, where no real token sees it under the causal mask.
    """
    T = max(len(example.idx) for example in examples)
    idx, targets, places = np.zeros((len(examples), T), np.int64), [], []
    for row, example in enumerate(examples):
        idx[row, : len(example.idx)] = example.idx
        (scored,) = np.nonzero(example.targets >= 0)  # positions in the row
        targets.append(example.targets[scored])
        places.append(row * T + scored)  # positions in the flattened (B * T)
    return idx, *(np.concatenate(part).astype(np.int64)[None] for part in (targets, places))


def micro_batches(examples: list[Example], limit: int, cost: int, rank: int = 0, world_size: int = 1) -> list[tuple]:
    """One rank's micro-batches of a global batch: examples in order of length are dealt out to the ranks, and then cut
    into micro-batches of about one length."""
    # every world_size-th of the sorted ones: all ranks get about the same lengths, and finish together
    mine = sorted(examples, key=lambda example: len(example.idx))[rank::world_size]
    parts = cut_by_length([len(example.idx) for example in mine], limit, cost)
    return [collate([mine[i] for i in part]) for part in parts]
