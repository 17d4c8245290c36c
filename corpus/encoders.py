"""text -> ids through the fastest library that is installed: gigatoken, tiktoken, or our own code.

All give the ids of bpe/tokenizer.py, and so the same shards. That is checked: `choose_encoder` compares ids on fixed
probes, and fineweb.py on the beginning of every unit. This file knows nothing of files or shards.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np

from bpe.formats import PROBES, to_tokenizers
from bpe.tokenizer import Tokenizer
from cli import UserError

ENCODERS = ("gigatoken", "tiktoken", "own")  # the fastest first
Encode = Callable[[str], np.ndarray]  # text -> ids (n,)


def encoder(tok: Tokenizer, name: str) -> Encode:
    """One of ENCODERS. Raises errors of several types if its library is missing or cannot hold this vocabulary."""
    fast = None
    if name == "gigatoken":
        import gigatoken

        plain = Tokenizer(tok.merges, tok.pattern, (), tok.ordinary)  # or it would encode special tokens in the text
        fast = gigatoken.Tokenizer.from_json(to_tokenizers(plain).to_str()).encode
    elif name == "tiktoken":
        fast = partial(tok.to_tiktoken().encode_to_numpy, disallowed_special=())

    def encode(text):
        with suppress(ValueError):  # tiktoken's regular expressions give up on a million blanks
            if fast:
                return fast(text)
        return np.array(tok.encode_ordinary(text), np.uint32)

    return encode


def choose_encoder(name: str, tok: Tokenizer) -> str:
    """`name`, or for auto the first usable one of ENCODERS; own if its ids differ from ours. Raises UserError."""
    for candidate in ENCODERS if name == "auto" else [name]:
        try:
            encode = encoder(tok, candidate)
        except Exception as e:  # gigatoken raises nothing more specific
            if name == "auto":
                continue
            raise UserError(f"--encoder {name}: {e}; pip install {name}, or give another one") from None
        if all(same_ids(encode, tok, text) for text in (*PROBES, *tok.special_tokens)):
            return candidate
        print(f"note: {candidate} is not used: its ids differ from ours", file=sys.stderr)
    return "own"


def same_ids(encode: Encode, tok: Tokenizer, text: str) -> bool:
    return np.array_equal(encode(text), tok.encode_ordinary(text))
