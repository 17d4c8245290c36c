"""What `bench.py lab` can try: by recipe and name, constants of train_gpt2.py or a patch of a few lines.

An idea that others had comes with its source. `model` changes a GPT in place before its optimizer is made. `patch` gets
the parts of a run (model, muon, adamw, config) and returns functions of the step, by the moment at which they are
called: before_step, after_step, at_end. This file knows nothing of how ideas are compared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from learning import optim
from model import GPT

Hooks = dict[str, Callable[[int], None]]


@dataclass(frozen=True)
class Idea:
    source: str  # what it is, and whose
    constants: dict = field(default_factory=dict)  # of train_gpt2.py
    patch: Callable[..., Hooks] | None = None
    options: dict = field(default_factory=dict)  # of the patch
    model: Callable[[GPT], object] | None = None
    recipe: str = ""  # another one than the baseline's
    tokens: float = 1.0  # steps, as a fraction of the baseline's
    seeds_from: int = 0  # added to every seed


# ------------------------------------------------------------------------------------------ changes of the model


def untied(model: GPT) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


@torch.no_grad()
def unscaled_init(model: GPT) -> None:
    for block in model.transformer.h:
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            projection.weight.mul_(math.sqrt(2 * model.config.n_layer))


def no_positions(model: GPT) -> None:
    nn.init.zeros_(model.transformer.wpe.weight).requires_grad_(False)


def exact_gelu(model: GPT) -> None:
    for block in model.transformer.h:
        mlp = block.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.dropout(mlp.c_proj(F.gelu(mlp.c_fc(x))))


def post_norm(model: GPT) -> None:
    """LayerNorm after each addition, and none at the end."""

    def forward(block, x, mask=None, cache=None):
        x = block.ln_1(x + block.attn(x, mask, cache))
        return block.ln_2(x + block.mlp(x))

    model.transformer.ln_f = nn.Identity()
    for block in model.transformer.h:
        block.forward = partial(forward, block)


# -------------------------------------------------------------------------------------------- changes of the steps


def groups(run, of: str, **constants) -> Hooks:
    for group in getattr(run, of).param_groups:
        group.update(constants)
    return {}


def own_group(run, name: str, **constants) -> Hooks:
    """The tensor of that name leaves its group of AdamW for one with `constants`."""
    p = run.model.get_parameter(name)
    group = next(group for group in run.adamw.param_groups if any(p is q for q in group["params"]))
    group["params"] = [q for q in group["params"] if q is not p]
    inherited = {key: group[key] for key in ("lr", "betas", "weight_decay")} | constants
    run.adamw.add_param_group(dict(params=[p], initial_lr=inherited["lr"], **inherited))
    return {}


def row_norms(run) -> Hooks:
    """Divide each row of Muon's momentum by its norm before the matrix is orthogonalized."""
    plain = optim.orthogonalized

    def orthogonalized(matrices, dtype):
        return plain(F.normalize(matrices, dim=2), dtype)

    optim.orthogonalized = orthogonalized
    return dict(at_end=lambda step: setattr(optim, "orthogonalized", plain))


def two_momenta(run, fast: float, slow: float, share: float, after: float) -> Hooks:
    """Muon's momentum is share x a fast mean of gradients + (1 - share) x a slow one, after a part of the steps."""
    params = [p for group in run.muon.param_groups for p in group["params"]]
    means = {beta: [torch.zeros_like(p) for p in params] for beta in (fast, slow)}

    def before_step(step: int) -> None:
        grads = [p.grad for p in params]
        for beta, mean in means.items():
            torch._foreach_lerp_(mean, grads, 1 - beta)
        if step > after * run.config.max_steps:
            mixed = torch._foreach_mul(means[fast], share)
            torch._foreach_add_(mixed, means[slow], alpha=1 - share)
            torch._foreach_lerp_(grads, mixed, 0.95)  # Nesterov's, here, so that Muon's own has nothing to add
            groups(run, "muon", momentum=0.0)

    return dict(before_step=before_step)


def hyperball(run, peak: float, floor: float) -> Hooks:
    """Every matrix keeps its norm: a step turns it by a fraction of that, and the four phases are those of the rate."""
    params = [p for group in run.muon.param_groups for p in group["params"]]
    groups(run, "muon", weight_decay=0.0)
    for p in params:
        nn.init.normal_(p, std=math.sqrt(1 / 3 / p.size(1)))
    norms, before = torch._foreach_norm(params), []

    def before_step(step: int) -> None:
        before[:] = [p.detach().clone() for p in params]

    @torch.no_grad()
    def after_step(step: int) -> None:
        done = step / run.config.max_steps
        fast = peak - (peak - floor) * max((done - 0.064) / 0.496, 0.0) ** 0.6
        rate = min(peak * done / 0.032, fast if done < 0.56 else floor * (1 - done) / 0.44)
        for p, old, norm in zip(params, before, norms, strict=True):
            moved = old - p
            p.copy_(old - moved * (rate * norm / moved.norm().clamp(min=1e-10)))
            p.mul_(norm / p.norm())

    return dict(before_step=before_step, after_step=after_step)


