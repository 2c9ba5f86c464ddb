"""What is known of a layer once its router has spoken, and who wants to hear of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flex_trainer.cost.load import Load
from flex_trainer.experts.layout import Layout, RecomputeVote
from flex_trainer.strategy import Site


@dataclass(frozen=True)
class Routing:
    """What the experts of one layer get on this rank."""

    num_pairs: int
    """Pairs of a token and an expert."""
    count: Callable[[], torch.Tensor | None]
    """Tokens of each expert on this rank, (E,); None where the number of experts is not known."""
    mean_tokens: float | None = None
    """Of an expert, over all ranks; None: the mean of `count`."""
    load: Load | None = None
    """Relative to an even spread over ranks, where experts are on several."""
    tokens_ratio: float = 1.0
    """Tokens of the mean rank over those of this one."""
    is_recompute_agreed: bool = False
    is_recompute_acceptable: bool = False

    @classmethod
    def local(cls, top_k_index: torch.Tensor, num_experts: int) -> Routing:
        """All experts are on this rank, or the others' are masked.

        Args:
            top_k_index: (N, K); ids of experts on other ranks are `num_experts`.
            num_experts: on this rank; 0: not known.
        """

        def count() -> torch.Tensor | None:
            if num_experts == 0:
                return None
            # Not bincount: its result's size depends on the data, so on CUDA the host would wait for the router. Ids
            # above those of this rank's experts fall outside of the bins.
            ids = top_k_index.detach()
            ids = ids.float() if ids.device.type == "cpu" else ids.int()
            return torch.histc(ids, bins=num_experts, min=0, max=num_experts - 1)

        return cls(top_k_index.numel(), count)

    @classmethod
    def exchanged(cls, layout: Layout) -> Routing:
        """Tokens have come from other ranks, or will."""
        num_ranks = len(layout.received_sizes)
        own_pairs = max(layout.num_tokens * layout.num_top_k, 1)
        most_rows = max(layout.num_tokens * min(num_ranks, layout.num_top_k), 1)
        return cls(
            layout.num_pairs,
            lambda: layout.expert_counts,
            mean_tokens=layout.num_all_pairs / (layout.num_local_experts * num_ranks),
            tokens_ratio=layout.num_all_pairs / num_ranks / own_pairs,
            load=Load(layout.num_pairs / own_pairs, layout.num_received / most_rows),
            is_recompute_agreed=layout.is_recompute_agreed,
            is_recompute_acceptable=layout.is_recompute_acceptable,
        )


def top_k_index_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The routing decision among the arguments of an experts module: the integer (N, K) tensor."""
    candidates = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return next((t for t in candidates if t.dim() == 2 and not t.is_floating_point() and t.dtype != torch.bool), None)


class RoutingListener(Protocol):
    """Hears of every layer's routing before its experts run."""

    def recompute_vote(self, block: Site, experts: Site) -> RecomputeVote:
        """What to tell the other ranks of this layer.

        Args:
            block: dispatch and experts.
            experts: the experts alone.
        """
        ...

    def on_routed(self, experts: Site, routing: Routing) -> None: ...


class NoListener:
    """Ignores all events."""

    def recompute_vote(self, block: Site, experts: Site) -> RecomputeVote:
        return RecomputeVote()

    def on_routed(self, experts: Site, routing: Routing) -> None:
        pass
