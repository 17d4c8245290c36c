"""What is left out, read otherwise than it may be meant, or cut off is said: texts, rows, tokenizers."""

import errno
import os
from pathlib import Path

import pytest

from bpe import train
from bpe.tokenizer import Tokenizer
from parts.shards import prepare_text
from parts.texts import open_texts, rows_of
from tests.helpers import assert_user_error, prose

ENDOFTEXT = "<|endoftext|>"


def read(path: Path) -> list[str]:
    return [text for _, batch in open_texts((str(path),)).batches() for text in batch]


# ---- texts


@pytest.mark.parametrize("text, n", [(f"a{ENDOFTEXT}b", 1), (f"a\n{ENDOFTEXT} b\n\n\nc", 1), (f"a\n{ENDOFTEXT}\nb", 0)])
def test_an_end_of_text_inside_a_line_is_text_and_that_is_said(tmp_path, tokenizer, text, n, recwarn):
    path = tmp_path / "a.txt"
    path.write_text(text * 9)  # also in the last tenth
    prepare_text(str(path), str(tokenizer), 600, tmp_path / "cache")
    assert [str(path) in str(note.message) for note in recwarn] == [True] * n


def test_words_of_a_table_that_look_like_nothing_are_words(tmp_path):
    words = ["NA", "None", "null", "nan", "n/a", "#N/A"]
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f"{n},{word}\n" for n, word in enumerate(words)) + "7,\n")
    assert read(tmp_path / "a.csv") == [*words, ""]
    assert [found["text"] for found in rows_of(str(tmp_path / "a.csv"))] == [*words, ""]
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.csv").rename(tmp_path / "folder/a.csv")
    assert read(tmp_path / "folder") == [*words, ""]


# ---- tokenizers

def test_a_full_disk_is_named_and_the_same_command_works_with_space(tmp_path, inline, monkeypatch):
    """At the last of the files that a tokenizer has."""
    out = tmp_path / "out"
    real = Path.write_text
    options = dict(input=tmp_path / "a.txt", vocab_size=300, out=out)
    (tmp_path / "a.txt").write_text(prose(20_000))

    def write(path, text, **options):
        real(path, text[:100], **options)
        if path.suffix == ".tiktoken":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write)
        assert_user_error(inline(train.main, **options), f"{out}: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]  # nothing half written
    assert inline(train.main, **options).returncode == 0
    assert Tokenizer.load(out).decode(range(300))
