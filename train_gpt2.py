"""Pretrain GPT-2: constants, then one loop that reads top to bottom.

    python train_gpt2.py tiny                                # a small GPT on input.txt, 1 to 5 minutes on 2 CPU cores
    python train_gpt2.py small --data my.txt                 # 6M parameters on your own text, in an hour or less
    python train_gpt2.py                                     # GPT-2 124M on FineWeb-Edu shards, one device
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # the same run on 8 GPUs
    python train_gpt2.py gpt2-medium --micro_batch_size 16   # another recipe, another constant
    python train_gpt2.py --resume                            # continue from the newest intact checkpoint
    python train_gpt2.py gpt2-xl --dry_run                   # print the plan: memory, disk, hours, money

Writes OUT_DIR (out/RECIPE): config.json, log.jsonl, learning_curve.png, samples.txt, and checkpoints step_NNNNNN/,
which transformers opens unchanged. model.py has the model, parts/ the rest: loss.py the loss, optim.py schedules and
optimizers, data.py the order of the data, run.py logging, saving and resuming, checkpoint.py a checkpoint's files,
runtime.py device, precision (TF32, bf16, fp16) and ranks.
"""

import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import nn

import hellaswag
from model import RESIDUAL_IN_BF16, GPT, GPTConfig
from parts.checkpoint import find_model, read_tokenizer, save_model
from parts.cli import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveFloat,
    Probability,
    Seed,
    UserError,
    construct,
    counted,
    parse_words,
    script,
)
from parts.data import Batches, to_inputs, training_batches, validation_batches
from parts.evaluation import complete, loss_is_of_logits, validate
from parts.huggingface import read_config, read_model
from parts.loss import loss_of_rows
from parts.optim import Optimizer, learning_rate, make_optimizer, muon_height
from parts.plan import print_plan
from parts.run import Run, RunDirectory, continue_constants, flag
from parts.runtime import Runtime, checkpoint_activations, make_deterministic, prefetch, profiled
from parts.shards import Shards, open_shards
from parts.trials import choose_attention, find_micro_batch_size, print_duration


