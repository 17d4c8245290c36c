"""Byte-level byte-pair encoding (Sennrich et al. 2016; the byte-level form of Radford et al. 2019), exact and fast.

Training, in five lines: a split pattern cuts text into chunks (" word", "'s", " 42", "!!"), and equal chunks are
counted once. Every chunk starts as its UTF-8 bytes, ids 0..255. Then, again and again, the adjacent pair that occurs
most often becomes a new token, everywhere at once. The list of these merges is the tokenizer. Encoding repeats the
merges in their order on the chunks of a new text, and decoding joins the bytes of the ids.

    tok = Tokenizer.train(open("input.txt"), vocab_size=1024)
    ids = tok.encode("Hello, world")            # a special token in the text raises, unless it is allowed
    tok.decode(ids)                             # "Hello, world"
    tok.save("out/tokenizer")                   # a directory for transformers.AutoTokenizer, with a .tiktoken in it
    tok = Tokenizer.load("out/tokenizer")       # or a tokenizer.json, a .tiktoken, vocab.json + merges.txt, "gpt2"
    tok.to_tiktoken(), tok.to_transformers()    # the same ids from other libraries

This file knows nothing of models, shards or command lines.
"""

import base64
import codecs
import contextlib
import gc
import hashlib
import heapq
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import regex
from tqdm import tqdm

from runtime import UserError

ENDOFTEXT = "<|endoftext|>"
BLOCK = 2**20  # characters that are split, counted or sent to a worker at a time
CACHED_CHUNKS = 2**18  # distinct chunks whose ids the encoder remembers
CACHED_LENGTH = 64  # characters of the longest chunk that it remembers
LONG_CHUNK = 24  # bytes from which the encoder merges with a heap; below, a simple loop is faster

# GPT-2 shows bytes as characters that can be printed and are not spaces, and numbers them in the order of those
# characters: first the printable ones of Latin-1 as themselves, then the other bytes as U+0100, U+0101, ...
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_ORDER = bytes(PRINTABLE + sorted(set(range(256)) - set(PRINTABLE)))  # id -> byte
BYTE_TO_CHAR = {b: chr(b if i < len(PRINTABLE) else 256 + i - len(PRINTABLE)) for i, b in enumerate(BYTE_ORDER)}
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}
BYTE_TO_ID = bytes(BYTE_ORDER.index(b) for b in range(256))  # a table for bytes.translate

# Split patterns by name: the pattern, as `regex`, tiktoken and Hugging Face read it alike; its twin for ASCII text,
# for the `re` of the standard library, which is three times as fast; and where a long text may be cut beforehand.
PATTERNS = {
    "gpt2": (
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+",
        r"(?<=\S)(?=\s)",
    ),
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}| ?[^\t-\r A-Za-z0-9]+[\r\n]*"
        r"|[\t-\r ]+\Z|[\t-\r ]*[\r\n]|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]",
        r"(?<=[\p{L}\p{N}])(?=\s)|(?<=\S)(?= )",
    ),
}

# Other spellings of these patterns, which split every text in the same way.
SPELLINGS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s": "cl100k",
}


# ---- splitting


class Splitter:
    """Cuts text into chunks, which merges never cross."""

    def __init__(self, pattern: str):
        """Raises ValueError for a regular expression that does not compile, or that has a capturing group."""
        try:
            compiled = regex.compile(pattern)
        except regex.error as e:
            raise ValueError(f"the split pattern {pattern!r} does not compile: {e}") from None
        if compiled.groups:
            raise ValueError(f"the split pattern {pattern!r} has a capturing group; write (?:...) instead of (...)")
        _, ascii_twin, cut = next((known for known in PATTERNS.values() if known[0] == pattern), (None, None, None))
        self.find = compiled.findall
        self.find_ascii = re.compile(ascii_twin).findall if ascii_twin else self.find
        self.cut = regex.compile(cut) if cut else None
        self.last_cut = regex.compile(cut, regex.REVERSE) if cut else None

    def split(self, text: str) -> list[str]:
        """The chunks of `text`. Raises ValueError if the pattern does not match all of it."""
        chunks = (self.find_ascii if text.isascii() else self.find)(text)
        if not self.cut and sum(map(len, chunks)) < len(text):
            raise ValueError("the split pattern leaves out some of the text; end it with an alternative such as |.|\\n")
        return chunks

    def blocks(self, text: str) -> Iterator[str]:
        """Parts of about BLOCK characters that together have the chunks of `text`."""
        start = 0
        while self.cut and len(text) - start > BLOCK and (cut := self.cut.search(text, start + BLOCK)):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]


@lru_cache
def splitter(pattern: str) -> Splitter:
    return Splitter(pattern)


@lru_cache
def any_of(specials: tuple[str, ...]) -> re.Pattern:
    """Matches one of `specials`, the longest if one begins another."""
    return re.compile("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")")


