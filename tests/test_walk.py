"""walk/walk.md does what it says: its blocks print what the page shows, and draw its pictures.

`python walk/run.py` runs the same, and says more where something differs.
"""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image, PngImagePlugin

from tests.helpers import ROOT
from walk import figures, run

PAGE = ROOT / "walk/walk.md"
OPENING, *STATIONS = run.read_page(PAGE)
CONFIG = SimpleNamespace(write=False)
SLOW = [station for station in STATIONS if any("slow" in block.marks for block in station.blocks)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def opening(pictures):
    """The names of all shared blocks, which are run once; pictures go to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for module in (figures, run):
            patch.setattr(module, "PICTURES", pictures)
        yield run.shared_names([OPENING, *STATIONS], PAGE, CONFIG)


def differences(station, opening, capsys, allowed=frozenset()) -> str:
    """What was printed, where a block differs from the page; "" where none does."""
    found = run.run_station(station, dict(opening), PAGE, set(allowed), CONFIG)
    return capsys.readouterr().out if found["different"] else ""


@pytest.mark.slow
@pytest.mark.parametrize("station", STATIONS, ids=lambda station: station.number)
def test_a_station_prints_what_the_page_shows(station, opening, pictures, capsys):
    assert differences(station, opening, capsys) == ""


@pytest.mark.slow
@pytest.mark.parametrize("station", SLOW, ids=lambda station: station.number)
def test_a_slow_station_prints_what_the_page_shows(station, opening, pictures, capsys):
    assert differences(station, opening, capsys, {"slow"}) == ""


def shown(station) -> list[tuple[str, str]]:
    """(its text, its file) of every picture of a station."""
    text = PAGE.read_text(encoding="utf-8")
    text = text[text.index(f"\n## {station.number} ") + 1 :].split("\n## ")[0]
    return re.findall(r"!\[(.+?)\]\(([\w.]+\.(?:png|svg))\)", text)


@pytest.mark.parametrize("station", STATIONS, ids=lambda station: station.number)
def test_a_picture_fits_a_page_and_has_the_title_that_its_station_gives_it(station):
    for title, name in shown(station):
        path = ROOT / "walk" / name
        assert path.stat().st_size < 120_000
        if path.suffix == ".png":
            picture = Image.open(path)
            assert picture.width == 900
            assert picture.text["Title"] == title


SAME = [  # (the words after ```text, what the page shows, what was printed)
    ("", "loss 6.93", "loss   6.94"),
    ("", "124,439,808 of them", "124,439,808 of them"),
    ("", "3e-08", "9e-08"),
    ("", "0.00", "0.01"),
    ("within 10%", "8.0 of 20", "8.5 of 22"),
    ("within 0.05", "+0.01", "-0.03"),
    ("varies", "3 s, a: 5.1", "12 s, a: 0.7"),
    ("sampled", "she said\n", "he ran\n"),
]
DIFFERENT = [
    ("", "loss 6.93", "loss 7.2"),
    ("", "loss 6.93", "Loss 6.93"),
    ("", "124,439,808 of them", "124,439,809 of them"),
    ("", "3e-08", "9e-07"),
    ("", "0.00", "0.03"),
    ("", "a\nb\n", "a\n"),
    ("within 10%", "8.0 of 20", "8.5 of 23"),
    ("within 10%", "+0.01", "-0.03"),
    ("within 0.05", "+0.01", "-0.05"),
    ("varies", "3 s, a: 5.1", "3 s, b: 5.1"),
    ("varies", "3 s\n4 s\n", "3 s\n"),
    ("varies", "3 s\n", "3 s\n4 s\n"),
    ("sampled", "she said\n", "he ran\nand ran\n"),
    ("sampled", "she said\nno\n", "he ran\n"),
]


@pytest.mark.parametrize("how, shown, printed", SAME)
def test_numbers_agree_within_what_processors_differ_by_and_the_page_says_what_may_vary(how, shown, printed):
    assert run.difference(shown, printed, tuple(how.split())) == ""


@pytest.mark.parametrize("how, shown, printed", DIFFERENT)
def test_what_differs_by_more_is_named(how, shown, printed):
    assert run.difference(shown, printed, tuple(how.split())) != ""


@pytest.mark.parametrize("drawn, same", [("0.018 x (0.2, 1.0)", True), ("0.5 x (0.7, 1.0)", False)])
def test_an_absolute_tolerance_of_a_picture_is_one_of_its_values(tmp_path, monkeypatch, drawn, same):
    """Noise changes the fractions of a small scale, and no value by more than the tolerance."""
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
    for folder, data in ("kept", "0.02 x (0.7, 1.0)"), ("drawn", drawn):
        (tmp_path / folder).mkdir()
        info = PngImagePlugin.PngInfo()
        info.add_text("Title", "a title")
        info.add_text("Data", data)
        Image.new("L", (1, 1)).save(tmp_path / folder / "x.png", pnginfo=info)
    found = run.difference_of_pictures(tmp_path / "drawn/x.png", ("within", "0.2"))
    assert (found == "") == same


@pytest.fixture
def check(tmp_path, inline, monkeypatch):
    """walk/run.py on a page of its own: check(page, "--write")."""
    monkeypatch.chdir(tmp_path)
    return lambda page, *words: inline(run.main, page, *words)


def test_a_page_that_says_something_else_ends_with_exit_code_1_and_the_line(tmp_path, check):
    page = page_of(tmp_path, "print(1 + 1)", "3")
    result = check(page)
    assert result.returncode == 1
    assert "LINE 6 DIFFERS" in result.stdout
    assert result.stdout.splitlines()[-1] == f"FAIL: 1 of 1 blocks differ from {page}"
    assert check(page, "7").returncode == 2


def test_what_differs_below_a_line_that_a_reader_changed_is_no_failure(tmp_path, check):
    page = tmp_path / "mine.md"
    text = PAGE.read_text(encoding="utf-8")
    line = text[: text.index("triu(1), -math")].count("\n") + 1
    page.write_text(text.replace("triu(1), -math", "triu(2), -math"), encoding="utf-8")
    result = check(page, "3")
    assert result.returncode == 0, result.stdout
    assert f"differs, as you changed line {line}:" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("PASS")
    drawn = [line for line in result.stdout.splitlines() if line.startswith("drawn: ")]
    assert [Path(line).name for line in drawn] == ["blocks.png"]  # where it is, other tests change


@pytest.mark.parametrize(
    "station, old, new, sentence",
    [
        ("3", "[0, 4]])", "[0, 4.02]])", "differs, as you changed line {}, within the tolerance of this block (2%)"),
        ("2", "batch_size=2)", "batch_size=1 + 1)", "prints the same, although you changed line {}"),
    ],
)
def test_a_changed_block_says_if_it_differs_even_within_its_tolerance(tmp_path, check, station, old, new, sentence):
    page = tmp_path / "mine.md"
    text = PAGE.read_text(encoding="utf-8")
    line = text[: text.index(old)].count("\n") + 1
    page.write_text(text.replace(old, new, 1), encoding="utf-8")
    result = check(page, station)
    assert sentence.format(line) in result.stdout, result.stdout


def test_a_block_that_a_reader_adds_is_no_failure(tmp_path, check):
    page = tmp_path / "mine.md"
    text = PAGE.read_text(encoding="utf-8")
    added = "```python\nprint(starts)\n```\n"
    page.write_text(text.replace("## 3 A forward pass", added + "\n## 3 A forward pass"), encoding="utf-8")
    result = check(page, "2")
    assert result.returncode == 0, result.stdout
    assert "differs, as you changed" in result.stdout


def test_a_change_of_what_the_page_shows_is_a_failure_above_the_changed_line(tmp_path, check):
    page = tmp_path / "mine.md"
    text = PAGE.read_text(encoding="utf-8").replace("loss 6.9189, by model.loss", "loss 5.9189, by model.loss")
    page.write_text(text.replace("triu(1), -math", "triu(2), -math"), encoding="utf-8")
    assert check(page, "3").returncode == 1


def test_a_block_shows_what_it_prints_before_it_ends(tmp_path):
    page = page_of(tmp_path, "print('first')\nwhile True: pass", "first")
    child = subprocess.Popen([sys.executable, ROOT / "walk/run.py", page], stdout=subprocess.PIPE, text=True)
    try:
        assert "first\n" in iter(child.stdout.readline, "")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_write_records_what_a_block_prints(tmp_path, check):
    page = page_of(tmp_path, "print(1 + 1)", "3")
    assert check(page, "--write").returncode == 0
    assert "\n2\n```" in page.read_text()
    assert check(page, "1").returncode == 0


def test_the_last_line_says_pass_how_many_blocks_ran_and_what_was_left_out(tmp_path, check):
    page = tmp_path / "page.md"
    block = "```python {}\nprint(2)\n```\n```text\n2\n```\n"
    page.write_text("## 1 One\n\n" + block.format("") + block.format("slow") + "\n## 2 Two\n\n" + block.format(""))
    assert check(page).stdout.splitlines()[-1] == f"PASS: 2 blocks ran as on {page}; left out: 1 slow"
    assert check(page, "--slow").stdout.splitlines()[-1] == f"PASS: 3 blocks ran as on {page}"


def test_a_shared_block_that_raises_fails(tmp_path, check):
    page = tmp_path / "page.md"
    page.write_text("```python shared\n1 / 0\n```\n\n## 1 One\n\n```python\nprint(2)\n```\n```text\n2\n```\n")
    result = check(page)
    assert result.returncode not in (0, 2)
    assert "ZeroDivisionError" in result.stdout


def page_of(folder: Path, code: str, printed: str, how: str = "") -> Path:
    """A page of one station with one block."""
    page = folder / "page.md"
    page.write_text(f"# Page\n\n## 1 One\n\n```python\n{code}\n```\n```text {how}\n{printed}\n```\n")
    return page


@pytest.mark.parametrize("shown", ["0.5 s", "0.5 s\n0.5 s\n0.5 s"])
def test_a_page_with_fewer_or_more_lines_than_its_code_prints_fails_even_where_numbers_vary(shown, tmp_path, check):
    page = page_of(tmp_path, "print('0.1 s')\nprint('0.2 s')", shown, "varies")
    result = check(page)
    assert result.returncode == 1
    assert "2 lines were printed" in result.stdout
    assert check(page, "--write").returncode == 0
    assert "\n0.1 s\n0.2 s\n```" in page.read_text()
    recorded = page.read_text()
    assert check(page).returncode == 0
    assert page.read_text() == recorded


def test_a_shared_block_is_known_to_all_stations_and_a_block_may_wait_for_a_file(tmp_path, check):
    page = tmp_path / "page.md"
    block = "```python {}\n{}\n```\n```text\n{}\n```\n"
    late = block.format(f"{tmp_path}/rows", "print('found')", "found")
    shared = "```python shared\nx = 2\n```\n"
    page.write_text("## 1 One\n\n" + block.format("", "print(x)", "2") + late + "\n## 2 Two\n\n" + shared)
    result = check(page, "1")
    assert result.returncode == 0
    assert "found" not in result.stdout
    assert "is left out" in result.stdout
    (tmp_path / "rows").touch()
    result = check(page, "1")
    assert result.returncode == 0
    assert "\nfound\n" in result.stdout


DRAW = """from walk import figures
figures.curves("a", "TITLE", "x", "y", dict(a=([1, 2, 3], [4, 5, LAST])))
print("drawn")"""


@pytest.fixture
def own_pictures(tmp_path, monkeypatch) -> Path:
    """The folder that stands for walk/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
    for module in (figures, run):
        monkeypatch.setattr(module, "PICTURES", tmp_path / "pictures")
    return tmp_path / "kept"


@pytest.mark.parametrize(
    "title, last, same",
    [("a title", "6", True), ("a title", "6.001", True), ("a title", "7", False), ("another title", "6", False)],
)
def test_a_picture_is_compared_by_its_title_and_by_what_it_shows(title, last, same, own_pictures, tmp_path, check):
    page = page_of(tmp_path, DRAW.replace("TITLE", "a title").replace("LAST", "6"), "drawn")
    assert check(page, "--write").returncode == 0
    kept = (own_pictures / "a.png").read_bytes()
    page_of(tmp_path, DRAW.replace("TITLE", title).replace("LAST", last), "drawn")
    result = check(page)
    assert (result.returncode == 0) == same
    assert ("in walk/a.png" in result.stdout) != same
    assert (own_pictures / "a.png").read_bytes() == kept


def test_without_write_a_picture_is_not_kept(own_pictures, tmp_path, check):
    page = page_of(tmp_path, DRAW.replace("LAST", "6"), "drawn")
    result = check(page)
    assert result.returncode == 1
    assert "walk/a.png is missing" in result.stdout
    assert not list(own_pictures.iterdir())


PAGES = [
    ROOT / "README.md",
    PAGE,
    ROOT / "exercises/README.md",
    ROOT / "bpe/README.md",
    *sorted(ROOT.glob("docs/*.md")),
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_every_link_to_a_station_names_one_that_is_there(page):
    titles = {station.number: station.title for station in STATIONS}
    where = "" if page == PAGE else r"[\w/.]*walk\.md"
    links = re.findall(rf"\[([^\]]+)\]\({where}#(\d+)-([\w-]+)\)", page.read_text("utf-8"))
    for text, number, anchor in links:  # GitHub's anchors: lower case, spaces as dashes
        assert anchor == titles[number].lower().replace(" ", "-"), (number, anchor)
        assert number in text.split() or "station" not in text.lower(), (text, number)
    assert links or page != PAGE


@pytest.mark.parametrize("page", PAGES[1:3], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_finds_one(page):
    text = page.read_text("utf-8")
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (page.parent / link).exists(), link


def test_every_paper_is_linked_and_every_link_is_cited():
    text, _, links = PAGE.read_text("utf-8").rpartition("\n\n")
    defined = re.findall(r"^\[([\w ]+)\]: https://", links, re.M)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    cited = re.findall(r"\[([A-Z][a-z]+(?: \d{4})?)\](?!\()", prose)
    assert set(cited) == set(defined)


def test_every_picture_of_the_folder_is_shown():
    shown_by_a_page = "".join(page.read_text("utf-8") for page in PAGES)
    for picture in [*ROOT.glob("walk/*.png"), *ROOT.glob("walk/*.svg")]:
        assert f"{picture.name})" in shown_by_a_page, picture.name
