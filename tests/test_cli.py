"""What every script shares: constants and their help, files that appear whole, errors that name their place."""

import errno
import os
import re
import signal
import stat
import sys
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args, get_origin

import pytest

import train_gpt2
from parts import cli
from parts.cli import NonNegative, Positional, Positive, UserError, parse_args
from parts.files import read_json, replace_file, write_atomically
from tests.helpers import assert_refused, resume_table

DOORS = {
    name: import_module(name) for name in "train_gpt2 lora_finetune fineweb hellaswag sample plot bpe.train".split()
}


@pytest.mark.parametrize("page, door", [("run.md", "train_gpt2"), ("lora.md", "lora_finetune")])
def test_a_page_says_what_a_resume_does_with_every_constant(page, door):
    table = resume_table(page)
    assert set(table) == {field.name for field in fields(DOORS[door].Config)}
    assert {name for name in table if table[name] == "refused"} == set(DOORS[door].FIXED)


# ---- flags


@dataclass(frozen=True)
class Base:
    place: Annotated[str, Positional]  # where to go
    depth: Positive = 3  # how deep


@dataclass(frozen=True)
class Example(Base):
    # food and drink
    soup: str = "50% leek"  # 100% vegetables
    served: Literal["hot", "cold", "either"] = "hot"  # of the two
    salt: NonNegative = 0.5  # grams
    # the kitchen
    guests: tuple[str, ...] = ("Ann", "Bob")  # who comes
    clean: bool = True  # wash the dishes
    book: bool = False  # reserve a table
    rows: Literal[1, 2, 4] = 1  # of tables
    window: int | None = None  # at which one
    hours: tuple[float, float] = (18.0, 22.0)  # from and to
    note: Annotated[str, Positional] = ""  # what to say
    kitchens: ClassVar[int] = 1  # no flag

    def __post_init__(self):
        assert self.hours[0] < self.hours[1], f"closed from {self.hours[0]} to {self.hours[1]}"


def read(*words: str) -> Example:
    return parse_args(Example, list(words), prog="x.py")


def help_of(config_type, capsys, monkeypatch, default=None) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        parse_args(config_type, ["--help"], default, prog="x.py", description="Some words.")
    assert not end.value.code
    return " ".join(capsys.readouterr().out.split())


SHOWN = ["x.py PLACE NOTE", "Some words.", "PLACE where to go", "--soup STR 100% vegetables (default: 50% leek)",
         "food and drink:", "--served {hot,cold,either} of the two (default: hot)", "(default: Ann Bob)",
         "--no_clean do not wash the dishes", "--book reserve a table", "--window INT at which one"]  # fmt: skip


@pytest.mark.parametrize("words", SHOWN)
def test_help_has_the_comments_types_and_defaults(words, capsys, monkeypatch):
    assert words in help_of(Example, capsys, monkeypatch)


@pytest.mark.parametrize("door", DOORS)
def test_every_constant_of_a_door_is_in_its_help_with_a_comment(door, capsys, monkeypatch):
    text = help_of(DOORS[door].Config, capsys, monkeypatch)
    for name in DOORS[door].Config.__dataclass_fields__:
        assert re.search(rf"--(no_)?{name} | {name.upper()} \w", text), name
    assert not re.findall(r"--\w+ (?:\(default|--)|--\w+ (?:[A-Z]+|{\S+}|\[STR ...\]) (?:\(default|--)", text)


def test_help_shows_the_values_of_the_recipe(monkeypatch, capsys):
    config = train_gpt2.RECIPES["tiny"]
    text = help_of(train_gpt2.Config, capsys, monkeypatch, config)
    assert re.search(rf"--max_steps INT optimizer steps; [^()]*\(default: {config.max_steps}\)", text)


