"""The models and batches that benchmarks run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BenchShape:
    """A model with random weights and a batch size."""

    name: str
    architecture: str
    config: dict[str, Any]
    batch_size: int
    sequence_length: int


_MLA = {  # equal sizes of queries, keys and values: only then torch's fused attention runs on a CPU
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_COMMON = {"vocab_size": 384, "max_position_embeddings": 8192, "use_cache": False, "pad_token_id": 0}

REFERENCE = BenchShape(
    "reference",
    "deepseek_v3",
    {
        **_COMMON,
        **_MLA,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 1,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    batch_size=4,
    sequence_length=1024,
)
UNEQUAL_HEADS = BenchShape(
    "unequal_heads",
    "deepseek_v3",
    # As in the published models: queries and keys are 1.5 times as wide as values. On a CPU torch has no fused kernel
    # for that, so attention saves its scores.
    {**REFERENCE.config, "num_hidden_layers": 6, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    batch_size=4,
    sequence_length=512,
)
WIDE_VOCABULARY = BenchShape(
    "wide_vocabulary",
    "deepseek_v3",
    {**REFERENCE.config, "num_hidden_layers": 4, "vocab_size": 16384},
    batch_size=4,
    sequence_length=512,
)
LONG = BenchShape(
    "long", "deepseek_v3", {**REFERENCE.config, "num_hidden_layers": 4}, batch_size=1, sequence_length=6144
)
FEW_BIG_EXPERTS = BenchShape(
    "few_big_experts",
    "mixtral",
    {
        **_COMMON,
        "hidden_size": 256,
        "intermediate_size": 896,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    batch_size=4,
    sequence_length=1024,
)


def quick(shape: BenchShape) -> BenchShape:
    """A small version: still large enough that activations are more than the process's noise."""
    return BenchShape(
        shape.name,
        shape.architecture,
        {**shape.config, "num_hidden_layers": 3},
        shape.batch_size,
        shape.sequence_length // 2,
    )


def _smaller(shape: BenchShape, name: str, num_layers: int, batch_size: int, length: int, **config: Any) -> BenchShape:
    return BenchShape(
        name, shape.architecture, {**shape.config, "num_hidden_layers": num_layers, **config}, batch_size, length
    )


CHOICE_SHAPES = (
    _smaller(UNEQUAL_HEADS, "unequal_heads", 3, 2, 512),
    _smaller(REFERENCE, "equal_heads", 3, 2, 768),
    _smaller(FEW_BIG_EXPERTS, "few_big_experts", 3, 2, 512),
    _smaller(LONG, "long", 2, 1, 2048),
    _smaller(UNEQUAL_HEADS, "long_unequal_heads", 2, 1, 1024),
    _smaller(WIDE_VOCABULARY, "wide_vocabulary", 2, 2, 384),
    _smaller(REFERENCE, "many_small_experts", 3, 2, 512, n_routed_experts=64, moe_intermediate_size=64),
    _smaller(REFERENCE, "dense", 4, 4, 512, first_k_dense_replace=4),
)
"""What times and choices are measured on: steps of a second or less on two cores."""