@dataclass(frozen=True)
class Config:
    # input and output
    data: str = "edu_fineweb10B"  # directory of token shards (fineweb.py writes them), or a .txt file
    tokenizer: str = "gpt2"  # gpt2, a tokenizer.json, or "train" to learn a BPE of vocab_size tokens from the .txt
    out_dir: str = ""  # run directory; out/RECIPE if empty
    resume: bool = False  # continue from the newest intact checkpoint in out_dir; start from step 0 if there is none
    overwrite: bool = False  # rename the run in out_dir to OUT_DIR.1, or the next free number, and start a new one
    dry_run: bool = False  # print what the run will do and the memory, time and money it needs, then stop
    price: NonNegative = 0.0  # with --dry_run: dollars per hour of one device; 0 to leave out the cost
    init_from: str = ""  # checkpoint directory or hub id (such as gpt2) to start from, instead of random weights
    # model
    n_layer: Positive = 12  # transformer blocks
    n_head: Positive = 12  # attention heads per block
    n_embd: Positive = 768  # channels of the residual stream
    sequence_length: Positive = 1024  # context length in tokens
    vocab_size: Positive = 50304  # tokens, padded to a multiple of 128 for the tensor cores: 50257 become 50304
    dropout: Probability = 0.0  # 0 for a single epoch of pretraining; 0.1 or more when data is scarce
    attention: Literal["auto", "flash", "naive"] = "auto"  # flash: fused kernel; naive: plain formula; auto: the faster
    # batch and schedule
    total_batch_size: Positive = 524_288  # tokens per optimizer step, summed over ranks and micro-batches
    micro_batch_size: Count = 0  # sequences per pass on each rank; 0: what fits; on a CPU 4096 tokens
    max_steps: Positive = 19_073  # optimizer steps; 19,073 steps of 524,288 tokens are one epoch of 10B
    target_loss: NonNegative = 0.0  # stop at the first validation loss at or below this; 0 to train all steps
    stop_at: Count = 0  # stop after this step, on the schedule of max_steps; 0 to train all steps
    warmup_steps: Count = 715  # steps of linear warmup; 715 are 375M tokens, as for GPT-3; 0 for none
    max_lr: PositiveFloat = 6e-4  # peak learning rate of AdamW; Muon has muon_lr
    min_lr: NonNegative = 6e-5  # learning rate at the last step
    lr_schedule: Literal["cosine", "wsd", "four_phases"] = "cosine"  # wsd ends in linear decay; four_phases suits Muon
    decay_fraction: Fraction = 0.5  # fraction of the steps after warmup in which wsd decays
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon for the blocks' matrices, AdamW for the rest
    muon_lr: NonNegative = 0.02  # Muon's peak learning rate
    weight_decay: NonNegative = 0.1  # on matrices and embeddings, not on biases and LayerNorm gains
    beta1: Probability = 0.9  # AdamW: decay rate of the mean of gradients
    beta2: Probability = 0.95  # AdamW: decay rate of the mean of squared gradients
    eps: PositiveFloat = 1e-8  # AdamW: added to the denominator
    grad_clip: NonNegative = 1.0  # clip the norm of the gradient to this; 0 for no clipping
    max_bad_steps: Positive = 20  # stop after this many steps in a row with a loss or gradient that is not finite
    seed: Seed = 1337  # seeds weights, data order, dropout and samples
    shuffle: bool = True  # shuffle the windows of every epoch
    # evaluation and checkpoints; intervals in steps, 0 for never
    eval_interval: Count = 250  # compute the validation loss
    eval_steps: Count = 20  # validation batches, of total_batch_size tokens each; 0 for the whole split
    hellaswag_interval: Count = 1000  # compute the HellaSwag accuracy
    hellaswag_data: str = ""  # local .jsonl with the validation split of HellaSwag; if empty, downloaded once
    sample_interval: Count = 1000  # generate a sample of text on the first rank, while the others wait
    sample_prompt: str = "Hello, I'm a language model,"  # the sample's prompt; empty for the start of a document
    sample_tokens: Positive = 128  # longest sample, in tokens
    checkpoint_interval: Count = 1000  # write a checkpoint, also at the end; even at 0 Ctrl-C and stop_at do
    keep_checkpoints: Count = 3  # keep this many of the newest, plus the one with the lowest validation loss; 0 for all
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matmuls; weights are fp32; float32 bars TF32
    compile: Literal["auto", "on", "off"] = "auto"  # use torch.compile; auto: on CUDA only
    activation_checkpointing: bool = False  # recompute activations: less memory, a third more time
    deterministic: bool = False  # the same bits in every run on one machine; slower on a GPU
    profile: Count = 0  # profile this many steps, from the third: a table by kernel, and OUT_DIR/profile.json
    threads: Count = 0  # CPU threads; 0 for PyTorch's number, which heeds OMP_NUM_THREADS
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # tracker to report to, besides log.jsonl


# A recipe's values override Config: to change the max_lr of tiny, edit it here.
RECIPES = {
    "gpt2": Config(),  # Radford et al. 2019 in size, Brown et al. 2020 (table 2.1) in hyperparameters
    "gpt2-medium": Config(
        n_layer=24,
        n_head=16,
        n_embd=1024,
        max_lr=3e-4,
        min_lr=3e-5,
    ),
    "gpt2-large": Config(
        n_layer=36,
        n_head=20,
        n_embd=1280,
        max_lr=2.5e-4,
        min_lr=2.5e-5,
    ),
    "gpt2-xl": Config(
        n_layer=48,
        n_head=25,
        n_embd=1600,
        total_batch_size=1_048_576,
        max_steps=9_536,
        warmup_steps=358,
        max_lr=2e-4,
        min_lr=2e-5,
    ),
    # gpt2 on 6.4B tokens: three times the rate, held, then a line to 0 in the last sixth. Two public runs reached
    # llm.c's loss this way on 72% of its tokens, with other norms and without biases (docs/speedrun.md); untried here
    "gpt2-tuned": Config(
        max_steps=12_288,
        warmup_steps=256,
        max_lr=1.8e-3,
        min_lr=0.0,
        lr_schedule="wsd",
        decay_fraction=0.17,
    ),
    # the same GPT-2 on half of gpt2's tokens: Muon for hidden matrices, at a rate that falls soon after the warmup.
    # At 80 tokens a parameter, models of 0.12M, 0.34M and 0.66M needed about half for the same loss, with the rates of
    # both tuned at the first two, and before four_phases (docs/speedrun.md). 124M is untried
    "speedrun": Config(
        max_steps=9_537,
        warmup_steps=256,
        max_lr=3e-3,
        min_lr=0.0,
        lr_schedule="four_phases",
        optimizer="muon",
    ),
    # your own text, 5 to 100 MB, in an hour or less on 2 CPU cores, or minutes on a GPU (docs/data.md)
    "small": Config(
        data="",  # yours
        tokenizer="train",
        n_layer=6,
        n_head=4,
        n_embd=256,
        sequence_length=256,
        vocab_size=4096,
        total_batch_size=4096,
        max_steps=1500,
        warmup_steps=40,
        max_lr=3e-3,
        min_lr=0.0,
        lr_schedule="wsd",
        decay_fraction=0.4,
        optimizer="muon",
        eval_interval=250,
        eval_steps=25,
        hellaswag_interval=0,
        sample_interval=500,
        sample_prompt="",
        checkpoint_interval=500,
    ),
    # tuned by measurement for one to five minutes on 2 CPU cores
    "tiny": Config(
        data="input.txt",
        tokenizer="train",
        n_layer=4,
        n_head=2,
        n_embd=128,
        sequence_length=128,
        vocab_size=2048,
        total_batch_size=2048,
        max_steps=1200,
        warmup_steps=20,
        max_lr=3e-3,
        min_lr=0.0,
        lr_schedule="wsd",
        decay_fraction=0.4,
        optimizer="muon",
        weight_decay=0.15,
        eval_interval=200,
        eval_steps=0,
        hellaswag_interval=0,
        sample_interval=600,
        sample_prompt="",
        checkpoint_interval=600,
        compile="off",  # on a GPU the run takes 20 seconds, and compiling 30
    ),
}

