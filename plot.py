"""Draw the curves of one run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

    python plot.py out/gpt2                                  # -> plot.png
    python plot.py out/gpt2 out/speedrun --x tokens          # which run needs fewer tokens
    python plot.py out/gpt2 out/bpe4k --y bpb                # with different tokenizers, compare bits per byte

RUNS are run directories, or their log.jsonl. Training draws its learning_curve.png with the same function, in
parts/curves.py. This file knows nothing of torch or models.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from parts.cli import Positional, UserError, parse_args, script
from parts.curves import picture
from parts.files import replace_file, set_aside
from parts.log import Records, read_log


@dataclass(frozen=True)
class Config:
    runs: Annotated[tuple[str, ...], Positional]  # run directories, or log.jsonl files
    x: Literal["steps", "tokens", "seconds"] = "steps"  # the x axis
    y: Literal["loss", "bpb"] = "loss"  # loss in nats per token, or in bits per byte
    out: str = "plot.png"  # picture to write: .png, .svg or .pdf; an existing one is renamed


def main() -> None:
    config = parse_args(Config, description=__doc__)
    out = Path(config.out)
    if out.suffix not in (".png", ".svg", ".pdf") or out.is_dir():
        raise UserError(f"--out {out} is not a picture; choose a name that ends in .png, .svg or .pdf")
    runs = dict(map(named_log, config.runs))
    content = picture(runs, out.suffix[1:], config.x, config.y)
    aside = f"; the earlier one is now {set_aside(out)}" if os.path.lexists(out) else ""
    replace_file(out, content)
    print(f"wrote {out}{aside}")


def named_log(name: str) -> tuple[str, Records]:
    """Return the label and the records of a run."""
    path = Path(name)
    if path.is_dir():
        path /= "log.jsonl"
    return name.removesuffix("/log.jsonl").rstrip("/"), read_log(path)


if __name__ == "__main__":
    script(main)
