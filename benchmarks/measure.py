"""How everything is measured: contestants in turn, medians, a table, the machine.

- `interleave(contestants, repeats, rt)` times them in turn in this process
- `in_own_process(function, *args)` keeps what a contestant compiles, chooses or allocates away from the others
- `table(seconds, work, unit)` prints rates, their spread, and ratios to the first contestant
- `markdown_table(rows)` is for reports
- `peak_memory(command)` is that of a whole tree of processes
- `model_sizes(name)` is what --size means, `fast_dtype(rt)` the precision of training on this device
- `machine(rt)` describes where the figures come from

This file knows nothing of what is compared.
"""

import contextlib
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from model import SIZES

TINY = dict(n_layer=2, n_head=2, n_embd=64)  # to see whether a command works, not how fast it is
Seconds = dict[str, list[float]]  # of each timed run of each contestant


def interleave(contestants: dict[str, Callable[[], object]], repeats: int, rt) -> Seconds:
    """Seconds of `repeats` runs of each contestant, after one that does not count.

    They take turns, so that a machine that becomes slower, for heat or a neighbour, does so for all of them alike.
    """
    seconds = {name: [] for name in contestants}
    for round_ in range(repeats + 1):
        for name, run in contestants.items():
            rt.synchronize()  # a GPU may still be busy with the one before
            began = time.perf_counter()
            run()
            rt.synchronize()
            if round_:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def in_own_process(function: Callable, *args):
    """function(*args), computed by a new Python that ends with it. Both have to be such as can be pickled.

    What torch.compile, the choice of an attention kernel and the allocator of a GPU leave behind is of the process.
    Errors come back as they are; BrokenProcessPool (a RuntimeError) says that the process was killed.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit all that
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *args).result()


def table(seconds: Seconds, work: float, unit: str) -> list[dict]:
    """Print median rates (work / seconds), slowest and fastest, ratios to the first contestant. Returns the rows."""
    rows, width = [], max(map(len, seconds))
    first = statistics.median(next(iter(seconds.values())))
    for name, values in seconds.items():
        median = statistics.median(values)
        low, high = work / max(values), work / min(values)
        rows.append(dict(name=name, rate=work / median, unit=unit, low=low, high=high, ratio=first / median))
        spread = f"({low:,.1f} to {high:,.1f})"
        print(f"{name:<{width}}  {work / median:>12,.1f} {unit}  {spread}  x {first / median:.2f}", flush=True)
    return rows


def markdown_table(rows: list[dict]) -> str:
    """Rows of text that all have the same keys, which become the head."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
    return "\n".join(lines) + "\n"


def model_sizes(name: str) -> dict:
    """n_layer, n_head and n_embd of a --size; GPT-2 124M for none."""
    return TINY if name == "tiny" else SIZES[name or "gpt2"]


def fast_dtype(rt) -> torch.dtype:
    """The 16-bit format in which this device is fast, or fp32. What fp32 products may be rounded to stays as it is."""
    precision = torch.get_float32_matmul_precision()
    try:
        return type(rt).setup(rt.device.type).dtype
    finally:
        torch.set_float32_matmul_precision(precision)  # else the contestants in fp32 would have TF32


def machine(rt) -> dict:
    """What the figures depend on besides the code."""
    if rt.device.type == "cuda":
        name = torch.cuda.get_device_name(rt.device)
    else:
        about = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
        found = re.search(r"model name\s*: (.+)", about)
        name = found[1] if found else platform.processor() or platform.machine()
    return dict(device=name, threads=torch.get_num_threads(), torch=torch.__version__, python=platform.python_version())


def peak_memory(command: list[str]) -> int:
    """Bytes of a command and its children at the worst moment, shared ones counted once; 0 elsewhere than on Linux.

    Raises RuntimeError if the command fails.
    """
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(0.05)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command[:3])} ... failed: {process.stderr.read()[-500:]}")
    return peak


def resident(pid: int) -> int:
    """Bytes that a process and its descendants keep in memory now: the sum of their proportional set sizes."""
    total, pids = 0, [pid]
    for pid in pids:
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += int(found[1]) * 1024 if found else 0
    return total