def valid_unicode(text: str) -> str:
    """`text`, with U+FFFD for lone surrogates, which have no UTF-8 form."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---- training: counting


def batches(texts: Iterable[str], pattern: str, specials: tuple[str, ...]) -> Iterator[list[str]]:
    """The texts in lists of about BLOCK characters, long ones cut where it does no harm, special tokens left out."""
    batch, size = [], 0
    for text in map(valid_unicode, texts):
        parts = any_of(specials).split(text)[::2] if any(s in text for s in specials) else [text]
        for block in chain.from_iterable(map(splitter(pattern).blocks, parts)):
            batch.append(block)
            size += len(block)
            if size >= BLOCK:
                yield batch
                batch, size = [], 0
    yield batch


def count_chunks(texts: list[str], pattern: str) -> Counter[str]:
    """How often each chunk occurs."""
    return Counter(chain.from_iterable(map(splitter(pattern).split, texts)))


class CountingProcess:
    """`count_chunks` in a process of its own, with JSON through pipes.

    multiprocessing would do, but its children run the main script again before they start: in a training script that
    imports torch this takes longer than most of the counting, and one without a main guard would train in each child.
    """

    def __init__(self, pattern: str):
        path, code = str(Path(__file__).parent.parent), "from bpe.tokenizer import answer_counts; answer_counts()"
        words = [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pattern = pattern

    def count(self, texts: list[str]) -> dict[str, int]:
        """Counts here if the process has died, which is slower but no reason to stop."""
        try:
            self.process.stdin.write(json.dumps([texts, self.pattern]).encode() + b"\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (OSError, ValueError):
            return count_chunks(texts, self.pattern)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.communicate()


def answer_counts() -> None:
    """The main loop of a CountingProcess; ends with its input, and so with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the business of that process
    for line in sys.stdin.buffer:
        sys.stdout.write(json.dumps(count_chunks(*json.loads(line))) + "\n")
        sys.stdout.flush()


def count_in_parallel(texts, pattern: str, specials: tuple[str, ...], workers: int, progress: bool) -> Counter[str]:
    """`count_chunks` over all texts.

    The first batches are counted here, so that a small corpus starts no process. Then `workers - 1` processes get
    what they can take, and what they cannot is counted here, so that no more than a few batches are in memory.
    """
    counts, pending, processes, idle = Counter(), set(), [], SimpleQueue()

    def count_elsewhere(batch: list[str]) -> dict[str, int]:
        process = idle.get()
        try:
            return process.count(batch)
        finally:
            idle.put(process)

    bar = tqdm(desc="count chunks", unit="char", unit_scale=True, disable=not progress, leave=False)
    threads = ThreadPoolExecutor(max(workers - 1, 1))  # they only wait for the processes
    try:
        for n, batch in enumerate(batches(texts, pattern, specials)):
            if n == 2:
                processes += [CountingProcess(pattern) for _ in range(workers - 1)]
                for process in processes:
                    idle.put(process)
            if len(pending) < 2 * len(processes):
                pending.add(threads.submit(count_elsewhere, batch))
            else:
                counts.update(count_chunks(batch, pattern))
            done = {future for future in pending if future.done()}
            pending -= done
            for future in done:
                counts.update(future.result())
            bar.update(sum(map(len, batch)))
        for future in pending:
            counts.update(future.result())
    finally:
        bar.close()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.close()
    return counts


def encode_chunks(counts: dict[str, int], longest: int | None) -> dict[bytes, int]:
    """Counted chunks as bytes, in an order that does not depend on who counted them, cut to `longest` bytes each."""
    chunks = {chunk.encode(): counts[chunk] for chunk in sorted(counts)}
    if longest is None:
        return chunks
    cut = Counter()
    for chunk, count in chunks.items():
        for i in range(0, len(chunk), longest):
            cut[chunk[i : i + longest]] += count
    return cut


# ---- training: merging

PAIR_SHIFT = 32  # a pair of ids is one integer, first << 32 | second, so that pairs sort as these integers do
PAIR_MASK = (1 << PAIR_SHIFT) - 1


