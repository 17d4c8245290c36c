"""What every script shares: constants and their help, files that appear whole, errors that name their place."""

import errno
import os
import re
import resource
import signal
import stat
import sys
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import pytest

import train_gpt2
from model import GPT
from parts import cli
from parts.cli import NonNegative, Positional, Positive, TemporaryError, UserError, parse_args
from parts.files import exclusive_lock, read_json, replace_file, set_aside, write_atomically
from tests.finetuning import distance, small_gpt
from tests.forks import start_fork
from tests.helpers import ROOT, assert_refused, environment, resume_table, run_script

DOORS = {
    name: import_module(name) for name in "train_gpt2 lora_finetune fineweb hellaswag sample plot bpe.train".split()
}
EDITED = [
    (dict(max_steps="1200"), "max_steps is '1200'; it must be of the type int"),
    (dict(max_steps=12.5), "max_steps is 12.5; it must be of the type int"),
    (dict(max_lr="6e-4"), "max_lr is '6e-4'; it must be of the type float"),
    (dict(optimizer="adam"), "optimizer is 'adam'; it must be one of 'adamw', 'muon'"),
    (dict(shuffle="no"), "shuffle is 'no'; it must be of the type bool"),
    (dict(beta1=1.0), "--beta1 must be in"),
]


@pytest.mark.parametrize("edit, words", EDITED)
def test_a_constant_that_was_edited_wrongly_gives_one_line(edit, words):
    assert_refused(words, parse_args, train_gpt2.Config, [], train_gpt2.Config(**edit))


def test_a_whole_number_is_a_number():
    assert parse_args(train_gpt2.Config, [], train_gpt2.Config(max_lr=1)).max_lr == 1


@pytest.mark.parametrize("page, door", [("run.md", "train_gpt2"), ("lora.md", "lora_finetune")])
def test_a_page_says_of_every_constant_what_a_resume_does_with_another_value(page, door):
    table = resume_table(page)
    assert set(table) == {field.name for field in fields(DOORS[door].Config)}
    assert {name for name in table if table[name] == "refused"} == set(DOORS[door].FIXED)


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
    chairs: int = 4
    note: Annotated[str, Positional] = ""  # what to say


def read(*words: str) -> Example:
    return parse_args(Example, list(words), prog="x.py")


def help_of(config_type, capsys, monkeypatch, default=None) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        parse_args(config_type, ["--help"], default, prog="x.py", description="Some words.")
    assert not end.value.code
    return capsys.readouterr().out


def test_help_has_the_comments_of_a_config_in_the_groups_that_it_names(capsys, monkeypatch):
    text = help_of(Example, capsys, monkeypatch)
    parts = re.split(r"^(?=\S)", text, flags=re.M)[1:]
    groups = {part.partition(":")[0]: " ".join(part.split()) for part in parts}
    assert text.startswith("usage: x.py PLACE [NOTE] [--FLAG VALUE ...]\n\nSome words.\n")
    assert groups["PLACE"] == "PLACE: where to go"
    assert groups["NOTE"] == "NOTE: what to say"
    assert list(groups)[-3:] == ["options", "food and drink", "the kitchen"]
    assert "--depth INT how deep (default: 3)" in groups["options"]
    assert "--soup STR 100% vegetables (default: 50% leek)" in groups["food and drink"]
    assert "--served {hot,cold,either} of the two (default: hot)" in groups["food and drink"]
    assert "--guests [STR ...] who comes (default: Ann Bob)" in groups["the kitchen"]
    assert "--no_clean do not wash the dishes" in groups["the kitchen"]
    assert "--book reserve a table" in groups["the kitchen"]
    assert "--chairs INT (default: 4)" in groups["the kitchen"]
    assert "--clean" not in text
    assert "--no_book" not in text


@pytest.mark.parametrize("recipe", train_gpt2.RECIPES)
def test_help_shows_each_constant_with_the_value_of_the_recipe(recipe, monkeypatch, capsys):
    config = train_gpt2.RECIPES[recipe]
    text = " ".join(help_of(train_gpt2.Config, capsys, monkeypatch, config).split())
    assert re.search(rf"--max_steps INT +optimizer steps; .*\(default: {config.max_steps}\)", text)
    for name, value in vars(config).items():
        assert f"--no_{name} " if value is True else f"--{name} " in text


