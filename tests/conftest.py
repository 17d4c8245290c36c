"""Fixtures that several test files share."""

import gc
import os
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

# before torch is imported: threads of several processes wait for each other, and no test needs a trial of their number
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # or each question to the hub is repeated for seconds without a network

import pytest
import torch

from bpe.tokenizer import Tokenizer
from parts import curves, report
from tests.corpora import make_documents, write_parquet
from tests.helpers import SHORT, arguments, assert_user_error, draw_nothing, prose, small_args
from tests.reworded import reword_errors

if os.environ.get("REWORD_ERRORS"):
    reword_errors()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """pytest -n: a file's tests go to one worker, or each would build what a file builds once for all of them."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the order is that of the next function
    return LoadFileScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    """Files with few tests first: these start processes and take long, and one that came last would be waited for."""
    n_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (n_tests[item.path], item.path))


def pytest_collection_finish() -> None:
    gc.freeze()  # a million objects of libraries, which no later search for garbage has to visit


@pytest.fixture(scope="session", autouse=True)
def quick_runs():
    """Runs in this process draw no learning curve and wait for no disk: both take longer than all the rest of a small
    run. test_plot.py looks at pictures, and test_cli.py at what is on the disk when."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw", draw_nothing)
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture
def learning_curve(monkeypatch):
    """For a test whose runs have to draw it."""
    monkeypatch.setattr(report, "draw", curves.draw)


@pytest.fixture
def inline(capsys, monkeypatch):
    """Run a script's main function in this process, inline(main, "a word", "--flag", "5", an_option=6): quicker than in
    a new one, with the same exit codes and output."""
    from parts.cli import script

    def run(main, *words, **options) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, words), *arguments(**options)])
        capsys.readouterr()
        try:
            script(main)
            code = 0
        except SystemExit as e:
            code = e.code
            while e:  # what their frames hold, such as the lock of a run, would else stay until garbage is collected
                traceback.clear_frames(e.__traceback__)
                e = e.__context__
        out = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out.out, stderr=out.err)

    return run


class Door:
    """How a test calls a script: door(max_steps=3) has to succeed, door.error("its words", max_steps=0) is refused in
    one line, and door.result() may end in any way."""

    def __init__(self, result):
        self.result = result

    def __call__(self, **options) -> SimpleNamespace:
        found = self.result(**options)
        assert found.returncode == 0, found.stderr
        return found

    def error(self, *words, **options) -> None:
        assert_user_error(self.result(**options), *words)


@pytest.fixture
def train(tmp_path, inline):
    """Pretrain a small GPT in this process: train(out="run", max_steps=3, ...)."""
    import train_gpt2

    def run(out="run", **changes):
        torch.manual_seed(0)
        return inline(train_gpt2.main, *small_args(tmp_path, out, **changes))

    return Door(run)


@pytest.fixture
def short(train):
    """Six steps, with checkpoints after 2, 4 and 6: short(max_steps=7, ...)."""
    return Door(lambda **changes: train.result(**SHORT | changes))


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """Where `train` writes, if it is not told otherwise."""
    return tmp_path / "run"


@pytest.fixture
def rt():
    from parts.runtime import Runtime

    return Runtime.setup("cpu", "float32")


@pytest.fixture(scope="session")
def gpt2_vocabulary() -> None:
    import tiktoken

    try:
        tiktoken.get_encoding("gpt2")
    except Exception as e:  # whatever keeps it from being downloaded
        pytest.skip(f"needs the GPT-2 vocabulary in tiktoken's cache ({type(e).__name__})")


@pytest.fixture
def offline(monkeypatch, tmp_path) -> Path:
    """No network, and empty caches of tiktoken and the hub; returns their folder."""

    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer.json with 600 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    text = prose()
    Tokenizer.train([text[:100_000]], 600).save(path)
    return path


@pytest.fixture(scope="session")
def small_tokenizer() -> Tokenizer:
    return Tokenizer.train([prose(60_000)], 320)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, tokenizer) -> tuple[Path, list[str]]:
    """A folder of 12 parquet files, and their documents."""
    folder = tmp_path_factory.mktemp("corpus")
    docs = make_documents(480)
    for i in range(12):
        write_parquet(folder / f"part_{i:02d}.parquet", docs[40 * i : 40 * (i + 1)], rows=15)
    return folder, docs
