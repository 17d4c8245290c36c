"""The records of a run: log.jsonl, one JSON object per line, read whatever has happened to the file.

This file knows nothing of torch, models, or what a record is used for.
"""

import json
import sys
from pathlib import Path

from cli import UserError

Records = list[dict]


def read_log(path: Path) -> Records:
    """The records of a log.jsonl in file order, each a dict with a `kind` and an integer `step`.

    Skips damaged lines, with one warning on stderr that names them. Raises UserError if there is no such file.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the directory of a run, or its log.jsonl")
    records = []
    damaged = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):  # not splitlines, which also splits at U+2028
        if not line.strip():
            continue
        try:
            records.append(checked(json.loads(line.decode("utf-8-sig"))))
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged.append(str(number))
    if damaged:
        print(f"warning: {path}: skipped damaged lines: line {', '.join(damaged)}", file=sys.stderr, flush=True)
    return records


def checked(record: dict) -> dict:
    """`record`, if it has a step, a kind, and what that kind needs. Raises ValueError, KeyError or TypeError."""
    kind, step = record["kind"], record["step"]
    needed = record[dict(train="loss", val="loss", sample="text").get(kind, "step")]
    numbers = [record.get(name) for name in ("loss", "dt_ms", "tokens_per_sec")]  # null if they were not finite
    right = type(step) is int and abs(step) < 1e15 and isinstance(needed, str) == (kind == "sample")
    if not (right and isinstance(kind, str) and all(type(n) in (int, float, type(None)) for n in numbers)):
        raise ValueError(record)
    return record


def of_kind(records: Records, kind: str) -> Records:
    return [record for record in records if record["kind"] == kind]


def newest_start(records: Records) -> dict:
    """The newest record of kind "run", which every start and resume adds; {} if there is none."""
    return next(iter(of_kind(records, "run")[::-1]), {})
