"""Pretrain GPT-2: constants, then one loop that reads top to bottom.

    python train_gpt2.py tiny                                # a small GPT on input.txt, two minutes on 2 CPU cores
    python train_gpt2.py                                     # GPT-2 124M on FineWeb-Edu shards, one device
    torchrun --standalone --nproc_per_node=8 train_gpt2.py   # the same run on 8 GPUs
    python train_gpt2.py gpt2-medium --micro_batch_size 16   # another recipe, another constant
    python train_gpt2.py --resume                            # go on from the newest sound checkpoint

Writes OUT_DIR (out/RECIPE): config.json, log.jsonl, learning_curve.png, samples.txt, and checkpoints step_NNNNNN/ that
transformers opens as they are. Data, checkpoints and the machine are the business of data.py, checkpoint.py and
runtime.py.
"""

import inspect
import json
import math
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.utils.checkpoint
from tqdm import tqdm

import hellaswag
from checkpoint import (
    CheckpointWriter,
    checkpoint_steps,
    load_model,
    load_train_state,
    newest_sound,
    remove_after,
    snapshot,
)
from data import (
    Batches,
    TokenStream,
    data_tokenizer,
    find_shards,
    prefetch,
    prepare_text,
    training_batches,
    validation_batches,
)
from model import GPT, GPTConfig, use_float8
from runtime import (
    RunLog,
    Runtime,
    SpikeDetector,
    Stopped,
    StopSignals,
    UserError,
    choose_attention,
    choose_attention_kernel,
    parse_args,
    script,
)


@dataclass
class Config:
    # where things are
    data: str = "edu_fineweb10B"  # directory of shards (see fineweb.py), or a .txt file
    tokenizer: str = "gpt2"  # gpt2, a tokenizer.json, or train: a BPE of vocab_size tokens, trained on the .txt
    out_dir: str = ""  # where the run is written; out/RECIPE when empty
    resume: bool = False  # go on from the newest sound checkpoint of out_dir, or start when there is none
    overwrite: bool = False  # replace the run that out_dir holds
    init_from: str = ""  # checkpoint directory or hub id (gpt2) to start from instead of random weights
    # model
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads a block
    n_embd: int = 768  # channels
    sequence_length: int = 1024  # tokens of context
    vocab_size: int = 50304  # 50257, padded to a multiple of 128 for the tensor cores
    dropout: float = 0.0  # 0 for one epoch of pretraining; 0.1 and more when data is scarce
    attention: Literal["auto", "flash", "naive"] = "auto"  # scaled_dot_product_attention, or the formula spelled out
    # batch and schedule
    total_batch_size: int = 524_288  # tokens per optimizer step, over all ranks and micro-steps
    micro_batch_size: int = 0  # sequences per forward pass and rank; 0 finds the largest that fits
    batch_ramp: int = 0  # tokens over which the batch grows linearly to its full size (Brown et al. 2020); 0 for none
    batch_ramp_from: int = 32_768  # tokens per optimizer step where that starts
    max_steps: int = 19_073  # optimizer steps: one epoch of 10B tokens
    warmup_steps: int = 715  # linear warmup: 375M tokens, as GPT-3
    max_lr: float = 6e-4  # peak learning rate
    min_lr: float = 6e-5  # where the schedule ends
    lr_schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: warmup, stable, linear decay
    decay_fraction: float = 0.5  # share of the steps in which wsd decays
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon for the blocks' matrices, AdamW for the rest
    muon_lr: float = 0.02  # peak learning rate of Muon's matrices
    weight_decay: float = 0.1  # on tensors of two or more dimensions
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    eps: float = 1e-8  # AdamW
    grad_clip: float = 1.0  # largest gradient norm; 0 for no clipping
    max_bad_steps: int = 20  # stop after this many steps in a row without a finite gradient
    spike_threshold: float = 1.0  # a loss this far above its running median goes back to a checkpoint; 0 for never
    seed: int = 1337  # of weights, data order and samples
    shuffle: bool = True  # permute the windows of every epoch; off is file order
    # along the way, in steps; 0 is never
    eval_interval: int = 250  # validation loss
    eval_steps: int = 20  # total_batch_size tokens of validation at a time; 0 for the whole split
    hellaswag_interval: int = 1000  # HellaSwag accuracy
    hellaswag_data: str = ""  # a local copy of its validation split; downloaded once when empty
    sample_interval: int = 250  # a sample of text
    sample_prompt: str = "Hello, I'm a language model,"  # what it starts with; empty for the start of a document
    sample_tokens: int = 128  # its length
    checkpoint_interval: int = 1000  # a checkpoint; the last step always writes one
    keep_checkpoints: int = 3  # how many of the newest stay, besides the one of the lowest validation loss; 0 for all
    # machine
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: cuda, else mps, else cpu
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"  # of matrix products; weights stay fp32
    fp8: bool = False  # the blocks' products in 8 bits while training: Hopper, Ada and newer GPUs
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: on a GPU
    shard: Literal["none", "optimizer"] = "none"  # optimizer: divide the optimizer's state over the ranks (ZeRO-1)
    activation_checkpointing: bool = False  # recompute activations: memory for a third more time
    report_to: Literal["none", "tensorboard", "wandb"] = "none"  # besides log.jsonl


