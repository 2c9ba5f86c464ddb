"""Parameter gradients as memory: which ones a backward has still to allocate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from operator import attrgetter
from typing import Any

from torch import nn

from flex_trainer.activations.identity import local_part
from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.models.discovery import ModelMap
from flex_trainer.models.sharding import gradient_dtype, sharded_parameters, units_of, whole_bytes

_requires_grad = attrgetter("requires_grad")


class Gradients:
    """Looks at a model's trainable parameters, by layer."""

    def __init__(self, model: nn.Module, model_map: ModelMap) -> None:
        layer_of: dict[int, int] = {}
        for operator in model_map.layers:
            for parameter in operator.module.parameters():
                layer_of.setdefault(id(parameter), operator.site.layer)
        self._layers: dict[int, list[tuple[nn.Parameter, int]]] = defaultdict(list)
        self._sharded: dict[int, list[tuple[_Sharded, int, int]]] = defaultdict(list)
        sharded = sharded_parameters(model) if units_of(model) else {}
        for name, parameter in model.named_parameters():
            layer = layer_of.get(id(parameter), -1)
            if name in sharded:
                group, _ = sharded[name]
                one, local = _Sharded(*sharded[name]), local_part(parameter)
                all_bytes = whole_bytes(parameter, gradient_dtype(group, parameter))
                self._sharded[layer].append((one, local.numel() * local.element_size(), all_bytes))
            else:
                self._layers[layer].append((parameter, parameter.numel()))
        self._parameters = [parameter for parameters in self._layers.values() for parameter, _ in parameters]
        self._last: tuple[tuple[Hashable, list[bool]], list[int], GradientBytes] | None = None

    def now(self, trained: Hashable = None) -> GradientBytes:
        """Gradient bytes that do not exist yet, and the largest one of each layer that does. The same object as before
        where the same gradients exist.

        Args:
            trained: stands for which parameters are trained, where that was looked at already.
        """
        # Thousands, before every micro-batch: so one quick look at each tells whether anything is different.
        trained = bytes(map(_requires_grad, self._parameters)) if trained is None else trained
        state = trained, [one.grad is None for one in self._parameters]
        sharded = [one.pending_bytes(local, whole) for parts in self._sharded.values() for one, local, whole in parts]
        if self._last is None or (state, sharded) != self._last[:2]:
            self._last = state, sharded, self._look()
        return self._last[2]

    def _look(self) -> GradientBytes:
        pending: dict[int, int] = {}
        temporary: dict[int, int] = {}
        for layer, parameters in self._layers.items():
            pending_bytes = temporary_bytes = 0
            for parameter, num_elements in parameters:
                if not parameter.requires_grad:
                    continue
                num_bytes = num_elements * parameter.element_size()
                if parameter.grad is None:
                    pending_bytes += num_bytes
                elif num_bytes > temporary_bytes:
                    temporary_bytes = num_bytes
            pending[layer], temporary[layer] = pending_bytes, temporary_bytes
        for layer, parameters in self._sharded.items():
            for one, local_bytes, all_bytes in parameters:
                # What is added to an existing gradient comes with the unit's gathered weights and is counted there.
                pending[layer] = pending.get(layer, 0) + one.pending_bytes(local_bytes, all_bytes)
            temporary.setdefault(layer, 0)
        return GradientBytes(pending, temporary)


class _Sharded:
    """The gradient of a parameter that FSDP2 shards: whole on every rank until it is reduced."""

    def __init__(self, group: Any, parameter: Any) -> None:
        self._group = group
        self._parameter = parameter

    def pending_bytes(self, local_bytes: int, all_bytes: int) -> int:
        sharded = self._parameter.sharded_param
        if not sharded.requires_grad:
            return 0
        if not self._group.reduce_grads:  # accumulation with gradient synchronization off
            return 0 if self._parameter.unsharded_accumulated_grad is not None else all_bytes
        return local_bytes if sharded.grad is None else 0
