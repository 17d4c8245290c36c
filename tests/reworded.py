"""Say every error in other words: tests hold what a user typed, and no phrase of ours.

    REWORD_ERRORS=1 python -m pytest -q        # the tests that fail then know our words

Each plain word of an error is spelled backwards. Flags, paths, numbers, names in capitals or with a sign in them and all
words of the command and of a case's parameters stay. Errors of scripts in processes of their own keep their words.
"""

import os
import re
import sys

WORD = re.compile(r"(?<![\w./'\"`=|-])[A-Za-z]?[a-z]+(?![\w/'\"`=|-]|\.\w)")


def reword(message: str) -> str:
    case = os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[2]  # its parameters
    typed = set(re.findall(r"\w+", " ".join([*map(str, sys.argv), case])))
    return WORD.sub(lambda found: found[0] if found[0] in typed else found[0][::-1], message)


def reword_errors() -> None:
    from parts.cli import UserError

    UserError.__str__ = lambda error: reword(Exception.__str__(error))
