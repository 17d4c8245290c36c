"""README.md and docs/: what they point to is there, and as long as they say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "bpe/README.md", *sorted(ROOT.glob("docs/*.md"))]


def line_counts() -> list[tuple[list[str], list[int]]]:
    """(files, their lines) of every row in the README's table of files."""
    rows = re.findall(r"^\| (`[^|]+) \| ([\d +]+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    return [(re.findall(r"`([^`]+\.py)`", files), [int(n) for n in numbers.split("+")]) for files, numbers in rows]


def test_the_table_of_files_is_complete_and_its_line_counts_are_right_within_a_tenth():
    rows = line_counts()
    for files, numbers in rows:
        assert len(files) == len(numbers), (files, numbers)
        for file, said in zip(files, numbers, strict=True):
            n = len((ROOT / file).read_text(encoding="utf-8").splitlines())
            assert abs(n - said) <= max(0.1 * n, 5), f"{file} has {n} lines, README says {said}"
    listed = {file for files, _ in rows for file in files}
    assert {path.name for path in ROOT.glob("*.py")} <= listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_picture_is_there(page):
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_script_that_a_command_names_is_there(page):
    blocks = "\n".join(re.findall(r"^```(?:sh|bash)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
    for script in re.findall(r"\b(?:python3?|torchrun[^#\n]*?) ((?:\w+/)*\w+\.py)\b", blocks):
        assert (ROOT / script).is_file(), script
