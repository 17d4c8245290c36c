"""The plan of a run: the memory, disk, time and money that it needs, before a device is rented (`--dry_run`).

Memory and FLOPs are those of the model and optimizer as they are, also if somebody has changed them: one sequence goes
through them on tensors without data, which count what a backward pass will need and what the optimizer keeps. In bytes,
with N parameters, micro-batches of B sequences of T tokens, C channels, V tokens in the vocabulary, and e bytes per
number in matrix products, 2 or 4:

    weights      4 N, and, unless activations are recomputed, the blocks' matrices once more in 16 bits
    gradients    4 N, on one rank as on several
    moments      what the optimizer has after a step: 8 N for AdamW, less with Muon
    activations  e for each number that is saved for the backward pass: 16 T C a block of GPT-2. With
                 --activation_checkpointing one block at a time has them, and the others T C
    loss         e V for each position whose logits exist at once (parts/loss.py), 8 V C for the gradient of the table,
                 B T C (4 + 2 e) for the last hidden states; at least what one rank's compiled backward pass holds back,
                 the gradients of all weights

The sum is within 10% of the peak of PyTorch's allocator in a compiled run (tests/fake_gpu). It leaves out the step of
Muon, which needs several matrices at once, and the context of CUDA, 0.5 GB; `--micro_batch_size 0` measures what fits.
"""

import math
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from model import GPT, GPTConfig, GPTWithLoss
from parts.cli import UserError, counted, explain
from parts.files import free_bytes
from parts.loss import chunk_size
from parts.optim import make_optimizer
from parts.runtime import Runtime, checkpoint_activations
from parts.shards import TRAIN_FRACTION, open_shards
from parts.trials import find_micro_batch_size, timed_step

DEVICES = (16, 24, 40, 80)  # GB that GPUs come with
USABLE = 0.95  # of them; the rest is for the context and for fragmentation
# Tokens/s of GPT-2 124M on one card (docs/gpu.md); of public runs the middle. Other models in proportion to FLOPs: one
# that is larger is up to 15% faster than that
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


def print_plan(config, shape: GPTConfig, rt: Runtime) -> None:
    """Print what a run will do and need on a GPU, and how long it takes here. Raises UserError if it would be refused.

    `config` is the settled Config of train_gpt2.py. Nothing is written.
    """
    n_tokens = config.max_steps * config.total_batch_size
    problem = ""
    try:
        data = about_data(config)
    except (UserError, OSError) as e:
        problem = explain(e)
        data = f"unusable: {problem}"
    try:
        needs = measure_needs(config, shape)
    except (DataDependentOutputException, DynamicOutputShapeException) as e:  # as of experts, or Adafactor
        raise UserError(
            "there is no plan for a model or an optimizer that looks at numbers to decide what to compute; "
            "train for --max_steps 3"
        ) from e
    rt.print(
        f"model   {needs.parameters:,} parameters\n"
        f"steps   {config.max_steps:,} of {config.total_batch_size:,} tokens, {n_tokens:,} in all\n"
        f"data    {data}\n"
        f"disk    {about_disk(config, 4 * needs.parameters + needs.moments)}\n"
        f"memory  {about_memory(config, needs)}\n"
        "\ntime    of one card, without evaluations and checkpoints; eight take about an eighth, and cost the same\n"
    )
    header = f"{'':<15}{'tokens/s':>13}{'time':>13}"
    rt.print(header + (f"    dollars, at {config.price:g} an hour" if config.price else ""))
    here = rate_here(config, shape, rt, needs)
    rates = {"this machine": (here, "timed" if here else "has too little memory")}
    at_most = config.total_batch_size / LAUNCHES
    for card, (rate, source) in RATES.items():
        rate *= FLOPS / needs.flops
        rates[card] = (
            (rate, f"124M: {source}") if rate < at_most else (at_most, "at most: small steps wait for the host")
        )
    for name, (rate, source) in rates.items():
        hours = n_tokens / (rate or math.nan) / 3600
        time = f"{hours:,.2f} h  " if hours >= 1 else f"{60 * hours:,.1f} min"
        dollars = f"{hours * config.price:>11,.2f}" if config.price else ""
        rt.print(f"{name:<15}{rate:>13,.0f} {time:>12}{dollars}   {source}")
    if problem:
        raise UserError(f"this run would fail: {problem}")


def about_data(config) -> str:
    """The training data and its tokenizer; of a .txt only its size is read."""
    if config.data.endswith(".txt"):
        n_bytes = os.path.getsize(config.data)
        bytes_per_token = 3 if config.tokenizer == "train" else 4.5  # of English, about; 4.5 are GPT-2's
        passes = config.max_steps * config.total_batch_size / (TRAIN_FRACTION * n_bytes / bytes_per_token)
        return f"{config.data}, {tqdm.format_sizeof(n_bytes)}B of text, read about {passes:.2g} times"
    shards = open_shards(config.data, config.tokenizer, config.vocab_size, Path())
    n_tokens = len(shards.train)
    passes = config.max_steps * config.total_batch_size / n_tokens
    about = f"{config.data}, {n_tokens:,} training tokens, read {passes:.2g} times"
    return f"{about}; a tokenizer of {len(shards.tokenizer):,}"


