"""FP8: matrix products in 8 bits while training, for GPUs that multiply 8 bits twice as fast as 16.

    use_float8(model)         # once, before training; parameters, files and generation stay as they are

**Two formats** (Micikevicius et al. 2022, section 3). E4M3 has 4 bits of exponent and 3 of mantissa: eight numbers for
each power of two, so a rounding error of up to 6% from 2^-6 to 448, and coarser steps down to 2^-9. E5M2 moves one bit
of the mantissa to the exponent: up to 12.5% from 2^-14 to 57,344, and coarser steps down to 2^-16. Weights and
activations need the precision, gradients the range. The errors do little harm because they are independent of each
other: a product adds up hundreds of them, and most cancel.

**A scale for each tensor.** Activations of 0.0005 would vanish in E4M3, and those of 500 overflow. So a tensor is
divided by a scale that brings its largest absolute value to the largest number of the format, and the product is
multiplied by both scales while it is still fp32. The scale is measured for each tensor anew, one more pass over it.
There are two other ways: the largest value of the last steps (NVIDIA's Transformer Engine) saves the pass, and may
overflow; a scale for each row (an option of torchao) is more precise, but the backward pass, which sums over the other
dimension, then needs the tensor a second time with a scale for each column.

**Three products** make a linear layer: y = x W^T forward, then dx = dy W and dW = dy^T x. All three are in FP8 here, in
the output projection and in wide blocks. LayerNorm, GELU, attention and the embeddings have no product with a weight
matrix.

**Why column-major.** A product sums over one dimension, K, and in 8 bits the tensor cores want both operands to lie in
memory along K (in 16 bits they can transpose while they load). So in a (N, K) @ b (K, M) the rows of a and the columns
of b have to be contiguous. In x W^T they are: x and W both have K last. The other two products need transposed copies,
of W for dx, of dy and x for dW, made from what is rounded already, at a byte a number.

**Where it pays.** The cost of maxima, rounding and copies is proportional to N (K + M), the saving to N K M: blocks
have to be wide. The output projection is 31% of all products of GPT-2 124M, and its largest tensor needs no maximum:
the gradient of the loss by the logits is softmax - one_hot, between -1 and 1, so that its scale is known (`by_dlogits`;
learning/loss.py calls it). All this is expected, and not yet measured on a GPU; `bench.py gpu` measures each by itself.

This file knows nothing of GPT-2 but `transformer.h`, `lm_head`, their sizes, and the flag `float8_head`, which it sets.
"""

import torch
from torch import nn
from torch.nn import functional as F

from cli import UserError

WIDE = 1600  # channels from which blocks are expected to gain
DLOGITS_SCALE = 2.0**-15  # brings 1 to 32,768, inside of E5M2, and keeps probabilities down to 2^-31


def use_float8(model: nn.Module, head: bool = True, blocks: bool | None = None) -> list[str]:
    """Let the output projection and the matrices of the blocks, by default of WIDE ones, multiply in FP8 while they
    train, under autocast to bf16. Returns which of the two do.

    Raises UserError where a size is not a multiple of 16, as the tensor cores want.
    """
    vocab_size, n_embd = model.lm_head.weight.shape
    for name, size in dict(n_embd=n_embd, vocab_size=vocab_size if head else 16).items():
        if size % 16:
            raise UserError(f"FP8 needs sizes that are multiples of 16, and {name} is {size}; leave out --fp8")
    model.float8_head = head
    blocks = n_embd >= WIDE if blocks is None else blocks
    for module in model.transformer.h.modules() if blocks else ():
        if isinstance(module, nn.Linear):
            module.__class__ = Float8Linear  # the same parameters under the same names, another forward pass
    return ["head"] * head + ["blocks"] * blocks


class Float8Linear(nn.Linear):
    """nn.Linear whose products are in FP8 while it trains; evaluation and generation are in the usual precision."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        y = Float8Product.apply(x.flatten(0, -2), self.weight)  # (N, K) -> (N, M)
        return y.view(*x.shape[:-1], -1) + self.bias.to(y.dtype)


class Float8Product(torch.autograd.Function):
    """x (N, K) @ weight (M, K).T in bf16, with FP8 operands in both directions."""

    @staticmethod
    def forward(ctx, x, weight):
        x, x_scale = to_float8(x, torch.float8_e4m3fn)
        weight, weight_scale = to_float8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, x_scale, weight, weight_scale)  # x in one byte a number, not two
        return multiply(x, weight.T, x_scale, weight_scale, fast=True)  # (N, M)

    @staticmethod
    def backward(ctx, grad):  # (N, M)
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        grad, grad_scale = to_float8(grad, torch.float8_e5m2)
        grad_x = multiply(grad, weight, grad_scale, weight_scale)  # sums over M: (N, K)
        grad_weight = multiply(grad.T, x, grad_scale, x_scale)  # sums over N: (M, K)
        return grad_x, grad_weight.float()


def by_weights(x, weight_t):
    """x (N, K) @ weight_t (K, M), as the output projection needs it forward."""
    x, x_scale = to_float8(x, torch.float8_e4m3fn)
    weight_t, weight_scale = to_float8(weight_t, torch.float8_e4m3fn)
    return multiply(x, weight_t, x_scale, weight_scale, fast=True)


def by_dlogits(dlogits, other):
    """dlogits (N, K) @ other (K, M), as it needs them backward; no number of dlogits may exceed 1."""
    scale = torch.full((), DLOGITS_SCALE, device=dlogits.device)
    other, other_scale = to_float8(other, torch.float8_e4m3fn)
    return multiply((dlogits / DLOGITS_SCALE).to(torch.float8_e5m2), other, scale, other_scale)


def to_float8(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x in FP8, and the fp32 scalar that brings it back."""
    largest = torch.finfo(dtype).max
    scale = x.abs().max().float().clamp(min=1e-12) / largest  # a tensor of zeros would divide by zero
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale  # rounded division may exceed the format


def multiply(a, b, a_scale, b_scale, fast: bool = False) -> torch.Tensor:
    """a (N, K) @ b (K, M), of FP8 tensors, in bf16.

    `fast` keeps the running sum in the tensor core's own registers, which on Hopper have 14 bits. That is good enough
    for activations; sums of gradients go on in fp32.
    """
    a, b = a.contiguous(), b.T.contiguous().T  # no copies where they lie along K already
    if hasattr(F, "scaled_mm"):
        one = F.ScalingType.TensorWise  # one scale a tensor
        return F.scaled_mm(a, b, a_scale, one, b_scale, one, output_dtype=torch.bfloat16, use_fast_accum=fast)
    return torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
