"""Every door with values that nobody should give, and with files that are damaged.

Each case ends with exit code 0 and finite figures, or with code 2 and one line that names what was
given: one odd value of each type for each door, and one damage of each file.
"""

import importlib
import json
import shutil
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fineweb
import lora_finetune
import train_gpt2
from parts.files import sha256
from tests.helpers import SMALL, arguments, damaged, hellaswag_rows, quietly, text_file, write_json, write_lines

VALUES = {int: ["0", "-1", str(10**12), "x"], float: ["nan", "inf", "-1", ""], str: ["no such thing", "x" * 5000]}
TRAIN = SMALL | dict(max_steps=2, eval_interval=2, sample_interval=0, checkpoint_interval=2, warmup_steps=1)
LORA = dict(max_steps=2, epochs=1, batch_size=4, sequence_length=32, lora_dim=2, device="cpu", dtype="float32",
            micro_batch_size=4, sample_tokens=4, checkpoint_interval=0, val_rows=2, eval_interval=0)  # fmt: skip


# ---- a folder with one of each


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trained checkpoint, an adapter, shards, a tokenizer, and texts in every format."""
    folder = tmp_path_factory.mktemp("fuzz")
    text = text_file(folder / "text.txt").read_text()
    rows = [dict(text=piece) for piece in text.split("\n\n\n")]
    write_lines(folder / "text.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "text.parquet")
    hellaswag_rows(folder / "hellaswag.jsonl", 3)
    asked = [dict(instruction=f"Say {i}", input="", output=f"{i} is said") for i in range(30)]
    write_json(folder / "rows.json", asked)
    quietly(train_gpt2.main, "tiny", **TRAIN, data=folder / "text.txt", out_dir=folder / "run")
    quietly(lora_finetune.main, **LORA, base=folder / "run", data=folder / "rows.json", out_dir=folder / "lora")
    options = dict(tokenizer=folder / "run/step_000002/tokenizer.json", shard_size=4000, workers=1)
    quietly(fineweb.main, source=folder / "text.parquet", out_dir=folder / "shards", **options)
    shutil.copy(folder / "run/step_000002/tokenizer.json", folder / "tokenizer.json")
    shutil.copytree(folder / "run/step_000002", folder / "unsealed")
    (folder / "unsealed/SHA256SUMS").unlink()  # what a user has got from elsewhere has no checksums
    return folder


# ---- the doors, and what each of them reads


@dataclass
class Door:
    module: str
    words: Callable[[Path, Path], dict]  # (folder, empty folder to write to) -> flags of a quick, sound run
    recipe: tuple[str, ...] = ()
    first: tuple[str, ...] = ()  # positional words, as paths below the folder
    files: tuple[str, ...] = ()  # what it reads, as paths below the folder


MODEL = ("unsealed/config.json", "unsealed/model.safetensors")
SHARDS = ("shards/manifest.json", "shards/tokenizer.json", "shards/shards_train_000001.npy")
STEP = [f"run/step_000002/{name}" for name in (
    "train_state.pt", "config.json", "model.safetensors", "SHA256SUMS", "tokenizer.json")]  # fmt: skip


def training(**changes):
    return lambda f, out: TRAIN | dict(data=f / "text.txt", out_dir=out / "run") | {
        name: f / value if isinstance(value, Path) else value for name, value in changes.items()}  # fmt: skip


def sharding(source: str, **changes):
    changes |= dict(workers=1)
    return lambda f, out: dict(source=f / source, tokenizer=f / "tokenizer.json", out_dir=out / "s") | changes


def tokenizing(source: str):
    return lambda f, out: dict(input=f / source, vocab_size=300, out=out / "bpe", workers=1)


DOORS = {
    "train": Door("train_gpt2", training(hellaswag_data=Path("hellaswag.jsonl")), ("tiny",), files=("text.txt",)),
    "train on shards": Door("train_gpt2", training(data=Path("shards")), ("tiny",), files=SHARDS),
    "train on": Door(
        "train_gpt2", training(out_dir=Path("run"), max_steps=3, resume=True), ("tiny",),
        files=("run/log.jsonl", *STEP),
    ),
    "init": Door("train_gpt2", training(init_from=Path("unsealed")), ("tiny",), files=MODEL),
    "hellaswag": Door(
        "hellaswag", lambda f, out: dict(data=f / "hellaswag.jsonl", device="cpu", json=out / "scores.json"),
        first=("unsealed",), files=("hellaswag.jsonl", *MODEL, "unsealed/tokenizer.json"),
    ),
    "lora": Door(
        "lora_finetune", lambda f, out: LORA | dict(base=f / "unsealed", data=f / "rows.json", out_dir=out / "lora"),
        files=("rows.json", *MODEL),
    ),
    "lora from an adapter": Door(
        "lora_finetune",
        lambda f, out: LORA | dict(base=f / "run", data=f / "rows.json", out_dir=out / "lora",
                                   adapter=f / "lora/adapter"),
        files=("lora/adapter/adapter_config.json", "lora/adapter/adapter_model.safetensors"),
    ),
    "sample": Door(
        "sample", lambda f, out: dict(max_new_tokens=3, device="cpu"), first=("unsealed",),
        files=(*MODEL, "unsealed/tokenizer.json"),
    ),
    "plot": Door("plot", lambda f, out: dict(out=out / "a.png"), first=("run",), files=("run/log.jsonl",)),
    "fineweb": Door(
        "fineweb", sharding("text.parquet", shard_size=300, limit_tokens=500),
        files=("text.parquet", "tokenizer.json"),
    ),
    "fineweb from jsonl": Door("fineweb", sharding("text.jsonl"), files=("text.jsonl",)),
    "verify": Door("fineweb", lambda f, out: dict(out_dir=f / "shards", verify=True), files=SHARDS),
    "bpe/train": Door("bpe.train", tokenizing("text.txt"), files=("text.txt",)),
    "bpe/train from parquet": Door("bpe.train", tokenizing("text.parquet"), files=("text.parquet",)),
    "bench": Door("bench", lambda f, out: dict(size="tiny", new_tokens=2, repeats=1, device="cpu"), ("sample",)),
    "bpe/try": Door(
        "bpe.try_tokenizer",
        lambda f, out: dict(tokenizer=f / "tokenizer.json", compare=f / "tokenizer.json"),
        files=("tokenizer.json",),
    ),
}  # fmt: skip
# doors whose constants are tried; the others differ from them in files only
TRIED = ["train", "hellaswag", "lora", "sample", "plot", "fineweb", "bench", "bpe/train", "bpe/try"]
POSITIONAL = {"model": 0, "runs": 0, "prompt": 1}
WAYS = ["empty", "a directory", "cut in half", "a number", "utf-16", "a picture", "null"]
ODD_JSON = {"null": None, "a number": -1}


# ---- one case


@pytest.fixture
def ends_well(tmp_path, inline, monkeypatch):
    """Run a door, and assert that it ends well; an error has to name one of the words `given`."""

    def run(door: Door, argv: list[str], given: list[str], out: Path) -> None:
        out.mkdir()
        monkeypatch.setattr(sys, "stdin", open("/dev/null"))
        monkeypatch.chdir(out)
        result = inline(importlib.import_module(door.module).main, *argv)
        assert result.returncode in (0, 2), result.stderr[-1000:]
        assert "Traceback" not in result.stderr
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == (result.returncode == 2)
        for line in lines:
            assert any(word[:40] in line for word in given), line
        assert not [log for log in out.rglob("log.jsonl") if "NaN" in log.read_text()]

    return run


def words_of(door: Door, folder: Path, out: Path) -> tuple[list[str], dict]:
    return [*door.recipe, *(str(folder / word) for word in door.first)], door.words(folder, out)


def spoil(path: Path, how: str) -> None:
    """Damage a file in one of the ways of `damaged`, make it a directory, or replace a value of its JSON."""
    content = path.read_bytes()
    if how == "a directory":
        path.unlink()
        path.mkdir()
    elif how in ODD_JSON and path.suffix == ".json":
        whole = json.loads(content)
        record = whole[0] if isinstance(whole, list) else whole
        record[next(iter(record))] = ODD_JSON[how]
        path.write_text(json.dumps(whole))
    else:
        path.write_bytes(damaged(content).get(how, b"x"))
    sums = path.parent / "SHA256SUMS"
    if path.is_file() and sums.exists() and sums != path:  # or no more than the checksum of the file is looked at
        lines = [line for line in sums.read_text().splitlines() if not line.endswith(f"  {path.name}")]
        sums.write_text("\n".join([*lines, f"{sha256(path)}  {path.name}"]) + "\n")


# ---- the cases


def constant_cases() -> list[tuple]:
    """(door, constant, value): the first constant of each type, with one of the odd values."""
    cases = []
    for i, name in enumerate(TRIED):
        door = DOORS[name]
        module = f"benchmarks.{door.recipe[0]}" if door.module == "bench" else door.module  # each has its own
        config = importlib.import_module(module).Config
        hints = typing.get_type_hints(config)
        first = {hints[field.name]: field.name for field in reversed(fields(config))}
        cases += [(name, first[kind], values[i % len(values)]) for kind, values in VALUES.items() if kind in first]
    return cases


@pytest.mark.parametrize("name, field, value", constant_cases())
def test_constants_with_odd_values(name, field, value, folder, tmp_path, ends_well):
    door = DOORS[name]
    out = tmp_path / "out"
    first, words = words_of(door, folder, out)
    if field in POSITIONAL:
        dashes = ["--"] if value.startswith("-") else []
        argv = [*arguments(**words), *first[: POSITIONAL[field]], *dashes, value]
    else:
        argv = [*first, *arguments(**{k: v for k, v in words.items() if k != field}), f"--{field}={value}"]
    ends_well(door, argv, [field, field.replace("_", "-"), field.upper(), value or "empty"], out)


def file_cases() -> list[tuple]:
    """(door, file, damage)"""
    files = [(name, file) for name, door in DOORS.items() for file in door.files]
    return [(name, file, WAYS[i % len(WAYS)]) for i, (name, file) in enumerate(files)]


@pytest.mark.parametrize("name, file, how", file_cases())
def test_files_that_are_damaged_or_hold_odd_values(name, file, how, folder, tmp_path, ends_well):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = copy / file
    spoil(path, how)
    out = tmp_path / "out"
    first, words = words_of(DOORS[name], copy, out)
    # a cache is named after its text, and an error about all checkpoints names the run
    given = [path.name, path.parent.name, f"{path.stem}-", str(path.parent.parent)]
    ends_well(DOORS[name], [*first, *arguments(**words)], given, out)
