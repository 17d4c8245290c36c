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

from parts import documents as texts
from parts import sources
from parts.cli import UserError
from parts.documents import decode, documents, documents_of, units_of
from parts.sources import Source, SourceFile, download, find_source, hub_errors
from tests.corpora import make_documents
from tests.helpers import assert_refused, damaged

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
    docs = []
    reasons = []
    for unit in units_of(path, "text", **options):
        texts = [text for text, reason in documents_of(unit, "text") if not reason]
        reasons += [reason for text, reason in documents_of(unit, "text") if text is None]
        docs += [docs.pop() + texts.pop(0), *texts] if unit.continued and docs else texts
    return docs, reasons


# ---------------------------------------------------------------------------------------------------- same documents


@pytest.mark.parametrize("unit_bytes", [500, 20_000, 10**9])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_documents_however_it_is_cut(tmp_path, monkeypatch, kind, unit_bytes):
    monkeypatch.setattr(texts, "UNIT_BYTES", unit_bytes)
    docs = make_documents()
    path = write(tmp_path / f"docs.{kind}", docs)
    assert read(path) == (docs, [])
    n = len(list(units_of(path, "text")))
    assert n == (9 if kind in ("parquet", "words.parquet") else 1) if unit_bytes == 10**9 else n > 3  # row groups


@pytest.mark.parametrize("kind", ["one_group.parquet", "parquet", "jsonl.gz", "txt"])
def test_no_unit_is_much_larger_than_it_should_be(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(texts, "UNIT_BYTES", 30_000)
    docs = make_documents(400)
    path = tmp_path / f"docs.{kind}"
    write(path, docs) if kind != "txt" else path.write_text("\n\n\n\n".join(docs))
    sizes = [sum(len(text.encode()) for text, _ in documents_of(unit, "text")) for unit in units_of(path, "text")]
    assert len(sizes) > 10
    assert max(sizes) < 4 * 30_000


# ---------------------------------------------------------------------------------------------------------- .txt files


@given(st.text(alphabet="a \r\n\u3000中", max_size=60))
@example("a\n\n\n\nb\n\nc\n\n\n")
@example("\r\n\r\n\r\na\r\n\r\n\r\n\r\nb")
def test_two_blank_lines_end_a_document(text):
    pieces = documents(text)
    assert "".join(pieces) == text
    assert "" not in pieces
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
        *['{"text": "more"}'] * 3, '{"text": "this", "text": "or that"}',
    ]  # fmt: skip
    path = tmp_path / "docs.jsonl"
    path.write_bytes("\r\n".join(lines).encode() + b'\n{"text": "\xff"}\n{"text": "last"}')
    docs, reasons = read(path)
    assert docs == ["one", "a lone \ud800 surrogate", "more", "more", "more", "last"]
    assert sorted(reasons) == ["broken line"] * 6 + ["no text"] * 4
    assert read(write(tmp_path / "docs.parquet", ["one", None, "last"])) == (["one", "last"], ["no text"])


ROWS = [dict(text=f"document {n}") for n in range(10)]
WHOLE = [json.dumps(row) for row in ROWS]
NOT_LINES = {
    "an array": (json.dumps(ROWS), "begins with \\[, so it is one JSON array and not one object a line"),
    "an array over lines": ("[\n" + ",\n".join(WHOLE) + "\n]\n", "begins with \\["),
    "an array after a mark": ("\ufeff [" + ",".join(WHOLE) + "]", "begins with \\["),
    "commas after the objects": (",\n".join(WHOLE), "has a comma after the object in line 1;"),
    "commas from the middle on": ("\n".join(WHOLE[:5]) + "\n" + ",\n".join(WHOLE[5:]), "the object in line 6;"),
    "objects over lines": ("\n".join(json.dumps(row, indent=1) for row in ROWS), "30 broken lines .* is line 1;"),
    "objects in one line": (" ".join(WHOLE), "1 broken line and 0 documents from line 1 on"),
    "mostly broken": ("\n".join(WHOLE[:4] + ["{"] * 5), "5 broken lines and 4 documents .* is line 5;"),
    "another encoding": ("\n".join(WHOLE).encode("utf-16"), "10 broken lines"),
    "another key": ('{"body": "one", "n": 1, "title": "two"}\n', "no key 'text'; .* one of body, n, title"),
    "rows in a key": ('{"data": [{"text": "one"}]}\n', "no key 'text'; give --text_field one of data,"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_LINES)
def test_another_kind_of_json_is_refused_with_file_and_line(tmp_path, what):
    """It would be skipped as broken lines, but for the last one."""
    content, words = NOT_LINES[what]
    path = tmp_path / "docs.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_refused(f"docs.jsonl .*{words}", read, path)


def test_half_of_the_lines_may_be_broken_and_are_counted(tmp_path):
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(WHOLE + ["{"] * 10))
    docs, reasons = read(path)
    assert docs == [row["text"] for row in ROWS]
    assert reasons == ["broken line"] * 10


