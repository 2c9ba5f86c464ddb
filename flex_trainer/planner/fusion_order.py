"""Which order a window runs in: the one that ends first among those that fit in memory.

Orders that need no search come first: backward then forward, and patterns of a layer. The search
(planner/fusion_search.py) looks for one that ends before the best of them that fits. How far it looks is counted in
labels and not in seconds, so that all ranks come to the same order.

Where the search had to let labels go, the same window without offloads, recoveries and memory limit says how much
better an order could be: whatever is left out of an order, the rest ends no later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flex_trainer.planner.fusion import Order, Window, fixed, sequential
from flex_trainer.planner.fusion_cost import FusedCost, nanoseconds, simulate
from flex_trainer.planner.fusion_search import OrderSearch

MAX_LABELS = 128
_MAX_PREFIXES = 1024
_PATTERNS = ("FB", "BF", "BFF", "FBF", "BFFBF")


@dataclass(frozen=True)
class PlannedOrder:
    """An order that fits, and what it costs."""

    order: Order
    cost: FusedCost
    least_seconds: float
    """No order of these stages that fits takes less."""

    @property
    def is_exact(self) -> bool:
        """No order is better. Where this is False, that is not known: the search was too large to be completed."""
        return self.least_seconds >= self.cost.seconds


def plan_order(
    window: Window, limit_bytes: int | None, max_labels: int = MAX_LABELS, known: Sequence[Order] = ()
) -> PlannedOrder | None:
    """The order of a window that ends first and never needs more than the limit.

    Args:
        window: the stages.
        limit_bytes: most that may be held and needed at one time, `start_bytes` included; None: no limit.
        max_labels: how widely to search, at least 1; time grows with it.
        known: orders that the result must not be worse than, where they fit.

    Returns:
        None where no order fits. In a window of more than 1024 prefixes of one length, also where none was found,
        although one may fit.

    Raises:
        ValueError: an order in `known` is none of this window.
    """
    best: tuple[Order, FusedCost] | None = None

    def consider(order: Order | None) -> None:
        nonlocal best
        if order is None:
            return
        cost = simulate(window, order)
        fits = limit_bytes is None or cost.peak_bytes <= limit_bytes
        if fits and (best is None or cost.seconds < best[1].seconds):
            best = order, cost

    search = OrderSearch(window, limit_bytes)
    for order in (*known, sequential(window), *(fixed(window, pattern) for pattern in _PATTERNS)):
        consider(order)
    if best is None:
        consider(search.fitting(_MAX_PREFIXES))
    if best is None:
        return None
    found = search.run(nanoseconds(best[1].seconds), max_labels)
    consider(found.order)
    end = nanoseconds(best[1].seconds)
    least = max(found.bound, search.lower_bound())
    if least < end and (window.offloads or window.recoveries or limit_bytes is not None):
        rest = replace(window, offloads=(), recoveries=())
        least = max(least, OrderSearch(rest, None).run(end, max_labels).bound)
    return PlannedOrder(*best, least_seconds=least / 1e9)
