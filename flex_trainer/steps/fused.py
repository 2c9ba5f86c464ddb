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

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from flex_trainer.compat import FsdpPassState, fsdp_pass_state
from flex_trainer.experts.dispatch import FlexEP, dispatcher_of
from flex_trainer.experts.handover import Exchange, WaitHere, Work
from flex_trainer.models.sharding import units_of
from flex_trainer.planner.fusion import Side
from flex_trainer.provision.beside import Beside, share_of_both
from flex_trainer.provision.device_books import MemoryLimitError
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.runtime import FlexRuntime
from flex_trainer.steps.agreement import agree
from flex_trainer.steps.alone import Alone
from flex_trainer.steps.order_choice import OrderChoice
from flex_trainer.steps.pair import Pair
from flex_trainer.steps.stages import RanStage, StageLog, timeline
from flex_trainer.steps.thread_state import in_state_of_this_thread
from flex_trainer.steps.turns import Worker
from flex_trainer.steps.two_passes import TwoPasses
from flex_trainer.strategy import Site
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
        runtime: manages a model by now whose experts are spread over ranks by FlexTrainer's dispatch.
    """

    def __init__(self, runtime: FlexRuntime) -> None:
        self.choice = OrderChoice(runtime.config.fuse, runtime.device)
        """Whether to fuse, and in which order."""
        self.num_pairs = 0
        """Forwards that a backward ran beside."""
        self._runtime = runtime
        self._passes: FsdpPassState | None = fsdp_pass_state(runtime.model) if units_of(runtime.model) else None
        self._worker = Worker()
        self._pending: _Pending | None = None
        self._running: Pair | Alone | None = None
        self._has_failed = False
        self._has_put_off = False
        self._alone_log: StageLog | None = None  # of a forward whose backward has not come yet
        self._undo: list[Callable[[], None]] = []
        for site, dispatcher in _dispatchers(runtime):
            waiting = _LayerWaiting(self, site)
            self._undo.append(replace_attribute(dispatcher.transport, "waiting", waiting))
            dispatcher.transport.count_apart()
        self._undo.append(replace_attribute(runtime, "neighbour", self))

    @property
    def has_pending(self) -> bool:
        """Whether a backward was put off and has not run."""
        return self._pending is not None

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
            self._runtime.books.budgets.pair_share = None

    def _share_memory(self) -> None:
        """While pairs run, two micro-batches are in flight (W of Algorithm 1), of which one takes what the other one
        gives back."""
        runs_pairs = self.choice.is_on and self._has_put_off
        self._runtime.follow_schedule(2 if runs_pairs else None)
        num_layers = len(self._runtime.part().managed.map.layers)
        reached = self.choice.reached(num_layers)
        self._runtime.books.budgets.pair_share = share_of_both(reached) if runs_pairs else None

    # The caller's backward

    def backward(self, loss: torch.Tensor, run: Callable[[], None], *, may_wait: bool) -> None:
        """Run the backward of `loss` now, or put it off until the next forward.

        Args:
            run: runs it.
            may_wait: whether nobody looks at the gradients before that.
        """
        self._check()
        self.settle()
        if not may_wait:
            run()
            return
        micro_batch = self._deferrable() if loss.requires_grad else None
        if not self.choice.is_on:
            self._run_alone(micro_batch, run)
        elif all(row[0] for row in agree([int(micro_batch is not None)], self._runtime.device)):
            assert micro_batch is not None
            flags = [] if self._passes is None else self._passes.gradient_flags()
            self._pending = _Pending(micro_batch, in_state_of_this_thread(loss.device, run), flags)
            self._has_put_off = True
            self._share_memory()
        else:
            run()

    def settle(self) -> None:
        """Run the backward that was put off by itself, if there is one. A forward may have begun."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if self._passes is None:
            pending.run()
            return
        sharding = TwoPasses(
            self._passes, pending.gradient_flags, lambda works, exchange, _: WaitHere().wait(works, exchange)
        )
        sharding.begin()
        try:
            sharding.switch(Side.BACKWARD)
            pending.run()
        finally:
            sharding.end()

    def _deferrable(self) -> MicroBatch | None:
        """The one micro-batch in flight, if its backward is the next thing to come and can be run in another thread."""
        in_flight = self._runtime.in_flight
        if len(in_flight) != 1:
            return None
        one = in_flight[0]
        is_waiting = one.is_forward_done and not one.has_backward_begun
        return one if is_waiting and one.entered is None else None

    def _run_alone(self, micro_batch: MicroBatch | None, run: Callable[[], None]) -> None:
        """A backward that could have been put off: what it takes by itself is learnt. All ranks choose then, whatever
        each has seen."""
        log, self._alone_log = self._alone_log, None
        if log is None or micro_batch is None:
            run()
        else:
            with self._by_itself(Alone(micro_batch, Side.BACKWARD, log, self._note, self._passes)):
                run()
            self.choice.learn(log)
        self.choice.choose()
        self._share_memory()

    # The next forward

    @contextmanager
    def beside(self, start: Callable[[], MicroBatch]) -> Iterator[MicroBatch]:
        """See `Neighbour.beside`.

        Raises:
            RuntimeError: an earlier pair has failed, and nothing was attached anew since.
        """
        self._check()
        pending = self._pending
        micro_batch = None if pending is None else self._start_beside(pending, start)
        if pending is None or micro_batch is None:
            micro_batch = start()
            self._alone_log = log = self._new_log()
            with self._by_itself(Alone(micro_batch, Side.FORWARD, log, self._note, self._passes)):
                yield micro_batch
            return
        self._pending = self._alone_log = None
        self._running = pair = Pair(
            micro_batch,
            pending.micro_batch,
            self.choice.order,
            self._new_log(),
            self._passes,
            pending.gradient_flags,
            on_switch=self._runtime.now_runs,
            on_exchange=self._note,
            room_bytes=lambda: self._runtime.books.measure()[1],
        )
        micro_batch.is_paired = pending.micro_batch.is_paired = True
        started, error = time.perf_counter(), None
        try:
            pair.start(self._worker, pending.run)
            yield micro_batch
        except BaseException as raised:  # raised again below, unless the backward has failed first
            error = raised
        self._has_failed = True
        try:
            pair.finish(error)
            self._has_failed = error is not None
        finally:
            self._running = None
        if error is not None:
            raise error
        micro_batch.pair_seconds = time.perf_counter() - started
        micro_batch.predicted_pair_seconds = self.choice.pair_seconds
        self._ended(pair, micro_batch)

    def _ended(self, pair: Pair, micro_batch: MicroBatch) -> None:
        self.num_pairs += 1
        self.choice.learn(pair.log)
        if pair.log.listens:
            self._runtime.last_pair = timeline(pair.log, micro_batch.step, micro_batch.number)
        self.choice.choose()
        self._share_memory()

    def _start_beside(self, pending: _Pending, start: Callable[[], MicroBatch]) -> MicroBatch | None:
        """The next micro-batch, where it can run while the other one is in backward, on all ranks; if not, the backward
        has run by itself when this returns None."""
        micro_batch: MicroBatch | None = None
        budgets = self._runtime.books.budgets
        budgets.beside = self._beside(pending.micro_batch)
        try:
            with suppress(MemoryLimitError):  # with the memory of the other one, it may fit
                micro_batch = start()
        finally:
            budgets.beside = None
        is_possible = micro_batch is not None and micro_batch.is_bounded and pending.micro_batch.is_bounded
        if all(row[0] for row in agree([int(is_possible)], self._runtime.device)):
            return micro_batch
        if micro_batch is not None:
            self._runtime.forget(micro_batch)
        self.settle()
        return None

    def _beside(self, micro_batch: MicroBatch) -> Beside | None:
        """What a forward is planned beside; None where it is not known how that goes."""
        plan = micro_batch.plan
        if plan is None or not plan.held_by_layer:
            return None
        reached = self.choice.reached(len(plan.held_by_layer))
        # The bytes of a forward that was not watched leave the ledger all at once, when its backward has ended.
        is_counted = micro_batch.scope is not None and micro_batch.scope.is_traced
        held_now = (lambda: micro_batch.ledger.held_bytes) if is_counted else None
        return Beside.of(plan, micro_batch.actual_bytes, reached, held_now)

    def _check(self) -> None:
        if self._has_failed:
            raise RuntimeError(
                "an earlier micro-batch failed while its forward ran beside the backward of the one before it, so the "
                "gradients of this step are incomplete. Start again from the last checkpoint; or set fuse=false, where "
                "code around the model catches errors of single micro-batches and goes on."
            )

    def _new_log(self) -> StageLog:
        return StageLog(self._runtime.device, listens=self.choice.listens)

    @contextmanager
    def _by_itself(self, alone: Alone) -> Iterator[None]:
        self._running = alone
        try:
            with alone.run():
                yield
        finally:
            self._running = None

    # The exchanges

    def wait(self, works: Sequence[Work], exchange: Exchange, experts: Site) -> None:
        """See `Waiting.wait`. `experts`: whose rows are exchanged."""
        if self._running is not None:
            self._running.wait(works, exchange, experts)
        else:
            WaitHere().wait(works, exchange)

    def sequence(self) -> int:
        """See `Waiting.sequence`."""
        return self._running.sequence() if isinstance(self._running, Pair) else 0

    def _note(self, micro_batch: MicroBatch, stage: RanStage) -> None:
        """An exchange has ended. Times of a GPU are not read for this."""
        if self._runtime.device.type == "cuda":
            return
        seconds = stage.exchange_seconds
        if not stage.arrivals and stage.exposed_seconds <= 0.5 * seconds:  # nobody saw it end
            seconds = min(self.choice.exchange_seconds(stage.key) or seconds, seconds)
        micro_batch.exposed_seconds += stage.exposed_seconds
        micro_batch.exchange_seconds += max(seconds, stage.exposed_seconds)


