"""Finetune GPT-2 on instructions: LoRA (Hu et al. 2021), or all weights. Constants, then the loop, then the rows.

    python lora_finetune.py --base gpt2 --lora_dim 8            # adapters of rank 8, on Alpaca
    python lora_finetune.py --base out/tiny --data rows.json    # a checkpoint of ours, another file of rows
    python lora_finetune.py --base gpt2 --lora_dim 0            # all weights, for comparison
    python lora_finetune.py --base gpt2 --adapter out/lora/adapter --merge out/merged   # both merged into one model

A row is a conversation, and the loss counts its answers:

    BEGINNING OF CONVERSATION: USER: Add 1 and 2. ASSISTANT:3<|endoftext|>
    ─────────────────── read ──────────────────────────────┘└── learned ──┘

Writes OUT_DIR (out/lora): config.json, log.jsonl, learning_curve.png, samples.txt, checkpoints step_NNNNNN/, and at the
end adapter/, which peft opens. Tokens in the log are answer tokens. parts/lora.py explains the method.
"""

import hashlib
import json
import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Literal, NamedTuple

import torch
from torch import nn

from bpe.tokenizer import Tokenizer
from model import GPT
from parts import lora
from parts.chat import Chat, chat_of, our_chat, save_chat_files
from parts.checkpoint import find_adapter, find_model, read_tokenizer, save_model
from parts.cli import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    Probability,
    Seed,
    UserError,
    counted,
    parse_words,
    script,
)
from parts.conversations import (
    Example,
    asks_and_answers,
    count_targets,
    encode_rows,
    global_batch,
    load_rows,
    micro_batches,
    split_rows,
)
from parts.evaluation import complete, validate
from parts.files import refuse_folders, write_atomically
from parts.huggingface import load_adapter, read_adapter, read_config, read_model, save_adapter, weights_sha256
from parts.lora import TARGETS, LoRAConfig
from parts.optim import Optimizer, learning_rate, make_optimizer
from parts.run import Run, RunDirectory, continue_constants
from parts.runtime import Runtime, checkpoint_activations, prefetch
from parts.trials import choose_attention, find_micro_batch_size

# One more micro-batch costs as much as this many tokens of padding: it reads all weights again (which dominates on a
# CPU) and launches all kernels again (which dominates on a GPU).
MICRO_BATCH_COST = {"cpu": 64, "mps": 1024, "cuda": 4096}


