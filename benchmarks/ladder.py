"""One training step, rung by rung: how much each change to the plainest recipe gains.

Every rung makes the same optimizer step (forward, backward, clipping, AdamW) on the same random tokens, and adds one
change to the rung before it. Each runs in a new process, so that compiled code does not help the next one. The model is
GPT-2 124M with 1,024 tokens of context on a GPU, 6 layers on a CPU, or --size. Memory is the peak of the device's
allocator, on a CPU that of the process. The first step includes the time of torch.compile; the loss of the third step
shows that all rungs compute the same.
The order decides how much of the gain a rung gets: with bf16 before TF32, TF32 would gain nothing.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import minimal
from benchmarks.measure import Common, Size, model_sizes
from benchmarks.steps import Step, in_own_process, measure_step, step_rates
from model import GPT, GPTConfig
from parts.cli import Count, Positive
from parts.loss import linear_cross_entropy
from parts.runtime import Runtime


@dataclass(frozen=True)
class Config(Common):
    batch_size: Positive = 16  # sequences per step
    size: Size = ""  # size of the model; tiny for a quick test
    sequence_length: Count = 0  # context in tokens; 0 for that of the model


@dataclass(frozen=True)
class Rung:
    """One way to make a training step."""

    name: str
    tf32: bool = False
    bf16: bool = False
    compile: bool = False
    attention: str = "naive"
    padded: bool = False  # vocabulary padded to a multiple of 128
    fused: bool = False  # AdamW in one kernel
    chunked: bool = False  # the loss of model.py, instead of all logits in fp32


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    shape = model_shape(config.size, rt)
    if config.sequence_length:
        shape["n_positions"] = config.sequence_length
    print(f"{shape}, batch size {config.batch_size}", flush=True)
    contestants = {rung.name: plain(rung, shape, config.batch_size, config.repeats, rt) for rung in rungs(rt)}
    n_tokens = config.batch_size * shape["n_positions"]
    before = None
    for row in step_rates(contestants, n_tokens, "tokens/s", 1, rt):
        if "rate" in row:
            row["loss"] = row.pop("losses")[-1]
            row["over_before"] = row["rate"] / (before or row["rate"])
            row["over_first"] = row.pop("ratio")
            before = row["rate"]
        yield row


def rungs(rt: Runtime) -> list[Rung]:
    """fp32 first, then one change per rung. A CPU has no TF32, its fused attention is slow in bf16, and torch.compile
    is last because it starts slowly there."""
    bf16 = {"bf16 autocast": dict(bf16=True)}
    compiled = {"torch.compile": dict(compile=True)}
    flash = {"flash attention": dict(attention="flash")}
    last = {
        "vocabulary padded to 128": dict(padded=True),
        "fused AdamW": dict(fused=True),
        "chunked loss": dict(chunked=True),
    }
    if rt.device.type == "cuda":
        changes = {"TF32": dict(tf32=True)} | bf16 | compiled | flash | last
    else:
        by_hand = {"attention by hand again": dict(attention="naive")}
        changes = flash | bf16 | by_hand | last | compiled
    ladder = [Rung("fp32, all by hand")]
    for name, change in changes.items():
        ladder.append(replace(ladder[-1], name=name, **change))
    return ladder


def model_shape(size: str, rt: Runtime) -> dict:
    """GPT-2 124M on a GPU; on a CPU a model that takes about a second for a step."""
    if size == "tiny":
        return model_sizes(size) | dict(n_positions=32, vocab_size=1000)
    if size or rt.device.type == "cuda":
        return model_sizes(size) | dict(n_positions=1024, vocab_size=50257)
    return dict(n_layer=6, n_head=6, n_embd=384, n_positions=256, vocab_size=1000)


def padded(vocab_size: int) -> int:
    """The next multiple of 128."""
    return -(-vocab_size // 128) * 128


def plain(rung: Rung, shape: dict, batch_size: int, repeats: int, rt: Runtime) -> partial:
    """A contestant: measures the step of a rung in a new process."""
    make = partial(plain_step, rung, shape, batch_size)
    return partial(in_own_process, measure_step, make, batch_size, repeats, rt.device.type)


def plain_step(rung: Rung, shape: dict, batch_size: int, rt: Runtime) -> Step:
    """A step as a plain script has it: model, loss and optimizer of minimal.py."""
    torch.set_float32_matmul_precision("high" if rung.tf32 else "highest")
    torch.backends.cuda.enable_cudnn_sdp(True)  # PyTorch's default, which our Runtime has changed
    config = GPTConfig(**shape)
    if rung.padded:
        config = replace(config, vocab_size=padded(config.vocab_size))
    sizes = dict(vocab_size=config.vocab_size, n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd)
    constants = minimal.Config(sequence_length=config.n_positions, max_lr=3e-4, **sizes)
    model = minimal.GPT(constants).to(rt.device)
    optimizer = minimal.make_optimizer(model, constants)
    if not rung.fused:
        optimizer = torch.optim.AdamW(optimizer.param_groups, foreach=True)
    weight = model.lm_head.weight
    if rung.chunked:
        model.lm_head = torch.nn.Identity()  # the loss takes hidden states
    # which tokens they are does not affect the speed of a step
    tokens = torch.randint(shape["vocab_size"], (batch_size, shape["n_positions"] + 1), device=rt.device)  # (B, T + 1)

    def loss_of(idx, targets):
        if rung.chunked:
            hidden = model(idx).flatten(0, 1)  # (B * T, C)
            return linear_cross_entropy(hidden, weight, targets.flatten()) / targets.numel()
        return model(idx, targets)

    if rung.compile:
        loss_of = torch.compile(loss_of)

    def step(n_micro: int) -> torch.Tensor:
        total = torch.zeros((), device=rt.device)
        for windows in tokens.chunk(n_micro):
            idx = windows[:, :-1].contiguous()
            targets = windows[:, 1:].contiguous()
            by_hand = sdpa_kernel(SDPBackend.MATH) if rung.attention == "naive" else nullcontext()
            with torch.autocast(rt.device.type, dtype=torch.bfloat16, enabled=rung.bf16), by_hand:
                loss = loss_of(idx, targets) / n_micro
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    with torch.device("meta"):
        flops = GPT(config).estimate_flops(shape["n_positions"])
    return step, flops
