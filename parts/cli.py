"""Shared startup of every script: the command line, checked constants, one-line errors.

This file imports no torch, so that a worker process that imports it stays small. Of models, ranks and runs it knows
only the remedies that `explain` names.
"""

import argparse
import atexit
import contextlib
import difflib
import inspect
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints


class UserError(Exception):
    """Bad user input: ends a script with one line, `error: what; what to do`, and exit code 2."""


class Stopped(Exception):
    """`Stopped(signum)`: a signal ended the run cleanly. The exit code is 128 + signum, 130 for SIGINT."""


def script(main: Callable[[], None]) -> None:
    """Run `main` and end the process: 0 done, 2 for bad usage or input, 128 + n after signal n."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):  # a terminal without UTF-8 still shows the rest
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = lambda message, *_, **__: f"note: {message}\n"  # without a line of our code
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
        fail(message)


def leave(code: int) -> None:
    """End a rank without shutting Python down: Gloo's threads outlive the process group, and one that requests the GIL
    meanwhile aborts the process."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def explain(e: BaseException) -> str | None:
    """Return the user's message about an error; None for a bug of ours, which keeps its traceback."""
    if isinstance(e, UserError | argparse.ArgumentError):  # of two constants with one flag
        return str(e)
    if isinstance(e, OSError):
        where = f"{e.filename}: " if e.filename else ""
        return f"{where}{e.strerror or e}; fix that, or pass another path"
    if isinstance(e, UnicodeDecodeError):
        return f"a text is not UTF-8 ({e.reason} at byte {e.start}); save it as UTF-8"
    if isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(e):
        return f"out of memory ({str(e).splitlines()[0] if str(e) else 'in Python'}); choose a smaller model or batch"
    if "no kernel image is available" in str(e):
        return "PyTorch has no code for this GPU; install its build for CUDA 12.6 (older cards), or a newer PyTorch"
    if type(e).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError") or "gloo" in str(e).lower():
        return f"another rank has ended or cannot be reached ({str(e).splitlines()[0]}); read its error first"
    return None


def fail(message: str) -> None:
    """Print `error: message` on one line of stderr and exit with code 2; each rank prints its own."""
    rank = os.environ.get("RANK", "0")
    who = "" if rank == "0" else f"rank {rank}: "
    print(f"error: {who}" + printable(" ".join(message.split())), file=sys.stderr, flush=True)
    if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
        leave(2)
    sys.exit(2)


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # except tabs and newlines


def printable(text: str) -> str:
    """Escape control characters: somebody else's file name could move the cursor or set the terminal's title."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: 1 thread, 2 threads."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


# ------------------------------------------------------------------------------------------------------- constants


@dataclass(frozen=True)
class Range:
    """A constant's allowed values: from `low` to `high`, both included, never nan."""

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
    """Mark a positional constant: `Annotated[str, Positional]`."""


def parse_args(config_type, args: list[str] | None = None, default=None, prog=None, description: str = ""):
    """Fill the dataclass `config_type` from the words of a command line, as `parse_words` does."""
    config, _ = parse_words(config_type, args, default, prog, description)
    return config


def parse_words(config_type, args: list[str] | None = None, default=None, prog=None, description: str = ""):
    """Fill the dataclass `config_type` from the words of a command line; also return the names that they set.

    `default` is an instance whose values replace the dataclass's own. Raises UserError for an unknown word, and for a
    constant of a wrong type or out of range.
    """
    words = sys.argv[1:] if args is None else args
    values = {field.name: getattr(default, field.name, field.default) for field in fields(config_type)}
    parser = make_parser(config_type, values, prog or os.path.basename(sys.argv[0]), description)
    given, unknown = parser.parse_known_intermixed_args([with_underscores(word) for word in words])
    if unknown:
        raise UserError(about_unknown(unknown[0].partition("=")[0], list(parser._option_string_actions)))
    for name, value in vars(given).items():
        values[name] = tuple(value) if isinstance(value, list) else value
    for name, hint in get_type_hints(config_type, include_extras=True).items():
        for limit in get_args(hint):
            if isinstance(limit, Range) and values[name] is not None and not limit.low <= values[name] <= limit.high:
                raise UserError(f"--{name} is {values[name]}; choose a value in [{limit.low:,g}, {limit.high:,g}]")
    return construct(config_type, **values), vars(given).keys()


