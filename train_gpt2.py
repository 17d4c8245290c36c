"""Pretrain GPT-2: constants, then one loop that reads top to bottom.

    python train_gpt2.py tiny                                # a small GPT on input.txt, 1 to 5 minutes on 2 CPU cores
    python train_gpt2.py                                     # GPT-2 124M on FineWeb-Edu shards, one device
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # the same run on 8 GPUs
    python train_gpt2.py gpt2-medium --micro_batch_size 16   # another recipe, another constant
    python train_gpt2.py --resume                            # go on from the newest sound checkpoint
    python train_gpt2.py gpt2-xl --dry_run                   # what a run will do, and the memory that it needs

Writes OUT_DIR (out/RECIPE): config.json, log.jsonl, learning_curve.png, samples.txt, and checkpoints step_NNNNNN/ that
transformers opens as they are. Where each decision lives: corpus/order.py the order of tokens, model.py GPT-2,
learning/optim.py the schedule and the optimizers, run/directory.py the run directory, run/runtime.py the machine.
"""

import math
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch

import hellaswag
from bpe.tokenizer import Tokenizer
from cli import Count, NonNegative, Positive, Probability, Range, Seed, UserError, parse_args, script
from corpus.order import (
    Batches,
    TokenStream,
    find_shards,
    fingerprint,
    read_manifest,
    to_inputs,
    training_batches,
    validation_batches,
)
from corpus.shards import data_tokenizer, origin, prepare_text
from learning.evaluation import complete, validate
from learning.fp8 import FP8_PRODUCTS
from learning.memory import Layout, checkpoint_bytes, n_parameters, table
from learning.optim import Optimizer, learning_rate, make_optimizer
from model import GPT, GPTConfig, Loss
from run.card import provenance
from run.checkpoint import ModelFiles, load_model, load_shape, whole_model
from run.directory import Run, RunDirectory
from run.runtime import Runtime, prefetch
from run.sharding import shard
from run.trials import (
    checkpoint_activations,
    choose_attention,
    find_micro_batch_size,
)


@dataclass(frozen=True)
class Config:
    # where things are
    data: str = "edu_fineweb10B"  # directory of shards (see fineweb.py), or a .txt file
    tokenizer: str = "gpt2"  # gpt2, a tokenizer.json, or train: a BPE of vocab_size tokens, trained on the .txt
    out_dir: str = ""  # where the run is written; out/RECIPE when empty
    resume: bool = False  # go on from the newest sound checkpoint of out_dir, or start when there is none
    overwrite: bool = False  # replace the run that out_dir holds
    dry_run: bool = False  # say what the run will do and the memory that it needs, and stop
    init_from: str = ""  # checkpoint directory or hub id (gpt2) to start from instead of random weights
    # model
    n_layer: Annotated[int, Range(1, 1000)] = 12  # blocks
    n_head: Annotated[int, Range(1, 1000)] = 12  # attention heads a block
    n_embd: Annotated[int, Range(1, 65536)] = 768  # channels
    sequence_length: Annotated[int, Range(1, 2**20)] = 1024  # tokens of context
    vocab_size: Annotated[int, Range(1, 2**20)] = 50304  # 50257, padded to a multiple of 128 for the tensor cores
    dropout: Probability = 0.0  # 0 for one epoch of pretraining; 0.1 and more when data is scarce
    attention: Literal["auto", "flash", "naive"] = "auto"  # scaled_dot_product_attention, or the formula spelled out
    # batch and schedule
    total_batch_size: Annotated[int, Range(1, 2**28)] = 524_288  # tokens per optimizer step, over ranks and micro-steps
    micro_batch_size: Annotated[int, Range(0, 2**20)] = 0  # sequences per forward pass and rank; 0 finds what fits
    max_steps: Positive = 19_073  # optimizer steps: one epoch of 10B tokens
    target_loss: NonNegative = 0.0  # end at the first validation loss at or below this; 0 for never
    warmup_steps: Count = 715  # linear warmup: 375M tokens, as GPT-3
    max_lr: Annotated[float, Range(0, 100, above=True)] = 6e-4  # peak learning rate
    min_lr: Annotated[float, Range(0, 100)] = 6e-5  # where the schedule ends
    lr_schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, linear decay
    decay_fraction: Annotated[float, Range(0, 1, above=True)] = 0.5  # of the steps after warmup, in which wsd decays
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon for the blocks' matrices, AdamW for the rest
    muon_lr: Annotated[float, Range(0, 100, above=True)] = 0.02  # peak learning rate of Muon's matrices
    weight_decay: Annotated[float, Range(0, 100)] = 0.1  # on tensors of two or more dimensions
    beta1: Probability = 0.9  # AdamW
    beta2: Probability = 0.95  # AdamW
    eps: Annotated[float, Range(0, 1, above=True)] = 1e-8  # AdamW
    grad_clip: NonNegative = 1.0  # largest gradient norm; 0 for no clipping
    max_bad_steps: Positive = 20  # stop after this many steps in a row without a finite gradient
    spike_threshold: NonNegative = 1.0  # a loss so far above its running median goes back to a checkpoint; 0 for never
    seed: Seed = 1337  # of weights, data order and samples
    shuffle: bool = True  # permute the windows of every epoch; off is file order
    # along the way, in steps; 0 is never
    eval_interval: Count = 250  # validation loss
    eval_steps: Count = 20  # batches of validation, of total_batch_size tokens each; 0 for the whole split
    hellaswag_interval: Count = 1000  # HellaSwag accuracy
    hellaswag_data: str = ""  # a local copy of its validation split; downloaded once when empty
    sample_interval: Count = 250  # a sample of text
    sample_prompt: str = "Hello, I'm a language model,"  # what it starts with; empty for the start of a document
    sample_tokens: Annotated[int, Range(0, 100_000)] = 128  # its length
    checkpoint_interval: Count = 1000  # a checkpoint, at the last step too
    keep_checkpoints: Count = 3  # how many of the newest stay, besides the one of the lowest validation loss; 0 for all
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matrix products; weights stay fp32
    fp8: bool = False  # products in 8 bits while training, of the head and of wide blocks: Hopper, Ada and newer GPUs
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: on a GPU
    shard: Literal["none", "optimizer", "full"] = "none"  # what ranks divide: see run/sharding.py
    activation_checkpointing: bool = False  # recompute activations: memory for a third more time
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # besides log.jsonl


