"""A model without weights (built on torch's meta device), and the parts of it that a pipeline stage runs.

Most layers of a model are alike: what one saves and does, the others do. So only three of each kind are left in place
to be traced; the others are replaced by stand-ins that hand their input on. Three, since the first layer may differ
(the embedding's output is still there), and some models keep a little more alive with every further layer (router
scores, for one), which shows in the transient bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flex_trainer.errors import UserError
from flex_trainer.estimate.mesh import Stage
from flex_trainer.estimate.weights import Weight
from flex_trainer.experts.fake import FakeEP
from flex_trainer.launch.build import build_tokenizer, build_without_weights, check_config, model_config
from flex_trainer.launch.distribute import check_mixed_precision
from flex_trainer.launch.model_sizes import NUM_CHOSEN_NAMES
from flex_trainer.launch.recipe import Recipe
from flex_trainer.models.discovery import discover, find_experts

_PLACES = frozenset({"layer_idx", "layer_index", "layer_id", "training"})
"""Attributes in which layers of one kind differ."""
_NUM_TRACED = 3
"""Layers of each kind that are traced."""


@dataclass(frozen=True)
class Representative:
    """The traced layers that stand for one layer."""

    traced: tuple[int, ...]
    """The first of its kind, at most three."""
    number: int = 0
    """Of the layer, among those of its kind."""
    num_alike: int = 1
    """Layers of its kind."""


class Skeleton:
    """A causal language model on the meta device.

    Args:
        model: any; used as it is on the meta device, and put back after each `as_stage`.
        kept_dtype: in which weights are kept, where that is another type than they are computed with.
    """

    def __init__(self, model: PreTrainedModel, kept_dtype: torch.dtype | None = None) -> None:
        self.model = model
        self._kept_bytes = None if kept_dtype is None else kept_dtype.itemsize
        self.compute_dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.kept_dtype = kept_dtype or self.compute_dtype
        self.map = discover(model)
        names = {module: name for name, module in model.named_modules()}
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
        prefix = f"{names[decoder]}." if decoder in names and names[decoder] else ""
        own = [layer for layer in self.map.layers if layer.site.name.startswith(prefix)]
        self.layers = tuple(own or self.map.layers)
        """The decoder's layers, in order."""
        self.kinds = tuple(_kind(layer.module) for layer in self.layers)
        """Equal for layers that are alike."""
        self._experts = list(find_experts(model))
        self._config = model.config.get_text_config()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer, 0 for a dense model: the first dimension of their weights."""
        return max((weight.shape[0] for weight in self.weights() if weight.is_expert), default=0)

    @property
    def num_chosen_experts(self) -> int:
        """Experts per token; 0 for a dense model."""
        return next((int(v) for name in NUM_CHOSEN_NAMES if isinstance(v := getattr(self._config, name, None), int)), 0)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def weights(self) -> list[Weight]:
        """All parameters; layers are numbered among the decoder's."""
        experts = {id(parameter) for module in self._experts for parameter in module.parameters()}
        layer_of = {
            id(parameter): number for number, layer in enumerate(self.layers) for parameter in layer.module.parameters()
        }
        embedding = {id(parameter) for parameter in _parameters(self.model.get_input_embeddings())}
        head = {id(parameter) for parameter in _parameters(self.model.get_output_embeddings())}
        head |= {
            id(parameter)
            for operator in self.map.operators
            if operator.site.kind == "final_norm"
            for parameter in operator.module.parameters()
        }
        return [
            Weight(
                shape=tuple(parameter.shape),
                element_bytes=self._kept_bytes or parameter.element_size(),
                compute_element_bytes=parameter.element_size(),
                is_expert=id(parameter) in experts,
                is_trainable=parameter.requires_grad,
                layer=layer_of.get(id(parameter), -1),
                is_embedding=id(parameter) in embedding,
                is_head=id(parameter) in head,
            )
            for parameter in self.model.parameters()
        ]

    def representatives(self, stage: Stage) -> dict[int, Representative]:
        """For every layer of a stage, the layers that stand for it: the first three of its kind in the stage.

        Where the layers' return value is not one tensor, or the loss looks at all layers (router losses), every layer
        stands for itself.
        """
        if not self._may_leave_out():
            return {layer: Representative((layer,)) for layer in stage.layers}
        alike: dict[object, list[int]] = {}
        for layer in stage.layers:
            alike.setdefault(self.kinds[layer], []).append(layer)
        return {
            layer: Representative(tuple(layers[:_NUM_TRACED]), number, len(layers))
            for layers in alike.values()
            for number, layer in enumerate(layers)
        }

    def _may_leave_out(self) -> bool:
        if getattr(self._config, "output_router_logits", False):
            return False
        returns = [inspect.signature(type(layer.module).forward).return_annotation for layer in self.layers]
        return all("Tensor" in str(kind) and "uple" not in str(kind) for kind in returns)

    @contextmanager
    def as_stage(self, stage: Stage, ep: int = 1, dispatch: str = "flex") -> Iterator[None]:
        """The model with only this stage's layers, three of each kind; embedding, norm and head where it owns them.

        A stage without the embedding takes `inputs_embeds`; one without the head gives hidden states as its logits.
        Of `ep` expert-parallel ranks one has its share of the experts, and gets as many tokens as it sends: by the
        operators of `experts/dispatch.py` under `flex`, inside the experts' own forward under `all_to_all`.
        """
        kept = {layer for found in self.representatives(stage).values() for layer in found.traced}
        with ExitStack() as stack:
            for module in self._experts if ep > 1 else ():
                num_local_experts = _keep_share(stack, module, ep)
                if dispatch == "flex":
                    stack.callback(vars(module).update, dict(vars(module)))
                    stack.callback(vars(module).clear)
                    FakeEP(module, ep, num_local_experts)
            for number, layer in enumerate(self.layers):
                if number not in kept:
                    _replace(stack, self.model, layer.site.name, _StandIn(layer.module))
            if not stage.has_head:
                head = self.model.get_output_embeddings()
                names = [op.site.name for op in self.map.operators if op.site.kind == "final_norm"]
                names += [name for name, module in self.model.named_modules() if module is head]
                for number, name in enumerate(names):
                    _replace(stack, self.model, name, nn.Identity() if number else _StageOutput())
            yield


