"""Sizes of micro-batches that never ran: a shape not known yet is traced on shapes alone before it runs.

So the first micro-batch is planned, and one that is eight times longer than any before is planned too, not guessed.
Where a model cannot be traced (its forward looks at data, a kernel has no shape rule), sizes are learnt from real
micro-batches instead, the first of which runs with everything mitigated.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.trace import Work
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.shape import BatchShape
from flex_trainer.memory.enforce import trim_freed_memory
from flex_trainer.models.discovery import ModelMap
from flex_trainer.models.effects import foreign_code
from flex_trainer.provision.loss_memory import LossMemory
from flex_trainer.snapshot import RandomStreams
from flex_trainer.symbolic.forward import SymbolicForward, SymbolicModel
from flex_trainer.symbolic.leftovers import Leftovers

_LOG = logging.getLogger(__name__)
_PROBE_SIZE = 512
_LAUNCH_SECONDS = 5e-6
_MAX_TRACED = 256


class Forecast:
    """Teaches a profile what a micro-batch will hold, before it runs.

    Args:
        model: the model that is trained; it is only read.
        model_map: its operators.
        device: where it runs.
        loss: is taught what the loss needs.
        trace: False: nothing is traced. "auto": only what is known to have no effects. True: anything.
    """

    def __init__(
        self,
        model: nn.Module,
        model_map: ModelMap,
        device: torch.device,
        trace: str | bool = "auto",
        loss: LossMemory | None = None,
    ) -> None:
        self._model = model
        self._map = model_map
        self._device = device
        self._setting = trace
        self._loss = loss or LossMemory()
        self.has_traced = False
        self._traced: set[BatchShape] = set()
        self._speed: tuple[float, float] | None = None
        self.refusal: str | None = None
        """Why the model is not traced, once that was seen."""

    def teach(
        self,
        profile: Profile,
        shape: BatchShape,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        is_refused: bool = False,
    ) -> float:
        """Trace a micro-batch that the profile does not know, or that is much longer than all it knows.

        Args:
            is_refused: also one that was not traced itself: what is known of its transients is a bound only, if it is
                smaller than all that were traced.

        Returns:
            Seconds spent; 0 where the profile knows enough.

        Raises:
            TraceLeftBehindError: the forward has put tensors of the trace somewhere outside of the model where they
                cannot be taken out again.
        """
        is_known = profile.knows(shape) and not profile.is_longer_than_any(shape)
        if (
            not self._setting
            or self.refusal is not None
            or not shape.is_told
            or (is_known and not (is_refused and shape not in self._traced))
        ):
            return 0.0
        started = time.perf_counter()
        # Each time: a forward may have been exchanged since.
        foreign = foreign_code(self._model) if self._setting == "auto" else None
        if foreign is not None:
            self._refuse(
                f"it may have effects outside of itself, which a run on trial would have too: {foreign}. If it has "
                "none, set trace=True (flex.trace: true in a recipe)"
            )
            return time.perf_counter() - started
        forward = self._trace(args, kwargs, shape.has_padding)
        if forward is not None:
            self.has_traced = True
            if len(self._traced) >= _MAX_TRACED:
                self._traced.clear()
            self._traced.add(shape)
            profile.observe(shape, forward.trace, forward.routed_pairs)
            self._loss.trace(shape, forward.inside_bytes, forward.after_bytes)
        return time.perf_counter() - started

    def _trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], has_padding: bool) -> SymbolicForward | None:
        """A trace with estimated times; None where it is refused."""
        streams = RandomStreams(self._device)
        symbolic: SymbolicModel | None = None
        leftovers: Leftovers | None = None
        forward: SymbolicForward | None = None
        try:
            # A new twin each time (they are rare): training flags, frozen parameters and adapters may have changed.
            symbolic = SymbolicModel(
                self._model, self._device, has_fused_attention=self._device.type == "cuda", find=self._map.in_copy
            )
            leftovers = symbolic.leftovers()
            forward = symbolic.trace(args, kwargs, has_padding=has_padding)
            forward.set_seconds(self._seconds_of)
        except Exception as error:  # a user's forward may fail in any way on tensors without data; said, not hidden
            self._refuse(f"it cannot be traced on shapes alone ({type(error).__name__}: {error})")
            _forget_frames(error)
        finally:
            symbolic = None
            streams.restore()
            # What is left of the twin: copies of its weights that an autocast around this forward keeps, and reference
            # cycles, as in any module with bound methods put on it.
            torch.clear_autocast_cache()
            gc.collect()
            if self._device.type == "cpu":
                trim_freed_memory()  # resident memory is what the micro-batch starts from
        left = None if leftovers is None else leftovers.take_out()
        if left is not None:
            self._refuse(left)
        return forward

    def _refuse(self, reason: str) -> None:
        """Trace no more, and say so once."""
        if self.refusal is None:
            self.refusal = reason
            _LOG.warning(
                "Activation sizes of %s are learnt from real micro-batches: %s", type(self._model).__name__, reason
            )

    def _seconds_of(self, work: Work) -> float:
        """A first guess at an operator's time, until a real run has measured it."""
        if self._speed is None:
            self._speed = _probe(self._device)
        flops_per_second, bytes_per_second = self._speed
        return max(work.flops / flops_per_second, work.moved_bytes / bytes_per_second) + _LAUNCH_SECONDS


def _forget_frames(error: Exception) -> None:
    """The frames of what has failed hold the twin's tensors."""
    failed: BaseException | None = error
    while failed is not None:
        traceback.clear_frames(failed.__traceback__)
        failed = failed.__cause__ or failed.__context__


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
