"""Byte-level byte-pair encoding (Sennrich et al. 2016; the byte-level form of Radford et al. 2019), exact and fast.

Training, in five lines: a split pattern cuts text into chunks (" word", "'s", " 42", "!!"), and equal chunks are
counted once. Every chunk starts as its UTF-8 bytes, ids 0..255. Then, again and again, the adjacent pair that occurs
most often becomes a new token, everywhere at once. The list of these merges is the tokenizer. Encoding repeats the
merges in their order on the chunks of a new text, and decoding joins the bytes of the ids.

    tok = Tokenizer.train(open("input.txt"), vocab_size=1024)
    ids = tok.encode("Hello, world")            # special tokens in the text raise, unless allowed
    tok.decode(ids)                             # "Hello, world"
    tok.save("out/tokenizer")                   # a directory for transformers.AutoTokenizer; .tiktoken in it
    tok = Tokenizer.load("out/tokenizer")       # or a tokenizer.json, a .tiktoken, vocab.json + merges.txt, "gpt2"
    tok.to_tiktoken(), tok.to_transformers()    # the same ids from other libraries

This file knows nothing of models, shards or command lines.
"""

import base64
import codecs
import hashlib
import heapq
import json
import multiprocessing
import os
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property, lru_cache
from itertools import chain
from operator import itemgetter
from pathlib import Path

import numpy as np
import regex
from tqdm import tqdm

from runtime import UserError

ENDOFTEXT = "<|endoftext|>"
BLOCK = 2**20  # characters that are split, counted or sent to a worker at a time
CACHED_CHUNKS = 2**18  # distinct chunks whose ids the encoder remembers

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
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}| ?[^\t-\r A-Za-z0-9]+[\r\n]*"
        r"|[\t-\r ]*[\r\n]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+",
        r"(?<=[\p{L}\p{N}])(?=\s)|(?<=\S)(?= )",
    ),
}


# ---- splitting


class Splitter:
    """Cuts text into chunks, which merges never cross."""

    def __init__(self, pattern: str):
        """`pattern` is a key of PATTERNS or a regular expression. Raises ValueError for one that does not compile."""
        ascii_twin = cut = None
        for known, *fast in PATTERNS.values():
            if pattern == known:
                ascii_twin, cut = fast
        try:
            compiled = regex.compile(pattern)
        except regex.error as e:
            raise ValueError(f"the split pattern {pattern!r} does not compile: {e}") from None
        if compiled.groups:
            raise ValueError(f"the split pattern {pattern!r} has a capturing group; write (?:...) instead of (...)")
        self.find = compiled.findall
        self.find_ascii = re.compile(ascii_twin).findall if ascii_twin else self.find
        self.cut = regex.compile(cut) if cut else None

    def split(self, text: str) -> list[str]:
        return (self.find_ascii if text.isascii() else self.find)(text)

    def blocks(self, text: str) -> Iterator[str]:
        """Parts of about BLOCK characters that together have the same chunks as `text`."""
        start = 0
        while self.cut and len(text) - start > BLOCK and (cut := self.cut.search(text, start + BLOCK)):
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:] if start else text


@lru_cache
def splitter(pattern: str) -> Splitter:
    return Splitter(pattern)


@lru_cache
def any_of(specials: tuple[str, ...]) -> re.Pattern:
    """Matches the longest of `specials`."""
    return re.compile("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")")


