"""The records of a run: log.jsonl, one JSON object per line, read whatever has happened to the file.

This file knows nothing of torch, models, or what a record is used for.
"""

import json
import sys
from pathlib import Path

from parts.cli import UserError

Records = list[dict]
NEEDED = {"train": "loss", "val": "loss", "sample": "text"}  # besides the step and the kind
NUMBERS = ("loss", "lr", "bpb", "dt_ms", "tokens_per_sec", "tokens", "memory_gib", "skipped_steps")
TYPES = {  # of what people and programs read from a log; null where it was not known or not finite
    **dict.fromkeys(NUMBERS, int | float | None),
    **dict.fromkeys(("command", "commit", "text", "base"), str | None),
    **dict.fromkeys(("config", "written", "data", "hub"), dict),
}


def read_log(path: Path) -> Records:
    """The records of a log.jsonl in file order, each a dict with a `kind` and an integer `step`.

    Skips damaged lines, with one warning on stderr that names them. Raises UserError if there is no such file.
    """
    if path.is_dir():
        raise UserError(f"{path} is a directory, not a log; move it away, or give another run")
    if not path.is_file():
        raise UserError(f"{path} does not exist; give the directory of a run, or its log.jsonl")
    records = []
    damaged = []
    with path.open("rb") as lines:  # bytes: a text of a sample may end lines in ways of its own
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                records.append(validate_record(json.loads(line.decode("utf-8-sig"))))
            except (ValueError, TypeError, KeyError, RecursionError):
                damaged.append(str(number))
    if damaged:
        print(f"warning: {path}: skipped damaged lines: line {', '.join(damaged)}", file=sys.stderr, flush=True)
    return records


def validate_record(record: dict) -> dict:
    """`record`, if it has a step, a kind, what that kind needs, and the right types. Raises ValueError, KeyError or
    TypeError."""
    step = record["step"]
    if type(step) is not int or abs(step) > 1e15:
        raise ValueError(step)
    kind = record["kind"]
    if not isinstance(kind, str) or NEEDED.get(kind, "step") not in record:
        raise ValueError(kind)
    for name in TYPES.keys() & record.keys():
        if not isinstance(record[name], TYPES[name]):
            raise ValueError(name)
        if isinstance(record[name], int) and abs(record[name]) > 1e300:  # more than a float holds
            raise ValueError(name)
    return record


def of_kind(records: Records, kind: str) -> Records:
    return [record for record in records if record["kind"] == kind]


def newest_start(records: Records) -> dict:
    """The newest record of kind "run", which every start and resume adds; {} if there is none."""
    starts = of_kind(records, "run")
    return starts[-1] if starts else {}
