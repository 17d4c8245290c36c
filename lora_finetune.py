"""Finetune GPT-2 on instructions: LoRA (Hu et al. 2021), or all weights. Constants, then the loop, then what it reads.

    python lora_finetune.py --base gpt2 --lora_dim 8            # adapters of rank 8, on Alpaca
    python lora_finetune.py --base out/tiny --data rows.json    # a checkpoint of ours, another file of rows
    python lora_finetune.py --base gpt2 --lora_dim 0            # all weights, for comparison
    python lora_finetune.py --base gpt2 --adapter out/lora/adapter --merge out/merged   # one plain model of both

A row is a conversation, and the loss counts its answers:

    BEGINNING OF CONVERSATION: USER: Add 1 and 2. ASSISTANT:3<|endoftext|>
    ─────────────────── read ──────────────────────────────┘└── learned ──┘

Writes OUT_DIR (out/lora): config.json, log.jsonl, learning_curve.png, samples.txt, checkpoints step_NNNNNN/, and at the
end adapter/, which peft opens. Tokens in the log are answer tokens. finetuning/lora.py explains the method.
"""

import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch

import cli
from bpe.tokenizer import Tokenizer
from cli import Count, NonNegative, Positive, Probability, Range, Seed, UserError
from finetuning import lora
from finetuning.chat import check_tokenizer, prompt_of, save_chat_files
from finetuning.lora import TARGETS, AdapterFiles, LoRAConfig
from finetuning.rows import Example, encode_rows, global_batch, load_rows, micro_batches, on_hub, split_rows
from learning.evaluation import complete, validate
from learning.optim import Optimizer, learning_rate, make_optimizer
from model import GPT, GPTConfig, Loss
from run import card
from run.checkpoint import ModelFiles, checkpoint_steps, find_model, load_model, load_shape, model_tokenizer, save_model
from run.curves import read_log
from run.directory import Run, RunDirectory, with_constants_of_run
from run.log import import_tracker
from run.runtime import Runtime, prefetch, ranks_of_environment
from run.trials import checkpoint_activations, choose_attention, find_micro_batch_size

# How many padded tokens cost as much as one more micro-batch, which reads all weights again (what counts on a CPU)
# and launches all kernels again (what counts on a GPU).
MICRO_BATCH_COST = {"cpu": 64, "cuda": 4096}


@dataclass(frozen=True)
class Config:
    # where things are
    base: str = "gpt2"  # what to finetune: checkpoint directory, run directory or hub id
    data: str = "tatsu-lab/alpaca"  # a hub dataset, or .json or .jsonl: instruction, input, output, or messages
    out_dir: str = ""  # where the run is written; out/lora when empty
    resume: bool = False  # continue from the newest intact checkpoint of out_dir, or start if there is none
    overwrite: bool = False  # rename the run in out_dir, or the directory of --merge, to the next free DIR.1
    adapter: str = ""  # adapter to start from, ours or peft's; it decides rank, alpha, scaling and targets
    merge: str = ""  # write base and adapter as one plain model here: after training, or at once with --adapter
    # adapter
    lora_dim: Count = 8  # rank r of the bypasses; 0 trains all weights instead
    lora_alpha: NonNegative = 0.0  # the bypass is scaled by alpha / r; 0 for 2 r
    lora_dropout: Probability = 0.0  # on the input of the bypasses
    targets: tuple[str, ...] = TARGETS  # projections that get a bypass
    rslora: bool = False  # scale by alpha / sqrt(r) (Kalajdzievski 2023)
    # data
    sequence_length: Count = 0  # longest example in tokens; 0 for the base's context
    val_rows: Count = 1000  # rows to hold out for validation, chosen by the seed; at most a tenth of all
    # batch and schedule
    batch_size: Positive = 32  # examples per optimizer step, over all ranks and micro-steps
    micro_batch_size: Count = 0  # full-length examples per forward pass; 0 finds the largest that fits
    epochs: NonNegative = 3.0  # passes over the training rows
    max_steps: Count = 0  # optimizer steps; 0 for as many as the epochs need
    warmup_steps: Count = 0  # linear warmup; 0 for 3% of the steps
    max_lr: NonNegative = 0.0  # peak learning rate; 0 for 1e-3 with LoRA, 1e-4 for all weights
    min_lr: NonNegative = 0.0  # where the schedule ends
    lr_schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, linear decay
    decay_fraction: Annotated[float, Range(1e-6, 1)] = 0.5  # of the steps after warmup, over which wsd decays
    # optimizer
    weight_decay: NonNegative = 0.01  # AdamW, on tensors of two dimensions
    beta1: Probability = 0.9  # AdamW
    beta2: Probability = 0.999  # AdamW
    eps: NonNegative = 1e-8  # AdamW
    grad_clip: NonNegative = 1.0  # largest gradient norm; 0 for no clipping
    max_bad_steps: Positive = 20  # stop after this many steps in a row without a finite gradient
    spike_threshold: NonNegative = 2.0  # roll back when the loss exceeds its running median by this much; 0 for never
    dropout: Probability = 0.0  # of the base, on embeddings, attention and residual branches
    seed: Seed = 1337  # of the adapter, the split, the data order and the samples
    # along the way, in steps; 0 is never
    eval_interval: int = -1  # validation loss; -1 for ten times in all
    sample_interval: Count = 0  # an answer to sample_prompt
    sample_prompt: str = "Give three tips for a good meal."  # what is asked
    sample_tokens: Count = 128  # the longest answer
    checkpoint_interval: Count = 500  # a checkpoint; there is one at the last step, too
    keep_checkpoints: Count = 2  # keep this many of the newest, plus the one with the lowest validation loss; 0 for all
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matrix products; trained weights stay fp32
    compile: Literal["auto", "on", "off"] = "off"  # torch.compile, with dynamic shapes: examples differ in length
    activation_checkpointing: bool = False  # recompute activations: saves memory, takes a third more time
    threads: Count = 0  # of a CPU; 0 for the fastest number, which is tried at the start
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # besides log.jsonl


