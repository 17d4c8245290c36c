"""Read and write a tokenizer's files, and give other libraries the same ids.

| | contents | read, written by |
|---|---|---|
| tokenizer.json | everything (Hugging Face) | `read`, `to_tokenizers` |
| vocab.json, merges.txt | ids and merges, as OpenAI published GPT-2's | transformers |
| .tiktoken | the tokens in order, without pattern and special tokens | tiktoken, `contents` |

A tokenizer.json can ask for much more than byte-level BPE, and so can the files beside it. `tokenizers` reads a file,
and transformers another model's folder. `parts_of` takes apart byte-level BPE with GPT-2's ids, such as our own files
and GPT-2's. All errors are ValueErrors. This file knows nothing of training.
"""

import base64
import json
import os
import re
import warnings
from itertools import pairwise
from pathlib import Path

import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bpe.chunks import BYTE_ORDER, KNOWN, PATTERNS, PRINTABLE, SINGLE_BYTES, by_pattern, full_pattern

ENDOFTEXT = "<|endoftext|>"
TIKTOKEN = "tokenizer.tiktoken"  # only ours have it
Merges = list[tuple[bytes, bytes]]
Parts = tuple[Merges, str, dict[str, int]]  # merges, pattern, special tokens

# GPT-2's characters for bytes: the printable ones of Latin-1 as themselves, the others as U+0100, U+0101, ...
CODE_POINTS = [*PRINTABLE, *range(256, 512 - len(PRINTABLE))]
BYTE_TO_CHAR = dict(zip(BYTE_ORDER, map(chr, CODE_POINTS), strict=True))
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}


# ---- writing


def save(tok, path: str | os.PathLike, model_max_length: int | None = None) -> None:
    """Write `path`, a Hugging Face tokenizer.json that holds everything, and a .tiktoken file beside it.

    A directory is what transformers.AutoTokenizer.from_pretrained reads: it also gets a tokenizer_config.json with
    `model_max_length`, the context of a model.
    """
    path = Path(path)
    if path.suffix == ".json" and not path.is_dir():
        files = {path.with_suffix(Path(name).suffix): content for name, content in tok.contents.items()}
    else:
        config = dict(tokenizer_class="PreTrainedTokenizerFast") | transformers_options(tok)
        if model_max_length:
            config["model_max_length"] = model_max_length
        files = {path / name: content for name, content in tok.contents.items()}
        files[path / "tokenizer_config.json"] = json.dumps(config, indent=2) + "\n"
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8", newline="\n")


def contents(tok) -> dict[str, str]:
    """Return {name: content}."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in tok.ranks.items()]
    return {"tokenizer.json": to_tokenizers(tok).to_str(pretty=True) + "\n", TIKTOKEN: "".join(lines)}


def to_tokenizers(tok) -> Tokenizer:
    """Return a tokenizers.Tokenizer with the same ids."""
    vocab = {show(token): i for token, i in tok.ranks.items()}
    merges = [(show(a), show(b)) for a, b in tok.merges]
    theirs = Tokenizer(models.BPE(vocab | tok.special_tokens, merges))
    theirs.pre_tokenizer = pre_tokenizer("gpt2" if tok.pattern == PATTERNS["gpt2"][0] else tok.pattern)
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([*tok.special_tokens])
    return theirs


def pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    if pattern == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([by_pattern(pattern), byte_level])


def show(token: bytes) -> str:
    """Write bytes in GPT-2's printable characters."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, token))


# ---- reading


def read(path: Path) -> tuple[Tokenizer, dict]:
    """Open the tokenizers.Tokenizer of a file or a folder; also return its settings for transformers.

    In a folder of ours, which has a .tiktoken, only the file is read. transformers reads any other folder,
    because files beside the tokenizer.json may change its ids.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    ours = file.with_name(TIKTOKEN).exists()
    if file.is_file() and (ours or not file.with_name("tokenizer_config.json").exists()):
        return open_text(file.read_text(encoding="utf-8")), {}
    if not any(re.match(r"tokenizer\.json|vocab|.*\.model$", beside.name) for beside in file.parent.iterdir()):
        raise ValueError("it has no tokenizer.json, vocab.json or .model")  # transformers would make an empty one
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False)
    settings = dict(theirs.special_tokens_map)
    if theirs.split_special_tokens:
        settings["split_special_tokens"] = True
    return open_text(theirs.backend_tokenizer.to_str()), settings


def open_text(text: str) -> Tokenizer:
    """Open a tokenizer.json's content by `tokenizers`."""
    theirs = Tokenizer.from_str(text)
    theirs.no_truncation()  # these belong to a call and not to a vocabulary: transformers sets them each time
    theirs.no_padding()
    return theirs


