"""The `training` section of a recipe, checked against the installed transformers: names and types of TrainingArguments
fields, values that no training can have, trackers, and precisions that the device does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_pt_utils import AcceleratorConfig

from flex_trainer.config import nearest
from flex_trainer.errors import UserError
from flex_trainer.launch.recipe import Recipe
from flex_trainer.launch.yaml import RecipeError, refuse_boolean_word

_FROM_ONE = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "save_total_limit",
    "torch_empty_cache_steps", "eval_accumulation_steps", "ddp_timeout", "ddp_bucket_cap_mb",
    "dataloader_prefetch_factor",
)  # fmt: skip
_FROM_ZERO = (
    "learning_rate", "weight_decay", "warmup_steps", "adam_epsilon", "max_grad_norm", "neftune_noise_alpha",
    "eval_delay",
    "dataloader_num_workers", "seed", "data_seed",
)  # fmt: skip
_ABOVE_ZERO = ("num_train_epochs", "logging_steps", "save_steps", "eval_steps")
_SHARES = ("adam_beta1", "adam_beta2", "label_smoothing_factor")

_ALSO_TRUE = ("resume_from_checkpoint", "fsdp")
"""Texts for which Trainer takes a boolean too, though their type does not say so."""

_CHECKPOINT_HINTS: Mapping[str, Any] = dict.fromkeys(
    ("use_reentrant", "preserve_rng_state", "debug", "early_stop"), bool
)
_NESTED_HINTS: Mapping[str, Mapping[str, Any]] = {
    "accelerator_config": get_type_hints(AcceleratorConfig),
    "gradient_checkpointing_kwargs": _CHECKPOINT_HINTS,
    "activation_checkpointing_kwargs": _CHECKPOINT_HINTS,
}
"""Types of keys inside sections of the training section, as far as they are known."""

_TRACKERS_BESIDE = ("all", "none")
"""Words of `report_to` that name no tracker."""


def check_training(recipe: Recipe) -> None:
    """Refuse a `training` key that is no TrainingArguments field, and a value that none can have.

    Raises:
        RecipeError: an unknown name, a plain value of another type, a number out of its range, an unknown tracker.
    """
    known = {entry.name: entry for entry in fields(TrainingArguments) if entry.init}
    hints = get_type_hints(TrainingArguments)
    try:
        for key, value in recipe.training.items():
            if key not in known:
                raise UserError(f"training.{key}: TrainingArguments has no such field; {nearest(key, list(known))}")
            if not (key in _ALSO_TRUE and isinstance(value, bool)):
                _check_type(f"training.{key}", value, hints[key])
            _check_range(f"training.{key}", key, value)
            if isinstance(value, dict):
                _check_nested(key, value)
        _check_trackers("report.to", recipe.report.to)
        _check_trackers("training.report_to", recipe.training.get("report_to"))
    except UserError as error:
        raise RecipeError(f"{recipe.path.name}: {error}") from error


def _check_nested(key: str, section: Mapping[str, Any]) -> None:
    for name, hint in _NESTED_HINTS.get(key, {}).items():
        if name in section:
            _check_type(f"training.{key}.{name}", section[name], hint)


def check_trackers_installed(recipe: Recipe) -> None:
    """Raise RecipeError for a tracker whose package is not installed here: transformers would raise in mid-launch."""
    installed = get_available_reporting_integrations()
    for name in _names(recipe.report.to) or _names(recipe.training.get("report_to")):
        if name not in _TRACKERS_BESIDE and name not in installed:
            raise RecipeError(
                f"{recipe.path.name}: report.to: {name!r} is not installed here; install it, or choose another tracker "
                f"(installed: {', '.join(sorted(installed)) or 'none'})"
            )


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


def _check_type(place: str, value: Any, hint: Any) -> None:
    kinds = _plain_kinds(hint)
    if not kinds or _is_of(value, kinds):
        return
    if bool in kinds:
        refuse_boolean_word(place, value)
    names = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
    raise UserError(f"{place}: {value!r} is {type(value).__name__}, but {names} is needed")


def _check_range(place: str, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if not math.isfinite(value):
        raise UserError(f"{place}: {value!r} is not a finite number; give one")
    if key in _FROM_ONE and value < 1:
        raise UserError(f"{place}: {value!r} must be at least 1")
    if key in _FROM_ZERO and value < 0:
        raise UserError(f"{place}: {value!r} must not be negative; give 0 or more")
    if key in _ABOVE_ZERO and value <= 0:
        raise UserError(f"{place}: {value!r} must be above 0")
    if key in _SHARES and not 0 <= value < 1:
        raise UserError(f"{place}: {value!r} must be at least 0 and below 1")
    if key == "max_steps" and value < 1 and value != -1:
        raise UserError(f"{place}: {value!r} must be at least 1, or -1 for as many steps as num_train_epochs takes")


def _check_trackers(place: str, value: Any) -> None:
    known = sorted(INTEGRATION_TO_CALLBACK)
    for name in _names(value):
        if name not in known and name not in _TRACKERS_BESIDE:
            raise UserError(f"{place}: no tracker of transformers is called {name!r}; {nearest(name, known)}")


def _names(value: Any) -> list[str]:
    """Trackers as a list, from one name or several."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else [str(name) for name in value]


def _plain_kinds(hint: Any) -> tuple[type, ...]:
    """The types of a hint made of bool, int, float, str and None only; empty for any other hint."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(kinds) if set(kinds) <= {bool, int, float, str, NoneType} else ()


def _is_of(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))