class _StandIn(nn.Module):
    """In the place of a layer: hands the hidden states on. Keeps what the model's loop may read off a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_") and isinstance(value, (str, int, float, bool)):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class _StageOutput(nn.Module):
    """At the end of a stage: its output is kept until its backward starts from it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = _Keep.apply(hidden_states)  # type: ignore[assignment]
        return kept


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(output)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def build_skeleton(recipe: Recipe) -> Skeleton:
    """The recipe's model on the meta device, in training mode. Of `name_or_path` only the configuration is read.

    Raises:
        RecipeError: a model that is not known, or a configuration that cannot be read (no network, for one).
    """
    section = recipe.model
    chosen = {name: getattr(section, name) for name in ("attn_implementation", "experts_implementation")}
    options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if section.architecture is not None:
        has_vocabulary = "vocab_size" in section.config
        config = model_config(recipe, None if has_vocabulary else build_tokenizer(recipe))
        dtype = section.dtype or "float32"
    else:
        config = model_config(recipe)
        dtype = section.dtype if section.dtype not in (None, "auto") else (config.dtype or "float32")
    check_config(recipe, config)
    config.use_cache = recipe.training.get("use_cache", False)  # as Trainer sets it
    model = build_without_weights(recipe, config, dtype=dtype, **options).train()
    if not recipe.parallel.mixed_precision:
        return Skeleton(model)
    check_mixed_precision(model)
    kept_dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    for parameter in model.parameters():  # buffers stay as they are, as under FSDP
        parameter.data = parameter.data.to(torch.bfloat16)
    return Skeleton(model, kept_dtype)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Classes, plain attributes and parameter shapes of a layer and all that is in it."""
    facts: list[object] = []
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if not key.startswith("_") and key not in _PLACES and isinstance(value, (str, int, float, bool, type(None)))
        }
        shapes = tuple((key, tuple(p.shape), p.dtype) for key, p in module.named_parameters(recurse=False))
        facts.append((name, type(module), tuple(sorted(plain.items())), shapes))
    return tuple(facts)


def _replace(stack: ExitStack, model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place called `name`, until the stack is left."""
    parent_name, _, own_name = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    original = parent._modules[own_name]
    parent._modules[own_name] = module
    stack.callback(parent._modules.__setitem__, own_name, original)


def _keep_share(stack: ExitStack, experts: nn.Module, ep: int) -> int:
    """Leave an experts block its first 1 / ep of the experts, until the stack is left. Returns how many those are."""
    num_experts = max(parameter.shape[0] for parameter in experts.parameters())
    for module in experts.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.shape[0] == num_experts:
                share = nn.Parameter(parameter.data[: num_experts // ep], requires_grad=parameter.requires_grad)
                stack.callback(module._parameters.__setitem__, name, parameter)
                module._parameters[name] = share
    if getattr(experts, "num_experts", None) == num_experts:
        stack.callback(setattr, experts, "num_experts", num_experts)
        experts.num_experts = num_experts // ep  # type: ignore[assignment]
    return num_experts // ep


def _parameters(module: nn.Module | None) -> Sequence[nn.Parameter]:
    if module is None:
        return ()
    if not isinstance(module, nn.Module):
        raise UserError(f"the model's embedding is a {type(module).__name__}, not a module, so it cannot be placed")
    return tuple(module.parameters())
