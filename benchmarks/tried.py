"""The choices of the recipe speedrun, undone, and what others gained tokens by, tried on it: each in a few lines.

Every line is the recipe with one change, trained once for each of --repeats seeds on --fraction of the tokens of
--steps full batches, on a model of one or five million parameters. A seed begins with the same weights and reads the
same data in the same order in all lines, so that the table can say how far a change ends from the recipe with the same
seed, and the standard error of that over the seeds. A gain within two of them is none.

--data is a .txt (input.txt); --only "NorMuon" leaves out the other lines. `Change.constants` are flags of
train_gpt2.py, and so is nothing of what the functions below do: what does not gain at two sizes has no place there.
Unfair to ideas that rest on many steps: these runs have some hundred.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.ablate import validation_loss
from benchmarks.speedrun import LINES, SHAPES, settings
from bpe.tokenizer import cpu_count
from cli import UserError
from corpus.order import Batches, TokenStream, find_shards, to_inputs
from corpus.shards import prepare_text
from learning.optim import Muon, Optimizer, learning_rate, make_optimizer
from model import GPT, GPTConfig
from run.runtime import Runtime
from run.trials import choose_attention
from train_gpt2 import RECIPES, Config

ROOT = Path(__file__).resolve().parent.parent
VALIDATED = 100 * 1024  # tokens
Hooks = dict[str, Callable[[int], None]]  # what an idea does in a step, by the moment at which: see `train`


def run(config, rt: Runtime) -> list[dict]:
    if unknown := set(config.only) - set(CHANGES):
        raise UserError(f"--only {sorted(unknown)[0]!r}: the lines are {', '.join(map(repr, CHANGES))}")
    lines = [name for name in CHANGES if not config.only or name in ("speedrun", *config.only)]
    text = config.data or str(ROOT / "input.txt")
    shards = str(prepare_text(text, "train", SHAPES[config.parameters]["vocab_size"], Path("out/cache")))
    one = partial(train_one, shards=shards, config=config, device=rt.device.type)
    print(f"{'':<44}loss: mean, over speedrun's (standard error; seed by seed)")
    workers = cpu_count() if rt.device.type == "cpu" else 1
    jobs = [(name, seed) for name in lines for seed in range(config.repeats)]
    rows = []
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        found = iter(pool.map(one, *zip(*jobs, strict=True)))
        for name in lines:
            losses = [next(found) for _ in range(config.repeats)]
            rows.append(row(name, losses, rows[0]["losses"] if rows else losses))
            show(rows[-1])
    return rows


def row(name: str, losses: list[float], recipe: list[float]) -> dict:
    over = [loss - other for loss, other in zip(losses, recipe, strict=True)]
    error = statistics.stdev(over) / len(over) ** 0.5 if len(over) > 1 else 0.0
    return dict(name=name, losses=losses, mean=statistics.mean(losses), over_speedrun=over, standard_error=error)


def show(row: dict) -> None:
    each = ", ".join(f"{value:+.3f}" for value in row["over_speedrun"])
    over = statistics.mean(row["over_speedrun"])
    print(f"{row['name']:<44}{row['mean']:.4f} {over:+.3f} ({row['standard_error']:.3f}; {each})", flush=True)


def train_one(name: str, seed: int, shards: str, config, device: str) -> float:
    steps = round(config.fraction * config.steps)
    constants = settings("speedrun", CHANGES[name].constants, steps, SHAPES[config.parameters])
    rt = Runtime.setup(device, "auto")
    return train(CHANGES[name].idea, replace(RECIPES["speedrun"], **constants, seed=seed), shards, rt)


def train(idea: Callable, config: Config, shards: str, rt: Runtime) -> float:
    """The validation loss after a run of train_gpt2.py, cut down to what an idea may change: `idea(run)` returns what
    it does before_forward, before_step and after_step, given the step, and at_end."""
    train, val = (TokenStream(find_shards(shards, split), config.vocab_size) for split in ("train", "val"))
    T, order = config.sequence_length, Batches(train, config.sequence_length, config.seed, config.shuffle)
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    rows = config.total_batch_size // T
    torch.manual_seed(config.seed)
    model = GPT(GPTConfig(**sizes, n_positions=T, attention=choose_attention(config.attention, rt, T))).to(rt.device)
    optimizer = make_optimizer(model, config, rt)
    hooks = defaultdict(lambda: lambda step: None, idea(made(model, optimizer, config)))
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
    hooks["at_end"](config.max_steps)
    return validation_loss(model, val, T, rt, VALIDATED)


# ------------------------------------------------------------------------------------------------------- the ideas


def made(model: GPT, optimizer: Optimizer, config: Config) -> SimpleNamespace:
    """What an idea gets: the parts of a run."""
    muon = next((part for part in optimizer.optimizers if isinstance(part, Muon)), None)
    adamw = next(part for part in optimizer.optimizers if not isinstance(part, Muon))
    return SimpleNamespace(model=model, config=config, muon=muon, adamw=adamw)


def nothing(run) -> Hooks:
    return {}


def fused_qkv(run) -> Hooks:
    """Muon takes Q, K and V as the one matrix that c_attn stores."""
    for group in run.muon.param_groups:
        group["parts"] = 1
    return {}


def zero_projections(run) -> Hooks:
    """What is added to the residual stream starts at zero, so that every block starts as the identity."""
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            if name.endswith("c_proj.weight"):
                p.zero_()
    return {}


def momentum_of(momentum: float) -> Callable:
    def idea(run) -> Hooks:
        for group in run.muon.param_groups:
            group["momentum"] = momentum
        return {}

    return idea


def momentum_warmup(steps: int) -> Callable:
    """Muon's momentum rises from 0.85 to 0.95 in the first steps, as in every record of modded-nanogpt: early gradients
    soon point elsewhere."""

    def idea(run) -> Hooks:
        def before_step(step: int) -> None:
            for group in run.muon.param_groups:
                group["momentum"] = 0.85 + 0.1 * min(step / steps, 1.0)

        return dict(before_step=before_step)

    return idea


def scheduled_decay(run) -> Hooks:
    """Muon's weight decay follows the schedule, as its learning rate does: their product falls as its square."""

    def before_step(step: int) -> None:
        for group in run.muon.param_groups:
            group["weight_decay"] = run.config.weight_decay * group["lr"] / group["initial_lr"]

    return dict(before_step=before_step)


