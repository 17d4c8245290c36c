"""The softmax of the loss on a GPU: one kernel, in Triton, that overwrites logits with their gradient.

A program of the kernel has a row of logits, those of one position, and all of it in registers at once: 100 KB for
GPT-2. It reads the row once, finds its maximum and its sum of exponentials, which give the loss, and writes
softmax(logits) - one_hot(target) in its place. So it takes little longer than a copy. PyTorch's operators would make a
copy in fp32, one of the softmax, and one in 16 bits: 8 bytes a logit in place of 2, and five passes over them.

This file knows nothing of models, autograd or autocast. It needs Triton, which PyTorch brings along on Linux.
"""

import torch
import triton
import triton.language as tl

LOGITS_PER_WARP = 2048  # 32 warps, the most that a program can have, share a row of up to 65,536: 64 for each thread
LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) = exp2(x LOG2_E): a GPU has exp2 as an instruction
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _kernel(
    logits, targets, losses, V: tl.constexpr, stride: tl.constexpr, need_gradient: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: a chunk may have more than 2^31 logits
    logits += row * stride
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    if target >= 0:
        at_target = tl.load(logits + target).to(tl.float32) * LOG2_E
        # all columns of the row, in loads of 16 bytes if it is aligned; those past the vocabulary do not count
        x = tl.load(logits + columns, mask=columns < stride, other=-float("inf"))
        x = tl.where(columns < V, x.to(tl.float32), -float("inf")).to(x.dtype)
        highest = tl.max(x, axis=0).to(tl.float32) * LOG2_E
        exponentials = tl.exp2(x.to(tl.float32) * LOG2_E - highest)
        total = tl.sum(exponentials, axis=0)  # in fp32, whatever the logits are in
        exponentials = exponentials.to(x.dtype)  # a row in fp32 has no room in the registers
        log_total = highest + tl.log2(total)
        tl.store(losses + row, (log_total - at_target) * LOG_2)
        if need_gradient:
            tl.store(logits + columns, exponentials.to(tl.float32) * (1 / total), mask=columns < stride)
            tl.debug_barrier()  # another thread may have written the one below
            tl.store(logits + target, tl.exp2(at_target - log_total) - 1)
    else:
        tl.store(losses + row, 0.0)
        if need_gradient:
            tl.store(logits + columns, tl.zeros((BLOCK,), tl.float32), mask=columns < stride)


def cross_entropy_(logits, targets, vocab_size: int, need_gradient: bool = True) -> torch.Tensor:
    """Compute each row's loss in nats, (N,) in fp32, of logits (N, V or more columns) against targets (N,) int64; 0
    for a negative target. Overwrites `logits` with the gradients of these losses, 0 in columns past the vocabulary."""
    n_rows, stride = logits.shape
    losses = torch.empty(n_rows, dtype=torch.float32, device=logits.device)
    block = triton.next_power_of_2(stride)
    n_warps = min(max(block // LOGITS_PER_WARP, 1), 32)
    _kernel[(n_rows,)](logits, targets, losses, vocab_size, stride, need_gradient, block, num_warps=n_warps)
    return losses
