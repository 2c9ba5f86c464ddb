"""What a micro-batch may hold, and under which plan: Algorithm 1 of BaGuaLu-2 (section V-A).

    warm-up i < W:   r = W - i;  budget = (M_max - U - r M0) / r + M0;  run;  U += actual
    steady  i >= W:  U -= actual[i - W];  budget = M_max - U;           run;  U += actual

M_max is the limit, U what is in use, M0 the least a micro-batch can hold (everything recomputed), W the number of
micro-batches in flight before the first backward. Replacing the budget by the actual bytes keeps an error from
cascading. With W = 1 (no pipeline) this is what is left of the limit.

Only numbers and plans come in and go out, so the runtime, the estimate before a launch and a simulation decide alike. A
"micro-batch" is one micro-batch in one part of the model (a pipeline stage); the parts on one device share its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from flex_trainer.planner.plan import Plan
from flex_trainer.provision.beside import Beside

_ROUNDS_REMEMBERED = 16
"""Rounds (first forward to last backward) over which the most micro-batches in flight are expected again."""
_MAX_TRIED_PLANS = 8
"""Plans tried until one holds no more than its budget."""


class BudgetBooks:
    """The bytes of the micro-batches between their forward and their backward, and how many of them there will be.

    Args:
        num_warmup: W, where it is known from the beginning.
    """

    def __init__(self, num_warmup: int = 1) -> None:
        self._rounds: deque[int] = deque([_checked(num_warmup)], maxlen=_ROUNDS_REMEMBERED)
        self.scheduled: int | None = None
        """W as a schedule has it; None: it is learnt."""
        self.pair_share: float | None = None
        """Where a forward runs beside the backward of the micro-batch before it: the most that both hold together, in
        what one holds (`share_of_both`)."""
        self.beside: Beside | None = None
        """Runs beside the forward that begins next."""
        self._most_in_flight = 0  # in this round
        self._in_flight: dict[Hashable, tuple[int, int]] = {}  # bytes held, and bytes on top of them in backward

    @property
    def num_expected(self) -> int:
        """W: how many forwards come before the first backward. A schedule says so; else it is the most there were
        recently."""
        return self.scheduled if self.scheduled is not None else max(self._rounds)

    def follow_schedule(self, num_warmup: int | None) -> None:
        """W as a schedule has it; None: learn it from what runs.

        Raises:
            ValueError: below 1.
        """
        self.scheduled = None if num_warmup is None else _checked(num_warmup)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def in_flight_bytes(self) -> int:
        """Activation bytes of the micro-batches between their forward and their backward."""
        return sum(held_bytes for held_bytes, _ in self._in_flight.values())

    @property
    def on_top_bytes(self) -> int:
        """Most bytes that the backward of a micro-batch in flight needs on top of what is held."""
        return max((on_top_bytes for _, on_top_bytes in self._in_flight.values()), default=0)

    @property
    def is_shared(self) -> bool:
        """Whether memory is shared with other micro-batches, in flight or to come."""
        return bool(self._in_flight) or self.num_expected > 1 or self.pair_share is not None

    def next(self, limit_bytes: int, other_bytes: int, minimum_bytes: int) -> int:
        """The budget of the next micro-batch; it may be negative when nothing is left. In a pair it is a share of all:
        what the other one still holds is bounded layer by layer (`provide`).

        Args:
            limit_bytes: M_max.
            other_bytes: bytes in use that are not activations of micro-batches in flight.
            minimum_bytes: M0.
        """
        if self.pair_share is not None and (self.beside is not None or not self._in_flight):
            return int((limit_bytes - other_bytes) / self.pair_share)
        remaining = max(self.num_expected - len(self._in_flight), 1)
        left_bytes = limit_bytes - other_bytes - self.in_flight_bytes
        return (left_bytes - remaining * minimum_bytes) // remaining + minimum_bytes

    def begin(self) -> None:
        """A forward begins."""
        self._most_in_flight = max(self._most_in_flight, len(self._in_flight) + 1)

    def commit(self, micro_batch: Hashable, actual_bytes: int, on_top_bytes: int = 0) -> None:
        """Forward ended: U += actual."""
        self._in_flight[micro_batch] = actual_bytes, on_top_bytes

    def release(self, micro_batch: Hashable) -> None:
        """Backward ended, or will never come: U -= actual."""
        self._in_flight.pop(micro_batch, None)
        if not self._in_flight and self._most_in_flight:
            self._rounds.append(self._most_in_flight)
            self._most_in_flight = 0


@dataclass(frozen=True)
class Provision:
    """What was decided for a micro-batch."""

    plan: Plan
    available_bytes: int
    """What the plan's peak may take above what is in use now."""
    budget_bytes: int
    """What the plan may hold at the end of forward."""
    fits: bool = True
    """Whether the plan does, beside what runs at the same time."""
    all_bytes: int = 0
    """What it and the micro-batches in flight may take together."""


