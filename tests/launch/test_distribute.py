"""What is refused before a model is spread over ranks. How it is spread: tests/distributed/test_recipe_ranks.py."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GPT2Config

from flex_trainer.errors import UserError
from flex_trainer.launch.distribute import check_mixed_precision, check_model, distributed_config
from flex_trainer.launch.recipe import ParallelSection
from flex_trainer.testing.tiny import tiny_config, tiny_model


def test_the_section_is_transformers_configuration() -> None:
    assert distributed_config(ParallelSection()) is None
    config = distributed_config(ParallelSection(replicate=2, fsdp=8, ep=4, dispatch="all_to_all", mixed_precision=True))
    assert config is not None
    assert (config.dp_replicate_size, config.fsdp_size, config.ep_size, config.efsdp_size) == (2, 8, 4, 2)
    assert (config.ep_implementation, config.fsdp_mixed_precision, config.dp_size) == ("all_to_all", True, 16)


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "olmoe"])
def test_experts_must_divide(architecture: str) -> None:
    config = tiny_config(architecture)  # 8 experts
    check_model(ParallelSection(fsdp=8, ep=4), config)
    with pytest.raises(UserError, match="parallel.ep=3 does not divide the 8 experts of a layer"):
        check_model(ParallelSection(fsdp=3, ep=3), config)


def test_models_without_what_it_takes() -> None:
    with pytest.raises(UserError, match="no routed experts to shard; set ep to 1"):
        check_model(ParallelSection(fsdp=2, ep=2), tiny_config("llama"))
    check_model(ParallelSection(fsdp=2), tiny_config("llama"))
    config: Any = tiny_config("mixtral")
    config.base_model_ep_plan = None
    with pytest.raises(UserError, match="transformers has no expert-parallel plan"):
        check_model(ParallelSection(fsdp=2, ep=2), config)
    without: Any = GPT2Config()
    without.base_model_fsdp_plan = None
    with pytest.raises(UserError, match="transformers has no FSDP plan for 'gpt2'.*distributed_type: FSDP"):
        check_model(ParallelSection(fsdp=2), without)


def test_mixed_precision_never_casts_what_stays_float32() -> None:
    with pytest.raises(UserError, match=r"would compute model\.layers\.1\.mlp\.gate\.weight in bfloat16"):
        check_mixed_precision(tiny_model("deepseek_v3"))
    check_mixed_precision(tiny_model("qwen3_moe"))
