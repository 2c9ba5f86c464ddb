"""What one forward did, as data: operators in order, the values they made, and who saves which value.

The engine writes it during every forward (whatever the strategies are); the cost model reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flex_trainer.strategy import Site


@dataclass
class ValueTrace:
    """One storage."""

    owner: int
    """Index of the call that made it; for what was computed between operators, the enclosing block; -1: outside."""
    num_bytes: int
    element_bytes: int = 1
    savers: list[int] = field(default_factory=list)
    """Calls whose autograd nodes save it."""


@dataclass
class CallTrace:
    """One run of an operator or block."""

    site: Site
    parent: int
    """Index of the enclosing block's call, or -1."""
    inputs: list[int] = field(default_factory=list)
    """Values it takes, as indices; parameters are not among them."""
    seconds: float = 0.0
    """Forward time, inner operators included."""
    output_bytes: int = 0


@dataclass
class Trace:
    """One forward."""

    calls: list[CallTrace] = field(default_factory=list)
    values: list[ValueTrace] = field(default_factory=list)
