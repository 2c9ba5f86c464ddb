"""When each value of a segment is in memory, by operator index: from the structure alone.

Backward goes through the operators from the last to the first. A value that is held can go once the first operator that
saved it has run backward; one that was dropped is there from the recomputation of its region on; one that was moved,
from the last operator that saved it on.
"""

from __future__ import annotations

from dataclasses import dataclass

from flex_trainer.cost.graph import Segment


@dataclass(frozen=True)
class Uses:
    """Operator indices, one entry per value (the first three) or per operator."""

    first: tuple[int, ...]
    """The operator whose backward is the last to need the value; the number of operators: it is gone before backward
    comes to this segment."""
    last: tuple[int, ...]
    """The operator whose backward, or whose recomputation, is the first to need it."""
    last_forward: tuple[int, ...]
    """The last operator that sees it in forward."""
    recompute_at: tuple[int, ...]
    """The operator whose backward is the first to need something that this operator, or one inside of it, made: there
    it would be recomputed."""


def find_uses(segment: Segment) -> Uses:
    """Work them out. What is saved by another segment is needed before backward comes to this layer, and, where the
    segment is what lies outside of the layers, until the end."""
    operators, values = segment.operators, segment.values
    num = len(operators)
    takers: list[list[int]] = [[] for _ in values]
    for index, operator in enumerate(operators):
        if operator.site.is_recomputable:
            for value in operator.inputs:
                takers[value].append(index)
    savers = [[num - 1 if saver < 0 else saver for saver in value.savers] for value in values]

    chains: list[set[int]] = []
    for index, operator in enumerate(operators):
        chains.append({index} | (chains[operator.parent] if operator.parent >= 0 else set()))
    inside: list[list[int]] = [[] for _ in operators]
    for index, value in enumerate(values):
        if value.owner < 0:
            continue
        if value.is_decision:  # blocks around the router take it in their recomputations
            blocks = chains[value.owner] - {value.owner}
            takers[index] += [outer for outer in sorted(blocks) if operators[outer].site.is_recomputable]
            inside[value.owner].append(index)
            continue
        for outer in chains[value.owner]:
            inside[outer].append(index)
    recompute_at = list(range(num))
    for index in range(num - 1, -1, -1):
        for value in inside[index]:
            outside = [recompute_at[taker] for taker in takers[value] if index not in chains[taker]]
            recompute_at[index] = max(recompute_at[index], *savers[value], *outside, 0)

    first, last, last_forward = [], [], []
    for index, value in enumerate(values):
        recomputes = [recompute_at[taker] for taker in takers[index]]
        here = [saver for saver in value.savers if saver >= 0]
        if segment.layer < 0 and -1 in value.savers:
            here = [0]
        first.append(min([*here, *recomputes], default=num))
        last.append(max([*savers[index], *recomputes], default=max(value.owner, 0)))
        last_forward.append(max([*savers[index], *takers[index]], default=max(value.owner, 0)))
    return Uses(tuple(first), tuple(last), tuple(last_forward), tuple(recompute_at))
