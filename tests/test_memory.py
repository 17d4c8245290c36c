"""The formula for the memory of training, against every byte that tensors have while a model trains."""

import re
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt2
from model import GPT, GPTConfig
from parts.cards import peaks
from parts.loss import chunk_size, linear_cross_entropy
from parts.optim import make_optimizer
from parts.plan import CARDS, Layout, n_parameters, needs, token_flops, token_seconds
from parts.runtime import Runtime, checkpoint_activations
from parts.shards import prepare_text
from tests.helpers import ROOT, slow, text_file


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
            optimizer.zero_grad()
        return memory.peak


TINY = dict(n_positions=128, vocab_size=1024, n_layer=4, n_head=2, n_embd=128)
NARROW = TINY | dict(n_embd=64)  # for 16 bits, which many processors emulate
# GPT-2 124M compiled, in bf16 with AdamW: sequences of a micro-batch, and the peak of the allocator on the emulated
# card (tests/fake_gpu)
PEAKS = [(1, 2.91), (8, 5.80), (64, 24.01), (256, 84.04)]
M30 = dict(n_positions=256, vocab_size=50304, n_layer=6, n_head=6, n_embd=384)
GPT2 = GPTConfig(vocab_size=50304)


@pytest.mark.parametrize(
    "sizes, attention, layout, rows",
    [
        (TINY, "flash", dict(itemsize=4, optimizer="muon"), 16),
        (TINY, "flash", dict(itemsize=4, optimizer="muon"), 1),
        (TINY, "flash", dict(itemsize=4, checkpointing=True), 16),
        (NARROW, "naive", dict(itemsize=2), 16),
        (TINY, "naive", dict(itemsize=4), 16),
        (TINY, "flash", dict(itemsize=4, sequence_length=64), 16),
        slow(M30, "flash", dict(itemsize=4), 8),
        slow(M30, "flash", dict(itemsize=4), 1),
        slow(M30, "flash", dict(itemsize=4, optimizer="muon"), 1),
        slow(M30, "flash", dict(itemsize=4, checkpointing=True), 8),
    ],
)
def test_the_peak_of_training_is_what_the_formula_says(sizes, attention, layout, rows):
    shape = GPTConfig(**sizes, attention=attention)
    layout = Layout(**dict(sequence_length=shape.n_positions, device="cpu") | layout)
    assert sum(needs(shape, layout, rows).values()) == pytest.approx(peak(shape, layout, rows), rel=0.15)


@pytest.mark.parametrize("rows, gigabytes", PEAKS)
def test_the_formula_is_within_a_tenth_of_the_peak_on_a_card(rows, gigabytes):
    assert sum(needs(GPT2, Layout(1024), rows).values()) / 1e9 == pytest.approx(gigabytes, rel=0.1)


def total(**layout) -> int:
    return sum(needs(GPT2, Layout(**dict(sequence_length=1024) | layout), 8).values())


def test_adamw_takes_16_bytes_a_parameter_and_muon_4_less_for_those_of_matrices():
    n = n_parameters(GPT2)
    matrices = 12 * GPT2.n_layer * GPT2.n_embd**2
    for optimizer, saved in (("adamw", 0), ("muon", 4 * matrices)):
        found = needs(GPT2, Layout(1024, itemsize=4, optimizer=optimizer), 8)
        assert found["weights"] + found["gradients"] + found["optimizer"] == 16 * n - saved


def test_each_way_to_share_a_model_takes_less_than_the_one_before_it():
    for ranks in (2, 8):
        ways = [total(ranks=ranks, shard=shard) for shard in ("none", "optimizer", "full")]
        assert ways == sorted(ways, reverse=True)
        assert len(set(ways)) == 3
    assert total(ranks=8, shard="full") < total(ranks=2, shard="full")
    assert total(checkpointing=True) < total()


