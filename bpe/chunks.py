"""Split text into chunks (" word", "'s", " 42", "!!"), which no token ever crosses; and order the 256 bytes.

Training, encoding and file formats share this file. A rank is the place of a token in the order in which
BPE makes them: the 256 bytes first, then one for each merge. Most tokenizers use the ranks as ids. This file knows
nothing of ids, of vocabularies, or of files.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

import regex
from tokenizers import Regex, pre_tokenizers

BLOCK = 2**20  # characters split, counted or sent to a process at a time

# GPT-2 shows bytes as characters that can be printed and are not spaces, and numbers them in the order of those
# characters: first printable Latin-1 as itself, then the other bytes as U+0100, U+0101, ...
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = sorted(set(range(256)) - set(PRINTABLE))
BYTE_ORDER = bytes(PRINTABLE + OTHERS)  # rank -> byte
BYTE_TO_RANK = bytes(map(BYTE_ORDER.index, range(256)))  # a table for bytes.translate
SINGLE_BYTES = [bytes([b]) for b in BYTE_ORDER]  # the first 256 tokens

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
KNOWN = {pattern for pattern, *_ in PATTERNS.values()}

# Other spellings, under which files of other tokenizers hold the first pattern.
SPELLINGS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
}


def full_pattern(pattern: str) -> str:
    """Return the regular expression of a name or another spelling, otherwise `pattern` itself."""
    name = SPELLINGS.get(pattern, pattern)
    return PATTERNS[name][0] if name in PATTERNS else pattern


class Splitter:
    """Cuts text into chunks. `tokenizers` reads any pattern outside PATTERNS: unmatched text is a chunk of its own, and
    `cut` is None."""

    def __init__(self, pattern: str):
        """Compile the pattern. Raise ValueError if it does not compile."""
        self.cut = None
        if pattern not in KNOWN:
            self.theirs = by_pattern(pattern)
        for known, ascii_twin, cut in PATTERNS.values():
            if pattern == known:
                self.find = regex.compile(pattern).findall
                self.find_ascii = re.compile(ascii_twin).findall
                self.cut = regex.compile(cut)

    def split(self, text: str) -> list[str]:
        if not self.cut:
            return [chunk for chunk, _ in self.theirs.pre_tokenize_str(text)]
        return self.find_ascii(text) if text.isascii() else self.find(text)

    def blocks(self, text: str, size: int = BLOCK) -> Iterator[str]:
        """Yield parts of about `size` characters that together have the chunks of `text`."""
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


def by_pattern(pattern: str) -> pre_tokenizers.Split:
    """Compile a pattern by `tokenizers`. Raise ValueError if it does not compile."""
    try:
        return pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as e:  # it raises no other type
        raise ValueError(f"the split pattern {pattern} does not compile: {e}") from None


@lru_cache
def any_of(specials: tuple[str, ...]) -> re.Pattern:
    """Match one of `specials`, the longest if one begins another."""
    longest_first = sorted(specials, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def valid_unicode(text: str) -> str:
    """Replace lone surrogates, which have no UTF-8 form, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
