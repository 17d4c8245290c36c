"""Scripts in processes that are forked from the one that tests; no test in itself.

A start of train_gpt2.py is 5 s of imports, a fork has them, and all else is the same. Tests of a start itself, of
torchrun, and of what imports no torch use `run_script` of helpers.py.
"""

import atexit
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

FORKS = multiprocessing.get_context("fork")


def become(script: Path, words: list[str], env: dict, cwd: Path, out: str) -> None:
    """Be the process that `python SCRIPT WORDS` is, with its output in files."""
    sys.stdout, sys.stderr = (open(out + end, "w", buffering=1) for end in (".out", ".err"))
    for fd, file in ((1, sys.stdout), (2, sys.stderr)):
        os.dup2(file.fileno(), fd)
    atexit._clear()  # of the parent, whose folders stay
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(ROOT)):
            del sys.modules[name]  # as they were patched; and a copy of the project has its own
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
        while running:
            ended = [running.pop(sentinel) for sentinel in wait(running, timeout)]
            for process in ended:
                process.join()
            if not ended or any(process.exitcode for process in ended):
                for process in running.values():
                    process.kill()
        code = next((process.exitcode for process in processes if process.exitcode), 0)
        stdout, stderr = ("".join(Path(out + end).read_text() for out in outs) for end in (".out", ".err"))
    return subprocess.CompletedProcess([script, *args], code, stdout, stderr)
