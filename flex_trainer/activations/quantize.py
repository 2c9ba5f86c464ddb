"""Quantise: a floating activation is stored in 8 bits, with one scale per row.

A row is the last dimension of the tensor as its maker returned it (see `layout.py`). For int8 the scale of row r is
max|x_r| / 127, so the error of an element is at most scale / 2 = max|x_r| / 254. For float8_e4m3fn the scale is
max|x_r| / 448 and the relative error of an element is at most 2^-4 (3 mantissa bits), down to the format's subnormals.
Scales have a floor (an all-zero row stays zero), and values are clamped before the cast. NaN and infinity do not
survive int8; a tensor that holds any is kept.
"""

from __future__ import annotations

import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.storage_layout import StorageLayout
from flex_trainer.strategy import WORTHWHILE

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = 1e-30


class QuantizedValue:
    """One storage in 8 bits.

    Args:
        tensor: any view of it.
        dtype: of the codes, int8 or float8_e4m3fn.
        ledger: is told of the bytes.
        layout: the tensor whose rows get a scale each; None: those of `tensor`.
    """

    def __init__(
        self, tensor: torch.Tensor, dtype: torch.dtype, ledger: Ledger, layout: StorageLayout | None = None
    ) -> None:
        rows = _rows(tensor, layout)
        self._original = (tensor.dtype, tensor.untyped_storage().nbytes())
        self._codes, self._scales = quantize_rows(rows, dtype)
        self.num_bytes = self._codes.untyped_storage().nbytes() + self._scales.untyped_storage().nbytes()
        self._value: torch.Tensor | None = None
        self._ledger = ledger
        ledger.hold(self.num_bytes)
        ledger.freed("quantize", self._original[1] - self.num_bytes)

    @staticmethod
    def shrinks(tensor: torch.Tensor, layout: StorageLayout | None = None) -> bool:
        """Whether quantising would make this tensor's storage smaller: it is floating, with rows long enough."""
        num_bytes = tensor.untyped_storage().nbytes()
        num_rows = _layout_of(tensor, layout).num_rows(num_bytes)
        return num_rows > 0 and num_bytes // tensor.element_size() + 4 * num_rows <= WORTHWHILE * num_bytes

    @staticmethod
    def is_finite(tensor: torch.Tensor) -> bool:
        """Whether its storage is finite all over, also where this view does not reach: other views of it are read from
        the same codes."""
        return bool(torch.isfinite(_all_elements(tensor)).all())

    @staticmethod
    def has_infinity(tensor: torch.Tensor) -> bool:
        """Whether it holds infinities as a mask does: beside numbers, and no NaN, which tells of an accident."""
        values = _all_elements(tensor)
        return bool(torch.isinf(values).any()) and not bool(torch.isnan(values).any())

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


def quantize_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the shape of `rows` (R, C) in `dtype`, and float32 scales (R, 1)."""
    largest = _LARGEST[dtype]
    scales = (rows.abs().amax(dim=-1, keepdim=True).float() / largest).clamp_(min=_SMALLEST_SCALE)
    scaled = (rows.float() / scales).clamp_(-largest, largest)
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype), scales


def dequantize_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 values (R, C) that `codes` (R, C) and `scales` (R, 1) stand for."""
    return codes.float() * scales


def _rows(tensor: torch.Tensor, layout: StorageLayout | None = None) -> torch.Tensor:
    """All elements of the tensor's storage as (rows, elements of a row)."""
    num_bytes = tensor.untyped_storage().nbytes()
    num_rows = _layout_of(tensor, layout).num_rows(num_bytes)
    row_elements = num_bytes // tensor.element_size() // num_rows
    return tensor.detach().as_strided((num_rows, row_elements), (row_elements, 1), 0)


def _all_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Those of the tensor's storage, as a vector."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((num_elements,), (1,), 0)


def _layout_of(tensor: torch.Tensor, layout: StorageLayout | None) -> StorageLayout:
    """The layout that was asked for; a view in another dtype has rows of its own."""
    return StorageLayout.of(tensor) if layout is None or layout.dtype != tensor.dtype else layout
