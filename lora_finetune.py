"""Finetune GPT-2 on instructions: LoRA (Hu et al. 2021), or all weights. Constants, then the loop, then what it reads.

    python lora_finetune.py --base gpt2 --lora_dim 8            # adapters of rank 8, on Alpaca
    python lora_finetune.py --base out/tiny --data rows.json    # a checkpoint of ours, another file of rows
    python lora_finetune.py --base gpt2 --lora_dim 0            # all weights, for comparison
    python lora_finetune.py --base gpt2 --adapter out/lora/adapter --merge out/merged   # one plain model of both
    python lora_finetune.py sweep --base gpt2                   # ranks 1 to 32 and full: a table, curves, answers

A row is a conversation, and the loss counts the answers in it:

    BEGINNING OF CONVERSATION: USER: Add 1 and 2. ASSISTANT:3<|endoftext|>
    ─────────────────── read ──────────────────────────────┘└── learned ──┘

Writes OUT_DIR (out/lora): config.json, log.jsonl, learning_curve.png, samples.txt, checkpoints step_NNNNNN/, and at the
end adapter/, which peft opens. Tokens in the log are answer tokens. The method is in finetuning/lora.py, the form of a
conversation in finetuning/chat.py. This file knows nothing of optimizers' formulas, or how checkpoints get to the disk.
"""

import hashlib
import itertools
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch

from benchmarks.sweep import sweep
from bpe.tokenizer import Tokenizer
from cli import Count, NonNegative, Positive, Probability, Range, Seed, UserError, parse_args, script, write_atomically
from finetuning.chat import check_tokenizer, prompt_of, save_chat_files
from finetuning.lora import (
    TARGETS,
    AdapterFiles,
    LoRAConfig,
    add_lora,
    cast_frozen,
    find_adapter,
    load_adapter,
    lora_modules,
    merge,
    read_adapter,
    remove_lora,
    trainable_parameters,
    weights_sha256,
)
from finetuning.rows import Example, encode_rows, global_batch, load_rows, micro_batches, on_hub, split_rows
from learning.evaluation import complete, validate
from learning.optim import Optimizer, adamw, decay_groups, learning_rate
from model import GPT, Loss
from plot import read_log
from run import card
from run.checkpoint import WEIGHTS, ModelFiles, checkpoint_steps, find_model, load_model, model_tokenizer, save_model
from run.directory import Run
from run.runtime import Runtime, prefetch
from run.trials import choose_attention, find_micro_batch_size

# Padded tokens that cost as much as one more micro-batch: what reading the weights takes on a CPU, what launching the
# kernels takes on a GPU.
MICRO_BATCH_COST = {"cpu": 64, "cuda": 4096}


