"""Curves of one run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

    python plot.py out/gpt2                                  # -> plot.png
    python plot.py out/gpt2 out/speedrun --x tokens          # which of them needs fewer tokens
    python plot.py out/gpt2 out/speedrun --x seconds --out race.png

RUN is a run directory or its log.jsonl. Training draws its learning_curve.png with the same function, of run/curves.py.
This file knows nothing of torch or models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from cli import UserError, parse_args, script
from run.curves import curves_of, draw, has_loss, read_log

Runs = Annotated[tuple[str, ...], Positional, arg(metavar="RUN [RUN ...]")]


@dataclass(frozen=True)
class Config:
    runs: Runs  # run directories, or log.jsonl files
    x: Literal["steps", "tokens", "seconds", "flops"] = "steps"  # what the loss is drawn over
    out: str = "plot.png"  # the picture: .png, .svg or .pdf


def main() -> None:
    config = parse_args(Config, description=__doc__)
    out = Path(config.out)
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {out}: the name of the picture must end in .png, .svg or .pdf")
    if not config.runs:
        raise UserError("no run was given; name the directory of a run, or its log.jsonl")
    runs = {}
    for name in config.runs:
        path = Path(name) / "log.jsonl" if Path(name).is_dir() else Path(name)
        runs[name.removesuffix("/log.jsonl").rstrip("/") or name] = records = read_log(path)
        if not has_loss(curves_of(records)):
            raise UserError(f"{path} has no loss to draw; is it the log of a training run?")
    draw(runs, out, config.x)
    print(f"drawn in {out}")


if __name__ == "__main__":
    script(main)
