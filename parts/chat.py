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

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bpe.chunks import PATTERNS
from bpe.tokenizer import ENDOFTEXT, Tokenizer
from parts.cli import UserError
from parts.files import read_json, write_json

TEMPLATE_FILE = "chat_template.jinja"
AT_ONCE = 1000  # conversations to render: what the library keeps about each token takes a hundred times its id's memory

# The dashes in each tag remove the white space of this layout. `template` fills in the words in capitals. Only filters,
# slices and `in`: a Jinja in C++ or JavaScript may lack the methods of Python's str. `generation` is an extension of
# transformers that marks what a model writes, for training here and elsewhere (assistant_only_loss of TRL); the engines
# of llama.cpp, vLLM and transformers.js take it.
TEMPLATE = """\
{%- set ns = namespace(start='BEGINNING OF CONVERSATION: ', said='', before='nobody') -%}
{%- for message in messages -%}
    {%- set text = message['content'] CLEAN | trim -%}
    {%- if message['role'] == 'assistant' and ns.before == 'user' -%}
        {{- ns.start + 'USER: ' + ns.said + ' ASSISTANT:' -}}
        {%- generation -%}
            {{- ('' if text[:1] in DIRECTLY else ' ') + text + ENDOFTEXT -}}
        {%- endgeneration -%}
        {%- set ns.start = '' -%}
        {%- set ns.said = '' -%}
    {%- elif message['role'] == 'user' or message['role'] == 'system' -%}
        {%- set ns.said = (ns.said + ' ' + text) | trim -%}
    {%- else -%}
        {{- raise_exception(message['role'] + ' after ' + ns.before + ': let an assistant answer a user') -}}
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
    """Write our chat template, for a model with this tokenizer."""
    # Both ends are replaced, or an overlapping token would survive: `||` occurs three times in `||||`. repr escapes
    # quotes and backslashes in a special token, and its quotes contain any braces.
    cleaned = [f"| replace({special!r}, {f' {special[1:-1]} '!r})" for special in tokenizer.special_tokens]
    # GPT-2's split pattern starts a new word after the colon; others may take the colon as the start of a word, so that
    # a space precedes every answer there
    directly = string.ascii_letters + string.digits if tokenizer.pattern == PATTERNS["gpt2"][0] else ""
    ours = TEMPLATE.replace("ENDOFTEXT", repr(ENDOFTEXT)).replace("DIRECTLY", repr(directly))
    return ours.replace("CLEAN", " ".join(cleaned))


# ---------------------------------------------------------------------------------------------------------- rendering


@dataclass(frozen=True)
class Chat:
    """Conversations as the tokens of one model."""

    reader: object  # a tokenizer of transformers, with the chat template
    end_tokens: set[int]  # ids that end an answer
    whose: str = ""  # the directory that the template comes from; "" for ours

    def encode(self, conversations: list[list[dict]]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield each conversation's ids, and as many marks: 1 in an answer and its end, else 0."""
        options = dict(return_dict=True, return_assistant_tokens_mask=True)
        for start in range(0, len(conversations), AT_ONCE):
            found = self.reader.apply_chat_template(conversations[start : start + AT_ONCE], **options)
            yield from zip(found["input_ids"], found["assistant_masks"], strict=True)

    def prompt(self, messages: list[dict]) -> str:
        """Return the text that the model reads before it answers. Raise UserError if the template refuses messages."""
        from jinja2 import TemplateError

        try:
            return self.reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError) as e:  # the last two from what a template computes
            raise UserError(f"chat template of {self.whose}: {e}; change it, or the messages") from None

    def prompt_ids(self, messages: list[dict]) -> list[int]:
        return self.reader(self.prompt(messages), add_special_tokens=False, verbose=False)["input_ids"]


def our_chat(tokenizer: Tokenizer, model: str = "the model", folders: Sequence[Path] = ()) -> Chat:
    """Return the chat in our format. Raise UserError if the tokenizer cannot express it."""
    if tokenizer.eot_token is None:
        raise UserError(f"the tokenizer of {model} has no {ENDOFTEXT}, which ends an answer; choose another model")
    reader = tokenizer.to_transformers()
    reader.chat_template = template(tokenizer)
    return Chat(reader, answer_ends(folders, reader, tokenizer))


def chat_of(folders: Sequence[Path], tokenizer: Tokenizer, model: str) -> Chat:
    """Return the chat of the first of these directories that has a template; else ours."""
    for folder in folders:
        reader = read_template(folder, tokenizer)
        if reader.chat_template:
            return Chat(reader, answer_ends(folders, reader, tokenizer), str(folder))
    return our_chat(tokenizer, model, folders)


def read_template(folder: Path, tokenizer: Tokenizer):
    """Read a directory's tokenizer and chat template by transformers; an adapter may have a template alone."""
    from transformers import AutoTokenizer

    if (folder / "tokenizer_config.json").is_file():
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    reader = tokenizer.to_transformers()
    if (folder / TEMPLATE_FILE).is_file():
        reader.chat_template = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
    return reader


def end_tokens(folders: Sequence[Path], tokenizer: Tokenizer) -> set[int]:
    """Return the ids that end a text: `<|endoftext|>`, and the ends that generation settings name."""
    ends = {tokenizer.eot_token}
    for folder in folders:
        file = folder / "generation_config.json"
        named = read_json(file).get("eos_token_id") if file.is_file() else None
        ends.update(named if isinstance(named, list) else [named])
    return ends - {None}


def answer_ends(folders: Sequence[Path], reader, tokenizer: Tokenizer) -> set[int]:
    """Return the ids that end an answer: those that end a text, the template's, and every other special token."""
    return {*end_tokens(folders, tokenizer), reader.eos_token_id, *tokenizer.special_tokens.values()} - {None}


# ---------------------------------------------------------------------------------------------------------- writing


def save_chat_files(path: Path, tokenizer: Tokenizer, chat: Chat | None = None) -> None:
    """Write what a chat, ours by default, needs besides weights: tokenizer, template, tokens that end an answer."""
    chat = chat or our_chat(tokenizer)
    if not (path / "tokenizer_config.json").exists():  # beside a model it exists
        tokenizer.save(path)
    text = chat.reader.get_chat_template()
    (path / TEMPLATE_FILE).write_text(text, encoding="utf-8")
    # transformers.js and older servers look for the template here only; transformers prefers the file
    changes = chat.reader.special_tokens_map | dict(chat_template=text)
    write_json(path / "tokenizer_config.json", read_json(path / "tokenizer_config.json") | changes)
    generation = path / "generation_config.json"  # beside an adapter there is none
    content = read_json(generation) if generation.exists() else {}
    write_json(generation, content | dict(eos_token_id=sorted(chat.end_tokens)))