READ = [  # words, and what differs from the defaults
    ("Rome --depth=4 now --salt 1", dict(depth=4, salt=1.0, note="now")),
    ("Rome --no-clean --book", dict(clean=False, book=True)),
    ("Rome --no_clean --clean --no_book", {}),
    ("--guests Cy --depth 4 Rome", dict(guests=("Cy",), depth=4)),
    ("Rome --guests", dict(guests=())),
    ("Rome -- -milk", dict(note="-milk")),
    ("Rome -5", dict(note="-5")),
    ("Rome --soup=--a-b", dict(soup="--a-b")),
    ("Rome --rows 2 --window 3", dict(rows=2, window=3)),
    ("Rome --window None --hours -1e-3 .5", dict(window=None, hours=(-0.001, 0.5))),
    ("Rome --hours 17 21.5", dict(hours=(17.0, 21.5))),
]


@pytest.mark.parametrize("words, changes", READ)
def test_words_become_constants(words, changes):
    assert read(*words.split()) == Example(**dict(place="Rome") | changes)
    assert cli.parse_words(Example, words.split())[1] >= changes.keys() - {"note"}


def test_every_flag_of_training_reaches_its_constant():
    words = []
    expected = {}
    for i, field in enumerate(fields(train_gpt2.Config), 1):
        values = {bool: not field.default, int: i, float: i / 1000, str: f"text {i}"}
        value = get_args(field.type)[-1] if get_origin(field.type) is Literal else values[type(field.default)]
        no = "no-" if value is False else ""
        words.append(f"--{no}{field.name.replace('_', '-')}")
        if type(value) is not bool:
            words.append(str(value))
        expected[field.name] = value
    assert vars(parse_args(train_gpt2.Config, words)) == expected


REFUSED = [  # words, and those of them that the error names
    ("", "PLACE"), ("Rome now then", "then"), ("Rome --depht 3", "--depht --depth"), ("Rome --dep 3", "--dep --depth"),
    ("--note hello Rome", "--note"), ("Rome --salt", "--salt"), ("Rome -milk", "milk"),
    ("Rome --book=True", "--book"), ("Rome --depth 0", "--depth 0"), ("Rome --depth 2.5", "--depth 2.5"),
    ("Rome --salt nan", "--salt nan"), ("Rome --salt much", "--salt much"),
    ("Rome --served warm", "--served warm"), ("Rome --rows 3", "--rows 3"), ("Rome --window x", "--window x"),
    ("Rome --hours 1", "--hours"), ("Rome --hours 22 7", "22.0 7.0"), ("Rome --kitchens 2", "--kitchens"),
]  # fmt: skip


@pytest.mark.parametrize("words, named", REFUSED)
def test_what_means_nothing_is_refused(words, named):
    with pytest.raises(UserError) as e:
        read(*words.split())
    for word in named.split():
        assert word in str(e.value)


def test_a_constant_edited_to_a_value_out_of_range_is_named():
    assert_refused("beta1.* 1.0", parse_args, train_gpt2.Config, [], train_gpt2.Config(beta1=1.0))


@dataclass(frozen=True)
class WithPath:
    folder: Path = Path("kitchen")  # config.json holds no Path


@dataclass(frozen=True)
class WithList:
    folder: list[int] = None  # a tuple is one


@dataclass(frozen=True)
class WithWords:
    folder: Literal[True, False] = True  # bool("False") is True


@dataclass(frozen=True)
class WithNumbers:
    folder: int | float = 1  # whichever was given


@pytest.mark.parametrize("config_type", [WithPath, WithList, WithWords, WithNumbers])
def test_a_constant_of_a_type_that_is_no_flag_is_named(config_type):
    assert_refused("--folder", parse_args, config_type, [], prog="x.py")


# ---- files


