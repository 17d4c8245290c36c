"""The memory and the time that training takes, before a device is rented: formulas, and the tables of --dry_run.

L layers, C channels, H heads, P positions of context, V tokens in the vocabulary; B sequences of T tokens in a
micro-batch; W ranks; e bytes per number in matrix products, 2 or 4. The parameters are

    N_root = (V + P + 2) C outside the blocks, N_block = 12 C^2 + 13 C in each, N = N_root + L N_block in all

In bytes, in a step of several micro-batches, so that gradients exist when the next one starts:

    --shard      none                       optimizer                          full
    weights      4 N                        4 N / W, and 4 N gathered          4 N / W, and 4 N_root + 4 times two
                                                                               blocks gathered: this one and the next
    copies       of all matrices for the products, 12 L C^2 e, where e is 2
    gradients    4 N; on several ranks      4 N + 4 N / W: divided after       4 N / W, and 4 N_root + 4 times two
                 8 N with DDP's buckets     the last micro-batch               blocks whole
    optimizer    8 N, less 48 L C^2 with    the same / W                       the same / W
                 Muon: one moment, not two

    activations  B T C (L (8 + 14 e) + 4 + 3 e). For its backward pass a block keeps of each token: two residuals in
                 fp32 (8); the inputs of four matrices (1 + 1 + 1 + 4), q, k and v (3), the input of GELU (4). Naive
                 attention keeps B T L (H T (4 + e) + C e) more, H T 4 of it if e is 4. With
                 --activation_checkpointing a block keeps its input, 4 B T C, and one at a time recomputes the rest.
    logits       of the n positions whose logits exist at once (loss.py): 8 n V for a copy in fp32 and its softmax,
                 beside the sum of the projection's gradients, 4 V C; or their gradients, e n V, and that sum twice;
                 or, when activations are gone, 12 V C: the gradients of the tied table's two uses, and their sum

The sum is the peak, reached when the backward pass starts. When the optimizer steps, activations are gone; Muon then
needs six times its largest stack of matrices of one shape. Not counted: dropout masks, the context of the device (0.5
GB on CUDA), and fragmentation (5% is reserved for it). This is the peak without compilation, which the trial of
micro-batches measures too; torch.compile needs less.

The time is an estimate, not a measurement, and leaves out what ranks spend on exchanging gradients: see `step_parts`.

This file knows nothing of data, run directories or training, and computes without a device.
"""

from dataclasses import dataclass, replace
from itertools import product

from learning.loss import chunk_size
from learning.optim import MOMENTS

DEVICES = (16, 24, 40, 80, 141)  # GB that GPUs come with
MICRO_BATCHES = (1, 8, 64)
RANKS = (1, 2, 4, 8)
STEP = 2**16  # tokens of the step whose time is estimated: 64 sequences of 1,024
REACHED = dict(matrix=0.64, attention=0.25, memory=0.92)  # of the peaks, by kernels: near what is reported of an H100
BUSY = 0.965  # of the time in which a kernel runs at all


@dataclass(frozen=True)
class Layout:
    """How a model is trained: on how many ranks, what they divide, and in which precision."""

    sequence_length: int = 1024  # tokens of a sequence in a step; the model may have more positions
    ranks: int = 1
    shard: str = "none"
    optimizer: str = "adamw"
    itemsize: int = 2  # bytes per number in matrix products
    device: str = "cuda"
    checkpointing: bool = False


def n_parameters(shape) -> int:
    C = shape.n_embd
    return (shape.vocab_size + shape.n_positions + 2) * C + shape.n_layer * (12 * C**2 + 13 * C)


def checkpoint_bytes(shape, layout: Layout) -> int:
    return 4 * n_parameters(shape) + state(shape, replace(layout, ranks=1))["optimizer"]


