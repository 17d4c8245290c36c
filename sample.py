"""Text from any checkpoint: MODEL is a checkpoint directory, a run directory (its newest checkpoint) or a hub id.

    python sample.py out/tiny                                        # a document from its start
    python sample.py out/gpt2/step_019073 "Hello, I'm a language model,"
    python sample.py gpt2 "The capital of France is" --num_samples 3 --temperature 0.8
    python sample.py gpt2 --adapter out/lora/adapter --chat          # a conversation, after lora_finetune.py

Tokens appear as they are generated, characters always whole; a text ends at `<|endoftext|>` or after --max_new_tokens.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from tyro.conf import Positional, arg

from checkpoint import load_model, load_tokenizer
from runtime import Runtime, UserError, parse_args, script

Model = Annotated[str, Positional, arg(metavar="MODEL")]
Prompt = Annotated[str, Positional, arg(metavar="PROMPT")]


@dataclass
class Config:
    model: Model  # checkpoint directory, run directory, or hub id such as gpt2
    prompt: Prompt = ""  # what the text starts with; empty for the start of a document
    num_samples: int = 1  # how many texts
    max_new_tokens: int = 200  # the longest continuation, in tokens
    temperature: float = 1.0  # 0 always takes the likeliest token; higher is wilder
    top_k: int = 50  # draw from the k likeliest tokens; 0 for all
    top_p: float = 1.0  # draw from the likeliest tokens that have this probability together
    seed: int = 1337  # of the random draws; -1 for another one each time
    adapter: str = ""  # directory of a LoRA adapter for this model
    chat: bool = False  # hold a conversation in the terminal
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of weights; auto: fp32 on a CPU, else 16 bits
    compile: bool = False  # compile the step of a token: for long texts on a GPU; on a CPU it is slower


def main() -> None:
    config = parse_args(Config, description=__doc__)
    check(config)
    rt = Runtime.setup(config.device, config.dtype, "on" if config.compile else "off")
    if config.dtype == "auto" and rt.device.type == "cpu":
        rt = Runtime.setup("cpu", "float32")
    model, tokenizer = load_model(config.model), load_tokenizer(config.model)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"the tokenizer of {config.model} has {len(tokenizer)} tokens and its model {model.config.vocab_size}; "
            "put the tokenizer.json beside it that it was trained with"
        )
    if config.adapter:
        from lora_finetune import load_adapter, merge, remove_lora

        model = remove_lora(merge(load_adapter(model, config.adapter)))
    model.to(rt.device, rt.dtype)
    if config.compile:
        model.compile_generation()
    generator = torch.Generator(rt.device)
    generator.manual_seed(config.seed) if config.seed >= 0 else generator.seed()
    if config.chat:
        chat(model, tokenizer, config, generator)
        return
    for number in range(config.num_samples):
        if config.num_samples > 1:
            print(f"--- sample {number + 1}")
        print(config.prompt, end="", flush=True)
        for text in stream(model, tokenizer, tokenizer.encode_ordinary(config.prompt), config, generator):
            print(text, end="", flush=True)
        print()


def check(config: Config) -> None:
    """Raises UserError for values that no text can be drawn with."""
    if config.temperature < 0:
        raise UserError(f"--temperature must be 0 or more, not {config.temperature}")
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top_p must be in (0, 1], not {config.top_p}")
    for name in ("top_k", "max_new_tokens", "num_samples"):
        if getattr(config, name) < 0:
            raise UserError(f"--{name} must be 0 or more, not {getattr(config, name)}")


def stream(model, tokenizer, ids: list[int], config: Config, generator) -> Iterator[str]:
    """The continuation of a prompt, in pieces of whole characters, up to `<|endoftext|>`."""
    ids = ids or [0 if tokenizer.eot_token is None else tokenizer.eot_token]
    decoder = tokenizer.stream_decoder()
    steps = model.generate(
        [ids], config.max_new_tokens, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p,
        stop_token=tokenizer.eot_token, n_tokens=len(tokenizer), generator=generator,
    )  # fmt: skip
    for (token,) in steps:
        if token != tokenizer.eot_token:
            yield decoder.push([token])
    yield decoder.flush()


def chat(model, tokenizer, config: Config, generator) -> None:
    """A conversation in the prompt form that lora_finetune.py trains on; ends with an empty line or Ctrl-D.

    Earlier turns stay in the context as long as they fit; then the oldest is forgotten.
    """
    from lora_finetune import chat_ids

    room = model.config.sequence_length - config.max_new_tokens
    messages: list[dict] = []
    print("Say something; an empty line ends the conversation.", file=sys.stderr)
    while said := read_line().strip():
        messages.append(dict(role="user", content=said))
        while len(messages) > 1 and len(chat_ids(tokenizer, messages)) > room:
            del messages[:2]
        answer = ""
        for text in stream(model, tokenizer, chat_ids(tokenizer, messages), config, generator):
            answer += (piece := text if answer else text.lstrip())
            print(piece, end="", flush=True)
        print()
        messages.append(dict(role="assistant", content=answer))


def read_line() -> str:
    try:
        return input("> ")
    except EOFError:
        print(file=sys.stderr)
        return ""


if __name__ == "__main__":
    script(main)