class Corpus:
    """The distinct chunks as one long row of symbols, with the count and the places of every adjacent pair.

    A symbol is an id, or -1 between chunks and where a merge has swallowed one; `next` and `previous` skip the latter.
    The places of a pair are noted when the later of its symbols comes into being, and checked when the pair is
    merged, since another merge may have broken it up in between. So a merge looks at its own places only.
    """

    def __init__(self, chunks: dict[bytes, int]):
        lengths = np.fromiter(map(len, chunks), np.int64, len(chunks))
        at = np.arange(lengths.sum()) + np.repeat(np.arange(1, len(chunks) + 1), lengths)  # a gap before each chunk
        size = len(at) + len(chunks) + 1
        symbols, counts = np.full(size, -1, np.int32), np.zeros(size, np.int64)
        symbols[at] = np.frombuffer(b"".join(chunks).translate(BYTE_TO_ID), np.uint8)
        counts[at] = np.repeat(np.fromiter(chunks.values(), np.int64, len(chunks)), lengths)
        self._find_pairs(symbols, counts)
        numbers = list(range(size + 1))
        self.symbols, self.counts = symbols.tolist(), counts.tolist()
        self.next, self.previous = numbers[1:], [0, *numbers[: size - 1]]

    def _find_pairs(self, symbols: np.ndarray, counts: np.ndarray) -> None:
        places = np.flatnonzero((symbols[:-1] >= 0) & (symbols[1:] >= 0))  # of the first symbol of each pair
        pairs = (symbols[places] << 8 | symbols[places + 1]).astype(np.uint16)
        order = np.argsort(pairs, kind="stable")
        pairs, places = pairs[order], places[order]
        starts = np.flatnonzero(np.diff(pairs.astype(np.int32), prepend=-1))
        totals = np.add.reduceat(counts[places], starts) if len(starts) else starts
        keys = [(p >> 8) << PAIR_SHIFT | p & 255 for p in pairs[starts].tolist()]
        self.pair_count = dict(zip(keys, totals.tolist(), strict=True))
        self.pair_places = dict(zip(keys, np.split(places, starts[1:]), strict=False))

    def merge(self, pair: int, new: int) -> list[int]:
        """Replace `pair` by the symbol `new` everywhere, from left to right; returns the pairs with `new` in them."""
        a, b = pair >> PAIR_SHIFT, pair & PAIR_MASK
        symbols, counts, following, previous = self.symbols, self.counts, self.next, self.previous
        left_count, left_places, right_count, right_places = {}, {}, {}, {}  # by the symbol on that side
        places = self.pair_places.pop(pair)
        for i in places if isinstance(places, list) else places.tolist():
            if symbols[i] != a:
                continue
            j = following[i]
            if symbols[j] != b:
                continue
            h, k, count = previous[i], following[j], counts[i]  # x a b y stand at h i j k
            symbols[i], symbols[j] = new, -1
            following[i], previous[k] = k, i
            if (x := symbols[h]) >= 0:
                if x in left_count:
                    left_count[x] += count
                    left_places[x].append(h)
                else:
                    left_count[x], left_places[x] = count, [h]
            if (y := symbols[k]) >= 0:
                if y in right_count:
                    right_count[y] += count
                    right_places[y].append(i)
                else:
                    right_count[y], right_places[y] = count, [i]
        # b,y has become new,y, and x,a has become x,new; the right side first, since in a b a b the first merge
        # makes new,a, which the second one breaks up
        created, pair_count, pair_places = [], self.pair_count, self.pair_places
        for y, count in right_count.items():
            pair_count[b << PAIR_SHIFT | y] -= count
            created.append(new << PAIR_SHIFT | y)
            pair_count[created[-1]], pair_places[created[-1]] = count, right_places[y]
        for x, count in left_count.items():
            pair_count[x << PAIR_SHIFT | a] -= count
            created.append(x << PAIR_SHIFT | new)
            pair_count[created[-1]], pair_places[created[-1]] = count, left_places[x]
        del pair_count[pair]
        return created


def find_merges(chunks: dict[bytes, int], tie_break: str) -> Iterator[tuple[int, int, int]]:
    """Yields (id, id, count) of one merge after the other, as long as there are pairs; merge i makes id 256 + i.

    A heap holds (-count, order among equal counts, pair). The count of a pair can only fall once the pair is there,
    so that an entry may stay, out of date, until it reaches the top.
    """
    corpus, new = Corpus(chunks), 256
    counts = corpus.pair_count
    order = [chr(255 - b) + "\u0100" for b in BYTE_ORDER]  # of tokens as strings: the greatest bytes come first

    def entry(pair: int) -> tuple:
        if tie_break == "lowest_id":
            return -counts[pair], pair
        return -counts[pair], order[pair >> PAIR_SHIFT] + order[pair & PAIR_MASK], pair

    heap = list(map(entry, counts))
    heapq.heapify(heap)
    while heap:
        count, pair = -heap[0][0], heap[0][-1]
        if count != counts[pair]:
            heapq.heapreplace(heap, entry(pair)) if counts[pair] else heapq.heappop(heap)
            continue
        heapq.heappop(heap)
        a, b = pair >> PAIR_SHIFT, pair & PAIR_MASK
        yield a, b, count
        order.append(order[a][:-1] + order[b])
        for created in corpus.merge(pair, new):
            if counts[created]:
                heapq.heappush(heap, entry(created))
        new += 1


