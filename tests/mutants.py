"""Do the tests notice when the code is wrong? Small mistakes at random places of the product, and the share they find.

    python tests/mutants.py                        # 300 mistakes of seed 0: survivors, and the score
    python tests/mutants.py --seed 1 --minutes 10  # ten minutes' worth; the same command continues

First every test file runs once under coverage, in subprocesses too: which tests run which line, and how long they take.
out/mutants/ keeps that, and a test file that changes is run again. Then each mistake is made in a copy of the tree, and
the tests that run its line are run on it, quick special ones first, until one fails, hangs, or `seconds` have passed.
A line is known by its function and its text, so that the same seed draws the same mistakes after other lines change.
Left out are slow tests, comments, annotations, prose (texts with a blank between two words) and the texts of f-strings.
The score is raw: of what survives, some cannot be told apart by anybody. On a busy machine a test may run into its time
limit without a fault: the last line counts what was found by the clock.

mutmut and cosmic-ray do not fit: mutmut switches mutants by a trampoline in the imported module and maps tests to
functions within its own process, where half of these tests start scripts; cosmic-ray runs one command for all mutants.
"""

import ast
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from itertools import count
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import coverage
import pytest
import torch  # noqa: F401  the tests run in forks, which find these imported
import transformers  # noqa: F401
import tyro

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "mutants"
ROOMS = {"bpe", "corpus", "finetuning", "learning", "machine", "pretraining", "run"}
OTHER = """
Lt: < to <=
LtE: <= to <
Gt: > to >=
GtE: >= to >
Eq: == to !=
NotEq: != to ==
Is: is to is not
IsNot: is not to is
In: in to not in
NotIn: not in to in
And: and to or
Or: or to and
"""
MTIME = count(1_000_000_000)  # a new one for each write: Python compares whole seconds and the size with its bytecode's


class Mutant(NamedTuple):
    file: str
    line: int
    kind: str
    start: int  # bytes of the file
    end: int
    before: str
    after: str
    place: str  # file, name of the line, kind, texts, and which of several it is
    lines: list[str]  # names of the lines of its statement
    binds: str  # what a statement outside of functions gives a value to; "" inside


def names_of_lines(source: str) -> list[str]:
    """`Class.function()|text` of every line; the first is of no line."""
    scopes = [""] * (source.count("\n") + 2)

    def visit(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{scope}.{child.name}" + ("" if isinstance(child, ast.ClassDef) else "()")
                n = child.end_lineno - child.body[0].lineno + 1
                scopes[child.body[0].lineno : child.end_lineno + 1] = [inner] * n
            visit(child, inner)

    visit(ast.parse(source), "")
    return [""] + [f"{scope}|{text.strip()}" for scope, text in zip(scopes[1:], source.split("\n"), strict=True)]


def nodes_of(node: ast.AST, statement: ast.stmt):
    """(node, its statement) of all that may change."""
    yield node, statement
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "format_spec") and not docstring:
                yield from nodes_of(child, child if isinstance(child, ast.stmt) else statement)


def edits(node: ast.AST, text):
    """(kind, first node, last node, what stands there then) of the mistakes in one node."""
    match node:
        case ast.Compare(left=a, ops=[op, *_], comparators=[b, *_]) | ast.BoolOp(op=op, values=[a, b, *_]):
            kind = "comparison" if isinstance(node, ast.Compare) else "and/or"
            old, new = re.search(rf"^{type(op).__name__}: (.+) to (.+)$", OTHER, re.M).groups()
            yield kind, a, b, text(a) + text(a, b).replace(old, new, 1) + text(b)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node, node, text(node).removeprefix("not").strip()
        case ast.Expr(value=ast.Call()):
            yield "call", node, node, "pass"
        case ast.Call(func=function, args=[a, b, *_]) if text(function) not in ("min", "max") and text(a) != text(b):
            if not isinstance(a, ast.Starred):
                yield "arguments", a, b, text(b) + text(a, b) + text(a)
        case ast.Constant(value=bool(value)):
            yield "bool", node, node, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            for new in {0: [1], 1: [0]}.get(value, {value + 1, value - 1} - {value}):
                yield "number", node, node, repr(new)
        case ast.Constant(value=str(value)) if not re.search(r"\w\w\S* \S*\w\w", value):
            yield "string", node, node, repr(value + "x")
    if isinstance(node, ast.If | ast.IfExp):
        yield "branch", node.test, node.test, "False"
        if node.orelse:
            yield "branch", node.test, node.test, "True"


