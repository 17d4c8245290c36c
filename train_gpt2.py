"""Pretrain GPT-2: constants, then one loop that reads top to bottom.

    python train_gpt2.py tiny                                # a small GPT on input.txt, 1 to 5 minutes on 2 CPU cores
    python train_gpt2.py                                     # GPT-2 124M on FineWeb-Edu shards, one device
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # the same run on 8 GPUs
    python train_gpt2.py gpt2-medium --micro_batch_size 16   # another recipe, another constant
    python train_gpt2.py --resume                            # continue from the newest intact checkpoint
    python train_gpt2.py gpt2-xl --dry_run                   # print the plan and the memory it needs, then stop

Writes OUT_DIR (out/RECIPE): config.json, log.jsonl, learning_curve.png, samples.txt, and checkpoints step_NNNNNN/ that
transformers opens as they are. Where to find each part: the model in model.py, the loss in learning/loss.py, the
schedule and the optimizers in learning/optim.py, the order of the data in corpus/order.py, when to save in
run/directory.py, what a checkpoint holds in run/checkpoint.py, device, precision and ranks in machine/runtime.py.
"""

# imported first, so that Ctrl-C while torch loads does not print a traceback
from cli import Count, NonNegative, Positive, Probability, Range, Seed, UserError, counted, explain, parse_args, script

# isort: split
import math
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch

import hellaswag
from bpe.tokenizer import Tokenizer
from corpus.order import Batches, to_inputs, training_batches, validation_batches
from corpus.shards import data_tokenizer, origin, prepare_text
from corpus.stream import TokenStream, find_shards, read_manifest
from learning.evaluation import complete, validate
from learning.fp8 import FP8_MATMULS
from learning.memory import Layout, checkpoint_bytes, memory_table, n_parameters, time_table, token_flops
from learning.optim import Optimizer, learning_rate, make_optimizer
from machine.runtime import Runtime, prefetch
from machine.sharding import shard
from machine.trials import checkpoint_activations, choose_attention, find_micro_batch_size
from model import GPT, GPTConfig, GPTWithLoss
from run.card import provenance
from run.checkpoint import ModelFiles, load_model, load_shape, unsharded_copy
from run.directory import RunDirectory, flags_set, with_constants_of_run
from run.log import import_tracker
from run.plan import CARDS, about_disk, about_measured
from run.reference import place_in_band
from run.run import Run


