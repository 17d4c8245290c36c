"""The plan of a run: the memory, disk, time and money that it needs, before a device is rented (`--dry_run`).

`print_plan` prints the page that a person reads; the rest are formulas.

L layers, C channels, H heads, V tokens in the vocabulary, N parameters; B sequences of T tokens in a micro-batch; W
ranks; e bytes per number in matrix products, 2 or 4, and r in the residual stream (model.py): 2 on a GPU with 16-bit
products, else 4. In bytes, with AdamW:

    weights      4 N. With --shard 4 N / W, and what is gathered: all of them (optimizer), or the embeddings and two
                 blocks, this one and the next (full). And, unless activations are recomputed, the blocks' matrices
                 once more in 16 bits, 12 L C^2 e
    gradients    4 N; on several ranks 8 N, with DDP's buckets. With --shard full 4 N / W
    optimizer    8 N; with --shard 8 N / W. Muon has one moment of each matrix, not two: 48 L C^2 less
    activations  B T L C (2 r + 14 e). For its backward pass a block keeps of each token the inputs of two norms (2 r);
                 those of four matrices (1 + 1 + 1 + 4), q, k and v (3), and the input of GELU (4). Naive attention
                 keeps B T L (H T e + C e) more. With --activation_checkpointing a block keeps its input alone,
                 B T L C r; one block at a time has all of this, after the loss, so that the larger of both counts
    loss         of the n positions whose logits exist at once (parts/loss.py): e n V on a GPU, 8 n V elsewhere; 8 V C
                 for the gradient of the table, which is scaled in a copy; B T C (4 + 2 e) for the last hidden states.
                 On one rank activations and this are 4 N at least, since a compiled backward pass has the gradients of
                 all weights before it adds them
    muon         a step has its largest stack of matrices of one shape, 16 L C^2, several times: MUON_STACKS. Counted
                 where this is more than the forward and backward pass take

The sum is the peak of a compiled run, within 10% of PyTorch's allocator (tests/fake_gpu); an eager one keeps the inputs
of norms in fp32, which makes up to 12% more, or, recomputed on one rank, up to a sixth less, since its gradients are
added one by one. A model is whole on each rank, 4 N, before it is sharded. A trial (`--micro_batch_size 0`) measures
the rest: dropout masks, fp16, what is not compiled. The device's context (0.5 GB on CUDA) is not counted; 5% are left
for it and for fragmentation.

This file runs no training and opens no run: it computes without a device, and reads only the sizes of data and disk.
"""

import os
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from model import GPTConfig
from parts.cards import peaks
from parts.cli import UserError, counted, explain
from parts.files import free_bytes
from parts.loss import chunk_size
from parts.runtime import Runtime
from parts.shards import open_shards

MOMENTS = {"adamw": 2, "muon": 1}  # numbers kept for each number of a block's matrices
CARDS = ("B200", "H200", "H100", "A100", "L40S", "RTX 4090", "RTX 3090")
DEVICES = (16, 24, 40, 80, 141)  # GB that GPUs come with
USABLE = 0.95  # of them
MICRO_BATCHES = (1, 8, 64)
RANKS = (1, 2, 4, 8)
MUON_STACKS = (2.5, 3)  # whole ones, and ones that are sharded over the ranks
# Fractions of the data sheets' peaks that a step of 124M reached on an H100, by the kernels of its profile
# (docs/benchmarks.md): of 16-bit products, and of memory's bandwidth by all the rest of the step, gaps included.
EFFICIENCY = dict(products=0.71, attention=0.23, memory=0.67)


@dataclass(frozen=True)
class Layout:
    """How a model is trained: on how many ranks, what they shard, and in which precision."""

    sequence_length: int  # tokens of a sequence in a step; the model may have more positions
    ranks: int = 1
    shard: str = "none"  # as it is on one rank
    optimizer: str = "adamw"
    itemsize: int = 2  # bytes per number in matrix products
    device: str = "cuda"
    checkpointing: bool = False