# what --resume does not change: the model and the order of the data depend on these (docs/lora.md has all constants)
FIXED = ("adapter", "lora_dim", "lora_alpha", "targets", "rslora", "sequence_length", "val_rows", "batch_size", "seed")


def main() -> None:
    written = cli.parse_args(Config, description=__doc__)
    written = with_constants_of_run(replace(written, out_dir=written.out_dir or "out/lora"), sys.argv[1:])
    refuse_bad_constants(written)
    if written.merge and written.adapter:
        write_merged(written, written.adapter)
    else:
        finetune(written)


def finetune(written: Config) -> None:
    """A whole run, from the constants as a person wrote them."""
    import_tracker(written.report_to)  # now, as a rank that ends later keeps the others waiting
    rt = Runtime.setup(written.device, written.dtype, written.compile, threads=written.threads)
    directory = RunDirectory(written, rt, FIXED)
    data = open_data(written, load_shape(written.base), rt)
    # from here on no constant changes, except for a micro-batch that has to be tried
    config = settle(written, directory.checkpoint, data, rt)
    base = load_model(config.base, config.dropout, choose_attention("auto", rt, config.sequence_length))
    identity = dict(base=lora.weights_sha256(base), tokenizer=data.tokenizer.fingerprint, data=data.sha256)
    facts = facts_of_run(config, base, data)
    trainable, fraction = lora.trainable_parameters(base, config.targets, config.lora_dim)
    rt.print(f"{config.base}: {base.num_params():,} parameters on {rt.why}; training {trainable:,} ({fraction:.3%})")

    model = adapt(base, config, directory.checkpoint)
    if config.lora_dim and rt.dtype != torch.float32:
        lora.cast_frozen(model, rt.dtype)
    if config.activation_checkpointing:
        checkpoint_activations(model.transformer.h)
    forward = rt.wrap(Loss(model.to(rt.device)), dynamic=True)
    if not config.micro_batch_size:
        rows, trained = config.batch_size // rt.world_size, (config.sequence_length, len(data.tokenizer))
        config = replace(config, micro_batch_size=find_micro_batch_size(forward, rows, trained, rt))
    optimizer = make_optimizer(model, config, rt)
    files = ModelFiles(model, data.tokenizer)
    if config.lora_dim:
        files = AdapterFiles(model, config.base, identity["base"])
    files = ChatFiles(files, data.tokenizer)
    run = Run(directory, config, files, optimizer, identity, facts)
    train(config, run, model, forward, optimizer, data)
    if not rt.is_main:
        return
    if config.lora_dim:
        write, write_card = files.copy(), run.log.card()
        cli.write_atomically(run.out_dir / "adapter", lambda path: [write(path), write_card(path)])
    if config.merge:
        write_merged(config, str(run.out_dir / "adapter"))
    say_what_was_reached(config, run)


