"""Every door with values that nobody should give.

Each case ends with exit code 0 and finite figures, or with code 2 and one line that names what was
given: one odd value of each type for each door.
"""

import importlib
import shutil
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import train_gpt2
from tests.helpers import SMALL, arguments, hellaswag_rows, quietly, text_file, write_json

VALUES = {int: ["0", "-1", str(10**12), "x"], float: ["nan", "inf", "-1", ""], str: ["no such thing", "x" * 5000]}
TRAIN = SMALL | dict(max_steps=2, eval_interval=2, sample_interval=0, checkpoint_interval=2, warmup_steps=1)
LORA = dict(max_steps=2, epochs=1, batch_size=4, sequence_length=32, lora_dim=2, device="cpu", dtype="float32",
            micro_batch_size=4, sample_tokens=4, checkpoint_interval=0, val_rows=2, eval_interval=0)  # fmt: skip


# ---- a folder with one of each


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, its tokenizer, and a text and rows to work on."""
    folder = tmp_path_factory.mktemp("fuzz")
    text_file(folder / "text.txt")
    hellaswag_rows(folder / "hellaswag.jsonl", 3)
    asked = [dict(instruction=f"Say {i}", input="", output=f"{i} is said") for i in range(30)]
    write_json(folder / "rows.json", asked)
    quietly(train_gpt2.main, "tiny", **TRAIN, data=folder / "text.txt", out_dir=folder / "run")
    shutil.copytree(folder / "run/step_000002", folder / "model")
    shutil.copy(folder / "model/tokenizer.json", folder)
    return folder


# {door: (module, positional words, folder and empty folder -> flags of a quick, sound run)}
DOORS = {
    "train": ("train_gpt2", ["tiny"], lambda f, out: TRAIN | dict(data=f / "text.txt", out_dir=out / "run")),
    "hellaswag": ("hellaswag", ["model"], lambda f, out: dict(data=f / "hellaswag.jsonl", device="cpu")),
    "lora": (
        "lora_finetune", [], lambda f, out: LORA | dict(base=f / "model", data=f / "rows.json", out_dir=out / "lora")
    ),
    "sample": ("sample", ["model"], lambda f, out: dict(max_new_tokens=3, device="cpu")),
    "plot": ("plot", ["run"], lambda f, out: dict(out=out / "a.png")),
    "fineweb": (
        "fineweb", [],
        lambda f, out: dict(source=f / "text.txt", tokenizer=f / "tokenizer.json", out_dir=out / "s", workers=1,
                            shard_size=300, limit_tokens=500),
    ),
    "bench": ("bench", ["sample"], lambda f, out: dict(size="tiny", new_tokens=2, repeats=1, device="cpu")),
    "bpe/train": ("bpe.train", [], lambda f, out: dict(input=f / "text.txt", vocab_size=300, out=out / "bpe")),
    "bpe/try": (
        "bpe.try_tokenizer", [], lambda f, out: dict(tokenizer=f / "tokenizer.json", compare=f / "tokenizer.json")
    ),
}  # fmt: skip
POSITIONAL = {"model": 0, "runs": 0, "prompt": 1}


@pytest.fixture
def ends_well(tmp_path, inline, monkeypatch):
    """Run a door, and assert that it ends well; an error has to name one of the words `given`."""

    def run(module: str, argv: list[str], given: list[str], out: Path) -> None:
        monkeypatch.setattr(sys, "stdin", open("/dev/null"))
        monkeypatch.chdir(out)
        result = inline(importlib.import_module(module).main, *argv)
        assert result.returncode in (0, 2), result.stderr[-1000:]
        assert "Traceback" not in result.stderr
        lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == (result.returncode == 2)
        for line in lines:
            assert any(word[:40] in line for word in given), line
        assert not [log for log in out.rglob("log.jsonl") if "NaN" in log.read_text()]

    return run


def constant_cases() -> list[tuple]:
    """(door, constant, value): the first constant of each type, with one of the odd values."""
    cases = []
    for i, (name, (module, words, _)) in enumerate(DOORS.items()):
        module = f"benchmarks.{words[0]}" if module == "bench" else module  # each has its own
        config = importlib.import_module(module).Config
        hints = typing.get_type_hints(config)
        first = {hints[field.name]: field.name for field in reversed(fields(config))}
        cases += [(name, first[kind], values[i % len(values)]) for kind, values in VALUES.items() if kind in first]
    return cases


@pytest.mark.parametrize("name, field, value", constant_cases())
def test_constants_with_odd_values(name, field, value, folder, tmp_path, ends_well):
    module, first, flags = DOORS[name]
    first = [folder / word if (folder / word).exists() else word for word in first]
    words = flags(folder, tmp_path)
    if field in POSITIONAL:
        argv = [*arguments(**words), *first[: POSITIONAL[field]], "--", value]
    else:
        argv = [*first, *arguments(**{k: v for k, v in words.items() if k != field}), f"--{field}={value}"]
    ends_well(module, argv, [field, field.replace("_", "-"), field.upper(), value or "empty"], tmp_path)
