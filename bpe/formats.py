"""The files of a tokenizer, and the same ids in other libraries.

| | what it holds | read, written by |
|---|---|---|
| tokenizer.json | everything (Hugging Face) | `read_json`, `to_tokenizers` |
| vocab.json, merges.txt | ids and merges, as OpenAI published GPT-2's | `read_vocab` alone |
| .tiktoken | the tokens in order, without pattern and special tokens | tiktoken alone, `to_ranks` |

A tokenizer.json can ask for much that is not byte-level BPE. So it is also opened with the `tokenizers` library, which
defines the format, and refused if PROBES get other chunks or ids there: a model whose prompts are tokenized differently
from its training data is silently wrong. Readers return the arguments of Tokenizer, and raise ValueError. This file
knows nothing of training.
"""

import base64
import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import permutations
from pathlib import Path

from bpe.chunks import BYTE_ORDER, KNOWN, PATTERNS, PRINTABLE, SINGLE_BYTES, merge_chunk, splitter

ENDOFTEXT = "<|endoftext|>"
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


# ---- files


def save(tok, path: str | os.PathLike, model_max_length: int | None = None) -> None:
    """Write `path`, a Hugging Face tokenizer.json that holds everything, and a .tiktoken file beside it.

    A directory gets tokenizer.json, tokenizer.tiktoken and tokenizer_config.json, and is what
    transformers.AutoTokenizer.from_pretrained reads; `model_max_length`, the context of a model, goes there, too.
    Raises ValueError, before anything is written, for special tokens that would have other ids there; warns of a split
    pattern that `tokenizers` reads differently.
    """
    path = Path(path)
    files = {}
    if path.suffix != ".json" or path.is_dir():
        path = path / "tokenizer.json"
        config = dict(tokenizer_class="PreTrainedTokenizerFast") | transformers_options(tok)
        if model_max_length:
            config["model_max_length"] = model_max_length
        files[path.with_name("tokenizer_config.json")] = json.dumps(config, indent=2) + "\n"
    files |= zip((path, path.with_suffix(".tiktoken")), contents(tok), strict=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".tiktoken").unlink(missing_ok=True)  # an older one would belong to another tokenizer
    for file, content in files.items():
        file.write_text(content, encoding="utf-8", newline="\n")


@lru_cache(maxsize=1)
def contents(tok) -> list[str]:
    """Of tokenizer.json and .tiktoken; of the first alone if tiktoken has no form for these ids. Remembered, since that
    of GPT-2 takes a second, and every checkpoint has it."""
    texts = [to_tokenizers(tok).to_str(pretty=True) + "\n"]
    with contextlib.suppress(ValueError):
        lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in to_ranks(tok).items()]
        texts.append("".join(lines))
    return texts


# ---- tokenizer.json

# What tokenizers differ in: spaces at both ends, apostrophes, cases, accents, digits, line ends, code, scripts without
# spaces, emoji, control characters.
PROBES = (
    "  It's what THEY'VE said, isn't it?   'tis naïve, cafe\u0301 ﬁve ½² Ⅷ ٣ ʕ ",
    "1 23 456 7890 3.14 1,000,000 x2y 12345678901\n",
    "def f(x, *a):\r\n\tif x_1 != 0:\n        return {'k': [x ** 2, \"s\"]}  # <a&b> @c ~d `e` \\n\n\n\n  ",
    "研究生院门前有一棵石榴树。全角　空格，中文English混排 ひらがな カタカナ 한국어 Привет, мир! עברית हिन्दी",
    "👩‍👩‍👧‍👦🏳️‍🌈 👍🏽🇨🇳 \u200b\ufeff\x00\x1c\x85\xa0\u2028\ufffd aaaaaaaaaaaaaaaa ================ \t ",
)
WITHOUT_EFFECT = {"type", "vocab", "merges", "unk_token", "fuse_unk"}  # nothing is unknown if all bytes are tokens


