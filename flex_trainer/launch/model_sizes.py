"""Sizes in a model's configuration that no model can have, found before anything is built.

The names are those of transformers' configurations; one that a configuration does not have, or that is a list with a
value for each layer, is passed over.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from flex_trainer.errors import UserError
from flex_trainer.launch.distribute import NUM_EXPERTS_NAMES

NUM_CHOSEN_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names of the number of experts that a token goes to."""

_FROM_ONE = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "qk_rope_head_dim",
    "head_dim",
    "kv_lora_rank", "q_lora_rank", "v_head_dim", "n_group",
)  # fmt: skip
_FROM_ZERO = (
    "intermediate_size", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "qk_nope_head_dim",
    *NUM_EXPERTS_NAMES,
)  # fmt: skip


def check_sizes(config: PreTrainedConfig) -> None:
    """Refuse sizes that do not go together.

    Raises:
        ValueError: a size below the least that makes sense, heads that do not divide, more experts per token than
            there are; with the name, the value and what to change.
    """
    text_config: Any = config.get_text_config()
    for least, names in ((1, _FROM_ONE), (0, _FROM_ZERO)):
        for name in names:
            value = _size(text_config, name)
            if value is not None and value < least:
                raise UserError(f"{name}: {value} must be at least {least}")
    _check_heads(text_config)
    _check_experts(text_config)


def _check_heads(config: Any) -> None:
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if heads is None or _size(config, "kv_lora_rank") is not None:  # latent attention has sizes of its own
        return
    groups = _size(config, "num_key_value_heads")
    if groups is not None and heads % groups:
        raise UserError(
            f"num_key_value_heads: {groups} does not divide num_attention_heads={heads}; use a divisor of {heads}"
        )
    if _size(config, "head_dim") is None and hidden is not None and hidden < heads:
        raise UserError(f"num_attention_heads: {heads} is more than hidden_size={hidden}, which leaves heads of size 0")


def _check_experts(config: Any) -> None:
    experts_name, num_experts = _first(config, NUM_EXPERTS_NAMES)
    chosen_name, num_chosen = _first(config, NUM_CHOSEN_NAMES)
    if not experts_name or not num_experts:
        layers, dense = _size(config, "num_hidden_layers"), _size(config, "first_k_dense_replace")
        if experts_name and layers is not None and dense is not None and dense < layers:
            raise UserError(
                f"{experts_name}: 0, but from first_k_dense_replace={dense} on, layers have experts; give a number, or "
                f"raise first_k_dense_replace to {layers}"
            )
        return
    if chosen_name and not 1 <= num_chosen <= num_experts:
        raise UserError(
            f"{chosen_name}: {num_chosen} must be from 1 to {experts_name}={num_experts}; lower it, or raise "
            f"{experts_name}"
        )
    groups, chosen_groups = _size(config, "n_group"), _size(config, "topk_group")
    if groups is not None and num_experts % groups:
        raise UserError(f"n_group: {groups} does not divide {experts_name}={num_experts}; use a divisor")
    if groups is not None and chosen_groups is not None and not 1 <= chosen_groups <= groups:
        raise UserError(f"topk_group: {chosen_groups} must be from 1 to n_group={groups}")


def _first(config: Any, names: tuple[str, ...]) -> tuple[str, int]:
    """The first of the names that the configuration has, with its value; "" and 0 where it has none."""
    return next(((name, size) for name in names if (size := _size(config, name)) is not None), ("", 0))


def _size(config: Any, name: str) -> int | None:
    try:
        value = getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:  # it has sizes for each layer, and refuses to say one for all
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
