"""What every script needs before it does anything: the command line, checked constants, one-line errors.

This file imports no torch, so that a worker process that imports it stays small. Of models, ranks and runs it knows
only the remedies that `explain` names.
"""

import argparse
import atexit
import contextlib
import difflib
import errno
import inspect
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints


class UserError(Exception):
    """A mistake in what the user gave: ends a script with one line, `error: what; what to do`, and exit code 2."""


class TemporaryError(UserError):
    """One that may be gone when the same command is given again, as of a network or a lock."""


class Stopped(Exception):
    """`Stopped(signum)`: a signal ended the run cleanly. The exit code is 128 + signum, 130 for SIGINT."""


def script(main: Callable[[], None]) -> None:
    """Run `main` and end the process: 0 done, 2 for bad usage or input, 128 + n after signal n."""
    if sys.stdin is None:  # the caller closed it: there is nothing to read
        sys.stdin = open(os.devnull)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it: discard what we print
            setattr(sys, name, open(os.devnull, "w"))
        with contextlib.suppress(AttributeError, ValueError, OSError):  # a terminal without UTF-8 still shows the rest
            getattr(sys, name).reconfigure(errors="backslashreplace")
    note = note_of_job()
    if note and note.exists():
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            fail(note.read_text())  # what ended the last start would end this one
        note.unlink()
    try:
        main()
        sys.stdout.flush()  # now, while an error still becomes one line
        if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
            distributed.barrier()  # Gloo still sends its last tensors
            distributed.destroy_process_group()
            leave(0)
    except Stopped as e:
        sys.exit(128 + e.args[0])
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as e:
        if (message := explain(e)) is None:
            raise
        wrong_path = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
        if note and isinstance(e, (UserError, *wrong_path)) and not isinstance(e, TemporaryError):
            note.write_text(message)
        fail(message)


def leave(code: int) -> None:
    """End a rank without shutting Python down: Gloo's threads outlive the process group, and one that requests the GIL
    meanwhile aborts the process."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def note_of_job() -> Path | None:
    """Under torchrun, which starts a script again when it fails: the file in which one start tells the next why."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    return Path(tempfile.gettempdir(), f"error-of-{job}-{os.getppid()}") if job else None


def explain(e: BaseException) -> str | None:
    """The message for the user about an error; None for a bug of ours, which should show its traceback."""
    if isinstance(e, UserError):
        return str(e)
    if isinstance(e, OSError):
        place = e.filename or "the output"
        reason = e.strerror or " ".join(map(str, e.args)) or type(e).__name__
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk of {place}; free some, then give the same command again"
        if e.errno is None:  # of a library, which has not asked the system why
            return f"{place}: {reason}; free some space if its disk is full, or give another path"
        return f"{place}: {reason}; fix that, or give another path"
    if isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(e):
        return f"out of memory ({str(e).splitlines()[0] if str(e) else 'in Python'}); use a smaller model or batch"
    if "can't start new thread" in str(e):
        return "the system grants no more threads; raise the limit (ulimit -u), or end other processes"
    if type(e).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError") or "gloo" in str(e).lower():
        return f"another rank has ended or cannot be reached ({str(e).splitlines()[0]}); then --resume continues"
    return None


def fail(message: str) -> None:
    """Print `error: message` on one line of stderr and exit with code 2. Each rank prints its own."""
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else f"rank {rank}: "
    print(f"error: {who}" + printable(" ".join(message.split())), file=sys.stderr, flush=True)
    if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
        leave(2)
    sys.exit(2)


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and line ends


