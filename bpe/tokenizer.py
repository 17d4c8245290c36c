"""Byte-level byte-pair encoding (Sennrich et al. 2016; the byte-level form of Radford et al. 2019).

    tok = Tokenizer.train(open("input.txt"), vocab_size=1024)
    ids = tok.encode("Hello, world")            # a special token in the text raises, unless it is allowed
    tok.decode(ids)                             # "Hello, world"
    tok.save("out/tokenizer")                   # a directory for transformers.AutoTokenizer, with a .tiktoken in it
    tok = Tokenizer.load("out/tokenizer")       # or a tokenizer.json, another model's directory, or "gpt2"
    tok.to_tiktoken(), tok.to_transformers()    # the same ids from other libraries

The algorithm on one page is minimal.py. Training is in training.py, splitting text in chunks.py, file formats in
formats.py; this file is the API. tiktoken encodes with GPT-2's vocabulary and with ours, the `tokenizers` library with
all others. All errors are ValueErrors. This file knows nothing of models, shards or command lines.
"""

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path

import numpy as np

from bpe import formats
from bpe.chunks import KNOWN, SINGLE_BYTES, any_of, full_pattern, valid_unicode
from bpe.formats import CHAR_TO_BYTE, ENDOFTEXT
from bpe.training import TIE_BREAKS, learn

SIGNS = str.maketrans(" \n\t", "␣⏎⇥")
Names = str | Collection[str]  # of special tokens