@contextlib.contextmanager
def without_gc():
    """Training makes millions of lists, none of them in a cycle; looking for cycles would take a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---- the tokenizer


class ChunkCache(dict):
    """chunk -> its ids, computed on the first look-up."""

    def __init__(self, encode_chunk: Callable[[str], list[int]]):
        self.encode_chunk = encode_chunk

    def __missing__(self, chunk: str) -> list[int]:
        ids = self.encode_chunk(chunk)
        if len(chunk) <= CACHED_LENGTH:
            if len(self) >= CACHED_CHUNKS:
                self.clear()
            self[chunk] = ids
        return ids


class Tokenizer:
    """A byte-level BPE tokenizer: merges, a split pattern and special tokens.

    Attributes: `merges`, pairs of byte strings in their order; `vocab`, id -> bytes, special tokens included;
    `special_tokens`, name -> id; `pattern`, a regular expression.
    """

    def __init__(
        self,
        merges: Iterable[tuple[bytes, bytes]],
        pattern: str = "gpt2",
        special_tokens: Collection[str] | dict[str, int] = (ENDOFTEXT,),
        ids: dict[bytes, int] | None = None,
    ):
        """By default ids are laid out as GPT-2's: bytes, merges, special tokens. `ids` gives other ones to the tokens
        that are not special. Raises ValueError for merges of unknown tokens and for ids that clash.
        """
        self.merges = [(a, b) for a, b in merges]
        self.pattern = PATTERNS[pattern][0] if pattern in PATTERNS else pattern
        self._rank = {bytes([b]): i for i, b in enumerate(BYTE_ORDER)}  # token -> rank: bytes first, then as merged
        for a, b in self.merges:
            self._rank.setdefault(a + b, len(self._rank))
        try:
            self._merge_rank = {(self._rank[a], self._rank[b]): self._rank[a + b] for a, b in self.merges}
        except KeyError as e:
            raise ValueError(f"a merge uses the token {e}, which is neither a byte nor made by a merge") from None
        if ids is None:
            ids = self._rank
        if missing := [token for token in self._rank if token not in ids]:
            raise ValueError(f"{len(missing)} tokens are not in the vocabulary, for instance {missing[0]!r}")
        self._ids = [ids[token] for token in self._rank]  # rank -> id
        if self._ids == list(range(len(self._ids))):
            self._ids = None  # the usual case: they are the same
        self.vocab = {i: token for token, i in sorted(ids.items(), key=lambda item: item[1])}
        if not isinstance(special_tokens, dict):
            special_tokens = {s: max(self.vocab) + 1 + i for i, s in enumerate(dict.fromkeys(special_tokens))}
        self.special_tokens = dict(sorted(special_tokens.items(), key=lambda item: item[1]))
        self.vocab |= {i: s.encode() for s, i in self.special_tokens.items()}
        if len(self.vocab) < len(ids) + len(special_tokens) or "" in special_tokens:
            raise ValueError("two tokens have the same id, or a special token is empty")
        self._splitter, self._cache = splitter(self.pattern), ChunkCache(self._encode_chunk)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        pattern: str = "gpt2",
        special_tokens: Collection[str] = (ENDOFTEXT,),
        tie_break: str = "lowest_id",
        *,
        workers: int | None = None,
        max_chunk_bytes: int | None = None,
        progress: bool = False,
        on_merge: Callable[[bytes, bytes, int], None] | None = None,
    ) -> "Tokenizer":
        """Learn merges from an iterable of texts, which is read once and never held as a whole.

        `vocab_size` counts the 256 bytes, the merges and the special tokens, which get the last ids and are cut out of
        the texts. `pattern` is "gpt2", "cl100k" (GPT-4) or a regular expression. Among pairs of equal count,
        `tie_break="lowest_id"` takes the one with the lowest ids, as the `tokenizers` library does, and
        `"greatest_bytes"` the lexicographically greatest pair of byte strings. `workers` processes count chunks (all
        cores by default). Chunks longer than `max_chunk_bytes` are cut. `progress` shows bars, and `on_merge` is
        called with each merge and the count of its pair. A corpus that has too few pairs gives a smaller vocabulary,
        and a warning. Raises ValueError for a vocabulary that has no room for the bytes.
        """
        if isinstance(texts, str | bytes):
            raise TypeError("texts must be an iterable of strings, such as [text], and not one string")
        if tie_break not in ("lowest_id", "greatest_bytes"):
            raise ValueError(f"tie_break is {tie_break!r}; choose lowest_id or greatest_bytes")
        specials = (special_tokens,) if isinstance(special_tokens, str) else tuple(dict.fromkeys(special_tokens))
        smallest = 256 + len(specials)
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size {vocab_size} is too small: the 256 bytes and the special tokens alone are {smallest}"
            )
        pattern = cls((), pattern, specials).pattern  # every complaint before the work
        with without_gc():
            counts = count_in_parallel(texts, pattern, specials, workers or cpu_count(), progress)
            found = islice(find_merges(encode_chunks(counts, max_chunk_bytes), tie_break), vocab_size - smallest)
            tokens, merges = [bytes([b]) for b in BYTE_ORDER], []
            for a, b, count in tqdm(found, "merge", vocab_size - smallest, disable=not progress, leave=False):
                merges.append((tokens[a], tokens[b]))
                tokens.append(tokens[a] + tokens[b])
                if on_merge:
                    on_merge(tokens[a], tokens[b], count)
        if smallest + len(merges) < vocab_size:
            warnings.warn(
                f"the corpus has no more pairs to merge: the vocabulary stops at {smallest + len(merges)} tokens, "
                f"short of the {vocab_size} asked for",
                stacklevel=2,
            )
        return cls(merges, pattern, specials)

    # ---- encoding

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are text like any other."""
        chunks = chain.from_iterable(map(self._splitter.split, self._splitter.blocks(valid_unicode(text))))
        return list(chain.from_iterable(map(self._cache.__getitem__, chunks)))

    def encode(
        self,
        text: str,
        *,
        allowed_special: str | Collection[str] = (),
        disallowed_special: str | Collection[str] = "all",
    ) -> list[int]:
        """Ids of `text`. Special tokens in `allowed_special` (a collection, or "all") become their ids.

        Any other special token in the text raises ValueError, since a text from outside should not be able to end a
        document; with `disallowed_special=()` it is encoded as ordinary text. The rules are tiktoken's.
        """
        allowed = tuple(self.special_tokens) if allowed_special == "all" else tuple(allowed_special)
        for special in set(self.special_tokens) - set(allowed) if disallowed_special == "all" else disallowed_special:
            if special in text:
                raise ValueError(
                    f"the text holds the special token {special!r}; pass allowed_special={{{special!r}}} to encode it "
                    "as one token, or disallowed_special=() to encode it as ordinary text"
                )
        if not any(s in text for s in allowed):
            return self.encode_ordinary(text)
        parts = any_of(allowed).split(text)  # text, special token, text, ..., text
        encoded = ([self.special_tokens[s]] if i % 2 else self.encode_ordinary(s) for i, s in enumerate(parts))
        return list(chain.from_iterable(encoded))

    def encode_batch(
        self,
        texts: Iterable[str],
        *,
        num_threads: int = 8,
        allowed_special: str | Collection[str] = (),
        disallowed_special: str | Collection[str] = "all",
    ) -> list[list[int]]:
        """`encode` for every text, in threads of tiktoken; without it, or where it cannot hold these ids, here."""
        texts = list(texts)
        allowed = set(self.special_tokens if allowed_special == "all" else allowed_special)
        try:
            encode = partial(self._tiktoken.encode_batch, texts, num_threads=num_threads)
        except (ImportError, ValueError):
            return [self.encode(t, allowed_special=allowed, disallowed_special=disallowed_special) for t in texts]
        return encode(allowed_special=allowed, disallowed_special=disallowed_special)

    def encode_iterable(
        self,
        texts: Iterable[str],
        *,
        allowed_special: str | Collection[str] = (),
        disallowed_special: str | Collection[str] = "all",
    ) -> Iterator[int]:
        """Ids of all texts joined, such as the lines of an open file, one by one.

        Holds about BLOCK characters at a time, if the pattern is one of PATTERNS; otherwise the whole text.
        """
        encode = partial(self.encode, allowed_special=allowed_special, disallowed_special=disallowed_special)
        waiting, size = [], 0
        for text in texts:
            waiting.append(text)
            size += len(text)
            if size >= BLOCK and self._splitter.cut:
                text = "".join(waiting)
                cut = self._settled(text)
                yield from encode(text[:cut])
                waiting, size = [text[cut:]], 0
        yield from encode("".join(waiting))

    def _settled(self, text: str) -> int:
        """Length of the part of `text` whose ids do not depend on what may follow."""
        start, end = 0, len(text)
        if self.special_tokens:  # never cut inside of one, not even of one that may have only begun
            start = max((m.end() for m in any_of(tuple(self.special_tokens)).finditer(text)), default=0)
            begun = {special[:n] for special in self.special_tokens for n in range(1, len(special))}
            end -= max((len(s) for s in begun if text.endswith(s)), default=0)
        cut = self._splitter.last_cut.search(text, start, max(start, end))
        return cut.start() if cut else start

    def _encode_chunk(self, chunk: str) -> list[int]:
        ranks = self._merge(chunk.encode())
        return ranks if self._ids is None else [self._ids[r] for r in ranks]

    def _merge(self, chunk: bytes) -> list[int]:
        """The ranks that a chunk is left with after all merges, in their order."""
        parts, merge_rank = list(chunk.translate(BYTE_TO_ID)), self._merge_rank
        if len(parts) > LONG_CHUNK:
            return self._merge_long(parts)
        never = len(self._rank)
        while len(parts) > 1:
            ranks = [merge_rank.get(pair, never) for pair in zip(parts, parts[1:], strict=False)]
            if (new := min(ranks)) == never:
                break
            i = ranks.index(new)
            parts[i : i + 2] = [new]
        return parts

    def _merge_long(self, parts: list[int]) -> list[int]:
        """The same in n log n: a linked list, and a heap of rank and place of all merges that may be due."""
        merge_rank, size = self._merge_rank, len(parts)
        following, previous = list(range(1, size + 1)), list(range(-1, size))
        parts.append(-1)  # stands behind the last part, and before the first one, whose previous is -1
        pairs = enumerate(zip(parts, parts[1:], strict=False))
        due = [merge_rank[pair] << PAIR_SHIFT | i for i, pair in pairs if pair in merge_rank]
        heapq.heapify(due)
        while due:
            entry = heapq.heappop(due)
            new, i = entry >> PAIR_SHIFT, entry & PAIR_MASK
            j = following[i]
            if merge_rank.get((parts[i], parts[j])) != new:
                continue  # broken up by an earlier merge
            h, k = previous[i], following[j]
            parts[i], parts[j] = new, -1
            following[i], previous[k] = k, i
            if (rank := merge_rank.get((parts[h], new))) is not None:
                heapq.heappush(due, rank << PAIR_SHIFT | h)
            if (rank := merge_rank.get((new, parts[k]))) is not None:
                heapq.heappush(due, rank << PAIR_SHIFT | i)
        return [part for part in parts if part >= 0]

    # ---- decoding

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Raises ValueError for an id that is not in the vocabulary."""
        try:
            return b"".join(map(self.vocab.__getitem__, map(int, ids)))
        except KeyError as e:
            raise ValueError(f"id {e} is not in this vocabulary of {self.n_vocab} tokens") from None

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """The text of `ids`; what is not UTF-8 becomes U+FFFD, or raises with errors="strict"."""
        return self.decode_bytes(ids).decode("utf-8", errors)

    def stream_decoder(self) -> "StreamDecoder":
        return StreamDecoder(self)

    # ---- properties

    @cached_property
    def n_vocab(self) -> int:
        """One more than the highest id."""
        return max(self.vocab) + 1

    def __len__(self) -> int:
        return self.n_vocab

    def __repr__(self) -> str:
        return f"Tokenizer({self.n_vocab} tokens, {len(self.merges)} merges, special tokens {self.special_tokens})"

    def __reduce__(self):
        """For pickle and copy, without the cache and without what other libraries have built."""
        ordinary = {token: i for i, token in self.vocab.items() if i not in set(self.special_tokens.values())}
        return Tokenizer, (self.merges, self.pattern, self.special_tokens, ordinary)

    @property
    def eot_token(self) -> int | None:
        """The id of <|endoftext|>, None where there is no such token."""
        return self.special_tokens.get(ENDOFTEXT)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over pattern, merges, ids and special tokens; equal fingerprints, equal ids."""
        merges = [[a.hex(), b.hex()] for a, b in self.merges]
        content = json.dumps([self.pattern, merges, self._ids, list(self.special_tokens.items())])
        return hashlib.sha256(content.encode()).hexdigest()

    def token_bytes(self) -> np.ndarray:
        """(n_vocab,) int64: how many bytes of text each id stands for, 0 for special tokens."""
        lengths = np.zeros(self.n_vocab, np.int64)
        lengths[list(self.vocab)] = list(map(len, self.vocab.values()))
        lengths[list(self.special_tokens.values())] = 0
        return lengths

    # ---- files

    def save(self, path: str | os.PathLike) -> None:
        """Write `path`, a Hugging Face tokenizer.json with everything in it, and a .tiktoken file beside it.

        A directory gets tokenizer.json, tokenizer.tiktoken and tokenizer_config.json, and is what
        transformers.AutoTokenizer.from_pretrained reads.
        """
        path = Path(path)
        if path.suffix != ".json":
            path.mkdir(parents=True, exist_ok=True)
            _write(path / "tokenizer_config.json", _dump(self._transformers_config()))
            path = path / "tokenizer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _dump(self._to_json()))
        with contextlib.suppress(ValueError):  # tiktoken has no form for these ids
            ranks = self._tiktoken_ranks().items()
            lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks)
            _write(path.with_suffix(".tiktoken"), "".join(lines))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        pattern: str | None = None,
        special_tokens: Collection[str] | dict[str, int] | None = None,
    ) -> "Tokenizer":
        """Read a tokenizer.json (ours, or any byte-level BPE of Hugging Face), a .tiktoken file, vocab.json with
        merges.txt beside it, a directory that holds one of these, or an encoding of tiktoken by name, such as "gpt2".

        A .tiktoken file has no pattern and no special tokens: they are the arguments, else those of the .json file of
        the same name, else GPT-2's pattern, and <|endoftext|> as the next id. Raises UserError for a file that is
        missing, damaged, or no byte-level BPE.
        """
        file = _find_file(Path(path))
        if file is None and str(path) in TIKTOKEN_FILES:
            return cls.from_tiktoken(str(path))
        if file is None:
            raise UserError(
                f"no tokenizer at {path}; give a directory, a tokenizer.json, a .tiktoken file, or one of "
                + ", ".join(TIKTOKEN_FILES)
            )
        try:
            if file.suffix == ".tiktoken":
                return cls._from_ranks(_read_tiktoken(file), *_beside_tiktoken(file, pattern, special_tokens))
            content = json.loads(file.read_text(encoding="utf-8"))
            if file.name == "vocab.json":
                lines = file.with_name("merges.txt").read_text(encoding="utf-8").splitlines()
                merges = [line for line in lines if line and not line.startswith("#version")]
                content = dict(model=dict(vocab=content, merges=merges), pre_tokenizer=BYTE_LEVEL)
            return cls._from_json(content)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
            raise UserError(f"cannot use the tokenizer {file}: {e}; download or train it again") from None

    @classmethod
    def from_tiktoken(cls, encoding) -> "Tokenizer":
        """`encoding` is a tiktoken.Encoding, or the name of one. Raises UserError where its files cannot be had."""
        if isinstance(encoding, str):
            encoding = _get_encoding(encoding)
        return cls._from_ranks(encoding._mergeable_ranks, encoding._pat_str, dict(encoding._special_tokens))

    def to_tiktoken(self, name: str = "bpe"):
        """A tiktoken.Encoding with the same ids. Raises ValueError where the ids are not in the order of merges."""
        import tiktoken

        ranks = self._tiktoken_ranks()
        return tiktoken.Encoding(name, pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens)

    @cached_property
    def _tiktoken(self):
        return self.to_tiktoken()

    def to_transformers(self):
        """A transformers.PreTrainedTokenizerFast with the same ids; it takes special tokens in a text for allowed."""
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast

        config = self._transformers_config()
        del config["tokenizer_class"]
        return PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(_dump(self._to_json())), **config)

    def _tiktoken_ranks(self) -> dict[bytes, int]:
        ids = self._ids or list(range(len(self._rank)))
        if ids[256:] != sorted(ids[256:]):
            raise ValueError("tiktoken merges in the order of ids, which this tokenizer does not")
        return dict(zip(self._rank, ids, strict=True))

    def _transformers_config(self) -> dict:
        config = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
        if self.eot_token is not None:
            config |= dict(bos_token=ENDOFTEXT, eos_token=ENDOFTEXT)
        return config

    def _to_json(self) -> dict:
        """The content of a Hugging Face tokenizer.json."""
        pre_tokenizer = BYTE_LEVEL
        if self.pattern != PATTERNS["gpt2"][0]:
            split = dict(type="Split", pattern=dict(Regex=self.pattern), behavior="Isolated", invert=False)
            pre_tokenizer = dict(type="Sequence", pretokenizers=[split, BYTE_LEVEL | dict(use_regex=False)])
        special_ids = set(self.special_tokens.values())
        vocab = {_show(token): i for i, token in self.vocab.items() if i not in special_ids}
        flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        options = dict(dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None)
        options |= dict(fuse_unk=False, byte_fallback=False, ignore_merges=False)
        merges = [[_show(a), _show(b)] for a, b in self.merges]
        return dict(
            version="1.0",
            truncation=None,
            padding=None,
            added_tokens=[dict(id=i, content=s) | flags for s, i in self.special_tokens.items()],
            normalizer=None,
            pre_tokenizer=pre_tokenizer,
            post_processor=None,
            decoder=BYTE_LEVEL,
            model=dict(type="BPE") | options | dict(vocab=self.special_tokens | vocab, merges=merges),
        )

    @classmethod
    def _from_json(cls, content: dict) -> "Tokenizer":
        """From a tokenizer.json. Raises ValueError for one that gives other ids in Hugging Face than it would here."""
        if not isinstance(content, dict) or not {"model", "pre_tokenizer"} <= set(content):
            raise ValueError("it has no model or no pre_tokenizer")
        model, added = content["model"], content.get("added_tokens", ())
        if model.get("type", "BPE") != "BPE" or content.get("normalizer"):
            raise ValueError("it is no BPE, or it has a normalizer")
        if used := [k for k in ("dropout", "byte_fallback", "ignore_merges", "end_of_word_suffix") if model.get(k)]:
            raise ValueError(f"it uses {used[0]}, which byte-level BPE as here does not have")
        if any(token.get("lstrip") or token.get("rstrip") for token in added):
            raise ValueError("one of its special tokens swallows the spaces beside it")
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        merges = [(_unshow(a), _unshow(b)) for a, b in merges]
        if "added_tokens" in content:
            special = {token["content"]: token["id"] for token in added}
        else:  # a vocab.json, where all that is neither a byte nor merged is special
            made = set(BYTE_TO_CHAR.values()) | {_show(a + b) for a, b in merges}
            special = {token: i for token, i in model["vocab"].items() if token not in made}
        ids = {_unshow(token): i for token, i in model["vocab"].items() if special.get(token) != i}
        return cls(merges, _pattern_of(content["pre_tokenizer"]), special, ids)

    @classmethod
    def _from_ranks(cls, ranks: dict[bytes, int], pattern: str, special_tokens) -> "Tokenizer":
        """From tiktoken's form, without merges: the halves of a token are what the merges before it make of it."""
        tok = cls((), special_tokens=())
        merges, tokens = [], [bytes([b]) for b in BYTE_ORDER]
        for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
            halves = tok._merge(token)
            if len(halves) != 2:
                raise ValueError(f"the token {token!r} is not made of two earlier tokens")
            tok._merge_rank[tuple(halves)] = tok._rank[token] = len(tokens)
            merges.append((tokens[halves[0]], tokens[halves[1]]))
            tokens.append(token)
        return cls(merges, SPELLINGS.get(pattern, pattern), special_tokens, ranks)