def printable(text: str) -> str:
    """The text with its control characters escaped.

    A name that somebody else chose, of a folder or of the base in an adapter's file, could otherwise move the cursor,
    overwrite what the terminal shows, or set its title.
    """
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def counted(n: int, noun: str) -> str:
    """A number with its noun: 1 thread, 2 threads."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


# ------------------------------------------------------------------------------------------------------- constants


@dataclass(frozen=True)
class Range:
    """The allowed values of a constant: from `low` to `high`, both included, never nan."""

    low: float
    high: float


Positive = Annotated[int, Range(1, 1e9)]  # sizes, steps, sequences
Count = Annotated[int, Range(0, 1e9)]  # the same, where 0 is special
Tokens = Annotated[int, Range(0, 1e15)]  # amounts of data; 0 has a special meaning
Seed = Annotated[int, Range(0, 2**63 - 1)]
NonNegative = Annotated[float, Range(0, 1e9)]
Probability = Annotated[float, Range(0, 0.9999)]  # of dropout, or a beta: 1 would leave nothing
Fraction = Annotated[float, Range(1e-6, 1)]
PositiveFloat = Annotated[float, Range(1e-30, 1e9)]


class Positional:
    """Marks a constant that is given by its place on the command line, not by a flag: `Annotated[str, Positional]`."""


NANOGPT = dict(  # flags that people bring from nanoGPT and its relatives, and what they are called here
    batch_size="micro_batch_size", block_size="sequence_length", dataset="data", device_batch_size="micro_batch_size",
    eval_iters="eval_steps", gradient_accumulation_steps="total_batch_size", learning_rate="max_lr", lr="max_lr",
    lr_decay_iters="max_steps", max_iters="max_steps", max_seq_len="sequence_length", n_ctx="sequence_length",
    num_iterations="max_steps", start="prompt", wandb_log="report_to", warmup_iters="warmup_steps",
)  # fmt: skip


def parse_args(config_type, args: list[str] | None = None, default=None, prog: str | None = None, description=None):
    """Fill the dataclass `config_type` from the words of a command line.

    `default` is an instance whose values replace the dataclass's own. Raises UserError for a word that means nothing,
    and for a constant of the wrong type or out of range.
    """
    words = sys.argv[1:] if args is None else args
    kinds = {name: kind_of(hint) for name, hint in get_type_hints(config_type, include_extras=True).items()}
    places = positionals(config_type)
    values = {field.name: getattr(default, field.name, field.default) for field in fields(config_type)}
    check_constants(config_type, values)  # a person may have edited them
    parser = make_parser(config_type, values, prog or os.path.basename(sys.argv[0]), description)
    end = words.index("--") if "--" in words else len(words)
    options = [with_underscores(word) for word in words[:end]]
    refuse_unknown(options, kinds, places)
    try:
        found, rest = parser.parse_known_args(options)
    except argparse.ArgumentError as e:
        flag = e.argument_name
        raise UserError(f"{flag} needs a value; one that begins with a dash is written {flag}=VALUE") from None
    values |= {name: converted(value, kinds[name]) for name, value in vars(found).items()}
    check_constants(config_type, values)
    rest += words[end + 1 :]
    for name in places:
        if get_origin(kinds[name]) is tuple:
            values[name] = tuple(rest)
            rest = []
        elif rest:
            values[name] = rest.pop(0)
        if values[name] in (MISSING, ()):
            raise UserError(f"{metavar(name)} is missing; {parser.format_usage()}")
    if rest:
        quotes = "put quotes around text that has spaces; " if places else ""
        raise UserError(f"{rest[0]!r} is not expected here; {quotes}{parser.format_usage()}")
    return config_type(**values)


def kind_of(hint):
    """The type of a constant, without its annotations."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def positionals(config_type) -> list[str]:
    """The names of the constants that are given by their place."""
    hints = get_type_hints(config_type, include_extras=True)
    return [name for name, hint in hints.items() if Positional in get_args(hint)]


def metavar(name: str) -> str:
    return name.upper().removesuffix("S")


