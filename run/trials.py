"""Settled before a run: which attention, and the largest micro-batch that fits into memory.

On a GPU memory is measured, and all ranks agree on the outcome; on a CPU earlier measurements are the rule. This file
knows nothing of GPT-2 beyond the shapes that it is given, and nothing of data or checkpoints.
"""

import re
from collections.abc import Iterable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from cli import UserError
from run.runtime import Runtime

# --------------------------------------------------------------------------------------------------- which attention


def choose_attention(attention: str, rt: Runtime, sequence_length: int) -> str:
    """Settle "auto": "flash" or "naive", whichever trained faster when it was measured.

    On CPUs PyTorch's fused kernel has no fast backward pass in 16 bits: it takes three times as long as the formula at
    64 tokens, and 1.6 times at 1024, where the formula starts to cost memory.
    """
    if attention != "auto":
        return attention
    return "naive" if rt.device.type == "cpu" and rt.dtype.itemsize == 2 and sequence_length <= 1024 else "flash"


# ------------------------------------------------------------------------------------------------------------ memory


def checkpoint_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Keep only the input of each block; the backward pass recomputes the rest (Chen et al. 2016)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def find_micro_batch_size(forward, sizes: list[int], shape: tuple[int, int], rt: Runtime, shards: int = 1) -> int:
    """The largest of `sizes` (sequences per forward pass of a rank) whose training step fits into memory.

    `shape` is (T, V): tokens per sequence and size of the vocabulary. `shards` is the number of ranks that divide the
    optimizer's state. On a CPU, where memory is not the limit, it is the size that keeps about 4096 tokens in the
    caches. Raises UserError if not even one sequence fits.
    """
    sizes = sorted(sizes, reverse=True)
    if rt.device.type == "cpu":
        return next((n for n in sizes if n * shape[0] <= 4096), sizes[-1])
    return largest_that_fits(forward, sizes, shape, rt, shards)


def largest_that_fits(forward, sizes: list[int], shape: tuple[int, int], rt: Runtime, shards: int) -> int:
    """The first of `sizes`, which descend, for which every rank has the memory. Raises UserError on all ranks alike."""
    peaks = {}  # bytes, by size

    def fits(size: int, forward) -> bool:
        rt.reset_peak_memory()
        mine = torch.tensor(int(has_memory_for(size, shape, forward, rt, shards)), device=rt.device)
        peaks[size] = rt.peak_memory()
        return int(rt.sum(mine)) == rt.world_size  # all ranks leave the trial together, whoever failed

    # a size that fits uncompiled fits compiled too (checking that takes a minute); the next larger size may fit as well
    uncompiled = getattr(getattr(forward, "module", forward), "_orig_mod", forward)
    largest = next((i for i, size in enumerate(sizes) if fits(size, uncompiled)), len(sizes))
    if largest > 0 and uncompiled is not forward and fits(sizes[largest - 1], forward):
        largest -= 1
    if largest == len(sizes):
        raise UserError("not even one sequence fits into the memory; use a smaller model or --sequence_length")
    rt.print(f"micro_batch_size {sizes[largest]} fits: {peaks[sizes[largest]] / 2**30:.1f} GiB at its peak")
    return sizes[largest]


def has_memory_for(size: int, shape: tuple[int, int], forward, rt: Runtime, shards: int = 1) -> bool:
    """Try one forward and backward pass of `size` sequences, with memory for the optimizer's state put aside.

    `forward` is called as the loop calls it, so that compiled code is reused: targets are a slice.
    """
    forward.require_backward_grad_sync = False  # of DDP: a rank that is out of memory would keep the others waiting
    T, V = shape
    try:
        windows = torch.randint(V, (size, T + 1), device=rt.device)
        idx, targets = windows[:, :-1].clip(0), windows[:, 1:]
        trained = [p for p in forward.parameters() if p.requires_grad]
        moments = [torch.empty(2 * p.numel() // shards, device=rt.device) for p in trained]
        if rt.device.type == "cuda":  # 5% for fragmentation and NCCL's buffers
            total = torch.cuda.get_device_properties(rt.device).total_memory
            moments.append(torch.empty(total // 20, dtype=torch.uint8, device=rt.device))
        with rt.autocast():
            loss = forward(idx, targets)
        loss.backward()
        del loss, moments
        return True
    except RuntimeError as e:  # the allocator raises its own type; cuBLAS and Triton raise plain RuntimeErrors
        if isinstance(e, torch.OutOfMemoryError) or re.search(r"out of memory|ALLOC_FAILED|out of resource", str(e)):
            return False
        raise
    finally:
        forward.zero_grad(set_to_none=True)
        if rt.device.type == "cuda":
            torch.cuda.empty_cache()
