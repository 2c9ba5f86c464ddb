"""Counts the bytes of tensors that are really alive: what a device's allocator would say, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.fake_meter import FakeMeter


class LiveBytes(TorchDispatchMode):
    """Sees every storage that operators make inside the context, and forgets those that died.

    Args:
        has_peak: also note the highest count, which costs a look at every storage after each operator.
    """

    def __init__(self, has_peak: bool = False) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._has_peak = has_peak
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, (torch.Tensor, tuple, list)):
            before = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and _has_memory(leaf) and _key(leaf) not in before:
                    storage = leaf.untyped_storage()
                    if storage._cdata not in self._storages:
                        self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._has_peak:
            self.peak_bytes = max(self.peak_bytes, self.now())
        return result

    def now(self) -> int:
        """Bytes alive that were made inside the context."""
        for key in [key for key, (reference, _) in self._storages.items() if reference.expired()]:
            del self._storages[key]
        return sum(num_bytes for _, num_bytes in self._storages.values())


class LiveMeter(FakeMeter):
    """Counts what is alive of all that operators made: the engine's bytes and everything else."""

    live: LiveBytes

    def in_use_bytes(self) -> int:
        return self._base_bytes + self.live.now()

    def start_window(self) -> None:
        self.live.peak_bytes = self.live.now()

    def peak_bytes(self) -> int:
        return self._base_bytes + max(self.live.peak_bytes, self.live.now())


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether there are bytes behind it that can be told: not those of a trace on shapes alone."""
    return tensor.layout == torch.strided and not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


@contextmanager
def live_bytes(has_peak: bool = False) -> Iterator[LiveBytes]:
    mode = LiveBytes(has_peak)
    with mode:
        yield mode
