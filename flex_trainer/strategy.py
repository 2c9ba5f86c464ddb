"""The four things that can happen to an activation between forward and backward, and the places they are chosen for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Strategy(Enum):
    """What an operator does with the activations it produced. Every value but KEEP is a mitigation."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    QUANTIZE = "quantize"


LEAST_MOVED_BYTES = 16 * 1024
"""Smaller storages are neither offloaded nor quantized: that costs more than it frees."""

WORTHWHILE = 0.75
"""Codes and scales that take more than this share of the original are not worth their error."""

EP_BLOCK, EP_DISPATCH, EP_COMBINE = "ep_block", "ep_dispatch", "ep_combine"
"""Kinds of the operators that only experts on several ranks have."""

_NEVER_QUANTIZED = frozenset({"router", "lm_head", "loss"})


@dataclass(frozen=True)
class Site:
    """One operator, or one block of operators, of a model: the unit of decision.

    A *block* (attention, experts, an MLP, a decoder layer) encloses operators and owns what is computed between them.
    Giving a block the strategy RECOMPUTE recomputes it as a whole and overrides the operators inside.
    """

    name: str
    """Dotted name, unique in the model, such as "model.layers.3.mlp.experts.activation"."""
    kind: str
    """The operator's role: norm, linear, attention, attention_core, router, experts, expert_up, ..."""
    layer: int
    """Index of the decoder layer; -1 for what lies outside the layers."""
    is_block: bool = False
    is_recomputable: bool = True
    """False for routers (a routing decision is never made twice), for collectives and for what would run one in a
    recomputation."""

    @property
    def is_router(self) -> bool:
        """Whether what it makes is kept also where a block around it is recomputed."""
        return self.kind == "router"

    @property
    def keeps_outputs(self) -> bool:
        """Whether its outputs are held where others save them, although it is recomputed: a layer is run again for what
        is inside of it only."""
        return self.kind == "layer"

    def allows(self, strategy: Strategy) -> bool:
        """Whether this site may have a strategy: routing is never made again, and logits never lose precision."""
        if strategy is Strategy.RECOMPUTE:
            return self.is_recomputable
        return strategy is not Strategy.QUANTIZE or self.kind not in _NEVER_QUANTIZED