def mutants_of(file: str) -> list[Mutant]:
    data = (ROOT / file).read_bytes()
    names = names_of_lines(data.decode())
    starts = [0, 0]
    for line in data.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def begin(node):
        return starts[node.lineno] + node.col_offset

    def end(node):
        return starts[node.end_lineno] + node.end_col_offset

    def text(node, until=None):
        """Of a node, or between it and another."""
        return data[end(node) : begin(until)].decode() if until else data[begin(node) : end(node)].decode()

    def is_where_it_says(node) -> bool:
        """Python 3.11 misplaces some parts of f-strings."""
        try:
            return isinstance(node, ast.stmt) or ast.dump(ast.parse(f"({text(node)})").body[0].value) == ast.dump(node)
        except (SyntaxError, UnicodeDecodeError):
            return False

    found, seen = [], Counter()
    for node, statement in nodes_of(ast.parse(data), None):
        for kind, first, last, after in edits(node, text):
            if not all(map(is_where_it_says, (node, first, last))):
                continue
            header = statement.body[0].lineno if hasattr(statement, "body") else statement.end_lineno + 1
            lines = names[statement.lineno : max(header, statement.lineno + 1)]
            target = getattr(statement, "target", None) or getattr(statement, "targets", [None])[0]
            binds = "" if "()|" in lines[0] else getattr(target, "id", "") or getattr(statement, "name", "")
            before = data[begin(first) : end(last)].decode()
            place = f"{file}|{names[first.lineno]}|{kind}|{before}|{after}"
            seen[place] += 1
            position = file, first.lineno, kind, begin(first), end(last)
            found.append(Mutant(*position, before, after, f"{place}|{seen[place]}", lines, binds))
    return found


class Watch:
    """A plugin: picks and orders the tests, tells coverage which one runs, ends one that hangs, and notes the time."""

    def __init__(self, folder: Path, limits: dict | None, cov: coverage.Coverage | None):
        self.folder, self.limits, self.cov, self.results = folder, limits, cov, {}

    def pytest_collection_modifyitems(self, items):
        if self.limits:
            order = list(self.limits)
            items[:] = [item for item in items if item.nodeid in self.limits]
            items.sort(key=lambda item: order.index(item.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        (self.folder / "current").write_text(item.nodeid)
        fixtures = item._fixtureinfo.name2fixturedefs
        self.results[item.nodeid] = [0.0, True, [name for name in fixtures if fixtures[name][-1].scope == "module"]]
        start = time.monotonic()
        if self.limits:
            signal.setitimer(signal.ITIMER_REAL, self.limits[item.nodeid])
        if self.cov:
            self.cov.switch_context(item.nodeid)
        done = yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.results[item.nodeid][0] = round(time.monotonic() - start, 2)
        (self.folder / "results.json").write_text(json.dumps(self.results))
        return done

    def pytest_runtest_logreport(self, report):
        self.results[report.nodeid][1] &= not report.failed and not (report.skipped and report.when == "setup")


def run_pytest(folder: Path, files, limits: dict | None = None, settings: Path | None = None) -> int:
    """The exit status of pytest in a fork of this process, in the tree in `folder`; whatever it started is ended."""
    pid = os.fork()
    if not pid:
        os.setsid()
        os.chdir(folder / "tree")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
        sys.path[0] = os.getcwd()
        del sys.modules["__main__"].__file__  # which multiprocessing would import again in each spawned process
        cov = None
        if settings:
            os.environ["COVERAGE_PROCESS_START"] = str(settings)
            cov = coverage.Coverage(config_file=settings)
            cov.start()
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}"] + ["-x"] * (not cov)
        code = pytest.main([*options, *files], plugins=[Watch(folder, limits, cov)])
        if cov:
            cov.stop()
            cov.save()
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    subprocess.run(["pkill", "-KILL", "-s", str(pid)])  # the session that it led
    return status


def tracked() -> list[str]:
    files = subprocess.check_output(["git", "-C", ROOT, "ls-files"], text=True).splitlines()
    return [file for file in files if (ROOT / file).exists()]


def copy_of_tree(folder: str) -> Path:
    for file in tracked():
        path = Path(folder) / "tree" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, path)
    return Path(folder)