def test_a_file_that_was_cut_short_loses_its_last_line_and_says_so(tmp_path, monkeypatch):
    """Also where that line is a unit by itself."""
    monkeypatch.setattr(texts, "UNIT_BYTES", 100)
    path = tmp_path / "docs.jsonl"
    lines = "".join(json.dumps(dict(text=f"{n:70}")) + "\n" for n in range(20))
    path.write_text(lines + '{"text": "cut')
    docs, reasons = read(path)
    assert len(docs) == 20
    assert reasons == ["broken line"]


def test_the_line_of_an_error_is_that_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "UNIT_BYTES", 100)
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(WHOLE * 10) + ",\n" + "\n".join(WHOLE))
    assert_refused("the object in line 100;", read, path)


def test_a_pointer_of_git_lfs_is_no_text(tmp_path):
    (tmp_path / "docs.txt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert_refused("docs.txt: it is a pointer of Git LFS", read, tmp_path / "docs.txt")


# ----------------------------------------------------------------------------------------------------------- bounds


def test_a_text_that_repeats_has_the_size_of_its_rows_and_is_read_in_units(tmp_path, monkeypatch):
    """Parquet stores it once; the plan, and the memory, are those of the rows."""
    monkeypatch.setattr(texts, "UNIT_BYTES", 10_000)
    docs = ["The tide comes twice a day. " * 100, "", None] * 1000
    size = 2800 * 1000
    for table in (pa.table({"text": docs}), pa.table({"text": pa.array(docs).dictionary_encode()})):
        path = tmp_path / "docs.parquet"
        pq.write_table(table, path)
        assert path.stat().st_size < 10_000
        [file] = find_source((str(path),)).files
        assert texts.text_size(file.name, file.bytes, "text") == size
        units = list(units_of(path, "text"))
        assert max(sum(len(text or "") for text in unit.content) for unit in units) <= 20_000
        assert [text for unit in units for text in unit.content] == docs


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "txt.gz"])
def test_a_compressed_text_has_the_size_that_it_unpacks_to(tmp_path, kind):
    text = "The tide comes twice a day. " * 100_000
    content = text if "txt" in kind else json.dumps(dict(text=text)) + "\n"
    path = compress(tmp_path / f"docs.{kind}", content.encode())
    [file] = find_source((str(path),)).files
    assert texts.text_size(file.name, file.bytes, "text") == pytest.approx(len(text), rel=0.1)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "txt", "txt.gz"])
