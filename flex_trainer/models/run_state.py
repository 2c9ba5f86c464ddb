"""What is trained and how it runs: what changes the sizes of a forward's activations while its inputs stay the same.

Layers are unfrozen in the middle of a run, another attention is switched on, dropout begins: then the same batch saves
other tensors, and what was learnt before does not hold. So the state is part of what a plan is for, and a state that
comes back finds its plans again.
"""

from __future__ import annotations

import hashlib
import re
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.backends import cuda as kernels

_CHANCES = re.compile(r"drop|jitter|noise|^_disable_adapters$")
"""Attributes of modules that say how random a forward is, or whether adapters are in use."""
_NOT_HOW_IT_RUNS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
_ALWAYS_THE_SAME = frozenset({nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.SiLU, nn.GELU, nn.Identity})
"""Modules that do the same in training and in evaluation."""
_PLAIN = (bool, int, float, str)
_requires_grad = attrgetter("requires_grad")
_training = itemgetter("training")


class RunState:
    """Reads the state of one model: for every micro-batch, at some 50 ns for each parameter and 20 for each module.

    Looked at are which parameters require gradients, whether modules train, chances of dropout and noise, the plain
    values of configurations (implementations of attention and experts, outputs asked for) and the attention kernels
    that torch may use.

    Args:
        model: its modules are listed once, here.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._parameters = tuple(model.parameters())
        self._modules = tuple(vars(module) for module in modules if type(module) not in _ALWAYS_THE_SAME)
        self._chances = [
            (vars(module), name)
            for module in modules
            for name, value in vars(module).items()
            if type(value) in (bool, int, float) and (_CHANCES.search(name) or _is_chance(module, name))
        ]
        configs = {id(config): config for module in modules for config in _configs(vars(module).get("config"))}
        self._configs = tuple(vars(config) for config in configs.values())
        get_embeddings = getattr(model, "get_input_embeddings", None)
        self._embeddings = _called(get_embeddings)
        self._names: dict[tuple[Any, ...], str] = {}

    def name(self) -> str:
        """A short name of the state as it is now: equal states have equal names, in other runs too."""
        key = self._now()
        name = self._names.get(key)
        if name is None:
            name = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
            self._names[key] = name
            if len(self._names) > 64:
                del self._names[next(iter(self._names))]
        return name

    def _now(self) -> tuple[Any, ...]:
        return (
            bytes(map(_requires_grad, self._parameters)),
            bytes(map(_training, self._modules)),
            tuple([space.get(name) for space, name in self._chances]),
            tuple([_plain_values(space) for space in self._configs]),
            # PEFT and others make a frozen model's embeddings require gradients by a hook.
            0 if self._embeddings is None else len(self._embeddings._forward_hooks),
            kernels.flash_sdp_enabled(),
            kernels.mem_efficient_sdp_enabled(),
            kernels.cudnn_sdp_enabled(),
            kernels.math_sdp_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )


def _is_chance(module: nn.Module, name: str) -> bool:
    return name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)


def _configs(config: Any) -> list[Any]:
    """A configuration and those inside it."""
    if config is None or not hasattr(config, "__dict__"):
        return []
    inner = [value for value in vars(config).values() if type(value).__name__.endswith("Config")]
    return [config, *(one for value in inner for one in _configs(value))]


def _plain_values(config: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        [(name, value) for name, value in config.items() if type(value) in _PLAIN and name not in _NOT_HOW_IT_RUNS]
    )


def _called(get_embeddings: Any) -> nn.Module | None:
    if not callable(get_embeddings):
        return None
    try:
        found = get_embeddings()
    except (NotImplementedError, AttributeError):  # transformers' answer of a model without any
        return None
    return found if isinstance(found, nn.Module) else None
