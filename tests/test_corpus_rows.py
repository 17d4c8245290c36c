"""sources.hub_rows: small datasets of the hub, through the real `datasets` and a server on 127.0.0.1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT, environment
from tests.rows_hub import RowsHub, write_dataset

ROWS = [dict(instruction=f"count to {n}", input="", output=" ".join(map(str, range(n)))) for n in range(5)]
CODE = """
import json, sys
from cli import UserError
from corpus.sources import hub_rows
try:
    print(json.dumps(hub_rows(*sys.argv[1:])))
except UserError as e:
    print(json.dumps(f"error: {e}"))
"""


def ask(env: dict, *words: str):
    """`hub_rows(*words)`, or the text of its error, in a process with this environment, which is read at its start."""
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
    assert ask(env | dict(HF_HUB_OFFLINE="1"), "some/rows", "train") == ROWS


def test_what_the_hub_does_not_have_is_one_error(dataset, tmp_path):
    with RowsHub("some/rows", dataset) as hub:
        env = hub.environment(tmp_path / "home")
        assert "no/body" in (error := ask(env, "no/body", "train")) and error.startswith("error: ")
        assert "nowhere" in (error := ask(env, "some/rows", "nowhere")) and error.startswith("error: ")


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