@dataclass(frozen=True)
class Config:
    # input and output
    base: str = "gpt2"  # model to finetune: checkpoint directory, run directory or hub id
    data: str = "tatsu-lab/alpaca"  # hub dataset, file or folder; rows have instruction, input, output, or messages
    out_dir: str = "out/lora"  # run directory
    resume: bool = False  # continue from the newest intact checkpoint in out_dir; start from step 0 if there is none
    overwrite: bool = False  # rename an existing out_dir to DIR.1, or the next free number
    adapter: str = ""  # adapter to start from, ours or peft's; it sets rank, alpha, scaling and targets
    merge: str = ""  # directory for base and adapter merged into a plain model; with --adapter, merge without training
    # adapter
    lora_dim: Count = 8  # rank r of the adapter; 0 trains all weights instead
    lora_alpha: NonNegative = 0.0  # scale the adapter's output by alpha / r; 0 is 2 r
    lora_dropout: Probability = 0.0  # dropout on the adapter's input
    targets: tuple[str, ...] = TARGETS  # projections of each block to adapt
    rslora: bool = False  # scale by alpha / sqrt(r) (Kalajdzievski 2023)
    # data
    sequence_length: Count = 0  # longest example in tokens; longer rows become windows; 0 is the base's context
    val_rows: Count = 1000  # rows to hold out for validation, chosen by the seed; at most a tenth of the data
    val_examples: Positive = 200  # validate on at most this many of their examples, from the first
    # batch and schedule
    batch_size: Positive = 32  # examples per optimizer step, summed over ranks and micro-batches
    micro_batch_size: Count = 0  # full-length examples per forward pass; 0 is the largest that fits
    epochs: NonNegative = 3.0  # passes over the training rows
    max_steps: Count = 0  # optimizer steps; 0 is as many as the epochs take
    warmup_steps: Count = 0  # steps of linear warmup; 0 is 3% of all steps
    max_lr: NonNegative = 0.0  # peak learning rate; 0 is 1e-3 with LoRA, 1e-4 for all weights
    min_lr: NonNegative = 0.0  # learning rate at the last step
    lr_schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, linear decay
    decay_fraction: Fraction = 0.5  # fraction of the steps after warmup in which wsd decays
    # optimizer
    weight_decay: NonNegative = 0.01  # AdamW: on matrices and embeddings, not on biases and LayerNorm gains
    beta1: Probability = 0.9  # AdamW: decay rate of the mean of gradients
    beta2: Probability = 0.999  # AdamW: decay rate of the mean of squared gradients
    eps: NonNegative = 1e-8  # AdamW: added to the denominator
    grad_clip: NonNegative = 1.0  # clip the norm of the gradient to this; 0 for no clipping
    max_bad_steps: Positive = 20  # stop after this many steps in a row with a loss or gradient that is not finite
    dropout: Probability = 0.0  # the base's dropout: on embeddings, attention and residual branches
    seed: Seed = 1337  # seeds the adapter, the split, the data order, dropout and the samples
    # evaluation and checkpoints; intervals in steps, 0 for never
    eval_interval: Count = 50  # compute the validation loss, also before the first step and after the last
    sample_interval: Count = 0  # generate an answer to sample_prompt; 0 is after the last step only
    sample_prompt: str = "Give three tips for a good meal."  # the question that samples answer
    sample_tokens: Positive = 128  # longest answer, in tokens
    checkpoint_interval: Count = 500  # write a checkpoint, also after the last step; Ctrl-C always does
    keep_checkpoints: Count = 2  # keep this many of the newest, plus the one with the lowest validation loss; 0 for all
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matrix products; trained weights are fp32
    compile: Literal["auto", "on", "off"] = "off"  # use torch.compile, with dynamic shapes; auto: on CUDA only
    activation_checkpointing: bool = False  # recompute activations: less memory, a third more time
    threads: Count = 0  # CPU threads; 0 is PyTorch's number, which heeds OMP_NUM_THREADS
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # tracker to report to, besides log.jsonl


# --resume refuses to change these: the weights or the order of the data depend on them (docs/lora.md)
FIXED = ("adapter", "lora_dim", "lora_alpha", "targets", "rslora", "sequence_length", "val_rows", "batch_size",
         "seed")  # fmt: skip
# these values mean auto
AUTOMATIC = dict(micro_batch_size=0, sequence_length=0, lora_alpha=0.0, max_steps=0, warmup_steps=0,
                 max_lr=0.0)  # fmt: skip


def main() -> None:
    config, flags = read_command_line(sys.argv[1:])
    if config.merge and config.adapter and not config.resume:
        write_merged(config, find_model(config.base), find_adapter(config.adapter))
    else:
        finetune(config, flags)


def finetune(config: Config, flags: set[str]) -> None:
    rt = Runtime.setup(config.device, config.dtype, config.compile, config.threads)
    directory = RunDirectory(config, rt)
    folder = rt.broadcast_from_main(lambda: find_model(config.base))
    config = settle(config, flags, folder, directory)
    data = open_data(config, folder, rt)
    config = settle_schedule(config, len(data.train), rt)
    base = read_model(folder, config.dropout, choose_attention("auto", rt, config.sequence_length))
    data_fingerprint = dict(base=weights_sha256(base), tokenizer=data.tokenizer.fingerprint, data=data.sha256)
    rows = dict(source=config.data, examples=len(data.train), validation=len(data.val), sha256=data.sha256)
    run_info = dict(parameters=base.num_params(), data=rows, base=config.base)
    model = adapt(base, config, directory.checkpoint, rt).to(rt.device)
    config, loss_fn = distribute(config, model, rt)
    optimizer = make_optimizer(model, config, rt)
    save_weights = partial(save_finetuned, config, model, data, data_fingerprint["base"])
    run = Run(directory, config, save_weights, optimizer, data_fingerprint, run_info)
    train(config, run, model, loss_fn, optimizer, data)
    if rt.is_main:
        adapter = Path(config.out_dir) / "adapter"
        if config.lora_dim:
            write_atomically(adapter, save_weights)
        if config.merge:
            write_merged(config, folder, adapter)
        print_answers(config, model, data, rt)
        print_summary(config, run)


# ------------------------------------------------------------------------------------------------------ the loop


