"""What `bench.py lab` can try: by recipe and name, constants of train_gpt2.py or a patch of a few lines.

`model` changes a GPT in place before its optimizer is made. `patch` gets the parts of a run (model, muon, adamw and
config) and returns functions of the step, by when they are called: before_step, after_step, at_end. Ideas that gained
nothing are removed; docs/lab.jsonl has their results. This file knows nothing of how ideas are judged.
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


@dataclass(frozen=True)
class Idea:
    source: str  # what it is, and whose
    constants: dict = field(default_factory=dict)  # of train_gpt2.py
    patch: Callable[..., dict] | None = None
    options: dict = field(default_factory=dict)  # of the patch
    model: Callable[[GPT], object] | None = None
    recipe: str = ""  # another one than the baseline's
    tokens: float = 1.0  # steps, as a fraction of the baseline's
    seeds_from: int = 0  # added to every seed


# ----------------------------------------------------------------------------------------------- changes of a model


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
        block.mlp.forward = lambda x, mlp=block.mlp: mlp.dropout(mlp.c_proj(F.gelu(mlp.c_fc(x))))


def post_norm(model: GPT) -> None:
    """LayerNorm after each addition, and none at the end."""

    def forward(block, x, mask=None, cache=None):
        x = block.ln_1(x + block.attn(x, mask, cache))
        return block.ln_2(x + block.mlp(x))

    model.transformer.ln_f = nn.Identity()
    for block in model.transformer.h:
        block.forward = partial(forward, block)


# ----------------------------------------------------------------------------------------------- changes of a step


def groups(run, of: str, **constants) -> dict:
    for group in getattr(run, of).param_groups:
        group.update(constants)
    return {}


def row_norms(run) -> dict:
    """Divide each row of Muon's momentum by its norm before the matrix is orthogonalized."""
    plain = optim.orthogonalized
    optim.orthogonalized = lambda matrices, dtype: plain(F.normalize(matrices, dim=2), dtype)
    return dict(at_end=lambda step: setattr(optim, "orthogonalized", plain))


def mixed_momentum(run, start: float = 0.3) -> dict:
    """From `start` of the run on, Muon's momentum is a mixture of a fast and a slow average of the gradients."""
    averages, keep = {}, run.muon.defaults["momentum"]

    def before_step(step):
        for p in (p for group in run.muon.param_groups for p in group["params"] if step > start * run.config.max_steps):
            momentum = run.muon.state[p]["momentum_buffer"]
            fast, slow = averages.setdefault(p, (momentum.clone(), momentum.clone()))
            mixed = 0.4385 * fast.lerp_(p.grad, 1 - 0.85) + 0.5615 * slow.lerp_(p.grad, 1 - 0.98)
            momentum.copy_((mixed - (1 - keep) * p.grad) / keep)  # so that Muon's own average becomes the mixture

    return dict(before_step=before_step)


def four_phases(run) -> dict:
    """Muon's rate: warmup, plateau, a fast decay to a fifth (progress to the power of 0.6), a slow one to 0."""

    def before_step(step):
        t = (step - 1) / run.config.max_steps * 3125
        fast, slow = max(0, t - 200) / 1550, (t - 1750) / 1375
        height = 0.2 * (1 - slow) if t >= 1750 else min((t + 1) / 100, 1 - 0.8 * fast**0.6)
        for group in run.muon.param_groups:
            group["lr"] = group["initial_lr"] * height

    return dict(before_step=before_step)


def both(run) -> dict:
    first, second = four_phases(run)["before_step"], mixed_momentum(run)["before_step"]
    return dict(before_step=lambda step: (first(step), second(step)))


def hyperball(run, lr: float = 0.03) -> dict:
    """Each matrix keeps its norm, and moves by `lr` of it, in four phases: MuonH."""
    phases, before = four_phases(run)["before_step"], {}
    for group in run.muon.param_groups:
        group.update(initial_lr=1.0, weight_decay=0.0)

    def before_step(step):
        phases(step)
        before.update((p, p.detach().clone()) for group in run.muon.param_groups for p in group["params"])

    @torch.no_grad()
    def after_step(step):
        for group in run.muon.param_groups:
            for p in group["params"]:
                old, radius = before[p], before[p].norm()
                p.copy_(old + ((p - old) / (p - old).norm()) * lr * group["lr"] * radius)
                p.mul_(radius / p.norm())

    return dict(before_step=before_step, after_step=after_step)


