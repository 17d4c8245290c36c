"""The parts of a training step by themselves, for what to choose and what to improve.

- `losses`: the loss of 65,536 positions, forward and backward: plain and compiled, in chunks of several sizes, in FP8
- `memory`: the micro-batch that train_gpt2.py finds for each size of GPT-2, and the memory at its peak
- `profile`: where the time of one step goes, by kind of kernel

Contestants of one table take turns in one process. Weights are random, which has no influence on the speed.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.ladder import WARM_UPS
from benchmarks.ladder import model_shape as bench_shape
from benchmarks.measure import interleave, model_sizes, table
from benchmarks.train import project_step
from learning.loss import LinearCrossEntropy
from model import GPT, SIZES
from run.runtime import Runtime
from run.trials import find_micro_batch_size
from train_gpt2 import RECIPES, model_shape, prepare

KINDS = {  # of kernels, by their names; the first that matches counts, since Inductor's name all that they fused
    "Inductor: reductions (norms, softmax, loss)": r"^triton_(red|per)",
    "Inductor: elementwise": r"^triton_(poi|for)",
    "attention": r"flash|fmha|sdpa|attention",
    "matrix products": r"gemm|nvjet|cutlass|cublas|matmul|mm_|triton_tem",
    "optimizer": r"adam|multi_tensor|foreach|lerp",
    "copies": r"memcpy|memset|copy",
}


def tiny(config) -> bool:
    return config.size == "tiny"


def fast(rt: Runtime) -> Runtime:
    """The precision and the compiler that a run has here."""
    return Runtime.setup(rt.device.type, "auto", "auto")


def compiled(function: Callable, rt: Runtime) -> Callable:
    return torch.compile(function, dynamic=False) if rt.compile else function


def has_float8(rt: Runtime) -> bool:
    """On a CPU too, where it is slow, if products are in bf16 there."""
    return rt.dtype == torch.bfloat16 and (
        rt.device.type != "cuda" or torch.cuda.get_device_capability(rt.device) >= (8, 9)
    )


# ----------------------------------------------------------------------------------------------------------- losses


def losses(config, rt: Runtime) -> list[dict]:
    rt = fast(rt)
    N, C, V = (512, 64, 512) if tiny(config) else (2**16, 768, 50304)
    x = torch.randn(N, C, device=rt.device, dtype=rt.dtype, requires_grad=True)  # as blocks leave it under autocast
    weight = (torch.randn(V, C, device=rt.device) * 0.02).requires_grad_()
    targets = torch.randint(V, (N,), device=rt.device)
    chunks = [N // 4, N // 2] if tiny(config) else [2**n // V // 256 * 256 for n in (27, 28, 29)]  # positions
    functions = {"all logits at once": all_logits}
    functions |= {f"{chunk:,} positions at a time": in_chunks(chunk, False) for chunk in chunks}
    if has_float8(rt):
        functions[f"{chunks[-1]:,} positions at a time, FP8"] = in_chunks(chunks[-1], True)
    steps, memory = {}, {}
    for name, function in functions.items():
        steps[name] = partial(gradients, compiled(function, rt), x, weight, targets)
        try:
            steps[name]()  # compiles, which may take more memory than the step
            rt.reset_peak_memory()
            steps[name]()
            memory[name] = rt.peak_memory()
        except torch.OutOfMemoryError:
            print(f"{name}: does not fit")
            del steps[name]
    rows = table(interleave(steps, config.repeats, rt), N, "positions/s")
    return [row | dict(memory=memory[row["name"]]) for row in rows]


def all_logits(x, weight, targets):
    return F.cross_entropy((x @ weight.to(x.dtype).T).float(), targets, reduction="sum")


def in_chunks(chunk: int, fp8: bool) -> Callable:
    return lambda x, weight, targets: LinearCrossEntropy.apply(x, weight, targets, chunk, True, fp8)


def gradients(function: Callable, x, weight, targets) -> None:
    torch.autograd.grad(function(x, weight, targets), (x, weight))


# ----------------------------------------------------------------------------------------------------------- memory


def memory(config, rt: Runtime) -> list[dict]:
    """Uncompiled, since compiling all sizes takes minutes; compiled code needs a little less."""
    rt = replace(fast(rt), compile=False)
    rows = []
    for name in ("tiny",) if tiny(config) else SIZES:
        sizes, length = (model_sizes(name), 32) if tiny(config) else (SIZES[name], 1024)
        constants = replace(RECIPES["gpt2"], **sizes, sequence_length=length)
        with torch.device(rt.device):  # 1.5 billion random numbers take a host a quarter of a minute
            model = GPT(model_shape(constants, "gpt2", None, rt))
        prepare(model, constants, rt)
        rt.reset_peak_memory()
        found = find_micro_batch_size(model, [1, 2, 4, 8, 16, 32, 64, 128, 256], (length, constants.vocab_size), rt)
        rows.append(dict(name=name, micro_batch_size=found, memory=rt.peak_memory()))
        print(f"{name}: {found} sequences of {length}", flush=True)
        del model
    return rows


# ---------------------------------------------------------------------------------------------------------- profile


def profile(config, rt: Runtime) -> list[dict]:
    batch_size = config.batch_size or (4 if tiny(config) else 64)
    step, _ = project_step(False, bench_shape(config.size, rt), batch_size, rt)
    for _ in range(WARM_UPS):
        step(1)
    rt.synchronize()
    with torch.profiler.profile() as profiler:
        step(1)
        rt.synchronize()
    cuda, times = rt.device.type == "cuda", Counter()
    for event in profiler.key_averages():
        # Inductor's annotations cover kernels that are counted by themselves
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        if on_gpu or not cuda:
            times[kind(event.key)] += event.self_device_time_total if cuda else event.self_cpu_time_total
    whole = sum(times.values())
    rows = [dict(name=name, ms=us / 1e3, fraction=us / whole) for name, us in times.most_common()]
    for row in rows:
        print(f"{row['name']:<46}{row['ms']:>9.2f} ms{row['fraction']:>8.1%}")
    return rows


def kind(name: str) -> str:
    return next((title for title, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "others")
