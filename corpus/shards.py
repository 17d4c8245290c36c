"""The writing side of shards: what stands beside them, whether they are sound, and a text file as shards.

- manifest: `manifest.json` beside the shards says where they come from and what is in them; `verify` checks all of it
- tokenizers by name, and the one that belongs to shards
- `prepare_text` turns a .txt file into shards, once, for training on a text of one's own

corpus/order.py reads what is written here. This file knows nothing of torch, models or training. fineweb.py writes
shards of whole corpora and imports it.
"""

import glob
import hashlib
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bpe.tokenizer import Tokenizer
from cli import UserError, only_one, replace_file, sha256, write_atomically
from corpus.order import ds_metadata, open_shard, read_manifest
from corpus.sources import documents

TRAIN_FRACTION = 0.9  # of a text's characters; the rest is the validation split
CACHE_SECONDS = 3600  # how long to wait for another run that tokenizes the same text


# -------------------------------------------------------------------------------------------------------- the format


def shard_dtype(n_vocab: int) -> type:
    return np.uint16 if n_vocab <= 2**16 else np.uint32


def npy_header(n: int, dtype: np.dtype) -> bytes:
    """What np.save writes before the data of an array (n,); as long for every n, so that n can be put in at the end."""
    header = io.BytesIO()
    fields = dict(descr=np.lib.format.dtype_to_descr(dtype), fortran_order=False, shape=(n,))
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()


# ------------------------------------------------------------------------------------------------------ the manifest


def save_manifest(directory: Path, manifest: dict) -> None:
    """Replace the manifest, which is on the disk when this returns; an interruption leaves the old one.

    Only one process may write to a directory at a time.
    """
    for leftover in Path(directory).glob(".manifest.json.*.tmp"):  # of one that was killed
        leftover.unlink()
    replace_file(Path(directory) / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def summary(manifest: dict) -> str:
    skipped = ", ".join(f"{n:,} ({reason})" for reason, n in manifest["skipped"].items())
    return (
        f"{manifest['tokens']:,} tokens in {len(manifest['shards'])} shards, {manifest['documents']:,} documents, "
        f"{manifest['bytes'] / max(manifest['tokens'], 1):.2f} bytes per token, skipped documents: {skipped or 'none'}"
    )


def origin(data: Path) -> tuple[dict, str]:
    """What the manifest says of where shards come from, without the list of them, and their data set's name on the hub,
    "" for none: for the model card of a run that reads them."""
    file = (data if data.is_dir() else data.parent) / "manifest.json"
    manifest = read_manifest(file.parent)
    known = ("source", "commit", "tokens", "documents", "bytes", "tokenizer")
    about = {key: manifest[key] for key in known if isinstance(manifest.get(key), int | str) and manifest[key]}
    on_hub = "source" in about and "commit" in about
    about |= {"manifest.json": sha256(file)} if manifest else {}
    return about, "/".join(about["source"].split("/")[:2]) if on_hub else ""


def verify(directory: Path, quiet: bool = False) -> str:
    """Check files, counts, checksums, ids and tokenizer against the manifest; returns its summary. Raises UserError."""
    manifest = read_manifest(directory)
    if not manifest:
        raise UserError(f"there is no {directory}/manifest.json, so that there is nothing to compare with")
    if lacking := {"tokenizer", "shards", "tokens", "documents", "bytes", "skipped"} - set(manifest):
        raise UserError(f"{directory}/manifest.json has no {min(lacking)}; it is damaged: write the shards again")
    if "next" in manifest:  # where the command that writes it resumes; gone once it is done
        raise UserError(f"{directory} is not complete: {summary(manifest)}; the command that began it goes on")
    tok = load_tokenizer(str(directory / "tokenizer.json"))
    problems = [] if tok.fingerprint == manifest["tokenizer"] else [f"{directory}/tokenizer.json is another tokenizer"]
    listed = {entry["file"] for entry in manifest["shards"]}
    strays = [p for split in ("train", "val") for p in directory.glob(f"*_{split}_*.npy") if p.name not in listed]
    problems += [f"{path} is not in manifest.json" for path in sorted(strays)]
    totals = Counter()
    for problem, counts in check_shards(directory, manifest["shards"], tok, quiet):
        problems += [problem] if problem else []
        totals += counts
    wrong = [key for key in ("tokens", "documents", "bytes") if totals[key] != manifest[key]]
    if wrong and not problems:
        problems.append(f"manifest.json counts {manifest[wrong[0]]} {wrong[0]}, and there are {totals[wrong[0]]}")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"{problems[0]}{more}; remove {directory} and write it again, or copy the sound file there")
    return summary(manifest)


