"""One forward and backward on shapes alone: what each operator saves, needs and does, with no weights in memory.

The model's twin runs under torch's fake tensors with the engine around it, everything kept. The engine writes the same
trace as in a real forward, so all sizes are those of the real run: dtypes, views, shared storages, autocast copies. In
addition every operation is counted, which gives the transient bytes of each operator, its floating-point operations
and the bytes it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.activations.trace import Trace, Work
from flex_trainer.activations.values import Packed
from flex_trainer.compat import as_if_real
from flex_trainer.experts.layout import RecomputeVote
from flex_trainer.models.discovery import ModelMap, discover
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.models.routing import Routing
from flex_trainer.planner.plan import Uniform
from flex_trainer.strategy import Site, Strategy
from flex_trainer.symbolic.arguments import with_fakes
from flex_trainer.symbolic.attention import FusedAttention
from flex_trainer.symbolic.counter import NotSymbolic, OperationCounter
from flex_trainer.symbolic.leftovers import Leftovers
from flex_trainer.symbolic.twin import symbolic_twin

_CANNOT = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@dataclass(frozen=True)
class SymbolicForward:
    """What one forward and backward would do."""

    trace: Trace
    """Every call with its `work`; times are zero."""
    outside: Work
    """What is done outside of all operators."""
    routed_pairs: Mapping[str, int]
    """Rows (token, expert pairs) of each experts block, by site name."""
    held_bytes: int
    """Saved bytes at the end of forward, everything kept."""
    inside_bytes: int = 0
    """Most bytes on top of them outside of all operators, from the first layer's forward to the last one's backward."""
    after_bytes: int = 0
    """The same between the end of the model's forward and the first value that backward asks for: what a loss needs
    that is computed of the model's outputs. Where the model computes none, that is a cross-entropy of its logits."""

    def set_seconds(self, seconds_of: Callable[[Work], float]) -> None:
        """Give every call a time, inner calls included, as the engine would have measured it.

        Args:
            seconds_of: forward time of an operator's own work.
        """
        calls = self.trace.calls
        for call in calls:
            call.seconds = 0.0 if call.work is None else seconds_of(call.work)
        for call in reversed(calls):  # inner calls come after their block
            if call.parent >= 0:
                calls[call.parent].seconds += call.seconds


class SymbolicModel:
    """The twin of one model, for traces at any shape.

    Args:
        model: on any device, also meta; it is not changed.
        device: where the run is to be imagined.
        has_fused_attention: whether attention is to be traced as the fused kernels of a GPU run it.
        find: lists the operators of the twin.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        has_fused_attention: bool,
        find: Callable[[nn.Module], ModelMap] = discover,
    ) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self._has_fused_attention = has_fused_attention
        self._twin = symbolic_twin(model, self._mode, device)
        self._map = find(self._twin)
        self._parameters = [*self._twin.parameters(), *self._twin.buffers()]

    def trace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, has_padding: bool = False, with_backward: bool = True
    ) -> SymbolicForward:
        """Trace one training micro-batch.

        Args:
            args, kwargs: the forward's arguments; of tensors only shape and dtype are read.
            has_padding: whether the attention mask among them masks anything.
            with_backward: also run backward, for what it needs and does; without, that part of `work` is 0.

        Raises:
            NotSymbolic: what the model does depends on data, or an operation has no shape rule.
        """
        fakes: dict[int, torch.Tensor] = {}
        try:
            args, kwargs = with_fakes((args, dict(kwargs)), self._fakes(fakes))
        except TypeError as error:
            raise NotSymbolic(str(error)) from error
        run = _Run(self._twin, self._parameters, has_padding)
        for leaf in fakes.values():
            run.counter.watch(leaf)  # what autograd saves of the inputs is held as well
        instrumentation = Instrumentation(self._twin, self._map, run)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._mode)
                stack.enter_context(torch.enable_grad())
                stack.enter_context(as_if_real())
                stack.enter_context(run.counter)
                if self._has_fused_attention:
                    stack.enter_context(FusedAttention(lambda: run.work))
                forward = run.forward_and_backward(args, kwargs, with_backward)
            for call in forward.trace.calls:
                if not self._map.repeatable.get(call.site.name, True):
                    call.site = replace(call.site, is_recomputable=False)
            return forward
        except _CANNOT as error:
            raise NotSymbolic(f"the model cannot be run on shapes alone: {error}") from error
        finally:
            instrumentation.remove()
            for parameter in self._twin.parameters():
                parameter.grad = None

    def leftovers(self) -> Leftovers:
        """Finds out, once this is gone, whether tensors of its traces are still alive."""
        return Leftovers(self._mode, self._twin)

    def _fakes(self, known: dict[int, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Makes fake tensors and puts them into `known`; of one that is given twice (ids that are labels too), one."""

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in known:
                with self._mode:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                known[id(tensor)] = made.requires_grad_(tensor.requires_grad)
            return known[id(tensor)]

        return fake