def construct(config_type, **values):
    """Make a dataclass of constants. Raises UserError with the words of its own asserts and ValueErrors, and for values
    that a checkpoint's config.json cannot hold."""
    try:
        config = config_type(**values)
    except (AssertionError, ValueError) as e:
        raise UserError(str(e) or f"an assert of {config_type.__name__} refuses these constants; change them") from e
    try:
        json.dumps(asdict(config))
    except TypeError as e:
        raise UserError(f"a constant of {config_type.__name__} does not fit into config.json: {e}; change it") from e
    return config


# names of other scripts, such as nanoGPT's
OTHER_NAMES = {
    "--lr": "--max_lr",
    "--learning_rate": "--max_lr",
    "--batch_size": "--micro_batch_size",
    "--block_size": "--sequence_length",
    "--max_iters": "--max_steps",
}


def about_unknown(word: str, flags: list[str]) -> str:
    """Write the error for an unknown word, with the closest flag."""
    if not word.startswith("-"):
        return f"unexpected {word!r}; quote text that has spaces, or see --help"
    name = OTHER_NAMES.get(word)
    near = [name] if name in flags else difflib.get_close_matches(word, flags, 1)
    return f"unknown flag {word}; did you mean {near[0]}?" if near else f"unknown flag {word}; see --help"


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def make_parser(config_type, values: dict, prog: str, description: str) -> Parser:
    """Make the flags of a dataclass, with its comments as help, in the groups that its own lines of comment name."""
    hints = get_type_hints(config_type, include_extras=True)
    places = [name.upper() for name, hint in hints.items() if Positional in get_args(hint)]
    group = parser = Parser(
        usage=" ".join([prog, *places, "[--FLAG VALUE ...]"]),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # the result holds given words alone
        allow_abbrev=False,
    )
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # before Python 3.14 -1e-3 would be a flag
    for cls in reversed(config_type.__mro__[:-1]):
        for line in inspect.getsource(cls).splitlines():
            if heading := re.match(" {4}# (.*)", line):
                group = parser.add_argument_group(heading[1])
            elif (constant := re.match(r" {4}(\w+) *:.*?(?:  # (.*))?$", line)) and constant[1] in values:
                name, comment = constant.groups(default="")
                add_argument(group, name, hints[name], values[name], comment.replace("%", "%%"))
    return parser


def add_argument(group, name: str, hint, default, comment: str) -> None:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if kind is bool:  # two switches; the help shows the one that changes something
        group.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS if default else comment)
        off = f"do not {comment}" if default else argparse.SUPPRESS
        group.add_argument(f"--no_{name}", action="store_false", dest=name, help=off)
        return
    parts = get_args(kind) or [kind]
    types = {type(part) for part in parts} if get_origin(kind) is Literal else {*parts} - {Ellipsis}
    first, *others = types - {NoneType} or [None]  # of tuple[int, ...] and int | None the int
    many = get_origin(kind) is tuple
    if others or first not in (str, int, float) or get_origin(kind) not in (None, tuple, Union, UnionType, Literal):
        raise UserError(f"--{name}: choose its type: bool, str, int, float, int | None, tuple[int, ...], Literal")
    if Positional in get_args(hint):
        nargs = None if default is MISSING else "?"
        if many:
            nargs = "+"
        group.add_argument(name, type=first, nargs=nargs, metavar=name.upper(), help=comment)
        return
    options = dict(type=none_or(first) if NoneType in types else first)
    if get_origin(kind) is Literal:
        options["choices"] = parts
    else:
        options["metavar"] = first.__name__.upper()
    if many:
        options["nargs"] = "*" if Ellipsis in get_args(kind) else len(get_args(kind))
        default = " ".join(map(str, default))
    shown = f" (default: {default})".replace("%", "%%") if default != "" else ""
    group.add_argument(f"--{name}", help=comment + shown, **options)


def none_or(kind) -> Callable:
    """Return a reader of words that takes None as well."""

    def read(word: str):
        return None if word == "None" else kind(word)

    read.__name__ = kind.__name__  # argparse names it in its errors
    return read


def with_underscores(word: str) -> str:
    """Return --max-steps=5 as --max_steps=5."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else word
