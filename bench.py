"""How fast it is: every figure of docs/benchmarks.md comes from a command here.

    python bench.py ladder      # fp32 -> TF32 -> bf16 -> compile -> flash attention -> padded vocabulary -> ...
    python bench.py train       # this project's training step against the plain recipe
    python bench.py bpe         # tokenizer training and encoding against tokenizers and tiktoken
    python bench.py data        # sharding and the loader
    python bench.py hellaswag   # batched scoring against one example at a time
    python bench.py lora        # finetuning against peft
    python bench.py sample      # generation with and without the cache, and transformers' generate
    python bench.py save        # what a checkpoint in the background costs the training loop
    python bench.py speedrun    # tokens that the recipe speedrun needs to the loss at which the recipe gpt2 ends
    python bench.py tried       # the choices of the recipe speedrun undone, and the ideas that it does without
    python bench.py ablate      # the choices of GPT-2's recipe, undone one at a time
    python bench.py gpu         # all that one GPU can answer, correctness first, as a report in --out FOLDER

Each is a file of benchmarks/, whose docstring says what is compared and how fair that is. What is compared takes turns
on one machine, and a table shows medians, their spread and ratios. `--json FILE` keeps all figures together with the
machine's description. This file knows nothing of what it measures.
"""

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.measure import machine
from cli import Count, Positive, Range, UserError, parse_args, replace_file, script
from run.runtime import Runtime

NAMES = ("ladder", "train", "bpe", "data", "hellaswag", "lora", "sample", "save", "speedrun", "tried", "ablate", "gpu")


@dataclass(frozen=True)
class Config:
    repeats: Annotated[int, Range(1, 1000)] = 5  # timed runs of what is compared; speedrun, tried, ablate: seeds
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    data: str = ""  # files to measure on, where a command needs some; each command says which
    json: str = ""  # write the figures to this file
    batch_size: Count = 0  # ladder and train: sequences per step; 0: 16, and for train on a GPU 16 and 64
    size: Literal["", "tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"] = ""  # of the model; tiny: a quick try
    shard: Literal["none", "optimizer", "full"] = "none"  # save under torchrun: what ranks divide, see run/sharding.py
    png: str = "ladder.png"  # ladder: the figure
    rows: Count = 0  # hellaswag: rows to score; 0: 40 on a CPU, all on a GPU
    new_tokens: Positive = 128  # sample: tokens to generate
    parameters: Literal["1M", "5M"] = "1M"  # speedrun, tried: the size of the model
    steps: Annotated[int, Range(10, 1e6)] = 1000  # speedrun, tried, ablate: optimizer steps of the recipe gpt2
    fraction: Annotated[float, Range(0.01, 1)] = 0.4  # speedrun, tried: tokens of the schedule, as a fraction of gpt2's
    out: str = ""  # gpu: the folder of the report
    only: tuple[str, ...] = ()  # gpu: these parts alone, added to the report; speedrun, tried: these lines alone
    minutes: Annotated[float, Range(0, 1e4, above=True)] = 9.0  # gpu: parts that would begin later are left out


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        parse_args(Config, ["--help"], description=__doc__)
    if name not in NAMES:
        wrong = f"there is no benchmark {name}; " if name and not name.startswith("-") else ""
        raise UserError(f"{wrong}say what to measure: python bench.py {' | '.join(NAMES)}")
    # only the one that was asked for: others import packages that may not be installed
    benchmark = importlib.import_module(f"benchmarks.{name}")
    config = parse_args(Config, sys.argv[2:], prog=f"bench.py {name}", description=benchmark.__doc__)
    out = Path(config.json)
    if config.json and not out.absolute().parent.is_dir():  # before the hours that it may take
        raise UserError(f"--json {out}: there is no directory {out.parent}; make it, or give another path")
    rt = Runtime.setup(config.device, "float32")
    if rt.world_size > 1 and name != "save":
        raise UserError(f"{name} measures one process; start it without torchrun")
    about = machine(rt)
    rt.print(f"{name}: {benchmark.__doc__.splitlines()[0]}\n{about}")
    rows = benchmark.run(config, rt)
    if config.json and rt.is_main:
        content = dict(benchmark=name, machine=about, config=asdict(config), rows=rows)
        replace_file(out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    script(main)