RECIPES = {
    "gpt2": Config(),  # Radford et al. 2019 in size, Brown et al. 2020 (table 2.1) in hyperparameters
    "gpt2-medium": Config(n_layer=24, n_head=16, n_embd=1024, max_lr=3e-4, min_lr=3e-5),
    "gpt2-large": Config(n_layer=36, n_head=20, n_embd=1280, max_lr=2.5e-4, min_lr=2.5e-5),
    "gpt2-xl": Config(n_layer=48, n_head=25, n_embd=1600, max_lr=2e-4, min_lr=2e-5, total_batch_size=1_048_576,
                      max_steps=9_536, warmup_steps=358),
    # GPT-2 unchanged, on half the tokens: Muon on hidden matrices, and a schedule that decays for half the steps;
    # `bench.py speedrun` undoes each of these choices (at 124M it is untested)
    "speedrun": Config(optimizer="muon", lr_schedule="wsd", max_steps=9_537, warmup_steps=256, max_lr=3e-3, min_lr=0.0),
    # chosen by measurement for one to five minutes on 2 CPU cores
    "tiny": Config(
        data="input.txt", tokenizer="train", vocab_size=2048, n_layer=4, n_head=2, n_embd=128, sequence_length=128,
        total_batch_size=2048, max_steps=1200, warmup_steps=20, max_lr=3e-3, min_lr=0.0, weight_decay=0.15,
        lr_schedule="wsd", decay_fraction=0.4, optimizer="muon", eval_interval=200, eval_steps=0, hellaswag_interval=0,
        sample_interval=600, sample_prompt="", checkpoint_interval=600,
    ),
}  # fmt: skip

# docs/record.md: speedrun on the shards and the 10,485,760 tokens of validation that others publish their losses on
RECIPES["record"] = replace(RECIPES["speedrun"], data="fineweb10B", target_loss=3.28, hellaswag_interval=0)

# what --resume does not change: the order of the data and the model depend on these (docs/resume.md has all constants)
FIXED = ("n_layer", "n_head", "n_embd", "sequence_length", "vocab_size", "total_batch_size", "optimizer", "seed",
         "shuffle")  # fmt: skip


