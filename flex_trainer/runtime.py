"""One micro-batch from budget to backward.

    begin      measure what is in use -> budget (Algorithm 1) -> plan, or take the plan from the cache
    forward    every operator under its strategy; after each router, look whether the rest of the plan still holds
    end        what is really held replaces what was predicted in the books
    backward   values come back; then the measured peak corrects the model, and a record is kept

`attach` puts the runtime between a model and its operators; `detach` takes it out; `backward` goes around every
backward. Where an allocation fails, transaction.py takes the step back and runs it again.
"""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from flex_trainer.activations.clock import Clock, HostClock, clocks_for
from flex_trainer.activations.context import current_scope
from flex_trainer.activations.place import OUTSIDE, Place, Whereabouts
from flex_trainer.activations.scope import Scope
from flex_trainer.config import FlexConfig
from flex_trainer.cost.shape import BatchShape
from flex_trainer.experts.layout import ReplayVote
from flex_trainer.memory.enforce import return_freed_memory
from flex_trainer.memory.meter import MemoryMeter, limit_bytes, meter_for
from flex_trainer.memory.offloading import OffloadService
from flex_trainer.models.checkpointing import is_checkpointing, stop_checkpointing
from flex_trainer.models.discovery import discover
from flex_trainer.models.inputs import shape_of
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.models.routing import Routing
from flex_trainer.models.sharding import Units, refuse_unmanaged, units_of, without_replayed_collectives
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.provision.provisioner import Provisioner
from flex_trainer.provision.stopwatch import Stopwatch
from flex_trainer.records import MicroBatchRecord, StepRetry
from flex_trainer.strategy import Site, Strategy
from flex_trainer.undo import replace_attribute
from flex_trainer.units import format_bytes

if TYPE_CHECKING:
    from flex_trainer.reports.ranks import RankSummary
    from flex_trainer.reports.summary import RunSummary


class Mark(NamedTuple):
    """How far a run has come."""

    step: int
    num_micro_batches: int
    num_records: int