# --resume refuses to change these: the weights or the order of the data depend on them (docs/run.md)
FIXED = ("init_from", "n_layer", "n_head", "n_embd", "sequence_length", "vocab_size", "total_batch_size", "optimizer",
         "seed", "shuffle")  # fmt: skip
AUTOMATIC = dict(micro_batch_size=0, attention="auto")  # these values mean auto
SIZES = ("n_layer", "n_head", "n_embd", "vocab_size")  # --init_from takes these from the checkpoint


def main() -> None:
    config, flags, recipe_named = read_command_line(sys.argv[1:])
    if config.deterministic:
        make_deterministic()
    rt = Runtime.setup(config.device, config.dtype, config.compile, config.threads)
    if rt.device.type == "cpu" and not (config.dry_run or recipe_named):
        raise UserError("without a GPU, name a recipe: tiny, small, or gpt2 (124M)")
    directory = None if config.dry_run else RunDirectory(config, rt)
    start_from = directory and directory.checkpoint  # directory of the first weights; None for random ones
    if config.init_from and not start_from:
        start_from = rt.broadcast_from_main(lambda: find_model(config.init_from))
    config, shape = settle(config, flags, directory, start_from, rt)
    if config.dry_run:
        return print_plan(config, shape, rt)
    data = open_data(config, shape, start_from, rt)
    model = build_model(config, shape, start_from).to(rt.device)
    if not loss_is_of_logits(model, data.first_ids(min(64, shape.n_positions))) and model.CHUNKED_LOSS:
        remedy = "set CHUNKED_LOSS = False in model.py (unless the loss differs on purpose)"
        rt.print(f"note: training ignores your GPT.logits: {remedy}", file=sys.stderr)
    config, loss_fn = distribute(config, model, rt)  # finds a micro_batch_size
    optimizer = make_optimizer(model, config, rt)
    run = open_run(directory, config, model, optimizer, data)
    train(config, run, model, loss_fn, optimizer, data)
    print_summary(config, run)


# ------------------------------------------------------------------------------------------------------ the loop


