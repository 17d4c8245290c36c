"""Conversations, examples and micro-batches: what is a target, and in which order."""

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parts import chat
from parts.cli import UserError
from parts.conversations import (
    IGNORED,
    Example,
    collate,
    encode_rows,
    global_batch,
    load_rows,
    messages_of,
    micro_batches,
    split_rows,
    windows,
)
from tests.finetuning import ROWS, row, said
from tests.helpers import assert_refused, write_json


def encode(rows: list[dict], tokenizer, sequence_length=1000):
    return encode_rows([messages_of(r, "") for r in rows], chat.our_chat(tokenizer), sequence_length)


def test_the_places_of_a_micro_batch_are_where_its_targets_are_predicted():
    long = Example(np.arange(1, 6), np.array([IGNORED, 1, 2, IGNORED, 4]))  # each token is followed by its predecessor
    idx, scored, places = collate([long, Example(np.arange(1, 3), np.array([0, IGNORED]))])
    assert idx.tolist() == [[1, 2, 3, 4, 5], [1, 2, 0, 0, 0]]
    assert (idx.flatten()[places] - 1).tolist() == scored.tolist() == [[1, 2, 4, 0]]


def test_every_answer_and_its_end_are_targets_and_nothing_else_is(small_tokenizer):
    """And a special token in a row is text, without its ends."""
    messages = said("s: Be", "u: Hi", "a: Ho", "u: A <|endoftext|>!", "a: Bye")
    (example,), _ = encode([dict(messages=messages)], small_tokenizer)
    text = "BEGINNING OF CONVERSATION: USER: Be Hi ASSISTANT:Ho<|endoftext|>"
    text += "USER: A  |endoftext| ! ASSISTANT:Bye<|endoftext|>"
    ids = small_tokenizer.encode(text, allowed_special="all")
    assert [*example.idx, example.targets[-1]] == ids
    assert all(target in (IGNORED, i) for target, i in zip(example.targets, ids[1:], strict=True))
    scored = example.targets[example.targets >= 0].tolist()
    assert small_tokenizer.decode(scored) == "Ho<|endoftext|>Bye<|endoftext|>"
    counts = [encode([dict(messages=messages)] * 2, small_tokenizer, len(ids) - n)[1] for n in (1, 2)]
    assert counts == [dict(empty=0, long=0), dict(empty=0, long=2)]


def test_empty_rows_are_counted_and_left_out_and_an_empty_system_message_is_nothing(small_tokenizer):
    messages = said("s:  ", "u: Hi", "a: Ho")
    empty = [row("Hi", " "), row("", "Ho"), dict(messages=[]), dict(messages=messages[:2])]
    (one, other), counts = encode([row("Hi", "Ho"), *empty, dict(messages=messages)], small_tokenizer)
    assert one.idx.tolist() == other.idx.tolist()
    assert counts["empty"] == 4


@given(st.integers(1, 90), st.integers(2, 40), st.integers(0, 89))
@settings(max_examples=200, deadline=None)
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


def test_the_split_is_by_seed_and_complete():
    rows = list(range(300))
    train, val = split_rows(rows, 1000, seed=5)
    assert len(val) == 30
    assert sorted(train + val) == rows
    assert (train, val) == split_rows(rows, 1000, seed=5) != split_rows(rows, 1000, seed=6)
    assert len(split_rows(rows, 7, seed=5)[1]) == 7
    assert split_rows(rows[:40], 1000, seed=5)[1] == [36, 25, 3, 27]  # of every version


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(20, 200), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_a_micro_batch_grows_until_the_limit_or_until_padding_costs_more_than_another_one(lengths, limit, cost):
    examples = [Example(np.full(n, n, np.int32), np.full(n, n, np.int32)) for n in lengths]
    parts = [(idx.max(axis=1).tolist(), idx.size) for idx, _, _ in micro_batches(examples, limit, cost)]
    assert sum((found for found, _ in parts), []) == sorted(lengths)

    def fits(part: list[int]) -> bool:
        padded = len(part) * max(part)
        return len(part) == 1 or (padded <= limit and padded - sum(part) <= cost)

    assert all(fits(part) and size == len(part) * max(part) for part, size in parts)
    for (part, _), (after, _) in itertools.pairwise(parts):
        assert not fits([*part, after[0]])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ranks_share_every_global_batch_whatever_their_number(small_tokenizer, world_size):
    examples, _ = encode(ROWS[:21], small_tokenizer)

    def targets_of(step, ranks):
        batch = global_batch(examples, step, 8, 3)
        micros = [micro for rank in range(ranks) for micro in micro_batches(batch, 400, 20, rank, ranks)]
        return sorted(target for _, targets, _ in micros for target in targets[0].tolist())

    for step in (0, 1, 2, 5):
        assert targets_of(step, world_size) == targets_of(step, 1)


