"""Which micro-batch is in forward on this thread, and the execution state that a recomputation has to restore."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.backends import cuda as kernels

from flex_trainer.activations.aside import changing
from flex_trainer.activations.host_random import HostRandom

if TYPE_CHECKING:
    from flex_trainer.activations.scope import Scope

_AutocastState = tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]

# Two micro-batches may run forward in two threads (fused execution), so the current scope is a property of the thread.
_thread = threading.local()


def current_scope() -> Scope | None:
    """The scope of the micro-batch that is in forward on this thread, or None."""
    return getattr(_thread, "scope", None)


def managing_scope() -> Scope | None:
    """The current scope, unless other hooks for saved tensors are above its own: None then too."""
    scope = current_scope()
    return scope if scope is None or scope.is_on_top() else None


def warn_of_other_hooks(hook: Callable[..., object], operator: str) -> None:
    """Say that `hook` gets what is saved inside an operator."""
    warnings.warn(
        f"Inside {operator}, saved tensors go to hooks that are not FlexTrainer's "
        f"({getattr(hook, '__module__', type(hook).__module__)}: torch.utils.checkpoint in a forward, save_on_cpu, "
        "another activation offloading). Operators there run as they are, and what they hold is not in the plan. Leave "
        "that out to have them managed.",
        stacklevel=3,
    )


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
    """Operators run plainly inside: used by recomputes."""
    return scope_is(None)


class ExecutionState:
    """Random number generators, autocast and the kernels allowed for attention, when an operator first ran.

    Most are as they were when the operator runs again; what is, is left alone.
    """

    __slots__ = ("_attention_kernels", "_autocast", "_device", "_device_rng", "_host_rng", "_rng")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rng = _cpu_rng()
        self._device_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._host_rng = HostRandom.capture()
        self._autocast = _autocast_state(device.type == "cuda")
        self._attention_kernels = _attention_kernels()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under this state; the global random streams go on afterwards as if nothing had happened."""
        change = _Restored(self, ExecutionState(self._device))
        with changing(change):
            try:
                change.begin()
                if change.found._autocast == self._autocast:
                    yield
                else:
                    with _Autocasts(self._autocast):
                        yield
            finally:
                change.end()

    def _put_back(self, now: ExecutionState | None = None) -> None:
        """Have the process go on from here, but for autocast, which belongs to the thread. `now`: its state, where that
        is known."""
        if now is None or now._host_rng is not self._host_rng:
            self._host_rng.put_back()
        if (_cpu_rng() if now is None else now._rng) is not self._rng:
            torch.set_rng_state(self._rng)
        if self._device_rng is not None:
            torch.cuda.set_rng_state(self._device_rng, self._device)
        _allow_attention_kernels(self._attention_kernels)


class _Restored:
    """The process under the state of a first run."""

    __slots__ = ("_wanted", "found")

    def __init__(self, wanted: ExecutionState, found: ExecutionState) -> None:
        self._wanted = wanted
        self.found = found
        """What the process gets back."""

    def begin(self) -> None:
        self._wanted._put_back(self.found)

    def end(self) -> None:
        self.found._put_back()

    def put_aside(self) -> None:
        self._wanted = ExecutionState(self.found._device)
        self.found._put_back(self._wanted)

    def take_up(self) -> None:
        self.found = ExecutionState(self.found._device)
        self._wanted._put_back(self.found)


def _cpu_rng() -> torch.Tensor:
    """The state of torch's stream on the CPU; the same tensor until the stream moves."""
    state = torch.get_rng_state()
    content = ctypes.string_at(state.data_ptr(), state.numel())  # torch.equal takes longer than to read the state
    last: tuple[torch.Tensor, bytes] | None = getattr(_thread, "cpu_rng", None)
    if last is None or last[1] != content:
        last = _thread.cpu_rng = state, content
    return last[0]


def _autocast_state(is_cuda: bool) -> _AutocastState:
    """Autocast by device type, and whether it keeps what it has cast."""
    types = ("cpu", "cuda") if is_cuda else ("cpu",)
    return (
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types),
        torch.is_autocast_cache_enabled(),
    )


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

    def __init__(self, state: _AutocastState) -> None:
        states, cache = state
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
