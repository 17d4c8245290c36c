"""Reading text: what `datasets` makes of files, folders and the hub; documents of a .txt; a line for what is wrong."""

import csv
import gzip
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from parts.cli import UserError
from parts.texts import ENDOFTEXT, open_texts, plain_texts, rows_of, texts_of
from tests.corpora import make_documents
from tests.helpers import ROOT, assert_refused, damaged
from tests.hub import Hub, hub_environment


def lines(*docs, key: str = "text") -> bytes:
    return "".join(json.dumps({"id": n, key: doc}, ensure_ascii=False) + "\n" for n, doc in enumerate(docs)).encode()


def parquet(docs, key: str = "text", **options) -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": range(len(docs)), key: docs}), buffer, **options)
    return buffer.getvalue().to_pybytes()


def arrow(docs: list, writer=pa.ipc.new_stream) -> bytes:
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


def read_all(*source, **options) -> list[str | None]:
    """The text of each row, None for one without."""
    batches = open_texts(tuple(map(str, source)), **options).batches()
    return [text for _, batch in batches for text in batch]


def read(*source, **options) -> list[str]:
    return [text for text in read_all(*source, **options) if text is not None]


# ------------------------------------------------------------------------------- a folder, and the hub's dataset of it

DOCS = make_documents(30)
OTHERS = [f"of another split {n}" for n in range(9)]
SUBSETS = b"""---
configs:
- config_name: set_1
  data_files: [{split: train, path: raw/train*}, {split: split_2, path: raw/test*}]
- config_name: set_2
  data_files: tokens/*
---
"""
LAYOUTS = {
    "splits": {
        "data/train-00000-of-00002.parquet": parquet(DOCS[:20]),
        "data/train-00001-of-00002.parquet": parquet(DOCS[20:]),
        "data/validation-00000-of-00001.parquet": parquet(OTHERS),
        "LICENSE.txt": b"MIT",
    },
    "folders": {"train/a.jsonl": lines(*DOCS), "test/b.jsonl": lines(*OTHERS), "README.md": b"# A dataset"},
    "kinds": {"docs.jsonl": lines(*DOCS), "docs.csv": b"text\nnot this\n", "docs.parquet": parquet(DOCS)},
    "card": {
        "README.md": SUBSETS,
        "raw/train.jsonl": lines(*DOCS),
        "raw/test.jsonl": lines(*OTHERS),
        "tokens/train.jsonl": lines("t o k e n s"),
    },
}
SUBSET = {"card": "set_1"}
STORIES = {"TinyStories-train.txt": b"One.\n\nDay.\n<|endoftext|>\nTwo.\n<|endoftext|>\n\nThree.\n",
           "TinyStories-valid.txt": b"Not this.\n"}  # fmt: skip
BY_HUB_ID = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import datasets
from parts.cli import UserError
from parts.texts import open_texts
for name, subset in json.loads(sys.argv[2]).items():
    texts = open_texts(("some/" + name,), subset=subset)
    read = [text for _, batch in texts.batches(downloads=Path(sys.argv[3])) for text in batch]
    rows = datasets.load_dataset("some/" + name, subset or None, split="train", streaming=True)
    print(json.dumps([name, read, [row["text"] for row in rows], texts.commit()]))
try:
    open_texts(("no/body",))
except UserError as e:
    print(json.dumps(["no/body", str(e)]))
