"""From a recipe's `parallel` section to a model that is spread over the ranks, by transformers' own machinery.

Weights that are loaded are split while they are read (`from_pretrained(distributed_config=...)`). Random weights are
drawn whole on every rank from one seed and then split, so that they are those of one process with that seed.
"""

from __future__ import annotations

import os
from fnmatch import fnmatch
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from flex_trainer.errors import UserError
from flex_trainer.launch.accelerate import launch_command
from flex_trainer.launch.deepspeed import launched_deepspeed_problem
from flex_trainer.launch.recipe import ParallelSection, Recipe
from flex_trainer.models.checksums import checksum, differing, names_of
from flex_trainer.ranks import num_launched

NUM_EXPERTS_NAMES = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


def distributed_config(section: ParallelSection) -> DistributedConfig | None:
    """The section as transformers writes it; None where no axis is used."""
    if not section.is_used:
        return None
    return DistributedConfig(
        fsdp_size=section.fsdp,
        dp_replicate_size=section.replicate,
        ep_size=section.ep,
        ep_implementation=section.dispatch,
        fsdp_mixed_precision=section.mixed_precision,
    )


def check_ranks(recipe: Recipe) -> None:
    """Refuse sizes that training cannot use, and a number of processes that is not the one they ask for.

    Raises:
        ValueError: pipeline stages, expert groups that do not fit, another number of processes, sharding by both
            the recipe and the launcher, FSDP1, or DeepSpeed's ZeRO-3.
    """
    section = recipe.parallel
    if section.pp > 1:
        raise UserError(
            f"parallel: pp={section.pp} is not available: pipeline stages can only be planned in this version "
            "(flex-trainer plan); set it to 1 to train"
        )
    check_expert_ranks(section.fsdp, section.ep, num_experts=None)
    deepspeed = launched_deepspeed_problem(recipe.training, section.is_used)
    if deepspeed is not None:
        raise UserError(deepspeed)
    _check_launcher(section)
    num_processes = num_launched()
    if section.is_used and num_processes != section.num_ranks:
        raise UserError(
            f"parallel: replicate={section.replicate} x fsdp={section.fsdp} is {section.num_ranks} processes, and "
            f"{_running(num_processes)}; change the sizes, or start {section.num_ranks}: "
            f"{launch_command(recipe)}"
        )


def check_model(section: ParallelSection, config: PreTrainedConfig) -> None:
    """Refuse a model that cannot be spread as the section says, before any of its weights are there.

    Raises:
        ValueError: no plan for its experts or for FSDP, or a number of experts that ep does not divide.
    """
    if section.mixed_precision and not section.is_used:
        raise UserError(
            "parallel: mixed_precision=true has no effect where nothing is sharded; use training.bf16: true, or set "
            "parallel.fsdp"
        )
    if not section.is_used:
        return
    text_config: Any = config.get_text_config()
    if section.ep > 1:
        check_expert_ranks(section.fsdp, section.ep, _num_experts(text_config))
        if "ep_dispatch_experts" not in (text_config.base_model_ep_plan or {}).values():
            raise UserError(
                f"parallel: ep={section.ep}: transformers has no expert-parallel plan that dispatches the experts of "
                f"{text_config.model_type!r}; set ep to 1"
            )
    if not text_config.base_model_fsdp_plan:
        raise UserError(
            f"parallel: fsdp={section.fsdp}: transformers has no FSDP plan for {text_config.model_type!r}; set all "
            "sizes of parallel to 1 and use an accelerate configuration with distributed_type: FSDP, fsdp_version: 2"
        )


def check_mixed_precision(model: PreTrainedModel) -> None:
    """Refuse bfloat16 for weights that the model keeps in float32: FSDP would cast them with the others.

    Raises:
        ValueError: the first such weight.
    """
    patterns = model._keep_in_fp32_modules_strict or ()
    for name, _ in model.named_parameters():
        if any(fnmatch(f".{name}.", f"*.{pattern}.*") for pattern in patterns):
            raise UserError(
                f"parallel: mixed_precision=true would compute {name} in bfloat16, which {type(model).__name__} keeps "
                "in float32; leave it out and set model.dtype: bfloat16 or training.bf16: true"
            )


