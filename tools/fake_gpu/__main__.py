"""Run this project's CUDA code on a machine without a GPU: python tools/fake_gpu [CHECK ...]

    python tools/fake_gpu              # the checks of checks.ini that are not slow
    python tools/fake_gpu h100 ddp-8   # these
    python tools/fake_gpu all          # all of them

Prints a row per check: what was launched in its last optimizer step, the allocator's peak, compiled graphs. The exit
status is 1 if one failed. Logs and compiled kernels stay in a folder of the temporary directory. README.md, beside this
file, says how it works, what it needs, and what it cannot show.
"""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from library import build

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORDS = "a woman makes tea in a kitchen and drinks it while rain falls on the roof of her house".split()


def main() -> int:
    checks = configparser.ConfigParser()
    checks.read(HERE / "checks.ini")
    asked = sys.argv[1:]
    if not asked:
        asked = [name for name in checks.sections() if not checks[name].getboolean("slow")]
    if asked == ["all"]:
        asked = checks.sections()
    if unknown := set(asked) - set(checks.sections()):
        print(f"error: there is no check {sorted(unknown)[0]}; they are {', '.join(checks.sections())}")
        return 2
    if not torch.version.cuda:
        print(f"error: PyTorch {torch.__version__} has no CUDA; install the build that PyPI has for Linux")
        return 2
    folder = Path(tempfile.gettempdir()) / f"fake_gpu_{torch.__version__}"
    folder.mkdir(exist_ok=True)
    build(folder)
    write_inputs(folder)
    if not (folder / "shards/tokenizer.json").exists() and "base" not in asked:  # others read its results
        asked = ["base", *asked]
    print(f"PyTorch {torch.__version__}; logs are in {folder}")
    failed = 0
    for name in asked:
        failed += not passes(name, checks[name], folder)
    return int(failed > 0)


def write_inputs(folder: Path) -> None:
    """Token shards, rows of HellaSwag and of Alpaca, of random words."""
    rng = np.random.default_rng(0)

    def say(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(low, high)))

    shards = folder / "shards"
    shards.mkdir(exist_ok=True)
    for split, n_tokens in (("train", 3_000_000), ("val", 700_000)):
        ids = rng.integers(0, 2000, n_tokens)  # of the small tokenizer: a sample may be what memory happens to hold
        np.save(shards / f"x_{split}_000000.npy", ids.astype(np.uint16))
    with open(folder / "hellaswag.jsonl", "w") as file:
        for label in [0, 1, 2, 3] * 10:
            endings = [say(3, 20) for _ in range(4)]
            row = dict(activity_label="x", ctx=say(5, 30), ctx_a="", ctx_b="", endings=endings, label=label)
            file.write(json.dumps(row) + "\n")
    answers = [dict(instruction=say(3, 30), input="", output=say(3, 200)) for _ in range(400)]
    (folder / "alpaca.json").write_text(json.dumps(answers))


def passes(name: str, check: configparser.SectionProxy, folder: Path) -> bool:
    """Run a check, print its row, and say whether it did what it should."""
    began = time.monotonic()
    log = folder / f"{name}.log"
    complaint = ""
    shutil.rmtree(folder / name, ignore_errors=True)  # what an earlier run left
    with open(log, "w") as output:
        for command in check["command"].format(folder=folder, name=name).split("&&"):
            complaint = complaint or run(shlex.split(command), check, folder / f"{name}.nccl", output)
    said = log.read_text()
    if not complaint and "Traceback" in said:  # of a process or thread that nobody waited for
        complaint = "a traceback"
    expected = check["expect"]
    if expected:  # this has to fail, and in this way
        found = complaint and re.search(expected, said + complaint)
        complaint = "" if found else f"it did not find: {expected}"
    rows = re.findall(r"^\[fake\] (.*)", said, re.M)
    row = "; ".join([row for row in rows if not row.startswith("step")] or rows[-1:])
    if expected and not complaint:
        row = f"found: {expected}"
    verdict = f"FAIL, {complaint}, see {log}:" if complaint else "ok"
    print(f"{name:<30} sm_{check['card']} {time.monotonic() - began:5.0f} s  {verdict}  {row}", flush=True)
    if name == "base":  # its tokenizer reads the shards, too
        newest = sorted(folder.glob("base/step_*/tokenizer.json"))[-1]
        (folder / "shards/tokenizer.json").write_bytes(newest.read_bytes())
    return not complaint


def run(words: list[str], check: configparser.SectionProxy, exchange: Path, output) -> str:
    """Run a command on the first rank, then on the last. Returns what is wrong, "" if nothing."""
    shutil.rmtree(exchange, ignore_errors=True)
    exchange.mkdir()
    n_ranks = check.getint("ranks")
    for rank in sorted({0, n_ranks - 1}):
        variables = environment(check, exchange, rank, n_ranks)
        command = [sys.executable, "-u", HERE / "process.py", *words]
        status = subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=output).returncode
        if status:
            return f"exit status {status} of rank {rank}"
    return differs(exchange)


def environment(check: configparser.SectionProxy, exchange: Path, rank: int, n_ranks: int) -> dict[str, str]:
    card = check["card"]
    folder = exchange.parent
    variables = dict(
        LD_PRELOAD=folder / "libcuda.so.1", LD_LIBRARY_PATH=folder, LIBRARY_PATH=folder, TRITON_LIBCUDA_PATH=folder,
        FAKE_CC=card, FAKE_MB=check["memory"], FAKE_FAULT=check["fault"], FAKE_NCCL=exchange,
        OMP_NUM_THREADS=1, TORCHINDUCTOR_COMPILE_THREADS=1, TORCHINDUCTOR_CACHE_DIR=folder / f"inductor_{card}",
        TRITON_CACHE_DIR=folder / f"triton_{card}",
    )  # fmt: skip
    if n_ranks > 1:  # as torchrun says it; this machine has one GPU
        n_nodes = check.getint("nodes")
        node_size = n_ranks // n_nodes
        variables |= dict(
            RANK=rank, WORLD_SIZE=n_ranks, LOCAL_RANK=0, LOCAL_WORLD_SIZE=node_size, GROUP_WORLD_SIZE=n_nodes
        )  # fmt: skip
    return os.environ | {name: str(value) for name, value in variables.items()}


def differs(exchange: Path) -> str:
    """Where the first and the last rank do not enter the same collectives, "" if nowhere."""
    lists = [path.read_text().splitlines() for path in sorted(exchange.glob("rank*"))]
    for i, entered in enumerate(zip_longest(*lists)):
        if len(set(entered)) > 1:
            return f"collective {i}: one rank enters {entered[0]}, another {entered[-1]}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
