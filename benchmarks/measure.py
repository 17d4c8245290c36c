"""How all benchmarks measure: contestants in turn, medians, tables, the machine.

- `Common`: the constants that every benchmark has
- `rates(contestants, ...)` times contestants in turn in this process, and yields a row whenever one has run; for
  contestants in processes of their own see steps.py
- `markdown_table(rows)` is how rows are shown
- `peak_memory(command)` measures a whole tree of processes
- `model_sizes(name)` is what --size means, `fast_dtype(rt)` the precision of training on this device
- `machine(rt)` describes where the figures come from

This file knows nothing of what is compared.
"""

import contextlib
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

from model import SIZES
from parts.cards import peak_of
from parts.cli import Range
from parts.runtime import Runtime

ROOT = Path(__file__).resolve().parent.parent
TINY = dict(n_layer=2, n_head=2, n_embd=64)  # to test that a command works, not how fast it is
Device = Literal["auto", "cuda", "mps", "cpu"]
Size = Literal["", "tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]


@dataclass(frozen=True)
class Common:
    repeats: Annotated[int, Range(1, 1000)] = 5  # timed runs of each contestant
    device: Device = "auto"  # auto: cuda, else mps, else cpu
    json: str = ""  # write the figures to this file


# -------------------------------------------------------------------------------------------------------- contestants


def rates(contestants: dict[str, Callable[[], object]], repeats: int, rt, work, unit: str) -> Iterator[dict]:
    """Rows with the median rate of each contestant, `work` a run (a number, or one for each), and its ratio to the
    first. A row comes after every timed run, and replaces the earlier row of that name.

    They take turns, so that a machine that slows down (heat, other load) slows all of them. The first round does not
    count, because contestants are built or compiled in it. One that raises gets a row that says so, and drops out.
    """
    found: dict[str, list[float]] = {name: [] for name in contestants}
    first = next(iter(contestants))
    running = dict(contestants)
    for round_ in range(repeats + 1):
        for name, run in list(running.items()):
            try:
                elapsed = timed(run, rt)
            except Exception as e:
                del running[name]
                yield failure(name, e)
                continue
            if round_ > 0:
                done = work[name] if isinstance(work, dict) else work
                found[name].append(done / elapsed)
                yield rate_row(name, found[name], found[first], unit)


def rate_row(name: str, found: list[float], base: list[float], unit: str) -> dict:
    """The row of a contestant that reached the rates `found`, compared with `base` if there are any."""
    median = statistics.median(found)
    ratio = median / statistics.median(base) if base else None
    return dict(name=name, rate=median, unit=unit, low=min(found), high=max(found), ratio=ratio)


def timed(run: Callable[[], object], rt) -> float:
    rt.synchronize()  # a GPU may still be busy with the one before
    began = time.perf_counter()
    run()
    rt.synchronize()
    return time.perf_counter() - began


def built_late(make: Callable, *args) -> Callable[[], object]:
    """The contestant that make(*args) returns, built in its first turn, which does not count."""
    made = []

    def run() -> object:
        if not made:
            made.append(make(*args))
        return made[0]()

    return run


def failure(name: str, e: BaseException) -> dict:
    """The row of a contestant that raised."""
    said = str(e).strip().splitlines() or ["without a message"]
    return dict(name=name, error=f"{type(e).__name__}: {said[0]}")


# ------------------------------------------------------------------------------------------------------------- tables


LOSSES = ("loss", "first_loss", "a", "b", "difference", "standard_error")  # shown with four decimals


def markdown_table(rows: list[dict]) -> str:
    """Rows as Markdown, with a column for every key but those that another column shows."""
    if not rows:
        return "nothing to show\n"
    keys = dict.fromkeys(key for row in rows for key in row)
    hidden = {"unit", "low", "high", "flops"}
    if "rate" in keys:
        hidden.add("seconds")
    columns = [key for key in keys if key not in hidden]
    lines = [columns]
    for row in rows:
        lines.append([cell(row, key) for key in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in lines]
    rule = ["-" * (width + 1) + ":" for width in widths]
    table.insert(1, "|" + "|".join(rule) + "|")
    return "\n".join(table) + "\n"


def cell(row: dict, key: str) -> str:
    if key not in row:
        return ""
    value = row[key]
    if value is None:
        return "n/a"
    if key == "rate":
        form = ",.0f" if value >= 1000 else ",.1f"
        spread = f" ({row['low']:{form}} to {row['high']:{form}})" if "low" in row else ""
        return f"{value:{form}} {row['unit']}{spread}"
    if key == "memory":
        return f"{value / 2**30:.2f} GiB"
    if key in LOSSES:
        return f"{value:.4f}"
    if isinstance(value, list):
        return ", ".join(cell({key: one}, key) for one in value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|")


# -------------------------------------------------------------------------------------------------- what is measured on


def model_sizes(name: str) -> dict:
    """n_layer, n_head and n_embd of a --size; GPT-2 124M if it is empty."""
    return TINY if name == "tiny" else SIZES[name or "gpt2"]


def fast_dtype(rt) -> torch.dtype:
    """The 16-bit format that is fast on this device, or fp32. Leaves the precision of fp32 products as it is."""
    precision = torch.get_float32_matmul_precision()
    try:
        return Runtime.setup(rt.device.type).dtype
    finally:
        torch.set_float32_matmul_precision(precision)  # or the contestants in fp32 would have TF32


def machine(rt) -> dict:
    """What the figures depend on besides the code."""
    on_gpu = rt.device.type == "cuda"
    name = torch.cuda.get_device_name(rt.device) if on_gpu else processor()
    about = dict(
        device=name,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
    )
    return about | about_gpu(rt, name) if on_gpu else about


def processor() -> str:
    about = Path("/proc/cpuinfo")
    if about.exists():
        found = re.search(r"model name\s*: (.+)", about.read_text())
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def about_gpu(rt, name: str) -> dict:
    """Memory, peak, and what nvidia-smi says: a card may be shared, capped or hot. {} if it does not answer."""
    free, total = torch.cuda.mem_get_info(rt.device)
    peak = peak_of(name)
    found = dict(
        cuda=torch.version.cuda,
        free_gib=round(free / 2**30, 1),
        total_gib=round(total / 2**30, 1),
        peak_tflops=peak and peak / 1e12,
    )
    asked = "driver_version,power.limit,power.default_limit,clocks.sm,clocks.max.sm,temperature.gpu,compute_mode"
    uuid = str(torch.cuda.get_device_properties(rt.device).uuid).removeprefix("GPU-")  # despite CUDA_VISIBLE_DEVICES
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", "-i", f"GPU-{uuid}"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # a container may not have it
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        answers = map(str.strip, line.split(","))
        found |= dict(zip(asked.split(","), answers, strict=False))
    return found


def peak_memory(command: list[str]) -> int:
    """Peak bytes of a command and its children, shared ones counted once; 0 on systems other than Linux.

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
    total = 0
    with contextlib.suppress(OSError):  # it may have ended meanwhile
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            total += resident(int(child))
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        if found:
            total += int(found[1]) * 1024
    return total
