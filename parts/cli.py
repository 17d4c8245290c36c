"""Shared startup of every script: the command line, checked constants, one-line errors.

This file imports no torch, so that a worker process that imports it stays small. Of models, ranks and runs it knows
only the remedies that `explain` names.
"""

import argparse
import atexit
import contextlib
import difflib
import inspect
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
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
    if isinstance(e, UserError):
        return str(e)
    if isinstance(e, OSError):
        where = f"{e.filename}: " if e.filename else ""
        return f"{where}{e.strerror or e}; fix that, or pass another path"
    if isinstance(e, UnicodeDecodeError):
        return f"a text is not UTF-8 ({e.reason} at byte {e.start}); save it as UTF-8"
    if isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(e):
        return f"out of memory ({str(e).splitlines()[0] if str(e) else 'in Python'}); use a smaller model or batch"
    if "no kernel image is available" in str(e):
        return "PyTorch has no code for this GPU; install its build for CUDA 12.6 (older cards), or a newer PyTorch"
    if type(e).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return f"another rank has ended or cannot be reached ({str(e).splitlines()[0]}); read its error first"
    if "gloo" in str(e).lower():
        return "another rank has ended; read its error first"
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
    """Marks a positional constant: `Annotated[str, Positional]`."""


NANOGPT = dict(  # nanoGPT's flags, and their names here
    batch_size="micro_batch_size", block_size="sequence_length", dataset="data", device_batch_size="micro_batch_size",
    eval_iters="eval_steps", gradient_accumulation_steps="total_batch_size", learning_rate="max_lr", lr="max_lr",
    lr_decay_iters="max_steps", max_iters="max_steps", max_seq_len="sequence_length", n_ctx="sequence_length",
    num_iterations="max_steps", start="prompt", wandb_log="report_to", warmup_iters="warmup_steps",
)  # fmt: skip


def parse_args(config_type, args: list[str] | None = None, default=None, prog=None, description: str = ""):
    """Fill the dataclass `config_type` from the words of a command line.

    `default` is an instance whose values replace the dataclass's own. Raises UserError for an unknown word, and for a
    constant of a wrong type or out of range.
    """
    words = sys.argv[1:] if args is None else args
    values = {field.name: getattr(default, field.name, field.default) for field in fields(config_type)}
    parser = make_parser(config_type, values, prog or os.path.basename(sys.argv[0]), description)
    end = words.index("--") if "--" in words else len(words)
    flags, rest = parser.parse_known_args([with_underscores(word) for word in words[:end]])
    for word in rest:
        if re.match(r"--?[^\W\d]\S*$", word):  # neither a number nor a text with spaces
            raise UserError(about_unknown(word.partition("=")[0].lstrip("-"), list(values)))
    rest += words[end + 1 :]
    values |= {name: tuple(value) if isinstance(value, list) else value for name, value in vars(flags).items()}
    for name, kind, limits in constants(config_type):
        if Positional in limits:
            if get_origin(kind) is tuple:
                values[name] = tuple(rest)
                rest = []
            elif rest:
                values[name] = rest.pop(0)
            if values[name] in (MISSING, ()):
                parser.error(f"{name.upper()} is missing")
    if rest:
        parser.error(f"unexpected {rest[0]!r}; quote text that has spaces")
    for name, kind, limits in constants(config_type):
        check_constant(name, values[name], kind, limits)
    return config_type(**values)


