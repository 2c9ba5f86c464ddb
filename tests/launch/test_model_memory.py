"""Weights that cannot fit are refused before they are drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flex_trainer.launch.build import build_model, build_tokenizer, build_without_weights, random_config
from flex_trainer.launch.model_memory import check_memory
from flex_trainer.launch.recipe import Recipe, load_recipe
from flex_trainer.launch.yaml import RecipeError
from flex_trainer.runtime import FlexRuntime
from tests.fake_meter import FakeMeter

SMALL = """
model:
  architecture: qwen3_moe
  config: {hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32,
           moe_intermediate_size: 96, intermediate_size: 64, num_experts: 16, num_experts_per_tok: 2}
data: {name: stdlib, sequence_length: 64, domains: [data]}
training: {max_steps: 3, use_cpu: true}
"""
NUM_BYTES = 5_524_480
"""Of its weights in float32."""


@pytest.fixture
def small(tmp_path: Path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return lambda *overrides: load_recipe(str(path), overrides)


def without_weights(recipe: Recipe):
    config = random_config(recipe, build_tokenizer(recipe))
    return build_without_weights(recipe, config, dtype=recipe.model.dtype or "float32")


def test_an_architecture_with_its_defaults_is_refused_at_once(small) -> None:
    sizes = "{num_hidden_layers: 4, num_experts: 128}"
    recipe = small(f"model.config={sizes}", "flex.memory_limit=1.4GiB")
    with pytest.raises(RecipeError) as caught:
        build_model(recipe, build_tokenizer(recipe))
    message = str(caught.value)
    assert message.startswith("small.yaml: model: 2.5 billion parameters take 9.")
    assert "GiB in float32, more than flex.memory_limit=1.4GiB; give smaller sizes in model.config" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"flex.memory_limit={NUM_BYTES - 1}",), f"flex.memory_limit={NUM_BYTES - 1} (5.27 MiB)"),
        (("flex.memory_limit=0.001",), "flex.memory_limit=0.001 (976.56 KiB); "),
        (("flex.memory_limit=2MiB", "model.dtype=bfloat16"), "take 2.63 MiB in bfloat16, more than"),
        (("flex.memory_limit=1MB", "parallel={fsdp: 2, ep: 2}"), "in float32, 2.63 MiB on each of 2 ranks, more than"),
        (("flex.memory_limit=5MB", "flex.strategies=[]", "flex.enforce_limit=true"), "more than flex.memory_limit=5MB"),
    ],
)
def test_what_is_refused(small, overrides: tuple[str, ...], message: str) -> None:
    recipe = small(*overrides)
    with pytest.raises(RecipeError) as caught:
        check_memory(recipe, without_weights(recipe), FakeMeter(FlexRuntime()))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        (f"flex.memory_limit={NUM_BYTES}",),
        ("flex.memory_limit=3MB", "model.dtype=bfloat16"),
        ("flex.memory_limit=3MB", "parallel={fsdp: 2, ep: 2}"),
        ("flex.memory_limit=1MB", "flex.strategies=[]"),  # watched only
        (),
    ],
)
def test_what_fits_is_not(small, overrides: tuple[str, ...]) -> None:
    recipe = small(*overrides)
    check_memory(recipe, without_weights(recipe), FakeMeter(FlexRuntime()))


def test_more_than_the_machine_has_is_refused_whatever_the_limit(small) -> None:
    class SmallMachine(FakeMeter):
        def device_bytes(self) -> int:
            return NUM_BYTES - 1

    recipe = small("flex.memory_limit=100GiB", "parallel={fsdp: 2, ep: 2}")
    with pytest.raises(RecipeError, match="more than the 5.27 MiB of this machine's memory"):
        check_memory(recipe, without_weights(recipe), SmallMachine(FlexRuntime()))


def test_the_question_draws_no_random_numbers(small) -> None:
    before = torch.get_rng_state()
    without_weights(small())
    assert torch.equal(torch.get_rng_state(), before)