@dataclass(frozen=True)
class Config:
    # input and output
    data: str = "edu_fineweb10B"  # directory of token shards (fineweb.py writes them), or a .txt file
    tokenizer: str = "gpt2"  # gpt2, a tokenizer.json, or train: learn a BPE of vocab_size tokens from the .txt
    out_dir: str = ""  # run directory; out/RECIPE if empty
    resume: bool = False  # continue from the newest intact checkpoint in out_dir; start from step 0 if there is none
    overwrite: bool = False  # rename the run in out_dir to OUT_DIR.1, or the next free number, and start a new one
    dry_run: bool = False  # print what the run will do and the memory, time and money it needs, then stop
    like: str = ""  # with --dry_run: a run directory; estimate the time from its measured tokens/s
    price: NonNegative = 0.0  # with --dry_run: dollars per hour of one device; 0 leaves out the cost
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
    micro_batch_size: Count = 0  # sequences per forward pass on each rank; 0 finds the largest that fits
    max_steps: Positive = 19_073  # optimizer steps; 19,073 steps of 524,288 tokens are one epoch of 10B
    target_loss: NonNegative = 0.0  # stop at the first validation loss at or below this; 0 to train all steps
    warmup_steps: Count = 715  # steps of linear warmup; 715 are 375M tokens, as for GPT-3; 0 for none
    max_lr: Annotated[float, Range(1e-9, 1e9)] = 6e-4  # peak learning rate; with Muon, of what AdamW updates
    min_lr: NonNegative = 6e-5  # learning rate at the last step
    lr_schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, linear decay
    decay_fraction: Annotated[float, Range(1e-6, 1)] = 0.5  # wsd decays over this fraction of the steps after warmup
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon for the blocks' matrices, AdamW for the rest
    muon_lr: NonNegative = 0.02  # peak learning rate of Muon
    weight_decay: NonNegative = 0.1  # on matrices and embeddings, not on biases and LayerNorm gains
    beta1: Probability = 0.9  # AdamW: decay rate of the mean of gradients
    beta2: Probability = 0.95  # AdamW: decay rate of the mean of squared gradients
    eps: Annotated[float, Range(1e-30, 1)] = 1e-8  # AdamW: added to the denominator
    grad_clip: NonNegative = 1.0  # clip the norm of the gradient to this; 0 for no clipping
    max_bad_steps: Positive = 20  # stop after this many steps in a row with a loss or gradient that is not finite
    spike_threshold: NonNegative = 1.0  # roll back if the loss stays this far above its running median; 0 for never
    seed: Seed = 1337  # of weights, data order, dropout and samples
    shuffle: bool = True  # permute the windows of every epoch; --no_shuffle reads them in file order
    # evaluation and checkpoints; intervals in steps, 0 for never
    eval_interval: Count = 250  # compute the validation loss
    eval_steps: Count = 20  # validation batches, of total_batch_size tokens each; 0 for the whole split
    hellaswag_interval: Count = 1000  # compute the HellaSwag accuracy
    hellaswag_data: str = ""  # local .jsonl with the validation split of HellaSwag; downloaded once if empty
    sample_interval: Count = 1000  # generate a sample of text on the first rank, while the others wait
    sample_prompt: str = "Hello, I'm a language model,"  # the sample's prompt; empty for the start of a document
    sample_tokens: Count = 128  # tokens of the sample, at most
    checkpoint_interval: Count = 1000  # write a checkpoint, also after the last step
    keep_checkpoints: Count = 3  # keep this many of the newest, plus the one with the lowest validation loss; 0 for all
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matrix products; weights stay in fp32
    fp8: bool = False  # compute the output projection in FP8 while training; needs an Ada, Hopper or newer GPU
    compile: Literal["auto", "on", "off"] = "auto"  # use torch.compile; auto: on CUDA only
    shard: Literal["none", "optimizer", "full"] = "none"  # what to shard across ranks; see machine/sharding.py
    activation_checkpointing: bool = False  # recompute activations: less memory, a third more time
    threads: Count = 0  # CPU threads; 0 tries several numbers for a second and takes the fastest
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # tracker to report to, besides log.jsonl


RECIPES = {
    "gpt2": Config(),  # Radford et al. 2019 in size, Brown et al. 2020 (table 2.1) in hyperparameters
    "gpt2-medium": Config(n_layer=24, n_head=16, n_embd=1024, max_lr=3e-4, min_lr=3e-5),
    "gpt2-large": Config(n_layer=36, n_head=20, n_embd=1280, max_lr=2.5e-4, min_lr=2.5e-5),
    "gpt2-xl": Config(n_layer=48, n_head=25, n_embd=1600, max_lr=2e-4, min_lr=2e-5, total_batch_size=1_048_576,
                      max_steps=9_536, warmup_steps=358),
    # the same GPT-2 on half the tokens, with Muon for hidden matrices and a rate that falls to 0 from the warmup on;
    # `bench.py lab` ablates each of these choices (not yet tested at 124M)
    "speedrun": Config(optimizer="muon", lr_schedule="wsd", decay_fraction=1.0, max_steps=9_537, warmup_steps=256,
                       max_lr=3e-3, min_lr=0.0),
    # tuned by measurement for one to five minutes on 2 CPU cores
    "tiny": Config(
        data="input.txt", tokenizer="train", vocab_size=2048, n_layer=4, n_head=2, n_embd=128, sequence_length=128,
        total_batch_size=2048, max_steps=1200, warmup_steps=20, max_lr=3e-3, min_lr=0.0, weight_decay=0.15,
        lr_schedule="wsd", decay_fraction=0.4, optimizer="muon", eval_interval=200, eval_steps=0, hellaswag_interval=0,
        sample_interval=600, sample_prompt="", checkpoint_interval=600,
    ),
}  # fmt: skip

# docs/record.md: speedrun on the shards and the 10,485,760 tokens of validation that others publish their losses on
RECIPES["record"] = replace(RECIPES["speedrun"], data="fineweb10B", target_loss=3.28, hellaswag_interval=0)

# --resume refuses to change these: the model, the data order or the optimizer depends on them (docs/resume.md)
FIXED = ("n_layer", "n_head", "n_embd", "sequence_length", "vocab_size", "total_batch_size", "optimizer", "seed",
         "shuffle")  # fmt: skip
