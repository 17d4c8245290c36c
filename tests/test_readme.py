"""README.md and the pages: what they point to is there."""

import re

import pytest

from tests.helpers import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("*/*.md"))]


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request):
    return request.param


def test_every_link_and_picture_of_a_page_is_there(page):
    targets = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    here = [target for target in targets if not target.startswith(("http:", "https:"))]
    assert [target for target in here if not (page.parent / target).exists()] == []


def test_every_script_that_a_command_of_a_page_names_is_there(page):
    blocks = "\n".join(re.findall(r"^```(?:sh|bash)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
    scripts = re.findall(r"\b(?:python3?|torchrun[^#\n]*?) ((?:\w+/)*\w+\.py)\b", blocks)
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_step_on_the_first_page_is_that_of_the_script():
    """Without the comments that have a line of their own."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```python\n(loss = torch.zeros.*?)```", page, re.S)
    script = (ROOT / "train_gpt2.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in script.splitlines() if not line.strip().startswith("#")]
    wanted = [line.strip() for line in shown.strip().splitlines()]
    first = lines.index(wanted[0])
    assert lines[first : first + len(wanted)] == wanted