class Tokenizer:
    """A byte-level BPE tokenizer: merges, a split pattern and special tokens.

    Attributes: `merges`, pairs of byte strings in order; `ranks`, bytes -> id, as in GPT-2: the 256 bytes, then the
    merges; `special_tokens`, name -> id; `vocab`, id -> bytes of both; `pattern`, a regular expression; `eot_token`,
    the id of <|endoftext|>, or None. Its length is one more than the highest id.
    """

    def __init__(
        self,
        merges: Iterable[tuple[bytes, bytes]],
        pattern: str = "gpt2",
        special_tokens: Collection[str] | dict[str, int] = (ENDOFTEXT,),
    ):
        """Give special tokens the ids after the merges, or a dict's. Raise ValueError for a special token, or its id,
        that an ordinary token has."""
        self.merges = [(a, b) for a, b in merges]
        self.pattern = full_pattern(pattern)
        tokens = [*SINGLE_BYTES, *(a + b for a, b in self.merges)]
        self.ranks = {token: i for i, token in enumerate(tokens)}
        if not isinstance(special_tokens, dict):
            special_tokens = {s: i for i, s in enumerate(dict.fromkeys(special_tokens), len(tokens))}
        self.special_tokens = dict(sorted(special_tokens.items(), key=itemgetter(1)))
        self.vocab = dict(enumerate(tokens))
        for special, i in self.special_tokens.items():
            if i in self.vocab or special in ("", *CHAR_TO_BYTE):  # tokenizer.json writes bytes as such characters
                raise ValueError(f"the special token {special!r} or its id {i} is taken; choose another")
            self.vocab[i] = special.encode()

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        pattern: str = "gpt2",
        special_tokens: Collection[str] = (ENDOFTEXT,),
        tie_break: str = "lowest_id",
        **options,
    ) -> "Tokenizer":
        """Learn merges from an iterable of texts, which is read once and never held as a whole.

        `vocab_size` counts the 256 bytes, the merges and the special tokens, which get the last ids and are cut out of
        the texts. `pattern` is "gpt2", "cl100k" (GPT-4) or a regular expression. Of equally frequent pairs,
        `tie_break="lowest_id"` takes the one with the lowest ids, as the `tokenizers` library does, and
        `"greatest_bytes"` the lexicographically greatest pair of byte strings. Other options: `training.learn`. If
        the corpus has too few pairs, the vocabulary is smaller, with a warning. Raises ValueError for a vocabulary
        that has no room for the bytes.
        """
        if isinstance(texts, str | bytes):
            raise TypeError("texts must be an iterable of strings, such as [text], and not one string")
        if tie_break not in TIE_BREAKS:
            raise ValueError(f"tie_break is {tie_break!r}; choose {' or '.join(TIE_BREAKS)}")
        empty = cls((), pattern, special_tokens)  # validate everything before the work starts
        specials = tuple(empty.special_tokens)
        smallest = len(empty.vocab)
        if vocab_size < smallest:
            raise ValueError(f"vocab_size {vocab_size} is too small; the bytes and special tokens alone are {smallest}")
        merges = learn(texts, vocab_size - smallest, empty.pattern, specials, tie_break, **options)
        size = smallest + len(merges)
        if size < vocab_size:
            warnings.warn(
                "the corpus has no more pairs to merge: "
                f"the vocabulary stops at {size} of {vocab_size} tokens",
                stacklevel=2,
            )
        return cls(merges, empty.pattern, specials)

    # ---- encoding

    @cached_property
    def _tiktoken(self):
        """Make tiktoken's encoding; None where it would split text in another way."""
        # without a special token tiktoken would look for it everywhere
        special_tokens = self.special_tokens or {ENDOFTEXT: len(self)}
        return formats.encoding_of(self, special_tokens) if self.pattern in KNOWN else None

    @cached_property
    def _tokenizers(self):
        return formats.open_text(self.contents["tokenizer.json"])

    def encode_ordinary(self, text: str) -> list[int]:
        """Encode `text`; special tokens in it are ordinary text."""
        return self.encode_to_numpy(text).tolist()

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """Encode like `encode_ordinary`, to an array (n,) uint32. tiktoken releases Python's lock meanwhile."""
        if self._tiktoken:
            with contextlib.suppress(ValueError):  # a million blanks, or a lone surrogate
                return self._tiktoken.encode_to_numpy(text, disallowed_special=())
        self._tokenizers.encode_special_tokens = True  # as ordinary text; a copy by pickle has forgotten it
        encoding = self._tokenizers.encode_batch_fast([valid_unicode(text)], add_special_tokens=False)[0]
        return np.array(encoding.ids, np.uint32)

    def encode(self, text: str, *, allowed_special: Names = (), disallowed_special: Names = "all") -> list[int]:
        """Encode `text`. Special tokens in `allowed_special` (a collection, or "all") become their ids.

        Any other special token in the text raises ValueError, because a text from outside should not be able to end a
        document; with `disallowed_special=()` it is encoded as ordinary text. The rules are tiktoken's.
        """
        found = {special for special in self.special_tokens if special in text}
        allowed = found if allowed_special == "all" else found & set(allowed_special)
        for special in found - allowed if disallowed_special == "all" else disallowed_special:
            if special in text:
                raise ValueError(
                    f"the text holds the special token {special!r}; pass allowed_special={{{special!r}}}, "
                    "or disallowed_special=() to encode it as ordinary text"
                )
        return self._encode(text, allowed, found) if allowed else self.encode_ordinary(text)

    def _encode(self, text: str, allowed: set[str], found: set[str]) -> list[int]:
        ids = []
        for part in any_of(tuple(allowed)).split(text):  # text, special token, text, ..., text
            if part in allowed:
                ids.append(self.special_tokens[part])
            else:
                ids += self.encode_ordinary(part)
        return ids

    def encode_batch(self, texts: Iterable[str], *, num_threads: int = 8, **special: Names) -> list[list[int]]:
        """Encode every text in threads, with the options of `encode`."""
        with ThreadPoolExecutor(num_threads) as threads:
            return list(threads.map(partial(self.encode, **special), texts))

    # ---- decoding

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; invalid UTF-8 becomes U+FFFD. Raise ValueError for an id outside the vocabulary."""
        try:
            tokens = [self.vocab[int(i)] for i in ids]
        except KeyError as e:
            raise ValueError(f"id {e} is not in this vocabulary of {len(self)} tokens") from None
        return b"".join(tokens).decode("utf-8", "replace")

    def stream_decoder(self) -> "StreamDecoder":
        return StreamDecoder(self)

    # ---- properties

    def __len__(self) -> int:
        return max(self.vocab) + 1

    @property
    def eot_token(self) -> int | None:
        return self.special_tokens.get(ENDOFTEXT)

    @cached_property
    def fingerprint(self) -> str:
        """Hash pattern, merges and special tokens by sha256; equal fingerprints, equal ids."""
        merges = [(a.hex(), b.hex()) for a, b in self.merges]
        content = [self.pattern, merges, None, list(self.special_tokens.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def same_ids(self, other: "Tokenizer") -> bool:
        """Return whether both give every text, and its end, the same ids; further special tokens may differ."""
        return (self.pattern, self.merges, self.eot_token) == (other.pattern, other.merges, other.eot_token)

    def unused_ids(self, vocab_size: int) -> list[int]:
        """Return the ids below `vocab_size` without a token: gaps in a vocabulary, and a model's padding. They cannot
        be decoded, and a model must not choose them."""
        return [i for i in range(vocab_size) if i not in self.vocab]

    def token_bytes(self) -> np.ndarray:
        """Return (len(self),) int64: the bytes of text that each id encodes, 0 for special tokens."""
        lengths = np.zeros(len(self), np.int64)
        for token, i in self.ranks.items():
            lengths[i] = len(token)
        return lengths

    # ---- files and other libraries: formats.py

    settings = {}  # for transformers, of ForeignTokenizer
    save = formats.save
    contents = cached_property(formats.contents)  # kept, since every checkpoint has them
    to_tiktoken = formats.to_tiktoken
    to_transformers = formats.to_transformers

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Read a tokenizer.json, a directory of ours or of another model, or "gpt2".

        Anything except GPT-2's byte-level BPE becomes a ForeignTokenizer. Raise ValueError for a missing or damaged
        file.
        """
        if not os.path.exists(path):
            if str(path) == "gpt2":
                return cls.from_tiktoken("gpt2")
            raise ValueError(
                f"no tokenizer at {path or 'an empty name'}; "
                "pass gpt2, a tokenizer.json, or the OUT of python bpe/train.py"
            )
        try:
            theirs, settings = formats.read(Path(path))
            with contextlib.suppress(ValueError):
                return cls(*formats.parts_of(theirs))
            return ForeignTokenizer(theirs, settings)
        except Exception as e:  # `tokenizers` raises nothing more specific
            reason = " ".join(str(e).split())[:100]
            raise ValueError(f"cannot use the tokenizer {path}: {reason}; choose another, or get it again") from None

    @classmethod
    def from_tiktoken(cls, encoding) -> "Tokenizer":
        """Make ours from a tiktoken.Encoding, or its name. Raise ValueError if its files cannot be downloaded, or
        for ids in another order than GPT-2's."""
        if isinstance(encoding, str):
            encoding = formats.get_encoding(encoding)
        return cls(*formats.read_encoding(encoding))


