"""See what a tokenizer does to an English and a Chinese text, side by side with GPT-2's.

    python bpe/try_tokenizer.py                                      # out/bpe, which bpe/train.py writes
    python bpe/try_tokenizer.py --tokenizer out/bpe4k --chinese "我喜欢吃苹果。"
    python bpe/try_tokenizer.py --compare out/bpe4k                  # instead of GPT-2's

Prints the tokens in colour, how many there are and bytes per token; draws the same in out/tokens.svg.
This file knows nothing of training.
"""

import os
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bpe.tokenizer import Tokenizer, valid_unicode
from parts.cli import UserError, parse_args, printable, script
from parts.files import replace_file

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


# light and darker in turn, so that neighbours differ in grey, too
COLORS = ("#fbe6c8", "#93cba0", "#dcebfb", "#ee9fae", "#efe6f8", "#d8c25c")
PICTURE = Path("out/tokens.svg")  # not beside the tokenizer, which may be in a checkpoint
COLUMNS = 96  # of the picture: Latin letters in a row
COLUMN = 9  # pixels of a letter
ROW = 24  # pixels of a row
REASON = """\
A pair is merged if it is frequent in the training text, as long as the vocabulary has room. So a tokenizer spends its
tokens on the language that it was trained on. Text in another language falls apart, down to bytes (an English letter
is one, a Chinese character three), and becomes longer: more to compute, and less of it fits into the context."""


def main() -> None:
    config = parse_args(Config, description=__doc__)
    tokenizers = load_both(config)
    texts = [valid_unicode(text) for text in (config.english, config.chinese) if text]
    results = []
    for text in texts:
        for name, tok in tokenizers.items():
            results.append(split_up(name, tok, text))
    in_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    codes = ["\x1b[48;2;{};{};{}m\x1b[30m".format(*bytes.fromhex(color[1:])) for color in COLORS]
    for title, pieces in results:
        colored = "".join(f"{codes[i % len(codes)]}{piece}\x1b[0m" for i, piece in enumerate(pieces))
        print(f"{title}\n{colored if in_color else '|'.join(pieces)}\n")
    print(f"· is a token that ends in the middle of a character.\n{REASON}")
    draw_svg(results, PICTURE)
    print(f"\nwrote {PICTURE}")


def load_both(config: Config) -> dict[str, Tokenizer]:
    """The tokenizers by name; without GPT-2's vocabulary only one of them. Raises UserError."""
    found = {}
    for name in (config.tokenizer, config.compare):
        try:
            found[name] = Tokenizer.load(name)
        except ValueError as e:
            if name == config.tokenizer or config.compare != Config.compare:
                raise UserError(str(e)) from None
            print(f"note: without GPT-2's tokenizer, since {e}\n")
    return found


def split_up(name: str, tok: Tokenizer, text: str) -> tuple[str, list[str]]:
    """A title, and each token as text. A token that ends in the middle of a character is a dot; the token that
    completes the character shows it."""
    decoder = tok.stream_decoder()
    pieces = [decoder.push([i]) or "·" for i in tok.encode_ordinary(text)]
    title = (
        f"{name} ({len(tok):,} tokens): {len(pieces)} tokens, {len(text.encode()) / len(pieces):.2f} bytes "
        f"and {len(text) / len(pieces):.2f} characters per token"
    )
    return title, [piece.replace("\n", "⏎").replace("\t", "⇥") for piece in pieces]


def draw_svg(results: list[tuple[str, list[str]]], path: Path) -> None:
    """Draw the tokens as coloured boxes. The viewer's own fonts draw the letters, so none has to be installed here."""
    parts = []
    y = 20  # the baseline of a line of text
    for title, pieces in results:
        parts.append(f'<text x="0" y="{y}" font-weight="bold" font-family="sans-serif">{escape(title)}</text>')
        x = 0
        y += 26
        for i, piece in enumerate(pieces):
            w = width(piece) * COLUMN
            if x and x + w > COLUMNS * COLUMN:
                x = 0
                y += ROW
            box = f'x="{x}" y="{y - 16}" width="{w}" height="{ROW - 2}" fill="{COLORS[i % len(COLORS)]}" stroke="#fff"'
            # textLength: East Asian fonts are not exactly two columns wide
            fit = f'x="{x}" y="{y}" textLength="{w}" lengthAdjust="spacingAndGlyphs"'
            parts.append(f"<rect {box}/><text {fit}>{escape(piece)}</text>")
            x += w
        y += 40
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -4 {COLUMNS * COLUMN + 20} {y - 20}"'
    style = 'width="900" font-family="monospace" font-size="15" style="background:#fff" xml:space="preserve">'
    # as well as xml:space: some browsers follow only one of the two and would drop the space that a token begins with
    lines = [f"{head} {style}", "<style>text { white-space: pre }</style>", *parts, "</svg>\n"]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, printable("\n".join(lines)))


def width(text: str) -> int:
    """Columns of a text in a fixed-width font, in which East Asian characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


if __name__ == "__main__":
    script(main)
