"""Scripts in processes that are forked from one which has imported torch already; no test in itself.

A start of train_gpt2.py is 5 s of imports, a fork has none of them, and all else is the same. Tests of a start itself,
of torchrun, and of what imports no torch use `run_script` of helpers.py.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

from tests.helpers import ROOT, arguments, environment

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch._dynamo", "tiktoken", "regex", "matplotlib.backends.backend_agg", "transformers.models.gpt2.modeling_gpt2"]
)


def become(script: Path, words: list[str], env: dict, cwd: Path, out: str) -> None:
    """Be the process that `python SCRIPT WORDS` is, with its output in files."""
    for fd, end in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(out + end, os.O_WRONLY | os.O_CREAT), fd)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("parts", "tests")]:
        del sys.modules[name]  # which this module brought along: a copy of the project has its own
    sys.argv = [str(script), *words]
    sys.path[:] = [str(script.parent), *(path for path in sys.path if path not in ("", str(ROOT)))]
    runpy.run_path(str(script), run_name="__main__")


def start_fork(script, *args, out: str, cwd=None, env=None, **options):
    """A multiprocessing.Process with a script of the project, or of a copy of it."""
    words = [*map(str, args), *arguments(**options)]
    process = FORKS.Process(target=become, args=(ROOT / script, words, env or environment(), cwd or Path.cwd(), out))
    process.start()
    return process


def fork_script(script, *args, ranks: int = 1, timeout=240, **options) -> subprocess.CompletedProcess:
    """Run a script to its end, on several ranks as torchrun does, and return what it printed; it may fail."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    joined = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with tempfile.TemporaryDirectory() as folder:
        outs = [f"{folder}/{rank}" for rank in range(ranks)]
        processes = []
        for rank, out in enumerate(outs):
            env = environment(**joined, RANK=str(rank), LOCAL_RANK=str(rank)) if ranks > 1 else environment()
            processes.append(start_fork(script, *args, out=out, env=env, **options))
        running = {process.sentinel: process for process in processes}
        code = 0  # of the rank that failed first: the others are killed
        while running:
            ended = [running.pop(sentinel) for sentinel in wait(running, timeout)]
            for process in ended:
                process.join()
                code = code or process.exitcode
            if not ended or any(process.exitcode for process in ended):
                for process in running.values():
                    process.kill()
        stdout, stderr = ("".join(Path(out + end).read_text() for out in outs) for end in (".out", ".err"))
    return subprocess.CompletedProcess([script, *args], code, stdout, stderr)