# ------------------------------------------------------------------------------------------------------ the loop


def train(config: Config, run: Run, model: GPT, forward: Loss, optimizer: Optimizer, data: "Data") -> None:
    """Optimizer steps until `config.max_steps`. `forward` is the model's loss, perhaps compiled and distributed."""
    rt = run.rt
    with run, closing(prefetch(micro_batches_from(run.data_step, config, data, rt), rt.device)) as batches:
        evaluate_if_due(config, run, model, forward, data)  # the base, or evaluations that an interruption skipped
        for step, batch in run.steps(batches):
            # ┌──────────────────────────────────── one optimizer step ────────────────────────────────────┐
            lr = learning_rate(step, config)
            optimizer.set_lr(lr)

            # Every answer token of the global batch has the same weight, whatever its row, its micro-batch and its
            # rank, so a row with a long answer counts for more. Each micro-batch's loss is its sum over targets divided
            # by n_targets / world_size. Added up on a rank and averaged over ranks, as DDP does with gradients, that is
            # the sum over all targets divided by n_targets: the loss of the whole batch.
            n_targets = rt.sum(sum((targets >= 0).sum() for _, targets, _ in batch))
            loss = torch.zeros((), device=rt.device)
            for i, (idx, targets, places) in enumerate(batch):
                rt.exchange_gradients(forward, now=i == len(batch) - 1)
                with rt.autocast():
                    micro_loss = forward(idx, targets, places, n_targets=n_targets / rt.world_size)
                optimizer.scale(micro_loss).backward()  # adds to the gradients of the earlier micro-batches
                loss += micro_loss.detach()

            # a number that is not finite, on any rank, changes no weight on any rank
            grad_norm = optimizer.clip_grad_norm(config.grad_clip)
            loss, grad_norm = rt.mean(torch.stack([loss, grad_norm]))
            optimizer.step(finite=(loss + grad_norm).isfinite())
            run.log_step(loss, grad_norm, lr, n_targets)
            # └────────────────────────────────────────────────────────────────────────────────────────────┘

            if run.due(config.checkpoint_interval):  # first: it is on the disk before an evaluation can fail
                run.catch_up()
                run.save()
            evaluate_if_due(config, run, model, forward, data)


def evaluate_if_due(config: Config, run: Run, model: GPT, forward: Loss, data: "Data") -> None:
    """What is due at this step, unless the log has it already."""
    rt = run.rt
    of_base = run.step == 0 and config.eval_interval > 0
    if data.val and (of_base or run.due(config.eval_interval, "val")):
        run.catch_up()
        run.record("val", **validate(forward, validation_inputs(config, data, rt), data.token_bytes, rt))
    if run.due(config.sample_interval, "sample"):
        run.catch_up()
        if rt.is_main:
            prompt, seed = prompt_of(config.sample_prompt, data.tokenizer), config.seed + run.step
            answers = complete(model, data.tokenizer, [prompt], config.sample_tokens, rt, seed, top_k=50)
            run.record("sample", text=prompt + answers[0])


# --------------------------------------------------------------------------------------------------------------- rows


class Data(NamedTuple):
    tokenizer: Tokenizer
    train: list[Example]
    val: list[Example]
    sequence_length: int  # of the longest example that is possible
    sha256: str  # of the rows
    token_bytes: torch.Tensor  # (vocabulary,) bytes of text of each id


def open_data(config: Config, shape: GPTConfig, rt: Runtime) -> Data:
    """The rows as examples. Raises UserError."""
    tokenizer, T = model_tokenizer(config.base), config.sequence_length or shape.n_positions
    check_tokenizer(tokenizer, config.base)
    if T > shape.n_positions:
        has = f"{config.base} has a context of {shape.n_positions} tokens, less than --sequence_length {T}"
        raise UserError(f"{has}; give {shape.n_positions} or less")
    if rt.world_size > 1:  # the other ranks then find a dataset of the hub in the cache
        rt.on_main(lambda: len(load_rows(config.data)))
    rows = load_rows(config.data)
    parts = split_rows(rows, config.val_rows, config.seed)
    (train_set, counts), (val_set, more) = (encode_rows(part, tokenizer, T) for part in parts)
    if not train_set:
        raise UserError(f"{config.data} has {len(rows)} rows, none with an instruction and an answer to train on")
    counts = {name: n + more[name] for name, n in counts.items()}
    about = f"data: {len(rows):,} rows: {len(train_set):,} examples to train on, {len(val_set):,} to validate"
    about += f"; {counts['empty']:,} empty rows skipped" * (counts["empty"] > 0)
    about += f"; {counts['long']:,} rows longer than {T} tokens read in overlapping windows" * (counts["long"] > 0)
    rt.print(about)
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(rt.device)
    sha256 = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return Data(tokenizer, train_set, val_set, T, sha256, token_bytes)