def train(config: Config, run: Run, model: GPT, loss_fn: nn.Module, optimizer: Optimizer, data: "Data") -> None:
    """Take optimizer steps until `config.max_steps`. `loss_fn(idx, targets, logit_positions, n_targets)` is the model's
    loss in nats, summed over the targets and divided by `n_targets`; perhaps compiled and distributed."""
    rt = run.rt
    batches = prefetch(micro_batches_from(run.step, config, data, rt), rt.device)  # reads them one step ahead
    with run:  # opens the log, and closes it whatever happens
        evaluate_if_due(config, run, model, loss_fn, data)  # the base, or evaluations that an interruption skipped
        for step in run.steps():  # 1, 2, ... max_steps, or until a signal
            micro_batches = next(batches)
            # ┌──────────────────────────────────── one optimizer step ────────────────────────────────────┐
            # dropout differs in every step and on every rank; with as many ranks and the same micro_batch_size a resume
            # draws the same again
            torch.manual_seed(config.seed + step * rt.world_size + rt.rank)
            lr = learning_rate(step, config)
            optimizer.set_lr(lr / config.max_lr)

            # The loss is the mean over all answer tokens of the global batch, so a long answer counts for more. DDP
            # averages over ranks: each rank divides its sums by n_targets / world_size.
            n_targets = count_targets(global_batch(data.train, step - 1, config.batch_size, config.seed))
            loss = torch.zeros((), device=rt.device)
            for i, (idx, targets, logit_positions) in enumerate(micro_batches):  # (B, T), (1, M), (1, M)
                is_last = i == len(micro_batches) - 1
                rt.set_gradient_sync(loss_fn, is_last)  # the last backward() also averages gradients over the ranks
                with rt.autocast():
                    micro_loss = loss_fn(idx, targets, logit_positions, n_targets=n_targets / rt.world_size)
                optimizer.scale(micro_loss).backward()  # scaled in fp16 only; clip_grad_norm unscales
                loss += micro_loss.detach()

            grad_norm = optimizer.clip_grad_norm(config.grad_clip)
            # nan or inf on one rank makes the mean nan or inf on all of them, and then step() changes nothing
            loss, grad_norm = rt.mean(torch.stack([loss, grad_norm]))
            optimizer.step(finite=(loss + grad_norm).isfinite())
            optimizer.zero_grad()
            run.log(loss, grad_norm, lr, n_targets)
            # └────────────────────────────────────────────────────────────────────────────────────────────┘

            if run.due(config.checkpoint_interval):
                run.save()  # before evaluations, which may fail
            evaluate_if_due(config, run, model, loss_fn, data)


def evaluate_if_due(config: Config, run: Run, model: GPT, loss_fn: nn.Module, data: "Data") -> None:
    """Run this step's evaluations that are not in the log yet."""
    rt = run.rt
    if data.val and run.due(config.eval_interval, "val", at_start=True):
        inputs = prefetch(iter(to_micro_batches(data.val, config, rt)), rt.device)
        run.record("val", **validate(loss_fn, inputs, data.token_bytes, rt))
    if run.due(config.sample_interval or config.max_steps, "sample"):
        prompt = data.chat.prompt([dict(role="user", content=config.sample_prompt)])
        text = complete(model, data.tokenizer, prompt, config.sample_tokens, rt, config.seed + run.step)
        run.record("sample", text=text)


# --------------------------------------------------------------------------------------------------------------- rows


class Data(NamedTuple):
    tokenizer: Tokenizer
    chat: Chat
    train: list[Example]
    val: list[Example]
    questions: list[list[dict]]  # held-out conversations, to be asked at the end
    sha256: str  # of the rows
    token_bytes: torch.Tensor  # (vocabulary,) bytes of text of each id