@dataclass(frozen=True)
class Config:
    # where things are
    base: str = "gpt2"  # what to finetune: checkpoint directory, run directory or hub id
    data: str = "tatsu-lab/alpaca"  # a hub dataset, or .json or .jsonl: instruction, input, output, or messages
    out_dir: str = ""  # where the run is written; out/lora when empty, out/lora_sweep for the sweep
    resume: bool = False  # go on from the newest sound checkpoint of out_dir, or start when there is none
    overwrite: bool = False  # replace the run that out_dir holds, or the directory that --merge names
    adapter: str = ""  # adapter to start from, ours or peft's; its rank, alpha, scaling and targets count
    merge: str = ""  # write base and adapter as one plain model here: after training, or at once with --adapter
    # adapter
    lora_dim: Count = 8  # rank r of the bypasses; 0 trains all weights instead
    lora_alpha: NonNegative = 0.0  # the bypass is scaled by alpha / r; 0 for 2 r
    lora_dropout: Probability = 0.0  # on the input of the bypass
    targets: tuple[str, ...] = TARGETS  # projections that get one
    rslora: bool = False  # scale by alpha / sqrt(r) (Kalajdzievski 2023)
    lora_plus: Annotated[float, Range(0, 1e4, above=True)] = 1.0  # learning rate of B over that of A (LoRA+ takes 16)
    ranks: Annotated[tuple[int, ...], Range(0, 1e6)] = (1, 2, 4, 8, 16, 32, 0)  # of the sweep; 0 is full finetuning
    # data
    sequence_length: Annotated[int, Range(0, 2**20)] = 0  # longest example in tokens; 0 for the base's context
    val_rows: Count = 1000  # held out for validation, chosen by the seed; at most a tenth of all
    # batch and schedule
    batch_size: Annotated[int, Range(1, 2**16)] = 32  # examples per optimizer step, over all ranks and micro-steps
    micro_batch_size: Annotated[int, Range(0, 2**16)] = 0  # full-length examples that fit into a forward pass; 0 tries
    epochs: Annotated[float, Range(0, 1e6, above=True)] = 3.0  # passes over the training rows
    max_steps: Count = 0  # optimizer steps; 0 for as many as the epochs need
    warmup_steps: Count = 0  # linear warmup; 0 for 3% of the steps
    max_lr: Annotated[float, Range(0, 100)] = 0.0  # peak learning rate; 0 for 1e-3 with LoRA, 1e-4 for all weights
    min_lr: Annotated[float, Range(0, 100)] = 0.0  # where the schedule ends
    lr_schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, linear decay
    decay_fraction: Annotated[float, Range(0, 1, above=True)] = 0.5  # of the steps after warmup, in which wsd decays
    # optimizer
    weight_decay: Annotated[float, Range(0, 100)] = 0.01  # AdamW, on tensors of two dimensions
    beta1: Probability = 0.9  # AdamW
    beta2: Probability = 0.999  # AdamW
    eps: Annotated[float, Range(0, 1, above=True)] = 1e-8  # AdamW
    grad_clip: NonNegative = 1.0  # largest gradient norm; 0 for no clipping
    max_bad_steps: Positive = 20  # stop after this many steps in a row without a finite gradient
    spike_threshold: NonNegative = 2.0  # a loss so far above its running median goes back to a checkpoint; 0 for never
    dropout: Probability = 0.0  # of the base, on embeddings, attention and residual branches
    seed: Seed = 1337  # of the adapter, the split, the data order and the samples
    # along the way, in steps; 0 is never
    eval_interval: Annotated[int, Range(-1, 1e9)] = -1  # validation loss; -1 for ten times in all
    sample_interval: Count = 0  # an answer to sample_prompt
    sample_prompt: str = "Give three tips for a good meal."  # what is asked
    sample_tokens: Annotated[int, Range(0, 100_000)] = 128  # the longest answer
    checkpoint_interval: Count = 500  # a checkpoint, at the last step too
    keep_checkpoints: Count = 2  # how many of the newest stay, besides the one of the lowest validation loss; 0 for all
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matrix products; trained weights stay fp32
    compile: Literal["auto", "on", "off"] = "off"  # torch.compile, with dynamic shapes: examples differ in length
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # besides log.jsonl


# what --resume does not change: the model and the order of the data depend on these (docs/lora.md has all constants)
FIXED = ("adapter", "lora_dim", "lora_alpha", "targets", "rslora", "sequence_length", "val_rows", "batch_size", "seed")
# what adapter/ and a merged model consist of: --overwrite replaces a directory that holds nothing else
OURS = {"adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "tokenizer.tiktoken", "chat_template.jinja", "generation_config.json",
        *card.FILES}  # fmt: skip


def main() -> None:
    words = sys.argv[1:]
    sweeping = words[:1] == ["sweep"]
    config = parse_args(Config, words[sweeping:], prog="lora_finetune.py" + " sweep" * sweeping, description=__doc__)
    config = replace(config, out_dir=config.out_dir or ("out/lora_sweep" if sweeping else "out/lora"))
    check(config)
    if sweeping:
        sweep(config)
    elif config.merge and config.adapter:
        write_merged(config, config.adapter)
    else:
        finetune(config)


