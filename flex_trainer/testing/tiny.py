"""Tiny causal language models of every Mixture-of-Experts architecture, with random weights and without a hub.

    model = tiny_model("deepseek_v3")
    loss = model(**tiny_batch(model, batch_size=2, sequence_length=16)).loss

The classes are those of transformers; only the sizes are ours (`tiny_sizes.py`). Classes that also see or hear are
built whole and trained on text alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import cycle, islice
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from flex_trainer.testing.tiny_sizes import (
    COMPOSITE_SIZES,
    ENCODER_SIZES,
    FAMILY_SIZES,
    FIRST_BYTE_ID,
    FIRST_SENTINEL_ID,
    GROUPED_ROUTING_SIZES,
    LATENT_ATTENTION_SIZES,
    NUM_LAYERS,
    TEXT_SIZES,
)

FAMILIES: tuple[str, ...] = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4v_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "llama",
    "qwen3",
)
"""Architectures that every part of the project is tested on; the last two are dense."""

NOT_TRAINABLE_HERE: Mapping[str, str] = {
    "gemma4_assistant": "reads the keys and values of another model's forward pass",
    "diffusion_gemma": "denoises blocks of tokens; its forward pass computes no loss",
}
"""Mixture-of-Experts architectures that a tiny causal step cannot train, with the reason."""


def tiny_config(architecture: str, **overrides: Any) -> PretrainedConfig:
    """The configuration of a tiny model: 3 layers (the first dense where the family allows it), hidden size 32,
    8 experts of which 2 are chosen, vocabulary 384 (ByT5).

    Args:
        architecture: transformers' `model_type`, such as "deepseek_v3".
        overrides: fields to set on the text part of the configuration, over the tiny sizes. With another
            `num_hidden_layers`, the lists of layer kinds are made longer or shorter.

    Raises:
        ValueError: an architecture without a causal language model in the installed transformers.
    """
    config_class = _config_class(architecture)
    parts = _part_classes(config_class)
    if "text_config" not in parts:
        return config_class(**_text_sizes(config_class, overrides))
    sizes: dict[str, Any] = {**_known(config_class, COMPOSITE_SIZES), **_placeholder_tokens(config_class)}
    for name, part_class in parts.items():
        if name == "text_config":
            sizes[name] = part_class(**_text_sizes(part_class, overrides))
        else:
            sizes[name] = _encoder_config(part_class)
    return config_class(**sizes, **FAMILY_SIZES.get(config_class.model_type, {}))


def tiny_model(
    architecture: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    **overrides: Any,
) -> PreTrainedModel:
    """A causal language model of `architecture` on the CPU, in training mode, with weights that depend on `seed` alone.

    The global random stream stays as it was. Weights come from the model's own initialization. See `tiny_config` for
    the arguments not listed.

    Args:
        dtype: of the parameters.
        seed: of the random weights.
        attn_implementation: a name in transformers' attention registry; None for the class's default.
        experts_implementation: a name in transformers' experts registry; None for the class's default.

    Raises:
        ValueError: see `tiny_config`.
    """
    config = tiny_config(architecture, **overrides)
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model_class: Any = mapping[type(config)]
    # Some joined configurations map to the text-only model, which wants its own part of them.
    text_config = getattr(config, "text_config", None)
    if text_config is not None and model_class.config_class is type(text_config):
        config = text_config
    choices = {"attn_implementation": attn_implementation, "experts_implementation": experts_implementation}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chosen = {name: value for name, value in choices.items() if value is not None}
        return model_class._from_config(config, dtype=dtype, **chosen).train()


def tiny_batch(
    model: PreTrainedModel, batch_size: int, sequence_length: int, *, padding: bool = False, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random bytes as a causal training batch for `model`, on its device.

    Args:
        padding: pad on the right, row i to a share of the length that falls from all of it to half of it. Labels of
            padding are -100, and `attention_mask` is part of the batch only then.

    Returns:
        `input_ids`, `labels`, and `attention_mask` with padding: each int64 of shape (batch_size, sequence_length).

    Raises:
        ValueError: a size below 1.
    """
    if batch_size < 1 or sequence_length < 1:
        raise ValueError(f"batch_size={batch_size} and sequence_length={sequence_length} must both be at least 1")
    generator = torch.Generator().manual_seed(seed)
    shape = (batch_size, sequence_length)
    input_ids = torch.randint(FIRST_BYTE_ID, FIRST_SENTINEL_ID, shape, generator=generator)
    batch = {"input_ids": input_ids, "labels": input_ids.clone()}
    if padding:
        shares = 1.0 - 0.5 * torch.arange(batch_size) / max(batch_size - 1, 1)
        lengths = (shares * sequence_length).ceil().long()
        is_padding = torch.arange(sequence_length) >= lengths[:, None]
        pad_token_id = model.config.get_text_config().pad_token_id
        batch["input_ids"] = input_ids.masked_fill(is_padding, 0 if pad_token_id is None else pad_token_id)
        batch["labels"] = input_ids.masked_fill(is_padding, -100)
        batch["attention_mask"] = (~is_padding).long()
    return {name: value.to(model.device) for name, value in batch.items()}