def provide(
    plan_for: Callable[[int], Plan],
    left_bytes: int,
    books: BudgetBooks,
    *,
    step_bytes: int = 1,
    is_minimum: bool = False,
    loss_bytes: int = 0,
) -> Provision:
    """Budget and plan of the next micro-batch.

    Args:
        plan_for: the plan whose peak takes at most so many bytes (one with `fits=False` where there is none).
        left_bytes: what may be used beside all that is in use now, micro-batches in flight included.
        step_bytes: rooms are rounded down to a multiple of this, so that plans are found in a cache.
        is_minimum: take the minimum-memory plan, whatever is left.
        loss_bytes: what comes on top of all that is held between forward and backward.
    """

    def rounded(available_bytes: int) -> Plan:
        return plan_for(available_bytes // step_bytes * step_bytes)

    beside = books.beside

    def excess_of_both(plan: Plan) -> int:
        """What both hold and need at one time, beyond what there is."""
        if beside is None:
            return 0
        return beside.most_bytes(plan) + _on_top_bytes(plan, books, loss_bytes) - all_bytes

    available_bytes = 0 if is_minimum else left_bytes + (0 if beside is None else beside.held_bytes)
    plan = rounded(available_bytes)
    # What is left was measured with the micro-batches in flight; the books take them off themselves.
    all_bytes = left_bytes + books.in_flight_bytes
    on_top_bytes = _on_top_bytes(plan, books, loss_bytes)
    budget_bytes = books.next(all_bytes, on_top_bytes, plan.minimum_bytes)
    if books.is_shared or loss_bytes > plan.on_top_bytes:
        # A plan bounds its own peak. What it holds beyond that, while others run or the loss does, is bounded here.
        for _ in range(_MAX_TRIED_PLANS):
            excess_bytes = max(plan.predicted_bytes - budget_bytes, excess_of_both(plan))
            if excess_bytes <= 0 or not plan.fits:
                break
            available_bytes = min(available_bytes, plan.peak_bytes) - max(excess_bytes, step_bytes)
            plan = rounded(available_bytes)
    fits = plan.fits and excess_of_both(plan) <= 0
    return Provision(plan, available_bytes, budget_bytes, fits, all_bytes)


def revise_beside(
    plan_for: Callable[[int], Plan],
    available_bytes: int,
    books: BudgetBooks,
    beside: Beside,
    layer: int,
    *,
    all_bytes: int,
    step_bytes: int = 1,
    loss_bytes: int = 0,
) -> Plan:
    """The plan of a forward from its `layer` on, beside what the other micro-batch still holds. What has run by then is
    as it is: where both do not fit, it is the minimum-memory plan of the rest.

    Args:
        plan_for, step_bytes, loss_bytes: as for `provide`.
        available_bytes: what the plan's peak may take once the other one is gone.
        all_bytes: what both may take together.
    """
    plan = plan_for(available_bytes)
    for _ in range(_MAX_TRIED_PLANS):
        both_bytes = beside.most_bytes_from(plan, layer) + _on_top_bytes(plan, books, loss_bytes)
        if both_bytes <= all_bytes or not plan.fits:
            return plan
        available_bytes = min(available_bytes, plan.peak_bytes) - max(both_bytes - all_bytes, step_bytes)
        plan = plan_for(available_bytes)
    return plan_for(0)


def _on_top_bytes(plan: Plan, books: BudgetBooks, loss_bytes: int) -> int:
    """Most that comes on top of what is held. The peak comes in the backward of whichever micro-batch in flight has
    most on top; where two of them take turns, each may be stopped where it has most."""
    own_bytes = max(plan.on_top_bytes, loss_bytes)
    if books.pair_share is None:
        return max(own_bytes, books.on_top_bytes)
    return own_bytes + (books.on_top_bytes or own_bytes)


def fill(
    plan_for: Callable[[int], Plan],
    left_bytes_under: Callable[[Plan], int],
    num_in_flight: int,
    low: Plan,
    high: Plan,
    *,
    full_bytes: int,
    max_plans: int,
) -> list[Plan]:
    """Plans for micro-batches that are all alike, each of which fits `num_in_flight` times: Algorithm 1 gives every one
    the same then, and what is looked for is the room of one with which all of them fill the limit.

    Args:
        plan_for: as for `provide`.
        left_bytes_under: bytes of the limit that are left when all run under a plan; negative where they do not fit.
        low, high: a plan that fits, and one that does not.
        full_bytes: a limit with no more than this left is full.
        max_plans: most plans that are tried.
    """
    found: list[Plan] = []
    # All hold the same, and one has its transients on top.
    room_bytes = left_bytes_under(high) + num_in_flight * high.predicted_bytes + high.on_top_bytes
    aim_bytes = (room_bytes + (num_in_flight - 1) * max(high.on_top_bytes, 0)) // num_in_flight
    for _ in range(max_plans):
        if not low.peak_bytes < aim_bytes < high.peak_bytes:
            aim_bytes = (low.peak_bytes + high.peak_bytes) // 2
        tried = plan_for(aim_bytes)
        left_bytes = left_bytes_under(tried)
        if left_bytes >= 0:
            low = tried
            found.append(tried)
            if left_bytes <= full_bytes:
                break
        else:
            high = tried
        # Every byte more for one is a byte more for all in flight.
        aim_bytes = tried.peak_bytes + left_bytes // num_in_flight
    return found


def _checked(num_warmup: int) -> int:
    if num_warmup < 1:
        raise ValueError(f"num_warmup={num_warmup} must be at least 1: one micro-batch is always in flight")
    return num_warmup
