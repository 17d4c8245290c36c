"""The chat format, shared by finetuning, sampling and servers: a Jinja template that is saved with a model.

    BEGINNING OF CONVERSATION: USER: Hi ASSISTANT:Hello.<|endoftext|>USER: Bye ASSISTANT:Take care.<|endoftext|>

A conversation is a list of messages, dicts with `role` (system, user, assistant) and `content`. `Chat` renders it by
transformers' `apply_chat_template`, as servers do: for training with a mask of the answers, for sampling up to where
the model continues. A model that was finetuned elsewhere has a template of its own, which `chat_of` takes. In ours:

- contents are stripped; a system message, and each message of a user who writes twice, joins the user's next turn
- where the tokenizer could merge the colon of `ASSISTANT:` with the start of an answer, as in `:(`, a space separates
  them, so that a prompt ends with the ids that it had in training
- the first and last characters of a special token in a message become spaces: `<|endoftext|>` arrives as
  ` |endoftext| `. So nobody can end a turn by writing it: transformers looks for special tokens anywhere

This file knows nothing of torch, models, or files of rows.
"""

import json
import string
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import regex

from bpe.tokenizer import ENDOFTEXT, Tokenizer
from parts.cli import UserError
from parts.files import read_json

AT_ONCE = 1000  # conversations to render: what the library keeps about each token takes a hundred times its id's memory

# The dashes in each tag remove the white space of this layout. `template` fills in the words in capitals. Only filters,
# slices and `in`: a Jinja in C++ or JavaScript may lack the methods of Python's str. `generation` is an extension of
# transformers that marks what a model writes, for training here and elsewhere (assistant_only_loss of TRL); the engines
# of llama.cpp, vLLM and transformers.js take it.
TEMPLATE = """\
{%- set ns = namespace(start='BEGINNING OF CONVERSATION: ', said='', before='nobody') -%}
{%- for message in messages -%}
    {%- set text = message['content'] CLEAN | trim -%}
    {%- if message['role'] == 'assistant' -%}
        {%- if ns.before != 'user' -%}
            {{- raise_exception('the assistant speaks after ' + ns.before + ', and can only answer the user') -}}
        {%- endif -%}
        {{- ns.start + 'USER: ' + ns.said + ' ASSISTANT:' -}}
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
    {{- ns.start + 'USER: ' + ns.said -}}
    {%- if add_generation_prompt -%}
        {{- ' ASSISTANT:' -}}
    {%- endif -%}
{%- endif -%}
"""


def template(tokenizer: Tokenizer) -> str:
    """Our chat template, for a model with this tokenizer."""
    words = dict(ENDOFTEXT=repr(ENDOFTEXT), DIRECTLY=repr(follows_directly(tokenizer)))
    # Both ends are replaced, or an overlapping token would survive: `||` occurs three times in `||||`. repr escapes
    # quotes and backslashes in a special token, and its quotes contain any braces.
    cleaned = [f"| replace({special!r}, {f' {special[1:-1]} '!r})" for special in tokenizer.special_tokens]
    words["CLEAN"] = " ".join(cleaned)
    return regex.sub(r"\b(CLEAN|DIRECTLY|ENDOFTEXT)\b", lambda match: words[match[0]], TEMPLATE)


def follows_directly(tokenizer: Tokenizer) -> str:
    """The characters that may follow the colon directly: ASCII letters and digits, unless a token joins them.

    None of GPT-2's does, since its split pattern starts a new word there. GPT-4's may take the colon as the start of a
    word, so that with such a vocabulary a space precedes every answer.
    """
    merged = any(regex.search(rb":[A-Za-z0-9]", token) for token in tokenizer.vocab.values())
    return "" if merged else string.ascii_letters + string.digits


# ---------------------------------------------------------------------------------------------------------- rendering


