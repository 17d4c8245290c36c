"""Conversations as finetuning reads them: rows of a file or of the hub, examples, micro-batches.

    row -> messages -> tokens, and which of them are answers -> examples of at most T tokens -> micro-batches

- a row has instruction, input and output, or a chat as `messages`; add another format in `messages_of`. Other keys are
  counted, and a key that marks some rows or messages and not others is refused until a person says that it may be
- an example is a conversation, or a window of a long one; only its answers are targets
- a micro-batch holds examples of about one length, so that few of its tokens are padding
- the global batch of a step is a function of seed and step, whatever the number of ranks and of interruptions

This file knows nothing of torch, models or devices. parts/chat.py defines how a conversation is written.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from parts.chat import Chat
from parts.cli import UserError
from parts.data import IGNORED, permutation
from parts.texts import rows_of

ROLES = ("system", "user", "assistant")
INSTRUCTION = ("instruction", "input", "output")

# -------------------------------------------------------------------------------------------------- rows to messages


def load_rows(data: str, ignore_keys: Collection[str] = ()) -> tuple[list[list[dict]], str]:
    """The conversations of --data, a file, a folder or the split `train` of a dataset of the hub; and which keys are
    not read, "" if all are. Raises UserError, also for a key that `count_keys` refuses."""
    rows = rows_of(data)
    conversations = [messages_of(row, f"row {number} of {data}") for number, row in enumerate(rows, start=1)]
    unread = {"rows": []} | {f"messages of the {role}": [] for role in ROLES}
    for row in rows:
        is_chat = row.get("messages") is not None
        unread["rows"].append(without(row, ("messages",) if is_chat else INSTRUCTION))
        for message in row["messages"] if is_chat else ():
            unread[f"messages of the {message['role']}"].append(without(message, ("role", "content")))
    counts = []
    for places, found in unread.items():
        counts += count_keys(found, places, data, ignore_keys)
    return conversations, ", ".join(counts)


def messages_of(row, where: str) -> list[dict]:
    """One row as messages of a role and content. Raises UserError for a field that is missing or not text."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}; a row is an object with instruction, input and output")
    row = {field: value for field, value in row.items() if value is not None}  # null counts as absent
    if "messages" in row:
        check_messages(row["messages"], where)
        return [dict(role=message["role"], content=message["content"]) for message in row["messages"]]
    said = {"input": ""} | row
    for field in INSTRUCTION:
        if not isinstance(said.get(field), str):
            raise UserError(f"{where}: {field} is missing or no text; rows have instruction, input, output or messages")
    user = " ".join(filter(None, (said["instruction"].strip(), said["input"].strip())))
    return [dict(role="user", content=user), dict(role="assistant", content=said["output"])]


def check_messages(messages: list, where: str) -> None:
    """Raises UserError for anything but a conversation."""
    before = None
    for message in messages if isinstance(messages, list) else [None]:
        fine = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not fine or message.get("role") not in ROLES:
            raise UserError(f"{where}: each message needs a role ({', '.join(ROLES)}) and content that is text")
        if message["role"] == "assistant" and before != "user":
            raise UserError(f"{where}: the assistant speaks after {before or 'nobody'}; it can only answer the user")
        before = message["role"]


# --------------------------------------------------------------------------------------------- keys that nothing reads


def without(found: dict, read: tuple[str, ...]) -> dict:
    """What a row or a message says besides the keys in `read`."""
    return {key: value for key, value in found.items() if key not in read}


def count_keys(unread: list[dict], places: str, data: str, ignore_keys: Collection[str]) -> list[str]:
    """In how many rows, or messages, each key is that training does not read.

    Raises UserError for one in which some differ from the others by true or false alone. It may say which answers are
    bad, or not to be learned: `label`, `train`, `loss_weight` and many more. No list of names would be complete, so the
    values tell: false or 0 in one place and true or 1 in another, or only one of them, and nothing in other places.
    Three values or more that all differ number the rows.
    """
    values = defaultdict(Counter)
    present = Counter()
    for found in unread:
        pairs = [(path, truth(value)) for path, value in leaves("", found)]
        present.update(dict(pairs).keys())
        for path, value in pairs:
            values[path][value] += 1
    counts = []
    for path, n in present.most_common():
        seen = values[path]
        off = seen[False]
        on = seen[True]
        absent = len(unread) - n
        numbers = len(seen) == seen.total() > 2
        marks = (off and on and not numbers) or (absent and off + on == seen.total())
        if marks and {path, path.partition(".")[0]}.isdisjoint(ignore_keys):
            raise UserError(
                f"{data}: of {len(unread):,} {places}, {path} is false or 0 in {off:,}, true or 1 in {on:,}, and "
                f"absent in {absent:,}; training does not read it: remove what should not be learned, or pass "
                f"--ignore_keys {path} to learn all of it"
            )
        note = " (false or 0 in all of them)" if off == seen.total() else ""
        counts.append(f"{path} in {n:,} of {len(unread):,} {places}{note}")
    return counts


def leaves(path: str, value) -> Iterator[tuple[str, object]]:
    """The values in a row, or a message, each with its path, such as metadata.train; all of a list have one path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(path, inner)
    elif value not in (None, ""):  # an empty value says nothing
        yield path, value


def truth(value) -> bool | str:
    """The truth value that a number or a text stands for, as 0 or "True" do; any other value as a text."""
    text = str(value).strip().lower()
    return {"false": False, "0": False, "0.0": False, "true": True, "1": True, "1.0": True}.get(text, text)


# ------------------------------------------------------------------------------------------------ messages to examples


class Example(NamedTuple):
    """Inputs and targets of one conversation, or of a window of a long one; -100 where no answer is predicted."""

    idx: np.ndarray  # (T,) int32
    targets: np.ndarray  # (T,) int32


def encode_rows(rows: list[list[dict]], chat: Chat, sequence_length: int) -> tuple[list[Example], dict[str, int]]:
    """Examples of all rows that ask and answer something, and how many rows were empty or long.

    A row longer than `sequence_length` becomes windows that overlap by half; each of its answer tokens is a target in
    exactly one of them.
    """
    full = [row for row in rows if asks_and_answers(row)]
    examples = []
    counts = dict(empty=len(rows) - len(full), long=0)
    for ids, marks in zip(*chat.encode(full), strict=True):
        tokens = np.array(ids, dtype=np.int32)
        targets = np.where(marks, tokens, IGNORED)[1:].astype(np.int32)  # shifted: the next token of each
        counts["long"] += len(targets) > sequence_length
        examples += windows(tokens[:-1], targets, sequence_length)
    return examples, counts


def asks_and_answers(messages: list[dict]) -> bool:
    """Whether somebody answers, and no turn is empty; an empty system message says nothing, and is left out."""
    turns = [message for message in messages if message["role"] != "system"]
    answered = any(message["role"] == "assistant" for message in turns)
    return answered and all(message["content"].strip() for message in turns)


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


def count_targets(examples: list[Example]) -> int:
    """How many answer tokens a batch has, which is known without asking the other ranks: all have the whole batch."""
    return sum(int((example.targets >= 0).sum()) for example in examples)


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