class StreamDecoder:
    """Text from ids as they come; the bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: int | Iterable[int]) -> str:
        return self.utf8.decode(self.tokenizer.decode_bytes([ids] if isinstance(ids, int | np.integer) else ids))

    def flush(self) -> str:
        """What is left at the end: "", or U+FFFD for a character that was never finished."""
        return self.utf8.decode(b"", final=True)


# ---- helpers

BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)

# What tiktoken downloads for an encoding, and its sha256 (tiktoken_ext/openai_public.py).
BLOB = "https://openaipublic.blob.core.windows.net/"
TIKTOKEN_FILES = {
    "gpt2": {
        "gpt-2/encodings/main/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "gpt-2/encodings/main/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    },
    "r50k_base": {
        "encodings/r50k_base.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    },
    "cl100k_base": {
        "encodings/cl100k_base.tiktoken": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    },
    "o200k_base": {
        "encodings/o200k_base.tiktoken": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    },
}


def visible(token: bytes) -> str:
    """A token for people to read: spaces and line ends as signs, bytes that are no whole character as \\x escapes."""
    text = token.decode("utf-8", "backslashreplace").replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _show(token: bytes) -> str:
    """Bytes in GPT-2's printable characters."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, token))


def _unshow(token: str) -> bytes:
    try:
        return bytes(map(CHAR_TO_BYTE.__getitem__, token))
    except KeyError:
        raise ValueError(f"the token {token!r} is not written in GPT-2's characters for bytes") from None


