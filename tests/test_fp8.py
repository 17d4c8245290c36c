"""Products in 8 bits: exact for what 8 bits hold, close otherwise, and only where they pay."""

import pytest
import torch
from torch.nn import functional as F

from cli import UserError
from learning import fp8
from learning.fp8 import Float8Linear, Float8Product, by_dlogits, by_weights, use_float8
from learning.loss import LinearCrossEntropy, linear_cross_entropy
from model import GPT, GPTConfig
from run.trials import checkpoint_activations
from tests.test_model import loss_case, small, tokens


@pytest.fixture(params=["public", "private"])
def scaled_mm(request, monkeypatch):
    """PyTorch 2.11 has the product in 8 bits under another name only."""
    if request.param == "private":
        monkeypatch.delattr(F, "scaled_mm", raising=False)
    elif not hasattr(F, "scaled_mm"):
        pytest.skip("this PyTorch has no public scaled_mm")


def test_8_bit_products_are_exact_for_what_8_bits_hold(scaled_mm):
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (32, 48)).float().requires_grad_()
    weight = torch.randint(-1, 2, (64, 48)).float().requires_grad_()
    grad = torch.randint(-1, 2, (32, 64)).float()
    Float8Product.apply(x, weight).backward(grad.bfloat16())
    y = Float8Product.apply(x, weight)
    torch.testing.assert_close(y.float(), x @ weight.T, rtol=1e-2, atol=1e-3)  # of bf16, which the result is in
    torch.testing.assert_close(x.grad, grad @ weight, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(weight.grad, grad.T @ x, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(by_weights(x, weight.T).float(), x @ weight.T, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(by_dlogits(grad, weight).float(), grad @ weight, rtol=1e-2, atol=1e-3)


def test_8_bit_products_are_laid_out_as_cuda_wants_them(scaled_mm):
    """On tensors without memory PyTorch checks what it checks on CUDA: rows, columns, multiples of 16."""
    with torch.device("meta"):
        x, weight = torch.empty(1536, 768, dtype=torch.bfloat16, requires_grad=True), torch.empty(50304, 768)
        targets = torch.zeros(1536, dtype=torch.long)
        loss = LinearCrossEntropy.apply(x, weight.requires_grad_(), targets, 1024, True, True)
        assert [grad.dtype for grad in torch.autograd.grad(loss, (x, weight))] == [torch.bfloat16, torch.float32]
        y = Float8Product.apply(x, torch.empty(3072, 768, requires_grad=True))
        assert torch.autograd.grad(y, x, torch.empty_like(y))[0].shape == x.shape
        with pytest.raises(RuntimeError, match="16"):  # it does check
            Float8Product.apply(torch.empty(32, 40), torch.empty(64, 40))


def test_the_scale_that_is_known_for_the_gradient_of_logits_keeps_small_probabilities_and_a_one():
    dlogits = torch.zeros(16, 32)
    dlogits[0, 0], dlogits[1, 1], dlogits[2, 2] = 1.0, 2.0**-30, -1.0
    found = by_dlogits(dlogits.bfloat16(), torch.eye(32).bfloat16())
    assert torch.equal(found.float(), dlogits)


def test_the_loss_in_8_bits_is_close_and_so_are_its_gradients():
    x, weight, targets = loss_case(n=256, channels=64, vocab=128, dtype=torch.float32)
    found = []
    for in_8_bits in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(x, weight, targets, in_8_bits)
        found.append([loss.detach(), *torch.autograd.grad(loss, (x, weight))])
    for exact, ours in zip(*found, strict=True):
        assert 1e-5 < (ours - exact).norm() / exact.norm() < 0.08  # it is another product, and a close one
    assert found[1][2].dtype == torch.float32


def test_8_bit_products_are_close_and_serve_training_only():
    torch.manual_seed(0)
    model = small(vocab_size=208)
    idx = tokens(32)[None] % 208
    expected, _ = model.eval()(idx)
    expected_loss = model(idx, idx)[1]
    names = list(model.state_dict())
    assert use_float8(model, blocks=True) == ["head", "blocks"]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model.eval()(idx)[0], expected, rtol=0, atol=0)
    assert model(idx, idx)[1] == expected_loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close, loss = model.train()(idx)[0], model(idx, idx)[1]
    error = (close.float() - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.05 and loss.item() == pytest.approx(expected_loss.item(), rel=0.05)


@pytest.mark.parametrize("wide, found", [(33, ["head"]), (32, ["head", "blocks"])])
def test_8_bit_products_are_of_the_head_and_of_wide_blocks(monkeypatch, wide, found):
    monkeypatch.setattr(fp8, "WIDE", wide)
    model = small(vocab_size=208)
    assert use_float8(model) == found and model.float8_head
    assert any(isinstance(module, Float8Linear) for module in model.modules()) is ("blocks" in found)


@pytest.mark.parametrize("sizes", [dict(n_embd=24), dict(vocab_size=65)], ids=str)
def test_8_bit_products_refuse_sizes_that_the_hardware_refuses(sizes):
    model = GPT(GPTConfig(**dict(sequence_length=8, vocab_size=64, n_layer=1, n_head=2, n_embd=32) | sizes))
    with pytest.raises(UserError, match="multiples of 16"):
        use_float8(model)


def test_8_bit_products_and_activation_checkpointing_compile_together_without_a_break():
    """Down to the operators of the backward pass; what fuses them needs a GPU to be of interest."""
    model = small(vocab_size=208, n_layer=1).train()
    use_float8(model, blocks=True)
    checkpoint_activations(model.transformer.h)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    idx, found = tokens(2, 32) % 208, []
    for forward in (whole, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(idx, idx)[1]
        grads = torch.autograd.grad(loss, tuple(model.parameters()))
        found.append(torch.cat([loss[None], *(grad.flatten() for grad in grads)]))
    assert (found[0] - found[1]).norm() < 0.02 * found[1].norm()
