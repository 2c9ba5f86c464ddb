"""Sizes of tiny test models, as data: what every configuration shares, and what single families need besides.

`tiny.py` applies the tables in the order they stand here; a later one wins. A table's entry is used only where the
configuration class declares a field of that name, so one table serves every family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOCAB_SIZE = 384
"""Vocabulary of transformers' ByT5Tokenizer: 3 special tokens, 256 bytes, 125 sentinels."""

FIRST_BYTE_ID, FIRST_SENTINEL_ID = 3, 259
"""Token ids of real bytes are [3, 259); sentinels above them stand in for the image and audio placeholder tokens."""

NUM_LAYERS, NUM_EXPERTS, TOP_K, HEAD_DIM = 3, 8, 2, 8

TEXT_SIZES: Mapping[str, Any] = {
    # Widths.
    "hidden_size": 32,
    "intermediate_size": 48,
    "dense_intermediate_size": 48,
    "prefix_dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "ffn_hidden_size": 48,
    "moe_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "router_hidden_size": 16,
    "hidden_size_per_layer_input": 8,
    # Depth: the first layer is dense where the family knows dense layers.
    "num_hidden_layers": NUM_LAYERS,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "mlp_only_layers": [0],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "max_window_layers": NUM_LAYERS,
    # Attention.
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": HEAD_DIM,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "attention_chunk_size": 64,
    "max_position_embeddings": 256,
    # Low-rank attention, and the indexer of its sparse variant.
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    # Linear attention and state-space layers.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": HEAD_DIM,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": HEAD_DIM,
    "mamba_chunk_size": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "block_size": 16,
    # Routing.
    "num_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "num_local_experts": NUM_EXPERTS,
    "moe_num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_experts_per_token": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "top_k_experts": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    # Tokens.
    "vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    # Extra heads that predict further tokens are not part of a training step in transformers.
    "num_mtp_layers": 0,
}

GROUPED_ROUTING_SIZES: Mapping[str, Any] = {"n_group": 2, "topk_group": 1}
"""Groups of experts, for the classes that route by groups unless told otherwise: 2 groups of 4, one chosen."""

LATENT_ATTENTION_SIZES: Mapping[str, Any] = {"num_key_value_heads": 4}
"""Latent attention (classes with a `kv_lora_rank`) expands one key and one value per query head."""

ENCODER_SIZES: Mapping[str, Any] = {
    # Vision and audio encoders are built, since the class wants them, and never run: only their size matters.
    "depth": 1,
    "num_hidden_layers": 1,
    "encoder_layers": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "encoder_attention_heads": 2,
    "head_dim": 16,
    "hidden_size": 32,
    "embed_dim": 32,
    "d_model": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "mlp_dim": 32,
    "encoder_ffn_dim": 32,
    "downsample_hidden_size": 16,
    "output_channels": 16,
    "adapter_in_dim": 32,
    "adapter_input_size": 32,
    "adapter_out_dim": 32,
    "projection_hidden_dim": 32,
    "projection_intermediate_size": 32,
    "text_hidden_size": 32,
    "out_hidden_size": 32,
    "output_dim": 32,
    "output_proj_dims": 32,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "mlp_layer_types": ["sparse"],
    "vocab_size": VOCAB_SIZE,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
    "image_size": 56,
    "max_image_size": 64,
    "window_size": 2,
    "deepstack_visual_indexes": [0],
    "global_attn_indexes": [0],
    "downsample_channels": [16, 32],
}

COMPOSITE_SIZES: Mapping[str, Any] = {"projector_hidden_size": 32, "out_hidden_size": 32}
"""Fields of a configuration that joins a text model with encoders."""

_LINEAR_AND_FULL = ["linear_attention", "full_attention", "linear_attention"]

FAMILY_SIZES: Mapping[str, Mapping[str, Any]] = {
    # Keyed by `model_type`, also of a part such as qwen3_5_moe_text. Hybrids get both kinds of layer, and classes whose
    # default starts with several dense layers, or with none, get exactly one.
    "bailing_hybrid": {"layer_types": _LINEAR_AND_FULL},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "dots1": {"norm_topk_prob": True},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
        "head_dim": 16,
    },
    "gemma4_text": {"enable_moe_block": True, "global_head_dim": 8},
    "gemma4_unified_text": {"global_head_dim": 8},
    "glm4v_moe_text": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 8],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    },
    "glm5_next_text": {
        "qk_rope_head_dim": 0,
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
    },
    "granitemoehybrid": {"layer_types": _LINEAR_AND_FULL, "position_embedding_type": "rope"},
    "hy_v4_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": {"layer_types": _LINEAR_AND_FULL},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "muse_spark_audio": {
        "num_hidden_layers": 1,
        "patch_sizes": [4],
        "hidden_sizes": [16],
        "depths": [1],
    },
    "muse_spark_text": {"moe_hidden_size": 16},
    "qwen3_5_moe_text": {"layer_types": _LINEAR_AND_FULL},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCAB_SIZE - 1},  # read with a mask, never declared
    "qwen3_next": {"layer_types": _LINEAR_AND_FULL},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "radio": {"video_temporal_patch_size": 2},
    "step3p5": {"share_expert_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