def main() -> None:
    recipe, written = read_command_line(sys.argv[1:])
    rt = Runtime.setup(written.device, written.dtype, written.compile, written.shard)
    check(written, rt)
    if written.dry_run:
        return print_plan(written, model_shape(written, recipe, None, rt), rt)
    directory = RunDirectory(written, rt, FIXED)
    shape = model_shape(written, recipe, directory.checkpoint, rt)
    data = open_data(written, shape, rt)
    model = build_model(written, shape, directory.checkpoint)
    rt.print(f"{recipe}: {model.num_params():,} parameters on {rt.why}")
    prepare(model, written, rt)
    forward = Loss(model.to(rt.device))
    forward = forward if rt.mesh else rt.wrap(forward)  # FSDP hooks it below; otherwise compile it, wrap it in DDP
    config = settle(written, shape, forward, rt)  # from here on no constant changes
    if rt.mesh:
        shard(forward, model.transformer.h, rt)
    optimizer = make_optimizer(model, config, rt)
    identity = dict(tokenizer=data.tokenizer.fingerprint, data=fingerprint(data.train.stream))
    facts = dict(parameters=model.num_params(), flops_per_token=model.estimate_flops(config.sequence_length))
    facts |= dict(uniform_loss=math.log(config.vocab_size))  # of a uniform guess; random weights begin a little above
    facts |= provenance(*data.origin, config.init_from)
    run = Run(directory, config, ModelFiles(model, data.tokenizer, rt.is_main), optimizer, identity, facts)
    say_what_is_read(config, data, rt)
    say_what_is_decayed(optimizer, rt)
    train(config, run, model, forward, optimizer, data)
    finish(config, run, model, data.tokenizer)


# ------------------------------------------------------------------------------------------------------ the loop


def train(config: Config, run: Run, model: GPT, forward: torch.nn.Module, optimizer: Optimizer, data: "Data") -> None:
    """Optimizer steps until `config.max_steps`. `forward` is the model, compiled and distributed where that is on."""
    rt = run.rt
    n_tokens = torch.full((), config.total_batch_size, device=rt.device)
    with run, closing(prefetch(micro_batches_from(run.data_step, config, data), rt.device)) as batches:
        if run.val_loss is not None and run.val_loss <= config.target_loss:  # it had ended here
            run.end_here()
        evaluate(config, run, model, forward, data)  # what an interruption cut off
        for step, batch in run.steps(batches):
            batch = [to_inputs(windows) for windows in batch]  # (idx, targets), (B, T) each, targets one token later
            lr = learning_rate(step, config)
            optimizer.set_lr(lr)

            # Gradients add up from one backward() to the next, and DDP averages them over the ranks. All micro-batches
            # have one size on all ranks, so the mean of their mean losses is the mean over all tokens of the batch.
            loss = torch.zeros((), device=rt.device)
            for i, (idx, targets) in enumerate(batch):
                rt.exchange_gradients(forward, now=i == len(batch) - 1)
                with rt.autocast():
                    micro_loss = forward(idx, targets) / len(batch)
                optimizer.scale(micro_loss).backward()
                loss += micro_loss.detach()

            # a number that is not finite, on any rank, changes no weight on any rank
            grad_norm = optimizer.clip_grad_norm(config.grad_clip)
            loss, grad_norm = rt.mean(torch.stack([loss, grad_norm]))
            optimizer.step(finite=(loss + grad_norm).isfinite())
            run.log_step(loss, grad_norm, lr, n_tokens)

            # the checkpoint first: it is on the disk before an evaluation can fail
            if run.due(config.checkpoint_interval):
                run.catch_up()
                run.save()
            evaluate(config, run, model, forward, data)


def evaluate(config: Config, run: Run, model: GPT, forward: torch.nn.Module, data: "Data") -> None:
    """What is due at this step, if the log does not have it already."""
    rt = run.rt
    if run.due(config.eval_interval, "val"):
        run.catch_up()
        inputs = validation_inputs(config, data, rt)
        val = validate(Loss(whole_model(model)) if rt.mesh else forward, inputs, data.token_bytes, rt)
        if val["loss"] <= config.target_loss:
            run.end_here()
        run.record("val", **val)
    if data.hellaswag and run.due(config.hellaswag_interval, "hellaswag"):
        run.catch_up()
        scores = hellaswag.evaluate(whole_model(model), data.hellaswag, rt)
        run.record("hellaswag", **{name: scores[name] for name in ("acc", "acc_norm", "acc_norm_stderr", "n")})
    if run.due(config.sample_interval, "sample"):
        run.catch_up()
        for text in sample(model, data.tokenizer, config, rt, seed=run.step):
            run.record("sample", text=text)


