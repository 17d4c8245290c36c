"""rows_of of parts/texts.py: whole small datasets, of files, folders and the hub."""

import json

import pytest

from parts.texts import rows_of
from tests.helpers import assert_refused

ROWS = [dict(instruction=f"count to {n}", input="", output=" ".join(map(str, range(n)))) for n in range(5)]

# ---- files


def test_json_and_jsonl_hold_the_same_rows(tmp_path):
    """A line ends at \\n alone, not where Unicode or splitlines see an end; a BOM and Windows' line ends do no harm, and
    a number stays one beside texts."""
    rows = [row | dict(output="a\u2028b\u2029c\x85d\x1ce") for row in ROWS]
    rows += [dict(ROWS[1], weight=0), dict(ROWS[2], weight="0"), dict(ROWS[3], weight=None)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    contents = [json.dumps(rows, indent=1), "\n".join(lines), "\ufeff" + "\r\n\n".join(lines)]
    for content in contents:
        (tmp_path / "rows").write_bytes(content.encode())
        assert rows_of(str(tmp_path / "rows")) == rows


FOREIGN = {
    "blank": b"\n\n", "no rows": b"[]", "an array cut in half": b"[{}, {", "a web page": b"<html>log in first</html>",
    "100,000 brackets": b"[" * 100_000, "a number of 5,000 digits": b"1" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_without_rows_is_one_error(tmp_path, what):
    (tmp_path / "rows.jsonl").write_bytes(FOREIGN[what])
    assert_refused(r"--my_rows.*rows\.jsonl", rows_of, str(tmp_path / "rows.jsonl"), "train", "--my_rows")


def test_what_is_not_a_file_names_the_option(tmp_path):
    assert_refused("--my_rows", rows_of, str(tmp_path / "absent.json"), "train", "--my_rows")


def test_without_a_network_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert_refused("--my_rows.*some/rows", rows_of, "some/rows", "train", "--my_rows")
