"""What autograd saves of one forward, in the ledger: each storage once, as long as autograd holds anything of it."""

from __future__ import annotations

from flex_trainer.activations.entry import Entry
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.trace import ValueTrace


class Demand:
    """Counts storages into a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._fresh: list[Entry] = []  # counted since the last sweep

    def count(self, entry: Entry) -> None:
        """Autograd saves this storage for the first time."""
        entry.is_counted = True
        self._fresh.append(entry)
        self._ledger.demand(entry.num_bytes)

    def drop(self, entry: Entry) -> None:
        """A recomputation brings the storage back, so it is not held."""
        entry.dropped_bytes = entry.num_bytes
        self._ledger.freed("recompute", entry.dropped_bytes)

    def keep(self, entry: Entry) -> None:
        """A recomputation does not bring it back after all."""
        self._ledger.freed("recompute", -entry.dropped_bytes)
        entry.dropped_bytes = 0

    def sweep(self, values: list[ValueTrace]) -> None:
        """Take back what was counted on branches of the graph that died in forward: a router's unused scores."""
        for entry in self._fresh:
            if not entry.is_pinned:
                value = values[entry.value]
                value.savers.clear()
                value.is_decision &= entry.is_router_output
                entry.is_counted = False
                self._ledger.demand(-value.num_bytes)
                self.keep(entry)
        self._fresh.clear()