RECIPES = {
    "gpt2": Config(),  # Radford et al. 2019 in size, Brown et al. 2020 (table 2.1) in hyperparameters
    "gpt2-medium": Config(n_layer=24, n_head=16, n_embd=1024, max_lr=3e-4, min_lr=3e-5),
    "gpt2-large": Config(n_layer=36, n_head=20, n_embd=1280, max_lr=2.5e-4, min_lr=2.5e-5),
    "gpt2-xl": Config(n_layer=48, n_head=25, n_embd=1600, max_lr=2e-4, min_lr=2e-5, total_batch_size=1_048_576),
    # GPT-2 unchanged, half the tokens: Muon on the hidden matrices, a schedule that decays for half the run, a batch
    # that grows over a fifth of the tokens; `bench.py speedrun` undoes each of these choices
    "speedrun": Config(optimizer="muon", lr_schedule="wsd", max_steps=12_293, warmup_steps=256, max_lr=3e-3, min_lr=0.0,
                       batch_ramp=1_000_000_000, batch_ramp_from=131_072),
    # chosen by measurement for two minutes on 2 CPU cores
    "tiny": Config(
        data="input.txt", tokenizer="train", vocab_size=1024, n_layer=4, n_head=2, n_embd=128, sequence_length=128,
        total_batch_size=2048, max_steps=1200, warmup_steps=20, max_lr=3e-3, min_lr=0.0,
        lr_schedule="wsd", decay_fraction=0.4, optimizer="muon", eval_interval=200, eval_steps=0, hellaswag_interval=0,
        sample_interval=600, sample_prompt="", checkpoint_interval=600,
    ),
}  # fmt: skip


