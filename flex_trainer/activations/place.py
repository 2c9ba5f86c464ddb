"""Where the engine is: so that an allocation that fails can be given a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flex_trainer.strategy import Site

OUTSIDE = "the model, outside of its layers"


class Place(NamedTuple):
    """An operator and what is done with it."""

    phase: str
    """planning, forward, backward, or recovery (a recomputation, a reload or a conversion back)."""
    operator: str
    """Name of the site. In backward: whose saved value was asked for last."""


class Whereabouts:
    """The latest place of one micro-batch. A failed forward leaves the innermost operator.

    It changes several times in every operator and is hardly ever asked for, so it is put together when it is.
    """

    __slots__ = ("_running", "operator", "phase")

    def __init__(self) -> None:
        self.phase: str | None = None
        self.operator = ""
        self._running: Sequence[Site] | None = None

    @property
    def at(self) -> Place | None:
        """None before anything has run, and after a backward."""
        if self._running is not None and self.phase == "forward":
            return Place("forward", self._running[-1].name if self._running else OUTSIDE)
        return None if self.phase is None else Place(self.phase, self.operator)

    @at.setter
    def at(self, place: Place | None) -> None:
        self._running = None
        self.phase, self.operator = (None, "") if place is None else place

    def follow(self, running: Sequence[Site]) -> None:
        """A forward begins: the operators that run, innermost last, say where it is, until `at` is set."""
        self.phase, self._running = "forward", running


class Latest:
    """The whereabouts of the micro-batch that ran last: of several in flight, one runs at a time."""

    __slots__ = ("whereabouts",)

    def __init__(self) -> None:
        self.whereabouts = Whereabouts()
