"""Is my curve normal? Reference runs: seeds of `tiny`, measured here, and published runs of GPT-2 124M.

docs/reference.json lists them. An entry has a `name`, its `source`, the `tokens` read at each validation, the `loss` of
each seed there, perhaps also as `bpb`, and `of`: the constants and facts of the data that a run must share with it. So
a recipe that changes has no band until `bench.py tiny` measures it again.

This file knows nothing of torch or models: it sees only the records of a log.
"""

import statistics
from pathlib import Path

from files import read_json

FILE = Path(__file__).resolve().parent.parent / "docs" / "reference.json"


def references(records: list[dict]) -> list[dict]:
    """The entries that fit a run."""
    run = next((record for record in reversed(records) if record["kind"] == "run"), {})
    own = (run.get("config") or {}) | (run.get("data") or {})
    known = read_json(FILE) if FILE.is_file() else []  # somebody may have copied the code alone
    return [entry for entry in known if all(own.get(key) == value for key, value in entry["of"].items())]


def place_in_band(records: list[dict]) -> str:
    """A line that compares the end of a run with the seeds of its recipe, "" if none were measured."""
    tokens = max((record.get("tokens") or 0 for record in records if record["kind"] == "train"), default=0)
    last = next((record["loss"] for record in reversed(records) if record["kind"] == "val"), None)
    for entry in references(records) if last is not None else []:
        ends = sorted(losses[-1] for losses in entry["loss"])
        if len(ends) > 2 and tokens == entry["tokens"][-1]:
            where = "within" if ends[0] <= round(last, 5) <= ends[-1] else "outside"  # the entry is rounded, too
            distance = (last - statistics.mean(ends)) / statistics.stdev(ends)
            seeds = f"the range of {entry['name']}, {ends[0]:.4f} to {ends[-1]:.4f}"
            return f"{where} {seeds}, {distance:+.1f} standard deviations from their mean\n"
    return ""
