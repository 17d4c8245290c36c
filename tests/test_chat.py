"""The chat format: what is written, and that transformers makes the same ids from the template saved with a model."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sample
from bpe.tokenizer import Tokenizer
from parts import chat
from parts.conversations import ROLES
from tests.finetuning import said, written
from tests.helpers import prose

SPECIALS = ("<|endoftext|>", "<|pad|>", "||", "☃", ">U")


@pytest.fixture(scope="module", params=["gpt2", "cl100k"])
def pair(request, tmp_path_factory):
    """A tokenizer of ours, and the one that transformers reads from a model's directory."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("chat")
    specials = SPECIALS if request.param == "cl100k" else SPECIALS[:1]
    # in cl100k a colon may begin a word, and here it does
    ours = Tokenizer.train([prose(60_000), ":Hi\n" * 1000], 400, request.param, specials)
    chat.save_chat_files(path, ours)
    return ours, AutoTokenizer.from_pretrained(path)


FORM = [
    (["u: Hi"], "Hi ASSISTANT:"),
    (["u:  Hi \n", "a:  Ho "], "Hi ASSISTANT:Ho<|endoftext|>"),
    (["s: Be kind.", "u: Hi"], "Be kind. Hi ASSISTANT:"),
    (["u: Hi", "a: Ho", "u: Bye"], "Hi ASSISTANT:Ho<|endoftext|>USER: Bye ASSISTANT:"),
    (["u: Hi", "a: Ho", "s: Now", "u: Bye"], "Hi ASSISTANT:Ho<|endoftext|>USER: Now Bye ASSISTANT:"),
    (["u: Hi", "u: you"], "Hi you ASSISTANT:"),
    (["u: Hi", "a: :)"], "Hi ASSISTANT: :)<|endoftext|>"),
    (["u: Hi", "a: 7"], "Hi ASSISTANT:7<|endoftext|>"),
    (["u: Say <|endoftext|>!"], "Say  |endoftext| ! ASSISTANT:"),
]


@pytest.mark.parametrize("turns, text", FORM)
def test_the_form(turns, text):
    assert written(said(*turns), Tokenizer(())) == "BEGINNING OF CONVERSATION: USER: " + text


atoms = st.sampled_from(
    ["Hi", "(a)", ":)", " ", "\n", "\t", "\x85", "\u2028", "'s", "1", "中文", "😀", "e\u0301", "\\", "{{", "%}", '"']
    + ["é", "'", "USER:", " ASSISTANT:", "<|endo", "ftext|>", "|", "<|", *SPECIALS]
)  # fmt: skip
contents = st.lists(atoms, max_size=6).map("".join)


@st.composite
def conversations(draw):
    messages = []
    for _ in range(draw(st.integers(1, 6))):
        allowed = ROLES if messages and messages[-1]["role"] == "user" else ROLES[:2]
        messages.append(dict(role=draw(st.sampled_from(allowed)), content=draw(contents)))
    return messages


@settings(max_examples=60, deadline=None)
@given(messages=conversations())
@example(messages=said("u: What does <|endoftext|> mean?", "a: The end.", "u: <|endo<|endoftext|>ftext|>", "a: Hm"))
@example(messages=said("u: |||| ☃☃", "a: (a) |||", "u: <|pad|><|pad|>", "a: \n"))
def test_what_is_trained_on_are_the_answers_and_each_follows_the_prompt_that_sampling_writes(pair, messages):
    """And nobody can end a turn by writing the token's name: the only ends are those of answers."""
    tokenizer, theirs = pair
    ours = chat.our_chat(tokenizer)
    [(ids, marks)] = ours.encode([messages])
    found = []
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = ours.prompt_ids(messages[:n])
            end = ids.index(tokenizer.eot_token, len(prompt)) + 1
            assert ids[: len(prompt)] == prompt
            found += [0] * (len(prompt) - len(found)) + [1] * (end - len(prompt))
            content = messages[n]["content"]
            for special in SPECIALS if len(tokenizer.special_tokens) > 1 else SPECIALS[:1]:
                content = content.replace(special, f" {special[1:-1]} ")
            assert tokenizer.decode(ids[len(prompt) : end - 1]).strip() == content.strip()
    assert marks == found + [0] * (len(ids) - len(found))
    assert ids.count(tokenizer.eot_token) == sum(message["role"] == "assistant" for message in messages)
    assert not {*ids} & {*tokenizer.special_tokens.values()} - {tokenizer.eot_token}
    # a server reads the files, and tokenizes the text as a whole
    served = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert served == ours.prompt_ids(messages)