def test_every_epoch_has_each_example_once_in_another_order():
    examples = list(range(12))
    first = [global_batch(examples, step, 4, 3) for step in (0, 1, 2)]
    second = [global_batch(examples, step, 4, 3) for step in (3, 4, 5)]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == examples
    assert first != second
    across = [global_batch(examples, step, 8, 3) for step in (0, 1, 2)]  # the same order in other portions
    assert sum(across, []) == sum(first + second, [])


BAD = [
    (dict(instruction="a"), "output is missing"),
    (dict(output="b"), "instruction is missing"),
    (row("a", 3), "output"),
    (row("a", float("nan")), "output"),
    (row("a", "b", 3), "input"),
    ("a", "a row is an object"),
    (3, "a row is an object"),
    (None, "a row is an object"),
    ([[]], "a row is an object"),
    (dict(messages=None), "instruction is missing"),
    (dict(messages=[dict(role="assistant", content="x")]), "the assistant speaks after nobody"),
]


@pytest.mark.parametrize("bad, words", BAD)
def test_a_malformed_row_is_named_with_its_number(tmp_path, bad, words):
    path = write_json(tmp_path / "rows.json", [row("a", "b"), bad])
    assert_refused(f"row 2 of .*rows.json.* {words}", load_rows, str(path))


CHAT = said("u: Hi there", "a: Ho")
PLAIN = row("Hi", "Ho", "there")


def answer(**more) -> dict:
    """A row whose answer says more."""
    return dict(messages=[CHAT[0], CHAT[1] | more])


def refused(tmp_path, rows: list[dict], key: str) -> None:
    """The rows are refused for the key by name, and read with --ignore_keys."""
    path = str(write_json(tmp_path / "rows.json", rows))
    words = rf"rows.json: .* {re.escape(key)} is .*; training does not read it: .*--ignore_keys {key} "
    assert_refused(words, load_rows, path)
    conversations, not_read = load_rows(path, [key])
    assert len(conversations) == len(rows)
    assert key.split(".")[0] in not_read


MARKS = [(False, True), (0, 1), (0.0, 1.0), ("0", "1"), ("0.0", "1.0"), ("False", "True"), ("false", True), (0, 0.5, 1)]
PLACES = {
    "a row with an instruction": (lambda key, value: PLAIN | {key: value}),
    "a row with messages": (lambda key, value: dict(messages=CHAT) | {key: value}),
    "an answer": (lambda key, value: answer(**{key: value})),
    "a question": (lambda key, value: dict(messages=[CHAT[0] | {key: value}, CHAT[1]])),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("values", MARKS, ids=str)
def test_a_key_that_marks_some_and_not_others_is_refused_whatever_its_name(tmp_path, values, place):
    rows = [PLACES[place]("zzz", value) for value in values] * 2
    refused(tmp_path, rows, "zzz")


@pytest.mark.parametrize("values", MARKS[:-1], ids=str)
def test_a_mark_needs_no_value_twice(tmp_path, values):
    refused(tmp_path, [PLAIN | dict(zzz=value) for value in values], "zzz")


@pytest.mark.parametrize("numbers", [range(5), "01234", [0, 1, 7], ["1", "0", "12"]], ids=str)
def test_numbers_of_rows_are_no_marks(tmp_path, numbers):
    rows = [PLAIN | dict(id=number) for number in numbers]
    assert load_rows(str(write_json(tmp_path / "rows.json", rows)))[1] == f"id in {len(rows)} of {len(rows)} rows"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [True, False, 0, "1"])
def test_a_mark_on_some_alone_is_refused(tmp_path, value, place):
    refused(tmp_path, [PLACES[place]("masked", value), PLAIN, dict(messages=CHAT)], "masked")


def test_a_mark_in_an_object_or_a_list_is_refused_by_its_path(tmp_path):
    refused(tmp_path, [PLAIN | dict(meta=dict(train=value)) for value in (True, False)], "meta.train")
    refused(tmp_path, [PLAIN | dict(mask=[0, 1])], "mask")
    path = str(write_json(tmp_path / "rows.json", [PLAIN | dict(meta=dict(train=value)) for value in (True, False)]))
    assert load_rows(path, ["meta"])[1] == "meta.train in 2 of 2 rows"


