"""Train a byte-pair tokenizer and look at what it has learned.

    python bpe/train.py                                               # 1024 tokens on bpe/manual.txt, a second
    python bpe/train.py --input input.txt bpe/manual.txt --vocab_size 4096 --out out/bpe4k
    python bpe/train.py --input "texts/*.parquet" --vocab_size 32768 --max_bytes 2_000_000_000 --out out/bpe32k
    python bpe/train.py --input HuggingFaceFW/fineweb-edu/sample/10BT --vocab_size 50257 --max_bytes 1_000_000_000

Prints merges as they are found, how well the vocabulary compresses text that it has not seen, and its longest tokens.
Writes OUT: tokenizer.json, tokenizer.tiktoken and tokenizer_config.json, for `--tokenizer OUT` of the other scripts
and for transformers.AutoTokenizer. The algorithm is in minimal.py, how it is made fast in training.py; this file
reads, reports and saves. It knows nothing of models or shards.
"""

import itertools
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bpe import formats
from bpe.tokenizer import ENDOFTEXT, HIGHEST_ID, Tokenizer, visible
from cli import Count, Range, Tokens, UserError, parse_args, script
from corpus.sources import Unit, arriving, discard, documents_of, find_source, is_txt, text_bytes, text_of, units_of


@dataclass(frozen=True)
class Config:
    input: tuple[str, ...] = ()  # files (text, .parquet, .jsonl), globs, folders, datasets of the hub; bpe/manual.txt
    text_field: str = "text"  # the column or key of the text, in .parquet and .jsonl
    max_bytes: Tokens = 0  # stop reading after so many bytes of text; 0 for all
    errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8: an error, or U+FFFD
    vocab_size: Annotated[int, Range(256, HIGHEST_ID)] = 1024  # 256 bytes, the merges and the special tokens
    pattern: str = "gpt2"  # how text is split before: gpt2, cl100k (GPT-4), or a regular expression
    special_tokens: tuple[str, ...] = (ENDOFTEXT,)  # they get the last ids and take no part in merges
    tie_break: Literal["lowest_id", "greatest_bytes"] = "lowest_id"  # which of two pairs of equal count is merged
    max_chunk_bytes: Count = 0  # cut longer chunks, for text without spaces; 0 for never
    workers: Annotated[int, Range(0, 1024)] = 0  # processes that count; 0 for one a core
    show: Annotated[int, Range(0, 1_000_000)] = 40  # merges to print: the first ones, then fewer and fewer
    out: str = "out/bpe"  # directory of the tokenizer
    overwrite: bool = False  # replace the tokenizer that it holds


HELD_OUT = 2**20  # characters that are kept for measuring, at most
DOWNLOADS = ".downloads"  # folder in OUT for files of the hub, until they have been read


# ---- reading

LINE_END = re.compile("\n")


def read_texts(config: Config) -> Iterator[str]:
    """All texts of all inputs; a .txt comes in blocks of whole lines. Raises UserError."""
    inputs = config.input or (str(Path(__file__).with_name("manual.txt")),)
    folder = Path(config.out) / DOWNLOADS
    for source in [find_source((pattern,), any_name=True) for pattern in inputs]:
        for n_files, path in enumerate(arriving(source, folder), 1):
            yield from read_file(path, config)
            discard(source, folder, n_files)


def read_file(path: Path, config: Config) -> Iterator[str]:
    n_lines = 0
    for unit in units_of(path, config.text_field, LINE_END):
        if not isinstance(unit.content, bytes):
            yield from (text for text, _ in documents_of(unit, config.text_field) if text)
        elif is_txt(path):
            yield decode(unit, config.errors)
        else:
            yield from read_lines(unit, n_lines, config)
            n_lines += unit.content.count(b"\n")


def decode(unit: Unit, errors: str) -> str:
    try:
        return text_bytes(unit).decode("utf-8", errors)
    except UnicodeDecodeError as e:
        where = f"{unit.path} is not UTF-8 at byte {unit.at + e.start}"
        raise UserError(f"{where}; convert it, as with iconv -t UTF-8, or use --errors replace") from None


def read_lines(unit: Unit, n_before: int, config: Config) -> Iterator[str]:
    """The texts of a .jsonl, where, unlike in a corpus of billions of lines, none may be broken."""
    for n, line in enumerate(text_bytes(unit).split(b"\n"), n_before + 1):
        if line.strip():
            text, problem = text_of(line, config.text_field, config.errors)
            if text is None:
                what = f"no {config.text_field!r}" if problem == "no text" else problem
                needed = f"every line must be an object with {config.text_field!r}"
                raise UserError(f"{unit.path}, line {n}: {what}; {needed}")
            yield text


def limit(texts: Iterator[str], max_bytes: int) -> Iterator[str]:
    """Texts up to `max_bytes` bytes in all, the last one cut; 0 for all."""
    left = max_bytes or sys.maxsize
    for text in texts:
        data = text.encode("utf-8", "replace")
        yield text if len(data) <= left else data[:left].decode("utf-8", "ignore")
        left -= len(data)
        if left <= 0:
            return