def _dump(content: dict) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _write(path: Path, content: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(content, encoding="utf-8", newline="\n")
    os.replace(part, path)


def _find_file(path: Path) -> Path | None:
    if path.is_dir():
        candidates = [path / "tokenizer.json", path / "vocab.json", *sorted(path.glob("*.tiktoken"))]
    else:
        candidates = [path.with_name("vocab.json") if path.name == "merges.txt" else path]
    return next((file for file in candidates if file.is_file()), None)


def _read_tiktoken(file: Path) -> dict[bytes, int]:
    pairs = (line.split() for line in file.read_bytes().splitlines() if line)
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}


def _beside_tiktoken(file: Path, pattern, special_tokens) -> tuple[str, Collection[str] | dict[str, int]]:
    """Pattern and special tokens of a .tiktoken file, as `Tokenizer.load` describes."""
    if (whole := file.with_suffix(".json")).is_file() and None in (pattern, special_tokens):
        beside = Tokenizer.load(whole)
        pattern = beside.pattern if pattern is None else pattern
        special_tokens = beside.special_tokens if special_tokens is None else special_tokens
    return pattern or "gpt2", (ENDOFTEXT,) if special_tokens is None else special_tokens


def _pattern_of(pre_tokenizer: dict | None) -> str:
    """The split pattern of a tokenizer.json. Raises ValueError where it is not one regular expression."""
    parts = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    *splits, byte_level = [part or {} for part in parts]
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        raise ValueError("it is not byte-level, or it puts a space in front of every text")
    if not splits and byte_level.get("use_regex", True):
        return "gpt2"
    if len(splits) != 1 or byte_level.get("use_regex", True) or "Regex" not in splits[0].get("pattern", ()):
        raise ValueError("it does not split text by one regular expression")
    pattern = splits[0]["pattern"]["Regex"]
    if splits[0]["behavior"] == "Removed" and splits[0]["invert"] or splits[0]["behavior"] == "Isolated":
        return SPELLINGS.get(pattern, pattern)
    raise ValueError("it drops or joins some of the text that its pattern finds")


def _get_encoding(name: str):
    """tiktoken's encoding, or a UserError that says which file is missing and where it belongs."""
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # of requests, of the check of the sum, of the file system: the file cannot be had
        if name not in TIKTOKEN_FILES:
            raise UserError(f"tiktoken has no encoding {name!r}; choose from {', '.join(TIKTOKEN_FILES)}") from None
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
        folder = Path(folder or os.path.join(tempfile.gettempdir(), "data-gym-cache"))
        needed = [(BLOB + f, folder / hashlib.sha1((BLOB + f).encode()).hexdigest()) for f in TIKTOKEN_FILES[name]]
        address, place = next((item for item in needed if not item[1].exists()), needed[0])
        checksum = TIKTOKEN_FILES[name][address.removeprefix(BLOB)]
        raise UserError(
            f"the {name} encoding needs {address} (sha256 {checksum}), which is not in the cache and could not be "
            f"downloaded ({type(e).__name__}); fetch it elsewhere, store it as {place}, and set "
            f"TIKTOKEN_CACHE_DIR={folder}; or use a tokenizer.json, which needs no network"
        ) from None
