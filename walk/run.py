"""Run the Python blocks of the walk's pages, and compare their output with the one that a page shows.

    python walk/run.py                          # the quick blocks of all pages, one to two minutes on two cores
    python walk/run.py walk/1_it_works.md 5     # one station, with its slow blocks
    python walk/run.py walk/1_it_works.md --slow    # a page, with the blocks that train for minutes
    python walk/run.py walk/1_it_works.md 5 --write    # record what it prints in the page, and what it draws in walk/
    python walk/run.py walk/1_it_works.md --notebook out/1.ipynb    # write the page as a notebook, and run nothing

A station is everything under a heading `## 5 ...`. Its Python blocks share their names with each other, and all
stations of a page have those of its blocks marked `shared`, which run first. Before a block of which the page asks you
to predict something, a terminal asks for your guess. A block is followed by its output, which may be folded:

    ```python              ```python slow      runs with --slow, or when its station is asked for
    print(1 / 3)           ```python out/a     runs if there is a file out/a
    ```                    ```text within 5%   is compared with this tolerance, instead of 2%
    ```text                ```text within 0.1  the same, but absolute: for differences near 0
    0.3333                 ```text varies      its numbers are not compared: seconds
    ```                    ```text sampled     only the number of its lines is compared: what a model writes

Integers must be equal; numbers with a decimal point within 2%, or one unit of the last digit; rounding errors such as
3.1e-08 within a factor of ten. Blocks draw in out/pictures/. A picture there is compared with the one of that name in
walk/: its title, and a few numbers of everything that it shows (the key Data of a PNG), with the tolerance of its
block.

In a copy of a page, what differs below lines that you changed is listed, even within a tolerance, and is no failure.
Only --write records outputs and pictures; without it nothing that git tracks changes. The last line says PASS or FAIL,
how many blocks ran, and how many were left out and why. The exit code is 1 if anything else differs. This file knows
nothing of what a page is about.
"""

import contextlib
import difflib
import io
import json
import math
import os
import re
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # before docs/, where `run` would be this file

from parts.cli import Positional, UserError, parse_args, script
from parts.files import replace_file

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "out" / "pictures"  # where blocks draw
KEPT = ROOT / "walk"  # where --write keeps what they drew
TOLERANCE = 0.02  # of a number with a decimal point: what fp32 in another order of summation changes in a short run
START = """import os
import sys
from pathlib import Path

for folder in (Path.cwd(), *Path.cwd().parents):  # a notebook starts in its own folder
    if (folder / "train_gpt2.py").exists():
        os.chdir(folder)
        break
sys.path.insert(0, os.getcwd())"""
FENCE = re.compile(
    r"^```python(?P<marks>[^\n]*)\n(?P<code>.*?)^```\n"
    r"(?:\n*(?:<details>[^\n]*\n+)?^```text(?P<how>[^\n]*)\n(?P<printed>.*?)^```$)?",
    re.M | re.S,
)
PREDICT = re.compile(r"(?i)\*\*Predict\*\*((?:(?!\n\n|```).)*?):?\s*\Z", re.S)  # right before a block
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Config:
    page: Annotated[str, Positional] = ""  # a Markdown file; empty for all pages of the walk
    station: Annotated[str, Positional] = ""  # the number of a station; empty for all
    slow: bool = False  # also run the blocks that take minutes
    write: bool = False  # record outputs in the page and pictures in walk/, instead of comparing them
    notebook: str = ""  # write the page as this .ipynb, and run nothing


@dataclass(frozen=True)
class Block:
    """Python, and what it prints."""

    code: str
    question: str  # what the page asks to predict, "" if nothing
    line: int  # of the page, where the code begins
    marks: tuple[str, ...]  # words after ```python
    how: tuple[str, ...]  # words after ```text
    printed: str | None  # None where the page shows nothing
    span: tuple[int, int]  # where `printed` is in the page


@dataclass(frozen=True)
class Station:
    number: str  # "" before the first one
    title: str
    blocks: list[Block]


