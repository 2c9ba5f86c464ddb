"""Whether a model's weights fit, asked before they are drawn: an architecture's defaults are those of a large model."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from flex_trainer.launch.recipe import Recipe
from flex_trainer.launch.yaml import RecipeError
from flex_trainer.memory.meter import MemoryMeter, limit_bytes, meter_for
from flex_trainer.units import format_bytes


def check_memory(recipe: Recipe, model: PreTrainedModel, meter: MemoryMeter | None = None) -> None:
    """Refuse weights for a CPU that alone take more than the memory limit, or than the machine has.

    A rank draws the whole model, and keeps its shard of it.

    Args:
        model: on the meta device.
        meter: that of the CPU when None. On a GPU nothing is checked.

    Raises:
        RecipeError: weights that are too large; how large, and what to change.
    """
    if torch.cuda.is_available() and not recipe.training.get("use_cpu"):
        return
    meter = meter or meter_for(torch.device("cpu"))
    parameters = list(model.parameters())
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    num_shards = recipe.parallel.fsdp
    is_kept_to = bool(recipe.flex.strategies) or recipe.enforce_limit
    if is_kept_to and num_bytes // num_shards > limit_bytes(recipe.flex, meter):
        each = f", {format_bytes(num_bytes // num_shards)} on each of {num_shards} ranks" if num_shards > 1 else ""
        than = f"flex.memory_limit={recipe.flex.memory_limit}"
        if not str(recipe.flex.memory_limit).endswith("B"):  # no size with a unit
            than += f" ({format_bytes(limit_bytes(recipe.flex, meter))})"
        remedy = "raise the limit"
    elif num_bytes > meter.device_bytes():
        each, than, remedy = (
            "",
            f"the {format_bytes(meter.device_bytes())} of this machine's memory",
            "use another machine",
        )
    else:
        return
    dtype = str(next(p.dtype for p in parameters if p.is_floating_point())).removeprefix("torch.")
    raise RecipeError(
        f"{recipe.path.name}: model: {_count(sum(parameter.numel() for parameter in parameters))} parameters take "
        f"{format_bytes(num_bytes)} in {dtype}{each}, more than {than}; give smaller sizes in model.config (what is "
        f"left out there has transformers' default, often that of a published model), or {remedy}"
    )


def _count(number: int) -> str:
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return f"{number:,}"