def train(config: Config, run: Run, model: GPT, loss_fn: nn.Module, optimizer: Optimizer, data: "Data") -> None:
    """Take optimizer steps until `config.max_steps`. `loss_fn(idx, targets)` is the model's mean loss in nats per
    token, perhaps compiled and distributed; its parameters are those of `model`."""
    rt = run.rt
    n_sequences = config.total_batch_size // config.sequence_length
    n_steps = config.max_steps - run.step
    step_batches = training_batches(data.train, n_sequences, run.step, n_steps, config.micro_batch_size)
    batches = prefetch(step_batches, rt.device)  # reads them one step ahead
    steps = run.steps()
    if config.profile and rt.is_main:
        steps = profiled(steps, config.profile, Path(config.out_dir, "profile.json"), rt)
    with run:  # opens the log, and closes it whatever happens
        if evaluate_if_due(config, run, model, loss_fn, data):  # --init_from, or what an interruption skipped
            run.end()
        for step, micro_batches in zip(steps, batches, strict=False):  # 1, 2, ... max_steps, or until a signal
            # ┌──────────────────────────────────── one optimizer step ────────────────────────────────────┐
            # new dropout in every step and on every rank; a resume with as many ranks and the same micro_batch_size
            # repeats it
            torch.manual_seed(config.seed + step * rt.world_size + rt.rank)
            lr = learning_rate(step, config)
            optimizer.set_lr(lr / config.max_lr, muon_height(step, config))

            # Each backward() adds to the gradients, which the last step's zero_grad() has cleared. All micro-batches
            # have one size on all ranks, so the mean of their mean losses is the mean over all tokens of the batch.
            loss = torch.zeros((), device=rt.device)
            for i, tokens in enumerate(micro_batches):  # (B, T + 1) each
                idx = tokens[:, :-1]  # (B, T)
                targets = tokens[:, 1:]  # (B, T), one token ahead
                is_last = i == len(micro_batches) - 1
                rt.set_gradient_sync(loss_fn, is_last)  # ranks average their gradients in the last backward()
                with rt.autocast():
                    micro_loss = loss_fn(idx, targets) / len(micro_batches)
                optimizer.scale(micro_loss).backward()  # scaled in fp16 only; clip_grad_norm unscales
                loss += micro_loss.detach()

            grad_norm = optimizer.clip_grad_norm(config.grad_clip)
            loss, grad_norm = rt.mean(torch.stack([loss, grad_norm]))
            finite = (loss + grad_norm).isfinite()  # on all ranks alike: nan or inf on one makes the mean nan or inf
            optimizer.step(finite)  # skipped if not finite
            optimizer.zero_grad()
            n_tokens = len(micro_batches) * targets.numel() * rt.world_size
            run.log(loss, grad_norm, lr, n_tokens)  # on a GPU it reads these a step late
            # └────────────────────────────────────────────────────────────────────────────────────────────┘

            if run.due(config.checkpoint_interval):
                run.save()  # before evaluations, which may fail
            if evaluate_if_due(config, run, model, loss_fn, data):
                run.end()


def evaluate_if_due(config: Config, run: Run, model: GPT, loss_fn: nn.Module, data: "Data") -> bool:
    """Run this step's evaluations that the log lacks. Return whether validation has reached target_loss: the step is
    then saved at once, and evaluated as the last one."""
    rt = run.rt
    if run.due(config.eval_interval, "val", at_start=bool(config.init_from)):
        found = validate(loss_fn, validation_inputs(config, data, rt), data.token_bytes, rt)
        run.record("val", **found, sequence_length=config.sequence_length)
    reached = config.target_loss > 0 and run.val_loss <= config.target_loss
    if reached:
        run.save()
    if data.hellaswag and run.due(config.hellaswag_interval, "hellaswag", is_last=reached):
        scores = hellaswag.evaluate(model, data.hellaswag, rt)
        run.record("hellaswag", **{name: scores[name] for name in hellaswag.LOGGED})
    if run.due(config.sample_interval, "sample", is_last=reached):
        seed = config.seed + run.step
        text = complete(model, data.shards.tokenizer, config.sample_prompt, config.sample_tokens, rt, seed)
        run.record("sample", text=text)
    return reached


# ------------------------------------------------------------------------------------------------- what it reads


class Data(NamedTuple):
    shards: Shards  # tokens of both splits, and the tokenizer that made them
    train: Batches  # training windows, in order
    token_bytes: torch.Tensor  # (vocabulary,) bytes of text that each id encodes
    hellaswag: hellaswag.Task | None

    def first_ids(self, n: int) -> list[int]:
        """Return the first `n` ids of validation, fewer if its first shard is shorter."""
        return self.shards.val.shards[0].read(0, n).tolist()


