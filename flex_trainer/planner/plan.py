"""A plan: the strategy of every operator for one micro-batch, with what it was predicted to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flex_trainer.strategy import Site, Strategy


@dataclass(frozen=True)
class Plan:
    """Strategies by site name (absent: keep). All sizes in bytes above what is in use before the micro-batch."""

    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    predicted_bytes: int = 0
    """Activation bytes held at the end of forward."""
    peak_bytes: int = 0
    """Highest point over forward and backward."""
    transient_bytes: int = 0
    """The part of the peak that is an estimate: what is recovered by then, gradients on their way and workspace."""
    demand_bytes: int = 0
    """What keeping everything would hold at the end of forward."""
    demand_peak_bytes: int = 0
    added_seconds: float = 0.0
    """What the mitigations add to the step."""
    recompute_seconds: float = 0.0
    """The part of it that recomputation takes."""
    minimum_bytes: int = 0
    """The least that one strategy for everything, segment by segment, holds at the end of forward: M0 of Algorithm 1.
    """
    held_by_layer: tuple[int, ...] = ()
    """Predicted bytes held once layer l has run, for every layer l."""
    fits: bool = True

    @property
    def on_top_bytes(self) -> int:
        """What comes on top of what is held when memory is highest: transients and gradients."""
        return self.peak_bytes - self.predicted_bytes

    def strategy(self, site: Site) -> Strategy:
        return self.strategies.get(site.name, Strategy.KEEP)

    def held_until(self, layer: int) -> int:
        """Most bytes predicted to be held while layer `layer` runs."""
        return self.held_by_layer[layer] if 0 <= layer < len(self.held_by_layer) else self.predicted_bytes


@dataclass(frozen=True)
class Uniform:
    """One strategy for everything that allows it: the plan of a micro-batch nothing is known about."""

    everywhere: Strategy

    def strategy(self, site: Site) -> Strategy:
        return self.everywhere if site.allows(self.everywhere) else Strategy.KEEP
