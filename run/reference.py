"""Is my curve normal? Reference runs: seeds of `tiny`, measured here, and published runs of GPT-2 124M.

docs/reference.json lists them. An entry has a `name`, its `source`, the `tokens` read at each validation, the `loss` of
each seed there, perhaps also as `bpb`, and `of`: the constants and facts of the data that a run must share with it. So
a recipe that changes has no band until `bench.py tiny` measures it again.

This file knows nothing of torch or models: it sees only the records of a log.
"""

import statistics
from pathlib import Path

from files import read_json
from run.records import Records, newest_start, of_kind

FILE = Path(__file__).resolve().parent.parent / "docs" / "reference.json"


def references(records: Records) -> list[dict]:
    """The entries that fit a run."""
    if not FILE.is_file():  # somebody may have copied the code alone
        return []
    start = newest_start(records)
    own = (start.get("config") or {}) | (start.get("data") or {})
    return [entry for entry in read_json(FILE) if entry["of"].items() <= own.items()]


def place_in_band(records: Records) -> str:
    """A line that compares the end of a run with the seeds of its recipe, "" if none were measured."""
    tokens = max((step.get("tokens") or 0 for step in of_kind(records, "train")), default=0)
    val = of_kind(records, "val")
    if not val or val[-1]["loss"] is None:
        return ""
    loss = val[-1]["loss"]
    for entry in references(records):
        ends = sorted(losses[-1] for losses in entry["loss"])
        if len(ends) > 2 and tokens == entry["tokens"][-1]:
            low, high = ends[0], ends[-1]
            where = "within" if low <= round(loss, 5) <= high else "outside"  # the entry is rounded, too
            distance = (loss - statistics.mean(ends)) / statistics.stdev(ends)
            seeds = f"the range of {entry['name']}, {low:.4f} to {high:.4f}"
            return f"{where} {seeds}, {distance:+.1f} standard deviations from their mean\n"
    return ""
