"""The scope of one micro-batch: runs its operators under their strategies, and packs what autograd saves (packing.py).

A scope is open during one forward. It keeps nothing alive afterwards: what backward needs hangs on the autograd graph.

Looking at every saved tensor costs the host as much as a plain forward of small kernels. Where everything is kept and
all sizes are known (known.py), it is not done: then operators are only listed. `watch` ends that, for a plan that
begins to mitigate in mid-forward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from flex_trainer.activations.choices import Choices
from flex_trainer.activations.clock import Clock, HostClock
from flex_trainer.activations.collector import collector_paused
from flex_trainer.activations.context import current_scope, scope_is, warn_of_other_hooks
from flex_trainer.activations.entry import keeps_nothing
from flex_trainer.activations.known import KnownForward, UnwatchedForward
from flex_trainer.activations.leaves import tensors_of
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.mitigation import Mitigation
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.packing import Packing
from flex_trainer.activations.place import Whereabouts
from flex_trainer.activations.quantize import NonFinite
from flex_trainer.activations.region import Region
from flex_trainer.activations.residency import Residency
from flex_trainer.activations.trace import CallTrace, Trace
from flex_trainer.activations.values import Packed, PackedKept, alive, detached
from flex_trainer.compat import current_backward, top_pack_hook
from flex_trainer.strategy import EP_BLOCK, LEAST_MOVED_BYTES, Site, Strategy


class Scope(Packing):
    """One micro-batch's forward under a plan."""

    def __init__(
        self,
        choices: Choices,
        ledger: Ledger,
        *,
        parameters: Iterable[torch.Tensor],
        modules: Mapping[str, nn.Module] | None = None,
        store: Callable[[], OffloadStore] | None = None,
        quantize_dtype: torch.dtype = torch.int8,
        min_mitigated_bytes: int = LEAST_MOVED_BYTES,
        on_memory: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        whereabouts: Whereabouts | None = None,
        residency: Residency | None = None,
        on_backward: Callable[[int], None] = lambda number: None,
        known: KnownForward | None = None,
        non_finite: NonFinite | None = None,
    ) -> None:
        """`parameters`: parameters and buffers, only referred to; looked up when needed. `residency`: where there are
        others, that come and go (sharded weights). `modules`: by site name, for what a recomputation restores and
        checks. `on_memory` is called where memory is worth a sample: operator boundaries, values coming back.
        `whereabouts`: lets an error name the operator. `on_backward` gets the number of each backward
        (`compat.current_backward`) that asks for values."""
        self._clock: Clock = clock or HostClock()
        mitigation = Mitigation(
            ledger, self._clock, store, quantize_dtype, min_mitigated_bytes, non_finite or NonFinite()
        )
        super().__init__(ledger, mitigation, residency)
        self._marks: list[tuple[int, Any, Any]] = []  # (call, start, end): times not read yet
        self._on_backward = on_backward
        self._backward = -1  # the backward that asked for a value last
        self._unpacker: weakref.ref[Callable[[Packed], torch.Tensor]] | None = None
        self.was_used = False
        """Whether backward has asked for any value yet."""
        self._choices = choices
        self._modules = modules or {}
        self._on_memory = on_memory
        self._whereabouts = whereabouts or Whereabouts()
        self.known = known
        """What this forward holds, if all is kept; None: every saved tensor is looked at. Set before it is opened."""
        self._unwatched = UnwatchedForward()
        self._regions: dict[int, list[weakref.ref[Region]]] = {}  # by layer, in the order of their runs
        self._is_bare = False  # open without hooks outside of operators
        self._parameter_tensors = parameters
        self._has_warned = False

    @contextmanager
    def open(self, *, is_last: bool = True) -> Iterator[Scope]:
        """Make this the current scope of the thread and pack what is saved until the context ends.

        Args:
            is_last: if not, it will be opened again for the same forward, or closed.
        """
        if self.known is not None and top_pack_hook() is not None:
            self.watch()  # hooks from outside would get what is saved
        self._is_bare = self.known is not None
        # What is noted of saved tensors is alive until backward: looking through it for cycles would find none.
        with nullcontext() if self._is_bare else collector_paused(), self._opened(is_last):
            yield self

    @contextmanager
    def _opened(self, is_last: bool) -> Iterator[None]:
        self._whereabouts.follow(self._running if self.known is None else self._unwatched.sites)
        if self.known is not None:
            self._unwatched.begin(self.known, self.ledger)
        elif not self._referred.is_known:
            self._referred.find(self._parameter_tensors)
        unpack = alive(self._unpacker)
        if unpack is None:
            unpack = functools.partial(self._unpack)
            self._unpacker = weakref.ref(unpack)
        try:
            with scope_is(self), nullcontext() if self._is_bare else saved_tensors_hooks(self._pack, unpack):
                yield
            self._unwatched.end(reached_its_end=self.known is not None)
        finally:
            self._unwatched.end(reached_its_end=False)
            self.sweep()
            self._whereabouts.at = self._whereabouts.at  # a copy: what runs is forgotten now
            self._running.clear()
            if is_last:
                self.close()

    def close(self) -> None:
        """Forward has ended."""
        self.sweep()
        self._table.clear()
        self._stack.clear()
        self._between.clear()

    @property
    def clock(self) -> Clock:
        """Times its operators."""
        return self._clock

    @property
    def holds_values(self) -> bool:
        """Whether autograd holds anything that was saved here: each saved tensor that is looked at holds the hook that
        unpacks it."""
        return alive(self._unpacker) is not None

    @property
    def is_watching(self) -> bool:
        """Whether saved tensors are looked at from here on."""
        return self.known is None

    def watch(self) -> None:
        """From here on, look at every saved tensor: strategies are not all "keep" any more, say. What was saved before
        stays as it is."""
        if self.known is None:
            return
        self.known = None
        if not self._unwatched.is_open:
            return
        self._referred.find(self._parameter_tensors)
        self._whereabouts.follow(self._running)
        self._unwatched.end_layer()

    @property
    def trace(self) -> Trace:
        """What forward did, as far as it was watched. On CUDA, reading waits for operators whose times are not read."""
        for index, start, end in self._marks:
            self._trace.calls[index].seconds = self._clock.seconds(start, end)
        self._marks.clear()
        self.mitigation.read_flags(self._trace.values)
        return self._trace

    @property
    def is_traced(self) -> bool:
        """Whether all of the forward was watched, so that `trace` tells all."""
        return self.known is None and not self._unwatched.sites

    @property
    def num_traced(self) -> tuple[int, int, int]:
        """`Trace.counts` so far: nothing is waited for."""
        return self._trace.counts

    @property
    def calls(self) -> list[CallTrace]:
        """The calls so far that were watched, without their times: nothing is waited for."""
        return self._trace.calls

    @property
    def sites(self) -> list[Site]:
        """What has run so far, or begun to."""
        return [*self._unwatched.sites, *(call.site for call in self._trace.calls)]

    # Running operators

    def run(self, site: Site, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one operator or block under its strategy and return its result; plainly, where this is not the thread's
        current scope (in a recomputation, for one), or where other hooks pack what is saved."""
        if current_scope() is not self or not self.is_on_top() or self.begin_unwatched(site):
            return function(*args, **kwargs)
        depth = len(running := self._running)
        running.append(site)
        self._whereabouts.phase = "forward"
        if self.known is not None:
            self._unwatched.sites.append(site)
            with saved_tensors_hooks(self._pack_sentinel, self._unpack_hook()):
                result = function(*args, **kwargs)
        elif self._is_bare and self._region is None:  # watched since mid-forward
            with saved_tensors_hooks(self._pack, self._unpack_hook()):
                result = self._run_watched(site, function, args, kwargs)
        else:
            result = self._run_watched(site, function, args, kwargs)
        del running[depth:]  # not after an error: it has come from the innermost
        return result

    def begin_unwatched(self, site: Site) -> bool:
        """Whether nothing is looked at in this operator; it is then noted as run, and the caller runs it plainly. Never
        outside of the layers (final norm, head, loss): backward asks for their values first, which tells that it has
        come."""
        if self.known is None or not self._unwatched.has_sentinel or site.layer < 0:
            return False
        self._unwatched.sites.append(site)
        return True

    def _run_watched(
        self, site: Site, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._residency is not None:
            self._referred.add(self._residency.weights(site.name))
        call = CallTrace(site, self._stack[-1] if self._stack else -1)
        for tensor in tensors_of(args, kwargs):
            entry = self._entry(tensor)
            if entry is not None:
                call.inputs.append(entry.value)
        index = len(self._trace.calls)
        self._trace.calls.append(call)
        self._first_values.append(len(self._trace.values))
        chosen = self._choices.strategy(site)
        may_recompute = site.is_recomputable and self._region is None and torch.is_grad_enabled()
        is_recomputed = chosen is Strategy.RECOMPUTE and may_recompute
        outer_region = self._region, self._region_call
        self._stack.append(index)
        self._between.append(_moved(chosen))
        start = self._clock.mark()
        try:
            if is_recomputed:
                result, region = self._run_region(index, function, args, kwargs)
            else:
                result, region = function(*args, **kwargs), None
        finally:
            self._marks.append((index, start, self._clock.mark()))
            self._stack.pop()
            self._between.pop()
            self._region, self._region_call = outer_region
        self._note_outputs(index, chosen if is_recomputed else _moved(chosen), result, region)
        if site.is_router and self._region is not None:
            self._region.routed.note(site.name, result, self._pack_input)
        self._on_memory()
        return result

    def is_on_top(self) -> bool:
        """Whether this scope gets what is saved; not inside of others' hooks (torch's checkpoint). Says so once."""
        hook = top_pack_hook()
        if hook is None:
            return self._is_bare
        if getattr(hook, "__self__", None) is self:
            return True
        if not self._has_warned:
            self._has_warned = True
            warn_of_other_hooks(hook, self._name())
        return False

    def _run_region(self, index: int, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Region]:
        site = self._trace.calls[index].site
        name = site.name
        # Parts of a module that are no modules themselves (the attention core) have its name in front.
        # Not "or": the truth of a compiled module is that of its length, which it may not have.
        module = self._modules.get(name, self._modules.get(name.rpartition(".")[0]))
        has_exchange = site.kind == EP_BLOCK
        region = Region(name, function, args, kwargs, self._pack_input, self.ledger, module, has_exchange=has_exchange)
        self._regions.setdefault(site.layer, []).append(weakref.ref(region))
        self._region, self._region_call = region, index
        self._num_packs = 0
        with saved_tensors_hooks(self._pack_inner, self._unpack_hook()):
            return region.run(args, kwargs, lambda: self._num_packs), region

    def sweep(self) -> None:
        """Forget dead storages (called when a layer ends), and savers on branches of the graph that died in forward,
        such as a router's unused scores."""
        if self.known is not None:
            self._unwatched.end_layer()
            self._on_memory()
            return
        self._demand.sweep(self._trace.values)
        self._table.sweep(keeps_nothing)

    # Backward

    def _pack_sentinel(self, tensor: torch.Tensor) -> Packed:
        """Where nothing is looked at: keep the tensor, and with it the account of the whole forward."""
        self._unwatched.has_sentinel = True
        return PackedKept(detached(tensor), self._unwatched.holding, self._name())

    def _unpack_hook(self) -> Callable[[Packed], torch.Tensor]:
        """The hook that brings values back; alive while the scope is open, and then as long as autograd holds any."""
        unpack = alive(self._unpacker)
        assert unpack is not None, "while the scope is open"
        return unpack

    def recompute_ahead(self, layer: int, operator: str, room_bytes: int) -> bool:
        """Recompute one region before backward asks for its values. No other rank takes part, so each may do as it
        likes. To be called in the backward.

        Args:
            layer: whose backward comes next; its weights are there.
            operator: whose backward runs now, by site name.
            room_bytes: what the values that come back may take.

        Returns:
            False where there is none to recompute.
        """
        for reference in reversed(self._regions.get(layer, ())):
            region = alive(reference)
            if region is None or not region.is_awaited or region.dropped_bytes > room_bytes:
                continue
            is_whole = self._residency is None or self._residency.is_whole(region.name, operator)
            if is_whole and region.may_run_alone():
                with self.ledger.recomputing():
                    region.recompute()
                self._on_memory()
                return True
        return False

    def _unpack(self, packed: Packed) -> torch.Tensor:
        self.was_used = True
        number = current_backward()
        if number != self._backward:
            self._backward = number
            self._on_backward(number)
        whereabouts = self._whereabouts
        whereabouts.phase, whereabouts.operator = "recovery", packed.name
        tensor = packed.get()
        whereabouts.phase, whereabouts.operator = "backward", packed.name
        self._on_memory()
        return tensor


def _moved(chosen: Strategy) -> Strategy:
    """What becomes of values that no recomputation brings back."""
    return Strategy.KEEP if chosen is Strategy.RECOMPUTE else chosen
