"""What several test files need: running a script as a user does, and small runs."""

import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest

from parts.cli import UserError
from parts.files import replace_file

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

# a GPT of a few thousand parameters, in fp32 so that figures do not depend on the processor
SMALL = dict(
    n_layer=2, n_head=2, n_embd=32, sequence_length=32, vocab_size=384, total_batch_size=256, micro_batch_size=8,
    max_steps=40, warmup_steps=4, eval_interval=10, eval_steps=2, sample_interval=20, sample_tokens=8,
    checkpoint_interval=5, dtype="float32", compile="off", device="cpu",
)  # fmt: skip
SHORT = dict(max_steps=6, checkpoint_interval=2, eval_interval=0, sample_interval=0, keep_checkpoints=0)

needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads /proc")
needs_gpt2 = pytest.mark.usefixtures("gpt2_vocabulary")


def slow(*case):
    """A case of a parametrized test that runs with -m slow only."""
    return pytest.param(*case, marks=pytest.mark.slow)


def arguments(**kwargs) -> list[str]:
    """Command-line flags; True is a plain switch."""
    words = []
    for name, value in kwargs.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value))
    return words


def small_args(folder: Path, out="run", **changes) -> list[str]:
    """A short run of the recipe tiny on a text in the folder, which is written unless it is there."""
    data = folder / "text.txt"
    if "data" not in changes and not data.exists():
        text_file(data)
    return ["tiny", *arguments(**SMALL | dict(data=data, out_dir=folder / out) | changes)]


def environment(**extra) -> dict:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": ""} | extra


def command(script: str, *args, ranks: int = 0, **kwargs) -> list[str]:
    torchrun = [*TORCHRUN, "--standalone", f"--nproc_per_node={ranks}"] if ranks else [sys.executable]
    return [*torchrun, str(ROOT / script), *map(str, args), *arguments(**kwargs)]


def run_script(script: str, *args, cwd=None, timeout=240, env=None, **kwargs) -> subprocess.CompletedProcess:
    """Run a script of the project to its end and return what it printed; it may fail."""
    return subprocess.run(
        command(script, *args, **kwargs),
        cwd=cwd,
        env=env or environment(),
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def start_script(script: str, *args, env=None, **kwargs) -> subprocess.Popen:
    """Start a script of the project, with its output in pipes."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command(script, *args, **kwargs), env=env or environment(), **pipes)


def state_of(pid: int) -> str:
    """As proc(5) has it: R, S, Z, ...; X for one that is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"


def gone(pid: int) -> bool:
    return state_of(pid) in "ZX"


def succeed(*args, **kwargs) -> subprocess.CompletedProcess:
    result = run_script(*args, **kwargs)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def assert_user_error(result: subprocess.CompletedProcess, *words: str) -> None:
    """Exit code 2, no traceback, and exactly one line on stderr that starts with `error:` and holds the words."""
    assert result.returncode == 2, (result.returncode, result.stderr[-2000:])
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr[-2000:]
    assert "Traceback" not in result.stderr, result.stderr[-2000:]
    for word in words:
        assert word in lines[0], (word, lines[0])


def assert_refused(words: str, function, *args, error=UserError, **options) -> None:
    """What the user gave is refused in a sentence that matches `words`."""
    with pytest.raises(error, match=words):
        function(*args, **options)


assert_invalid = partial(assert_refused, error=ValueError)


def prose(n: int | None = None) -> str:
    """The first n characters of the text that comes with the project."""
    return (ROOT / "input.txt").read_text()[:n]


def random_text(seed: int, alphabet: str, most: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choices(alphabet, k=rng.randint(0, most)))


def text_file(path: Path, n=40_000) -> Path:
    path.write_text(prose(n))
    return path


def damaged(content: bytes) -> dict[str, bytes]:
    """{what was done: content}"""
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 0x41]) + content[middle + 1 :]
    return {
        "empty": b"",
        "one byte": content[:1],
        "cut in half": content[:middle],
        "a flipped byte": flipped,
        "a picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4,
        "utf-16": "näive 潮汐".encode("utf-16") * 20,
        "deep": b"[" * 200_000,
        "deeper": b'{"a":' * 100_000,
        "nan": b'{"step": NaN, "kind": "train", "n_layer": NaN, "shards": Infinity}',
    }


def hellaswag_rows(path: Path, n: int = 7) -> Path:
    """Rows that are alike but for their labels."""
    row = dict(ctx="He", ctx_a="He", ctx_b="", activity_label="To", endings=["is", "was here", "a", "go on"])
    return write_lines(path, [row | dict(label=i % 4) for i in range(n)])