def make_parser(config_type, values: dict, prog: str, description: str) -> argparse.ArgumentParser:
    """Make the flags of a dataclass, with its comments as help, in the groups that its own lines of comment name."""
    kinds = {name: kind for name, kind, limits in constants(config_type) if Positional not in limits}
    places = [name.upper() if values[name] is MISSING else f"[{name.upper()}]" for name in values if name not in kinds]
    group = parser = Parser(
        usage=" ".join([prog, *places, "[--FLAG VALUE ...]"]),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # the result holds given flags alone
        allow_abbrev=False,
    )
    lines = [line for cls in reversed(config_type.__mro__[:-1]) for line in inspect.getsource(cls).splitlines()]
    for line in lines:
        if heading := re.match(" {4}# (.*)", line):
            group = parser.add_argument_group(heading[1])
        elif constant := re.match(r" {4}(\w+): .*?(?:  # (.*))?$", line):
            name, comment = constant.groups(default="")
            if name in kinds:
                add_flag(group, name, kinds[name], values[name], comment.replace("%", "%%"))
            else:
                parser.description += f"\n{name.upper()}: {comment}"
    return parser


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def constants(config_type) -> Iterator[tuple]:
    """Yield each constant's name, its type, and the rest of its annotation."""
    for name, hint in get_type_hints(config_type, include_extras=True).items():
        kind, *limits = get_args(hint) if get_origin(hint) is Annotated else [hint]
        yield name, kind, limits


def add_flag(group, name: str, kind, default, comment: str) -> None:
    if kind is bool:  # two switches; the help shows the one that changes something
        on, off = (argparse.SUPPRESS, f"do not {comment}") if default else (comment, argparse.SUPPRESS)
        group.add_argument(f"--{name}", action="store_true", help=on)
        group.add_argument(f"--no_{name}", action="store_false", dest=name, help=off)
        return
    word = type_of_word(name, kind)
    options = dict(type=word, metavar=word.__name__.upper())
    if get_origin(kind) is Literal:
        options = dict(type=word, choices=get_args(kind))
    if get_origin(kind) is tuple:
        options["nargs"] = "*" if ... in get_args(kind) else len(get_args(kind))
        default = " ".join(map(str, default))
    shown = str(default).replace("%", "%%")
    group.add_argument(f"--{name}", help=f"{comment} (default: {shown})" if shown else comment, **options)


def type_of_word(name: str, kind) -> type:
    """Return the type of each word after a flag. Raises UserError for a constant that words cannot give."""
    if get_origin(kind) is Literal:
        found = {type(value) for value in get_args(kind)}
    elif get_origin(kind) in (tuple, Union, UnionType):
        found = {*get_args(kind)} - {..., NoneType}
    else:
        found = {kind}
    if len(found) == 1 and found <= {int, float, str}:
        return found.pop()
    raise UserError(
        f"{name} is of the type {kind}; choose bool, int, float, str, Literal, int | None or tuple[int, ...]"
    )


def about_unknown(name: str, names: list[str]) -> str:
    """Return the error for an unknown flag, with the closest match."""
    if name in names:
        return f"{name.upper()} is positional: drop --{name}; see --help"
    if NANOGPT.get(name) in names:
        return f"--{name} is called --{NANOGPT[name]} here; see --help"
    near = difflib.get_close_matches(name, names, 1)
    return f"unknown flag --{name}; " + (f"did you mean --{near[0]}?" if near else "see --help")


def with_underscores(word: str) -> str:
    """Return --max-steps=5 as --max_steps=5."""
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else word


def check_constant(name: str, value, kind, limits: list) -> None:
    """Raise UserError for a value of a wrong type or out of range."""
    wrong = isinstance(kind, type) and not isinstance(value, (int, float) if kind is float else kind)
    if wrong or (get_origin(kind) is Literal and value not in get_args(kind)):
        raise UserError(f"{name} is {value!r}; choose a value of {kind}")
    for limit in limits:
        if isinstance(limit, Range) and not limit.low <= value <= limit.high:
            raise UserError(f"--{name} is {value}; choose a value in [{limit.low:,g}, {limit.high:,g}]")


def flags_set(config_type, args: list[str]) -> set[str]:
    """Return the names of the constants that the words of a command line set."""
    given = {word.partition("=")[0] for word in map(with_underscores, args)}
    names = (field.name for field in fields(config_type))
    return {name for name in names if given & {f"--{name}", f"--no_{name}"}}
