"""Fixtures that several test files share."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: two threads in each of two processes on two cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # wait for each other most of the time

import pytest
import torch

from tests.helpers import SMALL, arguments, run_inline, text_file


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
