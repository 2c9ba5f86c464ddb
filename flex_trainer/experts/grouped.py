"""The two grouped products of an experts module and the activation between them, on rows sorted by expert.

    up           (P, D) -> (P, 2 I), or (P, I) without a gate
    activation   act(gate) * up: (P, I)
    down         (P, I) -> (P, D)

The arithmetic is that of transformers' `grouped_mm` implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from flex_trainer.compat import grouped_linear


class GroupedProducts:
    """Reads the weights at every call and keeps none: by the time of a recomputation FSDP2 may have gathered them
    again.

    Args:
        experts: a module of a class that `use_experts_implementation` decorates.
    """

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def up(self, rows: torch.Tensor, offsets: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        return self._project("gate_up_proj" if self._experts.has_gate else "up_proj", rows, offsets, expert_ids)

    def activation(self, rows: torch.Tensor) -> torch.Tensor:
        experts = self._experts
        return experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)

    def down(self, rows: torch.Tensor, offsets: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.project_down(rows, offsets, expert_ids))

    def project_down(self, rows: torch.Tensor, offsets: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """`down` without the norm that some families have after it."""
        return self._project("down_proj", rows, offsets, expert_ids)

    def norm(self, rows: torch.Tensor) -> torch.Tensor:
        return self._experts.post_expert_norm(rows) if self._experts.has_post_expert_norm else rows

    def _project(self, name: str, rows: torch.Tensor, offsets: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        experts = self._experts
        bias = local(getattr(experts, f"{name}_bias"))[expert_ids] if experts.has_bias else None
        weight = local(getattr(experts, name))
        return grouped_linear(rows, weight, offsets, bias=bias, is_transposed=experts.is_transposed)


def local(weight: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight, with its gradient."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