SIZES = ("n_layer", "n_head", "n_embd", "vocab_size")  # --init_from and --resume take these from the checkpoint


def main() -> None:
    requested, cli_overrides = read_command_line(sys.argv[1:])
    import_tracker(requested.report_to)  # fail now: a rank that fails later would keep the others waiting
    rt = Runtime.setup(requested.device, requested.dtype, requested.compile, requested.shard, requested.threads)
    directory = None if requested.dry_run else RunDirectory(requested, rt, FIXED)
    checkpoint = directory.checkpoint if directory else None
    config, shape = resolve_config(requested, cli_overrides, checkpoint, rt)
    if config.dry_run:
        return rt.print(plan(config, shape, rt))
    data = open_data(config, shape, rt)
    model = build_model(config, shape, checkpoint)
    rt.print(f"{config.out_dir}: {model.num_params():,} parameters on {rt.description}")
    forward = GPTWithLoss(model.to(rt.device))
    if not rt.mesh:
        forward = rt.wrap(forward)  # compiled, and in DDP
    if not config.micro_batch_size:
        rows, T = config.total_batch_size // config.sequence_length // rt.world_size, config.sequence_length
        config = replace(config, micro_batch_size=find_micro_batch_size(forward, rows, (T, config.vocab_size), rt))
    if rt.mesh:  # FSDP instead, compiled in parts; only now, as the trial needs the unsharded model
        model.summed_loss = rt.compiled(model.summed_loss)
        shard(forward, model.transformer.h, rt)
    optimizer = make_optimizer(model, config, rt)
    files = ModelFiles(model, data.tokenizer, rt.is_main, compare=config.max_steps >= 100)  # not in a quick test
    identity = dict(tokenizer=data.tokenizer.fingerprint, data=data.train.stream.digest())
    run = Run(directory, config, files, optimizer, identity, facts_of_run(config, model, data))
    say_what_is_read(config, data, rt)
    train(config, run, model, forward, optimizer, data)
    print_summary(config, run)


# ------------------------------------------------------------------------------------------------------ the loop


def train(config: Config, run: Run, model: GPT, forward: GPTWithLoss, optimizer: Optimizer, data: "Data") -> None:
    """Optimizer steps until `config.max_steps`. `forward` is the model's loss, perhaps compiled and distributed."""
    rt = run.rt
    n_tokens = torch.full((), config.total_batch_size, device=rt.device)
    n_windows = config.total_batch_size // config.sequence_length
    # endless, because after a loss spike a run reads more batches than it takes steps
    windows = training_batches(data.train, n_windows, run.data_step, sys.maxsize, config.micro_batch_size)
    with run, closing(prefetch(windows, rt.device)) as batches:
        evaluate_if_due(config, run, model, forward, data)  # evaluations that an interruption skipped
        for step, batch in run.steps(batches):
            # ┌──────────────────────────────────── one optimizer step ────────────────────────────────────┐
            lr = learning_rate(step, config)
            optimizer.set_lr(lr)

            # Gradients add up from one backward() to the next, and DDP averages them over the ranks. All micro-batches
            # have one size on all ranks, so the mean of their mean losses is the mean over all tokens of the batch.
            loss = torch.zeros((), device=rt.device)
            for i, windows in enumerate(batch):  # (B, T + 1) each
                idx, targets = to_inputs(windows)  # (B, T) each; targets are one token ahead
                rt.set_gradient_sync(forward, now=i == len(batch) - 1)
                with rt.autocast():
                    micro_loss = forward(idx, targets) / len(batch)
                optimizer.scale(micro_loss).backward()
                loss += micro_loss.detach()

            # a non-finite loss or gradient on any rank skips the step on every rank
            grad_norm = optimizer.clip_grad_norm(config.grad_clip)
            loss, grad_norm = rt.mean(torch.stack([loss, grad_norm]))
            optimizer.step(finite=(loss + grad_norm).isfinite())
            run.log_step(loss, grad_norm, lr, n_tokens)
            # └────────────────────────────────────────────────────────────────────────────────────────────┘

            if run.due(config.checkpoint_interval):  # first, so that it is on the disk before an evaluation can fail
                run.catch_up()  # wait for the figures of all steps and for the previous checkpoint
                run.save()
            evaluate_if_due(config, run, model, forward, data)


