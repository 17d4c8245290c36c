"""All rows of a small dataset at once, with all their columns: of a file, or of a split on the Hugging Face hub.

Callers check what each row has to hold. This file knows nothing of tokens, models or torch.
"""

import json
from pathlib import Path

from cli import UserError


def file_rows(path: str, option: str = "--data") -> list:
    """The rows of a .json file, which holds a list, or of a .jsonl file, one per line; at least one.

    Raises UserError, which names the line that is not JSON; `option` is the flag that takes the file.
    """
    remedy = f"{option} takes a .json or .jsonl file of rows"
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (ValueError, OSError) as e:  # ValueError: not UTF-8
        raise UserError(f"{path} cannot be read as text: {e}; {remedy}") from None
    rows = []
    number = 1  # of the line
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:  # a line of .jsonl ends at \n alone: a JSON string may hold the other line separators of Unicode
            for number, line in enumerate(text.split("\n"), start=1):  # noqa: B007 - the error below names the line
                if line.strip():
                    rows.append(json.loads(line))
    except (ValueError, RecursionError) as e:
        number += getattr(e, "lineno", 1) - 1
        raise UserError(f"{path} is not JSON in line {number}: {getattr(e, 'msg', e)}; correct it there") from None
    if not rows:
        raise UserError(f"{path} has no rows; {remedy}")
    return rows


def hub_rows(repo: str, split: str, option: str = "--data") -> list[dict]:
    """All rows of a split of a dataset on the hub. Raises UserError, which names the option that takes a local file.

    `datasets` does the work: it keeps a copy in its cache, retries when the network fails, and follows HF_ENDPOINT.
    """
    import datasets  # a slow import (0.6 s), which --help and local files do not need

    try:
        return datasets.load_dataset(repo, split=split).to_list()
    except Exception as e:  # of the network, the hub, the library or the data: each has its own classes
        raise UserError(
            f"cannot load the split {split} of {repo} from the hub: {e}; "
            f"check the network, set HF_ENDPOINT to a mirror, or give a local file with {option}"
        ) from e
