"""Conversations as finetuning reads them: rows of a file or of the hub, examples, micro-batches.

    row -> messages -> tokens, and which of them are answers -> examples of at most T tokens -> micro-batches

- a row has instruction, input and output, or a chat as `messages`; add another format in `messages_of`. A row with
  `"held_out": true` is validated on and never trained on; other keys are counted and not read
- an example is a conversation, or a window of a long one; only its answers are targets
- a micro-batch holds examples of about one length, so that few of its tokens are padding
- the global batch of a step is a function of seed and step, whatever the number of ranks and of interruptions

This file knows nothing of torch, models or devices. parts/chat.py defines how a conversation is written.
"""

import contextlib
import json
import math
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from parts.chat import Chat
from parts.cli import UserError
from parts.data import IGNORED, permutation
from parts.texts import rows_of

ROLES = ("system", "user", "assistant")

# -------------------------------------------------------------------------------------------------- rows to messages


def load_rows(data: str) -> tuple[list[list[dict]], set[int]]:
    """Read the conversations of --data: a file, a folder or the split `train` of a hub dataset; also return the numbers
    of those that are held out. Raise UserError for a row that is no conversation."""
    rows = rows_of(data)
    conversations = [messages_of(row, f"row {number} of {data}") for number, row in enumerate(rows, start=1)]
    held_out = {i for i, row in enumerate(rows) if str(row.get("held_out")).lower() in ("true", "1", "1.0", "yes")}
    print_unread_keys(rows)
    return conversations, held_out


def messages_of(row, where: str) -> list[dict]:
    """Turn a row into messages of a role and content. Raise UserError for anything but a conversation."""
    with contextlib.suppress(AttributeError, KeyError, TypeError, UnicodeEncodeError):  # from a row of another form
        messages = row.get("messages")
        if messages is None:
            question = f"{row['instruction'].strip()} {(row.get('input') or '').strip()}".strip()
            messages = [dict(role="user", content=question), dict(role="assistant", content=row["output"])]
        if is_conversation(messages):
            return [dict(role=message["role"], content=message["content"]) for message in messages]
    raise UserError(
        f"{where} is not a conversation; write instruction, input and output, or messages with role and content, "
        "where an assistant answers a user, all as text in valid Unicode"
    )


def is_conversation(messages: list[dict]) -> bool:
    """Return whether each message has a known role and text, and each assistant answers a user."""
    before = None
    for message in messages:
        role = message["role"]
        if role not in ROLES or not isinstance(message["content"], str) or (role == "assistant" and before != "user"):
            return False
        message["content"].encode()  # raises for half a surrogate pair
        before = role
    return True


def print_unread_keys(rows: list[dict]) -> None:
    """Print each key that training does not read, with its values if they are few: it may mark bad answers."""
    values = defaultdict(Counter)
    for row in rows:
        messages = row.get("messages") or []
        read = {"held_out", "messages"}
        if not messages:
            read |= {"instruction", "input", "output"}
        for found in [row, *messages]:
            for key, value in found.items():
                if key not in read and value is not None:  # None where other rows of a table have the key
                    values[key][json.dumps(value, ensure_ascii=False, default=str)] += 1
            read = {"role", "content"}
    for key, counts in values.items():
        line = f"note: not read: {key} in {counts.total():,}"
        if len(counts) <= 3:
            line += ": " + ", ".join(f"{value:.60} {n:,}" for value, n in counts.most_common())
        print(line)


# ------------------------------------------------------------------------------------------------ messages to examples


class Example(NamedTuple):
    """Inputs and targets of one conversation, or of a window of a long one; -100 where no answer is predicted."""

    idx: np.ndarray  # (T,) int32
    targets: np.ndarray  # (T,) int32


def encode_rows(rows: list[list[dict]], chat: Chat, sequence_length: int) -> list[Example]:
    """Encode the rows that ask and answer something. A row longer than `sequence_length` becomes windows that overlap
    by half; each of its answer tokens is a target in exactly one of them."""
    examples = []
    for ids, marks in chat.encode([row for row in rows if asks_and_answers(row)]):
        tokens = np.array(ids, dtype=np.int32)
        targets = np.where(marks, tokens, IGNORED)[1:].astype(np.int32)  # shifted: the next token of each
        examples += windows(tokens[:-1], targets, sequence_length)
    return examples


def asks_and_answers(messages: list[dict]) -> bool:
    """Return whether the user is answered and no turn is empty. An empty system message is ignored."""
    turns = [message for message in messages if message["role"] != "system"]
    answered = any(message["role"] == "assistant" for message in turns)
    return answered and all(message["content"].strip() for message in turns)


def windows(idx: np.ndarray, targets: np.ndarray, T: int) -> list[Example]:
    """Cut a long row into parts of at most T tokens, half a window apart, that score every target once."""
    parts = [Example(idx[:T], targets[:T])]
    for end in range(T + T // 2, len(idx) + T // 2, max(T // 2, 1)):  # the last is up to half a window shorter
        part = targets[end - T : end].copy()
        part[: T - T // 2] = IGNORED  # scored in the window before
        parts.append(Example(idx[end - T : end], part))
    return [part for part in parts if (part.targets >= 0).any()]


def split_rows(rows: list, held_out: set[int], val_rows: int, seed: int) -> tuple[list, list]:
    """Split rows into (training, validation): the rows to hold out, or else at most a tenth by the seed. A held-out row
    that equals a training row is left out: validation is on rows that training does not have."""
    order = permutation(len(rows), seed, 2**31).tolist()  # an epoch that training never reaches
    val = [i for i in order if i in held_out] or order[: min(val_rows, len(rows) // 10)]
    chosen = set(val)
    train = [rows[i] for i in order if i not in chosen]
    known = {json.dumps(row) for row in train}
    return train, [rows[i] for i in val if json.dumps(rows[i]) not in known]


# -------------------------------------------------------------------------------------------------- batches of examples


def global_batch(examples: list[Example], step: int, batch_size: int, seed: int) -> list[Example]:
    """Return the examples of step 0, 1, ..., by seed and step alone. Every epoch permutes all examples."""
    batch = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, at = divmod(position, len(examples))
        batch.append(examples[permutation(len(examples), seed, epoch)[at]])
    return batch


def count_targets(examples: list[Example]) -> int:
    """Count the answer tokens of a batch. Every rank has the whole batch, so none has to ask the others."""
    return sum(int((example.targets >= 0).sum()) for example in examples)


def micro_batches(examples: list[Example], limit: int, cost: int, rank: int = 0, world_size: int = 1) -> list[tuple]:
    """Divide one rank's share of a global batch into micro-batches of at most `limit` tokens; a longer example is one.

    Another micro-batch costs as much as `cost` tokens, so up to that much padding is cheaper, and no more.
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
    """Return (idx (B, T), targets (1, M), logit_positions (1, M)), int64: padded inputs, the M targets, and where among
    the B * T positions they are predicted. The 1 is the batch dimension that every input of a model has.

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
