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


def row_norms(run) -> dict:
    """Divide each row of Muon's momentum by its norm before the matrix is orthogonalized."""
    plain = optim.orthogonalized
    optim.orthogonalized = lambda matrices, dtype: plain(F.normalize(matrices, dim=2), dtype)
    return dict(at_end=lambda step: setattr(optim, "orthogonalized", plain))


# ------------------------------------------------------------------------------------------------------- the ideas

UNDO = "a choice of the recipe, undone"

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
    "decay over half the steps": Idea(UNDO, dict(decay_fraction=0.5)),
    "Muon at 0.01": Idea(UNDO, dict(muon_lr=0.01)),
    "Q, K and V as one matrix": Idea(UNDO, {}, groups, dict(of="muon", n_stacked=1)),
    "momentum 0.9": Idea(UNDO, {}, groups, dict(of="muon", momentum=0.9)),
    "rows normalized": Idea("MuonEq-R: slowrun, nanochat", {}, row_norms),
}
for rate in ("1e-3", "2e-3", "3e-3", "5e-3"):  # if even the best is a harm, speedrun saves more than half
    rates = dict(max_lr=float(rate), min_lr=float(rate) / 10)
    SPEEDRUN[f"AdamW at {rate}, 2 times the tokens"] = Idea("tuned", rates, recipe="gpt2", tokens=2.0)
TINY = {f"weight decay {x}": Idea("slowrun, for 100M tokens", dict(weight_decay=x)) for x in (0.3, 0.8, 1.2, 1.6)}
TINY["dropout 0.1"] = Idea("the same", dict(dropout=0.1))
IDEAS = {"gpt2": GPT2, "speedrun": SPEEDRUN, "tiny": TINY}  # by the recipe of the baseline
