"""minimal.py as the oracle: train_gpt2.py has its losses, model.py its logits."""

import re
import subprocess
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import minimal
from bpe.tokenizer import Tokenizer
from model import GPT, GPTConfig
from tests.helpers import ROOT, TORCHRUN, column, environment, prose, run_script, slow, small_args

SIZES = dict(vocab_size=320, n_layer=2, n_head=2, n_embd=32, sequence_length=32)
STEPS = dict(total_batch_size=512, micro_batch_size=8, max_steps=12, warmup_steps=4, max_lr=3e-3, min_lr=3e-4)
SMALL = minimal.Config(**SIZES, **STEPS, device="cpu", bf16=False, compile=False)
PLAIN = dict(optimizer="adamw", lr_schedule="cosine", weight_decay=0.1, no_shuffle=True, eval_interval=0)
NEVER = dict(sample_interval=0, checkpoint_interval=0)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A folder of shards that 12 steps read more than once; none of them is a multiple of a window."""
    folder = tmp_path_factory.mktemp("shards")
    tokenizer = Tokenizer.train([prose(60_000)], SIZES["vocab_size"])
    tokenizer.save(folder / "tokenizer.json")
    ids = np.array(tokenizer.encode_ordinary(prose(20_000)), np.uint16)
    np.save(folder / "x_val_000000.npy", ids[:1001])
    for i, part in enumerate(np.split(ids[1001:], [2003, 2501])):
        np.save(folder / f"x_train_{i + 1:06d}.npy", part)
    return folder


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)", output, re.MULTILINE)]


def difference(ours: list[float], minimals: list[float]) -> float:
    assert len(ours) == len(minimals) == STEPS["max_steps"]
    return max(abs(a - b) for a, b in zip(ours, minimals, strict=True))


@pytest.mark.parametrize(
    "changes, ours, limit",
    [
        (dict(), dict(), 2e-6),  # minimal.py prints six digits
        (dict(micro_batch_size=2), dict(attention="naive"), 2e-6),
        slow(dict(), dict(compile="on"), 2e-6),
        slow(dict(bf16=True), dict(dtype="bfloat16"), 3e-3),
    ],
    ids=["one micro-batch a rank", "accumulation", "compiled", "bf16"],
)
def test_train_gpt2_has_the_same_losses(train, run_dir, shards, tmp_path, capsys, changes, ours, limit):
    config = replace(SMALL, data=str(shards), checkpoint=str(tmp_path / "minimal.pt"), **changes)
    minimal.train(config)
    expected = losses_of(capsys.readouterr().out)
    sizes = SIZES | STEPS | PLAIN | NEVER | dict(micro_batch_size=config.micro_batch_size)
    train(data=shards, tokenizer=shards / "tokenizer.json", **sizes, **ours)
    assert difference(column(run_dir, "train", "loss"), expected) < limit
    assert expected[-1] < expected[0] - 0.5


@pytest.mark.slow
def test_train_gpt2_has_the_same_losses_on_two_ranks(tmp_path, shards):
    constants = SIZES | STEPS | dict(data=str(shards), device="cpu", bf16=False, compile=False)
    constants["checkpoint"] = str(tmp_path / "minimal.pt")
    text = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport minimal\nminimal.train(minimal.Config(**{constants}))\n"
    (tmp_path / "script.py").write_text(text)
    two = [*TORCHRUN, "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*two, str(tmp_path / "script.py")], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = SIZES | STEPS | PLAIN | NEVER | dict(data=shards, tokenizer=shards / "tokenizer.json", total_batch_size=512)
    ours = run_script("train_gpt2.py", *small_args(tmp_path, **sizes), ranks=2)
    assert ours.returncode == 0, ours.stderr[-2000:]
    assert difference(column(tmp_path / "run", "train", "loss"), losses_of(done.stdout)) < 2e-6


def test_the_first_weights_and_their_logits_are_those_of_model_py():
    torch.manual_seed(5)
    ours = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=320))
    torch.manual_seed(5)
    model = minimal.GPT(SMALL)
    assert list(ours.state_dict()) == list(model.state_dict())
    assert all(map(torch.equal, ours.state_dict().values(), model.state_dict().values()))
    idx = torch.arange(64).view(2, 32) * 7 % 320
    torch.testing.assert_close(model(idx), ours(idx), rtol=0, atol=1e-5)


def test_it_writes_text_after_it_has_learned(tmp_path):
    text = tmp_path / "abc.txt"
    text.write_text("abc" * 1000)
    checkpoint = str(tmp_path / "minimal.pt")
    config = replace(SMALL, data=str(text), checkpoint=checkpoint, vocab_size=256, max_steps=60, max_lr=1e-2)
    model = minimal.train(config)
    assert bytes(minimal.sample(model, list(b"ab"), 40, config.sequence_length)).count(b"abc") > 10


def test_a_resume_continues_to_the_same_weights(tmp_path, shards, monkeypatch):
    whole = replace(SMALL, data=str(shards), checkpoint=str(tmp_path / "whole.pt"), eval_interval=5)
    expected = minimal.train(whole).state_dict()
    halves = replace(whole, checkpoint=str(tmp_path / "halves.pt"))
    clock = time.perf_counter
    steps = iter(range(2 * 10))
    with monkeypatch.context() as patch, pytest.raises(StopIteration):  # a step reads it twice: stops in step 11
        patch.setattr(time, "perf_counter", lambda: next(steps) and clock())
        minimal.train(halves)
    state = torch.load(tmp_path / "halves.pt", weights_only=True)
    assert state["step"] == 10
    found = minimal.train(replace(halves, resume=True)).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    minimal.train(replace(halves, resume=True, max_steps=13, weight_decay=0.5, beta1=0.8, eps=1e-6))  # as edited
    matrices, others = torch.load(halves.checkpoint)["optimizer"]["param_groups"]
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    assert [(group["betas"], group["eps"]) for group in (matrices, others)] == [((0.8, 0.95), 1e-6)] * 2


def test_it_validates_on_the_last_tenth_of_a_text(tmp_path, capsys):
    text = tmp_path / "ab.txt"
    text.write_bytes(b"a" * 9000 + b"b" * 1000)
    config = replace(SMALL, data=str(text), checkpoint=str(tmp_path / "minimal.pt"), vocab_size=256, eval_steps=3)
    model = minimal.train(config)
    [loss] = re.findall(r"step +12  validation loss (\S+)", capsys.readouterr().out)
    idx = torch.full((1, 32), ord("b"))
    with torch.no_grad():
        assert abs(float(loss) - model(idx, idx).item()) < 1e-3


def test_an_existing_checkpoint_is_not_overwritten(tmp_path, shards, capsys):
    config = replace(SMALL, data=str(shards), checkpoint=str(tmp_path / "minimal.pt"), max_steps=1)
    minimal.train(config)
    before = (tmp_path / "minimal.pt").read_bytes()
    with pytest.raises(SystemExit) as end:
        minimal.train(config)
    assert end.value.code == 2
    assert "minimal.pt" in capsys.readouterr().err
    assert (tmp_path / "minimal.pt").read_bytes() == before


def test_a_window_may_reach_into_the_next_shard():
    tokens = minimal.Tokens([np.arange(10), np.arange(10, 17), np.arange(17, 40)])
    for start in range(30):
        assert tokens.read(start, 6).tolist() == list(range(start, start + 6))
    idx, targets = tokens.windows(range(6, 9), 5)  # of seven windows; then the first one again
    assert idx[:, 0].tolist() == [30, 0, 5]
    assert torch.equal(targets, idx + 1)