def with_underscores(word: str) -> str:
    """--max-steps=5 as --max_steps=5."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else word


def converted(value: str | list[str] | bool, kind):
    """The words of a flag as a value of its kind; if they are none, as they are, for `check_constants` to refuse."""
    if isinstance(value, list):
        return tuple(value)
    if get_origin(kind) is Literal:
        return next((choice for choice in get_args(kind) if str(choice) == value), value)
    try:
        return kind(value)
    except ValueError:
        return value


def make_parser(config_type, values: dict, prog: str, description) -> argparse.ArgumentParser:
    """The flags of a dataclass, with its comments as help. No value is checked here."""
    kinds = {name: kind_of(hint) for name, hint in get_type_hints(config_type, include_extras=True).items()}
    places = positionals(config_type)
    usage = [prog]
    for name in places:
        word = metavar(name)
        word = f"{word} [{word} ...]" if get_origin(kinds[name]) is tuple else word
        usage.append(word if values[name] is MISSING else f"[{word}]")
    parser = argparse.ArgumentParser(
        usage=" ".join([*usage, "[--FLAG VALUE ...]"]).replace("%", "%%"),
        description=description,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32),
        argument_default=argparse.SUPPRESS,  # what is not given is not found
        add_help=False,
        exit_on_error=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    for heading, comments in comments_of(config_type).items():
        about = "\n".join(f"{metavar(name):<8}{comments[name]}" for name in places if name in comments)
        group = parser.add_argument_group(heading, about or None)
        for name, comment in comments.items():
            if name not in places:
                add_flag(group, name, kinds[name], values[name], comment.replace("%", "%%"))
    return parser


def add_flag(group, name: str, kind, default, comment: str) -> None:
    if kind is bool:  # two switches, of which the help shows the one that changes something
        for value in (True, False):
            words = comment if value else f"do not {comment}"
            flag = f"--{name}" if value else f"--no_{name}"
            shown = words if value != default else argparse.SUPPRESS
            group.add_argument(flag, dest=name, action="store_const", const=value, help=shown)
        return
    is_list = get_origin(kind) is tuple
    shown = " ".join(default) if is_list else str(default).replace("%", "%%")
    options = dict(help=f"{comment} (default: {shown})" if shown else comment)
    if get_origin(kind) is Literal:
        options["metavar"] = "{" + ",".join(map(str, get_args(kind))) + "}"
    else:
        options["metavar"] = "STR" if is_list else kind.__name__.upper()
    group.add_argument(f"--{name}", nargs="*" if is_list else None, **options)


def comments_of(config_type) -> dict[str, dict[str, str]]:
    """{heading: {constant: comment}}. A comment on lines of its own is a heading of the constants below it; above a
    constant without a comment on the same line it is that constant's."""
    groups: dict[str, dict[str, str]] = {}
    heading = "options"
    for cls in reversed([cls for cls in config_type.__mro__ if is_dataclass(cls)]):
        above = []
        for line in inspect.getsource(cls).splitlines():
            code, _, comment = line.rpartition("  # ")
            if alone := re.match(" {4}# (.*)", line):
                above.append(alone[1])
            elif name := re.match(r" {4}(\w+): ", line):
                if above and code:
                    heading = " ".join(above)
                groups.setdefault(heading, {})[name[1]] = comment if code else " ".join(above)
                above = []
    return groups


def refuse_unknown(options: list[str], kinds: dict, places: list[str]) -> None:
    """Raises UserError for the first word that looks like a flag but is none, with the flag that was perhaps meant."""
    flags = [f"--{name}" for name in kinds if name not in places]
    switches = [flag for flag in flags if kinds[flag[2:]] is bool]
    switches += [f"--no_{flag[2:]}" for flag in switches]
    for word in options:
        flag, equals, value = word.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if not re.match(r"--?[^\W\d]\S*$", flag) or word in ("-h", "--help"):  # a value, a number, or a text
            continue
        if flag in switches and equals:
            raise UserError(f"{flag} takes no value; leave out ={value}, or the flag")
        if flag in flags + switches:
            continue
        if name in places:
            raise UserError(f"{metavar(name)} is given by its place, without {flag}; see --help")
        if NANOGPT.get(name) in kinds:
            raise UserError(f"{flag} is called --{NANOGPT[name]} here; see --help")
        near = [known for known in flags if known.startswith(f"--{name}")]
        if flag.startswith("--"):
            near += difflib.get_close_matches(flag, flags + switches, 1)
        if near:
            raise UserError(f"there is no {flag}; did you mean {near[0]}?")
        if flag.startswith("--"):
            raise UserError(f"there is no {flag}; see --help")
        place = f", or comes after a lone -- as {metavar(places[-1])}" if places else ""
        raise UserError(f"{flag} is not a flag; a value that begins with a dash is written --FLAG={word}{place}")


def check_constants(config_type, values: dict) -> None:
    """Raises UserError for a value of the wrong type or out of range."""
    for name, hint in get_type_hints(config_type, include_extras=True).items():
        kind = kind_of(hint)
        value = values.get(name, MISSING)
        if value is MISSING:
            continue
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise UserError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, get_args(kind)))}")
        allowed = (int, float) if kind is float else (kind,)
        if kind in KINDS and type(value) not in allowed:
            raise UserError(f"{name} is {value!r}; it must be {KINDS[kind]}")
        if get_origin(kind) is tuple and not (type(value) is tuple and all(type(item) is str for item in value)):
            raise UserError(f"{name} is {value!r}; it must be a list of texts")
        for limit in get_args(hint):
            if isinstance(limit, Range) and not limit.low <= value <= limit.high:
                raise UserError(f"--{name} must be in [{limit.low:,g}, {limit.high:,g}], not {value}")


KINDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "True or False"}


def flags_set(config_type, args: list[str]) -> set[str]:
    """The names of the constants that the words of a command line set."""
    given = {word.partition("=")[0] for word in map(with_underscores, args)}
    names = (field.name for field in fields(config_type))
    return {name for name in names if given & {f"--{name}", f"--no_{name}"}}
