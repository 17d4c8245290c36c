"""Conversations as finetuning reads them: rows of a file or of the hub, examples, micro-batches.

    row -> messages -> tokens, and which of them are answers -> examples of at most T tokens -> micro-batches

- a row has instruction, input and output, or a chat as `messages`; add another format in `messages_of`. What else a
  row says to a model is refused by name, in whichever of SAYS_MORE it stands: trained on without it, the row would
  mean something else. Other keys, such as id, source or score, are nobody's words
- an example is a conversation, or a window of a long one; only its answers are targets
- a micro-batch holds examples of about one length, so that few of its tokens are padding
- the global batch of a step is a function of seed and step, whatever the number of ranks and of interruptions

This file knows nothing of torch, models or devices. parts/chat.py defines how a conversation is written.
"""

import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from parts.chat import check_messages, clean, pieces
from parts.cli import UserError
from parts.data import IGNORED, permutation
from parts.documents import file_rows, hub_rows

# Keys of public formats that hold what somebody says: in rows (Alpaca with a system prompt and a history, ShareGPT,
# preferences, questions with a context, calls of tools), and in a single message.
SAYS_MORE = set(
    "instruction input output messages system system_prompt history context knowledge conversation conversations "
    "dialog dialogue turns prompt completion question query answer response chosen rejected tools functions images "
    "image audio video thinking reasoning thought inputs targets target".split()
)
MESSAGE_SAYS_MORE = set(
    "tool_calls tool_call_id function_call thinking reasoning reasoning_content images image audio video from value "
    "text prefix".split()
)
COUNTS_LESS = {"weight", "train", "loss"}  # as numbers: 0 or false to read an answer and not to train on it
WITHOUT_EFFECT = (None, "", [], {}, True, 1)  # as a value of such a key

# -------------------------------------------------------------------------------------------------- rows to messages


def load_rows(data: str) -> list[list[dict]]:
    """The conversations of --data: a file, or the split `train` of a dataset on the hub. Raises UserError."""
    rows = hub_rows(data, "train") if on_hub(data) else file_rows(data)
    return [messages_of(row, f"row {number} of {data}") for number, row in enumerate(rows, start=1)]


def on_hub(data: str) -> bool:
    """True for OWNER/NAME, unless a local file has that name."""
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", data) and Path(data).suffix not in (".json", ".jsonl")
    return bool(is_name) and not os.path.exists(data)


