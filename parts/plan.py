"""The plan of a run: the memory, disk, time and money that it needs, before a device is rented (`--dry_run`).

Memory in bytes, with N parameters, M of them in the blocks' matrices, micro-batches of B sequences of T tokens, L
blocks of H heads and C channels, V tokens in the vocabulary, and e bytes per number in matrix products, 2 or 4:

    weights      4 N, and M once more in 16 bits, unless activations are recomputed
    gradients    4 N, on one rank as on several
    moments      8 N for AdamW; Muon keeps one number of 4 bytes for each of M
    activations  16 e B T C L, and e B T T H L with naive attention. With --activation_checkpointing one block has
                 them at a time, and each keeps its input, e B T C
    loss         e V for each position whose logits exist at once (parts/loss.py), 8 V C for the gradient of the table,
                 B T C (4 + 2 e) for the last hidden states; at least what one rank's compiled backward pass holds back,
                 the gradients of all weights

The sum is within 10% of the peak of PyTorch's allocator in a compiled run. It leaves out the step of Muon, which needs
several matrices at once, and the context of CUDA, 0.5 GB; `--micro_batch_size 0` measures what fits.
"""

import math
import os
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from model import GPT, GPTConfig
from parts.cli import UserError, counted, explain
from parts.files import free_bytes
from parts.loss import chunk_size
from parts.optim import make_optimizer
from parts.runtime import Runtime, checkpoint_activations
from parts.shards import TRAIN_FRACTION, open_shards
from parts.trials import find_micro_batch_size, timed_step

DEVICES = (16, 24, 40, 80)  # GB that GPUs come with
USABLE = 0.95  # of them; the rest is for the context and for fragmentation
# Tokens/s of GPT-2 124M on one card (docs/gpu.md); of public runs the middle. Other models in proportion to FLOPs; a
# larger one is up to 15% faster than that
RATES = {
    "B200": (1_269_000, "estimated from data sheets"),
    "H200": (536_000, "measured"),
    "H100": (548_000, "measured"),
    "A100": (170_000, "public runs, 140,000 to 200,000"),
    "L40S": (115_000, "public runs, 105,000 to 125,000"),
    "RTX 4090": (108_000, "public runs, 106,000 to 110,500"),
    "RTX 3090": (61_500, "public runs, 60,000 to 63,100"),
}
FLOPS = 855_383_040  # per token, of that model with 1,024 tokens of context
LAUNCHES = 0.017  # seconds that a step takes at least, however small: those of `tiny` on an H100
WRITING = 3.5e8  # bytes/s of a checkpoint until it is on the disk: 124M with AdamW in 4.3 s (docs/benchmarks.md)


def print_plan(config, shape: GPTConfig, rt: Runtime) -> None:
    """Print what a run will do and need on a GPU, and how long it takes here. Raises UserError if it would be refused.

    `config` is the settled Config of train_gpt2.py. Nothing is written.
    """
    with torch.device("meta"):
        model = GPT(shape)
    problem = ""
    try:
        data = about_data(config)
    except (UserError, OSError) as e:
        problem = explain(e)
        data = f"unusable: {problem}"
    needs = memory_by_kind(config, model, config.micro_batch_size or 1)
    checkpoint = 4 * model.num_params() + needs["moments"]
    n_checkpoints = n_times(config.checkpoint_interval, config.max_steps)
    rt.print(
        f"model   {model.num_params():,} parameters\n"
        f"steps   {config.max_steps:,} of {config.total_batch_size:,} tokens\n"
        f"data    {data}\n"
        f"disk    {about_disk(config, n_checkpoints, checkpoint)}\n"
        f"memory  {about_memory(config, model, needs)}\n"
    )
    together = "eight take about an eighth" + (", and 5% more for Muon" if config.optimizer == "muon" else "")
    rt.print(f"time    of one card, with validation and checkpoints; {together}\n")
    header = f"{'':<15}{'tokens/s':>13}{'time':>13}"
    rt.print(header + (f"    dollars, at {config.price:g} an hour" if config.price else ""))
    here = rate_here(config, shape, rt, sum(needs.values()))
    rates = {"this machine": (here, "timed" if here else "has too little memory")}
    at_most = config.total_batch_size / LAUNCHES
    for card, (rate, source) in RATES.items():
        rates[card] = (rate * FLOPS / model.estimate_flops(config.sequence_length), f"124M: {source}")
        if rates[card][0] > at_most:
            rates[card] = (at_most, "at most: small steps wait for the host")
    # a forward pass takes a third of a step's time
    steps = config.max_steps + n_times(config.eval_interval, config.max_steps) * config.eval_steps / 3
    for name, (rate, source) in rates.items():
        seconds = steps * config.total_batch_size / (rate or math.nan) + n_checkpoints * checkpoint / WRITING
        time = f"{seconds / 3600:,.2f} h  " if seconds >= 3600 else f"{seconds / 60:,.1f} min"
        dollars = f"{seconds / 3600 * config.price:>11,.2f}" if config.price else ""
        rt.print(f"{name:<15}{rate:>13,.0f} {time:>12}{dollars}   {source}")
    if problem:
        raise UserError(f"this run would fail: {problem}")


def n_times(interval: int, max_steps: int) -> int:
    """Return how often something happens every `interval` steps and after the last; never for 0."""
    return math.ceil(max_steps / interval) if interval else 0


