"""Parameter gradients as memory: which ones a backward has still to allocate."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.models.discovery import ModelMap


class Gradients:
    """Looks at a model's trainable parameters, by layer."""

    def __init__(self, model: nn.Module, model_map: ModelMap) -> None:
        layer_of: dict[nn.Parameter, int] = {}
        for operator in model_map.layers:
            for parameter in operator.module.parameters():
                layer_of.setdefault(parameter, operator.site.layer)
        self._layers: dict[int, list[tuple[nn.Parameter, int]]] = defaultdict(list)
        for parameter in model.parameters():
            self._layers[layer_of.get(parameter, -1)].append((parameter, parameter.numel()))

    def now(self) -> GradientBytes:
        """Gradient bytes that do not exist yet, and the largest one of each layer that does."""
        pending: dict[int, int] = {}
        temporary: dict[int, int] = {}
        for layer, parameters in self._layers.items():
            pending_bytes = temporary_bytes = 0
            for parameter, num_elements in parameters:  # thousands, before every micro-batch
                if not parameter.requires_grad:
                    continue
                num_bytes = num_elements * parameter.element_size()
                if parameter.grad is None:
                    pending_bytes += num_bytes
                elif num_bytes > temporary_bytes:
                    temporary_bytes = num_bytes
            pending[layer], temporary[layer] = pending_bytes, temporary_bytes
        return GradientBytes(pending, temporary)
