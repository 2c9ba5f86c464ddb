"""How a storage is cut into the rows that it is quantized in, each with a scale of its own.

A row is the last dimension of the tensor in which a storage was first seen, as its maker returned it, whichever view of
it is saved later: so what a value takes in 8 bits does not depend on who saves it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_QUANTIZED = (torch.float32, torch.bfloat16, torch.float16)


class StorageLayout(NamedTuple):
    """How a tensor lies in its storage, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> StorageLayout:
        """That of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def num_rows(self, num_bytes: int) -> int:
        """Rows that a storage of this many bytes is quantized in; 0 where its kind is not quantized."""
        num_elements = num_bytes // self.dtype.itemsize
        if self.dtype not in _QUANTIZED or num_elements == 0 or 0 in self.shape:
            return 0
        if len(self.shape) > 1 and self.shape[-1] == 1:
            # One number for each token, as the inverse deviation of a norm: the tokens beside it have nothing to do
            # with it, and those of padding may be a thousand times as large.
            return num_elements
        # The row is what the smallest stride above 1 steps over: the last dimension of a contiguous tensor, and the
        # common row of both halves when the tensor is one half of a wider one.
        strides = [stride for size, stride in zip(self.shape, self.stride, strict=True) if size > 1 and stride > 1]
        return num_elements // math.gcd(num_elements, min(strides, default=num_elements))
