"""Whether a GPU computes what it should: the fast way of each thing against the plain one, on the same weights.

- `numerics`: the losses of 20 steps as train_gpt2.py makes them, against formulas spelled out in eager mode
- `attention`: output and gradients of every attention kernel against the formula, and the time that each takes
- `scores`: the sums of HellaSwag as they are batched here, against one ending at a time

In bf16 nothing can be equal: what is asked is that the fast way is no further from fp32 than the plain way in bf16 is,
but for a factor of two. This file knows nothing of run directories; restarts.py checks those.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.hellaswag import score_one_by_one
from benchmarks.measure import TINY
from bpe.tokenizer import Tokenizer
from corpus.order import to_inputs
from hellaswag import evaluate, prepare
from learning.optim import learning_rate, make_optimizer
from model import GPT, Loss
from run import trials
from run.runtime import Runtime
from train_gpt2 import RECIPES, Config, model_shape
from train_gpt2 import prepare as prepare_model

STEPS = 20
WORDS = "A woman makes tea in a kitchen and then she drinks it while the rain falls on the roof of her house".split()


def check(name: str, found: str, ok: bool) -> dict:
    """A row of the report."""
    print(f"{'ok   ' if ok else 'WRONG'} {name}: {found}", flush=True)
    return dict(name=name, found=found, ok=bool(ok))


# ------------------------------------------------------------------------------------------------------- 20 steps


def numerics(config, rt: Runtime) -> list[dict]:
    dtypes = ["float32", "bfloat16"]
    plain = {dtype: losses_of(plain_steps, dtype, rt, config.size) for dtype in dtypes}
    rounding = distance(plain["bfloat16"], plain["float32"])  # what bf16 costs, however it is computed
    rows = []
    for dtype, limit in (("float32", 5e-4), ("bfloat16", 2 * rounding + 1e-3)):
        ours = losses_of(project_steps, dtype, rt, config.size)
        far = distance(ours, plain["float32"])
        found = f"{ours[0]:.4f} to {ours[-1]:.4f}, at most {far:.1e} from the formula in fp32 (allowed {limit:.1e})"
        rows.append(check(f"{STEPS} steps, {dtype}, {how(dtype, rt)}", found, far < limit and ours[-1] < ours[0]))
    return rows


def distance(a: list[float], b: list[float]) -> float:
    return float(np.abs(np.subtract(a, b)).max())


def how(dtype: str, rt: Runtime) -> str:
    return "compiled" if Runtime.setup(rt.device.type, dtype, "auto").compile else "not compiled"


def constants(size: str) -> Config:
    """A model that is quick to compile: 4 layers of GPT-2's width, or tiny."""
    sizes = TINY | dict(sequence_length=32, vocab_size=512) if size == "tiny" else dict(n_layer=4, sequence_length=512)
    return replace(RECIPES["gpt2"], **sizes, micro_batch_size=4, max_steps=STEPS, warmup_steps=2, max_lr=1e-3)


def losses_of(make: Callable, dtype: str, rt: Runtime, size: str) -> list[float]:
    """Losses of STEPS steps that make(config, rt, model) returns a function for: step(number, idx, targets)."""
    config, rt = constants(size), Runtime.setup(rt.device.type, dtype, "auto")
    torch.compiler.reset()  # guards of the last precision would only be in the way
    torch.manual_seed(0)
    model = GPT(model_shape(config, "gpt2", None, rt)).to(rt.device)
    generator = torch.Generator().manual_seed(0)
    # 50 tokens out of all: what frequencies there are is learned in 20 steps
    batch = torch.randint(50, (STEPS, 4, config.sequence_length + 1), generator=generator).to(rt.device)
    step = make(config, rt, model)
    return torch.stack([step(number, *to_inputs(windows)) for number, windows in enumerate(batch, start=1)]).tolist()


