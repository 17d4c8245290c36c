"""LoRA (Hu et al. 2021): the method and merging; parts/huggingface.py has an adapter's files.

A projection y = x W^T + b of a block keeps W and b, and gains a bypass of rank r:

    x ──┬── W (frozen) ──────────────────────(+)── y        A (r, in)  Kaiming uniform
        └── dropout ── A ── B ── * alpha / r ──┘            B (out, r) zero, so that y starts as the base's

The paper's hypothesis is that finetuning moves a weight along few directions (section 4.1). If so, r (in + out) numbers
can replace in * out of them. Only they need gradients and optimizer state, and only they are in an adapter's file.

This file knows nothing of training or conversations, and of the command line only the flag --targets.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model import GPT
from parts.cli import UserError

TARGETS = ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")  # all projections of a block


@dataclass(frozen=True)
class LoRAConfig:
    """The settings of an adapted model."""

    r: int
    alpha: float
    dropout: float = 0.0  # on the input of the bypass
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False  # scale by alpha / sqrt(r), so that a large r does not shrink the update (Kalajdzievski 2023)

    def __post_init__(self):
        if not (self.r >= 1 and 0 < self.scale < math.inf):
            raise UserError(f"lora_dim {self.r} and lora_alpha {self.alpha:g} make no scale; set both above 0")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


# -------------------------------------------------------------------------------------------------------- the method


class LowRankLinear(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T, for frozen W and b.

    Autograd would compute the same from the formula, but allocate and keep more tensors as large as x and y. Here the
    bypass is added in place, forward and backward. All tensors have one dtype; x is (N, in).
    """

    @staticmethod
    def forward(ctx, x, weight, bias, A, B, scale: float):
        h = x @ A.T  # (N, r)
        ctx.save_for_backward(x, weight, A, B, h)  # the formula would keep x as well, and h is small
        ctx.scale = scale
        return F.linear(x, weight, bias).addmm_(h, B.T, alpha=scale)  # (N, out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):  # (N, out)
        x, weight, A, B, h = ctx.saved_tensors
        # the chain rule on y = x W^T + s h B^T and h = x A^T; W and b are frozen, which saves the largest product
        grad_h = (grad_y @ B) * ctx.scale  # (N, r)
        # nothing below the first adapted projection needs a gradient
        grad_x = (grad_y @ weight).addmm_(grad_h, A) if ctx.needs_input_grad[0] else None  # (N, in)
        grad_B = (h.T @ grad_y).T * ctx.scale  # (out, r); transposed because a tall thin product is slow on a CPU
        return grad_x, None, None, grad_h.T @ x, grad_B, None


class LoRALinear(nn.Module):
    """A frozen nn.Linear with a bypass of rank r."""

    def __init__(self, linear: nn.Linear, config: LoRAConfig):
        super().__init__()
        self.weight = linear.weight  # names as in nn.Linear, so that a base's checkpoint fits
        self.bias = linear.bias
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(config.r, linear.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, config.r, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as in the authors' code and in nn.Linear
        self.scale = config.scale
        self.dropout = config.dropout
        self.register_buffer("unmerged", None, persistent=False)  # the base's weight, while merged

    def forward(self, x):
        if self.unmerged is not None:  # merged: the weight contains the bypass
            return F.linear(x, self.weight, self.bias)
        if self.dropout and self.training:  # W and A read different inputs, so the fused Function does not apply
            bypass = F.linear(F.linear(F.dropout(x, self.dropout), self.lora_A), self.lora_B)
            return F.linear(x, self.weight, self.bias) + bypass * self.scale
        # autocast does not reach into a Function, so we choose the precision of its products here
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        tensors = (x.flatten(0, -2), self.weight, self.bias, self.lora_A, self.lora_B)
        tensors = (t if t is None else t.to(dtype) for t in tensors)  # no bias
        return LowRankLinear.apply(*tensors, self.scale).unflatten(0, x.shape[:-1])

    @torch.no_grad()
    def merge(self) -> None:
        """Add the bypass to the weight, in fp64 so that fp32 is rounded only once. Merging again changes nothing."""
        if self.unmerged is None:
            self.unmerged = self.weight.data
            # on the CPU, because MPS has no fp64
            delta = self.lora_B.cpu().double() @ self.lora_A.cpu().double() * self.scale  # (out, in)
            self.weight.data = (self.weight.cpu().double() + delta).to(self.weight)

    def unmerge(self) -> None:
        """Put the base's weight back. `merge` kept it: subtracting the bypass would not restore the exact bits."""
        if self.unmerged is not None:
            self.weight.data = self.unmerged
            self.unmerged = None


def target_names(model: GPT, targets) -> list[str]:
    """Return the names of the modules to adapt, in every block. Raises UserError for others."""
    if not targets or not set(targets) <= set(TARGETS):
        raise UserError(
            f"--targets {' '.join(targets)!r:.80}: choose from {', '.join(TARGETS)} "
            "(wte and lm_head are one tied matrix; a bypass on one would untie them and could not be merged)"
        )
    return [name for name, _ in model.named_modules() if name.endswith(tuple(targets))]


def add_lora(model: GPT, config: LoRAConfig) -> GPT:
    """Freeze `model` and add a bypass to each target, in place, and keep the config as `model.lora`. Its outputs do not
    change until B is trained."""
    model.requires_grad_(False)  # embeddings and LayerNorm too: only the adapter is trained
    for name in target_names(model, config.targets):
        model.set_submodule(name, LoRALinear(model.get_submodule(name), config))
    model.lora = config
    return model


def lora_modules(model: GPT) -> dict[str, LoRALinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def merge(model: GPT) -> GPT:
    """Add every bypass to its weight, for inference without overhead. Idempotent."""
    for module in lora_modules(model).values():
        module.merge()
    return model


def unmerge(model: GPT) -> GPT:
    """Undo `merge`; the base's weights come back bit for bit. Idempotent."""
    for module in lora_modules(model).values():
        module.unmerge()
    return model


def remove_lora(model: GPT) -> GPT:
    """Turn the adapted modules back into plain nn.Linear, with their present weights, merged or not: a plain model that
    can be trained. (Autocast keeps its casts of such weights alone, and would cast frozen ones in every pass.)"""
    for name, module in lora_modules(model).items():
        n_out, n_in = module.weight.shape
        linear = nn.Linear(n_in, n_out, device="meta")  # no memory for weights that are about to be replaced
        linear.weight = module.weight
        linear.bias = module.bias
        model.set_submodule(name, linear)
    return model.requires_grad_(True)


def cast_frozen(model: GPT, dtype: torch.dtype) -> None:
    """Cast frozen projections to the dtype of the matrix products once, instead of in every forward pass.

    The results equal those of autocast bit for bit. The output projection stays in fp32, as evaluations need it.
    """
    for module in model.transformer.h.modules():
        if isinstance(module, nn.Linear | LoRALinear):
            module.weight.data = module.weight.data.to(dtype)
            if module.bias is not None:
                module.bias.data = module.bias.data.to(dtype)
