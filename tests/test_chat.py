"""The chat format: what is written, and that transformers makes the same ids from the template saved with a model."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bpe.tokenizer import Tokenizer
from parts import chat
from parts.conversations import ROLES
from tests.finetuning import said, written
from tests.helpers import assert_refused, prose, read_json

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


def test_no_turns_are_no_text():
    assert written([], Tokenizer(())) == ""


def test_a_prompt_is_a_first_message():
    tokenizer = Tokenizer(())
    assert chat.prompt_of(" Hi\n", tokenizer) == written(said("u: Hi"), tokenizer)


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


@settings(max_examples=150, deadline=None)
@given(messages=conversations())
@example(messages=said("u: What does <|endoftext|> mean?", "a: The end.", "u: <|endo<|endoftext|>ftext|>"))
@example(messages=said("u: |||| ☃☃", "a: (a) |||", "u: <|pad|><|pad|>"))
def test_transformers_renders_the_ids_that_training_uses(pair, messages):
    ours, theirs = pair
    ids = chat.chat_ids(ours, messages)  # of encode_ordinary: nobody can end a turn by writing the token's name
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_assistant_tokens_mask=True)
    assert ids == rendered["input_ids"]
    trained_on = []
    for text, is_answer in chat.pieces(messages, ours):
        trained_on += [is_answer] * (len(ours.encode_ordinary(text)) + is_answer)
    assert rendered["assistant_masks"] == trained_on


def test_without_a_prompt_for_the_answer_and_in_the_middle_of_one(pair):
    ours, theirs = pair
    messages = said("s: Be kind.", "u: Hi (you)")
    ids = theirs.apply_chat_template(messages, add_generation_prompt=False, return_dict=False)
    whole = chat.chat_ids(ours, messages)
    assert whole[: len(ids)] == ids
    assert ours.decode(whole[len(ids) :]) == " ASSISTANT:"
    messages = said("u: Hi", "a: Once upon")
    ids = theirs.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    assert ids == chat.chat_ids(ours, messages)[:-1]


def test_the_characters_that_follow_directly_do_so_in_every_text(pair):
    """The rule looks at one character; the pattern may look at all of them."""
    ours, _ = pair
    for first in map(chr, [*range(33, 0x250), *range(0x250, 0x3000, 53)]):
        for rest in ("", "a", " a", "'s", "1"):
            messages = said("u: Hi", "a: " + first + rest)
            whole = ours.encode(written(messages, ours), allowed_special="all")
            assert whole == chat.chat_ids(ours, messages), (first, rest)


def test_answers_end_where_the_template_ends_them(pair, tmp_path):
    ours, _ = pair
    chat.save_chat_files(tmp_path, ours)
    content = read_json(tmp_path / "generation_config.json")
    assert content == dict(do_sample=True, top_k=50, bos_token_id=ours.eot_token, eos_token_id=ours.eot_token)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')  # a model's own stays
    chat.save_chat_files(tmp_path, ours)
    assert read_json(tmp_path / "generation_config.json") == {"eos_token_id": 7}


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


DISORDERLY = [
    [dict(role="robot", content="x")], said("a: Hi"), said("u: Hi", "a: Ho", "a: Ho"),
    said("u: Hi", "s: Be kind.", "a: Ho"),
]  # fmt: skip


@pytest.mark.parametrize("messages", DISORDERLY)
def test_the_template_refuses_the_same_orders_and_roles(pair, messages):
    from jinja2 import TemplateError

    with pytest.raises(TemplateError):
        pair[1].apply_chat_template(messages, tokenize=False)


def test_a_tokenizer_without_an_end_is_refused():
    assert_refused("no <|endoftext|>", chat.check_tokenizer, Tokenizer((), special_tokens=("<|pad|>",)), "base")
