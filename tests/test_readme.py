"""README.md and docs/: what they point to is there, and as long as they say."""

import re

import pytest

from tests.helpers import ROOT
from tests.test_house import DOORS

PAGES = [ROOT / "README.md", ROOT / "bpe/README.md", *sorted(ROOT.glob("docs/*.md"))]


def n_lines(name: str) -> int:
    """Of a file, or of all Python files of a folder."""
    files = [ROOT / name] if name.endswith(".py") else (ROOT / name).glob("*.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_the_table_of_files_is_complete_and_its_line_counts_are_right_within_a_tenth():
    rows = re.findall(r"^\| `([^`|]+)` \| (\d+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    for name, said in rows:
        assert abs(n_lines(name) - int(said)) <= max(0.1 * n_lines(name), 5), f"{name} has {n_lines(name)} lines"
    folders = {f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py")} - {"tests/", "benchmarks/"}
    assert {f"{name}.py" for name in DOORS | {"model", "cli", "files"}} | folders <= {name for name, _ in rows}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_picture_is_there_and_every_script_that_a_command_names(page):
    for target in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target
    blocks = "\n".join(re.findall(r"^```(?:sh|bash)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
    for script in re.findall(r"\b(?:python3?|torchrun[^#\n]*?) ((?:\w+/)*\w+\.py)\b", blocks):
        assert (ROOT / script).is_file(), script