def check_ids(tok, theirs) -> None:
    """Raises ValueError if a tokenizers.Tokenizer cuts PROBES into other chunks, or gives them other ids."""
    for text in (*PROBES, *(f"a {s} b{s}{s}x \n{s}." for s in tok.special_tokens)):
        chunks = [text[start:end] for _, (start, end) in theirs.pre_tokenizer.pre_tokenize_str(text)]
        same_ids = tok.encode(text, allowed_special="all") == theirs.encode(text).ids
        if not same_ids or chunks != splitter(tok.pattern).split(text):
            raise ValueError(f"the tokenizers library has other ids for it than we have, for instance for {text!r}")


def to_tokenizers(tok):
    """A tokenizers.Tokenizer with the same ids. Raises ValueError for special tokens that it would take for bytes, and
    for a split pattern that it cannot compile; warns if it reads the pattern differently."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {show(token): i for token, i in tok.ordinary.items()}
    for special in tok.special_tokens:
        if special in vocab or not special.isascii() and set(special) <= CHAR_TO_BYTE.keys():
            raise ValueError(f"Hugging Face would take the special token {special!r} for bytes; choose another name")
    merges = [(show(a), show(b)) for a, b in tok.merges]
    theirs = Tokenizer(models.BPE(vocab | tok.special_tokens, merges))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if tok.pattern != PATTERNS["gpt2"][0]:
        try:
            split = pre_tokenizers.Split(Regex(tok.pattern), "isolated")
        except Exception as e:  # it raises no other type
            raise ValueError(f"tokenizers cannot compile the split pattern {tok.pattern}: {e}") from None
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        theirs.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([*tok.special_tokens])
    if tok.pattern not in KNOWN:
        try:
            check_ids(tok, theirs)
        except ValueError as e:
            warnings.warn(f"the split pattern {tok.pattern} is kept as it is, but {e}", stacklevel=3)
    return theirs


def read_json(file: Path) -> tuple:
    """Parts, and the tokenizers.Tokenizer. Raises ValueError for what is not BPE as here but may not show in PROBES."""
    from tokenizers import Tokenizer

    text = file.read_text(encoding="utf-8")
    content = json.loads(text)
    model = content["model"]
    if content["pre_tokenizer"] is None:
        raise ValueError("it is not byte-level BPE")
    for key, value in model.items():
        if value and key not in WITHOUT_EFFECT:
            raise ValueError(f"it uses {key}, which this byte-level BPE does not have")
    theirs = Tokenizer.from_str(text)  # after these checks, since a prefix that is too long ends it in a panic of Rust
    theirs.no_truncation()  # these belong to a call and not to a vocabulary: transformers sets them each time
    theirs.no_padding()
    added = theirs.get_added_tokens_decoder()
    special = {}
    for i, token in added.items():
        if not token.special:
            raise ValueError(f"the added token {token.content!r} is not special")
        special[token.content] = i
    merges = []
    for pair in model["merges"]:
        a, b = pair.split(" ") if isinstance(pair, str) else pair
        merges.append((unshow(a), unshow(b)))
    ids = {unshow(token): i for token, i in model["vocab"].items() if token not in special}
    first = content["pre_tokenizer"]
    if "pretokenizers" in first:
        first = first["pretokenizers"][0]
    pattern = first["pattern"]["Regex"] if first["type"] == "Split" else "gpt2"
    return (merges, pattern, special, ids), theirs


TOKENIZER_FILES = ["tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json"]


def has_vocab(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("vocab.json", "merges.txt"))


def read_vocab(folder: Path) -> tuple:
    """As `read_json`, from the vocab.json and merges.txt of a GPT-2. They do not say how text is split, so files of
    another model are refused."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    def content(name: str) -> dict:
        return json.loads((folder / name).read_bytes()) if (folder / name).is_file() else {}

    settings = content("tokenizer_config.json")
    kind = settings.get("tokenizer_class") or content("config.json").get("model_type") or "gpt2"
    unusual = [name for name in ("add_prefix_space", "add_bos_token", "add_eos_token") if settings.get(name)]
    unusual += [token["content"] for token in settings.get("added_tokens_decoder", {}).values() if not token["special"]]
    if kind not in ("gpt2", "GPT2Tokenizer", "GPT2TokenizerFast") or unusual:
        raise ValueError(
            f"only a tokenizer.json says how {' '.join([kind, *unusual])} splits text; write one with transformers: "
            f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    vocab = content("vocab.json")
    special = {token: i for token, i in vocab.items() if token == ENDOFTEXT} | content("added_tokens.json")
    special = dict(sorted(special.items(), key=lambda item: item[1]))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    pairs = [line.split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    merges = [(unshow(a), unshow(b)) for a, b in pairs]
    ids = {unshow(token): i for token, i in vocab.items() if token not in special}
    if lost := ids.keys() - {*SINGLE_BYTES, *(a + b for a, b in merges)}:
        raise ValueError(f"merges.txt is cut short: vocab.json has {min(lost)!r}, and no merge makes it")
    theirs = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.add_special_tokens([*special])
    return (merges, "gpt2", special, ids), theirs


def gpt2_of_transformers() -> Path | None:
    """The folder of GPT-2's files in the cache of the hub, which transformers fills; None without them."""
    from huggingface_hub import try_to_load_from_cache

    for repo in ("openai-community/gpt2", "gpt2"):
        for name in ("tokenizer.json", "vocab.json"):
            found = try_to_load_from_cache(repo, name)
            if isinstance(found, str) and (name == "tokenizer.json" or has_vocab(Path(found).parent)):
                return Path(found).parent
    return None


def show(token: bytes) -> str:
    """Bytes in GPT-2's printable characters."""
    return "".join(map(BYTE_TO_CHAR.__getitem__, token))


def unshow(token: str) -> bytes:
    try:
        return bytes(map(CHAR_TO_BYTE.__getitem__, token))
    except KeyError:
        raise ValueError(f"the token {token!r} is not written in GPT-2's characters for bytes") from None


# ---- tiktoken


def merges_of(tokens: Iterable[bytes]) -> Merges:
    """The merges that make `tokens`, in their order: the halves of each are what earlier merges leave of it."""
    made = list(SINGLE_BYTES)
    merges = []
    rank_of = {}
    for token in tokens:
        halves = merge_chunk(token, rank_of)
        if len(halves) != 2:
            raise ValueError(f"the token {token!r} is not made of two earlier tokens")
        rank_of[tuple(halves)] = len(made)
        a, b = halves
        merges.append((made[a], made[b]))
        made.append(token)
    return merges


def read_encoding(encoding) -> Parts:
    """From a tiktoken.Encoding, in which the order of the tokens implies the merges."""
    ranks = encoding._mergeable_ranks
    merges = merges_of(sorted((token for token in ranks if len(token) > 1), key=ranks.get))
    return merges, encoding._pat_str, dict(encoding._special_tokens), ranks


def to_ranks(tok) -> dict[bytes, int]:
    """token -> id, as tiktoken has it. Raises ValueError if its order does not imply the same merges."""
    tokens = [a + b for a, b in tok.merges]
    ids = {token: tok.ordinary[token] for token in SINGLE_BYTES + tokens}
    if sorted(tokens, key=ids.get) != tokens or merges_of(tokens) != tok.merges:
        raise ValueError("tiktoken merges in the order of ids, which this tokenizer does not")
    return ids


def to_tiktoken(tok):
    """A tiktoken.Encoding with the same ids. Raises ValueError if there is none; warns of an unknown pattern."""
    import tiktoken

    for a, b in permutations(tok.special_tokens, 2):
        if b.startswith(a):
            raise ValueError(f"the special token {a!r} begins another one, and tiktoken may take either")
    if tok.pattern not in KNOWN:
        warnings.warn(f"tiktoken may read the split pattern {tok.pattern} differently; compare some ids", stacklevel=2)
    return tiktoken.Encoding(
        "bpe",
        pat_str=tok.pattern,
        mergeable_ranks=to_ranks(tok),
        special_tokens=tok.special_tokens,
    )


def get_encoding(name: str):
    """tiktoken's encoding, or a ValueError that says which file is missing and where it belongs."""
    import tiktoken

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
    """A transformers.PreTrainedTokenizerFast with the same ids, which allows every special token in a text.
    Raises ValueError and warns as `save`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=to_tokenizers(tok), **transformers_options(tok))