COUNTED = [
    ([PLAIN | dict(id=n, source="web", score=0.5 + n, lang=dict(code="en")) for n in range(4)],
     "id in 4 of 4 rows, source in 4 of 4 rows, score in 4 of 4 rows, lang.code in 4 of 4 rows"),
    ([PLAIN | dict(text="BEGIN Hi there Ho END", system="Be kind."), PLAIN | dict(system="")],
     "text in 1 of 2 rows, system in 1 of 2 rows"),
    ([PLAIN | dict(history=[], tools=None, context="", weight=1), PLAIN | dict(weight="1.0")], "weight in 2 of 2 rows"),
    ([PLAIN | dict(label=False), PLAIN | dict(label="0")], "label in 2 of 2 rows (false or 0 in all of them)"),
    ([dict(messages=CHAT, rejected=dict(content="Hm"), images=["a.png"])],
     "rejected.content in 1 of 1 rows, images in 1 of 1 rows"),
    ([dict(messages=[CHAT[0], CHAT[1] | dict(name="Ann", weight=1)])] * 2,
     "name in 2 of 2 messages of the assistant, weight in 2 of 2 messages of the assistant"),
    # who asks is never learned, and who answers is
    ([dict(messages=[CHAT[0] | dict(loss=0), CHAT[1] | dict(loss=1)], id="a")],
     "id in 1 of 1 rows, loss in 1 of 1 messages of the user (false or 0 in all of them), "
     "loss in 1 of 1 messages of the assistant"),
    ([answer(tool_calls=[dict(name="clock")])], "tool_calls.name in 1 of 1 messages of the assistant"),
    ([dict(messages=CHAT) | PLAIN], "instruction in 1 of 1 rows, input in 1 of 1 rows, output in 1 of 1 rows"),
    ([PLAIN], ""),
    ([dict(messages=CHAT)], ""),
]  # fmt: skip


@pytest.mark.parametrize("rows, counts", COUNTED, ids=[counts for _, counts in COUNTED])
def test_every_key_that_is_not_read_is_counted(tmp_path, rows, counts):
    conversations, not_read = load_rows(str(write_json(tmp_path / "rows.json", rows)))
    assert not_read == counts
    assert conversations == [CHAT] * len(rows)


