"""Training and encoding: merges and ids are those of the `tokenizers` library, of tiktoken, and of bpe/minimal.py."""

import gc
import json
import os
import pickle
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import pairwise

import pytest
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from bpe import minimal, tokenizer
from bpe.chunks import BYTE_ORDER, PATTERNS
from bpe.formats import CHAR_TO_BYTE, ENDOFTEXT
from bpe.tokenizer import Tokenizer
from bpe.training import TIE_BREAKS, find_merges
from tests.helpers import ROOT, assert_invalid, environment, prose, random_text

pytestmark = pytest.mark.filterwarnings("ignore:the corpus has no more pairs")  # small corpora have few
MANUAL = (ROOT / "bpe/manual.txt").read_text(encoding="utf-8")
CODE = (ROOT / "model.py").read_text()[:20_000]
TEXTS = {
    "english": [prose(40_000), "It's I'll we've they're I'd IT'S ''s 'tis  two  spaces \n"],
    "chinese": [MANUAL[:12_000], "全角　空格，中文 English 混排。\n\n第二段"],
    "code": [
        CODE,
        "for i in range(10):\n\tprint(f'{i:>3}', end='\\n')\r\n\r\n    return x ** 2 != 1_000_000  # ok\n\n\n",
    ],
    "emoji": ["👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽👍🏽 🇨🇳🇫🇷 😀😀😀 e\u0301 café ﷺ ½ ² Ⅷ ٣ \u200b\ufeff\x00\x1c\x1f\x85\xa0\u3000" * 20],
    "random bytes": [random.Random(n).randbytes(3000).decode("utf-8", "replace") for n in range(3)],
}


# ---- oracles


def naive_merges(texts: list[str], n_merges: int, tie_break: str) -> list[tuple[bytes, bytes]]:
    """minimal.py's trainer; for greatest_bytes its loop with the other choice."""
    if tie_break == "lowest_id":
        return minimal.train(texts, n_merges, minimal.words, minimal.GPT2_ORDER)
    chunks = [chunk for text in texts for chunk in minimal.as_bytes(minimal.words(text))]
    merges = []
    while len(merges) < n_merges and (counts := Counter(pair for chunk in chunks for pair in pairwise(chunk))):
        merges.append(max(counts, key=lambda pair: (counts[pair], pair)))
        chunks = [minimal.merge(chunk, merges[-1]) for chunk in chunks]
    return merges


def hugging_face_merges(texts: list[str], vocab_size: int, pattern: str = "gpt2") -> list[tuple[bytes, bytes]]:
    """Those of the `tokenizers` library, without special tokens."""
    tok = HFTokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern == "gpt2")
    split = pre_tokenizers.Split(Regex(PATTERNS[pattern][0]), "isolated")
    tok.pre_tokenizer = byte_level if pattern == "gpt2" else pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = dict(special_tokens=[], initial_alphabet=alphabet, show_progress=False)
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    merges = json.loads(tok.to_str())["model"]["merges"]
    return [tuple(bytes(map(CHAR_TO_BYTE.__getitem__, part)) for part in pair) for pair in merges]


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.train([t for texts in TEXTS.values() for t in texts], 2000, special_tokens=(ENDOFTEXT, "<|end|>"))


# ---- training


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", TEXTS)
def test_merges_are_those_of_the_tokenizers_library(name, pattern):
    ours = Tokenizer.train(TEXTS[name], 1200, pattern, special_tokens=())
    assert ours.merges == hugging_face_merges(TEXTS[name], 1200, pattern)


@pytest.mark.parametrize("tie_break", TIE_BREAKS)
def test_merges_are_those_of_a_naive_trainer_on_generated_texts(tie_break):
    """A small alphabet makes ties and overlaps such as aaa."""
    for seed in range(40):
        texts = [random_text(seed + 99 * i, "ab  cé中\n'", 40) for i in range(seed % 7)]
        ours = Tokenizer.train(texts, 300, special_tokens=(), tie_break=tie_break)
        assert ours.merges == naive_merges(texts, 44, tie_break)


def test_special_tokens_come_last_and_take_no_part_in_merges():
    texts = [ENDOFTEXT.join(["one two"] * 50), "<|my token|>" * 50]
    tok = Tokenizer.train(texts, 262, special_tokens=(ENDOFTEXT, "<|my token|>"))
    assert tok.special_tokens == {ENDOFTEXT: 260, "<|my token|>": 261}
    assert len(tok) == len(tok.vocab) == 262
    assert tok.merges == Tokenizer.train(["one two"] * 50, 260, special_tokens=()).merges