def test_a_rank_of_many_has_its_fraction_of_what_is_sharded():
    found = needs(GPT2, Layout(1024, ranks=8, shard="full", itemsize=4), 8)
    n = n_parameters(GPT2)
    assert found["gradients"] == 4 * (n // 8)
    assert found["optimizer"] == 8 * n // 8
    assert 4 * n // 8 < found["weights"] < 4 * n  # and what is gathered at a time


def peak_without_optimizer(model: GPT, shape: GPTConfig, layout: Layout, rows: int) -> int:
    idx = torch.arange(rows * layout.sequence_length).view(rows, -1) % shape.vocab_size
    with LiveBytes(model.parameters()) as memory:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=layout.itemsize == 2):
                loss = model.loss(idx, idx)
            loss.backward()
            del loss
    return memory.peak


def test_the_loss_keeps_8_bytes_of_each_logit_on_a_processor():
    """One copy in fp32 and the softmax: nothing of the chunk before, and no 16-bit logits any more."""
    n_positions = 4096
    vocab_size = 1024
    x = torch.randn(n_positions, 8)
    weight = torch.randn(vocab_size, 8, requires_grad=True)
    targets = torch.randint(vocab_size, (n_positions,))
    a_chunk = chunk_size(n_positions, vocab_size, "cpu") * vocab_size  # logits
    with LiveBytes([x, weight, targets]) as memory, torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(x, weight, targets).backward()
    assert a_chunk < n_positions * vocab_size
    assert memory.peak == pytest.approx(8 * a_chunk, rel=0.15)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_block_keeps_what_the_formula_says_of_each_token(itemsize):
    """What twelve more sequences take in four more blocks: nothing else differs."""
    layout = Layout(64, itemsize=itemsize, device="cpu")
    found = 0
    wanted = 0
    for n_layer, rows, sign in ((5, 16, 1), (5, 4, -1), (1, 16, -1), (1, 4, 1)):
        shape = GPTConfig(n_positions=64, vocab_size=64, n_layer=n_layer, n_head=2, n_embd=64)
        found += sign * peak_without_optimizer(GPT(shape), shape, layout, rows)
        wanted += sign * sum(needs(shape, layout, rows).values())
    assert found == pytest.approx(wanted, rel=0.05)


def test_a_step_that_recomputes_keeps_no_16_bit_copy_of_a_weight():
    rt = Runtime.setup("cpu", "bfloat16")
    model = GPT(GPTConfig(**NARROW))
    checkpoint_activations(model.transformer.h)
    idx = torch.arange(4)[None]  # so few tokens that their activations are small
    with LiveBytes(model.parameters()) as memory, rt.autocast():
        before = memory.live
        x = model.hidden(idx)
        kept = memory.live - before
    assert x.requires_grad
    assert kept < model.transformer.h[0].mlp.c_fc.weight.numel() * 2


def test_parameters_are_counted_as_the_model_has_them():
    with torch.device("meta"):
        model = GPT(GPTConfig(**M30))
    assert n_parameters(model.config) == model.num_params()
    assert token_flops(model.config, 100) == model.estimate_flops(100)


def test_a_dry_run_says_what_a_run_does_and_needs_and_leaves_nothing_behind(train, tmp_path):
    result = train.result(dry_run=True, max_steps=7, checkpoint_interval=2, data=tmp_path / "missing.txt")
    assert result.returncode == 2
    assert result.stderr.startswith("error: this run would fail: ")
    assert not (tmp_path / "run").exists()
    assert f"data    unusable: {tmp_path / 'missing.txt'}" in result.stdout
    assert " 4 checkpoints of " in result.stdout


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of a table in docs/ that begins with `head`, without its first two lines."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_plan_of_gpt2_has_the_figures_of_the_page_about_one_gpu(inline, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    page = inline(train_gpt2.main, "--dry_run", "--price", "2.5").stdout
    assert "model   124,475,904 parameters\n" in page
    assert "steps   19,073 of 524,288 tokens, 9,999,745,024 in all\n" in page
    assert "disk    20 checkpoints of 1.49 GB, 5 at once: 7.5 of " in page
    lines = [line.rsplit(None, 5) for line in page.splitlines() if line]
    cards = [[name, rate, hours, dollars] for name, rate, _, hours, _, dollars in lines[-len(CARDS) :]]
    assert cards == rows_of("gpu.md", "| card | tokens/s")
    memory = [line[1:] for line in lines if line[0].startswith("    1  none")]
    assert memory == [row[1:] for row in rows_of("gpu.md", "| what fits, 124M in bf16")]


