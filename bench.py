"""How fast it is: every figure of the README comes from a command here.

    python bench.py ladder      # fp32 -> TF32 -> bf16 -> compile -> flash attention -> padded vocabulary -> ...
    python bench.py train       # this project's training step against the plain recipe
    python bench.py bpe         # tokenizer training and encoding against tokenizers and tiktoken
    python bench.py data        # sharding and the loader
    python bench.py hellaswag   # batched scoring against one example at a time
    python bench.py lora        # finetuning against peft
    python bench.py sample      # generation with and without the cache, and transformers' generate

Everything that is compared runs in one process tree, in turn, several times; a table shows medians and their ratios.
`--json FILE` keeps all figures together with the machine's description.
"""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from runtime import Runtime, UserError, parse_args, script


@dataclass
class Config:
    repeats: int = 5  # timed runs of everything that is compared; medians count
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    data: str = ""  # files to measure on, where a command needs some; each command says which
    json: str = ""  # write the figures to this file


def interleave(contestants: dict[str, Callable[[], None]], repeats: int, rt: Runtime) -> dict[str, list[float]]:
    """Seconds of each contestant, measured in turn so that a drifting machine hits all alike; one warm-up round."""
    seconds = {name: [] for name in contestants}
    for round_ in range(repeats + 1):
        for name, run in contestants.items():
            rt.synchronize()
            began = time.perf_counter()
            run()
            rt.synchronize()
            if round_:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def table(seconds: dict[str, list[float]], work: float, unit: str) -> list[dict]:
    """Print median rate (work / seconds), spread, and the ratio to the first contestant; returns the rows."""
    rows = []
    base = statistics.median(next(iter(seconds.values())))
    for name, values in seconds.items():
        median = statistics.median(values)
        rows.append(
            dict(
                name=name,
                rate=work / median,
                unit=unit,
                low=work / max(values),
                high=work / min(values),
                ratio=base / median,
            )
        )
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        spread = f"({row['low']:,.1f} to {row['high']:,.1f})"
        print(f"{row['name']:<{width}}  {row['rate']:>12,.1f} {unit}  {spread}  x {row['ratio']:.2f}")
    return rows


def machine(rt: Runtime) -> dict:
    name = torch.cuda.get_device_name() if rt.device.type == "cuda" else platform.processor() or platform.machine()
    return dict(device=name, threads=torch.get_num_threads(), torch=torch.__version__, python=platform.python_version())


def sample(config: Config, rt: Runtime) -> list[dict]:
    """Generation from a 124M model in fp32: 4 sequences, 128 new tokens."""
    import warnings

    from transformers import GPT2Config, GPT2LMHeadModel

    from model import GPT, GPTConfig

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(rt.device).eval()
    reference = GPT2LMHeadModel(GPT2Config()).to(rt.device).eval()
    prompts = torch.randint(50257, (4, 16)).tolist()
    idx = torch.tensor(prompts, device=rt.device)
    n = 128

    def recompute() -> None:
        x = idx
        with torch.no_grad():
            for _ in range(n):
                x = torch.cat([x, model(x)[0][:, -1].argmax(-1, keepdim=True)], dim=1)

    contestants = {
        "recomputing the context": recompute,
        "transformers generate": lambda: reference.generate(
            idx,
            attention_mask=torch.ones_like(idx),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
        ),
        "this project": lambda: list(model.generate(prompts, n, temperature=0)),
    }
    return table(interleave(contestants, config.repeats, rt), 4 * n, "tokens/s")


COMMANDS = {"sample": sample}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") and sys.argv[1] not in ("-h", "--help"):
        raise UserError(f"say what to measure: python bench.py {' | '.join(COMMANDS)}")
    if sys.argv[1] in ("-h", "--help"):
        parse_args(Config, ["--help"], description=__doc__)
    if sys.argv[1] not in COMMANDS:
        raise UserError(f"there is no benchmark {sys.argv[1]}; there are {', '.join(COMMANDS)}")
    command = COMMANDS[sys.argv[1]]
    config = parse_args(Config, sys.argv[2:], prog=f"bench.py {sys.argv[1]}", description=command.__doc__)
    rt = Runtime.setup(config.device, "float32")
    print(f"{sys.argv[1]}: {command.__doc__}\n{machine(rt)}")
    rows = command(config, rt)
    if config.json:
        with open(config.json, "w") as f:
            json.dump(dict(benchmark=sys.argv[1], machine=machine(rt), config=asdict(config), rows=rows), f, indent=2)


if __name__ == "__main__":
    script(main)
