"""An optimizer step as a transaction: where an allocation fails, the step is rolled back and retried in less memory.

    micro-batch 1    runs, its loss is returned, gradients exist
    micro-batch 2    runs out of memory, in forward, backward, recovery or offload
        roll back    gradients to None, buffers and random streams as they were, memory of the failed run given back
        tighten      first a wider safety margin; if that fails as well, the minimum-memory plan
        retry        micro-batch 1 (its loss was returned already), micro-batch 2
    micro-batch 3    goes on; the caller sees three losses, and the weights of a run in which nothing failed

Copied are random streams, buffers and plain attributes of modules and of the trainer, whole when the step begins and
what has changed since at each further micro-batch; not gradients: that all of them were None when the step began is
what makes it possible. A step that cannot be rolled back ends with the original error, and a note that says why. Where
that is known beforehand (several processes, no strategies), nothing is copied.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from flex_trainer.activations.place import OUTSIDE, Place
from flex_trainer.memory.failed_allocation import is_out_of_memory, let_go, nearest_limit, requested_bytes
from flex_trainer.provision.device_books import BudgetTakenError, MemoryLimitError
from flex_trainer.ranks import num_ranks
from flex_trainer.records import StepRetry
from flex_trainer.runtime import FlexRuntime, Mark
from flex_trainer.snapshot import ModuleValues, RandomStreams
from flex_trainer.units import format_bytes

logger = logging.getLogger(__name__)

MAX_RETRIES = 2
"""With a wider margin; under the minimum-memory plan."""

T = TypeVar("T")


class Restorable(Protocol):
    """Something that was captured and can be put back."""

    def restore(self) -> None: ...


class Failure(NamedTuple):
    """A failed allocation, without the error: its frames would hold the tensors of the failed run."""

    place: Place
    requested_bytes: int
    is_share: bool
    """No allocation has failed: a plan for one micro-batch left no room for another one before the first backward."""

    def __str__(self) -> str:
        if self.is_share:
            return "another forward began before the backward of one that had been given all the memory"
        size = f" of {format_bytes(self.requested_bytes)}" if self.requested_bytes else ""
        return f"an allocation{size} failed in {self.place.phase} of {self.place.operator}"


class Transaction:
    """The optimizer step that is being made.

    Args:
        runtime: whose plans are tightened. It manages a model by now.
        optimizers: the optimizers of the loop: they may train parameters that are not the model's.
        remember: called before every micro-batch; each returns something to put back before it is run again, beside
            random streams and what the modules hold.
    """

    def __init__(
        self,
        runtime: FlexRuntime,
        remember: tuple[Callable[[], Restorable], ...] = (),
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]] = tuple,
    ) -> None:
        self._runtime = runtime
        self._remember = remember
        self._optimizers = optimizers
        self._parameters = self._all_parameters()
        self._step: _Step | None = None
        self._is_running = False

    def run_micro_batch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function(*args, **kwargs)`, which runs forward and backward of one or more micro-batches of this step,
        and return what it returns; where memory runs out, roll the step back and retry it as far as it has come.

        The function must do the same each time it is called. A step begins where no parameter has a gradient, or where
        a parameter or a gradient was changed since the last call (by an optimizer, or by clipping).

        Raises:
            MemoryLimitError: memory ran out even under the minimum-memory plan.
        """
        if self._is_running:  # inside of another call: part of what that one repeats
            return function(*args, **kwargs)
        obstacle = _obstacle_of_every_step(self._runtime)
        if obstacle is not None:
            return _run_once(function, args, kwargs, obstacle)
        if self._step is None or not self._step.goes_on(self._parameters):
            self._parameters = self._all_parameters()
            self._step = _Step(self._parameters)
        earlier = self._step.calls[-1].modules if self._step.calls else None
        modules = ModuleValues((module for model in self._runtime.models for module in model.modules()), earlier)
        call = _Call(function, args, kwargs, self._runtime, modules, self._remember)
        self._step.calls.append(call)
        self._is_running = self._runtime.can_roll_back = True
        try:
            result = self._run_to_the_end(self._step)
        except BaseException:
            self._step = None
            raise
        finally:
            self._is_running = self._runtime.can_roll_back = False
            self._runtime.books.loosen()
        self._step.note_gradients(self._parameters)
        return result

    def _all_parameters(self) -> list[nn.Parameter]:
        """The model's as it is now, and what else is trained."""
        owned = (parameter for model in self._runtime.models for parameter in model.parameters())
        trained = (p for optimizer in self._optimizers() for group in optimizer.param_groups for p in group["params"])
        return list(dict.fromkeys((*owned, *trained)))

    def _run_to_the_end(self, step: _Step) -> Any:
        failure: Failure | None = None
        attempt = 0
        while True:
            try:
                if failure is not None:
                    for call in step.calls[:-1]:
                        call.restore()
                        call()  # its result was returned when it ran first
                    step.calls[-1].restore()
                return step.calls[-1]()
            except Exception as error:
                failure = self._failure_of(error, step, attempt, failure)
                let_go(error)
            # Room for one micro-batch more is shared out from now on; that ends by itself, so it is not counted.
            attempt += not failure.is_share
            self._roll_back(step)
            self._tighten(step, attempt, failure)

    def _failure_of(self, error: Exception, step: _Step, attempt: int, earlier: Failure | None) -> Failure:
        """What failed, if the step may be retried; raises otherwise."""
        is_taken = isinstance(error, BudgetTakenError)
        if not is_taken and not is_out_of_memory(error):
            if earlier is not None and isinstance(error, MemoryLimitError):
                error.add_note(f"This step was retried after {earlier}.")
            raise error
        obstacle = step.obstacle(self._parameters)
        if obstacle is not None:
            error.add_note(_NOTE.format(obstacle))
            raise error
        if is_taken:
            return Failure(Place("begin", "the model"), 0, is_share=True)
        failure = Failure(self._runtime.place or Place("forward", OUTSIDE), requested_bytes(error), is_share=False)
        if attempt == MAX_RETRIES:
            raise self._last_error(failure) from error
        return failure

    def _roll_back(self, step: _Step) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._runtime.roll_back(step.calls[0].mark)

    def _tighten(self, step: _Step, attempt: int, failure: Failure) -> None:
        if not failure.is_share:
            self._runtime.books.tighten(attempt, failure.requested_bytes)
        mark = step.calls[-1].mark
        retry = StepRetry(
            step=mark.step,
            micro_batch=mark.num_micro_batches,
            attempt=attempt,
            phase=failure.place.phase,
            operator=failure.place.operator,
            requested_bytes=failure.requested_bytes,
            margin_bytes=self._runtime.margin_bytes,
        )
        self._runtime.retries.append(retry)
        how = "under the minimum-memory plan" if attempt == MAX_RETRIES else "in less memory"
        logger.warning(
            "Step %d, micro-batch %d: %s. This step is rolled back and retried %s; %s are kept free from now on.",
            retry.step,
            retry.micro_batch,
            failure,
            how,
            format_bytes(retry.margin_bytes),
        )

    def _last_error(self, failure: Failure) -> MemoryLimitError:
        runtime = self._runtime
        config = runtime.config
        shortage = runtime.books.meter.shortage(failure.requested_bytes)
        return MemoryLimitError(
            f"{failure}, even under the minimum-memory plan: out of memory. In use now: "
            f"{_sizes(runtime.memory_now())}. What it ran into is {nearest_limit(runtime.device)}"
            f"{f', {shortage}' if shortage else ''}; "
            f"memory_limit={config.memory_limit!r} is {format_bytes(runtime.limit_bytes)}. Raise that limit, allow "
            f"more strategies than {', '.join(config.strategies)}, or use a smaller per-device batch, shorter "
            "sequences or a smaller model."
        )


