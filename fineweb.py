"""Turn text into shards of tokens: FineWeb-Edu, another dataset of the Hugging Face hub, or local files.

    python fineweb.py                                          # FineWeb-Edu sample-10BT -> edu_fineweb10B/
    python fineweb.py --dry_run                                # its input, output and disk space
    python fineweb.py --verify                                 # compare every shard with its checksum
    python fineweb.py --source roneneldan/TinyStories --out_dir stories       # a dataset, as load_dataset takes it
    python fineweb.py --source wikimedia/wikipedia --subset 20231101.simple --out_dir simple_wikipedia
    python fineweb.py --source "texts/*.jsonl.gz" --tokenizer tokenizer.json --out_dir text_shards    # local files

The idea is one line, ids = [eot, *encode(text)], for one document after the other, cut into shards of equal length
(`tokens_of`). tiktoken encodes without Python's lock, so threads keep all cores busy:

    source -> files -> batches of documents -> tokens, by threads -> shards, by one writer

Writes OUT_DIR: NAME_val_000000.npy, NAME_train_000001.npy, ..., manifest.json, tokenizer.json and .tiktoken. Documents
keep the order of the source, whatever the number of threads. However a run ends, the same command resumes after the
last complete shard, and the shards come out byte for byte the same.

It runs on one machine. For larger corpora use datatrove: training reads its files unchanged.
This file knows nothing of models, training or torch.
"""

import shutil
import signal
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bpe.tokenizer import Tokenizer
from bpe.training import cpu_count
from parts.cli import Count, Stopped, Tokens, UserError, counted, parse_args, script
from parts.data import new_manifest, read_manifest, summary
from parts.files import errors_name, exclusive_lock, free_bytes, remove_leftovers
from parts.shards import Writer, load_tokenizer, shard_dtype, shard_name, tokens_of, verify
from parts.texts import START, Texts, open_texts

BATCHES_AHEAD = 4  # per thread; bounds memory when writing is slower than encoding
SAMPLED = 10**6  # characters of the first documents, to estimate tokens per byte
RESUME = "repeat the command to resume"


@dataclass(frozen=True)
class Config:
    # input; source, subset, split and revision mean what datasets.load_dataset means
    source: tuple[str, ...] = ("HuggingFaceFW/fineweb-edu",)  # a hub dataset, or files, folders, globs
    subset: str = ""  # subset of a dataset; empty for its default, or sample-10BT of FineWeb-Edu
    split: str = "train"  # split of a dataset
    revision: str = "main"  # branch, tag or commit of the hub dataset
    text_field: str = "text"  # the text's column or JSON key; in a .txt, two blank lines end a document
    limit_tokens: Tokens = 0  # stop after this many tokens; 0 for the whole source
    # output
    tokenizer: str = "gpt2"  # gpt2, or a tokenizer.json
    out_dir: str = "edu_fineweb10B"  # directory for the shards
    shard_size: Count = 0  # tokens per shard; the first is for validation; 0 for 100M, or a tenth of a small source
    workers: Count = 0  # encoding threads; 0 for one per core
    # instead of writing
    verify: bool = False  # check the shards in out_dir against their manifest; write nothing
    dry_run: bool = False  # print the plan, then stop


def main() -> None:
    config = parse_args(Config, description=__doc__)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    out_dir = Path(config.out_dir)
    if config.verify:
        print(f"{out_dir} is intact: {verify(out_dir)}")
    else:
        make_shards(config, out_dir)


def stop(signum, frame) -> None:
    raise Stopped(signum)


