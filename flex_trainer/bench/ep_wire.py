"""Counts what ranks send each other to dispatch and combine tokens, exactly, independent of the implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountExchanges(TorchDispatchMode):
    """Counts the bytes that this rank sends to others inside the context, forward and backward, by all-to-all or by
    sends to single ranks.

    It sees operators as torch dispatches them: the plain collective (`torch.distributed.all_to_all_single`) and the
    functional one alike. What a rank keeps for itself is not counted. The group must be that of all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.num_calls = 0
        self._rank, self._num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name == "c10d::alltoall_base_":  # output, input, group, output sizes, input sizes
            self._count(args[1], args[4])
        elif name == "_c10d_functional::all_to_all_single":  # input, output sizes, input sizes, group
            self._count(args[0], args[2])
        elif name == "c10d::send":  # tensors, group, rank, tag
            self.num_calls += 1
            self.num_bytes += sum(tensor.nbytes for tensor in args[0])
        elif "alltoall" in name or "all_to_all" in name:
            raise RuntimeError(f"an all-to-all that is not counted: {name}")
        return func(*args, **(kwargs or {}))

    def _count(self, tensor: torch.Tensor, sizes: Sequence[int]) -> None:
        rows = tensor.size(0)
        own = sizes[self._rank] if sizes else rows // self._num_ranks
        self.num_calls += 1
        self.num_bytes += (rows - own) * (tensor.numel() // max(rows, 1)) * tensor.element_size()
