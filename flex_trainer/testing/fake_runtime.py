"""A runtime that only hands out records: for tests of callbacks and reports, which read records and nothing else."""

from __future__ import annotations

from typing import Any

from flex_trainer.records import MicroBatchRecord, RunRecords, StepRetry

GIB_BYTES = 2**30
LIMIT_BYTES = 2 * GIB_BYTES


def make_record(micro_batch: int, **values: Any) -> MicroBatchRecord:
    """A record with a peak of 1 GiB under a limit of 2 and half a GiB of activations, but for `values`."""
    defaults: dict[str, Any] = {
        "step": micro_batch // 2,
        "micro_batch": micro_batch,
        "num_tokens": 32,
        "imbalance": 1.5,
        "budget_bytes": GIB_BYTES,
        "predicted_bytes": GIB_BYTES // 2,
        "actual_bytes": GIB_BYTES // 2,
        "limit_bytes": LIMIT_BYTES,
        "peak_bytes": GIB_BYTES,
        "step_ms": 100.0,
    }
    merged = defaults | values
    return MicroBatchRecord(**({"run_ms": merged["step_ms"] - merged.get("plan_ms", 0.0)} | merged))


class FakeRuntime:
    """Makes one record per call of `run_one`.

    Args:
        unusual: field values of some micro-batches, by their number.
        memory_bytes: what `memory_now` says.
    """

    def __init__(
        self, unusual: dict[int, dict[str, Any]] | None = None, memory_bytes: dict[str, int] | None = None
    ) -> None:
        self.records = RunRecords()
        self.retries: list[StepRetry] = []
        self.limit_bytes = LIMIT_BYTES
        self._unusual = unusual or {}
        self._memory_bytes = memory_bytes or {"process": GIB_BYTES // 4}

    def memory_now(self) -> dict[str, int]:
        return self._memory_bytes

    def run_one(self) -> None:
        """Pretend to have run a micro-batch."""
        micro_batch = self.records.num_total
        self.records.append(make_record(micro_batch, **self._unusual.get(micro_batch, {})))