def valid_unicode(text: str) -> str:
    """`text` with lone surrogates, which have no UTF-8 form, replaced."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---- training


def count_chunks(texts: list[str], pattern: str, specials: tuple[str, ...]) -> Counter[str]:
    """How often each chunk occurs in `texts`; special tokens in them are left out. Runs in worker processes."""
    counts, split = Counter(), splitter(pattern)
    for text in texts:
        parts = any_of(specials).split(text)[::2] if any(s in text for s in specials) else [text]
        for block in chain.from_iterable(map(split.blocks, parts)):
            counts.update(split.split(block))
    return counts


def batches(texts: Iterable[str], pattern: str) -> Iterator[list[str]]:
    """Lists of about BLOCK characters; a longer text is cut where its chunks stay the same."""
    batch, size = [], 0
    for text in texts:
        for block in splitter(pattern).blocks(text) if len(text) > BLOCK else (text,):
            batch.append(block)
            size += len(block)
            if size >= BLOCK:
                yield batch
                batch, size = [], 0
    yield batch


def count_in_parallel(texts, pattern: str, specials: tuple[str, ...], workers: int, progress: bool) -> Counter[str]:
    """`count_chunks` over all texts. The first batches are counted here, so that small corpora start no process;
    then `workers - 1` processes get what they can take, and this process counts what they cannot."""
    counts, pending, pool = Counter(), set(), None
    bar = tqdm(desc="count chunks", unit="char", unit_scale=True, disable=not progress, leave=False)
    try:
        for n, batch in enumerate(batches(texts, pattern)):
            if n == 2 and workers > 1:
                pool = ProcessPoolExecutor(workers - 1, mp_context=multiprocessing.get_context("spawn"))
            if pool and len(pending) < 2 * (workers - 1):
                pending.add(pool.submit(count_chunks, batch, pattern, specials))
            else:
                counts.update(count_chunks(batch, pattern, specials))
            pending = _collect(pending, counts, wait=False)
            bar.update(sum(map(len, batch)))
        _collect(pending, counts, wait=True)
    except BrokenProcessPool:
        raise UserError(
            "a worker process of Tokenizer.train ended early; call it under `if __name__ == '__main__':`, "
            "or with workers=1"
        ) from None
    finally:
        bar.close()
        if pool:
            pool.shutdown(cancel_futures=True)
    return counts


def _collect(pending: set[Future], counts: Counter, wait: bool) -> set[Future]:
    done = {f for f in pending if wait or f.done()}
    for future in done:
        counts.update(future.result())
    return pending - done


PAIR_SHIFT = 32  # a pair of ids is one integer, first << 32 | second, which sorts as the pair does


class Corpus:
    """The distinct chunks as one long row of symbols, with the count and the places of every adjacent pair.

    A symbol is an id, -1 between chunks and where a merge has swallowed one; `next` and `previous` skip those. Places
    of a pair are found once, when its second symbol comes into being, and are checked when the pair is merged, since
    other merges may have broken it up in the meantime. So no merge ever looks at more than its own places.
    """

    def __init__(self, chunks: dict[bytes, int]):
        lengths = np.fromiter(map(len, chunks), np.int64, len(chunks))
        at = np.arange(lengths.sum()) + np.repeat(np.arange(1, len(chunks) + 1), lengths)  # leave gaps between chunks
        size = len(at) + len(chunks) + 1
        symbols, counts = np.full(size, -1, np.int32), np.zeros(size, np.int64)
        symbols[at] = np.frombuffer(b"".join(chunks).translate(BYTE_TO_ID), np.uint8)
        counts[at] = np.repeat(np.fromiter(chunks.values(), np.int64, len(chunks)), lengths)
        self._index_pairs(symbols, counts)
        numbers = list(range(size + 1))
        self.symbols, self.counts = symbols.tolist(), counts.tolist()
        self.next, self.previous = numbers[1:], [0, *numbers[: size - 1]]

    def _index_pairs(self, symbols, counts) -> None:
        first = np.flatnonzero((symbols[:-1] >= 0) & (symbols[1:] >= 0))
        pairs = (symbols[first] << 8 | symbols[first + 1]).astype(np.uint16)
        order = np.argsort(pairs, kind="stable")
        pairs, first = pairs[order], first[order]
        starts = np.flatnonzero(np.diff(pairs, prepend=-1))
        totals = np.add.reduceat(counts[first], starts) if len(starts) else starts
        keys = [(p >> 8) << PAIR_SHIFT | p & 255 for p in pairs[starts].tolist()]
        self.pair_count = dict(zip(keys, totals.tolist(), strict=True))
        self.pair_places = dict(zip(keys, np.split(first, starts[1:]), strict=False))

    def merge(self, pair: int, new: int) -> list[int]:
        """Replace `pair` by the symbol `new` everywhere, from left to right; returns the pairs that come into being."""
        a, b = pair >> PAIR_SHIFT, pair & (1 << PAIR_SHIFT) - 1
        symbols, counts, following, previous = self.symbols, self.counts, self.next, self.previous
        left_count, left_places, right_count, right_places = {}, {}, {}, {}  # by the neighbour's symbol
        places = self.pair_places.pop(pair)
        for i in places if isinstance(places, list) else places.tolist():
            if symbols[i] != a:
                continue
            j = following[i]
            if symbols[j] != b:
                continue
            h, k, count = previous[i], following[j], counts[i]
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
        del self.pair_count[pair]
        return self._recount(pair, new, left_count, left_places, right_count, right_places)

    def _recount(self, pair, new, left_count, left_places, right_count, right_places) -> list[int]:
        """Every x,a (b,y) beside the merged a,b has become x,new (new,y)."""
        a, b = pair >> PAIR_SHIFT, pair & (1 << PAIR_SHIFT) - 1
        pair_count, pair_places, created = self.pair_count, self.pair_places, []
        for y, count in right_count.items():
            broken, made = b << PAIR_SHIFT | y, new << PAIR_SHIFT | y
            if broken != pair:
                pair_count[broken] -= count
            pair_count[made], pair_places[made] = count, right_places[y]
            created.append(made)
        for x, count in left_count.items():  # after the right side: in abab the second merge breaks up new,a
            broken, made = x << PAIR_SHIFT | a, x << PAIR_SHIFT | new
            if broken != pair:
                pair_count[broken] -= count
            pair_count[made], pair_places[made] = count, left_places[x]
            created.append(made)
        return created


def find_merges(chunks: dict[bytes, int], n_merges: int, tie_break: str, progress: bool) -> list[tuple[int, int]]:
    """The first `n_merges` merges (or all there are) of counted chunks, as pairs of ids; merge i makes id 256 + i.

    The heap holds (-count, order among equal counts, pair). Counts of a pair only fall after it has come into being,
    so an entry that is out of date can stay until it reaches the top.
    """
    corpus = Corpus(chunks)
    mask = (1 << PAIR_SHIFT) - 1
    counts, merges = corpus.pair_count, []
    token_order = [chr(255 - b) + "\u0100" for b in BYTE_ORDER]  # sorts bytes from the greatest to the least

    def entry(pair: int) -> tuple:
        if tie_break == "lowest_id":
            return -counts[pair], pair
        return -counts[pair], token_order[pair >> PAIR_SHIFT] + token_order[pair & mask], pair

    heap = list(map(entry, counts))
    heapq.heapify(heap)
    bar = tqdm(total=n_merges, desc="merge", unit="merge", disable=not progress, leave=False)
    while heap and len(merges) < n_merges:
        count, pair = -heap[0][0], heap[0][-1]
        if counts[pair] != count:
            heapq.heapreplace(heap, entry(pair)) if counts[pair] else heapq.heappop(heap)
            continue
        heapq.heappop(heap)
        new = 256 + len(merges)
        a, b = pair >> PAIR_SHIFT, pair & mask
        merges.append((a, b))
        token_order.append(token_order[a][:-1] + token_order[b])
        for created in corpus.merge(pair, new):
            if counts[created]:
                heapq.heappush(heap, entry(created))
        if len(merges) % 256 == 0:
            bar.update(256)
    bar.close()
    return merges


# ---- the tokenizer


class ChunkCache(dict):
    """chunk -> its ids, computed on the first look-up."""

    def __init__(self, encode_chunk: Callable[[str], list[int]]):
        self.encode_chunk = encode_chunk

    def __missing__(self, chunk: str) -> list[int]:
        ids = self.encode_chunk(chunk)
        if len(chunk) <= 64:
            if len(self) >= CACHED_CHUNKS:
                self.clear()
            self[chunk] = ids
        return ids


class Tokenizer:
    """A byte-level BPE tokenizer: merges, a split pattern and special tokens.

    Attributes: `pattern`, a regular expression; `merges`, pairs of bytes in their order; `vocab`, id -> bytes, special
    tokens included; `special_tokens`, name -> id.
    """

    def __init__(
        self,
        merges: Iterable[tuple[bytes, bytes]],
        pattern: str = "gpt2",
        special_tokens: Collection[str] | dict[str, int] = (ENDOFTEXT,),
        ids: dict[bytes, int] | None = None,
    ):
        """Ids are those of GPT-2's layout: bytes, merges, special tokens; `ids` gives other ones to bytes and merges.

        Raises ValueError for merges in an impossible order, for a pattern that does not compile, for ids used twice.
        """
        self.merges = [(a, b) for a, b in merges]
        self.pattern = PATTERNS[pattern][0] if pattern in PATTERNS else pattern
        self._splitter = splitter(self.pattern)
        tokens = [bytes([b]) for b in BYTE_ORDER]  # in the order of ranks: bytes first, then merges
        rank = {token: i for i, token in enumerate(tokens)}
        self._merge_rank = {}  # (rank, rank) -> rank
        for a, b in self.merges:
            if a not in rank or b not in rank or a + b in rank:
                raise ValueError(f"merge {len(tokens) - 256}, {a!r} + {b!r}, uses a token that no earlier merge makes")
            self._merge_rank[rank[a], rank[b]] = rank[a + b] = len(tokens)
            tokens.append(a + b)
        if ids is None:
            self._ids, self.vocab = None, dict(enumerate(tokens))  # id and rank are the same
        else:
            if missing := [token for token in tokens if token not in ids]:
                raise ValueError(f"{len(missing)} tokens have no id, the first is {missing[0]!r}")
            self._ids = [ids[token] for token in tokens]
            self.vocab = {i: token for token, i in sorted(ids.items(), key=itemgetter(1))}
            if self._ids == list(range(len(tokens))):
                self._ids = None
        if not isinstance(special_tokens, dict):
            special_tokens = {s: len(self.vocab) + i for i, s in enumerate(dict.fromkeys(special_tokens))}
        self.special_tokens = dict(sorted(special_tokens.items(), key=itemgetter(1)))
        if taken := [s for s, i in self.special_tokens.items() if self.vocab.get(i, s.encode()) != s.encode()]:
            raise ValueError(f"the id of the special token {taken[0]!r} belongs to another token")
        if "" in self.special_tokens:
            raise ValueError("a special token is an empty string")
        self.vocab |= {i: s.encode() for s, i in self.special_tokens.items()}
        self._cache = ChunkCache(self._encode_chunk)

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
    ) -> "Tokenizer":
        """Learn merges from an iterable of texts, which is read once and never held as a whole.

        `vocab_size` counts the 256 bytes, the merges and the special tokens, which get the last ids and are cut out of
        the texts. Among pairs of equal count, `tie_break="lowest_id"` merges the one with the lowest ids, as the
        `tokenizers` library does, and `"greatest_bytes"` the lexicographically greatest pair of byte strings.
        `workers` is the number of processes that count chunks (default: all cores). Chunks longer than
        `max_chunk_bytes` are cut. A corpus with too few pairs gives a smaller vocabulary, and a warning.
        """
        if isinstance(texts, str | bytes):
            raise TypeError("texts must be an iterable of strings, such as [text], and not one string")
        if tie_break not in ("lowest_id", "greatest_bytes"):
            raise ValueError(f"tie_break is {tie_break!r}; choose lowest_id or greatest_bytes")
        if isinstance(special_tokens, str):
            special_tokens = (special_tokens,)
        specials = tuple(dict.fromkeys(special_tokens))
        n_merges = vocab_size - 256 - len(specials)
        if n_merges < 0:
            raise ValueError(
                f"vocab_size {vocab_size} is too small: 256 bytes and {len(specials)} special tokens "
                f"need {256 + len(specials)}"
            )
        empty = cls((), pattern, specials)
        counts = count_in_parallel(texts, empty.pattern, specials, workers or cpu_count(), progress)
        merges = find_merges(_to_bytes(counts, max_chunk_bytes), n_merges, tie_break, progress)
        if len(merges) < n_merges:
            warnings.warn(
                f"the corpus has no more pairs to merge: the vocabulary stops at {256 + len(merges) + len(specials)} "
                f"tokens, short of the {vocab_size} asked for",
                stacklevel=2,
            )
        tokens = [bytes([b]) for b in BYTE_ORDER]
        for a, b in merges:
            tokens.append(tokens[a] + tokens[b])
        return cls([(tokens[a], tokens[b]) for a, b in merges], pattern, specials)

    # ---- encoding

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are text like any other."""
        text = valid_unicode(text)
        blocks = (self._splitter.split(block) for block in self._splitter.blocks(text))
        return list(chain.from_iterable(map(self._cache.__getitem__, chain.from_iterable(blocks))))

    def encode(
        self,
        text: str,
        *,
        allowed_special: str | Collection[str] = (),
        disallowed_special: str | Collection[str] = "all",
    ) -> list[int]:
        """Ids of `text`. Special tokens in `allowed_special` (a collection or "all") become their ids.

        Any other special token in the text raises ValueError, since text from outside should not be able to end a
        document; with `disallowed_special=()` it is encoded as ordinary text. The rules are tiktoken's.
        """
        allowed = self._check_special(text, allowed_special, disallowed_special)
        if not any(s in text for s in allowed):
            return self.encode_ordinary(text)
        parts = any_of(allowed).split(text)  # text, special, text, ..., text
        for i, part in enumerate(parts):
            parts[i] = [self.special_tokens[part]] if i % 2 else self.encode_ordinary(part)
        return list(chain.from_iterable(parts))

    def _check_special(self, text: str, allowed, disallowed) -> tuple[str, ...]:
        allowed = tuple(self.special_tokens) if allowed == "all" else tuple(allowed)
        if unknown := set(allowed) - set(self.special_tokens):
            raise ValueError(f"{unknown.pop()!r} is not a special token of this tokenizer")
        for special in set(self.special_tokens) - set(allowed) if disallowed == "all" else disallowed:
            if special in text:
                raise ValueError(
                    f"the text holds the special token {special!r}; pass allowed_special={{{special!r}}} to encode it "
                    "as one token, or disallowed_special=() to encode it as ordinary text"
                )
        return allowed

    def encode_batch(
        self,
        texts: Iterable[str],
        *,
        num_threads: int = 8,
        allowed_special: str | Collection[str] = (),
        disallowed_special: str | Collection[str] = "all",
    ) -> list[list[int]]:
        """Ids of every text, in threads of tiktoken, where it can hold this vocabulary; the ids are the same."""
        texts = list(texts)
        try:
            encoding = self._tiktoken
        except (ImportError, ValueError):
            return [
                self.encode(t, allowed_special=allowed_special, disallowed_special=disallowed_special) for t in texts
            ]
        allowed = allowed_special if allowed_special == "all" else set(allowed_special)
        return encoding.encode_batch(
            texts, num_threads=num_threads, allowed_special=allowed, disallowed_special=disallowed_special
        )

    def encode_iterable(
        self,
        texts: Iterable[str],
        *,
        allowed_special: str | Collection[str] = (),
        disallowed_special: str | Collection[str] = "all",
    ) -> Iterator[int]:
        """Ids of the texts joined together, one by one, such as those of an open file.

        Memory is about BLOCK characters, if the pattern is one of PATTERNS; with another one the whole text is read.
        """
        options = dict(allowed_special=allowed_special, disallowed_special=disallowed_special)
        waiting, size = [], 0
        for text in texts:
            waiting.append(text)
            size += len(text)
            if size >= BLOCK and self._splitter.cut:
                ready, rest = self._cut_off("".join(waiting), allowed_special)
                yield from self.encode(ready, **options)
                waiting, size = [rest], 0  # not len(rest): a text without a place to cut is not searched every time
        yield from self.encode("".join(waiting), **options)

    def _cut_off(self, text: str, allowed_special) -> tuple[str, str]:
        """`text` in two: a part whose ids are settled, and the rest, whose chunks depend on what follows."""
        end = len(text)
        for special in self.special_tokens:  # one may have begun
            for length in range(min(len(special) - 1, len(text)), 0, -1):
                if text.endswith(special[:length]):
                    end = min(end, len(text) - length)
                    break
        start = 0
        for match in any_of(tuple(self.special_tokens)).finditer(text) if self.special_tokens else ():
            start = match.end()  # never cut inside of a special token
        cut = max((m.start() for m in self._splitter.cut.finditer(text, max(start, end - 4096), end)), default=0)
        if cut <= start:
            cut = max((m.start() for m in self._splitter.cut.finditer(text, start, end)), default=start)
        return text[:cut], text[cut:]

    def _encode_chunk(self, chunk: str) -> list[int]:
        ranks = self._merge(chunk.encode())
        return ranks if self._ids is None else [self._ids[r] for r in ranks]

    def _merge(self, chunk: bytes) -> list[int]:
        """The ranks of a chunk after all merges."""
        parts = list(chunk.translate(BYTE_TO_ID))
        if len(parts) > 64:
            return self._merge_long(parts)
        merge_rank, never = self._merge_rank, len(self._merge_rank) + 256
        while len(parts) > 1:
            new = min(merge_rank.get(pair, never) for pair in zip(parts, parts[1:], strict=False))
            if new == never:
                break
            i = 0
            while i < len(parts) - 1:
                if merge_rank.get((parts[i], parts[i + 1])) == new:
                    parts[i : i + 2] = [new]
                i += 1
        return parts

    def _merge_long(self, parts: list[int]) -> list[int]:
        """The same in linear time: like training, with the places of every merge that is due, lowest rank first."""
        merge_rank = self._merge_rank
        following, previous = list(range(1, len(parts) + 1)), list(range(-1, len(parts)))
        parts.append(-1)  # ends the chunk, and is what previous = -1 sees
        places: dict[int, list[int]] = {}
        for i, pair in enumerate(zip(parts, parts[1:], strict=False)):
            if pair in merge_rank:
                places.setdefault(merge_rank[pair], []).append(i)
        due = list(places)
        heapq.heapify(due)
        while due:
            new = heapq.heappop(due)
            for i in places.pop(new):
                j = following[i]
                if merge_rank.get((parts[i], parts[j])) != new:
                    continue
                h, k = previous[i], following[j]
                parts[i], parts[j] = new, -1
                following[i], previous[k] = k, i
                for at, pair in ((h, (parts[h], new)), (i, (new, parts[k]))):
                    if (rank := merge_rank.get(pair)) is not None:
                        if rank not in places:
                            places[rank] = []
                            heapq.heappush(due, rank)
                        places[rank].append(at)
        return [p for p in parts if p >= 0]

    # ---- decoding

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Raises ValueError for an id that is not in the vocabulary."""
        try:
            return b"".join(map(self.vocab.__getitem__, map(int, ids)))
        except KeyError as e:
            raise ValueError(f"id {e} is not in this vocabulary of {self.n_vocab} tokens") from None

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, or raise with errors="strict"."""
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

    def __getstate__(self) -> dict:
        """For pickle and copy: without the cache and what other libraries have built."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_cache", "_splitter", "_tiktoken")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__ |= state
        self._splitter, self._cache = splitter(self.pattern), ChunkCache(self._encode_chunk)

    @property
    def eot_token(self) -> int | None:
        """The id of <|endoftext|>, None where there is no such token."""
        return self.special_tokens.get(ENDOFTEXT)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over pattern, merges, ids and special tokens: two tokenizers of one fingerprint give the same ids."""
        content = [self.pattern, [[a.hex(), b.hex()] for a, b in self.merges], self._ids, self.special_tokens]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def token_bytes(self) -> np.ndarray:
        """(n_vocab,) int64: the number of bytes of text that each id stands for, 0 for special tokens."""
        lengths = np.zeros(self.n_vocab, np.int64)
        for i, token in self.vocab.items():
            lengths[i] = len(token)
        lengths[list(self.special_tokens.values())] = 0
        return lengths

    # ---- formats

    def save(self, path: str | os.PathLike) -> None:
        """Write `path`, a tokenizer.json with everything in it, and a .tiktoken file beside it.

        Where `path` is a directory, it gets tokenizer.json, tokenizer.tiktoken and tokenizer_config.json, which is
        what transformers.AutoTokenizer.from_pretrained(path) reads.
        """
        path = Path(path)
        if path.suffix != ".json":
            path.mkdir(parents=True, exist_ok=True)
            _write(path / "tokenizer_config.json", _dump(self._transformers_config()))
            path = path / "tokenizer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, _dump(self._to_json()))
        try:
            ranks = self._tiktoken_ranks()
        except ValueError:  # tiktoken has no form for these ids
            return
        lines = (base64.b64encode(token).decode() + f" {rank}\n" for token, rank in ranks.items())
        _write(path.with_suffix(".tiktoken"), "".join(lines))

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        pattern: str | None = None,
        special_tokens: Collection[str] | dict[str, int] | None = None,
    ) -> "Tokenizer":
        """Read a tokenizer.json (ours, or any byte-level BPE one of Hugging Face), a .tiktoken file, vocab.json with
        merges.txt beside it, a directory with one of these, or an encoding of tiktoken by its name, such as "gpt2".

        A .tiktoken file holds neither pattern nor special tokens: they come from the arguments, else from a
        tokenizer.json of the same name beside it, else they are GPT-2's pattern and <|endoftext|> as the next id.
        Raises UserError for a file that is missing, damaged, or not a byte-level BPE.
        """
        file = _find_file(Path(path))
        if file is None:
            if str(path) in TIKTOKEN_FILES:
                return cls.from_tiktoken(str(path))
            raise UserError(
                f"no tokenizer at {path}; give a directory with a tokenizer.json, a tokenizer.json, a .tiktoken file, "
                f"or one of {', '.join(TIKTOKEN_FILES)}"
            )
        try:
            if file.suffix == ".tiktoken":
                return cls._from_ranks(_read_tiktoken(file), *_beside_tiktoken(file, pattern, special_tokens))
            if file.name == "vocab.json":
                vocab = json.loads(file.read_text(encoding="utf-8"))
                merges = (file.parent / "merges.txt").read_text(encoding="utf-8").splitlines()
                merges = [m for m in merges if m and not m.startswith("#version")]
                return cls._from_json(dict(model=dict(vocab=vocab, merges=merges), pre_tokenizer=BYTE_LEVEL))
            return cls._from_json(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
            reason = f"it has no {e}" if isinstance(e, KeyError) else e
            raise UserError(f"cannot read the tokenizer {file}: {reason}; write or download it again") from None

    @classmethod
    def from_tiktoken(cls, encoding) -> "Tokenizer":
        """`encoding` is a tiktoken.Encoding or the name of one. Raises UserError where its files cannot be had."""
        if isinstance(encoding, str):
            encoding = _get_encoding(encoding)
        return cls._from_ranks(encoding._mergeable_ranks, encoding._pat_str, dict(encoding._special_tokens))

    def to_tiktoken(self, name: str = "bpe"):
        """A tiktoken.Encoding with the same ids. Raises ValueError where ids are not in the order of merges."""
        import tiktoken

        return tiktoken.Encoding(
            name,
            pat_str=self.pattern,
            mergeable_ranks=self._tiktoken_ranks(),
            special_tokens=self.special_tokens,
        )

    def to_transformers(self):
        """A transformers.PreTrainedTokenizerFast with the same ids (there special tokens are always allowed)."""
        from tokenizers import Tokenizer as HFTokenizer
        from transformers import PreTrainedTokenizerFast

        config = self._transformers_config()
        del config["tokenizer_class"]
        backend = HFTokenizer.from_str(_dump(self._to_json()))
        return PreTrainedTokenizerFast(tokenizer_object=backend, **config)

    @cached_property
    def _tiktoken(self):
        return self.to_tiktoken()

    def _tiktoken_ranks(self) -> dict[bytes, int]:
        ids = self._ids or range(256 + len(self.merges))
        tokens = [bytes([b]) for b in BYTE_ORDER] + [a + b for a, b in self.merges]
        if any(i >= j for i, j in zip(ids[256:], ids[257:], strict=False)):
            raise ValueError(
                "tiktoken takes ids for ranks, and the ids of this tokenizer are not in the order of merges"
            )
        return dict(zip(tokens, ids, strict=True))

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
        added = [
            dict(id=i, content=s, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
            for s, i in self.special_tokens.items()
        ]
        ordinary = {i: t for i, t in self.vocab.items() if i not in set(self.special_tokens.values())}
        model = dict(
            type="BPE",
            dropout=None,
            unk_token=None,
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=False,
            vocab={_show(token): i for i, token in ordinary.items()},
            merges=[[_show(a), _show(b)] for a, b in self.merges],
        )
        return dict(
            version="1.0",
            truncation=None,
            padding=None,
            added_tokens=added,
            normalizer=None,
            pre_tokenizer=pre_tokenizer,
            post_processor=None,
            decoder=BYTE_LEVEL,
            model=model,
        )

    @classmethod
    def _from_json(cls, content: dict) -> "Tokenizer":
        """From a tokenizer.json. Raises ValueError for what would give other ids here than in Hugging Face."""
        model = content["model"]
        if model.get("type", "BPE") != "BPE" or content.get("normalizer") or model.get("dropout"):
            raise ValueError("it is not a plain BPE, it has a normalizer, or it has dropout")
        if model.get("byte_fallback") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise ValueError("it is a BPE of characters and not of bytes")
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
        merges = [(_unshow(a), _unshow(b)) for a, b in merges]
        made = {bytes([b]) for b in range(256)} | {a + b for a, b in merges}
        special = {t["content"]: t["id"] for t in content.get("added_tokens", ())}
        if strips := [t["content"] for t in content.get("added_tokens", ()) if t.get("lstrip") or t.get("rstrip")]:
            raise ValueError(f"its special token {strips[0]!r} swallows the spaces beside it")
        if "added_tokens" not in content:  # vocab.json: what is neither a byte nor a merge is special
            special = {t: i for t, i in model["vocab"].items() if _unshow(t, strict=False) not in made}
        ids = {_unshow(t): i for t, i in model["vocab"].items() if t not in special}
        return cls(merges, _pattern_of(content["pre_tokenizer"]), special, ids)

    @classmethod
    def _from_ranks(cls, ranks: dict[bytes, int], pattern: str, special_tokens) -> "Tokenizer":
        """From tiktoken's form: the two halves of a token are what the merges before it make of its bytes."""
        tok = cls((), special_tokens=())
        merges, tokens = [], [bytes([b]) for b in BYTE_ORDER]
        for token in sorted((t for t in ranks if len(t) > 1), key=ranks.__getitem__):
            halves = tok._merge(token)
            if len(halves) != 2:
                raise ValueError(f"the token {token!r} is not made of two earlier tokens")
            tok._merge_rank[tuple(halves)] = len(tokens)
            merges.append((tokens[halves[0]], tokens[halves[1]]))
            tokens.append(token)
        if not isinstance(special_tokens, dict):
            special_tokens = {s: max(ranks.values(), default=0) + 1 + i for i, s in enumerate(special_tokens)}
        return cls(merges, EQUIVALENT.get(pattern, pattern), special_tokens, ranks)


class StreamDecoder:
    """Text from ids as they come; bytes of a character that is not complete wait for the rest of it."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: int | Iterable[int]) -> str:
        return self.utf8.decode(self.tokenizer.decode_bytes([ids] if isinstance(ids, int) else ids))

    def flush(self) -> str:
        """What is left at the end: "", or U+FFFD for a character that was never completed."""
        return self.utf8.decode(b"", final=True)


# ---- helpers of the formats

BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)

# The files behind the encodings of tiktoken, with their sha256, from tiktoken_ext.openai_public.
_BLOB = "https://openaipublic.blob.core.windows.net/"
TIKTOKEN_FILES = {
    "gpt2": {
        f"{_BLOB}gpt-2/encodings/main/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        f"{_BLOB}gpt-2/encodings/main/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    },
    "r50k_base": {
        f"{_BLOB}encodings/r50k_base.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    },
    "cl100k_base": {
        f"{_BLOB}encodings/cl100k_base.tiktoken": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    },
    "o200k_base": {
        f"{_BLOB}encodings/o200k_base.tiktoken": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    },
}

# Other spellings of known patterns, which split every text in the same way.
EQUIVALENT = {
    r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""": PATTERNS["gpt2"][0],
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""": PATTERNS["gpt2"][0],
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""": PATTERNS["gpt2"][0],
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+""": PATTERNS["cl100k"][0],
}


def cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _to_bytes(counts: dict[str, int], longest: int | None) -> dict[bytes, int]:
    """Chunks as bytes, in an order that does not depend on how they were counted, none longer than `longest`."""
    chunks = {chunk.encode(): counts[chunk] for chunk in sorted(counts)}
    if longest is None or all(len(chunk) <= longest for chunk in chunks):
        return chunks
    cut = Counter()
    for chunk, count in chunks.items():
        for i in range(0, len(chunk), longest):
            cut[chunk[i : i + longest]] += count
    return cut


def _show(token: bytes) -> str:
    """Bytes in GPT-2's printable characters."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, token))


def _unshow(token: str, strict: bool = True) -> bytes | None:
    try:
        return bytes(map(CHAR_TO_BYTE.__getitem__, token))
    except KeyError:
        if strict:
            raise ValueError(f"{token!r} is not written in GPT-2's byte characters") from None
        return None


def _dump(content: dict) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _write(path: Path, content: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_text(content, encoding="utf-8", newline="\n")
    os.replace(part, path)


def _find_file(path: Path) -> Path | None:
    if path.is_dir():
        names = [path / "tokenizer.json", path / "vocab.json", *sorted(path.glob("*.tiktoken"))]
        return next((file for file in names if file.is_file()), None)
    return path.with_name("vocab.json") if path.name == "merges.txt" else path if path.is_file() else None


def _read_tiktoken(file: Path) -> dict[bytes, int]:
    ranks = {}
    for line in file.read_bytes().splitlines():
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    return ranks


def _beside_tiktoken(file: Path, pattern, special_tokens) -> tuple[str, Collection[str] | dict[str, int]]:
    """Pattern and special tokens of a .tiktoken file, as `Tokenizer.load` finds them."""
    if (whole := file.with_suffix(".json")).is_file() and (pattern is None or special_tokens is None):
        beside = Tokenizer.load(whole)
        pattern = beside.pattern if pattern is None else pattern
        special_tokens = beside.special_tokens if special_tokens is None else special_tokens
    return pattern or "gpt2", (ENDOFTEXT,) if special_tokens is None else special_tokens


def _pattern_of(pre_tokenizer: dict) -> str:
    """The split pattern of a tokenizer.json. Raises ValueError where it is not one pattern."""
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    byte_level = parts[-1]
    if byte_level["type"] != "ByteLevel" or byte_level["add_prefix_space"]:
        raise ValueError("it is not byte-level, or it adds a space in front of a text")
    if len(parts) == 1 and byte_level.get("use_regex", True):
        return "gpt2"
    if len(parts) != 2 or byte_level.get("use_regex", True) or parts[0]["type"] != "Split":
        raise ValueError("it does not split text by one regular expression")
    pattern = parts[0]["pattern"]["Regex"]
    return EQUIVALENT.get(pattern, pattern)


def _get_encoding(name: str):
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # of requests, of the cache, of the check of the sum: all mean that the file is not there
        if name not in TIKTOKEN_FILES:
            raise UserError(
                f"tiktoken has no encoding {name!r} ({e}); choose from {', '.join(TIKTOKEN_FILES)}"
            ) from None
        files = TIKTOKEN_FILES[name]
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
        folder = folder or os.path.join(tempfile.gettempdir(), "data-gym-cache")
        places = {address: os.path.join(folder, hashlib.sha1(address.encode()).hexdigest()) for address in files}
        address = next((a for a, place in places.items() if not os.path.exists(place)), next(iter(files)))
        raise UserError(
            f"the {name} encoding needs {address} (sha256 {files[address]}), which is not in the cache and cannot be "
            f"downloaded ({type(e).__name__}); fetch it elsewhere, store it as {places[address]}, and set "
            f"TIKTOKEN_CACHE_DIR={folder}; or use a tokenizer.json, for which no network is needed"
        ) from None
