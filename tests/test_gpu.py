"""Whether a GPU computes what it should: `python -m pytest -m gpu`.

On a machine without one these run in small on the CPU, where they can only show that they work; what needs a GPU is
skipped. Sums on a GPU are not repeatable to the last bit, so that losses have to agree to a thousandth. In bf16 nothing
can be equal: the fast way may be twice as far from fp32 as the plain way in bf16 is.
"""

import shutil
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import train_gpt2
from benchmarks.hellaswag import score_one_by_one
from bpe.tokenizer import Tokenizer
from hellaswag import evaluate, prepare
from model import GPT, GPTConfig
from parts import loss, runtime
from parts.data import IGNORED, to_inputs
from parts.run import Run
from parts.runtime import Runtime
from tests.helpers import column, remove_after, seeded

pytestmark = pytest.mark.gpu
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SHAPE = GPTConfig(n_layer=4, n_positions=512, vocab_size=50304) if CUDA else GPTConfig(32, 512, 2, 2, 64)
COMPILE = "on" if CUDA else "off"  # the recipe tiny is not compiled
RUN = dict(device=DEVICE, dtype="auto", compile=COMPILE, max_steps=6, checkpoint_interval=3, eval_interval=3)
# what other tests look at on a CPU
slow_on_a_cpu = pytest.mark.gpu if CUDA else pytest.mark.slow
WORDS = "A woman makes tea in a kitchen and then she drinks it while the rain falls on the roof of her house".split()


@pytest.fixture(params=["adamw", "muon"])
def optimizer(request) -> str:
    return request.param


# ---------------------------------------------------------------------------------------------------- the same numbers


def gradients(dtype: str, plain: bool, compile: str = "off") -> torch.Tensor:
    """All gradients of one loss in a row, on the CPU: of the formula, or as train_gpt2.py has them."""
    rt = Runtime.setup(DEVICE, dtype, compile)
    torch.manual_seed(0)
    model = GPT(replace(SHAPE, attention="naive" if plain else "flash")).to(rt.device)
    generator = seeded()
    windows = torch.randint(SHAPE.vocab_size, (4, SHAPE.n_positions + 1), generator=generator).to(rt.device)
    idx, targets = to_inputs(windows)
    forward = model if plain else rt.compiled(model)
    with rt.autocast():
        loss = forward(idx) if plain else forward(idx, targets)
    loss = F.cross_entropy(loss.float().flatten(0, 1), targets.flatten()) if plain else loss
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_formula(dtype):
    exact = gradients("float32", plain=True)
    found = gradients(dtype, plain=False, compile=COMPILE)
    error = lambda x: ((x - exact).norm() / exact.norm()).item()  # noqa: E731
    assert error(found) < (1e-4 if dtype == "float32" else 2 * error(gradients(dtype, plain=True)) + 1e-3)


@pytest.mark.skipif(not CUDA, reason="needs a GPU: on a CPU the sum gets a kernel of its own")
def test_a_bias_gradient_is_summed_by_sequence_in_one_kernel_less():
    from torch._inductor import metrics
    from torch._inductor.utils import fresh_cache

    from parts.graphs import BiasGradients

    Runtime.setup("cuda", "float32")
    torch.manual_seed(0)
    linear = torch.nn.Linear(32, 128).cuda()
    x = torch.randn(4, 64, 32).cuda()
    found = []
    for changes in ({}, {"post_grad_custom_pre_pass": BiasGradients()}):
        linear.zero_grad()
        torch._dynamo.reset()
        metrics.reset()
        with fresh_cache():
            forward = torch.compile(lambda x: F.gelu(linear(x), approximate="tanh"), options=changes)
            forward(x).square().sum().backward()
        found.append((linear.bias.grad, metrics.generated_kernel_count))
    (by_rows, n), (by_sequence, fewer) = found
    torch.testing.assert_close(by_sequence, by_rows, rtol=1e-4, atol=1e-4)
    assert fewer == n - 1


@slow_on_a_cpu
@pytest.mark.parametrize("n_positions", [3, 5000])  # few, and chunks of which the last is ragged
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_and_its_gradients_are_those_of_the_formula(monkeypatch, dtype, n_positions):
    """On a GPU by the kernel. The scale is that of fp16 for 2^19 targets."""
    V = 50257 if CUDA else 500
    monkeypatch.setitem(loss.LOGITS, DEVICE, 2048 * V)
    Runtime.setup(DEVICE, "float32")  # no TF32
    generator = seeded()
    x = torch.randn(n_positions, 64, generator=generator).to(DEVICE)
    weight = (0.3 * torch.randn(V, 64, generator=generator)).to(DEVICE).requires_grad_()
    targets = torch.randint(V, (n_positions,), generator=generator).to(DEVICE)
    targets[1::5] = IGNORED
    scale = 2**16 / 2**19
    exact = x.to(dtype).float().requires_grad_()
    expected = loss.plain_cross_entropy(exact, weight, targets)
    wanted = torch.autograd.grad(scale * expected, (exact, weight))
    x = x.to(dtype).requires_grad_()
    found = loss.linear_cross_entropy(x, weight, targets)
    limit = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert found.item() == pytest.approx(expected.item(), rel=limit / 10)
    for gradient, exact_gradient in zip(torch.autograd.grad(scale * found, (x, weight)), wanted, strict=True):
        assert (gradient - exact_gradient).norm() < limit * exact_gradient.norm()


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_gpu_computes_its_loss_with_the_kernel():
    assert loss.loss_of_rows("cuda", 50304, torch.bfloat16) is not loss.cross_entropy_