def messages_of(row, where: str) -> list[dict]:
    """One row as messages. Raises UserError for a field that is missing or not text."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}; a row is an object with instruction, input and output")
    row = {field: value for field, value in row.items() if value is not None}  # null counts as absent
    if "messages" in row:
        check_messages(row["messages"], where)
        for message in row["messages"]:
            refuse_more(message, MESSAGE_SAYS_MORE, [], f"{where}: a message")
        refuse_more(row, SAYS_MORE - {"messages"}, row["messages"], where)
        return row["messages"]
    said = {"input": ""} | row
    fields = ("instruction", "input", "output")
    for field in fields:
        if not isinstance(said.get(field), str):
            raise UserError(f"{where}: {field} is missing or no text; rows have instruction, input, output or messages")
    user = " ".join(filter(None, (said["instruction"].strip(), said["input"].strip())))
    messages = [dict(role="user", content=user), dict(role="assistant", content=said["output"])]
    refuse_more(row, SAYS_MORE - {*fields}, messages, where)
    return messages


def refuse_more(row: dict, keys: set[str], messages: list[dict], where: str) -> None:
    """Raises UserError for one of `keys` in a row, unless it only repeats what is in the messages."""
    repeated = [messages, *(message["content"].strip() for message in messages)]
    for key, value in row.items():
        said = value.strip() if isinstance(value, str) else value
        matters = COUNTS_LESS if isinstance(value, int | float) else keys
        if key.lower() in matters and said not in WITHOUT_EFFECT and said not in repeated:
            raise UserError(
                f"{where} has {key}, which training would not read; put it into `messages` (role and content), "
                "or remove the key"
            )


# ------------------------------------------------------------------------------------------------ messages to examples


class Example(NamedTuple):
    """Inputs and targets of one conversation, or of a window of a long one; -100 where no answer is predicted."""

    idx: np.ndarray  # (T,) int32
    targets: np.ndarray  # (T,) int32


def encode_rows(rows: list[list[dict]], tokenizer, sequence_length: int) -> tuple[list[Example], dict[str, int]]:
    """Examples of all rows that ask and answer something, and how many rows were empty or long.

    A row longer than `sequence_length` becomes windows that overlap by half; each of its answer tokens is a target in
    exactly one of them.
    """
    full = [pieces(row, tokenizer) for row in rows if asks_and_answers(row, tokenizer)]
    # all texts in one call, which spreads them over threads; `clean` has removed every special token
    ids = iter(tokenizer.encode_batch([text for row in full for text, _ in row], disallowed_special=()))
    examples = []
    counts = dict(empty=len(rows) - len(full), long=0)
    for row in full:
        tokens = []
        scored = []
        for _, is_answer in row:
            part = next(ids)
            if is_answer:
                part = [*part, tokenizer.eot_token]
            tokens += part
            scored += [is_answer] * len(part)
        tokens = np.array(tokens, dtype=np.int32)
        targets = np.where(scored, tokens, IGNORED)[1:].astype(np.int32)  # shifted: the next token of each
        counts["long"] += len(targets) > sequence_length
        examples += windows(tokens[:-1], targets, sequence_length)
    return examples, counts


def asks_and_answers(messages: list[dict], tokenizer) -> bool:
    """Whether somebody answers, and no turn is empty; an empty system message says nothing, and is left out."""
    turns = [message for message in messages if message["role"] != "system"]
    answered = any(message["role"] == "assistant" for message in turns)
    return answered and all(clean(message["content"], tokenizer) for message in turns)


def windows(idx: np.ndarray, targets: np.ndarray, T: int) -> list[Example]:
    """Parts of at most T tokens, each half a window after the one before, that score every target once."""
    parts = [Example(idx[:T], targets[:T])]
    for end in range(T + T // 2, len(idx) + T // 2, max(T // 2, 1)):  # the last is up to half a window shorter
        part = targets[end - T : end].copy()
        part[: T - T // 2] = IGNORED  # scored in the window before
        parts.append(Example(idx[end - T : end], part))
    return [part for part in parts if (part.targets >= 0).any()]


def split_rows(rows: list, val_rows: int, seed: int) -> tuple[list, list]:
    """(training rows, validation rows), chosen by the seed alone; at most a tenth is held out."""
    order = permutation(len(rows), seed, 2**31)  # of an epoch that training never reaches
    n_val = min(val_rows, len(rows) // 10)
    return [rows[i] for i in order[n_val:]], [rows[i] for i in order[:n_val]]


# -------------------------------------------------------------------------------------------------- batches of examples


def global_batch(examples: list[Example], step: int, batch_size: int, seed: int) -> list[Example]:
    """The examples of step 0, 1, ..., a function of seed and step alone. Every epoch permutes all of them."""
    batch = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, at = divmod(position, len(examples))
        batch.append(examples[permutation(len(examples), seed, epoch)[at]])
    return batch


def micro_batches(examples: list[Example], limit: int, cost: int, rank: int = 0, world_size: int = 1) -> list[tuple]:
    """One rank's share of a global batch, in micro-batches of at most `limit` tokens, unless a single example has more.

    A micro-batch costs as much as `cost` more tokens, so it is worth up to that many of padding, but no more.
    """
    # every world_size-th of the sorted ones: all ranks get about the same lengths and finish together
    mine = sorted(examples, key=lambda example: len(example.idx))[rank::world_size]
    parts = []
    real = 0  # tokens of the last part, without padding
    for example in mine:
        length = len(example.idx)  # the longest so far, to which its whole part is padded
        padded = length * (len(parts[-1]) + 1) if parts else math.inf
        if padded > limit or padded - real - length > cost:
            parts.append([])
            real = 0
        parts[-1].append(example)
        real += length
    return [collate(part) for part in parts]


def collate(examples: list[Example]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(idx (B, T), targets (1, M), logit_positions (1, M)), int64: padded inputs, the M targets, and where among the
    B * T positions they are predicted. The 1 is the batch dimension that every input of a model has.

    Padding is on the right, where the causal mask hides it from every real token.
    """
    T = max(len(example.idx) for example in examples)
    idx = np.zeros((len(examples), T), np.int64)
    targets = []
    logit_positions = []
    for i, example in enumerate(examples):
        idx[i, : len(example.idx)] = example.idx
        (scored,) = np.nonzero(example.targets >= 0)  # positions in the example
        targets.append(example.targets[scored])
        logit_positions.append(i * T + scored)  # positions in the flattened (B * T)
    return idx, np.concatenate(targets)[None].astype(np.int64), np.concatenate(logit_positions)[None].astype(np.int64)