def test_files_and_directories_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    """A power failure after a rename would otherwise leave an empty file under the final name."""
    events = []
    fsync = os.fsync
    real = {name: getattr(Path, name) for name in ("rename", "replace")}

    def place(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(f"flush {place(fd)}"), fsync(fd)))
    for name, rename in real.items():

        def renamed(a, b, rename=rename):
            events.append(f"name {Path(b).name}")
            return rename(a, b)

        monkeypatch.setattr(Path, name, renamed)
    me = os.getpid()
    replace_file(tmp_path / "file", "text\ud800")
    assert (tmp_path / "file").read_text() == "text\\ud800"
    assert events == [f"flush .file.{me}.tmp", "name file", f"flush {tmp_path.name}"]
    for n in range(2):
        events.clear()
        write_atomically(tmp_path / "dir", lambda path, n=n: (path / "a").write_text(f"x{n}"))
        old = ["name dir.1"] * n
        assert events == ["flush a", f"flush .dir.{me}.tmp", *old, "name dir", f"flush {tmp_path.name}"]


def test_a_file_system_that_cannot_flush_directories_gets_files_all_the_same(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "dir", lambda path: (path / "a").write_text("x"))
    assert (tmp_path / "dir" / "a").read_text() == "x"


def test_what_a_killed_process_was_writing_beside_a_directory_goes_and_nothing_else(tmp_path):
    for name in (".adapter.4711.tmp", ".adapter.mine.tmp", ".other.4711.tmp"):
        (tmp_path / name).mkdir()
    write_atomically(tmp_path / "adapter", lambda path: (path / "file").write_text("x"))
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", ".adapter.mine.tmp", ".other.4711.tmp"}


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == {"a": 1}


# ---- how a script ends


class OutOfMemoryError(RuntimeError):
    """As CUDA's allocator raises."""


class DistNetworkError(RuntimeError):
    """As torch.distributed raises."""


SILENT = [(KeyboardInterrupt(), 130), (cli.Stopped(signal.SIGTERM), 143), (BrokenPipeError(), 0)]
ONE_LINE = [  # an error, and what its line names
    (UserError("one\n  two"), "one two"),
    (OSError(errno.ENOSPC, "Full", "a.png"), "a.png: Full"),
    (OSError("9 requested and 1 written"), "9 requested and 1 written"),
    (OutOfMemoryError("a GB\nmore"), "a GB"),
    (RuntimeError("can't allocate memory"), "can't allocate memory"),
    (DistNetworkError("lost\nit"), "lost"),
    (RuntimeError("[Gloo] x"), "x"),
    (RuntimeError("CUDA error: no kernel image is available for execution\nmore"), "PyTorch"),
]


@pytest.fixture
def ends(monkeypatch):
    """A script that ends with an exception; returns its exit code."""

    def run(raised) -> int:
        def main():
            raise raised

        monkeypatch.setattr(os, "dup2", lambda *_: None)
        monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
        with pytest.raises(SystemExit) as end:
            cli.script(main)
        return end.value.code

    return run


@pytest.mark.parametrize("raised, code", SILENT)
def test_a_script_that_is_stopped_says_nothing(ends, capsys, raised, code):
    assert ends(raised) == code
    assert not capsys.readouterr().err


@pytest.mark.parametrize("raised, words", ONE_LINE)
def test_an_error_is_one_line_and_code_2(ends, capsys, raised, words):
    assert ends(raised) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line


def test_an_error_of_another_rank_names_the_rank(ends, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    ends(UserError("WHY"))
    assert capsys.readouterr().err == "error: rank 1: WHY\n"


def test_a_name_cannot_write_escape_sequences_to_the_terminal(ends, capsys, rt):
    name = "a\x1b]0;TITLE\x07\x9b2Jb é中"
    ends(UserError(name))
    assert capsys.readouterr().err == "error: a\\x1b]0;TITLE\\x07\\x9b2Jb é中\n"
    rt.print(f"{name}\n\tline")
    assert capsys.readouterr().out == "a\\x1b]0;TITLE\\x07\\x9b2Jb é中\n\tline\n"


def test_a_mistake_of_ours_keeps_its_traceback(ends):
    with pytest.raises(KeyError, match="a mistake of ours"):
        ends(KeyError("a mistake of ours"))
