"""Where the engine is: so that an allocation that fails can be given a name."""

from __future__ import annotations

from typing import NamedTuple

OUTSIDE = "the model, outside of its layers"


class Place(NamedTuple):
    """An operator and what is done with it."""

    phase: str
    """planning, forward, backward, or recovery (a replay, a reload or a conversion back)."""
    operator: str
    """Name of the site. In backward: whose saved value was asked for last."""


class Whereabouts:
    """The engine's latest place, shared by the scopes of one run. A failed forward leaves the innermost operator."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at: Place | None = None
        """None before anything has run, and after a backward."""
