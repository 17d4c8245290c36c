"""Split patterns: a text is split alike by `regex`, which training uses, by tiktoken and by tokenizers."""

import itertools
import re

import pytest
import regex
import tiktoken
from tokenizers import Regex, pre_tokenizers

from bpe.chunks import PATTERNS, SPELLINGS, splitter
from bpe.tokenizer import Tokenizer
from tests.helpers import random_text

pytestmark = pytest.mark.filterwarnings("ignore:the corpus has no more pairs")  # small corpora have few
BYTES = {bytes([b]): b for b in range(256)}
ODD_CHARACTERS = " \n\r\t\x0b\x1c\x85\xa0\u3000\u2003abSsIlLvVeErRdDmMtT''1²½٣Ⅷ中é\u0301_!.😀\u200bſ\ufffd\x00\u0295"
TEXTS = [random_text(seed, ODD_CHARACTERS, 24) for seed in range(300)]


def by_tokenizers(pattern: str, text: str) -> list[str]:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [chunk for chunk, _ in split.pre_tokenize_str(text)]


def by_tiktoken(pattern: str, text: str) -> list[str]:
    """With every part of the text in the vocabulary, each chunk is one token."""
    parts = {text[i:j].encode() for i, j in itertools.combinations(range(len(text) + 1), 2)}
    ranks = BYTES | {part: 256 + i for i, part in enumerate(parts - BYTES.keys())}
    encoding = tiktoken.Encoding("parts", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return [token.decode() for token in encoding.decode_tokens_bytes(encoding.encode_ordinary(text))]


def test_every_form_of_a_known_pattern_splits_alike():
    for text, (name, (pattern, ascii_twin, cut)) in itertools.product(TEXTS, PATTERNS.items()):
        chunks = splitter(pattern).split(text)
        for spelling in (s for s, of in SPELLINGS.items() if of == name):
            assert regex.findall(spelling, text) == regex.findall(pattern, text)
        ascii_text = text.encode("ascii", "ignore").decode()
        assert regex.findall(pattern, ascii_text) == re.findall(ascii_twin, ascii_text)
        for place in (m.start() for m in regex.finditer(cut, text)):
            assert splitter(pattern).split(text[:place]) + splitter(pattern).split(text[place:]) == chunks


def test_all_libraries_split_by_the_known_patterns_alike():
    forms = [(pattern, pattern) for pattern, *_ in PATTERNS.values()]
    forms += [(PATTERNS[name][0], spelling) for spelling, name in SPELLINGS.items()]
    for text, (pattern, form) in itertools.product(TEXTS[:60], forms):
        assert splitter(pattern).split(text) == by_tokenizers(form, text) == by_tiktoken(form, text)


@pytest.mark.parametrize("pattern", [r"\w+", r"(\w)+|\W"])
def test_another_pattern_is_read_by_tokenizers_in_training_and_encoding(pattern, tmp_path):
    """Also one that leaves out some of the text, which loses nothing."""
    text = "one two², ½ 12345 three  \n"
    tok = Tokenizer.train([text] * 9, 270, pattern)
    pieces = by_tokenizers(pattern, text)
    assert tok.encode(text) == [i for piece in pieces for i in tok.encode(piece)]
    tok.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert tok.encode(text) == loaded.encode(text) == tok.to_transformers()(text)["input_ids"]
    with pytest.warns(UserWarning, match=re.escape(pattern)):
        tok.to_tiktoken()
