"""A run's records: log.jsonl, one JSON object per line.

This file knows nothing of torch, models, or what a record is used for.
"""

import json
import sys
from pathlib import Path

from parts.cli import UserError, counted

Records = list[dict]


def read_log(path: Path) -> Records:
    """Read the records of a log.jsonl in file order. Lines that are not JSON, such as one that a kill cut off, or have
    no step are skipped with a note. Raises UserError if there is no such file."""
    if not path.is_file():
        raise UserError(f"{path} is not a file; pass a run directory, or its log.jsonl")
    records = []
    damaged = 0
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line, parse_constant=lambda name: None)
            record["step"] = int(record["step"])
            records.append(record)
        except (ValueError, OverflowError, RecursionError, KeyError, TypeError):
            damaged += 1
    if damaged:
        print(f"note: {path}: skipped {counted(damaged, 'damaged line')}", file=sys.stderr, flush=True)
    return records


def of_kind(records: Records, kind: str) -> Records:
    return [record for record in records if record.get("kind") == kind]


def newest_start(records: Records) -> dict:
    """Return the newest record of kind "run", which every start and resume adds; {} if there is none."""
    starts = of_kind(records, "run")
    return starts[-1] if starts else {}
