"""The part of a recipe's checks that needs transformers, and the objects made from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import set_seed

from flex_trainer.launch.build import (
    build_data,
    build_model,
    build_tokenizer,
    check_recipe,
    random_config,
    training_arguments,
)
from flex_trainer.launch.recipe import Recipe, load_recipe
from flex_trainer.launch.yaml import RecipeError

TINY = """
model:
  architecture: qwen3_moe
  config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16,
           moe_intermediate_size: 16, intermediate_size: 32, num_experts: 4, num_experts_per_tok: 2}
data: {name: stdlib, sequence_length: 64, domains: [data]}
training: {max_steps: 3, per_device_train_batch_size: 2, gradient_accumulation_steps: 2, use_cpu: true}
"""


@pytest.fixture
def tiny(tmp_path: Path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)

    def load(*overrides: str) -> Recipe:
        return load_recipe(str(path), [f"training.output_dir={tmp_path / 'out'}", *overrides])

    return load


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.architecture=qwen3_mo", "model.architecture: 'qwen3_mo' is not known to transformers; did you mean"),
        ("model.architecture=clip", "model.architecture: 'clip' is not a causal language model"),
        ("model.config.num_expert=4", "model.config.num_expert: Qwen3MoeConfig has no such key; did you mean"),
        ("model.config.model_type=mixtral", "model.config.model_type: 'mixtral' does not fit"),
        ("model.config.hidden_size=wide", "model.config: "),
        ("training.lerning_rate=1", "training.lerning_rate: TrainingArguments has no such field; did you mean 'lear"),
        ("training.max_steps=1.5", "training.max_steps: 1.5 is float, but int is needed"),
        ("training.max_steps=true", "training.max_steps: True is bool, but int is needed"),
        ("training.bf16=yes", "training.bf16: 'yes' is not a boolean; write true"),
        ("training.learning_rate='1'", "training.learning_rate: '1' is str, but float is needed"),
    ],
)
def test_mistakes_that_transformers_knows(tiny, override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recipe(tiny(override))
    assert message in str(caught.value)
    assert str(caught.value).startswith("tiny.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["rope_theta", "num_local_experts"])
def test_keys_of_older_configurations_are_known(tiny, key: str) -> None:
    check_recipe(tiny(f"model.config.{key}=4"))


def test_a_value_transformers_refuses_is_one_line(tiny) -> None:
    with pytest.raises(RecipeError, match=r"tiny\.yaml: training: adamw_torchh") as caught:
        training_arguments(tiny("training.optim=adamw_torchh"))
    assert "\n" not in str(caught.value)


def test_training_arguments(tiny) -> None:
    args = training_arguments(tiny("training.learning_rate=1", "training.warmup_steps=2"))
    assert (args.max_steps, args.learning_rate, args.report_to) == (3, 1, [])
    assert args.run_name == "tiny"
    assert args.train_sampling_strategy == "random"


def test_drawn_lengths_keep_the_order(tiny) -> None:
    assert training_arguments(tiny("data.sampling.lengths=skewed")).train_sampling_strategy == "sequential"
    assert training_arguments(tiny("data.sampling.domains=blocked")).train_sampling_strategy == "sequential"
    with pytest.raises(RecipeError, match="would undo data.sampling"):
        training_arguments(tiny("data.sampling.lengths=skewed", "training.train_sampling_strategy=random"))


def test_random_model_follows_the_tokenizer(tiny) -> None:
    recipe = tiny()
    tokenizer = build_tokenizer(recipe)
    config = random_config(recipe, tokenizer)
    assert (config.vocab_size, config.pad_token_id, config.eos_token_id) == (384, 0, 1)
    set_seed(1)
    first = build_model(recipe, tokenizer)
    set_seed(1)
    second = build_model(recipe, tokenizer)
    assert type(first).__name__ == "Qwen3MoeForCausalLM"
    assert first.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_dtype(tiny) -> None:
    recipe = tiny("model.dtype=bfloat16")
    assert build_model(recipe, build_tokenizer(recipe)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.config.vocab_size=100", "vocab_size=100 is smaller than the tokenizer's 384"),
        ("model.config.max_position_embeddings=32", "data.sequence_length=64 is more than the model's"),
        ("model.attn_implementation=flashy", "tiny.yaml: model: "),
    ],
)
def test_what_does_not_fit(tiny, override: str, message: str) -> None:
    recipe = tiny(override)
    with pytest.raises(RecipeError) as caught:
        build_model(recipe, build_tokenizer(recipe))
    assert message in str(caught.value)


def test_data_covers_max_steps(tiny) -> None:
    recipe = tiny()
    dataset, evaluation = build_data(recipe, training_arguments(recipe), build_tokenizer(recipe))
    assert len(dataset) == 3 * 2 * 2  # steps x accumulation x batch
    assert evaluation is None


def test_evaluation_samples_are_set_aside(tiny) -> None:
    recipe = tiny("data.num_eval_samples=4")
    dataset, evaluation = build_data(recipe, training_arguments(recipe), build_tokenizer(recipe))
    assert evaluation is not None
    assert (len(dataset), len(evaluation)) == (12, 4)
    seen = {sample.tobytes() for sample in dataset.samples}
    assert not any(sample.tobytes() in seen for sample in evaluation.samples)


def test_saved_model_is_loaded_and_its_config_changed(tiny, tmp_path: Path) -> None:
    recipe = tiny()
    tokenizer = build_tokenizer(recipe)
    saved = build_model(recipe, tokenizer)
    saved.save_pretrained(tmp_path / "model")
    loaded = tiny(
        "model.architecture=null",
        "model.config={output_router_logits: true}",
        f"model.name_or_path={tmp_path / 'model'}",
        "data.tokenizer=byt5",
    )
    model = build_model(loaded, build_tokenizer(loaded))
    assert model.config.output_router_logits is True
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
    wrong = tiny(
        "model.architecture=null",
        "model.config={output_router_logit: true}",
        f"model.name_or_path={tmp_path / 'model'}",
        "data.tokenizer=byt5",
    )
    with pytest.raises(RecipeError, match="did you mean 'output_router_logits'"):
        build_model(wrong, build_tokenizer(wrong))


def test_weights_and_tokenizers_that_are_not_there(tiny) -> None:
    recipe = tiny("model.architecture=null", "model.config={}", "model.name_or_path=./nowhere", "data.tokenizer=byt5")
    with pytest.raises(RecipeError, match=r"model\.name_or_path: './nowhere' cannot be loaded"):
        build_model(recipe, build_tokenizer(recipe))
    with pytest.raises(RecipeError, match=r"tokenizer './nowhere' cannot be loaded"):
        build_tokenizer(tiny("data.tokenizer=./nowhere"))