@pytest.mark.parametrize("door", DOORS)
def test_every_constant_of_a_door_is_in_its_help_with_a_comment(door, capsys, monkeypatch):
    text = " ".join(help_of(DOORS[door].Config, capsys, monkeypatch).split())
    for name in DOORS[door].Config.__dataclass_fields__:
        assert re.search(rf"--(no_)?{name} |{name.upper()}: \w", text), name
    assert not re.findall(r"--\w+ (?:\(default|--)|--\w+ (?:[A-Z]+|{\S+}|\[STR ...\]) (?:\(default|--)", text)


READ = [  # words, and what differs from the defaults
    ("Rome", {}),
    ("--depth 4 Rome", dict(depth=4)),
    ("Rome --depth=4 now", dict(depth=4, note="now")),
    ("Rome --chairs 5", dict(chairs=5)),
    ("Rome now --salt 1", dict(salt=1.0, note="now")),
    ("Rome --no-clean --book", dict(clean=False, book=True)),
    ("Rome --no_clean --clean --no_book", {}),
    ("--guests Cy --depth 4 Rome", dict(guests=("Cy",), depth=4)),
    ("--depth 4 -- Rome --book", dict(depth=4, note="--book")),
    ("Rome -", dict(note="-")),
    ("Rome -5", dict(note="-5")),
    ("Rome --soup=--a-b", dict(soup="--a-b")),
    ("--depth 1_000 Rome", dict(depth=1000)),
    ("Rome --guests", dict(guests=())),
]


@pytest.mark.parametrize("words, changes", READ)
def test_words_become_constants(words, changes):
    assert read(*words.split()) == Example(**dict(place="Rome") | changes)
    assert cli.flags_set(Example, words.partition(" -- ")[0].split()) >= changes.keys() - {"note"}


def test_text_with_spaces_may_begin_with_a_dash():
    assert read("Rome", "- milk", "--soup", "- leek").note == "- milk"


REFUSED = [
    ("", "PLACE is missing; see --help"),
    ("Rome now then", "'then' is not expected here; put quotes"),
    ("Rome --depht 3", "no --depht; did you mean --depth?"),
    ("Rome --dep 3", "no --dep; did you mean --depth?"),
    ("Rome -depth 3", "no -depth; did you mean --depth?"),
    ("Rome --zebra", "no --zebra; see --help"),
    ("Rome --learning_rate 3", "no --learning_rate; see --help"),  # nothing of the kind here
    ("--note hello Rome", "NOTE is given by its place, without --note"),
    ("Rome --salt", "--salt: expected one argument"),
    ("Rome -milk", "no -milk; see --help"),
    ("Rome --book=True", "--book: ignored explicit argument"),
    ("Rome --depth 0", r"--depth must be in \[1, "),
    ("Rome --depth 2.5", "--depth: invalid int value: '2.5'"),
    ("Rome --salt nan", "--salt must be in"),
    ("Rome --salt inf", "--salt must be in"),
    ("Rome --salt much", "--salt: invalid float value: 'much'"),
    ("Rome --served warm", "--served: invalid choice: 'warm'"),
]


@pytest.mark.parametrize("words, message", REFUSED)
def test_what_means_nothing_is_refused_with_what_was_perhaps_meant(words, message):
    assert_refused(message, read, *words.split())


@pytest.mark.parametrize("words", ["--learning_rate 1", "--batch_size 8", "--block_size=64", "--max-iters 3"])
def test_a_flag_of_nanogpt_is_called_by_its_name_here(words):
    with pytest.raises(UserError, match=r"is called --(\w+) here") as e:
        parse_args(train_gpt2.Config, words.split())
    name = re.search(r"is called --(\w+)", str(e.value))[1]
    assert name in train_gpt2.Config.__dataclass_fields__


def test_a_name_of_nanogpt_that_exists_here_is_our_own():
    import lora_finetune

    assert parse_args(lora_finetune.Config, ["--batch_size", "8"]).batch_size == 8


def test_every_name_beside_nanogpts_is_a_constant_of_a_door():
    ours = {field.name for door in DOORS.values() for field in fields(door.Config)}
    assert not set(cli.NANOGPT.values()) - ours