def cautious_decay(run) -> Hooks:
    """Muon's decay by the schedule, and only of the numbers that the step moves towards zero anyway (Chen et al. 2025,
    "Cautious weight decay")."""
    before = {}

    def before_step(step: int) -> None:
        for group in run.muon.param_groups:
            group["weight_decay"] = 0.0
            before.update({p: p.detach().clone() for p in group["params"]})

    @torch.no_grad()
    def after_step(step: int) -> None:
        for group in run.muon.param_groups:
            decay = group["lr"] * run.config.weight_decay * group["lr"] / group["initial_lr"]
            for p in group["params"]:
                towards_zero = before[p] * (before[p] - p) > 0
                p.sub_(before[p] * towards_zero, alpha=decay)

    return dict(before_step=before_step, after_step=after_step)


def no_muon_decay(run) -> Hooks:
    for group in run.muon.param_groups:
        group["weight_decay"] = 0.0
    return {}


def own_groups(chosen: Callable, **constants) -> Callable:
    """The tensors for whose name and tensor `chosen` is true leave their group of AdamW for one with `constants`."""

    def idea(run) -> Hooks:
        for name, p in run.model.named_parameters():
            for group in run.adamw.param_groups[:2]:  # the recipe's: decayed, and not
                if chosen(name, p) and any(p is q for q in group["params"]):
                    group["params"] = [q for q in group["params"] if q is not p]
                    inherited = {key: group[key] for key in ("lr", "weight_decay")} | constants
                    run.adamw.add_param_group(dict(params=[p], **inherited))
                    run.adamw.param_groups[-1]["initial_lr"] = inherited["lr"]
                    break
        return {}

    return idea


def split_cooldown(run) -> Hooks:
    """AdamW decays over 70% of the steps, Muon over the 50% of the recipe."""
    longer = replace(run.config, decay_fraction=0.7)

    def before_step(step: int) -> None:
        for group in run.adamw.param_groups:
            group["lr"] = group["initial_lr"] * learning_rate(step, longer) / longer.max_lr

    return dict(before_step=before_step)


