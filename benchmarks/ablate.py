"""What everybody copies: the choices of GPT-2's recipe, undone one at a time, on a small model.

Each line is one change to the recipe of a model with a quarter of a million parameters, trained once for each of
--repeats seeds, for --steps steps of 512 tokens; see benchmarks/seeds.py.
Not shown: what the same changes do at 124M, or over more tokens. Several of them are for stability at depth.
"""

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.seeds import Change, Config, Hooks, chosen, compare, settings, shards_of, train
from model import GPT, GPTConfig
from run.runtime import Runtime

SHAPE = dict(n_layer=4, n_head=2, n_embd=64, sequence_length=32, vocab_size=1024, total_batch_size=512)


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    one = partial(train_one, steps=config.steps, shards=shards_of(config, SHAPE["vocab_size"]), device=rt.device.type)
    yield from compare(chosen(CHANGES, config.only), config.repeats, one, rt)


def train_one(name: str, seed: int, steps: int, shards: str, device: str) -> float:
    changes = dict(max_lr=3e-3, min_lr=3e-4, warmup_steps=max(steps // 25, 1), eval_steps=0)
    training = settings("gpt2", steps, SHAPE, seed, **changes)
    [(_, loss)] = train(CHANGES[name], training, shards, Runtime.setup(device, "float32"))
    return loss


# ------------------------------------------------------------------------------------------------------ the changes


class Untied(GPT):
    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.lm_head.weight = nn.Parameter(self.lm_head.weight.detach().clone())


class UnscaledInit(GPT):
    def __init__(self, config: GPTConfig):
        super().__init__(config)
        with torch.no_grad():
            for block in self.transformer.h:
                for projection in (block.attn.c_proj, block.mlp.c_proj):
                    projection.weight.mul_(math.sqrt(2 * config.n_layer))


class ExactGELU(GPT):
    def __init__(self, config: GPTConfig):
        super().__init__(config)
        for block in self.transformer.h:
            block.mlp.forward = partial(exact_gelu, block.mlp)


class NoPositions(GPT):
    def __init__(self, config: GPTConfig):
        super().__init__(config)
        nn.init.zeros_(self.transformer.wpe.weight).requires_grad_(False)


class PostNorm(GPT):
    """LayerNorm after each addition, as Vaswani et al. 2017 have it (section 3.1), and none at the end."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.transformer.ln_f = nn.Identity()
        for block in self.transformer.h:
            block.forward = partial(post_norm, block)


def exact_gelu(mlp, x):
    return mlp.dropout(mlp.c_proj(F.gelu(mlp.c_fc(x))))


def post_norm(block, x, mask=None, cache=None):
    x = block.ln_1(x + block.attn(x, mask, cache))
    return block.ln_2(x + block.mlp(x))


def decay_all(run: SimpleNamespace) -> Hooks:
    """Biases and LayerNorms are decayed, too."""
    for group in run.adamw.param_groups:
        group["weight_decay"] = run.config.weight_decay
    return {}


CHANGES = {
    "the recipe": Change(),
    "embedding and head not tied": Change(model=Untied),
    "no 1/sqrt(2 n_layer)": Change(model=UnscaledInit),
    "no warmup": Change(constants=dict(warmup_steps=0)),
    "no clipping": Change(constants=dict(grad_clip=0.0)),
    "no weight decay": Change(constants=dict(weight_decay=0.0)),
    "weight decay on biases and gains": Change(decay_all),
    "no shuffling": Change(constants=dict(shuffle=False)),
    "post-norm": Change(model=PostNorm),
    "post-norm, no warmup": Change(constants=dict(warmup_steps=0), model=PostNorm),
    "exact GELU": Change(model=ExactGELU),
    "no positions": Change(model=NoPositions),
}