def read_json(path: Path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_json(path: Path, content) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def log_of(out_dir: Path, kind: str) -> list[dict]:
    return [record for record in read_lines(Path(out_dir) / "log.jsonl") if record["kind"] == kind]


def column(out_dir: Path, kind: str, name: str) -> list:
    """One figure of all records of a kind."""
    return [record.get(name) for record in log_of(out_dir, kind)]


def n_logged(run: Path) -> int:
    """Training steps in the log."""
    return (run / "log.jsonl").read_text().count('"kind": "train"') if (run / "log.jsonl").exists() else 0


def wait_for_steps(run: Path, n: int, process: subprocess.Popen) -> None:
    while n_logged(run) < n:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def losses(out_dir: Path) -> list[tuple[int, float, float]]:
    """(step, loss, grad_norm) of every training step, and the validation losses: what an exact resume repeats."""
    train = [(r["step"], r["loss"], r["grad_norm"]) for r in log_of(out_dir, "train")]
    return train + [(r["step"], r["loss"], r["bpb"]) for r in log_of(out_dir, "val")]


def files_of(directory: Path) -> dict[str, bytes]:
    """All files below a directory but the lock."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def resume_table(page: str) -> dict[str, str]:
    """{constant: what a page of docs/ says a resume does with another value}"""
    text = (ROOT / "docs" / page).read_text()
    lines = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", text[text.index("| constant |") :], re.MULTILINE)
    return {name: said for names, said in lines for name in re.findall(r"`(\w+)`", names)}


def assert_refused_by_name(door, run: Path, page: str, constants: dict, other: dict) -> None:
    """What the table calls refused is, and changes nothing."""
    before = files_of(run)
    for name, said in resume_table(page).items():
        if said == "refused" and name in other:
            door.error(name, **constants | dict(resume=True) | {name: other[name]})
    assert files_of(run) == before


def assert_changes_take_effect(train, run: Path, page: str, constants: dict, other: dict) -> dict:
    """Resume `run` with the values in `other` of all constants that the table says take effect; returns them."""
    effective = [name for name, said in resume_table(page).items() if said == "takes effect"]
    changes = {name: other[name] for name in effective if name in other}
    said = train(**constants | changes | dict(resume=True)).stdout
    assert set(re.findall(r"; --(\w+) [^;]* ?is now", said)) == set(changes)
    config = read_json(run / "config.json")
    assert {name: config[name] for name in changes} == changes
    return changes


def quietly(main, *words, **options) -> None:
    """Run a script's main function in this process to prepare something; it has to succeed."""
    with pytest.MonkeyPatch.context() as patch, open(os.devnull, "w") as null:
        patch.setattr(sys, "argv", ["script.py", *map(str, words), *arguments(**options)])
        with redirect_stdout(null), redirect_stderr(null):
            main()


def draw_nothing(runs: dict, path: Path) -> None:
    """In place of parts.curves.draw: a file that tells what would have been drawn by its number of records."""
    n_records = sum(map(len, runs.values()))
    replace_file(path, f"{n_records} records".encode())


def stamps(directory: Path) -> dict[Path, int]:
    """When each file was written."""
    return {path: path.stat().st_mtime_ns for path in directory.iterdir()}


def seeded(seed: int = 0):
    """Random numbers of PyTorch."""
    import torch

    return torch.Generator().manual_seed(seed)


def spoil_gradients(monkeypatch, when, value: float) -> None:
    """Put `value` into the gradients of each step for which `when(step)` is true; steps count from 1."""
    import torch

    real = torch.nn.utils.get_total_norm
    steps = itertools.count(1)

    def get_total_norm(grads, *args):
        if when(next(steps)):
            grads[0][0] = value
        return real(grads, *args)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", get_total_norm)


def during_validation(monkeypatch, action) -> None:
    """Call `action` whenever a model computes the loss of a batch without gradients."""
    import torch

    real = torch.nn.Module.__call__

    def call(module, *args, **options):
        if len(args) == 2 and args[0] is not args[1] and not torch.is_grad_enabled():
            action()
        return real(module, *args, **options)

    monkeypatch.setattr(torch.nn.Module, "__call__", call)


def impatient(monkeypatch) -> list[float]:
    """Locks are waited for a moment; returns for how many seconds each was to be waited for."""
    import filelock

    real = filelock.BaseFileLock.acquire
    patience = []

    def acquire(lock, *args, **options):
        patience.append(lock.timeout)
        lock.timeout = 0.1
        return real(lock, *args, **options)

    monkeypatch.setattr(filelock.BaseFileLock, "acquire", acquire)
    return patience


def steps_of(run: Path) -> list[int]:
    """The steps of the checkpoints of a run, in their order."""
    return sorted(int(path.name.removeprefix("step_")) for path in run.glob("step_" + "[0-9]" * 6))


def remove_after(run: Path, step: int) -> None:
    """Remove the checkpoints of a run after `step`."""
    for newer in steps_of(run):
        if newer > step:
            shutil.rmtree(run / f"step_{newer:06d}")


def weights(run: Path, step: int) -> bytes:
    return (run / f"step_{step:06d}" / "model.safetensors").read_bytes()
