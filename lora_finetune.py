"""Finetune GPT-2 on instructions: LoRA (Hu et al. 2021), or all weights. Constants, then functions, then `main`.

    python lora_finetune.py --base gpt2 --lora_dim 8            # adapters of rank 8, on Alpaca
    python lora_finetune.py --base out/tiny --data rows.json    # a checkpoint of ours, another file of rows
    python lora_finetune.py --base gpt2 --lora_dim 0            # all weights, for comparison
    python lora_finetune.py --base gpt2 --adapter out/lora/adapter --merge out/merged   # one plain model of both
    python lora_finetune.py sweep --base gpt2                   # ranks 1 to 32 and full: a table, curves, answers

Writes OUT_DIR (out/lora): config.json, log.jsonl, learning_curve.png, samples.txt, checkpoints step_NNNNNN/, and at the
end adapter/, which peft opens. The training loop is that of train_gpt2.py; tokens in the log are answer tokens.
The method is in lora.py, the form of a conversation in chat.py.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn as nn

import chat
import train_gpt2
from checkpoint import checkpoint_steps, find_model, load_model, load_tokenizer
from cli import Stopped, UserError, parse_args, script, write_atomically
from data import permutation
from lora import (
    TARGETS,
    AdapterFiles,
    LoRAConfig,
    add_lora,
    cast_frozen,
    fingerprint,
    load_adapter,
    lora_modules,
    merge,
    read_adapter,
    remove_lora,
    target_names,
    trainable_parameters,
)
from model import GPT, IGNORE_INDEX, GPTConfig
from runtime import RunLog, Runtime, choose_attention, read_log, smoothed

RANKS = (1, 2, 4, 8, 16, 32, 0)
# Padded tokens that cost as much as one more micro-batch: what reading the weights takes on a CPU, what launching the
# kernels takes on a GPU.
MICRO_BATCH_COST = {"cpu": 64, "cuda": 4096}


@dataclass
class Config:
    # where things are
    base: str = "gpt2"  # what to finetune: checkpoint directory, run directory or hub id
    data: str = "tatsu-lab/alpaca"  # a hub dataset, or .json or .jsonl: instruction, input, output, or messages
    out_dir: str = ""  # where the run is written; out/lora when empty, out/lora_sweep for the sweep
    resume: bool = False  # go on from the newest sound checkpoint of out_dir, or start when there is none
    overwrite: bool = False  # replace the run that out_dir holds
    adapter: str = ""  # adapter to start from, ours or peft's; its rank, alpha and targets count
    merge: str = ""  # write base and adapter as one plain model here: after training, or at once with --adapter
    # adapter
    lora_dim: int = 8  # rank r of the bypasses; 0 trains all weights instead
    lora_alpha: float = 0.0  # the bypass is scaled by alpha / r; 0 for 2 r
    lora_dropout: float = 0.0  # on the input of the bypass
    targets: tuple[str, ...] = TARGETS  # projections that get one
    rslora: bool = False  # scale by alpha / sqrt(r) (Kalajdzievski 2023)
    lora_plus: float = 1.0  # learning rate of B over that of A; LoRA+ (Hayou et al. 2024) takes 16
    ranks: tuple[int, ...] = RANKS  # of the sweep; 0 is full finetuning
    # data
    sequence_length: int = 0  # longest example in tokens; 0 for the base's context
    val_rows: int = 1000  # held out for validation, chosen by the seed; at most a tenth of all
    # batch and schedule
    batch_size: int = 32  # examples per optimizer step, over all ranks and micro-steps
    micro_batch_size: int = 0  # full-length examples that fit into a forward pass of a rank; 0 finds out
    epochs: float = 3.0  # passes over the training rows
    max_steps: int = 0  # optimizer steps; 0 for as many as the epochs need
    warmup_steps: int = 0  # linear warmup; 0 for 3% of the steps
    max_lr: float = 0.0  # peak learning rate; 0 for 1e-3 with LoRA, 1e-4 for all weights
    min_lr: float = 0.0  # where the schedule ends
    lr_schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, linear decay
    decay_fraction: float = 0.5  # share of the steps in which wsd decays
    # optimizer
    weight_decay: float = 0.01  # AdamW, on tensors of two dimensions
    beta1: float = 0.9  # AdamW
    beta2: float = 0.999  # AdamW
    eps: float = 1e-8  # AdamW
    grad_clip: float = 1.0  # largest gradient norm; 0 for no clipping
    max_bad_steps: int = 20  # stop after this many steps in a row without a finite gradient
    spike_threshold: float = 2.0  # a loss this far above its running median goes back to a checkpoint; 0 for never
    dropout: float = 0.0  # of the base, on embeddings, attention and residual branches
    seed: int = 1337  # of the adapter, the split, the data order and the samples
    # along the way, in steps; 0 is never
    eval_interval: int = -1  # validation loss; -1 for ten times in all
    sample_interval: int = 0  # an answer to sample_prompt
    sample_prompt: str = "BEGINNING OF CONVERSATION: USER: Give three tips for a good meal. ASSISTANT:"
    sample_tokens: int = 128  # the longest answer
    checkpoint_interval: int = 500  # a checkpoint; the last step always writes one
    keep_checkpoints: int = 2  # how many of the newest stay, besides the one of the lowest validation loss; 0 for all
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matrix products; trained weights stay fp32
    compile: Literal["auto", "on", "off"] = "off"  # torch.compile, with dynamic shapes: examples differ in length
    report_to: Literal["none", "tensorboard", "wandb"] = "none"  # besides log.jsonl


# --------------------------------------------------------------------------------------------------------------- rows


def load_rows(data: str, rt: Runtime) -> list[list[dict]]:
    """The conversations of --data: a file, or the split `train` of a dataset of the hub."""
    is_file = (
        Path(data).exists() or Path(data).suffix in (".json", ".jsonl") or not re.fullmatch(r"[\w.-]+/[\w.-]+", data)
    )
    if is_file:
        return read_rows(data)
    for first in (True, False):  # the others then find it in the cache
        if rt.is_main == first:
            rows = hub_rows(data, "train")
        rt.barrier()
    return [messages_of(row, f"row {number} of {data}") for number, row in enumerate(rows, start=1)]


def hub_rows(repo: str, split: str) -> list[dict]:
    """All rows of one split of a small dataset of the hub. Raises UserError."""
    import datasets

    try:
        return datasets.load_dataset(repo, split=split).to_list()
    except Exception as e:  # of datasets, of the hub's client, of the network below it
        reason = str(e).partition("\n")[0]
        raise UserError(
            f"cannot load the split {split} of {repo} from the hub: {reason}; check the network, set HF_ENDPOINT to a "
            "mirror, or give a local file with --data"
        ) from None


def read_rows(path: str) -> list[list[dict]]:
    """The conversations of a .json or .jsonl file, as messages. Raises UserError that names the row and the field."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no {path}; --data takes a .json or .jsonl file of rows") from None
    except (UnicodeDecodeError, OSError) as e:
        raise UserError(f"{path} is not a text file ({e}); --data takes a .json or .jsonl file of rows") from None
    rows, line = [], 0
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:  # a line of .jsonl ends at \n alone: JSON may hold the other line separators of Unicode
            for line, row in enumerate(text.split("\n"), start=1):  # noqa: B007 - the line of an error
                rows += [json.loads(row)] if row.strip() else []
    except (ValueError, RecursionError) as e:
        what = getattr(e, "msg", e)
        raise UserError(
            f"{path} is not JSON in line {line or getattr(e, 'lineno', 1)}: {what}; correct it there"
        ) from None
    return [messages_of(row, f"row {number} of {path}") for number, row in enumerate(rows, start=1)]


