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

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig, GPTWithLoss
from parts.cards import peaks
from parts.cli import UserError, counted, explain
from parts.files import free_bytes
from parts.loss import chunk_size
from parts.optim import Optimizer, make_optimizer
from parts.runtime import Runtime, checkpoint_activations
from parts.shards import open_shards
from parts.trials import find_micro_batch_size

DEVICES = (16, 24, 40, 80)  # GB that GPUs come with
USABLE = 0.95  # of them; the rest is for the context and for fragmentation
# Tokens/s of GPT-2 124M in public runs, lowest and highest (docs/gpu.md); of others nothing is known but data sheets
PUBLIC = {
    "A100": (140_000, 200_000),
    "L40S": (105_000, 125_000),
    "RTX 4090": (106_000, 110_500),
    "RTX 3090": (60_000, 63_100),
}
CARDS = ("B200", "H200", "H100", *PUBLIC)
IN_PRODUCTS = 123_689_472  # parameters of that model in matrix products
# Fractions of the data sheets' peaks that a step of 124M reached on an H100, by the kernels of its profile
# (docs/benchmarks.md): of 16-bit products, and of memory's bandwidth by all the rest of the step, gaps included.
EFFICIENCY = dict(products=0.71, attention=0.23, memory=0.67)


def print_plan(config, shape: GPTConfig, rt: Runtime) -> None:
    """Print what a run will do and need on a GPU, and how long it takes here. Raises UserError if it would be refused.

    `config` is the settled Config of train_gpt2.py. Nothing is written.
    """
    T = config.sequence_length
    n_tokens = config.max_steps * config.total_batch_size
    data, no_data = about_data(config)
    try:
        needs = measure_needs(config, shape)
    except (DataDependentOutputException, DynamicOutputShapeException) as e:  # as of experts, or Adafactor
        raise UserError(
            "there is no plan for a model or an optimizer that looks at numbers to decide what to compute; "
            "train for --max_steps 3"
        ) from e
    disk, no_room = about_disk(config, 4 * needs.parameters + needs.moments)
    rt.print(
        f"model   {needs.parameters:,} parameters\n"
        f"steps   {config.max_steps:,} of {config.total_batch_size:,} tokens, {n_tokens:,} in all\n"
        f"data    {data}\n"
        f"disk    {disk}\n"
        f"memory  {about_memory(config, needs)}\n"
        "\ntime    without evaluations, checkpoints and the exchange of gradients between ranks\n"
    )
    header = f"{'':<15}{'tokens/s':>10}{'MFU':>8}{'hours on 1':>13}{'on 8':>9}"
    rt.print(header + (f"   dollars on 1 or 8, at {config.price:g} an hour of one" if config.price else ""))
    rate = rate_here(config, shape, rt, needs) if rt.is_main else None
    here = "this machine"
    if rate:
        hours = n_tokens / rate / 3600
        rt.print(f"{here:<15}{rate:>10,.0f}{'':>8}{hours:>13,.2f}{'':>9}   timed, three steps")
    else:
        rt.print(f"{here:<15}{'-':>10}   has too little memory")
    for card in CARDS:
        rt.print(time_row(card, needs, shape, T, n_tokens, config.price))
    if problem := no_data or no_room:
        raise UserError(f"this run would fail: {problem}")


def about_data(config) -> tuple[str, str]:
    """The training data and its tokenizer, and why they are unusable or ""; of a .txt only its size is read."""
    try:
        if config.data.endswith(".txt"):
            return f"{config.data}, {os.path.getsize(config.data) / 1e6:,.1f} MB of text", ""
        shards = open_shards(config.data, config.tokenizer, config.vocab_size, Path())
    except (UserError, OSError) as e:
        return f"unusable: {explain(e)}", explain(e)
    n_tokens = len(shards.train)
    passes = config.max_steps * config.total_batch_size / n_tokens
    about = f"{config.data}, {n_tokens:,} training tokens, read {passes:.2g} times"
    return f"{about}; a tokenizer of {len(shards.tokenizer):,}", ""


