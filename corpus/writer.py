"""tokens -> shards: files of equal length that are complete or not there at all, whenever the writing is interrupted.

This file knows nothing of text: it writes the tokens that it is given, and where the source is to be read again.
"""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from bpe.tokenizer import Tokenizer
from cli import UserError
from corpus.manifest import save_manifest
from corpus.stream import open_shard
from files import flush, sha256


def shard_dtype(n_vocab: int) -> type:
    return np.uint16 if n_vocab <= 2**16 else np.uint32


class Writer:
    """The only writer. It fills one shard in memory, and lists it in the manifest once it is complete and on the disk,
    with the place in the source where the next one begins. After an interruption, writing resumes from that place."""

    def __init__(self, out_dir: Path, manifest: dict, tok: Tokenizer, shard_size: int, limit: int):
        self.out_dir = out_dir
        self.manifest = manifest
        self.limit = limit  # of all tokens
        self.eot = tok.eot_token
        self.token_bytes = tok.token_bytes()
        self.shard = np.empty(min(shard_size, limit), shard_dtype(len(tok)))
        self.filled = 0  # tokens in it
        self.counts = np.zeros(len(tok), np.int64)  # of each id in it
        self.skipped = Counter(manifest["skipped"])
        # tokens of the first unit that are in the previous shard; None once the end of that shard has been checked
        self.to_skip = manifest["next"]["skip"] if manifest["shards"] else None
        save_manifest(out_dir, manifest)

    @property
    def n_tokens(self) -> int:
        return self.manifest["tokens"] + self.filled

    def write(self, place: dict, tokens: np.ndarray, skipped: Counter) -> None:
        """Append the tokens of the unit at `place`, up to the limit, and complete the shards that they fill."""
        done = 0
        if self.to_skip is not None:
            self._check_seam(tokens)
            done = self.to_skip
            self.to_skip = None
        tokens = tokens[: done + self.limit - self.n_tokens]
        while done < len(tokens):
            part = tokens[done : done + len(self.shard) - self.filled]
            self.shard[self.filled : self.filled + len(part)] = part
            self.counts += np.bincount(part, minlength=len(self.counts))
            self.filled += len(part)
            done += len(part)
            if self.filled == len(self.shard):
                self._complete()
                self.manifest["next"] = place | dict(skip=done)  # where the next shard begins
                self._save()
        self.skipped += skipped

    def _check_seam(self, tokens: np.ndarray) -> None:
        """Raises UserError unless the last shard ends with the first `to_skip` of `tokens`, the unit at `next`: the
        manifest may be damaged, or the source edited."""
        last = open_shard(self.out_dir / self.manifest["shards"][-1]["file"])
        held = tokens[: self.to_skip][-len(last) :]
        if not 0 < self.to_skip <= len(tokens) or not np.array_equal(held, last[-len(held) :]):
            raise UserError(
                f"the last shard of {self.out_dir} does not end where `next` in manifest.json says: "
                f"the manifest is damaged, or the source has changed; remove {self.out_dir}"
            )

    def _complete(self) -> None:
        """Make the shard durable, then list it."""
        tokens = self.shard[: self.filled]
        shards = self.manifest["shards"]
        split = "train" if shards else "val"
        path = self.out_dir / f"{shard_name(self.out_dir)}_{split}_{len(shards):06d}.npy"
        part = path.with_name(f".{path.name}.tmp")
        with open(part, "wb") as f:
            np.save(f, tokens)
        flush(part)
        shards.append(dict(file=path.name, tokens=len(tokens), sha256=sha256(part)))
        part.rename(path)
        flush(self.out_dir)
        self.manifest["tokens"] += self.filled
        self.manifest["documents"] += int(self.counts[self.eot])
        self.manifest["bytes"] += int(self.counts @ self.token_bytes)
        self.filled = 0
        self.counts[:] = 0

    def _save(self) -> None:
        self.manifest["skipped"] = dict(sorted(self.skipped.items()))
        save_manifest(self.out_dir, self.manifest)

    def end(self) -> None:
        """Complete the last shard, and the manifest. Raises UserError if there is nothing in them."""
        if self.to_skip is not None:  # no unit came: `next` is past the end of the source
            self._check_seam(np.zeros(0, int))
        if self.filled:
            self._complete()
        if not self.manifest["shards"]:
            raise UserError(
                f"no document in {self.manifest['source']}; skipped: {dict(self.skipped) or 'none'}; "
                "name the key of the text with --text_field, or give another --source"
            )
        del self.manifest["next"]
        self._save()


def shard_name(out_dir: Path) -> str:
    """The part of a shard's name before _val_ or _train_, which cannot be mistaken for these."""
    name = out_dir.resolve().name.removesuffix("_shards")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "text"
    return name.replace("edu-fineweb10B", "edufineweb")