def main() -> None:
    recipe, config = read_command_line(sys.argv[1:])
    rt = Runtime.setup(config.device, config.dtype, config.compile)
    check(config, rt)
    checkpoint = open_run(config, rt)
    tokenizer, train_stream, val_stream = open_data(config, rt)
    model = build_model(config, checkpoint, tokenizer, rt).to(rt.device)
    rt.print(f"{recipe}: {model.num_params():,} parameters on {rt.why}")

    if config.fp8:
        use_float8(model)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    if model.config.attention == "flash":
        shape = (config.micro_batch_size or 16, config.n_head, config.sequence_length, config.n_embd // config.n_head)
        if kernel := choose_attention_kernel(rt, shape):
            rt.print(f"attention: {kernel} is the fastest kernel here")
    forward = wrap(model, rt)
    optimizers = model.configure_optimizers(
        config.weight_decay, config.max_lr, (config.beta1, config.beta2), config.eps, config.optimizer, config.muon_lr
    )
    optimizers = shard_optimizers(optimizers, rt) if config.shard == "optimizer" else optimizers
    config.micro_batch_size = config.micro_batch_size or find_micro_batch_size(forward, config, rt)
    rows = config.total_batch_size // config.sequence_length  # sequences per step
    batches = Batches(train_stream, config.sequence_length, config.seed, config.shuffle, rt.rank, rt.world_size)
    plan = batch_plan(config)
    passes = plan(config.max_steps)[0] / batches.windows
    rt.print(
        f"data: {len(train_stream):,} training tokens, read {passes:.2g} times; {len(val_stream):,} validation tokens; "
        f"{rows} sequences a step, {config.micro_batch_size} at a time on each of {rt.world_size} ranks"
    )

    def steps_from(step: int) -> Iterator:
        return training_batches(batches, plan, step, sys.maxsize, config.micro_batch_size)

    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(rt.device)

    hellaswag_task = None
    if config.hellaswag_interval:
        hellaswag_task = hellaswag.validation_task(config.hellaswag_data, tokenizer, model.config, rt)

    def evaluations(step: int) -> Iterator[dict]:
        if due(step, config.eval_interval, config.max_steps):
            limit = config.eval_steps * config.total_batch_size
            batches = validation_batches(
                val_stream, config.sequence_length, config.micro_batch_size, limit, rt.rank, rt.world_size
            )
            yield dict(kind="val", **validate(forward, batches, token_bytes, rt))
        if hellaswag_task and due(step, config.hellaswag_interval, config.max_steps):
            result = hellaswag.evaluate(model, hellaswag_task, rt)
            yield dict(kind="hellaswag", acc=result["acc"], acc_norm=result["acc_norm"], n=result["n"])
        if due(step, config.sample_interval, 0) and rt.is_main:
            yield dict(kind="sample", text=sample(model, tokenizer, config, rt, step)[0])

    log = RunLog(Path(config.out_dir), rt, config)

    def save() -> Callable[[Path], None]:
        copy = model_copy(model)
        return lambda path: save_model(path, copy, tokenizer)

    train(
        config, rt, log, model, forward, optimizers, steps_from, evaluations, checkpoint, save, config.spike_threshold
    )
    if rt.is_main:
        finish(recipe, config, rt, log, model, tokenizer)


# ------------------------------------------------------------------------------------------------------ the loop

# constants whose steps are finished and logged before anything else happens
PAUSES = ("eval_interval", "hellaswag_interval", "sample_interval", "checkpoint_interval")


def train(
    config,
    rt: Runtime,
    log: RunLog,
    model: GPT,
    forward: Callable,
    optimizers: list,
    steps_from: Callable[[int], Iterator],
    evaluations: Callable[[int], Iterator[dict]],
    checkpoint: Path | None,
    save: Callable,
    spike_threshold: float = 0.0,
    flops_per_token: float | None = None,
    restore: Callable[[Path], None] | None = None,
) -> None:
    """Optimizer steps until `config.max_steps`; pretraining and finetuning both run through here.

    `steps_from(step)` yields the micro-batches of each step, without end where spikes make it skip some: tuples of
    arguments for `forward`, whose second one is the targets. `evaluations(step)` yields the log records that are due
    after a step. `save()` copies the model of this moment and returns a function that writes the copy into a directory;
    it runs in another thread while the next gradients are computed, so that it may read the model only. `checkpoint`
    is one to go on from; `restore(checkpoint)` puts the weights of one back, where it is not a whole model. Every rank
    comes to the same decisions, because they rest on sums over the ranks alone. Raises Stopped after a signal, and
    UserError after too many bad steps, each with a checkpoint on the disk.
    """
    scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)
    spikes = SpikeDetector(spike_threshold)
    writer = CheckpointWriter(Path(config.out_dir), config.keep_checkpoints)
    restore = restore or (lambda path: model.load_state_dict(load_model(str(path)).state_dict()))
    # the loader's step is ahead of the optimizers' by the steps whose data was left out
    step, loader = resume(checkpoint, optimizers, scaler, spikes, rt) if checkpoint else (0, 0)
    log.open(step)
    flops_per_token = flops_per_token or model.estimate_flops(config.sequence_length)
    val_loss, saved = None, step if checkpoint else -1
    launched: deque[tuple] = deque()  # steps that the device may still be working at, with what they will report

    def save_checkpoint() -> None:
        nonlocal saved
        if step != saved:
            state = training_state(step, loader, optimizers, scaler, spikes, config, rt)
            metrics = {} if val_loss is None else {"val_loss": val_loss}
            if rt.is_main:
                writer.save(step, save, state, metrics, announce=rt.print)
            saved = step

    with (
        StopSignals() as signals,
        progress_bar(step, config.max_steps, rt) as bar,
        closing(prefetch(steps_from(loader), rt.device)) as batches,
    ):
        watch = Watch(config, rt, log, spikes, writer, flops_per_token, bar)
        while step < config.max_steps:
            step, loader, batch = step + 1, loader + 1, next(batches)
            torch.manual_seed(config.seed + step * rt.world_size + rt.rank)  # other dropout on each rank, known by step
            lr = set_learning_rates(optimizers, step, config)
            n_targets, n_tokens = count(batch, rt)
            loss = backward(forward, batch, n_targets, scaler, rt)
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
            grad_norm = torch.nn.utils.clip_grad_norm_(params, config.grad_clip or math.inf)
            stop = loss.new_full((), signals.signum != 0 or writer.failed)  # new_tensor would wait for the GPU
            figures = rt.sum(torch.stack([loss, grad_norm, stop])) / rt.world_size
            writer.wait_for_copy()
            update(optimizers, ~figures.isfinite().all(), scaler, rt)
            launched.append((step, lr, rt.fetch(torch.stack([*figures, n_tokens.float()]))))

            due_now = (due(step, getattr(config, name, 0), config.max_steps) for name in PAUSES)
            pause = step == config.max_steps or any(due_now)
            spike = stop = False
            while len(launched) > (0 if pause or stop else rt.steps_ahead) and not spike:
                spike, stop = watch(*launched.popleft())
            if spike:
                back = roll_back(*watch.spiked_at, restore, optimizers, scaler, spikes, writer, log, config, rt)
                if back is not None:
                    step = saved = back
                    launched.clear()
                    continue
            for record in evaluations(step) if pause else ():
                val_loss = record["loss"] if record["kind"] == "val" else val_loss
                log.record(step, record)
            if stop:
                try:
                    save_checkpoint()
                    writer.wait()
                finally:
                    rt.barrier()  # torchrun ends every rank once one has ended
                raise Stopped(signals.signum or signal.SIGTERM)
            if due(step, config.checkpoint_interval, config.max_steps):
                save_checkpoint()
            if pause:
                watch.restart()
    writer.wait()
    log.close()


