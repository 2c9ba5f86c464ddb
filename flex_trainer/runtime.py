"""One micro-batch in one part of the model, from budget to backward.

    attach     plugin.attach -> FlexRuntime.attach
                 -> provision/managed_model.ManagedModel.of    looked at once: operators, units, gradients, fingerprint
                 -> provision/device_books.DeviceBooks         once per device: meter, limit, offload store, books
                 -> provision/part.ModelPart                   per part of the model: sizes, plans, expert loads
                 -> models/instrument.Instrumentation          operators go through the engine from now on
    begin      model.forward -> _forward -> _start
                 -> part.inputs.shape_of -> part.prepare -> provision/forecast.Forecast.teach       sizes
                 neighbour.beside                              what may run beside this forward (steps/fused.py)
                 -> part.begin -> device_books.measure -> provision/policy.provide -> plan_cache.plan  budget and plan
                 -> activations/scope.Scope                    opened around the forward
    forward    models/instrument.forward -> scope.run          every operator under its strategy
                 router -> provision/after_router.on_routed -> part.revise       does the rest of the plan still hold?
                 provision/flight.end_forward -> part.commit   what is held replaces what was predicted in the books
    backward   accelerator.backward -> flight.backward -> autograd -> scope._unpack                   values come back
                 first value -> flight.backward_begins;  compat.when_backward_ends -> flight._backward_ended
    end        flight.settle -> _finish -> part.learn -> _ended -> micro_batch.record -> records

Begin and end of forward and backward are events of (part, micro-batch). The model may be entered by another door than
its forward (`_entered`), and a pipeline runtime may say itself what begins and ends (`forward`, `backward`). Where an
allocation fails, steps/transaction.py rolls the step back and retries it.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from flex_trainer.activations.clock import clocks_for
from flex_trainer.activations.context import current_scope
from flex_trainer.activations.model_tensors import ModelTensors
from flex_trainer.activations.place import OUTSIDE, Latest, Place, Whereabouts
from flex_trainer.activations.quantize import NonFinite
from flex_trainer.activations.scope import Scope
from flex_trainer.compat import current_backward
from flex_trainer.config import FlexConfig
from flex_trainer.cost.shape import BatchShape
from flex_trainer.errors import UserError
from flex_trainer.memory.enforce import hold_memory_returned, trim_freed_memory
from flex_trainer.memory.meter import MemoryMeter, meter_for
from flex_trainer.models.checkpointing import stop_checkpointing, warn_of_checkpointing
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.provision.after_router import AfterRouter
from flex_trainer.provision.device_books import DeviceBooks, MemoryLimitError
from flex_trainer.provision.flight import Flight
from flex_trainer.provision.managed_model import ManagedModel
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.provision.neighbour import Neighbour, Nobody
from flex_trainer.provision.part import ModelPart, path_of_part
from flex_trainer.reports.run_view import RunView
from flex_trainer.strategy import Site
from flex_trainer.undo import replace_attribute


class Mark(NamedTuple):
    """How far a run has come."""

    step: int
    num_micro_batches: int
    """Begun, over all parts."""
    num_records: int
    next_numbers: Mapping[str, int]
    """By part."""


class FlexRuntime(RunView):
    """Everything FlexTrainer does on one device during training: to one model, or to several parts of one.

    Args:
        config: the settings.
        device: where the activations live; taken from the model when None.
    """

    def __init__(self, config: FlexConfig | None = None, device: torch.device | None = None) -> None:
        super().__init__(config or FlexConfig())
        self.step = 0
        """The optimizer step of the micro-batches to come; Trainer and plugin keep it up to date."""
        self.can_roll_back = False
        """Whether a transaction is around what runs now."""
        self.neighbour: Neighbour = Nobody()
        """Runs beside forwards."""
        self._given_device = device
        self._given_meter: MemoryMeter | None = None
        self._books: DeviceBooks | None = None
        self._parts: dict[str, ModelPart] = {}
        self._detached: dict[str, ModelPart] = {}  # what they have learnt
        self._undo: dict[str, list[Callable[[], None]]] = {}
        self._resumed_profile: Path | None = None
        self._latest = Latest()
        self._non_finite = NonFinite()
        self._flight = Flight(self._parts, self._latest, self._ended)
        self._thread = threading.local()  # .number: what `forward` has said of the forward to come
        self._num_micro_batches = 0
        self._has_warned = False

    # What others read

    @property
    def is_attached(self) -> bool:
        return bool(self._parts)

    @property
    def limit_bytes(self) -> int:
        """The memory limit in bytes; 0 before the first `attach`."""
        return self._books.limit_bytes if self._books is not None else 0

    def memory_now(self) -> dict[str, int]:
        """Bytes in use now by name: process (CPU); allocated, reserved, device (CUDA)."""
        return self._books.meter.now() if self._books is not None else {}

    @property
    def books(self) -> DeviceBooks:
        """What belongs to the device. After the first `attach`."""
        assert self._books is not None, "after attach"
        return self._books

    def part(self, name: str = "") -> ModelPart:
        """What belongs to a part of the model, also after it was detached."""
        return self._parts[name] if name in self._parts else self._detached[name]

    @property
    def model(self) -> nn.Module:
        """The model that is managed; of several parts, the first."""
        assert self._parts, "after attach"
        return next(iter(self._parts.values())).managed.module

    @property
    def models(self) -> list[nn.Module]:
        """All parts that are managed."""
        return [part.managed.module for part in self._parts.values()]

    @property
    def in_flight(self) -> list[MicroBatch]:
        """The micro-batches between the begin of their forward and the end of their backward, in that order."""
        return list(self._flight.micro_batches)

    @property
    def running(self) -> MicroBatch | None:
        """The micro-batch that is in forward on this thread."""
        return self._flight.running()

    # Checkpoints

    def save_planner(self, path: Path) -> None:
        """Write what was learnt so far, in the form of a seed profile; nothing before the first `attach`.

        Raises:
            ValueError: the file cannot be written.
        """
        for name, part in {**self._detached, **self._parts}.items():
            part.write_profile(path_of_part(path, name))

    def resume_planner(self, path: Path) -> None:
        """Have the first `attach` begin with what `save_planner` has written, instead of the seed profile."""
        self._resumed_profile = path

    # Attaching

    def use_meter(self, meter: MemoryMeter) -> None:
        """Measure memory by this meter, from the next `attach` on, instead of the device's own."""
        self._given_meter, self._books = meter, None

    def follow_schedule(self, num_in_flight: int | None) -> None:
        """How many forwards (of micro-batches in parts) come before the first backward, where a schedule says so: W of
        Algorithm 1. None: learn it from what runs. After the first `attach`.

        Raises:
            ValueError: below 1.
        """
        self.books.budgets.follow_schedule(num_in_flight)

    def attach(self, model: nn.Module, part: str = "") -> None:
        """Manage the activations of `model` from its next forward on.

        Several parts of one model, such as the stages of a pipeline that run on this device, are attached one after the
        other, each under a name; they share the memory limit. Nothing is changed when it raises.

        Raises:
            ValueError: no decoder layers, FSDP1 or tensor-parallel weights, a device that cannot be measured, parts on
                several devices, a limit below what is in use already, an offload directory or a seed profile that
                cannot be used.
            RuntimeError: a model (a part of this name) is attached already.
        """
        if part in self._parts or (self._parts and "" in (part, *self._parts)):
            raise RuntimeError(
                "this runtime manages a model already; call detach() first, or give every part of the model a name: "
                "attach(stage, part='stage 0')"
            )
        # Step 1: everything that may be refused.
        managed = ManagedModel.of(model, self._given_device, part, self.config.trace)
        books = self._books_for(managed.device)
        resumed = path_of_part(self._resumed_profile, part) if self._resumed_profile is not None else None
        one = ModelPart(
            managed,
            books,
            is_alone=not self._parts,
            earlier=self._detached.get(part),
            resumed_profile=resumed if resumed is not None and resumed.exists() else None,
        )
        books.check_start()
        # Step 2: the model.
        undo: list[Callable[[], None]] = []
        try:
            warn_of_checkpointing(model)
            undo.append(stop_checkpointing(model))
            listener = AfterRouter(one, lambda: self.running)
            enter = functools.partial(self._entered, one)
            undo.append(Instrumentation(model, managed.map, listener, enter).remove)
            undo.append(self._wrap_forward(one))
            if managed.device.type == "cpu" and self.config.strategies:
                undo.append(hold_memory_returned())
        except BaseException:
            _undo_all(undo)
            raise
        self._parts[part], self._undo[part] = one, undo
        self._books = self._flight.books = books
        books.gathered_bytes = sum(each.managed.gathered_bytes for each in self._parts.values())
        self.model_name = ", ".join(dict.fromkeys(type(each).__name__ for each in self.models))
        self.device_name = str(managed.device)

    def _books_for(self, device: torch.device) -> DeviceBooks:
        if self._books is not None and self._books.device == device:
            return self._books
        if self._parts:
            raise UserError(
                f"this runtime manages a part of the model on {self.books.device}, and this one is on {device}: the "
                "parts that share a memory limit are on one device. Use a FlexRuntime for each device."
            )
        return DeviceBooks(self.config, device, self._given_meter or meter_for(device))

    def detach(self) -> None:
        """Give the model, with all its parts, back as it was. Records stay; then, on the main process, a seed profile
        is written.

        Raises:
            ValueError: the seed profile cannot be written; the model is given back all the same.
        """
        if not self._parts:
            return
        try:
            self._flight.settle()
        finally:
            for undo in self._undo.values():
                _undo_all(undo)
            self._flight.forget_all()
            self._detached.update(self._parts)
            detached = list(self._parts.values())
            self._parts.clear()
            self._undo.clear()
        for part in detached:
            part.save_profile()

    def _wrap_forward(self, part: ModelPart) -> Callable[[], None]:
        model = part.managed.module
        original = model.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Evaluation, generation and scoring run without gradients; a nested call belongs to the outer one. And
            # after `detach` this function may still be called by one that was put in its place.
            if not self._is_managed(part) or current_scope() is not None:
                return original(*args, **kwargs)
            with self._forward(part, args, kwargs):
                return original(*args, **kwargs)

        return replace_attribute(model, "forward", forward)

    def _is_managed(self, part: ModelPart) -> bool:
        is_attached = self._parts.get(part.name) is part
        return is_attached and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    # Forward

    @contextmanager
    def forward(self, part: str, micro_batch: int) -> Iterator[None]:
        """Run the forward of one micro-batch of a part inside, and give it this number: for a pipeline runtime, whose
        micro-batches have numbers of their own. Without it they are counted, in each part.

        Raises:
            ValueError: no such part, or a micro-batch of this number is in flight there.
        """
        if part not in self._parts:
            raise UserError(f"there is no part {part!r}; this runtime manages {sorted(self._parts)}")
        if self._flight.found(part, micro_batch) is not None:
            raise UserError(
                f"micro-batch {micro_batch} of part {part!r} is in flight already; give every micro-batch between its "
                "forward and its backward a number of its own"
            )
        self._thread.number = part, micro_batch
        try:
            yield
        finally:
            self._thread.number = None

    @contextmanager
    def _forward(self, part: ModelPart, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Around the model's own forward."""
        with self.neighbour.beside(functools.partial(self._start, part, args, kwargs)) as micro_batch:
            assert micro_batch.scope is not None
            try:
                with micro_batch.scope.open():
                    yield
            except BaseException:
                self._flight.forget([micro_batch])
                raise
            finally:
                self.books.offloading.settle()
            self._flight.end_forward(micro_batch)

    def _entered(
        self, part: ModelPart, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[Scope] | None:
        """An operator is run from outside of the model's forward: by a loss function that calls the inner model and the
        head, or by a wrapper around it. The first one begins a micro-batch; one that has run already begins another.
        In a backward (a recomputation, checkpointing) operators are run for a micro-batch that has had its forward."""
        if not self._is_managed(part) or current_backward() >= 0:
            return None
        return self._another_door(part, site, args, kwargs)

    @contextmanager
    def _another_door(
        self, part: ModelPart, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Scope]:
        micro_batch = self._flight.open_forward(part.name)
        if micro_batch is None or micro_batch.entered is None or site.name in micro_batch.entered:
            self.neighbour.settle()
            micro_batch = self._start(part, args, kwargs, is_whole=False)
            micro_batch.entered = set()
        assert micro_batch.entered is not None and micro_batch.scope is not None
        micro_batch.entered.add(site.name)
        try:
            with micro_batch.scope.open(is_last=False) as scope:
                yield scope
        except BaseException:
            self._flight.forget([micro_batch])
            raise
        finally:
            self.books.offloading.settle()

    def _start(
        self, part: ModelPart, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_whole: bool = True
    ) -> MicroBatch:
        """A forward begins: budget, plan, scope. `is_whole`: these are the arguments of the model's own forward."""
        self._flight.settle()
        self._latest.whereabouts = whereabouts = Whereabouts()
        whereabouts.at = Place("planning", "the model")
        shape = part.inputs.shape_of(args, kwargs)
        # Before it is at work: what a trace needs is no part of the micro-batch's peak.
        started = time.perf_counter()
        traced_seconds = part.prepare(shape, args, kwargs) if is_whole else 0.0
        looked_up_seconds = max(time.perf_counter() - started - traced_seconds, 0.0)
        try:
            micro_batch = self._planned(part, shape, is_whole=is_whole)
        except MemoryLimitError:
            more_seconds = part.prepare(shape, args, kwargs, is_refused=True) if is_whole else 0.0
            if not more_seconds:
                raise
            traced_seconds += more_seconds
            micro_batch = self._planned(part, shape, is_whole=is_whole)
        micro_batch.traced_seconds = traced_seconds
        micro_batch.plan_seconds += looked_up_seconds
        whereabouts.at = Place("forward", OUTSIDE)
        micro_batch.begin_forward()
        return micro_batch

    def _planned(self, part: ModelPart, shape: BatchShape, *, is_whole: bool) -> MicroBatch:
        """The micro-batch, in the books and at work."""
        with self._flight.beginning(part) as activity:
            micro_batch = self._begin(part, shape, self._next_number(part))
            micro_batch.activity = activity
            if is_whole and micro_batch.scope is not None:  # by another door, not all of the forward may run
                micro_batch.scope.known = part.watching.known(micro_batch)
            self._flight.add(micro_batch)
        return micro_batch

    def _next_number(self, part: ModelPart) -> int:
        given = getattr(self._thread, "number", None)
        return given[1] if given is not None and given[0] == part.name else part.next_number

    def _begin(self, part: ModelPart, shape: BatchShape, number: int) -> MicroBatch:
        """The micro-batch, with its plan and its scope."""
        books, managed = self.books, part.managed
        micro_batch = part.begin(shape, can_roll_back=self.can_roll_back)
        micro_batch.number, micro_batch.step = number, self.step
        micro_batch.whereabouts = self._latest.whereabouts
        part.next_number = max(part.next_number, number + 1)
        self._num_micro_batches += 1
        micro_batch.scope = Scope(
            micro_batch,
            micro_batch.ledger,
            parameters=ModelTensors(managed.module),
            modules=managed.modules,
            store=books.offloading.store,
            quantize_dtype=getattr(torch, self.config.quantize_dtype),
            on_memory=books.meter.sample,
            clock=clocks_for(books.device)(),
            whereabouts=micro_batch.whereabouts,
            residency=managed.units,
            on_backward=functools.partial(self._flight.backward_begins, micro_batch),
            non_finite=self._non_finite,
        )
        return micro_batch

    # Backward

    def backward(
        self, part: str = "", micro_batch: int | None = None, *, is_last: bool = True
    ) -> AbstractContextManager[None]:
        """Run a backward inside: of whatever micro-batches it reaches, or of the one that is named. Nothing is learnt
        from one that fails.

        Args:
            part: with `micro_batch`: whose backward it is.
            micro_batch: its number; it ends with this context, whatever is kept for it. Those that are not named end
                too, but where the graph is kept for another backward (`retain_graph=True`).
            is_last: False for the first half of a backward that is split (gradients of inputs, then of weights).

        Raises:
            ValueError: no such micro-batch is in flight.
        """
        return self._flight.backward(part, micro_batch, is_last=is_last)

    def _ended(self, micro_batch: MicroBatch) -> None:
        """A micro-batch has ended, and what it taught was learnt."""
        self.records.append(micro_batch.record(self.limit_bytes))
        plan = micro_batch.plan
        if self._has_warned or plan is None or not plan.strategies or any(micro_batch.ledger.freed_bytes.values()):
            return
        self._has_warned = True  # its activations are where the engine cannot see them
        warnings.warn(
            f"FlexTrainer mitigates {len(plan.strategies)} operators of micro-batch {micro_batch.number}, which frees "
            f"nothing ({micro_batch.ledger.num_unmanaged} saved tensors are of kinds it leaves alone). Compiled "
            "regions and custom autograd functions keep their tensors out of its reach.",
            stacklevel=2,
        )

    # Rolling a step back (steps/transaction.py)

    @property
    def device(self) -> torch.device:
        """Where the activations live."""
        return self.books.device

    @property
    def place(self) -> Place | None:
        """What ran last; when something has failed, what failed."""
        return self._latest.whereabouts.at

    @property
    def margin_bytes(self) -> int:
        """Bytes kept free since an allocation failed."""
        return self._books.margin.num_bytes if self._books is not None else 0

    def mark(self) -> Mark:
        """How far the run has come: for `roll_back`."""
        numbers = {name: part.next_number for name, part in self._parts.items()}
        return Mark(self.step, self._num_micro_batches, self.records.num_total, numbers)

    def forget(self, micro_batch: MicroBatch) -> None:
        """Forget a micro-batch whose forward has not begun: it is to begin later."""
        self._flight.forget([micro_batch])
        self._parts[micro_batch.part].next_number = micro_batch.number
        self._num_micro_batches -= 1

    def now_runs(self, micro_batch: MicroBatch) -> None:
        """Of two that take turns, this one runs from now on."""
        self._latest.whereabouts = micro_batch.whereabouts

    def roll_back(self, mark: Mark) -> None:
        """Forget every micro-batch since `mark`, and give the memory of what has failed back."""
        self._flight.forget_all()
        self.step, self._num_micro_batches = mark.step, mark.num_micro_batches
        for name, number in mark.next_numbers.items():
            self._parts[name].next_number = number
        self.records.forget_since(mark.num_records)
        gc.collect()  # users' code may have made cycles that hold tensors
        self.books.offloading.settle()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim_freed_memory()


def _undo_all(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo.pop()()
