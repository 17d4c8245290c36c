"""Files of the tokenizer: nothing is lost between tokenizer.json, .tiktoken, transformers and GPT-2's own files."""

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer, GPT2Config

from bpe.tokenizer import ENDOFTEXT, PATTERNS, TIKTOKEN_FILES, Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    (ROOT / "input.txt").read_text()[:20_000],
    (ROOT / "bpe/manual.txt").read_text(encoding="utf-8")[:6000],
    (ROOT / "model.py").read_text()[:10_000],
    "  don't ADD spaces , before . these ' s\n\n\n\t 中文　ok👍🏽 \x1c½",
]
SPECIALS = (ENDOFTEXT, "<|user|>", "<|assistant|>")


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


def test_a_directory_comes_back_from_each_of_its_files(tok, tmp_path):
    tok.save(tmp_path / "tokenizer")
    files = sorted(file.name for file in (tmp_path / "tokenizer").iterdir())
    assert files == ["tokenizer.json", "tokenizer.tiktoken", "tokenizer_config.json"]
    for name in ["", "tokenizer.json", "tokenizer.tiktoken"]:
        assert_same(tok, Tokenizer.load(tmp_path / "tokenizer" / name))


def test_a_json_file_has_its_tiktoken_file_beside_it(tok, tmp_path):
    tok.save(tmp_path / "deep" / "mine.json")
    assert sorted(file.name for file in (tmp_path / "deep").iterdir()) == ["mine.json", "mine.tiktoken"]
    assert_same(tok, Tokenizer.load(tmp_path / "deep" / "mine.json"))


def test_saving_twice_gives_the_same_bytes(tok, tmp_path):
    for name in ("a", "b"):
        tok.save(tmp_path / name)
        tok = Tokenizer.load(tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_a_tiktoken_file_alone_takes_pattern_and_special_tokens_as_arguments(tok, tmp_path):
    tok.save(tmp_path / "x.json")
    (tmp_path / "x.json").unlink()
    assert_same(tok, Tokenizer.load(tmp_path / "x.tiktoken", tok.pattern, SPECIALS))
    plain = Tokenizer.load(tmp_path / "x.tiktoken")
    assert plain.pattern == PATTERNS["gpt2"][0] and plain.special_tokens == {ENDOFTEXT: 256 + len(tok.merges)}


def test_tiktoken_reads_the_file_as_we_do(tok, tmp_path):
    tok.save(tmp_path)
    ranks = load_tiktoken_bpe(str(tmp_path / "tokenizer.tiktoken"))
    theirs = tiktoken.Encoding("x", pat_str=tok.pattern, mergeable_ranks=ranks, special_tokens=tok.special_tokens)
    for text in TEXTS:
        assert theirs.encode(text) == tok.encode(text)


def test_from_tiktoken_and_back_loses_nothing(tok):
    assert_same(tok, Tokenizer.from_tiktoken(tok.to_tiktoken()))


# ---- transformers


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_auto_tokenizer_reads_the_directory_with_the_same_ids(tok, tmp_path, beside_a_model):
    tok.save(tmp_path)
    if beside_a_model:  # in a checkpoint, config.json says gpt2
        GPT2Config().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, conversation()]:
        ids = tok.encode(text, allowed_special="all")
        assert theirs(text)["input_ids"] == theirs.encode(text) == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == theirs.bos_token_id == tok.eot_token and theirs.eos_token == ENDOFTEXT
    assert len(theirs) == theirs.vocab_size == len(tok)
    assert theirs.decode(tok.encode(ENDOFTEXT + "x", allowed_special="all"), skip_special_tokens=True) == "x"


def test_to_transformers_saves_what_load_reads(tok, tmp_path):
    theirs = tok.to_transformers()
    assert theirs.eos_token_id == tok.eot_token
    theirs.save_pretrained(tmp_path)
    assert_same(tok, Tokenizer.load(tmp_path))


def test_without_endoftext_there_is_no_eos(tmp_path):
    tok = Tokenizer.train(TEXTS[:1], 300, special_tokens=("<|end|>",))
    tok.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tok.eot_token is None and theirs.eos_token is None
    assert theirs("a<|end|>")["input_ids"] == tok.encode("a<|end|>", allowed_special="all")


# ---- files of others