def make_shards(config: Config, out_dir: Path) -> None:
    """Write the missing shards of `config.source`. Raise UserError if they cannot be written."""
    of_fineweb = config.source == Config.source
    if not of_fineweb and config.out_dir == Config.out_dir:
        raise UserError(f"{out_dir} is for FineWeb-Edu; choose another --out_dir")
    tok = load_tokenizer(config.tokenizer)
    if tok.eot_token is None:
        raise UserError(f"{config.tokenizer} has no <|endoftext|> to start documents; train one with it")
    subset = config.subset or ("sample-10BT" if of_fineweb else "")
    config = replace(config, subset=subset, workers=config.workers or cpu_count())
    manifest = open_manifest(config, out_dir, tok)
    if "next" not in manifest:
        print(f"{out_dir} is already complete; source not read again: {summary(manifest)}")
        return
    # later shards come from the commit of the first ones
    revision = manifest.get("commit") or config.revision
    texts = open_texts(config.source, config.text_field, config.subset, config.split, revision)
    sizes = texts.sizes()
    expected = min(expected_tokens(texts, sizes, tok), config.limit_tokens or sys.maxsize)
    # by default leave most of a small source to train on
    config = replace(config, shard_size=manifest["shard_size"] or min(max(expected // 10, 1000), 100_000_000))
    print_plan(config, texts, sizes, manifest, expected)
    if config.dry_run:
        return
    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        with exclusive_lock(out_dir / ".lock", f"shard directory {out_dir}"):
            remove_leftovers(out_dir, "*.npy", "manifest.json", "tokenizer*")  # of a kill
            manifest = open_manifest(config, out_dir, tok)  # nobody else changes it now
            if "next" in manifest:  # else another process completed it while this one waited
                texts = texts._replace(files=in_order(texts.files, manifest))
                manifest |= dict(commit=texts.commit(), files=texts.files)
                write_shards(config, texts, manifest, tok, expected)
    except (KeyboardInterrupt, Stopped):
        print(f"stopped after {len(manifest['shards'])} complete shards; {RESUME}", file=sys.stderr)
        raise
    print(f"{out_dir}: {summary(manifest)}")


def write_shards(config: Config, texts: Texts, manifest: dict, tok: Tokenizer, expected: int) -> None:
    """Run the pipeline documents -> tokens -> shards, and fill in `manifest`."""
    out_dir = Path(config.out_dir)
    downloads = out_dir / ".downloads"
    limit = config.limit_tokens or sys.maxsize
    writer = Writer(out_dir, manifest, tok, config.shard_size, limit, shard_name(out_dir))
    if not manifest["shards"]:  # else others may be reading it
        with errors_name(out_dir / "tokenizer.json"):
            tok.save(out_dir / "tokenizer.json")
    bar = tqdm(total=expected, initial=writer.n_tokens, unit="tok", unit_scale=True, disable=None, dynamic_ncols=True)
    with bar:
        batches = texts.batches(manifest["next"], downloads)
        for place, tokens, skipped in encoded(batches, tok, config.workers):
            writer.write(place, tokens, skipped)
            bar.update(writer.n_tokens - bar.n)
            if writer.n_tokens == limit:
                break
        writer.end()
    shutil.rmtree(downloads, ignore_errors=True)


# ------------------------------------------------------------------------------------------- documents -> tokens


def encoded(batches: Iterator[tuple], tok: Tokenizer, n_threads: int) -> Iterator[tuple[dict, np.ndarray, int]]:
    """Yield (place, tokens (n,), skipped documents) in the batches' order.

    A task is a whole batch: a task per document would cost the main thread a fifth of the encoding time.
    """
    pending = deque()
    pool = ThreadPoolExecutor(n_threads)
    try:
        for place, texts in batches:
            pending.append((place, pool.submit(tokens_of, texts, tok)))
            if len(pending) == BATCHES_AHEAD * n_threads:
                place, result = pending.popleft()
                yield place, *result.result()
        for place, result in pending:
            yield place, *result.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# ------------------------------------------------------------------------------------------------ the manifest


def open_manifest(config: Config, out_dir: Path, tok: Tokenizer) -> dict:
    """Return an earlier run's manifest, or a new one. Raise UserError if `out_dir` holds anything else.

    `next` says where the next shard begins: a place in the stream of documents, and the number of that batch's tokens
    in the shard before.
    """
    manifest = read_manifest(out_dir)
    found = [*out_dir.glob(f"{shard_name(out_dir)}_*.npy"), *out_dir.glob("tokenizer.json")]
    if found and not manifest:
        raise UserError(f"{found[0]} is not in a manifest.json; choose another --out_dir, or remove it")
    if not manifest.get("shards"):  # nothing to continue, whatever the constants were
        manifest = {}
    constants = dict(
        source=" ".join(config.source),
        subset=config.subset,
        split=config.split,
        revision=config.revision,
        text_field=config.text_field,
        tokenizer=tok.fingerprint,
        dtype=np.dtype(shard_dtype(len(tok))).name,
        shard_size=config.shard_size or manifest.get("shard_size", 0),  # a resumed run keeps it
        limit_tokens=config.limit_tokens,
    )
    if not manifest:
        return new_manifest(**constants) | dict(next=START | dict(skip=0))
    for key, value in constants.items():
        if manifest.get(key) != value:
            raise UserError(
                f"{out_dir} holds shards with {key} {manifest.get(key)}, not {value}; "
                "choose another --out_dir, or remove that one"
            )
    return manifest


def in_order(files: list[str], manifest: dict) -> list[str]:
    """Order a source's files: files in shards, the file under way, then all others, so that files may be added,
    fixed or removed."""
    begun = manifest.get("files", [])[: manifest["next"]["file"] + 1]
    if begun and begun[-1] not in files:
        manifest["next"] = dict(file=len(begun), row=0, skip=0)
    return begun + [file for file in files if file not in begun]


# ------------------------------------------------------------------------------------------------ the plan


def expected_tokens(texts: Texts, sizes: list[int], tok: Tokenizer) -> int:
    """Estimate the source's number of tokens, by file sizes and the tokens of its first documents."""
    sample = "".join(text[:SAMPLED] for text in texts.first)[:SAMPLED]
    tokens_per_byte = len(tok.encode_to_numpy(sample)) / max(len(sample.encode()), 1)
    return int(texts.text_bytes(sizes) * tokens_per_byte)


def print_plan(config: Config, texts: Texts, sizes: list[int], manifest: dict, tokens: int) -> None:
    """Print source, target and disk space. Raise UserError if the disk is too small."""
    size = partial(tqdm.format_sizeof, suffix="B")
    out_dir = Path(config.out_dir)
    subset = f" {config.subset}" if config.subset else ""
    print(f"source  {manifest['source']}{subset}, {config.split}: {counted(len(sizes), 'file')}, {size(sum(sizes))}")
    if len(config.source) > 1:
        print("note: sources follow one another, and the first shard validates; mix them to validate on all")
    print(
        f"target  {out_dir}: about {tqdm.format_sizeof(tokens)} tokens, "
        f"in shards of {config.shard_size:,} {manifest['dtype']}"
    )
    for_shards = max(tokens - manifest["tokens"], 0) * np.dtype(manifest["dtype"]).itemsize
    free = free_bytes(out_dir)
    print(f"disk    {size(for_shards)} for shards; {size(free)} are free")
    if manifest["shards"]:
        print(f"resume  after {len(manifest['shards'])} complete shards, {manifest['tokens']:,} tokens")
    if for_shards > free:
        raise UserError(
            f"{out_dir} needs about {size(for_shards)}, and its disk has {size(free)} free; "
            "free some, lower --limit_tokens, or choose an --out_dir on another disk"
        )


if __name__ == "__main__":
    script(main)
