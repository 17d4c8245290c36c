"""The cross-entropy of a language model without ever holding all of its logits: a few positions at a time.

    loss = linear_cross_entropy(x, weight, targets)    # sum over targets >= 0 of -log softmax(x @ weight.T)[target]

`plain_cross_entropy` is the formula that everybody knows; the other one computes the same in a fraction of the memory.

GPT-2 turns 768 channels into 50,257 logits. For 64 x 1024 tokens those are 13 GB in fp32, and their gradients are as
many again: together more than all blocks keep for the backward pass. Both are needed for a moment only: the loss of a
position is one number of its logits, and the gradient, softmax(logits) - one_hot(target), goes into two products at
once. So the forward pass takes a chunk of positions, computes their logits, their loss and the gradients of `x` and
`weight`, and lets the next chunk overwrite them. All that is left for the backward pass is to multiply by the gradient
of the loss. No product is computed twice, so this costs no time, unlike activation checkpointing. (The same idea: Hsu
et al. 2024, Liger Kernel; Wijmans et al. 2024, "Cut your losses".)

On a GPU one kernel turns the logits of a chunk into their gradient (parts/loss_kernel.py). Nothing of this is compiled:
torch.compile keeps the logits of several chunks alive, and was no faster.

This file knows nothing of GPT-2 or ranks, and decides no precision: it obeys the autocast under which it is called.

Shapes in comments: N positions, C channels, V tokens of the vocabulary.
"""

import functools
import sys
from collections.abc import Callable

import torch
from torch.nn import functional as F

LOGITS = {"cpu": 2**19, "cuda": 2**30}  # alive at once, at most: on a CPU what its caches hold, on a GPU 2 GB in bf16
TILE = 256  # a chunk is a multiple of this: tensor cores multiply whole tiles


