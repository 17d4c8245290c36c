"""Everything that one GPU can answer, in one command: `python bench.py gpu --out FOLDER`.

First what is wrong with the machine, then whether it computes what it should, then how fast: the parts are in order of
worth, each a process of its own with a time limit of its own. After each of them FOLDER has report.json and report.md
as far as it has come, and log.txt with all that was printed; --minutes bounds the whole, and what no time was left for
is named with the command that measures it alone (`--only NAME ...`, which adds to the report that is there).

On a CPU, `--size tiny` goes through all of it in small. --data FOLDER has hellaswag*.jsonl and alpaca*.json where the
machine has no network. This file knows the parts and their order; what they measure is in their own files.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from benchmarks.measure import machine
from benchmarks.report import draw, markdown
from cli import UserError, read_json, replace_file
from run.runtime import Runtime

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 10  # times the limits, on a CPU


class Part(NamedTuple):
    place: str  # module:function, called with (config, rt); returns the rows
    seconds: int  # its limit, on a GPU
    title: str
    changes: dict = {}  # of config


PARTS = {
    "machine": Part("machine:run", 60, "What is wrong with this machine"),
    "numerics": Part("checks:numerics", 100, "Twenty steps against the formula"),
    "attention": Part("checks:attention", 60, "Attention kernels against the formula"),
    "scores": Part("checks:scores", 40, "HellaSwag's sums against one at a time"),
    "loop": Part("restarts:loop", 80, "The loop waits for nothing and compiles once"),
    "restarts": Part("restarts:restarts", 60, "Resumed, rolled back, through a process group"),
    "train": Part("train:quick", 240, "Training, 124M, against the plain recipe"),
    "sample": Part("sample:run", 120, "Generation against transformers", dict(repeats=2)),
    "losses": Part("kernels:losses", 60, "The loss by itself"),
    "hellaswag": Part("hellaswag:quick", 60, "HellaSwag, 124M"),
    "profile": Part("kernels:profile", 80, "Where the time of a step goes"),
    "memory": Part("kernels:memory", 80, "Micro-batches that fit"),
    "lora": Part("lora:run", 60, "LoRA against peft", dict(repeats=2)),
    "save": Part("save:run", 60, "Checkpoints in the background", dict(repeats=2)),
    "ladder": Part("ladder:run", 300, "One training step, rung by rung", dict(repeats=3)),
}


def run(config, rt: Runtime) -> list[dict]:
    names = config.only or tuple(PARTS)
    if unknown := set(names) - set(PARTS):
        raise UserError(f"--only {sorted(unknown)[0]}: the parts are {', '.join(PARTS)}")
    if not config.out:
        raise UserError("say where the report goes: bench.py gpu --out FOLDER")
    folder = Path(config.out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    report = dict(machine=machine(rt), device=rt.device.type, size=config.size, left_out=[])
    report["parts"] = earlier(folder) if config.only else {}
    deadline = time.monotonic() + 60 * config.minutes
    for name in names:
        left = deadline - time.monotonic()
        if left <= 0:
            report["left_out"].append(name)
            continue
        print(f"\n{name}: {PARTS[name].title}", flush=True)
        limit = PARTS[name].seconds * (1 if rt.device.type == "cuda" else PATIENCE)
        report["parts"][name] = run_part(name, config, folder, min(limit, left))
        write(report, folder)
    write(report, folder)
    draw(report, folder)
    print(f"\n{folder}/report.md" + "".join(f"; no time was left for {name}" for name in report["left_out"]))
    return [dict(part=name) | row for name in names if name in report["parts"] for row in report["parts"][name]["rows"]]


def earlier(folder: Path) -> dict:
    """The parts of a report that is there. Raises UserError for another kind of file."""
    try:
        parts = read_json(folder / "report.json")["parts"]
        return {name: dict(part, rows=list(part["rows"])) for name, part in parts.items() if name in PARTS}
    except FileNotFoundError:
        return {}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{folder}/report.json is no report of this command; give another --out") from None


def write(report: dict, folder: Path) -> None:
    """report.json and report.md, as far as it has come."""
    report["parts"] = {name: report["parts"][name] for name in PARTS if name in report["parts"]}
    replace_file(folder / "report.json", json.dumps(report, indent=1) + "\n")
    replace_file(folder / "report.md", markdown(report, {name: part.title for name, part in PARTS.items()}))


def run_part(name: str, config, folder: Path, limit: float) -> dict:
    """{rows, seconds, error} of a part that runs in a process of its own; error is "" if it came to its end in time."""
    file, began = folder / f".{name}.json", time.monotonic()
    file.unlink(missing_ok=True)  # of a run that was killed
    with open(folder / "log.txt", "a+b") as log:
        log.write(f"\n--- {name}\n".encode())
        log.flush()
        start = log.tell()
        code = wait_for(command(name, config, file), dict(cwd=folder, stdout=log, stderr=log), limit)
        log.seek(start)
        said = log.read().decode(errors="replace")
    print(said, flush=True)
    error = "" if code == 0 else f"not done after {limit:.0f} s" if code is None else last_line(said)
    rows = read_json(file) if file.exists() else []
    file.unlink(missing_ok=True)
    return dict(rows=rows, seconds=round(time.monotonic() - began, 1), error=error, said=said if error else "")


def wait_for(words: list[str], options: dict, limit: float) -> int | None:
    """The exit code of a process, None if it took longer than `limit` seconds. Whatever ends the wait, a signal too,
    ends the process and all that it started: it is in a session of its own for that."""
    process = subprocess.Popen(words, start_new_session=True, **options)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(ProcessLookupError):  # all have ended by themselves
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def command(name: str, config, file: Path) -> list[str]:
    """The words of a process that measures a part and writes its rows to `file`."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import cli, benchmarks.gpu as gpu; cli.script(gpu.main)"
    constants = asdict(config) | dict(data=str(Path(config.data).absolute()) if config.data else "")
    return [sys.executable, "-c", code, name, json.dumps(constants), str(file)]


def last_line(said: str) -> str:
    return (said.strip().splitlines() or ["it said nothing"])[-1].removeprefix("error: ")[:300]


# ----------------------------------------------------------------------------------------------- a part's own process


def main() -> None:
    name, words, file = sys.argv[1:]
    part = PARTS[name]
    config = SimpleNamespace(**json.loads(words) | part.changes)
    config.data, config.png = data_for(name, config.data), "ladder.png"
    module, function = part.place.split(":")
    rt = Runtime.setup(config.device, "float32")
    rows = getattr(importlib.import_module(f"benchmarks.{module}"), function)(config, rt)
    replace_file(Path(file), json.dumps(rows))


def data_for(name: str, folder: str) -> str:
    """The file that a part reads, of --data; "" is to download it."""
    pattern = {"hellaswag": "hellaswag*.jsonl", "lora": "alpaca*.json"}.get(name)
    found = sorted(Path(folder).glob(pattern)) if folder and pattern else []
    return str(found[0].absolute()) if found else ""