class _LayerWaiting:
    """How the transport of one layer waits."""

    def __init__(self, fused: FusedSteps, experts: Site) -> None:
        self._fused = fused
        self._experts = experts

    def wait(self, works: Sequence[Work], exchange: Exchange) -> None:
        self._fused.wait(works, exchange, self._experts)

    def sequence(self) -> int:
        return self._fused.sequence()


def obstacle_to_fusing(runtime: FlexRuntime) -> str | None:
    """Why forward and backward of two micro-batches are not run together, whatever it would save; None: they may be."""
    if not any(one.num_ranks > 1 for _, one in _dispatchers(runtime)):
        return "no experts are spread over ranks by FlexTrainer's dispatch (parallel: {ep: 2, dispatch: flex})"
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in runtime.model.parameters()):
        return (
            "hooks run when gradients are accumulated: an optimizer that runs in backward, or an average over ranks of "
            "what was added to a sharded model (adapters), which goes by the micro-batch that the loop is at"
        )
    return None


def _dispatchers(runtime: FlexRuntime) -> list[tuple[Site, FlexEP]]:
    """With the sites of their experts."""
    found = ((one.site, dispatcher_of(one.module)) for one in runtime.part().managed.map.experts)
    return [(site, one) for site, one in found if isinstance(one, FlexEP)]
