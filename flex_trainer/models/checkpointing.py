"""Whole-layer checkpointing, which is turned off while operators are chosen one by one: else all would be recomputed.

Two kinds can be turned off: the flags of transformers, and torch's wrappers around modules (`checkpoint_wrapper`,
`offload_wrapper`; accelerate's `fsdp_activation_checkpointing`). A forward that calls `torch.utils.checkpoint` itself
is left alone (`Scope.is_on_top`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from flex_trainer.undo import replace_attribute

_MARK = "_flex_passes_by"


def is_checkpointing(model: nn.Module) -> bool:
    """Whether any part of `model` recomputes in the way of transformers, or is inside one of torch's wrappers."""
    return bool(_checkpointing_modules(model)) or any(not _is_passed_by(wrapper) for wrapper in _wrappers(model))


def warn_of_checkpointing(model: nn.Module) -> None:
    """Say that checkpointing is turned off, where it is on. To be called by `attach`: the warning is its caller's."""
    if is_checkpointing(model):
        warnings.warn(
            "gradient checkpointing is on; FlexTrainer decides per operator what to recompute and turns it off "
            "while it manages this model. Set gradient_checkpointing=False to silence this.",
            stacklevel=3,
        )


def stop_checkpointing(model: nn.Module) -> Callable[[], None]:
    """Turn it off, and return the function that turns it on again as it was.

    Every module that checkpoints has a flag and, beside it, the function with the user's arguments
    (`activation_checkpointing_kwargs`). Only the flags are changed, so that those arguments, and a choice of every
    n-th layer, are still there afterwards. Wrappers stay, and hand their arguments on.
    """
    undo = [replace_attribute(module, "gradient_checkpointing", False) for module in _checkpointing_modules(model)]
    undo += [replace_attribute(wrapper, "forward", _pass_by(wrapper)) for wrapper in _wrappers(model)]

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def copy_checkpointing(model: nn.Module, copied: dict[int, Any]) -> None:
    """Have the copies of `model`'s modules, by the ids of the originals, checkpoint where these do now."""
    for module in model.modules():
        copy = copied[id(module)]
        is_on = getattr(module, "gradient_checkpointing", False)
        if getattr(copy, "gradient_checkpointing", False) != is_on:
            copy.gradient_checkpointing = is_on
        if isinstance(module, ActivationWrapper) and _is_passed_by(module):
            vars(copy)["forward"] = _pass_by(copy)


def _pass_by(wrapper: ActivationWrapper) -> Callable[..., Any]:
    """In place of a wrapper's forward."""
    reference = weakref.ref(wrapper)

    def forward(*args: Any, **kwargs: Any) -> Any:
        wrapper = reference()
        assert wrapper is not None, "called through the wrapper"
        return wrapper._checkpoint_wrapped_module(*args, **kwargs)

    setattr(forward, _MARK, True)
    return forward


def _is_passed_by(wrapper: ActivationWrapper) -> bool:
    return hasattr(vars(wrapper).get("forward"), _MARK)


def _wrappers(model: nn.Module) -> list[ActivationWrapper]:
    return [module for module in model.modules() if isinstance(module, ActivationWrapper)]


def _checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
