"""Puts the engine between a model and its operators, and takes it out again.

A module's `forward` is replaced on the instance (whatever was there is called, so earlier replacements keep working).
The attention core and the experts are functions that modules look up in transformers' registries at every call; the
lookup is wrapped on the registry instance while any model is instrumented.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.cache_utils import Cache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from flex_trainer.activations.context import current_scope
from flex_trainer.activations.leaves import tensors_of
from flex_trainer.activations.model_tensors import modules_of
from flex_trainer.activations.routed import as_routed
from flex_trainer.activations.scope import Scope
from flex_trainer.experts.dispatch import dispatcher_of
from flex_trainer.models.discovery import ModelMap, Operator
from flex_trainer.models.effects import forward_hooks, is_of_library
from flex_trainer.models.expert_parallel import ManagedOperators
from flex_trainer.models.experts import part_sites, run_in_scope, split_experts_forward
from flex_trainer.models.routing import NoListener, Routing, RoutingListener, top_k_index_of
from flex_trainer.strategy import Site
from flex_trainer.undo import replace_attribute

Outside = Callable[[Site, tuple[Any, ...], dict[str, Any]], AbstractContextManager[Scope] | None]
"""Asked for a scope when an operator is run while no micro-batch is in forward on this thread; None: run it plainly."""


_HELD: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_instrumented(module: nn.Module) -> bool:
    """Whether the engine has its hold on this operator now."""
    return module in _HELD


def _stays_outside(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


def _in_scope(
    run: Callable[[Scope, tuple[Any, ...], dict[str, Any]], Any],
    plain: Callable[..., Any],
    site: Site,
    outside: Outside,
    *,
    may_pass: bool = False,
) -> Callable[..., Any]:
    """A forward that runs in the scope there is, or in the one that `outside` opens, or plainly.

    Args:
        may_pass: whether `plain` is all there is to do where the scope looks at nothing.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope is not None:
            if may_pass and scope.begin_unwatched(site):
                return plain(*args, **kwargs)
            if scope.is_on_top():
                return run(scope, args, kwargs)
            return plain(*args, **kwargs)  # to other hooks for saved tensors
        opened = outside(site, args, kwargs)
        if opened is None:
            return plain(*args, **kwargs)
        with opened as scope:
            return run(scope, args, kwargs)

    return forward


