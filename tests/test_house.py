"""The layout of the house: doors at the root, parts in one folder, and no import that runs back up."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

DOORS = {"train_gpt2", "fineweb", "hellaswag", "lora_finetune", "sample", "plot", "bench"}
PARTS = sorted(ROOT.glob("parts/*.py"))
ROOMS_OF_BPE = [path for path in sorted(ROOT.glob("bpe/*.py")) if path.stem not in ("train", "try_tokenizer")]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> set[str]:
    """The dotted names that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def modules_after(*names: str) -> set[str]:
    """The modules that exist after these were imported in a fresh interpreter."""
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_at_the_root_are_the_doors_the_model_and_all_of_it_on_one_page():
    """Of what is in git: a reader's own script at the root is welcome."""
    git = ["git", "-C", str(ROOT), "ls-files", "*.py"]
    files = subprocess.run(git, capture_output=True, text=True).stdout.split()
    if not files:
        pytest.skip("this is no git checkout")
    assert {file.removesuffix(".py") for file in files if "/" not in file} == DOORS | {"model", "minimal"}


APART = {  # the names that files do not import
    "a part, of doors": (DOORS | {"benchmarks", "walk", "tests"}, PARTS),
    "a door, of others": (DOORS - {"hellaswag"}, [ROOT / f"{door}.py" for door in DOORS - {"bench"}]),
    "the tokenizer, of the house": (DOORS | {"parts", "model", "torch"}, ROOMS_OF_BPE),
    "minimal.py, of the house": (DOORS | {"parts", "model", "bpe"}, [ROOT / "minimal.py"]),
}


@pytest.mark.parametrize("names, paths", APART.values(), ids=APART)
def test_no_import_runs_back_up(names, paths):
    assert [path for path in paths if {name.split(".")[0] for name in imports(path)} & names] == []


def test_no_imports_run_in_a_circle():
    files = {f"parts.{path.stem}": path for path in PARTS} | {"model": ROOT / "model.py"}
    files |= {f"bpe.{path.stem}": path for path in ROOMS_OF_BPE}
    remaining = {name: imports(path) & files.keys() for name, path in files.items()}
    remaining["model"].discard("parts.huggingface")  # which it asks for in functions
    while free := [name for name in remaining if not remaining[name] & remaining.keys()]:
        for name in free:
            del remaining[name]
    assert not remaining


def test_loop_is_in_the_script():
    """No part calls backward, except the trials of memory and time, which keep nothing of their steps."""
    calls = set()
    for path in PARTS:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr == "backward":
                calls.add(path.stem)
    assert calls <= {"trials"}


def test_the_model_brings_the_loss_and_nothing_else_of_ours():
    """At the top of its file; a function may ask for more."""
    top = tree(ROOT / "model.py").body + tree(ROOT / "parts/loss.py").body
    modules = {node.module for node in top if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name.partition(".")[0] in ("parts", "bpe")} == {"parts.loss"}


def test_a_worker_process_is_free_of_torch_and_of_the_hubs_libraries():
    found = modules_after("fineweb", "parts.texts", "parts.shards", "plot", "bpe.tokenizer")
    assert not {"torch", "datasets", "huggingface_hub", "transformers", "matplotlib"} & found