def about_disk(config, n_bytes: int) -> tuple[str, str]:
    """The checkpoints of a run, each of `n_bytes`, with the room where OUT_DIR will be; and what is lacking, or ""."""
    n_saved = 0
    if config.checkpoint_interval:
        n_saved = -(-config.max_steps // config.checkpoint_interval)
    n_kept = n_saved
    if config.keep_checkpoints:
        n_kept = min(n_saved, config.keep_checkpoints + 2)  # and the best one, and the one being written
    free = free_bytes(Path(config.out_dir))
    needed = f"{n_kept * n_bytes / 1e9:.1f} of {free / 1e9:.1f} GB free"
    about = f"{counted(n_saved, 'checkpoint')} of {n_bytes / 1e9:.3g} GB, {n_kept} at once: {needed}"
    if n_kept * n_bytes <= free:
        return about, ""
    return f"{about}; NOT ENOUGH", f"the checkpoints take {needed}; keep fewer, or choose another --out_dir"


# ------------------------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class Needs:
    """What a model and its optimizer hold on a GPU: numbers of parameters, and bytes."""

    parameters: int
    in_products: int  # of them in matrix products
    moments: int
    copies: int  # of weights in 16 bits
    sequence: int  # activations of a sequence
    itemsize: int
    shape: GPTConfig
    T: int

    def by_kind(self, n_sequences: int) -> dict[str, int]:
        """Bytes with micro-batches of `n_sequences`; their sum is the peak. See the top."""
        C, V, e = self.shape.n_embd, self.shape.vocab_size, self.itemsize
        n_tokens = n_sequences * self.T
        activations = n_sequences * self.sequence
        n_positions = min(n_tokens, chunk_size(n_tokens, V, "cuda"))
        loss = e * n_positions * V + 8 * V * C + n_tokens * (4 + 2 * e) * C
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
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        matrices = sum(p.numel() for name, p in model.named_parameters() if ".h." in name and p.dim() == 2)
    e = 4 if config.dtype == "float32" else 2
    sequence = sum(n_bytes for _, n_bytes in saved.values()) * e // 4
    copies = matrices * e if e == 2 else 0
    if config.activation_checkpointing:
        sequence = sequence // shape.n_layer + e * T * shape.n_embd * shape.n_layer
        copies = 0
    in_products = sum(size for name, size in sizes.items() if "wpe" not in name)
    return Needs(parameters, in_products, moments, copies, sequence, e, shape, T)


def about_memory(config, needs: Needs) -> str:
    """What this recipe takes, and the largest micro-batch on each size of card."""
    batch = config.total_batch_size // config.sequence_length
    sizes = [size for size in range(1, min(batch, 1024) + 1) if batch % size == 0]
    B = config.micro_batch_size or 1
    parts = ", ".join(f"{kind} {n_bytes / 1e9:.2f}" for kind, n_bytes in needs.by_kind(B).items())
    fits = []
    for gb in DEVICES:
        fitting = [size for size in sizes if needs.peak(size) <= USABLE * 1e9 * gb]
        fits.append(f"{max(fitting, default='none')} on {gb}")
    total = f"{needs.peak(B) / 1e9:.2f} GB on each rank at B = {B}, in {8 * needs.itemsize} bits: {parts}"
    return f"{total}\n        largest B in GB: {', '.join(fits)}"


# -------------------------------------------------------------------------------------------------------------- time


def rate_here(config, shape: GPTConfig, rt: Runtime, needs: Needs) -> float | None:
    """Tokens/s of this machine with random weights; None if it has not the memory."""
    if rt.device.type == "cpu" and hasattr(os, "sysconf"):
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needs.peak(1) > 0.8 * has:
            return None
    try:
        model = GPT(shape).to(rt.device)
        if config.activation_checkpointing:
            checkpoint_activations(model.transformer.h)
        per_rank = config.total_batch_size // config.sequence_length // rt.world_size
        size = config.micro_batch_size
        if not size:
            alone = replace(rt, world_size=1)  # the other ranks are not asked
            trial = (config.sequence_length, config.vocab_size)
            optimizer = partial(make_optimizer, model, config, rt)
            size = find_micro_batch_size(GPTWithLoss(model), per_rank, trial, alone, optimizer)
        loss_fn = GPTWithLoss(model, rt.compiled(model.hidden))
        optimizer = make_optimizer(model, config, rt)
        idx = torch.randint(config.vocab_size, (size, config.sequence_length), device=rt.device)
        return rt.world_size * time_steps(lambda: loss_fn(idx, idx), optimizer, idx.numel(), per_rank // size, rt)
    except (UserError, torch.OutOfMemoryError):
        return None


def time_steps(loss_fn, optimizer: Optimizer, n_tokens: int, n_micro_batches: int, rt: Runtime, n_steps=3) -> float:
    """Tokens/s of steps of `n_micro_batches`, of `n_tokens` tokens each, whose loss is `loss_fn()`.

    One micro-batch of each step is run and counted `n_micro_batches` times. The first step makes buffers and compiles,
    and counts only if it takes longer than anybody wants to wait for the others.
    """
    steps = []
    for _ in range(1 + n_steps):
        begun = rt.mark_time()
        with rt.autocast():
            loss = loss_fn()
        optimizer.scale(loss).backward()
        ended = rt.mark_time()
        optimizer.step(finite=optimizer.clip_grad_norm(1.0).isfinite())
        optimizer.zero_grad()
        updated = rt.mark_time()
        rt.synchronize()
        steps.append(n_micro_batches * rt.seconds_between(begun, ended) + rt.seconds_between(ended, updated))
        if rt.device.type == "cpu" and rt.seconds_between(begun, updated) > 10:
            break
    return n_micro_batches * n_tokens / min(steps[1:] or steps)


def token_seconds(shape: GPTConfig, T: int, n_products: int, flops: float, bandwidth: float) -> float:
    """Of a token on a card with these peaks: compiled, in bf16, in micro-batches of 64 sequences. `n_products` are the
    parameters that take part in matrix products."""
    L, C, V = shape.n_layer, shape.n_embd, shape.vocab_size
    # 2 operations a weight and token forward, 4 backward
    products = 6 * n_products
    # 2 products forward, 5 backward, of T C operations each: half of the square is masked
    attention = 7 * L * C * T
    # Bytes that a block moves for each channel. Two norms and additions: residual and branch are read, sum and norm are
    # written, 2 (2 + 2 + 2 + 2); backward one more is read, 2 x 10. GELU, 4 C wide: read, write; backward two are
    # read, 4 x 10. Gradients of q, k and v are put side by side, 3 (2 + 2). For the gradients of two biases the
    # gradients of the residual are read again, 2 x 2; the other two are summed where they are computed. The loss reads
    # each logit, and overwrites it with its gradient
    memory = L * C * (16 + 20 + 40 + 12 + 4) + V * (2 + 2)
    return (
        products / (EFFICIENCY["products"] * flops)
        + attention / (EFFICIENCY["attention"] * flops)
        + memory / (EFFICIENCY["memory"] * bandwidth)
    )


def time_row(card: str, needs: Needs, shape: GPTConfig, T: int, n_tokens: int, price: float) -> str:
    """Tokens/s of a card, the hours that `n_tokens` take, and the cost if an hour of one card costs `price`: eight
    cards cost eight times as much an hour, and take an eighth of the hours.

    From data sheets and the profile of one H100; where 124M has public runs, in proportion to their rates.
    """
    flops, bandwidth = peaks(card)
    seconds = token_seconds(shape, T, needs.in_products, flops, bandwidth)
    rates = [1 / seconds]
    source = "estimated from its data sheet"
    if card == "H100":
        source = "estimated; measured for 124M: 548,050"
    if card in PUBLIC:
        small = GPTConfig(vocab_size=50304)
        estimate = 1 / token_seconds(small, 1024, IN_PRODUCTS, flops, bandwidth)
        rates = [rate / estimate / seconds for rate in PUBLIC[card]]
        source = f"from public runs of 124M: {rates[0]:,.0f} to {rates[1]:,.0f}"
    rate = sum(rates) / len(rates)
    hours = n_tokens / rate / 3600
    per_token = 6 * needs.in_products + 12 * shape.n_layer * shape.n_embd * T
    row = f"{card:<15}{rate:>10,.0f}{per_token * rate / flops:>8.1%}{hours:>13,.2f}{hours / 8:>9,.2f}"
    if price:
        row += f"{hours * price:>9,.0f}"
    return f"{row}   {source}"
