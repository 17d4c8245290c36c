"""Files of tokenizers: tokenizer.json, .tiktoken, vocab.json with merges.txt; and the same ids in other libraries.

| | holds | reads and writes here |
|---|---|---|
| tokenizer.json | everything (Hugging Face) | `read_json`, `to_json` |
| .tiktoken | the tokens in their order, without pattern and special tokens | `read_tiktoken`, `to_ranks` |
| vocab.json, merges.txt | ids and merges (GPT-2's own form), without the rest | `read_vocab` |

A tokenizer.json can ask for much that is not byte-level BPE. What was not shown to give the same ids in Hugging Face as
here is refused, by name: a model whose data was tokenized otherwise than its prompts is wrong without a word. Readers
return the arguments of Tokenizer, and raise ValueError. This file knows nothing of training or of the class Tokenizer.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path

from bpe.chunks import BYTE_ORDER, PRINTABLE, merge_chunk
from bpe.patterns import PATTERNS, SPELLINGS, TIKTOKEN_SPELLINGS, check_pattern

ENDOFTEXT = "<|endoftext|>"
Merges = list[tuple[bytes, bytes]]
Specials = Collection[str] | dict[str, int]
Parts = tuple[Merges, str, Specials, dict[bytes, int]]  # merges, pattern, special tokens, ids of the others

# GPT-2's characters for bytes: the printable ones of Latin-1 as themselves, the others as U+0100, U+0101, ...
BYTE_TO_CHAR = {b: chr(b if i < len(PRINTABLE) else 256 + i - len(PRINTABLE)) for i, b in enumerate(BYTE_ORDER)}
CHAR_TO_BYTE = {c: b for b, c in BYTE_TO_CHAR.items()}

# What tiktoken downloads for an encoding, and its sha256 (tiktoken_ext/openai_public.py).
BLOB = "https://openaipublic.blob.core.windows.net/"
TIKTOKEN_FILES = {
    "gpt2": {
        "gpt-2/encodings/main/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        "gpt-2/encodings/main/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    },
    "r50k_base": {
        "encodings/r50k_base.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
    },
    "cl100k_base": {
        "encodings/cl100k_base.tiktoken": "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    },
    "o200k_base": {
        "encodings/o200k_base.tiktoken": "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
    },
}


# ---- files


def find(path: str | os.PathLike) -> Path | None:
    """The file that `path` means, None for the name of an encoding. Raises ValueError where there is neither."""
    try:
        place = Path(path)
        if place.is_dir():
            candidates = [place / "tokenizer.json", place / "vocab.json", *sorted(place.glob("*.tiktoken"))]
        else:
            candidates = [place.with_name("vocab.json") if place.name == "merges.txt" else place]
        file = next((file for file in candidates if file.is_file()), None)
    except (OSError, ValueError):  # a name that no file can have
        file = None
    if file is None and str(path) not in TIKTOKEN_FILES:
        known = ", ".join(TIKTOKEN_FILES)
        raise ValueError(
            f"no tokenizer at {path}; give a directory, a tokenizer.json, a .tiktoken file, or one of {known}"
        )
    return file


@contextlib.contextmanager
def complaints_name(file: Path) -> Iterator[None]:
    """Whatever goes wrong with a file of somebody else's becomes a ValueError with its name."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as e:
        reason = f"it has no {e}" if isinstance(e, KeyError) else e
        raise ValueError(f"cannot use the tokenizer {file}: {reason}; download or train it again") from None


def read(file: Path, pattern: str | None, special_tokens: Specials | None) -> Parts:
    if file.suffix == ".tiktoken":
        return read_tiktoken(file, pattern, special_tokens)
    content = parse(file)
    return read_vocab(content, file.with_name("merges.txt")) if file.name == "vocab.json" else read_json(content)


def save(tok, path: str | os.PathLike) -> None:
    """Write tokenizer.json to a directory or file, and the other files beside it, as `Tokenizer.save` describes."""
    path, files = Path(path), {}
    if path.suffix != ".json":
        path = path / "tokenizer.json"
        files[path.with_name("tokenizer_config.json")] = dump(transformers_config(tok))
    files[path] = dump(to_json(tok))
    try:
        lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in tok.ranks.items())
        files[path.with_suffix(".tiktoken")] = "".join(lines)
    except ValueError:  # tiktoken has no form for these ids
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        write(file, content)
    if path.with_suffix(".tiktoken") not in files:  # one of an earlier tokenizer must not stay beside this one
        path.with_suffix(".tiktoken").unlink(missing_ok=True)


