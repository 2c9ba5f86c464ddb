"""Which micro-batch is in forward on this thread, and the execution state that a replay has to restore."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flex_trainer.activations.scope import Scope

# Two micro-batches may run forward in two threads (fused execution), so the current scope is a property of the thread.
_thread = threading.local()


def current_scope() -> Scope | None:
    """The scope of the micro-batch that is in forward on this thread, or None."""
    return getattr(_thread, "scope", None)


@contextmanager
def scope_is(scope: Scope | None) -> Iterator[None]:
    """Make `scope` the current one on this thread, whatever happens inside."""
    outer = current_scope()
    _thread.scope = scope
    try:
        yield
    finally:
        _thread.scope = outer


def no_scope():
    """Operators run plainly inside: used by replays."""
    return scope_is(None)


@dataclass(frozen=True)
class ExecutionState:
    """Random number generators and autocast, as they were when an operator first ran."""

    device: torch.device
    cpu_rng: torch.Tensor
    device_rng: torch.Tensor | None
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool

    @classmethod
    def capture(cls, device: torch.device) -> ExecutionState:
        on_cuda = device.type == "cuda"
        types = ("cpu", "cuda") if on_cuda else ("cpu",)
        return cls(
            device=device,
            cpu_rng=torch.get_rng_state(),
            device_rng=torch.cuda.get_rng_state(device) if on_cuda else None,
            autocast=tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types),
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under this state; the global random streams go on afterwards as if nothing had happened."""
        cuda_devices = [self.device] if self.device_rng is not None else []
        with torch.random.fork_rng(devices=cuda_devices):
            torch.set_rng_state(self.cpu_rng)
            if self.device_rng is not None:
                torch.cuda.set_rng_state(self.device_rng, self.device)
            with _Autocasts(self.autocast, self.autocast_cache):
                yield


class _Autocasts:
    """Enters one autocast context for each device type."""

    def __init__(self, states: tuple[tuple[str, bool, torch.dtype], ...], cache: bool) -> None:
        self._contexts = [
            torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache)
            for device_type, enabled, dtype in states
        ]

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *exception: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*exception)
