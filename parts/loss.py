"""The cross-entropy of a language model without ever holding all of its logits: a few positions at a time.

    loss = linear_cross_entropy(x, weight, targets)    # sum over targets >= 0 of -log softmax(x @ weight.T)[target]

`plain_cross_entropy` is the textbook formula; `linear_cross_entropy` computes the same in a fraction of the memory.

GPT-2 turns 768 channels into 50,257 logits. For 64 x 1024 tokens those are 13 GB in fp32, and their gradients are as
many again: together more than all blocks keep for the backward pass. Both are needed for a moment only: the loss of a
position is one number of its logits, and the gradient, softmax(logits) - one_hot(target), goes into two products at
once. So the forward pass takes a chunk of positions, computes their logits, their loss and the gradients of `x` and
`weight`, and lets the next chunk overwrite them. All that is left for the backward pass is to multiply by the gradient
of the loss. No product is computed twice, so this costs no time, unlike activation checkpointing. (The same idea: Hsu
et al. 2024, Liger Kernel; Wijmans et al. 2024, "Cut your losses".)

`cross_entropy_` overwrites the logits of a chunk with their gradient: on a GPU as one kernel (parts/loss_kernel.py).
Nothing of this is compiled: torch.compile keeps the logits of several chunks alive, and was no faster. PyTorch 2.13's
`F.linear_cross_entropy` was less exact in bf16 (error 5.8e-3, here 9.7e-6) and 2.2 to 2.9 times slower in fp32.

This file knows nothing of GPT-2 or ranks. A training step's precision is that of the autocast under which it is called.

Shapes in comments: N positions, C channels, V tokens of the vocabulary.
"""

import functools
import sys
from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

LOGITS = {"cpu": 2**19, "cuda": 2**30}  # alive at once, at most: on a CPU what its caches hold, on a GPU 2 GB in bf16
ALIGNED = 64  # rows of 128 bytes in 16 bits
TILE = 256  # a chunk is a multiple of this: tensor cores multiply whole tiles


def plain_cross_entropy(x, weight, targets) -> torch.Tensor:
    """Compute all logits at once, and PyTorch's loss: the oracle of `linear_cross_entropy`."""
    logits = x @ weight.T  # (N, V)
    targets = targets.where(targets >= 0, -100)
    return F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def linear_cross_entropy(x, weight, targets) -> torch.Tensor:
    """Sum the cross-entropy, an fp32 scalar in nats, of x (N, C) @ weight (V, C).T against targets (N,) int64.

    Negative targets are not scored. Products of a training step are in autocast's dtype, the gradient of `weight` is in
    its own. An evaluation computes its logits in that dtype, too: GPT-2's are around -100, where neighbouring bf16
    numbers are 0.5 apart.
    """
    device = x.device.type
    if not torch.is_grad_enabled():  # which a Function cannot see: inside it grad mode is always off
        x = x.detach().to(weight.dtype)
        weight = weight.detach()
    elif torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return LinearCrossEntropy.apply(x, weight, targets, chunk_size(len(x), len(weight), device))


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, chunk: int):
        vocab_size = len(weight)
        cross_entropy_ = loss_of_rows(x.device.type, vocab_size, x.dtype)
        w = product_weight(weight, x)  # (V, C), or more rows
        need_grad = any(ctx.needs_input_grad)
        losses = []
        grad_x = torch.empty_like(x)
        grad_w = None
        if need_grad and ctx.needs_input_grad[1]:
            grad_w = torch.zeros(w.shape, dtype=weight.dtype, device=w.device)
        for xc, tc, grad_xc in zip(x.split(chunk), targets.split(chunk), grad_x.split(chunk), strict=True):
            logits = xc @ w.T  # (chunk, V)
            losses.append(cross_entropy_(logits, tc, vocab_size, need_grad))  # (chunk,)
            if not need_grad:
                continue
            dlogits = logits  # (chunk, V), by now
            torch.mm(dlogits, w, out=grad_xc)  # (chunk, C)
            if grad_w is not None:
                grad_w = accumulate_matmul(grad_w, dlogits.T, xc)
            del logits, dlogits  # before the next chunk has its logits
        if need_grad:
            ctx.save_for_backward(grad_x, grad_w)
            ctx.vocab_size = vocab_size
        return torch.cat(losses).sum()

    @staticmethod
    @once_differentiable  # these gradients are numbers: a gradient of them raises, rather than be wrong
    def backward(ctx, grad_loss):
        # scaled only here, by 1 / n_targets and the loss scale together: the first alone would underflow in fp16
        grad_x, grad_w = ctx.saved_tensors
        if grad_w is not None:
            grad_w = grad_w[: ctx.vocab_size] * grad_loss
        return grad_x * grad_loss, grad_w, None, None


