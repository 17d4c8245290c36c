"""Byte-pair encoding (Sennrich et al. 2016, section 3.2; on bytes: Radford et al. 2019, section 2.2) on one page.

All of the algorithm, and none of the speed: tokenizer.py finds the same merges and ids, given GPT-2's order of the
bytes.

    merges = train(["the there then"], 3)    # [(b"h", b"e"), (b"t", b"he"), (b" ", b"the")]
    encode("the then", merges)               # [257, 258, 110]
    decode([257, 258, 110], merges)          # "the then"

A tokenizer is its list of merges: pairs of byte strings, in the order in which they were found.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import regex

Token = bytes
Merge = tuple[Token, Token]

# GPT-2's: English endings, then words, numbers and signs, each with the space before it, then what spaces are left.
# Merges stay inside of these chunks. Without them, "dog." "dog!" and "dog?" would each become a token of its own.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BYTES = bytes(range(256))  # the byte with id 0, with id 1, ...; GPT-2 has them in an order of its own


def split(text: str, pattern: str = PATTERN) -> list[list[Token]]:
    """The chunks of a text as single bytes. UTF-8 writes everything with these 256, so that nothing is ever unknown."""
    return [[bytes([b]) for b in chunk.encode()] for chunk in regex.findall(pattern, text)]


def merge(tokens: list[Token], pair: Merge) -> list[Token]:
    """Join the two tokens of `pair` wherever they are neighbours, from left to right: a a a becomes aa a."""
    merged, i = [], 0
    while i < len(tokens):
        found = tuple(tokens[i : i + 2]) == pair
        merged.append(tokens[i] + tokens[i + 1] if found else tokens[i])
        i += 2 if found else 1
    return merged


def train(texts: Iterable[str], n_merges: int, pattern=PATTERN, alphabet=BYTES, tie_break="lowest_id") -> list[Merge]:
    """Make the most frequent pair of neighbours a token, everywhere; then do it again, until there are enough."""
    chunks = [chunk for text in texts for chunk in split(text, pattern)]
    merges: list[Merge] = []
    while len(merges) < n_merges:
        counts = Counter(pair for chunk in chunks for pair in pairwise(chunk))
        if not counts:
            break  # every chunk is one token
        # Equal counts are common, and libraries differ in which pair comes first: the one that is made of earlier
        # tokens, or the greatest one in the order of the dictionary. Either way, it must not depend on chance.
        ids = {token: i for i, token in enumerate(vocabulary(merges, alphabet))}
        if tie_break == "lowest_id":
            best = min(counts, key=lambda pair: (-counts[pair], ids[pair[0]], ids[pair[1]]))
        else:
            best = max(counts, key=lambda pair: (counts[pair], pair))
        chunks = [merge(chunk, best) for chunk in chunks]
        merges.append(best)
    return merges


def vocabulary(merges: list[Merge], alphabet: bytes = BYTES) -> list[Token]:
    """id -> token: the bytes, then one token for each merge."""
    return [bytes([b]) for b in alphabet] + [a + b for a, b in merges]


def encode(text: str, merges: list[Merge], pattern=PATTERN, alphabet=BYTES) -> list[int]:
    """Do to a new text what training did to the old one: the same merges, in the same order."""
    ids = {token: i for i, token in enumerate(vocabulary(merges, alphabet))}
    encoded = []
    for chunk in split(text, pattern):
        for pair in merges:
            chunk = merge(chunk, pair)
        encoded += [ids[token] for token in chunk]
    return encoded


def decode(ids: Iterable[int], merges: list[Merge], alphabet=BYTES) -> str:
    """Join the bytes. A token may end inside of a character; what is no valid UTF-8 in the end becomes U+FFFD."""
    tokens = vocabulary(merges, alphabet)
    return b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace")