# ------------------------------------------------------------------------------------------------- what it reads


class Data(NamedTuple):
    tokenizer: Tokenizer
    train: Batches  # the windows of the training split in their order
    val: TokenStream
    token_bytes: torch.Tensor  # (vocabulary,) bytes of text that each id stands for
    hellaswag: hellaswag.Task | None
    origin: tuple[dict, str]  # where the tokens come from


def open_data(config: Config, shape: GPTConfig, rt: Runtime) -> Data:
    """The shards of a directory, or of a .txt that is tokenized first. Raises UserError."""
    shards = Path(config.data)
    if config.data.endswith(".txt"):
        cache = Path(config.out_dir).parent / "cache"
        shards = Path(rt.on_main(lambda: str(prepare_text(config.data, config.tokenizer, config.vocab_size, cache))))
    train_paths, val_paths = find_shards(str(shards), "train"), find_shards(str(shards), "val")
    tokenizer = data_tokenizer(shards, config.tokenizer)
    if "next" in read_manifest(shards if shards.is_dir() else shards.parent):
        rt.print(f"warning: {shards} is not complete: this trains on what is there by now", file=sys.stderr)
    if len(tokenizer) > shape.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, but vocab_size is {shape.vocab_size}; "
            f"use --vocab_size {-(-len(tokenizer) // 128) * 128}"
        )
    task = None
    if config.hellaswag_interval:
        task = hellaswag.validation_task(config.hellaswag_data, tokenizer, shape, rt)
    train, val = TokenStream(train_paths, shape.vocab_size), TokenStream(val_paths, shape.vocab_size)
    order = Batches(train, config.sequence_length, config.seed, config.shuffle, rt.rank, rt.world_size)
    return Data(tokenizer, order, val, torch.from_numpy(tokenizer.token_bytes()).to(rt.device), task, origin(shards))


def micro_batches_from(data_step: int, config: Config, data: Data) -> Iterator[list]:
    """This rank's micro-batches of each step, without end: a spike makes a run read more steps than it takes."""
    batch_size = config.total_batch_size // config.sequence_length  # in windows
    steps = training_batches(data.train, batch_size, data_step, sys.maxsize, config.micro_batch_size)
    return steps


def validation_inputs(config: Config, data: Data, rt: Runtime) -> Iterator[tuple]:
    """(idx, targets) on the device, of the windows that this rank validates on."""
    limit = config.eval_steps * config.total_batch_size
    windows = validation_batches(
        data.val, config.sequence_length, config.micro_batch_size, limit, rt.rank, rt.world_size
    )
    return map(to_inputs, prefetch(windows, rt.device))


def say_what_is_read(config: Config, data: Data, rt: Runtime) -> None:
    passes = config.max_steps * config.total_batch_size / config.sequence_length / data.train.n_windows
    rt.print(
        f"data: {len(data.train.stream):,} training tokens, read {passes:.2g} times; {len(data.val):,} to validate; "
        f"{config.total_batch_size // config.sequence_length} sequences a step, {config.micro_batch_size} at a time on "
        f"each of {rt.world_size} ranks"
    )


def say_what_is_decayed(optimizer: Optimizer, rt: Runtime) -> None:
    found = {True: [], False: []}
    for group in optimizer.param_groups():
        found[group["weight_decay"] > 0] += [p.numel() for p in group["params"]]
    decayed, not_decayed = (f"{len(sizes)} tensors with {sum(sizes):,} parameters" for sizes in found.values())
    rt.print(f"weight decay: {decayed}; none: {not_decayed}")


# ------------------------------------------------------------------------------------------------- before and after


def read_command_line(argv: list[str]) -> tuple[str, Config]:
    """The recipe, by its name in the first word, with the constants that the other words change."""
    recipe, args = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("gpt2", argv)
    if recipe not in RECIPES:
        raise UserError(f"there is no recipe {recipe}; the recipes are {', '.join(RECIPES)}")
    prog = "train_gpt2.py " + recipe
    config = parse_args(Config, args, RECIPES[recipe], prog, f"{__doc__}\nRecipes: {', '.join(RECIPES)}.")
    return recipe, replace(config, out_dir=config.out_dir or f"out/{recipe}")


