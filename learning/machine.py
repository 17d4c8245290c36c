"""What this folder reads of the machine that it computes on. machine/runtime.py's `Runtime` has all of it."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Machine(Protocol):
    device: torch.device
    dtype: torch.dtype  # of matrix products
    compile: bool

    def autocast(self) -> AbstractContextManager:
        """The context of every forward pass: matrix products in `dtype`."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over all ranks."""
