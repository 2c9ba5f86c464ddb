"""Recipes of tiny models. They are text: tests add sections and change fields."""

from __future__ import annotations

DEEPSEEK = """
model:
  architecture: deepseek_v3
  config: {hidden_size: 32, num_hidden_layers: 2, first_k_dense_replace: 1, num_attention_heads: 2,
           intermediate_size: 32, num_key_value_heads: 2, q_lora_rank: 16, kv_lora_rank: 16,
           qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 16,
           n_group: 2, topk_group: 1, n_routed_experts: 8, num_experts_per_tok: 2,
           moe_intermediate_size: 16}
data: {name: stdlib, sequence_length: 64, domains: [data], sampling: {lengths: fixed}}
training: {max_steps: 3, per_device_train_batch_size: 2, gradient_accumulation_steps: 2, use_cpu: true,
           save_strategy: no, logging_steps: 1, disable_tqdm: true, learning_rate: 1.0e-3}
"""
QWEN_MODEL = """
model:
  architecture: qwen3_moe
  config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16,
           moe_intermediate_size: 16, intermediate_size: 32, num_experts: 4, num_experts_per_tok: 2}
"""
QWEN = (
    QWEN_MODEL
    + """\
data: {name: stdlib, sequence_length: 64, domains: [data]}
training: {use_cpu: true}
"""
)
