"""A recipe's precision and limit, as a plan takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flex_trainer.cost.hardware import HARDWARE
from flex_trainer.estimate import estimate_recipe
from flex_trainer.estimate.estimator import Estimator
from flex_trainer.estimate.rank import KEEP
from flex_trainer.estimate.settings import settings_of
from flex_trainer.estimate.skeleton import build_skeleton
from flex_trainer.launch.recipe import load_recipe
from tests.estimate.recipes import write_recipe

DEVICE = HARDWARE["h100"]
MIXTRAL = (
    "model={architecture: mixtral, config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3, "
    "num_attention_heads: 4, num_key_value_heads: 2, num_local_experts: 8, max_position_embeddings: 512}}"
)
"""DeepSeek keeps weights in float32, for which FSDP's mixed precision is refused."""


def test_a_limit_above_the_device_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path), ["flex.memory_limit=90GiB"])
    with pytest.raises(
        ValueError, match=r"flex.memory_limit='90GiB' is 90\.\d+ GiB, more than the 79.1\d* GiB of NVIDIA"
    ):
        settings_of(recipe, DEVICE, None, torch.float32)


def test_mixed_precision_keeps_float32_and_computes_in_bfloat16(tmp_path: Path) -> None:
    overrides = [MIXTRAL, "parallel.fsdp=2", "flex.memory_limit=0.9"]

    def kept(*more: str):
        recipe = load_recipe(write_recipe(tmp_path), [*overrides, *more])
        skeleton = build_skeleton(recipe)
        settings = settings_of(recipe, DEVICE, None, skeleton.compute_dtype)
        return settings, Estimator(skeleton, DEVICE).outcome(settings, 1.0, KEEP).worst

    settings, mixed = kept("parallel.mixed_precision=true")
    _, whole = kept("model.dtype=float32")
    _, half = kept("model.dtype=bfloat16")
    assert settings.precision.matmul == "bfloat16" and settings.precision.autocast is None
    # Shards, optimizer state and reduced gradients as in float32; gathered weights and activations as in bfloat16.
    for name in ("parameters_bytes", "optimizer_bytes", "gradients_bytes"):
        assert getattr(mixed.weights, name) == getattr(whole.weights, name) == 2 * getattr(half.weights, name)
    assert 2 * mixed.weights.gathered_bytes == whole.weights.gathered_bytes == 2 * half.weights.gathered_bytes
    assert mixed.micro_batch.held_bytes == half.micro_batch.held_bytes < whole.micro_batch.held_bytes
    assert mixed.micro_batch.forward_seconds == half.micro_batch.forward_seconds
    # A layer's whole gradients in bfloat16, and their float32 in the buffer in which they are sent.
    layer = {layer: num_bytes for layer, num_bytes in half.weights.reduction_bytes.items() if layer == 1}
    assert mixed.weights.reduction_bytes[1] > layer[1]


def test_mixed_precision_that_training_refuses_is_refused(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    for overrides, message in (
        (["parallel.fsdp=2"], "which DeepseekV3ForCausalLM keeps in float32"),
        ([MIXTRAL], "mixed_precision=true has no effect where nothing is sharded"),
    ):
        with pytest.raises(ValueError, match=message):
            estimate_recipe(load_recipe(path, [*overrides, "parallel.mixed_precision=true"]), DEVICE)


def test_sequences_that_training_refuses_are_refused(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path), ["data.sequence_length=1024"])
    with pytest.raises(ValueError, match=r"data.sequence_length=1024 is more than the model's max_position_embeddings"):
        estimate_recipe(recipe, DEVICE)
