"""rows_of of parts/texts.py: whole small datasets, of files, folders and the hub."""

import json

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from parts.texts import rows_of
from tests.helpers import assert_refused

ROWS = [dict(instruction=f"count to {n}", input="", output=" ".join(map(str, range(n)))) for n in range(5)]

# ---- files


def test_json_and_jsonl_hold_the_same_rows(tmp_path):
    """A line ends at \\n alone, not where Unicode or splitlines see an end; a BOM and Windows' line ends do no harm."""
    rows = [row | dict(output="a\u2028b\u2029c\x85d\x1ce") for row in ROWS]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    contents = [json.dumps(rows, indent=1), "\n".join(lines), "\ufeff" + "\r\n\n".join(lines)]
    for content in contents:
        (tmp_path / "rows").write_bytes(content.encode())
        assert rows_of(str(tmp_path / "rows")) == rows


GOOD = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
FOREIGN = {
    "blank": b"\n\n", "no rows": b"[]", "an array cut in half": b"[{}, {",
    "UTF-16": GOOD.decode().encode("utf-16"), "Latin 1": b"caf\xe9", "a web page": b"<html>log in first</html>",
    "100,000 brackets": b"[" * 100_000, "a number of 5,000 digits": b"1" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_without_rows_is_one_error(tmp_path, what):
    (tmp_path / "rows.jsonl").write_bytes(FOREIGN[what])
    assert_refused(r"--my_rows.*rows\.jsonl", rows_of, str(tmp_path / "rows.jsonl"), "train", "--my_rows")


def test_a_single_row_of_lines_is_a_row(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[2]))
    assert rows_of(str(tmp_path / "rows.jsonl")) == [ROWS[2]]


def test_what_is_not_a_file_names_the_option(tmp_path):
    assert_refused("--my_rows", rows_of, str(tmp_path / "absent.json"), "train", "--my_rows")


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.jsonl.gz", "rows.arrow"])
def test_other_kinds_hold_the_same_rows(tmp_path, name):
    """Dates, numeric answers and empty inputs, too."""
    rows = [
        *ROWS,
        dict(instruction="When?", input="", output="2024-05-01"),
        dict(instruction="2+2", input="", output="4"),
    ]
    table = pa.Table.from_pylist(rows)
    with pa.output_stream(tmp_path / name) as file:  # compressed if the name says so
        if name == "rows.csv":
            pa_csv.write_csv(table, file)
        elif name == "rows.parquet":
            pq.write_table(table, file)
        elif name == "rows.arrow":
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        else:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    assert rows_of(str(tmp_path / name)) == rows


def test_a_number_stays_a_number_beside_texts(tmp_path):
    rows = [dict(ROWS[1], weight=0), dict(ROWS[2], weight="0"), dict(ROWS[3], weight=None), ROWS[4]]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert rows_of(str(tmp_path / "rows.json")) == rows


# ---- folders and the hub


def test_a_folder_means_its_split_as_datasets_does(tmp_path):
    (tmp_path / "data").mkdir()
    for split, rows in dict(train=ROWS, validation=ROWS[:2]).items():
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    assert rows_of(str(tmp_path), "train") == ROWS
    assert rows_of(str(tmp_path), "validation") == ROWS[:2]
    assert_refused("nowhere.*train", rows_of, str(tmp_path), "nowhere")


def test_without_a_network_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    assert_refused("--my_rows.*some/rows", rows_of, "some/rows", "train", "--my_rows")