def cross_entropy_(logits, targets, vocab_size: int, need_gradient: bool = True) -> torch.Tensor:
    """Compute each row's loss in nats, (N,), of logits (N, V or more columns) against targets (N,) int64; 0 where the
    target is negative. Overwrites `logits` with the gradients of these losses, 0 in columns past the vocabulary."""
    dtype = torch.promote_types(logits.dtype, torch.float32)  # of the softmax
    unscored = targets[:, None] < 0  # (N, 1)
    safe = targets[:, None].clamp(min=0)  # an unscored target looks up token 0, and its result is masked
    log_probs = F.log_softmax(logits[:, :vocab_size].to(dtype), dim=-1)  # (N, V)
    losses = -log_probs.gather(1, safe).masked_fill(unscored, 0.0)[:, 0]
    if need_gradient:
        logits[:, vocab_size:] = 0
        minus_one = torch.full_like(safe, -1, dtype=dtype)
        gradient = log_probs.exp_().scatter_add_(1, safe, minus_one)  # passes over (N, V) are what costs
        logits[:, :vocab_size] = gradient.masked_fill_(unscored, 0.0)
    return losses


@functools.cache
def loss_of_rows(device: str, vocab_size: int, dtype: torch.dtype) -> Callable:
    """Choose the `cross_entropy_` for these logits: on a GPU that of parts/loss_kernel.py, if one row shows that it
    works: it needs Triton (not on Windows), a C compiler, and a GPU that Triton compiles for. Else the one above."""
    if device != "cuda":
        return cross_entropy_
    try:
        from parts import loss_kernel

        row = torch.zeros(1, vocab_size, dtype=dtype, device="cuda")
        loss_kernel.cross_entropy_(row, torch.zeros(1, dtype=int, device="cuda"), vocab_size)
    except Exception as e:
        if "out of memory" in str(e):  # as a trial of micro-batches may be: it says nothing about the kernel
            raise
        print(f"note: the loss kernel is unavailable: {' '.join(str(e).split())[:120]}", file=sys.stderr)
        return cross_entropy_
    return loss_kernel.cross_entropy_


def product_weight(weight, x) -> torch.Tensor:
    """Return `weight` (V, C) in the dtype of x. It is cast here, so that the gradient's sum over chunks is not rounded
    to 16 bits. On a GPU this copy gets rows of zeros up to a multiple of 64: with GPT-2's 50,257 tokens a row of logits
    would begin anywhere, and tensor cores and the kernel read 16 bytes at once. These columns are not logits."""
    if x.dtype == weight.dtype or x.device.type != "cuda":
        return weight.to(x.dtype)
    n_rows = -(-len(weight) // ALIGNED) * ALIGNED
    padded = torch.zeros(n_rows, weight.size(1), dtype=x.dtype, device=x.device)
    padded[: len(weight)] = weight
    return padded


def chunk_size(n_positions: int, vocab_size: int, device: str) -> int:
    """Count the positions whose logits are alive at once: whole tiles of the tensor cores. Chunks are as few as LOGITS
    allows, since each adds a gradient of the size of `weight` to the sum, and about equally large."""
    most = max(LOGITS.get(device, 2**25) // vocab_size // TILE, 1)
    n_tiles = -(-n_positions // TILE)  # rounded up
    n_chunks = -(-n_tiles // most)
    if n_chunks > 1:
        most = -(-n_tiles // n_chunks)
    return most * TILE


def accumulate_matmul(total, a, b) -> torch.Tensor:
    """Return total (V, C) + a (V, N) @ b (N, C), added up in the dtype of `total`, which it may overwrite: over
    thousands of positions, and before any loss scale, a sum in fp16 would pass 65,504."""
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    if a.device.type == "cuda":  # tensor cores add up in fp32 anyway
        return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    if a.dtype == torch.float16:  # on a CPU, where speed does not count
        return total.addmm_(a.float(), b.float())
    return total.add_(a @ b)
