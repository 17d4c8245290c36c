"""Generation: recomputing the context for every token, transformers' generate, and this project.

Greedy continuations of the same random prompts of 16 tokens by random GPT-2 models of 124M, or --size: 4 sequences in
fp32 on a CPU, 1 and 64 in bf16 on a GPU. Which tokens they are does not affect the speed. transformers runs with its
defaults, a dynamic cache and no torch.compile; recomputing is what a script without a cache does.
Rates count new tokens, so that of recomputing falls with --new_tokens.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measure import Common, Size, built_late, model_sizes, rates
from model import GPT, GPTConfig
from parts.cli import Positive
from parts.generation import generate
from parts.runtime import Runtime


@dataclass(frozen=True)
class Config(Common):
    size: Size = ""  # size of the model; tiny for a quick test
    new_tokens: Positive = 128  # tokens to generate


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    warnings.simplefilter("ignore")
    n = config.new_tokens
    if rt.device.type == "cuda":
        dtype, batch_sizes = torch.bfloat16, (1, 64)
    else:
        dtype, batch_sizes = torch.float32, (4,)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**model_sizes(config.size))).to(rt.device, dtype).eval()
    for batch_size in batch_sizes:
        prompts = torch.randint(50257, (batch_size, 16), device=rt.device)
        contestants = {
            "recomputing the context": partial(recompute, model, prompts, n),
            "transformers generate": built_late(generating, model_sizes(config.size), dtype, prompts, n),
            "this project": partial(generate_all, model, prompts.tolist(), n),
        }
        contestants = {f"{name}, {batch_size} texts": run for name, run in contestants.items()}
        yield from rates(contestants, config.repeats, rt, batch_size * n, "tokens/s")


@torch.no_grad()
def recompute(model: GPT, idx: torch.Tensor, n: int) -> None:
    for _ in range(n):
        likeliest = model(idx)[:, -1].argmax(-1, keepdim=True)  # (B, 1)
        idx = torch.cat([idx, likeliest], dim=1)


def generating(shape: dict, dtype: torch.dtype, idx: torch.Tensor, n: int) -> Callable[[], object]:
    from transformers import GPT2Config, GPT2LMHeadModel

    reference = GPT2LMHeadModel(GPT2Config(**shape)).to(idx.device, dtype).eval()
    options = dict(max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
    return partial(reference.generate, idx, attention_mask=torch.ones_like(idx), **options)


def generate_all(model: GPT, prompts: list[list[int]], n: int) -> None:
    for _ in generate(model, prompts, n, temperature=0):
        pass
