"""Algorithm 1: budgets worked out by hand, and what holds for any sequence of micro-batches."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.planner.plan import Plan
from flex_trainer.provision.policy import BudgetBooks, fill, provide


def test_one_in_flight_gets_what_is_left() -> None:
    books = BudgetBooks()
    assert books.next(1000, 300, 50) == 700
    books.commit(0, 640)
    assert books.in_flight_bytes == 640
    books.release(0)
    assert books.next(1000, 320, 50) == 680


def test_warm_up_of_three_by_hand() -> None:
    # M_max = 1000, U = 100, M0 = 50, W = 3.
    books = BudgetBooks(num_warmup=3)
    assert books.next(1000, 100, 50) == 300  # r = 3: (1000 - 100 - 150) / 3 + 50
    books.commit(0, 240)
    assert books.next(1000, 100, 50) == 330  # r = 2: (1000 - 340 - 100) / 2 + 50
    books.commit(1, 330)
    assert books.next(1000, 100, 50) == 330  # r = 1: 1000 - 670
    books.commit(2, 130)
    # Steady: the oldest leaves, the next one gets all that is left.
    books.release(0)
    assert books.next(1000, 100, 50) == 440  # 1000 - 100 - 330 - 130
    books.commit(3, 440)
    books.release(1)
    assert books.next(1000, 100, 50) == 330


def test_an_error_does_not_cascade() -> None:
    # The first one takes 100 more than its budget; the other two share the loss, and the sum still fits.
    books = BudgetBooks(num_warmup=3)
    first = books.next(900, 0, 0)
    books.commit(0, first + 100)
    second = books.next(900, 0, 0)
    books.commit(1, second)
    third = books.next(900, 0, 0)
    assert (first, second, third) == (300, 250, 250)


def test_nothing_left_gives_a_negative_budget() -> None:
    assert BudgetBooks().next(100, 130, 0) == -30


def test_releasing_an_unknown_micro_batch_changes_nothing() -> None:
    books = BudgetBooks()
    books.release(7)
    assert books.in_flight_bytes == 0


def test_no_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_warmup=0 must be at least 1"):
        BudgetBooks(num_warmup=0)


@given(
    num_warmup=st.integers(1, 6),
    limit_bytes=st.integers(10**4, 10**9),
    other_share=st.floats(0, 0.5),
    minimum_share=st.floats(0, 0.05),
    used_shares=st.lists(st.floats(0, 1), min_size=1, max_size=20),
)
def test_the_sum_in_flight_never_exceeds_the_limit(
    num_warmup: int, limit_bytes: int, other_share: float, minimum_share: float, used_shares: list[float]
) -> None:
    books = BudgetBooks(num_warmup)
    other_bytes, minimum_bytes = int(other_share * limit_bytes), int(minimum_share * limit_bytes)
    for number, share in enumerate(used_shares):
        if number >= num_warmup:
            books.release(number - num_warmup)
        budget_bytes = books.next(limit_bytes, other_bytes, minimum_bytes)
        # In the warm-up every later micro-batch can still get at least the least it needs.
        later = max(num_warmup - number - 1, 0)
        assert books.in_flight_bytes + budget_bytes + later * minimum_bytes <= limit_bytes - other_bytes
        assert budget_bytes >= minimum_bytes - num_warmup
        books.commit(number, min(minimum_bytes + int(share * (budget_bytes - minimum_bytes)), budget_bytes))
        assert other_bytes + books.in_flight_bytes <= limit_bytes


# How many are in flight


def test_how_many_are_in_flight_is_learnt_or_told() -> None:
    books = BudgetBooks()

    def round_of(num: int) -> None:
        for number in range(num):
            books.begin()
            books.commit(number, 10)
        for number in range(num):
            books.release(number)

    assert books.num_expected == 1 and not books.is_shared
    round_of(3)
    assert books.num_expected == 3 and books.is_shared
    for _ in range(16):
        round_of(1)
    assert books.num_expected == 1  # three were long ago
    books.follow_schedule(4)
    round_of(2)
    assert books.num_expected == 4
    books.follow_schedule(None)
    assert books.num_expected == 2
    with pytest.raises(ValueError, match=r"num_warmup=0 must be at least 1"):
        books.follow_schedule(0)


# Plans


def plan_for(available_bytes: int) -> Plan:
    """Holds up to 1000, of which half comes on top again in backward; needs 60 at least."""
    held_bytes = max(min(available_bytes * 2 // 3, 1000), 40)
    peak_bytes = held_bytes * 3 // 2
    return Plan(
        predicted_bytes=held_bytes,
        peak_bytes=peak_bytes,
        minimum_bytes=40,
        added_seconds=(1000 - held_bytes) / 1000,
        fits=peak_bytes <= available_bytes,
    )


def test_alone_a_plan_is_bounded_by_its_peak() -> None:
    provision = provide(plan_for, 900, BudgetBooks())
    assert (provision.plan.peak_bytes, provision.available_bytes, provision.budget_bytes) == (900, 900, 600)
    assert provide(plan_for, 900, BudgetBooks(), step_bytes=64).plan.peak_bytes == 895  # of 896 bytes
    assert provide(plan_for, 900, BudgetBooks(), is_minimum=True).plan.predicted_bytes == 40
    assert not provide(plan_for, 50, BudgetBooks()).plan.fits


@pytest.mark.parametrize("num_in_flight", [2, 3, 5])
def test_in_flight_together_they_stay_under_the_limit(num_in_flight: int) -> None:
    """By Algorithm 1, one after the other, with what each of them came to in the books."""
    books, held_bytes = BudgetBooks(num_in_flight), 0
    plans: list[Plan] = []
    for number in range(3 * num_in_flight):
        if number >= num_in_flight:
            books.release(number - num_in_flight)
            held_bytes -= plans[number - num_in_flight].predicted_bytes
        plan = provide(plan_for, 2000 - held_bytes, books).plan
        assert plan.fits and plan.predicted_bytes >= 40
        assert held_bytes + plan.peak_bytes <= 2000
        plans.append(plan)
        books.commit(number, plan.predicted_bytes, plan.on_top_bytes)
        held_bytes += plan.predicted_bytes
        assert held_bytes + books.on_top_bytes <= 2000
    assert held_bytes > 0.6 * 2000  # and use it


def test_alike_they_fill_the_limit() -> None:
    def left_bytes_under(plan: Plan) -> int:
        return 2000 - (3 * plan.predicted_bytes + plan.on_top_bytes)

    found = fill(plan_for, left_bytes_under, 3, plan_for(0), plan_for(1500), full_bytes=20, max_plans=6)
    assert 1 <= len(found) <= 6 and all(left_bytes_under(plan) >= 0 for plan in found)
    assert left_bytes_under(min(found, key=lambda plan: plan.added_seconds)) <= 20


def test_it_needs_no_model_no_meter_and_no_torch() -> None:
    code = (
        "import sys, flex_trainer.provision.policy;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'accelerate', 'flex_trainer.memory')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
