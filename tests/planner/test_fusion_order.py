"""Planned orders against every order there is, in windows small enough to try them; and how large ones are planned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flex_trainer.planner.fusion import Order, Side, Window, fixed, sequential
from flex_trainer.planner.fusion_cost import FusedCost, simulate
from flex_trainer.planner.fusion_order import plan_order
from tests.planner.windows import MS, all_orders, layers, stage, windows
from tests.tiers import examples

F, B, O, R = Side  # noqa: E741
PATTERNS = ("FB", "BF", "BFFBF", "FFB", "F")


def best_of_all(window: Window, limit_bytes: int | None) -> float | None:
    costs = [simulate(window, order) for order in all_orders(window)]
    return min((cost.seconds for cost in costs if fits(cost, limit_bytes)), default=None)


def fits(cost: FusedCost, limit_bytes: int | None) -> bool:
    return limit_bytes is None or cost.peak_bytes <= limit_bytes


@examples(400)
@given(windows(), st.none() | st.integers(0, 20))
@example(Window((), ()), None)
@example(Window((), (), start_bytes=1), 0)
def test_no_order_is_better(window: Window, limit_bytes: int | None) -> None:
    planned = plan_order(window, limit_bytes)
    best = best_of_all(window, limit_bytes)
    if planned is None:
        assert best is None
        return
    assert planned.cost == simulate(window, planned.order) and fits(planned.cost, limit_bytes)
    assert planned.is_exact and planned.cost.seconds == planned.least_seconds == best


@examples(100)
@given(windows(num_most=2, num_moves=2), st.none() | st.integers(0, 20))
def test_no_order_is_better_with_several_offloads_and_recoveries(window: Window, limit_bytes: int | None) -> None:
    planned = plan_order(window, limit_bytes)
    assert (planned and planned.cost.seconds) == best_of_all(window, limit_bytes)


@pytest.mark.parametrize(
    "window",
    [
        Window((), (stage("b", 2, 2), stage("b", 3, 4)), (stage("o", 5, 1, 2),)),
        Window(
            (), (stage("b", 5, 2), stage("b", 5, 1)), (), (stage("r", 3, 1, 4, bound=2), stage("r", 1, 2, 4, bound=2))
        ),
        Window(
            (), (stage("b", 1),), (stage("o", 1, 4, 4),), (stage("r", 3, 1, 4, bound=0), stage("r", 3, 1, 4, bound=0))
        ),
        Window((), (stage("b", 1),), (), (stage("r", 1, 2, 4, bound=1),)),
    ],
    ids=["network", "copy lane", "copies waited for", "a copy that is not waited for"],
)
def test_each_time_of_a_label_counts(window: Window) -> None:
    """Small windows in which the best order is lost where labels are compared without one of their times."""
    planned = plan_order(window, None)
    assert planned is not None and planned.is_exact and planned.cost.seconds == best_of_all(window, None)


@examples(200)
@given(windows(), st.none() | st.integers(0, 20), st.integers(1, 3))
def test_a_narrow_search_says_how_far_off_it_may_be(window: Window, limit_bytes: int | None, max_labels: int) -> None:
    planned = plan_order(window, limit_bytes, max_labels)
    best = best_of_all(window, limit_bytes)
    assert (planned is None) == (best is None)
    if planned is not None and best is not None:
        assert planned.least_seconds <= best <= planned.cost.seconds and fits(planned.cost, limit_bytes)
        assert not planned.is_exact or planned.cost.seconds == best


@examples(100)
@given(windows(num_most=6, num_moves=4), st.none() | st.integers(5, 40), st.randoms(use_true_random=False))
def test_a_planned_order_is_never_worse_than_those_known(window: Window, limit_bytes: int | None, draw) -> None:
    shuffled = fixed(window, "".join(draw.choice("FB") for _ in range(8)))
    known = [sequential(window), shuffled, *(fixed(window, pattern) for pattern in PATTERNS)]
    planned = plan_order(window, limit_bytes, max_labels=2, known=[shuffled, *known])
    costs = [cost for order in known if fits(cost := simulate(window, order), limit_bytes)]
    if planned is None:
        assert not costs
    else:
        assert planned.cost.seconds <= min((cost.seconds for cost in costs), default=float("inf"))


def test_memory_decides_who_goes_first() -> None:
    forward = tuple(stage("f", 2, 2, held=4) for _ in range(2))
    backward = tuple(stage("b", 2, 2, held=-4) for _ in range(2))
    window = Window(forward, backward, start_bytes=8)
    free = plan_order(window, None)
    tight = plan_order(window, 8)
    assert free is not None and tight is not None
    assert tight.order[0] is B and tight.cost.peak_bytes == 8
    assert free.cost.seconds == tight.cost.seconds == 10 * MS
    assert plan_order(window, 7) is None


def test_only_an_offload_in_between_makes_room() -> None:
    """No order that needs no search fits."""
    forward = (stage("f", 1, held=4), stage("f", 1, held=4))
    window = Window(forward, (stage("b", 1, held=0, peak=5),), (stage("o", 0, copy_ms=1, held=-4, bound=1),))
    assert plan_order(window, 8) is not None
    backward = (stage("b", 1, held=2), stage("b", 1, held=-6, peak=4))
    window = Window(forward, backward, (stage("o", 1, held=-3, bound=2),), start_bytes=4)
    assert plan_order(window, 10) is not None and plan_order(window, 9) is None


@pytest.mark.parametrize("num_moves", [0, 6])
def test_an_order_that_fits_is_found_where_no_pattern_fits(num_moves: int) -> None:
    """Backward frees 3 and takes them back; only while it has, is there room for forward, which takes 4 for a while."""
    forward = tuple(stage("f", 1, 1, held=-1 if number % 5 else 4) for number in range(40))
    backward = tuple(stage("b", 1, 1, held=3 if number % 2 else -3) for number in range(30))
    moves = tuple(stage("o", 0, copy_ms=1, bound=40) for _ in range(num_moves))
    window = Window(forward, backward, moves, start_bytes=10)
    assert all(simulate(window, fixed(window, pattern)).peak_bytes > 11 for pattern in (*PATTERNS, "BFF", "FBF"))
    planned = plan_order(window, 11)
    assert planned is not None and planned.cost.peak_bytes == 11
    assert plan_order(window, 10) is None


def test_a_stage_that_is_cut_may_hide_more() -> None:
    """The paper says that stages within a computation give no more overlap. In this model they may."""
    backward = (stage("b", 1, 2), stage("b", 1, 2), stage("b", 1))
    whole = plan_order(Window((stage("f", 4),), backward), None)
    halves = plan_order(Window((stage("f", 2), stage("f", 2)), backward), None)
    assert whole is not None and halves is not None and whole.is_exact and halves.is_exact
    assert (whole.cost.seconds, halves.cost.seconds) == pytest.approx((9 * MS, 7 * MS))


def test_x_may_be_offloaded_and_y_recovered_in_one_window() -> None:
    """No pipeline (x - y = 1): an offload follows its forward stage, a recovery is there for its backward stage."""
    window = layers(4, num_moves=4)
    planned = plan_order(window, None)
    assert planned is not None
    order = planned.order
    for number in range(4):
        at = [index for index, side in enumerate(order) if side is O][number]
        assert order[:at].count(F) >= 3 * (number + 1)
        at = [index for index, side in enumerate(order) if side is R][number]
        assert order[:at].count(B) <= 2 * number


@pytest.mark.parametrize("num_layers", [8, 60])
@pytest.mark.parametrize("exchange", [0.5, 2.0])
def test_orders_of_deep_stacks_are_exact(num_layers: int, exchange: float) -> None:
    window = layers(num_layers, exchange)
    planned = plan_order(window, 6 * num_layers + 6)
    assert planned is not None and planned.is_exact
    patterns = (fixed(window, pattern) for pattern in PATTERNS)
    assert planned.cost.seconds < min(simulate(window, order).seconds for order in patterns)


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_orders_with_offloads_and_recoveries_are_near_the_bound(is_pipeline: bool) -> None:
    window = layers(16, num_moves=16, is_pipeline=is_pipeline)
    planned = plan_order(window, 6 * 16 + 20)
    assert planned is not None
    assert planned.cost.seconds <= 1.05 * planned.least_seconds
    assert planned.cost.seconds < 0.8 * simulate(window, sequential(window)).seconds


def test_equal_windows_have_equal_orders_in_every_process() -> None:
    """All ranks must issue their collectives in one order."""
    code = (
        "from tests.planner.windows import layers\n"
        "from flex_trainer.planner.fusion_order import plan_order\n"
        "print(*(side.value for side in plan_order(layers(6, num_moves=6), 50).order))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    here: Order = plan_order(layers(6, num_moves=6), 50).order  # pyright: ignore[reportOptionalMemberAccess]
    assert printed == [" ".join(side.value for side in here) + "\n"] * 2


def test_noise_below_a_nanosecond_does_not_change_the_order() -> None:
    exact, noisy = (layers(6, 1.0 + noise, num_moves=6) for noise in (0.0, 1e-9))
    first, second = plan_order(exact, None), plan_order(noisy, None)
    assert exact != noisy and first is not None and second is not None and first.order == second.order


def test_a_known_order_of_another_window_is_refused() -> None:
    with pytest.raises(ValueError):
        plan_order(Window((stage("f", 1),), ()), None, known=[(F, F)])
