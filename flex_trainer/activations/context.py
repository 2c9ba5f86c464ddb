"""Which micro-batch is in forward on this thread, and the execution state that a replay has to restore."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.backends import cuda as kernels

if TYPE_CHECKING:
    from flex_trainer.activations.scope import Scope

# Two micro-batches may run forward in two threads (fused execution), so the current scope is a property of the thread.
_thread = threading.local()


def current_scope() -> Scope | None:
    """The scope of the micro-batch that is in forward on this thread, or None."""
    return getattr(_thread, "scope", None)


def managing_scope() -> Scope | None:
    """The current scope, unless somebody else's hooks for saved tensors are above its own: None then too."""
    scope = current_scope()
    return scope if scope is None or scope.is_on_top() else None


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
    """Random number generators, autocast and the kernels allowed for attention, when an operator first ran."""

    device: torch.device
    cpu_rng: torch.Tensor
    device_rng: torch.Tensor | None
    host_rng: HostRandom
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    attention_kernels: tuple[bool, ...]

    @classmethod
    def capture(cls, device: torch.device) -> ExecutionState:
        on_cuda = device.type == "cuda"
        types = ("cpu", "cuda") if on_cuda else ("cpu",)
        return cls(
            device=device,
            cpu_rng=torch.get_rng_state(),
            device_rng=torch.cuda.get_rng_state(device) if on_cuda else None,
            host_rng=HostRandom.capture(),
            autocast=tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types),
            autocast_cache=torch.is_autocast_cache_enabled(),
            attention_kernels=_attention_kernels(),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under this state; the global random streams go on afterwards as if nothing had happened."""
        cuda_devices = [self.device] if self.device_rng is not None else []
        host_rng, attention_kernels = HostRandom.capture(), _attention_kernels()
        with torch.random.fork_rng(devices=cuda_devices):
            torch.set_rng_state(self.cpu_rng)
            if self.device_rng is not None:
                torch.cuda.set_rng_state(self.device_rng, self.device)
            try:
                self.host_rng.put_back()
                _allow_attention_kernels(self.attention_kernels)
                with _Autocasts(self.autocast, self.autocast_cache):
                    yield
            finally:
                host_rng.put_back()
                _allow_attention_kernels(attention_kernels)


@dataclass(frozen=True)
class HostRandom:
    """The global random streams of Python and numpy, which models may draw from as well."""

    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> HostRandom:
        """The streams as they are. One state serves all operators between two draws: it takes tens of kilobytes."""
        python, numpy = random.getstate(), np.random.get_state()
        last = getattr(_thread, "host_random", None)
        if last is None or last.python != python or last._position != _position(numpy):
            last = _thread.host_random = cls(python, numpy)
        return last

    def put_back(self) -> None:
        """Have the streams go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    @property
    def _position(self) -> tuple[Any, ...]:
        return _position(self.numpy)


def _position(numpy: Any) -> tuple[Any, ...]:
    """A numpy state in a form that compares."""
    return numpy[0], numpy[1].tobytes(), *numpy[2:]


def _attention_kernels() -> tuple[bool, ...]:
    return (
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.cudnn_sdp_enabled(),
        kernels.math_sdp_enabled(),
    )


def _allow_attention_kernels(allowed: tuple[bool, ...]) -> None:
    if allowed != _attention_kernels():
        flash, mem_efficient, cudnn, math = allowed
        kernels.enable_flash_sdp(flash)
        kernels.enable_mem_efficient_sdp(mem_efficient)
        kernels.enable_cudnn_sdp(cudnn)
        kernels.enable_math_sdp(math)


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
