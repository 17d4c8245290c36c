"""The formula for the memory of training, against every byte that tensors have while a model trains."""

import json
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
from parts.loss import chunk_size, linear_cross_entropy
from parts.optim import make_optimizer
from parts.plan import CARDS, Layout, n_parameters, needs, token_flops
from parts.runtime import Runtime, checkpoint_activations
from parts.shards import prepare_text
from tests.helpers import ROOT, slow, table, text_file


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


# a model's attention; tokens of a sequence, sequences, how it is trained; the bytes of each kind, by hand from the
# docstring of plan.py. Of the four moments of the logits each is the largest in some of them; Muon's step, too
BYTES = """
flash 16 3 {} | 44480 18432 44480 88960 184320 25920 67112791
flash 4 1 {"ranks":3} | 44480 18432 88960 88960 15360 5280 67113680
flash 1 1 {"itemsize":4} | 44480 0 44480 88960 6592 4080 67112422
flash 1 1 {} | 44480 18432 44480 88960 3840 4920 67112791
naive 16 3 {} | 44480 18432 44480 88960 230400 25920 67112791
naive 16 3 {"itemsize":4} | 44480 0 44480 88960 408576 24960 67112422
naive 16 3 {"device":"cpu"} | 44480 18432 44480 88960 230400 25920
flash 4 1 {"itemsize":4,"device":"cpu"} | 44480 0 44480 88960 26368 4800
flash 16 3 {"checkpointing":true} | 44480 18432 44480 88960 23040 25920 67112791
flash 4 3 {"ranks":3,"shard":"optimizer"} | 59304 18432 47968 29653 46080 8640 67111971
flash 16 5 {"ranks":3,"shard":"optimizer","checkpointing":true} | 59304 18432 47968 29653 38400 41280 67111971
flash 4 1 {"ranks":3,"shard":"full","checkpointing":true} | 24424 18432 14824 29653 1920 9536 67110610
flash 4 1 {"optimizer":"muon"} | 44480 18432 44480 52096 15360 5280 28512 67112053
flash 4 1 {"optimizer":"muon","ranks":3} | 44480 18432 88960 52096 15360 5280 28512 67112943
flash 1 1 {"checkpointing":true,"ranks":3,"shard":"optimizer"} | 59304 18432 47968 29653 480 6240 67111971
flash 1 1 {"optimizer":"muon","ranks":3,"shard":"optimizer"} | 59304 18432 47968 17365 3840 4920 0 67111725
flash 1 1 {"optimizer":"muon","ranks":3,"shard":"full"} | 24424 18432 14824 17365 3840 8288 2853 67110364
flash 1 1 {"optimizer":"muon"} | 44480 18432 44480 52096 3840 4920 40392 67112053
flash 16 3 {"compiled":true} | 44480 18432 44480 88960 182784 12480 67112791
flash 16 3 {"compiled":true,"itemsize":4} | 44480 0 44480 88960 313344 23040 67112422
flash 16 1000000 {"compiled":true} | 44480 18432 44480 88960 60928000000 1920002880 67112791
flash 1 1 {"compiled":true,"checkpointing":true} | 44480 0 44480 88960 416 48208 67112422
flash 4 1 {"compiled":true,"ranks":3} | 44480 18432 88960 88960 15232 3840 67113680
flash 16 3 {"compiled":true,"ranks":3,"shard":"full"} | 24424 18432 14824 29653 174336 12480 67110610
flash 1 1 {"compiled":true,"ranks":3,"shard":"full"} | 24424 18432 14824 29653 3632 2040 67110610
flash 16 9 {"compiled":1,"checkpointing":1,"ranks":3,"shard":"optimizer"} | 59304 0 47968 29653 66816 53760 67111602
"""


@pytest.mark.parametrize("case, said", table(BYTES))
def test_every_byte_of_the_formula(case, said):
    attention, T, rows, layout = case.split()
    shape = GPTConfig(n_positions=20, vocab_size=60, n_layer=12, n_head=2, n_embd=8, attention=attention)
    found = needs(shape, Layout(int(T), **json.loads(layout)), int(rows))
    assert " ".join(map(str, found.values())) == said[0]


def peak_without_optimizer(model: GPT, shape: GPTConfig, layout: Layout, rows: int) -> int:
    idx = torch.arange(rows * layout.sequence_length).view(rows, -1) % shape.vocab_size
    with LiveBytes(model.parameters()) as memory:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=layout.itemsize == 2):
                loss = model.loss(idx, idx)
            loss.backward()
            del loss
    return memory.peak


def test_the_loss_keeps_8_bytes_of_each_logit_without_compilation():
    """One copy in fp32 and the softmax: nothing of the chunk before, and no 16-bit logits any more."""
    n_positions, vocab_size = 4096, 1024
    x, weight = torch.randn(n_positions, 8), torch.randn(vocab_size, 8, requires_grad=True)
    targets = torch.randint(vocab_size, (n_positions,))
    a_chunk = chunk_size(n_positions, vocab_size, "cpu", False) * vocab_size  # logits
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
    result = train.result(dry_run=True, max_steps=7, checkpoint_interval=2, data=tmp_path / "missing.txt")
    assert result.returncode == 2 and result.stderr.startswith("error: this run would fail: ")
    assert not (tmp_path / "run").exists()
    assert f"data    unusable: {tmp_path / 'missing.txt'}" in result.stdout and " 4 checkpoints of " in result.stdout


