"""Tokenizers: training against `tokenizers` and `rustbpe` (Rust), encoding against tiktoken and transformers.

All train on the same texts to the same number of tokens, split by GPT-2's pattern; the benchmark checks and prints
whether ours finds the same merges; `rustbpe` takes part where it is installed. Ours and `tokenizers` train on all
cores; one more row is ours in one process. All encode those texts with the trained vocabulary, one text after the
other, on one core unless the row says threads. Peak memory is that of all processes of a training that streams the
texts.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.measure import ROOT, Common, peak_memory, rates
from bpe import train
from bpe.chunks import PATTERNS
from bpe.tokenizer import Tokenizer


@dataclass(frozen=True)
class Config(Common):
    data: str = str(ROOT / "input.txt")  # texts: a file, a folder or a glob


def run(config: Config, rt) -> Iterator[dict]:
    texts = list(train.read_texts(train.Config(input=(config.data,))))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    vocab_size = 32_768 if megabytes > 10 else 1024
    print(f"{len(texts):,} texts, {megabytes:.1f} MB, vocabulary of {vocab_size:,}", flush=True)
    contestants = trainers(texts, vocab_size)
    yield from rates(contestants, config.repeats, rt, megabytes, "MB/s")
    tok = Tokenizer.train(texts, vocab_size)
    same = same_merges(tok, contestants["training: tokenizers"]())
    print(f"the same merges as tokenizers: {'yes' if same else 'NO'}", flush=True)
    contestants = encoders(tok, texts)
    yield from rates(contestants, config.repeats, rt, megabytes, "MB/s")
    for name, code in MEMORY.items():
        peak = training_memory(code, config.data, vocab_size)
        yield dict(name=f"peak memory: {name}", rate=peak, unit="MB")


def trainers(texts: list[str], vocab_size: int) -> dict[str, Callable]:
    """{name: function that trains}; `vocab_size` counts <|endoftext|>, which only ours has from the start."""
    found = {
        "training: tokenizers": lambda: train_theirs(texts, vocab_size - 1),
        "training: this project, one process": lambda: Tokenizer.train(texts, vocab_size, workers=1),
        "training: this project": lambda: Tokenizer.train(texts, vocab_size),
    }
    with suppress(ImportError):  # where somebody has installed it
        import rustbpe

        options = dict(vocab_size=vocab_size - 1, pattern=PATTERNS["gpt2"][0])
        found["training: rustbpe"] = lambda: rustbpe.Tokenizer().train_from_iterator(iter(texts), **options)
    return found


def train_theirs(texts: list[str], vocab_size: int):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tok.train_from_iterator(texts, trainer)
    return tok


def same_merges(tok: Tokenizer, theirs) -> bool:
    """Both write bytes as the same characters, so the merges in their files can be compared directly."""
    return merges_of(tok.to_transformers().backend_tokenizer) == merges_of(theirs)


def merges_of(tokenizer) -> list:
    return json.loads(tokenizer.to_str())["model"]["merges"]


def encoders(tok: Tokenizer, texts: list[str]) -> dict[str, Callable]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tiktoken = tok.to_tiktoken()
    transformers = tok.to_transformers()
    return {
        "encoding: tiktoken": lambda: [tiktoken.encode_ordinary(text) for text in texts],
        "encoding: transformers, fast": lambda: [transformers(text)["input_ids"] for text in texts],
        "encoding: this project": lambda: [tok.encode_ordinary(text) for text in texts],
        "encoding: this project, arrays": lambda: [tok.encode_to_numpy(text) for text in texts],
        "encoding: this project, encode_batch in threads": lambda: tok.encode_batch(texts, disallowed_special=()),
    }


MEMORY = {  # `texts` and `vocab_size` are there already
    "tokenizers": "from benchmarks.bpe import train_theirs\ntrain_theirs(texts, vocab_size)\n",
    "this project": "from bpe.tokenizer import Tokenizer\nTokenizer.train(texts, vocab_size)\n",
}


def training_memory(code: str, data: str, vocab_size: int) -> float:
    """MB of a training in a new process, with the processes that it starts; 0 on systems other than Linux."""
    before = (
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom bpe import train\n"
        f"texts, vocab_size = train.read_texts(train.Config(input=({data!r},))), {vocab_size}\n"
    )
    return peak_memory([sys.executable, "-c", before + code]) / 1e6
