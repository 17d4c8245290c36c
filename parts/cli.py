"""What every script needs before it does anything: the command line, checked constants, one-line errors.

This file imports no torch, so that a worker process that imports it stays small. Of models, ranks and runs it knows
only the remedies that `explain` names.
"""

import atexit
import contextlib
import ctypes
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Literal, get_args, get_origin, get_type_hints


class UserError(Exception):
    """A mistake in what the user gave: ends a script with one line, `error: what; what to do`, and exit code 2."""


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
    try:
        main()
        sys.stdout.flush()  # now, while an error still becomes one line
        if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
            distributed.barrier()  # Gloo still sends its last tensors
            distributed.destroy_process_group()
            exit_now()
    except Stopped as e:
        sys.exit(128 + e.args[0])
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (UserError, OSError, MemoryError, RuntimeError) as e:  # NCCL's and Gloo's errors are RuntimeErrors
        if (message := explain(e)) is None:
            raise
        fail(message)


def hide_interrupts(kind, error, traceback) -> None:
    """A `sys.excepthook`: Ctrl-C while a script imports torch, before it calls `script`, needs no traceback."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, error, traceback)


def end_with_launcher() -> None:
    """On Linux: if torchrun is killed, its ranks get a SIGTERM. They would wait for its store for minutes."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


HOUSE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.dirname(os.path.abspath(sys.argv[0])) == HOUSE:  # a script of ours
    sys.excepthook = hide_interrupts
    if "TORCHELASTIC_RUN_ID" in os.environ:  # now, since importing torch takes seconds
        end_with_launcher()


def exit_now() -> None:
    """End a rank whose work is done, without shutting Python down: Gloo's threads outlive the process group, and one
    that requests the GIL during shutdown aborts the process."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def explain(e: BaseException) -> str | None:
    """The message for the user about an error; None for a bug of ours, which should show its traceback."""
    if isinstance(e, UserError):
        return str(e)
    if isinstance(e, OSError) and e.errno is not None:
        place = e.filename or "the output"
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"no space left on the disk of {place}; free some, then give the same command again"
        return f"{place}: {e.strerror}; fix that, or give another path"
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


def parse_args(config_type, args: list[str] | None = None, default=None, prog: str | None = None, description=None):
    """Fill the dataclass `config_type` from the command line; tyro makes --help of the comments after its fields.

    `default` is an instance whose values replace the dataclass's own. Raises UserError instead of printing tyro's box,
    and for a constant of the wrong type or out of range.
    """
    import tyro

    prog = prog or os.path.basename(sys.argv[0])
    # without a default instance those of the dataclass: None has no such attribute
    values = {field.name: getattr(default, field.name, field.default) for field in fields(config_type)}
    check_constants(config_type, values)  # a person may have edited them
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            config = tyro.cli(
                config_type,
                args=args,
                default=default,
                prog=prog,
                description=description,
                use_underscores=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as e:
        if not e.code:  # --help
            raise
        raise UserError(first_sentence(stderr.getvalue())) from None
    check_constants(config_type, vars(config))
    return config


def check_constants(config_type, values: dict) -> None:
    """Raises UserError for a value of the wrong type or out of range."""
    for name, hint in get_type_hints(config_type, include_extras=True).items():
        kind, *limits = get_args(hint) if get_origin(hint) is Annotated else [hint]
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
        items = value if isinstance(value, tuple) else (value,)
        for limit in limits:
            if isinstance(limit, Range) and not all(limit.low <= item <= limit.high for item in items):
                raise UserError(f"--{name} must be in [{limit.low:,g}, {limit.high:,g}], not {value}")


KINDS = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "True or False"}


def first_sentence(box: str) -> str:
    """The message of tyro's error box, without the frame, plus the option that it thinks was meant."""
    sections = [[]]
    for line in box.splitlines():
        line = line.strip("│ ")
        if line and set(line) <= set("─-"):
            sections.append([])
        elif line and line[0] not in "╭╰":
            sections[-1].append(line)
    if "╭" not in box:  # an ASCII frame leaves the title outside, as the first section
        del sections[0]
    message = " ".join(sections[0]).removesuffix(" .").rstrip(".")
    meant = re.search(r"Perhaps you meant:[\s│]+(--[\w-]+)", box)
    hint = f"did you mean {meant[1]}?" if meant else "see --help"
    return f"{message}; {hint}"


def flags_set(config_type, args: list[str]) -> set[str]:
    """The names of the constants that the words of a command line set."""
    options = (word[2:].partition("=")[0].replace("-", "_") for word in args if word.startswith("--"))
    return {name.removeprefix("no_") for name in options}