def tail_average(run, fraction: float, forget: float = 0.0) -> Hooks:
    """What is evaluated: the mean of the weights after each of the last steps, or one that forgets by 1 - `forget`."""
    params, seen = list(run.model.parameters()), []
    mean = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def after_step(step: int) -> None:
        if step > (1 - fraction) * run.config.max_steps:
            seen.append(step)
            torch._foreach_lerp_(mean, params, max(1 / len(seen), forget))

    @torch.no_grad()
    def at_end(step: int) -> None:
        torch._foreach_copy_(params, mean)

    return dict(after_step=after_step, at_end=at_end)


# ------------------------------------------------------------------------------------------------------------ the ideas

UNDO = "a choice of the recipe, undone"
LORE = "small texts, many epochs: qlabs-eng/slowrun on 100M tokens"

GPT2 = {
    "embedding and head not tied": Idea("Press and Wolf 2017 tie them", model=untied),
    "no 1/sqrt(2 n_layer)": Idea("Radford et al. 2019, section 2.3, scale so", model=unscaled_init),
    "no warmup": Idea(UNDO, dict(warmup_steps=0)),
    "no clipping": Idea(UNDO, dict(grad_clip=0.0)),
    "no weight decay": Idea(UNDO, dict(weight_decay=0.0)),
    "weight decay on biases and gains": Idea("as torch's AdamW does", {}, groups, dict(of="adamw", weight_decay=0.1)),
    "no shuffling": Idea(UNDO, dict(shuffle=False)),
    "post-norm": Idea("Vaswani et al. 2017, section 3.1", model=post_norm),
    "post-norm, no warmup": Idea("the same", dict(warmup_steps=0), model=post_norm),
    "exact GELU": Idea("Hendrycks and Gimpel 2016", model=exact_gelu),
    "no positions": Idea("Haviv et al. 2022", model=no_positions),
}
SPEEDRUN = {
    **{  # the baseline needs 40% of the tokens, or less, if the best of these is a harm
        f"AdamW at {lr:g}, 2.5 times the tokens": Idea(
            "the recipe gpt2", dict(max_lr=lr, min_lr=lr / 10), recipe="gpt2", tokens=2.5
        )
        for lr in (1e-3, 2e-3, 3e-3, 5e-3)
    },
    "AdamW instead of Muon": Idea(UNDO, dict(optimizer="adamw")),
    "Muon at 0.01": Idea(UNDO, dict(muon_lr=0.01)),
    "Muon at 0.04": Idea(UNDO, dict(muon_lr=0.04)),
    "the rest at 6e-3": Idea(UNDO, dict(max_lr=6e-3)),
    "the rest at 1e-2": Idea(UNDO, dict(max_lr=1e-2)),
    "cosine": Idea(UNDO, dict(lr_schedule="cosine")),
    "decay in the last quarter": Idea(UNDO, dict(decay_fraction=0.25)),
    "Q, K and V as one matrix": Idea(UNDO, {}, groups, dict(of="muon", parts=1)),
    "momentum 0.9": Idea(UNDO, {}, groups, dict(of="muon", momentum=0.9)),
    "rows normalized": Idea("MuonEq-R: slowrun, nanochat", patch=row_norms),
    "two momenta": Idea(
        "bi-Maxwell: modded-nanogpt 340, whose two rates we did not find: 0.9 and 0.98 are ours",
        patch=two_momenta, options=dict(fast=0.9, slow=0.98, share=0.4385, after=0.31),
    ),
    "hyperball": Idea("MuonH: modded-nanogpt 351", patch=hyperball, options=dict(peak=0.03, floor=0.006)),
    "wte with beta2 0.98": Idea(
        "a longer memory for rare tokens", patch=own_group,
        options=dict(name="transformer.wte.weight", betas=(0.9, 0.98)),
    ),
    "no decay, mean of the last 20%": Idea(
        "in place of a decaying rate", dict(min_lr=3e-3), tail_average, dict(fraction=0.2),
    ),
}  # fmt: skip
TINY = {
    **{f"weight decay {decay}": Idea(LORE, dict(weight_decay=decay)) for decay in (0.3, 0.8, 1.2, 1.6)},
    "dropout 0.1": Idea(LORE, dict(dropout=0.1)),
    "weight decay 0.8, dropout 0.1": Idea(LORE, dict(weight_decay=0.8, dropout=0.1)),
    "mean of the last 25%": Idea(LORE, patch=tail_average, options=dict(fraction=0.25)),
    "EMA of 0.995": Idea(LORE, patch=tail_average, options=dict(fraction=0.25, forget=0.005)),
}
IDEAS = {"gpt2": GPT2, "speedrun": SPEEDRUN, "tiny": TINY}  # by the recipe of the baseline
