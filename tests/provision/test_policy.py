"""Algorithm 1: budgets worked out by hand, and what holds for any sequence of micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.provision.policy import BudgetBooks


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
