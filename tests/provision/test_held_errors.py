"""What comes back is learnt; what came once, or is little, is not."""

from __future__ import annotations

from flex_trainer.cost.shape import BatchShape
from flex_trainer.provision.held_errors import HeldErrors

SHAPE, LONGER, OTHER = BatchShape(2, 50, "ids"), BatchShape(2, 100, "ids"), BatchShape(2, 50, "ids mask")


def test_an_error_that_comes_back_is_expected_and_grows_with_the_tokens() -> None:
    errors = HeldErrors()
    errors.observe(SHAPE, 1000, 1200)
    assert errors.expected_bytes(SHAPE) == 0, "it may have been an accident"
    errors.observe(SHAPE, 1000, 1100)
    assert errors.expected_bytes(SHAPE) == 200, "the larger of the two"
    assert errors.expected_bytes(LONGER) == 400
    assert errors.expected_bytes(OTHER) == 0


def test_it_is_forgotten_when_it_has_long_stayed_away() -> None:
    errors = HeldErrors()
    for _ in range(2):
        errors.observe(SHAPE, 1000, 1200)
    for _ in range(14):
        errors.observe(SHAPE, 1000, 1000)
    assert errors.expected_bytes(SHAPE) == 200
    errors.observe(SHAPE, 1000, 1000)
    assert errors.expected_bytes(SHAPE) == 0


def test_little_errors_and_less_held_than_predicted_are_none() -> None:
    errors = HeldErrors()
    for _ in range(3):
        errors.observe(SHAPE, 1000, 1005)
        errors.observe(OTHER, 1000, 800)
    assert errors.expected_bytes(SHAPE) == errors.expected_bytes(OTHER) == 0


def test_kinds_are_not_remembered_without_bound() -> None:
    errors = HeldErrors()
    for number in range(1000):
        errors.observe(BatchShape(1, 1, str(number)), 1000, 2000)
    assert len(errors._recent) <= 64
