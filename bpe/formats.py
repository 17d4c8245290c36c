"""The files of a tokenizer, and the same ids in other libraries.

| | what it holds | read, written by |
|---|---|---|
| tokenizer.json | everything (Hugging Face) | `read`, `to_tokenizers` |
| vocab.json, merges.txt | ids and merges, as OpenAI published GPT-2's, for older readers | `read`, `contents` |
| .tiktoken | the tokens in order, without pattern and special tokens | tiktoken alone, `to_ranks` |

A tokenizer.json can ask for much that is not byte-level BPE. `parts_of` takes it apart if it is byte-level BPE and
nothing else. With any other, the `tokenizers` library has to encode, which defines the format, and `bytes_of_tokens`
says which bytes its ids stand for. All errors are ValueErrors. This file knows nothing of training.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Collection
from functools import lru_cache
from itertools import pairwise, permutations
from operator import itemgetter
from pathlib import Path

import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bpe.chunks import BYTE_ORDER, BYTE_TO_RANK, KNOWN, PATTERNS, PRINTABLE, SINGLE_BYTES, by_pattern, full_pattern

ENDOFTEXT = "<|endoftext|>"
TOKENIZER_FILES = ["tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json"]
Merges = list[tuple[bytes, bytes]]
Specials = Collection[str] | dict[str, int]
Parts = tuple[Merges, str, Specials, dict[bytes, int]]  # merges, pattern, special tokens, ids of the others

# GPT-2's characters for bytes: the printable ones of Latin-1 as themselves, the others as U+0100, U+0101, ...
CODE_POINTS = [*PRINTABLE, *range(256, 512 - len(PRINTABLE))]
BYTE_TO_CHAR = dict(zip(BYTE_ORDER, map(chr, CODE_POINTS), strict=True))
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}

# What tiktoken downloads for GPT-2, and its sha256 (tiktoken_ext/openai_public.py).
GPT2_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {
    GPT2_ADDRESS + "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    GPT2_ADDRESS + "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


# ---- writing


def save(tok, path: str | os.PathLike, model_max_length: int | None = None) -> None:
    """Write `path`, a Hugging Face tokenizer.json that holds everything, and a .tiktoken file beside it.

    A directory is what transformers.AutoTokenizer.from_pretrained reads: it gets all that `contents` has, and
    tokenizer_config.json with `model_max_length`, the context of a model.
    """
    path = Path(path)
    if path.suffix == ".json" and not path.is_dir():
        named = {Path(name).suffix: content for name, content in tok.contents.items() if name.startswith("tokenizer.")}
        files = {path.with_suffix(suffix): content for suffix, content in named.items()}
        earlier = [path.with_suffix(".tiktoken")]
    else:
        config = dict(tokenizer_class="PreTrainedTokenizerFast") | transformers_options(tok)
        if model_max_length:
            config["model_max_length"] = model_max_length
        files = {path / name: content for name, content in tok.contents.items()}
        files[path / "tokenizer_config.json"] = json.dumps(config, indent=2) + "\n"
        earlier = [path / name for name in (*TOKENIZER_FILES, "tokenizer.tiktoken")]
    for file in earlier:
        file.unlink(missing_ok=True)
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8", newline="\n")


def contents(tok) -> dict[str, str]:
    """{name: content}. There is no .tiktoken if tiktoken has no form for these ids, and vocab.json and
    merges.txt, which do not say how text is split, are only there if GPT-2's pattern splits it."""
    theirs = to_tokenizers(tok)
    files = {"tokenizer.json": theirs.to_str(pretty=True) + "\n"}
    with contextlib.suppress(ValueError):
        lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in to_ranks(tok).items()]
        files["tokenizer.tiktoken"] = "".join(lines)
    if tok.pattern == PATTERNS["gpt2"][0]:
        by_id = dict(sorted(theirs.get_vocab().items(), key=itemgetter(1)))  # or equal vocabularies make other files
        files["vocab.json"] = json.dumps(by_id, ensure_ascii=False) + "\n"
        merges = [f"{show(a)} {show(b)}\n" for a, b in tok.merges]
        files["merges.txt"] = "".join(["#version: 0.2\n", *merges])
    return files


def to_tokenizers(tok) -> Tokenizer:
    """A tokenizers.Tokenizer with the same ids."""
    vocab = {show(token): i for token, i in tok.ordinary.items()}
    merges = [(show(a), show(b)) for a, b in tok.merges]
    theirs = Tokenizer(models.BPE(vocab | tok.special_tokens, merges))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if tok.pattern != PATTERNS["gpt2"][0]:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        theirs.pre_tokenizer = pre_tokenizers.Sequence([by_pattern(tok.pattern), byte_level])
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([*tok.special_tokens])
    return theirs


