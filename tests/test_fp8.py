"""Products in 8 bits: exact for what 8 bits hold, close otherwise, and only where they pay."""

import pytest
import torch

from learning.fp8 import FP8_MATMULS, by_dlogits, by_weights
from learning.loss import LinearCrossEntropy, linear_cross_entropy
from machine.runtime import checkpoint_activations
from model import GPTWithLoss
from tests.test_model import loss_case, small, tokens


def test_8_bit_products_are_exact_for_what_8_bits_hold():
    torch.manual_seed(0)
    x, weight, grad = (torch.randint(-1, 2, shape).float() for shape in ((32, 48), (64, 48), (32, 64)))
    close = dict(rtol=1e-2, atol=1e-3)  # the result is in bf16
    torch.testing.assert_close(by_weights(x, weight.T).float(), x @ weight.T, **close)
    torch.testing.assert_close(by_dlogits(grad, weight).float(), grad @ weight, **close)
    torch.testing.assert_close(by_dlogits(grad.T, x).float(), grad.T @ x, **close)


def test_8_bit_products_are_laid_out_as_cuda_wants_them():
    """On tensors without memory PyTorch checks what it checks on CUDA: rows, columns, multiples of 16."""
    with torch.device("meta"):
        x, weight = torch.empty(1536, 768, dtype=torch.bfloat16, requires_grad=True), torch.empty(50304, 768)
        targets = torch.zeros(1536, dtype=torch.long)
        loss = LinearCrossEntropy.apply(x, weight.requires_grad_(), targets, 1024, True, FP8_MATMULS)
        assert [grad.dtype for grad in torch.autograd.grad(loss, (x, weight))] == [torch.bfloat16, torch.float32]
        with pytest.raises(RuntimeError, match="16"):  # it does check
            by_weights(torch.empty(32, 40), torch.empty(64, 40).T)


def test_the_scale_that_is_known_for_the_gradient_of_logits_keeps_small_probabilities_and_a_one():
    dlogits = torch.zeros(16, 32)
    dlogits[0, 0], dlogits[1, 1], dlogits[2, 2] = 1.0, 2.0**-30, -1.0
    found = by_dlogits(dlogits.bfloat16(), torch.eye(32).bfloat16())
    assert torch.equal(found.float(), dlogits)


def test_the_loss_in_8_bits_is_close_and_so_are_its_gradients():
    x, weight, targets = loss_case(n=256, channels=64, vocab=128, dtype=torch.float32)
    found = []
    for matmuls in (None, FP8_MATMULS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(x, weight, targets, matmuls)
        found.append([loss.detach(), *torch.autograd.grad(loss, (x, weight))])
    for exact, ours in zip(*found, strict=True):
        assert 1e-5 < (ours - exact).norm() / exact.norm() < 0.08  # it is another product, and a close one
    assert found[1][2].dtype == torch.float32


def test_a_head_in_8_bits_is_close_and_serves_training_only():
    torch.manual_seed(0)
    model = small(vocab_size=208)
    idx = tokens(32)[None] % 208
    expected = model.eval().loss(idx, idx).item()
    gradient = torch.autograd.grad(model.loss(idx, idx), model.lm_head.weight)[0]
    model.head_matmuls = FP8_MATMULS
    assert model.loss(idx, idx).item() == expected
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model.train().loss(idx, idx)
    assert loss.item() != expected and loss.item() == pytest.approx(expected, rel=0.05)
    error = (torch.autograd.grad(loss, model.lm_head.weight)[0] - gradient).norm() / gradient.norm()
    assert 1e-4 < error < 0.1


def test_8_bit_products_and_activation_checkpointing_compile_together_without_a_break():
    """Down to the operators of the backward pass; what fuses them needs a GPU to be of interest."""
    model = small(vocab_size=208, n_layer=1).train()
    model.head_matmuls = FP8_MATMULS
    checkpoint_activations(model.transformer.h)
    loss_of = GPTWithLoss(model)
    whole = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    idx, found = tokens(2, 32) % 208, []
    for forward in (whole, loss_of):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(idx, idx)
        grads = torch.autograd.grad(loss, tuple(model.parameters()))
        found.append(torch.cat([loss[None], *(grad.flatten() for grad in grads)]))
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()
