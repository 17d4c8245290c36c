"""manifest.json, beside shards: where they come from, what is in them, and where an interrupted fineweb.py resumes.

This file knows nothing of what shards, tokenizers or sources hold: it opens none of them.
"""

import json
from pathlib import Path

from cli import UserError
from files import read_json, replace_file

# a type for each value; a list has one form for all of its items
FORM = dict(
    source=str,
    tokenizer=str,
    tokens=int,
    documents=int,
    bytes=int,
    skipped=dict,
    shards=[dict(file=str, tokens=int, sha256=str)],
)
UNFINISHED = dict(
    next=dict(file=int, unit=int, skip=int),
    files=[dict(name=str)],
    shard_size=int,
)


def new_manifest(**constants) -> dict:
    return constants | dict(tokens=0, documents=0, bytes=0, skipped={}, shards=[])


def read_manifest(directory: Path) -> dict:
    """`manifest.json` of a shard directory; {} if there is none. Raises UserError for a damaged one.

    It has all that FORM says, and in a directory that fineweb.py is still writing what UNFINISHED says.
    """
    path = directory / "manifest.json"
    try:
        manifest = read_json(path)
    except FileNotFoundError:
        return {}
    if type(manifest) is not dict:
        manifest = {}
    form = FORM | UNFINISHED if "next" in manifest else FORM
    for key in form:
        if not has_form(manifest.get(key), form[key]):
            raise UserError(f"{path} is damaged: {key} is missing or of the wrong type; write the shards again")
    return manifest


def has_form(value: object, form: object) -> bool:
    if type(form) is list:
        return type(value) is list and all(has_form(item, form[0]) for item in value)
    if type(form) is dict:
        return type(value) is dict and all(has_form(value.get(key), form[key]) for key in form)
    return type(value) is form  # not isinstance: to that a bool is an int


def save_manifest(directory: Path, manifest: dict) -> None:
    """Replace the manifest; it is on the disk when this returns, and an interruption leaves the old one."""
    replace_file(directory / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def summary(manifest: dict) -> str:
    skipped = ", ".join(f"{n:,} ({reason})" for reason, n in manifest["skipped"].items())
    return (
        f"{manifest['tokens']:,} tokens in {len(manifest['shards'])} shards, {manifest['documents']:,} documents, "
        f"{manifest['bytes'] / max(manifest['tokens'], 1):.2f} bytes per token, skipped documents: {skipped or 'none'}"
    )


def listed_shards(directory: Path) -> dict[Path, dict]:
    """{path: its entry} of all shards in the manifest of a directory; {} if there is none."""
    return {directory / entry["file"]: entry for entry in read_manifest(directory).get("shards", [])}