def map_lines(folder: Path, test_file: str, product: list[str]) -> dict:
    """{"tests": {test: [seconds, passed, fixtures]}, "lines": {file: {name of a line: [tests]}}} of one test file."""
    shutil.rmtree(folder / "data", ignore_errors=True)
    (folder / "data").mkdir()
    settings = folder / "settings"
    settings.write_text(
        f"[run]\ndata_file = {folder}/data/coverage\nsource = {folder}/tree\nparallel = true\nsigterm = true\n"
        "patch = _exit, fork\ncontext = ${PYTEST_CURRENT_TEST-}\n"
    )
    results = folder / "results.json"
    results.write_text("{}")
    run_pytest(folder, [test_file], settings=settings)
    tests = json.loads(results.read_text())
    cov = coverage.Coverage(config_file=settings)
    cov.combine()
    lines = {}
    for file in product:
        names = names_of_lines((ROOT / file).read_text())
        found = defaultdict(set)
        for line, contexts in cov.get_data().contexts_by_lineno(str(folder / "tree" / file)).items():
            found[names[line]] |= {context.rsplit(" (", 1)[0] for context in contexts} & tests.keys()
        lines[file] = {name: sorted(by) for name, by in found.items() if by}
    return dict(tests=tests, lines=lines)


class Tests:
    """What is known of the tests: seconds of each that passes, and for each line of the product those that run it."""

    def __init__(self, product: list[str], end: float):
        """Reads the map, and runs the test files that have changed since, until `end`."""
        self.seconds: dict[str, float] = {}
        self.limits: dict[str, float] = {}  # in seconds; what tests of a file share is in the time of any of them
        self.lines = {file: defaultdict(list) for file in product}
        self.n_lines = Counter()  # that a test runs: few for one that is about something special
        path = OUT / "lines.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        with tempfile.TemporaryDirectory(prefix="mutants_") as temporary:
            folder = copy_of_tree(temporary)
            for file in tracked():
                if not re.fullmatch(r"tests/test_\w+\.py", file):
                    continue
                digest = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
                if known.get(file, {}).get("digest") != digest:
                    if time.time() > end:
                        sys.exit("the time is over; the same command continues")
                    known[file] = map_lines(folder, file, product) | dict(digest=digest)
                    path.write_text(json.dumps(known))
                took = {}
                first = {}
                for test, (seconds, passed, shared) in known[file]["tests"].items():
                    for fixture in shared:  # the first test to use one pays for it; alone, each would
                        seconds = max(seconds, first.setdefault(fixture, seconds))
                    if passed:
                        took[test] = seconds
                self.seconds |= took
                self.limits |= dict.fromkeys(took, 60 + 5 * max(took.values(), default=0))
                for of_product in product:
                    for line, by in known[file]["lines"].get(of_product, {}).items():
                        self.lines[of_product][line] += by
                        if "()|" in line:  # what an import runs says nothing about a test
                            self.n_lines.update(by)

    def of(self, mutant: Mutant, seconds: float) -> dict[str, float]:
        """{test: limit} of those that run the statement, quick special ones of each file first, `seconds` of them.
        Outside of functions, those that run lines where its name occurs, and those that run none: they look at
        constants."""
        named = self.lines[mutant.file]
        users = [named.get(name, ()) for name in mutant.lines]
        if mutant.binds:
            word = re.compile(rf"\b{mutant.binds}\b")
            every_line = [line for found in self.lines.values() for line in found.items()]
            users = [by for name, by in every_line if "()|" in name and word.search(name)]
        if not any(users):  # a line that has changed since, or a name for statements like it: its function, the file
            scope = mutant.lines[0].split("|")[0]
            users = [by for name, by in named.items() if not scope or name.startswith(scope + "|")]
        if "()|" not in mutant.lines[0]:
            users.append(self.seconds.keys() - self.n_lines.keys())
        turns, seconds_of_file = {}, Counter()
        for test in sorted(set().union(*users) & self.seconds.keys(), key=lambda t: self.seconds[t] * self.n_lines[t]):
            file = test.split("::")[0]
            seconds_of_file[file] += self.seconds[test]
            turns[test] = seconds_of_file[file]
        chosen, total = {}, 0.0
        for test in sorted(turns, key=turns.get):  # those of all files that end first, if each file had a core
            if total < seconds:
                chosen[test] = self.limits[test]
                total += self.seconds[test]
        return chosen


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.utime(path, (0, next(MTIME)))