class FlexRuntime:
    """Everything FlexTrainer does to one model during training.

    Args:
        config: the settings.
        device: where the activations live; taken from the model when None.
    """

    def __init__(self, config: FlexConfig | None = None, device: torch.device | None = None) -> None:
        self.config = config or FlexConfig()
        self.records: list[MicroBatchRecord] = []
        self.retries: list[StepRetry] = []
        """Steps that were taken back and run again."""
        self.step = 0
        """The optimizer step of the micro-batches to come; Trainer and plugin keep it up to date."""
        self.can_step_back = False
        """Whether a transaction is around what runs now."""
        self._device = device
        self._meter: MemoryMeter | None = None
        self._make_clock: Callable[[], Clock] = HostClock
        self._provisioner: Provisioner | None = None
        self._offloading: OffloadService | None = None
        self._resumed_profile: Path | None = None
        self._model: nn.Module | None = None
        self._undo: list[Callable[[], None]] = []
        self._model_name = ""
        self._modules: dict[str, nn.Module] = {}
        self._units: Units | None = None
        self._pending: list[MicroBatch] = []
        self._running: MicroBatch | None = None
        self._is_window_open = False
        self._whereabouts = Whereabouts()
        self._num_micro_batches = 0
        self._has_warned = False

    # What others read

    @property
    def is_attached(self) -> bool:
        return self._model is not None

    @property
    def limit_bytes(self) -> int:
        """The memory limit in bytes; 0 before the first `attach`."""
        return self._provisioner.limit_bytes if self._provisioner is not None else 0

    def memory_now(self) -> dict[str, int]:
        """Bytes in use now by name: process (CPU); allocated, reserved, device (CUDA)."""
        return self._meter.now() if self._meter is not None else {}

    def summary(self) -> RunSummary:
        """The run so far in a few figures."""
        from flex_trainer.reports import summarize

        return summarize(self.records, self.limit_bytes, self.retries)

    def report(self, path: str | Path, ranks: Sequence[RankSummary] = ()) -> Path:
        """Write the self-contained HTML report of all micro-batches so far and return its path.

        Args:
            ranks: with several processes, what `reports.ranks.gather_ranks` returns: the summary is then of all ranks.

        Raises:
            ValueError: the path cannot be written.
        """
        from flex_trainer.reports import write_report

        info = {
            "Model": type(self._model).__name__ if self._model is not None else self._model_name,
            "Device": str(self._device),
            "Strategies": ", ".join(self.config.strategies) or "none",
            "Memory limit": format_bytes(self.limit_bytes),
        }
        write_report(Path(path), self.records, self.limit_bytes, info, self.retries, ranks)
        return Path(path)

    # Checkpoints

    def save_planner(self, path: Path) -> None:
        """Write what was learnt so far, in the form of a seed profile; nothing before the first `attach`.

        Raises:
            ValueError: the file cannot be written.
        """
        if self._provisioner is not None:
            self._provisioner.write_profile(path)

    def resume_planner(self, path: Path) -> None:
        """Have the first `attach` begin with what `save_planner` has written, instead of the seed profile."""
        self._resumed_profile = path

    # Attaching

    def attach(self, model: nn.Module) -> None:
        """Manage the activations of `model` from its next forward on.

        Nothing is changed when it raises.

        Raises:
            ValueError: no decoder layers, FSDP1 or tensor-parallel weights, a device that cannot be measured, a limit
                below what is in use already, an offload directory or a seed profile that cannot be used.
            RuntimeError: a model is attached already.
        """
        if self._model is not None:
            raise RuntimeError("this runtime manages a model already; call detach() first")
        # Step 1: everything that may be refused.
        refuse_unmanaged(model)
        model_map = without_replayed_collectives(discover(model))
        self._device = self._device or next(model.parameters()).device
        self._meter = self._meter or meter_for(self._device)
        self._make_clock = clocks_for(self._device)
        if self._device.type == "cpu":
            return_freed_memory()
        if self._offloading is None or self._provisioner is None:
            limit = limit_bytes(self.config, self._meter)
            self._offloading = OffloadService(self.config, self._device, limit)
        else:
            limit = self._provisioner.limit_bytes
        self._provisioner = Provisioner(
            self.config,
            limit,
            self._meter,
            self._offloading,
            model,
            model_map,
            earlier=self._provisioner,
            resumed_profile=self._resumed_profile,
        )
        # Step 2: the model.
        try:
            self._undo.append(self._stop_checkpointing(model))
            self._undo.append(Instrumentation(model, model_map, self).remove)
            self._undo.append(self._wrap_forward(model))
        except BaseException:
            self._give_back()
            raise
        self._model = model
        self._model_name = type(model).__name__
        self._modules = {operator.site.name: operator.module for operator in model_map.operators}
        self._units = Units(model, self._modules) if units_of(model) else None

    def detach(self) -> None:
        """Give the model back as it was. Records stay; then, on the main process, a seed profile is written.

        Raises:
            ValueError: the seed profile cannot be written; the model is given back all the same.
        """
        if self._model is None:
            return
        assert self._provisioner is not None
        try:
            self._finish()
        finally:
            self._give_back()
            self._forget(self._pending)
            self._end_window()
            self._model = None
        self._provisioner.save_profile()

    def _give_back(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _stop_checkpointing(self, model: nn.Module) -> Callable[[], None]:
        if is_checkpointing(model):
            warnings.warn(
                "gradient checkpointing is on; FlexTrainer decides per operator what to recompute and turns it off "
                "while it manages this model. Set gradient_checkpointing=False to silence this.",
                stacklevel=3,
            )
        return stop_checkpointing(model)

    def _wrap_forward(self, model: nn.Module) -> Callable[[], None]:
        original = model.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Evaluation, generation and scoring run without gradients; a nested call belongs to the outer one. And
            # after `detach` somebody who replaced this function may still call it.
            is_managed = self._model is model and torch.is_grad_enabled() and current_scope() is None
            if not is_managed or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            with self._micro_batch(args, kwargs):
                return original(*args, **kwargs)

        return replace_attribute(model, "forward", forward)

    # One micro-batch

    @contextmanager
    def _micro_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        assert self._provisioner is not None and self._meter is not None and self._offloading is not None
        self._finish()  # of a backward that was run outside of `backward()`
        self._forget([micro_batch for micro_batch in self._pending if micro_batch.is_abandoned])
        self._whereabouts.at = Place("planning", "the model")
        try:
            shape = shape_of(args, kwargs)
            # Before the window: what a trace needs is no part of the micro-batch's peak.
            traced_seconds = self._provisioner.prepare(shape, args, kwargs)
            self._provisioner.can_step_back = self.can_step_back
            if not self._pending or not self._is_window_open:
                self._meter.start_window()
                self._is_window_open = True
            if self._pending and self._units is not None:
                self._units.keep_whole(True)
            micro_batch = self._running = self._begin(shape)
            micro_batch.traced_seconds = traced_seconds
            self._whereabouts.at = Place("forward", OUTSIDE)
            assert micro_batch.scope is not None
            micro_batch.begin_forward()
            with micro_batch.scope.open():
                yield
        except BaseException:
            if self._running is not None:
                self._running.scope = None
            self._end_window()
            raise
        finally:
            self._running = None
            self._offloading.settle()
        micro_batch.end_forward()
        self._provisioner.commit(micro_batch)
        for earlier in self._pending:
            earlier.is_covered = True
        self._pending.append(micro_batch)

    def _begin(self, shape: BatchShape) -> MicroBatch:
        assert self._provisioner is not None and self._meter is not None and self._model is not None
        assert self._offloading is not None
        started = time.perf_counter()
        micro_batch = self._provisioner.begin(shape)
        micro_batch.number = self._num_micro_batches
        micro_batch.step = self.step
        micro_batch.started = started
        micro_batch.stopwatch = Stopwatch(self.device)
        self._num_micro_batches += 1
        micro_batch.scope = Scope(
            micro_batch,
            micro_batch.ledger,
            parameters=[*self._model.parameters(), *self._model.buffers()],
            modules=self._modules,
            store=self._offloading.store,
            quantize_dtype=getattr(torch, self.config.quantize_dtype),
            on_memory=self._meter.sample,
            clock=self._make_clock(),
            whereabouts=self._whereabouts,
            residency=self._units,
        )
        return micro_batch

    def replay_vote(self, block: Site, experts: Site) -> ReplayVote:
        """Before the counts of a layer are exchanged: whether to replay its dispatch in backward."""
        running = self._running_here()
        if running is None:
            return ReplayVote()
        is_planned = running.choices.strategy(block) is Strategy.RECOMPUTE
        # The received rows are worth fetching again only where the experts' values are given up too.
        return ReplayVote(is_planned, is_planned or running.choices.strategy(experts) is Strategy.RECOMPUTE)

    def on_routed(self, experts: Site, routing: Routing) -> None:
        """After a router: the exact counts of this layer are known."""
        assert self._provisioner is not None
        running = self._running_here()
        if running is not None:
            running.note_routing(experts, routing)
            self._provisioner.revise(running, experts, routing)

    def _running_here(self) -> MicroBatch | None:
        """The micro-batch in forward; None while this model runs inside the forward of another managed one, whose
        micro-batch it is."""
        running = self._running
        return running if running is not None and running.scope is current_scope() else None

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run the backward of all micro-batches in flight inside. Nothing is learnt from one that fails."""
        for micro_batch in self._pending:
            micro_batch.stopwatch.start()
        try:
            yield
        except BaseException:
            self._forget([micro_batch for micro_batch in self._pending if micro_batch.is_backward_done])
            self._end_window()
            raise
        self._whereabouts.at = None
        self._finish()

    def _finish(self) -> None:
        done = [micro_batch for micro_batch in self._pending if micro_batch.is_backward_done]
        if not done:
            return
        for micro_batch in done:
            micro_batch.stopwatch.stop()
        assert self._meter is not None and self._provisioner is not None
        peak_bytes, is_exact = self._meter.peak_bytes(), self._meter.is_peak_exact()
        ended = time.perf_counter()
        self._pending = [micro_batch for micro_batch in self._pending if not micro_batch.is_backward_done]
        if not self._pending:
            self._end_window()
        self._let_units_go()
        for micro_batch in done:
            self._provisioner.learn(micro_batch, peak_bytes, is_exact)
            self.records.append(micro_batch.record(self.limit_bytes, peak_bytes, ended))
            self._warn_of_no_effect(micro_batch)
            micro_batch.scope = None  # they refer to each other: only so both die at once

    def _warn_of_no_effect(self, micro_batch: MicroBatch) -> None:
        """Say once when a plan mitigates and frees nothing: the activations are where the engine cannot see them."""
        plan = micro_batch.plan
        if self._has_warned or plan is None or not plan.strategies or any(micro_batch.ledger.freed_bytes.values()):
            return
        self._has_warned = True
        warnings.warn(
            f"FlexTrainer mitigates {len(plan.strategies)} operators of micro-batch {micro_batch.number}, which frees "
            f"nothing ({micro_batch.ledger.num_unmanaged} saved tensors are of kinds it leaves alone). Compiled "
            "regions and custom autograd functions keep their tensors out of its reach.",
            stacklevel=2,
        )

    def _forget(self, micro_batches: list[MicroBatch]) -> None:
        """Drop micro-batches whose backward failed or will never come: nothing is learnt from them."""
        assert self._provisioner is not None
        numbers = {micro_batch.number for micro_batch in micro_batches}
        for micro_batch in micro_batches:
            self._provisioner.release(micro_batch)
            micro_batch.scope = None
        self._pending = [micro_batch for micro_batch in self._pending if micro_batch.number not in numbers]
        self._let_units_go()

    def _let_units_go(self) -> None:
        """With nothing in flight, no weights have to stay whole; left so, an optimizer step would pass them by."""
        if not self._pending and self._units is not None:
            self._units.keep_whole(False)

    # Taking a step back (transaction.py)

    @property
    def model(self) -> nn.Module:
        """The model that is managed."""
        assert self._model is not None, "after attach"
        return self._model

    @property
    def device(self) -> torch.device:
        """Where the activations live."""
        assert self._device is not None, "after attach"
        return self._device

    @property
    def place(self) -> Place | None:
        """What ran last; when something has failed, what failed."""
        return self._whereabouts.at

    @property
    def margin_bytes(self) -> int:
        """Bytes kept free since an allocation failed."""
        return self._provisioner.margin_bytes if self._provisioner is not None else 0

    def shortage(self, requested_bytes: int) -> str:
        """What the device's allocator says of a request that has just failed; "" where it says nothing."""
        return self._meter.shortage(requested_bytes) if self._meter is not None else ""

    def mark(self) -> Mark:
        """How far the run has come: for `take_back`."""
        return Mark(self.step, self._num_micro_batches, len(self.records))

    def take_back(self, mark: Mark) -> None:
        """Forget every micro-batch since `mark`, and give the memory of what has failed back."""
        self._forget(self._pending)
        self._end_window()
        self.step, self._num_micro_batches = mark.step, mark.num_micro_batches
        del self.records[mark.num_records :]
        gc.collect()  # people's own code may have made cycles that hold tensors
        if self._offloading is not None:
            self._offloading.settle()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()

    def tighten(self, attempt: int, requested_bytes: int) -> None:
        """Plan with less memory; see `Provisioner.tighten`."""
        assert self._provisioner is not None
        self._provisioner.tighten(attempt, requested_bytes)

    def loosen(self) -> None:
        """The step has been run, or given up."""
        if self._provisioner is not None:
            self._provisioner.loosen()

    def _end_window(self) -> None:
        if self._is_window_open and self._meter is not None:
            self._meter.end_window()
        self._is_window_open = False