class _SymbolicScope(Scope):
    """Also says whose saved tensor backward asks for: that operator's backward is running."""

    def __init__(self, *args: Any, holds_infinity: Callable[[torch.Tensor], bool], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.in_backward = -1
        self.was_asked = False
        """Whether backward has asked for a value."""
        self._holds_infinity = holds_infinity

    @property
    def running(self) -> int:
        """Index of the innermost call that runs forward, or -1."""
        return self._stack[-1] if self._stack else -1

    @property
    def untimed_trace(self) -> Trace:
        """The trace without the host's times, which say nothing of a run on data."""
        return self._trace

    def _hold(self, entry: Any, tensor: torch.Tensor) -> Any:
        self._trace.values[entry.value].has_infinity |= self._holds_infinity(tensor)
        return super()._hold(entry, tensor)

    def _pack(self, tensor: torch.Tensor) -> Any:
        return _Asked(super()._pack(tensor), self.running)

    def _unpack(self, packed: Any) -> torch.Tensor:
        self.in_backward, self.was_asked = packed.call, True
        return super()._unpack(packed.inner)


class _Asked:
    """A saved tensor with the call that saved it."""

    __slots__ = ("call", "inner")

    def __init__(self, inner: Packed, call: int) -> None:
        self.inner = inner
        self.call = call


class _Run:
    """One traced micro-batch."""

    def __init__(self, twin: nn.Module, parameters: list[torch.Tensor], has_padding: bool) -> None:
        self._twin = twin
        self._ledger = Ledger()
        self._before, self._inside, self._after = Work(), Work(), Work()  # outside of operators; see `_elsewhere`
        self._is_in_layers = self._is_after_forward = False
        self._routed_pairs: dict[str, int] = {}
        self._is_backward = False
        self.counter = OperationCounter(
            lambda: self.work, lambda: self._is_backward, lambda: self._ledger.held_bytes, has_padding
        )
        self._scope = _SymbolicScope(
            Uniform(Strategy.KEEP),
            self._ledger,
            parameters=parameters,
            holds_infinity=self.counter.holds_infinity,
        )

    @property
    def work(self) -> Work:
        """Of the operator that is running now."""
        scope = self._scope
        index = scope.in_backward if self._is_backward else scope.running
        if index < 0:
            return self._elsewhere()
        call = scope.calls[index]
        if call.site.layer >= 0:
            self._is_in_layers = not self._is_backward
        if call.work is None:
            call.work = Work()
        return call.work

    def _elsewhere(self) -> Work:
        """Outside of operators: before the layers (the embedding, masks; in backward they come last), after them in the
        model's own forward and backward, or between the two."""
        if self._is_after_forward and not self._scope.was_asked:
            return self._after
        return self._inside if self._is_in_layers else self._before

    def recompute_vote(self, block: Site, experts: Site) -> RecomputeVote:
        return RecomputeVote()

    def on_routed(self, experts: Site, routing: Routing) -> None:
        self._routed_pairs[experts.name] = routing.num_pairs

    def forward_and_backward(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], with_backward: bool
    ) -> SymbolicForward:
        with self._scope.open():
            output = self._twin(*args, **kwargs)
        held_bytes = self._ledger.held_bytes
        self._is_after_forward = True
        if with_backward:
            handles = [
                parameter.register_post_accumulate_grad_hook(self.counter.note_gradient)
                for parameter in self._twin.parameters()
                if parameter.requires_grad
            ]
            loss = _loss(output)
            del output
            self._is_backward = True
            loss.backward()
            for handle in handles:
                handle.remove()
        trace = self._scope.untimed_trace
        trace.is_symbolic = True
        for call in trace.calls:
            call.work = call.work or Work()
        self._give_gradients(trace)
        return SymbolicForward(
            trace,
            _together(self._before, self._inside, self._after),
            self._routed_pairs,
            held_bytes,
            inside_bytes=_most_bytes(self._inside),
            after_bytes=_most_bytes(self._after),
        )

    def _give_gradients(self, trace: Trace) -> None:
        """Gradients of weights that are used outside of operators, after the layers (a head within a function that
        computes log probabilities), are there before those of the layers: they count for what comes beside it."""
        beside = next((call for call in reversed(trace.calls) if call.site.layer < 0 and call.parent < 0), None)
        if beside is not None and beside.work is not None:
            beside.work.gradient_bytes += self._inside.gradient_bytes + self._after.gradient_bytes


def _most_bytes(work: Work) -> int:
    return max(work.forward_transient_bytes, work.backward_transient_bytes)


def _together(*works: Work) -> Work:
    return Work(
        **{
            name: (max if name.endswith("transient_bytes") else sum)(getattr(work, name) for work in works)
            for name in vars(works[0])
        }
    )


def _loss(output: Any) -> torch.Tensor:
    """The model's loss, or, where the Trainer computes one, something that depends on all that it may use."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not leaves:
        raise NotSymbolic("the model's output requires no gradient")
    logits = getattr(output, "logits", None)
    terms = (_cross_entropy(leaf) if leaf is logits and leaf.dim() > 2 else leaf.float().sum() for leaf in leaves)
    return sum(terms, leaves[0].new_zeros((), dtype=torch.float32))


def _cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Of the next tokens, as it is mostly computed by those who do it themselves. Logits: (batch, tokens, words)."""
    shifted = logits[..., :-1, :].float().flatten(0, -2)
    return nn.functional.cross_entropy(shifted, shifted.new_zeros(len(shifted), dtype=torch.long))
