"""Fused accumulation: the backward of a micro-batch runs beside the forward of the next one.

    micro-batch 1    forward                        its backward is put off
    micro-batch 2    forward 2 beside backward 1    the exchanges between ranks of each hide behind the other
    ...
    micro-batch n    forward n beside backward n-1, then backward n by itself: gradients are reduced in it

The caller's loop sees nothing of it: `accelerator.backward` returns at once where gradients are not synchronized yet,
and every micro-batch has its own loss. Gradients are added up in the same order as without, so all is bit for bit the
same. BaGuaLu-2 fuses the forward and backward of a pipeline's steady state (section V-B); here they come from gradient
accumulation, so it needs no pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flex_trainer.compat import FsdpPassState, fsdp_pass_state
from flex_trainer.experts.dispatch import FlexEP, dispatcher_of
from flex_trainer.experts.handover import Exchange, Work
from flex_trainer.models.sharding import units_of
from flex_trainer.provision.device_books import MemoryLimitError
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.runtime import FlexRuntime
from flex_trainer.steps.agreement import agree
from flex_trainer.steps.pair import Pair
from flex_trainer.steps.turns import Side, Worker
from flex_trainer.undo import replace_attribute


@dataclass
class _Pending:
    """A backward that was put off."""

    micro_batch: MicroBatch
    run: Callable[[], None]
    gradient_flags: list[tuple[bool, bool]]


class FusedSteps:
    """Puts backwards off and runs them beside forwards.

    Args:
        runtime: manages the model by now.
        model: its experts are spread over ranks by FlexTrainer's dispatch.
    """

    def __init__(self, runtime: FlexRuntime, model: nn.Module) -> None:
        self._runtime = runtime
        self._passes: FsdpPassState | None = fsdp_pass_state(model) if units_of(model) else None
        self._worker = Worker()
        self._pending: _Pending | None = None
        self.next_order: Callable[[], Iterable[Side]] = tuple
        """The order of the next pair (see Turns), the same on all ranks."""
        self.num_pairs = 0
        """Forwards that a backward ran beside."""
        self._pair: Pair | None = None
        self._undo: list[Callable[[], None]] = []
        for dispatcher in _dispatchers(model):
            self._undo.append(replace_attribute(dispatcher.transport, "waiting", self))
        self._undo.append(replace_attribute(runtime, "neighbour", self))
        runtime.follow_schedule(2)

    def stop(self, *, has_failed: bool = False) -> None:
        """Give everything back; a backward that was put off is run first.

        Args:
            has_failed: training has ended in an error, so it is dropped.
        """
        try:
            if not has_failed:
                self.settle()
        finally:
            self._pending = None
            while self._undo:
                self._undo.pop()()
            self._worker.stop()
            self._runtime.follow_schedule(None)

    # The caller's backward

    def put_off(self, loss: torch.Tensor, backward: Callable[[], None]) -> bool:
        """Whether the backward of `loss` is put off until the next forward; if not, the caller runs it now.

        Args:
            backward: runs it.
        """
        waiting = self._runtime.in_flight
        may_wait = (
            len(waiting) == 1
            and waiting[0].is_forward_done
            and not waiting[0].has_backward_begun
            and waiting[0].entered is None
            and loss.requires_grad
        )
        if not may_wait:
            return False
        flags = [] if self._passes is None else self._passes.gradient_flags()
        self._pending = _Pending(waiting[0], _in_state_of_this_thread(loss.device, backward), flags)
        return True

    def settle(self) -> None:
        """Run the backward that was put off by itself, if there is one."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        now = [] if self._passes is None else self._passes.gradient_flags()
        if self._passes is not None:
            self._passes.set_gradient_flags(pending.gradient_flags)
        try:
            pending.run()
        finally:
            if self._passes is not None:
                self._passes.set_gradient_flags(now)

    # The next forward

    @contextmanager
    def beside(self, start: Callable[[], MicroBatch]) -> Iterator[MicroBatch]:
        """See `Neighbour.beside`."""
        pending = self._pending
        micro_batch = None if pending is None else self._start_beside(pending, start)
        if pending is None or micro_batch is None:
            yield start()
            return
        self._pending = None
        self._pair = pair = Pair(
            micro_batch,
            pending.micro_batch,
            self.next_order(),
            self._passes,
            pending.gradient_flags,
            self._runtime.now_runs,
        )
        error: BaseException | None = None
        try:
            pair.start(self._worker, pending.run)
            yield micro_batch
        except BaseException as raised:
            error = raised
        try:
            pair.finish(error)
        finally:
            self._pair = None
        self.num_pairs += 1
        if error is not None:
            raise error

    def _start_beside(self, pending: _Pending, start: Callable[[], MicroBatch]) -> MicroBatch | None:
        """The next micro-batch, where it can run while the other one is in backward, on all ranks; if not, the backward
        has run by itself when this returns None."""
        micro_batch: MicroBatch | None = None
        try:
            micro_batch = start()
        except MemoryLimitError:
            pass  # with the memory of the other one, it may fit
        is_possible = micro_batch is not None and micro_batch.is_bounded and pending.micro_batch.is_bounded
        if all(row[0] for row in agree([int(is_possible)], self._runtime.device)):
            return micro_batch
        if micro_batch is not None:
            self._runtime.forget(micro_batch)
        self.settle()
        return None

    # The exchanges

    def wait(self, works: Sequence[Work], exchange: Exchange) -> None:
        """See `Waiting.wait`."""
        if self._pair is not None:
            self._pair.wait(works, exchange)
            return
        for work in works:
            work.wait()

    def sequence(self) -> int:
        """See `Waiting.sequence`."""
        return 0 if self._pair is None else self._pair.sequence()


def may_fuse(model: nn.Module) -> bool:
    """Whether anything can hide: experts are spread over ranks by FlexTrainer's dispatch."""
    return any(one.num_ranks > 1 for one in _dispatchers(model))


def _dispatchers(model: nn.Module) -> list[FlexEP]:
    found = (dispatcher_of(module) for module in model.modules())
    return [one for one in found if isinstance(one, FlexEP)]


def _in_state_of_this_thread(device: torch.device, function: Callable[[], None]) -> Callable[[], None]:
    """`function` under what torch keeps for each thread, as it is on this one now: autocast, device and stream."""
    kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.is_autocast_enabled(kind)]
    states: list[Callable[[], AbstractContextManager[Any]]] = [_autocast(kind) for kind in kinds]
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        states += [lambda: torch.cuda.device(device), lambda: torch.cuda.stream(stream)]

    def run() -> None:
        with ExitStack() as stack:
            for state in states:
                stack.enter_context(state())
            function()

    return run


def _autocast(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype)
