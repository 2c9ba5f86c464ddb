"""Finds the operators of an unmodified Hugging Face model.

Nothing here knows a class name of a family. Decoder layers are the `GradientCheckpointingLayer`s that transformers
makes of them; expert blocks are what the model's own expert-parallel plan sends to `ep_dispatch_experts`, and what
carries the experts interface; routers are the small matrices beside the experts; the rest follows from the module tree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    _CHECKPOINT_PREFIX,
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
)

from flex_trainer.compat import DecoderLayer
from flex_trainer.errors import UserError
from flex_trainer.strategy import Site

_ATTENTION_NAME = re.compile(r"attn|attention|mixer|mamba|conv|delta|linear_att", re.IGNORECASE)
_ROUTER_NAME = re.compile(r"^gate$|router", re.IGNORECASE)


@dataclass(frozen=True)
class Operator:
    """A module and the site that stands for it."""

    module: nn.Module
    site: Site


@dataclass(frozen=True)
class ModelMap:
    """All operators of a model."""

    operators: tuple[Operator, ...]
    layers: tuple[Operator, ...]
    experts: tuple[Operator, ...]
    repeatable: dict[str, bool] = field(default_factory=dict, compare=False)
    """By site name, once it has run: whether a block can be run again, as it changes neither its buffers nor what it is
    given. Shared with copies, so what a trace finds out holds in the first real forward."""

    def modules_around_routers(self) -> set[nn.Module]:
        """Routers, what is inside of them, and what encloses one within its layer: code there runs a second time only
        where the whole layer is recomputed."""
        routers = {operator.module for operator in self.operators if operator.site.is_router}
        found = {part for router in routers for part in router.modules()}
        for layer in self.layers:
            parts = (part for part in layer.module.modules() if part is not layer.module)
            found.update(part for part in parts if not routers.isdisjoint(part.modules()))
        return found

    def with_kept(self, is_kept: Callable[[Operator], bool]) -> ModelMap:
        """The same operators, where some are not recomputed."""

        def kept(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
            return tuple(
                replace(one, site=replace(one.site, is_recomputable=False)) if is_kept(one) else one
                for one in operators
            )

        return ModelMap(kept(self.operators), kept(self.layers), kept(self.experts), self.repeatable)

    def in_copy(self, model: nn.Module) -> ModelMap:
        """The same operators in a copy of the model."""
        modules = dict(model.named_modules())

        def copied(operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
            return tuple(Operator(modules[operator.site.name], operator.site) for operator in operators)

        return ModelMap(copied(self.operators), copied(self.layers), copied(self.experts), self.repeatable)


def discover(model: nn.Module) -> ModelMap:
    """List the operators and blocks of `model`, outermost first within a layer.

    Raises:
        ValueError: the model has no decoder layers.
    """
    names = {module: name for name, module in model.named_modules()}
    layers = [module for module in names if isinstance(module, DecoderLayer)] or _no_split_layers(model)
    if not layers:
        raise UserError(
            f"{type(model).__name__} has no decoder layers: none of its modules is a transformers"
            " GradientCheckpointingLayer and none is named in _no_split_modules. FlexTrainer manages the activations of"
            f" such layers. The model has {_inventory(names)}. Name the class of its layers in _no_split_modules, or"
            " use transformers' Trainer for this model."
        )
    experts = set(find_experts(model))
    walk = _Walk(names, experts)
    for index, layer in enumerate(layers):
        walk.layer(layer, index)
    walk.outside(model)
    operators = tuple(walk.found)
    return ModelMap(
        operators=operators,
        layers=tuple(operator for operator in operators if operator.site.kind == "layer"),
        experts=tuple(operator for operator in operators if operator.site.kind == "experts"),
    )


def _inventory(modules: Iterable[nn.Module]) -> str:
    """The classes of the modules that have modules inside, else of all, with how many there are."""
    found = list(modules)
    counts = Counter(type(module).__name__ for module in found[1:] if any(True for _ in module.children()))
    counts = counts or Counter(type(module).__name__ for module in found)
    return ", ".join(f"{number} {name}" for name, number in counts.most_common(12))


def find_experts(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that compute all experts of a layer: from the expert-parallel plan and from the experts interface."""
    plan = dict(getattr(model, "ep_plan", None) or {})
    patterns = [
        re.compile(r"(^|\.)" + re.escape(key).replace(r"\*", r"\d+") + "$")
        for key, style in plan.items()
        if style == "ep_dispatch_experts"
    ]
    for name, module in model.named_modules():
        # Adapters on fused weights are put on in the forward of a module around the experts: that is the operator.
        get_base = getattr(module, "get_base_layer", None)
        experts = get_base() if callable(get_base) else module
        # The decorator use_experts_implementation leaves these two on every experts class.
        has_interface = hasattr(type(experts), "_apply_gate") and hasattr(experts, "has_gate")
        if has_interface or any(pattern.search(_without_wrappers(name)) for pattern in patterns):
            yield module


