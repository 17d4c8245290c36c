"""Train a byte-pair tokenizer and look at its tokens.

    python bpe/train.py                                               # 1024 tokens on bpe/manual.txt, a second
    python bpe/train.py --input input.txt bpe/manual.txt --vocab_size 4096 --out out/bpe4k
    python bpe/train.py --input "texts/*.parquet" --vocab_size 32768 --max_bytes 2_000_000_000 --out out/bpe32k
    python bpe/train.py --input HuggingFaceFW/fineweb-edu --subset sample-10BT --max_bytes 1_000_000_000

Prints merges as it finds them, the vocabulary's compression of held-out text, and its longest tokens.
Writes OUT: tokenizer.json, and the same in other forms, for `--tokenizer OUT` of the other scripts and for
transformers.AutoTokenizer. This file knows nothing of models, shards or torch.
"""

import contextlib
import itertools
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bpe.tokenizer import ENDOFTEXT, Tokenizer, visible
from parts.cli import Count, Positive, Tokens, UserError, parse_args, script
from parts.files import refuse_folders, write_atomically
from parts.sources import kind_of
from parts.texts import open_texts


@dataclass(frozen=True)
class Config:
    input: tuple[str, ...] = ()  # .txt, .jsonl, .parquet, folders, globs, hub datasets; if empty, bpe/manual.txt
    subset: str = ""  # subset of a dataset; empty for its default
    split: str = "train"  # split of a dataset
    text_field: str = "text"  # column or JSON key that holds the text
    max_bytes: Tokens = 0  # stop reading after this many bytes of text; 0 reads everything
    vocab_size: Positive = 1024  # 256 bytes, the merges and the special tokens
    pattern: str = "gpt2"  # splits text first: gpt2, cl100k (GPT-4), or a regular expression
    special_tokens: tuple[str, ...] = (ENDOFTEXT,)  # they get the last ids and are never merged
    tie_break: Literal["lowest_id", "greatest_bytes"] = "lowest_id"  # the pair to merge among equally frequent pairs
    workers: Count = 0  # processes that count words; 0 for one per core
    out: str = "out/bpe"  # directory for the tokenizer
    overwrite: bool = False  # rename an existing OUT to OUT.1, or the next free number


HELD_OUT = 2**20  # characters to measure compression on; the last text counts whole
BLOCK = 2**22  # characters of a .txt counted together


def main() -> None:
    config = parse_args(Config, description=__doc__)
    check(config)
    skipped = Counter()
    texts = Split(limit(read_texts(config, skipped), config.max_bytes), " ".join(config.input))
    tqdm.write("  merge       count     the most frequent pair of neighbours  →  a new token")
    try:
        tok = Tokenizer.train(
            texts,
            config.vocab_size,
            config.pattern,
            config.special_tokens,
            config.tie_break,
            workers=config.workers,
            progress=sys.stderr.isatty(),
            on_merge=partial(print_merge, itertools.count(1)),
        )
    except ValueError as e:  # too small a vocabulary, or a pattern that leaves out some of the text
        raise UserError(f"{e}; see --help") from None
    out = Path(config.out)  # written before anything is printed, because printing to `| head` may fail
    write_atomically(out, tok.save)
    print(f"\n{len(tok):,} tokens from {texts.train_bytes:,} bytes")
    if n := skipped["no text"]:
        print(f"skipped documents: {n:,} (no text)")
    report(tok, texts.held_out)
    print(f"\nwrote {out}: tokenizer.json, and the same in other forms")
    print(f"next: python bpe/try_tokenizer.py --tokenizer {shlex.quote(str(out))}")


def check(config: Config) -> None:
    """Catch an OUT that cannot be written before hours of reading. Raises UserError."""
    out = Path(config.out)
    refuse_folders(out)
    if any(out.glob("*")) and not config.overwrite:
        raise UserError(f"--out {config.out} is not empty; pass --overwrite to rename it, or choose another directory")
    if not out.is_dir():
        out.mkdir(parents=True)  # fails now, not hours later
        out.rmdir()


# ---- reading


