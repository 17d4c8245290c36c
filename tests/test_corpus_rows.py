"""corpus/rows.py: whole datasets, of files and, through the real `datasets`, of a server on 127.0.0.1."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli import UserError
from corpus.rows import file_rows
from tests.helpers import ROOT, environment
from tests.rows_hub import RowsHub, write_dataset

ROWS = [dict(instruction=f"count to {n}", input="", output=" ".join(map(str, range(n)))) for n in range(5)]

# ---- files


def test_json_and_jsonl_hold_the_same_rows(tmp_path):
    """A line ends at \\n alone, not where Unicode or splitlines see an end; a BOM and Windows' line ends do no harm."""
    rows = [row | dict(output="a\u2028b\u2029c\x85d\x1ce") for row in ROWS]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    contents = [json.dumps(rows, indent=1), "\n".join(lines), "\ufeff" + "\r\n\n".join(lines)]
    for content in contents:
        (tmp_path / "rows").write_bytes(content.encode())
        assert file_rows(str(tmp_path / "rows")) == rows


GOOD = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FOREIGN = {
    "empty": b"", "blank": b"\n\n", "no rows": b"[]", "one byte": b"{", "cut in half": GOOD[: len(GOOD) // 2],
    "UTF-16": GOOD.decode().encode("utf-16"), "Latin 1": b"caf\xe9", "zeros": bytes(1000),
    "parquet": b"PAR1" + bytes(100) + b"PAR1", "zip": b"PK\x03\x04", "a web page": b"<html>log in first</html>",
    "CSV": b"instruction,output\nHi,Ho\n", "100,000 brackets": b"[" * 100_000,
    "100,000 braces": b'{"messages": ' * 100_000, "a number of 5,000 digits": b"1" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_without_rows_is_one_error(tmp_path, what):
    (tmp_path / "rows.jsonl").write_bytes(FOREIGN[what])
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        file_rows(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    "content, line", [('[{"a": 1}', 1), ('{"a": 1}\n\n{"a": 1 "b"}\n', 3), ('[\n{"a": 1,\n "b": c}]', 3)]
)
def test_the_line_that_is_not_json_is_named(tmp_path, content, line):
    (tmp_path / "rows").write_text(content)
    with pytest.raises(UserError, match=f"line {line}:"):
        file_rows(str(tmp_path / "rows"))


def test_no_flipped_bit_is_a_traceback_and_no_row_gets_lost(tmp_path):
    for at in range(0, len(GOOD), 7):
        (tmp_path / "rows").write_bytes(GOOD[:at] + bytes([GOOD[at] ^ 0x91]) + GOOD[at + 1 :])
        with contextlib.suppress(UserError):
            assert len(file_rows(str(tmp_path / "rows"))) == len(ROWS)


@pytest.mark.parametrize("name", ["absent.json", "", "x" * 300])
def test_what_is_not_a_file_names_the_option(tmp_path, name):
    with pytest.raises(UserError, match="--my_rows"):
        file_rows(str(tmp_path / name), "--my_rows")


# ---- the hub

CODE = """
import json, sys
from cli import UserError
from corpus.rows import hub_rows
try:
    print(json.dumps(hub_rows(*sys.argv[1:])))
except UserError as e:
    print(json.dumps(f"error: {e}"))
"""


def ask(env: dict, *words: str):
    """`hub_rows(*words)`, or the text of its error, in a process that starts with this environment."""
    done = subprocess.run([sys.executable, "-c", CODE, *words], cwd=ROOT, env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def dataset(tmp_path) -> Path:
    return write_dataset(tmp_path / "dataset", dict(train=ROWS))


def test_all_rows_come_from_the_endpoint_and_then_from_the_cache(dataset, tmp_path):
    with RowsHub("some/rows", dataset) as hub:
        env = hub.environment(tmp_path / "home")
        assert ask(env, "some/rows", "train") == ROWS
        assert hub.requests
        for words in (("no/body", "train"), ("some/rows", "nowhere")):  # a repository, a split
            assert (error := ask(env, *words)).startswith("error: ") and words[0] in error and words[1] in error
    assert ask(env | dict(HF_HUB_OFFLINE="1"), "some/rows", "train") == ROWS


def test_without_a_network_the_error_says_what_to_do(tmp_path):
    error = ask(environment(HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1"), "some/rows", "train", "--my_rows")
    assert error.startswith("error: ")
    assert all(word in error for word in ("some/rows", "network", "HF_ENDPOINT", "--my_rows"))


def test_damaged_files_are_one_error(dataset, tmp_path):
    (file,) = dataset.rglob("*.parquet")
    file.write_bytes(file.read_bytes()[:-20])
    with RowsHub("some/rows", dataset) as hub:
        error = ask(hub.environment(tmp_path / "home"), "some/rows", "train")
    assert error.startswith("error: ") and "some/rows" in error
