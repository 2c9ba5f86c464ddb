"""Windows, and the orders that need no planning."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.planner.fusion import Order, Side, Window, fixed, sequential
from flex_trainer.planner.fusion_cost import simulate
from tests.planner.windows import stage, windows
from tests.tiers import examples


def letters(order: Order) -> str:
    return "".join(side.value for side in order)


@examples(200)
@given(windows(num_most=5, num_moves=4), st.text("FB", min_size=1, max_size=6))
def test_fixed_orders_are_valid_in_any_window(window: Window, pattern: str) -> None:
    for order in (fixed(window, pattern), sequential(window)):
        simulate(window, order)  # raises where an order is none of the window


def test_sequential_is_backward_then_forward() -> None:
    window = Window((stage("f", 1),) * 2, (stage("b", 1),) * 3)
    assert letters(sequential(window)) == "BBBFF"


def test_a_pattern_repeats_and_what_is_left_follows() -> None:
    window = Window((stage("f", 1),) * 7, (stage("b", 1),) * 4)
    assert letters(fixed(window, "BFFBF")) == "BFFBFBFFBFF"


def test_offloads_go_in_early_and_recoveries_late() -> None:
    offloads = (stage("o", 0, copy_ms=1, bound=1), stage("o", 0, copy_ms=1, bound=3))
    recoveries = (stage("r", 1, bound=1), stage("r", 1, bound=3))
    window = Window((stage("f", 1),) * 3, (stage("b", 1),) * 3, offloads, recoveries)
    assert letters(fixed(window, "BF")) == "BFORBFBFOR"


@pytest.mark.parametrize("pattern", ["", "BFX", "bf"])
def test_a_pattern_has_letters_of_two_classes(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        fixed(Window((), ()), pattern)


def test_bounds_point_into_the_window() -> None:
    forward, backward = (stage("f", 1),), (stage("b", 1),) * 2
    Window(forward, backward, (stage("o", 1, bound=1),), (stage("r", 1, bound=2),))
    with pytest.raises(ValueError, match="class O has bound 2 > 1"):
        Window(forward, backward, (stage("o", 1, bound=2),))
    with pytest.raises(ValueError, match="class R has bound 3 > 2"):
        Window(forward, backward, (), (stage("r", 1, bound=3),))
    with pytest.raises(ValueError, match="class F has bound 1 > 0"):
        Window((stage("f", 1, bound=1),), backward)


def test_stages_have_no_negative_times() -> None:
    with pytest.raises(ValueError, match="negative"):
        stage("f", 1, exchange_ms=-1)


def test_bounds_hold_in_program_order() -> None:
    """A recovery with a late bound before one with an early bound is needed as early: their order is never changed."""
    backward = (stage("b", 1),) * 3
    window = Window((stage("f", 1),) * 2, backward, (), (stage("r", 1, bound=3), stage("r", 1, bound=1)))
    assert window.recoveries_before == (0, 2, 2)
    window = Window((stage("f", 1),) * 2, backward, (stage("o", 1, bound=2), stage("o", 1, bound=0)))
    assert window.forward_before == (2, 2)
    assert window.stages[0] is window.forward and Side.OFFLOAD not in sequential(window)[:4]
