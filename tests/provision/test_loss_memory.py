"""What the loss needs outside of operators: from traces first, from what was measured afterwards."""

from __future__ import annotations

from flex_trainer.cost.shape import BatchShape
from flex_trainer.provision.loss_memory import LossMemory

LIMIT_BYTES = 1_000_000


def shape(num_tokens: int, kind: str = "a", has_padding: bool = False) -> BatchShape:
    return BatchShape(1, num_tokens, kind=kind, has_padding=has_padding)


def test_nothing_is_expected_of_what_was_never_seen() -> None:
    assert LossMemory().expected_bytes(shape(100)) == LossMemory().sure_bytes(shape(100)) == 0


def test_a_trace_counts_until_something_is_measured() -> None:
    memory = LossMemory()
    memory.trace(shape(100), inside_bytes=30_000, after_bytes=50_000)
    assert memory.expected_bytes(shape(100)) == memory.sure_bytes(shape(100)) == 50_000
    assert memory.expected_bytes(shape(200)) == 100_000
    assert memory.expected_bytes(shape(80)) == 40_000
    assert memory.expected_bytes(shape(20)) == 30_000
    memory.observe(shape(100), 40_000, 80_000, True, LIMIT_BYTES)  # a reference model, say
    assert memory.expected_bytes(shape(100)) == 80_000
    assert memory.expected_bytes(shape(200)) == 160_000
    assert memory.sure_bytes(shape(100)) == 80_000
    assert memory.sure_bytes(shape(200)) == 100_000, "no batch is refused for what was measured of a smaller one"


def test_what_is_measured_to_be_less_counts_too() -> None:
    memory = LossMemory()
    memory.trace(shape(100), inside_bytes=30_000, after_bytes=50_000)
    memory.observe(shape(100), 24_000, 20_000, True, LIMIT_BYTES)
    assert memory.expected_bytes(shape(100)) == 24_000
    memory.observe(shape(100), 0, 0, True, LIMIT_BYTES)
    assert memory.expected_bytes(shape(100)) == 24_000, "the largest seen lately"
    for _ in range(16):
        memory.observe(shape(100), 0, 0, True, LIMIT_BYTES)
    assert memory.expected_bytes(shape(100)) == 30_000 // 4


def test_a_lower_bound_only_raises() -> None:
    memory = LossMemory()
    memory.observe(shape(100), 0, 50_000, True, LIMIT_BYTES)
    for _ in range(20):
        memory.observe(shape(100), 0, 10_000, False, LIMIT_BYTES)
    assert memory.expected_bytes(shape(100)) == 50_000
    memory.observe(shape(100), 0, 60_000, False, LIMIT_BYTES)
    assert memory.expected_bytes(shape(100)) == 60_000


def test_small_batches_and_small_amounts_say_nothing_of_large_ones() -> None:
    memory = LossMemory()
    memory.observe(shape(10), 0, 4_000, True, LIMIT_BYTES)  # below half a percent of the limit
    assert memory.expected_bytes(shape(1000)) == 0
    memory.observe(shape(10), 0, 6_000, True, LIMIT_BYTES)
    assert memory.expected_bytes(shape(1000)) == 600_000
    memory.observe(shape(1000), 0, 50_000, True, LIMIT_BYTES)
    assert memory.expected_bytes(shape(1000)) == 50_000


def test_each_kind_has_its_own_and_old_kinds_are_forgotten() -> None:
    memory = LossMemory()
    memory.observe(shape(100), 0, 50_000, True, LIMIT_BYTES)
    assert memory.expected_bytes(shape(100, has_padding=True)) == memory.expected_bytes(shape(100, kind="b")) == 0
    for number in range(64):
        memory.observe(shape(100, kind=str(number)), 0, 0, True, LIMIT_BYTES)
    assert memory.expected_bytes(shape(100)) == 0