def check_shards(directory: Path, entries: list[dict], tok: Tokenizer, quiet: bool) -> Iterator[tuple[str, Counter]]:
    """`check_shard` of all entries at once: checksums and counts leave Python's lock to other threads."""
    with ThreadPoolExecutor() as pool:
        checks = pool.map(lambda entry: check_shard(directory / entry["file"], entry, tok), entries)
        yield from tqdm(checks, total=len(entries), unit="shard", disable=quiet or None)


def check_shard(path: Path, entry: dict, tok: Tokenizer) -> tuple[str, Counter]:
    """(what is wrong with a shard or "", its counts)"""
    try:
        tokens = open_shard(path)
    except UserError as e:
        return str(e), Counter()
    if len(tokens) != entry["tokens"]:
        return f"shard {path} has {len(tokens)} tokens, and manifest.json says {entry['tokens']}", Counter()
    if sha256(path) != entry.get("sha256"):
        return f"shard {path} is not what was written: its sha256 differs from manifest.json", Counter()
    often = np.zeros(0, np.int64)  # how often each id occurs
    for i in range(0, len(tokens), 2**22):  # bincount makes int64 of its input: 32 MB at a time
        here = np.bincount(tokens[i : i + 2**22], minlength=len(often))  # longer where an id is new
        here[: len(often)] += often
        often = here
    if len(often) > len(tok):
        return f"shard {path} has token {len(often) - 1}, and its tokenizer only {len(tok)}", Counter()
    n_bytes = int(often @ tok.token_bytes()[: len(often)])  # special tokens stand for none
    eot = len(often) if tok.eot_token is None else tok.eot_token
    return "", Counter(tokens=len(tokens), documents=int(often[eot : eot + 1].sum()), bytes=n_bytes)


# ------------------------------------------------------------------------------------------------------- tokenizers


def load_tokenizer(name: str) -> Tokenizer:
    """`gpt2`, or a tokenizer file or directory. Raises UserError."""
    if name != "gpt2" and not os.path.exists(name):
        raise UserError(f"--tokenizer {name}: there is no such file; give gpt2, train, or a tokenizer.json")
    try:
        return Tokenizer.from_tiktoken("gpt2") if name == "gpt2" else Tokenizer.load(name)
    except ValueError as e:
        raise UserError(str(e)) from e


def data_tokenizer(data: Path, tokenizer: str) -> Tokenizer:
    """The tokenizer of a directory or glob of shards: the one beside them, else `tokenizer`. Raises UserError if the
    shards were written with another one than asked for."""
    directory = data if data.is_dir() else data.parent
    own = directory / "tokenizer.json"
    if tokenizer in ("gpt2", "train"):
        tokenizer = str(own) if own.exists() else ds_tokenizer(directory)
    tok = load_tokenizer(tokenizer)
    written = read_manifest(directory).get("tokenizer")
    if written and written != tok.fingerprint:
        raise UserError(f"{data} was written with another tokenizer than {tokenizer}; use {own} or write it again")
    return tok


def ds_tokenizer(directory: Path) -> str:
    """The tokenizer that datatrove used for the .ds files in a directory; `gpt2` where there are none.

    Raises UserError for one that is not here: to read its tokens as GPT-2's would be wrong, and nothing would show it.
    """
    try:
        names = {ds_metadata(path)[0] for path in sorted(directory.glob("*.ds"))}
    except (ValueError, OSError) as e:
        raise UserError(f"the .ds files of {directory} cannot be used: {e}") from e
    name = names.pop() if names else "gpt2"
    if names:
        raise UserError(f"the .ds files of {directory} have different tokenizers, {name} and {names.pop()}; sort them")
    if name in ("gpt2", "openai-community/gpt2"):
        return "gpt2"
    if not os.path.exists(name):
        raise UserError(f"{directory} was tokenized with {name}; put its tokenizer.json there, or name it: --tokenizer")
    return name


