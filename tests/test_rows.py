"""Conversations, examples and micro-batches: what is a target, and in which order."""

import itertools
import random
import re

import numpy as np
import pyarrow as pa
import pytest

from parts import chat
from parts.conversations import (
    IGNORED,
    Example,
    encode_rows,
    global_batch,
    load_rows,
    messages_of,
    micro_batches,
    split_rows,
    windows,
)
from tests.finetuning import ROWS, row, said
from tests.helpers import ROOT, assert_refused, write_json, write_lines


def encode(rows: list[dict], tokenizer, sequence_length=1000) -> list[Example]:
    return encode_rows([messages_of(r, "") for r in rows], chat.our_chat(tokenizer), sequence_length)


def test_every_answer_and_its_end_are_targets_and_nothing_else_is(small_tokenizer):
    """And a special token in a row is text, without its ends."""
    messages = said("s: Be", "u: Hi", "a: Ho", "u: A <|endoftext|>!", "a: Bye")
    [example] = encode([dict(messages=messages)], small_tokenizer)
    text = "BEGINNING OF CONVERSATION: USER: Be Hi ASSISTANT:Ho<|endoftext|>"
    text += "USER: A  |endoftext| ! ASSISTANT:Bye<|endoftext|>"
    ids = small_tokenizer.encode(text, allowed_special="all")
    assert [*example.idx, example.targets[-1]] == ids
    assert all(target in (IGNORED, i) for target, i in zip(example.targets, ids[1:], strict=True))
    scored = example.targets[example.targets >= 0].tolist()
    assert small_tokenizer.decode(scored) == "Ho<|endoftext|>Bye<|endoftext|>"


def test_empty_rows_are_left_out_and_an_empty_system_message_is_nothing(small_tokenizer):
    messages = said("s:  ", "u: Hi", "a: Ho")
    empty = [row("Hi", " "), row("", "Ho"), dict(messages=[]), dict(messages=messages[:2])]
    one, other = encode([row("Hi", "Ho"), *empty, dict(messages=messages)], small_tokenizer)
    assert one.idx.tolist() == other.idx.tolist()


@pytest.mark.parametrize("n, prompt", [(1, 0), (60, 0), (89, 6), (60, 58)])
@pytest.mark.parametrize("T", [2, 5, 40])
def test_a_long_row_is_read_in_windows_that_score_every_answer_token_once(n, T, prompt):
    idx = np.arange(n, dtype=np.int32)
    targets = np.where(idx < prompt, IGNORED, idx).astype(np.int32)  # of each token itself
    parts = windows(idx, targets, T)
    scored = np.concatenate([np.zeros(0, np.int32), *(part.targets[part.targets >= 0] for part in parts)])
    assert scored.tolist() == targets[targets >= 0].tolist()
    for part in parts:
        assert len(part.idx) == len(part.targets) <= T
        places = part.targets >= 0
        assert (part.targets[places] == part.idx[places]).all()
        assert part.idx[0] == 0 or part.idx[places].min() - part.idx[0] >= T // 2  # half a window of context


def test_split_is_by_seed_and_complete():
    rows = list(range(300))
    train, val = split_rows(rows, set(), 1000, seed=5)
    assert len(val) == 30
    assert sorted(train + val) == rows
    assert (train, val) == split_rows(rows, set(), 1000, seed=5) != split_rows(rows, set(), 1000, seed=6)
    assert len(split_rows(rows, set(), 7, seed=5)[1]) == 7
    assert split_rows(rows[:40], set(), 1000, seed=5)[1] == [36, 25, 3, 27]  # of every version


def test_equal_rows_never_stand_on_both_sides():
    rows = [row("Hi", str(n % 60)) for n in range(300)]
    train, val = split_rows(rows, set(), 1000, seed=5)
    assert len(train) == 270
    assert not [found for found in val if found in train]


def test_rows_that_say_so_are_held_out_and_no_others(tmp_path):
    marks = [True, 1.0, "yes", *[0.0, "no", None] * 13]
    rows = [row("Hi", str(n)) | dict(held_out=mark) for n, mark in enumerate(marks)]
    conversations, held_out = load_rows(str(write_json(tmp_path / "rows.json", rows)))
    train, val = split_rows(conversations, held_out, 1000, seed=5)
    assert sorted(int(found[-1]["content"]) for found in val) == [0, 1, 2]
    assert len(train) == 39


