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

This file knows nothing of GPT-2 or ranks, and decides no precision: it obeys the autocast under which it is called.

Shapes in comments: N positions, C channels, V tokens of the vocabulary.
"""

import torch
from torch.nn import functional as F

LOGITS = {"cpu": 2**19, "cuda": 2**29}  # alive at once, at most: what caches hold; 2 GB in fp32
TILE = 256  # a chunk is a multiple of this: tensor cores multiply whole tiles
MOST_CHUNKS = 12  # of a compiled graph: with 25, it kept the logits of 9 at once, 10 GB more for 256 x 1024 tokens


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
    chunk = chunk_size(len(x), len(weight), device, torch.compiler.is_compiling())
    with torch.autocast(device, enabled=False):
        # grad mode is always off inside a Function, so it is passed in
        need_grad = torch.is_grad_enabled()
        return LinearCrossEntropy.apply(x, weight, targets, chunk, need_grad)


def chunk_size(n_positions: int, vocab_size: int, device: str, compiled: bool) -> int:
    """Positions whose logits are alive at once: whole tiles of the tensor cores. Chunks are as few as LOGITS allows,
    since each adds a gradient of the size of `weight` to the sum, and about equally large. In a compiled graph of a GPU
    they are MOST_CHUNKS at most, and larger than LOGITS if need be."""
    most = max(LOGITS.get(device, 2**25) // vocab_size // TILE, 1)
    n_tiles = -(-n_positions // TILE)  # rounded up
    n_chunks = -(-n_tiles // most)
    if device == "cuda" and compiled:
        n_chunks = min(n_chunks, MOST_CHUNKS)
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
        # one sum at the end: a sum of each chunk makes torch.compile take all logits before any gradient
        return -torch.cat(log_likelihoods).sum()

    @staticmethod
    def backward(ctx, grad_loss):
        # scaled only here, by 1 / n_targets and the loss scale together: the first alone would underflow in fp16
        grad_x, grad_w = ctx.saved_tensors
        grad_x = grad_x * grad_loss
        if grad_w is not None:
            grad_w = grad_w * grad_loss
        return grad_x, grad_w, None, None, None


def accumulate_matmul(total, a, b) -> torch.Tensor:
    """total (V, C) + a (V, N) @ b (N, C), added up in the dtype of `total`, which it may overwrite: over thousands of
    positions, and before any loss scale, a sum in fp16 would pass 65,504."""
    if a.device.type == "cuda" and a.dtype != total.dtype:
        # tensor cores add up in fp32 anyway; addmm would save a pass, but torch.compile cannot lower its out_dtype
        return total.add_(torch.mm(a, b, out_dtype=total.dtype))
    if a.dtype == torch.float16:  # on a CPU, where speed does not count
        a = a.float()
        b = b.float()
    if a.dtype == total.dtype:
        return total.addmm_(a, b)
    return total.add_(a @ b)


def softmax_minus_one_hot(log_probs, targets):
    """exp(log_probs) (N, V), less 1 at `targets` (N, 1); may overwrite log_probs. Passes over (N, V) are what costs."""
    if torch.compiler.is_compiling():  # a comparison fuses with its neighbours into one pass, a scatter does not
        tokens = torch.arange(log_probs.size(1), device=targets.device)  # (V,)
        one_hot = tokens == targets
        return log_probs.exp() - one_hot.to(log_probs.dtype)
    minus_one = torch.full_like(targets, -1, dtype=log_probs.dtype)
    return log_probs.exp_().scatter_add_(1, targets, minus_one)
