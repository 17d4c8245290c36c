"""The plan of a run: the memory, disk, time and money that it needs, before a device is rented (`--dry_run`).

`print_plan` prints the page that a person reads; the rest are formulas.

L layers, C channels, H heads, P positions of context, V tokens in the vocabulary; B sequences of T tokens in a
micro-batch; W ranks; e bytes per number in matrix products, 2 or 4. The parameters are

    N_root = (V + P + 2) C outside the blocks, N_block = 12 C^2 + 13 C in each, N = N_root + L N_block in all

In bytes, in a step of several micro-batches, so that gradients exist when the next one starts:

    --shard      none                       optimizer                          full
    weights      4 N                        4 N / W, and 4 N gathered          4 N / W, and 4 N_root + 4 times two
                                                                               blocks gathered: this one and the next
    copies       of all matrices for the products, 12 L C^2 e, where e is 2
    gradients    4 N; on several ranks      4 N, and those of a block twice;   4 N / W; in the backward pass those of
                 8 N with DDP's buckets     as they are sharded, they shrink   a block are whole
    optimizer    8 N, less 48 L C^2 with    the same / W                       the same / W
                 Muon: one moment, not two

    activations  B T C (L (8 + 14 e) + 4 + 4 e) + B T L (16 + 4 H). For its backward pass a block keeps of each token:
                 two residuals in fp32 (8); the inputs of four matrices (1 + 1 + 1 + 4), q, k and v (3), the input of
                 GELU (4); mean and deviation of two norms (16) and the sum of each head's weights (4 H). Naive
                 attention keeps B T L (H T e + C e) more. With --activation_checkpointing a block keeps its input
                 alone, 4 B T C
    logits       the largest of four moments: 8 n V + 4 V C, when the n positions whose logits exist at once (loss.py)
                 have a copy in fp32 and its softmax, beside the sum of the projection's gradients; e n V + 8 V C, when
                 they add to that sum; 8 V C and a block's recomputed activations, when the backward pass starts;
                 12 V C, when activations are gone: the gradients of the tied table's two uses, and their sum.
                 Besides e V C for the table in 16 bits
    compiled     activations end with 4 + 2 e in place of 4 + 4 e, and with --shard, where each block and the loss are
                 compiled by themselves, with 4 + 3 e, and a block keeps one residual in the products' dtype: 4 + 15 e
                 in place of 8 + 14 e. With --activation_checkpointing there are no copies; activations end with 2 e
                 (with --shard 4 + 3 e), and a block that is recomputed has 8 C more of each token. The logits'
                 moments are 2 e n V + 4 V C for each chunk before this one, and the table in 16 bits; e n V and 4 V C
                 for each chunk; 8 V C (with --shard 4 V C) and recomputed activations; and on one rank 4 N, rounded
                 up by 5%, and 4 V C, without activations and copies, when a backward pass that is one graph has the
                 gradients of all weights before it adds them
    muon         by how much Muon's step exceeds the forward and backward pass, 0 if it does not. Then activations,
                 copies and gathered weights are gone, and it needs 2.5 + 3 / W times its largest stack of matrices of
                 one shape, 16 L C^2, where W is 1 with --shard none
    allocator    of PyTorch, on CUDA: 2% of what does not grow with B, which it rounds up, and cuBLAS's workspaces

The sum is the peak, compiled or not. tests/fake_gpu compares all this with PyTorch's allocator. Not counted: dropout
masks, the context of the device (0.5 GB on CUDA), and fragmentation (5% is reserved for it). The trial of micro-batches
measures what is not compiled.

The time is an estimate, with the fractions of the peaks that one step reached on an H200, and leaves out what ranks
spend on exchanging gradients: see `step_parts`.

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
from parts.optim import MOMENTS
from parts.runtime import Runtime
from parts.shards import open_shards

CARDS = ("B200", "H200", "H100", "A100", "L40S", "RTX 4090", "RTX 3090")
DEVICES = (16, 24, 40, 80, 141)  # GB that GPUs come with
WORKSPACES = 2 * 33_554_432  # bytes that cuBLAS takes on Hopper, for the forward and the backward pass; else a quarter
MICRO_BATCHES = (1, 8, 64)
RANKS = (1, 2, 4, 8)
STEP = 2**16  # tokens of the step whose time is estimated: 64 sequences of 1,024
# of the peaks, by the kernels of a profiled step on an H200 (docs/h200.md); `memory` with the gaps between kernels
REACHED = dict(matrix=0.72, attention=0.25, memory=0.66)


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
    compiled: bool = False


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
        shard=config.shard,
        optimizer=config.optimizer,
        itemsize=itemsize,
        device=device,
        checkpointing=config.activation_checkpointing,
        compiled=device == "cuda" and config.compile != "off",
    )
    data, no_data = about_data(config)
    n_bytes = 4 * n_parameters(shape) + state(shape, layout)["optimizer"]  # of a checkpoint
    disk, no_room = about_disk(config, n_bytes)
    lines = [
        f"model   {n_parameters(shape):,} parameters",
        f"steps   {config.max_steps:,} of {config.total_batch_size:,} tokens, {tokens:,} in all",
        f"data    {data}",
        f"disk    {disk}",
        f"memory  GB on each rank, {config.optimizer}, {8 * itemsize}-bit products, micro-batches of B sequences;",
        "        with torch.compile on a GPU, unless --compile off; --micro_batch_size 0 tries without\n",
        *memory_table(shape, layout, config.total_batch_size // T, config.micro_batch_size),
        "\ntime    estimated from data sheets and the profile of one H200; without the gradient exchange",
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
    C = shape.n_embd
    return (shape.vocab_size + shape.n_positions + 2) * C + shape.n_layer * (12 * C**2 + 13 * C)


def state(shape: GPTConfig, layout: Layout) -> dict[str, int]:
    """Weights, gradients and optimizer: what does not grow with the micro-batch."""
    L, C, W = shape.n_layer, shape.n_embd, layout.ranks
    N = n_parameters(shape)
    moments = 8 * N - (2 - MOMENTS[layout.optimizer]) * 4 * 12 * L * C**2
    copies = 0
    if layout.itemsize == 2 and not (layout.compiled and layout.checkpointing):
        copies = 12 * L * C**2 * layout.itemsize
    block = 12 * C**2 + 13 * C
    if layout.shard == "none":
        gathered = 0
        gradients = N * min(W, 2)
        W = 1
    elif layout.shard == "optimizer":
        gathered = N
        gradients = N + block
    else:
        gathered = N - max(L - 2, 0) * block  # two blocks at a time, and what is outside of them
        gradients = N // W
    return dict(weights=4 * (N // W + gathered), copies=copies, gradients=4 * gradients, optimizer=moments // W)


def needs(shape: GPTConfig, layout: Layout, n_sequences: int) -> dict[str, int]:
    """Bytes of each rank by kind, for micro-batches of `n_sequences`; their sum is the peak. See the top."""
    L, C, V = shape.n_layer, shape.n_embd, shape.vocab_size
    T, e = layout.sequence_length, layout.itemsize
    a_block = (8 + 14 * e) * C + 16 + 4 * shape.n_head
    outside = (4 + 4 * e) * C
    if layout.compiled:
        outside -= 2 * e * C
        if layout.shard != "none":  # blocks and loss are compiled by themselves
            a_block -= (4 - e) * C
            outside += e * C
    if shape.attention == "naive":
        a_block += e * (shape.n_head * T + C)
    kept = L * a_block
    recomputed = 0
    if layout.checkpointing:
        kept = L * 4 * C
        recomputed = a_block
        if layout.compiled:  # by measurement, as all of the compiled form
            recomputed += 8 * C
            if layout.shard == "none":
                outside -= 4 * C
    n_tokens = n_sequences * T
    activations = n_tokens * (kept + outside)
    found = state(shape, layout)
    n_positions = min(n_tokens, chunk_size(n_tokens, V, layout.device, layout.compiled))
    gradient = 4 * V * C
    table = (4 - e) * V * C  # its copy in 16 bits; there is none in fp32
    backward = n_tokens * recomputed + 2 * gradient
    if layout.compiled:
        n_chunks = -(-n_tokens // n_positions)
        if layout.shard != "none":
            backward -= gradient
        logits = max(
            2 * e * n_positions * V + (n_chunks - 1) * gradient + table,
            e * n_positions * V + n_chunks * gradient,
            backward,
        )
        if layout.ranks == 1:  # one graph has the gradients of all weights before it adds them; 5% for rounding up
            logits = max(logits, found["weights"] * 21 // 20 + gradient - found["copies"] - activations)
    else:
        if layout.shard == "full":  # the gradients of a block, before they are sharded
            backward += 4 * (12 * C**2 + 13 * C)
        logits = table + max(
            8 * n_positions * V + gradient,
            e * n_positions * V + 2 * gradient,
            backward,
            3 * gradient - activations,
        )
    found |= dict(activations=activations, logits=logits)
    if layout.optimizer == "muon":
        W = 1 if layout.shard == "none" else layout.ranks
        resident = found["weights"] + found["gradients"]
        if W > 1:  # without what was gathered
            resident = 8 * n_parameters(shape) // W
        stacks = int(16 * L * C**2 * (2.5 + 3 / W))
        found["muon"] = max(0, resident + found["optimizer"] + stacks - sum(found.values()))
    if layout.device == "cuda":
        found["allocator"] = WORKSPACES + sum(state(shape, layout).values()) // 50
    return found


def memory_table(shape: GPTConfig, asked: Layout, batch: int, micro_batch: int) -> list[str]:
    """Lines: what a rank needs, by number of ranks, --shard and --activation_checkpointing, as far as `asked` leaves
    them open. `batch` is the sequences of a step, `micro_batch` those at a time, 0 for a choice of sizes."""
    columns = [micro_batch] if micro_batch else [size for size in MICRO_BATCHES if size <= batch]
    sizes = "".join(f"{f'B={size}':>9}" for size in columns)
    devices = "".join(f"{f'{gb} GB':>8}" for gb in DEVICES)
    lines = [f"ranks  --shard    activations{sizes}    largest B on{devices}"]
    ways = ("none", "optimizer", "full") if asked.shard == "none" else (asked.shard,)
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
            fitting = [size for size in peak if peak[size] <= 0.95e9 * gb]
            line += f"{max(fitting, default='-'):>8}"
        lines.append(line)
    return lines


# -------------------------------------------------------------------------------------------------------------- time


def token_flops(shape: GPTConfig, T: int) -> int:
    """Operations of a token, forward and backward, as `GPT.estimate_flops` counts them."""
    return 6 * (n_parameters(shape) - shape.n_positions * shape.n_embd) + 12 * shape.n_layer * shape.n_embd * T


def step_parts(shape, T: int) -> dict[str, tuple[str, float]]:
    """{name: (bound, operations or bytes)} of STEP tokens in one micro-batch: compiled, in bf16 autocast, with AdamW. A
    number has 2 bytes in bf16, 4 in fp32 (residuals, weights)."""
    L, C, V, N = shape.n_layer, shape.n_embd, shape.vocab_size, n_parameters(shape)
    a_block = STEP * L * C  # numbers of one activation as wide as the residual stream, in all blocks
    sums = -(-STEP // chunk_size(STEP, V, "cuda", True)) * V * C  # numbers that the chunks of the loss add
    return {
        # 2 operations a weight and token forward, 4 backward
        "products of the blocks": ("matrix", 6 * 12 * a_block * C),
        "products of the head": ("matrix", 6 * STEP * V * C),
        # 2 products forward, 5 backward, of T^2 C operations each: half of the square is masked
        "attention": ("attention", 7 * a_block * T),
        # Norms and residuals, twice a block: read residual and branch, write the sum and its norm, 2 (4 + 2 + 4 + 2);
        # backward one more is read, 2 (2 + 4 + 4 + 4 + 2). GELU, 4 C wide: read, write; backward two are read, 4 x 10.
        # Gradients of biases and gains: outputs of four products, (3 + 1 + 4 + 1) C wide, and inputs and gradients of
        # two norms are read again, 9 x 2 + 2 (2 + 4). Gradients of q, k and v are put side by side, 3 (2 + 2)
        "between the products": ("memory", a_block * (56 + 40 + 30 + 12)),
        # read for the sum of exponentials, read again, gradients written
        "loss": ("memory", STEP * V * (2 + 2 + 2)),
        # AdamW (4 read, 3 written), the norm, clipping, casts of weights and gradients; embeddings
        "optimizer, casts, embeddings": ("memory", N * (7 * 4 + 4 + 8 + 6 + 6) + sums * 12 + STEP * C * 24),
    }


def time_table(shape: GPTConfig, T: int, tokens: int, price: float) -> list[str]:
    """Lines: tokens/s of each card, the hours that `tokens` take, and the cost if an hour of one card costs `price`.

    Eight cards cost eight times as much an hour, and take an eighth of the hours: there is one cost.
    """
    header = f"{'card':<10}{'tokens/s':>10}{'MFU':>8}{'hours on 1':>13}{'on 8':>9}"
    if price:
        header += f"   dollars on 1 or 8, if an hour of one card costs {price:g}"
    lines = [header]
    parts = step_parts(shape, T).values()
    for card in CARDS:
        flops, bandwidth = peaks(card)
        seconds = 0.0
        for bound, work in parts:
            peak = bandwidth if bound == "memory" else flops
            seconds += work / peak / REACHED[bound]
        rate = STEP / seconds
        hours = tokens / rate / 3600
        mfu = token_flops(shape, T) * rate / flops
        line = f"{card:<10}{rate:>10,.0f}{mfu:>8.1%}{hours:>13,.2f}{hours / 8:>9,.2f}"
        if price:
            line += f"{hours * price:>11,.0f}"
        lines.append(line)
    return lines
