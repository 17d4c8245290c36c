"""Check token shards, find their tokenizer, turn a text file into shards, and write shards.

- `verify` compares the files of a directory with its manifest
- tokenizers by name, and the one that belongs to given shards
- `prepare_text` turns a .txt file, or a folder of plain texts, into shards, once, for training on a text of your own

This file knows nothing of torch, models or training.
"""

import hashlib
import json
import re
import shlex
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bpe.tokenizer import Tokenizer
from parts.cli import UserError
from parts.data import (
    TokenStream,
    ds_metadata,
    find_shards,
    new_manifest,
    read_manifest,
    save_manifest,
    shards_by_split,
    summary,
)
from parts.files import errors_name, exclusive_lock, flush, sha256, write_atomically
from parts.sources import kind_of, readable
from parts.texts import note_ends, plain_texts, refuse_no_text, texts_of

TRAIN_FRACTION = 0.9  # of a text's characters; the rest is the validation split
LARGEST_TEXT = 10**9  # largest .txt in bytes; it is in memory as a whole
COUNTED = 2**20  # tokens counted at a time, at eight bytes each
ORIGIN = ("source", "commit", "tokens", "documents", "bytes", "tokenizer")


def verify(directory: Path) -> str:
    """Compare shards and tokenizer with the manifest; return its summary. Raise UserError for any difference."""
    manifest = read_manifest(directory)
    if "next" in manifest:  # where the command that writes it resumes; gone once it is done
        raise UserError(f"{directory} is not complete: {summary(manifest)}; repeat the command that started it")
    if not manifest.get("shards"):
        raise UserError(f"{directory}/manifest.json is missing or lists no shard; write the shards with fineweb.py")
    remedy = f"remove {directory} and write it again, or restore the intact file"
    if load_tokenizer(str(directory / "tokenizer.json")).fingerprint != manifest["tokenizer"]:
        raise UserError(f"{directory}/tokenizer.json is not the shards' tokenizer; {remedy}")
    written = {directory / entry["file"]: entry["sha256"] for entry in manifest["shards"]}
    found = {*directory.glob("*_train_*.npy"), *directory.glob("*_val_*.npy")}
    for path in found ^ written.keys():
        raise UserError(f"shard {path} is missing, or not in manifest.json; {remedy}")
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        for path, digest in zip(written, pool.map(sha256, written), strict=True):
            if digest != written[path]:
                raise UserError(f"shard {path} has changed: its sha256 differs; {remedy}")
    return summary(manifest)


# ------------------------------------------------------------------------------------------------- for a training run


class Shards(NamedTuple):
    """A training run's input: both splits, and their tokenizer."""

    train: TokenStream
    val: TokenStream
    tokenizer: Tokenizer
    origin: dict  # what their manifest says of it, for the log