class Watch:
    """Reads what the steps report once they are finished, logs it, and says what it calls for."""

    def __init__(self, config, rt: Runtime, log: RunLog, spikes: SpikeDetector, writer, flops_per_token: float, bar):
        self.config, self.rt, self.log, self.spikes, self.writer = config, rt, log, spikes, writer
        self.flops_per_token, self.bar = flops_per_token, bar
        self.bad_steps = 0  # in a row
        self.restart()

    def restart(self) -> None:
        """Do not count the time until now towards the next step."""
        self.clock = time.perf_counter()

    def __call__(self, step: int, lr: float, fetch: Callable[[], list[float]]) -> tuple[bool, bool]:
        """Wait for a step and log it; returns (has the loss jumped?, shall the run end?).

        `fetch` gives loss, gradient norm, stop flag and number of tokens, each of them over all ranks. Raises UserError
        after too many bad steps.
        """
        loss, grad_norm, stop, n_tokens = fetch()
        now = time.perf_counter()
        dt, self.clock = now - self.clock, now
        good = math.isfinite(loss) and math.isfinite(grad_norm)
        rate = n_tokens / dt
        mfu = rate * self.flops_per_token / peak if (peak := self.log.peak_flops) else None
        self.log.step(step, loss, lr, grad_norm, dt, rate, mfu, skipped=not good)
        self.bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tok/s" + (f", MFU {mfu:.0%}" if mfu else ""))
        self.bar.update(step - self.bar.n)
        self.bad_steps = 0 if good else self.bad_steps + 1
        if self.bad_steps >= self.config.max_bad_steps:
            self.writer.wait()
            raise UserError(
                f"no finite loss or gradient in {self.bad_steps} steps, up to step {step}; the last checkpoint is "
                f"{agree_on_checkpoint(self.config, self.rt)}: lower --max_lr, or use --dtype float32, and --resume"
            )
        self.spiked_at = (step, loss)
        return good and self.spikes.add(loss), stop > 0


def update(optimizers: list, bad: torch.Tensor, scaler, rt: Runtime) -> None:
    """A step of every optimizer, which changes nothing if `bad`, a scalar of bool, is True. The processor does not wait
    for the GPU to know: AdamW and Muon look at `found_inf` themselves."""
    for optimizer in optimizers:
        getattr(optimizer, "optim", optimizer).found_inf = bad.float()  # ZeRO keeps the real one in `optim`
        if rt.device.type != "mps" or not bad:  # there, do not rely on the kernel
            with rt.autocast():  # tells Muon the precision of its matrix products
                optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if scaler.is_enabled():  # all ranks halve the scale, also where only one has seen the infinity
        scaler.update(scaler.get_scale() / 2 if bad else None)


def count(batch: list[tuple], rt: Runtime) -> torch.Tensor:
    """(2,) int64: the targets of a step that count, and the tokens of the rows that have any, over all ranks."""
    scored = [micro[1] >= 0 for micro in batch]
    return rt.sum(sum(torch.stack([s.sum(), s.any(dim=1).sum() * s.size(1)]) for s in scored))


def backward(forward: Callable, batch: list[tuple], n_targets: torch.Tensor, scaler, rt: Runtime) -> torch.Tensor:
    """Gradients of the mean over a step's `n_targets`, however they are spread over ranks and micro-batches.

    Returns this rank's loss, whose mean over the ranks is the step's: DDP takes means as well.
    """
    loss = torch.zeros((), device=rt.device)
    for i, micro in enumerate(batch):
        if rt.world_size > 1:  # exchange gradients in the last backward pass only; set before the forward pass
            forward.require_backward_grad_sync = i == len(batch) - 1
        with rt.autocast():
            _, micro_loss = forward(*micro, n_targets=n_targets / rt.world_size)
        scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
    return loss


