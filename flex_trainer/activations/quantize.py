"""Quantize: a floating activation is stored in 8 bits, with one scale per row.

A row is the last dimension of the tensor as its maker returned it (see `storage_layout.py`). For int8 the scale of row
r is max|x_r| / 127, so the error of an element is at most scale / 2 = max|x_r| / 254. For float8_e4m3fn the scale is
max|x_r| / 448 and the relative error of an element is at most 2^-4 (3 mantissa bits), down to the format's subnormals.
Scales have a floor (an all-zero row stays zero), and values are clamped before the cast.

A tensor that holds NaN or infinity is kept. On a CPU that is seen at once. On a GPU the host would wait for the device
to see it, for every value; so there the cast takes note of what is not finite, in a code and in two bits of the row's
scale, and gives it back where it was. Beside it the row's finite numbers keep the error above. A flag on the device is
read once per micro-batch (`NonFinite`), and the next one keeps the tensor.
"""

from __future__ import annotations

import math

import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.storage_layout import StorageLayout
from flex_trainer.strategy import WORTHWHILE

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST_SCALE = 1e-30
_SPECIAL_INT8 = -128
"""The code that no finite number has."""
_KIND_BITS = 3
"""Of a scale: which number that is not finite the special code stands for in its row. 0: there is none."""
_POSITIVE, _NEGATIVE, _NAN = 1, 2, 3


class QuantizedValue:
    """One storage in 8 bits.

    Args:
        tensor: any view of it.
        dtype: of the codes, int8 or float8_e4m3fn.
        ledger: is told of the bytes.
        layout: the tensor whose rows get a scale each; None: those of `tensor`.
        is_finite: known to be; else what is not is noted, and `flag` says whether there is any.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        ledger: Ledger,
        layout: StorageLayout | None = None,
        is_finite: bool = True,
    ) -> None:
        rows = _rows(tensor, layout)
        self._original = (tensor.dtype, tensor.untyped_storage().nbytes())
        self._is_finite = is_finite
        self.flag: torch.Tensor | None = None
        """On the device: 0 where all is finite, infinity where there are infinities of one sign, else NaN."""
        if is_finite:
            self._codes, self._scales = quantize_rows(rows, dtype)
        else:
            self._codes, self._scales, self.flag = quantize_any_rows(rows, dtype)
        self.num_bytes = self._codes.untyped_storage().nbytes() + self._scales.untyped_storage().nbytes()
        self._value: torch.Tensor | None = None
        self._ledger = ledger
        ledger.hold(self.num_bytes)
        ledger.freed("quantize", self._original[1] - self.num_bytes)

    @staticmethod
    def shrinks(tensor: torch.Tensor, layout: StorageLayout | None = None) -> bool:
        """Whether quantizing would make this tensor's storage smaller: it is floating, with rows long enough."""
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
            dequantize = dequantize_rows if self._is_finite else dequantize_any_rows
            value.view(self._codes.shape).copy_(dequantize(self._codes, self._scales))
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


def quantize_any_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `quantize_rows`, for numbers that may not be finite, and a flag (see `QuantizedValue.flag`). Of numbers that
    are not finite each row gives back one kind: NaN where it has several. Nothing waits for the device."""
    is_finite = torch.isfinite(rows)
    codes, scales = quantize_rows(torch.where(is_finite, rows, 0.0), dtype)
    special = _SPECIAL_INT8 if dtype == torch.int8 else math.nan
    codes = torch.where(is_finite, codes.float(), special).to(dtype)
    rest = torch.where(is_finite, 0.0, rows.float()).sum(dim=-1, keepdim=True)
    kinds = torch.nan_to_num(rest, nan=_NAN, posinf=_POSITIVE, neginf=_NEGATIVE).to(torch.int32)
    scales.view(torch.int32).bitwise_and_(~_KIND_BITS).bitwise_or_(kinds)
    return codes, scales, rest.sum()


def dequantize_any_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 values (R, C) that `quantize_any_rows` has made `codes` (R, C) and `scales` (R, 1) of."""
    kinds = scales.view(torch.int32).bitwise_and(_KIND_BITS)
    special = torch.where(kinds == _POSITIVE, math.inf, math.nan)
    special = torch.where(kinds == _NEGATIVE, -math.inf, special)
    values = codes.float()
    is_special = values == _SPECIAL_INT8 if codes.dtype == torch.int8 else torch.isnan(values)
    return torch.where(is_special, special, values * scales)


class NonFinite:
    """Values that were seen not to be finite, by operator and number: shared by the scopes of one run, which keep them.

    On a CPU it stays empty: there a value is looked at when it is saved.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], bool] = {}

    def has(self, operator: str, number: int) -> bool:
        """Whether the operator's `number`-th value was not finite."""
        return (operator, number) in self._seen

    def has_infinity(self, operator: str, number: int) -> bool:
        """Whether it held infinities as a mask does: of one sign in every row, and no NaN."""
        return self._seen.get((operator, number), False)

    def note(self, values: list[tuple[str, int]], flags: list[torch.Tensor]) -> None:
        """Read the flags of a micro-batch, all in one transfer."""
        for value, flag in zip(values, torch.stack(flags).tolist(), strict=True):
            if not math.isfinite(flag):
                self._seen[value] = math.isinf(flag)


def is_seen_at_once(device: torch.device) -> bool:
    """Whether the host can look at a value without waiting for the device."""
    return device.type == "cpu"


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
