"""See what a tokenizer does to an English and a Chinese text, side by side with GPT-2's.

    python bpe/try_tokenizer.py                                      # out/bpe, as bpe/train.py leaves it
    python bpe/try_tokenizer.py --tokenizer out/bpe4k --chinese "我喜欢吃苹果。"
    python bpe/try_tokenizer.py --compare out/bpe4k                  # instead of GPT-2's

Prints the tokens in colour, counts, bytes per token and why they differ; writes the same as pictures, tokens.png and
tokens.svg, beside the tokenizer. Knows nothing of training.
"""

import os
import re
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bpe.tokenizer import Tokenizer, valid_unicode
from cli import UserError, parse_args, script

ENGLISH = (
    "The librarian keeps 3 clocks above the door. One is right, one is 5 minutes fast, and nobody remembers why "
    "the third one hasn't been wound since 1987."
)
CHINESE = "研究生院门前有一棵石榴树，每年秋天都会结出很多果子。管理员说，先到的同学可以摘两个，但不要告诉别人。"


@dataclass(frozen=True)
class Config:
    tokenizer: str = "out/bpe"  # directory or file of a tokenizer
    compare: str = "gpt2"  # the other one: gpt2, or a directory or file
    english: str = ENGLISH  # one text
    chinese: str = CHINESE  # the other text
    png: str = ""  # the picture, a .png; tokens.png beside the tokenizer when empty
    color: Literal["auto", "on", "off"] = "auto"  # colours in the terminal; off puts bars between tokens


COLORS = ("#f9d5a7", "#c5e3bf", "#bcd9f5", "#f6c5cf", "#dccbf0", "#f3eaa4")
COLUMNS = 96  # of the picture, in widths of a Latin letter
ROWS = 100  # of each text in the picture, at most


@dataclass(frozen=True)
class Result:
    """One text in the tokens of one tokenizer."""

    tokenizer: str
    vocab_size: int
    text: str
    pieces: list[str]

    def __str__(self) -> str:
        n = len(self.pieces)
        rate = f"{len(self.text.encode()) / n:.2f} bytes and {len(self.text) / n:.2f} characters per token"
        return f"{self.tokenizer} ({self.vocab_size:,} tokens): {n} tokens, {rate}"


def split_up(name: str, tok: Tokenizer, text: str) -> Result:
    """Each token as text; one that ends inside of a character is a dot, and the character stands where it ends."""
    decoder = tok.stream_decoder()
    pieces = [decoder.push(i) or "·" for i in tok.encode_ordinary(text)]
    return Result(name, len(tok), text, [piece.replace("\n", "⏎").replace("\t", "⇥") for piece in pieces])


# ---- in the terminal


def colored(pieces: list[str]) -> str:
    def paint(piece: str, color: str) -> str:
        r, g, b = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return f"\x1b[48;2;{r};{g};{b}m\x1b[30m{piece}\x1b[0m"

    return "".join(paint(piece, COLORS[i % len(COLORS)]) for i, piece in enumerate(pieces))


def use_color(choice: str) -> bool:
    return choice == "on" or choice == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ


# ---- as a picture


def chinese_font() -> str | None:
    """The name of an installed font with Chinese characters."""
    from matplotlib import font_manager

    likely = re.compile(
        r"CJK|Noto \w+ SC|Source Han|WenQuanYi|PingFang|Heiti|YaHei|SimHei|SimSun|Hiragino|Songti|Arial U"
    )
    for font in sorted(font_manager.fontManager.ttflist, key=lambda font: "Serif" in font.name):
        if likely.search(font.name) and font_manager.get_font(font.fname).get_char_index(ord("树")):
            return font.name
    return None


def width(text: str) -> int:
    """Columns of a text in a fixed-width font, where East Asian characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def lay_out(pieces: list[str]) -> tuple[list[tuple[int, int]], int]:
    """(column, row) of the pieces in ROWS rows of COLUMNS, and the number of rows."""
    places, column, row = [], 0, 0
    for piece in pieces:
        if column + width(piece) > COLUMNS and column:
            column, row = 0, row + 1
            if row == ROWS:
                return places, ROWS
        places.append((column, row))
        column += width(piece)
    return places, row + 1


def draw(results: list[Result], path: Path) -> str | None:
    """Write the picture; returns the name of the Chinese font, None where code points had to stand in."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    font = chinese_font()
    unit = 0.1  # inches a column
    shown = [[p if font else "".join(map(code_point, p)) for p in result.pieces] for result in results]
    layouts = [lay_out(pieces) for pieces in shown]
    rows = sum(n + 2 for _, n in layouts)
    fig = Figure(figsize=((COLUMNS + 4) * unit, rows * 2.4 * unit), dpi=150)
    ax = fig.add_axes((0, 0, 1, 1), xlim=(-2, COLUMNS + 2), ylim=(rows, 0))
    ax.axis("off")
    family = ["DejaVu Sans Mono", *([font] if font else [])]
    style = dict(family=family, size=unit * 72 / 0.602, va="center", parse_math=False)  # its letters are 0.602 em wide
    top = 0
    for result, pieces, (places, n_rows) in zip(results, shown, layouts, strict=True):
        ax.text(0, top + 0.9, str(result), **style | dict(family="DejaVu Sans"), weight="bold")
        for i, (piece, (column, row)) in enumerate(zip(pieces, places, strict=False)):
            y = top + 1.4 + row
            ax.add_patch(Rectangle((column, y + 0.06), width(piece), 0.88, color=COLORS[i % len(COLORS)], lw=0))
            for c in piece:
                ax.text(column + width(c) / 2, y + 0.5, c, ha="center", **style)
                column += width(c)
        top += n_rows + 2
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    return font


