"""Every constant of every door, and every file that a door reads, with values that nobody should give.

Each case ends within its time: with exit code 0 and finite figures, or with code 2 and one line that names what was
given. A fixed sample runs with the suite, all of them with `-m slow`.
"""

import contextlib
import importlib
import json
import random
import shutil
import signal
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fineweb
import lora_finetune
import train_gpt2
from parts.files import sha256
from tests.helpers import (
    SMALL,
    arguments,
    assert_user_error,
    damaged,
    hellaswag_rows,
    quietly,
    text_file,
    write_json,
    write_lines,
)

SECONDS = 120  # for one case, on a busy machine
VALUES = ["0", "-1", "1", str(10**12), "nan", "inf", "", "no such thing", "x" * 5000]
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
CONSTANTS = {name: DOORS[name] for name in TRIED}


def constants(door: Door) -> list[str]:
    """The constants of a door that take a value; switches do not."""
    module = f"benchmarks.{door.recipe[0]}" if door.module == "bench" else door.module  # each benchmark has its own
    config = importlib.import_module(module).Config
    hints = typing.get_type_hints(config)
    return [field.name for field in fields(config) if hints[field.name] is not bool]


def malformed(content: bytes, key: str, value: str) -> bytes:
    """JSON, or its first line, with another value under a key of the outermost object, or without the key."""
    first, newline, rest = content.partition(b"\n") if content.startswith(b'{"') else (content, b"", b"")
    record = json.loads(first)
    row = record[0] if isinstance(record, list) else record
    if value == "absent":
        row.pop(key, None)
    else:
        row[key] = json.loads(value)
    return json.dumps(record).encode() + newline + rest


ODD_JSON = ["absent", "null", "-1", "1e300", '"x"', "[]", "{}", "[[null]]", "true", "99999999999999999999"]
JSON_KEYS = {  # what is read of each file, besides what only transformers or people read
    "config.json": [
        "model_type", "n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "activation_function",
        "layer_norm_epsilon", "tie_word_embeddings", "dtype", "eos_token_id", "architectures",
    ],
    "log.jsonl": ["step", "kind", "loss", "parameters", "config"],
    "tokenizer.json": [
        "version", "model", "added_tokens", "pre_tokenizer", "decoder", "post_processor", "normalizer", "truncation",
    ],
    "adapter_config.json": [
        "peft_type", "r", "lora_alpha", "target_modules", "bias", "use_rslora", "rank_pattern", "alpha_pattern",
        "modules_to_save", "fan_in_fan_out", "base_model_name_or_path", "init_lora_weights",
    ],
    "rows.json": ["instruction", "input", "output", "messages"],
    "hellaswag.jsonl": ["ctx", "ctx_a", "ctx_b", "activity_label", "endings", "label"],
    "text.jsonl": ["text"],
}  # fmt: skip
WAYS = [*damaged(b"ab"), "a directory"]
FILES = [(name, file) for name, door in DOORS.items() for file in door.files]
FILE_CASES = [(*file, how) for file in FILES for how in WAYS]
JSON_CASES = [
    (*file, f"{key} {value}")
    for file in FILES for key in JSON_KEYS.get(Path(file[1]).name, []) for value in ODD_JSON
]  # fmt: skip


# ---- one case


@contextlib.contextmanager
def within(seconds: int):
    def late(signum, frame):
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def words_of(door: Door, folder: Path, out: Path) -> tuple[list[str], dict]:
    return [*door.recipe, *(str(folder / word) for word in door.first)], door.words(folder, out)