def normuon(run) -> Hooks:
    """Each row of Muon's orthogonalized step by the root of the mean square of such rows so far, with the norm of the
    whole step as it was (Li et al. 2025, "NorMuon")."""
    orthogonalized, squares = run.muon._orthogonalized_by_owners, {}

    def rows_alike(update: torch.Tensor, rows: int, group: dict) -> torch.Tensor:
        step = orthogonalized(update, rows, group)  # (N, rows, columns)
        square = step.square().mean(-1, keepdim=True)
        mean = squares.setdefault(update.shape, torch.zeros_like(square)).lerp_(square, 0.05)
        scaled = step * (mean + 1e-10).rsqrt()
        norms = [matrices.norm(dim=(1, 2), keepdim=True) for matrices in (step, scaled)]
        return scaled * (norms[0] / norms[1])

    run.muon._orthogonalized_by_owners = rows_alike
    return {}


def ema_nesterov(run) -> Hooks:
    """From 15% to 75% of the steps, gradients are taken ahead: 0.6 times the mean movement of the last steps further
    (arXiv 2605.25395). The mean forgets with 0.9."""
    params, before = list(run.model.parameters()), []
    movement = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def before_forward(step: int) -> None:
        before[:] = [p.detach().clone() for p in params]
        if 0.15 <= step / run.config.max_steps < 0.75:
            ahead = 0.6 * learning_rate(step, run.config) / run.config.max_lr
            torch._foreach_add_(params, movement, alpha=ahead)

    @torch.no_grad()
    def after_step(step: int) -> None:
        torch._foreach_lerp_(movement, [p - q for p, q in zip(params, before, strict=True)], 0.1)

    return dict(before_forward=before_forward, after_step=after_step)


def tail_average(fraction: float) -> Callable:
    """The mean of the weights after each of the last steps is what is evaluated."""

    def idea(run) -> Hooks:
        params, seen = list(run.model.parameters()), []
        mean = [torch.zeros_like(p) for p in params]

        @torch.no_grad()
        def after_step(step: int) -> None:
            if step > (1 - fraction) * run.config.max_steps:
                seen.append(step)
                torch._foreach_lerp_(mean, params, 1 / len(seen))

        @torch.no_grad()
        def at_end(step: int) -> None:
            torch._foreach_copy_(params, mean)

        return dict(after_step=after_step, at_end=at_end)

    return idea


@dataclass(frozen=True)
class Change:
    """What a line has instead of the recipe's."""

    idea: Callable[[SimpleNamespace], Hooks] = nothing
    constants: dict = field(default_factory=dict)


def embeddings(name: str, p: torch.Tensor) -> bool:
    return name.endswith(("wte.weight", "wpe.weight"))


def token_table(name: str, p: torch.Tensor) -> bool:
    return name.endswith("wte.weight")


def position_table(name: str, p: torch.Tensor) -> bool:
    return name.endswith("wpe.weight")


def one_dimensional(name: str, p: torch.Tensor) -> bool:
    return p.dim() < 2


CHANGES = {
    **{name: Change(constants=constants) for name, constants in LINES.items()},  # "speedrun" first, then undone
    "Q, K and V as one matrix": Change(fused_qkv),
    # what it does not do
    "momentum from 0.85 to 0.95 in 77 steps": Change(momentum_warmup(77)),
    "momentum from 0.85 to 0.95 in 300 steps": Change(momentum_warmup(300)),
    "momentum 0.9": Change(momentum_of(0.9)),
    "weight decay of Muon by the schedule": Change(scheduled_decay),
    "the same, and cautious": Change(cautious_decay),
    "no weight decay of Muon's matrices": Change(no_muon_decay),
    "no weight decay of wte and wpe": Change(own_groups(embeddings, weight_decay=0.0)),
    "wte at 6e-3": Change(own_groups(token_table, lr=6e-3)),
    "wpe at 1e-2": Change(own_groups(position_table, lr=1e-2)),
    "one-dimensional tensors at 1e-2": Change(own_groups(one_dimensional, lr=1e-2)),
    "beta2 of AdamW 0.98": Change(constants=dict(beta2=0.98)),
    "decay over 70% of the steps": Change(constants=dict(decay_fraction=0.7)),
    "split cooldown": Change(split_cooldown),
    "projections that start at zero": Change(zero_projections),
    "NorMuon": Change(normuon),
    "EMA-Nesterov": Change(ema_nesterov),
    "average of the last 5% of the steps": Change(tail_average(0.05)),
    "average of the last 15%": Change(tail_average(0.15)),
}
