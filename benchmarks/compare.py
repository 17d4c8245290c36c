"""Two commands of a training script over the same seeds: how much does the last validation loss differ?

    python bench.py compare "tiny" "tiny --weight_decay 0.3" --seeds 4
    python bench.py compare "tiny" "../idea/train_gpt2.py tiny"        # the same command in another checkout
    python bench.py compare "lora_finetune.py --lora_dim 8" "lora_finetune.py --lora_dim 16"

A command is a recipe with its flags, as after `python train_gpt2.py`, or begins with the path of the script. With the
same seed, models of one shape begin with the same weights and read the same data in the same order, so their difference
varies less than either loss. The table has the mean difference, B - A, and its standard error. For a chance of error of
5%, a difference has to be 3.2 standard errors with 4 seeds, and 2.4 with 8; and twenty ideas are twenty chances. What
helps a small model need not help a large one.
Runs stay in --out_dir. Those that are complete are read, and others are resumed: give the same command again after an
interruption. After a change of code, give another --out_dir.
"""

import hashlib
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from benchmarks.measure import ROOT
from parts.cli import Positional, Positive, UserError, with_underscores
from parts.log import Records, newest_start, of_kind, read_log

SCRIPTS = ("train_gpt2.py", "lora_finetune.py")
OURS = {"seed", "out_dir", "resume", "overwrite"}  # the flags that every run gets here


@dataclass(frozen=True)
class Config:
    a: Annotated[str, Positional]  # a command
    b: Annotated[str, Positional]  # the command to compare it with
    seeds: Positive = 4  # runs of each, with the seeds 1, 2, 3, ...
    out_dir: str = "out/compare"  # directory of the runs
    json: str = ""  # write the figures to this file


def run(config: Config, rt) -> Iterator[dict]:
    commands = {command: words_of(command) for command in (config.a, config.b)}  # both, before one trains for hours
    print(f"a: {config.a}\nb: {config.b}", flush=True)
    rows = []
    for seed in range(1, config.seeds + 1):
        runs = [trained(command, commands[command], seed, Path(config.out_dir)) for command in (config.a, config.b)]
        a, b = losses(runs)
        rows.append(dict(name=f"seed {seed}", a=a, b=b, difference=b - a))
        yield rows[-1]
    row = {key: statistics.mean(row[key] for row in rows) for key in ("a", "b", "difference")}
    if len(rows) > 1:
        row["standard_error"] = statistics.stdev(row["difference"] for row in rows) / len(rows) ** 0.5
    yield dict(name="mean", **row)


def words_of(command: str) -> list[str]:
    """The words of a command, from the path of its script on. Raises UserError."""
    try:
        words = shlex.split(command)
    except ValueError as e:
        raise UserError(f"{command!r} cannot be read: {e}; close its quotes") from e
    if not words or not words[0].endswith(".py"):
        words = [SCRIPTS[0], *words]
    script = Path(words[0])
    if script.parent == Path():  # of this checkout, wherever we are
        script = ROOT / script
    if script.name not in SCRIPTS or not script.is_file():
        raise UserError(f"{command!r} names no training script that is here; begin it with a recipe or a path to one")
    if given := {with_underscores(word).partition("=")[0].removeprefix("--") for word in words} & OURS:
        raise UserError(f"{command!r} has --{min(given)}, which compare sets itself; leave it out")
    return [str(script), *words[1:]]


def trained(command: str, words: list[str], seed: int, out_dir: Path) -> Records:
    """The log of a complete run, which is trained or continued as far as needed."""
    readable = re.sub(r"[^\w.]+", "_", command).strip("_")[:80]
    digest = hashlib.sha256(os.fsencode(command)).hexdigest()[:8]
    place = out_dir / f"{readable}-{digest}-seed{seed}"
    log = place / "log.jsonl"
    if log.exists() and is_complete(records := read_log(log)):
        print(f"{place}: complete, {origin(records)}", flush=True)
        return records
    print(f"{place}: training", flush=True)
    code = run_to_its_end([sys.executable, *words, "--resume", "--seed", str(seed), "--out_dir", str(place)])
    if code:  # the script has said why, or has saved its step after a signal
        sys.exit(code if code > 0 else 128 - code)
    records = read_log(log)
    if not is_complete(records):
        raise UserError(f"{command!r} ends without a validation loss; give it an --eval_interval above 0")
    print(f"{place}: trained, {origin(records)}", flush=True)
    return records


def origin(records: Records) -> str:
    """The machine and the code of a run."""
    start = newest_start(records)
    return f"on {start.get('machine')}, at commit {start.get('commit')}"


def is_complete(records: Records) -> bool:
    """Whether a run has validated at its last step."""
    last_step = newest_start(records).get("config", {}).get("max_steps")
    at_target = [record["step"] for record in of_kind(records, "target")]
    return any(val["step"] in (last_step, *at_target) for val in of_kind(records, "val"))


def run_to_its_end(command: list[str]) -> int:
    """The exit code of a command whose output is in its log, but for progress and errors. Signals let it save."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal sends Ctrl-C to both
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def losses(runs: list[Records]) -> list[float]:
    """The last validation losses in nats per token; of runs with different tokenizers in bits per byte."""
    tokenizers = {newest_start(records)["tokenizer"] for records in runs}
    key = "loss" if len(tokenizers) == 1 else "bpb"
    if measured_on(runs[0], key) != measured_on(runs[1], key):
        raise UserError("the two commands validate on different tokens; pass both the same --data and --eval_steps")
    found = [of_kind(records, "val")[-1][key] for records in runs]
    if None in found:
        raise UserError("a run has diverged: its last validation loss is not finite; lower its --max_lr")
    return found


def measured_on(records: Records, key: str) -> list:
    """What a run validates on; for bits per byte only what no tokenizer changes."""
    start = newest_start(records)
    val = of_kind(records, "val")[-1]
    if key == "loss":
        return [start["data"], val.get("tokens"), val.get("sequence_length")]
    return [start["config"].get("eval_steps"), *(start["data"].get(name) for name in ("source", "bytes", "examples"))]