def test_a_document_over_the_limit_is_an_error_before_it_is_in_memory(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(texts, "UNIT_BYTES", 2**16)
    monkeypatch.setattr(texts, "LARGEST_DOCUMENT", 2**20)
    text = "word " * 2**20
    content = text if "txt" in kind else json.dumps(dict(text=text)) + "\n"
    path = compress(tmp_path / f"docs.{kind}", content.encode())
    assert_refused(f"docs.{kind} has a document of 1 MB or more, and the most is 1 MB; split it", read, path)


@pytest.mark.parametrize("repeats", [1, 50])
def test_a_row_over_the_limit_is_an_error(tmp_path, monkeypatch, repeats):
    monkeypatch.setattr(texts, "UNIT_BYTES", 2**16)
    monkeypatch.setattr(texts, "LARGEST_DOCUMENT", 2**20)
    path = write(tmp_path / "docs.parquet", ["word " * 2**18] * repeats)
    assert_refused("docs.parquet has a document of 1 MB or more", read, path)


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
    monkeypatch.setattr(texts, "UNIT_BYTES", 1000)
    path = tmp_path / "docs.txt"
    path.write_bytes(("word " * 1000 + end).encode(encoding))
    words = re.escape(f"docs.txt is not UTF-8 at {near!r}; save it as UTF-8")
    assert_refused(words, read, path, cut=re.compile(r"(?<=\S)(?=\s)"))


def test_a_tenth_of_zeros_is_no_text():
    text = b"\0" * 100 + b"a" * 900 + b"\0"
    assert decode(text) == text.decode()
    assert_refused("it may be UTF-16", decode, b"\0" * 101 + b"a" * 899, error=UnicodeDecodeError)


class Listing:
    """A hub that has these files of one dataset, `some/corpus`; those in data/ are large."""

    def __init__(self, names: list[str], card: dict | None = None):
        self.names = names
        self.card = card

    def __call__(self, method: str, url: str, **options):
        wanted = rf"{ENDPOINT}/api/datasets/some/corpus/revision/(a%2Fbranch|main)\?blobs=true"
        assert method == "GET"
        assert re.fullmatch(wanted, url)
        assert options["max_retries"] == 2
        files = []
        for name in self.names:
            lfs = dict(sha256="1") if "data" in name else None
            files.append(dict(rfilename=name, size=9, blobId="0", lfs=lfs))
        info = dict(siblings=files, sha="abc", cardData=self.card)
        return SimpleNamespace(json=lambda: info, raise_for_status=lambda: None)


@pytest.fixture
def hub(monkeypatch):
    """hub(names, card) is the hub from then on."""
    return lambda *listing: monkeypatch.setattr("huggingface_hub.utils.http_backoff", Listing(*listing))


LISTED = [
    "../up.txt", "a/../../up.txt", "/etc/up.txt", "README.md", ".gitattributes", "a/..txt", "a/b.txt", "a/b.txt.gz",
    "read.me", "c.jsonl", "data/test.parquet", "data/train-1.parquet", "data/train-0.parquet", "strained/x.json.gz",
]  # fmt: skip
OTHERS = {"read.me", "a/..txt", "a/b.txt", "a/b.txt.gz", "c.jsonl", "data/test.parquet", "strained/x.json.gz"}
CHOSEN = {  # name: (files that are read, files that are left out by name)
    "some/corpus": (["data/train-0.parquet", "data/train-1.parquet"], OTHERS),
    "some/corpus/a": (["a/..txt", "a/b.txt"], {"a/b.txt.gz"}),
    "some/corpus/a/b*": (["a/b.txt"], {"a/b.txt.gz"}),
    "some/corpus/data": (["data/train-0.parquet", "data/train-1.parquet"], {"data/test.parquet"}),
    "some/corpus/data/test*": (["data/test.parquet"], set()),
    "some/corpus/strained/": (["strained/x.json.gz"], set()),
    "some/corpus/[cs]*": (["c.jsonl"], {"strained/x.json.gz"}),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_of_the_hub_files_of_one_kind_to_train_on_are_chosen_and_the_others_named(hub, name):
    """And none that leads elsewhere."""
    hub(LISTED)
    names, left_out = CHOSEN[name]
    found = find_source((name,), "a/branch")
    version = "1" if "data" in names[0] else "0"
    assert found.files == [SourceFile(name, 9, version) for name in names]
    assert (found.repo, found.commit) == ("some/corpus", "abc")
    assert {name for name, _ in found.left_out} == left_out


def test_why_a_file_of_the_hub_is_left_out(hub):
    hub(["data/train.parquet", "data/validation.parquet", "data/train.jsonl", "data/notes.csv"])
    said = sources.left_out(find_source(("some/corpus",)))
    assert "2 files (of another kind): data/train.jsonl, data/notes.csv" in said
    assert "1 file (of another split): data/validation.parquet" in said


def test_a_folder_of_the_hub_without_data_is_answered_with_those_that_have_some(hub):
    hub(LISTED)
    words = "some/corpus has no data file in no/where; name a folder that has some: ., a, data, strained$"
    assert_refused(words, find_source, ("some/corpus/no/where",))


WIKITEXT = [f"{name}/{split}-0.parquet" for name in ("raw", "tokens") for split in ("train", "test")]
CONFIGS = [
    dict(config_name="raw", data_files=[dict(split="train", path="raw/train-*")]),
    dict(config_name="tokens", data_files=[dict(split="train", path=["tokens/train-*"])]),
]
HALF = [dict(config_name="raw", data_files="raw/*")]
BY_NAME = [dict(config_name=name, data_files=f"data/{name}-*.parquet") for name in ("en", "de")]


@pytest.mark.parametrize("card", [None, dict(configs=CONFIGS), dict(license="mit"), dict(configs=HALF)])
def test_a_dataset_of_several_subsets_is_refused_and_they_are_named(hub, card):
    """They may be one text in several forms."""
    hub(WIKITEXT, card)
    words = r"some/corpus has 2 subsets, .*: some/corpus/raw, some/corpus/tokens; give one of them, or 'some/corpus/\*'"
    assert_refused(words, find_source, ("some/corpus",))
    assert [file.name for file in find_source(("some/corpus/raw",)).files] == ["raw/train-0.parquet"]
    both = ["raw/train-0.parquet", "tokens/train-0.parquet"]
    assert [file.name for file in find_source(("some/corpus/*",)).files] == both


def test_subsets_may_share_a_folder(hub):
    hub(["data/de-0.parquet", "data/en-0.parquet"], dict(configs=BY_NAME))
    words = "some/corpus/data/en-0.parquet, some/corpus/data/de-0.parquet; give one of them"
    assert_refused(words, find_source, ("some/corpus",))
    assert len(find_source(("some/corpus/data/en*",)).files) == 1


def test_a_subset_that_has_all_files_is_the_dataset(hub):
    default = dict(config_name="default", data_files="data/*/*")
    one = dict(config_name="2024", data_files="data/2024/*.parquet")
    hub(["data/2024/0.parquet", "data/2025/0.parquet"], dict(configs=[default, one]))
    assert len(find_source(("some/corpus",)).files) == 2


def test_without_a_network_the_error_says_what_to_do_and_a_full_disk_is_no_error_of_the_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils.http_backoff", lambda *_, **__: 1 / 0)
    words = r"list of files of a/b from http.* \(ZeroDivisionError: division by zero\); check .* HF_ENDPOINT"
    assert_refused(words, find_source, ("a/b",))
    with pytest.raises(OSError, match="full"), hub_errors("a file"):
        raise OSError(errno.ENOSPC, "full")


def test_a_download_is_resumed_compared_and_made_once(tmp_path, monkeypatch):
    content = b"The tide comes twice."
    asked = []

    def http_get(url: str, f, *, resume_size: int, expected_size: int, headers) -> None:
        asked.append((url.removeprefix(ENDPOINT), resume_size, expected_size))
        f.write(content[resume_size:])

    monkeypatch.setattr("huggingface_hub.file_download.http_get", http_get)
    version = hashlib.sha256(content).hexdigest()
    get = partial(download, Source([], "some/corpus", "abc"), SourceFile("a/b.txt", 21, version), tmp_path)
    path = get()
    part = path.with_name(f"b.txt.{version[:8]}.part")
    assert get().read_bytes() == content
    assert not part.exists()
    for begun in (b"The", b"the"):
        path.unlink()
        part.write_bytes(begun)
        if begun == b"The":
            assert get().read_bytes() == content
    assert_refused("cannot get a/b.txt .*it arrived damaged", get)
    url = "/datasets/some/corpus/resolve/abc/a/b.txt"
    assert asked == [(url, 0, 21), (url, 3, 21), (url, 3, 21)]
    assert not part.exists()
    assert download(get.args[0], SourceFile("c", 21, "git"), tmp_path).exists()  # without a hash to compare


@pytest.mark.parametrize("unit_bytes", [4, 10**6])
def test_a_row_that_is_not_utf8_is_named_by_what_is_before_it(tmp_path, monkeypatch, unit_bytes):
    monkeypatch.setattr(texts, "UNIT_BYTES", unit_bytes)
    rows = pa.array([b"one", b"a long row of a caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": rows}), tmp_path / "docs.parquet")
    words = r"docs.parquet is not UTF-8 at b'a long row of a caf\\xe9'; save it"
    assert_refused(words, read, tmp_path / "docs.parquet")


@pytest.mark.parametrize("kind", [*KINDS, "txt", "txt.gz", "txt.zst"])
def test_a_damaged_file_gives_documents_or_one_error_with_its_name(tmp_path, kind):
    rng = random.Random(kind)
    path = tmp_path / f"docs.{kind}"
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


def names_of(*patterns: str) -> list[str]:
    return [file.name for file in find_source(patterns).files]


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("sub/deep").mkdir(parents=True)
    for name in ("b.txt", "a.jsonl.gz", "sub/deep/c.parquet", "sub/readme.md", "d.json"):
        Path(name).touch()
    return tmp_path


def test_files_folders_and_globs_are_found_in_order(tree):
    """Also where a glob looks like OWNER/NAME/FOLDER of the hub."""
    assert names_of(".") == ["a.jsonl.gz", "b.txt", "sub/deep/c.parquet"]
    assert names_of("b.txt", "*.gz") == ["b.txt", "a.jsonl.gz"]
    assert names_of("sub/deep/**/*.parquet") == ["sub/deep/c.parquet"]


EVERYTHING = [
    ["**"], ["*", "**"], ["**/*"], ["./**"], [".", "sub"], ["sub", "."], ["b.txt", "."], ["sub/../b.txt", "."],
    ["{here}", "."], ["*", "*/*", "*/*/*"],
]  # fmt: skip


@pytest.mark.parametrize("patterns", EVERYTHING, ids=" ".join)
def test_each_file_is_read_once_whatever_the_pattern(tree, patterns):
    found = names_of(*[pattern.format(here=tree) for pattern in patterns])
    real = sorted(str(Path(name).resolve().relative_to(tree)) for name in found)
    assert real == ["a.jsonl.gz", "b.txt", "sub/deep/c.parquet"]


def test_what_is_not_read_in_a_folder_is_named_with_the_reason(tree):
    Path(".hidden.txt").touch()
    Path(".git").mkdir()
    Path(".git/x.txt").touch()
    Path("e.jsonl").symlink_to("nowhere.jsonl")
    Path("f.txt").symlink_to("b.txt")
    source = find_source((".",))
    assert [file.name for file in source.files] == ["a.jsonl.gz", "b.txt", "sub/deep/c.parquet"]
    assert dict(source.left_out) == {
        ".git": "hidden",
        ".hidden.txt": "hidden",
        "d.json": "of another kind",
        "e.jsonl": "a link that leads nowhere",
        "f.txt": "the same file as b.txt",
        "sub/readme.md": "of another kind",
    }
    assert "2 files (of another kind): d.json, sub/readme.md" in sources.left_out(source)
    assert names_of(".hidden.txt") == [".hidden.txt"], "who names it wants it"


def test_a_file_under_two_names_is_read_once(tree):
    Path("hard.txt").hardlink_to("b.txt")
    Path("soft.txt").symlink_to("b.txt")
    source = find_source((".",))
    assert [file.name for file in source.files] == ["a.jsonl.gz", "b.txt", "sub/deep/c.parquet"]
    assert {name for name, reason in source.left_out if reason == "the same file as b.txt"} == {"hard.txt", "soft.txt"}


def test_linked_folders_are_read_and_a_circle_ends(tree, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "x.txt").touch()
    Path("linked").symlink_to(elsewhere)
    Path("sub/up").symlink_to(tree)
    assert names_of(".") == ["a.jsonl.gz", "b.txt", "linked/x.txt", "sub/deep/c.parquet"]
    assert names_of(".") == names_of("**")


@pytest.mark.parametrize("twins", [("a.jsonl", "a.jsonl.gz"), ("a.txt", "a.parquet"), ("a.json.gz", "a.jsonl.zst")])
def test_a_text_in_two_formats_is_refused(tmp_path, monkeypatch, twins):
    monkeypatch.chdir(tmp_path)
    for name in twins:
        Path(name).touch()
    assert_refused("may hold the same documents, in two formats", find_source, (".",))
    assert names_of(twins[0]) == [twins[0]]


def test_a_dataset_that_was_downloaded_is_refused_as_on_the_hub(tmp_path):
    for name in ("raw/train.txt", "tokens/train.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    folder = str(tmp_path)
    assert len(find_source((folder,)).files) == 2
    card = "configs:\n- config_name: raw\n  data_files: raw/*\n- config_name: tokens\n  data_files: tokens/*\n"
    (tmp_path / "README.md").write_text(f"---\n{card}---\n# A dataset\n")
    assert_refused(f"has 2 subsets, .*: {folder}/raw, {folder}/tokens", find_source, (folder,))
    assert len(find_source((f"{folder}/*",)).files) == 2
    (tmp_path / "README.md").write_text("---\n: [\n---\nno YAML")
    assert len(find_source((folder,)).files) == 2


@pytest.mark.parametrize(
    "pattern", ["", "missing.parquet", "nowhere/missing.parquet", "./nothing/*.jsonl", "x" * 5000, "a\nb"]
)
def test_a_source_that_is_not_there_is_named(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    assert_refused(re.escape(pattern or "the empty name") + ".*OWNER/NAME", find_source, (pattern,))
