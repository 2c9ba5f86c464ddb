"""Parameter gradients as memory: which ones a backward has still to allocate."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.models.discovery import ModelMap


class Gradients:
    """Looks at a model's trainable parameters, by layer."""

    def __init__(self, model: nn.Module, model_map: ModelMap) -> None:
        self._layers: dict[int, list[nn.Parameter]] = defaultdict(list)
        layer_of: dict[nn.Parameter, int] = {}
        for operator in model_map.layers:
            for parameter in operator.module.parameters():
                layer_of.setdefault(parameter, operator.site.layer)
        for parameter in model.parameters():
            self._layers[layer_of.get(parameter, -1)].append(parameter)

    def now(self) -> GradientBytes:
        """Gradient bytes that do not exist yet, and the largest one of each layer that does."""
        pending: dict[int, int] = {}
        temporary: dict[int, int] = {}
        for layer, parameters in self._layers.items():
            trainable = [parameter for parameter in parameters if parameter.requires_grad]
            pending[layer] = sum(p.numel() * p.element_size() for p in trainable if p.grad is None)
            temporary[layer] = max((p.numel() * p.element_size() for p in trainable if p.grad is not None), default=0)
        return GradientBytes(pending, temporary)
