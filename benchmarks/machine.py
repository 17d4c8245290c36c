"""What is wrong with this machine: to be known before the hours on it are paid for.

A rented GPU may be shared, capped, hot, of another kind than its name says, or unable to compile; a training run then
takes twice as long, or stops when the disk is full. Each row is one thing that was looked at, what was found, and what
to do where it is not as it should be. Speeds are measured for about a second and compared with the vendors' tables:
matrix products in bf16 with PEAK_TFLOPS of run/runtime.py, copies within the GPU's memory with PEAK_GB below.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from run.runtime import Runtime, look_up, peak_flops

# Peak of the GPU's memory in GB/s, from the data sheets; written and read as PEAK_TFLOPS of run/runtime.py.
PEAK_GB = """
B300 8000, B200 8000, GH200 4000, H200 4800, H100 NVL 3900, H100 PCIe 2000, H100 3350, H800 3350, H20 4000,
A100 SXM4 40GB 1555, A100 PCIE 40GB 1555, A100 80GB PCIe 1935, A100 2039, A800 2039, L40S 864, L40 864, L4 300, A40 696,
A10G 600, A10 600, A6000 768, RTX 6000 Ada 960, RTX PRO 6000 1792, V100 900, T4 320, RTX 5090 1792, RTX 5080 960,
RTX 4090 1008, RTX 3090 Ti 1008, RTX 3090 936, MI300X 5300, MI325X 6000
"""
WRITTEN = 2**28  # bytes, to see how fast the disk is
NEEDED_GB = 20  # of disk: 10B tokens are 20 GB, and a checkpoint of 124M with its optimizer 1.5 GB
TOO_SLOW = 0.6  # of a peak; a sound card reaches 0.7 and more in both measurements


def run(config, rt: Runtime) -> list[dict]:
    checks = [*((gpu_memory, gpu_state, gpu_products, gpu_copies, host_link) if rt.device.type == "cuda" else ()),
              compiler, host, disk]  # fmt: skip
    rows = [dict(name=name, found=found, wrong=wrong) for check in checks for name, found, wrong in check(rt)]
    for row in rows:
        print(f"{row['name']:<12}{row['found']}" + (f"\n    WRONG: {row['wrong']}" if row["wrong"] else ""), flush=True)
    return rows


Found = list[tuple[str, str, str]]  # (what was looked at, what was found, what is wrong and what to do or "")


def gpu_memory(rt: Runtime) -> Found:
    free, total = torch.cuda.mem_get_info(rt.device)
    taken = total - free > 0.05 * total + 2 * 2**30  # besides the contexts of this process and of the one that waits
    found = f"{torch.cuda.get_device_name(rt.device)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return [("GPU", found, "another process is on it; see nvidia-smi, and end it" if taken else "")]


def gpu_state(rt: Runtime) -> Found:
    """Driver, power, heat and errors, as nvidia-smi has them; "" where it does not say."""
    names = ("driver_version", "power.limit", "power.default_limit", "clocks.sm", "clocks.max.sm", "temperature.gpu",
             "compute_mode", "ecc.errors.uncorrected.volatile.total")  # fmt: skip
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    uuid = str(torch.cuda.get_device_properties(rt.device).uuid)  # whatever CUDA_VISIBLE_DEVICES says
    command += ["-i", "GPU-" + uuid.removeprefix("GPU-")]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as e:
        return [("driver", f"nvidia-smi does not answer ({type(e).__name__})", "")]  # a container may not have it
    driver, limit, default, clock, max_clock, heat, mode, errors = (word.strip() for word in line.split(","))
    capped = number(limit) < 0.95 * number(default)
    return [
        ("driver", f"{driver}; PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}", ""),
        ("power", f"{limit} of {default} W", "its power is capped; ask for another machine" if capped else ""),
        ("clock", f"{clock} of {max_clock} MHz, before it is busy", ""),
        ("heat", f"{heat} degrees C", "it is hot before any work" if number(heat) > 75 else ""),
        ("mode", mode, "only one process may use it, and benchmarks need two" if "Exclusive" in mode else ""),
        ("memory bits", f"{errors} uncorrected errors", "memory fails; ask for another" if number(errors) > 0 else ""),
    ]


def number(word: str) -> float:
    """0 for "[N/A]" and the like, which is below every limit."""
    try:
        return float(word)
    except ValueError:
        return 0.0


def gpu_products(rt: Runtime) -> Found:
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(rt.device) >= (8, 0) else torch.float16
    a, b = (torch.randn(8192, 8192, device=rt.device, dtype=dtype) for _ in range(2))
    rate = 2 * 8192**3 / seconds_of(lambda: a @ b, rt)
    peak = peak_flops(torch.cuda.get_device_name(rt.device))
    return [("products", *against(rate / 1e12, peak and peak / 1e12, "TFLOP/s", "capped or shared"))]


def gpu_copies(rt: Runtime) -> Found:
    a = torch.zeros(2**30, dtype=torch.uint8, device=rt.device)
    b = torch.empty_like(a)
    rate = 2 * a.numel() / seconds_of(lambda: b.copy_(a), rt)  # read and written
    return [("copies", *against(rate / 1e9, look_up(torch.cuda.get_device_name(rt.device), PEAK_GB), "GB/s", "shared"))]


def against(rate: float, peak: float | None, unit: str, why: str) -> tuple[str, str]:
    found = f"{rate:,.0f} {unit}" + (f", {rate / peak:.0%} of {peak:,.0f}" if peak else ", its peak is not known")
    return found, f"slower than its name says: {why}?" if peak and rate < TOO_SLOW * peak else ""


def host_link(rt: Runtime) -> Found:
    host = torch.empty(2**28, dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device=rt.device)
    rate = host.numel() / seconds_of(lambda: device.copy_(host, non_blocking=True), rt) / 1e9
    # PCIe 3 with 16 lanes has 12 GB/s. A step reads half a megabyte, a checkpoint writes 1.5 GB
    return [("host to GPU", f"{rate:.1f} GB/s", "a narrow link: checkpoints take long to copy" if rate < 5 else "")]


def seconds_of(work: Callable[[], object], rt: Runtime) -> float:
    """Of one call, the mean over about a second, once clocks have risen."""

    def mean(n: int) -> float:
        rt.synchronize()
        began = time.perf_counter()
        for _ in range(n):
            work()
        rt.synchronize()
        return (time.perf_counter() - began) / n

    mean(3)
    return mean(max(1, int(1 / mean(30))))


def compiler(rt: Runtime) -> Found:
    """Whether training would be compiled. Triton, a C compiler and libcuda are what is missing most often."""
    why = Runtime.setup(rt.device.type, "auto", "auto").why
    off = rt.device.type == "cuda" and "compile on" not in why
    return [("training", why, "training without torch.compile takes about twice as long" if off else "")]


def host(rt: Runtime) -> Found:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    few = rt.device.type == "cuda" and cores < 4
    wrong = "few cores for a loader, a writer of checkpoints and torch.compile" if few else ""
    return [("host", f"{cores} cores, Python and PyTorch {torch.__version__}", wrong)]


def disk(rt: Runtime) -> Found:
    """The disk of the current directory: what is free, and how fast WRITTEN bytes are really on it."""
    free = shutil.disk_usage(".").free / 1e9
    with tempfile.NamedTemporaryFile(dir=".") as file:
        block = os.urandom(2**20)
        began = time.perf_counter()
        for _ in range(WRITTEN // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = WRITTEN / (time.perf_counter() - began) / 1e6
    wrong = f"less than {NEEDED_GB} GB free: shards and checkpoints need that" if free < NEEDED_GB else ""
    return [("disk", f"{Path.cwd()}: {free:,.0f} GB free, writes {rate:,.0f} MB/s", wrong)]
