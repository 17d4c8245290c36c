"""Rows, examples and micro-batches: what is read, what is a target, and in which order."""

import contextlib
import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import CrossEntropyLoss

from bpe.tokenizer import Tokenizer
from cli import UserError
from finetuning import chat
from finetuning.rows import (
    IGNORED,
    cut_by_length,
    encode_rows,
    global_batch,
    load_rows,
    messages_of,
    micro_batches,
    read_rows,
    split_rows,
    windows,
)
from tests.finetuning import ROWS, row, write_json
from tests.helpers import ROOT


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([(ROOT / "input.txt").read_text()[:60_000]], 320)


def encode(rows: list[dict], tokenizer, sequence_length=1000):
    return encode_rows([messages_of(r, "") for r in rows], tokenizer, sequence_length)


def test_answers_and_their_end_are_targets_and_nothing_else_is(tokenizer):
    (example,), _ = encode([row("Add.", "3", "1 and 2")], tokenizer)
    prompt = tokenizer.encode_ordinary("BEGINNING OF CONVERSATION: USER: Add. 1 and 2 ASSISTANT:")
    answer = [*tokenizer.encode_ordinary("3"), tokenizer.eot_token]
    assert example.idx.tolist() == (prompt + answer)[:-1]
    assert example.targets.tolist() == [IGNORED] * (len(prompt) - 1) + answer


def test_a_conversation_scores_every_answer(tokenizer):
    said = (("system", "Be kind."), ("user", "Hi"), ("assistant", "Ho"), ("user", "Bye"), ("assistant", "Ciao"))
    messages = [dict(role=role, content=content) for role, content in said]
    (example,), _ = encode([dict(messages=messages)], tokenizer)
    text = "BEGINNING OF CONVERSATION: USER: Be kind. Hi ASSISTANT:Ho<|endoftext|>USER: Bye ASSISTANT:Ciao<|endoftext|>"
    ids = tokenizer.encode(text, allowed_special="all")
    assert [*example.idx, example.targets[-1]] == ids == chat.chat_ids(tokenizer, messages)
    scored = example.targets[example.targets >= 0].tolist()
    assert tokenizer.decode(scored) == "Ho<|endoftext|>Ciao<|endoftext|>"


def test_special_tokens_in_a_row_are_text(tokenizer):
    (example,), _ = encode([row("Say <|endoftext|>", "<|endoftext|>")], tokenizer)
    assert tokenizer.eot_token not in example.idx
    assert (example.targets == tokenizer.eot_token).sum() == 1


def test_empty_rows_are_counted_and_left_out(tokenizer):
    rows = [
        row("Hi", "Ho"),
        row("Hi", " "),
        row("", "Ho"),
        dict(messages=[]),
        dict(messages=[dict(role="user", content="x")]),
    ]
    examples, counts = encode(rows, tokenizer)
    assert len(examples) == 1 and counts["empty"] == 4


@given(st.integers(1, 90), st.integers(2, 40), st.integers(0, 89))
@settings(max_examples=200, deadline=None)
def test_a_long_row_is_read_in_windows_that_score_every_answer_token_once(n, T, prompt):
    idx = np.arange(n, dtype=np.int32)
    targets = np.where(idx < prompt, IGNORED, idx + 1).astype(np.int32)
    parts = windows(idx, targets, T)
    scored = np.concatenate([np.zeros(0, np.int32), *(part.targets[part.targets >= 0] for part in parts)])
    assert scored.tolist() == targets[targets >= 0].tolist()
    for part in parts:
        assert len(part.idx) == len(part.targets) <= T
        places = part.targets >= 0
        assert (part.targets[places] == part.idx[places] + 1).all()
        assert part.idx[0] == 0 or part.idx[places].min() - part.idx[0] >= T // 2  # half a window of context