def show(token: bytes) -> str:
    """Bytes in GPT-2's printable characters."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, token))


# ---- reading


def read(path: Path) -> str:
    """The tokenizer.json of a file, or of a folder; where it has none, as transformers reads the folder: it knows the
    models that have vocab.json and merges.txt."""
    if (path / "tokenizer.json").is_file():
        path = path / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not (path / "vocab.json").is_file():
        raise ValueError("it has neither tokenizer.json nor vocab.json and merges.txt")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(path).backend_tokenizer
    merges = json.loads(theirs.to_str())["model"]["merges"]
    if theirs.get_vocab_size() > 256 + len(merges) + len(theirs.get_added_tokens_decoder()):
        raise ValueError(f"its merges.txt has {len(merges)} merges, fewer than vocab.json has tokens: it is cut short")
    return theirs.to_str()


def open_tokenizers(text: str) -> Tokenizer:
    """The tokenizers.Tokenizer of a tokenizer.json. Raises ValueError if its ids are not the same every time, or if its
    tokens hold more than text."""
    model = json.loads(text)["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):  # a prefix that is too long would end `tokenizers` in a panic of Rust
            raise ValueError(f"it uses {key}, which byte-level BPE does not have")
    theirs = Tokenizer.from_str(text)
    check_ids([*theirs.get_vocab().values()])
    theirs.no_truncation()  # these belong to a call and not to a vocabulary: transformers sets them each time
    theirs.no_padding()
    return theirs


def check_ids(ids: list[int]) -> None:
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id")


# Settings that change no id: nothing is unknown if all bytes are tokens, and offsets are no ids.
WITHOUT_EFFECT = {"type", "vocab", "merges", "unk_token", "fuse_unk"}


def parts_of(theirs: Tokenizer) -> Parts:
    """Raises ValueError for everything but byte-level BPE with nothing around it."""
    content = json.loads(theirs.to_str())
    model = content["model"]
    added = content["added_tokens"]
    first = content["pre_tokenizer"] or {}
    *split, last = first.get("pretokenizers", [first])
    pattern = split[0].get("pattern", {}).get("Regex") if split else "gpt2"
    expected = [dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)] if split else []
    expected.append(dict(type="ByteLevel", add_prefix_space=False, use_regex=not split))
    last.pop("trim_offsets", None)
    around = [
        content["normalizer"],
        *(value for key, value in model.items() if key not in WITHOUT_EFFECT),
        *(token[flag] for token in added for flag in ("single_word", "lstrip", "rstrip")),
        *(not token["special"] for token in added),
        len({token["normalized"] for token in added}) > 1,
    ]
    if model["type"] != "BPE" or [*split, last] != expected or any(around):
        raise ValueError("it is not byte-level BPE and nothing else")
    special = {token["content"]: token["id"] for token in added}
    merges = [(unshow(a), unshow(b)) for a, b in model["merges"]]
    ids = {unshow(token): i for token, i in model["vocab"].items() if token not in special}
    return merges, full_pattern(pattern), special, ids


def unshow(token: str) -> bytes:
    try:
        return bytes(map(CHAR_TO_BYTE.__getitem__, token))
    except KeyError:
        raise ValueError(f"the token {token!r} is not written in GPT-2's characters for bytes") from None


def bytes_of_tokens(theirs: Tokenizer) -> dict[int, bytes]:
    """id -> bytes, of a BPE that writes bytes in GPT-2's characters, or those that it has no token for as <0x0A>.
    Raises ValueError for any other."""
    content = json.loads(theirs.to_str())
    model = content["model"]
    byte_level = '"ByteLevel"' in json.dumps([content["pre_tokenizer"], content["decoder"]])
    if model["type"] != "BPE" or not (byte_level or model["byte_fallback"] and theirs.decoder):
        raise ValueError(f"its {model['type']} is not on bytes: which bytes of a text a token stands for is not known")
    added = theirs.get_added_tokens_decoder()
    vocab = {}
    for token, i in theirs.get_vocab().items():
        one_byte = model["byte_fallback"] and re.fullmatch("<0x([0-9A-F]{2})>", token)
        if i in added:
            vocab[i] = added[i].content.encode()
        elif one_byte:
            vocab[i] = bytes.fromhex(one_byte[1])
        elif not byte_level:
            vocab[i] = theirs.decoder.decode(["a", token])[1:].encode()  # the first token may lose its space
        else:
            vocab[i] = unshow(token)
    missing = set(SINGLE_BYTES) - set(vocab.values())
    if missing:
        raise ValueError(f"it has no token for the byte {min(missing)!r}, so that it would lose some texts")
    return vocab


# ---- tiktoken

LONGEST = 512  # bytes of a token; GPT-2's longest has 128


@lru_cache(maxsize=2)
def merges_of(tokens: tuple[bytes, ...]) -> Merges:
    """The merges by which tiktoken makes `tokens`, in their order: the halves of each are what earlier ones leave."""
    made = list(SINGLE_BYTES)
    merges = []
    rank_of = {}
    never = len(tokens) + 256
    for token in tokens:
        parts = list(token.translate(BYTE_TO_RANK))
        while len(parts) > 2:
            ranks = [rank_of.get(pair, never) for pair in pairwise(parts)]
            new = min(ranks)
            if new == never:
                break
            i = ranks.index(new)
            parts[i : i + 2] = [new]
        if len(parts) != 2 or tuple(parts) in rank_of:
            raise ValueError(f"the token {token!r} is not made of two earlier tokens")
        rank_of[tuple(parts)] = len(made)
        a, b = parts
        merges.append((made[a], made[b]))
        made.append(token)
    return merges


def read_encoding(encoding: tiktoken.Encoding) -> Parts:
    """From a tiktoken.Encoding, in which the order of the tokens implies the merges. Warns of an unknown pattern."""
    ranks = encoding._mergeable_ranks
    tokens = sorted((token for token in ranks if len(token) > 1), key=ranks.get)
    merges = merges_of(tuple(tokens))
    pattern = full_pattern(encoding._pat_str.replace("{1,3}+", "{1,3}"))  # tokenizers repeats what tiktoken possesses
    if pattern not in KNOWN:
        warnings.warn(f"tokenizers may read the split pattern {pattern} differently; compare some ids", stacklevel=3)
    return merges, pattern, dict(encoding._special_tokens), ranks


def to_ranks(tok) -> dict[bytes, int]:
    """token -> id, as tiktoken has it. Raises ValueError if its order does not imply the same merges."""
    tokens = [a + b for a, b in tok.merges]
    ids = {token: tok.ordinary[token] for token in SINGLE_BYTES + tokens}
    if max(map(len, tokens), default=0) > LONGEST:
        raise ValueError(f"whether tiktoken merges alike takes too long to find out for tokens of over {LONGEST} bytes")
    if sorted(tokens, key=ids.get) != tokens or merges_of(tuple(tokens)) != tok.merges:
        raise ValueError("tiktoken merges in the order of ids, which this tokenizer does not")
    return ids


def encoding_of(tok, special_tokens: dict[str, int]) -> tiktoken.Encoding:
    """A tiktoken.Encoding. Raises ValueError for merges that it would do in another order."""
    return tiktoken.Encoding(
        "bpe",
        pat_str=tok.pattern,
        mergeable_ranks=to_ranks(tok),
        special_tokens=special_tokens,
    )


def to_tiktoken(tok) -> tiktoken.Encoding:
    """A tiktoken.Encoding with the same ids. Raises ValueError if there is none; warns of an unknown pattern."""
    if tok.pattern is None:
        raise ValueError("tiktoken has no form for a tokenizer that is more than byte-level BPE")
    for a, b in permutations(tok.special_tokens, 2):
        if b.startswith(a):
            raise ValueError(f"the special token {a!r} begins another one, and tiktoken may take either")
    if tok.pattern not in KNOWN:
        warnings.warn(f"tiktoken may read the split pattern {tok.pattern} differently; compare some ids", stacklevel=2)
    return encoding_of(tok, tok.special_tokens)


def get_encoding(name: str) -> tiktoken.Encoding:
    """tiktoken's encoding, or a ValueError that says which file is missing and where it belongs."""
    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # of requests, of the checksum, of the file system: the file is not available
        if name != "gpt2":
            raise ValueError(f"tiktoken has no encoding {name!r} in its cache, and cannot download it: {e}") from None
        default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
        folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or default)
        files = []
        for address, checksum in GPT2_FILES.items():
            name = hashlib.sha1(address.encode()).hexdigest()
            files.append(f"{address} (sha256 {checksum}) as {folder / name}")
        raise ValueError(
            f"GPT-2's vocabulary is not in tiktoken's cache and could not be downloaded ({type(e).__name__}); "
            f"fetch it elsewhere, store {' and '.join(files)}, and set TIKTOKEN_CACHE_DIR={folder}; "
            "or use a tokenizer.json, which needs no network"
        ) from None


# ---- transformers


def transformers_options(tok) -> dict:
    options = dict(clean_up_tokenization_spaces=False)
    if tok.eot_token is not None:  # the three as in OpenAI's files; no text needs the unknown token
        options |= dict(bos_token=ENDOFTEXT, eos_token=ENDOFTEXT, unk_token=ENDOFTEXT)
    return options


def to_transformers(tok):
    """A transformers.PreTrainedTokenizerFast with the same ids, which allows every special token in a text."""
    from transformers import PreTrainedTokenizerFast

    theirs = open_tokenizers(tok.contents["tokenizer.json"])
    return PreTrainedTokenizerFast(tokenizer_object=theirs, **transformers_options(tok))
