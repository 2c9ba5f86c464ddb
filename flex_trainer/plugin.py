"""FlexPlugin: the same for a plain Accelerate loop.

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    flex = FlexPlugin(FlexConfig(memory_limit="12GiB"))
    flex.attach(accelerator)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step(); optimizer.zero_grad()
    flex.detach()

Accelerate has no registry for plugins of others (a foreign handler in `kwargs_handlers` raises a KeyError), so this one
is attached to the accelerator after `prepare`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from torch import nn

from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError
from flex_trainer.runtime import FlexRuntime
from flex_trainer.undo import replace_attribute


class FlexPlugin:
    """Attaches a FlexRuntime to an Accelerator and a model.

    Args:
        config: the settings; read from the device when None.
    """

    def __init__(self, config: FlexConfig | None = None) -> None:
        self.runtime = FlexRuntime(config)
        self._undo: list[Callable[[], None]] = []

    @property
    def is_attached(self) -> bool:
        return self.runtime.is_attached

    def attach(self, accelerator: Accelerator, model: nn.Module | None = None) -> FlexRuntime:
        """Manage the activations of `model`, or of the one model that `accelerator` has prepared.

        Raises:
            ValueError: no model or several were prepared and none is given; and what `FlexRuntime.attach` raises.
        """
        if model is None:
            prepared = accelerator._models
            if len(prepared) != 1:
                raise UserError(
                    f"the accelerator has prepared {len(prepared)} models; call attach after accelerator.prepare, or "
                    "name the model to manage: attach(accelerator, model)"
                )
            model = prepared[0]
        unwrapped = accelerator.unwrap_model(model)
        self.runtime.attach(unwrapped)
        self._undo.append(self.runtime.detach)
        self._wrap_backward(accelerator)
        return self.runtime

    def detach(self) -> None:
        """Give model and accelerator back as they were.

        Several plugins on one accelerator, each with a model of its own, may be detached in any order.

        Raises:
            ValueError: the seed profile cannot be written; all is given back all the same.
        """
        while self._undo:
            self._undo.pop()()

    def _wrap_backward(self, accelerator: Accelerator) -> None:
        original = accelerator.backward

        @functools.wraps(original)
        def backward(loss: Any, **kwargs: Any) -> None:
            if not self.is_attached:  # called by another plugin that was attached later and is there still
                original(loss, **kwargs)
                return
            with self.runtime.backward():
                original(loss, **kwargs)
            if accelerator.sync_gradients:
                self.runtime.step += 1

        self._undo.append(replace_attribute(accelerator, "backward", backward))
