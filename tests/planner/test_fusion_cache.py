"""Orders are planned once for a structure and a budget."""

from __future__ import annotations

import pytest

from flex_trainer.planner.fusion import Window
from flex_trainer.planner.fusion_cache import OrderCache
from flex_trainer.planner.fusion_order import plan_order
from tests.planner.windows import layers


def not_again() -> Window:
    raise AssertionError("planned again")


def test_an_order_is_found_again() -> None:
    cache = OrderCache(step_bytes=10)
    first = cache.find("two layers", 25, lambda: layers(2))
    assert cache.find("two layers", 25, not_again) is first
    assert cache.find("two layers", 29, not_again) is first
    assert cache.num_planned == 1


def test_a_budget_is_rounded_down() -> None:
    cache = OrderCache(step_bytes=10)
    found = cache.find("two layers", 19, lambda: layers(2))
    assert found == plan_order(layers(2), 10) and found is None
    found = cache.find("two layers", 20, lambda: layers(2))
    assert found == plan_order(layers(2), 20) and found is not None and found.cost.peak_bytes <= 20
    assert cache.num_planned == 2


def test_that_nothing_fits_is_remembered() -> None:
    cache = OrderCache(step_bytes=1)
    assert cache.find("two layers", 3, lambda: layers(2)) is None
    assert cache.find("two layers", 3, not_again) is None


def test_structures_and_missing_limits_are_told_apart() -> None:
    cache = OrderCache(step_bytes=10)
    two, three = (cache.find(number, None, lambda number=number: layers(number)) for number in (2, 3))
    assert two is not None and three is not None and len(two.order) == 10 and len(three.order) == 15
    cache.find(2, 0, lambda: layers(2))
    assert cache.num_planned == 3


def test_what_was_not_asked_for_longest_goes_first() -> None:
    cache = OrderCache(step_bytes=1, max_orders=2)
    for number in (1, 2, 1, 3):
        cache.find(number, None, lambda number=number: layers(number))
    cache.find(1, None, not_again)
    cache.find(3, None, not_again)
    cache.find(2, None, lambda: layers(2))
    assert cache.num_planned == 4


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_steps_and_numbers_are_positive(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        OrderCache(*numbers)