def about_data(config) -> str:
    """Describe the training data; of a .txt only its size is read."""
    if config.data.endswith(".txt"):
        bytes_per_token = 3 if config.tokenizer == "train" else 4.5  # of English, about; 4.5 are GPT-2's
        n_tokens = int(TRAIN_FRACTION * os.path.getsize(config.data) / bytes_per_token)
    else:
        n_tokens = len(open_shards(config.data, config.tokenizer, config.vocab_size, Path()).train)
    passes = config.max_steps * config.total_batch_size / n_tokens
    return f"{config.data}, {n_tokens:,} training tokens, read {passes:.2g} times"


def about_disk(config, n_checkpoints: int, n_bytes: int) -> str:
    """Describe the checkpoints of a run, each of `n_bytes`, and the room where OUT_DIR will be."""
    n_kept = n_checkpoints
    if config.keep_checkpoints:
        n_kept = min(n_checkpoints, config.keep_checkpoints + 2)  # and the best one, and the one being written
    free = free_bytes(Path(config.out_dir))
    needed = n_kept * n_bytes
    sizes = f"{tqdm.format_sizeof(n_bytes)}B, at most {n_kept} at a time: {tqdm.format_sizeof(needed)}B"
    enough = "" if needed <= free else "; NOT ENOUGH"
    return f"{counted(n_checkpoints, 'checkpoint')} of {sizes}, where {tqdm.format_sizeof(free)}B are free{enough}"


# ------------------------------------------------------------------------------------------------------------ memory


def memory_by_kind(config, model: GPT, n_sequences: int) -> dict[str, int]:
    """Return bytes with micro-batches of `n_sequences`; their sum is the peak. See the top. `model` may be on meta."""
    shape = model.config
    C = shape.n_embd
    L = shape.n_layer
    V = shape.vocab_size
    N = model.num_params()
    T = config.sequence_length
    n_tokens = n_sequences * T
    M = sum(p.numel() for name, p in model.named_parameters() if ".h." in name and p.dim() == 2)
    e = 4 if config.dtype == "float32" else 2
    block = 16 * e * n_tokens * C
    if config.attention == "naive":
        block += e * n_tokens * T * shape.n_head
    recomputed = config.activation_checkpointing
    activations = block + e * n_tokens * C * L if recomputed else block * L
    n_positions = min(n_tokens, chunk_size(n_tokens, V, "cuda"))
    loss = e * n_positions * V + 8 * V * C + n_tokens * (4 + 2 * e) * C
    return dict(
        weights=4 * N + (0 if recomputed or e == 4 else e * M),
        gradients=4 * N,
        moments=8 * N - (4 * M if config.optimizer == "muon" else 0),
        activations=activations,
        loss=max(loss, 4 * N - activations),
    )


def about_memory(config, model: GPT, needs: dict[str, int]) -> str:
    """Describe what this recipe takes, and the largest micro-batch on each size of card."""
    batch = config.total_batch_size // config.sequence_length
    sizes = [size for size in range(1, min(batch, 1024) + 1) if batch % size == 0]
    peaks = {size: sum(memory_by_kind(config, model, size).values()) for size in sizes}
    fits = []
    for gb in DEVICES:
        fitting = [size for size in sizes if peaks[size] <= USABLE * 1e9 * gb]
        fits.append(f"{max(fitting, default='none')} of {gb} GB")
    kinds = ", ".join(f"{kind} {n_bytes / 1e9:.2f}" for kind, n_bytes in needs.items())
    total = f"{sum(needs.values()) / 1e9:.2f} GB on each rank at B = {config.micro_batch_size or 1}: {kinds}"
    return f"{total}\n        largest B on a card: {', '.join(fits)}"


# -------------------------------------------------------------------------------------------------------------- time


def rate_here(config, shape: GPTConfig, rt: Runtime, n_bytes: int) -> float:
    """Return tokens/s of this device with random weights; 0 if it lacks the memory, on a CPU `n_bytes`.

    One micro-batch of each step is run, and counted as many times as the step has micro-batches.
    """
    if rt.device.type == "cpu" and hasattr(os, "sysconf"):
        if n_bytes > 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            return 0.0
    try:
        model = GPT(shape).to(rt.device)
        if config.activation_checkpointing:
            checkpoint_activations(model.transformer.h)
        n_sequences = config.total_batch_size // config.sequence_length
        size = config.micro_batch_size
        if not size:
            trial = (config.sequence_length, config.vocab_size)
            optimizer = partial(make_optimizer, model, config, rt)
            size = find_micro_batch_size(model, n_sequences, trial, rt, optimizer)
        loss_fn = rt.compiled(model)
        optimizer = make_optimizer(model, config, rt)
        idx = torch.randint(config.vocab_size, (size, config.sequence_length), device=rt.device)
        steps = []
        for _ in range(4):
            passes, update = timed_step(loss_fn, (idx, idx), optimizer, rt)
            optimizer.zero_grad()
            steps.append(n_sequences // size * passes + update)
            if rt.device.type == "cpu" and passes > 10:
                break
        # the first one makes buffers and compiles: it counts alone where nobody wants to wait for the others
        return config.total_batch_size / min(steps[1:] or steps)
    except (UserError, torch.OutOfMemoryError):
        return 0.0
