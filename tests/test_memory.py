"""The formula for the memory of training, against every byte that tensors have while a model trains."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learning.memory import Layout, n_parameters, needs
from learning.optim import make_optimizer
from model import GPT, GPTConfig
from run.runtime import Runtime
from run.trials import checkpoint_activations


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operators have made and nobody has let go yet, now and at their peak."""

    live = peak = 0

    def __init__(self, tensors):
        super().__init__()
        self.known = set()
        for tensor in tensors:
            self.count(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor)
        return result

    def count(self, tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.let_go, storage._cdata, storage.nbytes())

    def let_go(self, key: int, n_bytes: int) -> None:
        self.known.discard(key)
        self.live -= n_bytes


def peak(shape: GPTConfig, layout: Layout, rows: int) -> int:
    """Live bytes at the peak of two steps of two micro-batches on random ids."""
    rt = Runtime.setup("cpu", {2: "bfloat16", 4: "float32"}[layout.itemsize])
    constants = SimpleNamespace(
        optimizer=layout.optimizer, max_lr=1e-3, muon_lr=0.02, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8
    )
    with LiveBytes([]) as memory:
        model = GPT(shape)
        checkpoint_activations(model.transformer.h if layout.checkpointing else [])
        optimizer = make_optimizer(model, constants, rt)
        for _ in range(2):  # moments exist from the second step on, gradients from the second micro-batch on
            for _ in range(2):
                idx = torch.randint(shape.vocab_size, (rows, layout.sequence_length))
                with rt.autocast():
                    loss = model.loss(idx, idx)
                optimizer.scale(loss).backward()
                del loss
            optimizer.step(finite=optimizer.clip_grad_norm(1.0).isfinite())
        return memory.peak


TINY = dict(n_positions=128, vocab_size=1024, n_layer=4, n_head=2, n_embd=128)
M30 = dict(n_positions=256, vocab_size=50304, n_layer=6, n_head=6, n_embd=384)
CASES = {
    "tiny": (TINY, Layout(128, optimizer="muon", itemsize=4, device="cpu"), 16),
    "tiny, one sequence": (TINY, Layout(128, optimizer="muon", itemsize=4, device="cpu"), 1),
    "tiny, recomputed": (TINY, Layout(128, itemsize=4, device="cpu", checkpointing=True), 16),
    "tiny, 16 bits, spelled out": (TINY | dict(attention="naive"), Layout(128, itemsize=2, device="cpu"), 16),
    "tiny, spelled out": (TINY | dict(attention="naive"), Layout(128, itemsize=4, device="cpu"), 16),
    "tiny, half of its positions": (TINY, Layout(64, itemsize=4, device="cpu"), 16),
    "30M": (M30, Layout(256, itemsize=4, device="cpu"), 8),
    "30M, one sequence": (M30, Layout(256, itemsize=4, device="cpu"), 1),
    "30M, Muon": (M30, Layout(256, optimizer="muon", itemsize=4, device="cpu"), 1),
    "30M, recomputed": (M30, Layout(256, itemsize=4, device="cpu", checkpointing=True), 8),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) if "30M" in name else name for name in CASES]


@pytest.mark.parametrize("name", SLOW)
def test_the_peak_of_training_is_what_the_formula_says(name):
    sizes, layout, rows = CASES[name]
    shape = GPTConfig(**sizes)
    assert sum(needs(shape, layout, rows).values()) == pytest.approx(peak(shape, layout, rows), rel=0.15)


def test_parameters_are_counted_as_the_model_has_them():
    with torch.device("meta"):
        assert n_parameters(GPTConfig(**M30)) == GPT(GPTConfig(**M30)).num_params()


def test_more_ranks_that_divide_more_need_less():
    shape = GPTConfig(n_layer=48, n_head=25, n_embd=1600)
    totals = [sum(needs(shape, Layout(1024, 8, how), 1).values()) for how in ("none", "optimizer", "full")]
    assert totals == sorted(totals, reverse=True)
    for how in ("optimizer", "full"):
        totals = [sum(needs(shape, Layout(1024, ranks, how), 1).values()) for ranks in (2, 4, 8, 16)]
        assert totals == sorted(totals, reverse=True)


def test_a_dry_run_says_what_a_run_does_and_needs_and_leaves_nothing_behind(train, tmp_path):
    result = train(dry_run=True, n_layer=3, max_steps=7, checkpoint_interval=2, data=tmp_path / "missing.txt")
    assert result.returncode == 0 and not (tmp_path / "run").exists()
    with torch.device("meta"):
        n = GPT(GPTConfig(n_positions=32, vocab_size=384, n_layer=3, n_embd=32, n_head=2)).num_params()
    for figure in (f"{n:,} parameters", f"{7 * 256:,} in all", "4 checkpoints"):
        assert figure in result.stdout
    for how in ("none", "optimizer", "full"):
        assert how in result.stdout


def test_a_dry_run_from_a_model_with_more_positions_counts_the_tokens_of_a_step(train, tmp_path):
    """The activations of 32 tokens, whatever the base has; its weights differ by the rows of `wpe` alone."""
    GPT(GPTConfig(n_positions=1024, vocab_size=384, n_layer=2, n_head=2, n_embd=32)).save_pretrained(tmp_path / "base")
    plans = [train(dry_run=True, **more).stdout.splitlines() for more in ({}, dict(init_from=tmp_path / "base"))]
    small, large = (float(next(line.split()[4] for line in plan if " none " in line)) for plan in plans)
    assert small <= large < small + 16 * 4 * 992 * 32 / 1e9 + 0.01
