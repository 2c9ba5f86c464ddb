"""What an order costs: by hand, against a second computation, and what must hold of any order."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given

from flex_trainer.planner.fusion import Order, Side, Window, fixed
from flex_trainer.planner.fusion_cost import Lane, simulate
from tests.planner.windows import MS, all_orders, longest_path_ms, stage, windows
from tests.tiers import examples

F, B, O, R = Side  # noqa: E741


def total_ms(window: Window, what: str) -> float:
    return sum(getattr(one, what) for stages in window.stages for one in stages) / MS


@examples(200)
@given(windows(num_most=4, num_moves=2))
def test_seconds_are_those_of_the_longest_path(window: Window) -> None:
    for order in islice(all_orders(window), 20):
        assert simulate(window, order).seconds / MS == pytest.approx(longest_path_ms(window, order))


@examples(200)
@given(windows(num_most=4, num_moves=2))
def test_what_holds_of_any_order(window: Window) -> None:
    compute, exchange = total_ms(window, "seconds"), total_ms(window, "exchange_seconds")
    chains = [sum(one.seconds + one.exchange_seconds for one in stages) / MS for stages in window.stages]
    for order in islice(all_orders(window), 20):
        cost = simulate(window, order)
        assert cost.seconds / MS >= max(compute, exchange, total_ms(window, "copy_seconds"), *chains) - 1e-9
        assert (cost.hidden_seconds + cost.exposed_seconds) / MS == pytest.approx(exchange)
        assert cost.hidden_seconds >= 0 and cost.exposed_seconds >= 0 and cost.copy_wait_seconds >= 0
        waits = cost.exposed_seconds + cost.copy_wait_seconds
        assert cost.seconds == pytest.approx(compute * MS + waits)
        for lane in Lane:
            spans = [span for span in cost.spans if span.lane is lane]
            assert all(one.end_seconds <= other.start_seconds for one, other in zip(spans, spans[1:], strict=False))
        assert cost.seconds == max((span.end_seconds for span in cost.spans), default=0.0)


def test_an_exchange_hides_behind_the_other_class() -> None:
    window = Window((stage("f", 2, 3), stage("f", 1)), (stage("b", 4),))
    hidden = simulate(window, (F, B, F))
    assert (hidden.seconds, hidden.exposed_seconds, hidden.hidden_seconds) == (7 * MS, 0, 3 * MS)
    exposed = simulate(window, (B, F, F))
    assert (exposed.seconds, exposed.exposed_seconds, exposed.hidden_seconds) == (10 * MS, 3 * MS, 0)


def test_the_compute_lane_waits_rather_than_run_something_else() -> None:
    window = Window((stage("f", 1, 5), stage("f", 1)), (stage("b", 4),))
    assert simulate(window, (F, F, B)).seconds == 11 * MS


def test_the_network_serves_one_exchange_at_a_time() -> None:
    window = Window((stage("f", 1, 5), stage("f", 1)), (stage("b", 1, 4), stage("b", 1)))
    # F's exchange from 1 to 6, B's from 6 to 10.
    assert simulate(window, (F, B, F, B)).seconds == 11 * MS


def test_the_window_ends_when_the_last_exchange_does() -> None:
    cost = simulate(Window((stage("f", 1, 5),), ()), (F,))
    assert (cost.seconds, cost.exposed_seconds) == (6 * MS, 5 * MS)


def test_backward_waits_for_the_copies_it_needs() -> None:
    window = Window((), (stage("b", 1), stage("b", 1)), (), (stage("r", 1, copy_ms=4, bound=1),))
    waiting = simulate(window, (R, B, B))  # the second one begins at 4
    assert (waiting.seconds, waiting.copy_wait_seconds, waiting.exposed_seconds) == (5 * MS, 2 * MS, 0)
    needed_by_none = Window((), (stage("b", 1), stage("b", 1)), (), (stage("r", 1, copy_ms=2, bound=2),))
    assert simulate(needed_by_none, (R, B, B)).seconds == 3 * MS


def test_copies_share_a_lane() -> None:
    window = Window((), (stage("b", 1),), (stage("o", 0, copy_ms=5),), (stage("r", 0, copy_ms=1, bound=0),))
    assert simulate(window, (O, R, B)).seconds == 7 * MS
    assert simulate(window, (R, B, O)).seconds == 7 * MS
    assert simulate(window, (R, O, B)).seconds == 6 * MS


def test_peak_is_the_highest_of_what_is_held_and_needed() -> None:
    window = Window((stage("f", 1, held=5, peak=2),), (stage("b", 1, held=-4, peak=3),), start_bytes=10)
    assert simulate(window, (B, F)).peak_bytes == 13  # in backward; then 6 + 5
    assert simulate(window, (F, B)).peak_bytes == 18  # 15 held, and 3 on top
    assert simulate(Window((), (), start_bytes=3), ()).peak_bytes == 3


@pytest.mark.parametrize("order", [(), (F, B), (F, F, B), (O, F, B), (F, O, B, B)])
def test_an_order_runs_every_stage_once_and_within_bounds(order: Order) -> None:
    window = Window((stage("f", 1),), (stage("b", 1),), (stage("o", 1, bound=1),))
    simulate(window, fixed(window, "FB"))
    with pytest.raises(ValueError):
        simulate(window, order)


def test_a_recovery_runs_before_the_stage_that_needs_it() -> None:
    window = Window((), (stage("b", 1),) * 2, (), (stage("r", 1, bound=1),))
    simulate(window, (B, R, B))
    with pytest.raises(ValueError, match="Stage 1 of class B cannot run"):
        simulate(window, (B, B, R))


def test_times_count_to_the_nanosecond() -> None:
    third = Window((stage("f", 1 / 3, 1 / 7),) * 30, ())
    noisy = Window((stage("f", 1 / 3 + 1e-13, 1 / 7 - 1e-13),) * 30, ())
    assert simulate(third, (F,) * 30) == simulate(noisy, (F,) * 30)