def open_data(config: Config, folder: Path, rt: Runtime) -> Data:
    """Read the rows, on the first rank, as examples for the model in `folder`. Raise UserError."""
    T = config.sequence_length
    tokenizer = read_tokenizer(folder)
    chat = our_chat(tokenizer, config.base)
    rows, held_out = rt.broadcast_from_main(lambda: load_rows(config.data))
    train_rows, val_rows = split_rows(rows, held_out, config.val_rows, config.seed)
    train_set = encode_rows(train_rows, chat, T)
    val_set = encode_rows(val_rows, chat, T)
    if not train_set:
        raise UserError(f"{config.data}: none of {len(rows)} rows has an answer within {T} tokens; fix the rows")
    rt.print(f"data: {len(rows):,} rows: {len(train_set):,} examples to train on, {len(val_set):,} to validate")
    if n_equal := len(rows) - len(train_rows) - len(val_rows):
        rt.print(f"note: left out {counted(n_equal, 'validation row')} that training also has")
    if n_empty := sum(not asks_and_answers(row) for row in train_rows + val_rows):
        rt.print(f"note: skipped {counted(n_empty, 'row')} with an empty message or no answer")
    if chat_of([folder], tokenizer, config.base).reader.chat_template != chat.reader.chat_template:
        rt.print(f"note: {config.base} has its own chat template, replaced by ours here (parts/chat.py)")
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(rt.device)
    sha256 = hashlib.sha256(json.dumps([train_rows, val_rows]).encode()).hexdigest()
    questions = [row for row in val_rows if asks_and_answers(row) and row[-1]["role"] == "assistant"]
    return Data(tokenizer, chat, train_set, val_set[: config.val_examples], questions[:3], sha256, token_bytes)


def to_micro_batches(examples: list[Example], config: Config, rt: Runtime) -> list[tuple]:
    """Divide this rank's share of some examples into micro-batches."""
    limit = config.sequence_length * config.micro_batch_size  # tokens
    return micro_batches(examples, limit, MICRO_BATCH_COST[rt.device.type], rt.rank, rt.world_size)


def micro_batches_from(first: int, config: Config, data: Data, rt: Runtime) -> Iterator[list]:
    """Yield this rank's micro-batches of each step; steps count from 0 here."""
    for step in range(first, config.max_steps):
        yield to_micro_batches(global_batch(data.train, step, config.batch_size, config.seed), config, rt)


# ----------------------------------------------------------------------------------------------------------- constants


def read_command_line(args: list[str]) -> tuple[Config, set[str]]:
    """Parse the command line; also return the names of the constants that it sets. Raise UserError."""
    config, flags = parse_words(Config, args, description=__doc__)
    if not config.lora_dim and config.merge:
        raise UserError("--lora_dim 0 makes no adapter to merge; remove --merge")
    if not config.lora_dim and not config.checkpoint_interval:
        raise UserError("--lora_dim 0 keeps its weights in checkpoints alone; set --checkpoint_interval above 0")
    if config.merge:
        refuse_folders(Path(config.merge))
    return config, flags


def settle(config: Config, flags: set[str], folder: Path, directory: RunDirectory) -> Config:
    """Fill in the constants that base, adapter and the run to resume determine. Raise UserError."""
    if Path(config.base).is_dir():  # of a run the newest checkpoint; a hub id stays one
        config = replace(config, base=str(folder))
    if config.adapter:
        found, _, _ = read_adapter(find_adapter(config.adapter))
        own = dict(lora_dim=found.r, lora_alpha=found.alpha, targets=found.targets, rslora=found.rslora)
        for name, value in own.items():
            if name in flags and getattr(config, name) != value:
                raise UserError(f"{config.adapter} has {name} {value}, not {getattr(config, name)}; remove --{name}")
        config = replace(config, **own)
    if directory.checkpoint:
        max_steps = config.max_steps
        config = continue_constants(config, flags, directory, FIXED, AUTOMATIC)
        if "epochs" in flags:  # counts the steps again
            config = replace(config, max_steps=max_steps)
    if config.batch_size < directory.rt.world_size:
        raise UserError(f"--batch_size {config.batch_size} gives some ranks no example; raise it or start fewer ranks")
    context = read_config(folder).n_positions
    if config.sequence_length > context:
        raise UserError(f"{config.base} has a context of {context}; lower --sequence_length {config.sequence_length}")
    return replace(
        config,
        sequence_length=config.sequence_length or context,
        lora_alpha=config.lora_alpha or 2.0 * config.lora_dim,
        max_lr=config.max_lr or (1e-3 if config.lora_dim else 1e-4),
    )


def settle_schedule(config: Config, n_examples: int, rt: Runtime) -> Config:
    """Fill in the steps and their warmup."""
    max_steps = config.max_steps or max(round(config.epochs * n_examples / config.batch_size), 1)
    passes = max_steps * config.batch_size / n_examples
    rt.print(f"{counted(max_steps, 'step')} of {config.batch_size} examples: {passes:.2g} epochs")
    if max_steps < 20 and not config.max_steps:
        rt.print(f"note: {counted(max_steps, 'step')}: too few to learn much; raise --epochs or --max_steps")
    warmup_steps = config.warmup_steps or math.ceil(0.03 * max_steps)
    return replace(config, max_steps=max_steps, warmup_steps=warmup_steps)


