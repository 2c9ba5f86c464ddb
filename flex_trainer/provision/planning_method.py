"""Which planner makes the next plan: the time-optimal one comes in once what it may save has paid for it.

Algorithm 2 plans in a fraction of the time, and its plans are nearly as good. In a short run, or one that hardly
mitigates, or one where every micro-batch has another shape, the search for better plans would take longer than they
save. So it may spend what it is expected to have saved of the time that mitigations were predicted to have added so
far, and no more.
"""

from __future__ import annotations

_EXPECTED_GAIN = 0.04
"""Share of the added time that the time-optimal planner saves over Algorithm 2 (docs/benchmarks.md), rounded up."""
_FIRST_SECONDS = 1.0
"""A first guess of what it takes: it searches each kind of layer once, a quarter of a second each and more."""


class MethodChoice:
    """Chooses the method of the next plan."""

    def __init__(self, method: str) -> None:
        """`method` is the one that was asked for: "auto" leaves it to what has been seen so far."""
        self._wanted = method
        self._added_seconds = 0.0
        self._spent_seconds = 0.0
        self._next_seconds = _FIRST_SECONDS

    @property
    def method(self) -> str:
        """The method that is worth its time now."""
        if self._wanted != "auto":
            return self._wanted
        is_worth = _EXPECTED_GAIN * self._added_seconds >= self._spent_seconds + self._next_seconds
        return "optimal" if is_worth else "bandwidth"

    def note_run(self, added_seconds: float) -> None:
        """A micro-batch was run whose mitigations were predicted to add so much."""
        self._added_seconds += added_seconds

    def note_plan(self, method: str, seconds: float) -> None:
        """A plan was made by a method, and took so long."""
        if method == "optimal":
            self._spent_seconds += seconds
            self._next_seconds = seconds
