"""Quantise: a floating activation is stored in 8 bits, with one scale per row.

A row is the last dimension of the tensor as it was saved. For int8 the scale of row r is max|x_r| / 127, so the error
of an element is at most scale / 2 = max|x_r| / 254. For float8_e4m3fn the scale is max|x_r| / 448 and the relative
error of an element is at most 2^-4 (3 mantissa bits), down to the format's subnormals. Scales have a floor (an all-zero
row stays zero), and values are clamped before the cast. NaN and infinity do not survive int8; a tensor that holds any
is kept.
"""

from __future__ import annotations

import math

import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.strategy import WORTHWHILE

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = 1e-30


class QuantizedValue:
    """One storage in 8 bits."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype, ledger: Ledger) -> None:
        rows = _rows(tensor)
        self._original = (tensor.dtype, tensor.untyped_storage().nbytes())
        self._codes, self._scales = quantize_rows(rows, dtype)
        self.num_bytes = self._codes.untyped_storage().nbytes() + self._scales.untyped_storage().nbytes()
        self._value: torch.Tensor | None = None
        self._ledger = ledger
        ledger.hold(self.num_bytes)
        ledger.freed("quantize", self._original[1] - self.num_bytes)

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        """Whether this tensor's storage can be quantised: floating, and finite all over (also where this view does not
        reach: other views of it are read from the same codes), and with rows long enough that it shrinks."""
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or tensor.numel() == 0:
            return False
        rows = _rows(tensor)
        code_bytes, scale_bytes = rows.numel(), 4 * rows.shape[0]
        is_smaller = code_bytes + scale_bytes <= WORTHWHILE * rows.numel() * rows.element_size()
        return is_smaller and bool(torch.isfinite(rows).all())

    def read(self) -> torch.Tensor:
        if self._value is None:
            dtype, num_bytes = self._original
            value = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=self._codes.device)
            value.view(self._codes.shape).copy_(dequantize_rows(self._codes, self._scales))
            self._value = value
            self._ledger.recover(num_bytes)
        return self._value

    def __del__(self) -> None:
        # An allocation that failed in __init__ leaves nothing to give back.
        if hasattr(self, "_ledger"):
            self._ledger.release(self.num_bytes)
            if self._value is not None:
                self._ledger.recover(-self._original[1])


def num_rows(tensor: torch.Tensor) -> int:
    """Rows that the tensor's storage is quantised in; 0 where its kind is not quantised."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or tensor.numel() == 0:
        return 0
    return _rows(tensor).shape[0]


def quantize_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the shape of `rows` (R, C) in `dtype`, and float32 scales (R, 1)."""
    largest = _LARGEST[dtype]
    scales = (rows.abs().amax(dim=-1, keepdim=True).float() / largest).clamp_(min=_SMALLEST_SCALE)
    scaled = (rows.float() / scales).clamp_(-largest, largest)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 values (R, C) that `codes` (R, C) and `scales` (R, 1) stand for."""
    return codes.float() * scales


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of the tensor's storage as (rows, elements of a row).

    The row is what the smallest stride above 1 steps over: the last dimension of a contiguous tensor, and the common
    row of both halves when the tensor is one half of a wider one.
    """
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.dim() > 1 and tensor.size(-1) == 1:
        # One number for each token, as the inverse deviation of a norm: the tokens beside it have nothing to do with
        # it, and those of padding may be a thousand times as large.
        return tensor.detach().as_strided((num_elements, 1), (1, 1), 0)
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and stride > 1]
    row_elements = math.gcd(num_elements, min(strides, default=num_elements))
    return tensor.detach().as_strided((num_elements // row_elements, row_elements), (row_elements, 1), 0)
