"""Train BPE fast: `learn` finds the merges of minimal.py's slow trainer, in the same order.

minimal.py counts every pair of the whole corpus again for each merge. This file is faster because:

1. Equal chunks are counted once: 25 MB of English have some 100,000 different ones. (`count_chunks`)
2. Processes share the counting; merging works on chunks and their counts. (`count_in_parallel`)
3. The chunks are one row of symbols that knows how often and where each pair of neighbours occurs, so that a merge
   touches its own places and no others. (`Corpus`)
4. The most frequent pair comes from a heap in which counts may be out of date. (`find_merges`)

So time grows with the number of different chunks and of merges, and memory with the chunks, not with the corpus. This
file knows nothing of encoding, of ids, or of files.
"""

import contextlib
import gc
import heapq
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bpe.chunks import BLOCK, BYTE_ORDER, BYTE_TO_RANK, SINGLE_BYTES, any_of, splitter, valid_unicode

TIE_BREAKS = ("lowest_id", "greatest_bytes")


def cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def learn(
    texts: Iterable[str],
    n_merges: int,
    pattern: str,
    specials: tuple[str, ...],
    tie_break: str,
    workers: int = 0,
    progress: bool = False,
    on_merge: Callable[[bytes, bytes, int], None] | None = None,
    block: int = BLOCK,
) -> list[tuple[bytes, bytes]]:
    """Find the first `n_merges` merges, or all possible ones. Texts are read once, without their special tokens.

    `workers` processes count chunks (0 for one per core), `block` characters at a time; `progress` shows bars;
    `on_merge` is called with each merge and the count of its pair. None of these changes a merge.
    """
    gc.disable()  # training makes millions of lists, none of them in a cycle; looking for cycles takes a fifth of it
    try:
        blocks = batches(texts, pattern, specials, block)
        counts = count_in_parallel(blocks, pattern, workers or cpu_count(), progress)
        # as bytes, in an order that does not depend on which process counted them
        chunks = {chunk.encode(): counts[chunk] for chunk in sorted(counts)}
        found = islice(find_merges(chunks, tie_break), n_merges)
        tokens = list(SINGLE_BYTES)
        merges = []
        for i, j, count in tqdm(found, "merge", n_merges, disable=not progress, leave=False):
            a = tokens[i]
            b = tokens[j]
            merges.append((a, b))
            tokens.append(a + b)
            if on_merge:
                on_merge(a, b, count)
    finally:
        gc.enable()
    return merges


# ---- counting chunks


def count_chunks(texts: list[str], pattern: str) -> Counter[str]:
    """Count each chunk."""
    chunks = map(splitter(pattern).split, texts)
    return Counter(chain.from_iterable(chunks))


def batches(texts: Iterable[str], pattern: str, specials: tuple[str, ...], size: int) -> Iterator[list[str]]:
    """Yield lists of about `size` characters of text; long texts are cut between chunks, special tokens left out."""
    batch = []
    n = 0
    for text in map(valid_unicode, texts):
        parts = [text]
        if any(s in text for s in specials):
            parts = any_of(specials).split(text)[::2]
        for part in parts:
            for block in splitter(pattern).blocks(part, size):
                batch.append(block)
                n += len(block)
                if n >= size:
                    yield batch
                    batch = []
                    n = 0
    yield batch


