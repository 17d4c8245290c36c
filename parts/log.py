"""The records of a run: log.jsonl, one JSON object per line, read whatever has happened to the file.

This file knows nothing of torch, models, or what a record is used for.
"""

import json
import sys
from pathlib import Path

from parts.cli import UserError, counted

Records = list[dict]


def read_log(path: Path) -> Records:
    """The records of a log.jsonl in file order, each a dict with a `kind` and an integer `step`.

    Skips damaged lines, with one warning on stderr that names them. Raises UserError if there is no such file.
    """
    if not path.is_file():
        raise UserError(f"{path} is no file; give the directory of a run, or its log.jsonl")
    records = []
    damaged = []
    with path.open("rb") as lines:  # bytes: a text of a sample may end lines in ways of its own
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"), parse_constant=lambda name: None)
                if type(record["step"]) is not int or type(record["kind"]) is not str:
                    raise TypeError
                records.append(record)
            except (ValueError, TypeError, KeyError):
                damaged.append(str(number))
    if damaged:
        lines = ", ".join(damaged[:5]) + (", ..." if len(damaged) > 5 else "")
        print(f"warning: {path}: skipped {counted(len(damaged), 'damaged line')}: {lines}", file=sys.stderr, flush=True)
    return records


def of_kind(records: Records, kind: str) -> Records:
    return [record for record in records if record["kind"] == kind]


def newest_start(records: Records) -> dict:
    """The newest record of kind "run", which every start and resume adds; {} if there is none."""
    starts = of_kind(records, "run")
    return starts[-1] if starts else {}