def distribute(model: PreTrainedModel, config: DistributedConfig) -> PreTrainedModel:
    """Spread a whole model, the same on every rank, over all of them in place; no rank sends weights.

    Args:
        model: with its weights, on any device; equal on all ranks.
        config: sizes whose product is the number of processes.

    Raises:
        ValueError: the model has no plan for an axis, or its weights are not the same on all ranks.
    """
    model_class: Any = type(model)
    checked, _, mesh = model_class.prepare_distribute_model(config)
    if mesh is None:
        return model
    if _is_tied(model):
        # FSDP keeps a shared weight only inside one group: that of the whole model, which takes all others left over.
        model.fsdp_plan = _plan_without_tied(model)
    drawn = {name: tensor for name, tensor in model.state_dict().items() if tensor.device.type != "meta"}
    expected = {name: checksum(tensor) for name, tensor in drawn.items()}
    del drawn
    model_class.maybe_distribute_model(model, checked, mesh)
    found = differing(dict(model.state_dict()), expected)
    if found:
        raise UserError(
            f"the weights of {model_class.__name__} are not the same on all ranks, so that the model spread over them "
            f"would be a mixture: {names_of(found)}. Seed every rank alike before the weights are drawn (set_seed), or "
            "load them from files."
        )
    return model


def is_launched_for_fsdp() -> bool:
    """Whether accelerate's launcher was told to shard by FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true")


def _check_launcher(section: ParallelSection) -> None:
    if not is_launched_for_fsdp():
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError(
            "this process was launched for FSDP version 1, whose flattened weights FlexTrainer cannot manage; write "
            "fsdp_version: 2 in the fsdp_config of the accelerate configuration, or use the recipe's parallel section "
            "with distributed_type: MULTI_GPU"
        )
    if section.is_used:
        raise UserError(
            "the model would be sharded twice, by the recipe's parallel section and by accelerate's FSDP; use an "
            "accelerate configuration with distributed_type: MULTI_GPU, or set all sizes of parallel to 1"
        )


def _running(num_processes: int) -> str:
    return "there is 1" if num_processes == 1 else f"there are {num_processes}"


def _num_experts(text_config: Any) -> int:
    return max((getattr(text_config, name, None) or 0 for name in NUM_EXPERTS_NAMES), default=0)


def _is_tied(model: PreTrainedModel) -> bool:
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def _plan_without_tied(model: PreTrainedModel) -> dict[str, str]:
    """The plan without embedding and head, and without what is gathered as long as they are (the last norm)."""
    tied: list[nn.Module | None] = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = {name for name, module in model.named_modules() if any(module is one for one in tied)}
    plan = model.fsdp_plan
    return {name: style for name, style in plan.items() if name not in names and style != "keep_full_weight"}


def check_expert_ranks(fsdp: int, ep: int, num_experts: int | None) -> None:
    """Refuse expert groups that cannot be made.

    Args:
        fsdp: ranks that share one copy of the weights.
        ep: ranks that share one copy of the experts.
        num_experts: routed experts of a layer, 0 for a dense model, None where the model is not known yet.

    Raises:
        ValueError: sizes that do not divide each other, or experts where there are none; with what to change.
    """
    if fsdp % ep:
        raise UserError(
            f"parallel.ep={ep} does not divide fsdp={fsdp}: the ranks of an expert group hold different batches, so "
            f"they are part of the fsdp ranks; use an ep that divides {fsdp}, or a larger fsdp"
        )
    if ep == 1 or num_experts is None:
        return
    if num_experts == 0:
        raise UserError(f"parallel.ep={ep}: this model has no routed experts to shard; set ep to 1")
    if num_experts % ep:
        raise UserError(
            f"parallel.ep={ep} does not divide the {num_experts} experts of a layer; use a divisor of {num_experts}"
        )
