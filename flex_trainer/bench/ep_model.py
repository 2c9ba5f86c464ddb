"""Models of `flex-trainer bench ep`: written once, then loaded by every rank, with its share of the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

import flex_trainer  # noqa: F401  registers "flex"
from flex_trainer.bench.child import ByteText
from flex_trainer.bench.shapes import REFERENCE, BenchShape

NATIVE, FLEX = "all_to_all", "flex"
"""Names of the two implementations that are compared."""

SPEED = replace(
    REFERENCE,
    name="speed",
    config={**REFERENCE.config, "first_k_dense_replace": 0, "moe_intermediate_size": 64},
    batch_size=16,
    sequence_length=128,
)
"""Per rank. Experts of a quarter of the hidden size (DeepSeek-V3's have 2/7 of theirs), no dense layer and short
sequences: as much to send for what there is to compute as this class of models has, so that the link matters."""

SKEW = replace(REFERENCE, name="skew", config={**REFERENCE.config, "num_hidden_layers": 4}, batch_size=2)
"""Per rank: each of the ranks has half of the reference batch."""


class MeshSizes(NamedTuple):
    """How many ranks share what."""

    ep_size: int
    fsdp_size: int
    dp_replicate_size: int = 1

    @property
    def num_ranks(self) -> int:
        return self.fsdp_size * self.dp_replicate_size

    @property
    def title(self) -> str:
        replicas = f" x {self.dp_replicate_size} replicas" if self.dp_replicate_size > 1 else ""
        return f"ep {self.ep_size}, fsdp {self.fsdp_size}{replicas}"


def write_model(shape: BenchShape, directory: str | Path, *, favoured_experts: int = 0) -> Path:
    """Write a model with random weights, the same at every call, and return the path.

    Args:
        favoured_experts: the first so many experts of each layer are chosen for every token: the routers' correction
            biases (which sway the choice and not the weights) are made to say so. 0: as the routers like.
    """
    set_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[shape.architecture](**shape.config))
    if favoured_experts:
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        assert biases, f"{shape.architecture} has no correction biases"
        for bias in biases:
            bias[:favoured_experts] += 10.0  # scores are in (0, 1)
    path = Path(directory) / shape.name
    write_weights(model, path)
    return path


def write_weights(model: PreTrainedModel, path: Path) -> None:
    """Save a model without a progress bar."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(path)
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def load_model(
    path: str | Path, mesh: MeshSizes | None = None, implementation: str = NATIVE, **options: Any
) -> PreTrainedModel:
    """This rank's share of the model at `path`, or all of it without a mesh; in training mode.

    Args:
        options: settings of its config.
    """
    if mesh is None:
        return AutoModelForCausalLM.from_pretrained(path, **options).train()
    sharding = DistributedConfig(**mesh._asdict(), ep_implementation=implementation)
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=sharding, **options).train()


def rank_batch(shape_batch_size: int, sequence_length: int, rank: int, number: int = 0) -> dict[str, Any]:
    """The batch of a rank in step `number`: bytes of the standard library's text, other ones for each."""
    text = ByteText([sequence_length] * 4096)
    first = (64 * number + rank) * shape_batch_size
    rows = [text[(first + row) % len(text)] for row in range(shape_batch_size)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
