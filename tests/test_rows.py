"""Conversations, examples and micro-batches: what is a target, and in which order."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parts import chat
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
    return encode_rows([messages_of(r, "") for r in rows], tokenizer, sequence_length)


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
    assert [*example.idx, example.targets[-1]] == ids == chat.chat_ids(small_tokenizer, messages)
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
MORE = [
    # what public formats say beside an instruction and an output
    PLAIN | dict(system="Be kind."),
    PLAIN | dict(system_prompt="Be kind."),
    PLAIN | dict(history=[["Hi", "Ho"]]),
    PLAIN | dict(context="It is late."),
    PLAIN | dict(conversations=[{"from": "human", "value": "Hi"}]),
    PLAIN | dict(rejected="Hm"),
    PLAIN | dict(Response="Hm"),
    PLAIN | dict(tools=[dict(name="clock")]),
    PLAIN | dict(images=["a.png"]),
    PLAIN | dict(weight=0),
    # and beside messages
    dict(messages=CHAT) | row("Say", "x"),
    dict(messages=CHAT, output="Hm"),
    dict(messages=CHAT, system="Be kind."),
    dict(messages=CHAT, chosen=CHAT, rejected=said("u: Hi there", "a: Hm")),
    dict(messages=CHAT, prompt="Another one"),
    dict(messages=CHAT, tools=[dict(name="clock")]),
    # and in a message
    dict(messages=[CHAT[0], CHAT[1] | dict(tool_calls=[dict(name="clock")])]),
    dict(messages=[CHAT[0], CHAT[1] | dict(reasoning_content="Hm")]),
    dict(messages=[CHAT[0], CHAT[1] | dict(weight=0)]),
    dict(messages=[CHAT[0], CHAT[1] | dict(train=False)]),
]


@pytest.mark.parametrize("more", MORE, ids=str)
def test_what_else_a_row_says_is_refused_by_name(tmp_path, more):
    path = write_json(tmp_path / "rows.json", [row("a", "b"), more])
    assert_refused(r"row 2 of .*rows.json.* has \w+, which training would not read; put it into", load_rows, str(path))


HARMLESS = [
    PLAIN | dict(id=7, source="web", url="http://a", score=0.5, category="greeting", metadata=dict(lang="en")),
    PLAIN | dict(text="BEGIN Hi there Ho END"),  # of Alpaca: the same in another form
    PLAIN | dict(system="", history=[], tools=None, context=" ", weight=1, turns=2),
    dict(messages=CHAT, prompt="Hi there", prompt_id="x", chosen=CHAT, output="Ho"),  # only repeats what is read
    dict(messages=[message | dict(name="Ann", weight=1, tool_calls=None) for message in CHAT]),
]


@pytest.mark.parametrize("harmless", HARMLESS, ids=str)
def test_keys_that_say_nothing_more_may_stay(tmp_path, harmless):
    [messages] = load_rows(str(write_json(tmp_path / "rows.json", [harmless])))
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert [message["content"] for message in messages] == ["Hi there", "Ho"]


# Rows as public datasets have them: what is read of each, or the key for which it is refused.
PUBLIC = {
    "Alpaca": (PLAIN | dict(text="BEGIN Hi there Ho"), CHAT),
    "Alpaca with a system prompt and a history": (PLAIN | dict(system="Be kind.", history=[["a", "b"]]), "system"),
    "Dolly": (dict(instruction="Hi", context="there", response="Ho", category="chat"), "output"),
    "ShareGPT": (dict(conversations=[{"from": "human", "value": "Hi"}]), "instruction"),
    "chats of OpenAI": (dict(messages=said("s: Be kind.", "u: Hi", "a: Ho")), said("s: Be kind.", "u: Hi", "a: Ho")),
    "calls of tools": (dict(messages=[dict(role="tool", content="12:00")]), "role"),
    "UltraChat": (dict(prompt="Hi there", prompt_id="0", messages=CHAT), CHAT),
    "UltraFeedback": (dict(prompt="Hi there", messages=CHAT, chosen=CHAT, rejected=CHAT[:1]), "rejected"),
    "questions": (dict(id=1, system_prompt="Be kind.", question="Hi", response="Ho"), "instruction"),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_rows_of_public_datasets_are_read_whole_or_refused_by_name(tmp_path, name):
    public, expected = PUBLIC[name]
    path = str(write_json(tmp_path / "rows.json", [public]))
    if isinstance(expected, str):
        assert_refused(rf"row 1 of .*\b{expected}\b", load_rows, path)
    else:
        assert load_rows(path) == [expected]


def test_instructions_and_messages_are_read_alike(tmp_path):
    rows = [row("Hi", "Ho", "there"), row("Say", "x"), dict(instruction="Hm", input=None, output="y", messages=None)]
    messages = [dict(messages=messages_of(r, "")) for r in rows]
    plain = load_rows(str(write_json(tmp_path / "rows.json", rows)))
    chats = load_rows(str(write_json(tmp_path / "messages.json", messages)))
    assert plain == chats
    assert plain[0] == said("u: Hi there", "a: Ho")


def test_alpaca_comes_from_the_hub(monkeypatch, tmp_path):
    hub = {("tatsu-lab/alpaca", "train"): [row("Hi", "Ho", "there") | dict(text="...")]}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("parts.conversations.hub_rows", lambda *asked: hub[asked])
    assert load_rows("tatsu-lab/alpaca") == [said("u: Hi there", "a: Ho")]


LOCAL = ["absent.json", "folder/absent.json", "folder/absent.jsonl", "absent", "a/b/c", "./absent", "x" * 300]


@pytest.mark.parametrize("name", LOCAL)
def test_a_name_that_is_not_a_dataset_of_the_hub_is_a_file(monkeypatch, name):
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    assert_refused(name[-10:], load_rows, name)