def test_files_and_directories_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    """A power failure after a rename would otherwise leave an empty file under the final name."""
    events = []
    fsync = os.fsync
    real = {name: getattr(Path, name) for name in ("rename", "replace")}

    def place(fd: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{fd}")).name

    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(f"flush {place(fd)}"), fsync(fd)))
    for name, rename in real.items():
        monkeypatch.setattr(Path, name, lambda a, b, rename=rename: (events.append(f"name {b.name}"), rename(a, b))[1])
    me = os.getpid()
    replace_file(tmp_path / "file", "text\ud800")
    assert (tmp_path / "file").read_text() == "text\\ud800"
    assert events == [f"flush .file.{me}.tmp", "name file", f"flush {tmp_path.name}"]
    for n in range(2):
        events.clear()
        write_atomically(tmp_path / "dir", lambda path, n=n: (path / "a").write_text(f"x{n}"))
        old = ["name dir.1"] * n
        assert events == ["flush a", f"flush .dir.{me}.tmp", *old, "name dir", f"flush {tmp_path.name}"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_directories_gets_files_all_the_same(tmp_path, monkeypatch, code):
    real = os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "file", "text")
    write_atomically(tmp_path / "dir", lambda path: (path / "a").write_text("x"))
    assert (tmp_path / "file").read_text() == "text"
    assert (tmp_path / "dir" / "a").read_text() == "x"


@pytest.mark.parametrize(
    "is_kind, code", [(stat.S_ISREG, errno.EINVAL), (stat.S_ISREG, errno.EIO), (stat.S_ISDIR, errno.EIO)]
)
def test_any_other_failure_to_flush_is_an_error(tmp_path, monkeypatch, is_kind, code):
    def fsync(fd):
        if is_kind(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(code)):
        replace_file(tmp_path / "file", "text")


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_file_system_without_modes_gets_weights_all_the_same(tmp_path, monkeypatch, code):
    def chmod(*args, **options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "chmod", chmod)
    monkeypatch.setattr(Path, "chmod", chmod)
    model = small_gpt()
    model.save_pretrained(tmp_path)
    assert distance(GPT.from_pretrained(tmp_path), model) == 0


