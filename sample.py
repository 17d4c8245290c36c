"""Generate text: MODEL is a checkpoint directory, a run directory (its newest checkpoint) or a hub id.

    python sample.py out/tiny                                        # a document from its start
    python sample.py out/gpt2/step_019073 "Hello, I'm a language model,"
    python sample.py gpt2 "The capital of France is" --num_samples 3 --temperature 0.8
    python sample.py gpt2 --adapter out/lora/adapter --chat          # a conversation, after lora_finetune.py
    python sample.py gpt2 - < prompt.txt                             # the prompt from a file or a pipe
    python sample.py gpt2 -- "- milk"                                # a prompt that begins with a dash

A single text appears as it is generated, in whole characters; several appear together, once all are done. A text
ends at `<|endoftext|>`, at another end token that the model's files name, or after --max_new_tokens. Standard input
loses its last line end. --chat uses the adapter's chat template, else the model's, else ours (parts/chat.py).
"""

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch

from parts.chat import Chat, chat_of, end_tokens
from parts.checkpoint import find_adapter, open_model
from parts.cli import Count, NonNegative, Positional, Positive, Seed, parse_args, printable, script
from parts.files import errors_name
from parts.generation import generate
from parts.huggingface import load_adapter
from parts.lora import merge, remove_lora
from parts.runtime import Runtime

BATCH = 64  # texts to generate at once, at most: each needs memory for its keys and values


@dataclass(frozen=True)
class Config:
    model: Annotated[str, Positional]  # checkpoint directory, run directory, or hub id (gpt2)
    prompt: Annotated[str, Positional] = ""  # start of the text; - reads it from stdin
    num_samples: Positive = 1  # texts to generate
    max_new_tokens: Count = 200  # stop after this many tokens
    temperature: NonNegative = 1.0  # 0 always takes the likeliest token; higher is more random
    top_k: Count = 50  # draw from the k likeliest tokens; 0 for all
    top_p: NonNegative = 1.0  # draw from the likeliest tokens that together have this probability
    seed: Seed = 1337  # seeds the random draws: another seed, another text
    adapter: str = ""  # directory of a LoRA adapter for this model
    chat: bool = False  # hold a conversation in the terminal; PROMPT is the first message
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of weights; auto: fp32 on a CPU, else 16 bits
    threads: Count = 0  # CPU threads; 0 for PyTorch's number, which heeds OMP_NUM_THREADS


def main() -> None:
    config = parse_args(Config, description=__doc__)
    prompt = config.prompt
    if prompt == "-":  # without the line end that `echo` and editors put after the last line
        with errors_name(Path("standard input")):
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    rt = Runtime.setup(config.device, config.dtype, threads=config.threads)
    if config.dtype == "auto" and rt.device.type == "cpu":
        rt = Runtime.setup("cpu", "float32")  # one row is bound by memory, and 16 bits are partly emulated
    model, tokenizer, folder = open_model(config.model)
    folders = [folder]  # their files say how the model is spoken to
    if config.adapter:
        adapter = find_adapter(config.adapter)
        model = remove_lora(merge(load_adapter(model, adapter)))
        folders = [adapter, folder]
    model.to(rt.device, rt.dtype)
    generator = torch.Generator(rt.device).manual_seed(config.seed)
    ends = end_tokens(folders, tokenizer)
    generate_more = partial(
        generate, model, stop_tokens=ends, suppress_tokens=tokenizer.unused_ids(model.config.vocab_size),
        temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, generator=generator,
    )  # fmt: skip
    ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token or 0]  # no prompt: start a document
    if config.chat:
        chat = chat_of(folders, tokenizer, config.model)
        converse(generate_more, chat, tokenizer, model.config.n_positions, config.max_new_tokens, prompt)
    elif config.num_samples == 1:
        show(prompt)
        for text in stream(generate_more([ids], config.max_new_tokens), tokenizer, ends):
            show(text)
        print()
    else:
        for start in range(0, config.num_samples, BATCH):
            n = min(BATCH, config.num_samples - start)
            steps = list(generate_more([ids] * n, config.max_new_tokens))  # of n tokens each
            for i in range(n):
                new = [step[i] for step in steps if step[i] not in ends]
                show(f"--- sample {start + i + 1}\n{prompt}{tokenizer.decode(new)}\n")


def show(text: str) -> None:
    """Print a text now. A terminal would obey the control characters that a model can write, so there they are escaped;
    a file or a pipe gets them as they are."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def stream(steps: Iterator[list[int]], tokenizer, ends: Collection[int]) -> Iterator[str]:
    """Yield a text as it is generated, in pieces of whole characters, up to one of the tokens in `ends`."""
    decoder = tokenizer.stream_decoder()
    for (token,) in steps:
        if token not in ends:
            yield decoder.push([token])
    yield decoder.flush()


def converse(generate_more: Callable, chat: Chat, tokenizer, n_positions: int, max_new_tokens: int, said: str) -> None:
    """Hold a conversation in the form of the model's training; an empty line or Ctrl-D ends it.

    Earlier turns stay in the context as long as they fit; then the oldest is dropped. An answer gets at most a third of
    the context: another third is for the previous answer, and the last third for the two messages of the user.
    """
    most = min(max_new_tokens, n_positions // 3)
    messages = []
    whose = f"that of {chat.whose}" if chat.whose else "ours, as the model has none"
    print(f"chat template: {whose}", file=sys.stderr)
    print(f"Say something; an empty line ends the conversation. An answer has at most {most} tokens.", file=sys.stderr)
    while said := said.strip() or read_line().strip():
        messages.append(dict(role="user", content=said))
        while len(ids := chat.prompt_ids(messages)) > n_positions - most and len(messages) > 1:
            del messages[:2]
            print(f"note: a context of {n_positions} tokens is full; the oldest turn is dropped", file=sys.stderr)
        if len(ids) > n_positions:
            print(f"note: of these {len(ids):,} tokens the model reads the last {n_positions}", file=sys.stderr)
        steps = generate_more([ids], most, stop_tokens=chat.end_tokens)
        answer = ""
        for text in stream(steps, tokenizer, chat.end_tokens):
            show(text if answer.strip() else text.lstrip())  # a space after the colon belongs to our format
            answer += text
        print()
        messages.append(dict(role="assistant", content=answer))
        said = ""


def read_line() -> str:
    try:
        return input("> ")
    except EOFError:
        print(file=sys.stderr)
        return ""


if __name__ == "__main__":
    script(main)
