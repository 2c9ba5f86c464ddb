"""A model, or the part of one that a pipeline stage is, as it is managed: what is looked up once, at attach."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from flex_trainer.errors import UserError
from flex_trainer.experts.dispatch import dispatcher_of
from flex_trainer.models.discovery import ModelMap, discover
from flex_trainer.models.effects import foreign_code, forward_hooks, is_of_library
from flex_trainer.models.instrument import is_instrumented
from flex_trainer.models.sharding import (
    Units,
    gathered_bytes,
    original_class,
    refuse_unmanaged,
    units_of,
    without_recomputed_collectives,
)
from flex_trainer.provision.gradients import Gradients


@dataclass(frozen=True)
class ManagedModel:
    """What everyone who has to do with a managed model takes."""

    module: nn.Module
    map: ModelMap
    device: torch.device
    """Where its activations live."""
    modules: Mapping[str, nn.Module]
    """By site name."""
    units: Units | None
    """Units of FSDP2; None where weights are not sharded."""
    gathered_bytes: int
    """Most bytes that FSDP2 needs at one time besides what is sharded."""
    gradients: Gradients
    """Parameter gradients by layer."""
    fingerprint: str
    """Says whether what was learnt belongs to this model."""
    name: str = ""
    """Of the part, where several are managed on one device."""

    @classmethod
    def of(
        cls, module: nn.Module, device: torch.device | None = None, name: str = "", trace: str | bool = "auto"
    ) -> ManagedModel:
        """Look at a model; nothing is changed.

        Args:
            device: where the activations live; that of the first parameter when None.
            trace: as in `FlexConfig`. Layers are recomputed as a whole only if all code of the forward is of known
                libraries, or this is True.

        Raises:
            ValueError: no decoder layers, FSDP1 or tensor-parallel weights, operators that are managed already.
        """
        refuse_unmanaged(module)
        model_map = without_recomputed_collectives(discover(module))
        _refuse_managed(module, model_map)
        if (trace is not True and foreign_code(module) is not None) or _has_hooks_at_routers(model_map):
            model_map = model_map.with_kept(lambda one: one.site.kind == "layer")
        modules = {operator.site.name: operator.module for operator in model_map.operators}
        is_sharded = bool(units_of(module))
        return cls(
            module=module,
            map=model_map,
            device=device or next(module.parameters()).device,
            modules=modules,
            units=Units(module, modules) if is_sharded else None,
            gathered_bytes=gathered_bytes(module) if is_sharded else 0,
            gradients=Gradients(module, model_map),
            fingerprint=_fingerprint(module, model_map),
            name=name,
        )

    @property
    def is_spread(self) -> bool:
        """Whether tokens are exchanged with experts on other ranks."""
        return any(dispatcher_of(operator.module) is not None for operator in self.map.experts)


def _refuse_managed(module: nn.Module, model_map: ModelMap) -> None:
    """Two runtimes on one model would each plan for memory that the other one's plan has taken.

    Raises:
        ValueError: an operator of the model is managed now.
    """
    name = next((operator.site.name for operator in model_map.operators if is_instrumented(operator.module)), None)
    if name is not None:
        raise UserError(
            f"this {original_class(module).__name__} is managed already (its {name}, by another FlexPlugin, "
            "FlexTrainer or FlexRuntime); detach that one first, and attach one only to each model"
        )


def _has_hooks_at_routers(model_map: ModelMap) -> bool:
    """Whether code of others runs there with every forward. A trace's copy has no such hooks (symbolic/twin.py)."""
    return not all(map(is_of_library, forward_hooks(model_map.modules_around_routers())))


def _fingerprint(model: nn.Module, model_map: ModelMap) -> str:
    """Classes, sites and parameter shapes."""
    facts = [original_class(model).__name__, *(operator.site.name for operator in model_map.operators)]
    # What a rank's experts get, and which operators they have, follows the number of ranks.
    dispatchers = (dispatcher_of(operator.module) for operator in model_map.experts)
    facts += [f"experts on {one.num_ranks} ranks" for one in dispatchers if one is not None]
    facts += [f"{name}:{tuple(parameter.shape)}:{parameter.dtype}" for name, parameter in model.named_parameters()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
