"""Benchmarks: every figure in docs/benchmarks.md comes from one of these commands.

    python bench.py --help                # the benchmarks, one per line
    python bench.py NAME --help           # one benchmark's comparison, its fairness and constants
    python bench.py NAME --json FILE      # prints a table, and keeps all figures with the machine's description

Each benchmark is a file of benchmarks/ with a Config and a `run(config, rt)` that yields rows: a row is a dict with a
`name`, and replaces the earlier row of that name. FILE is written after every row, so an interrupted benchmark keeps
the rows that it has. This file knows nothing of what is measured.
"""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import machine, markdown_table
from parts.cli import UserError, parse_args, script
from parts.files import replace_file
from parts.runtime import Runtime

# Read, not imported: some benchmarks import packages that may not be installed.
FILES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("benchmarks/*.py"))}
NAMES = [name for name, content in FILES.items() if "\ndef run(config" in content]


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("-h", "--help"):
        print(__doc__)
        for name in NAMES:
            title = FILES[name].splitlines()[0].removeprefix('"""')
            print(f"    {name:<12}{title}")
        return
    if name not in NAMES:
        raise UserError(f"{name!r} is not a benchmark; choose one: python bench.py {' | '.join(NAMES)}")
    benchmark = importlib.import_module(f"benchmarks.{name}")
    config = parse_args(benchmark.Config, sys.argv[2:], prog=f"bench.py {name}", description=benchmark.__doc__)
    rt = Runtime.setup(getattr(config, "device", "cpu"), "float32")  # compare has none: its commands choose
    about = machine(rt)
    title = benchmark.__doc__.splitlines()[0]
    rt.print(f"{name}: {title}\n{about}")
    rows = {}
    for row in benchmark.run(config, rt):
        rows[row["name"]] = row
        if config.json and rt.is_main:
            content = dict(benchmark=name, machine=about, config=asdict(config), rows=list(rows.values()))
            replace_file(Path(config.json), json.dumps(content, indent=2) + "\n")
    rt.print("\n" + markdown_table(list(rows.values())), end="")


if __name__ == "__main__":
    script(main)
