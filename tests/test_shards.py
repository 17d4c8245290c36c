"""What is written beside shards, and a text as shards: manifests, tokenizers by name, the cache of a text's tokens."""

import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from bpe.tokenizer import Tokenizer
from model import GPT, GPTConfig
from parts.checkpoint import save_model
from parts.cli import UserError
from parts.data import Shard, find_shards, read_manifest
from parts.shards import (
    data_tokenizer,
    load_tokenizer,
    open_shards,
    prepare_text,
    shard_name,
)
from tests.helpers import assert_refused, files_of, impatient, stamps
from tests.test_shard_files import write_ds
from tests.token_shards import UNFINISHED, with_manifest, write_shards

TEXT = "One morning the clock stood still.\n\n\nThe second document, of two\n\nparagraphs.\n\n\n\nA third one.\n" * 40
TEXT += "zig zag zig zag " * 30  # in the validation part


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "story.txt").write_text(TEXT)
    return tmp_path / "story.txt"


@pytest.fixture
def prepare(tmp_path, text):
    return lambda: prepare_text(str(text), "train", 300, tmp_path / "cache")


@pytest.fixture
def byte_tokenizer(tmp_path) -> Path:
    Tokenizer.train(["ab"], 257).save(tmp_path / "bytes.json")
    return tmp_path / "bytes.json"


def decoded(directory: Path, split: str) -> str:
    shards = [Shard(path) for path in find_shards(str(directory), split)]
    tokens = np.concatenate([shard.read(0, len(shard)) for shard in shards])
    return load_tokenizer(str(directory / "tokenizer.json")).decode(tokens.tolist())


# ----------------------------------------------------------------------------------------------------- a text as shards


def test_a_text_becomes_shards_that_hold_all_of_it(prepare):
    directory = prepare()
    train = decoded(directory, "train")
    val = decoded(directory, "val")
    assert (train + val).replace("<|endoftext|>", "") == TEXT
    n = int(0.9 * len(TEXT))
    assert train.replace("<|endoftext|>", "") == TEXT[:n]
    assert load_tokenizer(str(directory)).merges == Tokenizer.train([TEXT[:n]], 300).merges
    manifest = read_manifest(directory)
    assert manifest["documents"] == (train + val).count("<|endoftext|>")
    assert manifest["bytes"] == len(TEXT.encode())
    assert manifest["tokens"] == sum(len(np.load(path)) for path in directory.glob("*.npy"))


def test_documents_end_at_two_empty_lines_of_any_system(tmp_path, byte_tokenizer):
    (tmp_path / "x.txt").write_bytes(("\ufeff" + TEXT.replace("\n", "\r\n")).encode())
    directory = prepare_text(str(tmp_path / "x.txt"), str(byte_tokenizer), 257, tmp_path / "deep/cache")
    assert decoded(directory, "train").split("<|endoftext|>")[:4] == [
        "", "One morning the clock stood still.\n\n\n", "The second document, of two\n\nparagraphs.\n\n\n\n",
        "A third one.\nOne morning the clock stood still.\n\n\n",
    ]  # fmt: skip


def test_prepared_once_and_again_for_another_text_or_tokenizer(tmp_path, prepare, text, byte_tokenizer):
    cache = tmp_path / "cache"
    first = prepare()
    before = stamps(first)
    assert prepare() == first
    assert stamps(first) == before
    assert first.name == "story-6c6aea4530325678"
    others = {prepare_text(str(text), *wanted, cache) for wanted in (("train", 290), (str(byte_tokenizer), 300))}
    text.write_text(TEXT + "More.\n")
    assert len({first, *others, prepare()}) == 4


