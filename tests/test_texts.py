"""Reading text: what `datasets` makes of files, folders and the hub; documents of a .txt; a line for what is wrong."""

import gzip
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parts.cli import UserError
from parts.texts import documents, open_texts, plain_texts, texts_of
from tests.corpora import make_documents
from tests.helpers import ROOT, assert_refused, damaged
from tests.hub import Hub, hub_environment


def lines(*docs, key: str = "text") -> bytes:
    return "".join(json.dumps({"id": n, key: doc}, ensure_ascii=False) + "\n" for n, doc in enumerate(docs)).encode()


def parquet(docs, key: str = "text", **options) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": range(len(docs)), key: docs}), buffer, **options)
    return buffer.getvalue().to_pybytes()


def arrow(docs: list, writer=pa.ipc.new_file) -> bytes:
    table = pa.table({"text": docs})
    buffer = pa.BufferOutputStream()
    with writer(buffer, table.schema) as file:
        file.write_table(table)
    return buffer.getvalue().to_pybytes()


def zst(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


def write(folder: Path, files: dict[str, bytes | Path]) -> Path:
    """The files, or links, in a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.symlink_to(content)
    return folder


def read(*source, **options) -> list[str]:
    batches = open_texts(tuple(map(str, source)), **options).batches()
    return [text for _, batch in batches for text in batch if text is not None]


# ------------------------------------------------------------------------------- a folder, and the hub's dataset of it

DOCS = make_documents(30)
OTHERS = [f"of another split {n}" for n in range(9)]
SUBSETS = b"""---
configs:
- config_name: raw
  data_files: [{split: train, path: raw/train*}, {split: test, path: raw/test*}]
- config_name: tokens
  data_files: tokens/*
---
"""
LAYOUTS = {
    "splits": {"data/train-00000-of-00002.parquet": parquet(DOCS[:20]), "LICENSE.txt": b"MIT",
               "data/train-00001-of-00002.parquet": parquet(DOCS[20:]),
               "data/validation-00000-of-00001.parquet": parquet(OTHERS)},
    "folders": {"train/a.jsonl": lines(*DOCS), "test/b.jsonl": lines(*OTHERS), "README.md": b"# A dataset"},
    "kinds": {"docs.jsonl": lines(*DOCS), "docs.csv": b"text\nnot this\n", "docs.parquet": parquet(DOCS)},
    "arrow": {"data-00000-of-00001.arrow": arrow(DOCS, pa.ipc.new_stream)},
    "zst": {"train.jsonl.zst": zst(lines(*DOCS[:9])) + zst(lines(*DOCS[9:])), "valid.jsonl.zst": zst(lines(*OTHERS))},
    "array": {"train.json": json.dumps([dict(text=doc) for doc in DOCS], indent=1).encode()},
    "delta": {f"{n}.parquet": parquet(docs, use_dictionary=False, column_encoding={"text": f"DELTA_{kind}BYTE_ARRAY"})
              for n, (docs, kind) in enumerate([(DOCS[:9], ""), (DOCS[9:], "LENGTH_")])},
    "card": {"README.md": SUBSETS, "raw/train.jsonl": lines(*DOCS), "raw/test.jsonl": lines(*OTHERS),
             "tokens/train.jsonl": lines("t o k e n s")},
}  # fmt: skip
SUBSET = {"card": "raw"}
ALL = {name: DOCS for name in LAYOUTS}
STORIES = {"TinyStories-train.txt": b"One.\n\nDay.\n<|endoftext|>\nTwo.\n<|endoftext|>\n\nThree.\n",
           "TinyStories-valid.txt": b"Not this.\n"}  # fmt: skip
BY_HUB_ID = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import datasets
from parts.texts import open_texts
for name, subset in json.loads(sys.argv[2]).items():
    options = dict(subset=subset) if subset else {}
    texts = open_texts(("some/" + name,), **options)
    read = [text for _, batch in texts.batches(downloads=Path(sys.argv[3])) for text in batch]
    rows = datasets.load_dataset("some/" + name, subset or None, split="train", streaming=True)
    print(json.dumps([name, read, [row["text"] for row in rows], texts.commit()]))
"""


@pytest.fixture(scope="module")
def by_hub_id(tmp_path_factory) -> dict:
    """{layout: (its documents by the id of a hub, its rows there in `datasets`, the commit)}."""
    folder = tmp_path_factory.mktemp("hub")
    for name, files in {**LAYOUTS, "stories": STORIES}.items():
        write(folder / name, files)
    wanted = json.dumps({name: SUBSET.get(name) for name in (*LAYOUTS, "stories")})
    home = tmp_path_factory.mktemp("home")
    with Hub(folder) as hub:
        words = [sys.executable, "-c", BY_HUB_ID, str(ROOT), wanted, str(home / "downloads")]
        env = hub_environment(hub.url, home)
        result = subprocess.run(words, env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-2000:]
    found = map(json.loads, result.stdout.splitlines())
    return {name: about for name, *about in found}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_means_what_the_hubs_dataset_means_and_what_datasets_reads(tmp_path, by_hub_id, layout):
    """Its training split, one subset, one kind of files."""
    import datasets

    folder = write(tmp_path / layout, LAYOUTS[layout])
    read_here = read(folder, subset=SUBSET.get(layout, ""))
    rows = datasets.load_dataset(str(folder), SUBSET.get(layout), split="train", streaming=True)
    assert read_here == [row["text"] for row in rows] == DOCS
    read_there, rows_there, commit = by_hub_id[layout]
    assert read_there == rows_there == DOCS
    assert commit == Hub.COMMIT


def test_tiny_stories_as_text_has_its_stories_here_and_on_the_hub(tmp_path, by_hub_id):
    """`datasets` reads lines of it."""
    stories = ["One.\n\nDay.\n", "Two.\n", "Three.\n"]
    assert read(write(tmp_path, STORIES)) == stories == by_hub_id["stories"][0]


def test_several_subsets_and_none_named_is_a_line_with_their_names(tmp_path):
    folder = write(tmp_path / "card", LAYOUTS["card"])
    assert_refused("has several subsets; give --subset one of 'raw', 'tokens'", open_texts, (str(folder),))
    assert read(folder, subset="raw", split="test") == OTHERS
    assert_refused("no split nowhere; give --split one of train, test", read, folder, subset="raw", split="nowhere")
    assert read(folder, subset="raw", split="train+test") == DOCS + OTHERS


# ----------------------------------------------------------------------------------------- documents in, documents out

A = lines("one", "two", "three")
B = lines("four", "five")
LINK = Path("a.jsonl")
ARRAY = json.dumps([{"text": "one"}, {"text": "two"}])
WORDS = pa.array(["one", "two", "one", None])
UTF_16 = "one two three".encode("utf-16")
HIDDEN = {"a.jsonl": A, ".b.jsonl": B, ".git/c.jsonl": B}
# {what: (files, how many documents come out, or the words of the error)}
INPUTS = {
    "hidden files and folders": (HIDDEN, 3),
    "a link to a file": ({"a.jsonl": A, "b.jsonl": LINK}, 3),
    "an array": ({"a.json": ARRAY.encode()}, 2),
    "commas after objects": ({"a.jsonl": A.replace(b"\n", b",\n")}, "cannot read .*a.jsonl: JSON parse error"),
    "objects over lines": ({"a.jsonl": A + b'{"text":\n"one"\n'}, "cannot read .*a.jsonl: JSON .* in row 3"),
    "a byte order mark": ({"a.jsonl": b"\xef\xbb\xbf" + A}, 3),
    "line ends of Windows": ({"a.jsonl": A.replace(b"\n", b"\r\n")}, 3),
    "other line separators": ({"a.jsonl": lines("a\u2028b\x85c", "d\x0ce")}, 2),
    "gzip of many members": ({"a.jsonl.gz": gzip.compress(A) + gzip.compress(B)}, 5),
    "gzip cut short": ({"a.jsonl.gz": gzip.compress(A * 999)[:-5]}, "a.jsonl.gz"),
    "nulls": ({"a.jsonl": lines("one", None)}, 1),
    "nulls in parquet": ({"a.parquet": parquet(WORDS)}, 3),
    "empty texts": ({"a.jsonl": lines("", "one", " ")}, 3),
    "special tokens in texts": ({"a.jsonl": lines("a<|endoftext|>b", "<|endoftext|>")}, 2),
    "some rows with another key": ({"a.jsonl": lines("one") + lines("two", key="body")}, 1),
    "another key": ({"a.jsonl": lines("one", key="body")}, "no 'text'; give --text_field one of id, body"),
    "another column": ({"a.parquet": parquet(["one"], "body")}, "a.parquet has no 'text'; .* one of id, body$"),
    "numbers": ({"a.parquet": parquet([1, 2])}, 0),
    "a broken line": ({"a.jsonl": A + b"{\n" + B}, "cannot read .*a.jsonl: JSON .* in row 3"),
    "a file that was cut short": ({"a.jsonl": A + b'{"text": "cut'}, "cannot read .*a.jsonl: JSON .* in row 3"),
    "paragraphs of Windows": ({"a.txt": b"x\r\n\r\ny\r\n\r\n\r\nz"}, 2),
    "UTF-16": ({"a.txt": UTF_16}, "a.txt: 'utf-8' codec can't decode"),
    "UTF-16 without a mark": ({"a.txt": UTF_16[2:]}, "a.txt begins with .* and is no plain text"),
    "another encoding": ({"a.txt": "研究生".encode("gb18030")}, "a.txt: 'utf-8' codec can't decode"),
    "gzip by another name": ({"a.jsonl": gzip.compress(A)}, "cannot read .*a.jsonl: JSON .* in row 0"),
    "parquet by another name": ({"a.jsonl": parquet(["one"])}, "cannot read .*a.jsonl: JSON .* in row 0"),
    "a web page": ({"a.txt": b"<!DOCTYPE html>\n<p>Log in"}, "a.txt begins with '<!DOCTYPE html>"),
    "a pointer of LFS": ({"a.txt": b"version https://git-lfs.github.com/spec/v1\n"}, "a.txt begins with 'version"),
    "text by the name of parquet": ({"a.parquet": b"not parquet"}, "cannot read .*a.parquet"),
    "C4": ({"c4-train.00000.json.gz": gzip.compress(lines("one", "two"))}, 2),
    "the Pile": ({"00.jsonl.zst": zst(b'{"text": "one", "meta": {"set": "x"}}\n')}, 1),
}  # fmt: skip


@pytest.mark.parametrize("what", INPUTS)
def test_documents_come_out_or_the_error_names_the_file(tmp_path, what):
    files, expected = INPUTS[what]
    folder = write(tmp_path / "folder", files)
    if isinstance(expected, str):
        assert_refused(expected, read, folder)
    else:
        assert len(read(folder)) == expected


@pytest.mark.parametrize("kind", ["ndjson", "jsonlines", "jsonl.zstd", "csv", "arrow"])
def test_other_endings_are_read_where_a_file_is_named(tmp_path, kind):
    content = dict(csv=b"n,text\n1,one\n2,two\n", arrow=arrow(["one", "two"]))
    content["jsonl.zstd"] = zst(lines("one", "two"))
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content.get(kind, lines("one", "two")))
    assert read(path) == ["one", "two"]


def test_rows_without_text_are_none_and_keep_their_place(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(WORDS))
    [(_, batch)] = open_texts((str(path),)).batches()
    assert batch == ["one", "two", "one", None]


NESTED = {"a.jsonl": A, "x/b.jsonl": B, "x/y/c.jsonl": B}


@pytest.mark.parametrize("patterns", [[""], ["**/*.jsonl"], ["x/b.jsonl", "", "x"], ["*.jsonl", "*/*.jsonl", "x"]])
def test_nested_documents_come_out_once_whatever_the_patterns(tmp_path, patterns):
    write(tmp_path, NESTED)
    assert sorted(read(*(f"{tmp_path}/{pattern}" for pattern in patterns))) == sorted(read(tmp_path))
    assert len(read(tmp_path)) == 7


def test_a_glob_of_several_kinds_is_refused_with_an_example_of_each(tmp_path):
    write(tmp_path, LAYOUTS["kinds"])
    assert_refused("several kinds, such as .*docs.csv, .*docs.jsonl, .*docs.parquet; give", read, tmp_path / "docs.*")
    assert read(tmp_path / "docs.csv", tmp_path / "docs.jsonl") == ["not this", *DOCS]


def test_what_is_left_out_is_counted_by_kind(tmp_path):
    write(tmp_path, HIDDEN | {"b.md": b"x", "c.md": b"y", "LICENSE": b"MIT" * 9999})
    assert_refused("cannot read ", read, tmp_path)  # `datasets` takes what most endings say
    (tmp_path / "d.jsonl").write_bytes(B)
    (tmp_path / "e.jsonl").write_bytes(B)
    [note] = open_texts((str(tmp_path),)).notes
    assert note == f"{tmp_path} without 3 files (2 .md, 1 LICENSE)"
    write(tmp_path / "x", {"a.jsonl": A})
    assert open_texts((str(tmp_path / "x"), str(tmp_path / "x/a.jsonl"))).notes == [
        "1 file named more than once, and read once"
    ]


@pytest.mark.parametrize("source", [(), ("",), ("absent.txt",), ("no/absent.jsonl",)])
def test_a_source_that_names_nothing_is_one_line(source):
    assert_refused("give files, a folder, a quoted glob, or OWNER/NAME", open_texts, source)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.jsonl.zst", "a.txt", "a.txt.gz", "a.arrow"])
def test_a_stream_continues_from_each_of_its_places(tmp_path, name):
    docs = [f"{n} " + doc.replace("\r", "") + "\n\n\n" for n, doc in enumerate(make_documents(300))]
    if ".txt" in name:
        content = "".join(docs).replace("\n", "\n \t").encode()
    elif name == "a.parquet":
        content = parquet(docs, row_group_size=100)
    else:
        content = arrow(docs) if name == "a.arrow" else lines(*docs)
    content = gzip.compress(content) if name.endswith("gz") else zst(content) if name.endswith("zst") else content
    path = tmp_path / name
    path.write_bytes(content)
    (tmp_path / "b.jsonl").write_bytes(lines(*docs[:70]))
    texts = open_texts((str(path), str(tmp_path / "b.jsonl")))
    batches = list(texts.batches())
    assert len(batches) > 6
    for n, (place, _) in enumerate(batches):
        again = list(texts.batches(json.loads(json.dumps(place))))
        assert [batch for _, batch in again] == [batch for _, batch in batches[n:]]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz"])
def test_a_damaged_file_gives_documents_or_one_error_with_its_name(tmp_path, kind):
    docs = make_documents(20)
    content = parquet(docs) if kind == "parquet" else "\n\n\n".join(docs).encode() if "txt" in kind else lines(*docs)
    whole = gzip.compress(content) if kind.endswith("gz") else zst(content) if kind.endswith("zst") else content
    rng = random.Random(kind)
    path = tmp_path / f"docs.{kind}"
    contents = damaged(whole) | {"cut short": whole[:-5], "zeros": bytes(len(whole))}
    for i in rng.choices(range(len(whole)), k=8):
        contents[f"byte {i} flipped"] = whole[:i] + bytes([whole[i] ^ 1 << rng.randrange(8)]) + whole[i + 1 :]
    for what, data in contents.items():
        path.write_bytes(data)
        try:
            read(path)
        except UserError as e:
            assert str(path) in str(e), what


# ---------------------------------------------------------------------------------------------------- documents of text

TEXTS = {
    "two blank lines": ("a\n\n\nb", ["a\n\n\n", "b"]),
    "one blank line": ("a\n\nb", ["a\n\nb"]),
    "blank lines with white space": ("a\n \t\n\u3000\nb", ["a\n \t\n\u3000\n", "b"]),
    "blank lines at the start": ("\n\n\na", ["a"]),
    "a blank line at the start": ("\na", ["\na"]),
    "nothing but blank lines": ("\n \n\n", []),
    "line ends of Windows": ("a\r\n\r\n\r\nb\r\n", ["a\n\n\n", "b\n"]),
    "CR alone": ("a\r\r\rb\r", ["a\n\n\n", "b\n"]),
    "<|endoftext|> on a line": ("a\n<|endoftext|>\nb\n <|endoftext|> \r\n\nc", ["a\n", "b\n", "c"]),
    "<|endoftext|> first and last": ("<|endoftext|>\na\n<|endoftext|>", ["a\n"]),
    "<|endoftext|> in a line": ("a <|endoftext|>\nb", ["a <|endoftext|>\nb"]),
}


@pytest.mark.parametrize("what", TEXTS)
def test_documents_of_a_text_are_the_same_for_training_and_for_shards(tmp_path, what):
    text, expected = TEXTS[what]
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert texts_of((tmp_path / "a.txt").read_text(encoding="utf-8")) == expected
    assert read(tmp_path / "a.txt") == expected


@given(st.text(alphabet="a \n\u3000中", max_size=60))
@example("a\n\n\n\nb\n\nc\n\n\n")
def test_documents_join_to_the_text_without_blank_lines_before_it(text):
    pieces = texts_of(text)
    assert text.endswith("".join(pieces))
    assert not text.removesuffix("".join(pieces)).strip()
    assert all(piece.strip() for piece in pieces)
    assert not any(re.search(r"\S[^\S\n]*\n([^\S\n]*\n){2,}[^\S\n]*[^\s]", piece) for piece in pieces)


def test_many_blank_lines_are_read_at_once():
    assert texts_of("a" + "\n" * 300_000 + "b") == ["a" + "\n" * 300_000, "b"]


def test_a_document_has_the_number_of_its_first_line():
    assert list(documents(["\n", "\n", "a\n", "\n", "\n", "b\n"], start=10)) == [(12, "a\n\n\n"), (15, "b\n")]


def test_a_long_text_of_one_document_is_said(tmp_path):
    for text, n in (("a\n" * 60_000, 1), ("a\n" * 40_000, 0), ("a\n" * 60_000 + "\n\nb", 0)):
        (tmp_path / "a.txt").write_text(text)
        texts = open_texts((str(tmp_path / "a.txt"),))
        list(texts.batches())
        assert len(texts.notes) == n
        assert all("a.txt is one document; to end documents" in note for note in texts.notes)


def test_a_folder_of_plain_texts_is_read_but_for_what_is_hidden_or_no_text(tmp_path):
    files = {"b.md": b"# Notes", "a/x.py": b"print()", "c.html": b"<p>hi", "e": b"\xef\xbb\xbfmarked"}
    files |= {"d.png": b"\x89PNG\xff" * 99, ".f.txt": b"hidden", ".git/g.txt": b"hidden", "h.txt": b" \n"}
    write(tmp_path, files)
    texts, notes = plain_texts(str(tmp_path))
    assert texts == ["# Notes", "<p>hi", "marked", "print()"]
    read, left_out = notes
    assert "4 files read as text (1 .md, 1 .html, 1 e, 1 .py)" in read
    assert "without 2 files (1 .png, 1 .txt)" in left_out
    (tmp_path / "empty").mkdir()
    assert_refused("no file of plain text", plain_texts, str(tmp_path / "empty"))