def _sizes(memory: Mapping[str, int]) -> str:
    return ", ".join(f"{format_bytes(num_bytes)} ({name})" for name, num_bytes in memory.items())


_NOTE = "FlexTrainer cannot roll this step back and retry it in less memory: {}"


def _obstacle_of_every_step(runtime: FlexRuntime) -> str | None:
    """Why no step of this run can be rolled back."""
    if num_ranks() > 1:
        return (
            f"it is one of {num_ranks()} processes, and the others would wait for its gradients. "
            "Lower memory_limit, so that plans leave more room."
        )
    if not runtime.config.strategies:
        return "strategies is empty, so there is no plan that needs less. Allow recompute or offload."
    return None


def _run_once(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], obstacle: str) -> T:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(_NOTE.format(obstacle))
        raise


class _Call:
    """One call of `Transaction.run_micro_batch`, with everything needed to make it again."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        runtime: FlexRuntime,
        modules: ModuleValues,
        remember: tuple[Callable[[], Restorable], ...],
    ) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self.modules = modules
        self._runtime = runtime
        self.mark: Mark = runtime.mark()
        self._saved: list[Restorable] = [RandomStreams(runtime.device), modules, *(capture() for capture in remember)]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for value in (*args, *kwargs.values()):
            if isinstance(value, MutableMapping):  # a BatchEncoding, for one, is no dictionary to torch
                tensors += [item for item in value.values() if isinstance(item, torch.Tensor)]
        self._tensors = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def __call__(self) -> Any:
        # Copies: loss functions take things out of a dictionary of inputs (labels, for one).
        args = [_copied(value) for value in self._args]
        return self._function(*args, **{name: _copied(value) for name, value in self._kwargs.items()})

    def restore(self) -> None:
        self._runtime.step = self.mark.step
        for saved in self._saved:
            saved.restore()

    @property
    def is_changed(self) -> bool:
        """Whether one of the arguments was written to since."""
        return any(tensor._version != version for tensor, version in self._tensors)


def _copied(value: Any) -> Any:
    """The containers in it copied, however deep; not what they hold."""
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        for key, item in value.items():
            if isinstance(item, (list, tuple, MutableMapping)):
                new[key] = _copied(item)
        return new
    return copy.copy(value) if isinstance(value, list) else value  # a list of a kind of its own


class _Step:
    """An optimizer step as far as it has come."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.calls: list[_Call] = []
        self._had_gradients = any(parameter.grad is not None for parameter in parameters)
        self._versions = [parameter._version for parameter in parameters]
        self._gradients: list[tuple[int, int]] = []

    def note_gradients(self, parameters: list[nn.Parameter]) -> None:
        """A call has ended; what happens to gradients before the next one is not done by this step."""
        self._gradients = _marks(parameters)

    def goes_on(self, parameters: list[nn.Parameter]) -> bool:
        """Whether the next call belongs to this step."""
        marks = _marks(parameters)
        return bool(marks) and marks == self._gradients and not self._is_changed(parameters)

    def _is_changed(self, parameters: list[nn.Parameter]) -> bool:
        return any(p._version != version for p, version in zip(parameters, self._versions, strict=True))

    def obstacle(self, parameters: list[nn.Parameter]) -> str | None:
        """Why this step cannot be rolled back."""
        if self._had_gradients:
            return (
                "gradients existed when the step began, and they were not copied. Call zero_grad(set_to_none=True) "
                "after each optimizer step."
            )
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters):
            return (
                "hooks run when gradients are accumulated (an optimizer that runs in backward) and may change weights."
            )
        if self._is_changed(parameters):
            return "parameters have changed since the step began (an optimizer that runs in backward)."
        if any(call.is_changed for call in self.calls):
            return "an input was changed in place. Use the out-of-place form of that operation."
        return None


def _marks(parameters: list[nn.Parameter]) -> list[tuple[int, int]]:
    return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]
