"""Text from any checkpoint: MODEL is a checkpoint directory, a run directory (its newest checkpoint) or a hub id.

    python sample.py out/tiny                                        # a document from its start
    python sample.py out/gpt2/step_019073 "Hello, I'm a language model,"
    python sample.py gpt2 "The capital of France is" --num_samples 3 --temperature 0.8
    python sample.py gpt2 --adapter out/lora/adapter --chat          # a conversation, after lora_finetune.py
    python sample.py gpt2 - < prompt.txt                             # the prompt from a file or a pipe

One text appears as it is generated, characters always whole; several are generated at once and appear when all are
done. A text ends at `<|endoftext|>` or after --max_new_tokens. A prompt right after MODEL may begin with a `-`; one
that looks like an option goes last, after a `--`. Standard input loses the line end after its last line.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from tyro.conf import Positional, arg

from cli import Count, NonNegative, Range, UserError, parse_args, script
from finetuning.chat import chat_ids
from finetuning.lora import load_adapter, merge, read_adapter, remove_lora
from learning import generation
from model import GPT
from run.checkpoint import load_model, model_tokenizer
from run.runtime import Runtime

BATCH = 64  # texts that are generated at once, at most: each has keys and values of its own in memory


@dataclass(frozen=True)
class Config:
    model: Annotated[str, Positional, arg(metavar="MODEL")]  # checkpoint directory, run directory, or hub id (gpt2)
    prompt: Annotated[str, Positional, arg(metavar="PROMPT")] = ""  # what the text starts with; - is standard input
    num_samples: Annotated[int, Range(1, 1e6)] = 1  # how many texts
    max_new_tokens: Count = 200  # the longest continuation, in tokens
    temperature: NonNegative = 1.0  # 0 always takes the likeliest token; higher is wilder
    top_k: Count = 50  # draw from the k likeliest tokens; 0 for all
    top_p: Annotated[float, Range(0, 1, above=True)] = (
        1.0  # draw from the likeliest that have this probability together
    )
    seed: Annotated[int, Range(-1, 2**63 - 1)] = 1337  # of the random draws; -1 for another one each time
    adapter: str = ""  # directory of a LoRA adapter for this model
    chat: bool = False  # hold a conversation in the terminal; PROMPT is the first thing said
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of weights; auto: fp32 on a CPU, else 16 bits


def main() -> None:
    config = parse_args(Config, set_apart(sys.argv[1:]), description=__doc__)
    check(config)
    prompt = checked(read_all() if config.prompt == "-" else config.prompt, "the prompt")
    rt = Runtime.setup(config.device, config.dtype)
    if config.dtype == "auto" and rt.device.type == "cpu":
        rt = Runtime.setup("cpu", "float32")  # one row at a time is bound by memory, and 16 bits are emulated in part
    model, tokenizer = open_model(config)
    model.to(rt.device, rt.dtype)
    generator = torch.Generator(rt.device)
    generator.manual_seed(config.seed) if config.seed >= 0 else generator.seed()
    if config.chat:
        converse(model, tokenizer, config, prompt, generator)
    elif config.num_samples == 1:
        show(prompt, stream(model, tokenizer, tokenizer.encode_ordinary(prompt), config, generator))
    else:
        for start in range(0, config.num_samples, BATCH):
            rows = [tokenizer.encode_ordinary(prompt)] * min(BATCH, config.num_samples - start)
            for number, text in enumerate(complete(model, tokenizer, rows, config, generator), start + 1):
                print(f"--- sample {number}\n{prompt}{text}")


def set_apart(words: list[str]) -> list[str]:
    """Put a prompt right after MODEL that begins with a dash, such as "-5 degrees", where it is taken for no option."""
    option = r"-|-h|--([\w-]+(=.*)?)?"
    if len(words) > 1 and words[0][:1] != "-" and words[1][:1] == "-" and not re.fullmatch(option, words[1], re.DOTALL):
        return [words[0], *words[2:], "--", words[1]]
    return words


def check(config: Config) -> None:
    """Raises UserError for values that do not go together, or that no text can be drawn with."""
    if 0 < config.temperature < 1e-3:  # logits divided by it leave the range of fp32
        raise UserError(f"--temperature {config.temperature} takes the likeliest token all the same; give 0")
    if config.chat and config.num_samples > 1:
        raise UserError("--chat has one answer to everything that is said; --num_samples is for texts")


def open_model(config: Config) -> tuple:
    """(model, tokenizer), the adapter merged in. Raises UserError for what does not belong together."""
    try:
        model, tokenizer = load_model(config.model), model_tokenizer(config.model)
    except UserError as error:
        try:
            adapter = read_adapter(config.model)
        except UserError:
            raise error from None
        hint = f"python sample.py {adapter.base or 'BASE'} --adapter {config.model}"
        raise UserError(f"{config.model} is an adapter and needs its base; try: {hint}") from None
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"the tokenizer of {config.model} has {len(tokenizer)} tokens and its model {model.config.vocab_size}; "
            "put the tokenizer.json beside it that it was trained with"
        )
    if config.adapter:
        model = remove_lora(merge(load_adapter(model, config.adapter)))
    return model, tokenizer


def generate(model: GPT, tokenizer, rows: list[list[int]], config: Config, generator) -> Iterator[list[int]]:
    """The next token of every row, step by step."""
    start = [0 if tokenizer.eot_token is None else tokenizer.eot_token]  # of a document
    sampling = dict(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, generator=generator)
    ends = dict(stop_token=tokenizer.eot_token, n_tokens=len(tokenizer))
    return generation.generate(model, [row or start for row in rows], config.max_new_tokens, **sampling, **ends)


def stream(model: GPT, tokenizer, ids: list[int], config: Config, generator) -> Iterator[str]:
    """The continuation of a prompt, in pieces of whole characters, up to `<|endoftext|>`."""
    decoder = tokenizer.stream_decoder()
    for (token,) in generate(model, tokenizer, [ids], config, generator):
        if token != tokenizer.eot_token:
            yield decoder.push([token])
    yield decoder.flush()


def complete(model: GPT, tokenizer, rows: list[list[int]], config: Config, generator) -> list[str]:
    """The continuations of several prompts, generated together."""
    steps = list(generate(model, tokenizer, rows, config, generator))  # of B tokens each
    return [tokenizer.decode([step[i] for step in steps if step[i] != tokenizer.eot_token]) for i in range(len(rows))]


def show(prompt: str, pieces: Iterator[str]) -> None:
    print(prompt, end="", flush=True)
    for text in pieces:
        print(text, end="", flush=True)
    print()


def converse(model: GPT, tokenizer, config: Config, said: str, generator) -> None:
    """A conversation in the form that lora_finetune.py trains on; ends with an empty line or Ctrl-D.

    Earlier turns stay in the context as long as they fit; then the oldest is forgotten.
    """
    room = model.config.n_positions - config.max_new_tokens
    messages: list[dict] = []
    print("Say something; an empty line ends the conversation.", file=sys.stderr)
    while said := said.strip() or read_line().strip():
        messages.append(dict(role="user", content=said))
        while len(messages) > 1 and len(chat_ids(tokenizer, messages)) > room:
            del messages[:2]
        answer = ""
        for text in stream(model, tokenizer, chat_ids(tokenizer, messages), config, generator):
            answer += (piece := text if answer else text.lstrip())
            print(piece, end="", flush=True)
        print()
        messages.append(dict(role="assistant", content=answer))
        said = ""


def read_line() -> str:
    if sys.stdin is None:
        return ""
    try:
        return checked(input("> "), "what was said")
    except EOFError:
        print(file=sys.stderr)
        return ""
    except UnicodeDecodeError as e:
        raise UserError(f"what was said is not UTF-8 ({e.reason} at byte {e.start}); convert it, with iconv") from None


def read_all() -> str:
    """Standard input, without the line end that `echo` and editors put after the last line."""
    if sys.stdin is None:  # closed by whoever started us
        return ""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as e:
        raise UserError(f"standard input is not UTF-8 ({e.reason} at byte {e.start}); convert it, with iconv") from None


def checked(text: str, what: str) -> str:
    """`text`. Raises UserError where Python has marked bytes of the command line that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"{what} is not UTF-8 (at character {e.start}); convert it, with iconv") from None
    return text


if __name__ == "__main__":
    script(main)