DAMAGE = {
    "a shard is cut": lambda folder: os.truncate(folder / "text_train_000001.npy", 500),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_cache_is_made_again(tmp_path, prepare, damage):
    directory = prepare()
    intact = files_of(directory)
    damage(directory)
    assert prepare() == directory
    assert files_of(directory) == intact
    kept = {path.name for path in (tmp_path / "cache").iterdir() if path.name[0] != "."}
    assert kept == {directory.name, f"{directory.name}.1"}  # the damaged one is set aside


def test_a_run_waits_for_another_that_makes_its_cache(prepare, monkeypatch):
    """As long as that takes, and not only until a process that is about to exit has done so."""
    patience = impatient(monkeypatch)
    prepare()
    assert min(patience) > 600


def test_texts_that_cannot_be_used(tmp_path):
    path = tmp_path / "x.txt"
    plain = tmp_path / "plain.json"
    Tokenizer.train(["ab"], 256, special_tokens=()).save(plain)

    def refused(words: str, tokenizer="train", vocab_size=300) -> None:
        with pytest.raises((UserError, OSError), match=words):  # cli.script says an OSError in one line, too
            prepare_text(str(path), str(tokenizer), vocab_size, tmp_path / "cache")

    refused(str(path))
    for content in (b"\xef\xbb\xbf \n\r\n", "A te".encode("utf-16-le"), b"caf\xe9"):
        path.write_bytes(content)
        refused(str(path))
    os.truncate(path, 10**9 + 1)  # no block of it is on the disk
    refused(str(path))
    path.write_text("A text.")
    refused("--vocab_size 5", vocab_size=5)
    refused("nowhere.json", tokenizer="nowhere.json")
    refused(str(plain), tokenizer=plain)


def test_a_folder_of_plain_texts_validates_on_the_end_of_each(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    for name in "abc":
        (notes / f"{name}.md").write_text(f"{name} " * 900 + f"{name.upper()} " * 100)
    with pytest.warns(UserWarning, match="3 of 3 files"):
        shards = open_shards(str(notes), "train", 300, tmp_path / "cache")
    folder = shards.train.paths[0].parent
    assert decoded(folder, "val").split("<|endoftext|>")[1:] == [f"{name} " * 100 for name in "ABC"]
    assert decoded(folder, "train").split("<|endoftext|>")[1:] == [f"{name} " * 900 for name in "abc"]
    assert_refused(str(notes), open_shards, str(notes), "gpt2", 300, tmp_path)


# -------------------------------------------------------------------------------------------------- tokenizers by name


def test_shards_bring_their_tokenizer(tmp_path, byte_tokenizer):
    tok = Tokenizer.load(byte_tokenizer)
    tok.save(tmp_path / "tokenizer.json")
    Tokenizer([(b"a", b"b")]).save(tmp_path / "other.json")
    write_shards(tmp_path, (50,))
    with_manifest(tmp_path, tokenizer=tok.fingerprint)
    for name in ("gpt2", "train", str(byte_tokenizer)):
        assert data_tokenizer(tmp_path, name).fingerprint == tok.fingerprint
    assert_refused(f"{tmp_path} .*other.json", data_tokenizer, tmp_path, str(tmp_path / "other.json"))


@pytest.fixture
def folder(tmp_path, byte_tokenizer) -> Path:
    """A folder of two shards with their tokenizer of 257 tokens."""
    folder = tmp_path / "shards"
    folder.mkdir()
    shutil.copy(byte_tokenizer, folder / "tokenizer.json")
    np.save(folder / "x_val_000000.npy", np.zeros(2500, np.uint16))
    np.save(folder / "x_train_000000.npy", np.zeros(10_000, np.uint16))
    return folder


def opened(folder: Path, tokenizer: str = "gpt2", vocab_size: int = 384):
    return open_shards(str(folder), tokenizer, vocab_size, folder)


@pytest.mark.parametrize("split", ["val", "train"])
def test_a_token_of_another_tokenizer_is_refused_at_the_start_although_the_model_has_room(folder, split):
    """Shard and token are named: as a validation target it would be an error in the middle of a run, and in
    the training split nobody would notice."""
    Tokenizer([], special_tokens={"<|endoftext|>": 300}).save(folder / "tokenizer.json")
    path = folder / f"x_{split}_000000.npy"
    for token in (299, 301):  # a gap, and one past the end
        np.save(path, np.full(2500, token, np.uint16))
        assert_refused(f"{path} .*{token}.*301", opened, folder)
    np.save(path, np.full(2500, 300, np.uint16))
    opened(folder)


def test_a_vocabulary_larger_than_the_model_is_refused(folder):
    assert_refused("--vocab_size.*256", opened, folder, vocab_size=256)


def test_what_a_person_should_know_of_shards_is_a_warning(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        opened(folder, vocab_size=768)
    with pytest.warns(UserWarning, match="769"):
        opened(folder, vocab_size=769)
    with_manifest(folder, **UNFINISHED, tokenizer=Tokenizer.load(folder).fingerprint)
    with pytest.warns(UserWarning, match=str(folder)):
        opened(folder)


def test_a_tokenizer_with_further_special_tokens_reads_the_same_shards(folder):
    """As GPT-2's with a [PAD]; one with another text, or another end of it, does not."""
    own = Tokenizer([(b"a", b"b")])
    own.save(folder)
    with_manifest(folder, tokenizer=own.fingerprint)
    padded = Tokenizer(own.merges, special_tokens=("<|endoftext|>", "[PAD]"))
    padded.save(folder / "padded.json")
    assert opened(folder, str(folder / "padded.json")).tokenizer.fingerprint == padded.fingerprint
    others = [Tokenizer(own.merges, "cl100k"), Tokenizer([(b"a", b"c")])]
    others += [Tokenizer(own.merges, special_tokens=("[PAD]", "<|endoftext|>"))]
    for other in others:
        other.save(folder / "other.json")
        assert_refused("other.json", opened, folder, str(folder / "other.json"))


def save_base(folder: Path, tok: Tokenizer) -> Path:
    save_model(folder, GPT(GPTConfig(n_positions=32, vocab_size=384, n_layer=2, n_head=2, n_embd=32)), tok)
    return folder


@pytest.mark.parametrize("named", [True, False])
def test_a_base_with_an_added_token_is_trained_on_the_shards_of_its_vocabulary(tmp_path, prepare, train, named):
    """With the tokenizer of the base, if that is named."""
    shards = prepare()
    tok = Tokenizer.load(shards)
    padded = Tokenizer(tok.merges, special_tokens=("<|endoftext|>", "[PAD]"))
    base = save_base(tmp_path / "base", padded)
    train(data=shards, init_from=base, max_steps=1, eval_interval=0, **dict(tokenizer=base) if named else {})
    saved = Tokenizer.load(tmp_path / "run/step_000001")
    assert saved.fingerprint == (padded if named else tok).fingerprint


def test_a_base_of_another_vocabulary_is_refused(tmp_path, prepare, train):
    base = save_base(tmp_path / "base", Tokenizer([(b"a", b"b")]))
    train.error(str(base), data=prepare(), init_from=base)


# ------------------------------------------------------------------------------------------------------- the manifest


NAMES = {"edu_fineweb10B": "edufineweb", "x_val 2.0": "x-val-2.0", "数据": "text"}


@pytest.mark.parametrize("folder, name", NAMES.items())
def test_the_name_of_a_folder_is_that_of_its_shards(tmp_path, folder, name):
    assert shard_name(tmp_path / folder) == name


# ------------------------------------------------------------------------------------------------------------ datatrove


def test_shards_of_datatrove_say_what_tokenized_them(tmp_path, byte_tokenizer):
    tokens = np.arange(100, dtype=np.uint16)
    for i in range(2):
        write_ds(tmp_path / f"{i:05d}.ds", tokens, str(byte_tokenizer))
    assert len(data_tokenizer(tmp_path, "gpt2")) == 257, "a path that exists is used"
    write_ds(tmp_path / "00001.ds", tokens, "openai-community/nowhere")
    assert_refused(str(byte_tokenizer), data_tokenizer, tmp_path, "gpt2")
    assert len(data_tokenizer(tmp_path, str(byte_tokenizer))) == 257, "what the user says counts"
    (tmp_path / "00001.ds.metadata").write_text("SmolLM2")
    assert_refused("00001.ds.metadata", data_tokenizer, tmp_path, "gpt2")
    shutil.copy(byte_tokenizer, tmp_path / "tokenizer.json")
    assert len(data_tokenizer(tmp_path, "gpt2")) == 257, "the tokenizer beside the shards counts"
