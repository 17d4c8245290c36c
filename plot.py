"""Curves of one run, or of several in one picture: loss, HellaSwag, gradient norm, learning rate.

    python plot.py out/gpt2                                  # -> plot.png
    python plot.py out/gpt2 out/speedrun --x tokens          # which of them needs fewer tokens
    python plot.py out/gpt2 out/speedrun --x flops           # which of them needs fewer operations
    python plot.py out/gpt2 out/bpe4k --y bpb                # with different tokenizers, compare bits per byte
    python plot.py out/tiny --reference                      # is this curve normal? draws known runs behind it

RUN is a run directory or its log.jsonl. Training draws its learning_curve.png with the same function, of run/curves.py.
This file knows nothing of torch or models.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from cli import UserError, parse_args, script
from files import read_json, set_aside
from run.curves import curves_of, draw, has_loss
from run.records import Records, newest_start, read_log

REFERENCES = Path(__file__).resolve().parent / "docs" / "reference.json"


@dataclass(frozen=True)
class Config:
    runs: Annotated[tuple[str, ...], Positional, arg(metavar="RUN [RUN ...]")]  # run directories, or log.jsonl files
    x: Literal["steps", "tokens", "seconds", "flops"] = "steps"  # the x axis
    y: Literal["loss", "bpb"] = "loss"  # loss in nats per token, or in bits per byte
    reference: bool = False  # also draw runs of docs/reference.json with the same constants; llm.c's is on FineWeb
    out: str = "plot.png"  # picture to write: .png, .svg or .pdf; an existing one is renamed


def main() -> None:
    config = parse_args(Config, description=__doc__)
    out = Path(config.out)
    if out.suffix not in (".png", ".svg", ".pdf") or out.is_dir():
        raise UserError(f"--out {out} is not the name of a picture; give one that ends in .png, .svg or .pdf")
    if not config.runs or "" in config.runs:
        raise UserError("no run was given, or an empty name; give the directory of a run, or its log.jsonl")
    runs = dict(map(named_log, config.runs))
    first = next(iter(runs))
    known = references(runs[first]) if config.reference else []
    if config.reference and not known:
        raise UserError(f"--reference: {REFERENCES} has no run with the constants of {first}; leave it out")
    aside = f"; the earlier one is now {set_aside(out)}" if out.exists() else ""
    draw(runs, out, config.x, config.y, known)
    for entry in known:
        print(f"{entry['name']}: {entry['source']}")
    print(f"drawn in {out}{aside}")


def references(records: Records) -> list[dict]:
    """The known runs that fit a run: seeds of `tiny`, measured here, and published runs of GPT-2 124M.

    Each has a `name`, its `source`, the `tokens` read at each validation, the `loss` of each seed there, perhaps also
    as `bpb`, and `of`: the constants and facts of the data that a run must share with it. So a recipe that changes has
    none until `bench.py tiny` measures it again.
    """
    if not REFERENCES.is_file():  # somebody may have copied the code alone
        return []
    start = newest_start(records)
    own = (start.get("config") or {}) | (start.get("data") or {})
    return [entry for entry in read_json(REFERENCES) if entry["of"].items() <= own.items()]


def named_log(name: str) -> tuple[str, Records]:
    """The label and the records of a run. Raises UserError if it has no loss to draw."""
    path = Path(name)
    if path.is_dir():
        path /= "log.jsonl"
    records = read_log(path)
    if not has_loss(curves_of(records)):
        raise UserError(f"{path} has no loss to draw; is it the log of a training run?")
    return name.removesuffix("/log.jsonl").rstrip("/") or name, records


if __name__ == "__main__":
    script(main)
