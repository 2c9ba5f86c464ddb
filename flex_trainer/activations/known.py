"""A forward of which everything is known beforehand, and in which everything is kept.

Then nothing has to be done for each saved tensor: autograd holds it as in a plain run, and the ledger takes the bytes
that were predicted. Hooks are on in a few operators only: what they save tells whether backward has come, and for how
long the graph is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flex_trainer.activations.ledger import Ledger
from flex_trainer.strategy import Site


@dataclass(frozen=True)
class KnownForward:
    """What a forward holds in which everything is kept."""

    held_bytes: int
    """When it has ended."""
    held_until: Callable[[int], int]
    """Most bytes held while layer l runs."""


class KnownHolding:
    """Accounts for all that such a forward holds: alive as long as any sentinel of it is."""

    __slots__ = ("__weakref__", "_known", "_ledger", "_num_bytes")

    def __init__(self, known: KnownForward, ledger: Ledger) -> None:
        self._known = known
        self._ledger = ledger
        self._num_bytes = 0

    def end_layer(self, layer: int) -> None:
        """A layer has run."""
        self._grow(self._known.held_until(layer))

    def end_forward(self) -> None:
        self._grow(self._known.held_bytes)

    def _grow(self, num_bytes: int) -> None:
        more = num_bytes - self._num_bytes
        if more > 0:
            self._num_bytes = num_bytes
            self._ledger.demand(more)
            self._ledger.hold(more)

    def __del__(self) -> None:
        self._ledger.release(self._num_bytes)


class UnwatchedForward:
    """A known forward while it runs: which operators have run, and the account that its sentinels keep alive."""

    __slots__ = ("_holding", "has_sentinel", "sites")

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.has_sentinel = False
        """Whether backward will be noticed."""
        self._holding: KnownHolding | None = None

    @property
    def is_open(self) -> bool:
        return self._holding is not None

    @property
    def holding(self) -> KnownHolding:
        assert self._holding is not None, "while it is open"
        return self._holding

    def begin(self, known: KnownForward, ledger: Ledger) -> None:
        self._holding = KnownHolding(known, ledger)

    def end_layer(self) -> None:
        """The layer that has run last is done."""
        if self._holding is not None and self.sites:
            self._holding.end_layer(self.sites[-1].layer)

    def end(self, *, reached_its_end: bool) -> None:
        """Forget the account: from here on the sentinels alone hold it.

        Args:
            reached_its_end: nothing was looked at up to the end of forward.
        """
        if self._holding is not None and reached_its_end:
            self._holding.end_forward()
        self._holding = None
