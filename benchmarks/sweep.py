"""Finetune one base with several ranks of LoRA, and with all weights, and compare the results.

    python bench.py sweep --base gpt2 --ranks 1 8 32 0      # 0 is full finetuning

Every run has the same seed and its own process, so that their memory can be compared. Writes to OUT_DIR a run directory
each, sweep.md (the table), sweep.png (the curves) and samples.md (the answers of the base and every variant to PROMPTS,
and how repetitive they are). It takes the constants of lora_finetune.py. This file knows nothing of the training loop:
it starts runs, and reads what they write.
"""

import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from benchmarks.measure import ROOT, markdown_table
from cli import Range, Stopped, UserError
from files import replace_file
from finetuning.chat import prompt_of
from finetuning.lora import load_adapter, trainable_parameters
from learning.evaluation import complete
from lora_finetune import Config as Finetuning
from lora_finetune import validate_config
from machine.runtime import Runtime
from model import GPT
from run.checkpoint import checkpoint_steps, load_model, model_tokenizer
from run.curves import draw
from run.records import read_log

PROMPTS = (
    "Give three tips for a good meal.",
    "Write a poem about a delicious night.",
    "Write a tweet describing your capabilities.",
    "Write three opinions of an alien visiting Earth.",
    "Explain what a computer is to a child.",
    "Name five animals that can swim.",
    "Rewrite the sentence in the past tense. I go to the market and buy bread.",
    "What is the capital of France?",
    "Write a short letter to a friend who is ill.",
    "List the steps of making tea.",
    "Which of these is a fruit: carrot, apple, onion?",
    "Describe the sea in one sentence.",
    "Suggest a name for a bakery and say why.",
    "Why do people sleep?",
)


@dataclass(frozen=True)
class Config(Finetuning):
    ranks: Annotated[tuple[int, ...], Range(0, 1e6)] = (1, 2, 4, 8, 16, 32, 0)  # ranks to train; 0 is full finetuning
    json: str = ""  # write the figures to this file


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    config = replace(config, out_dir=config.out_dir or "out/lora_sweep")
    validate_config(config)
    if config.merge or config.adapter:
        raise UserError("the sweep trains adapters of several ranks; --adapter and --merge are for a single one")
    if not config.ranks:
        raise UserError("--ranks takes ranks from 1 on, and 0 for full finetuning, such as --ranks 1 8 0")
    out_dir = Path(config.out_dir)
    model = load_model(config.base)
    counts = {rank: trainable_parameters(model, config.targets, rank) for rank in config.ranks}
    del model  # the first run is about to need its memory
    runs = {(f"r = {r}" if r else "full"): (r, out_dir / (f"r{r}" if r else "full")) for r in config.ranks}
    rows, logs = {}, {}
    for label, (r, run_dir) in runs.items():
        run_in_process(command_line(config, lora_dim=r, out_dir=str(run_dir)))
        logs[label] = read_log(run_dir / "log.jsonl")
        rows[label] = summary_row(label, *counts[r], logs[label], run_dir)
        yield dict(name=label) | rows[label]
    found = all_answers(config, runs)
    for label, row in rows.items():
        row["repeated"] = f"{statistics.mean(map(repeated, found[label])):.0%}"
        yield dict(name=label) | row
    replace_file(out_dir / "sweep.md", markdown_table(list(rows.values())))
    draw(logs, out_dir / "sweep.png")
    replace_file(out_dir / "samples.md", side_by_side(config.base, found))
    print(f"{out_dir}/sweep.md, {out_dir}/sweep.png and {out_dir}/samples.md hold table, curves and answers")


def command_line(config, **changes) -> list[str]:
    """The words of a command that runs lora_finetune.py with `config`, but for `changes`."""
    words = [sys.executable, str(ROOT / "lora_finetune.py")]
    for field in fields(Finetuning):
        value = changes.get(field.name, getattr(config, field.name))
        if value == field.default:
            continue
        values = [] if value is True else value if isinstance(value, tuple) else [value]
        words += [f"--{field.name}", *map(str, values)]
    return words


def run_in_process(words: list[str]) -> None:
    """Run a command to its end and pass SIGINT and SIGTERM on to it, so that it can write its checkpoint first."""
    # in another session, or Ctrl-C would reach it twice; its progress and its errors are on stderr
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
    before = {s: signal.signal(s, lambda s, _: process.send_signal(s)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if code > 128:
        print("stopped; give the same command again with --resume to continue", file=sys.stderr)
        raise Stopped(code - 128)
    if code:
        sys.exit(code)  # its own message is on the terminal


def summary_row(label: str, trainable: int, fraction: float, log: list[dict], run_dir: Path) -> dict:
    """A row of the table: what was trained, what it took and what it reached."""
    train = [record for record in log if record["kind"] == "train"]
    val = [record["loss"] for record in log if record["kind"] == "val"]
    adapter = run_dir / "adapter" / "adapter_model.safetensors"
    file = adapter if adapter.exists() else checkpoint_steps(run_dir)[-1][1] / "model.safetensors"
    return {
        "variant": label,
        "trainable": f"{trainable:,}",
        "of all": f"{fraction:.3%}",
        "peak memory (GiB)": f"{max(record['memory_gib'] for record in train):.2f}",
        "answer tokens/s": f"{statistics.median(record['tokens_per_sec'] for record in train):,.0f}",
        "loss before": f"{val[0]:.4f}" if val else "",
        "best loss": f"{min(val):.4f}" if val else "",
        "final loss": f"{val[-1]:.4f}" if val else "",
        "file (bytes)": f"{file.stat().st_size:,}",
    }


def all_answers(config, runs: dict[str, tuple[int, Path]]) -> dict[str, list[str]]:
    """The answers of the base and of every saved variant to each of PROMPTS."""
    rt = Runtime.setup(config.device, config.dtype)
    tokenizer = model_tokenizer(config.base)
    found = {"base": answers(load_model(config.base), tokenizer, config, rt)}
    for label, (r, run_dir) in runs.items():
        model = load_adapter(load_model(config.base), run_dir / "adapter") if r else load_model(str(run_dir))
        found[label] = answers(model, tokenizer, config, rt)
    return found


def side_by_side(base: str, found: dict[str, list[str]]) -> str:
    """In Markdown, a table for each prompt. `repeated` is the fraction of an answer that repeats earlier text."""
    sections = [f"# What {base} and its finetuned variants answer\n"]
    for i, prompt in enumerate(PROMPTS):
        lines = ["| variant | repeated | answer |", "|---|---|---|"]
        for label, texts in found.items():
            text = texts[i].replace("|", "\\|").replace("\n", "<br>")
            lines.append(f"| {label} | {repeated(texts[i]):.0%} | {text} |")
        sections.append("\n".join([f"## {prompt}\n", *lines]) + "\n")
    return "\n".join(sections)


def repeated(text: str, n: int = 3) -> float:
    """The fraction of a text's n-grams of words that occur earlier in it. Small models repeat themselves, which the
    loss does not show, as it is computed on answers that people wrote (Holtzman et al. 2020)."""
    words = text.lower().split()
    sequences = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(sequences)) / len(sequences) if sequences else 0.0


def answers(model: GPT, tokenizer, config, rt: Runtime) -> list[str]:
    """An answer to each of PROMPTS, drawn with the run's seed."""
    prompts = [prompt_of(text, tokenizer) for text in PROMPTS]
    options = dict(temperature=0.7, top_k=40)
    texts = complete(model.to(rt.device), tokenizer, prompts, config.sample_tokens, rt, config.seed, **options)
    return [text.strip() for text in texts]