"""


@pytest.fixture(scope="module")
def by_hub_id(tmp_path_factory) -> dict:
    """{layout: (its documents by the id of a hub, its rows there in `datasets`, the commit)}."""
    folder = tmp_path_factory.mktemp("hub")
    for name, files in {**LAYOUTS, "stories": STORIES}.items():
        write(folder / name, files)
    wanted = json.dumps({name: SUBSET.get(name, "") for name in (*LAYOUTS, "stories")})
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


def test_a_name_that_the_hub_does_not_have_is_one_error(by_hub_id):
    assert "no/body" in by_hub_id["no/body"][0]


def test_tiny_stories_as_text_has_its_stories_here_and_on_the_hub(tmp_path, by_hub_id):
    """`datasets` reads lines of it."""
    stories = ["One.\n\nDay.\n", "Two.\n", "Three.\n"]
    assert read(write(tmp_path, STORIES)) == stories == by_hub_id["stories"][0]


def test_the_kind_that_a_folder_does_not_mean_is_named(tmp_path):
    folder = write(tmp_path / "folder", {"a.jsonl": A, "b.txt": b"b", "c.md": b"c"})
    with pytest.warns(UserWarning, match=f"{folder}.*text"):
        assert read(folder) == ONE


def test_several_subsets_and_none_named_is_a_line_with_their_names(tmp_path):
    folder = write(tmp_path / "card", LAYOUTS["card"])
    assert_refused("set_1.*set_2", read, folder)
    assert_refused("split_3.*split_2", read, folder, subset="set_1", split="split_3")
    assert read(folder, subset="set_1", split="train+split_2") == DOCS + OTHERS


# ----------------------------------------------------------------------------------------- documents in, documents out

A = lines("one", "two", "three")
B = lines("four", "five")
ONE = ["one", "two", "three"]
ARRAY = json.dumps([{"text": "one"}, {"text": "two"}], indent=1).encode()
# {what: (a file, its content, the documents that come out, None for an error that names the file, or its row)}
INPUTS = {
    "an array": ("a.json", b"\xef\xbb\xbf" + ARRAY, ["one", "two"]),
    "an array that was cut short": ("a.json", ARRAY[:-5], None),
    "byte order marks": ("a.jsonl", b"\xef\xbb\xbf" + A.replace(b"\n", b"\r\n\xef\xbb\xbf", 2), ONE),
    "gzip of many members": ("a.jsonl.gz", gzip.compress(A) + gzip.compress(B), [*ONE, "four", "five"]),
    "zstd of many frames": ("a.jsonl.zst", zst(A) + zst(B), [*ONE, "four", "five"]),
    "another key": ("a.jsonl", lines("one", key="body"), None),
    "UTF-16": ("a.txt", "one two".encode("utf-16"), None),
    "another encoding": ("a.txt", "研究生".encode("gb18030"), None),
    "a web page": ("a.txt", b"<!DOCTYPE html>\n<p>Log in", None),
    "a pointer of LFS": ("a.txt", b"version https://git-lfs.github.com/spec/v1\n", None),
    "a quote that is never closed": ("a.csv", b'text\n"one"\ntwo\n"three\n', 3),
}  # fmt: skip


@pytest.mark.parametrize("what", INPUTS)
def test_documents_come_out_or_the_error_names_the_file(tmp_path, what):
    name, content, expected = INPUTS[what]
    folder = write(tmp_path / "folder", {name: content})
    if isinstance(expected, list):
        assert read(folder) == expected
    else:
        row = rf".*\b{expected}\b" if expected else ""
        assert_refused(re.escape(name) + row, read, folder)


# ------------------------------------------------------------------------------------------------ rows without text

@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_rows_without_text_leave_their_neighbours_alone(tmp_path, kind):
    """With quotes, line ends and accents, which a reader of types writes otherwise where a column has two types."""
    docs = ['She said "naïve"\n\tand \\ left', "", " \u2028 ", "🙂"]
    odd = [1, 2.5, True, ["x"], {"text": "x"}, None, "\ud83d", "a\udc00"]
    rows = [dict(text=docs[0]), *(dict(text=text) for text in odd), *(dict(text=doc) for doc in docs[1:]), dict(id=1)]
    path = tmp_path / f"a.{kind}"
    path.write_text(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_bytes(lines(*docs))
    with pytest.warns(UserWarning, match=f"2 of {path}"):
        found = read_all(path, tmp_path / "b.jsonl")
    assert found == [docs[0], *[None] * len(odd), *docs[1:], None, *docs]


def test_columns_of_other_types_are_rows_without_text(tmp_path):
    for n, columns in enumerate([{"text": ["one"]}, {"text": [1, None]}, {"text": [["a"]]}, {"body": ["x"]}]):
        pq.write_table(pa.table(columns), tmp_path / f"{n}.parquet")
    assert read_all(f"{tmp_path}/*.parquet") == ["one", None, None, None, None]


def test_a_line_that_is_not_json_is_left_out_and_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "cut\n' + A + b"\0\0\n" + B + b'{"text": "caf\xe9"}')
    with pytest.warns(UserWarning, match=f"1 of {path}"):
        assert read_all(path) == [None, *ONE, None, "four", "five", None]


def test_a_row_with_more_fields_than_columns_is_left_out_and_named(tmp_path):
    """Its text may go on in the next field."""
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,one\n2,two, or\n3\n\n4,four\n")
    with pytest.warns(UserWarning, match=f"2 of {path}"):
        assert read_all(path) == ["one", None, None, "four"]


def test_an_empty_file_is_no_fault_wherever_it_stands(tmp_path):
    empty = {
        "no rows.parquet": parquet(pa.array([], pa.string())),
        "no bytes.parquet": b"",
        "a.jsonl": b"",
        "a.csv": b"",
        "a.txt": b"",
    }
    write(tmp_path, empty | {"one.jsonl": lines("one"), "two.jsonl": lines("two")})
    empty = [tmp_path / name for name in empty]
    one = tmp_path / "one.jsonl"
    two = tmp_path / "two.jsonl"
    for order in ([*empty, one, two], [one, *empty, two], [one, two, *empty]):
        assert read(*order) == ["one", "two"]


# --------------------------------------------------------------------------------------------------- formats and names

WORDS = ["one", "naïve 🙂", "a\nb", 'said "x", then', "NA", "null", "", "1", "\u2028", "tab\there"]


def table_of(docs: list[str], delimiter: str) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, delimiter=delimiter).writerows([("id", "text"), *enumerate(docs)])
    return buffer.getvalue().encode()


def test_all_formats_give_the_same_documents(tmp_path):
    contents = {
        "parquet": parquet(WORDS),
        "arrow": arrow(WORDS),
        "file.arrow": arrow(WORDS, pa.ipc.new_file),
        "jsonl.gz": gzip.compress(lines(*WORDS)),
        "jsonl.zst": zst(lines(*WORDS)),
        "json": json.dumps([dict(text=word) for word in WORDS]).encode(),
        "csv": table_of(WORDS, ","),
        "tsv": table_of(WORDS, "\t"),
    }
    for name, content in contents.items():
        path = tmp_path / f"a.{name}"
        path.write_bytes(content)
        assert read(path) == WORDS, name


@pytest.mark.parametrize("name", ["a[b]c", "{數據} *"])
def test_a_folder_may_have_any_name(tmp_path, name):
    folder = write(tmp_path / name, LAYOUTS["splits"])
    assert read(folder) == DOCS
    assert read(folder, split="validation") == OTHERS
    assert read(folder / "data/train-00000-of-00002.parquet") == DOCS[:20]


# ---------------------------------------------------------------------------------------------------------------- links


def test_links_to_files_are_read_once_and_links_to_folders_are_named(tmp_path):
    """A folder links to itself, to one in it and one elsewhere, to files and to nowhere."""
    write(tmp_path / "elsewhere", {"e.jsonl": lines("elsewhere"), "f.jsonl": lines("named")})
    files = {"a.jsonl": A, "x/b.jsonl": B, "y/c.jsonl": lines("six")}
    links = {"loop": ".", "x/y": "../y", "far": "../elsewhere", "gone.jsonl": "nowhere"}
    links |= {"f.jsonl": "../elsewhere/f.jsonl", "x/twice.jsonl": "../a.jsonl"}
    folder = write(tmp_path / "folder", files | {name: Path(target) for name, target in links.items()})
    (folder / "y/hard.jsonl").hardlink_to(folder / "a.jsonl")
    expected = [*ONE, "five", "four", "named", "six"]
    with pytest.warns(UserWarning) as notes:
        assert sorted(read(folder)) == sorted(expected)
        assert sorted(plain_texts(str(folder))) == sorted(map(bytes.decode, [A, B, lines("six"), lines("named")]))
    said = "\n".join(str(note.message) for note in notes)
    for name in ("loop", "x/y", "far", "gone.jsonl"):
        assert f"{folder}/{name} " in said
    assert sorted(read(f"{folder}/**/*.jsonl")) == sorted(expected)
    assert read(folder / "far") == ["elsewhere", "named"], "a linked folder that is named is read"


HIDDEN = {"a.jsonl": A, ".b.jsonl": B, ".git/c.jsonl": B, "x/b.jsonl": B, "x/y/c.jsonl": B}


@pytest.mark.parametrize("patterns", [["**/*.jsonl"], ["x/b.jsonl", "", "x"]])
def test_nested_documents_come_out_once_whatever_the_patterns(tmp_path, patterns):
    write(tmp_path, HIDDEN)
    assert sorted(read(*(f"{tmp_path}/{pattern}" for pattern in patterns))) == sorted([*ONE, *["five", "four"] * 2])


def test_a_source_that_names_nothing_is_one_line():
    assert_refused("no/absent.jsonl", read, "no/absent.jsonl")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.zst"])
def test_a_stream_continues_from_each_of_its_places(tmp_path, name):
    docs = make_documents(300)
    content = parquet(docs, row_group_size=100) if name == "a.parquet" else zst(lines(*docs))
    write(tmp_path, {name: content, "b.jsonl": lines(*docs[:70])})
    texts = open_texts((f"{tmp_path}/{name}", f"{tmp_path}/b.jsonl"))
    batches = list(texts.batches())
    assert len(batches) > 6
    for n, (place, _) in enumerate(batches):
        again = list(texts.batches(json.loads(json.dumps(place))))
        assert [batch for _, batch in again] == [batch for _, batch in batches[n:]]


@pytest.mark.parametrize("kind", ["parquet", "jsonl.zst", "txt.gz"])
def test_a_damaged_file_gives_documents_or_one_error_with_its_name(tmp_path, kind):
    docs = make_documents(20)
    wholes = {
        "parquet": parquet(docs),
        "jsonl.zst": zst(lines(*docs)),
        "txt.gz": gzip.compress("\n\n\n".join(docs).encode()),
    }
    whole = wholes[kind]
    path = tmp_path / f"docs.{kind}"
    for what, data in damaged(whole).items():
        path.write_bytes(data)
        try:
            read(path)
        except UserError as e:
            assert str(path) in str(e), what


# ---------------------------------------------------------------------------------------------------- documents of text

TEXTS = {
    "two blank lines": ("a\n\n\nb", ["a\n\n\n", "b"]),
    "blank lines with white space": ("a\n \t\n\u3000\nb", ["a\n \t\n\u3000\n", "b"]),
    "CR alone": ("a\r\r\rb\r", ["a\n\n\n", "b\n"]),
    "<|endoftext|> on a line": ("a\n<|endoftext|>\nb\n <|endoftext|> \r\n\nc", ["a\n", "b\n", "c"]),
}


@pytest.mark.parametrize("what", TEXTS)
def test_documents_of_a_text_are_the_same_for_training_and_for_shards(tmp_path, what):
    text, expected = TEXTS[what]
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert texts_of((tmp_path / "a.txt").read_text(encoding="utf-8")) == expected
    assert read(tmp_path / "a.txt") == expected


def test_an_end_inside_a_line_is_named(tmp_path):
    (tmp_path / "a.txt").write_text(f"a {ENDOFTEXT} b")
    with pytest.warns(UserWarning, match="a.txt "):
        open_texts((str(tmp_path / "a.txt"),))


def test_a_folder_of_plain_texts_is_read_but_for_what_is_hidden_or_no_text(tmp_path):
    files = {"b.md": b"# Notes", "a/x.py": b"print()", "c.html": b"<p>hi", "e": b"\xef\xbb\xbfmarked"}
    files |= {"d.png": b"\x89PNG\xff" * 99, ".f.txt": b"hidden", ".git/g.txt": b"hidden", "h.txt": b" \n"}
    write(tmp_path, files)
    with pytest.warns(UserWarning) as notes:
        texts = plain_texts(str(tmp_path))
    assert texts == ["# Notes", "<p>hi", "marked", "print()"]
    assert {"4", "6"} <= set(re.findall(r"\d+", str(notes[0].message)))
    (tmp_path / "empty").mkdir()
    assert_refused("empty", plain_texts, str(tmp_path / "empty"))


# --------------------------------------------------------------------------------- all rows of a small dataset

@pytest.mark.parametrize("content", [b"\n\n", b"[]", b"<html>log in first</html>", b"1" * 5000], ids=len)
def test_a_file_without_rows_is_one_error(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert_refused(r"--my_rows.*rows\.jsonl", rows_of, str(tmp_path / "rows.jsonl"), "train", "--my_rows")


def test_what_is_not_a_file_names_the_option(tmp_path):
    assert_refused("--my_rows", rows_of, str(tmp_path / "absent.json"), "train", "--my_rows")


def test_without_a_network_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert_refused("--my_rows.*some/rows", rows_of, "some/rows", "train", "--my_rows")