def print_plan(config, shape: GPTConfig, rt: Runtime) -> None:
    """Print what a run will do and need, for GPUs unless --device is cpu. Raises UserError if it would be refused.

    `config` is the resolved Config of train_gpt2.py. Nothing is written.
    """
    T = config.sequence_length
    tokens = config.max_steps * config.total_batch_size
    if config.device == "cpu":
        device, itemsize, attention = "cpu", rt.dtype.itemsize, config.attention
    else:  # what a GPU would choose, not this machine
        device, itemsize, attention = "cuda", 4 if config.dtype == "float32" else 2, "flash"
    shape = replace(shape, attention=attention)
    layout = Layout(
        sequence_length=T,
        shard="none",
        optimizer=config.optimizer,
        itemsize=itemsize,
        device=device,
        checkpointing=config.activation_checkpointing,
    )
    data, no_data = about_data(config)
    disk, no_room = about_disk(config, 4 * n_parameters(shape) + moments(shape, config.optimizer))
    lines = [
        f"model   {n_parameters(shape):,} parameters",
        f"steps   {config.max_steps:,} of {config.total_batch_size:,} tokens, {tokens:,} in all",
        f"data    {data}",
        f"disk    {disk}",
        f"memory  GB on each rank, {config.optimizer}, {8 * itemsize}-bit products, micro-batches of B sequences;",
        "        a formula, within 10%; --micro_batch_size 0 measures what fits\n",
        *memory_table(shape, layout, config.total_batch_size // T, config.micro_batch_size),
        "\ntime    estimated from data sheets and the profile of one H100; without the gradient exchange",
        "        between ranks, evaluations and checkpoints\n",
        *time_table(shape, T, tokens, config.price),
    ]
    rt.print("\n".join(lines))
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


def n_parameters(shape: GPTConfig) -> int:
    outside = (shape.vocab_size + shape.n_positions + 2) * shape.n_embd
    return outside + shape.n_layer * block_parameters(shape)


def block_parameters(shape: GPTConfig) -> int:
    return 12 * shape.n_embd**2 + 13 * shape.n_embd


def moments(shape: GPTConfig, optimizer: str) -> int:
    """Bytes of the optimizer's state."""
    matrices = 12 * shape.n_layer * shape.n_embd**2
    return 8 * n_parameters(shape) - 4 * (2 - MOMENTS[optimizer]) * matrices


def needs(shape: GPTConfig, layout: Layout, n_sequences: int) -> dict[str, int]:
    """Bytes of each rank by kind, for micro-batches of `n_sequences`; their sum is the peak. See the top."""
    L, C, V, N = shape.n_layer, shape.n_embd, shape.vocab_size, n_parameters(shape)
    e, T, W = layout.itemsize, layout.sequence_length, layout.ranks
    on_gpu = layout.device == "cuda"
    r = 2 if on_gpu and e == 2 else 4

    gathered = dict(none=0, optimizer=N, full=N - max(L - 2, 0) * block_parameters(shape))[layout.shard]
    gradients = dict(none=N * min(W, 2), optimizer=N, full=N // W)[layout.shard]
    if layout.shard == "none":
        W = 1
    copies = 0 if e == 4 or layout.checkpointing else 12 * L * C**2 * e
    resident = dict(
        weights=4 * (N // W + gathered) + copies,
        gradients=4 * gradients,
        optimizer=moments(shape, layout.optimizer) // W,
    )

    a_block = (2 * r + 14 * e) * C  # of each token
    if shape.attention == "naive":
        a_block += e * (shape.n_head * T + C)
    n_tokens = n_sequences * T
    activations = n_tokens * L * (r * C if layout.checkpointing else a_block)
    n_positions = min(n_tokens, chunk_size(n_tokens, V, layout.device))
    logits = (e if on_gpu else 8) * n_positions * V
    loss = logits + 8 * V * C + n_tokens * (4 + 2 * e) * C
    if layout.checkpointing:
        loss = max(loss, n_tokens * a_block)
    found = resident | dict(activations=activations, loss=loss)
    if layout.ranks == 1:
        found["loss"] = max(loss, 4 * N - activations)

    if layout.optimizer == "muon":
        whole, sharded = MUON_STACKS
        step = 8 * N // W + resident["optimizer"] + int(16 * L * C**2 * (whole + sharded / W))
        found["muon"] = max(0, step - sum(found.values()))
    return found


def memory_table(shape: GPTConfig, asked: Layout, batch: int, micro_batch: int) -> list[str]:
    """Lines: what a rank needs, by number of ranks, --shard and --activation_checkpointing, as far as `asked` leaves
    them open. `batch` is the sequences of a step, `micro_batch` those at a time, 0 for a choice of sizes."""
    columns = [micro_batch] if micro_batch else [size for size in MICRO_BATCHES if size <= batch]
    sizes = "".join(f"{f'B={size}':>9}" for size in columns)
    devices = "".join(f"{f'{gb} GB':>8}" for gb in DEVICES)
    lines = [f"ranks  --shard    activations{sizes}    largest B on{devices}"]
    ways = (asked.shard,)
    for ranks, way, recomputed in product(RANKS, ways, (False, True)):
        if (ranks == 1 and way != ways[0]) or (asked.checkpointing and not recomputed):
            continue
        shard = way if ranks > 1 else "none"
        layout = replace(asked, ranks=ranks, shard=shard, checkpointing=recomputed)
        possible = [size for size in {*columns, *(2**i for i in range(11))} if size * ranks <= batch]
        peak = {size: sum(needs(shape, layout, size).values()) for size in possible}
        line = f"{ranks:>5}  {shard:<11}{'recomputed' if recomputed else 'kept':<11}"
        for size in columns:
            cell = f"{peak[size] / 1e9:.2f}" if size in peak else "-"
            line += f"{cell:>9}"
        line += " " * 16
        for gb in DEVICES:
            fitting = [size for size in peak if peak[size] <= USABLE * 1e9 * gb]
            line += f"{max(fitting, default='-'):>8}"
        lines.append(line)
    return lines


# -------------------------------------------------------------------------------------------------------------- time


def token_flops(shape: GPTConfig, T: int) -> int:
    """Operations of a token, forward and backward, as `GPT.estimate_flops` counts them."""
    return 6 * (n_parameters(shape) - shape.n_positions * shape.n_embd) + 12 * shape.n_layer * shape.n_embd * T


def token_seconds(shape: GPTConfig, T: int, flops: float, bandwidth: float) -> float:
    """Of a token on a card with these peaks: compiled, in bf16, in micro-batches of 64 sequences."""
    L, C, V = shape.n_layer, shape.n_embd, shape.vocab_size
    # 2 operations a weight and token forward, 4 backward
    products = 6 * (12 * L * C + V) * C
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


def time_table(shape: GPTConfig, T: int, tokens: int, price: float) -> list[str]:
    """Lines: tokens/s of each card, the hours that `tokens` take, and the cost if an hour of one card costs `price`.

    Eight cards cost eight times as much an hour, and take an eighth of the hours: there is one cost.
    """
    header = f"{'card':<10}{'tokens/s':>10}{'MFU':>8}{'hours on 1':>13}{'on 8':>9}"
    if price:
        header += f"   dollars on 1 or 8, if an hour of one card costs {price:g}"
    lines = [header]
    for card in CARDS:
        flops, bandwidth = peaks(card)
        rate = 1 / token_seconds(shape, T, flops, bandwidth)
        hours = tokens / rate / 3600
        mfu = token_flops(shape, T) * rate / flops
        line = f"{card:<10}{rate:>10,.0f}{mfu:>8.1%}{hours:>13,.2f}{hours / 8:>9,.2f}"
        if price:
            line += f"{hours * price:>11,.0f}"
        lines.append(line)
    return lines