def messages_of(row, where: str) -> list[dict]:
    """One row as messages. Raises UserError for a field that is missing or is no text."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}; a row is an object with instruction, input and output")
    if "messages" in row:
        try:
            chat.check_messages(row["messages"])
        except ValueError as e:
            raise UserError(f"{where}: {e}; correct it there") from None
        return row["messages"]
    said = {"input": ""} | {field: text for field, text in row.items() if text is not None}
    for field in ("instruction", "input", "output"):
        if not isinstance(said.get(field), str):
            what = "is no text" if field in said else "is missing"
            raise UserError(f"{where}: {field} {what}; rows have instruction, input and output, or messages")
    user = " ".join(filter(None, (said["instruction"].strip(), said["input"].strip())))
    return [dict(role="user", content=user), dict(role="assistant", content=said["output"])]


class Example(NamedTuple):
    """Inputs and targets of one conversation, or of a window of a long one; -100 where no answer is predicted."""

    idx: np.ndarray  # (T,) int32
    targets: np.ndarray  # (T,) int32


def encode_rows(rows: list[list[dict]], tokenizer, sequence_length: int) -> tuple[list[Example], dict[str, int]]:
    """Examples of all rows with something asked and answered, and how many rows were empty or long.

    A row longer than `sequence_length` becomes windows that overlap by half; each of its answer tokens is a target in
    one of them.
    """
    full = [row for row in rows if row and all(chat.clean(m["content"], tokenizer) for m in row)]
    full = [row for row in full if any(m["role"] == "assistant" for m in row)]
    pieces = [chat.pieces(row, tokenizer) for row in full]
    ids = iter(tokenizer.encode_batch([text for row in pieces for text, _ in row], disallowed_special=()))
    examples, counts = [], dict(rows=len(rows), empty=len(rows) - len(full), long=0, longest=0)
    for row in pieces:
        tokens, scored = [], []
        for _, is_answer in row:
            part = next(ids) + [tokenizer.eot_token] * is_answer
            tokens += part
            scored += [is_answer] * len(part)
        tokens = np.array(tokens, dtype=np.int32)
        targets = np.where(scored, tokens, IGNORE_INDEX)[1:].astype(np.int32)  # shifted: the next token of each
        counts["longest"] = max(counts["longest"], len(targets))
        counts["long"] += len(targets) > sequence_length
        examples += windows(tokens[:-1], targets, sequence_length)
    return examples, counts


def windows(idx: np.ndarray, targets: np.ndarray, T: int) -> list[Example]:
    """Parts of at most T tokens, each half a window further, that score every target once."""
    parts = [Example(idx[:T], targets[:T])]
    for end in range(T + T // 2, len(idx) + T // 2, T // 2):
        part = targets[end - T : end].copy()
        part[: T - T // 2] = IGNORE_INDEX  # scored in the window before
        parts.append(Example(idx[end - T : end], part))
    return [part for part in parts if (part.targets >= 0).any()]


def split_rows(rows: list, val_rows: int, seed: int) -> tuple[list, list]:
    """(training rows, validation rows), chosen by the seed alone; at most a tenth is held out."""
    order = permutation(len(rows), seed, 2**31)  # an epoch that training never comes to
    n_val = min(val_rows, len(rows) // 10)
    return [rows[i] for i in order[n_val:]], [rows[i] for i in order[:n_val]]


def cut_by_length(lengths: list[int], limit: int, cost: int) -> list[range]:
    """Cut ascending lengths into micro-batches with the fewest padded tokens plus `cost` for each; optimal, by dynamic
    programming. None has more than `limit` tokens, unless it is a single example."""
    best, cuts = [0], [0]
    for end in range(1, len(lengths) + 1):
        best.append(math.inf)
        cuts.append(end - 1)
        for start in range(end - 1, -1, -1):
            size = (end - start) * lengths[end - 1]
            if size > limit and start < end - 1:
                break
            if best[start] + size + cost < best[end]:
                best[end], cuts[end] = best[start] + size + cost, start
    parts, end = [], len(lengths)
    while end:
        parts.append(range(cuts[end], end))
        end = cuts[end]
    return parts


def collate(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(idx (B, T), targets (1, M), places (1, M)), int64: padded inputs, and the targets with where they belong.

    Padding is on the right, where no real token sees it under the causal mask.
    """
    T = max(len(example.idx) for example in examples)
    idx, targets, places = torch.zeros(len(examples), T, dtype=torch.long), [], []
    for row, example in enumerate(examples):
        idx[row, : len(example.idx)] = torch.from_numpy(example.idx)
        (scored,) = np.nonzero(example.targets >= 0)
        targets.append(example.targets[scored])
        places.append(row * T + scored)
    return idx, *(torch.from_numpy(np.concatenate(part).astype(np.int64))[None] for part in (targets, places))


