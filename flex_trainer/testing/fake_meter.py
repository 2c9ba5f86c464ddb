"""A meter that counts the engine's own bytes: for runs that must not depend on what the process happens to use."""

from __future__ import annotations

from flex_trainer.runtime import FlexRuntime

BASE_BYTES = 1_000_000


class FakeMeter:
    """In use = a base + what the micro-batches in flight hold and have recovered.

    Args:
        runtime: whose micro-batches are counted.
        base_bytes: in use before anything runs.
    """

    def __init__(self, runtime: FlexRuntime, base_bytes: int = BASE_BYTES) -> None:
        self._runtime = runtime
        self._base_bytes = base_bytes
        self._peak_bytes = 0

    def auto_bytes(self) -> int:
        return 10**9

    def device_bytes(self) -> int:
        return 10**9

    def in_use_bytes(self) -> int:
        ledgers = [micro_batch.ledger for micro_batch in self._runtime.in_flight]
        return self._base_bytes + sum(ledger.held_bytes + ledger.recovered_bytes for ledger in ledgers)

    def left_bytes(self, limit_bytes: int) -> int:
        return limit_bytes - self.in_use_bytes()

    def start_window(self) -> None:
        self._peak_bytes = self.in_use_bytes()

    def end_window(self) -> None:
        pass

    def sample(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self.in_use_bytes())

    def peak_bytes(self) -> int:
        self.sample()
        return self._peak_bytes

    def is_peak_exact(self) -> bool:
        return True

    def now(self) -> dict[str, int]:
        return {"fake": self.in_use_bytes()}

    def shortage(self, wanted_bytes: int = 0) -> str:
        return ""


def with_fake_meter(runtime: FlexRuntime) -> FakeMeter:
    """Give the runtime a fake meter; call it before `attach`."""
    meter = FakeMeter(runtime)
    runtime.use_meter(meter)
    return meter