def open_data(config: Config, shape: GPTConfig, source: Path | None, rt: Runtime) -> Data:
    """Open the shards of a directory, or of a .txt that is tokenized first. Raises UserError."""
    cache = Path(config.out_dir).parent / "cache"
    shards = open_shards(config.data, config.tokenizer, config.vocab_size, cache)
    if config.init_from and not read_tokenizer(source).same_ids(shards.tokenizer):
        raise UserError(
            f"{config.data} has other tokens than {source}; for a .txt also pass --tokenizer {source}, else "
            f"write shards with it: fineweb.py --tokenizer {source}"
        )
    batches = Batches(shards.train, config.sequence_length, config.seed, config.shuffle, rt.rank, rt.world_size)
    token_bytes = torch.from_numpy(shards.tokenizer.token_bytes()).to(rt.device)
    task = open_hellaswag(config.hellaswag_data, shards, shape, rt) if config.hellaswag_interval else None
    passes = config.max_steps * config.total_batch_size / config.sequence_length / batches.n_windows
    n_train, n_val = len(shards.train), len(shards.val)
    rt.print(f"data: {n_train:,} training tokens ({passes:.2g} epochs), {n_val:,} validation tokens")
    if passes > 20:
        rt.print(f"note: {passes:.0f} passes memorize a text; add text, or lower --max_steps")
    return Data(shards, batches, token_bytes, task)


def open_hellaswag(data: str, shards: Shards, shape: GPTConfig, rt: Runtime) -> hellaswag.Task | None:
    """Prepare the task to score. Return None, after one note, if no file is given and the download fails."""
    try:
        rows = hellaswag.load_rows(data, rt, "--hellaswag_data")
    except UserError as e:
        if data:
            raise
        rt.print(f"note: training continues without HellaSwag: {e}", file=sys.stderr)
        return None
    return hellaswag.prepare(rows, shards.tokenizer, shape, "completion")


def validation_inputs(config: Config, data: Data, rt: Runtime) -> Iterator[tuple]:
    """Yield (idx, targets) on the device, of the windows that this rank validates on."""
    limit = config.eval_steps * config.total_batch_size
    windows = validation_batches(
        data.shards.val, config.sequence_length, config.micro_batch_size, limit, rt.rank, rt.world_size
    )
    return map(to_inputs, prefetch(windows, rt.device))


# ---------------------------------------------------------------------------------------------------- constants


def read_command_line(argv: list[str]) -> tuple[Config, set[str], bool]:
    """Parse the recipe and its overrides; also return the overridden names, and whether a recipe was named."""
    recipe_named = bool(argv) and not argv[0].startswith("-")
    recipe, *args = argv if recipe_named else ["gpt2", *argv]
    if recipe not in RECIPES:
        raise UserError(f"unknown recipe {recipe}; choose from {', '.join(RECIPES)}, and pass a text as --data FILE")
    about = f"{__doc__}\nRecipes: {', '.join(RECIPES)}. The defaults below are {recipe}'s."
    config, flags = parse_words(Config, args, RECIPES[recipe], "train_gpt2.py [RECIPE]", about)
    config = replace(config, out_dir=config.out_dir or f"out/{recipe}")
    return config, flags, recipe_named


def settle(
    config: Config, flags: set[str], directory: RunDirectory | None, source: Path | None, rt: Runtime
) -> tuple[Config, GPTConfig]:
    """Return the run's final constants and its model's shape; a micro_batch_size of 0 waits for the model. Raises
    UserError."""
    if config.init_from:
        config = settle_sizes(config, flags, source)
    if directory and directory.checkpoint:
        config = continue_constants(config, flags, directory, FIXED, AUTOMATIC)
        per_rank = config.total_batch_size // config.sequence_length // rt.world_size
        if "micro_batch_size" not in flags and per_rank % max(config.micro_batch_size, 1):
            config = replace(config, micro_batch_size=0)  # it fitted another number of ranks
    validate_config(config, rt)
    of_model = {field.name: getattr(config, field.name) for field in fields(GPTConfig) if hasattr(config, field.name)}
    of_model["attention"] = choose_attention(config.attention, rt, config.sequence_length)
    of_model["n_positions"] = read_config(source).n_positions if source else config.sequence_length
    return config, construct(GPTConfig, **of_model)


def settle_sizes(config: Config, flags: set[str], source: Path) -> Config:
    """Take the sizes of the model in `source`: they override the recipe's, not a flag's."""
    base = read_config(source)
    if config.sequence_length > base.n_positions:
        raise UserError(f"{source} has a context of {base.n_positions} tokens; --sequence_length must not exceed it")
    for name in SIZES:
        stored = getattr(base, name)
        if name in flags and getattr(config, name) != stored:
            raise UserError(f"{source} has {name} {stored}, not {getattr(config, name)}; leave out --{name}")
        config = replace(config, **{name: stored})
    return config