def batch_plan(config: Config) -> Callable[[int], tuple[int, int]]:
    """plan(step): the position and the size of a step's global batch, in sequences, for any number of ranks.

    During the ramp the size is a line in the tokens seen so far, in multiples of its first value.
    """
    full, ramp = config.total_batch_size // config.sequence_length, config.batch_ramp // config.sequence_length
    first = min(max(config.batch_ramp_from // config.sequence_length, 1), full)
    starts, sizes = [0], []
    while starts[-1] < ramp:
        sizes.append((first + (full - first) * starts[-1] // ramp) // first * first)
        starts.append(starts[-1] + sizes[-1])

    def plan(step: int) -> tuple[int, int]:
        past = step - len(sizes)
        return (starts[step], sizes[step]) if past < 0 else (starts[-1] + past * full, full)

    return plan


def due(step: int, interval: int, max_steps: int) -> bool:
    """Every `interval` steps, and at the end; never for 0."""
    return interval > 0 and (step % interval == 0 or step == max_steps)


def learning_rate(step: int, config) -> float:
    """Learning rate of step 1 .. max_steps: linear warmup, then a cosine, or a plateau and a line, to min_lr."""
    if step <= config.warmup_steps:
        return config.max_lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(config.max_steps - config.warmup_steps, 1)  # 0 .. 1
    if config.lr_schedule == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        share = min(1.0, (1 - progress) / config.decay_fraction)
    return config.min_lr + share * (config.max_lr - config.min_lr)


def set_learning_rates(optimizers: list, step: int, config) -> float:
    """Every parameter group follows the same curve, scaled to its own peak."""
    lr = learning_rate(step, config)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr / config.max_lr
    return lr


def training_state(step: int, loader: int, optimizers: list, scaler, spikes, config, rt: Runtime) -> dict:
    """All that the next step depends on, besides the weights; the data order follows from the loader's step.

    Every rank takes part, because sharded optimizers are put together; the result is the first one's.
    """
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    for optimizer in optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            optimizer.consolidate_state_dict(to=0)
    states = [optimizer.state_dict() for optimizer in optimizers] if rt.is_main else []
    return dict(step=step, loader=loader, optimizers=states, scaler=scaler.state_dict(), spikes=spikes.state_dict(),
                rng=rng, config=asdict(config))  # fmt: skip


def resume(checkpoint: Path, optimizers: list, scaler, spikes, rt: Runtime) -> tuple[int, int]:
    """Put optimizers, scaler and random numbers where they were; returns the step and that of the loader."""
    state = load_train_state(checkpoint)
    if len(state["optimizers"]) != len(optimizers):
        raise UserError(
            f"{checkpoint} was trained with another --optimizer; resume with the one in its run's config.json"
        )
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["rng"]["cpu"])
    if rt.device.type == "cuda" and "cuda" in state["rng"]:
        torch.cuda.set_rng_state(state["rng"]["cuda"])
    spikes.load_state_dict(state["spikes"])
    rt.print(f"resuming from {checkpoint}")
    return state["step"], state["loader"]


def agree_on_checkpoint(config, rt: Runtime, before: float = math.inf) -> Path | None:
    """The newest sound checkpoint, which the first rank chooses for all. Raises UserError if others cannot see it."""
    path = newest_sound(Path(config.out_dir), before) if rt.is_main else None
    step = int(rt.sum(torch.tensor(int(path.name.removeprefix("step_")) if path else 0, device=rt.device)))
    path = Path(config.out_dir) / f"step_{step:06d}" if step else None
    seeing = int(rt.sum(torch.tensor(int(path is None or path.is_dir()), device=rt.device)))
    if seeing < rt.world_size:
        raise UserError(f"{path} is seen by {seeing} of {rt.world_size} ranks; put --out_dir where all nodes see it")
    return path


def roll_back(
    step: int, loss: float, restore, optimizers: list, scaler, spikes, writer, log: RunLog, config, rt: Runtime
) -> int | None:
    """After a spike: put everything where it was at the newest checkpoint from before it, and return its step.

    Reading goes on where it is, so that all data since then is left out, as in PaLM (Chowdhery et al. 2022, section
    5.1). Returns None where there is no checkpoint yet. Raises UserError if this does not help.
    """
    writer.wait()
    rt.barrier()
    checkpoint = agree_on_checkpoint(config, rt, before=spikes.suspect(step))
    if checkpoint is None:
        rt.print(f"step {step}: the loss has jumped to {loss:.3f}, and there is no earlier checkpoint to go back to")
        return spikes.accept()
    if rt.is_main:
        remove_after(checkpoint)
    rt.barrier()
    spikes.count(checkpoint)
    median = spikes.median()
    restore(checkpoint)
    back, _ = resume(checkpoint, optimizers, scaler, spikes, rt)
    log.open(back)
    log.record(back, {"kind": "rollback", "from_step": step, "loss": loss, "median": median})
    return back


def progress_bar(start: int, max_steps: int, rt: Runtime):
    return tqdm(total=max_steps, initial=start, unit="step", disable=not rt.is_main, dynamic_ncols=True)


# ------------------------------------------------------------------------------------- what happens along the way


def validate(forward, batches, token_bytes, rt: Runtime) -> dict:
    """Mean loss in nats per token and bits per byte over the micro-batches of all ranks, as `train` takes them."""
    module = getattr(forward, "module", forward)  # DDP has nothing to exchange here
    module.eval()
    totals = torch.zeros(3, dtype=torch.float64, device="cpu" if rt.device.type == "mps" else rt.device)
    with torch.no_grad(), rt.autocast():
        for micro in prefetch(([batch] for batch in batches), rt.device):
            targets = micro[0][1]
            _, nats = module(*micro[0], n_targets=torch.ones((), device=rt.device))
            scored = targets >= 0
            n_bytes = torch.where(scored, token_bytes[targets.clamp(min=0)], 0).sum()
            totals += torch.stack([nats, scored.sum().to(nats), n_bytes.to(nats)]).to(totals)
    module.train()
    nats, tokens, n_bytes = rt.sum(totals).tolist()
    return dict(loss=nats / tokens, bpb=nats / math.log(2) / max(n_bytes, 1))


def sample(model, tokenizer, config, rt: Runtime, seed: int, num_samples: int = 1) -> list[str]:
    """Text after `sample_prompt`, with a random stream of its own, so that sampling does not change training."""
    prompts = [config.sample_prompt] * num_samples
    texts = complete(model, tokenizer, prompts, config.sample_tokens, rt, config.seed + seed, top_k=50)
    return [config.sample_prompt + text for text in texts]


def complete(model, tokenizer, prompts: list[str], max_tokens: int, rt: Runtime, seed: int, **options) -> list[str]:
    """What `model.generate` with `options` writes after each prompt, up to `<|endoftext|>`; all prompts at once."""
    generator = torch.Generator(rt.device).manual_seed(seed)
    ids = [tokenizer.encode_ordinary(prompt) or [tokenizer.eot_token] for prompt in prompts]
    options |= dict(stop_token=tokenizer.eot_token, n_tokens=len(tokenizer), generator=generator)
    with rt.autocast():
        rows = zip(*model.generate(ids, max_tokens, **options), strict=True)
        return [tokenizer.decode([t for t in row if t != tokenizer.eot_token]) for row in rows]


# ------------------------------------------------------------------------------------------------- before and after


def read_command_line(argv: list[str]) -> tuple[str, Config]:
    """The recipe, by its name in the first word, with the constants that the other words change."""
    recipe, args = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("gpt2", argv)
    if recipe not in RECIPES:
        raise UserError(f"there is no recipe {recipe}; the recipes are {', '.join(RECIPES)}")
    prog = "train_gpt2.py " + recipe
    config = parse_args(Config, args, replace(RECIPES[recipe]), prog, f"{__doc__}\nRecipes: {', '.join(RECIPES)}.")
    config.out_dir = config.out_dir or f"out/{recipe}"
    return recipe, config


def check(config: Config, rt: Runtime) -> None:
    """Refuse what cannot work, before anything is written. Raises UserError."""
    for name in "n_layer n_head n_embd sequence_length vocab_size total_batch_size max_steps max_lr".split():
        if getattr(config, name) <= 0:
            raise UserError(f"--{name} must be positive, not {getattr(config, name)}")
    if config.n_embd % config.n_head:
        raise UserError(
            f"--n_embd {config.n_embd} is not divisible by --n_head {config.n_head}; heads share the channels"
        )
    if config.fp8:
        if rt.dtype != torch.bfloat16 or (rt.device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9)):
            raise UserError(f"--fp8 needs bfloat16 and a GPU of compute capability 8.9 or more; this is {rt.why}")
        if config.n_embd % 16:
            raise UserError(f"--fp8 needs an --n_embd that is a multiple of 16, not {config.n_embd}")
    if not 0 <= config.dropout < 1:
        raise UserError(f"--dropout must be in [0, 1), not {config.dropout}")
    unit = config.sequence_length * max(config.micro_batch_size, 1) * rt.world_size
    if config.total_batch_size % unit:
        nearest = max(config.total_batch_size // unit, 1) * unit
        raise UserError(
            f"--total_batch_size {config.total_batch_size} is not divisible by {unit} = sequence_length "
            f"{config.sequence_length} x micro_batch_size {max(config.micro_batch_size, 1)} x {rt.world_size} ranks; "
            f"{nearest} is"
        )


def open_run(config: Config, rt: Runtime) -> Path | None:
    """Make the run directory; returns the checkpoint to resume from. Raises UserError rather than overwrite a run."""
    out_dir = Path(config.out_dir)
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f"--out_dir {out_dir} is a file; give a directory")
    holds_run = (out_dir / "log.jsonl").exists() or bool(checkpoint_steps(out_dir))
    if holds_run and not (config.resume or config.overwrite):
        raise UserError(
            f"{out_dir} already holds a run; --resume continues it, --overwrite replaces it, --out_dir avoids it"
        )
    rt.barrier()  # every rank has looked before the first one changes anything
    if rt.is_main:
        if holds_run and config.overwrite and not config.resume:
            for path in [*out_dir.glob("step_*"), *out_dir.glob("*.jsonl"), *out_dir.glob("samples.txt")]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"--out_dir {out_dir} cannot be made: {e.strerror}; give another one") from e
    rt.barrier()
    checkpoint = agree_on_checkpoint(config, rt) if config.resume else None
    if config.resume and checkpoint is None and checkpoint_steps(out_dir):
        raise UserError(f"no checkpoint of {out_dir} is undamaged; --overwrite starts again")
    if rt.is_main:
        (out_dir / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    return checkpoint


def open_data(config: Config, rt: Runtime) -> tuple:
    """(tokenizer, training stream, validation stream) of a shard directory, or of a .txt that is tokenized first."""
    if config.data.endswith(".txt"):
        cache = Path(config.out_dir).parent / "cache"
        if rt.is_main:
            prepare_text(config.data, config.tokenizer, config.vocab_size, cache)
        rt.barrier()
        shards = prepare_text(config.data, config.tokenizer, config.vocab_size, cache)
    else:
        shards = Path(config.data)
    train_paths, val_paths = find_shards(str(shards), "train"), find_shards(str(shards), "val")
    tokenizer = data_tokenizer(shards, config.tokenizer)
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, but vocab_size is {config.vocab_size}; "
            f"use --vocab_size {-(-len(tokenizer) // 128) * 128}"
        )
    return tokenizer, TokenStream(train_paths, config.vocab_size), TokenStream(val_paths, config.vocab_size)


def build_model(config: Config, checkpoint: Path | None, tokenizer, rt: Runtime) -> GPT:
    """Random weights, those of `init_from`, or those of the checkpoint to resume from; `config` takes on its sizes."""
    torch.manual_seed(config.seed)
    source = str(checkpoint) if checkpoint else config.init_from
    attention = choose_attention(config.attention, rt, config.sequence_length)
    sizes = ("n_layer", "n_head", "n_embd", "sequence_length", "vocab_size")
    if not source:
        return GPT(GPTConfig(dropout=config.dropout, attention=attention, **{k: getattr(config, k) for k in sizes}))
    model = load_model(source, config.dropout, attention)
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"{source} has {model.config.vocab_size} tokens, the data's tokenizer {len(tokenizer)}; they differ"
        )
    if config.sequence_length > model.config.sequence_length:
        raise UserError(
            f"{source} was made for {model.config.sequence_length} tokens; --sequence_length may not exceed it"
        )
    for name in ("n_layer", "n_head", "n_embd", "vocab_size"):
        if checkpoint and getattr(config, name) != getattr(model.config, name):
            raise UserError(
                f"{source} has {name} {getattr(model.config, name)}, not {getattr(config, name)}; --resume keeps sizes"
            )
        setattr(config, name, getattr(model.config, name))
    return model