def main() -> None:
    config = parse_args(Config, description=__doc__)
    paths = [Path(config.page).resolve()] if config.page else walk_pages()
    for path in paths:
        if not path.is_file():
            raise UserError(f"there is no page {config.page}; pass a Markdown file, such as walk/1_it_works.md")
    if config.notebook:
        if not config.page:
            raise UserError("--notebook makes a notebook of one page; name it first")
        target = Path(config.notebook)
        replace_file(target, json.dumps(notebook(paths[0], target), ensure_ascii=False, indent=1) + "\n")
        print(f"wrote {target}")
        return
    os.chdir(ROOT)
    found = Counter()
    for path in paths:
        found += run_page(path, config)
    print("\n" + verdict(found, config))
    if found["different"]:
        sys.exit(1)


def walk_pages() -> list[Path]:
    return sorted((ROOT / "walk").glob("[0-9]_*.md"))


def run_page(path: Path, config: Config) -> Counter:
    """Run the stations of a page, or the one that is asked for; return how many blocks did what."""
    stations = read_page(path)
    wanted = [station for station in stations if station.number and config.station in ("", station.number)]
    if not wanted:
        numbers = ", ".join(station.number for station in stations if station.number)
        raise UserError(f"{config.page} has no station {config.station}; choose from {numbers}")
    allowed = {"slow"} if config.slow or config.station else set()
    names = shared_names(stations, path, config)
    found = Counter()
    for station in wanted:
        found += run_station(station, dict(names), path, allowed, config)
    return found


def verdict(found: Counter, config: Config) -> str:
    """One line: PASS or FAIL, and how many blocks did what."""
    page = config.page or "the pages"
    left_out = [f"{n} {name.removeprefix('without ')}" for name, n in found.items() if name.startswith("without ")]
    more = f"; left out: {', '.join(left_out)}" if left_out else ""
    if found["changed"]:
        more = f"; {found['changed']} differ, as you changed them{more}"
    if found["different"]:
        return f"FAIL: {found['different']} of {found['ran']} blocks differ from {page}{more}"
    done = "were recorded in" if config.write else "ran as on"
    return f"PASS: {found['ran'] - found['changed']} blocks {done} {page}{more}"


def shared_names(stations: list[Station], path: Path, config: Config) -> dict:
    """The names of all shared blocks."""
    names = {}
    blocks = [block for station in stations for block in station.blocks if "shared" in block.marks]
    if run_station(Station("", "", blocks), names, path, {"shared"}, config)["different"]:
        sys.exit("FAIL: a shared block differs, and all stations need it")
    return names


def run_station(station: Station, names: dict, path: Path, allowed: set, config: Config) -> Counter:
    """Run the blocks, show what they print and what differs. Leaves their names in `names`; returns how many blocks
    `ran`, are `different`, and were left out `without` a mark such as slow."""
    found, began = Counter(), time.perf_counter()
    if station.number:
        print(f"\n--- {station.number} {station.title}", flush=True)
    edits = changed_lines(station, path)
    for block in station.blocks:
        missing = [mark for mark in block.marks if mark not in allowed and not (ROOT / mark).exists()]
        if missing:
            if missing != ["shared"]:
                print(f"(line {block.line} is left out: {', '.join(missing)})")
                found[f"without {missing[0]}"] += 1
            continue
        found["ran"] += 1
        drawn_before = pictures()
        guess = ask(block.question)
        printed, raised = run_block(block, names, path)
        if guess:
            print(f"your guess: {guess}")
        drawn = [picture for picture, when in pictures().items() if drawn_before.get(picture) != when]
        if config.write and not raised:
            record(path, block, printed, drawn)
            continue
        problem = raised or difference(block.printed or "", printed, block.how)
        for picture in drawn:
            problem = problem or difference_of_pictures(picture, block.how)
            print(f"drawn: {os.path.relpath(picture, ROOT)}")
        end = block.line + block.code.count("\n")
        changed = [line for line in edits if line < end]
        if changed and not raised:
            lines = f"line{'s' if len(changed) > 1 else ''} {' and '.join(map(str, changed))}"
            tolerated = ""
            if not problem:
                exactly = ("varies",) if "varies" in block.how else ("within", "0")
                problem = difference(block.printed or "", printed, exactly)
                tolerated = f", within the tolerance of this block ({' '.join(block.how) or '2%'})"
            if problem:
                found["changed"] += 1
                print(f"line {block.line} differs, as you changed {lines}{tolerated}: {problem}", flush=True)
            elif changed[-1] >= block.line:
                print(f"line {block.line} prints the same, although you changed {lines}", flush=True)
        elif problem:
            found["different"] += 1
            print(f"LINE {block.line} DIFFERS: {problem}", flush=True)
    if station.number:
        print(f"({time.perf_counter() - began:.1f} s)", flush=True)
    return found