def evaluate_if_due(config: Config, run: Run, model: GPT, forward: GPTWithLoss, data: "Data") -> None:
    """The evaluations of this step that the log does not have yet."""
    rt = run.rt
    if run.due(config.eval_interval, "val"):
        run.catch_up()
        whole_loss = rt.compiled(GPTWithLoss(unsharded_copy(model))) if rt.mesh else forward
        run.record("val", **validate(whole_loss, validation_inputs(config, data, rt), data.token_bytes, rt))
    if config.target_loss and run.val_loss <= config.target_loss:
        run.end_here()
    if data.hellaswag and run.due(config.hellaswag_interval, "hellaswag"):
        run.catch_up()
        scores = hellaswag.evaluate(unsharded_copy(model), data.hellaswag, rt)
        run.record("hellaswag", **{name: scores[name] for name in hellaswag.LOGGED})
    if run.due(config.sample_interval, "sample"):
        run.catch_up()
        whole, prompt, seed = unsharded_copy(model), config.sample_prompt, config.seed + run.step
        if rt.is_main:  # the other ranks only help to gather a divided model
            texts = complete(whole, data.tokenizer, [prompt], config.sample_tokens, rt, seed, top_k=50)
            run.record("sample", text=prompt + texts[0])


# ------------------------------------------------------------------------------------------------- what it reads


class Data(NamedTuple):
    tokenizer: Tokenizer
    train: Batches  # the windows of the training split in their order
    val: TokenStream
    token_bytes: torch.Tensor  # (vocabulary,) bytes of text that each id encodes
    hellaswag: hellaswag.Task | None
    origin: tuple[dict, str]  # where the tokens come from