def invented(number: int) -> dict:
    """A row of HellaSwag."""
    rng = np.random.default_rng(number)
    pick = lambda low, high: " ".join(rng.choice(WORDS, int(rng.integers(low, high))))  # noqa: E731
    return dict(ctx=pick(3, 15), endings=[pick(2, 9) for _ in range(4)], label=number % 4)


@pytest.mark.parametrize("dtype, limit", [("float32", 1e-4), ("auto", 0.05)])
def test_sums_of_hellaswag_are_those_of_one_row_at_a_time(dtype, limit):
    tokenizer, rows = Tokenizer.train([" ".join(WORDS)], 300), [invented(i) for i in range(64 if CUDA else 8)]
    rt = Runtime.setup(DEVICE, "float32")
    torch.manual_seed(0)
    model = GPT(replace(SHAPE, n_positions=256))
    for p in model.parameters():  # logits as large as those of a trained model, far from a uniform guess
        torch.nn.init.normal_(p, std=0.1)
    model.to(rt.device).eval()
    plain = np.array(score_one_by_one(model, tokenizer, rows, rt))  # (rows, 4), before anything allows TF32
    task = prepare(rows, tokenizer, model.config, "completion")
    ours = -np.array(evaluate(model, task, Runtime.setup(DEVICE, dtype))["log_likelihoods"])
    assert np.abs(ours / plain - 1).max() < limit


@slow_on_a_cpu
def test_a_resumed_run_has_the_losses_of_one_that_was_not_interrupted(train, tmp_path, optimizer):
    train(out="whole", optimizer=optimizer, **RUN)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    remove_after(tmp_path / "parts", 3)  # as if it had been killed after that
    train(out="parts", optimizer=optimizer, resume=True, **RUN)
    expected = column(tmp_path / "whole", "train", "loss")
    assert column(tmp_path / "parts", "train", "loss") == pytest.approx(expected, rel=1e-3)


# ----------------------------------------------------------------------------------------------------- nothing is slow


@slow_on_a_cpu
def test_the_time_between_two_marks_is_that_of_the_device_and_not_of_the_host():
    rt = Runtime.setup(DEVICE)
    start = rt.mark_time()
    torch.cuda._sleep(10**9) if CUDA else time.sleep(0.3)  # cycles, for which the host does not wait
    end = rt.mark_time()
    assert 0.25 < rt.seconds_between(start, end) < 2


@pytest.fixture
def graphs(monkeypatch) -> list[int]:
    """The number of compiled graphs at the start of each step. From step 3 on the body of the training loop runs with
    every operator that waits for the GPU an error; evaluations and checkpoints may wait."""

    from torch._dynamo.utils import counters

    found = []
    real = train_gpt2.learning_rate
    real_log = Run.log
    mode = torch.cuda.set_sync_debug_mode if CUDA else lambda mode: None

    def learning_rate(step, config):  # the first call of the loop's body
        found.append(counters["stats"]["unique_graphs"])
        mode("error" if step >= 3 else "default")
        return real(step, config)

    def log(*args):  # the last one
        real_log(*args)
        mode("default")

    monkeypatch.setattr(train_gpt2, "learning_rate", learning_rate)
    monkeypatch.setattr(Run, "log", log)
    if not CUDA:  # graphs are the same, and done in a second
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        monkeypatch.setattr(runtime, "static_shapes", "eager")
    torch._dynamo.reset()
    counters.clear()
    yield found
    mode("default")
    torch._dynamo.reset()


@slow_on_a_cpu
def test_the_loop_waits_for_nothing_and_is_compiled_once(train, graphs, optimizer):
    from torch._dynamo.utils import counters

    train(**RUN | dict(optimizer=optimizer, compile="on", micro_batch_size=8))
    breaks = [reason for reason in counters["graph_break"] if "compiler.disable" not in reason]  # of the loss alone
    assert not breaks
    assert len(graphs) == 6
    assert graphs[1] - graphs[0] == 1 + (optimizer == "muon")  # the hidden states; Muon's momentum
    assert graphs[-1] - graphs[1] == 1  # of validation