def cut(examples: list[Example], config: Config, rt: Runtime) -> list[tuple]:
    """This rank's micro-batches of some examples."""
    limit = config.sequence_length * config.micro_batch_size  # tokens
    return micro_batches(examples, limit, MICRO_BATCH_COST.get(rt.device.type, 1024), rt.rank, rt.world_size)


def micro_batches_from(data_step: int, config: Config, data: Data, rt: Runtime) -> Iterator[list]:
    """This rank's micro-batches of each step, without end: after a spike a run reads more steps than it takes."""
    for step in itertools.count(data_step):
        yield cut(global_batch(data.train, step, config.batch_size, config.seed), config, rt)


def validation_inputs(config: Config, data: Data, rt: Runtime) -> Iterator[tuple]:
    """What the loss takes, on the device, for this rank's validation rows."""
    return prefetch(iter(cut(data.val, config, rt)), rt.device)


# ----------------------------------------------------------------------------------------------------------- constants


def refuse_bad_constants(config: Config) -> None:
    """Raises UserError for constants that contradict each other, before anything is touched."""
    if config.batch_size < (ranks := ranks_of_environment()[1]):
        raise UserError(f"--batch_size {config.batch_size} is less than one example for each of {ranks} ranks")
    if not config.lora_dim and (config.adapter or config.merge):
        raise UserError("--lora_dim 0 trains all weights and no adapter; leave out --adapter and --merge")
    if config.max_lr and config.min_lr > config.max_lr:
        raise UserError(f"--min_lr {config.min_lr} is above --max_lr {config.max_lr}; the schedule ends at min_lr")
    if config.merge:
        out, read = Path(config.merge), (config.base, config.adapter, config.out_dir)
        if out.resolve() in {Path(path).resolve() for path in read if path}:
            raise UserError(f"--merge {out} is one of the directories that it reads; choose another one")
        if out.exists() and not config.overwrite:
            raise UserError(f"--merge {out} already exists; pass --overwrite to rename it, or choose another name")


