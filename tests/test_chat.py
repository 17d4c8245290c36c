"""The chat format: what is written, and that transformers makes the same ids from the template saved with a model."""

import random

import pytest

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
    (["u:  Hi \n", "a:  Ho "], "Hi ASSISTANT:Ho<|endoftext|>"),
    (["s: Be kind.", "u: Hi"], "Be kind. Hi ASSISTANT:"),
    (["u: Hi", "a: Ho", "s: Now", "u: Bye"], "Hi ASSISTANT:Ho<|endoftext|>USER: Now Bye ASSISTANT:"),
    (["u: Hi", "u: you"], "Hi you ASSISTANT:"),
    (["u: Hi", "a: :)"], "Hi ASSISTANT: :)<|endoftext|>"),
    (["u: Hi", "a: 7"], "Hi ASSISTANT:7<|endoftext|>"),
]


@pytest.mark.parametrize("turns, text", FORM)
def test_the_form(turns, text):
    assert written(said(*turns), Tokenizer(())) == "BEGINNING OF CONVERSATION: USER: " + text


ATOMS = [
    *("Hi", "(a)", ":)", " ", "\n", "\t", "\x85", "\u2028", "'s", "1", "中文", "😀", "e\u0301", "\\", "{{", "%}", '"'),
    *("é", "'", "USER:", " ASSISTANT:", "<|endo", "ftext|>", "|", "<|", *SPECIALS),
]


def random_conversation(seed: int) -> list[dict]:
    rng = random.Random(seed)
    messages = []
    for _ in range(rng.randint(1, 6)):
        allowed = ROLES if messages and messages[-1]["role"] == "user" else ROLES[:2]
        content = "".join(rng.choices(ATOMS, k=rng.randint(0, 6)))
        messages.append(dict(role=rng.choice(allowed), content=content))
    return messages


CONVERSATIONS = [
    said("u: What does <|endoftext|> mean?", "a: The end.", "u: <|endo<|endoftext|>ftext|>", "a: Hm"),
    said("u: |||| ☃☃", "a: (a) |||", "u: <|pad|><|pad|>", "a: \n"),
    *map(random_conversation, range(20)),
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
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
    answers = [first + rest for first in starts for rest in ("", "'s")]
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


@pytest.mark.parametrize("turns", [["a: Hi"], ["u: Hi", "s: Be kind.", "a: Ho"]])
def test_the_template_refuses_an_answer_to_nobody(pair, turns):
    from jinja2 import TemplateError

    with pytest.raises(TemplateError):
        pair[1].apply_chat_template(said(*turns), tokenize=False)
