"""What a mitigation costs: a fixed overhead, then bytes over bandwidth (BaGuaLu-2, section IV-B, Figure 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from flex_trainer.cost.graph import Value
from flex_trainer.strategy import LEAST_MOVED_BYTES, WORTHWHILE, Strategy

_Amount = TypeVar("_Amount", float, np.ndarray)


@dataclass(frozen=True)
class Roofline:
    """A strategy that moves or casts bytes. Below the knee `overhead_seconds * bytes_per_second` the overhead
    dominates."""

    overhead_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: _Amount) -> _Amount:
        """Time to free `num_bytes` (one amount, or an array of them) and to bring them back."""
        return self.overhead_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Rates:
    """What this machine's mitigations add to a step. Recompute costs an operator's own forward time once more, times a
    factor, and a fixed overhead."""

    offload: Roofline = Roofline(200e-6, 0.6e9)
    quantize: Roofline = Roofline(100e-6, 1.0e9)
    smallest_moved_bytes: int = LEAST_MOVED_BYTES
    in_flight_bytes: int = 0
    """Most bytes of offload copies on their way at once, on top of all else: down in forward, up in backward."""
    recompute_overhead_seconds: float = 60e-6
    recompute_factor: float = 1.0
    """Time of a recomputation in backward over that of the operator in forward."""
    transient_factor: float = 1.0
    """What comes on top while operators run, over what the operators' transients and recovered values say."""

    def moved(self, strategy: Strategy, num_bytes: int) -> float:
        """Seconds that moving or casting a value of this size adds."""
        return (self.offload if strategy is Strategy.OFFLOAD else self.quantize).seconds(num_bytes)

    def moves(self, strategy: Strategy, value: Value) -> bool:
        """Whether a value is moved or cast at all: small ones are not, and only floats in rows that shrink are
        quantized."""
        if value.num_bytes < self.smallest_moved_bytes:
            return False
        if strategy is Strategy.QUANTIZE:
            return value.num_rows > 0 and quantized_bytes(value) <= WORTHWHILE * value.num_bytes
        return strategy is Strategy.OFFLOAD

    def left_bytes(self, strategy: Strategy, value: Value) -> int:
        """Bytes that stay on the device of a value that is moved or cast."""
        return 0 if strategy is Strategy.OFFLOAD else quantized_bytes(value)


def quantized_bytes(value: Value) -> int:
    """One byte an element, and a float32 scale for each row."""
    return value.num_bytes // value.element_bytes + 4 * value.num_rows
