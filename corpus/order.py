"""The order in which training reads a stream of tokens: a pure function of (seed, epoch, step).

    stream -> windows of T + 1 tokens -> a seeded permutation of them, one an epoch -> global batches -> a rank's part

- window i is the slice [i*T : (i+1)*T + 1]: T inputs and, shifted by one, T targets. Windows may straddle two shards,
  so nothing is dropped between them. From the second epoch on, all windows begin up to T - 1 tokens later
- step s takes the windows from number s * batch_size on, counted through all epochs. Every rank takes its slice of the
  same global batch, so the order depends on neither the number of ranks, the micro-batch nor interruptions

Batches are NumPy arrays of windows, (rows, T + 1) int64; `to_inputs` cuts them into inputs and targets on any device.
This file needs NumPy and corpus/stream.py, and knows nothing of torch, models, tokenizers or devices.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from cli import UserError
from corpus.stream import TokenStream

IGNORED = -100  # a target that is not scored, as in PyTorch; pads the last windows of validation


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0 .. n-1 as (n,) uint32.

    The numbers are sorted by random bits of PCG64, which are put above their own bits. NumPy guarantees the stream of
    PCG64 forever, but not that of Generator.shuffle, which is also slower.
    """
    bits = (n - 1).bit_length()  # enough for a number below n
    keys = np.random.PCG64([seed, epoch]).random_raw(n)  # (n,) uint64
    keys >>= np.uint64(bits)
    keys <<= np.uint64(bits)  # the low bits are free
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()  # by the random bits; equal ones, which are rare, by number
    keys &= np.uint64(2**bits - 1)
    return keys.astype(np.uint32)


class Batches:
    """The windows of a stream in their training order, and one rank's part of every global batch."""

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        seed: int,
        shuffle: bool,
        rank=0,
        world_size=1,
        n_parts=1,  # epochs take turns in as many equal parts of the stream, such as tokenizations of one text
    ):
        self.stream = stream
        self.T = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.n_parts = n_parts
        # an epoch; at the end of the stream up to T * n_parts tokens are left over
        self.n_windows = (len(stream) - 1) // sequence_length // n_parts
        if self.n_windows < 1:
            raise UserError(
                f"{stream.paths[0]} has {len(stream) // n_parts} tokens, fewer than "
                f"sequence_length + 1 = {self.T + 1}; give more text, or a smaller --sequence_length"
            )
        self.order = lru_cache(maxsize=2)(self._order)  # a batch spans two epochs at most, unless an epoch is tiny

    def _order(self, epoch: int) -> np.ndarray:
        """All windows in the order of this epoch, (n_windows,): 39 MB for 10B tokens in windows of 1024."""
        if not self.shuffle:
            return np.arange(self.n_windows)
        return permutation(self.n_windows, self.seed, epoch)

    def shift(self, epoch: int) -> int:
        """How many tokens later windows begin in this epoch, 0 .. T-1: 0 in the first one.

        The first target of a window is predicted from one token, the last one from T. Windows that were cut at the same
        places in every epoch would give a target the same context length every time. The recipe `tiny` reads its text
        several times, and gains 0.03 bits per byte from the shift.
        """
        if epoch == 0 or not self.shuffle:
            return 0
        return int(np.random.PCG64([self.seed, epoch, 1]).random_raw()) % self.T

    def global_batch(self, position: int, batch_size: int) -> list[int]:
        """Where in the stream the `batch_size` windows from number `position` on begin."""
        last = len(self.stream) - 1 - self.T  # where the last window that fits begins
        starts = []
        while len(starts) < batch_size:  # the end of an epoch and the beginning of the next may share a batch
            epoch, at = divmod(position + len(starts), self.n_windows)
            windows = self.order(epoch)[at : at + batch_size - len(starts)]
            shift = self.shift(epoch) + epoch % self.n_parts * self.n_windows * self.T
            starts += [min(window * self.T + shift, last) for window in windows.tolist()]
        return starts

    def micro_batches(self, position: int, batch_size: int, micro_batch_size: int) -> Iterator[np.ndarray]:
        """This rank's part of that global batch, in arrays of one shape, (micro_batch_size, T + 1) int64.

        `batch_size` is a multiple of `micro_batch_size` times the number of ranks: all ranks take part in every
        exchange of gradients, so each of them needs as many micro-batches as the others.
        """
        if batch_size % (micro_batch_size * self.world_size):
            raise ValueError(
                f"a batch of {batch_size} windows is not a multiple of {self.world_size} ranks x {micro_batch_size}"
            )
        own = batch_size // self.world_size
        first = self.rank * own
        starts = self.global_batch(position, batch_size)[first : first + own]
        for i in range(0, own, micro_batch_size):
            yield self.stream.read_windows(starts[i : i + micro_batch_size], self.T + 1)  # T + 1: the last target, too


# -------------------------------------------------------------------------------------------------------- the batches


def training_batches(
    order: Batches,
    batch_size: int,
    first_step: int,
    n_steps: int,
    micro_batch_size: int,
) -> Iterator[list[np.ndarray]]:
    """For each of `n_steps` steps the list of this rank's micro-batches, arrays of windows (micro_batch_size, T + 1).

    A step reads `batch_size` windows over all ranks, and steps count from 0: step s starts at window s * batch_size.
    """
    for step in range(first_step, first_step + n_steps):
        yield list(order.micro_batches(step * batch_size, batch_size, micro_batch_size))


def validation_batches(
    stream: TokenStream,
    sequence_length: int,
    micro_batch_size: int,
    limit: int,
    rank=0,
    world_size=1,
) -> Iterator[np.ndarray]:
    """Every token of a split once, as a target, in windows dealt out to the ranks; at most `limit` tokens if it is > 0.

    Yields micro-batches, all (micro_batch_size, T + 1) int64, so that compiled code sees one shape; short windows are
    padded with IGNORED. The union over ranks is the same for every world size.
    """
    T = sequence_length
    n = len(stream) - 1
    if limit > 0:
        n = min(n, limit)
    starts = range(0, n, T)[rank::world_size]  # of the windows that are this rank's
    for i in range(0, len(starts), micro_batch_size):
        windows = np.full((micro_batch_size, T + 1), IGNORED, np.int64)  # a new array: the last one may be in transit
        for window, start in zip(windows, starts[i : i + micro_batch_size], strict=False):
            tokens = stream.read(start, min(T, n - start) + 1)
            window[: len(tokens)] = tokens
        yield windows


def to_inputs(windows):
    """(idx, targets), each (B, T), of windows (B, T + 1): a NumPy array, or a tensor on any device.

    Each target is the token after its input. As an input IGNORED becomes token 0: it needs an embedding, and changes
    nothing, because no position looks ahead at it (attention is causal) and as a target it is not scored.
    """
    idx = windows[:, :-1].clip(0)
    targets = windows[:, 1:]
    return idx, targets
