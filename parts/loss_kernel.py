"""The softmax of the loss on a GPU: one kernel, in Triton, that overwrites logits with their gradient.

A program of the kernel has a row of logits, those of one position. It reads the row twice: first for the logarithm of
the sum of exponentials, which gives the loss, then for softmax(logits) - one_hot(target), which it writes over the
logits. All sums are in fp32, whatever the logits are in, and nothing else is ever in memory. PyTorch's operators would
make a copy in fp32, one of the softmax, and one in 16 bits: 8 bytes a logit in place of 2, and five passes over them.

This file knows nothing of models, autograd or autocast. It needs Triton, which PyTorch brings along on Linux.
"""

import torch
import triton
import triton.language as tl

# A row of GPT-2 has 100 KB. With 32 warps a multiprocessor of an H100 has 2 rows at work, all 132 of them 26 MB: half
# of the L2 cache, so that the second pass over a row does not go to memory again.
BLOCK = 16_384  # logits of a row that are in registers at once
WARPS = 32


@triton.jit
def _kernel(logits, targets, losses, V: tl.constexpr, need_gradient: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: a chunk may have more than 2^31 logits
    logits += row * V
    target = tl.load(targets + row)
    is_scored = target >= 0
    # read here, before the reductions of the loop: they wait for all threads, so that none has overwritten it yet
    at_target = tl.load(logits + target, mask=is_scored, other=0.0).to(tl.float32)

    # The sum of exp(x - highest) in one pass: when a block has a higher logit, what was summed before is scaled down
    # (Milakov and Gimelshein 2018, algorithm 3)
    highest = -float("inf")
    total = 0.0
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), axis=0)
        highest = higher
    log_total = highest + tl.log(total)
    tl.store(losses + row, tl.where(is_scored, log_total - at_target, 0.0))

    if need_gradient:
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + columns, mask=columns < V).to(tl.float32)
            gradient = tl.exp(x - log_total) - tl.where(columns == target, 1.0, 0.0)
            tl.store(logits + columns, tl.where(is_scored, gradient, 0.0), mask=columns < V)


def cross_entropy_(logits, targets, need_gradient: bool = True) -> torch.Tensor:
    """The loss of each row in nats, (N,) in fp32, of logits (N, V) against targets (N,) int64, 0 where the target is
    negative. Overwrites `logits` with the gradients of these losses."""
    n_rows, vocab_size = logits.shape
    losses = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    n_warps = max(block * WARPS // BLOCK, 1)
    _kernel[(n_rows,)](logits, targets, losses, vocab_size, need_gradient, block, num_warps=n_warps)
    return losses