def about_disk(config, n_bytes: int) -> str:
    """The checkpoints of a run, each of `n_bytes`, with the room where OUT_DIR will be."""
    n_saved = -(-config.max_steps // config.checkpoint_interval) if config.checkpoint_interval else 0
    n_kept = n_saved
    if config.keep_checkpoints:
        n_kept = min(n_saved, config.keep_checkpoints + 2)  # and the best one, and the one being written
    free = free_bytes(Path(config.out_dir))
    needed = n_kept * n_bytes
    sizes = f"{tqdm.format_sizeof(n_bytes)}B, at most {n_kept} at a time: {tqdm.format_sizeof(needed)}B"
    enough = "" if needed <= free else "; NOT ENOUGH"
    return f"{counted(n_saved, 'checkpoint')} of {sizes}, where {tqdm.format_sizeof(free)}B are free{enough}"


# ------------------------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class Needs:
    """What a model and its optimizer hold on a GPU: numbers, and bytes."""

    parameters: int
    flops: int  # per token
    moments: int
    copies: int  # of weights in 16 bits
    sequence: int  # activations of a sequence
    T: int
    C: int
    V: int
    e: int

    def by_kind(self, n_sequences: int) -> dict[str, int]:
        """Bytes with micro-batches of `n_sequences`; their sum is the peak. See the top."""
        n_tokens = n_sequences * self.T
        activations = n_sequences * self.sequence
        n_positions = min(n_tokens, chunk_size(n_tokens, self.V, "cuda"))
        logits = self.e * n_positions * self.V
        loss = logits + 8 * self.V * self.C + n_tokens * (4 + 2 * self.e) * self.C
        return dict(
            weights=4 * self.parameters + self.copies,
            gradients=4 * self.parameters,
            moments=self.moments,
            activations=activations,
            loss=max(loss, 4 * self.parameters - activations),
        )

    def peak(self, n_sequences: int) -> int:
        return sum(self.by_kind(n_sequences).values())


def measure_needs(config, shape: GPTConfig) -> Needs:
    """Let one sequence and one step of the optimizer pass through tensors without data."""
    T = config.sequence_length
    attention = "naive" if config.attention == "naive" else "flash"  # what a GPU would choose, not this machine
    saved = {}  # bytes of each storage, in fp32
    with FakeTensorMode():
        model = GPT(replace(shape, attention=attention))
        weights = {p.untyped_storage()._cdata for p in model.parameters()}

        def count(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                saved[storage._cdata] = (storage, storage.nbytes())  # the storage, so that no other gets its address
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model.hidden(torch.zeros(1, T, dtype=torch.long))
        plain = Runtime(torch.device("cpu"), torch.float32, False, 0, 1, "")
        optimizer = make_optimizer(model, config, plain)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for each in optimizer.optimizers:
            each.step()
        states = tree_leaves([each.state_dict()["state"] for each in optimizer.optimizers])
        moments = sum(state.nbytes for state in states if isinstance(state, torch.Tensor))
        parameters = model.num_params()
        flops = model.estimate_flops(T)
        matrices = sum(p.numel() for name, p in model.named_parameters() if ".h." in name and p.dim() == 2)
    e = 4 if config.dtype == "float32" else 2
    sequence = sum(n_bytes for _, n_bytes in saved.values()) * e // 4
    copies = matrices * e if e == 2 else 0
    if config.activation_checkpointing:
        sequence = sequence // shape.n_layer + e * T * shape.n_embd * shape.n_layer
        copies = 0
    return Needs(parameters, flops, moments, copies, sequence, T, shape.n_embd, shape.vocab_size, e)


def about_memory(config, needs: Needs) -> str:
    """What this recipe takes, and the largest micro-batch on each size of card."""
    batch = config.total_batch_size // config.sequence_length
    sizes = [size for size in range(1, min(batch, 1024) + 1) if batch % size == 0]
    B = config.micro_batch_size or 1
    parts = ", ".join(f"{kind} {n_bytes / 1e9:.2f}" for kind, n_bytes in needs.by_kind(B).items())
    fits = []
    for gb in DEVICES:
        fitting = [size for size in sizes if needs.peak(size) <= USABLE * 1e9 * gb]
        fits.append(f"{max(fitting, default='none')} of {gb} GB")
    total = f"{needs.peak(B) / 1e9:.2f} GB on each rank at B = {B}, in {8 * needs.e} bits: {parts}"
    return f"{total}\n        largest B on a card: {', '.join(fits)}"


# -------------------------------------------------------------------------------------------------------------- time


def rate_here(config, shape: GPTConfig, rt: Runtime, needs: Needs) -> float:
    """Tokens/s of this device with random weights; 0 if it has not the memory.

    One micro-batch of each step is run, and counted as many times as the step has micro-batches.
    """
    if rt.device.type == "cpu" and hasattr(os, "sysconf"):
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needs.peak(1) > 0.8 * has:
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
            size = find_micro_batch_size(GPTWithLoss(model), n_sequences, trial, rt, optimizer)
        loss_fn = GPTWithLoss(model, rt.compiled(model.hidden))
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
