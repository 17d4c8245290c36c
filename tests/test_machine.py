"""Decisions about the machine: device, ranks, compiler, threads, peaks."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

import train_gpt2
from parts.cards import peak_of
from parts.optim import make_optimizer
from parts.runtime import Runtime
from tests.helpers import assert_refused

PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA GeForce RTX 4070 Ti SUPER": None,  # another chip
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,  # a slice of one
    "Quadro RTX 6000": None,  # an older one
    "NVIDIA RTX A4000": None,  # no A40
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_follows_from_the_name_of_the_gpu(name):
    assert peak_of(name) == PEAKS[name]


def test_memory_without_a_gpu_is_the_peak_of_the_process(rt, monkeypatch):
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3000))
    for system, unit in (("linux", 1024), ("darwin", 1)):
        monkeypatch.setattr(sys, "platform", system)
        assert rt.peak_memory() == 3000 * unit


@pytest.mark.parametrize("asked, default, cores, expected", [(0, 4, 8, 4), (3, 4, 8, 3), (9, 4, 8, 8)])
def test_threads_are_never_more_than_cores(monkeypatch, asked, default, cores, expected):
    chosen = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: default)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    Runtime.setup("cpu", "float32", threads=asked)
    assert chosen == [expected]


STRAY = [  # (what the environment holds, names in the error)
    (dict(RANK="1"), "RANK=1 WORLD_SIZE=1"),
    (dict(RANK="abc"), "RANK=abc WORLD_SIZE=1"),
    (dict(WORLD_SIZE="2"), "WORLD_SIZE.*MASTER_ADDR"),
]


@pytest.mark.parametrize("found, names", STRAY)
def test_ranks_that_no_launcher_sets_are_refused(monkeypatch, found, names):
    """As the only process, one of a rank above 0 would train to its end and write nothing."""
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert_refused(names, Runtime.setup, "cpu", "float32")


def test_empty_variables_of_ranks_are_as_if_unset(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    rt = Runtime.setup("cpu", "float32")
    assert (rt.rank, rt.world_size) == (0, 1)


@pytest.fixture
def gpus_here(monkeypatch):
    """gpus_here(cuda=True, mps=False): which kinds of GPU there are; of cuda one, an H100."""

    def make(cuda: bool, mps: bool) -> None:
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        facts = dict(is_available=cuda, device_count=1, set_device=None, get_device_capability=(9, 0))
        for name, fact in (facts | dict(get_device_name="NVIDIA H100 PCIe")).items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, fact=fact: fact)

    yield make
    torch.backends.cuda.enable_cudnn_sdp(True)


DEVICES = [  # (what is asked for, is there CUDA, is there MPS, what is chosen)
    ("auto", True, True, "cuda:0"),
    ("auto", False, True, "mps"),
    ("auto", False, False, "cpu"),
    ("cpu", True, True, "cpu"),
]


@pytest.mark.parametrize("asked, cuda, mps, chosen", DEVICES)
def test_a_device_is_the_best_one_or_the_one_that_was_asked_for(gpus_here, asked, cuda, mps, chosen):
    gpus_here(cuda, mps)
    assert str(Runtime.setup(asked).device) == chosen


@pytest.mark.parametrize("asked, local_rank", [("cuda", "0"), ("mps", "0"), ("cuda", "1")])
def test_a_device_that_is_not_here_is_refused(gpus_here, monkeypatch, asked, local_rank):
    gpus_here(cuda=local_rank == "1", mps=False)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert_refused("1" if local_rank == "1" else f"--device {asked}", Runtime.setup, asked)


def test_a_card_is_known_by_its_type_whatever_its_number(gpus_here):
    """A comparison of "cuda:0" with "cuda" turned the fused AdamW off (build-nanogpt PR 96)."""
    gpus_here(cuda=True, mps=False)
    rt = Runtime.setup("auto", compile="off")
    assert (str(rt.device), rt.dtype, rt.steps_ahead) == ("cuda:0", torch.bfloat16, 1)
    [adamw] = make_optimizer(torch.nn.Linear(2, 2), train_gpt2.Config(), rt).optimizers
    assert adamw.defaults["fused"]


def test_nothing_is_compiled_on_mps(gpus_here, monkeypatch):
    """Not even where a trial works: some of its numbers are wrong (pytorch 171764)."""
    gpus_here(cuda=False, mps=True)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: 0)
    assert_refused("--compile", Runtime.setup, "mps", compile="on")
    assert not Runtime.setup("mps", compile="auto").compile


def test_cpu_means_that_no_gpu_is_asked_for(monkeypatch):
    """A question to CUDA opens a context on it."""
    for name in ("is_available", "device_count", "set_device", "current_device"):
        monkeypatch.setattr(torch.cuda, name, None)
    assert Runtime.setup("cpu", "float32").device.type == "cpu"


def test_a_missing_compiler_is_named(gpus_here, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("CalledProcessError: /usr/bin/ld: cannot find -lcuda: No such file or directory")

    monkeypatch.setattr(torch, "compile", lambda function: fail)
    assert_refused("--compile.*-lcuda", Runtime.setup, "cpu", "float32", "on")
    gpus_here(cuda=True, mps=False)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)
    Runtime.setup("auto", "auto", "auto")  # training continues without
    assert "cannot find -lcuda" in capsys.readouterr().err