def finetune(written: Config) -> None:
    """A whole run, from the constants as a person wrote them."""
    rt = Runtime.setup(written.device, written.dtype, written.compile)
    if written.batch_size < rt.world_size:
        raise UserError(f"--batch_size {written.batch_size} is less than one example for each of {rt.world_size} ranks")
    check_replaceable(Path(written.out_dir) / "adapter")
    run = Run.open(written, rt, FIXED)
    base = load_model(written.base, written.dropout, choose_attention("auto", rt, written.sequence_length))
    data = open_data(written, base, rt)
    lora = choose_lora(written, base, run.checkpoint)
    base_path, base_sha256 = find_model(written.base), weights_sha256(base)
    facts = dict(parameters=base.num_params(), flops_per_token=flops_per_answer_token(base, data.train, lora))
    about = dict(source=written.data, examples=len(data.train), validation=len(data.val), sha256=data.fingerprint)
    facts |= card.provenance(about, written.data if on_hub(written.data) else "", base_path)
    rt.print(f"{base_path}: {base.num_params():,} parameters, on {rt.why}\n{data.about}")
    if lora:
        rt.print(parameter_table(base, lora))

    model = adapt(base, written, lora, run.checkpoint)
    if lora and rt.dtype != torch.float32:
        cast_frozen(model, rt.dtype)
    forward = rt.wrap(Loss(model.to(rt.device)), dynamic=True)
    config = settle(written, lora, data, forward, rt)  # from here on no constant changes
    optimizer = make_optimizer(model, config, rt)
    weights = AdapterFiles(model, lora, base_path, base_sha256) if lora else ModelFiles(model, data.tokenizer)
    files = ChatFiles(weights, data.tokenizer)
    identity = dict(base=base_sha256, tokenizer=data.tokenizer.fingerprint, data=data.fingerprint)
    rt.reset_peak_memory()
    run.begin(config, files, optimizer, identity, facts)
    train(config, run, model, forward, optimizer, data)
    if rt.is_main:
        finish(config, run, files)


# ------------------------------------------------------------------------------------------------------ the loop


def train(config: Config, run: Run, model: GPT, forward: torch.nn.Module, optimizer: Optimizer, data: "Data") -> None:
    """Optimizer steps until `config.max_steps`. `forward` is the model's loss, perhaps compiled and distributed."""
    rt = run.rt
    if data.val and run.checkpoint is None and config.eval_interval:
        run.record("val", **validate(forward, validation_inputs(config, data, rt), data.token_bytes, rt))  # of the base
    with run, closing(prefetch(micro_batches_from(run.data_step, config, data, rt), rt.device)) as batches:
        evaluate(config, run, model, forward, data)  # what an interruption cut off
        for step, batch in run.steps(batches):
            lr = learning_rate(step, config)
            optimizer.set_lr(lr)

            # A row with a long answer has more to say than one with a short one, and counts for more: every answer
            # token of the global batch weighs the same, whatever its row, its micro-batch and its rank.
            n_targets = rt.sum(sum((targets >= 0).sum() for _, targets, _ in batch))
            loss = torch.zeros((), device=rt.device)
            for i, (idx, targets, places) in enumerate(batch):
                rt.exchange_gradients(forward, now=i == len(batch) - 1)
                with rt.autocast():
                    micro_loss = forward(idx, targets, places, n_targets=n_targets / rt.world_size)
                optimizer.scale(micro_loss).backward()  # adds to the gradients of the micro-batches before
                loss += micro_loss.detach()

            # a number that is not finite, on any rank, changes no weight on any rank
            grad_norm = optimizer.clip_grad_norm(config.grad_clip)
            loss, grad_norm = rt.mean(torch.stack([loss, grad_norm]))
            optimizer.step(finite=(loss + grad_norm).isfinite())
            run.log_step(loss, grad_norm, lr, n_targets)

            # the checkpoint first: it is on the disk before an evaluation can fail
            if run.due(config.checkpoint_interval):
                run.save()
            evaluate(config, run, model, forward, data)


def evaluate(config: Config, run: Run, model: GPT, forward: torch.nn.Module, data: "Data") -> None:
    """What is due at this step, if the log does not have it already."""
    rt = run.rt
    if data.val and run.due(config.eval_interval, "val"):
        run.record("val", **validate(forward, validation_inputs(config, data, rt), data.token_bytes, rt))
    if run.due(config.sample_interval, "sample") and rt.is_main:
        prompt, seed = prompt_of(config.sample_prompt, data.tokenizer), config.seed + run.step
        answers = complete(model, data.tokenizer, [prompt], config.sample_tokens, rt, seed, top_k=50)
        run.record("sample", text=prompt + answers[0])