def test_questions_hold_out_phrasings_of_facts_that_are_trained_on():
    conversations, held_out = load_rows(str(ROOT / "questions.json"))
    train, val = split_rows(conversations, held_out, 1000, seed=5)
    assert len(train) + len(val) == len(conversations)  # none is left out as equal
    assert len(val) > 40
    questions = [found[0]["content"] for found in conversations if len(found) == 2]
    assert len({*questions}) == len(questions)
    asked = {message["content"] for found in train for message in found if message["role"] == "user"}
    answers = {found[1]["content"] for found in train}
    for question, answer in val:
        assert question["content"] not in asked
        assert answer["content"] in answers


@pytest.mark.parametrize("seed", range(4))
def test_a_micro_batch_grows_until_the_limit_or_until_padding_costs_more_than_another_one(seed):
    rng = random.Random(seed)
    lengths = rng.choices(range(1, 61), k=rng.randint(1, 30))
    limit = rng.randint(20, 200)
    cost = rng.randint(0, 100)
    examples = [Example(np.full(n, n, np.int32), np.full(n, n, np.int32)) for n in lengths]
    parts = [idx.max(axis=1).tolist() for idx, _, _ in micro_batches(examples, limit, cost)]
    assert sum(parts, []) == sorted(lengths)

    def fits(part: list[int]) -> bool:
        padded = len(part) * max(part)
        return len(part) == 1 or (padded <= limit and padded - sum(part) <= cost)

    assert all(map(fits, parts))
    for part, after in itertools.pairwise(parts):
        assert not fits([*part, after[0]])


def test_the_ranks_share_every_global_batch_whatever_their_number(small_tokenizer):
    examples = encode(ROWS[:21], small_tokenizer)

    def targets_of(step, ranks):
        batch = global_batch(examples, step, 8, 3)
        micros = [micro for rank in range(ranks) for micro in micro_batches(batch, 400, 20, rank, ranks)]
        return sorted(target for _, targets, _ in micros for target in targets[0].tolist())

    for step in (0, 2, 5):
        assert targets_of(step, 4) == targets_of(step, 2) == targets_of(step, 1)


def test_every_epoch_has_each_example_once_in_another_order():
    examples = list(range(12))
    first = [global_batch(examples, step, 4, 3) for step in (0, 1, 2)]
    second = [global_batch(examples, step, 4, 3) for step in (3, 4, 5)]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == examples
    assert first != second
    across = [global_batch(examples, step, 8, 3) for step in (0, 1, 2)]  # the same order in other portions
    assert sum(across, []) == sum(first + second, [])


BAD = [
    dict(instruction="Say hi.", output="hi \ud83d"),  # half a surrogate pair
    dict(instruction="a"),
    dict(messages=[dict(role="user", content=3)]),
    dict(messages=[dict(role="tool", content="12:00")]),
    dict(messages=said("u: Hi", "a: Ho", "a: Ho")),
    "a",
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_malformed_row_is_named_with_its_number(tmp_path, bad):
    path = write_json(tmp_path / "rows.json", [row("a", "b"), bad])
    assert_refused(r"\b2 .*rows.json", load_rows, str(path))


CHAT = said("u: Hi there", "a: Ho")
PLAIN = row("Hi", "Ho", "there")
UNREAD = [
    ([PLAIN | dict(label=n % 2 == 0) for n in range(6)], ["label", "6", "true", "3", "false", "3"]),
    ([PLAIN | dict(id=n) for n in range(4)], ["id", "4"]),  # too many values to be shown
    ([dict(messages=[CHAT[0], CHAT[1] | dict(weight=0)], tools=None)], ["weight", "1", "0", "1"]),
    ([PLAIN, dict(instruction="Hi there", input=None, output="Ho", messages=None)], []),
]


@pytest.mark.parametrize("rows, expected", UNREAD, ids=str)
def test_each_key_that_is_not_read_is_counted_with_its_values_where_they_are_few(tmp_path, capsys, rows, expected):
    conversations, _ = load_rows(str(write_json(tmp_path / "rows.json", rows)))
    assert conversations == [CHAT] * len(rows)
    assert re.findall(r"\d+|true|false|label|id|weight", capsys.readouterr().out) == expected


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "folder"])
def test_rows_of_other_files_are_the_same(tmp_path, name):
    import pyarrow.csv
    import pyarrow.parquet

    rows = [PLAIN | dict(held_out=n % 2 == 0, none=None) for n in range(4)]
    table = pa.Table.from_pylist(rows)
    path = tmp_path / name
    match name:
        case "rows.jsonl":
            write_lines(path, rows)
        case "rows.csv":
            pa.csv.write_csv(table, path)
        case "folder":
            path.mkdir()
            pa.parquet.write_table(table, path / "train.parquet")
    assert load_rows(str(path)) == ([CHAT] * 4, {0, 2})
