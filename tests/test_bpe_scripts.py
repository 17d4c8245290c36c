"""bpe/train.py, bpe/try_tokenizer.py and bpe/README.md as a reader meets them."""

import re
from pathlib import Path

import pytest

from bpe import train, try_tokenizer
from bpe.tokenizer import Tokenizer, visible
from tests.helpers import (
    ROOT,
    assert_user_error,
    needs_gpt2,
    prose,
    succeed,
    write_lines,
)

MANUAL = (ROOT / "bpe/manual.txt").read_text(encoding="utf-8")


@pytest.fixture
def run_train(tmp_path, inline):
    """bpe/train.py in this process: run_train("--input", file, ...); the tokenizer goes to tmp_path / "out"."""
    return lambda *argv: inline(train.main, "--out", tmp_path / "out", *argv)


@pytest.fixture
def run_try(tmp_path, inline, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *argv: inline(try_tokenizer.main, *argv)


# ---- train.py


def test_the_default_run_as_a_user_starts_it(tmp_path):
    """In another directory, so that nothing depends on where it is started."""
    result = succeed("bpe/train.py", cwd=tmp_path)
    tok = Tokenizer.load(tmp_path / "out/bpe")
    assert (len(tok), tok.eot_token) == (1024, 1023)
    assert not result.stderr
    for n in (1, 20, 30, 700):
        a, b = tok.merges[n - 1]
        assert re.search(rf" {n} .*{re.escape(f'{visible(a)} + {visible(b)}  →  {visible(a + b)}')}\n", result.stdout)


def test_compression_is_measured_on_text_that_was_held_out(run_train, tmp_path):
    out = run_train("--vocab_size", 512).stdout
    tok = Tokenizer.load(tmp_path / "out")
    split = train.Split(iter([MANUAL]))
    trained = "".join(split)
    held_out = "".join(split.held_out)
    assert trained + held_out == MANUAL
    assert len(trained) == MANUAL.index("\n", len(MANUAL) * 9 // 10) + 1
    assert Tokenizer.train([trained], 512).merges == tok.merges
    n = len(tok.encode(held_out))
    table = re.findall(r"^ +([\d,]+) +([\d.]+) +([\d.]+)$", out, re.M)
    assert [row[0] for row in table] == ["256", "511"]
    assert table[-1] == ("511", f"{len(held_out.encode()) / n:.2f}", f"{len(held_out) / n:.2f}")


@pytest.mark.parametrize("n, size, kept, held", [(95, 0.75, 93, 2 * 0.75), (10, 0.75, 9, 0.75), (8, 2, 8, 1)])
def test_of_many_texts_every_tenth_is_held_out_until_there_are_enough_and_of_few_the_ends(n, size, kept, held):
    split = train.Split(iter(["x" * int(train.HELD_OUT * size)] * n))
    assert len(list(split)) == kept
    assert sum(map(len, split.held_out)) == train.HELD_OUT * held


def test_no_directory_that_holds_others_becomes_a_tokenizer(tmp_path, run_train, monkeypatch):
    (tmp_path / "out" / "of somebody").mkdir(parents=True)
    assert_user_error(run_train("--overwrite"), str(tmp_path / "out"))
    (tmp_path / "out" / "of somebody").rmdir()
    monkeypatch.chdir(tmp_path / "out")
    assert_user_error(run_train("--overwrite"), str(tmp_path / "out"))


def test_an_old_tokenizer_is_renamed_and_never_deleted(run_train, tmp_path):
    (tmp_path / "a.txt").write_text("spring has come " * 50)
    words = ["--input", tmp_path / "a.txt", "--vocab_size"]
    assert run_train(*words, 262).returncode == 0
    assert_user_error(run_train(*words, 263), "--overwrite")
    out = tmp_path / "out"
    assert f"{out}.1" in run_train(*words, 263, "--overwrite").stdout
    assert [len(Tokenizer.load(tmp_path / name)) for name in ("out.1", "out")] == [262, 263]


def test_options_reach_the_trainer(run_train, tmp_path):
    texts = MANUAL.split("\n\n")
    specials = ["<|user|>", "<|end|>"]
    write_lines(tmp_path / "a.jsonl", [dict(body=text) for text in texts])
    options = ["--vocab_size", "5_000", "--pattern", "cl100k", "--tie_break", "greatest_bytes", "--max_bytes", "9_999"]
    kept = list(train.Split(train.limit(iter(texts), 9_999)))
    with pytest.warns(UserWarning, match="5000"):
        run_train("--input", tmp_path / "a.jsonl", "--text_field=body", *options, "--special_tokens", *specials)
        expected = Tokenizer.train(kept, 5000, "cl100k", specials, "greatest_bytes")
    assert Tokenizer.load(tmp_path / "out").fingerprint == expected.fingerprint


FILES = {
    "empty.txt": b"",
    "gb.txt": "研究生".encode("gb18030"),
    "odd.jsonl": b'{"other": "a"}\n{"text": \n',
    "other.jsonl": b'{"body": "one"}',
}
WRONG = [
    (["--input", "empty.txt"], "empty.txt"),
    (["--input", "gb.txt"], "gb.txt"),
    (["--input", "odd.jsonl"], "odd.jsonl"),
    (["--input", "other.jsonl"], "body"),
    (["--input", "gb.txt", "--out", "gb.txt/x"], "gb.txt/x"),
    (["--vocab_size", "256"], "256"),
    (["--pattern", "("], "("),
    (["--special_tokens", "§"], "§"),
]


@pytest.mark.parametrize("argv, word", WRONG)
def test_what_is_wrong_is_said_in_one_line(run_train, tmp_path, monkeypatch, argv, word):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    assert_user_error(run_train(*argv), word)
    assert not any((tmp_path / "out").glob("*"))


def test_documents_that_are_left_out_are_counted_and_named(run_train, tmp_path):
    rows = [dict(text="spring has come"), dict(text=None), dict(text=""), dict(body="x"), dict(text="so it has")]
    write_lines(tmp_path / "a.jsonl", rows)
    with pytest.warns(UserWarning, match="row 2 of .*a.jsonl"):
        printed = run_train("--input", tmp_path / "a.jsonl", "--vocab_size", 258).stdout
    assert re.search(r"skipped.* 2 ", printed)


# ---- try_tokenizer.py


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train([MANUAL], 800).save(path / "zh")
    Tokenizer.train([prose(50_000)], 800).save(path / "en")
    return path


def test_two_tokenizers_side_by_side(run_try, saved):
    result = run_try("--tokenizer", saved / "zh", "--compare", saved / "en")
    assert result.returncode == 0, result.stderr
    for name in ("zh", "en"):
        tok = Tokenizer.load(saved / name)
        for text in (try_tokenizer.ENGLISH, try_tokenizer.CHINESE):
            title, pieces = try_tokenizer.split_up(str(saved / name), tok, text)
            assert f"{title}\n{'|'.join(pieces)}\n" in result.stdout
            n = len(tok.encode(text))
            assert {f"{n}", f"{len(text.encode()) / n:.2f}", f"{len(text) / n:.2f}"} <= set(title.split())


def test_tokens_are_shown_as_text_with_dots_for_parts_of_characters():
    tok = Tokenizer((), special_tokens=())
    assert try_tokenizer.split_up("x", tok, "a中\n")[1] == ["a", "·", "·", "中", "⏎"]


@pytest.mark.parametrize("argv", [["--compare", "nowhere"], ["--tokenizer", "out/bpe"]])
def test_what_cannot_be_shown_is_said_in_one_line(run_try, saved, argv):
    assert_user_error(run_try("--tokenizer", saved / "zh", "--compare", saved / "en", *argv), argv[1])


def test_without_gpt2_the_other_tokenizer_is_still_shown(run_try, saved, offline):
    result = run_try("--tokenizer", saved / "zh", "--english", "a\udcff", "--chinese", "")
    assert result.stdout.startswith("note: ")
    assert "\na|" in result.stdout


# ---- README.md


@needs_gpt2
@pytest.mark.slow
def test_the_code_of_the_readme_prints_what_it_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "bpe/README.md").read_text(encoding="utf-8")
    namespace = {}
    blocks = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", text, re.S)
    for code, expected in blocks:
        exec(code, namespace)
        assert capsys.readouterr().out == expected
    assert len(blocks) > 5


def test_the_readme_shows_the_code_of_minimal_py():
    text = (ROOT / "bpe/README.md").read_text(encoding="utf-8")
    code = (ROOT / "bpe/minimal.py").read_text(encoding="utf-8")
    shown = re.findall(r"```py\n(.*?)```", text, re.S)
    assert shown
    assert all(part in code for block in shown for part in block.split("\n\n\n"))
