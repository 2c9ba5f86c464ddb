"""A small recipe to be planned: 4 layers (the first dense), 8 experts of which 2 are chosen."""

from __future__ import annotations

from pathlib import Path

TEXT = """
model:
  architecture: deepseek_v3
  config: {num_hidden_layers: 4, first_k_dense_replace: 1, hidden_size: 64, intermediate_size: 128,
    moe_intermediate_size: 32, n_routed_experts: 8, num_experts_per_tok: 2, n_group: 1, topk_group: 1,
    num_attention_heads: 4, num_key_value_heads: 4, q_lora_rank: 32, kv_lora_rank: 16, qk_rope_head_dim: 8,
    qk_nope_head_dim: 8, v_head_dim: 8, vocab_size: 384, max_position_embeddings: 512}
  dtype: float32
data: {name: stdlib, sequence_length: 64}
training: {per_device_train_batch_size: 2}
flex: {memory_limit: 64MiB, strategies: [recompute]}
"""


def write_recipe(directory: Path) -> str:
    """The recipe as a file; its path."""
    path = directory / "small.yaml"
    path.write_text(TEXT)
    return str(path)