def counting_process() -> subprocess.Popen:
    """Start a process that answers JSON with JSON: [texts, pattern] with `count_chunks` of them, a line each.

    multiprocessing would do, but its children run the main script again before they start: in a training script that
    imports torch this takes longer than most of the counting, and one without a main guard would train in each child.
    """
    root = str(Path(__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); from bpe.training import answer_counts; answer_counts()"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def answer_counts() -> None:
    """Run the main loop of a counting process; it ends with its input, and so with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for that process to handle
    for line in sys.stdin.buffer:
        counts = count_chunks(*json.loads(line))
        print(json.dumps(counts), flush=True)


def count_in_parallel(blocks: Iterable[list[str]], pattern: str, workers: int, progress: bool) -> Counter[str]:
    """Count the chunks of all texts, by `count_chunks`.

    This process counts the first batches, so that a small corpus starts no other. Then `workers - 1` processes get up
    to two batches each, and this one counts the rest, so that only a few batches are in memory.
    """
    n_helpers = workers - 1
    counts = Counter()
    pending = deque()
    processes = []
    of_thread = threading.local()

    def start():
        of_thread.process = counting_process()
        processes.append(of_thread.process)

    def count_elsewhere(batch):
        process = of_thread.process
        try:
            process.stdin.write(f"{json.dumps([batch, pattern])}\n".encode())
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (OSError, ValueError):  # it has died: counting here is slower, but no reason to stop
            return count_chunks(batch, pattern)

    bar = tqdm(desc="count chunks", unit="char", unit_scale=True, disable=not progress, leave=False)
    threads = ThreadPoolExecutor(max(n_helpers, 1), initializer=start)  # each only waits for its process
    try:
        for n, batch in enumerate(blocks):
            if n >= 2 and len(pending) < 2 * n_helpers:
                pending.append(threads.submit(count_elsewhere, batch))
            else:
                counts.update(count_chunks(batch, pattern))
            while pending and pending[0].done():
                counts.update(pending.popleft().result())
            bar.update(sum(map(len, batch)))
        for counted in pending:
            counts.update(counted.result())
    finally:
        bar.close()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            with contextlib.suppress(OSError):
                process.communicate()
    return counts


# ---- merging

PAIR_SHIFT = 32  # a pair of ranks is one integer, first << 32 | second, so that pairs sort as these integers do
PAIR_MASK = (1 << PAIR_SHIFT) - 1


class Corpus:
    """The distinct chunks as one long row of symbols, with the count and the places of every pair of neighbours.

    A symbol is a rank, or -1 between chunks and where a merge has swallowed one; `next` and `previous` skip the
    latter. For the chunk "hehe", which occurred 7 times, and the merge of h, e into X:

        place            0   1   2   3   4   5             0   1   2   3   4   5
        symbols         -1   h   e   h   e  -1     ->     -1   X  -1   X  -1  -1
        counts           0   7   7   7   7   0             0   7   7   7   7   0
        next                 2   3   4   5                     3       5

        pair_count       h,e: 14     e,h: 7        ->      X,X: 7   e,h: 0   X,h: 0
        pair_places      h,e: 1, 3   e,h: 2        ->      X,X: 1   e,h: 2   X,h: 1

    The places of a pair are recorded when its later symbol is made, and only checked when the pair is merged: place 2
    of e,h no longer holds an e. Keeping the places exact would cost more than checking them.
    """

    def __init__(self, chunks: dict[bytes, int]):
        lengths = np.array(list(map(len, chunks)), np.int64)
        gaps = np.repeat(np.arange(1, len(chunks) + 1), lengths)  # one before each chunk
        at = np.arange(len(gaps)) + gaps
        size = len(at) + len(chunks) + 1
        symbols = np.full(size, -1, np.int32)
        symbols[at] = np.frombuffer(b"".join(chunks).translate(BYTE_TO_RANK), np.uint8)
        counts = np.zeros(size, np.int64)
        counts[at] = np.repeat(np.array(list(chunks.values()), np.int64), lengths)
        # all places, sorted by their pair of bytes; stable, because a merge goes from left to right
        places = np.flatnonzero((symbols[:-1] >= 0) & (symbols[1:] >= 0))  # of the first symbol of each pair
        pairs = (symbols[places] << 8 | symbols[places + 1]).astype(np.uint16)
        order = np.argsort(pairs, kind="stable")
        pairs = pairs[order]
        places = places[order]
        starts = np.flatnonzero(np.diff(pairs.astype(np.int32), prepend=-1))
        totals = np.add.reduceat(counts[places], starts)
        keys = [(p >> 8) << PAIR_SHIFT | p & 255 for p in pairs[starts].tolist()]
        self.pair_count = dict(zip(keys, totals.tolist(), strict=True))
        self.pair_places = dict(zip(keys, np.split(places, starts[1:]), strict=False))
        self.symbols = symbols.tolist()  # lists: single items are read, not ranges
        self.counts = counts.tolist()
        numbers = list(range(size + 1))  # `next` and `previous` share these integers
        self.next = numbers[1:]
        self.previous = [0, *numbers[: size - 1]]

    def merge(self, pair: int, new: int) -> list[int]:
        """Replace `pair` by the symbol `new` everywhere, from left to right; return the pairs with `new` in them."""
        a = pair >> PAIR_SHIFT
        b = pair & PAIR_MASK
        symbols = self.symbols
        following = self.next
        previous = self.previous
        left = {}  # by the symbol on that side: the places of the new pairs
        right = {}
        places = self.pair_places.pop(pair)
        for i in places if isinstance(places, list) else places.tolist():
            if symbols[i] != a:
                continue
            j = following[i]
            if symbols[j] != b:
                continue
            h = previous[i]  # x a b y at h i j k
            k = following[j]
            symbols[i] = new
            symbols[j] = -1
            following[i] = k
            previous[k] = i
            # defaultdicts would be shorter and slower: most symbols come only once
            if (x := symbols[h]) >= 0:
                if x in left:
                    left[x].append(h)
                else:
                    left[x] = [h]
            if (y := symbols[k]) >= 0:
                if y in right:
                    right[y].append(i)
                else:
                    right[y] = [i]
        # b,y has become new,y, and x,a has become x,new; the right side first, since in a b a b the first merge
        # makes new,a, which the second one breaks up
        changed = []
        for y, places in right.items():
            changed.append((b << PAIR_SHIFT | y, new << PAIR_SHIFT | y, places))
        for x, places in left.items():
            changed.append((x << PAIR_SHIFT | a, x << PAIR_SHIFT | new, places))
        for broken, created, places in changed:
            count = sum(map(self.counts.__getitem__, places))
            self.pair_count[broken] -= count
            self.pair_count[created] = count
            self.pair_places[created] = places
        del self.pair_count[pair]
        return [created for _, created, _ in changed]


def find_merges(chunks: dict[bytes, int], tie_break: str) -> Iterator[tuple[int, int, int]]:
    """Yield (rank, rank, count) of each merge in turn, while there are pairs; merge i makes rank 256 + i.

    The heap holds (-count, order among equal counts, pair). Once a pair exists, its count can only fall, because merges
    only remove its symbols. So an outdated entry is too high in the heap, never too low, and can wait until it reaches
    the top, where it gets its true count and sinks.
    """
    corpus = Corpus(chunks)
    counts = corpus.pair_count
    new = 256
    # tokens as strings in reverse order: the greatest bytes come first, and of two tokens that begin alike the longer
    # one, since the end mark is above all bytes
    order = [chr(255 - b) + "\u0100" for b in BYTE_ORDER]

    def entry(pair):
        if tie_break == "lowest_id":
            return -counts[pair], pair
        return -counts[pair], order[pair >> PAIR_SHIFT] + order[pair & PAIR_MASK], pair

    heap = list(map(entry, counts))
    heapq.heapify(heap)
    while heap:
        count = -heap[0][0]
        pair = heap[0][-1]
        if count != counts[pair]:
            if counts[pair]:
                heapq.heapreplace(heap, entry(pair))
            else:
                heapq.heappop(heap)
            continue
        heapq.heappop(heap)
        a = pair >> PAIR_SHIFT
        b = pair & PAIR_MASK
        yield a, b, count
        order.append(order[a][:-1] + order[b])
        for created in corpus.merge(pair, new):
            if counts[created]:
                heapq.heappush(heap, entry(created))
        new += 1