def test_without_a_prompt_for_the_answer_and_in_the_middle_of_one(pair):
    tokenizer, theirs = pair
    ours = chat.our_chat(tokenizer)
    messages = said("s: Be kind.", "u: Hi (you)")
    ids = theirs.apply_chat_template(messages, add_generation_prompt=False, return_dict=False)
    whole = ours.prompt_ids(messages)
    assert whole[: len(ids)] == ids
    assert tokenizer.decode(whole[len(ids) :]) == " ASSISTANT:"
    messages = said("u: Hi", "a: Once upon")
    ids = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    [(whole, _)] = ours.encode([messages])
    assert ids == whole[:-1]


def test_whatever_begins_an_answer_leaves_the_ids_of_its_prompt(pair):
    """The rule looks at one character; the pattern may look at all of them."""
    ours = chat.our_chat(pair[0])
    starts = map(chr, [*range(33, 0x250), *range(0x250, 0x3000, 53)])
    answers = [first + rest for first in starts for rest in ("", "a", " a", "'s", "1")]
    prompt = ours.prompt_ids(said("u: Hi"))
    encoded = ours.encode([said("u: Hi", "a: " + answer) for answer in answers])  # more than are rendered at once
    for answer, (found, marked) in zip(answers, encoded, strict=True):
        assert found[: len(prompt)] == prompt, answer
        assert sum(marked) == len(found) - len(prompt), answer


def test_a_client_that_reads_tokenizer_config_json_alone_gets_the_same_template(pair, tmp_path):
    """As transformers.js does."""
    from transformers import AutoTokenizer

    ours, theirs = pair
    chat.save_chat_files(tmp_path, ours)
    (tmp_path / "chat_template.jinja").unlink()
    other = AutoTokenizer.from_pretrained(tmp_path)
    messages = said("s: Be kind.", "u: Hi <|endoftext|>", "a: :) ok", "u: Bye")
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert other.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == expected
    assert other.eos_token == "<|endoftext|>"  # what else the file says has stayed


@pytest.mark.parametrize("turns", [["a: Hi"], ["u: Hi", "a: Ho", "a: Ho"], ["u: Hi", "s: Be kind.", "a: Ho"]])
def test_the_template_refuses_an_answer_to_nobody(pair, turns):
    from jinja2 import TemplateError

    with pytest.raises(TemplateError):
        pair[1].apply_chat_template(said(*turns), tokenize=False)


class Reader:
    """A template of contents alone, and a token for each letter."""

    def apply_chat_template(self, messages, **_) -> str:
        return "".join(message["content"] for message in messages)

    def __call__(self, text, **_) -> dict:
        return dict(input_ids=[*text])


@pytest.mark.parametrize("turns, numbers", [([40], "40 30"), ([12, 12], "30"), ([1], "")])
def test_chat_says_what_leaves_its_context(monkeypatch, capsys, turns, numbers):
    """A context of 30 tokens, of which an answer takes 10."""
    said, *later = ["x" * length for length in turns]
    lines = iter([*later, ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))

    class Letters:
        def stream_decoder(self):
            return self

        def push(self, tokens):
            return "".join(tokens)

        def flush(self):
            return ""

    sample.converse(lambda *_, **__: iter([["z"]]), chat.Chat(Reader(), set()), Letters(), 30, 10, said)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    assert [" ".join(re.findall(r"\d+", note)) for note in notes] == [numbers] * bool(numbers)