def judge(folder: Path, mutant: Mutant, chosen: dict) -> dict:
    path = folder / "tree" / mutant.file
    original = path.read_bytes()
    write(path, original[: mutant.start] + mutant.after.encode() + original[mutant.end :])
    start = time.monotonic()
    (folder / "current").write_text("import")
    status = run_pytest(folder, {test.split("::")[0] for test in chosen}, chosen) if chosen else 5
    write(path, original)
    killer = None if status in (0, 5) else (folder / "current").read_text()
    seconds = round(time.monotonic() - start, 1)
    return dict(place=mutant.place, killer=killer, status=status, tests=len(chosen), seconds=seconds)


def work(mutants: list[Mutant], tests: Tests, seconds: float, end: float, ledger: Path) -> None:
    """Judge them in a tree of our own."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as temporary:
        folder = copy_of_tree(temporary)
        fastest = dict.fromkeys(sorted(tests.seconds, key=tests.seconds.get)[:20], 300)
        if run_pytest(folder, {test.split("::")[0] for test in fastest}, fastest):
            sys.exit(f"the tests fail without any mistake:\n{(folder / 'output').read_text()}")
        for mutant in mutants:
            if time.time() < end:
                result = judge(folder, mutant, tests.of(mutant, seconds))
                with open(ledger, "a") as file:
                    file.write(json.dumps(result) + "\n")


def read(path: Path) -> dict[str, dict]:
    return {result["place"]: result for result in map(json.loads, path.read_text().splitlines())}


def main(n: int = 300, seed: int = 0, workers: int = 1, minutes: float = 1e9, seconds: float = 20, name: str = "seed"):
    """n: mistakes. seconds: at most this much of tests on each. name: of the ledger, as in before_0.jsonl."""
    end = time.time() + 60 * minutes
    OUT.mkdir(parents=True, exist_ok=True)
    product = [file for file in tracked() if file.endswith(".py") and ("/" not in file or file.split("/")[0] in ROOMS)]
    tests = Tests(product, end)
    mutants = [mutant for file in product for mutant in mutants_of(file)]
    mutants = sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {m.place}".encode()).digest())[:n]
    ledger = OUT / f"{name}_{seed}.jsonl"
    ledger.touch()
    todo = [mutant for mutant in mutants if mutant.place not in read(ledger)]
    pids = []
    for worker in range(workers):
        pids.append(os.fork())
        if not pids[-1]:
            work(todo[worker::workers], tests, seconds, end, ledger)
            os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
    results = read(ledger)
    done = [mutant for mutant in mutants if mutant.place in results]
    survivors = [mutant for mutant in done if not results[mutant.place]["killer"]]
    for m in survivors:
        print(f"{m.file}:{m.line}: {m.kind}, {results[m.place]['tests']} tests: {m.before} -> {m.after}")
    share = 1 - len(survivors) / max(len(done), 1)
    late = [mutant for mutant in done if results[mutant.place]["status"] == -signal.SIGALRM]
    print(f"seed {seed}: the tests find {share:.1%} of {len(done)} mistakes, of {n} drawn; {len(late)} by the clock")


if __name__ == "__main__":
    tyro.cli(main)
