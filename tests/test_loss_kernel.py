"""The kernel of the loss, interpreted on the CPU, against the formula. Needs Triton, which PyTorch's builds for CUDA
bring along; the numbers of a compiled kernel are compared by test_gpu.py."""

import math
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
import torch
from torch.nn import functional as F

from parts.data import IGNORED
from parts.loss import cross_entropy_
from tests.helpers import seeded

if find_spec("triton") is None:
    pytest.skip("there is no Triton here", allow_module_level=True)

EPS = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # rounding, of numbers up to 1
DTYPES = list(EPS)


@pytest.fixture(scope="module")
def interpreted():
    """interpreted(function, *args) calls it in a process in which Triton interprets kernels. Triton decides that when
    it is imported, and here it may have been imported already."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            yield lambda function, *args: process.submit(function, *args).result()


def call_kernel(logits, targets, vocab_size=0, need_gradient=True) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses, and what is in the place of the logits then."""
    from parts.loss_kernel import cross_entropy_

    return cross_entropy_(logits, targets, vocab_size or logits.size(1), need_gradient), logits


def rows(n_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and targets of which every third is not scored."""
    logits = 4 * torch.randn(n_rows, vocab_size, generator=seeded())
    targets = torch.randint(vocab_size, (n_rows,), generator=seeded())
    targets[::3] = IGNORED
    return logits.to(dtype), targets


# one token, fewer than a block has, a whole block, GPT-2's vocabulary, and one that no program has registers for
@pytest.mark.parametrize("n_rows, vocab_size", [(4, 1), (2, 17), (33, 2048), (4, 50257), (3, 70000)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_has_the_losses_and_the_gradients_of_each_row(interpreted, n_rows, vocab_size, dtype):
    logits, targets = rows(n_rows, vocab_size, dtype)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses, overwritten = interpreted(call_kernel, logits, targets)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    # rounded twice: the exponentials, and what becomes of them
    torch.testing.assert_close(overwritten.double(), gradient, rtol=2 * EPS[dtype], atol=EPS[dtype] / 100)
    assert not overwritten[targets < 0].any()


def test_without_a_gradient_the_logits_stay_as_they_are(interpreted):
    logits, targets = rows(5, 300, torch.float32)
    losses, after = interpreted(call_kernel, logits, targets, 0, False)
    assert torch.equal(after, logits)
    assert torch.equal(losses, interpreted(call_kernel, logits, targets)[0])


@pytest.mark.parametrize("where", ["kernel", "PyTorch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_past_the_vocabulary_are_no_logits(interpreted, dtype, where):
    """Whatever they hold: a copy of 50,257 rows of weights has 50,304, for aligned products."""
    logits, targets = rows(5, 300, dtype)
    padded = F.pad(logits, (0, 20), value=7.0)
    if where == "kernel":
        losses, overwritten = interpreted(call_kernel, padded, targets, 300)
        expected, gradient = interpreted(call_kernel, logits, targets)
    else:
        losses, overwritten = cross_entropy_(padded, targets, 300), padded
        expected, gradient = cross_entropy_(logits, targets, 300), logits
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(overwritten[:, :300], gradient)
    assert not overwritten[:, 300:].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_shows_in_the_loss_of_its_row_alone(interpreted, value):
    logits, targets = rows(6, 300, torch.float32)
    logits[4, 7] = value
    losses, _ = interpreted(call_kernel, logits, targets)
    assert losses.isfinite().tolist() == [True, True, True, True, False, True]