def ask(question: str) -> str:
    """The reader's guess, where there is a reader at a terminal."""
    if not question or not sys.stdin.isatty():
        return ""
    print(f"\nPredict {question}")
    return input("your guess: ").strip()


# --------------------------------------------------------------------------------------------------------- the page


def read_page(path: Path) -> list[Station]:
    """What comes before the first station, and the stations."""
    text = path.read_text(encoding="utf-8")
    heads = list(re.finditer(r"^## (\d+) (.+)$", text, re.M))
    starts = [0, *(head.start() for head in heads), len(text)]
    stations = []
    for i, start in enumerate(starts[:-1]):
        blocks = [make_block(found, text) for found in FENCE.finditer(text, start, starts[i + 1])]
        number, title = heads[i - 1].groups() if i else ("", "")
        stations.append(Station(number, title, blocks))
    return stations


def make_block(found: re.Match, text: str) -> Block:
    line = text.count("\n", 0, found.start("code")) + 1
    asked = PREDICT.search(text, 0, found.start())
    question = " ".join(asked[1].split()) if asked else ""
    marks = tuple((found["marks"] or "").split())
    how = tuple((found["how"] or "").split())
    return Block(found["code"], question, line, marks, how, found["printed"], found.span("printed"))


def changed_lines(station: Station, path: Path) -> list[int]:
    """The lines of code, the first of each edit, that differ from the station of this title in the walk."""
    if path in walk_pages() or not station.number:
        return []
    title = (station.number, station.title)
    originals = [s for page in walk_pages() for s in read_page(page) if (s.number, s.title) == title]
    if not originals:
        return []
    here = numbered_code(station)
    before = [text for _, text in numbered_code(originals[0])]
    matcher = difflib.SequenceMatcher(None, before, [text for _, text in here], autojunk=False)
    edits = [start for kind, _, _, start, _ in matcher.get_opcodes() if kind != "equal"]
    return [here[min(start, len(here) - 1)][0] for start in edits]


def numbered_code(station: Station) -> list[tuple[int, str]]:
    """[(line of the page, code)] of all blocks."""
    lines = []
    for block in station.blocks:
        lines += enumerate(block.code.splitlines(), block.line)
    return lines


def notebook(path: Path, target: Path) -> dict:
    """The page as the JSON of a notebook (nbformat 4): its Python blocks are cells, and so is the text between them."""
    text = path.read_text(encoding="utf-8")
    link = re.compile(r"\]\((?!https?:|#)([^)\s#]+)")

    def from_target(found: re.Match) -> str:
        return f"]({os.path.relpath(path.parent / found[1], target.resolve().parent)}"

    cells = []
    end = 0
    for found in re.finditer(r"^```python[^\n]*\n(.*?)^```\n", text, re.M | re.S):
        cells.append(cell("markdown", link.sub(from_target, text[end : found.start()])))
        if len(cells) == 1:
            cells.append(cell("code", START))
        cells.append(cell("code", found[1]))
        end = found.end()
    cells.append(cell("markdown", link.sub(from_target, text[end:])))
    python = dict(name="python3", display_name="Python 3", language="python")
    cells = [dict(id=f"cell{i}", **content) for i, content in enumerate(cells) if content["source"]]
    return dict(cells=cells, metadata=dict(kernelspec=python), nbformat=4, nbformat_minor=5)


def cell(kind: str, text: str) -> dict:
    content = dict(cell_type=kind, metadata={}, source=text.strip().splitlines(keepends=True))
    if kind == "code":
        content |= dict(execution_count=None, outputs=[])
    return content


def record(path: Path, block: Block, printed: str, drawn: list[Path]) -> None:
    """Replace what the page shows for a block, and the pictures that the block has drawn."""
    text = path.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):  # its place is looked up again: an earlier block may have moved it
        if found["code"] == block.code and found["printed"] not in (None, printed):
            start, end = found.span("printed")
            replace_file(path, text[:start] + printed + text[end:])
            break
    for picture in drawn:
        replace_file(KEPT / picture.name, picture.read_bytes())


