"""What everybody copies: the choices of GPT-2's recipe, undone one at a time, on a small model.

Each line is one change to the recipe of a model with a quarter of a million parameters, trained once for each of
--repeats seeds, for --steps steps of 512 tokens; a seed begins with the same weights and reads the same data in the
same order in all lines. The table has the validation loss and its distance to the recipe's with the same seed.
--data is a .txt (input.txt).
Not shown: what the same changes do at 124M, or over more tokens; stability at depth is what several of them are for.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from corpus.order import Batches, TokenStream, find_shards, to_inputs, validation_batches
from corpus.shards import prepare_text
from learning.optim import adamw, decay_groups, learning_rate
from model import GPT, GPTConfig
from run.runtime import Runtime
from train_gpt2 import Config

ROOT = Path(__file__).resolve().parent.parent
SHAPE = GPTConfig(n_layer=4, n_head=2, n_embd=64, n_positions=32, vocab_size=1024)
ROWS = 16  # sequences in a batch


def run(config, rt: Runtime) -> list[dict]:
    folder = prepare_text(config.data or str(ROOT / "input.txt"), "train", SHAPE.vocab_size, Path("out/cache"))
    streams = {s: TokenStream(find_shards(str(folder), s), SHAPE.vocab_size) for s in ("train", "val")}
    constants = Config(max_lr=3e-3, min_lr=3e-4, max_steps=config.steps, warmup_steps=max(config.steps // 25, 1))
    print(f"{SHAPE}\n{config.steps} steps of {ROWS * SHAPE.n_positions:,} tokens\n")
    print(f"{'':<36}validation loss, nats per token: mean, over the recipe's (the same, seed by seed)")
    rows = []
    for name, change in CHANGES.items():
        losses = [train(change, constants, seed, streams, rt) for seed in range(config.repeats)]
        over = [loss - recipe for loss, recipe in zip(losses, (rows[0]["losses"] if rows else losses), strict=True)]
        rows.append(dict(name=name, losses=losses, mean=statistics.mean(losses), over_recipe=over))
        each = ", ".join(f"{value:+.3f}" for value in over)
        print(f"{name:<36}{rows[-1]['mean']:.3f} {statistics.mean(over):+.3f} ({each})", flush=True)
    return rows


def train(change: "Change", constants: Config, seed: int, streams: dict[str, TokenStream], rt: Runtime) -> float:
    """The validation loss at the end of a run."""
    torch.manual_seed(seed)
    constants = replace(constants, **change.constants)
    model = change.model(SHAPE).to(rt.device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(change.groups(params, constants.weight_decay), constants)
    order = Batches(streams["train"], SHAPE.n_positions, seed, change.shuffle)
    for step in range(1, constants.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, constants)
        windows = next(order.micro_batches((step - 1) * ROWS, ROWS, ROWS))
        loss = model.loss(*to_inputs(torch.from_numpy(windows).to(rt.device)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), constants.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
    return validation_loss(model.eval(), streams["val"], SHAPE.n_positions, rt)


@torch.no_grad()
def validation_loss(model: GPT, stream: TokenStream, sequence_length: int, rt: Runtime, max_tokens: int = 0) -> float:
    """Nats per token, of all targets or of the first `max_tokens`."""
    total, n = 0.0, 0
    for windows in validation_batches(stream, sequence_length, 64, max_tokens):
        x, y = to_inputs(torch.from_numpy(windows).to(rt.device))
        n_targets = (y >= 0).sum().item()
        with rt.autocast():
            total, n = total + model.loss(x, y).item() * n_targets, n + n_targets
    return total / n


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


def one_group(params, weight_decay: float) -> list[dict]:
    """Biases and LayerNorms are decayed, too."""
    return [dict(params=list(params), weight_decay=weight_decay)]


@dataclass(frozen=True)
class Change:
    """What a line has instead of the recipe's."""

    constants: dict = field(default_factory=dict)
    model: type[GPT] = GPT
    shuffle: bool = True
    groups: Callable = decay_groups


CHANGES = {
    "the recipe": Change(),
    "embedding and head not tied": Change(model=Untied),
    "no 1/sqrt(2 n_layer)": Change(model=UnscaledInit),
    "no warmup": Change(dict(warmup_steps=0)),
    "no clipping": Change(dict(grad_clip=0.0)),
    "no weight decay": Change(dict(weight_decay=0.0)),
    "weight decay on biases and gains": Change(groups=one_group),
    "no shuffling": Change(shuffle=False),
    "post-norm": Change(model=PostNorm),
    "post-norm, no warmup": Change(dict(warmup_steps=0), model=PostNorm),
    "exact GELU": Change(model=ExactGELU),
    "no positions": Change(model=NoPositions),
}
