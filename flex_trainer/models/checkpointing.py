"""Activation (gradient) checkpointing of transformers, turned off while FlexTrainer decides what is recomputed."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from flex_trainer.undo import replace_attribute


def is_checkpointing(model: nn.Module) -> bool:
    """Whether any part of `model` recomputes in the way of transformers."""
    return bool(_checkpointing_modules(model))


def stop_checkpointing(model: nn.Module) -> Callable[[], None]:
    """Turn it off, and return the function that turns it on again as it was.

    Every module that checkpoints has a flag and, beside it, the function with the user's arguments
    (`activation_checkpointing_kwargs`). Only the flags are changed, so that those arguments, and a choice of every
    n-th layer, are still there afterwards.
    """
    undo = [replace_attribute(module, "gradient_checkpointing", False) for module in _checkpointing_modules(model)]

    def restore() -> None:
        while undo:
            undo.pop()()

    return restore


def _checkpointing_modules(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
