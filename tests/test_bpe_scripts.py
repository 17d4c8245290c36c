"""bpe/train.py, bpe/try_tokenizer.py and bpe/README.md as a reader meets them."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from bpe import train, try_tokenizer
from bpe.tokenizer import Tokenizer, visible
from parts.files import set_aside
from tests.helpers import (
    ROOT,
    assert_user_error,
    command,
    environment,
    needs_gpt2,
    prose,
    succeed,
    write_lines,
)
from tests.hub import Hub, hub_environment

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

    from transformers import AutoTokenizer

    result = succeed("bpe/train.py", cwd=tmp_path)
    tok = Tokenizer.load(tmp_path / "out/bpe")
    assert len(tok) == 1024
    assert tok.eot_token == 1023
    assert not result.stderr
    printed = re.findall(r"^ *([\d,]+) +([\d,]+) x   (.*) \+ (.*)  →  (.*)$", result.stdout, re.M)
    numbers = [int(row[0].replace(",", "")) for row in printed]
    assert numbers == [*range(1, 21), *range(30, 100, 10), *range(100, 767, 100)]
    for n, _, a, b, ab in printed:
        first, second = tok.merges[int(n.replace(",", "")) - 1]
        assert (a, b, ab) == (visible(first), visible(second), visible(first + second))
    counts = [int(row[1].replace(",", "")) for row in printed]
    assert counts == sorted(counts, reverse=True)
    assert AutoTokenizer.from_pretrained(tmp_path / "out/bpe")("研究生")["input_ids"] == tok.encode("研究生")


@pytest.mark.slow
def test_the_tokenizer_is_written_also_if_nobody_reads_to_the_end(tmp_path):
    with subprocess.Popen(command("bpe/train.py"), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE) as run:
        run.stdout.readline()
        run.stdout.close()  # as `| head -1` does
    assert run.returncode == 0
    assert len(Tokenizer.load(tmp_path / "out/bpe")) == 1024


def test_compression_is_measured_on_text_that_was_held_out(run_train, tmp_path):
    out = run_train().stdout
    tok = Tokenizer.load(tmp_path / "out")
    split = train.Split(iter([MANUAL]))
    trained = "".join(split)
    held_out = "".join(split.held_out)
    assert trained + held_out == MANUAL
    assert len(trained) == MANUAL.index("\n", len(MANUAL) * 9 // 10) + 1
    assert Tokenizer.train([trained], 1024).merges == tok.merges
    n = len(tok.encode(held_out))
    table = re.findall(r"^ +([\d,]+) +([\d.]+) +([\d.]+)$", out, re.M)
    assert [row[0] for row in table] == ["256", "512", "1,023"]
    assert table[0][1] == "1.00"
    longest = sorted((a + b for a, b in tok.merges), key=len)[-20:]
    for said in (
        f"1,024 tokens from {len(trained.encode()):,} bytes",
        f"of {len(held_out):,} characters",
        " ".join(map(visible, longest)) + "\n",
    ):
        assert said in out
    assert table[-1] == ("1,023", f"{len(held_out.encode()) / n:.2f}", f"{len(held_out) / n:.2f}")


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


def test_the_next_command_can_be_pasted_whatever_the_name(run_train, tmp_path):
    (tmp_path / "a.txt").write_text("spring has come " * 50)
    out = tmp_path / "it's my (tokenizer)"
    printed = run_train("--input", tmp_path / "a.txt", "--vocab_size", 262, "--out", out).stdout
    assert shlex.split(printed.splitlines()[-1])[-1] == str(out)
    assert Tokenizer.load(out)


def test_an_old_tokenizer_is_renamed_and_never_deleted(run_train, tmp_path):
    (tmp_path / "a.txt").write_text("spring has come " * 50)
    words = ["--input", tmp_path / "a.txt", "--vocab_size"]
    assert run_train(*words, 262).returncode == 0
    assert_user_error(run_train(*words, 263), "--overwrite")
    out = tmp_path / "out"
    assert f"{out}.1" in run_train(*words, 263, "--overwrite").stdout
    assert [len(Tokenizer.load(tmp_path / name)) for name in ("out.1", "out")] == [262, 263]


def test_what_is_set_aside_takes_the_next_free_number(tmp_path):
    for n in range(3):
        (tmp_path / "out").mkdir()
        (tmp_path / "out/file").write_text(str(n))
        if n == 1:
            (tmp_path / "out.2").symlink_to("nowhere")  # taken, even if it leads nowhere
        assert set_aside(tmp_path / "out") == tmp_path / f"out.{(1, 3, 4)[n]}"
    assert [(tmp_path / f"out.{n}" / "file").read_text() for n in (1, 3, 4)] == ["0", "1", "2"]


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
    "bad.parquet": b"not parquet",
    "null.jsonl": b'{"text": null}\n',
    "odd.jsonl": b'{"other": "a"}\n{"text": \n',
    "other.jsonl": b'{"body": "one"}',
}
WRONG = [
    (["--input", "nowhere.txt"], "nowhere.txt"),
    (["--input", "empty.txt"], "empty.txt"),
    (["--input", "gb.txt"], "gb.txt"),
    (["--input", "bad.parquet"], "bad.parquet"),
    (["--input", "null.jsonl"], "null.jsonl"),
    (["--input", "odd.jsonl"], "odd.jsonl"),
    (["--input", "other.jsonl"], "body"),
    (["--input", "gb.txt", "--out", "gb.txt/x"], "gb.txt/x"),
    (["--vocab_size", "256"], "256"),
    (["--pattern", "("], "("),
    (["--special_tokens", "§"], "§"),
    (["--special_tokens", ""], ""),
    (["--vocab_sise", "300"], "--vocab_size"),
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


def test_an_input_that_is_named_twice_is_read_once(run_train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        Path(name).mkdir()
        (Path(name) / "a.txt").write_text(f"{name} spring has come " * 50)
    once = run_train("--input", "one", "two", "--vocab_size", 262).stdout
    words = ["--input", "one", "two/a.txt", "*/a.txt", "./one/../two", "--vocab_size", 262, "--overwrite"]
    again = run_train(*words).stdout
    [n_bytes] = re.findall(r"tokens from ([\d,]+) bytes", once)
    assert f"tokens from {n_bytes} bytes" in again


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_downloaded_as_far_as_it_is_read(tmp_path):
    texts = MANUAL.split("\n\n")
    folder = tmp_path / "hub/corpus/some/folder"
    folder.mkdir(parents=True)
    for i in range(5):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts[i::5]}), folder / f"{i}.parquet")
    words = dict(input="some/corpus/some/folder", max_bytes=30_000, vocab_size=400, out=tmp_path / "out")
    with Hub(tmp_path / "hub") as hub:
        succeed("bpe/train.py", **words, env=hub_environment(hub.url, tmp_path / "home"))
    ahead = {f"corpus/some/folder/{i}.parquet" for i in range(4)}
    assert {*hub.downloads()} <= ahead  # what was read, and two more
    kept = list(train.Split(train.limit((text for i in range(5) for text in texts[i::5]), 30_000)))
    assert Tokenizer.load(tmp_path / "out").fingerprint == Tokenizer.train(kept, 400).fingerprint
    assert not list((tmp_path / "out").rglob("0.parquet"))


# ---- try_tokenizer.py


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train([MANUAL], 800).save(path / "zh")
    Tokenizer.train([prose(50_000)], 800).save(path / "en")
    return path


def test_the_script_shows_the_tokenizer_that_train_py_writes(saved, tmp_path):
    """As a user starts it, in another directory, with nothing but what it is compared with."""
    shutil.copytree(saved / "zh", tmp_path / "out/bpe")
    printed = succeed("bpe/try_tokenizer.py", compare=saved / "en", cwd=tmp_path).stdout
    tok = Tokenizer.load(saved / "zh")
    for text in (try_tokenizer.ENGLISH, try_tokenizer.CHINESE):
        title, pieces = try_tokenizer.split_up("out/bpe", tok, text)
        assert f"{title}\n{'|'.join(pieces)}\n" in printed


def test_two_tokenizers_side_by_side(run_try, saved, monkeypatch):
    result = run_try("--tokenizer", saved / "zh", "--compare", saved / "en")
    assert result.returncode == 0, result.stderr
    for name in ("zh", "en"):
        tok = Tokenizer.load(saved / name)
        for text in (try_tokenizer.ENGLISH, try_tokenizer.CHINESE):
            n = len(tok.encode(text))
            line = f"{saved / name} (800 tokens): {n} tokens, {len(text.encode()) / n:.2f} bytes"
            assert f"{line} and {len(text) / n:.2f} characters per token\n" in result.stdout
    assert "\x1b" not in result.stdout
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "\x1b[48;2;147;203;160m\x1b[30m" in run_try("--tokenizer", saved / "en").stdout


def test_tokens_are_shown_as_text_with_dots_for_parts_of_characters():
    tok = Tokenizer((), special_tokens=())
    assert try_tokenizer.split_up("x", tok, "a中\n")[1] == ["a", "·", "·", "中", "⏎"]
    tok = Tokenizer.train([MANUAL], 800)
    pieces = try_tokenizer.split_up("x", tok, MANUAL[:500])[1]
    assert "".join(p for p in pieces if p != "·") == MANUAL[:500].replace("\n", "⏎")


@pytest.mark.parametrize("argv", [["--compare", "nowhere"], ["--compare", "README.md"], ["--tokenizer", "out/bpe"]])
def test_what_cannot_be_shown_is_said_in_one_line(run_try, saved, argv):
    Path("README.md").touch()
    assert_user_error(run_try("--tokenizer", saved / "zh", "--compare", saved / "en", *argv), argv[1])


def test_long_texts_and_bytes_that_are_no_utf8_are_shown(run_try, saved):
    argv = ["--tokenizer", saved / "zh/tokenizer.json", "--compare", saved / "zh"]
    result = run_try(*argv, "--english", "a\udcff $x$ \\frac " + "x" * 30_000, "--chinese", "")
    assert result.returncode == 0, result.stderr


def test_without_gpt2_the_other_tokenizer_is_still_shown(run_try, saved, offline):
    result = run_try("--tokenizer", saved / "zh")
    assert result.stdout.startswith("note: ")
    assert "800 tokens" in result.stdout


# ---- README.md


@needs_gpt2
def test_the_code_of_the_readme_prints_what_it_says(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "bpe/README.md").read_text(encoding="utf-8")
    namespace = {}
    blocks = re.findall(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", text, re.S)
    for code, expected in blocks:
        exec(code, namespace)
        assert capsys.readouterr().out == expected
    assert len(blocks) == 14


def test_the_readme_shows_the_code_of_minimal_py():
    text = (ROOT / "bpe/README.md").read_text(encoding="utf-8")
    code = (ROOT / "bpe/minimal.py").read_text(encoding="utf-8")
    shown = re.findall(r"```py\n(.*?)```", text, re.S)
    assert shown
    assert all(part in code for block in shown for part in block.split("\n\n\n"))
    assert text.index("minimal.py") < text.index("tokenizer.py")