def test_the_split_is_by_seed_and_complete():
    rows = list(range(300))
    train, val = split_rows(rows, 1000, seed=5)
    assert len(val) == 30 and sorted(train + val) == rows
    assert (train, val) == split_rows(rows, 1000, seed=5) != split_rows(rows, 1000, seed=6)
    assert len(split_rows(rows, 7, seed=5)[1]) == 7


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(20, 200), st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_micro_batches_waste_least(lengths, limit, cost):
    lengths.sort()
    parts = cut_by_length(lengths, limit, cost)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))

    def price(parts):
        sizes = [len(part) * max(lengths[i] for i in part) for part in parts]
        fits = all(size <= limit or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
        return sum(sizes) + cost * len(parts) if fits else math.inf

    ways = []  # every way to cut
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        ways.append([range(a, b) for a, b in itertools.pairwise(edges)])
    assert price(parts) == min(map(price, ways))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ranks_share_every_global_batch_whatever_their_number(tokenizer, world_size):
    examples, _ = encode(ROWS[:21], tokenizer)

    def targets_of(step, ranks):
        batch = global_batch(examples, step, 8, 3)
        micros = [micro for rank in range(ranks) for micro in micro_batches(batch, 400, 20, rank, ranks)]
        return sorted(target for _, targets, _ in micros for target in targets[0].tolist())

    for step in (0, 1, 2, 5):
        assert targets_of(step, world_size) == targets_of(step, 1)


def test_every_epoch_has_each_example_once_in_another_order():
    examples = list(range(12))
    first, second = ([global_batch(examples, step, 4, 3) for step in steps] for steps in ((0, 1, 2), (3, 4, 5)))
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == examples and first != second
    across = [global_batch(examples, step, 8, 3) for step in (0, 1, 2)]  # the same order in other portions
    assert sum(across, []) == sum(first + second, [])


@pytest.mark.parametrize(
    "content,words",
    [
        ('[{"instruction": "a", "output": "b"}', ("not JSON in line 1",)),
        ('{"instruction": "a", "output": "b"}\n{"instruction": "a" "output"}\n', ("not JSON in line 2",)),
        ('[\n{"instruction": "a",\n "output": b}]', ("not JSON in line 3",)),
        ([row("a", "b"), dict(instruction="a")], ("row 2 of", "output is missing")),
        ([dict(output="b")], ("row 1 of", "instruction is missing")),
        ([row("a", 3)], ("row 1 of", "output is no text")),
        ([row("a", "b", input=3)], ("row 1 of", "input is no text")),
        (["a"], ("row 1 of", "is a str")),
        ([dict(messages="x")], ("row 1 of", "messages need a role")),
        ([dict(messages=[dict(role="user")])], ("row 1 of", "messages need a role")),
        ([dict(messages=[dict(role="robot", content="x")])], ("row 1 of", "messages need a role")),
        ([dict(messages=[dict(role="assistant", content="x")])], ("row 1 of", "the assistant speaks after nobody")),
    ],
)
def test_a_malformed_file_is_one_clear_line(tmp_path, content, words):
    path = write_json(tmp_path / "rows.json", content)
    with pytest.raises(UserError) as error:
        read_rows(str(path))
    assert all(word in str(error.value) for word in (*words, "rows.json")), error.value


def test_json_jsonl_and_messages_are_read_alike(tmp_path):
    rows = [row("Hi", "Ho", "there"), row("Say", "line\u2028separator")]
    messages = [dict(messages=messages_of(r, "")) for r in rows]
    lines = "\n".join(json.dumps(r, ensure_ascii=False) for r in rows) + "\n\n"
    files = {"a.json": rows, "b.jsonl": lines, "c.json": messages, "d.json": "\ufeff" + json.dumps(rows)}
    found = [read_rows(str(write_json(tmp_path / name, content))) for name, content in files.items()]
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][0] == [dict(role="user", content="Hi there"), dict(role="assistant", content="Ho")]


def test_alpaca_comes_from_the_hub_through_datasets(monkeypatch, tmp_path):
    import datasets

    asked = []

    def stand_in(repo, split):
        asked.append((repo, split))
        return datasets.Dataset.from_list([row("Hi", "Ho", "there") | dict(text="...")])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    found = load_rows("tatsu-lab/alpaca")
    assert asked == [("tatsu-lab/alpaca", "train")]
    assert found == [[dict(role="user", content="Hi there"), dict(role="assistant", content="Ho")]]


def test_without_a_network_the_remedy_is_named(monkeypatch):
    def stand_in(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr("datasets.load_dataset", stand_in)
    with pytest.raises(UserError, match="tatsu-lab/alpaca.*no route to host.*--data"):
        load_rows("tatsu-lab/alpaca")


@pytest.mark.parametrize("name", ["absent.json", "folder/absent.jsonl", "absent", "a/b/c", "./absent", "x" * 300])
def test_what_is_no_dataset_of_the_hub_is_a_file(monkeypatch, name):
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match=name[-10:]):
        load_rows(name)


GOOD = json.dumps(ROWS).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[", b"{", b"\x00", GOOD[: len(GOOD) // 2], b"[" * 100_000, b'{"messages": ' * 100_000, b"1" * 5000,
        json.dumps(ROWS).encode("utf-16"), "caf\u00e9".encode("latin-1"), b"PK\x03\x04", b"{}", b"3", b"null", b"NaN",
        b'{"instruction": NaN, "output": "x"}', b'[[]]', b'{"messages": null}', b"instruction,output\nHi,Ho\n",
    ],
    ids=range(19),
)  # fmt: skip
def test_a_file_that_holds_no_rows_is_one_line(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    try:
        assert read_rows(str(path)) == [] and not content  # an empty file has no rows
    except UserError as e:
        assert "rows.json" in str(e)


def test_a_directory_or_a_flipped_byte_is_one_line_or_other_rows(tmp_path):
    with pytest.raises(UserError, match="rows"):
        read_rows(str(tmp_path))
    path = tmp_path / "rows.json"
    for at in range(0, len(GOOD), 97):
        path.write_bytes(GOOD[:at] + bytes([GOOD[at] ^ 0x91]) + GOOD[at + 1 :])
        with contextlib.suppress(UserError):
            assert len(read_rows(str(path))) == len(ROWS)


def test_a_target_that_is_not_scored_is_the_one_of_the_model():
    assert IGNORED == CrossEntropyLoss().ignore_index


def test_it_needs_no_torch():
    program = "import sys, rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=240).returncode == 0
