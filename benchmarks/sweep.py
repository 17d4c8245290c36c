"""Finetune one base with several ranks of LoRA, and with all weights, and compare the results.

    python bench.py sweep --base gpt2 --lora_dims 1 8 32 0      # 0 is full finetuning

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
from typing import Annotated, NamedTuple

from benchmarks.measure import ROOT, markdown_table
from cli import Range, Stopped, UserError
from files import replace_file
from finetuning.chat import prompt_of
from finetuning.lora import load_adapter, trainable_parameters
from learning.evaluation import complete
from lora_finetune import Config as Finetuning
from machine.runtime import Runtime
from model import GPT
from run.checkpoint import checkpoint_steps, load_model, model_tokenizer
from run.curves import draw
from run.records import Records, of_kind, read_log

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


class Variant(NamedTuple):
    rank: int  # of LoRA; 0 for full finetuning
    run_dir: Path


@dataclass(frozen=True)
class Config(Finetuning):
    lora_dims: Annotated[tuple[int, ...], Range(0, 1e6)] = (1, 2, 4, 8, 16, 32, 0)  # ranks; 0 is full finetuning
    json: str = ""  # write the figures to this file


def run(config: Config, rt: Runtime) -> Iterator[dict]:
    config = replace(config, out_dir=config.out_dir or "out/lora_sweep")
    if config.merge or config.adapter:
        raise UserError("the sweep trains adapters of several ranks; --adapter and --merge are for a single one")
    if not config.lora_dims:
        raise UserError("--lora_dims takes ranks from 1 on, and 0 for full finetuning, such as --lora_dims 1 8 0")
    out_dir = Path(config.out_dir)
    model = load_model(config.base)
    trainable = {rank: trainable_parameters(model, config.targets, rank) for rank in config.lora_dims}
    del model  # the first run is about to need its memory
    variants = {}
    for rank in config.lora_dims:
        label, folder = (f"r = {rank}", f"r{rank}") if rank else ("full", "full")
        variants[label] = Variant(rank, out_dir / folder)
    rows = {}
    logs = {}
    for label, (rank, run_dir) in variants.items():
        run_in_process(command_line(config, lora_dim=rank, out_dir=str(run_dir)))
        logs[label] = read_log(run_dir / "log.jsonl")
        rows[label] = summary_row(label, *trainable[rank], logs[label], run_dir)
        yield dict(name=label) | rows[label]
    found = all_answers(config, variants)
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
        words.append(f"--{field.name}")
        if isinstance(value, tuple):
            words += map(str, value)
        elif value is not True:
            words.append(str(value))
    return words


def run_in_process(words: list[str]) -> None:
    """Run a command to its end and pass SIGINT and SIGTERM on to it, so that it can write its checkpoint first."""
    # in another session, or Ctrl-C would reach it twice; its progress and its errors are on stderr
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)

    def pass_on(signum: int, frame) -> None:
        process.send_signal(signum)

    on_interrupt = signal.signal(signal.SIGINT, pass_on)
    on_termination = signal.signal(signal.SIGTERM, pass_on)
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_termination)
    if code > 128:
        print("stopped; give the same command again with --resume to continue", file=sys.stderr)
        raise Stopped(code - 128)
    if code:
        sys.exit(code)  # its own message is on the terminal


def summary_row(label: str, trainable: int, fraction: float, log: Records, run_dir: Path) -> dict:
    """A row of the table: what was trained, what it took and what it reached."""
    memory = max(step["memory_gib"] for step in of_kind(log, "train"))
    rate = statistics.median(step["tokens_per_sec"] for step in of_kind(log, "train"))
    losses = [val["loss"] for val in of_kind(log, "val")]
    file = run_dir / "adapter" / "adapter_model.safetensors"
    if not file.exists():
        _, newest = checkpoint_steps(run_dir)[-1]
        file = newest / "model.safetensors"
    return {
        "variant": label,
        "trainable": f"{trainable:,}",
        "of all": f"{fraction:.3%}",
        "peak memory (GiB)": f"{memory:.2f}",
        "answer tokens/s": f"{rate:,.0f}",
        "loss before": f"{losses[0]:.4f}" if losses else "",
        "best loss": f"{min(losses):.4f}" if losses else "",
        "final loss": f"{losses[-1]:.4f}" if losses else "",
        "file (bytes)": f"{file.stat().st_size:,}",
    }


def all_answers(config, variants: dict[str, Variant]) -> dict[str, list[str]]:
    """The answers of the base and of every saved variant to each of PROMPTS."""
    rt = Runtime.setup(config.device, config.dtype)
    tokenizer = model_tokenizer(config.base)
    found = {"base": answers(load_model(config.base), tokenizer, config, rt)}
    for label, (rank, run_dir) in variants.items():
        if rank:
            model = load_adapter(load_model(config.base), run_dir / "adapter")
        else:
            model = load_model(str(run_dir))
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
    ngrams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def answers(model: GPT, tokenizer, config, rt: Runtime) -> list[str]:
    """An answer to each of PROMPTS, drawn with the run's seed."""
    prompts = [prompt_of(text, tokenizer) for text in PROMPTS]
    model.to(rt.device)
    texts = complete(model, tokenizer, prompts, config.sample_tokens, rt, config.seed, temperature=0.7, top_k=40)
    return [text.strip() for text in texts]