# ------------------------------------------------------------------------------------------------------------ the model


def adapt(base: GPT, config: Config, checkpoint: Path | None, rt: Runtime) -> GPT:
    """Return the model to train: the base with a new or loaded adapter, or all weights of the base or a checkpoint."""
    rt.print(f"{config.base}: {base.num_params():,} parameters on {rt.description}")
    model = base
    if config.lora_dim:
        if source := checkpoint or config.adapter:
            model = load_adapter(base, find_adapter(source), config.lora_dropout)
        else:
            torch.manual_seed(config.seed)
            new = LoRAConfig(config.lora_dim, config.lora_alpha, config.lora_dropout, config.targets, config.rslora)
            model = lora.add_lora(base, new)
    elif checkpoint:
        model = read_model(checkpoint, config.dropout, base.config.attention)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rt.print(f"training {trainable:,} parameters ({trainable / model.num_params():.3%})")
    if config.lora_dim and rt.dtype != torch.float32:
        lora.cast_frozen(model, rt.dtype)
    if config.activation_checkpointing:
        checkpoint_activations(model.transformer.h)
    return model


def distribute(config: Config, model: GPT, rt: Runtime) -> tuple[Config, nn.Module]:
    """Wrap the model with its loss for the loop: compiled, and in DDP on several ranks. A micro_batch_size of 0 becomes
    the largest that fits."""
    if not config.micro_batch_size:
        optimizer = partial(make_optimizer, model, config, rt)
        n_sequences = config.batch_size // rt.world_size
        found = find_micro_batch_size(model, n_sequences, config.sequence_length, rt, optimizer)
        config = replace(config, micro_batch_size=found)
    return config, rt.wrap(rt.compiled(model, dynamic=True))


# ------------------------------------------------------------------------------------------------------------ the files


def save_finetuned(config: Config, model: GPT, data: Data, base_sha256: str, directory: Path) -> None:
    """Save the adapter or all weights, plus the chat files."""
    if config.lora_dim:
        save_adapter(directory, model, config.base, base_sha256)
    else:
        save_model(directory, model, data.tokenizer, tuple(data.train[0].idx.tolist()))
    save_chat_files(directory, data.tokenizer)


def write_merged(config: Config, folder: Path, adapter: Path) -> None:
    """Write base and adapter as one plain model, and print by how much its logits differ from theirs."""
    tokenizer = read_tokenizer(folder)
    model = load_adapter(read_model(folder), adapter).eval()
    idx = torch.arange(min(64, model.config.n_positions))[None]
    with torch.no_grad():
        logits = model(idx)
        model = lora.remove_lora(lora.merge(model))
        difference = (model(idx) - logits).abs().max().item()

    def write(path: Path) -> None:
        save_model(path, model, tokenizer)
        chat = chat_of([adapter, folder], tokenizer, config.base)
        if chat.whose:  # without a template servers refuse messages
            save_chat_files(path, tokenizer, chat)

    write_atomically(Path(config.merge), write)
    print(f"wrote {config.merge}: {config.base} with {adapter} merged in; logits differ by at most {difference:.1e}")


def print_answers(config: Config, model: GPT, data: Data, rt: Runtime) -> None:
    """Print held-out questions with the model's likeliest answer and the row's."""
    for *messages, answer in data.questions:
        prompt = data.chat.prompt(messages)
        text = complete(model, data.tokenizer, prompt, config.sample_tokens, rt, seed=None)
        print(f"\nheld out: {shorten(messages[-1]['content'], 300)}")
        print(f"   model: {shorten(text.removeprefix(prompt), 300)}")
        print(f"     row: {shorten(answer['content'], 300)}")


def print_summary(config: Config, run: Run) -> None:
    """Print the results and what to try next."""
    if not run.report.print_results():
        return
    model = shlex.quote(config.out_dir)
    if config.lora_dim:
        model = f"{shlex.quote(config.base)} --adapter {shlex.quote(config.out_dir + '/adapter')}"
    print(f"\nNow try:\n  python sample.py {model} --chat")


if __name__ == "__main__":
    script(main)
