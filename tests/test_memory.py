"""The formula for the memory of training, against every byte that tensors have while a model trains."""

import json
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_gpt2
from learning.loss import chunk_size, linear_cross_entropy
from learning.optim import make_optimizer
from machine.runtime import Runtime, checkpoint_activations, peaks
from model import GPT, GPTConfig
from pretraining.plan import CARDS, LAUNCHES, REACHED, Layout, n_parameters, needs, step_parts, token_flops
from tests.helpers import ROOT, slow


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
M30 = dict(n_positions=256, vocab_size=50304, n_layer=6, n_head=6, n_embd=384)
# the model, its attention, how it is trained, the sequences of a micro-batch
CASES = """
tiny flash {"optimizer":"muon","itemsize":4} 16
tiny flash {"optimizer":"muon","itemsize":4} 1
tiny flash {"itemsize":4,"checkpointing":true} 16
tiny naive {"itemsize":2} 16
tiny naive {"itemsize":4} 16
tiny flash {"itemsize":4,"sequence_length":64} 16
30M flash {"itemsize":4} 8
30M flash {"itemsize":4} 1
30M flash {"optimizer":"muon","itemsize":4} 1
30M flash {"itemsize":4,"checkpointing":true} 8
""".strip()


@pytest.mark.parametrize("case", [slow(case) if "30M" in case else case for case in CASES.splitlines()])
def test_the_peak_of_training_is_what_the_formula_says(case):
    size, attention, layout, rows = case.split()
    shape = GPTConfig(**(TINY if size == "tiny" else M30), attention=attention)
    layout = Layout(**dict(sequence_length=shape.n_positions, device="cpu") | json.loads(layout))
    assert sum(needs(shape, layout, int(rows)).values()) == pytest.approx(peak(shape, layout, int(rows)), rel=0.15)


def peak_without_optimizer(model: GPT, shape: GPTConfig, layout: Layout, rows: int) -> int:
    idx = torch.arange(rows * layout.sequence_length).view(rows, -1) % shape.vocab_size
    with LiveBytes(model.parameters()) as memory:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=layout.itemsize == 2):
                loss = model.loss(idx, idx)
            loss.backward()
            del loss
    return memory.peak


def test_the_gradient_of_the_output_projection_is_counted_twice():
    """Where it is a third of everything, so that half of it is no rounding error; before the optimizer's first step."""
    shape = GPTConfig(n_positions=64, vocab_size=8000, n_layer=1, n_head=1, n_embd=128)
    found = needs(shape, layout := Layout(64, itemsize=4, device="cpu"), 1)
    wanted = sum(found.values()) - found["optimizer"]
    assert peak_without_optimizer(GPT(shape), shape, layout, 1) == pytest.approx(wanted, rel=0.05)


def test_the_loss_keeps_8_bytes_of_each_logit_without_compilation():
    """One copy in fp32 and the softmax: nothing of the chunk before, and no 16-bit logits any more."""
    n_positions, vocab_size = 4096, 1024
    x, weight = torch.randn(n_positions, 8), torch.randn(vocab_size, 8, requires_grad=True)
    targets = torch.randint(vocab_size, (n_positions,))
    a_chunk = chunk_size(n_positions, vocab_size, "cpu") * vocab_size  # logits
    with LiveBytes([x, weight, targets]) as memory, torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(x, weight, targets).backward()
    assert a_chunk < n_positions * vocab_size and memory.peak == pytest.approx(8 * a_chunk, rel=0.15)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_block_keeps_what_the_formula_says_of_each_token(itemsize):
    """What twelve more sequences take in four more blocks: nothing else differs."""
    layout, found, wanted = Layout(64, itemsize=itemsize, device="cpu"), 0, 0
    for n_layer, rows, sign in ((5, 16, 1), (5, 4, -1), (1, 16, -1), (1, 4, 1)):
        shape = GPTConfig(n_positions=64, vocab_size=64, n_layer=n_layer, n_head=2, n_embd=128)
        found += sign * peak_without_optimizer(GPT(shape), shape, layout, rows)
        wanted += sign * sum(needs(shape, layout, rows).values())
    assert found == pytest.approx(wanted, rel=0.05)


def test_parameters_are_counted_as_the_model_has_them():
    with torch.device("meta"):
        model = GPT(GPTConfig(**M30))
    assert n_parameters(model.config) == model.num_params()
    assert token_flops(model.config, 100) == model.estimate_flops(100)


