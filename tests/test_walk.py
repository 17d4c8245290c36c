"""The walk's pages do what they say: their blocks print what a page shows, and draw its pictures.

`python walk/run.py` runs the same, and says more where something differs.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT, read_json, run_script, succeed
from walk import run

PAGES = sorted((ROOT / "walk").glob("[0-9]_*.md"))
ANY_PAGE = [ROOT / "README.md", *ROOT.glob("*/*.md")]
SLOW = []  # the stations with a slow block
for path in PAGES:
    for station in path.read_text("utf-8").split("\n## ")[1:]:
        if "```python slow" in station:
            SLOW.append((path, station.split()[0]))
HEADING = re.compile(r"^## ((\d+) .+)$", re.M)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_shows(page):
    result = run_script("walk/run.py", page, timeout=900)
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page, number", SLOW)
def test_a_station_with_its_slow_blocks_prints_what_the_page_shows(page, number):
    result = run_script("walk/run.py", page, number, timeout=1800)
    assert result.returncode == 0, result.stdout


DIFFERENT = [  # (the words after ```text, what the page shows, what was printed)
    ("", "loss 6.93", "loss 7.2"),
    ("", "124,439,808 of them", "124,439,809 of them"),
    ("", "a\nb", "a"),
    ("within 10%", "8.0 of 20", "8.5 of 23"),
    ("within 0.05", "+0.01", "-0.05"),
    ("varies", "3 s, a: 5.1", "3 s, b: 5.1"),
    ("sampled", "she said", "he ran\nand ran"),
]


@pytest.fixture
def check(tmp_path, inline, monkeypatch):
    """walk/run.py on a page of its own: check(page, "--write")."""
    monkeypatch.chdir(tmp_path)
    return lambda page, *words: inline(run.main, page, *words)


def page_of(folder: Path, code: str, printed: str, how: str = "", ask: str = "") -> Path:
    """A page of one station with one block, whose output is folded."""
    page = folder / "page.md"
    folded = f"<details><summary>what it prints</summary>\n\n```text {how}\n{printed}\n```\n\n</details>\n"
    page.write_text(f"# Page\n\n## 1 One\n\n{ask}\n```python\n{code}\n```\n\n{folded}")
    return page


@pytest.mark.parametrize("how, shown, printed", DIFFERENT)
def test_numbers_that_differ_by_more_fail(how, shown, printed, tmp_path, check):
    assert check(page_of(tmp_path, f"print({printed!r})", shown, how)).returncode == 1


def test_slow_blocks_and_blocks_without_their_file_are_left_out(tmp_path, check):
    page = tmp_path / "page.md"
    block = "```python {}\nprint(2)\n```\n```text\n2\n```\n"
    one = block.format("") + block.format("slow") + block.format(f"{tmp_path}/rows")
    page.write_text("## 1 One\n\n" + one + "\n## 2 Two\n\n" + block.format(""))
    assert check(page).stdout.splitlines().count("2") == 2
    assert check(page, "--slow").stdout.splitlines().count("2") == 3
    (tmp_path / "rows").touch()
    assert check(page, "1").stdout.splitlines().count("2") == 3
    assert check(page, "7").returncode == 2


# ------------------------------------------------------------------------------------------------------- the reader


def test_a_reader_may_edit_a_copy_of_a_page_and_what_it_shows_stays_an_expectation(tmp_path, check):
    text = PAGES[0].read_text("utf-8")
    block = "```python\nprint(starts)\n```\n\n"
    for old, new, code in (
        ("x[0].tolist()", "x[1].tolist()", 0),
        ("## 3 A forward pass", f"{block}## 3 A forward pass", 0),
        ("two of 45,913 windows", "two of 45,914 windows", 1),
    ):
        assert old in text
        (tmp_path / "mine.md").write_text(text.replace(old, new, 1), encoding="utf-8")
        assert check(tmp_path / "mine.md", "2").returncode == code


# --------------------------------------------------------------------------------------------------------- pictures

DRAW = """from walk import figures
figures.curves("a", "TITLE", "x", "y", dict(a=([1, 2, 3], [4, 5, LAST])))
print("drawn")"""


def test_a_picture_is_compared_by_its_title_and_by_what_it_shows(monkeypatch, tmp_path, check):
    from walk import figures

    kept = tmp_path / "kept"
    kept.mkdir()
    monkeypatch.setattr(run, "KEPT", kept)
    for module in (figures, run):
        monkeypatch.setattr(module, "PICTURES", tmp_path / "pictures")

    def check_picture(title: str, last: str, *words) -> int:
        return check(page_of(tmp_path, DRAW.replace("TITLE", title).replace("LAST", last), "drawn"), *words).returncode

    assert check_picture("a title", "6") == 1
    assert not list(kept.iterdir())
    assert check_picture("a title", "6", "--write") == 0
    before = (kept / "a.png").read_bytes()
    assert check_picture("a title", "6.001") == 0
    assert check_picture("a title", "7") == 1
    assert check_picture("another title", "6") == 1
    assert (kept / "a.png").read_bytes() == before


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_picture_fits_a_page_and_has_the_title_that_its_page_gives_it(page):
    from PIL import Image

    for title, name in re.findall(r"!\[(.+?)\]\(([\w.]+\.(?:png|svg))\)", page.read_text("utf-8")):
        path = ROOT / "walk" / name
        assert path.stat().st_size < 120_000
        if path.suffix == ".png":
            picture = Image.open(path)
            assert picture.width == 900
            assert picture.text["Title"] == title


# ------------------------------------------------------------------------------------------------------------- links


def test_every_link_to_a_station_names_one_that_is_there():
    anchors = {}  # GitHub's: lower case, spaces as dashes
    for page in PAGES:
        anchors[page.name] = [head.lower().replace(" ", "-") for head, _ in HEADING.findall(page.read_text("utf-8"))]
    for page in ANY_PAGE:
        text = page.read_text("utf-8")
        for label, name, anchor in re.findall(r"\[([^\]]+)\]\((?:[\w/.]*?)(\d_\w+\.md)?#(\d+-[\w-]+)\)", text):
            if name or page in PAGES:
                assert anchor in anchors[name or page.name], (page.name, anchor)
                number = anchor.partition("-")[0]
                assert number in label.split() or "station" not in label.lower(), (page.name, label, number)


# --------------------------------------------------------------------------------------------------------- notebooks


def test_the_notebook_for_colab_is_that_of_its_page():
    made = ROOT / "out" / f"colab_{os.getpid()}.ipynb"
    made.parent.mkdir(exist_ok=True)
    succeed("walk/run.py", "walk/colab.md", "--notebook", made, cwd=ROOT)
    kept = (ROOT / "walk/colab.ipynb").read_text("utf-8")
    assert kept == made.read_text("utf-8").replace("(../walk/", "(")
    made.unlink()


@pytest.mark.slow
def test_the_notebook_for_colab_runs_in_small(tmp_path):
    """In a copy of the project; the runs are shorter."""

    def shorter(code: str) -> str:
        short = "tiny --max_steps 6 --warmup_steps 2 --eval_interval 3 --eval_steps 1 --sample_interval 3"
        code = code.replace("train_gpt2.py tiny", f"train_gpt2.py {short}")
        return code.replace("lora_finetune.py", "lora_finetune.py --max_steps 2")

    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        copy = tmp_path / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    cells = read_json(ROOT / "walk/colab.ipynb")["cells"]
    code = "\n".join(shorter("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "walk/cells.py").write_text(code, encoding="utf-8")
    succeed(tmp_path / "walk/cells.py", cwd=tmp_path / "walk", timeout=1800)
    assert (tmp_path / "out/both.png").exists()
