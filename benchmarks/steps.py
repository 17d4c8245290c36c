"""Steps of training, each contestant in its own process: what one compiles or allocates does not affect the next.

- `measure_step(make, ...)` measures the step that `make(rt)` builds
- `measure_door(script, ...)` measures the steps of a training script, from its log
- `step_rates(contestants, ...)` compares both kinds

This file knows nothing of what a step does.
"""

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.measure import ROOT, failure, rate_row, timed
from parts.cli import UserError
from parts.log import newest_start, of_kind, read_log
from parts.runtime import Runtime

# One optimizer step in so many micro-batches, which returns its loss; and its FLOPs per token.
Step = tuple[Callable[[int], torch.Tensor], float]
WARM_UPS = 3  # steps: the first one compiles, and clocks of a GPU take a moment to rise
NEVER = dict(eval_interval=0, sample_interval=0, checkpoint_interval=0)


def step_rates(contestants: dict[str, Callable[[], dict]], n_tokens: int, unit: str, turns: int, rt) -> Iterator[dict]:
    """A row whenever a contestant has run, with all its turns so far, and the ratio to the first contestant.

    Each measures itself and returns what `measure_step` does. They take turns, so that a machine that slows down slows
    all of them. One that raises gets a row that says so, and drops out.
    """
    found: dict[str, list[dict]] = {name: [] for name in contestants}
    first = next(iter(contestants))
    running = dict(contestants)
    for _ in range(turns):
        for name, measure in list(running.items()):
            try:
                found[name].append(measure())
            except Exception as e:  # out of memory, no compiler, or this GPU cannot do it
                del running[name]
                yield failure(name, e)
                continue
            row = rate_row(name, rates_of(found[name], n_tokens), rates_of(found[first], n_tokens), unit)
            newest = found[name][-1]
            if newest["flops"]:
                row["mfu"] = mfu(row["rate"], newest["flops"], rt)
            row["memory"] = max(turn["memory"] for turn in found[name])
            for key in ("micro_batch_size", "first", "losses"):
                row[key] = newest[key]
            row["seconds"] = [seconds for turn in found[name] for seconds in turn["seconds"]]
            yield row


def rates_of(turns: list[dict], n_tokens: int) -> list[float]:
    return [n_tokens / seconds for turn in turns for seconds in turn["seconds"]]


def mfu(rate: float, flops_per_token: float, rt: Runtime) -> float | None:
    """Model FLOPs utilization (Chowdhery et al. 2022, appendix B), None where the peak is not known."""
    peak = rt.peak_flops()
    return rate * flops_per_token / peak if peak else None


def in_own_process(function: Callable, *args):
    """function(*args), computed by a new Python that ends with it. Both must be picklable.

    What torch.compile and the allocator of a GPU leave is gone with the process. Errors come back as they are;
    BrokenProcessPool (a RuntimeError) says that the process was killed.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit all that
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *args).result()


def measure_step(make: Callable[[Runtime], Step], batch_size: int, repeats: int, device: str) -> dict:
    """{seconds, flops, memory, micro_batch_size, first, losses} of the step that make(rt) returns, in as few
    micro-batches as fit: `first` is the seconds of the first step, and `losses` are those of the first three."""
    rt = Runtime.setup(device, "float32")
    for n_micro in (n for n in (1, 2, 4, 8, 16, 32, 64) if n <= batch_size):
        torch.manual_seed(0)
        torch.compiler.reset()  # code for other sizes would make these sizes dynamic, which is slower
        try:
            step, flops = make(rt)
            began = time.perf_counter()
            losses = [step(n_micro).item()]
            first = time.perf_counter() - began
            losses += [step(n_micro).item() for _ in range(WARM_UPS - 1)]
            break
        except torch.OutOfMemoryError:
            step = None
            torch.cuda.empty_cache()
    else:
        raise UserError(f"not even one sequence fits into the memory of this {device}; give a smaller --size")
    rt.reset_peak_memory()
    step(n_micro)
    return dict(
        seconds=[timed(lambda: step(n_micro), rt) for _ in range(repeats)],
        flops=flops,
        memory=rt.peak_memory(),
        micro_batch_size=batch_size // n_micro,
        first=first,
        losses=losses,
    )


def measure_door(script: str, repeats: int, *words: str, **constants) -> dict:
    """The same of a training script, which neither evaluates nor saves: it takes the steps and times them itself."""
    with tempfile.TemporaryDirectory() as out_dir:
        command = [sys.executable, str(ROOT / script), *words]
        for name, value in (NEVER | constants | dict(max_steps=WARM_UPS + repeats, out_dir=out_dir)).items():
            command += [f"--{name}", str(value)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last_line = ["", *done.stderr.splitlines()][-1]
            raise RuntimeError(f"{script} ended with exit code {done.returncode}; {last_line}")
        records = read_log(Path(out_dir) / "log.jsonl")
    start = newest_start(records)
    steps = of_kind(records, "train")
    seconds = [step["dt_ms"] / 1e3 for step in steps]
    return dict(
        seconds=seconds[WARM_UPS:],
        flops=start.get("flops_per_token"),
        memory=steps[-1]["memory_gib"] * 2**30,
        micro_batch_size=start["config"]["micro_batch_size"],
        first=seconds[0],
        losses=[step["loss"] for step in steps[:WARM_UPS]],
    )
