"""What is tried before a run: the fastest attention, and the largest micro-batch that fits into memory.

Each is a measurement on the machine at hand, on which all ranks agree. This file knows nothing of GPT-2 beyond the
shapes that it is given, and nothing of data or checkpoints.
"""

import contextlib
import re
import statistics
import time
from collections.abc import Iterable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from cli import UserError
from runtime import Runtime

# --------------------------------------------------------------------------------------------------- which attention


def choose_attention(attention: str, rt: Runtime, sequence_length: int) -> str:
    """ "flash" or "naive" where `attention` is "auto": what is faster to train with, as measured.

    On CPUs PyTorch's fused kernel is slow in 16 bits, for lack of a fast backward pass: three times the time of the
    formula at 64 tokens, 1.6 times at 1024, where the formula begins to cost memory.
    """
    if attention != "auto":
        return attention
    return "naive" if rt.device.type == "cpu" and rt.dtype.itemsize == 2 and sequence_length <= 1024 else "flash"


def attention_kernels(device_type: str) -> dict[str, tuple]:
    """{name: (backend, function that turns it on or off)} of the fused kernels to choose from."""
    if device_type != "cuda":
        return {}
    return {
        "flash": (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.enable_flash_sdp),
        "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.enable_cudnn_sdp),
    }


def choose_attention_kernel(rt: Runtime, shape: tuple[int, int, int, int], rounds: int = 5) -> str:
    """Leave scaled_dot_product_attention its fastest fused kernel for `shape` (B, H, T, D), forward and backward, by
    measurement: it differs between GPUs and versions. Returns the kernel's name, "" where there is no choice.

    Candidates take turns, so that a clock that still rises favours none; the first round warms up and is compared with
    the formula. Times are summed over the ranks, so that all choose alike.
    """
    B, H, T, D = shape
    kernels = attention_kernels(rt.device.type)
    if not kernels:
        return ""
    q, k, v = (torch.randn(B, T, H, D, device=rt.device, dtype=rt.dtype).transpose(1, 2) for _ in range(3))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    seconds = {name: [] for name in kernels}
    for _ in range(rounds + 1):
        for name, (backend, _) in kernels.items():
            with contextlib.suppress(RuntimeError), sdpa_kernel(backend):  # not every GPU has every kernel
                rt.synchronize()
                began = time.perf_counter()
                scaled_dot_product_attention(q, k, v, is_causal=True).backward(v)
                rt.synchronize()
                seconds[name].append(time.perf_counter() - began)
    medians = [statistics.median(times[1:]) if len(times) > 1 else float("inf") for times in seconds.values()]
    medians = rt.sum(torch.tensor(medians, device=rt.device)).tolist()
    if min(medians) == float("inf"):
        return ""
    fastest = list(kernels)[medians.index(min(medians))]
    for name, (_, enable) in kernels.items():
        enable(name == fastest)
    return fastest


# ------------------------------------------------------------------------------------------------------------ memory


def checkpoint_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Keep only the input of each block for the backward pass, which computes the rest again (Chen et al. 2016)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def find_micro_batch_size(forward, sizes: list[int], shape: tuple[int, int], rt: Runtime, shards: int = 1) -> int:
    """The largest of `sizes` (sequences per forward pass of a rank) whose training step fits into memory.

    `shape` is (T, V), tokens a sequence and the vocabulary's size; `shards` is the number of ranks that divide the
    optimizer's state. All ranks agree on the smallest. On a CPU, where memory is not the limit, it is the size that
    keeps about 4096 tokens at once in the caches. Raises UserError if not even one sequence fits.
    """
    sizes = sorted(sizes, reverse=True)
    if rt.device.type == "cpu":
        return next((n for n in sizes if n * shape[0] <= 4096), sizes[-1])
    peaks = {}  # bytes, by size

    def fits(size: int, forward) -> bool:
        rt.reset_peak_memory()
        mine = torch.tensor(int(has_memory_for(size, shape, forward, rt, shards)), device=rt.device)
        peaks[size] = rt.peak_memory()
        return int(rt.sum(mine)) == rt.world_size  # all ranks leave the trial together, whoever failed

    # a size that fits uncompiled fits compiled, too, which takes a minute to see; perhaps even the next larger one does
    uncompiled = getattr(getattr(forward, "module", forward), "_orig_mod", forward)
    largest = next((i for i, size in enumerate(sizes) if fits(size, uncompiled)), len(sizes))
    if largest > 0 and uncompiled is not forward and fits(sizes[largest - 1], forward):
        largest -= 1
    if largest == len(sizes):
        raise UserError("not even one sequence fits into the memory; use a smaller model or --sequence_length")
    rt.print(f"micro_batch_size {sizes[largest]} fits: {peaks[sizes[largest]] / 2**30:.1f} GiB at its peak")
    return sizes[largest]


def has_memory_for(size: int, shape: tuple[int, int], forward, rt: Runtime, shards: int = 1) -> bool:
    """Try one forward and backward pass of `size` sequences, with the optimizer's state, which is not there yet.

    Called as the loop calls it, targets apart from idx and n_targets a tensor, so that compiled code is used again.
    """
    rng = torch.get_rng_state()
    forward.require_backward_grad_sync = False  # of DDP: a rank that is out of memory would keep the others waiting
    T, V = shape
    try:
        idx, targets = torch.randint(V, (2, size, T), device=rt.device)
        trained = [p for p in forward.parameters() if p.requires_grad]
        moments = [torch.empty(2 * p.numel() // shards, device=rt.device) for p in trained]
        spare = torch.empty(_five_percent(rt), dtype=torch.uint8, device=rt.device)  # fragmentation, NCCL's buffers
        with rt.autocast():
            _, loss = forward(idx, targets, n_targets=torch.ones((), device=rt.device))
        loss.backward()
        del loss, moments, spare
        return True
    except RuntimeError as e:  # of the allocator; cuBLAS and Triton have no type of their own for it
        if isinstance(e, torch.OutOfMemoryError) or re.search(r"out of memory|ALLOC_FAILED|out of resource", str(e)):
            return False
        raise
    finally:
        forward.zero_grad(set_to_none=True)
        torch.set_rng_state(rng)
        if rt.device.type == "cuda":
            torch.cuda.empty_cache()


def _five_percent(rt: Runtime) -> int:
    return torch.cuda.get_device_properties(rt.device).total_memory // 20 if rt.device.type == "cuda" else 0