class ForeignTokenizer(Tokenizer):
    """Any other tokenizer: the `tokenizers` library encodes and decodes.

    It has no `merges` and no `pattern`, and `vocab` holds its tokens as its file writes them. What its post-processor
    adds before and after a text is not part of `encode`.
    """

    def __init__(self, theirs, settings: dict):
        """Wrap a tokenizers.Tokenizer, with `settings` of transformers."""
        self.merges = self.pattern = self._tiktoken = None
        self._marked = theirs  # finds special tokens, unlike _tokenizers
        self.contents = {"tokenizer.json": theirs.to_str(pretty=True) + "\n"}
        self._tokenizers = formats.open_text(self.contents["tokenizer.json"])
        self.settings = settings
        self.vocab = {i: token.encode() for token, i in theirs.get_vocab().items()}
        if len(self.vocab) < len(theirs.get_vocab()):
            raise ValueError("two of its tokens have one id")
        added = theirs.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in sorted(added.items()) if token.special}

    def _encode(self, text: str, allowed: set[str], found: set[str]) -> list[int]:
        """Encode a text whose special tokens all become ids, or none."""
        if len(allowed) < len(found):
            raise ValueError(f"the text holds {', '.join(sorted(found))}: allow all of these special tokens, or none")
        if self.settings.get("split_special_tokens"):
            return self.encode_ordinary(text)
        return self._marked.encode(valid_unicode(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._marked.decode([int(i) for i in ids], skip_special_tokens=False)

    @cached_property
    def fingerprint(self) -> str:
        """Hash by sha256 all of the file that decides ids."""
        content = json.loads(self.contents["tokenizer.json"])
        decisive = [content[key] for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def same_ids(self, other: Tokenizer) -> bool:
        return self.fingerprint == other.fingerprint

    def token_bytes(self) -> np.ndarray:
        """Count as Tokenizer does; all 0 where a token's name does not determine its bytes."""
        lengths = formats.token_bytes(self._tokenizers) | dict.fromkeys(self.special_tokens.values(), 0)
        return np.array([lengths.get(i, 0) for i in range(len(self))], np.int64)


class StreamDecoder:
    """Decodes ids as they come; an unfinished character waits for the rest of it."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.shown = []  # the ids shown last: without an id before it, a token may lose its space
        self.waiting = []

    def push(self, ids: Iterable[int]) -> str:
        self.waiting += ids
        unfinished = self.tokenizer.decode(self.waiting).endswith("\ufffd")
        return "" if unfinished or not self.waiting else self.flush()

    def flush(self) -> str:
        """Return the rest at the end: "", or U+FFFD for an unfinished character."""
        text = self.tokenizer.decode(self.shown + self.waiting)
        new = text[len(self.tokenizer.decode(self.shown)) :]
        self.shown = self.waiting
        self.waiting = []
        return new


def visible(token: bytes) -> str:
    """Return a token to read: spaces and line ends as signs, bytes of incomplete characters as \\x escapes."""
    text = token.decode("utf-8", "backslashreplace").translate(SIGNS)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
