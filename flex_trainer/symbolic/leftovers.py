"""What a trace has left behind: a forward that keeps tensors outside of its module was given some without data."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flex_trainer.errors import UserError

_LOG = logging.getLogger(__name__)
_MAX_SHOWN = 3
_MAPPINGS = (dict, defaultdict, OrderedDict)
_SEQUENCES = (list, deque)
_MAX_DEPTH = 3
"""Tuples in containers that are looked for."""
_MAX_PASSES = 3
"""The collector loses sight of some tables until it has run again."""


class TraceLeftBehindError(UserError):
    """The model's forward keeps tensors outside of its module, and was given some without data to keep."""


class Leftovers:
    """Watches over the tensors of one twin. It keeps none of them alive."""

    def __init__(self, mode: FakeTensorMode, twin: nn.Module) -> None:
        self._mode = weakref.ref(mode)
        self._modules = [weakref.ref(module) for module in twin.modules()]

    def take_out(self) -> str | None:
        """Call once the twin is no longer needed, and garbage has been collected. Takes tensors of the trace out of the
        lists, sets and tables that they were added to, and says why the model should not be traced again.

        Where modules of the twin are still alive (a method's cache that is keyed by `self`, a registry of modules),
        what is left most likely hangs on them, and only a warning is given.

        Raises:
            TraceLeftBehindError: some are bound to names (of a Python module, a class, another object), which had other
                values before, and none of the twin's modules is alive.
        """
        left = self._left()
        if not left:
            return None
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in left[:_MAX_SHOWN])
        found = f"{len(left)} of shapes {shapes}{' ...' if len(left) > _MAX_SHOWN else ''}"
        if any(module() is not None for module in self._modules):
            _LOG.warning(
                "A run of the model's copy on tensors without data left some of them behind (%s), in something that is "
                "kept outside of the module. If the forward fails on one of them, set trace=false (flex.trace).",
                found,
            )
            return None
        for _ in range(_MAX_PASSES):
            for number in range(len(left)):
                _take_out(left[number], left, 0)
            left.clear()
            gc.collect()
            left = self._left()
            if not left:
                return (
                    "its forward keeps tensors outside of its module, and a run on trial with tensors without data put "
                    f"{found} there; they were taken out again. Set trace=false (flex.trace in a recipe)"
                )
        raise TraceLeftBehindError(
            f"the model's forward keeps tensors outside of its module: it was given some without data on trial, and "
            f"{found} are still in a cache, a class attribute or a global name. Keep them in the module, or set "
            "trace=false (flex.trace in a recipe) and start anew."
        )

    def _left(self) -> list[FakeTensor]:
        mode = self._mode()
        if mode is None:  # every one of them would keep it alive
            return []
        # It may also be the twin that keeps the mode alive, through its parameters: those are not counted.
        alive = [thing for thing in gc.get_objects() if type(thing) is FakeTensor and thing.fake_mode is mode]
        return [tensor for tensor in alive if not getattr(tensor, "_is_param", False)]


def _take_out(thing: Any, ours: list[FakeTensor], depth: int) -> None:
    """Take a tensor, or a tuple that has one, out of the containers that hold it."""
    for holder in gc.get_referrers(thing):
        if holder is ours:
            continue
        if type(holder) in _SEQUENCES:
            kept = [item for item in holder if item is not thing]
            holder.clear()
            holder.extend(kept)
        elif type(holder) in _MAPPINGS and not _is_namespace(holder):
            for key in [key for key, value in holder.items() if value is thing]:
                del holder[key]
        elif type(holder) is set:
            holder.discard(thing)
        elif type(holder) is tuple and depth < _MAX_DEPTH:
            _take_out(holder, ours, depth + 1)


def _is_namespace(table: dict[Any, Any]) -> bool:
    """Whether a table holds the names of a Python module, a class or another object."""
    return "__builtins__" in table or any(
        isinstance(owner, type) or getattr(owner, "__dict__", None) is table
        for owner in gc.get_referrers(table)
        if not isinstance(owner, dict)
    )
