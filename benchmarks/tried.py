"""The choices of the recipe speedrun, undone, and what others gained tokens by, tried on it: each in a few lines.

Every line is the recipe with one change, trained once for each of --repeats seeds on --fraction of the tokens of
--steps batches, on a model of one or five million parameters; see benchmarks/seeds.py. --only "NorMuon" leaves out the
other lines. What does not gain at two sizes does not enter train_gpt2.py.
Unfair to ideas that need many steps: these runs have a few hundred.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.seeds import SHAPES, Change, Hooks, chosen, compare, settings, shards_of, train
from benchmarks.speedrun import LINES, Config
from learning.optim import learning_rate
from run.runtime import Runtime


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    lines = chosen(CHANGES, config.only)
    shards = shards_of(config, SHAPES[config.parameters]["vocab_size"])
    one = partial(train_one, config=config, shards=shards, device=rt.device.type)
    yield from compare(lines, config.repeats, one, rt)


def train_one(name: str, seed: int, config: Config, shards: str, device: str) -> float:
    steps = round(config.fraction * config.steps)
    training = settings("speedrun", steps, SHAPES[config.parameters], seed, eval_steps=100)
    [(_, loss)] = train(CHANGES[name], training, shards, Runtime.setup(device))
    return loss


# ------------------------------------------------------------------------------------------------------- the ideas


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
    """Divides each row of Muon's step by the root of the mean square of such rows so far, and keeps the norm of the
    whole step (Li et al. 2025, "NorMuon")."""
    before, squares = {}, {}

    def before_step(step: int) -> None:
        for group in run.muon.param_groups:
            group["weight_decay"] = 0.0
            before.update({p: p.detach().clone() for p in group["params"]})

    @torch.no_grad()
    def after_step(step: int) -> None:
        for group in (group for group in run.muon.param_groups if group["lr"]):
            lr = group["lr"]
            for p in group["params"]:
                moved = (before[p] - p).unflatten(0, (group["parts"], -1)) / lr  # (matrices, rows, columns)
                square = moved.square().mean(-1, keepdim=True)
                mean = squares.setdefault(p, torch.zeros_like(square)).lerp_(square, 0.05)
                scaled = moved * (mean + 1e-10).rsqrt()
                scaled *= moved.norm(dim=(1, 2), keepdim=True) / scaled.norm(dim=(1, 2), keepdim=True)
                p.copy_(before[p] * (1 - lr * run.config.weight_decay) - lr * scaled.flatten(0, 1))

    return dict(before_step=before_step, after_step=after_step)


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
