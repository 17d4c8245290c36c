"""Split patterns: the two that have names, and which regular expressions every library reads alike.

The same pattern is read by `regex` here, by tiktoken (Rust's expressions), and by tokenizers (Oniguruma, Ruby's). They
agree on most of the language, and where they do not, a tokenizer has other ids there than here. `check_pattern` lets
through what was tested to mean the same. This file knows nothing of texts, of tokens, or of files.
"""

import re

# Split patterns by name: the pattern, as `regex`, tiktoken and Hugging Face read it alike; its twin for ASCII text,
# for the `re` of the standard library, which is three times as fast; and where a long text may be cut beforehand
# (written with letters of which every version of Unicode says that they are letters).
PATTERNS = {
    "gpt2": (
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+",
        r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+",
        r"(?<=\S)(?=\s)",
    ),
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}| ?[^\t-\r A-Za-z0-9]+[\r\n]*"
        r"|[\t-\r ]+\Z|[\t-\r ]*[\r\n]|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]",
        r"(?<=[A-Za-z0-9\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=\s)|(?<=\S)(?= )",
    ),
}

# Other spellings of the split patterns, which split every text in the same way.
SPELLINGS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
}
# The same in tiktoken alone: in Hugging Face's regular expressions {1,3}+ repeats, and takes any number of digits.
TIKTOKEN_SPELLINGS = SPELLINGS | {
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s": "cl100k",
}


# ---- what everybody reads alike

# What `regex`, tiktoken (Rust's) and tokenizers (Oniguruma, as in Ruby) take for the same, tested over all characters.
# Missing are, for instance: ^ $ (Ruby has lines), \w \b (three ideas of a word), {2}+ (possessive or repeated),
# sets in sets, lookbehind, flags. The two (?i:...) are those of GPT-4's patterns.
PROPERTY = r"\\[pP]\{(?:L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|Han|Hiragana|Katakana|Hangul)\}"
ESCAPE = rf"{PROPERTY}|\\[sSdDrnt]|\\[][\\.(){{}}|?*+^$-]"
ITEM = rf"{ESCAPE}|[0-9A-Za-z]-[0-9A-Za-z]|[^][\\^&~-]"
TOKEN = re.compile(
    rf"""(?P<open>\((?:\?:|\?=|\?!))|(?P<bar>\|)
    |(?:(?P<close>\))|\[\^?(?:{ITEM})+\]|{ESCAPE}|\(\?i:(?:\[sdmt\]\|ll\|ve\|re|'s\|'t\|'re\|'ve\|'m\|'ll\|'d)\)
       |[^][\\(){{}}|?*+^$])(?P<times>[*+?][+?]?|\{{\d{{1,3}}(?:,\d{{0,3}})?\}}(?![+?]))?""",
    re.VERBOSE | re.DOTALL,
)


def read_alike(pattern: str) -> bool:
    """True for a split pattern that tiktoken and tokenizers are known to read as `regex` does, and that matches no
    empty text, after which every library goes on in its own way.

    A parser in small, which goes from token to token. `takes` says whether the alternative that it is in takes a
    character in any case, `all_take` whether all alternatives before it in the same group do.
    """
    if pattern in [known for known, *_ in PATTERNS.values()]:
        return True
    at, takes, all_take, outer = 0, False, True, []
    while at < len(pattern):
        if not (token := TOKEN.match(pattern, at)):
            return False
        at = token.end()
        if token["open"]:
            outer.append((token["open"], takes, all_take))
            takes, all_take = False, True
        elif token["bar"]:
            takes, all_take = False, all_take and takes
        else:
            taken = True
            if token["close"]:
                if not outer:
                    return False
                taken = all_take and takes
                opened, takes, all_take = outer.pop()
                if token["times"] and (opened != "(?:" or not taken):  # nothing, repeated
                    return False
                taken = taken and opened == "(?:"
            optional = (token["times"] or "").startswith(("*", "?", "{0"))
            takes = takes or taken and not optional
    return pattern.isascii() and not outer and all_take and takes


def check_pattern(pattern: str) -> str:
    """`pattern`. Raises ValueError for one that other libraries may read in another way."""
    if not read_alike(pattern):
        raise ValueError(
            f"tiktoken and Hugging Face may read the split pattern {pattern} in other ways than it is read here; use "
            r"gpt2, cl100k, or an expression of ASCII characters, [sets], \p{L} \p{N} \s \S . | (?:) (?=) (?!) * + ? "
            "{m,n} that matches no empty text"
        )
    return pattern