def test_a_vocabulary_that_the_corpus_cannot_reach_stops_and_says_where():
    with pytest.warns(UserWarning, match="261.*5000"):
        tok = Tokenizer.train(["abcd abcd"], 5000)
    assert [a + b for a, b in tok.merges] == [b"ab", b"cd", b"abcd", b" abcd"]
    assert tok.eot_token == 260
    for texts in ([], [""], [ENDOFTEXT]):
        tok = Tokenizer.train(texts, 300)
        assert tok.decode(tok.encode("né")) == "né"
        assert tok.merges == []


def test_counts_do_not_overflow():
    """2**31 and more of one pair, as a corpus of terabytes has."""
    *_, count = next(find_merges({b"ab": 2**40, b"bc": 2**40 + 1, b"b": 1}, "lowest_id"))
    assert count == 2**40 + 1


def test_processes_count_what_one_process_counts():
    texts = [*TEXTS["english"], *TEXTS["chinese"], *TEXTS["code"], *TEXTS["emoji"]] * 3
    merges = []
    for how in (dict(workers=3, block=2000), dict(workers=1, block=2000), dict(workers=1, progress=True)):
        found = []
        Tokenizer.train(texts, 400, on_merge=lambda *merge, found=found: found.append(merge), **how)
        merges.append(found)
    assert len(merges[0]) == 143
    assert merges[0] == merges[1] == merges[2]
    assert gc.isenabled()


def test_memory_does_not_grow_with_the_number_of_texts_that_hold_the_same_words():
    words = [" " + "".join(random.Random(n).choices("abcdefghij", k=60)) for n in range(50)]

    def peak(n_texts: int) -> int:
        texts = ("".join(words[n % 50 :] + words[: n % 50]) * 14 for n in range(n_texts))  # 43 kB each
        tracemalloc.start()
        try:
            Tokenizer.train(texts, 300, workers=2, block=10_000)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(50) < 1.5 * peak(10)


def test_a_quarter_of_a_million_letters_without_a_space():
    text = "a" * 2**18
    tok = Tokenizer.train([text], 300)
    assert [len(a + b) for a, b in tok.merges[:17]] == [2**n for n in range(1, 18)]
    assert Tokenizer(tok.merges[:4]).encode(text) == [259] * 2**14


# ---- encoding


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ids_agree_with_tiktoken_and_transformers_and_decode_to_the_text(pattern):
    texts = [text for texts in TEXTS.values() for text in texts]
    tok = Tokenizer.train(texts, 1500, pattern)
    theirs = tok.to_tiktoken()
    transformers = tok.to_transformers()
    for text in [*texts, ENDOFTEXT.join(texts)]:
        ids = tok.encode(text, allowed_special="all")
        assert ids == theirs.encode(text, allowed_special="all") == transformers(text)["input_ids"]
        assert tok.decode(ids) == text == transformers.decode(ids)
        assert tok.encode_batch([text] * 2, allowed_special="all", num_threads=2) == [ids] * 2


def test_ids_are_those_of_a_naive_encoder(tok):
    texts = [text[:3000] for texts in TEXTS.values() for text in texts]
    for text in [*texts, "中文没有空格" * 30, "a" * 65]:
        assert tok.encode(text) == minimal.encode(text, tok.merges, minimal.words, minimal.GPT2_ORDER)


def test_special_tokens_follow_the_rules_of_tiktoken(tok):
    text = f"one{ENDOFTEXT}two<|end|>{ENDOFTEXT}"
    theirs = tok.to_tiktoken()
    assert_invalid(r"<\|end", tok.encode, text.replace(ENDOFTEXT, ""))
    assert_invalid(r"<\|end\|>", tok.encode, text, allowed_special={ENDOFTEXT})
    for options in (
        dict(allowed_special="all"),
        dict(allowed_special={ENDOFTEXT}, disallowed_special=()),
        dict(disallowed_special=()),
        dict(disallowed_special=["not there"]),
        dict(allowed_special={"<|x|>"}, disallowed_special=()),  # not a special token, so it cannot be allowed
    ):
        assert tok.encode(text, **options) == theirs.encode(text, **options)
    assert tok.encode_ordinary(text) == theirs.encode_ordinary(text)


