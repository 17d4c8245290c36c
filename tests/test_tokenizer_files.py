"""Files of the tokenizer: nothing is lost between tokenizer.json, .tiktoken, transformers and GPT-2's vocabulary."""

import hashlib
import inspect
import re
from pathlib import Path

import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext import openai_public
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from bpe.chunks import PATTERNS, SPELLINGS
from bpe.tokenizer import ENDOFTEXT, Tokenizer
from tests.helpers import ROOT, assert_invalid, needs_gpt2, prose, write_json

TEXTS = [
    prose(20_000),
    (ROOT / "bpe/manual.txt").read_text(encoding="utf-8")[:6000],
    (ROOT / "model.py").read_text()[:10_000],
    "  don't ADD spaces , before . these ' s\n\n\n\t 中文　ok👍🏽 \x1c½",
]
SPECIALS = (ENDOFTEXT, "<|user|>", "<|assistant|>", "中")


@pytest.fixture(scope="module", params=PATTERNS)
def tok(request) -> Tokenizer:
    return Tokenizer.train(TEXTS, 1000, request.param, SPECIALS)


def conversation() -> str:
    return f"<|user|>{TEXTS[3]}<|assistant|>{TEXTS[1][:500]}{ENDOFTEXT}"


def assert_same(a: Tokenizer, b: Tokenizer) -> None:
    assert a.fingerprint == b.fingerprint
    assert (a.merges, a.vocab, a.special_tokens, a.pattern) == (b.merges, b.vocab, b.special_tokens, b.pattern)
    for text in [*TEXTS, conversation()]:
        assert a.encode(text, allowed_special="all") == b.encode(text, allowed_special="all")


# ---- our own files


def test_a_directory_and_its_file_come_back(tok, tmp_path):
    tok.save(tmp_path / "tokenizer")
    files = {file.name for file in (tmp_path / "tokenizer").iterdir()}
    assert files == {"tokenizer.json", "tokenizer.tiktoken", "tokenizer_config.json"}
    for name in ["", "tokenizer.json"]:
        assert_same(tok, Tokenizer.load(tmp_path / "tokenizer" / name))
    folder = tmp_path / "very/deep"
    tok.save(folder / "mine.json")
    assert sorted(file.name for file in folder.iterdir()) == ["mine.json", "mine.tiktoken"]
    assert_same(tok, Tokenizer.load(folder / "mine.json"))


def test_tiktoken_reads_the_file_as_we_do(tok, tmp_path):
    tok.save(tmp_path)
    assert load_tiktoken_bpe(str(tmp_path / "tokenizer.tiktoken")) == tok.to_tiktoken()._mergeable_ranks


def test_from_tiktoken_and_back_loses_nothing(tok):
    assert_same(tok, Tokenizer.from_tiktoken(tok.to_tiktoken()))
    for pattern in (pattern for pattern, name in SPELLINGS.items() if PATTERNS[name][0] == tok.pattern):
        assert_same(tok, Tokenizer(tok.merges, pattern, tok.special_tokens))


def test_patterns_of_tiktoken_that_tokenizers_reads_otherwise_are_translated_or_warned_of(tok):
    theirs = tok.to_tiktoken()
    possessive = tok.pattern.replace("{1,3}", "{1,3}+")
    options = dict(mergeable_ranks=theirs._mergeable_ranks, special_tokens=theirs._special_tokens)
    assert_same(tok, Tokenizer.from_tiktoken(tiktoken.Encoding("x", pat_str=possessive, **options)))
    with pytest.warns(UserWarning, match=r"\\S\+"):
        Tokenizer.from_tiktoken(tiktoken.Encoding("x", pat_str=r"\S+|\s+", **options))


# ---- transformers


def test_auto_tokenizer_reads_the_directory_with_the_same_ids(tok, tmp_path):
    from transformers import AutoTokenizer, GPT2Config

    tok.save(tmp_path, 77)
    GPT2Config().save_pretrained(tmp_path)  # as in a checkpoint
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, conversation()]:
        ids = tok.encode(text, allowed_special="all")
        assert theirs(text)["input_ids"] == theirs.encode(text) == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.bos_token_id == tok.eot_token
    assert theirs.eos_token == ENDOFTEXT
    assert len(theirs) == theirs.vocab_size == len(tok)
    assert theirs.model_max_length == 77
    assert theirs.decode(tok.encode(ENDOFTEXT + "x", allowed_special="all"), skip_special_tokens=True) == "x"


