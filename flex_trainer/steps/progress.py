"""How far a backward has come by the time the forward beside it reaches a layer: it follows from their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flex_trainer.experts.handover import Exchange
from flex_trainer.planner.fusion import Side
from flex_trainer.steps.stages import StageKey
from flex_trainer.strategy import Site


def layers_reached(
    order: Iterable[Side], forward: Sequence[StageKey], backward: Sequence[StageKey], num_layers: int
) -> tuple[int, ...]:
    """For each layer of the forward, and after the last one: the layer that the backward is in by then; `num_layers`:
    in none yet. What it has left behind is gone, whatever happens later.

    Args:
        order: whose stage comes next. Empty: not known, so the backward may be in no layer all the time.
        forward, backward: the stages of both.
    """
    keys = {Side.FORWARD: iter(forward), Side.BACKWARD: iter(backward)}
    is_in = num_layers
    found = [num_layers] * (num_layers + 1)
    for side in order:
        stage = next(keys[side], None)
        if stage is None or not isinstance(stage.place, Site):
            continue
        if side is Side.BACKWARD:
            is_in = min(is_in, stage.place.layer)
        elif stage.exchange is Exchange.COMBINE:
            first = stage.place.layer + 1  # the next layer begins
            found[first:] = [is_in] * len(found[first:])
    return tuple(found)
