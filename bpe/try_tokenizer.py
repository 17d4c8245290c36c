"""Compare a tokenizer's tokens of an English and a Chinese text with GPT-2's.

    python bpe/try_tokenizer.py                                      # out/bpe, which bpe/train.py writes
    python bpe/try_tokenizer.py --tokenizer out/bpe4k --chinese "我喜欢吃苹果。"
    python bpe/try_tokenizer.py --compare out/bpe4k                  # instead of GPT-2's

Prints the tokens in colour, their number and bytes per token.
This file knows nothing of training.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bpe.chunks import valid_unicode
from bpe.tokenizer import Tokenizer
from parts.cli import UserError, parse_args, script

ENGLISH = (
    "The librarian keeps 3 clocks above the door. One is right, one is 5 minutes fast, and nobody remembers why "
    "the third one hasn't been wound since 1987."
)
CHINESE = "研究生院门前有一棵石榴树，每年秋天都会结出很多果子。管理员说，先到的同学可以摘两个，但不要告诉别人。"


@dataclass(frozen=True)
class Config:
    tokenizer: str = "out/bpe"  # directory or file of a tokenizer
    compare: str = "gpt2"  # tokenizer to compare with: gpt2, or a directory or file
    english: str = ENGLISH  # the first text
    chinese: str = CHINESE  # the second text


# light and darker in turn, so that neighbours also differ in grey
COLORS = ("#fbe6c8", "#93cba0", "#dcebfb", "#ee9fae", "#efe6f8", "#d8c25c")
REASON = """\
A pair is merged if it is frequent in the training text, as long as the vocabulary has room. So a tokenizer spends its
tokens on the language that it was trained on. Text in another language falls apart, down to bytes (an English letter
is one, a Chinese character three), and becomes longer: more to compute, and less of it fits into the context."""


def main() -> None:
    config = parse_args(Config, description=__doc__)
    tokenizers = load_both(config)
    in_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    codes = ["\x1b[48;2;{};{};{}m\x1b[30m".format(*bytes.fromhex(color[1:])) for color in COLORS]
    for text in filter(None, (config.english, config.chinese)):
        for name, tok in tokenizers.items():
            title, pieces = split_up(name, tok, valid_unicode(text))
            shown = "|".join(pieces)
            if in_color:
                shown = "".join(f"{codes[i % len(codes)]}{piece}\x1b[0m" for i, piece in enumerate(pieces))
            print(f"{title}\n{shown}\n")
    print(f"· is a token that ends in the middle of a character.\n{REASON}")


def load_both(config: Config) -> dict[str, Tokenizer]:
    """Load the tokenizers by name; without GPT-2's vocabulary only the first. Raise UserError."""
    found = {}
    for name in (config.tokenizer, config.compare):
        try:
            found[name] = Tokenizer.load(name)
        except ValueError as e:
            if name == config.tokenizer or config.compare != Config.compare:
                raise UserError(str(e)) from None
            print(f"note: without GPT-2's tokenizer, because {e}\n")
    return found


def split_up(name: str, tok: Tokenizer, text: str) -> tuple[str, list[str]]:
    """Return a title, and each token as text. A token that ends in the middle of a character is a dot; the token that
    completes the character shows it."""
    decoder = tok.stream_decoder()
    pieces = [decoder.push([i]) or "·" for i in tok.encode_ordinary(text)]
    title = (
        f"{name} ({len(tok):,} tokens): {len(pieces)} tokens, {len(text.encode()) / len(pieces):.2f} bytes "
        f"and {len(text) / len(pieces):.2f} characters per token"
    )
    return title, [piece.replace("\n", "⏎").replace("\t", "⇥") for piece in pieces]


if __name__ == "__main__":
    script(main)
