"""The chat format, shared by finetuning, sampling and servers.

    BEGINNING OF CONVERSATION: USER: Hi ASSISTANT:Hello.<|endoftext|>USER: Bye ASSISTANT:Take care.<|endoftext|>

- `pieces` writes a conversation in this form and marks the answers, which finetuning trains on; `chat_ids` returns its
  tokens. A conversation is a list of dicts with `role` (system, user, assistant) and `content`
- `template` is the same form in Jinja, which transformers, vLLM and web clients apply to a list of messages;
  `save_chat_files` writes it into a model's directory. They tokenize its text as a whole, we piece by piece; both give
  the same ids

That takes three rules, which both sides follow:
- contents are stripped; a system message, and each message of a user who writes twice, joins the user's next turn
- where the tokenizer would merge the colon of `ASSISTANT:` with the start of an answer, as in `:(`, a space separates
  them. GPT-2's pattern never merges it with a letter or a digit, so most answers follow it directly
- the first and last characters of a special token in a message become spaces: `<|endoftext|>` arrives as
  ` |endoftext| `. So nobody can end a turn by writing it, not even on a server, which looks for special tokens anywhere

This file knows nothing of torch, models, or files of rows.
"""

import json
import string
from pathlib import Path

import regex

from bpe.tokenizer import ENDOFTEXT, Tokenizer
from parts.cli import UserError
from parts.files import read_json

START = "BEGINNING OF CONVERSATION: "
USER = "USER: "
ASSISTANT = " ASSISTANT:"


def check_tokenizer(tokenizer: Tokenizer, base: str) -> None:
    """Raises UserError for a tokenizer that cannot express the chat format."""
    if tokenizer.eot_token is None:
        raise UserError(f"the tokenizer of {base} has no {ENDOFTEXT}, which ends an answer; choose another base")


def pieces(messages: list[dict], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """A conversation as texts, each with a flag: True for an answer, which <|endoftext|> follows."""
    texts = []
    said = []  # what the assistant has not answered yet
    for message in messages:
        text = clean(message["content"], tokenizer)
        if message["role"] != "assistant":
            said.append(text)
            continue
        texts.append((turn(said, first=not texts), False))
        gap = "" if text[:1] in follows_directly(tokenizer) else " "
        texts.append((gap + text, True))
        said = []
    if said:  # the user spoke last: the text ends with `ASSISTANT:`, and the model continues from there
        texts.append((turn(said, first=not texts), False))
    return texts


def turn(said: list[str], first: bool) -> str:
    """What the user says, and the `ASSISTANT:` that the answer follows."""
    return (START if first else "") + USER + " ".join(filter(None, said)) + ASSISTANT


def clean(text: str, tokenizer: Tokenizer) -> str:
    """A message's content as the model reads it: stripped, and without special tokens."""
    for special in tokenizer.special_tokens:  # in any order: the spaces cannot complete another one
        text = text.replace(special, neutralize(special))
    return text.strip()


def neutralize(special: str) -> str:
    """Replace both ends, or an overlapping token would survive: `||` occurs three times in `||||`."""
    return f" {special[1:-1]} "


def follows_directly(tokenizer: Tokenizer) -> str:
    """The characters that may follow the colon directly, because the pattern always splits there.

    GPT-2's pattern does so before every letter and digit. ASCII is enough for us, and any Jinja can look it up. GPT-4's
    pattern may take the colon as the start of a word, so there a space precedes every answer.
    """
    # merges never cross a split, so both sides get the ids that they have as separate texts
    apart = regex.findall(tokenizer.pattern, ":A1") == [":", "A", "1"]
    return string.ascii_letters + string.digits if apart else ""


def chat_ids(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """The tokens of a conversation. If the user spoke last, the model's answer comes next."""
    ids = []
    for text, is_answer in pieces(messages, tokenizer):
        ids += tokenizer.encode_ordinary(text)
        if is_answer:
            ids.append(tokenizer.eot_token)
    return ids


def prompt_of(text: str, tokenizer: Tokenizer) -> str:
    """What the model reads before it answers `text`, the first message."""
    return turn([clean(text, tokenizer)], first=True)


# ------------------------------------------------------------------------------------------------ the same in Jinja

# The dashes in each tag remove the white space of this layout. `template` fills in the words in capitals. Only filters,
# slices and `in`: a Jinja in C++ or JavaScript may lack the methods of Python's str. `generation` is an extension of
# transformers that marks what a model writes, for training elsewhere (assistant_only_loss of TRL); the engines of
# llama.cpp, vLLM and transformers.js take it.
TEMPLATE = """\
{%- set ns = namespace(start=START, said='', before='nobody') -%}
{%- for message in messages -%}
    {%- set text = message['content'] CLEAN | trim -%}
    {%- if message['role'] == 'assistant' -%}
        {%- if ns.before != 'user' -%}
            {{- raise_exception('the assistant speaks after ' + ns.before + ', and can only answer the user') -}}
        {%- endif -%}
        {{- ns.start + USER + ns.said + ASSISTANT -}}
        {%- generation -%}
            {{- ('' if text[:1] in DIRECTLY else ' ') + text + ENDOFTEXT -}}
        {%- endgeneration -%}
        {%- set ns.start = '' -%}
        {%- set ns.said = '' -%}
    {%- elif message['role'] == 'user' or message['role'] == 'system' -%}
        {%- set ns.said = (ns.said + ' ' + text) | trim -%}
    {%- else -%}
        {{- raise_exception('messages have the role system, user or assistant, not ' + message['role']) -}}
    {%- endif -%}
    {%- set ns.before = message['role'] -%}
{%- endfor -%}
{%- if ns.before == 'user' or ns.before == 'system' -%}
    {{- ns.start + USER + ns.said -}}
    {%- if add_generation_prompt -%}
        {{- ASSISTANT -}}
    {%- endif -%}
{%- endif -%}
"""


def template(tokenizer: Tokenizer) -> str:
    """The chat template of a model that was finetuned with this tokenizer."""
    words = dict(START=START, USER=USER, ASSISTANT=ASSISTANT, ENDOFTEXT=ENDOFTEXT, DIRECTLY=follows_directly(tokenizer))
    words = {name: repr(value) for name, value in words.items()}
    # repr escapes quotes and backslashes in a special token, and its quotes contain any braces
    words["CLEAN"] = " ".join(f"| replace({s!r}, {neutralize(s)!r})" for s in tokenizer.special_tokens)
    return regex.sub("|".join(words), lambda match: words[match[0]], TEMPLATE)


def save_chat_files(path: Path, tokenizer: Tokenizer) -> None:
    """Write what a chat needs besides weights: tokenizer, template, and the token that ends an answer."""
    if not (path / "tokenizer.json").exists():  # beside a model it is there
        tokenizer.save(path)
    (path / "chat_template.jinja").write_text(template(tokenizer), encoding="utf-8")
    # transformers.js and older servers look for the template here only; transformers prefers the file
    file = path / "tokenizer_config.json"
    content = read_json(file) | dict(chat_template=template(tokenizer))
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    settings = path / "generation_config.json"
    if not settings.exists():  # a model has its own, with the same settings
        eot = tokenizer.eot_token
        content = dict(do_sample=True, top_k=50, bos_token_id=eot, eos_token_id=eot)
        settings.write_text(json.dumps(content, indent=2) + "\n")
