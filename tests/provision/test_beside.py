"""A forward beside a backward: what both may hold at one time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flex_trainer.experts.handover import Exchange
from flex_trainer.planner.fusion import Side
from flex_trainer.planner.plan import Plan
from flex_trainer.provision.beside import Beside, share_of_both
from flex_trainer.provision.policy import BudgetBooks, provide, revise_beside
from flex_trainer.steps.fused import FusedSteps
from flex_trainer.steps.progress import layers_reached
from flex_trainer.steps.stages import Place, StageKey
from flex_trainer.strategy import Site

LAYERS = 4
ALTERNATING = "FB" * (2 * LAYERS + 1)


def plan(layer_bytes: int, on_top_bytes: int = 0, available_bytes: int | None = None) -> Plan:
    """Holds as much in every layer."""
    held = tuple(layer_bytes * (layer + 1) for layer in range(LAYERS))
    peak = held[-1] + on_top_bytes
    fits = available_bytes is None or peak <= available_bytes
    return Plan(predicted_bytes=held[-1], peak_bytes=peak, held_by_layer=held, fits=fits)


def keys(side: Side) -> list[StageKey]:
    layers = range(LAYERS) if side is Side.FORWARD else range(LAYERS - 1, -1, -1)
    places: list[tuple[Exchange | None, Place | None]] = []
    for layer in layers:
        site = Site(f"layers.{layer}.experts", "experts", layer)
        places += [(Exchange.DISPATCH, site), (Exchange.COMBINE, site)]
    return [StageKey(side, exchange, False, place, 0) for exchange, place in [*places, (None, None)]]


def reached(order: str) -> tuple[int, ...]:
    return layers_reached(map(Side, order), keys(Side.FORWARD), keys(Side.BACKWARD), LAYERS)


def test_how_far_a_backward_is_follows_from_the_order() -> None:
    assert reached("") == (4, 4, 4, 4, 4)  # not known: it may be in no layer all the time
    assert reached("F" * 9 + "B" * 9) == (4, 4, 4, 4, 4)
    assert reached("B" * 9 + "F" * 9) == (4, 0, 0, 0, 0)
    assert reached(ALTERNATING) == (4, 3, 2, 1, 0)
    assert reached("FB" * 40) == (4, 3, 2, 1, 0)  # a pattern goes on


def test_the_share_of_both_lies_between_one_and_two() -> None:
    assert share_of_both(reached("")) == 2.0
    assert share_of_both(reached(ALTERNATING)) == pytest.approx(1.5)  # 2 of 4 layers, and 4 of 4
    assert share_of_both((60, *range(59, -1, -1))) == pytest.approx(61 / 60 + 1 / 60, abs=0.02)


def test_what_is_gone_by_then_may_be_taken() -> None:
    other = plan(100, on_top_bytes=10)
    both = Beside.of(other, 400, reached(ALTERNATING), lambda: 400)
    assert both.held_by_layer == (400, 400, 300, 200, 100)
    assert both.most_bytes(plan(100)) == 100 + 400 + 100  # in the second layer
    assert both.most_bytes(plan(0)) == 400
    assert both.late_bytes(1) == 0 and both.late_bytes(3) == 200


@pytest.mark.parametrize("is_watched", [True, False])
def test_only_what_is_counted_as_it_is_given_back_can_be_late(is_watched: bool) -> None:
    """The ledger of a forward that was not watched has all of its bytes until its backward has ended."""
    ledger, scope = SimpleNamespace(held_bytes=400), SimpleNamespace(is_traced=is_watched)
    micro_batch = SimpleNamespace(plan=plan(100), actual_bytes=400, ledger=ledger, scope=scope)
    steps = SimpleNamespace(choice=SimpleNamespace(reached=lambda num_layers: reached(ALTERNATING)))
    beside: Any = FusedSteps._beside
    assert beside(steps, micro_batch).late_bytes(3) == (200 if is_watched else 0)


def test_more_held_than_predicted_goes_last() -> None:
    both = Beside.of(plan(100), 430, reached(ALTERNATING), lambda: 430)
    assert both.held_by_layer == (430, 430, 330, 230, 130)


@pytest.mark.parametrize("left_bytes", [60, 150, 250, 1000])
def test_plans_fit_beside_what_is_still_held(left_bytes: int) -> None:
    books = BudgetBooks()
    books.follow_schedule(2)
    books.pair_share = share_of_both(reached(ALTERNATING))
    books.commit("earlier", 400, 10)
    books.beside = both = Beside.of(plan(100, 10), 400, reached(ALTERNATING), lambda: 400)

    def plan_for(available_bytes: int) -> Plan:
        return plan(max(min((available_bytes - 10) // LAYERS, 100), 5), 10, available_bytes)

    provision = provide(plan_for, left_bytes, books)
    most_bytes = both.most_bytes(provision.plan) + provision.plan.on_top_bytes + both.on_top_bytes
    assert provision.fits and most_bytes <= 400 + left_bytes
    # As W = 2 of Algorithm 1 it would have what is left, and no more.
    assert provision.plan.predicted_bytes >= min(left_bytes - 20, 400)


def test_the_first_one_leaves_room_for_the_next() -> None:
    books = BudgetBooks()
    books.follow_schedule(2)
    books.pair_share = 1.25
    provision = provide(lambda available: plan(max(available - 10, 0) // LAYERS, 10, available), 1020, books)
    assert provision.plan.predicted_bytes == pytest.approx(1000 / 1.25, abs=LAYERS)


def test_what_cannot_fit_beside_is_said() -> None:
    books = BudgetBooks()
    books.pair_share = 1.5
    books.commit("earlier", 400, 10)
    books.beside = Beside.of(plan(100, 10), 400, reached(ALTERNATING), lambda: 400)
    assert not provide(lambda available: plan(50, 10, available), 100, books).fits


@pytest.mark.parametrize(("all_bytes", "late_bytes"), [(1000, 0), (700, 0), (620, 0), (700, 100), (800, 100)])
def test_more_rows_than_planned_fit_beside_what_is_still_held(all_bytes: int, late_bytes: int) -> None:
    """In the second layer twice as much comes as was planned: all of that would fit once the other one is gone."""
    books, layer = BudgetBooks(), 1
    books.pair_share = share_of_both(reached(ALTERNATING))
    books.commit("earlier", 400, 10)
    both = Beside.of(plan(100, 10), 400, reached(ALTERNATING), lambda: 400 + late_bytes)

    def plan_for(available_bytes: int) -> Plan:
        """100 bytes of the first layer are there; each other layer takes from 5 to 200."""
        layer_bytes = max(min((available_bytes - 110) // (LAYERS - 1), 200), 5)
        held = tuple(100 + layer_bytes * later for later in range(LAYERS))
        peak_bytes = held[-1] + 10
        return Plan(
            predicted_bytes=held[-1],
            peak_bytes=peak_bytes,
            held_by_layer=held,
            fits=peak_bytes <= available_bytes,
        )

    revised = revise_beside(plan_for, all_bytes, books, both, layer, all_bytes=all_bytes)
    held_beside = [held + late_bytes for held in both.held_by_layer[layer:]]
    own = [*revised.held_by_layer[layer:], revised.predicted_bytes]
    assert max(map(sum, zip(own, held_beside, strict=True))) + 20 <= all_bytes
    assert revised.fits and revised.predicted_bytes > 115
