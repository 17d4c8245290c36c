"""The output projection in FP8: matrix products in 8 bits, for GPUs that multiply 8 bits twice as fast as 16.

    model.head_matmuls = FP8_MATMULS     # loss.py then multiplies with these while training

**Two formats** (Micikevicius et al. 2022, section 3). E4M3 has 4 exponent bits and 3 mantissa bits: eight numbers for
each power of two, so a rounding error of up to 6% from 2^-6 to 448, and coarser steps down to 2^-9. E5M2 moves one bit
from the mantissa to the exponent: up to 12.5% from 2^-14 to 57,344, and coarser steps down to 2^-16. Weights and
activations need the precision, gradients the range. The errors do little harm because they are independent: a product
adds up hundreds of them, and most cancel.

**A scale for each tensor.** Activations of 0.0005 would vanish in E4M3, and 500 overflows. So a tensor is divided by a
scale that maps its largest absolute value to the largest number of the format, and the product is multiplied by both
scales while it is still fp32. The gradient of the loss with respect to the logits needs no measurement: softmax -
one_hot lies between -1 and 1, so its scale is known.

**Row by column.** A product a (N, K) @ b (K, M) sums over K, and in 8 bits the tensor cores want both operands
contiguous along K (in 16 bits they can transpose while they load): a row-major, b column-major. Other layouts are
copied first, one byte a number.

**Why the head.** It is 31% of all products of GPT-2 124M, and its largest tensor needs no maximum. The cost of maxima,
rounding and copies is proportional to N (K + M), the gain to N K M. The gain is expected and not yet measured on a GPU:
`bench.py ladder` has a rung for it.

This file knows nothing of GPT-2 and of the loss that uses it.
"""

import torch

DLOGITS_SCALE = 2.0**-15  # maps 1 to 32,768, within E5M2, and keeps probabilities down to 2^-31


def by_weights(x, weight_t):
    """Logits: x (N, C) row-major @ weight_t (C, V) column-major, as the transpose of a (V, C) weight is. No copies."""
    x, x_scale = to_float8(x, torch.float8_e4m3fn)
    weight_t, weight_scale = to_float8(weight_t, torch.float8_e4m3fn)
    return multiply(x, weight_t, x_scale, weight_scale, fast=True)


def by_dlogits(dlogits, other):
    """Gradients: dlogits (N, V) @ weight (V, C), or its transpose (V, N) @ x (N, C); no |dlogits| may exceed 1.

    `other` is row-major in both, so it is copied; the transposed dlogits too.
    """
    scale = torch.full((), DLOGITS_SCALE, device=dlogits.device)
    dlogits = (dlogits / DLOGITS_SCALE).to(torch.float8_e5m2)
    other, other_scale = to_float8(other, torch.float8_e4m3fn)
    return multiply(dlogits, other, scale, other_scale)


FP8_MATMULS = (by_weights, by_dlogits)


def to_float8(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x in FP8, and the fp32 scalar that brings it back."""
    largest = torch.finfo(dtype).max
    absmax = x.abs().max().float().clamp(min=1e-12)  # a tensor of zeros would divide by zero
    scale = absmax / largest
    x = (x.float() / scale).clamp(-largest, largest)  # rounded division may exceed the format
    return x.to(dtype), scale


def multiply(a, b, a_scale, b_scale, fast: bool = False) -> torch.Tensor:
    """a (N, K) @ b (K, M), of FP8 tensors, in bf16.

    `fast` keeps the running sum in the tensor core's registers, which on Hopper have 14 bits. That is good enough for
    activations; sums of gradients continue in fp32.
    """
    # public as torch.nn.functional.scaled_mm only in newer versions of PyTorch
    return torch._scaled_mm(
        a.contiguous(),  # row-major; no copy if it is so already
        b.T.contiguous().T,  # column-major
        scale_a=a_scale,
        scale_b=b_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
