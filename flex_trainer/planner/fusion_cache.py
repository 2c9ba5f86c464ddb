"""Orders found before (BaGuaLu-2, section V-B): most scheduling points repeat an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from flex_trainer.planner.fusion import Window
from flex_trainer.planner.fusion_order import MAX_LABELS, PlannedOrder, plan_order


class OrderCache:
    """Plans orders, each once for a structure and a budget; the budget is rounded down to a multiple of a step.

    Ranks that share windows ask for the same ones in the same sequence, so their caches stay alike.
    """

    def __init__(self, step_bytes: int, max_labels: int = MAX_LABELS, max_orders: int = 256) -> None:
        """
        Args:
            step_bytes: budgets between two multiples of this share an order, planned for the lower one.
            max_labels: how widely to search.
            max_orders: most that are kept; those not asked for longest go first.

        Raises:
            ValueError: a step or number that is not positive.
        """
        if min(step_bytes, max_labels, max_orders) < 1:
            raise ValueError(f"Steps ({step_bytes}), labels ({max_labels}) and orders ({max_orders}) must be positive.")
        self._step_bytes, self._max_labels, self._max_orders = step_bytes, max_labels, max_orders
        self._orders: dict[tuple[Hashable, int | None], PlannedOrder | None] = {}
        self.num_planned = 0
        """Orders that were not found here."""

    def find(
        self, structure: Hashable, limit_bytes: int | None, make_window: Callable[[], Window]
    ) -> PlannedOrder | None:
        """The order of a window, as `plan_order` gives it.

        Args:
            structure: what all of the window follows from, its times and `start_bytes` included; quick to hash, which
                a window itself is not. A measured time must be rounded so that it repeats, and equal on all ranks.
            limit_bytes: as in `plan_order`.
            make_window: called where the order is not known.
        """
        key = structure, None if limit_bytes is None else limit_bytes // self._step_bytes
        if key in self._orders:
            found = self._orders[key] = self._orders.pop(key)
            return found
        limit = None if key[1] is None else key[1] * self._step_bytes
        found = self._orders[key] = plan_order(make_window(), limit, self._max_labels)
        self.num_planned += 1
        if len(self._orders) > self._max_orders:
            del self._orders[next(iter(self._orders))]
        return found