def test_to_transformers_saves_what_load_reads(tok, tmp_path):
    theirs = tok.to_transformers()
    theirs.save_pretrained(tmp_path)
    assert_same(tok, Tokenizer.load(tmp_path))


def test_without_endoftext_there_is_no_eos(tmp_path):
    from transformers import AutoTokenizer

    tok = Tokenizer.train(TEXTS[:1], 300, special_tokens=("<|end|>",))
    tok.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tok.eot_token is None
    assert theirs.eos_token is None
    assert theirs("a<|end|>")["input_ids"] == tok.encode("a<|end|>", allowed_special="all")


# ---- files of others


def test_a_file_of_the_tokenizers_library_keeps_its_ids(tmp_path):
    """With special tokens first, so that ids are not ranks."""
    theirs = HFTokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    options = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    theirs.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=800, special_tokens=[*SPECIALS], **options))
    theirs.save(str(tmp_path / "theirs.json"))
    tok = Tokenizer.load(tmp_path / "theirs.json")
    assert tok.special_tokens == {s: i for i, s in enumerate(SPECIALS)}
    tok.save(tmp_path / "ours")
    for text in [*TEXTS, conversation()]:
        ids = theirs.encode(text).ids
        for ours in (tok, Tokenizer.load(tmp_path / "ours")):
            assert ours.encode(text, allowed_special="all") == ids
            assert ours.decode(ids) == text


# ---- vocab.json and merges.txt


@pytest.fixture
def published(tmp_path) -> tuple[Tokenizer, Path]:
    """A tokenizer in the files that OpenAI published for GPT-2."""
    tok = Tokenizer.train(TEXTS, 600)
    folder = tmp_path / "published"
    tok.save(tmp_path / "tokenizer.json")
    folder.mkdir()
    HFTokenizer.from_file(str(tmp_path / "tokenizer.json")).model.save(str(folder))  # vocab.json and merges.txt
    write_json(folder / "config.json", dict(model_type="gpt2"))
    return tok, folder


def test_the_files_of_gpt2_are_read_here_and_by_transformers(published):
    from transformers import GPT2Tokenizer

    tok, folder = published
    assert_same(tok, Tokenizer.load(folder))
    theirs = GPT2Tokenizer.from_pretrained(folder)
    for text in [*TEXTS, f"a{ENDOFTEXT}b"]:
        assert theirs(text)["input_ids"] == tok.encode(text, allowed_special="all")
    write_json(folder / "tokenizer_config.json", dict(tokenizer_class="GPT2Tokenizer", model_max_length=1024))
    assert_same(tok, Tokenizer.load(folder))
    write_json(folder / "added_tokens.json", {"[PAD]": 600, "[SEP]": 601})
    ids = GPT2Tokenizer.from_pretrained(folder).encode("a[SEP] b", add_special_tokens=False)
    assert Tokenizer.load(folder).encode("a[SEP] b", allowed_special="all") == ids


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_damaged_files_of_gpt2_are_one_error(published, name):
    folder = published[1]
    whole = (folder / name).read_bytes()
    for content in (b"[]", b"x y\n", whole[: len(whole) // 2]):
        (folder / name).write_bytes(content)
        assert_invalid(f"{folder}[^\n]*$", Tokenizer.load, folder)


def test_a_folder_without_a_tokenizer_is_one_error(tmp_path):
    write_json(tmp_path / "config.json", dict(model_type="gpt2"))
    assert_invalid(str(tmp_path), Tokenizer.load, tmp_path)


# ---- GPT-2


@needs_gpt2
def test_gpt2_from_tiktoken_has_gpt2s_ids_and_saves_them_for_auto_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    theirs = tiktoken.get_encoding("gpt2")
    tok = Tokenizer.load("gpt2")
    tok.save(tmp_path)
    transformers = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, f"a{ENDOFTEXT}b"]:
        ids = tok.encode(text, allowed_special="all")
        assert ids == theirs.encode(text, allowed_special="all") == transformers(text)["input_ids"]
    assert_same(tok, Tokenizer.load(tmp_path))
    assert tok.fingerprint[:16] == "a8e0a7876d8860f7", "shards would be refused"


def test_without_network_and_cache_gpt2_is_one_error(offline):
    assert_invalid("gpt2", Tokenizer.load, "gpt2")


def test_the_page_says_which_files_tiktoken_takes_and_under_which_names():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    addresses = re.findall(r"https://openaipublic.*/gpt-2/[^>]*", page)
    source = inspect.getsource(openai_public)
    assert len(addresses) == 2
    for address in addresses:
        assert address in source
        assert hashlib.sha1(address.encode()).hexdigest() in page
