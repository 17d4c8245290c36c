"""Byte-level byte-pair encoding (Sennrich et al. 2016; the byte-level form of Radford et al. 2019), exact and fast.

    tok = Tokenizer.train(open("input.txt"), vocab_size=1024)
    ids = tok.encode("Hello, world")            # a special token in the text raises, unless it is allowed
    tok.decode(ids)                             # "Hello, world"
    tok.save("out/tokenizer")                   # a directory for transformers.AutoTokenizer, with a .tiktoken in it
    tok = Tokenizer.load("out/tokenizer")       # or a tokenizer.json, or "gpt2"
    tok.to_tiktoken(), tok.to_transformers()    # the same ids from other libraries

The algorithm on one page is minimal.py; this computes the same, only faster. Training is in training.py, splitting text
and merging bytes in chunks.py, file formats in formats.py; this file is the API. All errors are ValueErrors. It knows
nothing of models, shards or command lines.
"""

import codecs
import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path

import numpy as np

from bpe import formats
from bpe.chunks import BLOCK, KNOWN, SINGLE_BYTES, any_of, full_pattern, merge_chunk, splitter, valid_unicode
from bpe.formats import ENDOFTEXT, Specials
from bpe.training import TIE_BREAKS, Options, learn
from bpe.training import cpu_count as cpu_count  # other folders take it from here

CACHED_CHUNKS = 2**18  # distinct chunks whose ids the encoder remembers
CACHED_LENGTH = 64  # characters of the longest chunk that it remembers
SIGNS = str.maketrans(" \n\t", "␣⏎⇥")
HIGHEST_ID = 2**24  # tables are as long as the highest id: a damaged file must not fill the memory
Names = str | Collection[str]  # of special tokens


class ChunkCache(dict):
    """chunk -> its ids, computed on the first look-up. Words repeat: most chunks of a text are found here."""

    def __init__(self, encode_chunk: Callable[[str], list[int]]):
        self.encode_chunk = encode_chunk

    def __missing__(self, chunk: str) -> list[int]:
        ids = self.encode_chunk(chunk)
        if len(chunk) <= CACHED_LENGTH:
            if len(self) >= CACHED_CHUNKS:
                self.clear()
            self[chunk] = ids
        return ids


