"""From text to chunks, and from a chunk to ranks: what training, encoding and file formats have in common.

- a split pattern cuts text into chunks (" word", "'s", " 42", "!!"), which no token ever crosses: `splitter(pattern)`
- a chunk becomes its UTF-8 bytes, and neighbours are merged in the order of the merges: `merge_chunk`

A rank is the place of a token in the order in which BPE makes them: the 256 bytes first, then one for each merge. Most
tokenizers use the ranks as ids. This file knows nothing of ids, of vocabularies, or of files.
"""

import heapq
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import regex

BLOCK = 2**20  # characters that are split, counted or sent to a process at a time
LONG_CHUNK = 24  # bytes from which merging uses a heap; below, a simple loop is faster

# GPT-2 shows bytes as characters that can be printed and are not spaces, and numbers them in the order of those
# characters: first printable Latin-1 as itself, then the other bytes as U+0100, U+0101, ...
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = sorted(set(range(256)) - set(PRINTABLE))
BYTE_ORDER = bytes(PRINTABLE + OTHERS)  # rank -> byte
BYTE_TO_RANK = bytes(map(BYTE_ORDER.index, range(256)))  # a table for bytes.translate
SINGLE_BYTES = [bytes([b]) for b in BYTE_ORDER]  # the first 256 tokens


# ---- split patterns

# By name: the pattern, which `regex`, tiktoken and tokenizers read alike; its twin for ASCII text, for the `re` of the
# standard library, which is three times as fast; and where a long text may be cut beforehand (in letters that are
# letters in every version of Unicode).
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
        r"(?<=[A-Za-z0-9\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=\s)|(?<=\S)(?= )",
    ),
}

# Other spellings, under which files of other tokenizers hold the same two patterns.
SPELLINGS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
    # tiktoken's; in tokenizers {1,3}+ repeats and takes any number of digits, which loading such a file would find out
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s": "cl100k",
}
KNOWN = {pattern for pattern, *_ in PATTERNS.values()}  # tests compare all libraries on these


def full_pattern(pattern: str) -> str:
    """The regular expression that a name or another spelling stands for, otherwise `pattern` itself."""
    name = SPELLINGS.get(pattern, pattern)
    return PATTERNS[name][0] if name in PATTERNS else pattern


# ---- letters: those of Unicode 16

# tiktoken and tokenizers have Unicode 16 compiled in, while `regex` follows the newest version. These are the ranges
# that Unicode 16 leaves unassigned and in which regex 2026.11.15 knows letters, numbers or marks (17,559 of them).
# A test compares all characters with both libraries, and so tells which ranges a newer `regex` or library would need.
NEWER = (
    "\u0557\u0558\u058b\u058c\u05c8-\u05cf\u088f\u0b4e-\u0b54\u0c5b\u0c5c\u0cd7-\u0cdc\u1acf-\u1aff\u208f\u209d-\u209f"
    "\ua7ce\ua7cf\ua7d2\ua7d4\ua7dd-\ua7f1\uab6c-\uab6f"
)
NEWER_BEYOND = (
    "\U000107bb-\U000107ff\U00010940-\U0001097f\U00010ec5-\U00010efb\U00011b0a-\U00011bbf\U00011daa-\U00011edf"
    "\U0001246f\U00012475-\U0001247f\U00012544-\U00012f8f\U00016e9b-\U00016eff\U00016ff2-\U00016fff"
    "\U000187f8-\U000187ff\U00018cd6-\U00018cfe\U00018d09-\U0001afef\U0001b123-\U0001b131\U0001b168-\U0001b16f"
    "\U0001d127\U0001d128\U0001d246-\U0001d2bf\U0001d6a6\U0001d6a7\U0001df1f-\U0001df24\U0001df2b-\U0001dfff"
    "\U0001e600-\U0001e7df\U0002b73a-\U0002b73f\U0002b81e\U0002b81f\U0002cea2-\U0002ceaf\U000323b0-\U000e0000"
)
# found ten times faster than all of these ranges; emoji are in neither of the last two
PERHAPS_NEWER = re.compile(f"[{NEWER}\U00010000-\U0001e7df\U0002b73a-\U0010ffff]")
UNASSIGNED = "\uffff"  # will never be assigned


def as_of_unicode_16(text: str) -> str:
    """`text` with unassigned characters in place of those that are newer than Unicode 16.

    Chunk boundaries are looked for in it, so that ids are those of tiktoken and tokenizers, and do not depend on the
    day of an installation. Taking these ranges out of each \\p{L} of a pattern, as [\\p{L}--[...]], would say the same,
    but takes twice the time on Chinese; looking for them beforehand takes 3% of it.
    """
    if not PERHAPS_NEWER.search(text):
        return text
    return re.sub(f"[{NEWER}{NEWER_BEYOND}]", UNASSIGNED, text)