def write(path: Path, content: str) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        part.write_text(content, encoding="utf-8", newline="\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def dump(content: dict) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def parse(file: Path) -> dict:
    def refuse(number: str):
        raise ValueError(f"it has {number} for a number")

    content = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def show(token: bytes) -> str:
    """Bytes in GPT-2's printable characters."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, token))


def unshow(token: str) -> bytes:
    try:
        return bytes(map(CHAR_TO_BYTE.__getitem__, token))
    except KeyError:
        raise ValueError(f"the token {token!r} is not written in GPT-2's characters for bytes") from None


# ---- tokenizer.json

BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
OPTIONS = dict(dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None)
OPTIONS |= dict(fuse_unk=False, byte_fallback=False, ignore_merges=False)
WITHOUT_EFFECT = {"type", "vocab", "merges", "unk_token", "fuse_unk"}  # nothing is unknown where all bytes are tokens
ANYWHERE = dict(single_word=False, lstrip=False, rstrip=False, special=True)  # as special tokens are found here
KEYS = {
    "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder",
    "model",
}  # fmt: skip


def to_json(tok) -> dict:
    """The content of a tokenizer.json. Raises ValueError for what would have other ids in Hugging Face."""
    pre_tokenizer = BYTE_LEVEL
    if check_pattern(tok.pattern) != PATTERNS["gpt2"][0]:
        split = dict(type="Split", pattern=dict(Regex=tok.pattern), behavior="Isolated", invert=False)
        pre_tokenizer = dict(type="Sequence", pretokenizers=[split, BYTE_LEVEL | dict(use_regex=False)])
    for special in tok.special_tokens:
        if not special.isascii() and set(special) <= CHAR_TO_BYTE.keys():
            raise ValueError(
                f"Hugging Face takes the characters of the special token {special!r} for bytes, for which GPT-2 uses "
                "them; give it a name with other characters"
            )
    ordinary = {show(token): i for token, i in tok.ordinary.items()}
    # Where a special token is spelled like an ordinary one, such as "#", the string can have only one id there. It is
    # the special one's: Hugging Face finds that first in every text, and never gets to the other.
    vocab = tok.special_tokens | {token: i for token, i in ordinary.items() if token not in tok.special_tokens}
    merges = [[show(a), show(b)] for a, b in tok.merges]
    content = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[dict(id=i, content=s) | ANYWHERE | dict(normalized=False) for s, i in tok.special_tokens.items()],
        normalizer=None,
        pre_tokenizer=pre_tokenizer,
        post_processor=None,
        decoder=BYTE_LEVEL,
        model=dict(type="BPE") | OPTIONS | dict(vocab=vocab, merges=merges),
    )
    if len(vocab) < len(ordinary) + len(tok.special_tokens) and read_json(content)[3] != tok.ordinary:
        raise ValueError("a special token is spelled like an ordinary one, whose id would be lost; choose another name")
    return content


def read_json(content: dict) -> Parts:
    """From a tokenizer.json. Raises ValueError for one that gives other ids in Hugging Face than it would here."""
    if not {"model", "pre_tokenizer"} <= content.keys() <= KEYS or content.get("version", "1.0") != "1.0":
        raise ValueError("it has no model or no pre_tokenizer, or more than version 1.0 of a tokenizer.json has")
    if used := [key for key in ("truncation", "padding", "normalizer") if content.get(key)]:
        raise ValueError(f"it has a {used[0]}, which would change the ids")
    if not adds_nothing(content.get("post_processor")):
        raise ValueError("it has a post_processor that puts special tokens around each text")
    if (content.get("decoder") or BYTE_LEVEL)["type"] != "ByteLevel":
        raise ValueError(f"its decoder is {content['decoder']['type']}, and not ByteLevel")
    model, added = content["model"], content.get("added_tokens", [])
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"its model is {model['type']}, and not BPE")
    if used := [key for key, value in model.items() if value and key not in WITHOUT_EFFECT]:
        raise ValueError(f"it uses {used[0]}, which byte-level BPE as here does not have")
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    merges = one_merge_a_token([(unshow(a), unshow(b)) for a, b in merges])
    special = read_added_tokens(added, model["vocab"])
    ids = {unshow(token): i for token, i in model["vocab"].items() if special.get(token) != i}
    return merges, read_pre_tokenizer(content["pre_tokenizer"]), special, ids | hidden(merges, special, ids)


def adds_nothing(post_processor: dict | None) -> bool:
    if post_processor is None or post_processor["type"] == "ByteLevel":  # which changes offsets alone
        return True
    if post_processor["type"] == "Sequence":
        return all(map(adds_nothing, post_processor["processors"]))
    # what transformers writes for a tokenizer without <bos> and <eos> is a template of the text alone
    single = post_processor["single"] if post_processor["type"] == "TemplateProcessing" else []
    return len(single) == 1 and single[0].get("Sequence", {}).get("id") == "A"


def read_added_tokens(added: list[dict], vocab: dict[str, int]) -> dict[str, int]:
    """The special tokens. Raises ValueError where tokenizers would find them otherwise, or give them other ids."""
    special = {}
    for token in added:
        name = token["content"]
        if any(token[key] is not value for key, value in ANYWHERE.items()):
            raise ValueError(f"the added token {name!r} is not special, or does not count wherever it stands")
        if token["normalized"] is not added[0]["normalized"]:  # those that are not are looked for first
            raise ValueError(f"some added tokens are normalized and others, such as {name!r}, are not")
        # tokenizers does not read the id: it is that of the vocabulary, or the next one that is free
        expected = vocab.get(name, max([len(vocab), *(i + 1 for i in special.values())]))
        if name in special or token["id"] != expected:
            raise ValueError(f"the added token {name!r} is there twice, or its id is not {expected}")
        special[name] = token["id"]
    return special


def hidden(merges: Merges, special: dict[str, int], ids: dict[bytes, int]) -> dict[bytes, int]:
    """Ids of the tokens that are spelled like special ones (see `to_json`): what is left over, in their order."""
    made = [*(bytes([b]) for b in BYTE_ORDER), *(a + b for a, b in merges)]
    if not (tokens := [token for token in made if token not in ids and show(token) in special]):
        return {}
    used = {*ids.values(), *special.values()}
    left = [i for i in range(max(used)) if i not in used]
    return dict(zip(tokens, left, strict=True)) if len(tokens) == len(left) else {}


def read_pre_tokenizer(pre_tokenizer: dict | None) -> str:
    """The split pattern of a tokenizer.json. Raises ValueError where it is not one regular expression."""
    pre_tokenizer = pre_tokenizer or {}
    sequence = pre_tokenizer.get("type") == "Sequence"
    *splits, byte_level = pre_tokenizer["pretokenizers"] if sequence else [pre_tokenizer]
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        raise ValueError("it is not byte-level, or it puts a space in front of every text")
    if not splits and byte_level.get("use_regex", True):
        return "gpt2"
    if len(splits) != 1 or byte_level.get("use_regex", True) or "Regex" not in splits[0].get("pattern", ()):
        raise ValueError("it does not split text by one regular expression")
    pattern, form = splits[0]["pattern"]["Regex"], (splits[0]["behavior"], splits[0]["invert"])
    if form not in [("Isolated", False), ("Removed", True)]:
        raise ValueError("it drops or joins some of the text that its pattern finds")
    return SPELLINGS.get(pattern) or check_pattern(pattern)


def one_merge_a_token(merges: Merges) -> Merges:
    """Without the merges that never happen, in files that list every way in which a token could be put together.

    What was converted from tiktoken has them, one beside the other. Only one of them can happen: the pair that the
    merges before it leave of the token, since within its bytes they do the same wherever these stand in a text.
    """
    tokens = [a + b for a, b in merges]
    if len(set(tokens)) == len(tokens):
        return merges
    beside = [token for token, _ in groupby(tokens)]
    found = merges_of(beside) if len(set(beside)) == len(beside) else []
    if not found or not set(found) <= set(merges):
        twice = next(token for i, token in enumerate(tokens) if token in tokens[:i])
        raise ValueError(f"more than one merge makes a token such as {twice!r}, not one beside the other")
    return found


# ---- vocab.json and merges.txt


def read_vocab(vocab: dict[str, int], merges_file: Path) -> Parts:
    """GPT-2's own two files; a token such as <|endoftext|> that no merge makes is special."""
    lines = merges_file.read_text(encoding="utf-8").split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    merges = one_merge_a_token([(unshow(a), unshow(b)) for a, b in pairs])
    made = {*BYTE_TO_CHAR.values(), *(show(a + b) for a, b in merges)}
    special = {token: i for token, i in vocab.items() if token not in made}
    if lost := [token for token in special if not re.fullmatch(r"<\|[^|]+\|>", token)]:
        raise ValueError(f"no merge of {merges_file.name} makes {lost[0]!r}; is that file whole?")
    return merges, "gpt2", special, {unshow(token): i for token, i in vocab.items() if token not in special}


# ---- tiktoken


def merges_of(tokens: Iterable[bytes]) -> Merges:
    """The merges that make `tokens`, in their order: the halves of each are what the merges before it leave of it."""
    merges, rank_of, made = [], {}, [bytes([b]) for b in BYTE_ORDER]
    for token in tokens:
        halves = merge_chunk(token, rank_of)
        if len(halves) != 2:
            raise ValueError(f"the token {token!r} is not made of two earlier tokens")
        rank_of[tuple(halves)] = len(made)
        merges.append((made[halves[0]], made[halves[1]]))
        made.append(token)
    return merges


def read_ranks(ranks: dict[bytes, int], pattern: str, special_tokens: Specials) -> Parts:
    """From tiktoken's form, in which the order of the tokens says all that there is to say about merges."""
    pattern = TIKTOKEN_SPELLINGS.get(pattern, pattern)
    merges = merges_of(sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__))
    return merges, pattern if pattern in PATTERNS else check_pattern(pattern), special_tokens, ranks


