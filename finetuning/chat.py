"""The chat format, in the one place that finetuning, sampling and servers share.

    BEGINNING OF CONVERSATION: USER: Hi ASSISTANT:Hello.<|endoftext|>USER: Bye ASSISTANT:Take care.<|endoftext|>

- `pieces` writes a conversation in this form and marks the answers, which are what finetuning trains on; `chat_ids` are
  its tokens. A conversation is a list of dicts with `role` (system, user, assistant) and `content`
- `template` is the same form in Jinja, which transformers, vLLM and web clients apply to a list of messages;
  `save_chat_files` puts it beside a model. Its text is tokenized as a whole, ours piece by piece, and the ids are equal

Three rules see to that, and both sides follow them:
- contents are stripped; what the system says, and every message of a user who writes twice, joins the user's next turn
- where the tokenizer would join the colon of `ASSISTANT:` with the beginning of an answer, as in `:(`, a space stands
  between them. GPT-2's pattern never joins it with a letter or a digit, so that most answers follow it directly
- a special token in a content loses its ends to spaces: `<|endoftext|>` arrives as ` |endoftext| `. Nobody can end a
  turn by writing this word, neither here nor on a server, which looks for special tokens in all of its text

This file knows nothing of torch, models, or files of rows.
"""

import json
import string
from pathlib import Path

import regex

from bpe.tokenizer import ENDOFTEXT, Tokenizer

START, USER, ASSISTANT = "BEGINNING OF CONVERSATION: ", "USER: ", " ASSISTANT:"
ROLES = ("system", "user", "assistant")


def check_messages(messages: list) -> None:
    """Raises ValueError for what is no conversation."""
    before = None
    for message in messages if isinstance(messages, list) else [None]:
        fine = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not fine or message.get("role") not in ROLES:
            raise ValueError(f"messages need a role ({', '.join(ROLES)}) and a content of text each")
        if message["role"] == "assistant" and before != "user":
            raise ValueError(f"the assistant speaks after {before or 'nobody'}, and can only answer the user")
        before = message["role"]


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Raises ValueError for a tokenizer in which the form cannot be written."""
    if tokenizer.eot_token is None:
        raise ValueError(f"it has no {ENDOFTEXT}, which ends an answer")
    for special in tokenizer.special_tokens:
        if any(map(str.isspace, special)) or special in START + USER + ASSISTANT:
            raise ValueError(f"its special token {special!r} is part of the chat format or has a space in it")


def pieces(messages: list[dict], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """A conversation as texts, each with whether it is an answer, after which <|endoftext|> follows."""
    texts, said = [], []  # said: what nobody has answered yet
    for message in messages:
        text = clean(message["content"], tokenizer)
        if message["role"] != "assistant":
            said.append(text)
            continue
        texts.append((turn(said, first=not texts), False))
        gap = "" if text[:1] in follows_directly(tokenizer) else " "
        texts.append((gap + text, True))
        said = []
    # a conversation that ends with the user ends with the word after which the model goes on
    return texts + ([(turn(said, first=not texts), False)] if said else [])


def turn(said: list[str], first: bool) -> str:
    """What the user says, and the word after which the model answers."""
    return (START if first else "") + USER + " ".join(filter(None, said)) + ASSISTANT


def clean(text: str, tokenizer: Tokenizer) -> str:
    """A content as the model reads it: no special tokens, no blanks around it."""
    for special in tokenizer.special_tokens:  # their order does not matter: a space cannot complete another one
        text = text.replace(special, blunt(special))
    return text.strip()


def blunt(special: str) -> str:
    """Both ends go, or a second token that overlaps with the first would be left whole: `||` three times in `||||`."""
    return f" {special[1:-1]} "


def follows_directly(tokenizer: Tokenizer) -> str:
    """The characters with which an answer may begin right after the colon: the pattern makes a cut there.

    GPT-2's does so before all letters and digits. ASCII is enough for us, and any Jinja can look it up. GPT-4's pattern
    takes the colon for the beginning of a word, so that there a space precedes every answer.
    """
    # a merge never crosses a cut, so that the ids on either side are those of two texts of their own
    apart = regex.findall(tokenizer.pattern, ":A1") == [":", "A", "1"]
    return string.ascii_letters + string.digits if apart else ""


def chat_ids(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    """The tokens of a conversation; one that ends with the user is ready for the answer."""
    ids = []
    for text, is_answer in pieces(messages, tokenizer):
        ids += tokenizer.encode_ordinary(text) + [tokenizer.eot_token] * is_answer
    return ids


def prompt_of(text: str, tokenizer: Tokenizer) -> str:
    """What the model reads before it answers a first message."""
    return pieces([dict(role="user", content=text)], tokenizer)[0][0]


# ------------------------------------------------------------------------------------------------ the same in Jinja

# Every tag has its dashes, which take the white space of this layout away. The words in capitals are filled in.
# Filters, slices and `in` do without the methods of Python's str, which a Jinja in C++ or JavaScript may lack.
TEMPLATE = """\
{%- set ns = namespace(start=START, said='', before='nobody') -%}
{%- for message in messages -%}
    {%- set text = message['content'] CLEAN | trim -%}
    {%- if message['role'] == 'assistant' -%}
        {%- if ns.before != 'user' -%}
            {{- raise_exception('the assistant speaks after ' + ns.before + ', and can only answer the user') -}}
        {%- endif -%}
        {{- ns.start + USER + ns.said + ASSISTANT + ('' if text[:1] in DIRECTLY else ' ') + text + ENDOFTEXT -}}
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
    # repr: quotes, backslashes and braces in a special token stay inside the string
    words["CLEAN"] = " ".join(f"| replace({s!r}, {blunt(s)!r})" for s in tokenizer.special_tokens)
    return regex.sub("|".join(words), lambda match: words[match[0]], TEMPLATE)


def save_chat_files(path: Path, tokenizer: Tokenizer) -> None:
    """Write what a chat needs besides weights: tokenizer, chat_template.jinja, and where an answer ends."""
    tokenizer.save(path)
    (path / "chat_template.jinja").write_text(template(tokenizer), encoding="utf-8")
    if not (path / "generation_config.json").exists():  # a model comes with its own, which says the same
        eot = tokenizer.eot_token
        content = dict(do_sample=True, top_k=50, bos_token_id=eot, eos_token_id=eot)
        (path / "generation_config.json").write_text(json.dumps(content, indent=2) + "\n")
