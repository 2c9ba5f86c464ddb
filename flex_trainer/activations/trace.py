"""What one forward did, as data: operators in order, the values they made, and who saves which value.

The engine writes it during every forward (whatever the strategies are); the cost model reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flex_trainer.activations.storage_layout import StorageLayout
from flex_trainer.strategy import Site


@dataclass(slots=True)
class ValueTrace:
    """One storage."""

    owner: int
    """Index of the call that made it; for what was computed between operators, the enclosing block; -1: outside."""
    num_bytes: int
    element_bytes: int = 1
    savers: list[int] = field(default_factory=list)
    """Calls whose autograd nodes save it."""
    layout: StorageLayout | None = None
    """Of the tensor in which it was first seen."""
    is_decision: bool = False
    """A router has decided it: what it gives, and the numbers of experts inside of it."""
    has_infinity: bool = False
    """It was seen to hold infinities, as masks do: it is kept where others are quantized."""

    @property
    def num_rows(self) -> int:
        """Rows that it is quantized in, each with a scale of its own; 0: not a kind that is quantized."""
        return 0 if self.layout is None else self.layout.num_rows(self.num_bytes)


@dataclass
class Work:
    """What one run of an operator does, inner operators left out; known from a symbolic trace only."""

    flops: float = 0.0
    """Floating-point operations of its forward."""
    moved_bytes: float = 0.0
    """Bytes its forward reads and writes."""
    backward_flops: float = 0.0
    backward_moved_bytes: float = 0.0
    forward_transient_bytes: int = 0
    """Most bytes alive in its forward on top of what autograd holds."""
    backward_transient_bytes: int = 0
    """The same in its backward, gradients of parameters left out once they are whole."""
    gradient_bytes: int = 0
    """Gradients of parameters that its backward leaves behind."""


@dataclass(slots=True)
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
    work: Work | None = None


@dataclass
class Trace:
    """One forward."""

    calls: list[CallTrace] = field(default_factory=list)
    values: list[ValueTrace] = field(default_factory=list)
    is_symbolic: bool = False
    """Made on shapes alone: sizes and work are right, and the seconds are at best an estimate."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Calls, values, and calls that may be recomputed."""
        return len(self.calls), len(self.values), sum(call.site.is_recomputable for call in self.calls)

    def is_inside(self, inner: int, outer: int) -> bool:
        """Whether call `inner` is `outer`, or ran inside of it."""
        while inner > outer:
            inner = self.calls[inner].parent
        return inner == outer
