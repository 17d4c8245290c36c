"""From text to chunks, and from a chunk to ranks: what training, encoding and file formats have in common.

- a split pattern cuts text into chunks (" word", "'s", " 42", "!!"), which no token ever crosses: `splitter(pattern)`
- a chunk becomes its UTF-8 bytes, and neighbours are merged in the order of the merges: `merge_chunk`

A rank is the place of a token in the order in which BPE makes them: the 256 bytes first, then one for each merge. Most
tokenizers use the ranks as ids. This file knows nothing of special tokens' ids, of vocabularies, or of files.
"""

import heapq
import re
from bisect import bisect
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import regex

from bpe.patterns import PATTERNS

BLOCK = 2**20  # characters that are split, counted or sent to a process at a time
LONG_CHUNK = 24  # bytes from which merging uses a heap; below, a simple loop is faster

# GPT-2 shows bytes as characters that can be printed and are not spaces, and numbers them in the order of those
# characters: first the printable ones of Latin-1 as themselves, then the other bytes as U+0100, U+0101, ...
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_ORDER = bytes(PRINTABLE + sorted(set(range(256)) - set(PRINTABLE)))  # rank -> byte
BYTE_TO_RANK = bytes(BYTE_ORDER.index(b) for b in range(256))  # a table for bytes.translate


# ---- letters: those of Unicode 16

NOBODY = "\uffff"  # a code point that will never be assigned stands for those that Unicode 16 has not assigned
RECASED = {"\u0295": "\u0250"}  # the one letter that was a lower-case letter in Unicode 16, and is none since
# Beyond U+FFFF everything is suspect but the usual emoji: one set of three ranges is compared faster than hundreds.
BEYOND = "\U00010000-\U0001f2ff\U0001f6d8-\U0001f8ff\U0001fa54-\U0010ffff"


@cache
def unassigned() -> list[int]:
    """The ranges of code points that Unicode 16.0 leaves unassigned: first, last + 1, first, last + 1, ..."""
    lines = Path(__file__).with_name("unicode16.txt").read_text(encoding="ascii").splitlines()
    ranges = " ".join(line for line in lines if not line.startswith("#")).split()
    return [int(end, 16) + i for pair in ranges for i, end in enumerate(pair.split("-"))]


@cache
def suspects() -> re.Pattern:
    """Finds the characters that may need a stand-in."""
    pairs = zip(unassigned()[::2], unassigned()[1::2], strict=True)
    ranges = (f"\\u{first:04x}-\\u{min(end - 1, 0xFFFF):04x}" for first, end in pairs if first <= 0xFFFF)
    return re.compile("[" + "".join(ranges) + "".join(RECASED) + BEYOND + "]")


def stand_in(found: re.Match) -> str:
    character = found[0]
    if bisect(unassigned(), ord(character)) % 2:  # an odd number of ends of ranges is at or below it: inside of one
        return NOBODY
    return RECASED.get(character, character)


def as_of_unicode_16(text: str) -> str:
    """`text` as a library sees it that knows Unicode 16 and no more, character by character.

    The split patterns ask for letters and numbers. tiktoken and tokenizers have version 16.0 of Unicode compiled in;
    `regex` follows the newest, and knew 17,144 more letters in November 2026. What is a letter must not depend on the
    day of an installation, so boundaries are looked for in a text in which newer characters are as good as unassigned.
    """
    # looking for suspects takes 3 ns a character, where splitting takes 100
    return suspects().sub(stand_in, text) if suspects().search(text) else text


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
        _, ascii_twin, cut = next((known for known in PATTERNS.values() if known[0] == pattern), (None, None, None))
        self.find_ascii = re.compile(ascii_twin).findall if ascii_twin else self.compiled.findall
        self.cut = regex.compile(cut) if cut else None
        self.last_cut = regex.compile(cut, regex.REVERSE) if cut else None

    def split(self, text: str) -> list[str]:
        """The chunks of `text`. Raises ValueError if the pattern does not match all of it."""
        chunks = self.find_ascii(text) if text.isascii() else self.find(text)
        if not self.cut and sum(map(len, chunks)) < len(text):
            raise ValueError("the split pattern leaves out some of the text; end it with an alternative such as |.|\\n")
        return chunks

    def find(self, text: str) -> list[str]:
        seen = as_of_unicode_16(text)
        if seen == text:
            return self.compiled.findall(text)
        return [text[m.start() : m.end()] for m in self.compiled.finditer(seen)]

    def blocks(self, text: str, size: int = BLOCK) -> Iterator[str]:
        """Parts of about `size` characters that together have the chunks of `text`."""
        start = 0
        while self.cut and len(text) - start > size and (cut := self.cut.search(text, start + size)):
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
        ranks = [rank_of.get(pair, never) for pair in zip(parts, parts[1:], strict=False)]
        if (new := min(ranks)) == never:
            break
        i = ranks.index(new)
        parts[i : i + 2] = [new]
    return parts


def merge_long(parts: list[int], rank_of: RankOfPair) -> list[int]:
    """The same in n log n instead of n squared, for chunks such as a line of Chinese or of a thousand blanks.

    The parts are a linked list, so that two of them become one without moving the others. A heap holds rank and place
    of every merge that may be due; one whose pair was broken up by an earlier merge is noticed when its turn comes.
    """
    size = len(parts)
    following, previous = list(range(1, size + 1)), list(range(-1, size))
    parts.append(-1)  # ends the list on both sides: it follows the last part, and is parts[-1] for the first one
    pairs = enumerate(zip(parts, parts[1:], strict=False))
    due = [rank_of[pair] << PLACE_BITS | i for i, pair in pairs if pair in rank_of]
    heapq.heapify(due)
    while due:
        entry = heapq.heappop(due)
        new, i = entry >> PLACE_BITS, entry & PLACE_MASK
        j = following[i]
        if rank_of.get((parts[i], parts[j])) != new:
            continue
        h, k = previous[i], following[j]  # h (i j) k
        parts[i], parts[j] = new, -1
        following[i], previous[k] = k, i
        if (rank := rank_of.get((parts[h], new))) is not None:
            heapq.heappush(due, rank << PLACE_BITS | h)
        if (rank := rank_of.get((new, parts[k]))) is not None:
            heapq.heappush(due, rank << PLACE_BITS | i)
    return [part for part in parts if part >= 0]
