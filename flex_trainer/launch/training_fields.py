"""The `training` section of a recipe, checked against the installed transformers: names and types of TrainingArguments
fields, and precisions that the device does not have."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from transformers import TrainingArguments

from flex_trainer.config import nearest
from flex_trainer.launch.recipe import Recipe
from flex_trainer.launch.yaml import RecipeError


def check_training(recipe: Recipe) -> None:
    """Raise RecipeError for a `training` key that is no TrainingArguments field, or a plain value of another type."""
    known = {entry.name: entry for entry in fields(TrainingArguments) if entry.init}
    hints = get_type_hints(TrainingArguments)
    for key, value in recipe.training.items():
        place = f"{recipe.path.name}: training.{key}"
        if key not in known:
            raise RecipeError(f"{place}: TrainingArguments has no such field; {nearest(key, list(known))}")
        kinds = _plain_kinds(hints[key])
        if kinds and not _is_of(value, kinds):
            names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
            raise RecipeError(f"{place}: {value!r} is {type(value).__name__}, but {names} is needed")


def check_precision(recipe: Recipe, args: TrainingArguments) -> None:
    """Raise RecipeError for a precision that the device does not compute in, or would compute in some other way."""
    wants_bf16 = [f"training.{name}" for name in ("bf16", "bf16_full_eval") if getattr(args, name)]
    wants_bf16 += ["model.dtype"] if recipe.model.dtype == "bfloat16" else []
    # torch counts a GPU that only emulates bf16, many times slower, among those that support it.
    if wants_bf16 and args.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise RecipeError(
            f"{recipe.path.name}: {wants_bf16[0]}: {torch.cuda.get_device_name(args.device)} has no bfloat16; use "
            "float32, training.fp16, or a GPU that has it"
        )
    if args.fp16 and args.device.type == "cpu":
        raise RecipeError(f"{recipe.path.name}: training.fp16: a CPU has no float16 training; use bf16, or neither")


def _plain_kinds(hint: Any) -> tuple[type, ...]:
    """The types of a hint made of bool, int, float and None only; empty for any other hint."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(kinds) if set(kinds) <= {bool, int, float, NoneType} else ()


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))