def micro_batches(examples: list[Example], limit: int, cost: int, rank: int = 0, world_size: int = 1) -> list[tuple]:
    """One rank's micro-batches of a global batch: examples in order of length are dealt out to the ranks, and then cut
    into micro-batches of about one length."""
    share = sorted(examples, key=lambda example: len(example.idx))[rank::world_size]
    parts = cut_by_length([len(example.idx) for example in share], limit, cost)
    return [collate([share[i] for i in part]) for part in parts]


def training_batches(examples: list[Example], step: int, batch_size: int, seed: int, cut: Callable) -> Iterator[list]:
    """The micro-batches of each step from `step` on. The global batch is a function of (seed, step) alone; every epoch
    is another permutation of all examples."""
    n, order = len(examples), lru_cache(maxsize=2)(permutation)
    while True:
        positions = range(step * batch_size, (step + 1) * batch_size)
        yield cut([examples[order(n, seed, p // n)[p % n]] for p in positions])
        step += 1


# ----------------------------------------------------------------------------------------------------------- training


class AnswerLoss(nn.Module):
    """What the training loop calls: the model and its loss on answers; the head computes no other position."""

    def __init__(self, gpt: GPT):
        super().__init__()
        self.gpt = gpt

    def forward(self, idx, targets, places=None, n_targets=1.0):
        """idx (B, T); targets (1, M) and places (1, M), theirs among the B * T positions. Returns (None, loss)."""
        x = self.gpt.hidden(idx).flatten(0, 1)  # (B * T, C)
        if places is not None:
            x = x.index_select(0, places[0])  # (M, C)
        return None, self.gpt.sum_loss(x, targets.flatten()) / n_targets


def main() -> None:
    words = sys.argv[1:]
    sweeping = words[:1] == ["sweep"]
    config = parse_args(Config, words[sweeping:], prog="lora_finetune.py" + " sweep" * sweeping, description=__doc__)
    config.out_dir = config.out_dir or ("out/lora_sweep" if sweeping else "out/lora")
    check(config)
    if sweeping and (config.merge or config.adapter):
        raise UserError("the sweep trains adapters of several ranks; --adapter and --merge are for a single one")
    if sweeping:
        sweep(config)
    elif config.merge and config.adapter:
        merge_to_directory(config, config.adapter, Path(config.merge))
    else:
        finetune(config)


def finetune(config: Config) -> None:
    rt = Runtime.setup(config.device, config.dtype, config.compile)
    if config.adapter:
        found = read_adapter(config.adapter).config
        config.lora_dim, config.lora_alpha, config.lora_dropout = found.r, found.alpha, found.dropout
        config.targets, config.rslora = found.targets, found.rslora
    model = load_model(config.base, config.dropout, choose_attention("auto", rt, config.sequence_length))
    tokenizer, base = load_tokenizer(config.base), find_model(config.base)
    train_set, val_set, about = open_data(config, tokenizer, model.config, rt)
    settle(config, len(train_set))
    target_names(model, config.targets)
    checkpoint = train_gpt2.open_run(config, rt)
    base_sha256, total = fingerprint(model) if config.lora_dim else "", model.num_params()
    table = parameter_table(model, config.targets, config.lora_dim)
    model = adapt(config, model, checkpoint, rt)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rt.print(f"{base}: {total:,} parameters, {trained:,} of them trained, on {rt.why}\n{about}")
    if config.lora_dim:
        rt.print(table)
    if config.lora_dim and rt.dtype != torch.float32:
        cast_frozen(model, rt.dtype)
    model.to(rt.device)

    forward = train_gpt2.wrap(AnswerLoss(model), rt, dynamic=True)
    optimizers = make_optimizers(model, config)
    limit = config.sequence_length * (config.micro_batch_size or find_micro_batch_size(forward, model, config, rt))
    cost = MICRO_BATCH_COST.get(rt.device.type, 1024)
    cut = lambda examples: micro_batches(examples, limit, cost, rt.rank, rt.world_size)  # noqa: E731
    val_batches = cut(val_set)
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(rt.device)

    def evaluations(step: int) -> Iterator[dict]:
        if val_set and train_gpt2.due(step, config.eval_interval, config.max_steps):
            yield dict(kind="val", **train_gpt2.validate(forward, val_batches, token_bytes, rt))
        if rt.is_main and train_gpt2.due(step, config.sample_interval, config.max_steps):
            yield dict(kind="sample", text=train_gpt2.sample(model, tokenizer, config, rt, step)[0])

    files = AdapterFiles(model, lora_config(config), base, base_sha256)

    def save() -> Callable[[Path], None]:
        if config.lora_dim:
            write = files.copy()
        else:
            copy = train_gpt2.model_copy(model)
            write = lambda path: train_gpt2.save_model(path, copy, tokenizer)  # noqa: E731

        def write_all(path: Path) -> None:
            write(path)
            chat.save_chat_files(path, tokenizer)

        return write_all

    log = RunLog(Path(config.out_dir), rt, config)
    rt.reset_peak_memory()
    if checkpoint is None:
        log.open(-1)
        for record in evaluations(0):  # where the base stands
            log.record(0, record)
    train_gpt2.train(
        config, rt, log, model, forward, optimizers,
        lambda step: training_batches(train_set, step, config.batch_size, config.seed, cut),
        evaluations, checkpoint, save, config.spike_threshold,
        flops_per_answer_token(model, train_set, config.lora_dim), files.load if config.lora_dim else None,
    )  # fmt: skip
    if rt.is_main:
        finish(config, log, save)


def check(config: Config) -> None:
    """Refuse what cannot work, before anything is loaded. Raises UserError."""
    for name in "lora_dim lora_alpha epochs max_steps warmup_steps max_lr sequence_length val_rows".split():
        if getattr(config, name) < 0:
            raise UserError(f"--{name} must not be negative, but it is {getattr(config, name)}")
    if config.sequence_length == 1:
        raise UserError("--sequence_length 1 has no room for a question and an answer; 0 takes the base's context")
    for name in ("batch_size", "lora_plus"):
        if getattr(config, name) <= 0:
            raise UserError(f"--{name} must be positive, not {getattr(config, name)}")
    for name in ("dropout", "lora_dropout"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"--{name} must be in [0, 1), not {getattr(config, name)}")
    if config.adapter and not config.lora_dim:
        raise UserError("--adapter continues an adapter, and --lora_dim 0 trains none; merge it first, with --merge")
    if config.merge and not config.lora_dim:
        raise UserError("--merge adds an adapter to its base, and --lora_dim 0 trains none; its checkpoints are plain")
    if not config.targets:
        raise UserError(f"--targets names no projection; choose from {', '.join(TARGETS)}")
    if not config.ranks or min(config.ranks) < 0:
        raise UserError("--ranks takes ranks from 1 on, and 0 for full finetuning, such as --ranks 1 8 0")
    if config.merge and Path(config.merge).exists() and not config.overwrite:
        raise UserError(f"--merge {config.merge} already exists; --overwrite replaces it, another name avoids it")


def open_data(config: Config, tokenizer, shape: GPTConfig, rt: Runtime) -> tuple[list[Example], list[Example], str]:
    """(training examples, validation examples, a line about them); `config` takes on the sequence length."""
    if config.sequence_length > shape.sequence_length:
        raise UserError(f"{config.base} was made for {shape.sequence_length} tokens; --sequence_length is more")
    if len(tokenizer) > shape.vocab_size or tokenizer.eot_token is None:
        raise UserError(f"the tokenizer of {config.base} needs <|endoftext|> and at most {shape.vocab_size} tokens")
    config.sequence_length = config.sequence_length or shape.sequence_length
    parts = split_rows(load_rows(config.data, rt), config.val_rows, config.seed)
    (train_set, counts), (val_set, more) = (encode_rows(rows, tokenizer, config.sequence_length) for rows in parts)
    n_rows, empty, long = (counts[key] + more[key] for key in ("rows", "empty", "long"))
    if not train_set:
        raise UserError(f"{config.data} has {n_rows} rows, none of them with an instruction and an answer to train on")
    about = f"data: {n_rows:,} rows: {len(train_set):,} examples to train on, {len(val_set):,} to validate"
    if empty:
        about += f"; empty and left out: {empty:,} rows"
    if long:
        longest = max(counts["longest"], more["longest"])
        about += (
            f"; longer than {config.sequence_length} tokens (up to {longest:,}), and so read in overlapping windows: "
            f"{long:,} rows"
        )
    return train_set, val_set, about


def settle(config: Config, n_examples: int) -> None:
    """Fill in the constants that follow from the number of examples, or from LoRA or not."""
    config.max_steps = config.max_steps or max(round(config.epochs * n_examples / config.batch_size), 1)
    config.warmup_steps = config.warmup_steps or math.ceil(0.03 * config.max_steps)
    config.eval_interval = max(config.max_steps // 10, 1) if config.eval_interval < 0 else config.eval_interval
    config.lora_alpha = config.lora_alpha or 2 * config.lora_dim
    config.max_lr = config.max_lr or (1e-3 if config.lora_dim else 1e-4)


def lora_config(config: Config) -> LoRAConfig:
    return LoRAConfig(config.lora_dim, config.lora_alpha, config.lora_dropout, config.targets, config.rslora)


def parameter_table(model: GPT, targets: tuple[str, ...], r: int) -> str:
    """Trainable parameters by rank, for `model` without an adapter."""
    counts = {rank: trainable_parameters(model, targets, rank) for rank in [*sorted({*RANKS[:-1], r}), 0]}
    lines = [f"{rank or 'full':>4} {n:>13,} {fraction:>8.3%}" for rank, (n, fraction) in counts.items()]
    return "\n".join([f"{'rank':>4} {'trainable':>13} {'of all':>8}", *lines])


def adapt(config: Config, model: GPT, checkpoint: Path | None, rt: Runtime) -> GPT:
    """The model to train: the base with a new adapter, with that of a checkpoint or of --adapter, or as it is."""
    if config.batch_size < rt.world_size:
        raise UserError(f"--batch_size {config.batch_size} is less than one example for each of {rt.world_size} ranks")
    if checkpoint:
        adapted = (checkpoint / "adapter_config.json").exists()
        r = read_adapter(checkpoint).config.r if adapted else 0
        if r != config.lora_dim:
            raise UserError(f"{checkpoint} has --lora_dim {r}, not {config.lora_dim}; --resume keeps it")
    if not config.lora_dim:
        return load_model(str(checkpoint), config.dropout, model.config.attention) if checkpoint else model
    if checkpoint or config.adapter:
        return load_adapter(model, checkpoint or config.adapter)
    torch.manual_seed(config.seed)
    return add_lora(model, lora_config(config))


def make_optimizers(model: GPT, config: Config) -> list:
    """[AdamW]. LoRA+ gives B a learning rate of its own."""
    betas = (config.beta1, config.beta2)
    optimizers = model.configure_optimizers(config.weight_decay, config.max_lr, betas, config.eps)
    group = optimizers[0].param_groups[0]
    if config.lora_dim and config.lora_plus != 1:
        B = {id(module.lora_B) for module in lora_modules(model).values()}
        faster = group | dict(params=[p for p in group["params"] if id(p) in B])
        faster["initial_lr"] *= config.lora_plus
        group["params"] = [p for p in group["params"] if id(p) not in B]
        optimizers[0].add_param_group(faster)
    return optimizers


def find_micro_batch_size(forward, model: GPT, config: Config, rt: Runtime) -> int:
    """Full-length examples that fit into one forward pass, found as in pretraining."""
    T = config.sequence_length
    size = config.batch_size - config.batch_size % rt.world_size
    like = train_gpt2.Config(sequence_length=T, total_batch_size=size * T, vocab_size=model.config.vocab_size)
    return train_gpt2.find_micro_batch_size(forward, like, rt)


def flops_per_answer_token(model: GPT, examples: list[Example], lora_dim: int) -> float:
    """Floating-point operations per answer token, forward and backward, for MFU: as in `GPT.estimate_flops`, but blocks
    run on prompts too, the head on answers only, and a frozen weight has no gradient (4 instead of 6 each)."""
    c, per_weight = model.config, 4 if lora_dim else 6
    tokens, squares = (sum(len(example.idx) ** power for example in examples) for power in (1, 2))
    answers = sum(int((example.targets >= 0).sum()) for example in examples)
    blocks = per_weight * sum(p.numel() for p in model.transformer.h.parameters())
    head = per_weight * c.vocab_size * c.n_embd
    return (blocks * tokens + 12 * c.n_layer * c.n_embd * squares) / answers + head


def finish(config: Config, log: RunLog, save: Callable) -> None:
    """Write the adapter, say what was reached and where to go from here."""
    out_dir = Path(config.out_dir)
    result = str(checkpoint_steps(out_dir)[-1][1])
    if config.lora_dim:
        write_atomically(out_dir / "adapter", save())
        result = f"{config.base} --adapter {out_dir / 'adapter'}"
    val = [r["loss"] for r in log.records if r["kind"] == "val"]
    if val:
        print(f"\nvalidation loss {val[0]:.4f} before, {val[-1]:.4f} after, {min(val):.4f} at best (nats a token)")
    print(f"{log.median_tokens_per_sec():,.0f} answer tokens/s")
    if config.merge:
        merge_to_directory(config, config.out_dir, Path(config.merge))
    print(f"\nNow try:\n  python sample.py {result} --chat\n  {out_dir / 'learning_curve.png'}    # how it went")


def merge_to_directory(config: Config, adapter: str, out: Path) -> None:
    """Write base and adapter as one plain model, merged in fp32, and say how far its logits are from the unmerged."""
    tokenizer = load_tokenizer(config.base)
    model = load_adapter(load_model(config.base), adapter).eval()
    idx = torch.randint(len(tokenizer), (4, min(64, model.config.sequence_length)))
    with torch.no_grad():
        before = model(idx)[0]
        model = remove_lora(merge(model))
        difference = (model(idx)[0] - before).abs().max()

    def fill(path: Path) -> None:
        train_gpt2.save_model(path, model, tokenizer)
        chat.save_chat_files(path, tokenizer)

    write_atomically(out, fill)
    print(f"wrote {out}: {config.base} with {adapter} merged in; logits differ by at most {difference:.1e}")


# -------------------------------------------------------------------------------------------------------------- sweep

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


def sweep(config: Config) -> None:
    """Finetune with every rank from the same seed, each in a process of its own, so that their memory can be compared;
    then write sweep.md (the table), sweep.png (the curves) and samples.md (the answers)."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("the sweep starts its runs itself; start it without torchrun")
    out_dir = Path(config.out_dir)
    model = load_model(config.base)
    counts = {r: trainable_parameters(model, config.targets, r) for r in config.ranks}
    del model
    runs = {(f"r = {r}" if r else "full"): (r, out_dir / (f"r{r}" if r else "full")) for r in config.ranks}
    rows, logs = [], {}
    for label, (r, run_dir) in runs.items():
        run_in_process(command_line(config, lora_dim=r, out_dir=str(run_dir)))
        logs[label] = list(read_log(run_dir / "log.jsonl"))
        rows.append(summary_row(label, *counts[r], logs[label], run_dir))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    table = markdown_table(rows)
    (out_dir / "sweep.md").write_text(table)
    draw_sweep(logs, out_dir / "sweep.png")
    write_samples(config, runs, out_dir / "samples.md")
    print(f"\n{table}\n{out_dir}/sweep.md, {out_dir}/sweep.png and {out_dir}/samples.md hold table, curves and answers")


def command_line(config: Config, **changes) -> list[str]:
    """The words of a command that runs this script with `config`, but for `changes`."""
    words = [sys.executable, __file__]
    for field in fields(Config):
        value = changes.get(field.name, getattr(config, field.name))
        if field.name == "ranks" or value == field.default:
            continue
        values = [] if value is True else value if isinstance(value, tuple) else [value]
        words += [f"--{field.name}", *map(str, values)]
    return words


def run_in_process(words: list[str]) -> None:
    """Run a command to its end and pass SIGINT and SIGTERM on to it, so that it can write its checkpoint first."""
    # in a session of its own, or Ctrl-C would reach it twice; its progress and its errors are on stderr
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
    before = {s: signal.signal(s, lambda s, _: process.send_signal(s)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if code > 128:
        print("stopped; the same command with --resume goes on", file=sys.stderr)
        raise Stopped(code - 128)
    if code:
        sys.exit(code)  # its own message is on the terminal


def markdown_table(rows: list[dict]) -> str:
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
    return "\n".join(lines) + "\n"


def summary_row(label: str, trainable: int, share: float, log: list[dict], run_dir: Path) -> dict:
    train = [r for r in log if r["kind"] == "train"]
    val = [r["loss"] for r in log if r["kind"] == "val"]
    adapter = run_dir / "adapter" / "adapter_model.safetensors"
    file = adapter if adapter.exists() else checkpoint_steps(run_dir)[-1][1] / "model.safetensors"
    return {
        "variant": label,
        "trainable": f"{trainable:,}",
        "share": f"{share:.3%}",
        "peak memory (GiB)": f"{max(r['memory_gib'] for r in train):.2f}",
        "answer tokens/s": f"{np.median([r['tokens_per_sec'] for r in train]):,.0f}",
        "loss before": f"{val[0]:.4f}" if val else "",
        "best loss": f"{min(val):.4f}" if val else "",
        "final loss": f"{val[-1]:.4f}" if val else "",
        "file (bytes)": f"{file.stat().st_size:,}",
    }


def draw_sweep(logs: dict[str, list[dict]], path: Path) -> None:
    """Validation and smoothed training loss of every variant over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True)
    colors = plt.get_cmap("turbo")(np.linspace(0.1, 0.9, len(logs)))
    for color, (label, log) in zip(colors, logs.items(), strict=True):
        style = dict(color="black", linestyle="--") if label == "full" else dict(color=color)
        val = [(r["step"], r["loss"]) for r in log if r["kind"] == "val"]
        train = [(r["step"], r["loss"]) for r in log if r["kind"] == "train" and r["loss"] is not None]
        if val:
            left.plot(*zip(*val, strict=True), marker="o", markersize=3, label=f"{label}: {val[-1][1]:.3f}", **style)
        steps, losses = zip(*train, strict=True)
        right.plot(steps, smoothed(losses, 1 + len(losses) // 20), linewidth=1.2, label=label, **style)
    left.set(xlabel="step", ylabel="loss (nats per answer token)", title="validation, and where it ended")
    right.set(xlabel="step", title="training, smoothed")
    later = [r["loss"] for log in logs.values() for r in log if r["kind"] == "val" and r["step"]]
    if later:  # variants differ in what comes after the first drop, which all have
        margin = 0.1 * (max(later) - min(later)) or 0.1
        left.set_ylim(min(later) - margin, max(later) + margin)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_samples(config: Config, runs: dict[str, tuple[int, Path]], path: Path) -> None:
    """The answers of the base and of every variant, as it was saved, to PROMPTS."""
    rt = Runtime.setup(config.device, config.dtype)
    tokenizer = load_tokenizer(config.base)
    found = {"base": answers(load_model(config.base).to(rt.device), tokenizer, config, rt)}
    for label, (r, run_dir) in runs.items():
        model = load_adapter(load_model(config.base), run_dir / "adapter") if r else load_model(str(run_dir))
        found[label] = answers(model.to(rt.device), tokenizer, config, rt)
    sections = [f"# What {config.base} and its finetuned variants answer\n"]
    for i, prompt in enumerate(PROMPTS):
        cells = {label: texts[i].replace("|", "\\|").replace("\n", "<br>") for label, texts in found.items()}
        lines = [f"| {label} | {text} |" for label, text in cells.items()]
        sections.append("\n".join([f"## {prompt}\n", "| variant | answer |", "|---|---|", *lines]) + "\n")
    path.write_text("\n".join(sections), encoding="utf-8")


def answers(model: GPT, tokenizer, config: Config, rt: Runtime) -> list[str]:
    """An answer to each of PROMPTS, drawn with the run's seed."""
    options = dict(temperature=0.7, top_k=40)
    prompts = [chat.prompt_of(text, tokenizer) for text in PROMPTS]
    texts = train_gpt2.complete(model, tokenizer, prompts, config.sample_tokens, rt, config.seed, **options)
    return [text.strip() for text in texts]


if __name__ == "__main__":
    script(main)
