"""Byte-pair encoding (Sennrich et al. 2016, section 3.2; on bytes: Radford et al. 2019, section 2.2) on one page.

All of the algorithm, and none of the speed: tokenizer.py finds the same merges and ids.

    merges = train(["the there then"], 3)    # [(b"h", b"e"), (b"t", b"he"), (b" ", b"the")]
    encode("the then", merges)               # [257, 258, 77]
    decode([257, 258, 77], merges)           # "the then"

A tokenizer is its list of merges: pairs of byte strings, in the order in which they were found. This file knows nothing
of special tokens, files or other libraries.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import regex

Token = bytes
Merge = tuple[Token, Token]

# GPT-2's: English endings, then words, numbers and signs, each with the space before it, then the remaining spaces.
# No merge crosses these chunks. Without them, "dog." "dog!" and "dog?" could each become a token.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# The tokens to begin with, in GPT-2's order: printable Latin-1 first. UTF-8 writes every text with these 256.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = sorted(set(range(256)) - set(PRINTABLE))
BYTES = [bytes([b]) for b in PRINTABLE + OTHERS]


def split(text: str) -> list[list[Token]]:
    """The chunks of a text, as single bytes."""
    chunks = []
    for chunk in regex.findall(PATTERN, text):
        chunks.append([bytes([b]) for b in chunk.encode()])
    return chunks


def merge(tokens: list[Token], pair: Merge) -> list[Token]:
    """Join the two tokens of `pair` wherever they are neighbours, from left to right: a a a becomes aa a."""
    merged = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def train(texts: Iterable[str], n_merges: int) -> list[Merge]:
    """Make the most frequent pair of neighbours a token, everywhere; repeat until there are enough."""
    chunks = []
    for text in texts:
        chunks += split(text)
    merges = []
    while len(merges) < n_merges:
        counts = Counter(pair for chunk in chunks for pair in pairwise(chunk))
        if not counts:
            break  # every chunk is one token
        ids = {token: i for i, token in enumerate(vocabulary(merges))}
        # of equally frequent pairs take the one of the earliest tokens, so that nothing is left to chance
        best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
        chunks = [merge(chunk, best) for chunk in chunks]
        merges.append(best)
    return merges


def vocabulary(merges: list[Merge]) -> list[Token]:
    """id -> token: the bytes, then one token for each merge."""
    return BYTES + [a + b for a, b in merges]


def encode(text: str, merges: list[Merge]) -> list[int]:
    """In each chunk, merge the pair that training found earliest; repeat until no pair of neighbours is a merge."""
    ids = {token: i for i, token in enumerate(vocabulary(merges))}
    order = {pair: i for i, pair in enumerate(merges)}
    encoded = []
    for chunk in split(text):
        while pairs := order.keys() & pairwise(chunk):  # those pairs of neighbours that training has merged
            earliest = min(pairs, key=order.get)
            chunk = merge(chunk, earliest)
        encoded += [ids[token] for token in chunk]
    return encoded


def decode(ids: Iterable[int], merges: list[Merge]) -> str:
    """Join the bytes. A token may end in the middle of a character; what is not valid UTF-8 becomes U+FFFD."""
    tokens = vocabulary(merges)
    data = b"".join(tokens[i] for i in ids)
    return data.decode("utf-8", errors="replace")
