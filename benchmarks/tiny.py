"""Seeds of the recipe `tiny`, or `cores`, on a text: the spread of its curve, and its loss in windows of characters.

Trains one seed after another in --out, and skips those that are finished. A row has the validation losses, every 100
steps, and two final losses in nats per character, for a text whose characters are bytes. Both score every character of
the validation text once: in the recipe's windows of tokens, and in windows of --window characters from a cold
start, with one character of context, to compare with models of characters.
--write stores the losses in docs/reference.json, which `plot.py --reference` draws behind a run.
"""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch

import hellaswag
from benchmarks.measure import ROOT, Common, machine
from cli import Positive, Range
from corpus.shards import TRAIN_FRACTION, read_text
from files import replace_file
from machine.runtime import Runtime
from plot import REFERENCES
from run.checkpoint import find_model, load_model, model_tokenizer
from run.records import of_kind, read_log
from train_gpt2 import RECIPES

# Runs that agree in these constants, and in their data, are seeds of one recipe: the others (seed, machine, reports) do
# not change what a run reaches.
DECISIVE = (
    "bpe_dropout", "n_layer", "n_head", "n_embd", "sequence_length", "vocab_size", "dropout",
    "total_batch_size", "max_steps", "warmup_steps", "max_lr", "min_lr", "lr_schedule", "decay_fraction",
    "optimizer", "muon_lr", "weight_decay", "beta1", "beta2", "eps", "grad_clip", "shuffle",
)  # fmt: skip


@dataclass(frozen=True)
class Config(Common):
    repeats: Annotated[int, Range(1, 1000)] = 10  # seeds to train
    recipe: Literal["tiny", "cores"] = "tiny"  # what to train
    data: str = str(ROOT / "input.txt")  # a .txt file
    window: Positive = 256  # characters of a window
    out: str = "out/seeds"  # directory of the runs, OUT/TEXT_SEED
    write: bool = False  # replace the entry of tiny in docs/reference.json; leave --recipe as it is


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    text = read_text(config.data)
    rows = []
    for seed in range(config.repeats):
        out = Path(config.out) / f"{Path(config.data).stem}_{seed}"
        if not (out / f"step_{RECIPES[config.recipe].max_steps:06d}").is_dir():
            words = ["--data", config.data, "--seed", str(seed), "--eval_interval", "100", "--out_dir", str(out)]
            subprocess.run([sys.executable, str(ROOT / "train_gpt2.py"), config.recipe, *words, "--resume"], check=True)
        records = read_log(out / "log.jsonl")
        vals = of_kind(records, "val")
        row = dict(
            name=f"seed {seed}",
            loss=[r["loss"] for r in vals],
            bpb=[r["bpb"] for r in vals],
            windows_of_tokens=vals[-1]["bpb"] * math.log(2),
            windows_of_characters=cold_start(str(out), text[int(len(text) * TRAIN_FRACTION) :], config.window),
        )
        rows.append(row)
        yield row
    if config.write:
        write_entry(records, rows, machine(rt)["device"])


@torch.no_grad()
def cold_start(model_path: str, text: str, window: int) -> float:
    """Nats per character of a text, cut into windows that see only the character before them."""
    model = load_model(find_model(model_path)).eval()
    tokenizer = model_tokenizer(model_path)
    packed = []
    for start in range(0, len(text) - 1, window):
        context = tokenizer.encode_ordinary(text[start])
        rest = tokenizer.encode_ordinary(text[start + 1 : start + 1 + window])
        packed += hellaswag.fit(context, [rest], 0, model.config.n_positions)
    nats = 0.0
    for batch in hellaswag.batches(sorted(packed, key=len, reverse=True), 512):
        inputs, (logit_positions, targets, _) = hellaswag.collate(batch)
        nats -= hellaswag.log_likelihoods(model, inputs, logit_positions, targets).sum().item()
    return nats / (len(text) - 1)


def write_entry(records: list[dict], rows: list[dict], device: str) -> None:
    """`records` are those of one of the runs."""
    first = records[0]
    config = first["config"]
    of = {key: config[key] for key in DECISIVE}
    for key in ("source", "tokenizer"):
        of[key] = first["data"][key]
    about = f"bench.py tiny, commit {first['commit']}, {device}, {first['machine']}, PyTorch {torch.__version__}"
    entry = dict(name=f"{len(rows)} seeds of tiny", source=about, of=dict(sorted(of.items())))
    entry["tokens"] = [record["step"] * config["total_batch_size"] for record in of_kind(records, "val")]
    for key in ("loss", "bpb"):
        entry[key] = [[round(value, 5) for value in row[key]] for row in rows]
    others = [known for known in json.loads(REFERENCES.read_text()) if "seeds of tiny" not in known["name"]]
    replace_file(REFERENCES, "[\n" + ",\n".join(json.dumps(known) for known in [entry, *others]) + "\n]\n")
