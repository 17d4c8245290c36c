"""What `bench.py lab` can try: by recipe and name, constants of train_gpt2.py or a patch of a few lines.

`model` changes a GPT in place before its optimizer is made. `patch` gets the parts of a run (model, muon, adamw and
config) and returns functions of the step, by when they are called: before_step, after_step, at_end. Most that were
tried are removed again: docs/lab.jsonl keeps their results. This file knows nothing of how ideas are judged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from model import GPT


def unchanged(of) -> dict:
    return {}


@dataclass(frozen=True)
class Idea:
    source: str  # what it is, and whose
    constants: dict = field(default_factory=dict)  # of train_gpt2.py
    patch: Callable[..., dict] = unchanged
    options: dict = field(default_factory=dict)  # of the patch
    model: Callable[[GPT], object] = unchanged
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


def post_norm(model: GPT) -> None:
    def forward(block, x, mask=None, cache=None):
        x = block.ln_1(x + block.attn(x, mask, cache))
        return block.ln_2(x + block.mlp(x))

    model.transformer.ln_f = nn.Identity()  # each block ends with one
    for block in model.transformer.h:
        block.forward = partial(forward, block)


# ----------------------------------------------------------------------------------------------- changes of a step


def groups(run, of: str, **constants) -> dict:
    for group in getattr(run, of).param_groups:
        group.update(constants)
    return {}


def two_momenta(run, first: float, last: float) -> dict:
    """Muon's momentum is a mixture of averages with decay rates 0.85 and 0.98. The slow one's part goes from `first`
    in the first step to `last` in the last one."""
    averages = {}
    keep = run.muon.defaults["momentum"]

    def before_step(step):
        part = first + (last - first) * step / run.config.max_steps
        for p in (p for group in run.muon.param_groups for p in group["params"]):
            state = run.muon.state[p]
            fast, slow = averages.setdefault(p, (torch.zeros_like(p), torch.zeros_like(p)))
            fast.lerp_(p.grad, 1 - 0.85)
            slow.lerp_(p.grad, 1 - 0.98)
            mixed = (1 - part) * fast + part * slow
            state["momentum_buffer"] = (mixed - (1 - keep) * p.grad) / keep  # Muon's own average makes it the mixture

    return dict(before_step=before_step)


# ------------------------------------------------------------------------------------------------------- the ideas

UNDO = "a choice of the recipe, undone"

GPT2 = {
    "embedding and head not tied": Idea("Press and Wolf 2017 tie them", model=untied),
    "no 1/sqrt(2 n_layer)": Idea("Radford et al. 2019, section 2.3, scale so", model=unscaled_init),
    "no warmup": Idea(UNDO, dict(warmup_steps=0)),
    "no weight decay": Idea(UNDO, dict(weight_decay=0.0)),
    "weight decay on biases and gains": Idea("as torch's AdamW", {}, groups, dict(of="adamw", weight_decay=0.1)),
    "post-norm": Idea("Vaswani et al. 2017, section 3.1", model=post_norm),
    "no positions": Idea("Haviv et al. 2022", model=no_positions),
}
TRACK = "modded-nanogpt, track 3, PR"
SPEEDRUN = {
    "AdamW instead of Muon": Idea(UNDO, dict(optimizer="adamw")),
    "Q, K and V as one matrix": Idea(UNDO, {}, groups, dict(of="muon", n_stacked=1)),
    "momentum 0.9": Idea(UNDO, {}, groups, dict(of="muon", momentum=0.9)),
    "one schedule for both": Idea(UNDO, dict(lr_schedule="wsd", decay_fraction=1.0)),
    "two momenta": Idea(f"{TRACK} 340", {}, two_momenta, dict(first=0.5615, last=0.5615)),
    "two momenta, the slow one fading": Idea(f"as in {TRACK} 357", {}, two_momenta, dict(first=0.85, last=0.4)),
    "the rest at 6e-3": Idea(f"{TRACK} 323", dict(max_lr=6e-3)),
    "weight decay 0.03": Idea("Wang and Aitchison 2024: less in longer runs", dict(weight_decay=0.03)),
}
TINY = {f"weight decay {x}": Idea("slowrun, for 100M tokens", dict(weight_decay=x)) for x in (0.3, 0.8, 1.2, 1.6)}
TINY["dropout 0.1"] = Idea("the same", dict(dropout=0.1))
IDEAS = {"gpt2": GPT2, "speedrun": SPEEDRUN, "tiny": TINY}  # by the recipe of the baseline
