"""The layout of the house: doors at the root, parts in one folder, and no import that runs back up."""

import ast
import importlib.util
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

from tests.forks import fork_script
from tests.helpers import ROOT

DOORS = {"train_gpt2", "fineweb", "hellaswag", "lora_finetune", "sample", "plot", "bench"}
PARTS = sorted(ROOT.glob("parts/*.py"))
BENCHMARKS = sorted(ROOT.glob("benchmarks/*.py"))
ROOMS_OF_BPE = [path for path in sorted(ROOT.glob("bpe/*.py")) if path.stem not in ("train", "try_tokenizer")]


PRODUCT = [*(ROOT / f"{door}.py" for door in sorted(DOORS)), ROOT / "model.py", *PARTS, *sorted(ROOT.glob("bpe/*.py"))]


def name_of(path: Path) -> str:
    """As it is imported: `model`, `parts.data`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    """{its name, with that of its class: a function of the file}"""
    found = {}
    for node in tree(path).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + member.name: member for member in members if isinstance(member, ast.FunctionDef)}
    return found


def imports(path: Path) -> set[str]:
    """The dotted names that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def first_names(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


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


def test_the_parts_lie_flat_in_one_folder():
    """A reader looks for a part by its name alone."""
    assert not [path for path in ROOT.glob("parts/*/**/*.py")]


def test_docs_holds_pages_and_their_pictures():
    """And the page that a server of ours shows."""
    others = {path.name for path in (ROOT / "docs").iterdir() if path.suffix not in (".md", ".png", ".svg")}
    assert others <= {"chat.html"}


def test_a_file_opens_with_what_it_holds():
    assert [name_of(path) for path in (*PRODUCT, *BENCHMARKS) if not ast.get_docstring(tree(path))] == []


def imported(names: set[str], paths) -> list[tuple[str, set[str]]]:
    """The files that import one of the names, with those."""
    return [(name_of(path), found) for path in paths if (found := first_names(path) & names)]


def test_a_part_imports_no_door():
    assert imported(DOORS | {"benchmarks", "walk", "tests"}, PARTS) == []


def test_the_tokenizer_needs_nothing_else_of_the_house():
    assert imported(DOORS | {"parts", "model", "torch"}, ROOMS_OF_BPE) == []


def test_a_door_imports_no_other_but_hellaswag():
    assert imported(DOORS - {"hellaswag"}, [ROOT / f"{door}.py" for door in DOORS - {"bench"}]) == []


def test_no_imports_run_in_a_circle():
    files = {f"parts.{path.stem}": path for path in PARTS} | {"model": ROOT / "model.py"}
    files |= {f"bpe.{path.stem}": path for path in ROOMS_OF_BPE}
    remaining = {name: imports(path) & files.keys() for name, path in files.items()}
    while free := [name for name in remaining if not remaining[name] & remaining.keys()]:
        for name in free:
            del remaining[name]
    assert not remaining


# they measure, and keep nothing of their steps
TRIALS = {
    "parts.trials": {"timed_passes"},
}


def test_the_loop_is_in_the_door():
    """No part calls backward, but for trials of memory."""
    for path in PARTS:
        for name, function in functions(path).items():
            calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
            if any(isinstance(called, ast.Attribute) and called.attr == "backward" for called in calls):
                assert name in TRIALS.get(name_of(path), set()), path


LINES_OF_A_SCREEN = 60
LIKE_TORCH = {"Muon.__init__", "_kernel"}  # take what optimizers of torch take, and what a kernel knows of its tensors


def test_a_function_fits_on_one_screen_with_at_most_six_parameters():
    for path in (*PRODUCT, *BENCHMARKS):
        for name, function in functions(path).items():
            parameters = [argument.arg for argument in function.args.args + function.args.kwonlyargs]
            count = len([parameter for parameter in parameters if parameter not in ("self", "cls", "ctx")])
            assert count <= 6 or name in LIKE_TORCH, (path, name)
            assert function.end_lineno - function.lineno < LINES_OF_A_SCREEN, (path, name)


WORKERS = {"parts.cli", "parts.files", "parts.data", "parts.shards", "parts.sources", "parts.texts", "fineweb"}


def says_it_knows_no_torch(path: Path) -> bool:
    docstring = " ".join((ast.get_docstring(tree(path)) or "").split())
    return bool(re.search(r"(knows nothing of|imports no)[^.:]*\btorch\b", docstring))


FREE_OF_TORCH = sorted(WORKERS | {name_of(path) for path in PRODUCT if says_it_knows_no_torch(path)})


def test_what_a_worker_process_imports_is_free_of_torch_and_so_is_what_says_so():
    assert "torch" not in modules_after(*FREE_OF_TORCH)


def test_a_worker_process_imports_no_library_of_the_hub_and_plot_draws_no_sooner_than_it_has_to():
    found = modules_after("fineweb", "parts.texts", "parts.shards", "plot")
    assert not {"datasets", "huggingface_hub", "transformers", "matplotlib"} & found


def test_the_order_of_the_data_needs_no_tokenizer():
    needed = {name.split(".")[0] for name in modules_after("parts.data")}
    assert not needed & {"bpe", "tiktoken", "regex", "pyarrow"}


def test_the_model_brings_at_most_two_files_of_ours(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.append({str(ROOT)!r})\nimport model\nprint(*sys.modules)\n")
    done = fork_script(script)  # torch is there already
    assert done.returncode == 0, done.stderr
    ours = {name for name in done.stdout.split() if name.startswith(("parts.", "bpe."))}
    assert len(ours) <= 2, sorted(ours)


def test_what_is_settled_cannot_be_changed():
    for module in [*DOORS, "model", *(f"parts.{path.stem}" for path in PARTS)]:
        if module == "parts.loss_kernel" and not importlib.util.find_spec("triton"):
            continue
        values = vars(importlib.import_module(module)).values()
        own = [value for value in values if is_dataclass(value) and value.__module__ == module]
        assert [kind for kind in own if not kind.__dataclass_params__.frozen] == []