def parts_of(theirs: Tokenizer) -> Parts:
    """Take a tokenizer apart. Raise ValueError except for byte-level BPE with GPT-2's ids and nothing around it."""
    content = json.loads(theirs.to_str())
    model = content["model"]
    merges = model.pop("merges", [])
    vocab = model.pop("vocab")
    added = content["added_tokens"]
    special = {token["content"]: token["id"] for token in added}
    by_rank = {token: i for i, token in enumerate([*CHAR_TO_BYTE, *(a + b for a, b in merges)])}
    split = (content["pre_tokenizer"] or {}).get("pretokenizers")
    pattern = split[0].get("pattern", {}).get("Regex", "") if split else "gpt2"
    flags = [{key for key, value in token.items() if value is True} - {"normalized"} for token in added]
    if (
        [value for value in model.values() if value] != ["BPE"]  # and no other setting
        or vocab | special != by_rank | special
        or content["pre_tokenizer"] != json.loads(pre_tokenizer(pattern).__getstate__())
        or content["normalizer"]
        or any(names != {"special"} for names in flags)
    ):
        raise ValueError("it is not byte-level BPE with GPT-2's ids and nothing else")
    return [(unshow(a), unshow(b)) for a, b in merges], pattern, special


def unshow(token: str) -> bytes:
    return bytes(map(CHAR_TO_BYTE.__getitem__, token))


def token_bytes(theirs: Tokenizer) -> dict[int, int]:
    """Return id -> bytes of text, if tokens are in GPT-2's characters for bytes, or some as <0x0A>; else {}."""
    content = json.loads(theirs.to_str())
    byte_level = '"ByteLevel"' in json.dumps([content["normalizer"], content["pre_tokenizer"]])
    lengths = {}
    if byte_level or content["model"].get("byte_fallback"):
        for token, i in theirs.get_vocab().items():
            if byte_level:
                lengths[i] = len(token if CHAR_TO_BYTE.keys() >= set(token) else token.encode())
            elif re.fullmatch("<0x[0-9A-F]{2}>", token):
                lengths[i] = 1
            else:  # after another token, because a text's first may lose its space
                lengths[i] = len(theirs.decoder.decode(["a", token])[1:].encode())
    return lengths


# ---- tiktoken


def read_encoding(encoding: tiktoken.Encoding) -> Parts:
    """Take a tiktoken.Encoding apart. Raise ValueError for ids other than GPT-2's; warn of an unknown pattern."""
    ranks = encoding._mergeable_ranks
    tokens = sorted(ranks, key=ranks.get)
    if tokens[:256] != SINGLE_BYTES or ranks[tokens[-1]] != len(tokens) - 1:
        raise ValueError(f"the ids of {encoding.name} are not GPT-2's bytes and then its merges")
    pattern = full_pattern(encoding._pat_str.replace("{1,3}+", "{1,3}"))  # tokenizers repeats what tiktoken possesses
    if pattern not in KNOWN:
        warnings.warn(f"tokenizers may read the split pattern {pattern} differently; compare some ids", stacklevel=3)
    return [last_merge(token, ranks) for token in tokens[256:]], pattern, dict(encoding._special_tokens)


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the halves that tiktoken joins last in `token`: neighbours whose union has the lowest rank come first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        unions = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        i = unions.index(min(unions))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return tuple(parts)


def encoding_of(tok, special_tokens: dict[str, int]) -> tiktoken.Encoding:
    """Make a tiktoken.Encoding, which merges in the order of ids, the order of training."""
    return tiktoken.Encoding("bpe", pat_str=tok.pattern, mergeable_ranks=tok.ranks, special_tokens=special_tokens)


def to_tiktoken(tok) -> tiktoken.Encoding:
    """Make a tiktoken.Encoding with the same ids. Raise ValueError if impossible; warn of an unknown pattern."""
    if tok.pattern is None:
        raise ValueError("tiktoken has no form for a tokenizer that is more than byte-level BPE")
    if tok.pattern not in KNOWN:
        warnings.warn(f"tiktoken may read the split pattern {tok.pattern} differently; compare some ids", stacklevel=2)
    return encoding_of(tok, tok.special_tokens)


def get_encoding(name: str) -> tiktoken.Encoding:
    """Get tiktoken's encoding. Raise ValueError if it is neither in the cache nor downloadable."""
    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # of requests, of the checksum, of the file system
        reason = str(e).partition("\n")[0]
        raise ValueError(
            f"tiktoken cannot load {name}: {reason}; without a network set TIKTOKEN_CACHE_DIR as docs/data.md says, "
            "or pass a tokenizer.json"
        ) from None


# ---- transformers


def transformers_options(tok) -> dict:
    options = dict(clean_up_tokenization_spaces=False)
    if tok.eot_token is not None:  # the three as in OpenAI's files; no text needs the unknown token
        options |= dict(bos_token=ENDOFTEXT, eos_token=ENDOFTEXT, unk_token=ENDOFTEXT)
    return options | tok.settings


def to_transformers(tok):
    """Make a transformers.PreTrainedTokenizerFast with the same ids, which allows every special token in a text."""
    from transformers import PreTrainedTokenizerFast

    theirs = open_text(tok.contents["tokenizer.json"])
    return PreTrainedTokenizerFast(tokenizer_object=theirs, **transformers_options(tok))