def rows_of(page: str, head: str) -> list[list[str]]:
    """The cells of a table in docs/ that begins with `head`, without its first two lines."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


PLAN = """\
model   124,475,904 parameters
steps   19,073 of 524,288 tokens, 9,999,745,024 in all
data    unusable: --data edu_fineweb10B does not exist; write shards with fineweb.py, or start with one that needs no other data: python train_gpt2.py tiny
disk    20 checkpoints of 1.49 GB, 5 at once: 7.5 of ... GB free
memory  GB on each rank, adamw, 16-bit products, micro-batches of B sequences;
        with torch.compile on a GPU, unless --compile off; --micro_batch_size 0 tries without

ranks  --shard    activations      B=1      B=8     B=64    largest B on   16 GB   24 GB   40 GB   80 GB  141 GB
    1  none       kept            2.93     6.77    27.38                      16      32      64     128     256
    1  none       recomputed      2.78     4.15     7.63                     128     256     256     512     512
    2  none       kept            3.44     7.28    27.89                      16      32      64     128     256
    2  none       recomputed      2.99     4.66     8.13                     128     256     256     256     256
    2  optimizer  kept            2.66     6.41    26.05                      32      32      64     128     256
    2  optimizer  recomputed      2.20     3.96     7.70                     128     256     256     256     256
    2  full       kept            2.09     5.84    25.47                      32      32      64     128     256
    2  full       recomputed      1.63     3.39     7.13                     128     256     256     256     256
    4  none       kept            3.44     7.28    27.89                      16      32      64     128     128
    4  none       recomputed      2.99     4.66     8.13                     128     128     128     128     128
    4  optimizer  kept            2.28     6.03    25.67                      32      32      64     128     128
    4  optimizer  recomputed      1.82     3.58     7.32                     128     128     128     128     128
    4  full       kept            1.58     5.33    24.97                      32      32      64     128     128
    4  full       recomputed      1.12     2.88     6.62                     128     128     128     128     128
    8  none       kept            3.44     7.28    27.89                      16      32      64      64      64
    8  none       recomputed      2.99     4.66     8.13                      64      64      64      64      64
    8  optimizer  kept            2.09     5.84    25.47                      32      32      64      64      64
    8  optimizer  recomputed      1.63     3.39     7.13                      64      64      64      64      64
    8  full       kept            1.33     5.07    24.71                      32      32      64      64      64
    8  full       recomputed      0.87     2.63     6.37                      64      64      64      64      64

time    estimated from data sheets and the profile of one H200; without the gradient exchange
        between ranks, evaluations and checkpoints

card        tokens/s     MFU   hours on 1     on 8   dollars on 1 or 8, if an hour of one card costs 2.5
B200       1,105,325   42.0%         2.51     0.31          6
H200         538,294   46.6%         5.16     0.65         13
H100         477,320   41.3%         5.82     0.73         15
A100         183,804   50.4%        15.11     1.89         38
L40S         150,910   35.7%        18.41     2.30         46
RTX 4090      95,618   49.6%        29.05     3.63         73
RTX 3090      47,524   57.3%        58.45     7.31        146
"""  # noqa: E501


def test_the_plan_of_gpt2_has_the_figures_of_the_page_about_one_gpu(inline, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    page = inline(train_gpt2.main, "--dry_run", "--price", "2.5").stdout
    assert re.sub("[0-9.]+ GB free", "... GB free", page) == PLAN
    lines = [line.rsplit(None, 5) for line in page.splitlines() if line]
    cards = [[name, rate, hours, dollars] for name, rate, _, hours, _, dollars in lines[-len(CARDS) :]]
    assert cards == rows_of("gpu.md", "| card | tokens/s")
    memory = [line[1:] for line in lines if line[0].startswith("    1  none")]
    assert memory == [row[1:] for row in rows_of("gpu.md", "| what fits, 124M in bf16")]


def test_gpt2_xl_needs_what_the_page_about_clusters_says():
    """In GB, on 8 ranks."""
    shape = GPTConfig(vocab_size=50304, n_layer=48, n_head=25, n_embd=1600)
    for command, *said, _ in rows_of("gpu.md", "| | weights | gradients | moments"):
        how, checkpointing, n = re.fullmatch(r"`--shard (\w+)( --activation.*)?`, B = (\d+)", command).groups()
        found = needs(shape, Layout(1024, ranks=8, shard=how, checkpointing=bool(checkpointing), compiled=True), int(n))
        found["weights"] += found.pop("copies")
        figures = [*found.values(), sum(found.values())]
        assert [figure.split(":")[0] for figure in said] == [f"{figure / 1e9:.1f}" for figure in figures], command


OBEYED = """\
memory  GB on each rank, muon, 32-bit products, micro-batches of B sequences;
        with torch.compile on a GPU, unless --compile off; --micro_batch_size 0 tries without

ranks  --shard    activations    B=256    largest B on   16 GB   24 GB   40 GB   80 GB  141 GB
    1  none       recomputed      1.16                    1024    1024    1024    1024    1024
    2  full       recomputed      1.15                    1024    1024    1024    1024    1024
    4  full       recomputed      1.08                    1024    1024    1024    1024    1024
    8  full       recomputed      1.04                     512     512     512     512     512

"""


def test_a_plan_obeys_what_is_given_and_ends_at_the_batch(train, tmp_path):
    """On shards, for a GPU in fp32."""
    data = prepare_text(str(text_file(tmp_path / "text.txt")), "train", 300, tmp_path / "cache")
    words = dict(shard="full", micro_batch_size=256, activation_checkpointing=True, total_batch_size=2**17, n_embd=1024)
    words |= dict(device="auto", data=data, max_steps=10**7, checkpoint_interval=1, keep_checkpoints=0)
    plan = train.result(dry_run=True, **words).stdout
    assert OBEYED in plan and "NOT ENOUGH" in plan
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