@cache
def all_moe_architectures() -> tuple[str, ...]:
    """Every architecture of the installed transformers with an expert-parallel plan and a model that a text batch
    trains, sorted; without those in `NOT_TRAINABLE_HERE`.

    Found from the plans in the configuration classes, so a newer transformers adds to it.
    """
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    names -= NOT_TRAINABLE_HERE.keys()
    return tuple(sorted(name for name in names if _has_expert_plan(CONFIG_MAPPING[name])))


def _config_class(architecture: str) -> type[PretrainedConfig]:
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if architecture not in known:
        close = difflib.get_close_matches(architecture, sorted(known), n=3)
        hint = f"did you mean one of {close}?" if close else "use a model_type such as 'deepseek_v3'"
        raise ValueError(f"transformers has no causal language model for architecture={architecture!r}; {hint}")
    return CONFIG_MAPPING[architecture]


def _has_expert_plan(config_class: type[PretrainedConfig]) -> bool:
    text_class = _part_classes(config_class).get("text_config", config_class)
    return bool(text_class.base_model_ep_plan)


def _part_classes(config_class: type[PretrainedConfig]) -> dict[str, type[PretrainedConfig]]:
    """Classes of the nested configurations that cannot be left out, by field name."""
    parts: dict[str, type[PretrainedConfig]] = {}
    for name, spec in config_class.sub_configs_defaults.items():
        if spec.optional and name != "text_config":
            continue
        is_open = not issubclass(spec.config_class, PretrainedConfig)  # AutoConfig: the default names the class
        parts[name] = CONFIG_MAPPING[spec.model_type] if is_open else spec.config_class
    return parts


def _known(config_class: type[PretrainedConfig], sizes: Mapping[str, Any]) -> dict[str, Any]:
    declared = {field.name for field in fields(config_class)}
    return {name: value for name, value in sizes.items() if name in declared}


def _text_sizes(config_class: type[PretrainedConfig], overrides: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(config_class)}
    sizes = {**_placeholder_tokens(config_class), **_known(config_class, TEXT_SIZES)}
    sizes |= {name: size for name, size in GROUPED_ROUTING_SIZES.items() if defaults.get(name) is not None}
    if "kv_lora_rank" in defaults:
        sizes |= _known(config_class, LATENT_ATTENTION_SIZES)
    sizes |= FAMILY_SIZES.get(config_class.model_type, {})
    num_layers = overrides.get("num_hidden_layers", NUM_LAYERS)
    sizes |= {name: _kinds(sizes[name], num_layers) for name in ("layer_types", "mlp_layer_types") if name in sizes}
    return sizes | dict(overrides)


def _kinds(kinds: Sequence[str], num_layers: int) -> list[str]:
    """The first kind once, then the others in turns: dense, sparse, sparse, ..."""
    return [*kinds[:1], *islice(cycle(kinds[1:]), num_layers - 1)][:num_layers]


def _encoder_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    sizes = _known(config_class, ENCODER_SIZES) | dict(FAMILY_SIZES.get(config_class.model_type, {}))
    sizes |= {name: _encoder_config(part_class) for name, part_class in _part_classes(config_class).items()}
    return config_class(**sizes)


def _placeholder_tokens(config_class: type[PretrainedConfig]) -> dict[str, int]:
    """Ids for the tokens that stand for images, sounds and the like: sentinels, which `tiny_batch` never draws."""
    names = [
        field.name
        for field in fields(config_class)
        if field.name.endswith(("_token_id", "_token_index")) and isinstance(field.default, int)
    ]
    return {name: FIRST_SENTINEL_ID + i for i, name in enumerate(names)}
