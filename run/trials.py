"""What is tried before a run: the fastest attention, the largest micro-batch that fits into memory, and peaks of it.

On a GPU each is a measurement, on whose outcome all ranks agree; on a CPU a rule, from earlier measurements. This file
knows nothing of GPT-2 beyond the shapes that it is given, and nothing of data or checkpoints.
"""

import contextlib
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from cli import UserError
from run.runtime import Runtime

LARGEST_ERROR = 0.02  # of attention in 16 bits, whose kernels round weights and gradients: bf16 has 2^-9 = 0.2%

# --------------------------------------------------------------------------------------------------- which attention


def choose_attention(attention: str, rt: Runtime, sequence_length: int) -> str:
    """ "flash" or "naive" where `attention` is "auto": what is faster to train with, as measured.

    On CPUs PyTorch's fused kernel is slow in 16 bits, for lack of a fast backward pass: three times the time of the
    formula at 64 tokens, 1.6 times at 1024, where the formula begins to cost memory.
    """
    if attention != "auto":
        return attention
    return "naive" if rt.device.type == "cpu" and rt.dtype.itemsize == 2 and sequence_length <= 1024 else "flash"


def attention_kernels(device_type: str, dropout: float) -> list[str]:
    """The fused kernels to choose from: PyTorch's own, cuDNN's, and packages that PyTorch can put in place of its own
    (FA3, FA4), where it can; those have no dropout."""
    if device_type != "cuda":
        return []
    packages = getattr(torch.nn.attention, "list_flash_attention_impls", list)()
    return ["flash", "cudnn", *([] if dropout else packages)]


def use_kernel(name: str) -> None:
    """Leave this one of the fused kernels to scaled_dot_product_attention, none of them for "". What they cannot do
    (masks, fp32) is left to PyTorch's memory-efficient kernel in any case.

    Raises ImportError, RuntimeError or ValueError for a package that is not installed or does not fit this GPU.
    """
    in_place = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()  # of PyTorch's own kernel
    if in_place and in_place != name:
        torch.nn.attention.restore_flash_attention_impl()
    if name not in ("flash", "cudnn", "", in_place):
        torch.nn.attention.activate_flash_attention_impl(name)
    torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
    torch.backends.cuda.enable_flash_sdp(name not in ("cudnn", ""))


def choose_attention_kernel(rt: Runtime, shape: tuple[int, int, int, int], dropout: float = 0.0) -> str:
    """Leave scaled_dot_product_attention its fastest fused kernel for `shape` (B, H, T, D), forward and backward, by
    measurement: it differs between GPUs and versions. Returns the kernel's name, "" where there is none.

    The fastest is compared with the formula before it is used. All ranks choose alike.
    """
    kernels = attention_kernels(rt.device.type, dropout)
    if not kernels:
        return ""
    qkv, grad = attention_inputs(rt, shape)
    # one number a kernel: the fastest of all ranks together is then the same on each
    seconds = rt.sum(torch.tensor(time_kernels(kernels, qkv, grad, shape, rt), device=rt.device)).tolist()
    for total, name in sorted(zip(seconds, kernels, strict=True)):
        if total == float("inf"):
            break
        use_kernel(name)
        error = attention_error(qkv, grad, shape)
        if rt.sum(torch.tensor(int(error < LARGEST_ERROR), device=rt.device)) == rt.world_size:
            return name
        rt.print(f"warning: the attention kernel {name} differs from the formula by {error:.1%} and is not used")
    use_kernel("")
    return ""


def time_kernels(kernels: list[str], qkv, grad, shape: tuple[int, int, int, int], rt: Runtime) -> list[float]:
    """Median seconds of each kernel, inf for one that is not there.

    They take turns, so that a clock that still rises favours none, and the first round does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(1 + 10):
        for name in kernels:
            with contextlib.suppress(RuntimeError, ImportError, ValueError):  # not every GPU has every kernel
                use_kernel(name)
                rt.synchronize()
                began = time.perf_counter()
                attend(qkv, grad, shape)
                rt.synchronize()
                seconds[name].append(time.perf_counter() - began)
    return [statistics.median(times[1:]) if len(times) > 1 else float("inf") for times in seconds.values()]


def attention_inputs(rt: Runtime, shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random queries, keys and values (B, T, 3 H D), as one product leaves them, and a gradient (B, T, H D)."""
    B, H, T, D = shape
    qkv, grad = (torch.randn(B, T, n * H * D, device=rt.device, dtype=rt.dtype) for n in (3, 1))
    return qkv.requires_grad_(), grad


