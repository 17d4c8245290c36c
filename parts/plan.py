"""The plan of a run: the memory, time and money that it needs, before a device is rented (`--dry_run`).

Memory in bytes, with N parameters, micro-batches of B sequences of T tokens, L blocks of H heads and C channels, V
tokens in the vocabulary, and e bytes per number in matrix products, 2 or 4:

    weights      4 N, and the blocks' 12 L C C matrices once more in 16 bits, unless activations are recomputed
    gradients    4 N, on one rank as on several
    moments      8 N for AdamW; Muon keeps one number of 4 bytes for each of the blocks' matrices
    activations  16 e B T C L, and e B T T H L with naive attention. With --activation_checkpointing one block has
                 them at a time, and each keeps its input, e B T C
    loss         e V for each position whose logits exist at once (parts/loss.py), 8 V C for the gradient of the table,
                 B T C (4 + 2 e) for the last hidden states; at least what one rank's compiled backward pass holds back,
                 the gradients of all weights

The sum is within 10% of the peak of PyTorch's allocator in a compiled run. It leaves out the step of Muon, which needs
several matrices at once, and the context of CUDA, 0.5 GB; `--micro_batch_size 0` measures what fits.
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from model import GPT, GPTConfig
from parts.cards import FLOPS, LAUNCHES, RATES
from parts.cli import UserError
from parts.loss import chunk_size
from parts.optim import make_optimizer
from parts.runtime import Runtime, checkpoint_activations
from parts.shards import open_shards
from parts.trials import find_micro_batch_size, timed_step


def print_plan(config, shape: GPTConfig, rt: Runtime) -> None:
    """Print what a run needs, how long its steps take on one card, and here. Nothing is written, and data need not
    be there yet.

    `config` is the settled Config of train_gpt2.py.
    """
    with torch.device("meta"):
        model = GPT(shape)
    B = config.micro_batch_size or 1
    needs = memory_by_kind(config, model, B)
    kinds = ", ".join(f"{kind} {n_bytes / 1e9:.2f}" for kind, n_bytes in needs.items())
    fits = ", ".join(f"{largest_batch(config, model, gb)} on {gb} GB" for gb in (16, 24, 40, 80))
    rt.print(
        f"model   {model.num_params():,} parameters\n"
        f"memory  {sum(needs.values()) / 1e9:.2f} GB at B = {B}: {kinds}\n"
        f"        largest B: {fits}\n"
        f"disk    {(4 * model.num_params() + needs['moments']) / 1e9:.2f} GB a checkpoint\n"
        f"time    {config.max_steps:,} steps of {config.total_batch_size:,} tokens, and 3% for evaluations and checkpoints"
    )
    for card, rate in RATES.items():
        rate *= FLOPS / model.estimate_flops(config.sequence_length)
        rt.print(about_time(config, card, min(rate, config.total_batch_size / LAUNCHES)))
    try:
        with TemporaryDirectory() as cache:  # for a text
            n_tokens = len(open_shards(config.data, config.tokenizer, config.vocab_size, Path(cache)).train)
        passes = config.max_steps * config.total_batch_size / n_tokens
        rt.print(f"data    {config.data}, {n_tokens:,} training tokens, {passes:,.2f} epochs")
    except UserError as e:
        rt.print(f"note: {e}")
    rt.print(about_time(config, "this machine", rate_here(config, shape, rt)))


def about_time(config, name: str, rate: float) -> str:
    """Describe the steps of a run at `rate` tokens/s."""
    seconds = 1.03 * config.max_steps * config.total_batch_size / rate  # 3%: gpt2's evaluations and checkpoints on an H100
    dollars = f"{seconds / 3600 * config.price:>14,.2f} dollars" if config.price else ""
    return f"{name:<14}{rate:>12,.0f} tokens/s {tqdm.format_interval(seconds):>12}{dollars}"


def memory_by_kind(config, model: GPT, n_sequences: int) -> dict[str, int]:
    """Return bytes with micro-batches of `n_sequences`; their sum is the peak. See the top. `model` may be on meta."""
    C = model.config.n_embd
    L = model.config.n_layer
    V = model.config.vocab_size
    N = model.num_params()
    matrices = 12 * L * C * C
    T = config.sequence_length
    n_tokens = n_sequences * T
    e = 4 if config.dtype == "float32" else 2
    block = 16 * e * n_tokens * C
    if config.attention == "naive":
        block += e * n_tokens * T * model.config.n_head
    recomputed = config.activation_checkpointing
    activations = block + e * n_tokens * C * L if recomputed else block * L
    n_positions = min(n_tokens, chunk_size(n_tokens, V, "cuda"))
    loss = e * n_positions * V + 8 * V * C + n_tokens * (4 + 2 * e) * C
    return dict(
        weights=4 * N + (0 if recomputed or e == 4 else e * matrices),
        gradients=4 * N,
        moments=8 * N - (4 * matrices if config.optimizer == "muon" else 0),
        activations=activations,
        loss=max(loss, 4 * N - activations),
    )


def largest_batch(config, model: GPT, gigabytes: int) -> int:
    """Return the largest micro-batch on a card, with 5% left for the context and for fragmentation; 0 if none fits."""
    batch = config.total_batch_size // config.sequence_length
    for size in range(min(batch, 1024), 0, -1):
        if batch % size == 0 and sum(memory_by_kind(config, model, size).values()) <= 0.95e9 * gigabytes:
            return size
    return 0


def rate_here(config, shape: GPTConfig, rt: Runtime) -> float:
    """Return tokens/s of this device with random weights.

    One micro-batch of each step is run, and counted as many times as the step has micro-batches.
    """
    model = GPT(shape).to(rt.device)
    if config.activation_checkpointing:
        checkpoint_activations(model.transformer.h)
    n_sequences = config.total_batch_size // config.sequence_length
    make = partial(make_optimizer, model, config, rt)
    size = config.micro_batch_size or find_micro_batch_size(model, n_sequences, config.sequence_length, rt, make)
    loss_fn = rt.compiled(model)
    optimizer = make()
    idx = torch.randint(config.vocab_size, (size, config.sequence_length), device=rt.device)
    for _ in range(2):  # the first one makes buffers and compiles
        passes, update = timed_step(loss_fn, (idx, idx), optimizer, rt)
        optimizer.zero_grad()
    return config.total_batch_size / (n_sequences // size * passes + update)