def read_tiktoken(file: Path, pattern: str | None, special_tokens: Specials | None) -> Parts:
    """Pattern and special tokens are not in the file: see `Tokenizer.load`."""
    ranks = {}
    for line in filter(None, file.read_bytes().split(b"\n")):
        token, rank = line.split()
        token = base64.b64decode(token, validate=True)
        if token in ranks or not rank.isdigit():
            raise ValueError(f"the token {token!r} is there twice, or its rank {rank.decode()!r} is no number")
        ranks[token] = int(rank)
    if None in (pattern, special_tokens) and (whole := file.with_suffix(".json")).is_file():
        with complaints_name(whole):
            own_merges, own_pattern, own_special, own_ids = read_json(parse(whole))
        if not ranks.items() <= own_ids.items() or len(ranks) != len(BYTE_ORDER) + len(own_merges):
            raise ValueError(f"{whole.name} beside it holds another tokenizer")
        pattern = own_pattern if pattern is None else pattern
        special_tokens = own_special if special_tokens is None else special_tokens
    return read_ranks(ranks, pattern or "gpt2", (ENDOFTEXT,) if special_tokens is None else special_tokens)


def to_ranks(tok) -> dict[bytes, int]:
    """token -> id, as tiktoken has it. Raises ValueError where its order does not give the same merges."""
    tokens = [a + b for a, b in tok.merges]
    ids = {token: tok.ordinary[token] for token in (*(bytes([b]) for b in BYTE_ORDER), *tokens)}
    if sorted(tokens, key=ids.__getitem__) != tokens or merges_of(tokens) != tok.merges:
        raise ValueError("tiktoken merges in the order of ids, which this tokenizer does not")
    return ids


