"""Letters and split patterns: what is split here is split alike by tiktoken and by tokenizers, for every character."""

import itertools
import re

import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from bpe.patterns import SPELLINGS, TIKTOKEN_SPELLINGS, read_alike
from bpe.tokenizer import PATTERNS, Tokenizer, splitter

pytestmark = pytest.mark.filterwarnings("ignore:the corpus has no more pairs")  # small corpora have few

# all characters, in parts that begin with one that is neither letter, nor number, nor space; surrogates are none
CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
EVERYTHING = ["\0" + "".join(map(chr, CODES[i : i + 2**13])) for i in range(0, len(CODES), 2**13)]


def by_tokenizers(pattern: str, text: str) -> list[str]:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [chunk for chunk, _ in split.pre_tokenize_str(text)]


def by_tiktoken(pattern: str, text: str) -> list[str]:
    """With every part of the text in the vocabulary, each chunk is one token."""
    parts = {text[i:j].encode() for i, j in itertools.combinations(range(len(text) + 1), 2)}
    ranks = {bytes([b]): b for b in range(256)}
    ranks |= {part: 256 + i for i, part in enumerate(parts - ranks.keys())}
    encoding = tiktoken.Encoding("parts", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return [token.decode() for token in encoding.decode_tokens_bytes(encoding.encode_ordinary(text))]


def found_by_tiktoken(of_one_character: str) -> str:
    ranks = {bytes([b]): b for b in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=of_one_character, mergeable_ranks=ranks, special_tokens={})
    return "".join(bytes(encoding.encode_ordinary(part)).decode() for part in EVERYTHING)


def found_by_tokenizers(of_one_character: str) -> str:
    split = pre_tokenizers.Split(Regex(of_one_character), "removed", invert=True)
    return "".join(piece for part in EVERYTHING for piece, _ in split.pre_tokenize_str(part))


# ---- letters


def check_every_character(one: str, other: str) -> None:
    """Split into runs of characters that match `one` and of those that match `other`; the first one, U+0000, does."""
    runs = splitter(f"{one}+|{other}+")
    ours = "".join(run for part in EVERYTHING for run in runs.split(part)[1::2])
    assert ours == found_by_tiktoken(one) == found_by_tokenizers(one)


@pytest.mark.parametrize("one, other", [(r"\p{L}", r"\P{L}"), (r"\p{N}", r"\P{N}"), (r"\s", r"\S")])
def test_of_every_character_all_libraries_agree_whether_it_is_a(one, other):
    """Whatever version of Unicode the installed `regex` has: the one of November 2026 knows 17,144 more letters."""
    check_every_character(one, other)


PROPERTIES = "Lu Ll Lt Lm Lo M Mn Mc Me Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PROPERTIES.split(), "Han", "Hiragana", "Katakana", "Hangul"])
def test_of_every_character_all_libraries_agree_in_what_patterns_may_ask(name):
    check_every_character(rf"\p{{{name}}}", rf"\P{{{name}}}")


def newer_letters() -> list[str]:
    """Characters that the installed `regex` takes for letters or numbers, and tiktoken does not."""
    known = set(found_by_tiktoken(r"[\p{L}\p{N}]"))
    return [c for part in EVERYTHING for c in regex.findall(r"[\p{L}\p{N}]", part) if c not in known]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ids_of_letters_that_are_newer_are_those_of_tiktoken_and_tokenizers(pattern):
    some = [*newer_letters()[::97], "\u0295", "\ua7ce", "\U000323b0", "\U0001e6c0", "\u0378", "\uffff"]
    text = "".join(f"a{c} b{c}{c}1 {c}!{c}\n x{c}\n'{c}s{c}'s {c}2{c}" for c in some)
    tok = Tokenizer.train([text], 500, pattern)
    ids = tok.encode(text)
    assert ids == tok.to_tiktoken().encode(text) == tok.to_transformers()(text)["input_ids"]
    assert ids == list(tok.encode_iterable(text, block=10)) and tok.decode(ids) == text
    pieces = pre_tokenizers.Split(Regex(tok.pattern), "isolated").pre_tokenize_str(text)
    assert splitter(tok.pattern).split(text) == [piece for piece, _ in pieces]


# ---- patterns

odd_characters = (
    " \n\r\t\x0b\x1c\x85\xa0\u3000\u2003abSsIlLvVeErRdDmMtT''1²½٣Ⅷ中é\u0301_!.😀\u200bſ\ufffd\x00\u0295\ua7ce"
)
texts = st.text(alphabet=odd_characters, max_size=24)


@settings(max_examples=400, deadline=None)
@given(texts)
def test_every_spelling_of_a_pattern_splits_alike(text):
    for name, (pattern, ascii_twin, cut) in PATTERNS.items():
        chunks = splitter(pattern).split(text)
        for spelling in (s for s, of in TIKTOKEN_SPELLINGS.items() if of == name):
            assert splitter(spelling).find(text) == chunks
        ascii_text = text.encode("ascii", "ignore").decode()
        assert regex.findall(pattern, ascii_text) == re.findall(ascii_twin, ascii_text)
        for place in (m.start() for m in regex.finditer(cut, text)):
            assert splitter(pattern).split(text[:place]) + splitter(pattern).split(text[place:]) == chunks


@settings(max_examples=60, deadline=None)
@given(texts)
def test_all_libraries_split_by_the_known_patterns_alike(text):
    for pattern, *_ in PATTERNS.values():
        assert splitter(pattern).split(text) == by_tokenizers(pattern, text) == by_tiktoken(pattern, text)
    for spelling in TIKTOKEN_SPELLINGS:
        assert splitter(spelling).find(text) == by_tiktoken(spelling, text)
    for spelling in SPELLINGS:
        assert splitter(spelling).find(text) == by_tokenizers(spelling, text)


SETS = [r"[\r\n]", r"[^\s\p{L}\p{N}]", r"[^\r\n]", "[a-z]", "[A-Z0-9']", r"[^\S ]", r"[\p{Lu}\P{L}]"]
PROPERTY = [r"\p{L}", r"\P{L}", r"\p{Lu}", r"\p{Ll}", r"\p{M}", r"\p{N}", r"\p{P}", r"\p{Han}", r"\s", r"\S", r"\d"]
GROUPS = ["(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:[sdmt]|ll|ve|re)", r"(?!\S)", r"(?=\s)", "(?!a)"]
atoms = st.sampled_from([*"aelsrv1!' .", r"\.", r"\-", r"\n", *SETS, *PROPERTY, *GROUPS])
quantifiers = st.sampled_from([""] * 8 + [*"*+?", "++", "*+", "?+", "+?", "*?", "??", "{1,3}", "{2}", "{0,2}", "{2,}"])
patterns = st.recursive(
    st.tuples(atoms, quantifiers).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map("|".join),
        st.tuples(inner, quantifiers).map(lambda parts: f"(?:{parts[0]}){parts[1]}"),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(patterns, st.lists(texts, min_size=1, max_size=3))
def test_all_libraries_split_by_a_pattern_that_is_let_through_alike(pattern, some):
    pattern += r"|.|\n"
    if read_alike(pattern):
        for text in some:
            assert splitter(pattern).split(text) == by_tokenizers(pattern, text) == by_tiktoken(pattern, text)


@pytest.mark.parametrize(
    "pattern, text",
    [
        (r"\w+|\W+", "x² ½"),
        (r"^\S+|\S|\s", "b\ncd"),
        (r"a+$|.|\n", "aa\naa\n"),
        (r"\s*|\S+", "a b"),
        (r"\p{N}{1,3}+|.|\n", "123456"),
        (r"(?:)|.|\n", "ab"),
        (r"(?m:.)+|.|\n", "a\nb"),
        (r"[a[bc]]|.|\n", "a]b"),
        (r"[\p{L}&&[a-c]]+|.|\n", "abcd&"),
        (r"x(?i:ss)|.|\n", "xß"),
        (r"\h+|.|\n", "af"),
        (r"a\b.|.|\n", "a²"),
        (r"(?=a)|.|\n", "ba"),
    ],
)
def test_a_pattern_that_is_read_otherwise_elsewhere_is_refused_when_saved(pattern, text, tmp_path):
    assert not all(read(pattern, text) == splitter(pattern).find(text) for read in (by_tokenizers, by_tiktoken))
    tok = Tokenizer((), pattern)
    for save in (tok.to_tiktoken, tok.to_transformers, lambda: tok.save(tmp_path / "out")):
        with pytest.raises(ValueError, match="may read the split pattern"):
            save()
    assert not (tmp_path / "out").exists()


def test_a_pattern_that_is_not_saved_can_be_used_here():
    tok = Tokenizer.train(["one two"] * 9, 265, r"\w+|\W+")
    assert tok.decode(tok.encode("one two")) == "one two"
    assert tok.encode_batch(["one two², ½"]) == [tok.encode("one two², ½")]