class Split:
    """Passes texts on for training, and keeps up to HELD_OUT characters in `held_out`: every tenth text, or the last
    tenth of each when there are fewer than ten."""

    def __init__(self, texts: Iterator[str], source: str = "the input"):
        self.texts, self.source, self.held_out, self.train_bytes = texts, source, [], 0

    def __iter__(self) -> Iterator[str]:
        first = list(itertools.islice(self.texts, 10))
        if not any(first):
            raise UserError(f"{self.source} holds no text; give --input something to learn from")
        for text in self.end_of_each(first) if len(first) < 10 else self.every_tenth(first):
            self.train_bytes += len(text.encode("utf-8", "replace"))
            yield text

    def end_of_each(self, texts: list[str]) -> Iterator[str]:
        for text in texts:
            cut = max(len(text) - HELD_OUT // len(texts), len(text) * 9 // 10)
            cut = text.find("\n", cut) + 1 or cut
            self.held_out.append(text[cut:])
            yield text[:cut]

    def every_tenth(self, first: list[str]) -> Iterator[str]:
        size = 0
        for n, text in enumerate(itertools.chain(first, self.texts)):
            if n % 10 == 9 and size < HELD_OUT:
                self.held_out.append(text)
                size += len(text)
            else:
                yield text


# ---- reporting


class MergePrinter:
    """Prints about `show` merges as they are found: half of them one after the other, then with growing gaps."""

    def __init__(self, n_merges: int, show: int):
        self.n, first = 0, (show + 1) // 2
        rest = show - first
        steps = (first * (max(n_merges, 1) / max(first, 1)) ** (k / max(rest, 1)) for k in range(1, rest + 1))
        self.chosen = set(range(1, first + 1)) | set(map(round, steps))

    def __call__(self, a: bytes, b: bytes, count: int) -> None:
        from tqdm import tqdm

        if self.n == 0:
            tqdm.write("  merge       count     the most frequent pair of neighbours  →  a new token")
        self.n += 1
        if self.n in self.chosen:
            tqdm.write(f"{self.n:>7,}  {count:>10,} x   {visible(a)} + {visible(b)}  →  {visible(a + b)}")


def compression(tok: Tokenizer, texts: list[str]) -> Iterator[tuple[int, float, float]]:
    """(vocabulary size, bytes a token, characters a token) of the first merges of `tok`, in doubling numbers."""
    n_bytes, n_chars = sum(len(t.encode("utf-8", "replace")) for t in texts), sum(map(len, texts))
    sizes = [256 * 2**n for n in range(20) if 256 * 2**n < 256 + len(tok.merges)]
    for size in [*sizes, 256 + len(tok.merges)]:
        part = Tokenizer(tok.merges[: size - 256], tok.pattern, special_tokens=())
        n_tokens = sum(len(part.encode_ordinary(text)) for text in texts)
        yield size, n_bytes / n_tokens, n_chars / n_tokens


def report(tok: Tokenizer, held_out: list[str]) -> None:
    if any(held_out):
        print(f"\ncompression of {sum(map(len, held_out)):,} characters that were held out")
        print(" vocabulary  bytes/token  characters/token")
        for size, bytes_per_token, chars_per_token in compression(tok, held_out):
            print(f"{size:>11,}  {bytes_per_token:>11.2f}  {chars_per_token:>16.2f}")
    tokens = sorted((a + b for a, b in tok.merges), key=lambda token: (-len(token), token))
    print("\nlongest tokens\n  " + "  ".join(map(visible, tokens[:20])))


def check(config: Config) -> None:
    """Whatever can be known to be wrong before hours of reading. Raises UserError."""
    out = Path(config.out)
    if not config.out or out.exists() and not out.is_dir():
        raise UserError(f"--out {config.out!r} is no directory; give one for the tokenizer's files")
    if (out / "config.json").exists():
        raise UserError(
            f"--out {out} holds a model, which goes with the tokenizer that is there; give another directory"
        )
    if (out / "tokenizer.json").exists() and not config.overwrite:
        raise UserError(f"--out {out} already holds a tokenizer; --overwrite replaces it, another name avoids it")
    try:
        tok = Tokenizer((), config.pattern, config.special_tokens)
        formats.to_json(tok)  # what could not be saved
    except ValueError as e:
        raise UserError(f"{e}; see --help") from None
    if config.vocab_size < len(tok):
        raise UserError(
            f"--vocab_size {config.vocab_size} is too small: the 256 bytes and the special tokens alone are {len(tok)}"
        )


def train(config: Config, texts: Split) -> Tokenizer:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tok = Tokenizer.train(
                texts,
                config.vocab_size,
                config.pattern,
                config.special_tokens,
                config.tie_break,
                workers=config.workers or None,
                max_chunk_bytes=config.max_chunk_bytes or None,
                progress=sys.stderr.isatty(),
                on_merge=MergePrinter(config.vocab_size - 256 - len(config.special_tokens), config.show),
            )
        except ValueError as e:  # a pattern that leaves out some of the text is known only now
            raise UserError(f"{e}; see --help") from None
    for warning in caught:
        print(f"note: {warning.message}")
    return tok


def main() -> None:
    config = parse_args(Config, description=__doc__)
    sys.stdout.reconfigure(errors="replace")  # a terminal that has no Chinese still shows the rest
    check(config)
    texts = Split(limit(read_texts(config), config.max_bytes), " ".join(config.input))
    began = time.perf_counter()
    tok = train(config, texts)
    print(f"\n{len(tok):,} tokens from {texts.train_bytes:,} bytes in {time.perf_counter() - began:.2f} s")
    report(tok, texts.held_out)
    tok.save(config.out)
    shutil.rmtree(Path(config.out) / DOWNLOADS, ignore_errors=True)
    print(f"\nwrote {config.out}: tokenizer.json, tokenizer.tiktoken, tokenizer_config.json")
    print(f"next: python bpe/try_tokenizer.py --tokenizer {config.out}")


if __name__ == "__main__":
    script(main)
