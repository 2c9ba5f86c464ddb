"""What a long run leaves behind: memory and records over many micro-batches of a small model (`bench host`)."""

from __future__ import annotations

import gc
import tracemalloc

from flex_trainer.config import FlexConfig
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.tiny import tiny_batch, tiny_model

_LENGTHS = (8, 12, 16)


def growth(num_micro_batches: int) -> dict[str, float]:
    """Python's bytes and records that each micro-batch leaves behind, and resident bytes of the whole run.

    The first quarter fills caches and is not counted.
    """
    model = tiny_model("qwen3_moe")
    batches = [tiny_batch(model, 1, length) for length in _LENGTHS]
    runtime = FlexRuntime(FlexConfig(memory_limit="auto"))
    runtime.attach(model)

    def run(start: int, end: int) -> None:
        for number in range(start, end):
            model.zero_grad(set_to_none=True)
            loss = model(**batches[number % len(batches)]).loss
            with runtime.backward():
                loss.backward()
        gc.collect()

    warm_up = num_micro_batches // 4
    try:
        run(0, warm_up)
        before_bytes, num_records = runtime.memory_now()["process"], len(runtime.records)
        tracemalloc.start()
        try:
            run(warm_up, warm_up + num_micro_batches // 8)  # what is made once under tracing
            started_bytes, _ = tracemalloc.get_traced_memory()
            start = warm_up + num_micro_batches // 8
            run(start, num_micro_batches)
            left_bytes = tracemalloc.get_traced_memory()[0] - started_bytes
        finally:
            tracemalloc.stop()
        return {
            "micro_batches": num_micro_batches,
            "bytes_per_micro_batch": left_bytes / (num_micro_batches - start),
            "records": len(runtime.records) - num_records,
            "resident_mib": (runtime.memory_now()["process"] - before_bytes) / 2**20,
        }
    finally:
        runtime.detach()