def trained_elsewhere(tmp_path, specials=(), **changes) -> Path:
    """A tokenizer.json of the `tokenizers` library, whose special tokens have the first ids."""
    tok = HFTokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, value in changes.items():
        setattr(tok, name, value)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=800, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
        ),
    )
    tok.save(str(tmp_path / "theirs.json"))
    return tmp_path / "theirs.json"


def test_a_file_of_the_tokenizers_library_keeps_its_ids(tmp_path):
    """Special tokens first, so that ids are not ranks."""
    file = trained_elsewhere(tmp_path, SPECIALS)
    tok, theirs = Tokenizer.load(file), HFTokenizer.from_file(str(file))
    assert tok.special_tokens == {s: i for i, s in enumerate(SPECIALS)} and tok.vocab[3] == b"!"
    for text in [*TEXTS, conversation()]:
        ids = theirs.encode(text).ids
        assert tok.encode(text, allowed_special="all") == ids == tok.to_tiktoken().encode(text, allowed_special="all")
        assert tok.decode(ids) == text
    tok.save(tmp_path / "ours")
    assert_same(tok, Tokenizer.load(tmp_path / "ours"))
    assert_same(tok, Tokenizer.load(tmp_path / "ours" / "tokenizer.tiktoken"))


def test_other_split_patterns_and_the_older_form_of_merges(tmp_path):
    pattern = r"\p{N}|\p{L}+|\s+|[^\p{N}\p{L}\s]+"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    file = trained_elsewhere(tmp_path, pre_tokenizer=split)
    content = json.loads(file.read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    file.write_text(json.dumps(content))
    tok, theirs = Tokenizer.load(file), HFTokenizer.from_file(str(file))
    assert tok.pattern == pattern
    for text in TEXTS:
        assert tok.encode(text) == theirs.encode(text).ids


def test_several_merges_that_make_one_token(tmp_path):
    """Files converted from tiktoken list every way in which a token could be put together."""
    tok = Tokenizer.train(TEXTS, 600)
    tok.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, merges = content["model"]["vocab"], []
    for token in sorted(vocab, key=vocab.get):
        merges += [[token[:i], token[i:]] for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
    content["model"]["merges"] = merges
    assert len(merges) > len(tok.merges)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    converted, theirs = Tokenizer.load(tmp_path), HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert converted.encode(text) == theirs.encode(text).ids


def test_vocab_json_with_merges_txt(tmp_path):
    tok = Tokenizer.train(TEXTS, 600)
    tok.to_transformers().backend_tokenizer.model.save(str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["merges.txt", "vocab.json"]
    for path in (tmp_path, tmp_path / "vocab.json", tmp_path / "merges.txt"):
        assert_same(tok, Tokenizer.load(path))


# ---- what cannot be read


def content_of(tok: Tokenizer) -> dict:
    """What `save` writes to tokenizer.json."""
    with tempfile.TemporaryDirectory() as folder:
        tok.save(folder)
        return json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))


BYTES_ONLY = json.dumps(content_of(Tokenizer((), special_tokens=())))


def damaged(**changes) -> str:
    content = json.loads(BYTES_ONLY)
    for path, value in changes.items():
        *outer, last = path.split("__")
        inner = content
        for key in outer:
            inner = inner[key]
        inner[last] = value
    return json.dumps(content)


BAD_JSON = {
    "empty": "",
    "cut off": damaged()[:2000],
    "not a tokenizer": "[1, 2]",
    "without a model": json.dumps(dict(version="1.0", pre_tokenizer=None)),
    "without a vocabulary": damaged(model=dict(type="BPE", merges=[])),
    "a merge of unknown tokens": damaged(model__merges=[["ab", "c"]]),
    "a merge of three": damaged(model__merges=["a b c"]),
    "a merge outside the vocabulary": damaged(model__merges=[["a", "b"]]),
    "a byte is missing": damaged(model__vocab={"a": 0}),
    "ids that are no numbers": damaged(model__vocab={"a": "b"}),
    "two tokens of one id": damaged(added_tokens=[dict(id=3, content="<x>")]),
    "wordpiece": damaged(model__type="WordPiece"),
    "a normalizer": damaged(normalizer=dict(type="NFC")),
    "no pre-tokenizer": damaged(pre_tokenizer=None),
    "a prefix space": damaged(pre_tokenizer__add_prefix_space=True),
    "a pattern that does not compile": damaged(
        pre_tokenizer=dict(
            type="Sequence",
            pretokenizers=[
                dict(type="Split", pattern=dict(Regex="("), behavior="Isolated", invert=False),
                dict(type="ByteLevel", add_prefix_space=False, use_regex=False),
            ],
        )
    ),
    "byte fallback": damaged(model__byte_fallback=True),
    "a special token that strips": damaged(added_tokens=[dict(id=256, content="<x>", lstrip=True)]),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_a_damaged_tokenizer_json_is_one_clear_error(name, tmp_path):
    (tmp_path / "tokenizer.json").write_text(BAD_JSON[name])
    with pytest.raises(ValueError, match=r"cannot use the tokenizer .*tokenizer\.json: .*train it again"):
        Tokenizer.load(tmp_path)


def test_what_is_refused_is_refused_with_a_reason(tmp_path):
    file = trained_elsewhere(tmp_path, normalizer=normalizers.NFC())
    with pytest.raises(ValueError, match="has a normalizer"):
        Tokenizer.load(file)


@pytest.mark.parametrize("line", [b"no rank", b"IQ== x", b"!!! 300", base64.b64encode(b"three") + b" 300"])
def test_a_damaged_tiktoken_file_is_one_clear_error(line, tmp_path):
    Tokenizer(()).save(tmp_path / "x.json")
    (tmp_path / "x.json").unlink()
    with open(tmp_path / "x.tiktoken", "ab") as f:
        f.write(line + b"\n")
    with pytest.raises(ValueError, match=r"cannot use the tokenizer .*x\.tiktoken"):
        Tokenizer.load(tmp_path / "x.tiktoken")


def test_bytes_that_are_no_utf8_are_one_clear_error(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="cannot use the tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_missing_file_is_one_clear_error(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="no tokenizer at .*; give a directory"):
            Tokenizer.load(path)


# ---- GPT-2


def need_gpt2() -> None:
    try:
        tiktoken.get_encoding("gpt2")
    except Exception as e:
        pytest.skip(f"needs the GPT-2 vocabulary in tiktoken's cache ({type(e).__name__})")


def test_gpt2_from_tiktoken_has_gpt2s_ids_and_saves_them_for_auto_tokenizer(tmp_path):
    need_gpt2()
    theirs, tok = tiktoken.get_encoding("gpt2"), Tokenizer.from_tiktoken("gpt2")
    assert len(tok) == 50257 and tok.eot_token == 50256 and tok.merges[0] == (b" ", b"t")
    tok.save(tmp_path)
    transformers = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, f"a{ENDOFTEXT}b"]:
        ids = tok.encode(text, allowed_special="all")
        assert ids == theirs.encode(text, allowed_special="all") == transformers(text)["input_ids"]
    assert_same(tok, Tokenizer.load(tmp_path))
    assert_same(tok, Tokenizer.load("gpt2"))


def test_without_network_and_cache_the_error_names_file_folder_and_checksum(tmp_path):
    """In a process of its own, where every connection fails at once."""
    code = (
        "import socket\n"
        "def fail(*args, **kwargs): raise OSError('no network')\n"
        "socket.getaddrinfo = socket.create_connection = fail\n"
        "from bpe.tokenizer import Tokenizer\n"
        "try: Tokenizer.load('gpt2')\n"
        "except ValueError as e: print(e)\n"
    )
    env = os.environ | {"TIKTOKEN_CACHE_DIR": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert "vocab.bpe" in out.stdout, out.stderr
    assert str(tmp_path / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee") in out.stdout
    assert "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5" in out.stdout
    assert f"TIKTOKEN_CACHE_DIR={tmp_path}" in out.stdout


def test_addresses_and_checksums_are_tiktokens():
    import inspect

    import tiktoken_ext.openai_public as public

    source = inspect.getsource(public)
    for files in TIKTOKEN_FILES.values():
        for address, checksum in files.items():
            assert address in source and checksum in source


def test_an_unknown_encoding_is_one_clear_error():
    with pytest.raises(ValueError, match="no encoding 'gpt5'; choose from gpt2"):
        Tokenizer.from_tiktoken("gpt5")