def draw_svg(results: list[Result], path: Path) -> None:
    """The same picture as SVG. Letters are drawn by whoever looks at it, so that no font has to be installed here."""
    column, row = 9, 24  # pixels
    parts, top = [], 0
    for result in results:
        places, n_rows = lay_out(result.pieces)
        parts.append(f'<text x="0" y="{top + 20}" font-weight="bold" font-family="sans-serif">{xml(result)}</text>')
        for i, (piece, (left, line)) in enumerate(zip(result.pieces, places, strict=False)):
            x, y, w = left * column, top + 30 + line * row, width(piece) * column
            # a white edge, because neighbouring colours are alike in grey
            parts.append(
                f'<rect x="{x}" y="{y}" width="{w}" height="{row - 2}" fill="{COLORS[i % len(COLORS)]}" stroke="#fff"/>'
            )
            # textLength: East Asian fonts are not exactly two columns wide
            fit = f'textLength="{w}" lengthAdjust="spacingAndGlyphs"'
            parts.append(f'<text x="{x}" y="{y + 16}" {fit}>{xml(piece)}</text>')
        top += 30 + n_rows * row + 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -4 {COLUMNS * column + 20} {top}"'
    style = 'width="900" font-family="monospace" font-size="15" style="background:#fff" xml:space="preserve">'
    path.parent.mkdir(parents=True, exist_ok=True)
    # browsers differ in which of the two they follow, and a token's space would be lost
    spaces = "<style>text { white-space: pre }</style>"
    path.write_text("\n".join([f"{head} {style}", spaces, *parts, "</svg>"]) + "\n", encoding="utf-8")


def xml(text: object) -> str:
    """Text between tags, without the characters that XML cannot hold."""
    return escape(re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "·", str(text)))


def code_point(c: str) -> str:
    return c if ord(c) < 0x250 else f"{ord(c):04x}"


# ---- why

HAN = re.compile(r"[\u4e00-\u9fff]")
REASON = """\
A pair is merged when it is frequent in the training text, and only as long as the vocabulary has room. So a
tokenizer spends its tokens on the language that it was trained on. A text in another one falls apart, down to bytes
(a letter of English is one, a Chinese character three), and becomes longer: more to compute, and less of it fits
into the context."""


def why(name: str, tok: Tokenizer, english: str, chinese: str) -> str:
    """The numbers behind the lengths."""
    tokens = [a + b for a, b in tok.merges]
    n_english = sum(bool(re.fullmatch(rb" ?[A-Za-z]{2,}", token)) for token in tokens)
    n_chinese = sum(bool(HAN.search(token.decode("utf-8", "ignore"))) for token in tokens)
    words, characters = re.findall(r" [A-Za-z]{2,}", english), HAN.findall(chinese)
    whole = [sum(len(tok.encode_ordinary(part)) == 1 for part in parts) for parts in (words, characters)]
    return (
        f"{name}: of its {len(tokens):,} merges {n_english:,} are made of English letters and {n_chinese:,} hold a "
        f"Chinese character. One token each are {whole[0]} of {len(words)} English words here, and {whole[1]} of "
        f"{len(characters)} Chinese characters."
    )


def load(name: str) -> Tokenizer:
    if not name:
        raise UserError("the name of a tokenizer is empty; give a directory or a tokenizer.json")
    if name == Config.tokenizer and not Path(name).exists():
        raise UserError(f"there is no tokenizer at {name} yet; run python bpe/train.py first")
    try:
        return Tokenizer.load(name)
    except ValueError as e:
        raise UserError(str(e)) from None


def picture_of(config: Config) -> Path:
    """Where the picture goes. Raises UserError."""
    beside = Path(config.tokenizer)
    path = Path(config.png or (beside if beside.is_dir() else beside.parent) / "tokens.png")
    if path.suffix != ".png" or path.is_dir():
        raise UserError(f"--png {config.png} is no name of a picture; give one that ends in .png")
    return path


def main() -> None:
    config = parse_args(Config, description=__doc__)
    sys.stdout.reconfigure(errors="replace")
    tokenizers = {config.tokenizer: load(config.tokenizer)}
    try:
        tokenizers[config.compare] = load(config.compare)
    except UserError as e:
        if config.compare != Config.compare:
            raise
        print(f"note: without GPT-2's tokenizer, since {e}\n")
    path = picture_of(config)
    english, chinese = valid_unicode(config.english), valid_unicode(config.chinese)
    results = [split_up(name, tok, text) for text in (english, chinese) if text for name, tok in tokenizers.items()]
    if not results:
        raise UserError("--english and --chinese are both empty; give a text")
    for result in results:
        print(result)
        print(colored(result.pieces) if use_color(config.color) else "|".join(result.pieces), end="\n\n")
    if any("·" in result.pieces for result in results):
        print("· is a token that ends inside of a character\n")
    for name, tok in tokenizers.items():
        print(why(name, tok, english, chinese))
    print(REASON)
    font = draw(results, path)
    svg = path.with_suffix(".svg")
    draw_svg(results, svg)
    instead = "no font with Chinese characters here, so it shows code points; Noto Sans CJK is one: fonts-noto-cjk"
    print(f"\nwrote {svg} and {path}" + ("" if font else f" ({instead})"))


if __name__ == "__main__":
    script(main)