def make_optimizer(model: GPT, config: Config, rt: Runtime) -> Optimizer:
    """AdamW. With LoRA+ (Hayou et al. 2024) B learns faster than A: in wide models it has to, for both to learn as
    much, because one starts at zero and the other does not."""
    ups = [module.lora_B for module in lora_modules(model).values()]
    known = {id(p) for p in ups}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    faster = dict(params=ups, lr=config.lora_plus * config.max_lr, weight_decay=config.weight_decay)
    groups = [group for group in [*decay_groups(rest, config.weight_decay), faster] if group["params"]]
    return Optimizer([adamw(groups, config)], config.max_lr, rt)


# --------------------------------------------------------------------------------------------------------------- rows


class Data(NamedTuple):
    tokenizer: Tokenizer
    train: list[Example]
    val: list[Example]
    sequence_length: int  # the longest example
    fingerprint: str  # of the rows
    token_bytes: torch.Tensor  # (vocabulary,) bytes of text that each id stands for
    about: str  # a line for people


def open_data(config: Config, base: GPT, rt: Runtime) -> Data:
    """The rows as examples. Raises UserError."""
    tokenizer, shape, T = model_tokenizer(config.base), base.config, config.sequence_length
    try:
        check_tokenizer(tokenizer)
    except ValueError as e:
        raise UserError(f"the tokenizer of {config.base} is not one for chats: {e}; take another base") from None
    if T > shape.n_positions:
        has = f"{config.base} has a context of {shape.n_positions} tokens, less than --sequence_length {T}"
        raise UserError(f"{has}; give {shape.n_positions} or less")
    if len(tokenizer) > shape.vocab_size:
        raise UserError(f"the tokenizer of {config.base} has {len(tokenizer)} tokens, its model {shape.vocab_size}")
    T = T or shape.n_positions
    if rt.world_size > 1:  # the other ranks then find a dataset of the hub in the cache
        rt.on_main(lambda: len(load_rows(config.data)))
    rows = load_rows(config.data)
    parts = split_rows(rows, config.val_rows, config.seed)
    (train_set, counts), (val_set, more) = (encode_rows(part, tokenizer, T) for part in parts)
    if not train_set:
        raise UserError(f"{config.data} has {len(rows)} rows, none with an instruction and an answer to train on")
    about = f"data: {len(rows):,} rows: {len(train_set):,} examples to train on, {len(val_set):,} to validate"
    if empty := counts["empty"] + more["empty"]:
        about += f"; empty and left out: {empty:,} rows"
    if n := counts["long"] + more["long"]:
        longest = max(counts["longest"], more["longest"])
        about += f"; longer than {T} tokens (up to {longest:,}), and so read in overlapping windows: {n:,} rows"
    sha256 = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(rt.device)
    return Data(tokenizer, train_set, val_set, T, sha256, token_bytes, about)


def cut(examples: list[Example], config: Config, rt: Runtime) -> list[tuple]:
    limit = config.sequence_length * config.micro_batch_size  # tokens
    return micro_batches(examples, limit, MICRO_BATCH_COST.get(rt.device.type, 1024), rt.rank, rt.world_size)


def micro_batches_from(data_step: int, config: Config, data: Data, rt: Runtime) -> Iterator[list]:
    """This rank's micro-batches of each step, without end: a spike makes a run read more steps than it takes."""
    for step in itertools.count(data_step):
        yield cut(global_batch(data.train, step, config.batch_size, config.seed), config, rt)


def validation_inputs(config: Config, data: Data, rt: Runtime) -> Iterator[tuple]:
    """What the loss takes, on the device, for this rank's validation rows."""
    return (micro for (micro,) in prefetch(([one] for one in cut(data.val, config, rt)), rt.device))


# ------------------------------------------------------------------------------------------------- before and after