def state(shape, layout: Layout) -> dict[str, int]:
    """Weights, gradients and optimizer: what does not grow with the micro-batch."""
    L, C, e, W, N = shape.n_layer, shape.n_embd, layout.itemsize, layout.ranks, n_parameters(shape)
    moments = 8 * N - (2 - MOMENTS[layout.optimizer]) * 4 * 12 * L * C**2
    copies = 12 * L * C**2 * e if e < 4 else 0
    if layout.shard == "none" or W == 1:
        return dict(weights=4 * N + copies, gradients=4 * N * min(W, 2), optimizer=moments)
    gathered = N if layout.shard == "optimizer" else N - max(L - 2, 0) * (12 * C**2 + 13 * C)
    both = 4 * (N // W + gathered)
    return dict(weights=both + copies, gradients=both, optimizer=moments // W)


def needs(shape, layout: Layout, rows: int) -> dict[str, int]:
    """Bytes of each rank by kind, for micro-batches of `rows` sequences; their sum is the peak. See the top."""
    L, C, T, V, e = shape.n_layer, shape.n_embd, layout.sequence_length, shape.vocab_size, layout.itemsize
    a_block = (8 + 14 * e) * C
    if shape.attention == "naive":
        a_block += shape.n_head * T * (4 if e == 4 else 4 + e) + C * e
    blocks = 4 * C * L + a_block if layout.checkpointing else L * a_block
    activations = rows * T * (blocks + (4 + 3 * e) * C)
    n = min(rows * T, chunk_size(rows * T, V, layout.device))
    logits = max(8 * n * V + 4 * V * C, e * n * V + 8 * V * C, 12 * V * C - activations)
    if layout.optimizer == "muon":  # one shape's gradients and momenta stacked, the update, and three products
        logits = max(logits, 6 * 4 * 4 * L * C**2 - activations)
    return state(shape, layout) | dict(activations=activations, logits=logits)


def memory_table(shape, asked: Layout, batch: int, micro_batch: int) -> list[str]:
    """Lines: what a rank needs, by number of ranks, --shard and --activation_checkpointing, as far as `asked` leaves
    them open. `batch` is the sequences of a step, `micro_batch` those at a time, 0 for a choice of sizes."""
    columns = [micro_batch] if micro_batch else [rows for rows in MICRO_BATCHES if rows <= batch]
    head = "".join(f"{f'B={rows}':>9}" for rows in columns)
    lines = [f"ranks  --shard    activations{head}    largest B on" + "".join(f"{f'{gb} GB':>8}" for gb in DEVICES)]
    ways = ("none", "optimizer", "full") if asked.shard == "none" else (asked.shard,)
    for ranks, how, again in product(RANKS, ways, (False, True)):
        if (ranks == 1 and how != ways[0]) or again < asked.checkpointing:
            continue
        how = how if ranks > 1 else "none"
        layout = replace(asked, ranks=ranks, shard=how, checkpointing=again)
        possible = [rows for rows in {*columns, *(2**i for i in range(11))} if rows * ranks <= batch]
        peaks = {rows: sum(needs(shape, layout, rows).values()) for rows in possible}
        cells = "".join(f"{f'{peaks[rows] / 1e9:.2f}' if rows in peaks else '-':>9}" for rows in columns)
        fitting = ([rows for rows, peak in peaks.items() if peak <= 0.95e9 * gb] for gb in DEVICES)
        largest = "".join(f"{max(fits, default='-'):>8}" for fits in fitting)
        lines.append(f"{ranks:>5}  {how:<11}{'recomputed' if again else 'kept':<11}{cells}{'':16}{largest}")
    return lines


def token_flops(shape, T: int) -> int:
    """Operations of a token, forward and backward, as `GPT.estimate_flops` counts them."""
    return 6 * (n_parameters(shape) - shape.n_positions * shape.n_embd) + 12 * shape.n_layer * shape.n_embd * T


def step_parts(shape, T: int) -> dict[str, tuple[str, float]]:
    """{name: (bound, operations or bytes)} of STEP tokens in one micro-batch: compiled, in bf16 autocast, with AdamW. A
    number has 2 bytes in bf16, 4 in fp32 (residuals, weights)."""
    L, C, V, N = shape.n_layer, shape.n_embd, shape.vocab_size, n_parameters(shape)
    a_block = STEP * L * C  # numbers of one activation as wide as the residual stream, in all blocks
    sums = -(-STEP // chunk_size(STEP, V, "cuda")) * V * C  # numbers that the chunks of the loss add
    return {
        # 2 operations a weight and token forward, 4 backward
        "products of the blocks": ("matrix", 6 * 12 * a_block * C),
        "products of the head": ("matrix", 6 * STEP * V * C),
        # 2 products forward, 5 backward, of T^2 C operations each: half of the square is masked
        "attention": ("attention", 7 * a_block * T),
        # twice a block: read residual and branch, write the sum and its norm; backward one more is read
        "norms and residuals": ("memory", 2 * a_block * (4 + 2 + 4 + 2 + 2 + 4 + 4 + 4 + 2)),
        # 4 C wide: read, write; backward two are read
        "GELU": ("memory", 4 * a_block * (2 + 2 + 2 + 2 + 2)),
        # the outputs of four products, (3 + 1 + 4 + 1) C wide, and inputs and gradients of two norms are read again
        "gradients of biases and norms": ("memory", a_block * (9 * 2 + 2 * (2 + 4))),
        "gradients of q, k and v side by side": ("memory", 3 * a_block * (2 + 2)),
        # read for the sum of exponentials, read again, gradients written
        "loss": ("memory", STEP * V * (2 + 2 + 2)),
        # AdamW (4 read, 3 written), the norm, clipping, casts of weights and gradients; embeddings
        "optimizer, casts, embeddings": ("memory", N * (7 * 4 + 4 + 8 + 6 + 6) + sums * 12 + STEP * C * 24),
    }


def time_table(shape, T: int, tokens: int, cards: dict[str, tuple[float, float]], price: float) -> list[str]:
    """Lines: tokens/s of a card, the hours that `tokens` take, and dollars for `price` an hour; `cards` has peaks."""
    lines = [f"{'card':<10}{'tokens/s':>10}{'MFU':>8}{'hours on 1':>13}{'on 8':>9}" + f"{'dollars':>11}" * (price > 0)]
    parts = step_parts(shape, T).values()
    for name, peaks in cards.items():
        rate = STEP * BUSY / sum(work / peaks[bound == "memory"] / REACHED[bound] for bound, work in parts)
        hours, mfu = tokens / rate / 3600, token_flops(shape, T) * rate / peaks[0]
        cost = f"{hours * price:>11,.0f}" * (price > 0)
        lines.append(f"{name:<10}{rate:>10,.0f}{mfu:>8.1%}{hours:>13,.2f}{hours / 8:>9,.2f}{cost}")
    return lines
