"""The formula for the memory of training, against every byte that tensors have while a model trains."""

import re
import weakref
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, GPTConfig
from parts.cards import RATES
from parts.loss import chunk_size, linear_cross_entropy
from parts.optim import make_optimizer
from parts.plan import memory_by_kind
from parts.shards import prepare_text
from tests.helpers import text_file
from train_gpt2 import RECIPES


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


def plan_of(config, n_sequences: int = 1, shape: GPTConfig | None = None) -> dict[str, int]:
    sizes = {name: getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    with torch.device("meta"):
        model = GPT(shape or GPTConfig(n_positions=config.sequence_length, **sizes))
    return memory_by_kind(config, model, n_sequences)


TINY = dict(n_positions=128, vocab_size=1024, n_layer=4, n_head=2, n_embd=128)
# GPT-2 124M compiled, in bf16 with AdamW: sequences of a micro-batch, and the peak of the allocator on the emulated
# card (tools/fake_gpu)
PEAKS = {1: 2.91, 8: 5.80, 64: 24.01, 256: 84.04}


@pytest.mark.parametrize("rows", PEAKS)
def test_the_plan_is_within_a_tenth_of_the_peak_on_a_card(rows):
    assert sum(plan_of(RECIPES["gpt2"], rows).values()) / 1e9 == pytest.approx(PEAKS[rows], rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_are_those_that_the_optimizer_keeps(rt, optimizer):
    config = replace(RECIPES["tiny"], optimizer=optimizer)
    shape = GPTConfig(**TINY)
    model = GPT(shape)
    found = make_optimizer(model, config, rt)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    found.step(torch.tensor(True))
    kept = sum(x.nbytes for x in tree_leaves(found.state_dict()) if isinstance(x, torch.Tensor))
    assert plan_of(config, shape=shape)["moments"] == pytest.approx(kept, rel=0.001)  # and a few counters


@pytest.mark.parametrize("attention", ["flash", "naive"])
def test_sequences_keep_what_the_plan_says(attention):
    """What twelve more sequences take until the backward pass."""
    shape = GPTConfig(**TINY, attention=attention)
    config = replace(RECIPES["tiny"], dtype="float32", attention=attention)
    model = GPT(shape)
    kept = []
    for rows in (4, 16):
        with LiveBytes(model.parameters()) as memory:
            before = memory.live
            x = model.hidden(torch.zeros(rows, 128, dtype=torch.long))
            kept.append(memory.live - before)
            del x
    assert kept[1] - kept[0] == pytest.approx(plan_of(config, 12, shape)["activations"], rel=0.1)


def test_gpt2_xl_fits_on_a_card_of_40_gb_next_to_seven_others():
    """31.8 GB on the emulated card, 26.2 of them with recomputed activations; 31.6 while DDP makes its buckets."""
    for recomputed in (False, True):
        needs = plan_of(replace(RECIPES["gpt2-xl"], activation_checkpointing=recomputed))
        assert 0.95 * 31.6e9 < sum(needs.values()) < 0.95 * 40e9


def test_the_loss_keeps_10_bytes_of_each_logit_on_a_processor():
    """The 16-bit logits, which become gradients, a copy in fp32 and the softmax; nothing of the chunk before."""
    n_positions = 4096
    vocab_size = 1024
    x = torch.randn(n_positions, 8)
    weight = torch.randn(vocab_size, 8, requires_grad=True)
    targets = torch.randint(vocab_size, (n_positions,))
    a_chunk = chunk_size(n_positions, vocab_size, "cpu") * vocab_size  # logits
    with LiveBytes([x, weight, targets]) as memory, torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(x, weight, targets).backward()
    assert a_chunk < n_positions * vocab_size
    assert memory.peak == pytest.approx(10 * a_chunk, rel=0.15)


def rates_of(output: str) -> dict[str, list[float]]:
    """{name: tokens/s, seconds, dollars} of each line of a plan that has a rate."""
    found = {}
    for line in output.replace(",", "").splitlines():
        if match := re.match(r"(.+?) +(\d+) tokens/s +([\d:]+)(?: +([\d.]+))?", line):
            name, rate, time, dollars = match.groups(default="0")
            seconds = sum(int(part) * 60**i for i, part in enumerate(reversed(time.split(":"))))
            found[name] = [float(rate), seconds, float(dollars)]
    return found


def test_a_plan_comes_before_the_data_and_leaves_nothing_behind(train, tmp_path):
    result = train(dry_run=True, data=tmp_path / "missing.txt")
    assert str(tmp_path / "missing.txt") in result.stdout
    assert "this machine" in rates_of(result.stdout)
    assert not list(tmp_path.iterdir())


def test_a_plan_times_this_machine_and_cards(train, tmp_path):
    """On shards."""
    data = prepare_text(str(text_file(tmp_path / "text.txt")), "train", 300, tmp_path / "cache")
    words = dict(data=data, price=2.5, max_steps=10**7, n_embd=64)
    words |= dict(total_batch_size=2**25)  # a step takes longer than its launches
    result = train(dry_run=True, **words)
    n = len(np.load(data / "text_train_000001.npy"))
    assert f"{n:,}" in result.stdout
    assert f"{1e7 * 2**25 / n:,.2f}" in result.stdout
    found = rates_of(result.stdout)
    assert set(found) == {*RATES, "this machine"}
    for rate, seconds, dollars in found.values():
        assert seconds == pytest.approx(1.03 * 1e7 * 2**25 / rate, rel=0.01)
        assert dollars == pytest.approx(2.5 * seconds / 3600, rel=0.01)


def test_a_small_model_is_no_faster_on_a_card_than_its_steps_are_launched(train):
    """`tiny` takes 20 seconds on an H100, which no count of its FLOPs would say."""
    assert rates_of(train(dry_run=True).stdout)["H100"][0] == round(256 / 0.017)


def test_a_rate_counts_every_micro_batch_of_a_step(train, monkeypatch):
    """By a clock that ticks whenever it is read: each of 64 micro-batches takes a second, and so does the update."""
    ticks = count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    found = rates_of(train(dry_run=True, micro_batch_size=8, total_batch_size=64 * 256).stdout)
    assert found["this machine"][0] == round(64 * 256 / (64 + 1))