def validate_config(config: Config, rt: Runtime) -> None:
    """Raise UserError for resolved constants that contradict each other."""
    T = config.sequence_length
    if not config.data:
        raise UserError("this recipe has no text of its own; pass --data FILE.txt")
    if config.min_lr > config.max_lr:
        raise UserError(f"--min_lr {config.min_lr} is above --max_lr {config.max_lr}; set a lower --min_lr")
    if config.target_loss and not config.eval_interval:
        raise UserError(f"--target_loss {config.target_loss} needs evaluations; pass an --eval_interval above 0")
    B = max(config.micro_batch_size, 1)
    if config.total_batch_size % (B * T * rt.world_size):
        raise UserError(
            f"--total_batch_size {config.total_batch_size} is not a multiple of micro_batch_size {B} x sequence_length "
            f"{T} x {counted(rt.world_size, 'rank')}; change one of them"
        )


# ------------------------------------------------------------------------------------------------- before and after


def build_model(config: Config, shape: GPTConfig, source: Path | None) -> GPT:
    """Make random weights, or load those of the checkpoint to resume or start from. Raises UserError for a checkpoint
    of another shape, which includes constants that you add to a model."""
    torch.manual_seed(config.seed)
    if source:
        model = read_model(source, shape.dropout, shape.attention)
        for name, stored in vars(model.config).items():
            if stored != getattr(shape, name):
                raise UserError(f"{source} has {name} {stored}, not {getattr(shape, name)}; pass {flag(name, stored)}")
    else:
        model = GPT(shape)
    if config.activation_checkpointing:
        checkpoint_activations(model.transformer.h)
    return model


def distribute(config: Config, model: GPT, rt: Runtime) -> tuple[Config, nn.Module]:
    """Return the model with its loss as the loop calls it: compiled, and in DDP on several ranks. A micro_batch_size of
    0 becomes the largest that fits."""
    rt.print(f"{config.out_dir}: {model.num_params():,} parameters on {rt.description}")
    n_sequences = config.total_batch_size // config.sequence_length
    if not config.micro_batch_size:
        alone = replace(rt, rank=0, world_size=1)  # a trial waits for no other rank
        optimizer = partial(make_optimizer, model, config, alone)
        size = find_micro_batch_size(model, n_sequences // rt.world_size, config.sequence_length, rt, optimizer)
        config = replace(config, micro_batch_size=size)
    if rt.device.type == "cpu":
        print_duration(model, config, rt)
    rt.print(f"a step: {n_sequences} sequences of {config.sequence_length}, {config.micro_batch_size} at a time")
    return config, rt.wrap(rt.compiled(model))


def open_run(directory: RunDirectory, config: Config, model: GPT, optimizer: Optimizer, data: Data) -> Run:
    """Start the run, or continue it with its optimizer and counters. Raises UserError."""
    rt = directory.rt
    shards = data.shards
    data_fingerprint = dict(
        tokenizer=shards.tokenizer.fingerprint,
        data=shards.train.digest(),
        validation=shards.val.digest(),
    )
    run_info = dict(
        parameters=model.num_params(),
        flops_per_token=model.estimate_flops(config.sequence_length),
        uniform_loss=math.log(config.vocab_size),  # of a uniform guess; random weights start slightly above
        attention=model.config.attention,
        cross_entropy=loss_of_rows(rt.device.type, config.vocab_size, rt.dtype).__module__,
        residual_in_bf16=RESIDUAL_IN_BF16,
        training_tokens=len(shards.train),
        data=shards.origin,
        base=config.init_from,
    )
    window = tuple(data.first_ids(model.config.n_positions))
    save_weights = partial(save_model, model=model, tokenizer=shards.tokenizer, ids=window)
    return Run(directory, config, save_weights, optimizer, data_fingerprint, run_info)


def print_summary(config: Config, run: Run) -> None:
    if run.rt.is_main and run.report.print_results() and config.checkpoint_interval:
        where = shlex.quote(config.out_dir)
        print(
            f"\nthe loss curve: {where}/learning_curve.png\n"
            f"\nNow try:\n  python sample.py {where} --num_samples 3    # more text\n"
            f"  python train_gpt2.py tiny --data YOUR.txt --out_dir out/yours    # a text of your own\n"
            f"  python lora_finetune.py --base {where}    # questions and answers: docs/lora.md"
        )


if __name__ == "__main__":
    script(main)
