"""Fixtures that several test files share."""

import os
from pathlib import Path

# before torch is imported: threads of several processes wait for each other, and no test needs a trial of their number
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from bpe.tokenizer import Tokenizer
from tests.corpora import make_documents, write_parquet
from tests.helpers import ROOT, SMALL, arguments, run_inline, text_file


@pytest.fixture
def train(tmp_path, capsys, monkeypatch):
    """Pretrain a small GPT in this process: train(out="run", max_steps=3, ...)."""
    import train_gpt2

    def run(out="run", **changes):
        torch.manual_seed(0)
        data = tmp_path / "text.txt"
        if "data" not in changes and not data.exists():
            text_file(data)
        options = {**SMALL, "data": data, "out_dir": tmp_path / out, **changes}
        return run_inline(train_gpt2.main, ["tiny", *arguments(**options)], capsys, monkeypatch)

    return run


@pytest.fixture(scope="session")
def gpt2_vocabulary() -> None:
    import tiktoken

    try:
        tiktoken.get_encoding("gpt2")
    except Exception as e:  # whatever keeps it from being downloaded
        pytest.skip(f"needs the GPT-2 vocabulary in tiktoken's cache ({type(e).__name__})")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    """A tokenizer.json with 600 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    text = (ROOT / "input.txt").read_text()
    Tokenizer.train([text[:100_000]], 600).save(path)
    return path


@pytest.fixture(scope="session")
def small_tokenizer() -> Tokenizer:
    return Tokenizer.train([(ROOT / "input.txt").read_text()[:60_000]], 320)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, tokenizer) -> tuple[Path, list[str]]:
    """A folder of 12 parquet files, and their documents."""
    folder, docs = tmp_path_factory.mktemp("corpus"), make_documents(480)
    for i in range(12):
        write_parquet(folder / f"part_{i:02d}.parquet", docs[40 * i : 40 * (i + 1)], rows=15)
    return folder, docs