def read_texts(config: Config, skipped: Counter | None = None) -> Iterator[str]:
    """Yield all texts of all inputs, each file once; a .txt comes in blocks of documents, which are most often small.
    Count the skipped documents in `skipped`, by reason. Raise UserError for an unusable input."""
    skipped = Counter() if skipped is None else skipped
    source = config.input or (str(Path(__file__).with_name("manual.txt")),)
    texts = open_texts(source, config.text_field, config.subset, config.split)
    for number, batches in itertools.groupby(texts.batches(), lambda batch: batch[0]["file"]):
        block = []
        for _, batch in batches:
            skipped["no text"] += batch.count(None)
            found = filter(None, batch)
            if kind_of(texts.files[number]) != "text":
                yield from found
                continue
            block += found
            if sum(map(len, block)) >= BLOCK:
                yield "".join(block)
                block = []
        if block:
            yield "".join(block)


def limit(texts: Iterator[str], max_bytes: int) -> Iterator[str]:
    """Yield texts up to `max_bytes` bytes in all, the last text cut; 0 for all."""
    left = max_bytes or sys.maxsize
    for text in texts:
        data = text.encode("utf-8", "replace")
        if len(data) >= left:
            yield data[:left].decode("utf-8", "ignore")
            return
        yield text
        left -= len(data)


class Split:
    """Iterates over the texts to train on, and keeps about HELD_OUT characters in `held_out`: every tenth text, or the
    last tenth of each if there are fewer than ten."""

    def __init__(self, texts: Iterator[str], source: str = "the input"):
        self.texts = texts
        self.source = source
        self.held_out = []
        self.train_bytes = 0

    def __iter__(self) -> Iterator[str]:
        first = list(itertools.islice(self.texts, 10))
        size = 0  # characters held out
        for n, text in enumerate(itertools.chain(first, self.texts)):
            cut = len(text)
            if len(first) < 10:
                cut = max(cut - HELD_OUT // len(first), cut * 9 // 10)
                cut = text.find("\n", cut) + 1 or cut
            elif n % 10 == 9 and size < HELD_OUT:
                cut = 0
            rest = text[cut:]
            text = text[:cut]
            if rest:
                self.held_out.append(rest)
                size += len(rest)
            if text:
                self.train_bytes += len(text.encode("utf-8", "replace"))
                yield text
        if not self.train_bytes:
            raise UserError(f"{self.source} holds no text to learn from; set --input, --text_field or --max_bytes")


# ---- reporting


def print_merge(numbers: Iterator[int], a: bytes, b: bytes, count: int) -> None:
    """Print merges 1 to 20, then 30, 40, ... 100, 200, ... 1000, 2000, ..."""
    n = next(numbers)
    if n <= 20 or n % 10 ** (len(str(n)) - 1) == 0:
        with contextlib.suppress(BrokenPipeError):  # of `| head`: the tokenizer is wanted all the same
            tqdm.write(f"{n:>7,}  {count:>10,} x   {visible(a)} + {visible(b)}  →  {visible(a + b)}")


def report(tok: Tokenizer, held_out: list[str]) -> None:
    if held_out:
        print(f"\ncompression of {sum(map(len, held_out)):,} characters that were held out")
        print(" vocabulary  bytes/token  characters/token")
        for size, bytes_per_token, chars_per_token in compression(tok, held_out):
            print(f"{size:>11,}  {bytes_per_token:>11.2f}  {chars_per_token:>16.2f}")
    tokens = sorted((a + b for a, b in tok.merges), key=len)
    print("\nlongest tokens:", *map(visible, tokens[-20:]))


def compression(tok: Tokenizer, texts: list[str]) -> Iterator[tuple[int, float, float]]:
    """Yield (vocabulary size, bytes per token, characters per token) of the first merges, doubling each time."""
    n_chars = sum(map(len, texts))
    n_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    whole = 256 + len(tok.merges)
    size = 256
    while True:
        part = Tokenizer(tok.merges[: size - 256], tok.pattern, special_tokens=())
        n_tokens = sum(len(part.encode_ordinary(text)) for text in texts)
        yield size, n_bytes / n_tokens, n_chars / n_tokens
        if size == whole:
            return
        size = min(2 * size, whole)


if __name__ == "__main__":
    script(main)
