"""Sizes by elimination: exact after two or three shapes, never too small for a longer batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flex_trainer.cost.scaling import Scaling

LAWS = {
    "constant": lambda b, s: 48,
    "batch": lambda b, s: 3 * b,
    "sequence": lambda b, s: 8 * s,
    "tokens": lambda b, s: 32 * b * s,
    "mask": lambda b, s: s * s,
    "attention": lambda b, s: 4 * b * s * s,
    "shifted labels": lambda b, s: b * (s + 1),
    "attention with a sink": lambda b, s: 4 * b * s * (s + 1),
}
CHUNK = 16


def chunked(b: int, s: int) -> int:
    """Padded to whole chunks: follows none of the laws."""
    return 32 * b * -(-s // CHUNK) * CHUNK


def sizes(b: int, s: int) -> list[int]:
    return [4 * law(b, s) for law in LAWS.values()]


def learnt(*shapes: tuple[int, int]) -> Scaling:
    scaling = Scaling([4] * len(LAWS))
    for shape in shapes:
        scaling.observe(*shape, sizes(*shape))
    return scaling


def test_exact_after_shapes_that_tell_the_laws_apart() -> None:
    scaling = learnt((2, 24), (3, 32))
    for shape in ((2, 16), (5, 40), (1, 100), (8, 1000)):
        assert scaling.is_sure(*shape)
        assert scaling.predict(*shape).tolist() == sizes(*shape)


def test_with_a_fixed_batch_size_lengths_alone_suffice() -> None:
    scaling = learnt((4, 32), (4, 56), (4, 41))
    assert scaling.is_sure(4, 300)
    assert scaling.predict(4, 300).tolist() == sizes(4, 300)


def test_one_shape_gives_a_bound_and_says_so() -> None:
    scaling = learnt((4, 32))
    assert scaling.is_sure(4, 32)
    assert not scaling.is_sure(4, 64)
    assert all(scaling.predict(4, 64) >= sizes(4, 64))


def test_a_shape_that_was_seen_gives_what_was_seen() -> None:
    scaling = Scaling([4])
    scaling.observe(2, 24, [4 * 777])
    scaling.observe(2, 30, [4 * 555])
    scaling.observe(2, 24, [4 * 700])  # the largest counts
    assert scaling.predict(2, 24).tolist() == [4 * 777]


def test_nothing_stays_nothing() -> None:
    scaling = Scaling([8])
    scaling.observe(2, 24, [0])
    scaling.observe(3, 32, [0])
    assert scaling.predict(7, 99).tolist() == [0]


shapes = st.tuples(st.integers(1, 8), st.integers(2, 300))


@settings(deadline=None)
@given(seen=st.lists(shapes, min_size=1, max_size=4), factor=st.integers(1, 4), longer=st.integers(1, 500))
def test_never_below_the_truth_for_a_longer_batch(seen: list[tuple[int, int]], factor: int, longer: int) -> None:
    scaling = learnt(*seen)
    shape = (factor * max(b for b, _ in seen), longer + max(s for _, s in seen))
    assert all(scaling.predict(*shape) >= sizes(*shape))
    if scaling.is_sure(*shape):
        assert scaling.predict(*shape).sum() <= 1.02 * sum(sizes(*shape))


def test_a_value_in_chunks_is_covered_once_an_uneven_chunk_was_seen() -> None:
    scaling = Scaling([4])
    for s in (17, 40, 33):  # 17 tokens take two chunks: the most elements per token there are
        scaling.observe(2, s, [4 * chunked(2, s)])
    for s in range(41, 500):
        assert scaling.predict(2, s)[0] >= 4 * chunked(2, s)


def test_what_grows_faster_than_tokens_is_extrapolated_as_a_square() -> None:
    # s (s + 5) follows no unit.
    scaling = Scaling([4])
    for s in (20, 30, 44):
        scaling.observe(1, s, [4 * s * (s + 5)])
    truth = 4 * 200 * 205
    assert truth <= scaling.predict(1, 200)[0] <= 1.25 * truth


@pytest.mark.parametrize("shape", [(4, 24), (2, 200)])
def test_sizes_without_a_law_are_an_estimate_but_not_in_doubt(shape: tuple[int, int]) -> None:
    scaling = Scaling([4])
    for s in (17, 33, 50):
        scaling.observe(2, s, [4 * chunked(2, s)])
    assert scaling.is_sure(*shape)