class Instrumentation:
    """The engine's hold on one model; `remove()` restores everything.

    Args:
        listener: hears of the routing of every layer.
        outside: what to do with operators that are run while no micro-batch is in forward; plainly, by default.
    """

    def __init__(
        self,
        model: nn.Module,
        model_map: ModelMap,
        listener: RoutingListener | None = None,
        outside: Outside = _stays_outside,
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        self._held = [operator.module for operator in model_map.operators if operator.module not in _HELD]
        _HELD.update(self._held)
        self._outside = outside
        try:
            self._install(model, model_map, listener or NoListener())
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Give the model and the registries back as they were."""
        while self._undo:
            self._undo.pop()()
        for module in self._held:
            _HELD.discard(module)
        self._held = []

    def _install(self, model: nn.Module, model_map: ModelMap, listener: RoutingListener) -> None:
        expert_sites = {
            operator.module: part_sites(operator.site)
            for operator in model_map.experts
            if dispatcher_of(operator.module) is None
        }
        guarded_sites: list[_GuardedSite] = []
        for operator in model_map.operators:
            dispatcher = dispatcher_of(operator.module)
            if dispatcher is not None:
                managed = ManagedOperators(operator.module, operator.site, listener)
                self._undo.append(replace_attribute(dispatcher, "operators", managed))
                continue
            guarded = _GuardedSite(operator, model_map.repeatable)
            guarded_sites.append(guarded)
            parts = set(operator.module.modules())
            inside = {module: sites for module, sites in expert_sites.items() if module in parts}
            if operator.site.kind == "experts":
                self._replace_forward(operator.module, self._experts_forward(operator, guarded, inside, listener))
            else:
                self._replace_forward(operator.module, _module_forward(operator, guarded, inside, self._outside))
        attention_sites = {
            operator.module: Site(f"{operator.site.name}.core", "attention_core", operator.site.layer)
            for operator in model_map.operators
            if operator.site.kind == "attention"
        }
        self._undo.append(_REGISTRIES.add(attention_sites, expert_sites))
        self._wrap_loss(model)
        around_routers = model_map.modules_around_routers()
        for guarded in guarded_sites:
            guarded.remember_code(around_routers)

    def _replace_forward(self, module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = module.forward
        self._undo.append(replace_attribute(module, "forward", functools.wraps(original)(make(original))))

    def _experts_forward(
        self,
        operator: Operator,
        guarded: _GuardedSite,
        sites: dict[nn.Module, dict[str, Site]],
        listener: RoutingListener,
    ) -> Callable[..., Callable[..., Any]]:
        site, module = operator.site, operator.module
        outside = self._outside

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                top_k_index = top_k_index_of(args, kwargs)
                if top_k_index is not None:
                    # Another dispatch than ours gets ids of all ranks' experts here, and tells nothing of what comes.
                    is_spread = bool(getattr(module, "_is_expert_parallel", False))
                    num_experts = 0 if is_spread else int(getattr(module, "num_experts", 0) or 0)
                    listener.on_routed(site, Routing.local(top_k_index, num_experts))
                # Backward may come after `remove`, and a recomputation has to take the very steps of this run.
                function = functools.partial(_REGISTRIES.run_split, sites, original)
                return guarded.run(scope, function, args, kwargs)

            return _in_scope(run, original, site, outside)

        return make

    def _wrap_loss(self, model: nn.Module) -> None:
        """Make the loss function an operator, where there is one to set."""
        # A wrapper such as PEFT's hands reads through to the model inside, but not writes.
        owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if owner is None:
            return
        original = owner.loss_function
        site, outside = Site("loss", "loss", -1), self._outside

        def run(scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return scope.run(site, original, *args, **kwargs)

        # The property loss_function reads this attribute before it looks up the configured loss.
        loss_function = _in_scope(run, original, site, outside)
        self._undo.append(replace_attribute(owner, "_loss_function", loss_function))


class _GuardedSite:
    """Says whether a module may be recomputed in this forward, by the site that it gives it.

    A recomputation must find the module as the first run did, and change nothing. Kept in its first forward, unless a
    trace has shown before how it is: a module with buffers, and every layer. Kept for good: one that writes into its
    buffers (counters, running statistics), or a layer that writes into its inputs. Kept each time: a module that is
    given a cache, which would be written twice; a layer whose code was exchanged since the model was attached, or with
    hooks of users at its router. They may have effects, such as to hand out recorded choices by call order.

    Args:
        repeatable: what was found out, by site name (`ModelMap.repeatable`).
    """

    def __init__(self, operator: Operator, repeatable: dict[str, bool]) -> None:
        self._site = operator.site
        self._kept = replace(operator.site, is_recomputable=False)
        self._module = operator.module
        self._repeatable = repeatable
        self._code: list[Any] = []  # of a layer
        self._around_routers: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._has_foreign_hooks = False
        self._now: Site | None = None
        """None: not known yet."""
        if not operator.site.is_recomputable or (operator.site.kind != "layer" and not self._buffers()):
            self._now = self._site

    def run(self, scope: Scope, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._now is None and self._site.name in self._repeatable:
            self._now = self._site if self._repeatable[self._site.name] else self._kept
        site = self._now
        if site is None:
            return self._run_first(scope, function, args, kwargs)
        if site.is_recomputable and scope.is_watching and (_has_cache(args, kwargs) or self._has_other_code()):
            site = self._kept
        return scope.run(site, function, *args, **kwargs)

    def _run_first(
        self, scope: Scope, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Versions alone do not show a write through `.data`.
        before = [(buffer, buffer._version, buffer.detach().clone()) for buffer in self._buffers()]
        given = [(tensor, tensor._version) for tensor in tensors_of(args, kwargs) if not tensor.is_inference()]
        # In a trace nothing is recomputed, and what it finds out is put right when it has ended.
        is_trace = any(isinstance(tensor, FakeTensor) for tensor in self._module.parameters())
        may_repeat = is_trace and not _has_cache(args, kwargs) and not self._has_other_code()
        site = self._site if may_repeat else self._kept
        result = scope.run(site, function, *args, **kwargs)
        now = self._buffers()
        self._repeatable[self._site.name] = (
            len(now) == len(before)
            and all(
                buffer is first and buffer._version == version and _is_equal(buffer, content)
                for buffer, (first, version, content) in zip(now, before, strict=True)
            )
            and all(tensor._version == version for tensor, version in given)
        )
        return result

    def remember_code(self, around_routers: set[nn.Module]) -> None:
        """What a layer's code is once the model is instrumented: what differs later was exchanged."""
        if self._site.kind == "layer" and self._site.is_recomputable:
            self._code = self._code_now()
            self._around_routers = [part for part in self._module.modules() if part in around_routers]

    def _has_other_code(self) -> bool:
        if not self._code:
            return False
        hooks = forward_hooks(self._around_routers)
        if hooks != self._hooks:  # whose they are takes long to find out
            self._hooks, self._has_foreign_hooks = hooks, not all(map(is_of_library, hooks))
        return self._has_foreign_hooks or self._code_now() != self._code

    def _code_now(self) -> list[Any]:
        return [(vars(part).get("forward"), type(part).forward) for part in modules_of(self._module)]

    def _buffers(self) -> list[torch.Tensor]:
        return list(self._module.buffers())


def _has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in args:
        if isinstance(value, Cache):
            return True
    return bool(kwargs) and any(isinstance(value, Cache) for value in kwargs.values())


def _is_equal(buffer: torch.Tensor, content: torch.Tensor) -> bool:
    return isinstance(buffer, FakeTensor) or torch.equal(buffer, content)  # a trace on shapes alone has no contents


def _module_forward(
    operator: Operator, guarded: _GuardedSite, experts: dict[nn.Module, dict[str, Site]], outside: Outside
) -> Callable[..., Callable[..., Any]]:
    """`experts`: those inside that are cut into operators."""
    is_layer, is_router = operator.site.kind == "layer", operator.site.is_router

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        # As with experts: the very steps of the first run, whenever backward comes.
        function = functools.partial(_REGISTRIES.run_split, experts, original) if experts else original
        if is_router:
            function = functools.partial(_route, operator.site.name, original)

        def run(scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = guarded.run(scope, function, args, kwargs)
            if is_layer:
                scope.sweep()
            return result

        return _in_scope(run, function, operator.site, outside, may_pass=not is_layer)

    return make


def _route(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a router; in a recomputation of what is around it, the first run's results come out."""
    return as_routed(name, original(*args, **kwargs))


class _Registries:
    """Wraps the two registries' lookups while any model is instrumented."""

    def __init__(self) -> None:
        self._attention: weakref.WeakKeyDictionary[nn.Module, Site] = weakref.WeakKeyDictionary()
        self._experts: weakref.WeakKeyDictionary[nn.Module, dict[str, Site]] = weakref.WeakKeyDictionary()
        self._num_models = 0
        self._undo: list[Callable[[], None]] = []

    def add(self, attention: dict[nn.Module, Site], experts: dict[nn.Module, dict[str, Site]]) -> Callable[[], None]:
        self._attention.update(attention)
        self._experts.update(experts)
        self._num_models += 1
        if self._num_models == 1:
            for registry, wrapped in (
                (ALL_ATTENTION_FUNCTIONS, self._get_attention),
                (ALL_EXPERTS_FUNCTIONS, self._get_experts),
            ):
                lookup = functools.partial(wrapped, registry.get_interface)
                self._undo.append(replace_attribute(registry, "get_interface", lookup))

        def remove() -> None:
            for module in attention:
                self._attention.pop(module, None)
            for module in experts:
                self._experts.pop(module, None)
            self._num_models -= 1
            while self._undo and self._num_models == 0:
                self._undo.pop()()

        return remove

    def run_split(
        self,
        sites: dict[nn.Module, dict[str, Site]],
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a forward with the products of the experts inside cut into operators, also when the model is attached no
        more."""
        if all(module in self._experts for module in sites):
            return function(*args, **kwargs)
        remove = self.add({}, sites)
        try:
            return function(*args, **kwargs)
        finally:
            remove()

    def _get_attention(
        self, lookup: Callable[..., Callable[..., Any]], attn_implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        function = lookup(attn_implementation, default)

        def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            scope, site = current_scope(), self._attention.get(module)
            if scope is None or site is None or scope.begin_unwatched(site):
                return function(module, *args, **kwargs)
            return scope.run(site, functools.partial(function, module), *args, **kwargs)

        return attention

    def _get_experts(
        self, lookup: Callable[..., Callable[..., Any]], experts_implementation: str, default: Callable[..., Any]
    ) -> Callable[..., Any]:
        function = lookup(experts_implementation, default)
        if experts_implementation != "grouped_mm":
            return function

        def experts(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            sites = self._experts.get(module)
            if sites is None:
                return function(module, *args, **kwargs)
            # Also without a scope: a recomputation has to take the very steps of the first run.
            return split_experts_forward(module, functools.partial(run_in_scope, sites), *args, **kwargs)

        return experts


_REGISTRIES = _Registries()
