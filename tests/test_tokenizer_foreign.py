"""Other people's tokenizer.json: its ids are those of `tokenizers`, or it is refused by name; and damaged files."""

import copy
import json
import pickle
import random
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer

from bpe import try_tokenizer
from bpe.tokenizer import ENDOFTEXT, ForeignTokenizer, Tokenizer
from tests.helpers import assert_invalid, prose, read_json, slow, write_json

pytestmark = pytest.mark.filterwarnings("ignore:the corpus has no more pairs")  # small corpora have few
TEXT = prose(3000) + "中文 naïve ﬁve ½² 1234 👍🏽"
TEXTS = [TEXT, f"<|user|>a b{ENDOFTEXT} c<|user|><|user|>", "abcabcab  ab\n\n c!", "#A the§é<|us", "Ａ１ [PAD]", ""]
TOK = Tokenizer.train([TEXT], 300, special_tokens=(ENDOFTEXT, "<|user|>"))


@pytest.fixture(scope="module")
def content(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tokenizer")
    TOK.save(folder)
    return read_json(folder / "tokenizer.json")


def load(content: dict, folder: Path) -> Tokenizer:
    file = folder / "changed.json"
    write_json(file, content)
    return Tokenizer.load(file)


def assert_ids_of_tokenizers(tok: Tokenizer, content: dict, texts=TEXTS) -> None:
    """With special tokens as ids, and as text."""
    theirs = HFTokenizer.from_str(json.dumps(content))
    theirs.no_truncation()
    theirs.no_padding()
    for as_text in (False, True):
        theirs.encode_special_tokens = as_text
        for text in texts:
            ids = tok.encode_ordinary(text) if as_text else tok.encode(text, allowed_special="all")
            assert ids == theirs.encode(text, add_special_tokens=False).ids


# ---- whole tokenizers of other kinds

BYTES = [f"<0x{b:02X}>" for b in range(256)]


def trained(model, normalizer, pre_tokenizer, decoder, **options) -> dict:
    theirs = HFTokenizer(model)
    theirs.normalizer = normalizer
    theirs.pre_tokenizer = pre_tokenizer
    theirs.decoder = decoder
    kind = {models.BPE: trainers.BpeTrainer, models.WordPiece: trainers.WordPieceTrainer}[type(model)]
    theirs.train_from_iterator([TEXT], kind(vocab_size=700, show_progress=False, **options))
    theirs.add_special_tokens(["[PAD]", AddedToken("<|user|>", lstrip=True), ENDOFTEXT])
    theirs.add_tokens([AddedToken("c!", normalized=False)])
    content = json.loads(theirs.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in BYTES]
    return content


ALPHABET = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
LLAMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
KINDS = {
    "as Llama 2": lambda: trained(
        models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        LLAMA_DECODER,
        special_tokens=["<unk>", "<s>", "</s>", *BYTES],
    ),
    "SentencePiece with Metaspace": lambda: trained(
        models.BPE(byte_fallback=True),
        None,
        pre_tokenizers.Metaspace(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        special_tokens=BYTES,
    ),
    "NFKC, lower case and a space in front": lambda: trained(
        models.BPE(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        decoders.ByteLevel(),
        **ALPHABET,
    ),
    "single digits": lambda: trained(
        models.BPE(ignore_merges=True),
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
        decoders.ByteLevel(),
        **ALPHABET,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_tokenizer_of_another_kind_has_the_ids_of_tokenizers_wherever_it_goes(name, tmp_path):
    content = KINDS[name]()
    tok = load(content, tmp_path)
    assert_ids_of_tokenizers(tok, content)
    tok.save(tmp_path / "saved", 64)
    assert (tmp_path / "saved/tokenizer.json").read_text() == (tmp_path / "changed.json").read_text()
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    for other in (Tokenizer.load(tmp_path / "saved"), pickle.loads(pickle.dumps(tok))):
        assert other.fingerprint == tok.fingerprint
        assert other.same_ids(tok)
        assert_ids_of_tokenizers(other, content)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        assert tok.encode(text, allowed_special="all") == theirs.encode(text, add_special_tokens=False)
        assert tok.encode_batch([text], disallowed_special=()) == [tok.encode_ordinary(text)]
        # the text as the normalizer writes it, with a space in front where it adds one
        normalizer = theirs.backend_tokenizer.normalizer
        written = normalizer.normalize_str(text).replace("▁", " ") if normalizer else text
        decoder = tok.stream_decoder()
        ids = tok.encode_ordinary(text)
        shown = "".join(decoder.push([i]) for i in ids) + decoder.flush()
        assert shown == tok.decode(ids)
        assert shown.removeprefix(" ") == written.removeprefix(" ")
        assert tok.token_bytes()[ids].sum() == len(shown.encode())
    assert try_tokenizer.split_up("x", tok, "naïve 中文")[1]
    for special in ((), "all"):
        assert tok.encode("a\ud800", allowed_special=special) == tok.encode("a\ufffd", allowed_special=special)
    assert_invalid("tiktoken has no form", tok.to_tiktoken)


def test_special_tokens_of_another_kind_become_ids_all_or_none(tmp_path):
    """Those of the text alone, whatever its post-processor puts in front."""
    tok = load(KINDS["single digits"]() | dict(post_processor=template(1, 0)), tmp_path)
    assert tok.token_bytes()[tok.eot_token] == 0
    assert_invalid("holds the special token", tok.encode, "a[PAD]")
    text = f"a[PAD]{ENDOFTEXT}"
    assert_invalid("allow all of these", tok.encode, text, allowed_special={ENDOFTEXT}, disallowed_special=())
    both = tok.encode(text, allowed_special={ENDOFTEXT, "[PAD]"})
    assert both == tok.encode(text, allowed_special="all")
    assert both == [*tok.encode("a"), tok.special_tokens["[PAD]"], tok.eot_token]


UNCOUNTABLE = {
    "continuing_subword_prefix": lambda: trained(
        models.WordPiece(unk_token="[UNK]"), normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), None
    ),
    "not on bytes": lambda: trained(models.BPE(unk_token="[UNK]"), None, pre_tokenizers.Whitespace(), None),
    "no token for the byte b'": lambda: trained(
        models.BPE(), None, pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    ),
}


@pytest.mark.parametrize("words", UNCOUNTABLE)
def test_tokens_that_cannot_be_counted_in_bytes_are_refused_by_name(words, tmp_path):
    assert_invalid(f"cannot use the tokenizer .*changed.json: .*{words}", load, UNCOUNTABLE[words](), tmp_path)


def test_a_fingerprint_tells_what_decides_ids(tmp_path):
    content = KINDS["single digits"]()
    tok = load(content, tmp_path)
    assert load(content | dict(decoder=None, post_processor=BYTE_LEVEL), tmp_path).fingerprint == tok.fingerprint
    for change in (dict(normalizer=dict(type="NFC")), dict(added_tokens=content["added_tokens"][:-1])):
        other = load(content | change, tmp_path)
        assert other.fingerprint != tok.fingerprint
        assert not other.same_ids(tok)


# ---- changes of a file of ours


def set_(*path):
    """A change of a tokenizer.json: the last of `path` is the new value of what the others lead to."""

    def change(content: dict) -> None:
        *keys, last, value = path
        for key in keys:
            content = content[key]
        content[last] = copy.deepcopy(value)

    return change


def add_merges(*merges):
    def change(content: dict) -> None:
        content["model"]["merges"] += [list(merge) for merge in merges]
        vocab = content["model"]["vocab"]
        for a, b in merges:
            vocab.setdefault(a + b, len(vocab))

    return change


def add_token(name: str, i: int, **flags):
    token = dict(id=i, content=name, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    return lambda content: content["added_tokens"].append(token | flags)


def take_from_vocab(name: str):
    return lambda content: content["model"]["vocab"].pop(name)


def all_(*changes):
    return lambda content: [change(content) for change in changes]


def template(*single):
    pieces = [{"SpecialToken": {"id": ENDOFTEXT, "type_id": 0}} if s else TEXT_ALONE for s in single]
    special = {ENDOFTEXT: dict(id=ENDOFTEXT, ids=[298], tokens=[ENDOFTEXT])}
    return dict(type="TemplateProcessing", single=pieces, pair=[TEXT_ALONE], special_tokens=special)


TEXT_ALONE = {"Sequence": {"id": "A", "type_id": 0}}
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)


def split(pattern: str, behavior: str = "Isolated") -> dict:
    by_pattern = dict(type="Split", pattern=dict(Regex=pattern), behavior=behavior, invert=False)
    return dict(type="Sequence", pretokenizers=[by_pattern, BYTE_LEVEL | dict(use_regex=False)])


TRUNCATION = dict(max_length=4, strategy="LongestFirst", stride=0, direction="Right")
PADDING = dict(
    strategy="BatchLongest", direction="Right", pad_to_multiple_of=8, pad_id=0, pad_type_id=0, pad_token="!"
)  # fmt: skip

REFUSED = {
    "a negative id": set_("model", "vocab", "zz", -1),
    "dropout": set_("model", "dropout", 1.0),
    "a suffix": set_("model", "end_of_word_suffix", "</w>"),
    "two tokens with one id": set_("model", "vocab", "zz", 290),
}
CHANGES = {  # and whether it is still a tokenizer of ours
    "lstrip": (False, set_("added_tokens", 1, "lstrip", True)),
    "an added token that is not special": (False, set_("added_tokens", 1, "special", False)),
    "a normalizer": (False, set_("normalizer", dict(type="Lowercase"))),
    "ignore_merges": (False, set_("model", "ignore_merges", True)),
    "a prefix space": (False, set_("pre_tokenizer", "add_prefix_space", True)),
    "a special token that is normalized beside one that is not": (
        False,
        all_(set_("added_tokens", 0, "normalized", True), set_("added_tokens", 0, "content", "<|user|>x")),
    ),
    "an added token with the name of a token": (
        False,
        all_(add_token("the", 300), add_merges(("t", "h"), ("th", "e"))),
    ),
    "a second merge for a token": (False, add_merges(("b", "c"), ("a", "bc"), ("a", "b"), ("ab", "c"))),
    "words that are split again": (
        False,
        set_("pre_tokenizer", dict(type="Sequence", pretokenizers=[dict(type="Whitespace"), BYTE_LEVEL])),
    ),
    "what is split off is dropped": (False, set_("pre_tokenizer", split(r"\s+|\S+", "Removed"))),
    "digits that Ruby counts otherwise": (True, set_("pre_tokenizer", split(r"\p{N}{1,3}+|\P{N}+"))),
    "a post-processor": (True, set_("post_processor", template(1, 0))),
    "a post-processor for offsets": (True, set_("post_processor", BYTE_LEVEL | dict(trim_offsets=False))),
    "no decoder": (True, set_("decoder", None)),
    "an unknown token": (True, set_("model", "unk_token", "<|endoftext|>")),
    "a token that no merge makes": (True, set_("model", "vocab", "zz", 300)),
    "truncation": (True, set_("truncation", TRUNCATION)),
    "padding": (True, set_("padding", PADDING)),
    "an old file without type": (True, lambda content: content["model"].pop("type")),
    "the older form of merges": (
        True,
        lambda content: content["model"].update(merges=[" ".join(pair) for pair in content["model"]["merges"]]),
    ),
    "all special tokens normalized": (True, all_(*(set_("added_tokens", i, "normalized", True) for i in (0, 1)))),
    "a special token that begins another one": (True, add_token("<|user|><|user|>", 300)),
    "an id of an added token that is not the next one": (
        True,
        all_(take_from_vocab("<|user|>"), set_("added_tokens", 1, "id", 310)),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_same_every_time_or_cannot_be_counted_is_refused(name, content, tmp_path):
    REFUSED[name](changed := copy.deepcopy(content))
    assert_invalid(r"cannot use the tokenizer .*changed\.json: ", load, changed, tmp_path)


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_file_asks_for_its_ids_are_those_of_tokenizers(name, content, tmp_path):
    is_ours, change = CHANGES[name]
    change(changed := copy.deepcopy(content))
    tok = load(changed, tmp_path)
    assert type(tok) is (Tokenizer if is_ours else ForeignTokenizer)
    assert_ids_of_tokenizers(tok, changed)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(merges=st.lists(st.tuples(*[st.sampled_from(["a", "b", "c", "ab", "bc", "ca", "abc", "bca"])] * 2), max_size=9))
def test_whatever_merges_are_accepted_give_the_same_ids_in_tokenizers(merges, content, tmp_path):
    changed = copy.deepcopy(content)
    changed["model"]["merges"] = []
    add_merges(*merges)(changed)
    try:
        tok = load(changed, tmp_path)
    except ValueError:
        return
    theirs = HFTokenizer.from_str(json.dumps(changed))
    for text in ("abc", "abcabc", "bcabca", "cabcab", "aabbcc", "abcbca" * 20):
        assert tok.encode(text) == theirs.encode(text).ids == tok.encode_batch([text])[0]


# ---- special tokens


@pytest.mark.parametrize("special", [" ", "\n", "中", "<|a|>", "😀"])
def test_a_special_token_of_any_name_keeps_its_id_in_transformers(special, tmp_path):
    tok = Tokenizer.train([TEXT, "the then" * 99], 320, special_tokens=(ENDOFTEXT, special))
    tok.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == tok.fingerprint
    for theirs in (AutoTokenizer.from_pretrained(tmp_path), tok.to_transformers()):
        assert theirs.convert_tokens_to_ids(special) == tok.special_tokens[special]
        for text in [*TEXTS, f"x{special} y{special}{special}"]:
            ids = tok.encode(text, allowed_special="all")
            assert theirs(text)["input_ids"] == ids
            assert theirs.decode(ids) == text


@pytest.mark.parametrize("special", ["§", "é", "Ġ", "<|é|>", "#", "A"])
def test_a_special_token_that_hugging_face_takes_for_bytes_is_refused(special):
    assert_invalid(special, Tokenizer, (), special_tokens=(ENDOFTEXT, special))


NAMES = ("<a>", "<a>b", "b c", "|>")
SOME = st.sampled_from(["all", (), NAMES[:1], NAMES[1:], NAMES[::2]])


@settings(max_examples=50, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([*NAMES, "<", "a", "b", " c", ">", "!", "\n ", "é"]), max_size=14),
    allowed=SOME,
    disallowed=SOME,
    pattern=st.sampled_from(["gpt2", "cl100k", r"\s+|\S+"]),
)
def test_encode_batch_is_encode_for_any_special_tokens(pieces, allowed, disallowed, pattern):
    tok = Tokenizer([(b"<", b"a"), (b">", b"!"), (b" ", b"c")], pattern, NAMES)
    options = dict(allowed_special=allowed, disallowed_special=disallowed)
    try:
        whole = tok.encode("".join(pieces), **options)
    except ValueError:
        with pytest.raises(ValueError, match="holds the special token"):
            tok.encode_batch(["".join(pieces)], **options)
        return
    assert tok.encode_batch(["".join(pieces)], **options) == [whole]


# ---- tiktoken


def test_merges_that_tiktoken_would_do_in_another_order_are_refused_for_it(tmp_path):
    """It merges whatever makes a token, and not only the pairs on the list."""
    tok = Tokenizer([(b"b", b"c"), (b"a", b"b"), (b"ab", b"c")])  # the last one never happens: b is merged with c
    assert len(tok.encode("abc")) == 2
    assert_invalid("tiktoken merges in the order of ids", tok.to_tiktoken)
    assert tok.encode_batch(["abc"]) == [tok.encode("abc")] == [tok.to_transformers()("abc")["input_ids"]]
    swapped = Tokenizer([(b"a", b"b"), (b"b", b"c")], ids=TOK.ordinary | {b"ab": 300, b"bc": 299})
    assert [swapped.vocab[i] for i in swapped.encode("abc")] == [b"ab", b"c"]
    assert swapped.encode("abc") == swapped.to_transformers()("abc")["input_ids"]
    alike = Tokenizer((), special_tokens=("<|a|>", "<|a|><|b|>"))  # tiktoken takes the first that fits, we the longest
    assert_invalid("begins another", alike.to_tiktoken)
    TOK.save(tmp_path)
    tok.save(tmp_path)
    assert not (tmp_path / "tokenizer.tiktoken").exists()


# ---- damaged files

OTHER = [b"", b"NaN", b"[" * 200_000, b'{"a":' * 100_000, b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"]


def check_reading(file: Path) -> None:
    """One ValueError that names the file, or a tokenizer that works, with the ids of tokenizers."""
    try:
        tok = Tokenizer.load(file)
    except ValueError as e:
        assert re.search(r"(cannot use the|no) tokenizer ", str(e))
        assert str(file.parent) in str(e)
        return
    assert len(tok.token_bytes()) == len(tok)
    assert_ids_of_tokenizers(tok, read_json(file))


@pytest.mark.parametrize("n", [12, slow(1000)])
def test_a_file_that_is_cut_or_flipped_or_of_another_kind_is_one_error_or_works(tmp_path, n):
    TOK.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    rng = random.Random(n)
    data = file.read_bytes()
    damaged = [*OTHER, *(file.read_text("utf-8").encode(e) for e in ("utf-16", "utf-8-sig"))]
    for i in rng.choices(range(len(data)), k=n):
        damaged += [data[:i], data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1 :]]
    for content in damaged:
        file.write_bytes(content)
        check_reading(file)
    file.write_bytes(b"{}")
    assert_invalid("it has no 'model'; choose", Tokenizer.load, file)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "", "no/such/place", "con\udcffused"])
def test_a_path_that_cannot_be_is_one_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_invalid("no tokenizer at", Tokenizer.load, path)
