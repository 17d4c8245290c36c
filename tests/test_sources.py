"""Reading text: the same documents from every format, however it is cut; one line for whatever is wrong with a file."""

import errno
import gzip
import hashlib
import json
import random
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.constants import ENDPOINT
from hypothesis import example, given
from hypothesis import strategies as st

from parts import sources
from parts.cli import UserError
from parts.sources import (
    Source,
    SourceFile,
    decode,
    documents,
    documents_of,
    download,
    find_source,
    hub_errors,
    units_of,
)
from tests.corpora import make_documents
from tests.helpers import assert_refused, damaged, table

KINDS = ["parquet", "one_group.parquet", "words.parquet", "jsonl", "jsonl.gz", "jsonl.zst", "json.gz"]


def compress(path: Path, data: bytes) -> Path:
    if path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as f:
            f.write(data)
    else:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write(path: Path, docs: list[str]) -> Path:
    """A file of the kind that its name says."""
    if path.name.endswith("words.parquet"):
        pq.write_table(pa.table({"text": pa.array(docs).dictionary_encode()}), path, row_group_size=7)
    elif path.suffix == ".parquet":
        rows = 1000 if path.name.endswith("one_group.parquet") else 7
        pq.write_table(pa.table({"text": docs, "id": list(range(len(docs)))}), path, row_group_size=rows)
    else:
        lines = [json.dumps({"id": 1, "text": doc}, ensure_ascii=i % 2 == 0) + "\n" for i, doc in enumerate(docs)]
        compress(path, "".join(lines).encode())
    return path


def read(path: Path, **options) -> tuple[list[str], list[str]]:
    """All documents of a file, and the reasons for which others were skipped."""
    docs, reasons = [], []
    for unit in units_of(path, "text", **options):
        texts = [text for text, reason in documents_of(unit, "text") if not reason]
        reasons += [reason for text, reason in documents_of(unit, "text") if text is None]
        docs += [docs.pop() + texts.pop(0), *texts] if unit.continued and docs else texts
    return docs, reasons


# ---------------------------------------------------------------------------------------------------- same documents


@pytest.mark.parametrize("unit_bytes", [500, 20_000, 10**9])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_documents_however_it_is_cut(tmp_path, monkeypatch, kind, unit_bytes):
    monkeypatch.setattr(sources, "UNIT_BYTES", unit_bytes)
    docs = make_documents()
    path = write(tmp_path / f"docs.{kind}", docs)
    assert read(path) == (docs, [])
    n = len(list(units_of(path, "text")))
    assert n == (9 if kind in ("parquet", "words.parquet") else 1) if unit_bytes == 10**9 else n > 3  # row groups


@pytest.mark.parametrize("kind", ["one_group.parquet", "parquet", "jsonl.gz", "txt"])
def test_no_unit_is_much_larger_than_it_should_be(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "UNIT_BYTES", 30_000)
    docs = make_documents(400)
    path = tmp_path / f"docs.{kind}"
    write(path, docs) if kind != "txt" else path.write_text("\n\n\n\n".join(docs))
    sizes = [sum(len(text.encode()) for text, _ in documents_of(unit, "text")) for unit in units_of(path, "text")]
    assert len(sizes) > 10 and max(sizes) < 4 * 30_000


# ---------------------------------------------------------------------------------------------------------- .txt files


@given(st.text(alphabet="a \r\n\u3000中", max_size=60))
@example("a\n\n\n\nb\n\nc\n\n\n")
@example("\r\n\r\n\r\na\r\n\r\n\r\n\r\nb")
def test_two_blank_lines_end_a_document(text):
    pieces = documents(text)
    assert "".join(pieces) == text and "" not in pieces
    unix = re.sub(r"\r\n", "\n", text)
    expected = [piece for piece in re.split(r"(?<=\n\n\n)(?!\n)", unix) if piece]
    assert [re.sub(r"\r\n", "\n", piece) for piece in pieces] == expected


def test_millions_of_blank_lines_are_read_at_once():
    assert documents("a" + "\n" * 3_000_000 + "b") == ["a" + "\n" * 3_000_000, "b"]


