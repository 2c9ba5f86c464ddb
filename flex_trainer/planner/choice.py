"""A choice: one strategy for every operator of a segment, in a form that is small and can be looked up."""

from __future__ import annotations

from collections.abc import Mapping

from flex_trainer.cost.compiled import CODES, KEEP
from flex_trainer.cost.graph import Segment
from flex_trainer.strategy import Strategy

Choice = bytes
"""Strategies of one segment, as a number into `CODES` for each operator."""


def uniform_choice(segment: Segment, strategy: Strategy) -> Choice:
    """One strategy for all that allows it."""
    code = CODES.index(strategy)
    return bytes(code if operator.site.allows(strategy) else KEEP for operator in segment.operators)


def changed(choice: Choice, operator: int, code: int) -> Choice:
    """The choice with another code for one operator."""
    return choice[:operator] + bytes((code,)) + choice[operator + 1 :]


def strategies_of(choice: Choice) -> dict[int, Strategy]:
    """The mitigations of a choice, by operator index."""
    return {index: CODES[code] for index, code in enumerate(choice) if code != KEEP}


def choice_of(segment: Segment, strategies: Mapping[str, Strategy]) -> Choice:
    """The choice that strategies by site name are in a segment."""
    return bytes(CODES.index(strategies.get(operator.site.name, Strategy.KEEP)) for operator in segment.operators)
