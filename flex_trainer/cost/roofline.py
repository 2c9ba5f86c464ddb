"""What a mitigation costs: a fixed overhead, then bytes over bandwidth (BaGuaLu-2, section IV-B, Figure 6)."""

from __future__ import annotations

from dataclasses import dataclass

from flex_trainer.strategy import LEAST_MOVED_BYTES, Strategy


@dataclass(frozen=True)
class Roofline:
    """A strategy that moves or casts bytes. Below the knee `overhead_seconds * bytes_per_second` the overhead
    dominates."""

    overhead_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: int) -> float:
        """Time to free `num_bytes` and to bring them back."""
        return self.overhead_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Rates:
    """What this machine's mitigations cost. Recompute has no entry: it costs the operator's own forward time."""

    offload: Roofline = Roofline(200e-6, 0.6e9)
    quantize: Roofline = Roofline(100e-6, 1.0e9)
    quantized_fraction: float = 0.27
    """Bytes kept of a quantised float32 value (codes, and one scale for a row of 64); bfloat16 keeps twice that."""
    smallest_moved_bytes: int = LEAST_MOVED_BYTES
    in_flight_bytes: int = 0
    """Most bytes of offload copies on their way at once, on top of all else: down in forward, up in backward."""
    replay_overhead_seconds: float = 60e-6

    def moved(self, strategy: Strategy, num_bytes: int) -> float:
        return (self.offload if strategy is Strategy.OFFLOAD else self.quantize).seconds(num_bytes)

    def moves(self, strategy: Strategy, num_bytes: int, element_bytes: int) -> bool:
        """Whether a value of this size is moved or cast at all: small ones are not, and only floats are quantised.

        Saved tensors of 1 byte (masks) and 8 bytes (indices) an element are not floats.
        """
        if strategy is Strategy.QUANTIZE and element_bytes not in (2, 4):
            return False
        return strategy in (Strategy.OFFLOAD, Strategy.QUANTIZE) and num_bytes >= self.smallest_moved_bytes

    def left_bytes(self, strategy: Strategy, num_bytes: int, element_bytes: int) -> int:
        """Bytes that stay on the device of a value that is moved or cast."""
        return 0 if strategy is Strategy.OFFLOAD else int(num_bytes * self.quantized_fraction * 4 / element_bytes)
