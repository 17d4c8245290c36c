"""Generation: recomputing the context for every token, transformers' generate, and this project.

Greedy continuations of the same random prompts of 16 tokens by random GPT-2 models of 124M, or --size: 4 sequences in
fp32 on a CPU, 1 and 64 in bf16 on a GPU. Which tokens they are does not affect the speed. transformers runs with its
defaults, a dynamic cache and no torch.compile; recomputing is what a script without a cache does.
Rates count new tokens, so that of recomputing falls with --new_tokens.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.measure import Common, Size, built_late, model_sizes, rates
from cli import Positive
from learning.generation import generate
from machine.runtime import Runtime
from model import GPT, GPTConfig


@dataclass(frozen=True)
class Config(Common):
    size: Size = ""  # size of the model; tiny for a quick test
    new_tokens: Positive = 128  # tokens to generate


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    warnings.simplefilter("ignore")
    cuda, n = rt.device.type == "cuda", config.new_tokens
    dtype = torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    model = GPT(GPTConfig(**model_sizes(config.size))).to(rt.device, dtype).eval()
    for batch_size in (1, 64) if cuda else (4,):
        prompts = torch.randint(50257, (batch_size, 16), device=rt.device)
        contestants = {
            "recomputing the context": recomputing(model, prompts, n),
            "transformers generate": built_late(generating, model_sizes(config.size), dtype, prompts, n),
            "this project": own(model, prompts.tolist(), n),
        }
        contestants = {f"{name}, {batch_size} texts": run for name, run in contestants.items()}
        yield from rates(contestants, config.repeats, rt, batch_size * n, "tokens/s")


def recomputing(model: GPT, idx: torch.Tensor, n: int) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        x = idx  # (B, T), a column longer with every token
        for _ in range(n):
            x = torch.cat([x, model(x)[:, -1].argmax(-1, keepdim=True)], dim=1)

    return run


def generating(shape: dict, dtype: torch.dtype, idx: torch.Tensor, n: int) -> Callable[[], object]:
    from transformers import GPT2Config, GPT2LMHeadModel

    reference = GPT2LMHeadModel(GPT2Config(**shape)).to(idx.device, dtype).eval()
    options = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
    return lambda: reference.generate(idx, attention_mask=torch.ones_like(idx), **options)


def own(model: GPT, prompts: list[list[int]], n: int) -> Callable[[], None]:
    return lambda: list(generate(model, prompts, n, temperature=0))