def ends_well(door: Door, argv: list[str], given: list[str], out: Path, inline, monkeypatch) -> str:
    """Run it; returns what is wrong with how it ended, "" if nothing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "stdin", open("/dev/null"))
    monkeypatch.chdir(out)
    try:
        with within(SECONDS):
            result = inline(importlib.import_module(door.module).main, *argv)
    except BaseException as e:
        return f"{type(e).__name__}: {e}"[:300]
    if result.returncode == 0:
        return "".join(not_finite(log) for log in out.rglob("log.jsonl"))
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    if result.returncode != 2 or len(lines) != 1 or "Traceback" in result.stderr:
        return f"exit code {result.returncode}, {lines}"
    if not any(word[:40] in lines[0] for word in given):
        return f"nothing of {[word[:40] for word in given]} in: {lines[0][:300]}"
    return ""


def not_finite(log: Path) -> str:
    def refuse(constant):
        raise ValueError(constant)

    for line in log.read_text().splitlines():
        record = json.loads(line, parse_constant=refuse)
        if record["kind"] in ("train", "val") and record["loss"] is None and not record.get("skipped"):
            return f"the loss of step {record['step']} is not finite"
    return ""


def constant_problems(name: str, field: str, folder: Path, tmp_path: Path, inline, monkeypatch) -> list[str]:
    door = DOORS[name]
    problems = []
    positional = {"model": 0, "runs": 0, "prompt": 1}
    values = [value for value in VALUES if (name, field, value) != ("bench", "size", "")]  # 124M: half a minute
    for i, value in enumerate(values):
        out = tmp_path / str(i)
        out.mkdir()
        first, words = words_of(door, folder, out)
        if field in positional:
            dashes = ["--"] if value.startswith("-") else []
            argv = [*arguments(**words), *first[: positional[field]], *dashes, value]
        else:
            argv = [*first, *arguments(**{k: v for k, v in words.items() if k != field}), f"--{field}={value}"]
        given = [field, field.replace("_", "-"), value or "empty"]
        if problem := ends_well(door, argv, given, out, inline, monkeypatch):
            problems.append(f"{name}: --{field} {value[:30]!r}: {problem}")
    return problems


def spoil(path: Path, how: str) -> None:
    """Damage a file in one of the ways of `damaged`, make it a directory, or, given "key value", put a value that does
    not belong there into its JSON."""
    if how == "a directory":
        path.unlink()
        path.mkdir()
    elif how in WAYS:
        path.write_bytes(damaged(path.read_bytes())[how])
    else:
        path.write_bytes(malformed(path.read_bytes(), *how.split(" ")))
        write_sum_again(path)


def write_sum_again(path: Path) -> None:
    """Or no more than the checksum of the file is looked at."""
    sums = path.parent / "SHA256SUMS"
    if sums.exists():
        lines = sums.read_text().splitlines()
        lines = [f"{sha256(path)}  {path.name}" if line.endswith(f"  {path.name}") else line for line in lines]
        sums.write_text("\n".join(lines) + "\n")


# ---- the cases


def some(cases: list[tuple], n: int, seed: int) -> list:
    """The cases as parameters: a fixed sample of n of them runs with the suite, the others are slow."""
    quick = random.Random(seed).sample(cases, n)
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


ALL_CONSTANTS = [(name, field) for name, door in CONSTANTS.items() for field in constants(door)]


@pytest.mark.parametrize("name, field", some(ALL_CONSTANTS, 6, seed=1))
def test_constants_with_odd_values(name, field, folder, tmp_path, inline, monkeypatch):
    assert not constant_problems(name, field, folder, tmp_path, inline, monkeypatch)


@pytest.mark.parametrize("name, file, how", some(FILE_CASES, 16, seed=1) + some(JSON_CASES, 8, seed=2))
@pytest.mark.usefixtures("learning_curve")  # of a damaged log, too
def test_files_that_are_damaged_or_hold_odd_values(name, file, how, folder, tmp_path, inline, monkeypatch):
    copy = tmp_path / "copy"
    out = tmp_path / "out"
    shutil.copytree(folder, copy)
    out.mkdir()
    path = copy / file
    spoil(path, how)
    first, words = words_of(DOORS[name], copy, out)
    # a cache is named after its text
    given = [path.name, path.parent.name, f"{path.stem}-", "every checkpoint in"]
    assert not ends_well(DOORS[name], [*first, *arguments(**words)], given, out, inline, monkeypatch)


# ---- a file that unpickles safely may still hold anything


def first_moments(state: dict) -> dict:
    return state["optimizer"]["optimizers"][0]["state"][0]


def change_state(change: Callable) -> Callable:
    """Apply `change` to the state that is in a file."""

    def harm(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)

    return harm


FORGED = {
    "a moment of one number": change_state(lambda state: first_moments(state).update(exp_avg=torch.zeros(1))),
}


@pytest.mark.parametrize("harm", FORGED.values(), ids=FORGED)
def test_a_forged_state_with_a_sum_of_its_own_is_refused_in_one_line(harm, folder, tmp_path, inline):
    shutil.copytree(folder / "run", tmp_path / "run")
    path = tmp_path / "run/step_000002/train_state.pt"
    harm(path)
    write_sum_again(path)
    door = DOORS["train on"]
    words = door.words(tmp_path, tmp_path) | dict(data=folder / "text.txt", max_steps=4, hellaswag_interval=0)
    assert_user_error(inline(train_gpt2.main, *door.recipe, **words), "train_state.pt")