def wrap(model: torch.nn.Module, rt: Runtime, dynamic: bool = False) -> Callable:
    """The model as the loop calls it: compiled and distributed where that is on. Shapes change only if `dynamic`."""
    forward = torch.compile(model, dynamic=dynamic) if rt.compile else model
    if rt.world_size > 1:
        ids = [rt.device.index] if rt.device.type == "cuda" else None
        forward = torch.nn.parallel.DistributedDataParallel(forward, device_ids=ids, gradient_as_bucket_view=True)
    return forward


def checkpoint_activations(model: GPT) -> None:
    """Keep only the input of each block for the backward pass, which computes the rest again (Chen et al. 2016)."""
    for block in model.transformer.h:
        block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)


def shard_optimizers(optimizers: list, rt: Runtime) -> list:
    """Optimizers that keep the state of this rank's share of the parameters only, and exchange the new parameters:
    stage 1 of ZeRO (Rajbhandari et al. 2020). In a checkpoint the state is whole again."""
    if rt.world_size == 1:
        return optimizers
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def shard(optimizer):
        known = inspect.signature(type(optimizer)).parameters
        constants = {name: value for name, value in optimizer.defaults.items() if name in known}
        return ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **constants)

    return [shard(optimizer) for optimizer in optimizers]


def find_micro_batch_size(forward, config, rt: Runtime) -> int:
    """The largest number of sequences per forward pass that fits: halved until nothing runs out of memory.

    It divides the sequences of a step on each rank; all ranks agree on the smallest. On a CPU, where memory is not the
    limit, it is the one that keeps about 4096 tokens at once in the caches.
    """
    rows = config.total_batch_size // config.sequence_length // rt.world_size
    sizes = [n for n in range(min(rows, 256), 0, -1) if rows % n == 0]
    if rt.device.type == "cpu":
        return next((n for n in sizes if n * config.sequence_length <= 4096), 1)

    peaks = {}  # bytes, by size

    def fits(size: int, forward) -> bool:
        rt.reset_peak_memory()
        mine = torch.tensor(int(has_memory_for(size, forward, config, rt)), device=rt.device)
        peaks[size] = rt.peak_memory()
        return int(rt.sum(mine)) == rt.world_size

    # a size that fits uncompiled fits compiled, too, which takes a minute to see; perhaps even the next larger one does
    uncompiled = getattr(getattr(forward, "module", forward), "_orig_mod", forward)
    largest = next((i for i, size in enumerate(sizes) if fits(size, uncompiled)), len(sizes))
    if largest > 0 and uncompiled is not forward and fits(sizes[largest - 1], forward):
        largest -= 1
    if largest == len(sizes):
        raise UserError("not even one sequence fits into the memory; use a smaller model or --sequence_length")
    rt.print(f"micro_batch_size {sizes[largest]} fits: {peaks[sizes[largest]] / 2**30:.1f} GiB at its peak")
    return sizes[largest]