@dataclass(frozen=True)
class Chat:
    """Conversations as the tokens of one model."""

    reader: object  # a tokenizer of transformers, with the chat template
    end_tokens: set[int]  # ids that end an answer
    whose: str = ""  # the directory that the template comes from; "" for ours

    def encode(self, conversations: list[list[dict]]) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of each conversation, and as many marks: 1 in an answer and its end, else 0."""
        ids = []
        marks = []
        options = dict(return_dict=True, return_assistant_tokens_mask=True)
        for start in range(0, len(conversations), AT_ONCE):
            found = self.reader.apply_chat_template(conversations[start : start + AT_ONCE], **options)
            ids += found["input_ids"]
            marks += found["assistant_masks"]
        return ids, marks

    def prompt(self, messages: list[dict]) -> str:
        """What the model reads before it answers. Raises UserError for messages that the template refuses."""
        from jinja2 import TemplateError

        try:
            text = self.reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            if not text:
                raise ValueError("it writes nothing")
            return text
        except (TemplateError, TypeError, ValueError) as e:  # the last two are of what a template computes
            raise UserError(
                f"the chat template of {self.whose or 'this project'} refuses these messages: {e}"
            ) from None

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        return self.reader(self.prompt(messages), add_special_tokens=False, verbose=False)["input_ids"]


def our_chat(tokenizer: Tokenizer, model: str = "the model") -> Chat:
    """Our format. Raises UserError for a tokenizer that cannot express it."""
    if tokenizer.eot_token is None:
        raise UserError(f"the tokenizer of {model} has no {ENDOFTEXT}, which ends an answer; choose another model")
    reader = tokenizer.to_transformers()
    reader.chat_template = template(tokenizer)
    return Chat(reader, {tokenizer.eot_token})


def chat_of(folders: list[Path], tokenizer: Tokenizer, model: str) -> Chat:
    """The chat of the first of these directories that has a template; else ours. An answer also ends at every token
    that the files of one of them name as an end."""
    from transformers import AutoTokenizer

    ends = end_tokens(folders, tokenizer)
    for folder in folders:
        if not (folder / "tokenizer_config.json").is_file():  # an adapter may come without a tokenizer
            continue
        try:
            reader = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            if reader.chat_template:
                reader.chat_template = reader.get_chat_template()  # of several the one for conversations
        except Exception as e:  # of each kind of tokenizer its own
            raise UserError(f"transformers cannot read the tokenizer of {folder}: {e}; mend its files") from e
        if reader.chat_template:
            return Chat(reader, ends | end_of_turn(reader, tokenizer), str(folder))
    return replace(our_chat(tokenizer, model), end_tokens=ends)


def end_tokens(folders: list[Path], tokenizer: Tokenizer) -> set[int]:
    """The ids that these directories' files name as the end of what a model writes."""
    ids = {tokenizer.eot_token}
    for folder in folders:
        for name in ("generation_config.json", "config.json"):
            named = settings_of(folder, name).get("eos_token_id")
            ids.update(named if isinstance(named, list) else [named])
        token = settings_of(folder, "tokenizer_config.json").get("eos_token")
        ids.add(tokenizer.special_tokens.get(token["content"] if isinstance(token, dict) else token))
    return ids & tokenizer.vocab.keys()


def settings_of(folder: Path, name: str) -> dict:
    return read_json(folder / name) if (folder / name).is_file() else {}


def end_of_turn(reader, tokenizer: Tokenizer) -> set[int]:
    """The special token that a template writes after an answer, perhaps after white space: it ends the answer, whatever
    the files name."""
    from jinja2 import TemplateError

    answer = "Xyzzy"
    messages = [dict(role="user", content="Hi"), dict(role="assistant", content=answer)]
    after = ""
    with suppress(TemplateError, TypeError, ValueError):  # it may want other messages
        after = reader.apply_chat_template(messages, tokenize=False).rpartition(answer)[2].lstrip()
    return {i for special, i in tokenizer.special_tokens.items() if after.startswith(special)}


# ---------------------------------------------------------------------------------------------------------- writing


def save_chat_files(path: Path, tokenizer: Tokenizer) -> None:
    """Write what a chat in our format needs besides weights: tokenizer, template, and the token that ends an answer."""
    if not (path / "tokenizer.json").exists():  # beside a model it is there
        tokenizer.save(path)
    write_template(path, template(tokenizer))
    settings = path / "generation_config.json"
    if not settings.exists():  # a model has its own, with the same settings
        eot = tokenizer.eot_token
        content = dict(do_sample=True, top_k=50, bos_token_id=eot, eos_token_id=eot)
        settings.write_text(json.dumps(content, indent=2) + "\n")


def write_template(path: Path, text: str, tokens: dict | None = None) -> None:
    (path / "chat_template.jinja").write_text(text, encoding="utf-8")
    # transformers.js and older servers look for the template here only; transformers prefers the file
    file = path / "tokenizer_config.json"
    content = read_json(file) | (tokens or {}) | dict(chat_template=text)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def copy_chat_files(folders: list[Path], path: Path, tokenizer: Tokenizer) -> str:
    """Give the model in `path` the template of the first of `folders` that has one, with the tokens that it may name,
    and all ends that they name. Returns that folder, "" if none has one."""
    chat = chat_of(folders, tokenizer, str(path))
    if chat.whose:
        write_template(path, chat.reader.chat_template, chat.reader.special_tokens_map)
        settings = path / "generation_config.json"
        ends = sorted(chat.end_tokens)
        content = read_json(settings) | dict(eos_token_id=ends if len(ends) > 1 else ends[0])
        settings.write_text(json.dumps(content, indent=2) + "\n")
    return chat.whose