def open_shards(data: str, tokenizer: str, vocab_size: int, cache: Path) -> Shards:
    """Open a directory or glob of shards, or a .txt file, which becomes shards below `cache` first; with the tokenizer
    `train` also any other plain text. Raise UserError.

    Under torchrun all ranks call this: one makes the shards of a text, and the others wait for its file lock, since a
    collective would time out.
    """
    place = Path(data)
    is_text = tokenizer == "train" and place.exists() and not any(shards_by_split(data).values())
    if data.endswith(".txt") or is_text:
        place = prepare_text(data, tokenizer, vocab_size, cache)
    train_paths = find_shards(str(place), "train")
    val_paths = find_shards(str(place), "val")
    folder = train_paths[0].parent
    tok = data_tokenizer(folder, tokenizer)
    padded = -(-len(tok) // 128) * 128  # a size that suits tensor cores
    if len(tok) > vocab_size:
        raise UserError(f"the tokenizer has {len(tok)} tokens, more than --vocab_size {vocab_size}; pass {padded}")
    unused = tok.unused_ids(len(tok))  # the model may be padded to more ids, which no token has
    val = TokenStream(val_paths, len(tok), unused)
    train = TokenStream(train_paths, len(tok), unused)
    manifest = read_manifest(folder)
    if "next" in manifest:
        warnings.warn(f"{place} is incomplete; training on the shards written so far", stacklevel=2)
    if vocab_size > 2 * padded:
        share = f"{1 - len(tok) / vocab_size:.0%}"
        warnings.warn(f"{share} of {vocab_size:,} embeddings have no token; pass --vocab_size {padded}", stacklevel=2)
    return Shards(train, val, tok, {key: manifest[key] for key in ORIGIN if manifest.get(key)})


# ------------------------------------------------------------------------------------------------------- tokenizers


def load_tokenizer(name: str) -> Tokenizer:
    """Load `gpt2`, or a tokenizer file or directory. Raise UserError if it is not usable."""
    try:
        return Tokenizer.load(name)
    except ValueError as e:
        raise UserError(str(e)) from e


def data_tokenizer(directory: Path, tokenizer: str) -> Tokenizer:
    """Return the tokenizer of a directory of shards: the one beside them, which one that `tokenizer` names must equal,
    or else that one, the one that datatrove's files name, or GPT-2's. Raises UserError if the shards have another."""
    own = directory / "tokenizer.json"
    name = tokenizer
    if tokenizer in ("gpt2", "train"):
        name = str(own)
        if not own.exists():
            of_files = {ds_metadata(path)[0].removeprefix("openai-community/") for path in directory.glob("*.ds")}
            name = " and ".join(of_files) or "gpt2"
    tok = load_tokenizer(name)
    source = load_tokenizer(str(own)) if own.exists() else tok
    written = read_manifest(directory).get("tokenizer") or source.fingerprint
    # one with further special tokens, such as [PAD], has the same ids for every text
    if source.fingerprint != written or not source.same_ids(tok):
        raise UserError(f"{directory} has another tokenizer than {name}; pass {own}, or write it again")
    return tok


# ------------------------------------------------------------------------------------------------- a text as shards


def prepare_text(source: str, tokenizer: str, vocab_size: int, cache: Path) -> Path:
    """Make shards of a text file or a folder of them: the first part of each to train on, the rest to validate. Raise
    UserError.

    `tokenizer` is `train`, for a BPE of `vocab_size` tokens trained on the training part, or as in `load_tokenizer`.
    The shard directory below `cache` also holds `tokenizer.json` and `manifest.json`. It is made once: later runs use
    it as long as it is intact, and if several runs need it at the same time, one of them makes it.
    """
    place = Path(source)
    texts = plain_texts(source) if place.is_dir() else [read_text(place)]
    if kind_of(source) not in ("", "text"):
        message = f"{source} is read as plain text, keys and quotes included; for its rows use fineweb.py --source"
        warnings.warn(message, stacklevel=2)
    firsts = [text[: int(len(text) * TRAIN_FRACTION)] for text in texts]  # by characters: the same for every tokenizer
    rests = [text[len(first) :] for text, first in zip(texts, firsts, strict=True)]
    parts = {"val": list(chain(*map(texts_of, rests))), "train": list(chain(*map(texts_of, firsts)))}
    note_ends(source, parts["train"])
    tok = None if tokenizer == "train" else load_tokenizer(tokenizer)
    if tok and tok.eot_token is None:
        raise UserError(f"--tokenizer {tokenizer} has no <|endoftext|> to start documents; train one with it")
    wanted = tok.fingerprint if tok else f"train:{vocab_size}"
    # everything that decides the shards, so that a change to any of it makes others
    key = hashlib.sha256(f"{TRAIN_FRACTION} {wanted} {json.dumps(parts)}".encode()).hexdigest()[:16]
    directory = cache / f"{place.resolve().stem[:60]}-{key}"  # a name has 255 bytes at most, a character up to 4
    cache.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(cache / f".{directory.name}.lock", f"cached tokens {directory}", seconds=3600):  # others wait
        with suppress(UserError, OSError):  # OSError: a file, or a directory that may not be read, in its place
            verify(directory)
            return directory
        try:
            tok = tok or Tokenizer.train(firsts, vocab_size)
        except ValueError as e:
            raise UserError(f"--tokenizer train --vocab_size {vocab_size}: {e}") from e
        write_atomically(directory, partial(write_text_shards, parts=parts, tok=tok, source=place.name))
    return directory


def read_text(path: Path) -> str:
    if path.is_file() and path.stat().st_size > LARGEST_TEXT:
        raise UserError(
            f"{path} has more than {LARGEST_TEXT / 1e9:g} GB, too much to tokenize at once; write shards: "
            f"python fineweb.py --source {shlex.quote(str(path))} --out_dir FOLDER, then --data FOLDER"
        )
    with readable(str(path)):
        text = path.read_text(encoding="utf-8-sig")
        refuse_no_text(text)
    if not text.strip():
        raise UserError(f"{path} is empty; pass a text of more than a few hundred words")
    return text


def write_text_shards(directory: Path, parts: dict[str, list[str]], tok: Tokenizer, source: str) -> None:
    """Write a shard for each of `parts`, {split: documents}, tokenizer.json and manifest.json."""
    manifest = new_manifest(source=source, tokenizer=tok.fingerprint) | dict(next={})
    writer = Writer(directory, manifest, tok, 0, 0, "text")
    for texts in parts.values():
        writer.complete(tokens_of(texts, tok)[0])
    writer.end()
    tok.save(directory / "tokenizer.json")


# -------------------------------------------------------------------------------------------- the writer of shards


def shard_dtype(n_vocab: int) -> type:
    return np.uint16 if n_vocab <= 2**16 else np.uint32


def tokens_of(texts: list[str | None], tok: Tokenizer) -> tuple[np.ndarray, int]:
    """Return tokens = [eot, *encode(text)] for one document after the other, as one array (n,); and the number of
    documents without text."""
    tokens = []  # of arrays: in a list, an id would take eight bytes
    for text in texts:
        if text is not None:
            tokens += [[tok.eot_token], tok.encode_to_numpy(text)]
    return np.concatenate([[], *tokens], dtype=shard_dtype(len(tok)), casting="unsafe"), texts.count(None)


class Writer:
    """The only writer. It fills one shard in memory, and lists it in the manifest once it is complete and on the disk,
    with the place in the source where the next one begins. After an interruption, writing resumes from that place."""

    def __init__(self, out_dir: Path, manifest: dict, tok: Tokenizer, shard_size: int, limit: int, name: str):
        self.name = name  # of each shard, before _val_ or _train_
        self.out_dir = out_dir
        self.manifest = manifest
        self.limit = limit  # of all tokens
        self.eot = tok.eot_token
        self.token_bytes = tok.token_bytes()
        self.shard = np.empty(min(shard_size, limit), shard_dtype(len(tok)))
        self.filled = 0  # tokens in it
        self.skipped = manifest["skipped"].get("no text", 0)  # documents
        self.to_skip = manifest["next"].get("skip", 0)  # tokens of the first unit that are in the previous shard
        save_manifest(out_dir, manifest)

    @property
    def n_tokens(self) -> int:
        return self.manifest["tokens"] + self.filled

    def write(self, place: dict, tokens: np.ndarray, skipped: int) -> None:
        """Append the tokens of the unit at `place`, up to the limit, and complete the shards that they fill."""
        done = self.to_skip
        self.to_skip = 0
        tokens = tokens[: done + self.limit - self.n_tokens]
        while done < len(tokens):
            part = tokens[done : done + len(self.shard) - self.filled]
            self.shard[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            done += len(part)
            if self.filled == len(self.shard):
                self.complete(self.shard)
                self.manifest["next"] = place | dict(skip=done)  # where the next shard begins
                self._save()
        self.skipped += skipped

    def complete(self, tokens: np.ndarray) -> None:
        """Make a shard durable, then list it."""
        shards = self.manifest["shards"]
        split = "train" if shards else "val"
        path = self.out_dir / f"{self.name}_{split}_{len(shards):06d}.npy"
        part = path.with_name(f".{path.name}.tmp")
        with errors_name(path), open(part, "wb") as f:
            np.save(f, tokens)
        flush(part)
        shards.append(dict(file=path.name, tokens=len(tokens), sha256=sha256(part)))
        part.rename(path)
        flush(self.out_dir)
        self.manifest["tokens"] += len(tokens)
        for start in range(0, len(tokens), COUNTED):
            counts = np.bincount(tokens[start : start + COUNTED], minlength=len(self.token_bytes))
            self.manifest["documents"] += int(counts[self.eot])
            self.manifest["bytes"] += int(counts @ self.token_bytes)
        self.filled = 0

    def _save(self) -> None:
        if self.skipped:
            self.manifest["skipped"] = {"no text": self.skipped}
        save_manifest(self.out_dir, self.manifest)

    def end(self) -> None:
        """Complete the last shard and the manifest. Raise UserError if both are empty."""
        if self.filled:
            self.complete(self.shard[: self.filled])
        if not self.manifest["shards"]:
            raise UserError(
                f"no document in {self.manifest['source']}, {self.skipped} rows without text; pass --text_field or "
                "another --source"
            )
        del self.manifest["next"]
        self._save()


def shard_name(out_dir: Path) -> str:
    """Return the part of a shard's name before _val_ or _train_, never mistaken for either."""
    name = out_dir.resolve().name.removesuffix("_shards")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "text"
    return name.replace("edu-fineweb10B", "edufineweb")
