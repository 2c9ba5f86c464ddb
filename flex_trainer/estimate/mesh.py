"""How ranks are divided: the device mesh of transformers' `DistributedConfig`, checked before anything is built.

Dense weights see (pp, dp_replicate, fsdp), experts see (pp, dp_replicate, efsdp, ep) of the same ranks, so that
fsdp = efsdp x ep. Neighbouring ranks share an expert group: ep is the innermost axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from flex_trainer.errors import UserError
from flex_trainer.launch.distribute import check_expert_ranks


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes."""

    num_ranks: int = 1
    fsdp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def dp_replicate(self) -> int:
        """Replicas of the sharded model."""
        return self.num_ranks // (self.fsdp * self.pp)

    @property
    def efsdp(self) -> int:
        """Ranks that share the shards of one rank's experts."""
        return self.fsdp // self.ep

    @property
    def num_batches(self) -> int:
        """Ranks that see a batch of their own."""
        return self.fsdp * self.dp_replicate


def make_mesh(fsdp: int, ep: int, pp: int, num_ranks: int | None, num_experts: int, num_layers: int) -> Mesh:
    """The mesh of `parallel: {fsdp, ep, pp}` over `num_ranks` (default: fsdp x pp).

    Args:
        num_experts: routed experts of a layer, 0 for a dense model.
        num_layers: decoder layers.

    Raises:
        ValueError: sizes that do not divide each other, with what to change.
    """
    ranks = fsdp * pp if num_ranks is None else num_ranks
    if ranks < 1 or ranks % (fsdp * pp):
        raise UserError(
            f"parallel: fsdp={fsdp} x pp={pp} is {fsdp * pp} ranks, which does not divide the {ranks} there are; "
            "change them, or --ranks"
        )
    check_expert_ranks(fsdp, ep, num_experts)
    if pp > num_layers:
        raise UserError(f"parallel.pp={pp} is more than the model's {num_layers} layers; use at most {num_layers}")
    return Mesh(ranks, fsdp, ep, pp)


@dataclass(frozen=True)
class Stage:
    """The part of the model that one pipeline rank holds."""

    index: int
    layers: tuple[int, ...]
    """Decoder layers, as numbers in the whole model."""
    has_embedding: bool
    has_head: bool


def cut_into_stages(num_layers: int, pp: int) -> list[Stage]:
    """Layers cut evenly; where they do not divide, the first stages get one more."""
    share, more = divmod(num_layers, pp)
    stages, start = [], 0
    for index in range(pp):
        end = start + share + (index < more)
        stages.append(Stage(index, tuple(range(start, end)), index == 0, index == pp - 1))
        start = end
    return stages
