"""The memory that training takes on each rank, before a device is rented: a formula, and the table of --dry_run.

L layers, C channels, H heads, T tokens of context, V tokens in the vocabulary; B sequences a micro-batch; W ranks,
which divide a copy of the model; e bytes a number in matrix products, 2 or 4. Outside of blocks and in a block there
are

    N_root = (V + T + 2) C and N_block = 12 C^2 + 13 C parameters, N = N_root + L N_block in all

In bytes, and in a step of several micro-batches, so that gradients are there when the next one begins:

    --shard      none                       optimizer                          full
    weights      4 N                        4 N / W, and gathered 4 N          4 N / W, and gathered 4 N_root + 4 times
                                                                               two blocks: this one and the next
    copies       of all matrices for the products, 12 L C^2 e, where e is 2
    gradients    4 N; on several ranks      4 N + 4 N / W: divided after       4 N / W, and whole 4 N_root + 4 times
                 8 N with DDP's buckets     the last micro-batch               two blocks
    optimizer    8 N, less 48 L C^2 with    that / W                           that / W
                 Muon: one moment, not two

    activations  B T C (L (8 + 14 e) + 4 + 3 e). Of each token a block keeps for its backward pass: two residuals in
                 fp32 (8); the inputs of four matrices (1 + 1 + 1 + 4), q, k and v (3), the input of GELU (4). Attention
                 spelled out keeps B T L (H T (4 + e) + C e) more, H T 4 of it where e is 4. With
                 --activation_checkpointing a block keeps its input, 4 B T C; one at a time computes the rest anew.
    logits       n V (4 + e) for the n positions that are alive at once (loss.py), and 8 V C: the gradient of the output
                 projection, twice

The sum is the peak, reached where the backward pass begins. When the optimizer steps, activations are gone: Muon then
takes five times its largest stack of matrices of one shape. Not counted are dropout's masks, the context of the device
(0.5 GB on CUDA), and fragmentation (5% is left for it). torch.compile keeps less than this.

This file knows nothing of data, run directories or training; it computes without a device.
"""

from dataclasses import dataclass, replace
from itertools import product

from learning.loss import chunk_size

DEVICES = (16, 24, 40, 80, 141)  # GB that GPUs come with
MICRO_BATCHES = (1, 8, 64)
RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Layout:
    """How a model is trained: on how many ranks, what they divide, and in which precision."""

    ranks: int = 1
    shard: str = "none"
    optimizer: str = "adamw"
    itemsize: int = 2  # bytes a number of the matrix products
    device: str = "cuda"
    checkpointing: bool = False


def sizes(shape) -> tuple[int, int, int]:
    """(N_root, N_block, N)"""
    C = shape.n_embd
    root, block = (shape.vocab_size + shape.n_positions + 2) * C, 12 * C**2 + 13 * C
    return root, block, root + shape.n_layer * block


def n_parameters(shape) -> int:
    return sizes(shape)[2]


def checkpoint_bytes(shape, layout: Layout) -> int:
    return 4 * n_parameters(shape) + state(shape, replace(layout, ranks=1))["optimizer"]


def needs(shape, layout: Layout, rows: int) -> dict[str, int]:
    """Bytes of each rank by kind, for micro-batches of `rows` sequences; their sum is the peak. See the top."""
    kinds = state(shape, layout) | passing(shape, layout, rows)
    step = 0
    if layout.optimizer == "muon":  # the gradients of one shape stacked, what Nesterov makes of them, three products
        step = 5 * 4 * 4 * shape.n_layer * shape.n_embd**2 // divided(layout)
    return kinds | dict(logits=max(kinds["logits"], step - kinds["activations"]))


def divided(layout: Layout) -> int:
    return layout.ranks if layout.shard != "none" else 1


def state(shape, layout: Layout) -> dict[str, int]:
    """Weights, gradients and optimizer: what does not grow with the micro-batch."""
    L, C, e, W = shape.n_layer, shape.n_embd, layout.itemsize, divided(layout)
    root, block, N = sizes(shape)
    moments = 8 * N - (4 * 12 * L * C**2 if layout.optimizer == "muon" else 0)
    copies = 12 * L * C**2 * e if e < 4 else 0
    if layout.shard == "none" or layout.ranks == 1:
        return dict(weights=4 * N + copies, gradients=4 * N * min(layout.ranks, 2), optimizer=moments)
    gathered = N if layout.shard == "optimizer" else root + min(2, L) * block
    both = 4 * (N // W + gathered)
    return dict(weights=both + copies, gradients=both, optimizer=moments // W)


def passing(shape, layout: Layout, rows: int) -> dict[str, int]:
    """Activations and logits: what is there from the forward pass to the backward pass."""
    L, C, T, V, e = shape.n_layer, shape.n_embd, shape.n_positions, shape.vocab_size, layout.itemsize
    a_block = (8 + 14 * e) * C
    if shape.attention == "naive":
        a_block += shape.n_head * T * (4 if e == 4 else 4 + e) + C * e
    blocks = 4 * C * L + a_block if layout.checkpointing else L * a_block
    n = min(rows * T, chunk_size(rows * T, V, layout.device))
    return dict(activations=rows * T * (blocks + (4 + 3 * e) * C), logits=n * V * (4 + e) + 8 * V * C)


def largest_micro_batch(shape, layout: Layout, n_bytes: float) -> int:
    """Sequences that fit into so many bytes, 0 if not even one does."""
    fits = [rows for rows in (2**i for i in range(11)) if sum(needs(shape, layout, rows).values()) <= 0.95 * n_bytes]
    return max(fits, default=0)


def table(shape, one_rank: Layout, measured: dict[tuple[bool, int], int | None]) -> list[str]:
    """Lines: what a rank needs, by number of ranks, --shard and --activation_checkpointing.

    `measured` has peaks of one rank by (activations recomputed, B), None where B did not fit; {} for no measurement.
    """
    columns = "".join(f"{f'B={rows}':>9}" for rows in MICRO_BATCHES)
    cards = "".join(f"{f'{gb} GB':>8}" for gb in DEVICES)
    lines = [f"ranks  --shard    activations{columns}    largest B on{cards}"]
    for ranks, how, again in product(RANKS, ("none", "optimizer", "full"), (False, True)):
        if ranks == 1 and how != "none":
            continue
        layout = replace(one_rank, ranks=ranks, shard=how, checkpointing=again)
        gb = "".join(f"{sum(needs(shape, layout, rows).values()) / 1e9:9.2f}" for rows in MICRO_BATCHES)
        largest = "".join(f"{largest_micro_batch(shape, layout, gb * 1e9) or '-':>8}" for gb in DEVICES)
        lines.append(f"{ranks:>5}  {how:<11}{'recomputed' if again else 'kept':<11}{gb}{'':16}{largest}")
        if ranks == 1 and measured:
            peaks = [measured[again, rows] for rows in MICRO_BATCHES]
            lines.append(f"{'':7}{'measured':<22}" + "".join(f"{p / 1e9:9.2f}" if p else f"{'-':>9}" for p in peaks))
    return lines