def attend(qkv, grad, shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention (B, T, H D), and the gradient (B, T, 3 H D) that `grad` gives `qkv`."""
    _, H, T, D = shape
    q, k, v = (x.unflatten(2, (H, D)).transpose(1, 2) for x in qkv.split(H * D, dim=2))  # (B, H, T, D)
    y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)  # (B, T, H D)
    return y, torch.autograd.grad(y, qkv, grad)[0]


def attention_error(qkv, grad, shape: tuple[int, int, int, int]) -> float:
    """Relative error |x - y| / |y| of the kernel in use, x, against PyTorch's formula in fp32, y: of the output or of
    the gradient, whichever is larger; nan if something is not finite. Only the last sequence of the batch is compared,
    where an index that overflows shows first.
    """
    found = [x[-1:].float() for x in attend(qkv, grad, shape)]
    last = qkv[-1:].detach().float().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        expected = attend(last, grad[-1:].float(), shape)
    errors = [(x - y).norm() / y.norm() for x, y in zip(found, expected, strict=True)]
    return torch.stack(errors).max().item()


# ------------------------------------------------------------------------------------------------------------ memory


def checkpoint_activations(blocks: Iterable[torch.nn.Module]) -> None:
    """Keep only the input of each block for the backward pass, which computes the rest again (Chen et al. 2016)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def find_micro_batch_size(forward, sizes: list[int], shape: tuple[int, int], rt: Runtime, shards: int = 1) -> int:
    """The largest of `sizes` (sequences per forward pass of a rank) whose training step fits into memory.

    `shape` is (T, V), tokens a sequence and the vocabulary's size; `shards` is the number of ranks that divide the
    optimizer's state. On a CPU, where memory is not the limit, it is the size that keeps about 4096 tokens at once in
    the caches. Raises UserError if not even one sequence fits.
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

    Called as the loop calls it, so that compiled code is used again: targets are a slice, n_targets is a tensor.
    """
    rng = torch.get_rng_state()
    forward.require_backward_grad_sync = False  # of DDP: a rank that is out of memory would keep the others waiting
    T, V = shape
    try:
        windows = torch.randint(V, (size, T + 1), device=rt.device)
        idx, targets = windows[:, :-1].clip(0), windows[:, 1:]
        trained = [p for p in forward.parameters() if p.requires_grad]
        moments = [torch.empty(2 * p.numel() // shards, device=rt.device) for p in trained]
        spare = torch.empty(_five_percent(rt), dtype=torch.uint8, device=rt.device)  # fragmentation, NCCL's buffers
        with rt.autocast():
            loss = forward(idx, targets, n_targets=torch.ones((), device=rt.device))
        loss.backward()
        del loss, moments, spare
        return True
    except RuntimeError as e:
        if ran_out_of_memory(e):
            return False
        raise
    finally:
        forward.zero_grad(set_to_none=True)
        torch.set_rng_state(rng)
        if rt.device.type == "cuda":
            torch.cuda.empty_cache()


def ran_out_of_memory(e: RuntimeError) -> bool:
    """The allocator has a type of its own for it, cuBLAS and Triton have not."""
    words = r"out of memory|ALLOC_FAILED|out of resource"
    return isinstance(e, torch.OutOfMemoryError) or re.search(words, str(e)) is not None


def measure_peaks(make: Callable, sizes: Iterable[int], shape: tuple[int, int], rt: Runtime) -> dict:
    """Peaks of training on one GPU, not compiled, by (activations recomputed, micro-batch); {} without a GPU.

    `make(recomputed)` returns a model on the device and its optimizer; for `shape` see `find_micro_batch_size`.
    """
    if rt.device.type != "cuda" or rt.world_size > 1:
        return {}
    cases = product((False, True), sizes)
    return {(again, size): peak_of_training(partial(make, again), size, shape, rt) for again, size in cases}


def peak_of_training(make: Callable[[], tuple], size: int, shape: tuple[int, int], rt: Runtime) -> int | None:
    """Bytes at the peak of two steps on random ids with micro-batches of `size` sequences; None if they do not fit."""
    gc.collect()  # of the model before: one that recomputes its activations refers to itself
    rt.reset_peak_memory()
    T, V = shape
    try:
        model, optimizer = make()
        for _ in range(2):  # moments are there from the second step on, gradients from the second micro-batch on
            for _ in range(2):
                idx = torch.randint(V, (size, T), device=rt.device)
                with rt.autocast():
                    loss = model.loss(idx, idx)
                optimizer.scale(loss).backward()
                del loss
            optimizer.step(finite=optimizer.clip_grad_norm(1.0).isfinite())
        return rt.peak_memory()
    except RuntimeError as e:
        if ran_out_of_memory(e):
            return None
        raise


def _five_percent(rt: Runtime) -> int:
    return torch.cuda.get_device_properties(rt.device).total_memory // 20 if rt.device.type == "cuda" else 0