def test_a_dry_run_says_what_a_run_does_and_needs_and_leaves_nothing_behind(train, tmp_path):
    result = train.result(dry_run=True, n_layer=3, max_steps=7, checkpoint_interval=2, data=tmp_path / "missing.txt")
    assert result.returncode == 2 and result.stderr.startswith("error: this run would fail: ")
    assert not (tmp_path / "run").exists()
    with torch.device("meta"):
        n = GPT(GPTConfig(n_positions=32, vocab_size=384, n_layer=3, n_embd=32, n_head=2)).num_params()
    for figure in (f"{n:,} parameters", f"{7 * 256:,} in all", "4 checkpoints"):
        assert figure in result.stdout
    for how in ("none", "optimizer", "full"):
        assert how in result.stdout
    assert "data    unusable" in result.stdout and "missing.txt" in result.stdout


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of a table in docs/ that begins with `head`, without its first two lines."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_plan_of_gpt2_has_the_figures_of_the_page_about_one_gpu(inline, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    page = inline(train_gpt2.main, "--dry_run", "--price", "2.5").stdout
    lines = [line.rsplit(None, 5) for line in page.splitlines() if line]
    cards = [[name, rate, hours, dollars] for name, rate, _, hours, _, dollars in lines[-len(CARDS) :]]
    assert cards == rows_of("one_gpu.md", "| card | tokens/s")
    assert float(lines[-1][-2].replace(",", "")) * 8 == pytest.approx(float(lines[-1][-3]), rel=1e-2)
    memory = [line for line in lines if line[0].startswith("    1  none")]
    assert [line[1:] for line in memory] == [row[1:] for row in rows_of("one_gpu.md", "| what fits, 124M in bf16")]
    shape = GPTConfig(vocab_size=50304)
    for line, recomputed in zip(memory, (False, True), strict=True):
        needed = [sum(needs(shape, Layout(checkpointing=recomputed), B).values()) / 1e9 for B in (1, 8, 64)]
        assert line[0].split()[3:] == [f"{gb:.2f}" for gb in needed]
    for figure in (
        "124,475,904 parameters", "19,073 of 524,288", "9,999,745,024 in all", "B=1 ", "B=64 ", "16 GB", "141 GB",
        "20 checkpoints of 1.49 GB, 5 at once: 7.5 of", "this card costs 2.5",
    ):  # fmt: skip
        assert figure in page, figure


def test_gpt2_xl_needs_what_the_page_about_clusters_says():
    """In GB, on 8 ranks."""
    shape = GPTConfig(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600)
    for command, *said, _ in rows_of("cluster.md", "| | weights | gradients | moments"):
        how, checkpointing, n = re.fullmatch(r"`--shard (\w+)( --activation.*)?`, B = (\d+)", command).groups()
        found = needs(shape, Layout(ranks=8, shard=how, checkpointing=bool(checkpointing)), int(n))
        found["weights"] += found.pop("copies")
        figures = [*found.values(), sum(found.values())]
        assert [figure.split(":")[0] for figure in said] == [f"{figure / 1e9:.1f}" for figure in figures], command


def test_a_plan_obeys_what_is_given_and_ends_at_the_batch(train, tmp_path):
    words = dict(dry_run=True, shard="full", micro_batch_size=2, activation_checkpointing=True, total_batch_size=512)
    plan = train.result(**words, max_steps=10**9, checkpoint_interval=1, keep_checkpoints=0)
    rows = [line.split() for line in plan.stdout.splitlines() if "recomputed" in line or "kept" in line]
    assert [row[:3] for row in rows] == [[str(n), "full" if n > 1 else "none", "recomputed"] for n in (1, 2, 4, 8)]
    assert [row[-1] for row in rows] == ["16", "8", "4", "2"]  # sequences of a step on each rank
    assert "B=2 " in plan.stdout and "B=8" not in plan.stdout and "NOT ENOUGH" in plan.stdout


def test_the_estimated_time_of_a_step_on_an_h100():
    """By hand, from what docs/benchmarks.md says of 65,536 tokens of GPT-2 124M: 137 ms."""
    shape, found = GPTConfig(n_positions=1024, vocab_size=50304, n_layer=12, n_head=12, n_embd=768), peaks("H100")
    parts = step_parts(shape, 1024).values()
    seconds = [1e3 * work / found[bound == "memory"] / REACHED[bound] for bound, work in parts]  # ms
    assert seconds == pytest.approx([53, 24, 17.5, 11, 7.8, 5.9, 2.4, 6.4, 3.5], abs=0.3)
    assert sum(seconds) + 1e3 * LAUNCHES * 12 == pytest.approx(137, abs=0.5)


def test_a_dry_run_from_a_model_with_more_positions_counts_the_tokens_of_a_step(train, tmp_path):
    """The activations of 32 tokens, whatever the base has; its weights differ by the rows of `wpe` alone."""
    GPT(GPTConfig(n_positions=1024, vocab_size=384, n_layer=2, n_head=2, n_embd=32)).save_pretrained(tmp_path / "base")
    plans = [train(dry_run=True, **more).stdout.splitlines() for more in ({}, dict(init_from=tmp_path / "base"))]
    small, large = (float(next(line.split()[4] for line in plan if " none " in line)) for plan in plans)
    assert small <= large < small + 16 * 4 * 992 * 32 / 1e9 + 0.01
