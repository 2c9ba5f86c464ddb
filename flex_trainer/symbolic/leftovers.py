"""What a trace has left behind: a forward that keeps tensors outside of its module was given some without data."""

from __future__ import annotations

import gc
import weakref

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flex_trainer.errors import UserError

_MAX_SHOWN = 3


class TraceLeftBehindError(UserError):
    """The model's forward keeps tensors outside of its module, and was given some without data to keep."""


class Leftovers:
    """Watches over the tensors of one twin. It keeps none of them alive."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = weakref.ref(mode)

    def check(self) -> None:
        """Call once the twin is gone and garbage has been collected.

        Raises:
            TraceLeftBehindError: tensors are still alive.
        """
        mode = self._mode()
        if mode is None:  # every one of them would keep it alive
            return
        alive = [thing for thing in gc.get_objects() if type(thing) is FakeTensor and thing.fake_mode is mode]
        # Parameters of the twin may be alive through what was left; they are not what the forward keeps.
        left = [tensor for tensor in alive if not getattr(tensor, "_is_param", False)]
        if left:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in left[:_MAX_SHOWN])
            raise TraceLeftBehindError(
                f"the model's forward keeps tensors outside of its module (of {len(left)} that it was given on trial, "
                f"of shapes {shapes}{' ...' if len(left) > _MAX_SHOWN else ''}, some are in a list, a cache or a class "
                "attribute). Keep them in the module, or set trace=false (flex.trace in a recipe) and start anew."
            )
