"""Byte-pair encoding (Sennrich et al. 2016, section 3.2; on bytes: Radford et al. 2019, section 2.2) on one page.

All of the algorithm, and none of the speed, in three steps:

1. Bytes. A text is its bytes, and the ids 0 to 255 are these bytes: 97 is `a`. Merges make the tokens from 256 on.

    merges = train(["the there then"], 3)    # [(b"h", b"e"), (b"t", b"he"), (b" ", b"the")]
    encode("the then", merges)               # [257, 258, 110]
    decode([257, 258, 110], merges)          # "the then"

2. The pattern. A text is first split into words, and no token crosses them: train(texts, 3, words).
3. GPT-2's order of the bytes, in which 64 is `a`: train(texts, 3, words, GPT2_ORDER). So does tokenizer.py, which finds
   the same merges and ids.

A tokenizer is its list of merges: pairs of byte strings, in the order in which they were found. This file knows nothing
of special tokens, files or other libraries.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import regex

Token = bytes
Merge = tuple[Token, Token]
Split = Callable[[str], list[str]]

# ---- 1. bytes: UTF-8 writes every text with these 256 tokens

BYTES = [bytes([b]) for b in range(256)]


def whole(text: str) -> list[str]:
    """Return a text unsplit."""
    return [text]


def merge(tokens: list[Token], pair: Merge) -> list[Token]:
    """Join the two tokens of `pair` wherever they are neighbours, from left to right: a a a becomes aa a."""
    merged = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def train(texts: Iterable[str], n_merges: int, split: Split = whole, order: list[Token] = BYTES) -> list[Merge]:
    """Make the most frequent pair of neighbours a token, everywhere; repeat until there are enough."""
    chunks = []
    for text in texts:
        chunks += as_bytes(split(text))
    merges = []
    while len(merges) < n_merges:
        counts = Counter(pair for chunk in chunks for pair in pairwise(chunk))
        if not counts:
            break  # every chunk is one token
        ids = {token: i for i, token in enumerate(vocabulary(merges, order))}
        # of equally frequent pairs take the one of the earliest tokens, so that nothing is left to chance
        best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
        chunks = [merge(chunk, best) for chunk in chunks]
        merges.append(best)
    return merges


def as_bytes(chunks: list[str]) -> list[list[Token]]:
    return [[bytes([b]) for b in chunk.encode()] for chunk in chunks]


def vocabulary(merges: list[Merge], order: list[Token] = BYTES) -> list[Token]:
    """Return id -> token: the bytes, then a token for each merge."""
    return order + [a + b for a, b in merges]


def encode(text: str, merges: list[Merge], split: Split = whole, order: list[Token] = BYTES) -> list[int]:
    """In each chunk, merge the pair that training found earliest; repeat until no pair of neighbours is a merge."""
    ids = {token: i for i, token in enumerate(vocabulary(merges, order))}
    found = {pair: i for i, pair in enumerate(merges)}
    encoded = []
    for chunk in as_bytes(split(text)):
        while pairs := found.keys() & pairwise(chunk):  # neighbours that training has merged
            earliest = min(pairs, key=found.get)
            chunk = merge(chunk, earliest)
        encoded += [ids[token] for token in chunk]
    return encoded


def decode(ids: Iterable[int], merges: list[Merge], order: list[Token] = BYTES) -> str:
    """Join the bytes. A token may end in the middle of a character; invalid UTF-8 becomes U+FFFD."""
    tokens = vocabulary(merges, order)
    data = b"".join(tokens[i] for i in ids)
    return data.decode("utf-8", errors="replace")


# ---- 2. the pattern

# GPT-2's: English endings, then words, numbers and signs, each with the space before it, then the remaining spaces.
# Without it, "dog." "dog!" and "dog?" could each become a token.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def words(text: str) -> list[str]:
    return regex.findall(PATTERN, text)


# ---- 3. GPT-2's order: printable Latin-1 first

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = sorted(set(range(256)) - set(PRINTABLE))
GPT2_ORDER = [bytes([b]) for b in PRINTABLE + OTHERS]
