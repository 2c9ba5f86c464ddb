"""Sizes that no model can have; those of every model of transformers can be."""

from __future__ import annotations

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flex_trainer.launch.model_sizes import check_sizes

_MANY_TEXT_CONFIGS = ("musicgen", "musicgen_melody")


@pytest.mark.parametrize(
    ("architecture", "sizes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 129}, "num_experts_per_tok: 129 must be from 1 to num_experts=128"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok: 0 must be from 1 to num_experts=8"),
        ("mixtral", {"num_attention_heads": 0}, "num_attention_heads: 0 must be at least 1"),
        ("mixtral", {"num_attention_heads": 12}, "num_key_value_heads: 8 does not divide num_attention_heads=12"),
        ("llama", {"hidden_size": 16, "head_dim": None}, "num_attention_heads: 32 is more than hidden_size=16"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers: 0 must be at least 1"),
        ("llama", {"hidden_size": -4}, "hidden_size: -4 must be at least 1"),
        ("deepseek_v3", {"n_group": 7}, "n_group: 7 does not divide n_routed_experts=256"),
        ("deepseek_v3", {"n_group": 0}, "n_group: 0 must be at least 1"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group: 9 must be from 1 to n_group=8"),
        ("deepseek_v3", {"n_routed_experts": 0}, "n_routed_experts: 0, but from first_k_dense_replace=3 on"),
        ("deepseek_v3", {"n_shared_experts": -1}, "n_shared_experts: -1 must be at least 0"),
    ],
)
def test_sizes_that_cannot_be(architecture: str, sizes: dict[str, int], message: str) -> None:
    config = CONFIG_MAPPING[architecture]()
    for name, value in sizes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError) as caught:
        check_sizes(config)
    assert message in str(caught.value)


def test_every_model_of_transformers_has_sizes_that_can_be() -> None:
    num_checked = 0
    for architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[architecture]()
        except (ValueError, StrictDataclassError):  # needs arguments of its own
            continue
        if architecture not in _MANY_TEXT_CONFIGS:
            check_sizes(config)
            num_checked += 1
    assert num_checked > 150
