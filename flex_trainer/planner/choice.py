"""A choice: one strategy for every operator of a segment, in a form that is small and can be looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from flex_trainer.cost.compiled import CODE_OF, CODES, KEEP
from flex_trainer.strategy import Strategy

Choice = bytes
"""Strategies of one segment, as a number into `CODES` for each operator."""


def changed(choice: Choice, operator: int, code: int) -> Choice:
    """The choice with another code for one operator."""
    return choice[:operator] + bytes((code,)) + choice[operator + 1 :]


def mitigated(choice: Choice) -> list[tuple[int, Strategy]]:
    """The mitigations of a choice, with the operator of each."""
    return [(index, CODES[code]) for index, code in enumerate(choice) if code != KEEP]


def choice_of(names: Sequence[str], strategies: Mapping[str, Strategy]) -> Choice:
    """The choice that strategies by site name are in a segment whose operators have these names."""
    return bytes(CODE_OF[strategies[name]] if name in strategies else KEEP for name in names)


def codes_of(choices: Sequence[Choice]) -> np.ndarray:
    """Choices of one class as C x n numbers into `CODES`."""
    return np.frombuffer(b"".join(choices), dtype=np.uint8).reshape(len(choices), -1).astype(np.int64)
