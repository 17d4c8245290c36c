"""The loss alone: from hidden states and the table of embeddings to the loss and the gradients of both.

"plain" computes all logits at once and PyTorch's cross-entropy of them (`plain_cross_entropy` in parts/loss.py); "this
project" is `linear_cross_entropy`, which every training step calls. Both run as they are and through torch.compile, in
the precision of training on this device, with the channels and the vocabulary of GPT-2 124M, or --size. Each runs in a
new process; what does not fit into memory at once is split, and the row says so. Memory is the peak of the device's
allocator, on a CPU that of the process. MFU counts the three products, 6 V C FLOPs a position.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.measure import Common, Size, model_sizes
from benchmarks.steps import Step, in_own_process, measure_step, step_rates
from parts.cli import Count, Positive
from parts.loss import linear_cross_entropy, plain_cross_entropy
from parts.runtime import Runtime


@dataclass(frozen=True)
class Config(Common):
    positions: Count = 0  # hidden states; 0 for 1,024, on a GPU 65,536
    vocab_size: Positive = 50304  # tokens
    size: Size = ""  # size of the model whose channels they have; tiny for a quick test


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    n_positions = config.positions or (65_536 if rt.device.type == "cuda" else 1024)
    n_embd = model_sizes(config.size)["n_embd"]
    print(f"{n_positions:,} positions of {n_embd:,} channels, {config.vocab_size:,} tokens", flush=True)
    contestants = {}
    for name, loss in {"plain": plain_cross_entropy, "this project": linear_cross_entropy}.items():
        for compile in (False, True):
            make = partial(loss_step, loss, compile, n_positions, n_embd, config.vocab_size)
            measure = partial(in_own_process, measure_step, make, n_positions, config.repeats, rt.device.type)
            contestants[f"{name}, compiled" if compile else name] = measure
    for row in step_rates(contestants, n_positions, "positions/s", 1, rt):
        if "rate" in row:
            row["loss"] = row.pop("losses")[0]
            row["ms"] = 1e3 * n_positions / row["rate"]
        yield row


def loss_step(loss: Callable, compile: bool, n_positions: int, n_embd: int, vocab_size: int, rt: Runtime) -> Step:
    rt = Runtime.setup(rt.device.type)  # the precision of training
    x = torch.randn(n_positions, n_embd, device=rt.device)  # (N, C), as the last LayerNorm leaves them
    weight = torch.randn(vocab_size, n_embd, device=rt.device).mul_(0.02).requires_grad_()  # (V, C)
    targets = torch.randint(vocab_size, (n_positions,), device=rt.device)  # (N,)
    if compile:
        loss = torch.compile(loss)

    def step(n_parts: int) -> torch.Tensor:
        total = torch.zeros((), device=rt.device)
        weight.grad = None
        for hidden, ids in zip(x.chunk(n_parts), targets.chunk(n_parts), strict=True):
            hidden = hidden.detach().requires_grad_()
            with rt.autocast():
                mean = loss(hidden, weight, ids) / n_positions
            mean.backward()
            total += mean.detach()
        return total

    return step, 6 * vocab_size * n_embd