def open_data(config: Config, shape: GPTConfig, rt: Runtime) -> Data:
    """The shards of a directory, or of a .txt that is tokenized first. Raises UserError."""
    shards = Path(config.data)
    if config.data.endswith(".txt"):
        cache = Path(config.out_dir).parent / "cache"
        # one rank makes them, which may take long; the others wait for its file lock, as a collective would time out
        shards = prepare_text(config.data, config.tokenizer, config.vocab_size, cache)
    train_paths, val_paths = find_shards(str(shards), "train"), find_shards(str(shards), "val")
    tokenizer = data_tokenizer(shards, config.tokenizer)
    if "next" in read_manifest(shards if shards.is_dir() else shards.parent):
        rt.print(f"warning: {shards} is incomplete; training on what has been written so far", file=sys.stderr)
    if len(tokenizer) > config.vocab_size:
        enough = -(-len(tokenizer) // 128) * 128
        raise UserError(f"the tokenizer has {len(tokenizer)} tokens, more than --vocab_size; give {enough}")
    train, val = TokenStream(train_paths, config.vocab_size), TokenStream(val_paths, config.vocab_size)
    order = Batches(train, config.sequence_length, config.seed, config.shuffle, rt.rank, rt.world_size)
    task = None
    if config.hellaswag_interval:
        task = hellaswag.validation_task(config.hellaswag_data, tokenizer, shape, rt)
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(rt.device)
    return Data(tokenizer, order, val, token_bytes, task, origin(shards))


def validation_inputs(config: Config, data: Data, rt: Runtime) -> Iterator[tuple]:
    """(idx, targets) on the device, of the windows that this rank validates on."""
    limit = config.eval_steps * config.total_batch_size
    windows = validation_batches(
        data.val, config.sequence_length, config.micro_batch_size, limit, rt.rank, rt.world_size
    )
    return map(to_inputs, prefetch(windows, rt.device))


# ------------------------------------------------------------------------------------------------- before and after


def read_command_line(argv: list[str]) -> tuple[Config, set[str]]:
    """The recipe that the first word names, with the constants that the other words change, and the names of these."""
    recipe, args = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("gpt2", argv)
    if recipe not in RECIPES:
        raise UserError(f"{recipe} is not a recipe; they are {', '.join(RECIPES)}")
    prog = "train_gpt2.py " + recipe
    config = parse_args(Config, args, RECIPES[recipe], prog, f"{__doc__}\nRecipes: {', '.join(RECIPES)}.")
    return with_constants_of_run(replace(config, out_dir=config.out_dir or f"out/{recipe}"), args), flags_set(args)


def resolve_config(
    requested: Config, cli_overrides: set[str], checkpoint: Path | None, rt: Runtime
) -> tuple[Config, GPTConfig]:
    """Settle the constants that a person wrote; returns those of the run, and the shape of its model.

    A run that resumes or starts from a checkpoint takes its sizes. Only a micro_batch_size of 0 stays open, because
    finding one needs the model. Raises UserError.
    """
    source, sizes = str(checkpoint or requested.init_from), {name: getattr(requested, name) for name in SIZES}
    n_positions = requested.sequence_length
    if source:
        base = load_shape(source)
        n_positions, sizes = base.n_positions, {name: getattr(base, name) for name in SIZES}
        if requested.sequence_length > n_positions:
            raise UserError(f"{source} has a context of {n_positions} tokens; --sequence_length must not exceed it")
        for name, size in sizes.items():  # a size of the recipe gives way, one of the command line does not
            if name in cli_overrides and getattr(requested, name) != size:
                raise UserError(f"{source} has {name} {size}, not {getattr(requested, name)}; leave out --{name}")
    warmup = min(requested.warmup_steps, requested.max_steps)
    attention = choose_attention(requested.attention, rt, requested.sequence_length)
    threads = torch.get_num_threads() if rt.device.type == "cpu" else requested.threads
    config = replace(requested, **sizes, warmup_steps=warmup, attention=attention, threads=threads)
    validate_config(config, rt)
    return config, GPTConfig(n_positions=n_positions, **sizes, dropout=config.dropout, attention=attention)


def validate_config(config: Config, rt: Runtime) -> None:
    """Raise UserError for settled constants that contradict each other."""
    if config.n_embd % config.n_head:
        what = f"--n_embd {config.n_embd} is not divisible by --n_head {config.n_head}"
        raise UserError(f"{what}; every head gets n_embd / n_head channels")
    if config.min_lr > config.max_lr:
        raise UserError(f"--min_lr {config.min_lr} is above --max_lr {config.max_lr}; the schedule ends at min_lr")
    if config.target_loss and not config.eval_interval:
        raise UserError(f"--target_loss {config.target_loss} needs evaluations; give an --eval_interval above 0")
    if config.fp8:
        old = rt.device.type == "cuda" and (not rt.compile or torch.cuda.get_device_capability() < (8, 9))
        odd = config.n_embd % 16 or config.sequence_length % 16 or config.vocab_size % 16
        if rt.dtype != torch.bfloat16 or config.compile == "off" or old or odd or config.shard != "none":
            needs = "--dtype bfloat16, --shard none, torch.compile, a GPU of compute capability 8.9 or more"
            sizes = "a --n_embd, --sequence_length and --vocab_size that are multiples of 16"
            raise UserError(f"--fp8 needs {needs}, and {sizes}; this is {rt.description}")
    if rt.shard == "full" and rt.device.type == "cuda" and not config.micro_batch_size:
        raise UserError("--shard full needs a --micro_batch_size: a trial would take the memory of the whole model")
    unit = config.sequence_length * max(config.micro_batch_size, 1) * rt.world_size
    if config.total_batch_size % unit:
        nearest = max(config.total_batch_size // unit, 1) * unit
        rows = f"micro_batch_size {max(config.micro_batch_size, 1)} x {counted(rt.world_size, 'rank')}"
        factors = f"{unit} = sequence_length {config.sequence_length} x {rows}"
        raise UserError(f"--total_batch_size {config.total_batch_size} is not divisible by {factors}; {nearest} is")


def plan(config: Config, shape: GPTConfig, rt: Runtime) -> str:
    """Describe what a run will do and need, and write nothing. Plans for GPUs unless --device is cpu."""
    on_cpu, T, tokens = config.device == "cpu", config.sequence_length, config.max_steps * config.total_batch_size
    itemsize = rt.dtype.itemsize if on_cpu else 4 if config.dtype == "float32" else 2
    shape = replace(shape, attention=config.attention if on_cpu else "flash")  # not this machine's choice
    layout = Layout(
        T, shard=config.shard, optimizer=config.optimizer, itemsize=itemsize, device="cpu" if on_cpu else "cuda",
        checkpointing=config.activation_checkpointing,
    )  # fmt: skip
    lines = [
        f"model   {n_parameters(shape):,} parameters",
        f"steps   {config.max_steps:,} of {config.total_batch_size:,} tokens, {tokens:,} in all",
        f"data    {about_data(config)}",
        f"disk    {about_disk(config, checkpoint_bytes(shape, layout))}",
        f"memory  GB on each rank, {config.optimizer}, {8 * itemsize}-bit products, micro-batches of B sequences\n",
        *memory_table(shape, layout, config.total_batch_size // T, config.micro_batch_size),
        "\ntime    estimated from data sheets, not measured; without the gradient exchange between ranks\n",
        *time_table(shape, T, tokens, CARDS, config.price),
    ]
    if config.like:
        lines += ["", about_measured(config.like, token_flops(shape, T), tokens, config.price)]
    return "\n".join(lines)


def about_data(config: Config) -> str:
    """The training data and its tokenizer, or why they are unusable; of a .txt only the size: tokenizing is slow."""
    shards = Path(config.data)
    try:
        if config.data.endswith(".txt"):
            return f"{config.data}, {os.path.getsize(shards) / 1e6:,.1f} MB of text"
        n, vocab = len(TokenStream(find_shards(str(shards), "train"))), len(data_tokenizer(shards, config.tokenizer))
    except (UserError, OSError) as e:
        return f"unusable: {explain(e)}"
    passes = config.max_steps * config.total_batch_size / n
    return f"{config.data}, {n:,} training tokens, read {passes:.2g} times; a tokenizer of {vocab:,}"


def build_model(config: Config, shape: GPTConfig, checkpoint: Path | None) -> GPT:
    """Random weights, or those of the checkpoint to resume or start from. FP8 and recomputed activations change how
    they are trained, not what they are."""
    torch.manual_seed(config.seed)
    source = checkpoint or config.init_from
    model = load_model(str(source), shape.dropout, shape.attention) if source else GPT(shape)
    if config.fp8:
        model.head_matmuls = FP8_MATMULS
    if config.activation_checkpointing:
        checkpoint_activations(model.transformer.h)
    return model


def facts_of_run(config: Config, model: GPT, data: Data) -> dict:
    """What the log's first record holds besides the constants."""
    return dict(
        parameters=model.num_params(),
        flops_per_token=model.estimate_flops(config.sequence_length),
        uniform_loss=math.log(config.vocab_size),  # of a uniform guess; random weights start slightly above
        **provenance(*data.origin, config.init_from),
    )


def say_what_is_read(config: Config, data: Data, rt: Runtime) -> None:
    passes = config.max_steps * config.total_batch_size / config.sequence_length / data.train.n_windows
    rt.print(
        f"data: {len(data.train.stream):,} training tokens, read {passes:.2g} times; {len(data.val):,} to validate; "
        f"{config.total_batch_size // config.sequence_length} sequences a step, {config.micro_batch_size} at a time on "
        f"each of {counted(rt.world_size, 'rank')}"
    )


def print_summary(config: Config, run: Run) -> None:
    if not run.rt.is_main:
        return
    if val := [r for r in run.log.records if r["kind"] == "val" and None not in (r["loss"], r.get("bpb"))]:
        print(f"\nvalidation loss {val[-1]['loss']:.4f} nats per token, {val[-1]['bpb']:.4f} bits per byte")
        print(place_in_band(run.log.records), end="")
    rate, memory = run.log.median_rate(), run.rt.peak_memory() / 2**30
    print(f"{run.tokens:,} tokens in {run.step:,} steps, {rate:,.0f} tokens/s, {memory:.2f} GiB at the peak")
    guess = run.facts["uniform_loss"]
    if not run.log.last_loss() < guess + 1:  # random weights start slightly above a guess
        rates = f"--max_lr {config.max_lr}" + f" and --muon_lr {config.muon_lr}" * (config.optimizer == "muon")
        print(f"\nthe run diverged: guessing has a loss of {guess:.2f}; {rates} is most likely too high, try a tenth")
    elif run.step < config.max_steps:
        more = run.resume_command("--target_loss", "0")
        print(f"\n--target_loss {config.target_loss} is reached; to continue: {more}")
    if run.log.last_loss() < guess:
        newest = f"{config.out_dir}/step_{run.step:06d}"
        print(
            "\nNow try:\n"
            f"  python sample.py {config.out_dir} --num_samples 3    # more text\n"
            f"  {config.out_dir}/learning_curve.png    # the loss curve\n"
            f"  python bpe/try_tokenizer.py --tokenizer {newest} --svg tokens.svg    # the tokens that it reads"
        )


if __name__ == "__main__":
    script(main)
