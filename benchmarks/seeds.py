"""A baseline and changes of it, trained with the same seeds on a small model, to tell a gain from noise.

A seed starts from the same weights and reads the same data in the same order in every line. So a row can say how far a
change ends from the baseline with the same seed, and the standard error of that over the seeds. A gain within two of
them is none.

- `Change` is what a line has instead of the baseline's: constants of train_gpt2.py, another model, or an idea
- `train(change, config, shards, rt)` is a run of train_gpt2.py, reduced to what a change may touch
- `compare(lines, seeds, job, rt)` trains all lines with all seeds, and yields a row for each line
- `side_by_side(function, jobs, rt)`: one run a core on a CPU, one at a time on a GPU

This file knows nothing of the changes that are tried.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch

from benchmarks.measure import ROOT, Common
from bpe.tokenizer import cpu_count
from cli import Range, UserError
from corpus.order import Batches, to_inputs, validation_batches
from corpus.shards import prepare_text
from corpus.stream import TokenStream, find_shards
from learning.optim import Muon, Optimizer, learning_rate, make_optimizer
from model import GPT, GPTConfig
from run.runtime import Runtime
from run.trials import choose_attention
from train_gpt2 import RECIPES
from train_gpt2 import Config as Training

SHAPES = {
    "1M": dict(n_layer=4, n_head=2, n_embd=128, sequence_length=64, vocab_size=1024, total_batch_size=1024),
    "5M": dict(n_layer=6, n_head=4, n_embd=256, sequence_length=64, vocab_size=1024, total_batch_size=1024),
}
Hooks = dict[str, Callable[[int], None]]  # what an idea does in a step, by the moment: see `train`


@dataclass(frozen=True)
class Config(Common):
    repeats: Annotated[int, Range(1, 1000)] = 5  # seeds
    data: str = str(ROOT / "input.txt")  # a .txt
    steps: Annotated[int, Range(10, 1e6)] = 1000  # optimizer steps of the baseline
    only: tuple[str, ...] = ()  # train these lines alone, and the baseline


@dataclass(frozen=True)
class Change:
    idea: Callable[[SimpleNamespace], Hooks] = lambda run: {}
    constants: dict = field(default_factory=dict)
    model: type[GPT] = GPT


def settings(recipe: str, steps: int, shape: dict, seed: int, **changes) -> Training:
    """The recipe with another size and length: the same fraction of warmup, other `changes` on top."""
    config = RECIPES[recipe]
    warmup = steps * config.warmup_steps // config.max_steps
    return replace(config, **shape | dict(max_steps=steps, warmup_steps=warmup, seed=seed) | changes)


def shards_of(config: Config, vocab_size: int) -> str:
    """The text as tokens of a tokenizer that was trained on it; made before runs start, so that none makes it again."""
    return str(prepare_text(config.data, "train", vocab_size, Path("out/cache")))


def chosen(lines: dict, only: tuple[str, ...]) -> dict:
    """The lines that are asked for, after the first one, which the others compare with. Raises UserError."""
    if unknown := set(only) - set(lines):
        raise UserError(f"--only {sorted(unknown)[0]!r}: the lines are {', '.join(map(repr, lines))}")
    return {name: line for i, (name, line) in enumerate(lines.items()) if i == 0 or not only or name in only}


def compare(lines: dict, repeats: int, job: Callable[[str, int], float], rt: Runtime) -> Iterator[dict]:
    """A row for each line: job(name, seed) is the loss that it ends at."""
    losses = side_by_side(job, [(name, seed) for name in lines for seed in range(repeats)], rt)
    baseline: list[float] = []
    for name in lines:
        found = [next(losses) for _ in range(repeats)]
        baseline = baseline or found
        yield row(name, found, baseline)


def row(name: str, losses: list[float], baseline: list[float]) -> dict:
    over = [loss - other for loss, other in zip(losses, baseline, strict=True)]
    error = statistics.stdev(over) / len(over) ** 0.5 if len(over) > 1 else 0.0
    means = dict(mean=statistics.mean(losses), over=statistics.mean(over), standard_error=error)
    return dict(name=name, **means, losses=losses, over_recipe=over)


def side_by_side(function: Callable, jobs: list[tuple], rt: Runtime) -> Iterator:
    """function(*job) of each job, in their order."""
    workers = cpu_count() if rt.device.type == "cpu" else 1
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(function, *zip(*jobs, strict=True))


def train(change: Change, config: Training, shards: str, rt: Runtime, checks: int = 1) -> Iterator[tuple[int, float]]:
    """Yield (tokens read, validation loss) at `checks` points of a run, the last one at its end.

    `change.idea(run)` returns what it does before_forward, before_step and after_step, given the step, and at_end.
    """
    config = replace(config, **change.constants)
    train, val = (TokenStream(find_shards(shards, split), config.vocab_size) for split in ("train", "val"))
    T, rows = config.sequence_length, config.total_batch_size // config.sequence_length
    order = Batches(train, T, config.seed, config.shuffle)
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    torch.manual_seed(config.seed)
    attention = choose_attention(config.attention, rt, T)
    model = change.model(GPTConfig(**sizes, n_positions=T, attention=attention)).to(rt.device)
    optimizer = make_optimizer(model, config, rt)
    hooks = defaultdict(lambda: lambda step: None, change.idea(parts_of(model, optimizer, config)))
    for step in range(1, config.max_steps + 1):
        hooks["before_forward"](step)
        windows = torch.from_numpy(next(order.micro_batches((step - 1) * rows, rows, rows))).to(rt.device)
        with rt.autocast():
            loss = model.loss(*to_inputs(windows))
        loss.backward()
        norm = optimizer.clip_grad_norm(config.grad_clip)
        optimizer.set_lr(learning_rate(step, config))
        hooks["before_step"](step)
        optimizer.step(finite=norm.isfinite())
        hooks["after_step"](step)
        if step == config.max_steps:
            hooks["at_end"](step)
        if step == config.max_steps or step % max(config.max_steps // checks, 1) == 0:
            yield step * config.total_batch_size, validation_loss(model, val, config, rt)


@torch.no_grad()
def validation_loss(model: GPT, stream: TokenStream, config: Training, rt: Runtime) -> float:
    """Nats per token, over config.eval_steps batches; 0 for all of the split."""
    total, n, limit = 0.0, 0, config.eval_steps * config.total_batch_size
    model.eval()
    for windows in validation_batches(stream, config.sequence_length, 64, limit):
        x, y = to_inputs(torch.from_numpy(windows).to(rt.device))
        n_targets = (y >= 0).sum().item()
        with rt.autocast():
            total, n = total + model.loss(x, y).item() * n_targets, n + n_targets
    model.train()
    return total / n


def parts_of(model: GPT, optimizer: Optimizer, config: Training) -> SimpleNamespace:
    """What an idea gets: the parts of a run."""
    muon = next((part for part in optimizer.optimizers if isinstance(part, Muon)), None)
    adamw = next(part for part in optimizer.optimizers if not isinstance(part, Muon))
    return SimpleNamespace(model=model, config=config, muon=muon, adamw=adamw)