def check(config: Config) -> None:
    """Refuse constants that do not go together, before anything is touched. Raises UserError."""
    if not config.base or not config.data:
        raise UserError("--base and --data need a name; leave them out for GPT-2 and Alpaca")
    if config.sequence_length == 1:
        raise UserError("--sequence_length 1 has no room for a question and an answer; 0 takes the base's context")
    if config.adapter and not config.lora_dim:
        raise UserError("--adapter continues an adapter, and --lora_dim 0 trains none; merge it first, with --merge")
    if config.merge and not config.lora_dim:
        raise UserError("--merge adds an adapter to its base, and --lora_dim 0 trains none; its checkpoints are plain")
    if config.max_lr and config.min_lr > config.max_lr:
        raise UserError(f"--min_lr {config.min_lr} is above --max_lr {config.max_lr}; the schedule ends at min_lr")
    if config.merge:
        out = Path(config.merge)
        if out.exists() and not config.overwrite:
            raise UserError(f"--merge {out} already exists; --overwrite replaces it, another name avoids it")
        if out.resolve() in {Path(path).resolve() for path in (config.base, config.adapter, config.out_dir) if path}:
            raise UserError(f"--merge {out} would replace what it is made of; give another directory")
        check_replaceable(out)


def check_replaceable(path: Path) -> None:
    """Raises UserError for a directory with files that are not ours, before they would go with it."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; a directory is to be written there: give another name")
    names = {file.name for file in path.glob("*")}
    ours = OURS if names & set(WEIGHTS.values()) else OURS - card.FILES  # without a model, a README is somebody else's
    if others := sorted(names - ours):
        raise UserError(f"{path} holds {others[0]}, which is not ours to replace; move it, or give another directory")


def choose_lora(config: Config, base: GPT, checkpoint: Path | None) -> LoRAConfig | None:
    """The adapter to train: that of the checkpoint or of --adapter, or as the constants say; None for all weights."""
    if checkpoint and not (checkpoint / "adapter_config.json").exists():
        return None
    if source := checkpoint or config.adapter:
        return replace(read_adapter(source).config, dropout=config.lora_dropout)
    if not config.lora_dim:
        return None
    if config.lora_dim > base.config.n_embd:
        raise UserError(
            f"--lora_dim {config.lora_dim}: the projections of {config.base} have rank {base.config.n_embd} at most; "
            "give that or less, or 0 to train all weights"
        )
    alpha = config.lora_alpha or 2.0 * config.lora_dim
    return LoRAConfig(config.lora_dim, alpha, config.lora_dropout, config.targets, config.rslora)


def adapt(base: GPT, config: Config, lora: LoRAConfig | None, checkpoint: Path | None) -> GPT:
    """The model to train: the base with its adapter, new or read, or all weights, of the base or of a checkpoint."""
    if lora is None:
        return load_model(str(checkpoint), config.dropout, base.config.attention) if checkpoint else base
    if source := checkpoint or config.adapter:
        return load_adapter(base, source, lora.dropout)
    torch.manual_seed(config.seed)
    return add_lora(base, lora)


def settle(config: Config, lora: LoRAConfig | None, data: Data, forward: torch.nn.Module, rt: Runtime) -> Config:
    """The constants that run, from those that a person wrote: what follows from adapter, rows, and memory."""
    max_steps = config.max_steps or max(round(config.epochs * len(data.train) / config.batch_size), 1)
    found = dict(
        sequence_length=data.sequence_length,
        lora_dim=0,
        max_steps=max_steps,
        warmup_steps=min(config.warmup_steps or math.ceil(0.03 * max_steps), max_steps),
        eval_interval=max(max_steps // 10, 1) if config.eval_interval < 0 else config.eval_interval,
        max_lr=config.max_lr or (1e-3 if lora else 1e-4),
    )
    if lora:
        found |= dict(lora_dim=lora.r, lora_alpha=lora.alpha, targets=lora.targets, rslora=lora.rslora)
    if not config.micro_batch_size:
        n, shape = config.batch_size // rt.world_size, (data.sequence_length, len(data.tokenizer))
        sizes = [size for size in range(1, min(n, 256) + 1) if n % size == 0]
        found["micro_batch_size"] = find_micro_batch_size(forward, sizes, shape, rt)
    return replace(config, **found)


def parameter_table(base: GPT, lora: LoRAConfig) -> str:
    """Trainable parameters by rank, 0 being all weights."""
    lines = [f"{'rank':>4} {'trainable':>13} {'of all':>8}"]
    for rank in [*sorted({1, 2, 4, 8, 16, 32, lora.r}), 0]:
        n, fraction = trainable_parameters(base, lora.targets, rank)
        lines.append(f"{rank or 'full':>4} {n:>13,} {fraction:>8.3%}" + "  <- this run" * (rank == lora.r))
    return "\n".join(lines)


def flops_per_answer_token(base: GPT, examples: list[Example], lora: LoRAConfig | None) -> float:
    """Floating-point operations per answer token, forward and backward, for MFU: as in `GPT.estimate_flops`, but blocks
    run on prompts too, the head on answers only, and a frozen weight has no gradient (4 instead of 6 each)."""
    c, per_weight = base.config, 4 if lora else 6
    tokens, squares = (sum(len(example.idx) ** power for example in examples) for power in (1, 2))
    answers = sum(int((example.targets >= 0).sum()) for example in examples)
    blocks = per_weight * sum(p.numel() for p in base.transformer.h.parameters())
    head = per_weight * c.vocab_size * c.n_embd
    return (blocks * tokens + 12 * c.n_layer * c.n_embd * squares) / answers + head


class ChatFiles:
    """The weights as `weights` writes and reads them, with what a chat needs beside them."""

    def __init__(self, weights: AdapterFiles | ModelFiles, tokenizer: Tokenizer):
        self.weights, self.tokenizer, self.load = weights, tokenizer, weights.load

    def copy(self) -> Callable[[Path], None]:
        write = self.weights.copy()

        def write_all(path: Path) -> None:
            write(path)
            save_chat_files(path, self.tokenizer)

        return write_all


def finish(config: Config, run: Run, files: ChatFiles) -> None:
    """Write the adapter, say what was reached and where to go from here."""
    adapter = run.out_dir / "adapter"
    check_replaceable(adapter)
    if config.lora_dim:
        write_files, write_card = files.copy(), run.log.card()
        write_atomically(adapter, lambda path: [write(path) for write in (write_files, write_card)])
    elif adapter.exists():  # of a run that this one has replaced
        shutil.rmtree(adapter)
    if val := list(run.log.val_losses().values()):
        print(
            f"\nvalidation loss {val[0]:.4f} before, {val[-1]:.4f} after, {min(val):.4f} at its lowest (nats per token)"
        )
    print(f"{run.log.median_rate():,.0f} answer tokens/s")
    if config.merge:
        write_merged(config, str(adapter))
    result = f"{config.base} --adapter {adapter}" if config.lora_dim else run.out_dir
    print(f"\nNow try:\n  python sample.py {result} --chat\n  {run.out_dir / 'learning_curve.png'}    # how it went")


def write_merged(config: Config, adapter: str) -> None:
    """Write base and adapter as one plain model, merged in fp32, and say how far its logits are from the unmerged."""
    out, tokenizer = Path(config.merge), model_tokenizer(config.base)
    model = load_adapter(load_model(config.base), adapter).eval()
    idx = torch.randint(len(tokenizer), (4, min(64, model.config.n_positions)))
    with torch.no_grad():
        before = model(idx)
        model = remove_lora(merge(model))
        difference = (model(idx) - before).abs().max()

    def fill(path: Path) -> None:
        save_model(path, model, tokenizer)
        save_chat_files(path, tokenizer)
        card.write_card(
            path, out.name, records_of(config, adapter), find_adapter(adapter).parent / "learning_curve.png"
        )

    check_replaceable(out)
    write_atomically(out, fill)
    print(f"wrote {out}: {config.base} with {adapter} merged in; logits differ by at most {difference:.1e}")


def records_of(config: Config, adapter: str) -> list[dict]:
    """The log of the run that an adapter lies in, up to its step; else one record with what is known of the adapter."""
    found = find_adapter(adapter)
    if (log := found.parent / "log.jsonl").exists():
        last = dict((path, step) for step, path in checkpoint_steps(found.parent)).get(found, math.inf)
        return [record for record in read_log(log) if record["step"] <= last]
    about = dict(data="unknown data", lora_dim=read_adapter(found).config.r)
    return [dict(step=0, kind="run", config=about, **card.provenance({}, "", find_model(config.base)))]


if __name__ == "__main__":
    script(main)