@pytest.mark.parametrize("name", ["docs.txt", "docs.txt.gz", "docs.jsonl", "docs.jsonl.zst"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    data = b"one" if "txt" in name else b'{"text": "one"}\r\n{"text": "two"}\r\n'
    path = compress(tmp_path / name, b"\xef\xbb\xbf" + data)
    assert read(path) == (["one"] if "txt" in name else ["one", "two"], [])


# ------------------------------------------------------------------------------------------------------ what is wrong


def test_lines_without_text_are_skipped_with_the_reason(tmp_path):
    deep = "[" * 100_000 + "]" * 100_000
    lines = [
        '{"text": "one"}', "", '{"text": null}', '{"text": 5}', '{"other": 1}', "{broken", "[1]",
        f'{{"text": {deep}}}', f'{{"text": {"9" * 5000}}}', '{"text": "a lone \\ud800 surrogate"}', '{"text": NaN}',
    ]  # fmt: skip
    path = tmp_path / "docs.jsonl"
    path.write_bytes("\r\n".join(lines).encode() + b'\n{"text": "\xff"}\n{"text": "last"}')
    docs, reasons = read(path)
    assert docs == ["one", "a lone \ud800 surrogate", "last"]
    assert sorted(reasons) == ["broken line"] * 5 + ["no text"] * 4
    assert read(write(tmp_path / "docs.parquet", ["one", None, "last"])) == (["one", "last"], ["no text"])


def test_a_wrong_text_field_is_answered_with_those_there_are(tmp_path):
    path = tmp_path / "docs.parquet"
    pq.write_table(pa.table({"body": ["x"], "title": ["y"], "id": [1], "tags": [["a"]]}), path)
    assert_refused("no column 'text' of text; give --text_field one of body, title$", read, path)
    pq.write_table(pa.table({"text": [1, 2]}), path)
    assert_refused("no column 'text' of text; give another file", read, path)


@pytest.mark.parametrize(
    "end, encoding, near",
    [
        ("研究生", "gb18030", b" " + b"word " * 5 + b"\xd1\xd0\xbe\xbf"),
        ("", "utf-16-le", b"w\0o\0r"),
        ("", "utf-16-be", b"\0w\0o"),
    ],
)
def test_text_in_another_encoding_is_named_with_the_place(tmp_path, monkeypatch, end, encoding, near):
    monkeypatch.setattr(sources, "UNIT_BYTES", 1000)
    path = tmp_path / "docs.txt"
    path.write_bytes(("word " * 1000 + end).encode(encoding))
    words = re.escape(f"docs.txt is not UTF-8 at {near!r}; save it as UTF-8")
    assert_refused(words, read, path, cut=re.compile(r"(?<=\S)(?=\s)"))


def test_a_tenth_of_zeros_is_no_text():
    text = b"\0" * 100 + b"a" * 900 + b"\0"
    assert decode(text) == text.decode()
    assert_refused("it may be UTF-16", decode, b"\0" * 101 + b"a" * 899, error=UnicodeDecodeError)


LISTED = """\
../up.txt a/../../up.txt /etc/up.txt a/..txt a/b.txt a/b.txt.gz read.me c.jsonl data/test.parquet data/train-1.parquet
data/train-0.parquet strained/x.json.gz"""
CHOSEN = """
some/corpus | data/train-0.parquet data/train-1.parquet
some/corpus/a | a/..txt a/b.txt
some/corpus/a/b* | a/b.txt
some/corpus/data/test* | data/test.parquet
some/corpus/strained/ | strained/x.json.gz
some/corpus/[cs]* | c.jsonl
"""


@pytest.fixture
def hub(monkeypatch) -> None:
    """A hub that has LISTED, some of them large."""

    def answer(method: str, url: str, **options):
        wanted = rf"{ENDPOINT}/api/datasets/some/corpus/revision/(a%2Fbranch|main)\?blobs=true"
        assert method == "GET" and re.fullmatch(wanted, url) and options["max_retries"] == 2
        small = dict(size=9, blobId="0")
        files = [
            small | dict(rfilename=name, lfs=dict(sha256="1") if "data" in name else None) for name in LISTED.split()
        ]
        return SimpleNamespace(json=lambda: dict(siblings=files, sha="abc"), raise_for_status=lambda: None)

    monkeypatch.setattr("huggingface_hub.utils.http_backoff", answer)


@pytest.mark.parametrize("source, names", table(CHOSEN))
def test_of_the_hub_files_of_one_kind_to_train_on_are_chosen_and_none_that_leads_elsewhere(hub, source, names):
    found = find_source((source,), "a/branch")
    version = "1" if "data" in names[0] else "0"
    assert found == Source([SourceFile(name, 9, version) for name in names[0].split()], "some/corpus", "abc")


def test_a_folder_of_the_hub_without_data_is_answered_with_those_that_have_some(hub):
    words = "some/corpus has no data file in no/where; name a folder that has some: ., a, data, strained$"
    assert_refused(words, find_source, ("some/corpus/no/where",))


def test_without_a_network_the_error_says_what_to_do_and_a_full_disk_is_no_error_of_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils.http_backoff", lambda *_, **__: 1 / 0)
    words = r"list of files of a/b from http.* \(ZeroDivisionError: division by zero\); check .* HF_ENDPOINT"
    assert_refused(words, find_source, ("a/b",))
    with pytest.raises(OSError, match="full"), hub_errors("a file"):
        raise OSError(errno.ENOSPC, "full")


def test_a_download_is_resumed_compared_and_made_once(tmp_path, monkeypatch):
    content, asked = b"The tide comes twice.", []

    def http_get(url: str, f, *, resume_size: int, expected_size: int, headers) -> None:
        asked.append((url.removeprefix(ENDPOINT), resume_size, expected_size))
        f.write(content[resume_size:])

    monkeypatch.setattr("huggingface_hub.file_download.http_get", http_get)
    version = hashlib.sha256(content).hexdigest()
    get = partial(download, Source([], "some/corpus", "abc"), SourceFile("a/b.txt", 21, version), tmp_path)
    path = get()
    part = path.with_name(f"b.txt.{version[:8]}.part")
    assert get().read_bytes() == content and not part.exists()
    for begun in (b"The", b"the"):
        path.unlink()
        part.write_bytes(begun)
        if begun == b"The":
            assert get().read_bytes() == content
    assert_refused("cannot get a/b.txt .*it arrived damaged", get)
    url = "/datasets/some/corpus/resolve/abc/a/b.txt"
    assert asked == [(url, 0, 21), (url, 3, 21), (url, 3, 21)] and not part.exists()
    assert download(get.args[0], SourceFile("c", 21, "git"), tmp_path).exists()  # without a hash to compare


@pytest.mark.parametrize("unit_bytes", [4, 10**6])
def test_a_row_that_is_not_utf8_is_named_by_what_is_before_it(tmp_path, monkeypatch, unit_bytes):
    monkeypatch.setattr(sources, "UNIT_BYTES", unit_bytes)
    rows = pa.array([b"one", b"a long row of a caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": rows}), tmp_path / "docs.parquet")
    words = r"docs.parquet is not UTF-8 at b'a long row of a caf\\xe9'; save it"
    assert_refused(words, read, tmp_path / "docs.parquet")


@pytest.mark.parametrize("kind", [*KINDS, "txt", "txt.gz", "txt.zst"])
def test_a_damaged_file_gives_documents_or_one_error_with_its_name(tmp_path, kind):
    rng, path = random.Random(kind), tmp_path / f"docs.{kind}"
    docs = make_documents(20)
    whole = (compress(path, "\n\n\n".join(docs).encode()) if "txt" in kind else write(path, docs)).read_bytes()
    contents = damaged(whole) | {"cut short": whole[:-5], "zeros": bytes(len(whole))}
    for i in rng.choices(range(len(whole)), k=40):
        contents[f"byte {i} flipped"] = whole[:i] + bytes([whole[i] ^ 1 << rng.randrange(8)]) + whole[i + 1 :]
    for what, data in contents.items():
        path.write_bytes(data)
        try:
            assert all(isinstance(doc, str) for doc in read(path)[0]), what
        except UserError as e:
            assert str(path) in str(e), what


# ------------------------------------------------------------------------------------------------------- which files


def test_files_folders_and_globs_are_found_in_order(tmp_path, monkeypatch):
    """Also where a glob looks like OWNER/NAME/FOLDER of the hub."""
    monkeypatch.chdir(tmp_path)
    Path("sub/deep").mkdir(parents=True)
    for name in ("b.txt", "a.jsonl.gz", "sub/deep/c.parquet", "sub/readme.md", "d.json"):
        Path(name).touch()

    def names(*patterns: str) -> list[str]:
        return [file.name for file in find_source(patterns).files]

    assert names(".") == ["a.jsonl.gz", "b.txt", "sub/deep/c.parquet"]
    assert names("b.txt", "*.gz") == ["b.txt", "a.jsonl.gz"]
    assert names("sub/deep/**/*.parquet") == ["sub/deep/c.parquet"]


@pytest.mark.parametrize(
    "pattern", ["", "missing.parquet", "nowhere/missing.parquet", "./nothing/*.jsonl", "x" * 5000, "a\nb"]
)
def test_a_source_that_is_not_there_is_named(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    assert_refused(re.escape(pattern or "the empty name") + ".*OWNER/NAME", find_source, (pattern,))