def test_ids_do_not_depend_on_which_library_encodes(tok):
    """tiktoken gives up on a million blanks, and takes no lone surrogates; the texts are tokenizers' then."""
    eight = tok.encode(" " * 8)
    assert tok.encode(f"x{' ' * 10**6} y") == [*tok.encode("x"), *eight * 125_000, *tok.encode(" y")]
    assert tok.encode("中\ud800文") == tok.encode("中\ufffd文")
    assert tok.encode("\ud83d\ude00") == tok.encode("😀")


# ---- decoding


def test_streaming_decode_equals_whole_decode(tok):
    """Also for ids that are no valid UTF-8, and however they come."""
    for seed in range(200):
        rng = random.Random(seed)
        ids = [rng.randrange(2000) if rng.random() < 0.5 else rng.randrange(90, 256) for _ in range(rng.randrange(40))]
        decoder = tok.stream_decoder()
        shown = ""
        start = 0
        while start < len(ids):
            size = rng.randrange(4)
            shown += decoder.push(ids[start : start + size])
            start += size
        assert shown + decoder.flush() == tok.decode(ids)


def test_streaming_decode_never_shows_half_a_character():
    tok = Tokenizer((), special_tokens=())
    decoder = tok.stream_decoder()
    shown = [decoder.push([i]) for i in tok.encode("é中😀!")]
    assert shown == ["", "é", "", "", "中", "", "", "", "😀", "!"]


def test_what_is_not_utf8_is_replaced_and_an_id_outside_the_vocabulary_is_an_error(tok):
    assert tok.decode([BYTE_ORDER.index("中".encode()[0])]) == "\ufffd"
    assert tokenizer.visible(b" a\n\t\xe4\x00\xc2\xa0") == r"␣a⏎⇥\xe4\x00\xa0"
    assert_invalid("50303", tok.decode, [0, 50303])


# ---- attributes


def test_token_bytes_counts_the_bytes_of_text(tok):
    text = TEXTS["chinese"][0]
    assert tok.token_bytes()[tok.encode(text)].sum() == len(text.encode())
    assert tok.token_bytes()[tok.eot_token] == 0


def test_a_fingerprint_is_the_same_in_every_version():
    tok = Tokenizer([(b"a", b"b")], special_tokens=("<|b|>", "<|a|>"))
    assert tok.fingerprint[:16] == "e71190aba3f64968", "older shards would be refused"


def test_a_tokenizer_survives_pickle(tok):
    clone = pickle.loads(pickle.dumps(tok))
    assert clone.vocab == tok.vocab
    assert clone.encode("in another process") == tok.encode("in another process")


IMPOSSIBLE = [
    lambda: Tokenizer.train(["some text"], 300, tie_break="random"),
    lambda: Tokenizer.train("some text", 300),  # would be taken for texts of one character
    lambda: Tokenizer([], special_tokens={ENDOFTEXT: 5}),  # the id of a byte
    lambda: Tokenizer([], special_tokens=("",)),
]


@pytest.mark.parametrize("make", IMPOSSIBLE)
def test_what_makes_no_sense_is_an_error(make):
    with pytest.raises((ValueError, TypeError)):
        make()


def test_work_of_a_process_that_dies_is_done_here(monkeypatch):
    texts = TEXTS["english"][0].split("\n\n") * 4
    monkeypatch.setattr(sys, "executable", "/bin/false" if os.name == "posix" else "where.exe")
    parallel = Tokenizer.train(texts, 500, workers=3, block=2000)
    assert parallel.merges == Tokenizer.train(texts, 500, workers=1).merges


def test_a_script_without_a_main_guard_trains_once(tmp_path):
    """Worker processes do not run the script again."""
    script = "print('started'); from bpe.tokenizer import Tokenizer\n"
    script += "print(len(Tokenizer.train(['some text or other'] * 9999, 260, workers=3, block=1000)))\n"
    (tmp_path / "script.py").write_text(script)
    env = environment(PYTHONPATH=str(ROOT))
    out = subprocess.run([sys.executable, tmp_path / "script.py"], env=env, capture_output=True, text=True, timeout=60)
    assert out.stdout == "started\n260\n"
    assert not out.stderr
