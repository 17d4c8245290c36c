"""Letters and split patterns: what is split here is split alike by tiktoken and by tokenizers, for every character."""

import itertools
import re

import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from bpe.chunks import PATTERNS, SPELLINGS
from bpe.tokenizer import Tokenizer, splitter
from tests.helpers import assert_invalid

pytestmark = pytest.mark.filterwarnings("ignore:the corpus has no more pairs")  # small corpora have few

# all characters, in parts that begin with one that is neither letter, nor number, nor space; surrogates are none
CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
EVERYTHING = ["\0" + "".join(map(chr, CODES[i : i + 2**13])) for i in range(0, len(CODES), 2**13)]

BYTES = {bytes([b]): b for b in range(256)}


def by_tokenizers(pattern: str, text: str) -> list[str]:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [chunk for chunk, _ in split.pre_tokenize_str(text)]


def by_tiktoken(pattern: str, text: str) -> list[str]:
    """With every part of the text in the vocabulary, each chunk is one token."""
    parts = {text[i:j].encode() for i, j in itertools.combinations(range(len(text) + 1), 2)}
    ranks = BYTES | {part: 256 + i for i, part in enumerate(parts - BYTES.keys())}
    encoding = tiktoken.Encoding("parts", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return [token.decode() for token in encoding.decode_tokens_bytes(encoding.encode_ordinary(text))]


def found_by_tiktoken(of_one_character: str) -> str:
    encoding = tiktoken.Encoding("bytes", pat_str=of_one_character, mergeable_ranks=BYTES, special_tokens={})
    return "".join(bytes(encoding.encode_ordinary(part)).decode() for part in EVERYTHING)


# ---- letters


@pytest.mark.parametrize("one", [r"\p{L}", r"\p{N}", r"\p{M}", r"\s"])
def test_of_every_character_all_libraries_agree_whether_it_is_a(one):
    """Whatever version of Unicode the installed `regex` has: the one of November 2026 knows 17,144 more letters."""
    other = one.replace("p{", "P{").replace("\\s", "\\S")
    runs = splitter(f"{one}+|{other}+")  # U+0000, the first character of each part, matches the second
    ours = "".join(run for part in EVERYTHING for run in runs.split(part)[1::2])
    found = pre_tokenizers.Split(Regex(one), "removed", invert=True)
    assert ours == "".join(piece for part in EVERYTHING for piece, _ in found.pre_tokenize_str(part))
    assert ours == found_by_tiktoken(one)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ids_of_letters_that_are_newer_are_those_of_tiktoken_and_tokenizers(pattern):
    known = set(found_by_tiktoken(r"[\p{L}\p{N}]"))
    newer = [c for part in EVERYTHING for c in regex.findall(r"[\p{L}\p{N}]", part) if c not in known]
    some = [*newer[::97], "\u0295", "\ua7ce", "\U000323b0", "\U0001e6c0", "\u0378", "\uffff"]
    text = "".join(f"a{c} b{c}{c}1 {c}!{c}\n x{c}\n'{c}s{c}'s {c}2{c}" for c in some)
    tok = Tokenizer.train([text], 500, pattern)
    ids = tok.encode(text)
    assert ids == tok.to_tiktoken().encode(text) == tok.to_transformers()(text)["input_ids"]
    assert ids == list(tok.encode_iterable(text, block=10))
    assert tok.decode(ids) == text
    assert splitter(tok.pattern).split(text) == by_tokenizers(tok.pattern, text)


# ---- patterns

odd_characters = (
    " \n\r\t\x0b\x1c\x85\xa0\u3000\u2003abSsIlLvVeErRdDmMtT''1²½٣Ⅷ中é\u0301_!.😀\u200bſ\ufffd\x00\u0295\ua7ce"
)
texts = st.text(alphabet=odd_characters, max_size=24)


@settings(max_examples=400, deadline=None)
@given(texts)
def test_every_form_of_a_known_pattern_splits_alike(text):
    for name, (pattern, ascii_twin, cut) in PATTERNS.items():
        chunks = splitter(pattern).split(text)
        for spelling in (s for s, of in SPELLINGS.items() if of == name):
            assert regex.findall(spelling, text) == regex.findall(pattern, text)
        ascii_text = text.encode("ascii", "ignore").decode()
        assert regex.findall(pattern, ascii_text) == re.findall(ascii_twin, ascii_text)
        for place in (m.start() for m in regex.finditer(cut, text)):
            assert splitter(pattern).split(text[:place]) + splitter(pattern).split(text[place:]) == chunks


@settings(max_examples=60, deadline=None)
@given(texts)
def test_all_libraries_split_by_the_known_patterns_alike(text):
    for pattern, *_ in PATTERNS.values():
        assert splitter(pattern).split(text) == by_tokenizers(pattern, text) == by_tiktoken(pattern, text)
    for spelling, name in SPELLINGS.items():
        assert splitter(PATTERNS[name][0]).split(text) == by_tiktoken(spelling, text)


@pytest.mark.parametrize("pattern", [r"\w+|\W+", r"^\S+|\S|\s", r"\p{N}{1,3}+|.|\n", r"\h+|.|\n"])
def test_a_pattern_that_is_read_differently_elsewhere_is_kept_with_a_warning(pattern, tmp_path):
    tok = Tokenizer.train(["one two², ½ 12345"] * 9, 270, pattern)
    ids = tok.encode("one two², ½ 12345")
    assert tok.decode(ids) == "one two², ½ 12345"
    assert tok.encode_batch(["one two², ½ 12345"]) == [ids]
    for save in (tok.to_tiktoken, tok.to_transformers, lambda: tok.save(tmp_path)):
        with pytest.warns(UserWarning, match=re.escape(pattern)):
            save()
    assert_invalid("cannot use the tokenizer", Tokenizer.load, tmp_path)  # the file means other ids than we would give