def settle(written: Config, checkpoint: Path | None, data: Data, rt: Runtime) -> Config:
    """Turn the constants that a person wrote into those that run: what follows from base, adapter and rows."""
    if checkpoint and not (checkpoint / "adapter_config.json").exists():
        adapter = dict(lora_dim=0)
    elif source := checkpoint or written.adapter:
        found = lora.read_adapter(source).config
        adapter = dict(lora_dim=found.r, lora_alpha=found.alpha, targets=found.targets, rslora=found.rslora)
    else:
        adapter = dict(lora_dim=written.lora_dim, lora_alpha=written.lora_alpha or 2.0 * written.lora_dim)
    max_steps = written.max_steps or max(round(written.epochs * len(data.train) / written.batch_size), 1)
    return replace(
        written,
        **adapter,
        base=rt.on_main(lambda: find_model(written.base)),  # of a run its newest checkpoint, once for all ranks
        sequence_length=data.sequence_length,
        max_steps=max_steps,
        warmup_steps=min(written.warmup_steps or math.ceil(0.03 * max_steps), max_steps),
        eval_interval=max(max_steps // 10, 1) if written.eval_interval < 0 else written.eval_interval,
        max_lr=written.max_lr or (1e-3 if adapter["lora_dim"] else 1e-4),
        threads=torch.get_num_threads() if rt.device.type == "cpu" else written.threads,
    )


# ------------------------------------------------------------------------------------------------------------ the model


def adapt(base: GPT, config: Config, checkpoint: Path | None) -> GPT:
    """The model to train: the base with a new or a loaded adapter, or all weights, of the base or of a checkpoint."""
    if not config.lora_dim:
        return load_model(str(checkpoint), config.dropout, base.config.attention) if checkpoint else base
    if source := checkpoint or config.adapter:
        return lora.load_adapter(base, source, config.lora_dropout)
    torch.manual_seed(config.seed)
    new = LoRAConfig(config.lora_dim, config.lora_alpha, config.lora_dropout, config.targets, config.rslora)
    return lora.add_lora(base, new)


def facts_of_run(config: Config, base: GPT, data: Data) -> dict:
    """What the first line of the log says about base and data, and FLOPs per answer token for MFU.

    The latter are counted as in `GPT.estimate_flops`, except that blocks run on prompts, too, the head runs on answers
    only, and a frozen weight has no gradient (4 operations instead of 6).
    """
    c, per_weight = base.config, 4 if config.lora_dim else 6
    tokens, squares = (sum(len(example.idx) ** power for example in data.train) for power in (1, 2))
    answers = sum(int((example.targets >= 0).sum()) for example in data.train)
    blocks = per_weight * sum(p.numel() for p in base.transformer.h.parameters())
    flops = (blocks * tokens + 12 * c.n_layer * c.n_embd * squares) / answers + per_weight * c.vocab_size * c.n_embd
    about = dict(source=config.data, examples=len(data.train), validation=len(data.val), sha256=data.sha256)
    origin = card.provenance(about, config.data if on_hub(config.data) else "", config.base)
    return dict(parameters=base.num_params(), flops_per_token=flops) | origin


# ------------------------------------------------------------------------------------------------------------ the files


class ChatFiles:
    """The weights, as `weights` writes and reads them, together with what a chat needs."""

    def __init__(self, weights: AdapterFiles | ModelFiles, tokenizer: Tokenizer):
        self.weights, self.tokenizer, self.load = weights, tokenizer, weights.load

    def copy(self) -> Callable[[Path], None]:
        write = self.weights.copy()
        return lambda path: [write(path), save_chat_files(path, self.tokenizer)]


def write_merged(config: Config, adapter: str) -> None:
    """Write base and adapter as one plain model, merged in fp32, and print how much that changes its logits."""
    out, found, tokenizer = Path(config.merge), lora.find_adapter(adapter), model_tokenizer(config.base)
    model = lora.load_adapter(load_model(config.base), adapter).eval()
    idx = torch.randint(len(tokenizer), (4, min(64, model.config.n_positions)))
    with torch.no_grad():
        before = model(idx)
        model = lora.remove_lora(lora.merge(model))
        difference = (model(idx) - before).abs().max()
    records, curve = records_of(config, found), found.parent / "learning_curve.png"

    def write(path: Path) -> None:
        save_model(path, model, tokenizer)
        save_chat_files(path, tokenizer)
        card.write_card(path, out.name, records, curve)

    cli.write_atomically(out, write)
    print(f"wrote {out}: {config.base} with {adapter} merged in; logits differ by at most {difference:.1e}")


def records_of(config: Config, found: Path) -> list[dict]:
    """The log of the adapter's run, up to the adapter's step; without one, a record of what the adapter's files say."""
    if (log := found.parent / "log.jsonl").exists():
        last = dict((path, step) for step, path in checkpoint_steps(found.parent)).get(found, math.inf)
        return [record for record in read_log(log) if record["step"] <= last]
    about = dict(data="unknown data", lora_dim=lora.read_adapter(found).config.r)
    return [dict(step=0, kind="run", config=about, **card.provenance({}, "", find_model(config.base)))]


def say_what_was_reached(config: Config, run: Run) -> None:
    """Print the validation loss, the rate, and what to try next."""
    val = list(run.log.val_losses().values())
    if val:
        print(f"\nvalidation loss {val[0]:.4f} before, {val[-1]:.4f} after, {min(val):.4f} at best (nats per token)")
    print(f"{run.log.median_rate():,.0f} answer tokens/s")
    if not run.log.last_loss() < (val[0] if val else math.inf) + 1:
        print(f"\nthe run diverged: --max_lr {config.max_lr} is most likely too high, try a tenth")
        return
    result = f"{config.base} --adapter {run.out_dir / 'adapter'}" if config.lora_dim else run.out_dir
    print(f"\nNow try:\n  python sample.py {result} --chat\n  {run.out_dir / 'learning_curve.png'}    # how it went")


if __name__ == "__main__":
    cli.script(main)
