"""Sizes of micro-batches that never ran: a shape not known yet is traced on shapes alone before it runs.

So the first micro-batch is planned, and one that is eight times longer than any before is planned too, not guessed.
Where a model cannot be traced (its forward looks at data, a kernel has no shape rule), sizes are learnt from real
micro-batches instead, the first of which runs with everything mitigated.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.trace import Trace, Work
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.shape import BatchShape
from flex_trainer.process_memory import return_freed_memory
from flex_trainer.snapshot import RandomStreams
from flex_trainer.symbolic.forward import SymbolicModel
from flex_trainer.symbolic.leftovers import TraceLeftBehindError

_LOG = logging.getLogger(__name__)
_PROBE_SIZE = 512
_LAUNCH_SECONDS = 5e-6


class Forecast:
    """Teaches a profile what a micro-batch will hold, before it runs.

    Args:
        model: the model that is trained; it is only read.
        device: where it runs.
        is_enabled: if not, nothing is traced.
    """

    def __init__(self, model: nn.Module, device: torch.device, is_enabled: bool = True) -> None:
        self._model = model
        self._device = device
        self._is_enabled = is_enabled
        self.has_traced = False
        self._speed: tuple[float, float] | None = None
        self.refusal: str | None = None
        """Why the model cannot be traced, once that was seen."""

    def teach(self, profile: Profile, shape: BatchShape, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """Trace a micro-batch that the profile does not know, or that is much longer than all it knows.

        Returns:
            Seconds spent; 0 where the profile knows enough.

        Raises:
            TraceLeftBehindError: the forward has put tensors of the trace somewhere outside of the model.
        """
        if (
            not self._is_enabled
            or self.refusal is not None
            or (profile.knows(shape) and not profile.is_longer_than_any(shape))
        ):
            return 0.0
        started = time.perf_counter()
        try:
            forward = self._trace(args, kwargs, shape.has_padding)
        except TraceLeftBehindError:
            raise
        except Exception as error:  # a user's forward may fail in any way on tensors without data; said, not hidden
            self.refusal = f"{type(error).__name__}: {error}"
            _LOG.warning(
                "Activation sizes of %s are learnt from real micro-batches, since it cannot be traced on shapes "
                "alone (%s)",
                type(self._model).__name__,
                self.refusal,
            )
            return time.perf_counter() - started
        finally:
            if self._device.type == "cpu":
                return_freed_memory()  # of the twin: resident memory is what the micro-batch starts from
        trace, routed_rows = forward
        self.has_traced = True
        profile.observe(shape, trace, routed_rows)
        return time.perf_counter() - started

    def _trace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_padding: bool
    ) -> tuple[Trace, Mapping[str, int]]:
        # A new twin each time (they are rare): training flags, frozen parameters and adapters may have changed.
        streams = RandomStreams(self._device)
        try:
            symbolic = SymbolicModel(self._model, self._device, has_fused_attention=self._device.type == "cuda")
            leftovers = symbolic.leftovers()
            forward = symbolic.trace(args, kwargs, has_padding=has_padding)
            del symbolic
        finally:
            streams.restore()
            gc.collect()  # the twin is full of reference cycles, as any module with bound methods put on it
        leftovers.check()
        forward.set_seconds(self._seconds_of)
        return forward.trace, forward.routed_rows

    def _seconds_of(self, work: Work) -> float:
        """A first guess at an operator's time, until a real run has measured it."""
        if self._speed is None:
            self._speed = _probe(self._device)
        flops_per_second, bytes_per_second = self._speed
        return max(work.flops / flops_per_second, work.moved_bytes / bytes_per_second) + _LAUNCH_SECONDS


def _probe(device: torch.device) -> tuple[float, float]:
    """Floating-point operations and bytes copied per second, roughly (a few milliseconds)."""
    a = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=device)

    def best(function: Any) -> float:
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        return max(min(seconds), 1e-9)

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return 2 * _PROBE_SIZE**3 / best(lambda: a @ a), 2 * a.numel() * a.element_size() / best(lambda: a.clone())
