"""What is left out, read otherwise than it may be meant, or cut off is said: texts, rows, tokenizers."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from bpe import train
from parts.conversations import load_rows
from parts.shards import prepare_text
from parts.texts import open_texts, rows_of
from tests.finetuning import row
from tests.helpers import assert_user_error, prose, write_json

ENDOFTEXT = "<|endoftext|>"


def read(path: Path) -> tuple[list[str], list[str]]:
    texts = open_texts((str(path),))
    return [text for _, batch in texts.batches() for text in batch], texts.notes


# ---- texts


@pytest.mark.parametrize("text, n", [(f"a{ENDOFTEXT}b", 1), (f"a\n{ENDOFTEXT} b\n\n\nc", 1), (f"a\n{ENDOFTEXT}\nb", 0)])
def test_an_end_of_text_inside_a_line_is_text_and_that_is_said(tmp_path, tokenizer, text, n):
    path = tmp_path / "a.txt"
    path.write_text(text * 9)  # also in the last tenth
    for notes in (read(path)[1], prepare_text(str(path), str(tokenizer), 600, tmp_path / "cache")[1]):
        assert [str(path) in note for note in notes] == [True] * n


def test_an_end_of_text_after_many_documents_is_said_too(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a word\n\n\n" * 80 + f"and {ENDOFTEXT} inside")
    texts, notes = read(path)
    assert len(texts) == 81
    assert [note.split(" has ")[0] for note in notes] == [str(path)]


def test_a_long_document_after_others_is_not_said_to_be_the_only_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a word\n\n\n" * 64 + "many words " * 20_000)
    assert read(path)[1] == []


def test_a_long_text_of_one_document_is_said_by_the_trainer_of_tokenizers_too(tmp_path, inline):
    (tmp_path / "a.txt").write_text(prose()[:50_000].replace("\n\n\n", "\n") * 3)
    result = inline(train.main, input=tmp_path / "a.txt", vocab_size=300, out=tmp_path / "out")
    assert "a.txt is one document" in result.stdout


def test_words_of_a_table_that_look_like_nothing_are_words(tmp_path):
    words = ["NA", "None", "null", "nan", "n/a", "#N/A"]
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f"{n},{word}\n" for n, word in enumerate(words)) + "7,\n")
    assert read(tmp_path / "a.csv")[0] == [*words, ""]
    assert [found["text"] for found in rows_of(str(tmp_path / "a.csv"))] == [*words, ""]
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.csv").rename(tmp_path / "folder/a.csv")
    assert read(tmp_path / "folder")[0] == [*words, ""]


# ---- rows


def test_files_of_a_folder_of_rows_that_are_not_read_are_counted(tmp_path, capsys):
    for name in ("train.json", "test.json", "extra.json"):
        write_json(tmp_path / name, [row("Hi", "Ho")])
    (tmp_path / "notes.csv").write_text("instruction,output\nHi,Ho\n")
    assert len(load_rows(str(tmp_path))[0]) == 1
    assert "without 3 files (2 .json, 1 .csv)" in capsys.readouterr().out


# ---- tokenizers


def test_a_full_disk_is_named_and_the_same_command_works_with_space(tmp_path, inline, monkeypatch):
    """At each of the files that a tokenizer has."""
    out = tmp_path / "out"
    plain = Path.write_text
    options = dict(input=tmp_path / "a.txt", vocab_size=300)
    (tmp_path / "a.txt").write_text(prose()[:20_000])
    assert inline(train.main, **options, out=tmp_path / "whole").returncode == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    for fits in range(len(files)):
        written = []

        def write(path, text, fits=fits, written=written, **options):
            written.append(path)
            if len(written) > fits:
                plain(path, text[:100])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return plain(path, text, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", write)
            result = inline(train.main, **options, out=out)
        assert_user_error(result, f"{out}: No space left on device; fix that")
        assert inline(train.main, **options, out=out).returncode == 0
        assert {path.name: path.read_bytes() for path in out.iterdir()} == files
        assert not (tmp_path / "out.1").exists()
        shutil.rmtree(out)
