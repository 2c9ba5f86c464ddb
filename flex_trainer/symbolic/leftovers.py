"""What a trace has left behind: a forward that keeps tensors outside of its module was given some without data."""

from __future__ import annotations

import gc
import logging
import weakref

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flex_trainer.errors import UserError

_LOG = logging.getLogger(__name__)
_MAX_SHOWN = 3


class TraceLeftBehindError(UserError):
    """The model's forward keeps tensors outside of its module, and was given some without data to keep."""


class Leftovers:
    """Watches over the tensors of one twin. It keeps none of them alive."""

    def __init__(self, mode: FakeTensorMode, twin: nn.Module) -> None:
        self._mode = weakref.ref(mode)
        self._modules = [weakref.ref(module) for module in twin.modules()]

    def check(self) -> None:
        """Call once nobody should need the twin, and garbage has been collected.

        Where modules of the twin are still alive (a method's cache that is keyed by `self`, a registry of modules),
        what is left most likely hangs on them, and only a warning is given.

        Raises:
            TraceLeftBehindError: tensors are alive, and none of the twin's modules is.
        """
        mode = self._mode()
        if mode is None:  # every one of them would keep it alive
            return
        # It may also be the twin that keeps the mode alive, through its parameters: those are not counted.
        alive = [thing for thing in gc.get_objects() if type(thing) is FakeTensor and thing.fake_mode is mode]
        left = [tensor for tensor in alive if not getattr(tensor, "_is_param", False)]
        if not left:
            return
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in left[:_MAX_SHOWN])
        found = f"{len(left)} of shapes {shapes}{' ...' if len(left) > _MAX_SHOWN else ''}"
        if any(module() is not None for module in self._modules):
            _LOG.warning(
                "A run of the model's copy on tensors without data left some of them behind (%s), in something that is "
                "kept outside of the module. If the forward fails on one of them, set trace=false (flex.trace).",
                found,
            )
            return
        raise TraceLeftBehindError(
            f"the model's forward keeps tensors outside of its module: it was given some without data on trial, and "
            f"{found} are still in a list, a cache or a class attribute. Keep them in the module, or set trace=false "
            "(flex.trace in a recipe) and start anew."
        )