def plain_cross_entropy(x, weight, targets) -> torch.Tensor:
    """The oracle of `linear_cross_entropy`: all logits at once, and PyTorch's loss."""
    logits = x @ weight.T  # (N, V)
    targets = targets.where(targets >= 0, -100)
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def linear_cross_entropy(x, weight, targets) -> torch.Tensor:
    """Summed cross-entropy, an fp32 scalar in nats, of x (N, C) @ weight (V, C).T against targets (N,) int64.

    Negative targets are not scored. Products are in autocast's dtype, the gradient of `weight` is in its own.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    chunk = chunk_size(len(x), len(weight), device)
    with torch.autocast(device, enabled=False):
        # grad mode is always off inside a Function, so it is passed in
        need_grad = torch.is_grad_enabled()
        if device == "cuda" and (kernel := loss_kernel(len(weight), x.dtype)):
            return KernelCrossEntropy.apply(x, weight, targets, chunk, need_grad, kernel)
        return LinearCrossEntropy.apply(x, weight, targets, chunk, need_grad)


@functools.cache
def loss_kernel(vocab_size: int, dtype: torch.dtype) -> Callable | None:
    """`cross_entropy_` of parts/loss_kernel.py, or None where there is no Triton (Windows), no C compiler, which Triton
    needs, or a GPU for which it cannot compile the kernel: one row shows it."""
    try:
        from parts.loss_kernel import cross_entropy_

        cross_entropy_(torch.zeros(1, vocab_size, dtype=dtype, device="cuda"), torch.zeros(1, dtype=int, device="cuda"))
    except Exception as e:
        print(f"note: the loss does without its kernel: {' '.join(str(e).split())[:120]}", file=sys.stderr)
        return None
    return cross_entropy_


def chunk_size(n_positions: int, vocab_size: int, device: str) -> int:
    """Positions whose logits are alive at once: whole tiles of the tensor cores. Chunks are as few as LOGITS allows,
    since each adds a gradient of the size of `weight` to the sum, and about equally large."""
    most = max(LOGITS.get(device, 2**25) // vocab_size // TILE, 1)
    n_tiles = -(-n_positions // TILE)  # rounded up
    n_chunks = -(-n_tiles // most)
    if n_chunks > 1:
        most = -(-n_tiles // n_chunks)
    return most * TILE


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, chunk: int, need_grad: bool):
        w = weight.to(x.dtype)  # cast here, so that the gradient's sum over chunks is not rounded to 16 bits
        dtype = torch.promote_types(x.dtype, torch.float32)  # of the softmax
        log_likelihoods = []
        grad_x = []
        grad_w = None
        if need_grad and ctx.needs_input_grad[1]:
            grad_w = torch.zeros_like(weight)
        for xc, tc in zip(x.split(chunk), targets.split(chunk), strict=True):
            tc = tc[:, None]  # (chunk, 1)
            valid = tc >= 0
            safe = tc.clamp(min=0)  # an unscored target looks up token 0, and `valid` masks the result
            # no name for the 16-bit logits, so that they are freed before the softmax
            log_probs = F.log_softmax((xc @ w.T).to(dtype), dim=-1)  # (chunk, V)
            log_likelihoods.append(torch.where(valid, log_probs.gather(1, safe), 0.0))
            if not need_grad:
                continue
            dlogits = softmax_minus_one_hot(log_probs, safe).to(x.dtype)  # (chunk, V)
            del log_probs
            grad_x.append(dlogits @ w * valid)  # (chunk, C)
            if grad_w is not None:
                grad_w = accumulate_matmul(grad_w, dlogits.T, xc * valid)
            del dlogits  # before the next chunk has its logits
        if need_grad:
            ctx.save_for_backward(torch.cat(grad_x), grad_w)
        return -torch.cat(log_likelihoods).sum()

    @staticmethod
    def backward(ctx, grad_loss):
        # scaled only here, by 1 / n_targets and the loss scale together: the first alone would underflow in fp16
        grad_x, grad_w = ctx.saved_tensors
        grad_x = grad_x * grad_loss
        if grad_w is not None:
            grad_w = grad_w * grad_loss
        return grad_x, grad_w, None, None, None, None  # the last one is of KernelCrossEntropy's `kernel`


class KernelCrossEntropy(LinearCrossEntropy):
    """The same on a GPU, where a kernel overwrites the logits of a chunk with their gradient."""

    @staticmethod
    def forward(ctx, x, weight, targets, chunk: int, need_grad: bool, kernel: Callable):
        w = weight.to(x.dtype)
        losses = []
        grad_x = torch.empty_like(x)
        grad_w = None
        if need_grad and ctx.needs_input_grad[1]:
            grad_w = torch.zeros_like(weight)
        for xc, tc, grad_xc in zip(x.split(chunk), targets.split(chunk), grad_x.split(chunk), strict=True):
            logits = xc @ w.T  # (chunk, V)
            losses.append(kernel(logits, tc, need_grad))  # (chunk,)
            if not need_grad:
                continue
            dlogits = logits  # (chunk, V), by now
            torch.mm(dlogits, w, out=grad_xc)  # (chunk, C)
            if grad_w is not None:
                grad_w = accumulate_matmul(grad_w, dlogits.T, xc)
            del logits, dlogits  # before the next chunk has its logits
        if need_grad:
            ctx.save_for_backward(grad_x, grad_w)
        return torch.cat(losses).sum()


def accumulate_matmul(total, a, b) -> torch.Tensor:
    """total (V, C) + a (V, N) @ b (N, C), added up in the dtype of `total`, which it may overwrite: over thousands of
    positions, and before any loss scale, a sum in fp16 would pass 65,504."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    if a.device.type == "cuda":  # tensor cores add up in fp32 anyway
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    if a.dtype == torch.float16:  # on a CPU, where speed does not count
        return total.addmm_(a.float(), b.float())
    return total.add_(a @ b)


def softmax_minus_one_hot(log_probs, targets):
    """exp(log_probs) (N, V), less 1 at `targets` (N, 1); overwrites log_probs. Passes over (N, V) are what costs."""
    minus_one = torch.full_like(targets, -1, dtype=log_probs.dtype)
    return log_probs.exp_().scatter_add_(1, targets, minus_one)