def tail_average(run, window: float = 0.1) -> dict:
    """Validate an exponential moving average of the weights that remembers the last `window` of the steps."""
    average = {p: p.detach().clone() for p in run.model.parameters()}

    @torch.no_grad()
    def after_step(step):
        for p, mean in average.items():
            mean.lerp_(p, 1 / min(step, window * run.config.max_steps))

    @torch.no_grad()
    def at_end(step):
        for p, mean in average.items():
            p.copy_(mean)

    return dict(after_step=after_step, at_end=at_end)


def memory_of_vectors(run, beta2: float) -> dict:
    run.adamw.param_groups[1].update(betas=(run.config.beta1, beta2))
    return {}


# ------------------------------------------------------------------------------------------------------- the ideas

UNDO = "a choice of the recipe, undone"
LORE = "small texts, many epochs: qlabs-eng/slowrun, 100M tokens"

GPT2 = {
    "embedding and head not tied": Idea("Press and Wolf 2017 tie them", model=untied),
    "no 1/sqrt(2 n_layer)": Idea("Radford et al. 2019, section 2.3, scale so", model=unscaled_init),
    "no warmup": Idea(UNDO, dict(warmup_steps=0)),
    "no clipping": Idea(UNDO, dict(grad_clip=0.0)),
    "no weight decay": Idea(UNDO, dict(weight_decay=0.0)),
    "weight decay on biases and gains": Idea("as torch's AdamW", {}, groups, dict(of="adamw", weight_decay=0.1)),
    "no shuffling": Idea(UNDO, dict(shuffle=False)),
    "post-norm": Idea("Vaswani et al. 2017, section 3.1", model=post_norm),
    "post-norm, no warmup": Idea("the same", dict(warmup_steps=0), model=post_norm),
    "exact GELU": Idea("Hendrycks and Gimpel 2016", model=exact_gelu),
    "no positions": Idea("Haviv et al. 2022", model=no_positions),
}
SPEEDRUN = {
    "AdamW instead of Muon": Idea(UNDO, dict(optimizer="adamw")),
    "the rest at 1e-2": Idea(UNDO, dict(max_lr=1e-2)),
    "Q, K and V as one matrix": Idea(UNDO, {}, groups, dict(of="muon", parts=1)),
    "momentum 0.9": Idea(UNDO, {}, groups, dict(of="muon", momentum=0.9)),
    "rows normalized": Idea("MuonEq-R: slowrun, nanochat", {}, row_norms),
    "two momenta": Idea("bi-Maxwell: modded-nanogpt, PR 340", {}, mixed_momentum),
    "four phases": Idea("modded-nanogpt, PR 351, without its hyperball", {}, four_phases),
    "Muon at 0.01": Idea(UNDO, dict(muon_lr=0.01)),
    "decay over all steps": Idea(UNDO, dict(decay_fraction=1.0)),
    "Muon at 0.01, decay over all steps": Idea(UNDO, dict(decay_fraction=1.0, muon_lr=0.01)),
    "decay over all steps, Muon at 0.03": Idea(UNDO, dict(decay_fraction=1.0, muon_lr=0.03)),
    "two momenta, four phases": Idea("both", {}, both),
    "two momenta from the start": Idea("bi-Maxwell, always", {}, mixed_momentum, dict(start=0.001)),
    "MuonH, four phases": Idea("modded-nanogpt, PR 351", {}, hyperball),
    "constant rate, average of the tail": Idea("in place of a decay", dict(min_lr=3e-3), tail_average),
    "beta2 0.99 for vectors": Idea("modded-nanogpt, PR 321", {}, memory_of_vectors, dict(beta2=0.99)),
}
for rate in ("1e-3", "2e-3", "3e-3", "5e-3"):  # if even the best is a harm, speedrun needs at most 40%
    rates = dict(max_lr=float(rate), min_lr=float(rate) / 10)
    SPEEDRUN[f"AdamW at {rate}, 2.5 times the tokens"] = Idea("tuned", rates, recipe="gpt2", tokens=2.5)
TINY = {
    **{f"weight decay {decay}": Idea(LORE, dict(weight_decay=decay)) for decay in (0.3, 0.8, 1.2, 1.6)},
    "dropout 0.1": Idea(LORE, dict(dropout=0.1)),
}
IDEAS = {"gpt2": GPT2, "speedrun": SPEEDRUN, "tiny": TINY}  # by the recipe of the baseline
