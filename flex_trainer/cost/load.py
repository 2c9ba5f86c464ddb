"""How much one rank's experts have to do, relative to an even spread, and what of a micro-batch follows it.

With expert parallelism, what a layer's experts hold on a rank depends on the routers of all ranks: sizes are learnt as
they would be under an even load, and scaled to the load that is expected, or known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flex_trainer.activations.trace import Trace
from flex_trainer.strategy import EP_BLOCK, EP_DISPATCH

_STEPS = 8
"""Expected loads are multiples of one over this."""
_COARSE_STEPS = 4
"""Per factor of two: loads that round to the same step are nearly equal."""
_MAX_DIFFERENT = 8
"""So many loads are planned apart; more are merged."""
_BY_ROWS = frozenset({EP_BLOCK, EP_DISPATCH, "experts", "expert_unpermute"})


@dataclass(frozen=True)
class Load:
    """Of one layer on one rank."""

    pairs: float = 1.0
    """(Row, expert) pairs here over the pairs that this rank's own tokens make."""
    rows: float = 1.0
    """Rows received over the most that this rank could send: its tokens times the ranks, or experts per token, whatever
    is less."""

    def exceeds(self, other: Load) -> bool:
        return self.pairs > other.pairs or self.rows > other.rows

    def rounded_up(self) -> Load:
        """In steps of an eighth, so that plans made for a load are found again."""
        return Load(*(math.ceil(value * _STEPS) / _STEPS for value in (self.pairs, self.rows)))

    def scaled(self, factor: float) -> Load:
        return Load(self.pairs * factor, self.rows * factor)

    def maximum(self, other: Load) -> Load:
        return Load(max(self.pairs, other.pairs), max(self.rows, other.rows))

    def of(self, kind: str) -> float:
        """By what the sizes of an operator of this kind are larger than under an even load."""
        by = follows(kind)
        return 1.0 if by is None else getattr(self, by)


EVEN = Load()


def follows(kind: str) -> Literal["pairs", "rows"] | None:
    """What of the load the sizes of an operator of this kind follow."""
    if kind in _BY_ROWS:
        return "rows"
    return "pairs" if kind.startswith("expert") else None


def merged(loads: Mapping[int, Load]) -> dict[int, Load]:
    """Layers of nearly equal load get their mean, so that they are planned as one kind. The layer with the most pairs
    keeps its own. Few different loads stay as they are.

    Args:
        loads: by layer.
    """
    if len(set(loads.values())) <= _MAX_DIFFERENT:
        return dict(loads)
    most = max(loads, key=lambda layer: loads[layer].pairs)
    groups: dict[object, list[int]] = {}
    for layer, load in loads.items():
        group = "most" if layer == most else round(_COARSE_STEPS * math.log2(load.pairs)) if load.pairs else None
        groups.setdefault(group, []).append(layer)
    few: dict[int, Load] = {}
    for layers in groups.values():
        few.update(dict.fromkeys(layers, _mean([loads[layer] for layer in layers])))
    return few


def _mean(loads: Sequence[Load]) -> Load:
    return Load(sum(load.pairs for load in loads) / len(loads), sum(load.rows for load in loads) / len(loads))


def at_even_load(trace: Trace, loads: Mapping[int, Load]) -> Trace | None:
    """The trace as it would have been under an even load; None where a load was zero, which says nothing of sizes.

    Args:
        loads: by layer.
    """
    if not loads:
        return trace
    if any(load.pairs == 0 for load in loads.values()):
        return None
    calls = [
        replace(
            call,
            output_bytes=round(call.output_bytes / factor),
            seconds=call.seconds / factor,
        )
        for call in trace.calls
        for factor in [loads.get(call.site.layer, EVEN).of(call.site.kind)]
    ]
    values = []
    for value in trace.values:
        site = trace.calls[value.owner].site if value.owner >= 0 else None
        factor = 1.0 if site is None else loads.get(site.layer, EVEN).of(site.kind)
        values.append(replace(value, num_bytes=round(value.num_bytes / factor)))
    return Trace(calls, values, trace.is_symbolic)