def test_the_estimated_rate_is_near_what_a_card_did():
    """One H100 (docs/benchmarks.md)."""
    assert 1 / token_seconds(GPT2, 1024, *peaks("H100")) == pytest.approx(552_666, rel=0.05)


def test_gpt2_xl_needs_what_the_page_about_clusters_says():
    """In GB, on 8 ranks."""
    shape = GPTConfig(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600)
    for command, *said in rows_of("gpu.md", "| | weights | gradients | moments"):
        how, checkpointing, n = re.fullmatch(r"`--shard (\w+)( --activation.*)?`, B = (\d+)", command).groups()
        found = needs(shape, Layout(1024, ranks=8, shard=how, checkpointing=bool(checkpointing)), int(n))
        figures = [*found.values(), sum(found.values())]
        assert [figure.split(":")[0] for figure in said] == [f"{figure / 1e9:.1f}" for figure in figures], command


def test_a_plan_obeys_what_is_given_and_ends_at_the_batch(train, tmp_path):
    """On shards, for a GPU in fp32."""
    data = prepare_text(str(text_file(tmp_path / "text.txt")), "train", 300, tmp_path / "cache")
    words = dict(shard="full", micro_batch_size=256, activation_checkpointing=True, total_batch_size=2**17, n_embd=1024)
    words |= dict(device="auto", data=data, max_steps=10**7, checkpoint_interval=1, keep_checkpoints=0)
    plan = train.result(dry_run=True, **words).stdout
    assert "NOT ENOUGH" in plan
    assert "memory  GB on each rank, muon, 32-bit products" in plan
    header, *rows = [line.split() for line in plan.split("ranks  ")[1].split("\n\n")[0].splitlines()]
    assert header[:3] == ["--shard", "activations", "B=256"]
    assert [row[:3] for row in rows] == [
        ["1", "none", "recomputed"],
        ["2", "full", "recomputed"],
        ["4", "full", "recomputed"],
        ["8", "full", "recomputed"],
    ]
    # a step has 4096 sequences: 512 on each of 8 ranks
    assert [row[-1] for row in rows] == ["1024", "1024", "1024", "512"]
    n = len(np.load(data / "text_train_000001.npy"))
    assert f"data    {data}, {n:,} training tokens, read {1e7 * 2**17 / n:.2g} times; a tokenizer of 300\n" in plan


def test_a_dry_run_from_a_model_with_more_positions_counts_the_tokens_of_a_step(train, tmp_path):
    """The activations of 32 tokens, whatever the base has; its weights differ by the rows of `wpe` alone."""
    shape = GPTConfig(n_positions=1024, vocab_size=384, n_layer=2, n_head=2, n_embd=32, attention="naive")
    GPT(shape).save_pretrained(tmp_path / "base")
    words = dict(dry_run=True, attention="naive", total_batch_size=2**20, micro_batch_size=2**15, optimizer="adamw")
    for more, n_positions in (({}, 32), (dict(init_from=tmp_path / "base"), 1024)):
        wanted = needs(replace(shape, n_positions=n_positions), Layout(32, itemsize=4, device="cpu"), 2**15)
        plan = train(**words, **more).stdout
        assert f" none       kept{sum(wanted.values()) / 1e9:>16.2f} " in plan
        assert " none       kept               -  " in plan  # more than two ranks have
    assert f"{tmp_path}/text.txt, {(tmp_path / 'text.txt').stat().st_size / 1e6:.1f} MB of text\n" in plan