def _no_split_layers(model: nn.Module) -> list[nn.Module]:
    """Layers by the names that the model itself gives as units of placement (models outside of transformers)."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in classes]


class _Walk:
    """One pass over the module tree that collects operators."""

    def __init__(self, names: dict[nn.Module, str], experts: set[nn.Module]) -> None:
        self.found: list[Operator] = []
        self._names = names
        self._experts = experts
        self._seen: set[nn.Module] = set()

    def layer(self, layer: nn.Module, index: int) -> None:
        at = len(self.found)
        self._add(layer, "layer", index, is_block=True)
        children = list(_children(layer))
        has_experts = any(child in self._experts for _, child in children)
        for name, child in children:
            if has_experts and _is_router_name(name):  # router and experts may stand in the layer itself
                self._add(child, "router", index, is_recomputable=False)
            else:
                self._part(name, child, index)
        # With experts but no router found, decisions could not be held.
        has_routers = any(found.site.is_router for found in self.found[at:])
        is_own = at < len(self.found) and self.found[at].module is layer
        if is_own and not has_routers and any(part in self._experts for part in layer.modules()):
            self.found[at] = Operator(layer, replace(self.found[at].site, is_recomputable=False))

    def outside(self, model: nn.Module) -> None:
        """The final norm and the output head."""
        get_head = getattr(model, "get_output_embeddings", None)
        head = get_head() if callable(get_head) else None
        for module in self._names:
            if module not in self._seen and _is_norm(module) and self._is_beside_layers(module):
                self._add(module, "final_norm", -1)
        if isinstance(head, nn.Module) and head not in self._seen:
            self._add(head, "lm_head", -1)

    def _is_beside_layers(self, module: nn.Module) -> bool:
        """Whether the module's parent also holds the list of decoder layers."""
        layers = [self._names[found.module] for found in self.found if found.site.kind == "layer"]
        beside = {_parent(_parent(_without_wrappers(name))) for name in layers}
        return _parent(_without_wrappers(self._names[module])) in beside

    def _part(self, name: str, module: nn.Module, layer: int) -> None:
        """A child of a decoder layer."""
        if isinstance(module, nn.ModuleList):  # several of a kind in one layer
            for _, child in _children(module):
                self._part(name, child, layer)
        elif any(part in self._experts for part in module.modules()):
            self._moe(module, layer)
        elif _is_norm(module):
            self._add(module, "norm", layer)
        elif _ATTENTION_NAME.search(name) or "Attention" in type(module).__name__:
            self._block(module, "attention", layer)
        elif any(True for _ in module.children()) and any(True for _ in module.parameters()):
            self._block(module, "mlp", layer)
        elif any(True for _ in module.parameters()):
            self._add(module, "linear", layer)

    def _moe(self, module: nn.Module, layer: int) -> None:
        """A Mixture-of-Experts block: experts, router, and what else stands beside them."""
        if module in self._experts:
            self._add(module, "experts", layer, is_block=True)
            return
        for name, child in _children(module):
            if any(part in self._experts for part in child.modules()):
                self._moe(child, layer)
            elif _is_router_name(name):
                self._add(child, "router", layer, is_recomputable=False)
            elif _is_norm(child):
                self._add(child, "norm", layer)
            elif any(True for _ in child.children()):
                self._block(child, "shared_experts", layer)
            elif any(True for _ in child.parameters()):
                self._add(child, "linear", layer)

    def _block(self, module: nn.Module, kind: str, layer: int) -> None:
        """A block and the operators that are its children.

        What looks like an MLP or attention may be a Mixture-of-Experts of a kind that `find_experts` does not know:
        with a router inside, it is not recomputed.
        """
        self._add(module, kind, layer, is_block=True, is_recomputable=not _has_router(module))
        for name, child in _children(module):
            if _is_router_name(name) or _has_router(child):
                self._add(child, "router", layer, is_recomputable=False)
                continue
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or not any(True for _ in child.parameters()):
                if name.startswith("act"):
                    self._add(child, "activation", layer)
                continue
            self._add(child, "norm" if _is_norm(child) else "linear", layer)

    def _add(
        self, module: nn.Module, kind: str, layer: int, *, is_block: bool = False, is_recomputable: bool = True
    ) -> None:
        if module in self._seen:  # a module shared between layers keeps its first site
            return
        self._seen.add(module)
        self.found.append(Operator(module, Site(self._names[module], kind, layer, is_block, is_recomputable)))


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module's children by name; of those in torch's wrappers for checkpointing, what is inside."""
    for name, child in module.named_children():
        while isinstance(child, ActivationWrapper):
            child = child._checkpoint_wrapped_module
        yield name, child


def _without_wrappers(name: str) -> str:
    return name.replace(f".{_CHECKPOINT_PREFIX}", ".").removesuffix(f".{_CHECKPOINT_WRAPPED_MODULE}")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_router_name(name: str) -> bool:
    return bool(_ROUTER_NAME.search(name)) and "shared" not in name


def _has_router(module: nn.Module) -> bool:
    return any(_is_router_name(name.rpartition(".")[2]) for name, _ in module.named_modules() if name)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not any(True for _ in module.children())