def check(config: Config, rt: Runtime) -> None:
    """Refuse constants that do not go together, before anything is touched. Raises UserError."""
    if config.n_embd % config.n_head:
        raise UserError(
            f"--n_embd {config.n_embd} is not divisible by --n_head {config.n_head}; heads share the channels"
        )
    if config.min_lr > config.max_lr:
        raise UserError(f"--min_lr {config.min_lr} is above --max_lr {config.max_lr}; the schedule ends at min_lr")
    if config.fp8:
        if rt.dtype != torch.bfloat16 or (rt.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9)):
            raise UserError(f"--fp8 needs bfloat16 and a GPU of compute capability 8.9 or more; this is {rt.why}")
        if config.compile == "off" or (rt.device.type == "cuda" and not rt.compile):
            raise UserError(f"--fp8 needs torch.compile, or rounding costs more than it gains; this is {rt.why}")
        if config.shard != "none":
            raise UserError(f"--fp8 has not been tried with --shard {config.shard}; give one of them")
        for name in ("n_embd", "sequence_length", "vocab_size"):
            if getattr(config, name) % 16:
                raise UserError(f"--fp8 needs a --{name} that is a multiple of 16, not {getattr(config, name)}")
    unit = config.sequence_length * max(config.micro_batch_size, 1) * rt.world_size
    if config.total_batch_size % unit:
        nearest = max(config.total_batch_size // unit, 1) * unit
        raise UserError(
            f"--total_batch_size {config.total_batch_size} is not divisible by {unit} = sequence_length "
            f"{config.sequence_length} x micro_batch_size {max(config.micro_batch_size, 1)} x {rt.world_size} ranks; "
            f"{nearest} is"
        )


def print_plan(config: Config, shape: GPTConfig, rt: Runtime) -> None:
    """What a run will do, and what it needs; nothing is written. It is about GPUs unless --device cpu is given."""
    itemsize = rt.dtype.itemsize if config.device == "cpu" else 4 if config.dtype == "float32" else 2
    device = "cpu" if config.device == "cpu" else "cuda"
    one_rank = Layout(config.sequence_length, optimizer=config.optimizer, itemsize=itemsize, device=device)
    if config.device != "cpu" and config.attention == "auto":  # whatever was chosen for the machine at hand
        shape = replace(shape, attention="flash")
    n_saved = -(-config.max_steps // config.checkpoint_interval) if config.checkpoint_interval else 0
    n_kept = min(n_saved, config.keep_checkpoints + 2) if config.keep_checkpoints else n_saved  # best, one on its way
    gb = checkpoint_bytes(shape, one_rank) / 1e9
    free = shutil.disk_usage(next(path for path in Path(config.out_dir).resolve().parents if path.exists())).free / 1e9
    tokens = f"{config.total_batch_size:,} tokens, {config.max_steps * config.total_batch_size:,} in all"
    rt.print(f"model   {n_parameters(shape):,} parameters")
    rt.print(f"steps   {config.max_steps:,} of {tokens}")
    rt.print(
        f"disk    {n_saved:,} checkpoints of {gb:.2f} GB, {n_kept} at once: {n_kept * gb:.1f} of {free:.1f} GB free"
    )
    rt.print(
        f"memory  GB on each rank, {config.optimizer}, {8 * itemsize}-bit products, micro-batches of B (memory.py)\n"
    )
    rt.print("\n".join(table(shape, one_rank)))


def model_shape(config: Config, recipe: str, checkpoint: Path | None, rt: Runtime) -> GPTConfig:
    """The model's sizes: those of the checkpoint to resume or start from, else the constants. Raises UserError."""
    sizes = ("n_layer", "n_head", "n_embd", "vocab_size")
    attention = choose_attention(config.attention, rt, config.sequence_length)
    source = str(checkpoint or config.init_from)
    if not source:
        shape = GPTConfig(n_positions=config.sequence_length, **{name: getattr(config, name) for name in sizes})
        return replace(shape, dropout=config.dropout, attention=attention)
    shape = load_shape(source)
    if config.sequence_length > shape.n_positions:
        raise UserError(f"{source} has a context of {shape.n_positions} tokens; --sequence_length must not exceed it")
    for name in sizes:  # a size that somebody chose, other than by choosing the recipe, has to be the checkpoint's
        if getattr(config, name) not in (getattr(shape, name), getattr(RECIPES[recipe], name)):
            raise UserError(f"{source} has {name} {getattr(shape, name)}, not {getattr(config, name)}; leave it out")
    return replace(shape, dropout=config.dropout, attention=attention)


def build_model(config: Config, shape: GPTConfig, checkpoint: Path | None) -> GPT:
    """Random weights, or those of the checkpoint to resume or start from."""
    torch.manual_seed(config.seed)
    source = checkpoint or config.init_from
    return load_model(str(source), shape.dropout, shape.attention) if source else GPT(shape)


def prepare(model: GPT, config: Config, rt: Runtime) -> None:
    """FP8, recomputed activations: the same model, faster or smaller; FP8 also rounds more."""
    if config.fp8:
        model.head_products = FP8_PRODUCTS
    if config.activation_checkpointing:
        checkpoint_activations(model.transformer.h)


def settle(config: Config, shape: GPTConfig, forward: torch.nn.Module, rt: Runtime) -> Config:
    """The constants that run, from those that a person wrote: sizes of a checkpoint, and the micro-batch that fits."""
    sizes = {name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    warmup = min(config.warmup_steps, config.max_steps)
    if warmup < config.warmup_steps:
        rt.print(f"note: --warmup_steps {config.warmup_steps} is cut to --max_steps {config.max_steps}")
    config = replace(config, **sizes, warmup_steps=warmup)
    if config.micro_batch_size:
        return config
    rows = config.total_batch_size // config.sequence_length // rt.world_size
    fitting = [n for n in range(1, min(rows, 256) + 1) if rows % n == 0]
    if rt.shard == "full" and rt.device.type == "cuda":  # a trial would need the memory of the undivided model
        raise UserError("--shard full needs a --micro_batch_size; --dry_run says what fits")
    trained, forward = (config.sequence_length, config.vocab_size), forward.to(rt.device)
    size = find_micro_batch_size(forward, fitting, trained, rt, rt.n_shards)
    return replace(config, micro_batch_size=size)


def sample(model: GPT, tokenizer: Tokenizer, config: Config, rt: Runtime, seed: int, num_samples: int = 1) -> list[str]:
    """Texts on the first rank, none on the others, which only help to gather a model that is divided."""
    prompts = [config.sample_prompt] * num_samples
    model = whole_model(model)
    if not rt.is_main:
        return []
    texts = complete(model, tokenizer, prompts, config.sample_tokens, rt, config.seed + seed, top_k=50)
    return [config.sample_prompt + text for text in texts]


def finish(config: Config, run: Run, model: GPT, tokenizer: Tokenizer) -> None:
    """What was reached, three more samples, and where to go from here."""
    if run.step > run.first_step and config.sample_interval:
        for text in sample(model, tokenizer, config, run.rt, config.max_steps + 1, num_samples=3):
            run.record("sample", text=text)
    if not run.rt.is_main:
        return
    if val := [r for r in run.log.records if r["kind"] == "val" and None not in (r["loss"], r["bpb"])]:
        print(f"\nvalidation loss {val[-1]['loss']:.4f} nats per token, {val[-1]['bpb']:.4f} bits per byte")
    memory = run.rt.peak_memory() / 2**30
    rate = run.log.median_rate()
    print(f"{run.tokens:,} tokens in {run.step:,} steps, {rate:,.0f} tokens/s, {memory:.2f} GiB at the peak")
    given = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    steps = [i for i, word in enumerate(given) if word in ("--max_steps", "--max-steps")]
    words = [word for i, word in enumerate(given) if i not in steps and i - 1 not in steps]
    print(
        "\nNow try:\n"
        f"  python sample.py {config.out_dir} --num_samples 3    # more text\n"
        f"  {config.out_dir}/learning_curve.png    # how it went\n"
        f"  python train_gpt2.py {shlex.join(words)} --resume --max_steps {2 * config.max_steps}    # train on\n"
        "  python bpe/train.py && python bpe/try_tokenizer.py    # what it reads instead of letters"
    )


if __name__ == "__main__":
    script(main)