# ---- chunks


class Splitter:
    """Cuts text into chunks, which merges never cross."""

    def __init__(self, pattern: str):
        """Raises ValueError for a regular expression that does not compile, or that has a capturing group."""
        try:
            self.compiled = regex.compile(pattern)
        except (regex.error, RecursionError, OverflowError) as e:
            raise ValueError(f"the split pattern {pattern} does not compile: {e}") from None
        if self.compiled.groups:
            raise ValueError(f"the split pattern {pattern} has a capturing group; write (?:...) instead of (...)")
        self.find_ascii = self.compiled.findall
        self.cut = self.last_cut = None
        for known, ascii_twin, cut in PATTERNS.values():
            if pattern == known:
                self.find_ascii = re.compile(ascii_twin).findall
                self.cut = regex.compile(cut)
                self.last_cut = regex.compile(cut, regex.REVERSE)

    def split(self, text: str) -> list[str]:
        """The chunks of `text`. Raises ValueError if the pattern does not match all of it."""
        if text.isascii():
            chunks = self.find_ascii(text)
        else:
            seen = as_of_unicode_16(text)
            chunks = self.compiled.findall(seen)
            if seen != text:
                chunks = [text[slice(*match.span())] for match in self.compiled.finditer(seen)]
        if not self.cut and sum(map(len, chunks)) < len(text):
            raise ValueError("the split pattern leaves out some of the text; end it with an alternative such as |.|\\n")
        return chunks

    def blocks(self, text: str, size: int = BLOCK) -> Iterator[str]:
        """Parts of about `size` characters that together have the chunks of `text`."""
        start = 0
        while self.cut and len(text) - start > size:
            cut = self.cut.search(text, start + size)
            if not cut:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]


@lru_cache
def splitter(pattern: str) -> Splitter:
    return Splitter(pattern)


@lru_cache
def any_of(specials: tuple[str, ...]) -> re.Pattern:
    """Matches one of `specials`, the longest if one begins another."""
    longest_first = sorted(specials, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def valid_unicode(text: str) -> str:
    """`text`, with U+FFFD for lone surrogates, which have no UTF-8 form."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ---- merging in a chunk

RankOfPair = dict[tuple[int, int], int]  # the ranks of two neighbours -> the rank of the token that they become
PLACE_BITS = 32  # rank and place as one integer, rank << 32 | place: comparing integers is faster than tuples
PLACE_MASK = (1 << PLACE_BITS) - 1


def merge_chunk(chunk: bytes, rank_of: RankOfPair) -> list[int]:
    """The ranks that a chunk is left with after all merges: always the earliest merge first, from left to right."""
    parts = list(chunk.translate(BYTE_TO_RANK))
    if len(parts) > LONG_CHUNK:
        return merge_long(parts, rank_of)
    never = 1 << PLACE_BITS
    while len(parts) > 1:
        ranks = [rank_of.get(pair, never) for pair in pairwise(parts)]
        new = min(ranks)
        if new == never:
            break
        i = ranks.index(new)
        parts[i : i + 2] = [new]
    return parts


def merge_long(parts: list[int], rank_of: RankOfPair) -> list[int]:
    """The same in n log n instead of n squared, for chunks such as a line of Chinese or a thousand spaces.

    The parts are a linked list, so that joining two of them moves no others. A heap holds rank and place of every
    merge that may be due; if an earlier merge has broken up its pair, that shows when its turn comes.
    """
    size = len(parts)
    following = list(range(1, size + 1))
    previous = list(range(-1, size))
    parts.append(-1)  # ends the list on both sides: it follows the last part, and is parts[-1] for the first one
    due = [rank_of[pair] << PLACE_BITS | i for i, pair in enumerate(pairwise(parts)) if pair in rank_of]
    heapq.heapify(due)
    while due:
        entry = heapq.heappop(due)
        new = entry >> PLACE_BITS
        i = entry & PLACE_MASK
        j = following[i]
        if rank_of.get((parts[i], parts[j])) != new:
            continue
        h = previous[i]  # h (i j) k
        k = following[j]
        parts[i] = new
        parts[j] = -1
        following[i] = k
        previous[k] = i
        if (rank := rank_of.get((parts[h], new))) is not None:
            heapq.heappush(due, rank << PLACE_BITS | h)
        if (rank := rank_of.get((new, parts[k]))) is not None:
            heapq.heappush(due, rank << PLACE_BITS | i)
    return [part for part in parts if part >= 0]
