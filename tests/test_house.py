"""The layout of the house: doors at the root, rooms in folders, and no import that runs back up."""

import ast
import importlib
import signal
import subprocess
import sys
from dataclasses import is_dataclass

import pytest

from tests.helpers import ROOT, environment, run_script

DOORS = {*"train_gpt2 fineweb hellaswag lora_finetune sample plot bench".split()}
FOLDERS = {*"bpe corpus learning finetuning machine pretraining run benchmarks".split()}
NEVER = {  # folder: what none of its files imports, besides the doors
    "bpe": "model learning finetuning pretraining machine run benchmarks torch",
    "corpus": "model learning finetuning pretraining machine run benchmarks torch",
    "learning": "model corpus bpe finetuning pretraining machine run benchmarks",
    "machine": "model corpus bpe learning finetuning pretraining run benchmarks",
    "run": "learning finetuning pretraining benchmarks",
    "finetuning": "pretraining benchmarks",
    "pretraining": "finetuning benchmarks",
}
KNOWS_NOTHING_OF = {  # a file: what its import does not bring
    "cli": "torch", "files": "torch", "run.records": "torch", "finetuning.chat": "torch", "finetuning.rows": "torch",
    "corpus.stream": "torch tqdm regex tiktoken tyro pyarrow bpe corpus.shards corpus.sources corpus.order",
    "corpus.order": "torch tqdm regex tiktoken tyro pyarrow bpe corpus.shards corpus.sources",
    "corpus.sources": "torch datasets huggingface_hub bpe corpus.stream corpus.shards",
    "corpus.shards": "torch datasets huggingface_hub corpus.order",
    "fineweb": "torch datasets huggingface_hub corpus.order", "plot": "torch matplotlib",
}  # fmt: skip


def imports(path) -> set[str]:
    """The dotted names that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def first_names(path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def brings(module: str) -> set[str]:
    """The modules that exist after an import in a fresh interpreter."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_at_the_root_are_doors_the_model_and_the_command_line():
    """Of what is in git: a reader's own script at the root is welcome."""
    git = ["git", "-C", str(ROOT), "ls-files", "*.py"]
    files = subprocess.run(git, capture_output=True, text=True).stdout.split()
    if not files:
        pytest.skip("this is no git checkout")
    assert {file.removesuffix(".py") for file in files if "/" not in file} == DOORS | {"model", "cli", "files"}


@pytest.mark.parametrize("folder", NEVER)
def test_no_folder_imports_one_that_imports_it(folder):
    for path in (ROOT / folder).glob("*.py"):
        doors_of_bpe = {"bpe/train.py", "bpe/try_tokenizer.py"}
        allowed = {"corpus", "cli"} if str(path.relative_to(ROOT)) in doors_of_bpe else set()
        assert not first_names(path) & (DOORS | {*NEVER[folder].split()} - allowed), path
    if folder == "bpe":
        rooms = [path for path in (ROOT / "bpe").glob("*.py") if path.stem not in ("train", "try_tokenizer")]
        assert not [path for path in rooms if first_names(path) & {"cli", "corpus"}]


@pytest.mark.parametrize("door", ["train_gpt2", "lora_finetune", "hellaswag", "sample", "bench"])
def test_ctrl_c_while_torch_is_imported_is_not_a_traceback(door, tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    result = run_script(f"{door}.py", env=environment(PYTHONPATH=str(tmp_path)))
    assert result.returncode == -signal.SIGINT and not result.stderr


@pytest.mark.parametrize("module", KNOWS_NOTHING_OF)
def test_a_file_brings_nothing_of_which_it_says_it_knows_nothing(module):
    """And what worker processes import is free of torch."""
    assert not set(KNOWS_NOTHING_OF[module].split()) & brings(module)


@pytest.mark.parametrize("module, most", [("model", 2), ("hellaswag", 13)])
def test_a_file_that_is_read_alone_brings_few_others(module, most):
    ours = {name for name in brings(module) if name.split(".")[0] in DOORS | FOLDERS | {"model", "cli", "files"}}
    ours -= FOLDERS | {module}
    assert len(ours) <= most, sorted(ours)


DATACLASSES = """
bpe.train bpe.training bpe.try_tokenizer cli finetuning.lora fineweb hellaswag lora_finetune machine.runtime model plot
pretraining.plan run.card run.checkpoint sample train_gpt2
""".split()


@pytest.mark.parametrize("module", DATACLASSES)
def test_what_is_settled_cannot_be_changed(module):
    kinds = [value for value in vars(importlib.import_module(module)).values() if is_dataclass(value)]
    own = [kind.__dataclass_params__.frozen for kind in kinds if kind.__module__ == module]
    assert own and all(own)