def has_memory_for(size: int, forward, config, rt: Runtime) -> bool:
    """Try one forward and backward pass of `size` sequences, with the optimizer's state, which is not there yet."""
    rng = torch.get_rng_state()
    forward.require_backward_grad_sync = False  # of DDP: a rank that is out of memory would keep the others waiting
    idx = torch.randint(config.vocab_size, (size, config.sequence_length), device=rt.device)
    shares = rt.world_size if config.shard == "optimizer" else 1
    try:
        trained = [p for p in forward.parameters() if p.requires_grad]
        moments = [torch.empty(2 * p.numel() // shares, device=rt.device) for p in trained]
        with rt.autocast():
            _, loss = forward(idx, idx)
        loss.backward()
        del loss, moments
        return True
    except torch.OutOfMemoryError:
        return False
    finally:
        forward.zero_grad(set_to_none=True)
        torch.set_rng_state(rng)
        if rt.device.type == "cuda":
            torch.cuda.empty_cache()


def model_copy(model: GPT) -> GPT:
    """The model as it is now, in CPU memory, for a writer that works while training goes on."""
    with torch.device("meta"):
        copy = GPT(model.config)
    state = model.state_dict()
    state["lm_head.weight"] = None  # tied: copied once
    state = snapshot(state)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    copy.load_state_dict(state, assign=True)
    return copy


def save_model(path: Path, model: GPT, tokenizer) -> None:
    model.save_pretrained(path, tokenizer.eot_token, len(tokenizer))
    tokenizer.save(path)


def finish(recipe: str, config: Config, rt: Runtime, log: RunLog, model: GPT, tokenizer) -> None:
    """What was reached, four samples, and where to go from here."""
    val = [r for r in log.records if r["kind"] == "val"]
    for text in sample(model, tokenizer, config, rt, config.max_steps, num_samples=4):
        log.record(config.max_steps, dict(kind="sample", text=text))
    if val:
        print(f"\nvalidation loss {val[-1]['loss']:.4f} nats per token, {val[-1]['bpb']:.4f} bits per byte")
    print(f"{log.median_tokens_per_sec():,.0f} tokens/s, {rt.peak_memory() / 2**30:.2f} GiB of memory at the peak")
    given = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    steps = [i for i, word in enumerate(given) if word in ("--max_steps", "--max-steps")]
    words = [word for i, word in enumerate(given) if i not in steps and i - 1 not in steps]
    print(
        "\nNow try:\n"
        f"  python sample.py {config.out_dir} --num_samples 3    # more text\n"
        f"  {config.out_dir}/learning_curve.png    # how it went\n"
        f"  python train_gpt2.py {shlex.join(words)} --resume --max_steps {2 * config.max_steps}    # train on\n"
        "  python bpe/try_tokenizer.py    # what it reads instead of letters"
    )


if __name__ == "__main__":
    script(main)