def to_tiktoken(tok, name: str):
    """A tiktoken.Encoding with the same ids. Raises ValueError where there is none."""
    import tiktoken

    if begun := [s for s in tok.special_tokens for t in tok.special_tokens if s != t and t.startswith(s)]:
        raise ValueError(f"the special token {begun[0]!r} begins another one, and tiktoken may take either")
    pattern = check_pattern(tok.pattern)
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=tok.ranks, special_tokens=tok.special_tokens)


def get_encoding(name: str):
    """tiktoken's encoding, or a ValueError that says which file is missing and where it belongs."""
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except Exception as e:  # of requests, of the check of the sum, of the file system: the file cannot be had
        if name not in TIKTOKEN_FILES:
            raise ValueError(f"tiktoken has no encoding {name!r}; choose from {', '.join(TIKTOKEN_FILES)}") from None
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
        folder = Path(folder or os.path.join(tempfile.gettempdir(), "data-gym-cache"))
        needed = [(BLOB + f, folder / hashlib.sha1((BLOB + f).encode()).hexdigest()) for f in TIKTOKEN_FILES[name]]
        address, place = next((item for item in needed if not item[1].exists()), needed[0])
        checksum = TIKTOKEN_FILES[name][address.removeprefix(BLOB)]
        raise ValueError(
            f"the {name} encoding needs {address} (sha256 {checksum}), which is not in the cache and could not be "
            f"downloaded ({type(e).__name__}); fetch it elsewhere, store it as {place}, and set "
            f"TIKTOKEN_CACHE_DIR={folder}; or use a tokenizer.json, which needs no network"
        ) from None


# ---- transformers


def transformers_config(tok) -> dict:
    """The content of tokenizer_config.json, which transformers reads beside tokenizer.json."""
    config = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    if tok.eot_token is not None:
        config |= dict(bos_token=ENDOFTEXT, eos_token=ENDOFTEXT)
    return config


def to_transformers(tok):
    """A transformers.PreTrainedTokenizerFast with the same ids. Raises ValueError as `to_json`."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    config = transformers_config(tok)
    del config["tokenizer_class"]
    return PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(dump(to_json(tok))), **config)
