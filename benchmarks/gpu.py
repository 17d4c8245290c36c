"""All GPU tests and benchmarks in one command: `python bench.py gpu --out FOLDER`.

First the tests that need a GPU (`python -m pytest -m gpu`: does it compute what it should?), then the benchmarks, the
most important first, each in a process that may use the rest of --minutes. FOLDER/report.md describes the machine and
has a table for each part; log.txt has everything that was printed. Both grow as it runs: a part that runs out of time
keeps the rows of its finished contestants, and one that fails shows its last lines; either way the exit code is 2 at
the end. --only NAME ... runs these parts again and keeps the results of the others.
On a CPU, `--size tiny` goes through all of it in small. For a machine without a network: --data FOLDER has
hellaswag*.jsonl and alpaca*.json, and TIKTOKEN_CACHE_DIR (absolute) is a copy of tiktoken's cache. This file knows the
order of the parts, but not what they measure.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.measure import ROOT, Device, Size, machine, markdown_table
from cli import Range, UserError
from files import read_json, replace_file, set_aside
from machine.runtime import Runtime

TESTS = [sys.executable, "-m", "pytest", "-v", "-rs", "-m", "gpu", "tests/test_gpu.py"]
PARTS = {  # by name: a title, and the words of bench.py for this part alone
    "tests": ("Does it compute what it should?", []),
    "train": ("Training, 124M, against the plain recipe", ["--turns", "1"]),
    "hellaswag": ("HellaSwag, 124M", ["--repeats", "1"]),
    "sample": ("Generation against transformers", ["--repeats", "2"]),
    "lora": ("LoRA against peft", ["--repeats", "2"]),
    "save": ("Checkpoints in the background", ["--repeats", "2"]),
    "ladder": ("One training step, rung by rung", ["--repeats", "3"]),
}
FILES = {"hellaswag": "hellaswag*.jsonl", "lora": "alpaca*.json"}  # of --data


@dataclass(frozen=True)
class Config:
    out: str = ""  # folder for the report
    minutes: Annotated[float, Range(0.01, 1e4)] = 9.0  # time limit for all parts together
    only: tuple[str, ...] = ()  # run only these parts
    size: Size = ""  # size of the models; tiny for a quick test
    data: str = ""  # folder with HellaSwag and Alpaca; downloaded if empty
    device: Device = "auto"  # auto: cuda, else mps, else cpu
    json: str = ""  # write a line for each part to this file


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    if unknown := set(config.only) - set(PARTS):
        raise UserError(f"--only {sorted(unknown)[0]}: the parts are {', '.join(PARTS)}")
    if not config.out:
        raise UserError("no folder for the report was given; give one: bench.py gpu --out FOLDER")
    folder = Path(config.out).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * config.minutes
    failed = []
    for name in config.only or PARTS:
        figures = folder / f"{name}.json"
        if figures.exists():
            set_aside(figures)
        limit = deadline - time.monotonic()
        if name == "tests" and config.only != ("tests",):
            limit /= 3  # a hanging test must not cost all
        part = run_part(name, command(name, config, figures), folder, limit)
        rows = read_json(figures)["rows"] if figures.exists() else []
        replace_file(figures, json.dumps(dict(part, rows=rows), indent=1) + "\n")
        replace_file(folder / "report.md", report(folder, machine(rt)))
        if part["error"]:
            failed.append(name)
        yield dict(name=name, seconds=part["seconds"], error=part["error"], rows=len(rows))
    if failed:
        raise UserError(f"{', '.join(failed)} failed; {folder}/report.md says why, and has the figures of what did not")
    print(f"\n{folder}/report.md")


def command(name: str, config: Config, figures: Path) -> list[str]:
    """The words of the process that runs a part and writes its rows to `figures`."""
    if name == "tests":
        return TESTS
    words = ["--device", config.device, "--json", str(figures), *PARTS[name][1]]
    if config.size:
        words += ["--size", config.size]
    if config.data and name in FILES:
        folder = Path(config.data).absolute()
        found = [*sorted(folder.glob(FILES[name])), folder / FILES[name]]  # what is missing fails by its name
        words += ["--data", str(found[0])]
    return [sys.executable, str(ROOT / "bench.py"), name, *words]


def run_part(name: str, words: list[str], folder: Path, limit: float) -> dict:
    """{seconds, error, said} of a process; error is "" if it succeeded within `limit` seconds."""
    began = time.monotonic()
    if limit <= 0:
        return dict(seconds=0.0, error="no time was left", said="")
    with open(folder / "log.txt", "a+b") as log:
        log.write(f"\n--- {name}\n".encode())
        log.flush()
        start = log.tell()
        # the tests are found from the repository; what a benchmark writes goes into the folder
        cwd = ROOT if name == "tests" else folder
        code = wait_for(words, dict(cwd=cwd, stdout=log, stderr=log), limit)
        log.seek(start)
        said = log.read().decode(errors="replace").strip()
    print(f"\n--- {name}\n{said}", flush=True)
    seconds = round(time.monotonic() - began, 1)
    return dict(seconds=seconds, error=what_failed(code, said, limit), said=said)


def what_failed(code: int | None, said: str, limit: float) -> str:
    """The error of a process that printed `said`; "" if there is none."""
    if code == 0:
        return ""
    if code is None:
        return f"cut off after {limit:.0f} s"
    last = said.splitlines()[-1] if said else "it printed nothing"
    return last.removeprefix("error: ")[:300]


def wait_for(words: list[str], options: dict, limit: float) -> int | None:
    """The exit code of a process, None if it took longer than `limit` seconds. Whatever ends the wait, even a signal,
    ends the process and everything it started, which is why it has a session."""
    process = subprocess.Popen(words, start_new_session=True, **options)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def report(folder: Path, about: dict) -> str:
    """The page, from the parts that the folder has."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    parts = {name: read_json(file) for name, file in files.items() if file.exists()}
    minutes = sum(part["seconds"] for part in parts.values()) / 60
    found = [{"machine": name, "found": value} for name, value in about.items()]
    lines = [f"# {about['device']}, {minutes:.1f} minutes", "", markdown_table(found)]
    for name, part in parts.items():
        title, _ = PARTS[name]
        lines += [f"## {title}", "", f"`bench.py gpu --only {name}`, {part['seconds']:.0f} s", ""]
        if part["rows"]:
            lines.append(markdown_table(part["rows"]))
        if part["error"]:
            lines += [f"**{part['error']}**", ""]
        if part["error"] or not part["rows"]:
            lines += ["```", *part["said"].splitlines()[-30:], "```", ""]
    return "\n".join(lines)
