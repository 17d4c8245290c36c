"""Choices made before a run: the kind of attention, and the largest micro-batch that fits into memory.

On a GPU memory is measured by training steps, and all ranks agree on the outcome; on a CPU fixed rules follow earlier
measurements. This file knows nothing of GPT-2 beyond the shapes that it is given, and nothing of data or checkpoints.
"""

import copy
import re

import torch
from tqdm import tqdm

from parts.cli import UserError
from parts.runtime import Runtime

# --------------------------------------------------------------------------------------------------- which attention


def choose_attention(attention: str, rt: Runtime, sequence_length: int) -> str:
    """Settle "auto": "flash" or "naive", whichever trained faster when it was measured.

    On CPUs PyTorch's fused kernel has no fast backward pass in 16 bits: it takes three times as long as the formula at
    64 tokens, and 1.6 times at 1024, where the formula starts to cost memory.
    """
    if attention in ("flash", "naive"):
        return attention
    if attention != "auto":
        raise UserError(f"attention {attention}: add it to choose_attention in parts/trials.py, and to model.py")
    return "naive" if rt.device.type == "cpu" and rt.dtype.itemsize == 2 and sequence_length <= 1024 else "flash"


# ------------------------------------------------------------------------------------------------------------ memory


def find_micro_batch_size(loss_fn, sequences: int, T: int, rt: Runtime, make_optimizer) -> int:
    """Find the largest divisor of `sequences`, those of a rank's step, whose training step fits into memory.

    `make_optimizer()` is called for each trial, which takes real steps, and weights are put back afterwards. `loss_fn`
    is neither compiled, as compiling each size would take a minute, and what fits without also fits compiled; nor in
    DDP, as the backward pass of its module would have a rank that is out of memory keep the others waiting. On a CPU,
    where memory is not the limit, it is the size that keeps about 4096 tokens in the caches. Raises UserError if not
    even one sequence of T tokens fits.
    """
    sizes = [n for n in range(min(sequences, 256), 0, -1) if sequences % n == 0]
    if rt.device.type == "cpu":
        return next((n for n in sizes if n * T <= 4096), 1)
    return largest_that_fits(loss_fn, sizes, T, rt, make_optimizer)


def largest_that_fits(loss_fn, sizes: list[int], T: int, rt: Runtime, make_optimizer) -> int:
    """Find the first of `sizes`, which descend, that fits on every rank. Raises UserError on all ranks alike."""
    tensors = [*(p for p in loss_fn.parameters() if p.requires_grad), *loss_fn.buffers()]  # what a step changes
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    for size in sizes:
        rt.reset_peak_memory()
        fits = has_memory_for(size, T, loss_fn, rt, make_optimizer)
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)
        fits = torch.tensor(fits, dtype=torch.int64, device=rt.device)
        if rt.sum(fits).item() == rt.world_size:  # all ranks leave the trial together, whoever failed
            rt.print(f"micro_batch_size {size} fits: {rt.peak_memory() / 2**30:.1f} GiB at its peak")
            rt.reset_peak_memory()  # the log tells the peak of the run
            return size
    raise UserError("not even one sequence fits into memory; choose a smaller model or --sequence_length")


def has_memory_for(size: int, T: int, loss_fn, rt: Runtime, make_optimizer) -> bool:
    """Try a step of one micro-batch of `size` sequences, as it is from the second step on."""
    trained = [p for p in loss_fn.parameters() if p.requires_grad]
    try:
        idx = torch.zeros(size, T, dtype=torch.long, device=rt.device)
        kept = []
        if rt.device.type == "cuda":  # 5% for fragmentation and NCCL's buffers
            total = torch.cuda.get_device_properties(rt.device).total_memory
            kept.append(torch.empty(total // 20, dtype=torch.uint8, device=rt.device))
        for p in trained:
            p.grad = torch.zeros_like(p)
        optimizer = make_optimizer()
        optimizer.step(finite=torch.ones((), dtype=torch.bool, device=rt.device))  # makes what it keeps
        if rt.world_size > 1:  # DDP makes new buckets before the second step, and moves the gradients there
            buckets = [torch.empty_like(p) for p in trained]
            del buckets
        timed_step(loss_fn, (idx, idx), optimizer, rt)  # Muon works on many matrices at once
        return True
    except RuntimeError as e:  # the allocator raises its own type; cuBLAS and Triton raise plain RuntimeErrors
        if re.search(r"out of memory|ALLOC_FAILED|out of resource", str(e)):
            return False
        raise
    finally:
        loss_fn.zero_grad()
        optimizer = kept = None
        torch.cuda.empty_cache()  # of a process that uses CUDA


def print_duration(loss_fn, config, rt: Runtime) -> None:
    """Time a pass on a CPU, and print how long the steps of a run take."""
    idx = torch.zeros(config.micro_batch_size, config.sequence_length, dtype=torch.long)  # (B, T)
    n_passes = config.total_batch_size // idx.numel() // rt.world_size
    seconds = n_passes * timed_passes(copy.deepcopy(loss_fn), (idx, idx), rt)  # buffers change in it, such as means
    total = config.max_steps * seconds
    remedy = "; for less lower --max_steps, or take the recipe tiny or small" if total > 3600 else ""
    whole = f"{config.max_steps:,} from the start take {tqdm.format_interval(total)}"
    rt.print(f"a step takes about {seconds:.2g} s; {whole}{remedy}")


def timed_step(loss_fn, micro_batch: tuple, optimizer, rt: Runtime) -> tuple[float, float]:
    """Take a step of one micro-batch: return seconds of the forward and backward pass, and of the update."""
    passes = timed_passes(loss_fn, micro_batch, rt, optimizer.scale)
    begun = rt.mark_time()
    optimizer.clip_grad_norm(1.0)
    optimizer.step(finite=torch.ones((), dtype=torch.bool, device=rt.device))  # whatever the tokens gave
    return passes, rt.seconds_between(begun, rt.mark_time())


def timed_passes(loss_fn, micro_batch: tuple, rt: Runtime, scale=lambda loss: loss) -> float:
    """Return seconds of one micro-batch's forward and backward pass; its gradients are added to the others."""
    begun = rt.mark_time()
    with rt.autocast():
        loss = loss_fn(*micro_batch)
    scale(loss).backward()
    return rt.seconds_between(begun, rt.mark_time())
