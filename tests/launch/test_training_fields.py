"""The training section: values that no training can have, one rule for booleans, trackers."""

from __future__ import annotations

from pathlib import Path

import pytest

from flex_trainer.launch import training_fields
from flex_trainer.launch.build import check_recipe
from flex_trainer.launch.recipe import load_recipe
from flex_trainer.launch.training_fields import check_trackers_installed
from flex_trainer.launch.yaml import RecipeError


@pytest.fixture
def recipe_with(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text("model: {architecture: llama}\ndata: {name: stdlib}\n")
    return lambda *overrides: load_recipe(str(path), overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("per_device_train_batch_size=0", "per_device_train_batch_size: 0 must be at least 1"),
        ("per_device_train_batch_size=-1", "per_device_train_batch_size: -1 must be at least 1"),
        ("gradient_accumulation_steps=0", "gradient_accumulation_steps: 0 must be at least 1"),
        ("gradient_accumulation_steps=two", "'two' is str, but int is needed"),
        ("per_device_eval_batch_size=0", "per_device_eval_batch_size: 0 must be at least 1"),
        ("learning_rate=-1", "learning_rate: -1 must not be negative"),
        ("learning_rate=.nan", "learning_rate: nan is not a finite number"),
        ("weight_decay=-0.1", "weight_decay: -0.1 must not be negative"),
        ("num_train_epochs=0", "num_train_epochs: 0 must be above 0"),
        ("max_steps=0", "max_steps: 0 must be at least 1, or -1 for as many"),
        ("logging_steps=0", "logging_steps: 0 must be above 0"),
        ("adam_beta1=1.0", "adam_beta1: 1.0 must be at least 0 and below 1"),
        ("seed=-1", "seed: -1 must not be negative"),
        ("output_dir=5", "output_dir: 5 is int, but str or null is needed"),
        ("report_to=[wanddb]", "report_to: no tracker of transformers is called 'wanddb'; did you mean 'wandb'?"),
    ],
)
def test_values_that_cannot_be(recipe_with, override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe_with(f"training.{override}"))
    assert str(caught.value).startswith("r.yaml: training.") and message in str(caught.value)


@pytest.mark.parametrize("override", ["max_steps=-1", "logging_steps=0.5", "learning_rate=0", "report_to=none"])
def test_values_at_the_edge(recipe_with, override: str) -> None:
    check_recipe(recipe_with(f"training.{override}"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.bf16=\u201ctrue\u201d", "training.bf16: the text '\u201ctrue\u201d' is not a boolean; write true unquoted"),  # noqa: E501
        ("training.bf16=yes", "training.bf16: 'yes' is not a boolean; write true"),
        ("training.bf16=on", "training.bf16: 'on' is not a boolean; write true"),
        ("training.bf16=1", "training.bf16: 1 is not a boolean; write true"),
        ("training.bf16=0", "training.bf16: 0 is not a boolean; write false"),
        ("training.tf32=off", "training.tf32: 'off' is not a boolean; write false"),
        ("training.accelerator_config={split_batches: yes}", "accelerator_config.split_batches: 'yes' is not a boolean"),  # noqa: E501
        ("training.gradient_checkpointing_kwargs={use_reentrant: no}", "use_reentrant: 'no' is not a boolean; write false"),  # noqa: E501
        ("flex.trace=yes", "flex: trace='yes' must be 'auto', true or false"),
        ("flex.trace=1", "flex: trace=1 must be 'auto', true or false"),
        ("flex.enforce_limit=on", "flex.enforce_limit: 'on' must be true or false"),
        ("parallel.mixed_precision=1", "parallel.mixed_precision: input should be a valid boolean, found 1"),
        ("model.trust_remote_code=yes", "model.trust_remote_code: input should be a valid boolean, found 'yes'"),
        ("model.config.use_cache=\u00abfalse\u00bb", "model.config.use_cache: the text '\u00abfalse\u00bb' is not a boolean"),  # noqa: E501
    ],
)  # fmt: skip
def test_only_true_and_false_are_booleans(recipe_with, override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe_with(override))
    assert message in str(caught.value)


@pytest.mark.parametrize("override", ["training.save_strategy=no", "training.include_num_input_tokens_seen=no"])
def test_words_that_are_no_booleans_stay(recipe_with, override: str) -> None:
    check_recipe(recipe_with(override))


def test_trackers_that_are_not_installed(recipe_with, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_fields, "get_available_reporting_integrations", lambda: ["tensorboard"])
    check_trackers_installed(recipe_with("report.to=[tensorboard]"))
    check_trackers_installed(recipe_with("report.to=[all]"))
    with pytest.raises(RecipeError, match=r"report.to: 'wandb' is not installed here; .*installed: tensorboard"):
        check_trackers_installed(recipe_with("report.to=[wandb]"))