# -------------------------------------------------------------------------------------------------------- a block


class Shown(io.StringIO):
    """Keeps what a block prints, and shows it at once: some take minutes."""

    def __init__(self):
        super().__init__()
        self.terminal = sys.stdout

    def write(self, text: str) -> int:
        self.terminal.write(text)
        self.terminal.flush()
        return super().write(text)


def run_block(block: Block, names: dict, path: Path) -> tuple[str, str]:
    """(what it printed, its traceback or ""). Its names are left in `names`."""
    # as many empty lines before it as the page has, so that a traceback shows the line of the page
    code, out = "\n" * (block.line - 1) + block.code, Shown()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, str(path), "exec"), names)
    except Exception:
        return out.getvalue(), traceback.format_exc()
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines()), ""


def difference(expected: str, printed: str, how: tuple[str, ...] = ()) -> str:
    """The first line in which two outputs differ, "" where none does; runs of spaces count as one."""
    wanted = expected.splitlines()
    found = printed.splitlines()
    for want, line in zip(wanted, found, strict=False):
        if not same_line(want, line, how):
            return f"the page says\n    {want}\nand printed was\n    {line}"
    return "" if len(wanted) == len(found) else f"{len(found)} lines were printed, the page has {len(wanted)}"


def same_line(expected: str, printed: str, how: tuple[str, ...]) -> bool:
    if "sampled" in how:
        return True
    words = [" ".join(NUMBER.sub(" # ", line).split()) for line in (expected, printed)]
    if words[0] != words[1] or "varies" in how:
        return words[0] == words[1]
    tolerance = how[how.index("within") + 1] if "within" in how else ""
    numbers = [NUMBER.findall(line) for line in (expected, printed)]
    return all(same_number(a, b, tolerance) for a, b in zip(*numbers, strict=True))


def same_number(expected: str, printed: str, tolerance: str) -> bool:
    """Whether two numbers agree within `tolerance`: "5%", "0.1", or "" for what the top of this file says."""
    a, b = (float(number.replace(",", "")) for number in (expected, printed))
    if tolerance and not tolerance.endswith("%"):
        return abs(a - b) <= float(tolerance)
    if a == b:
        return True
    if "e-" in expected:
        return a * b > 0 and abs(math.log10(a / b)) <= 1
    if "." not in expected and "e" not in expected and not tolerance:
        return False
    decimals = len(expected.partition(".")[2]) if "e" not in expected else 300
    last_digit = 1.001 * 10.0**-decimals if "." in expected else 0
    relative = float(tolerance[:-1]) / 100 if tolerance else TOLERANCE
    return abs(a - b) <= relative * abs(a) + last_digit


# ------------------------------------------------------------------------------------------------------- pictures


def pictures() -> dict[Path, int]:
    """{picture of any block: when it was drawn}"""
    return {path: path.stat().st_mtime_ns for path in PICTURES.glob("*.*")}


def difference_of_pictures(drawn: Path, how: tuple[str, ...]) -> str:
    """What a picture that was just drawn shows differently from the one in walk/, "" if nothing."""
    kept = KEPT / drawn.name
    if not kept.exists():
        return f"walk/{drawn.name} is missing; --write puts it there"
    if drawn.suffix == ".svg":
        return "" if drawn.read_bytes() == kept.read_bytes() else f"another walk/{drawn.name} was drawn"
    old = Image.open(kept).text
    new = Image.open(drawn).text
    texts = [f"{text['Title']}\n{text['Data']}" for text in (old, new)]
    if "within" in how and "%" not in how[-1]:  # an absolute tolerance is one of values, not of fractions of a scale
        texts = [re.sub(r"(\S+) x \((.*?)\)", scaled, text) for text in texts]
    problem = difference(*texts, how)
    return problem and f"in walk/{drawn.name} {problem}"


def scaled(found: re.Match) -> str:
    """`-1.00 0.50` of `2 x (-0.5, 0.25)`."""
    return " ".join(f"{float(found[1]) * float(fraction):.5f}" for fraction in found[2].split(","))


if __name__ == "__main__":
    script(main)