# ------------------------------------------------------------------------------------------------- a text as shards


def prepare_text(text_file: str, tokenizer: str, vocab_size: int, cache: Path) -> Path:
    """Shards of a text file, the first part of it to train on and the rest to validate. Raises UserError.

    `tokenizer` is `train`, for a BPE of `vocab_size` tokens trained on the training part, or as in `load_tokenizer`.
    Returns the shard directory below `cache`, which also holds `tokenizer.json` and `manifest.json`. It is made once:
    who finds it sound uses it, and of several runs that need it at the same time one makes it and the others wait.
    """
    text = read_text(text_file)
    tok = None if tokenizer == "train" else load_tokenizer(tokenizer)
    if tok and tok.eot_token is None:
        raise UserError(f"--tokenizer {tokenizer} has no <|endoftext|> to start documents with; train one that has")
    wanted = tok.fingerprint if tok else f"train:{vocab_size}"
    # everything that the shards follow from, so that a change of any of it makes others
    key = hashlib.sha256(f"{TRAIN_FRACTION} {wanted} {text}".encode()).hexdigest()[:16]
    directory = cache / f"{Path(text_file).stem[:60]}-{key}"  # a name has 255 bytes at most, a character up to 4
    if is_sound(directory):  # before the lock: a sound cache may be read-only, and all ranks come here at once
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    with only_one(cache / f".{directory.name}.lock", f"cached tokens {directory}", CACHE_SECONDS):
        if not is_sound(directory):  # another run may have made it by now
            for leftover in cache.glob(f".{glob.escape(directory.name)}.*.tmp"):  # of a run that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            split = int(len(text) * TRAIN_FRACTION)  # by characters, so that it is the same for every tokenizer
            tok = tok or train_tokenizer(text[:split], vocab_size)
            parts = {"val": text[split:], "train": text[:split]}
            write_atomically(directory, lambda path: write_text_shards(path, parts, tok, Path(text_file).name))
    return directory


def is_sound(directory: Path) -> bool:
    try:
        return bool(verify(directory, quiet=True))
    except UserError:
        return False


def read_text(text_file: str) -> str:
    try:
        text = Path(text_file).read_bytes().decode("utf-8-sig")  # without the byte order mark that Windows puts first
    except FileNotFoundError:
        raise UserError(f"there is no {text_file}; --data takes a .txt file or a directory of shards") from None
    except OSError as e:
        raise UserError(f"{text_file} cannot be read: {e.strerror}; --data takes a .txt file") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{text_file} is not UTF-8 text ({e}); convert it, for instance with iconv") from None
    if not text.strip():
        raise UserError(f"{text_file} is empty; give a text with more than a few hundred words")
    return text


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    try:
        return Tokenizer.train([text], vocab_size)
    except ValueError as e:
        raise UserError(f"--tokenizer train --vocab_size {vocab_size}: {e}") from e


def write_text_shards(directory: Path, parts: dict[str, str], tok: Tokenizer, source: str) -> None:
    """One shard for each split, tokenizer.json and manifest.json. Every document begins with <|endoftext|>."""
    manifest = dict(source=source, tokenizer=tok.fingerprint, tokens=0, documents=0, bytes=0, skipped={}, shards=[])
    for number, (split, part) in enumerate(parts.items()):
        pieces = documents(part)
        ids = [i for piece in pieces for i in (tok.eot_token, *tok.encode_ordinary(piece))]
        file = directory / f"text_{split}_{number:06d}.npy"
        np.save(file, np.array(ids, dtype=shard_dtype(len(tok))))
        manifest["shards"].append(dict(file=file.name, tokens=len(ids), sha256=sha256(file)))
        manifest["tokens"] += len(ids)
        manifest["documents"] += len(pieces)
        manifest["bytes"] += len(part.encode())
    tok.save(directory / "tokenizer.json")
    save_manifest(directory, manifest)