@pytest.mark.parametrize("place", [".", "..", "../.."])
def test_what_holds_the_current_directory_is_not_renamed(tmp_path, monkeypatch, place):
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert_refused("holds the current directory", set_aside, Path(place))


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_what_cannot_be_written_is_named_by_its_path(tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for write in (
            lambda path: replace_file(path, "x" * 5000),
            lambda path: write_atomically(path, lambda directory: (directory / "a").write_bytes(bytes(5000))),
        ):
            with pytest.raises(OSError) as e:
                write(tmp_path / "place")
            assert str(tmp_path / "place") in cli.explain(e.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as context, pytest.raises(OSError) as e:
        context.setattr(fcntl, "flock", no_locks)
        with exclusive_lock(tmp_path / "lock", str(tmp_path), seconds=0.2):
            pass
    assert "No locks available" in cli.explain(e.value)
    assert str(tmp_path) in cli.explain(e.value)


def test_a_terminal_without_utf8_gets_the_same_line():
    errors = []
    for code in ("utf-8", "ascii"):
        errors.append(run_script("plot.py", "--x", "hours", env=environment(PYTHONIOENCODING=code)).stderr)
    assert errors[0] == errors[1]
    assert errors[0].startswith("error: ")
    assert "hours" in errors[0]


class OutOfMemoryError(RuntimeError):
    """As CUDA's allocator raises."""


ENDS = [
    (KeyboardInterrupt(), 130, ""),
    (cli.Stopped(signal.SIGTERM), 143, ""),
    (BrokenPipeError(), 0, ""),
    (UserError("one\n  two"), 2, "one two"),
    (OSError(errno.ENOSPC, "Full", "a.png"), 2, "a.png: Full; fix that, or give another path"),
    (OSError(errno.EACCES, "Permission denied", "a"), 2, "a: Permission denied; fix that, or give another path"),
    (OSError("9 requested and 1 written"), 2,
     "the output: 9 requested and 1 written; fix that, or give another path"),
    (MemoryError(), 2, "out of memory (in Python); use a smaller model or batch"),
    (OutOfMemoryError("a GB\nmore"), 2, "out of memory (a GB); use a smaller model or batch"),
    (RuntimeError("can't allocate memory"), 2, "out of memory (can't allocate memory); use a smaller model or batch"),
    *((type(name, (RuntimeError,), {})("lost\nit"), 2,
       "another rank has ended or cannot be reached (lost); then --resume continues")
      for name in ("DistBackendError", "DistNetworkError", "DistStoreError")),
    (RuntimeError("[Gloo] x"), 2, "another rank has ended or cannot be reached ([Gloo] x); then --resume continues"),
]  # fmt: skip


@pytest.fixture
def ends(monkeypatch):
    """A script that ends with an exception."""

    def run(raised, rank="0"):
        def main():
            raise raised

        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(os, "dup2", lambda *_: None)
        monkeypatch.setattr(sys.stdout, "fileno", lambda: 1)
        cli.script(main)

    return run


@pytest.mark.parametrize("rank, who", [("0", ""), ("1", "rank 1: ")])
@pytest.mark.parametrize("raised, code, message", ENDS)
def test_whatever_ends_a_script_has_its_exit_code_and_its_line(ends, capsys, raised, code, message, rank, who):
    with pytest.raises(SystemExit) as end:
        ends(raised, rank)
    assert end.value.code == code
    assert capsys.readouterr().err == (f"error: {who}{message}\n" if message else "")


def test_a_name_cannot_write_escape_sequences_to_the_terminal(ends, capsys, rt):
    name = "a\x1b]0;title\x07\x9b2Jb é中"
    with pytest.raises(SystemExit):
        ends(UserError(name))
    assert capsys.readouterr().err == "error: a\\x1b]0;title\\x07\\x9b2Jb é中\n"
    rt.print(f"{name}\n\tline")
    assert capsys.readouterr().out == "a\\x1b]0;title\\x07\\x9b2Jb é中\n\tline\n"


LAST_WORDS = """
import atexit, sys, time
from pathlib import Path
import torch.distributed as dist
sys.path.append({root!r})
from parts.cli import script

rank = int(sys.argv[1])
folder = Path(__file__).parent
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)

def main():
    time.sleep(rank)
    (folder / f"{rank} has ended").touch()

atexit.register(lambda: print((folder / "1 has ended").exists()))
script(main)
"""


@pytest.mark.slow
def test_no_rank_leaves_before_the_last_one_has_ended(tmp_path):
    """Gloo may still be sending what the others wait for."""
    file = tmp_path / "ranks.py"
    file.write_text(LAST_WORDS.replace("{root!r}", repr(str(ROOT))))
    for rank in [start_fork(file, rank, out=f"{tmp_path}/{rank}") for rank in range(2)]:
        rank.join()
    assert [(tmp_path / f"{rank}.out").read_text() for rank in range(2)] == ["True\n", "True\n"]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError])
def test_a_mistake_of_ours_keeps_its_traceback(ends, kind):
    with pytest.raises(kind, match="a mistake of ours"):
        ends(kind("a mistake of ours"))


@pytest.mark.parametrize("targets", [None, [1], "c_attn"])
def test_a_list_of_texts_is_a_tuple(targets):
    import lora_finetune

    with pytest.raises(UserError, match="targets is .*; it must be of the type tuple"):
        cli.check_constants(lora_finetune.Config, dict(targets=targets))


def test_an_error_that_no_retry_can_mend_ends_the_next_start_of_a_job_at_once(inline, monkeypatch, tmp_path):
    """As torchrun starts a script: with the name of the job, and the number of starts before."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    starts = []

    def fail(error):
        def main():
            starts.append(error)
            raise error

        return main

    wrong = fail(UserError("--data nope does not exist"))
    busy = fail(TemporaryError("another process is writing there"))
    for main, restart in ((busy, "0"), (busy, "1"), (wrong, "2"), (wrong, "3")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        result = inline(main)
        assert result.returncode == 2
    assert "--data nope does not exist" in result.stderr  # said again
    assert len(starts) == 3  # and not tried again
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert inline(lambda: None).returncode == 0  # another job forgets it
