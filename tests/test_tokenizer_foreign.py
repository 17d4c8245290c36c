"""Other people's tokenizers: ids and text are those of `tokenizers`, and of transformers for a folder."""

import copy
import json
import pickle
import random
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from bpe.tokenizer import ENDOFTEXT, Tokenizer
from tests.helpers import assert_invalid, damaged, prose, read_json, write_json

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


def assert_ids_of_tokenizers(tok: Tokenizer, content: dict) -> None:
    """With special tokens as ids, and as text."""
    theirs = HFTokenizer.from_str(json.dumps(content))
    theirs.no_truncation()
    theirs.no_padding()
    for as_text in (False, True):
        theirs.encode_special_tokens = as_text
        for text in TEXTS:
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
    "NFKC": lambda: trained(
        models.BPE(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        decoders.ByteLevel(),
        **ALPHABET,
    ),
    "WordPiece, not on bytes": lambda: trained(
        models.WordPiece(unk_token="[UNK]"),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(),
        special_tokens=["[UNK]"],
    ),
}


@pytest.fixture(params=KINDS)
def another(request, tmp_path) -> tuple[Tokenizer, dict]:
    """A tokenizer of another kind, and its tokenizer.json."""
    content = KINDS[request.param]()
    return load(content, tmp_path), content


