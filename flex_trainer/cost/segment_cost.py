"""What one segment comes to under one choice of strategies, and the estimates of what operators need while they run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flex_trainer.cost.graph import Operator, Segment

_INPUT_SAVERS = frozenset({"linear", "lm_head", "expert_up", "expert_down"})
"""Kinds that save only inputs, before they compute: a recomputation that stops there does not pay for them."""


@dataclass(frozen=True)
class SegmentCost:
    """One segment under one choice of strategies."""

    held_bytes: int
    """Held from forward until the segment's backward."""
    added_seconds: float
    """Time that the mitigations add to the step."""
    backward_bytes: int
    """The most needed on top of what is held, at any time in the segment's backward: recovered values, gradients and
    workspace, less what has been let go of by then."""
    forward_bytes: int
    """The same while an operator runs forward, over the stack with all of the segment in it: values that will be
    dropped or moved, and workspace."""
    transient_bytes: int = 0
    """The part of the larger of the two that is an estimate: `Rates.transient_factor` is in it."""
    offloaded_bytes: int = 0
    """In the lower tier until backward."""
    recompute_seconds: float = 0.0
    """The part of `added_seconds` that recomputation takes."""
    shared: frozenset[int] = frozenset()
    """Values outside of the layers that recomputes here need: indices into `ActivationGraph.shared_bytes`."""

    @property
    def on_top_bytes(self) -> int:
        """Forward or backward, whichever needs more."""
        return max(self.backward_bytes, self.forward_bytes)


def unpaid_operators(operators: tuple[Operator, ...], region: int, last_saver: int) -> list[int]:
    """Operators inside a block that its recomputation never reaches: it stops once all that was saved inside is
    there."""
    return [
        index
        for index, operator in enumerate(operators[region + 1 :], start=region + 1)
        if operator.parent == region
        and (index > last_saver or (index == last_saver and operator.site.kind in _INPUT_SAVERS))
    ]


def ceil_bytes(num_bytes: float) -> int:
    """Whole bytes; what is a fraction only because of how floats are added is not rounded up."""
    return math.ceil(num_bytes - 1e-3)


def backward_transients(segment: Segment) -> list[int | None]:
    """By operator: bytes on top of what is held and recovered in its backward; None: no point worth looking at.

    Known from a symbolic trace, or estimated: the gradients of what goes in and out, and, where an operator is made of
    several (attention as plain matrix products), the gradient of its largest internal value and a copy on its way.
    """
    internal_bytes = [0] * len(segment.operators)
    for value in segment.values:
        if value.owner >= 0 and value.owner in value.savers:
            internal_bytes[value.owner] = max(internal_bytes[value.owner], value.num_bytes)
    transients: list[int | None] = []
    for operator, internal in zip(segment.operators, internal_bytes, strict=True):
        if operator.backward_transient_bytes is not None:
            transients.append(operator.backward_transient_bytes)
        else:
            around_bytes = operator.input_bytes + operator.output_bytes + 2 * internal
            transients.append(None if operator.site.is_block else around_bytes)
    return transients


def forward_transients(segment: Segment) -> list[int]:
    """By operator: bytes on top in its forward, of what no operator saves; 0 where no trace has told them."""
    return [operator.forward_transient_bytes or 0 for operator in segment.operators]