# Rows as public datasets have them: what is read of each, or the word for which it is refused; and what is not read.
PUBLIC = {
    "Alpaca": (PLAIN | dict(text="BEGIN Hi there Ho"), CHAT, "text in 1 of 1 rows"),
    "Alpaca with a history": (
        PLAIN | dict(system="Hm", history=[["a", "b"]]),
        CHAT,
        "system in 1 of 1 rows, history in 1 of 1 rows",
    ),
    "Dolly": (dict(instruction="Hi", context="there", response="Ho", category="chat"), "output", ""),
    "ShareGPT": (dict(conversations=[{"from": "human", "value": "Hi"}], tools="[]"), "instruction", ""),
    "chats of OpenAI": (dict(messages=said("s: Be", "u: Hi", "a: Ho")), said("s: Be", "u: Hi", "a: Ho"), ""),
    "calls of tools": (dict(messages=[dict(role="tool", content="12:00")]), "role", ""),
    "parts of content": (dict(messages=[dict(role="user", content=[dict(type="text", value="Hi")])]), "content", ""),
    "pictures": (dict(messages=CHAT, images=["1.jpg"]), CHAT, "images in 1 of 1 rows"),
    "sounds and films": (
        dict(messages=CHAT, videos=["4.mp4"], audios=["4.mp3"]),
        CHAT,
        "videos in 1 of 1 rows, audios in 1 of 1 rows",
    ),
    "UltraChat": (
        dict(prompt="Hi there", prompt_id="x", messages=CHAT),
        CHAT,
        "prompt in 1 of 1 rows, prompt_id in 1 of 1 rows",
    ),
    "preferences": (dict(conversations=[], chosen=dict(value="Ho"), rejected=dict(value="Hm")), "instruction", ""),
    "questions": (dict(id=1, system_prompt="Be kind.", question="Hi", response="Ho"), "instruction", ""),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_rows_of_public_datasets_are_read_or_refused_by_name(tmp_path, name):
    public, expected, not_read = PUBLIC[name]
    path = str(write_json(tmp_path / "rows.json", [public]))
    if isinstance(expected, str):
        assert_refused(rf"row 1 of .*\b{expected}\b", load_rows, path)
    else:
        assert load_rows(path) == ([expected], not_read)


def test_good_and_bad_answers_together_are_refused(tmp_path):
    """Rows for KTO."""
    rows = [dict(messages=CHAT, label=n % 2 == 0) for n in range(30)]
    path = str(write_json(tmp_path / "rows.json", rows))
    words = "of 30 rows, label is false or 0 in 15, true or 1 in 15, and absent in 0"
    assert_refused(words, load_rows, path)
    assert load_rows(path, ["label"])[1] == "label in 30 of 30 rows"


DISORDERLY = [
    "x", [dict(role="user")], [dict(role="user", content=3)], [dict(role="robot", content="x")], said("a: Hi"),
    said("u: Hi", "a: Ho", "a: Ho"), said("u: Hi", "s: Be kind.", "a: Ho"),
]  # fmt: skip


@pytest.mark.parametrize("messages", DISORDERLY, ids=str)
def test_anything_but_a_conversation_is_refused(messages):
    words = r"row 3: (each message needs a role \(system, user, assistant\) and|the assistant speaks after \w+;)"
    assert_refused(words, messages_of, dict(messages=messages), "row 3")


def test_instructions_and_messages_are_read_alike(tmp_path):
    rows = [row("Hi", "Ho", "there"), row("Say", "x"), dict(instruction="Hm", input=None, output="y", messages=None)]
    messages = [dict(messages=messages_of(r, "")) for r in rows]
    plain, _ = load_rows(str(write_json(tmp_path / "rows.json", rows)))
    chats, _ = load_rows(str(write_json(tmp_path / "messages.json", messages)))
    assert plain == chats
    assert plain[0] == said("u: Hi there", "a: Ho")


def as_dataset(rows: list[dict]):
    import datasets  # slow, and not needed to collect the tests

    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv", "folder"])
def test_rows_of_other_files_are_the_same_and_so_are_their_marks(tmp_path, name):
    rows = [row("Hi", "Ho", "there") | dict(label=n % 2 == 0, id=f"n{n}", none=None) for n in range(4)]
    table = as_dataset(rows)
    path = tmp_path / name
    if name == "rows.jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    elif name == "rows.csv":
        table.to_csv(path)
    else:
        path = path / "train.parquet" if name == "folder" else path
        path.parent.mkdir(exist_ok=True)
        table.to_parquet(path)
    assert_refused("label is false or 0 in 2, true or 1 in 2", load_rows, str(tmp_path / name))
    conversations, not_read = load_rows(str(tmp_path / name), ["label"])
    assert conversations == [CHAT] * 4
    assert not_read == "label in 4 of 4 rows, id in 4 of 4 rows"


def test_messages_in_a_parquet_file_are_read_with_their_marks(tmp_path):
    """Whose messages all have the keys that one of them has, with null in the others."""
    rows = [answer(weight=n, name="Ann") if n < 2 else dict(messages=CHAT) for n in range(4)]
    as_dataset(rows).to_parquet(tmp_path / "rows.parquet")
    words = "of 4 messages of the assistant, weight is false or 0 in 1, true or 1 in 1, and absent in 2"
    assert_refused(words, load_rows, str(tmp_path / "rows.parquet"))
    conversations, not_read = load_rows(str(tmp_path / "rows.parquet"), ["weight"])
    assert conversations == [CHAT] * 4
    assert not_read == "weight in 2 of 4 messages of the assistant, name in 2 of 4 messages of the assistant"


LOCAL = ["absent.json", "folder/absent.json", "folder/absent.jsonl", "absent", "./absent", "x" * 300]


@pytest.mark.parametrize("name", LOCAL)
def test_a_name_that_is_not_a_dataset_of_the_hub_is_a_file(monkeypatch, name):
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    assert_refused(name.removeprefix("./")[-10:], load_rows, name)


@pytest.mark.parametrize("form", ["[{}]", "{}\n"], ids=["list", "lines"])
def test_a_key_that_a_row_has_twice_is_refused(tmp_path, form):
    path = tmp_path / "rows.json"
    path.write_text(form.replace("{}", '{"instruction": "q", "output": "A", "output": "B"}'))
    with pytest.raises(UserError, match="a key twice"):
        load_rows(str(path))
