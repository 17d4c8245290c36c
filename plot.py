"""Curves of one run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

    python plot.py out/gpt2                                  # -> plot.png
    python plot.py out/gpt2 out/speedrun --x tokens          # which of them needs fewer tokens
    python plot.py out/gpt2 out/speedrun --x flops           # and by what factor it needs fewer operations
    python plot.py out/gpt2 out/bpe4k --y bpb                # with different tokenizers, compare bits per byte
    python plot.py out/tiny --reference                      # is this curve normal? draws known runs behind it
    python plot.py out/record --forecast docs/forecast_2.json  # did it end where the forecast said?

RUN is a run directory or its log.jsonl. Training draws its learning_curve.png with the same function, of run/curves.py.
This file knows nothing of torch or models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from tyro.conf import Positional, arg

from cli import UserError, parse_args, script
from files import read_json, set_aside
from run.curves import curves_of, draw, has_loss, placed, read_log
from run.reference import FILE, references


@dataclass(frozen=True)
class Config:
    runs: Annotated[tuple[str, ...], Positional, arg(metavar="RUN [RUN ...]")]  # run directories, or log.jsonl files
    x: Literal["steps", "tokens", "seconds", "flops"] = "steps"  # the x axis
    y: Literal["loss", "bpb"] = "loss"  # loss in nats per token, or in bits per byte
    reference: bool = False  # also draw the runs of docs/reference.json that are comparable with the first run
    forecast: str = ""  # file that `bench.py forecast` wrote: draw the first run over its fan, and judge it
    out: str = "plot.png"  # picture to write: .png, .svg or .pdf; an existing one is renamed


def main() -> None:
    config = parse_args(Config, description=__doc__)
    out = Path(config.out)
    if out.suffix not in (".png", ".svg", ".pdf") or out.is_dir():
        raise UserError(f"--out {out} is not the name of a picture; give one that ends in .png, .svg or .pdf")
    if not config.runs or "" in config.runs:
        raise UserError("no run was given, or an empty name; give the directory of a run, or its log.jsonl")
    runs = {}
    for name in config.runs:
        path = Path(name) / "log.jsonl" if Path(name).is_dir() else Path(name)
        runs[name.removesuffix("/log.jsonl").rstrip("/") or name] = records = read_log(path)
        if not has_loss(curves_of(records)):
            raise UserError(f"{path} has no loss to draw; is it the log of a training run?")
    first = next(iter(runs))
    known = references(runs[first]) if config.reference else []
    if config.reference and not known:
        raise UserError(f"--reference: {FILE} has no run with the constants and the data of {first}; leave it out")
    fan = read_fan(Path(config.forecast)) if config.forecast else None
    if fan is not None and config.y != "loss":
        raise UserError("--forecast is in nats per token; leave out --y bpb")
    said = [] if fan is None else [judged(first, curves_of(runs[first]), fan)]
    aside = f"; the earlier one is now {set_aside(out)}" if out.exists() else ""
    said += draw(runs, out, config.x if fan is None else "tokens", config.y, known, fan)
    print(*said, *(f"{entry['name']}: {entry['source']}" for entry in known), f"drawn in {out}{aside}", sep="\n")


def read_fan(path: Path) -> np.ndarray:
    """(points, 4): tokens; and the lowest, middle and highest loss of a run that ends there. Raises UserError."""
    try:
        return np.array(read_json(path)["fan"], float).reshape(-1, 4)
    except (LookupError, TypeError, ValueError):
        raise UserError(f"{path} has no fan; give a file that bench.py forecast --forecast wrote") from None


def judged(label: str, run: dict, fan: np.ndarray) -> str:
    """Whether the last validation loss is inside the fan."""
    (at, losses), (first, *_, last) = placed(run, "tokens", label)["val", "loss"], fan[:, 0]
    tokens = float(at[-1]) if len(at) else 0
    if not first <= tokens <= last:
        return f"{label}: not judged; the forecast is for runs that end at {first:,.0f} to {last:,.0f} tokens"
    low, high = (float(np.interp(tokens, fan[:, 0], fan[:, side])) for side in (1, 3))
    where = "inside" if low <= losses[-1] <= high else "outside"
    return f"{label}: {losses[-1]:.4f} after {tokens:,.0f} tokens, {where} the forecast's {low:.4f} to {high:.4f}"


if __name__ == "__main__":
    script(main)