def test_a_tokenizer_of_another_kind_has_the_ids_of_tokenizers_wherever_it_goes(another, tmp_path):
    from transformers import AutoTokenizer

    tok, content = another
    tok.save(tmp_path / "saved", 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.model_max_length == 64
    for other in (tok, Tokenizer.load(tmp_path / "saved"), pickle.loads(pickle.dumps(tok))):
        assert_ids_of_tokenizers(other, content)
        assert other.fingerprint == tok.fingerprint
        assert other.same_ids(tok)
    for text in TEXTS:
        assert tok.encode(text, allowed_special="all") == theirs.encode(text, add_special_tokens=False)
        assert tok.encode_batch([text], disallowed_special=()) == [tok.encode_ordinary(text)]
    assert tok.encode("a\ud800") == tok.encode("a\ufffd")


def test_a_tokenizer_of_another_kind_decodes_as_tokenizers_does_and_counts_the_bytes(another):
    """Also as ids come. Bytes are counted after another token, since the first one of a text may lose its space."""
    tok, content = another
    theirs = HFTokenizer.from_str(json.dumps(content))
    first = tok.encode_ordinary("a")
    for text in TEXTS:
        ids = tok.encode_ordinary(text)
        decoder = tok.stream_decoder()
        shown = "".join(decoder.push([i]) for i in ids) + decoder.flush()
        assert shown == tok.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
        decoded = tok.decode(first + ids).removeprefix(tok.decode(first))
        on_bytes = content["model"]["type"] == "BPE"  # of no other kind is it known
        assert tok.token_bytes()[ids].sum() == (len(decoded.encode()) if on_bytes else 0)


def test_special_tokens_of_another_kind_become_ids_all_or_none(tmp_path):
    tok = load(KINDS["NFKC"](), tmp_path)
    text = f"a[PAD]{ENDOFTEXT}"
    for allowed in ((), {ENDOFTEXT}):
        with pytest.raises(ValueError):
            tok.encode(text, allowed_special=allowed)
    both = tok.encode(text, allowed_special={ENDOFTEXT, "[PAD]"})
    assert both == [*tok.encode("a"), tok.special_tokens["[PAD]"], tok.eot_token]


def test_a_fingerprint_tells_what_decides_ids(tmp_path):
    content = KINDS["NFKC"]()
    tok = load(content, tmp_path)
    assert load(content | dict(decoder=None), tmp_path).same_ids(tok)
    for change in (dict(normalizer=dict(type="NFC")), dict(added_tokens=content["added_tokens"][:-1])):
        assert not load(content | change, tmp_path).same_ids(tok)


# ---- folders of other models

BESIDE = {
    "as Llama 2": dict(tokenizer_class="LlamaTokenizer", legacy=False, add_prefix_space=False),
    "added tokens": dict(
        tokenizer_class="PreTrainedTokenizerFast",
        added_tokens_decoder={
            "800": dict(content="the", special=False, normalized=False, lstrip=False, rstrip=False, single_word=False),
        },
    ),
    "special tokens as text": dict(tokenizer_class="PreTrainedTokenizerFast", split_special_tokens=True),
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("kind", ["as Llama 2", "NFKC"])
def test_a_folder_means_what_transformers_says(kind, beside, tmp_path):
    """Also as its tokenizer.json, and in a checkpoint that takes it over."""
    from transformers import AutoTokenizer

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    write_json(theirs / "tokenizer.json", KINDS[kind]())
    write_json(theirs / "tokenizer_config.json", BESIDE[beside])
    reader = AutoTokenizer.from_pretrained(theirs)
    tok = Tokenizer.load(theirs)
    assert Tokenizer.load(theirs / "tokenizer.json").fingerprint == tok.fingerprint
    tok.save(tmp_path / "checkpoint")
    assert Tokenizer.load(tmp_path / "checkpoint").fingerprint == tok.fingerprint
    saved = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert saved.eos_token == (reader.eos_token or ENDOFTEXT)
    for text in TEXTS:
        ids = reader.encode(text, add_special_tokens=False)
        assert tok.encode(text, allowed_special="all") == saved.encode(text, add_special_tokens=False) == ids
        assert tok.decode(ids) == reader.decode(ids)


# ---- changes of a file of ours


def set_(*path):
    """A change of a tokenizer.json: the last of `path` is the new value of what the others lead to."""

    def change(content: dict) -> None:
        *keys, last, value = path
        for key in keys:
            content = content[key]
        content[last] = value

    return change


CHANGES = {
    "lstrip": set_("added_tokens", 1, "lstrip", True),
    "an added token that is not special": set_("added_tokens", 1, "special", False),
    "a normalizer": set_("normalizer", dict(type="Lowercase")),
    "ignore_merges": set_("model", "ignore_merges", True),
    "a prefix space": set_("pre_tokenizer", "add_prefix_space", True),
    "another order of merges": lambda content: content["model"]["merges"].reverse(),
    "a token that no merge makes": set_("model", "vocab", "zz", 300),
}
WITHOUT_EFFECT = {
    "truncation": set_("truncation", dict(max_length=4, strategy="LongestFirst", stride=0, direction="Right")),
}


@pytest.mark.parametrize("name", CHANGES | WITHOUT_EFFECT)
def test_whatever_a_file_asks_for_its_ids_are_those_of_tokenizers(name, content, tmp_path):
    changed = copy.deepcopy(content)
    (CHANGES | WITHOUT_EFFECT)[name](changed)
    tok = load(changed, tmp_path)
    assert (tok.fingerprint == TOK.fingerprint) == (name in WITHOUT_EFFECT)
    assert_ids_of_tokenizers(tok, changed)


# ---- damaged files


def test_a_damaged_file_is_one_error_that_names_it_or_works_with_the_ids_of_tokenizers(tmp_path):
    TOK.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    rng = random.Random(0)
    data = file.read_bytes()
    others = [*damaged(data).values(), b"\xef\xbb\xbf" + data]
    for i in rng.choices(range(len(data)), k=20):
        others.append(data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1 :])
    for content in others:
        file.write_bytes(content)
        try:
            tok = Tokenizer.load(file)
        except ValueError as e:
            assert str(file) in str(e)
            assert "\n" not in str(e)
        else:
            assert_ids_of_tokenizers(tok, read_json(file))


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "no/such/place"])
def test_a_path_that_cannot_be_is_one_error(path):
    assert_invalid(re.escape(path), Tokenizer.load, path)