class Tokenizer:
    """A byte-level BPE tokenizer: merges, a split pattern and special tokens.

    Attributes: `merges`, pairs of byte strings in order; `vocab`, id -> bytes, special tokens included;
    `special_tokens`, name -> id; `ordinary`, bytes -> id of the others; `pattern`, a regular expression; `n_vocab`, one
    more than the highest id; `eot_token`, the id of <|endoftext|>, or None.
    """

    def __init__(
        self,
        merges: Iterable[tuple[bytes, bytes]],
        pattern: str = "gpt2",
        special_tokens: Specials = (ENDOFTEXT,),
        ids: dict[bytes, int] | None = None,
    ):
        """By default ids are laid out as GPT-2's: bytes, merges, special tokens. `ids` gives other ones to the tokens
        that are not special. Raises ValueError for impossible merges and for ids that clash.
        """
        self.merges = [(a, b) for a, b in merges]
        self.pattern = full_pattern(pattern)
        tokens = SINGLE_BYTES + [a + b for a, b in self.merges]
        rank = {token: i for i, token in enumerate(tokens)}
        if len(rank) < len(tokens):
            raise ValueError("two merges make the same token")
        try:
            self._rank_of_pair = {(rank[a], rank[b]): rank[a + b] for a, b in self.merges}
        except KeyError as e:
            raise ValueError(f"a merge uses the token {e}, which is neither a byte nor made by a merge") from None
        if ids is None:
            ids = rank
        for token in tokens:
            if token not in ids:
                raise ValueError(f"the token {token!r} is not in the vocabulary")
        self._ids = [ids[token] for token in tokens]  # rank -> id; None where they are the same
        if self._ids == list(range(len(tokens))):
            self._ids = None
        if isinstance(special_tokens, str):
            special_tokens = (special_tokens,)
        if not isinstance(special_tokens, dict):
            next_id = max(ids.values()) + 1
            special_tokens = {s: i for i, s in enumerate(dict.fromkeys(special_tokens), next_id)}
        check_ids([*ids.values(), *special_tokens.values()])
        if "" in special_tokens or b"" in ids:
            raise ValueError("a token is empty")
        self.ordinary = dict(ids)
        self.special_tokens = dict(sorted(special_tokens.items(), key=itemgetter(1)))
        self.vocab = {i: token for token, i in self.ordinary.items()}
        for special, i in self.special_tokens.items():
            self.vocab[i] = special.encode()
        self.n_vocab = max(self.vocab) + 1
        self.eot_token = self.special_tokens.get(ENDOFTEXT)
        self._splitter = splitter(self.pattern)
        self._cache = ChunkCache(self._encode_chunk)

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
        `"greatest_bytes"` the lexicographically greatest pair of byte strings. Other options: `training.Options`. If
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
        merges = learn(texts, vocab_size - smallest, empty.pattern, specials, tie_break, Options(**options))
        size = smallest + len(merges)
        if size < vocab_size:
            warnings.warn(
                "the corpus has no more pairs to merge: "
                f"the vocabulary stops at {size} tokens, short of the {vocab_size} asked for",
                stacklevel=2,
            )
        return cls(merges, empty.pattern, specials)

    # ---- encoding

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it are text like any other."""
        ids = []
        for block in self._splitter.blocks(valid_unicode(text)):
            chunks = self._splitter.split(block)
            ids += chain.from_iterable(map(self._cache.__getitem__, chunks))
        return ids

    def encode_to_numpy(self, text: str) -> np.ndarray:
        """`encode_ordinary` as an array (n,) uint32, by tiktoken where it gives the same ids: ten times as fast."""
        blocks = []  # so that no list of ids is long
        for block in self._splitter.blocks(valid_unicode(text)):
            blocks.append(self._block_to_numpy(block))
        return np.concatenate(blocks)

    def _block_to_numpy(self, block: str) -> np.ndarray:
        if self._tiktoken:
            with contextlib.suppress(ValueError):  # its regular expressions give up on a million blanks
                return self._tiktoken.encode_to_numpy(block, disallowed_special=())
        return np.array(self.encode_ordinary(block), np.uint32)

    def encode(self, text: str, *, allowed_special: Names = (), disallowed_special: Names = "all") -> list[int]:
        """Ids of `text`. Special tokens in `allowed_special` (a collection, or "all") become their ids.

        Any other special token in the text raises ValueError, since a text from outside should not be able to end a
        document; with `disallowed_special=()` it is encoded as ordinary text. The rules are tiktoken's.
        """
        allowed, disallowed = self._which_special(allowed_special, disallowed_special)
        refuse_special(text, disallowed)
        if not any(s in text for s in allowed):
            return self.encode_ordinary(text)
        ids = []
        for part in any_of(allowed).split(text):  # text, special token, text, ..., text
            if part in allowed:
                ids.append(self.special_tokens[part])
            else:
                ids += self.encode_ordinary(part)
        return ids

    def encode_batch(self, texts: Iterable[str], *, num_threads: int = 8, **special: Names) -> list[list[int]]:
        """`encode` with its options for every text, in threads of tiktoken; here if tiktoken may give other ids."""
        texts = list(texts)
        allowed, disallowed = self._which_special(**special)
        options = dict(allowed_special=set(allowed), disallowed_special=disallowed)
        if self._tiktoken:
            with contextlib.suppress(ValueError):  # its regular expressions give up on a million blanks
                return self._tiktoken.encode_batch(texts, num_threads=num_threads, **options)
        return [self.encode(text, **options) for text in texts]

    def encode_iterable(self, texts: Iterable[str], *, block: int = BLOCK, **special: Names) -> Iterator[int]:
        """The ids that `encode` with its options gives for all texts joined, such as the lines of an open file.

        Holds about `block` characters at a time if the pattern is gpt2 or cl100k; otherwise the whole text.
        """
        allowed, disallowed = self._which_special(**special)
        waiting = []
        size = 0
        for text in texts:
            waiting.append(text)
            size += len(text)
            if size >= block and self._splitter.cut:
                joined = "".join(waiting)
                refuse_special(joined, disallowed)
                cut = self._settled(joined, allowed, disallowed)
                yield from self.encode(joined[:cut], allowed_special=allowed, disallowed_special=())
                waiting = [joined[cut:]]
                size = 0
        yield from self.encode("".join(waiting), allowed_special=allowed, disallowed_special=disallowed)

    def _settled(self, text: str, allowed: Names, disallowed: Names) -> int:
        """Length of the part of `text` whose ids do not depend on what may follow, and that can be encoded alone."""
        # the last characters may be the beginning of a special token, or of a longer one: they wait for the rest
        end = len(text) - max(map(len, allowed + disallowed), default=0)
        # text starts afresh after an allowed one; a cut within it would lose it
        found = any_of(allowed).finditer(text) if allowed else ()
        start = max((m.end() for m in found if m.start() < end), default=0)
        cut = self._splitter.last_cut.search(text, start, max(start, end))
        return cut.start() if cut else start

    def _which_special(self, allowed_special: Names = (), disallowed_special: Names = "all") -> tuple[tuple, tuple]:
        """Both as names: "all" is every special token for the first, and every one not allowed for the second."""
        allowed = as_set(allowed_special)
        if allowed == {"all"}:
            allowed = self.special_tokens.keys()
        else:
            allowed &= self.special_tokens.keys()
        disallowed = as_set(disallowed_special)
        if disallowed == {"all"}:
            disallowed = self.special_tokens.keys() - allowed
        return tuple(allowed), tuple(disallowed)

    def _encode_chunk(self, chunk: str) -> list[int]:
        ranks = merge_chunk(chunk.encode(), self._rank_of_pair)
        if self._ids is None:
            return ranks
        return [self._ids[rank] for rank in ranks]

    # ---- decoding

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Raises ValueError for an id that is not in the vocabulary."""
        try:
            return b"".join(map(self.vocab.__getitem__, map(int, ids)))
        except KeyError as e:
            raise ValueError(f"id {e} is not in this vocabulary of {self.n_vocab} tokens") from None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; what is not UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream_decoder(self) -> "StreamDecoder":
        return StreamDecoder(self)

    # ---- properties

    def __len__(self) -> int:
        return self.n_vocab

    def __reduce__(self):
        """For pickle and copy: without the cache, and without objects of other libraries."""
        return Tokenizer, (self.merges, self.pattern, self.special_tokens, self.ordinary)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over pattern, merges, ids and special tokens; equal fingerprints, equal ids."""
        merges = [(a.hex(), b.hex()) for a, b in self.merges]
        content = [self.pattern, merges, self._ids, list(self.special_tokens.items())]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def same_ids(self, other: "Tokenizer") -> bool:
        """Whether both give every text, and its end, the same ids; further special tokens may differ."""
        ours, theirs = ((tok.pattern, tok.merges, tok.ordinary, tok.eot_token) for tok in (self, other))
        return ours == theirs

    def unused_ids(self, vocab_size: int) -> list[int]:
        """The ids below `vocab_size` that are no token: gaps in a vocabulary, and the padding of a model's. Nothing can
        be decoded from them, and a model must not choose them."""
        return [i for i in range(vocab_size) if i not in self.vocab]

    def token_bytes(self) -> np.ndarray:
        """(n_vocab,) int64: how many bytes of text each id encodes, 0 for special tokens."""
        lengths = np.zeros(self.n_vocab, np.int64)
        for token, i in self.ordinary.items():
            lengths[i] = len(token)
        return lengths

    # ---- files and other libraries: formats.py

    save = formats.save
    to_tiktoken = formats.to_tiktoken
    to_transformers = formats.to_transformers

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Read a tokenizer.json (ours, or any byte-level BPE of Hugging Face), the one in a directory, else GPT-2's
        vocab.json and merges.txt there, or "gpt2".

        Raises ValueError for a file that is missing or damaged, or that gives other ids in the `tokenizers` library.
        """
        file = path
        read = formats.read_json
        if os.path.isdir(path):
            file = os.path.join(path, "tokenizer.json")
            if not os.path.isfile(file) and formats.has_vocab(Path(path)):
                file = path
                read = formats.read_vocab
            elif not os.path.isfile(file):
                raise ValueError(
                    f"no tokenizer at {path}: neither tokenizer.json nor vocab.json and merges.txt; copy those of its "
                    f"model there, or write them: AutoTokenizer.from_pretrained(MODEL).save_pretrained('{path}')"
                )
        elif not os.path.isfile(file):  # False for a name that no file can have, too
            if str(path) == "gpt2":
                return cls._gpt2()
            raise ValueError(
                f"no tokenizer at {path or 'an empty name'}; "
                "give gpt2, a tokenizer.json, or the OUT of python bpe/train.py"
            )
        try:
            parts, theirs = read(Path(file))
            tok = cls(*parts)
            formats.check_ids(tok, theirs)
        except Exception as e:  # `tokenizers` raises nothing more specific
            reason = f"it has no {e}" if isinstance(e, KeyError) else e
            raise ValueError(f"cannot use the tokenizer {file}: {reason}; download or train it again") from None
        return tok

    @classmethod
    def _gpt2(cls) -> "Tokenizer":
        """GPT-2's, of tiktoken, or of transformers if it has the files and tiktoken cannot get them."""
        try:
            return cls.from_tiktoken("gpt2")
        except ValueError:
            if folder := formats.gpt2_of_transformers():
                return cls.load(folder)
            raise

    @classmethod
    def from_tiktoken(cls, encoding) -> "Tokenizer":
        """From a tiktoken.Encoding, or its name. Raises ValueError if its files cannot be downloaded."""
        if isinstance(encoding, str):
            encoding = formats.get_encoding(encoding)
        return cls(*formats.read_encoding(encoding))

    @cached_property
    def _tiktoken(self):
        if self.pattern in KNOWN:
            with contextlib.suppress(ValueError):
                return self.to_tiktoken()


class StreamDecoder:
    """Decodes ids as they come; the bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self.utf8.decode(self.tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """What is left at the end: "", or U+FFFD for a character that was never finished."""
        return self.utf8.decode(b"", final=True)


def check_ids(ids: list[int]) -> None:
    """Raises ValueError for an id that is not a whole number in range, or that occurs twice."""
    for i in ids:
        if type(i) is not int or not 0 <= i <= HIGHEST_ID:
            raise ValueError(f"an id is {i!r}, and not a whole number from 0 to {HIGHEST_ID:,}")
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id")


def as_set(names: Names) -> set[str]:
    return {names} if isinstance(names, str) else set(names)


def refuse_special(text: str, disallowed: Iterable[str]) -> None:
    for special in disallowed:
        if special in text:
            raise ValueError(
                f"the text holds the special token {special!r}; pass allowed_special={{{special!r}}}, "
                "or disallowed_special=() to encode it as ordinary text"
            )


def visible(token: bytes) -> str:
    """A token for people to read: spaces and line ends as signs, bytes of incomplete characters as \\x escapes."""
    text = token.decode("utf-8", "backslashreplace").translate(SIGNS)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