def project_steps(config: Config, rt: Runtime, model: GPT) -> Callable:
    """Steps as train_gpt2.py makes them."""
    prepare_model(model, config, rt)
    forward, optimizer = rt.wrap(Loss(model)), make_optimizer(model, config, rt)

    def step(number: int, idx, targets) -> torch.Tensor:
        optimizer.set_lr(learning_rate(number, config))
        with rt.autocast():
            loss = forward(idx, targets, n_targets=torch.full((), targets.numel(), device=rt.device))
        optimizer.scale(loss).backward()
        norm = optimizer.clip_grad_norm(config.grad_clip)
        optimizer.step(finite=norm.isfinite())
        return loss.detach()

    return step


def plain_steps(config: Config, rt: Runtime, model: GPT) -> Callable:
    """The recipe spelled out: the formula of attention, all logits, a loop over torch's AdamW; nothing compiled."""
    for block in model.transformer.h:
        block.attn.attention = "naive"
    groups = [dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=config.weight_decay),
              dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0)]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), foreach=False, fused=False)

    def step(number: int, idx, targets) -> torch.Tensor:
        with rt.autocast():
            logits = model(idx)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, config)
        optimizer.step()
        return loss.detach()

    return step


# ------------------------------------------------------------------------------------------------------- attention


def attention(config, rt: Runtime) -> list[dict]:
    rt = Runtime.setup(rt.device.type, "auto")
    shapes = [(2, 2, 64, 32)] if config.size == "tiny" else [(16, 12, 1024, 64), (64, 12, 1024, 64), (4, 25, 1024, 64)]
    kernels = trials.attention_kernels(rt.device.type, dropout=0.0)
    rows = []
    for shape in shapes:
        qkv, grad = trials.attention_inputs(rt, shape)
        seconds = trials.time_kernels(kernels, qkv, grad, shape, rt)
        for name, s in zip(kernels or ["as it comes"], seconds or [None], strict=True):
            if s == float("inf"):
                print(f"{name} is not to be had here")
                continue
            if kernels:
                trials.use_kernel(name)
            error = trials.attention_error(qkv, grad, shape)
            found = f"{error:.2%} from the formula" + (f", {1e3 * s:.3f} ms forward and backward" if s else "")
            rows.append(check(f"attention {name}, {shape}, {rt.dtype}", found, error < trials.LARGEST_ERROR))
    return rows


# -------------------------------------------------------------------------------------------------------- HellaSwag


def scores(config, rt: Runtime) -> list[dict]:
    """On invented rows with a tokenizer of their own, so that nothing has to be downloaded."""
    tokenizer = Tokenizer.train([" ".join(WORDS)], 300)
    rows = [invented(i) for i in range(8 if config.size == "tiny" else 64)]
    torch.manual_seed(0)
    model = GPT(replace(model_shape(constants(config.size), "gpt2", None, rt), sequence_length=256))
    for p in model.parameters():  # far from a uniform guess: logits of some size, as of a trained model
        torch.nn.init.normal_(p, std=0.1)
    model.to(rt.device)
    task = prepare(rows, tokenizer, model.config, "completion")
    plain = np.array(score_one_by_one(model, tokenizer, rows, rt))  # (rows, 4), before anything allows TF32
    found = []
    for dtype, limit in (("float32", 1e-4), ("auto", 0.05)):
        ours = -np.array(evaluate(model, task, Runtime.setup(rt.device.type, dtype))["log_likelihoods"])
        error = float(np.abs(ours / plain - 1).max())
        found.append(check(f"sums of HellaSwag, {dtype}", f"{error:.1e} from one at a time in fp32", error < limit))
    return found


def invented(number: int) -> dict:
    rng = np.random.default_rng(number)
    pick = partial(lambda n: " ".join(rng.choice(WORDS, n)))
    endings = [pick(int(rng.integers(2, 9))) for _ in range(4)]
    return dict(ctx=pick(int(rng.integers(3, 15))), endings=endings, label=number % 4)
