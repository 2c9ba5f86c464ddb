"""From a checked recipe to the objects of a run: training arguments, tokenizer, model, samples.

The keys of a model's configuration are checked here too, since that needs transformers.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flex_trainer.config import nearest
from flex_trainer.data import build_dataset, byte_tokenizer
from flex_trainer.data.samples import TokenDataset
from flex_trainer.errors import UserError, one_line
from flex_trainer.files import check_can_be_made
from flex_trainer.launch.distribute import check_mixed_precision, check_model, distribute, distributed_config
from flex_trainer.launch.model_memory import check_memory
from flex_trainer.launch.model_sizes import check_sizes
from flex_trainer.launch.recipe import Recipe
from flex_trainer.launch.training_fields import check_precision, check_training
from flex_trainer.launch.yaml import RecipeError

BYTE_TOKENIZER = "byt5"

# Keys of older configuration files that transformers still reads into `rope_parameters`.
_ROPE_KEYS = ("rope_theta", "rope_scaling", "partial_rotary_factor")

_CONFIG_READ = re.compile(r'(?:\bgetattr\((?:self\.)?config, "|\bconfig\.)(\w+)')


def check_recipe(recipe: Recipe) -> None:
    """Check what can be checked without loading weights or building a model.

    Raises:
        RecipeError: a misspelt or wrongly typed training argument, an unknown architecture or configuration key.
    """
    check_training(recipe)
    check_output(recipe)
    section = recipe.model
    # The configuration of a model on a hub may need a network, so it is looked at only where it is used.
    if section.architecture is not None or (section.name_or_path and Path(section.name_or_path).is_dir()):
        check_config(recipe, model_config(recipe))


def check_output(recipe: Recipe) -> None:
    """Raise RecipeError where the output directory is a file, or lies below one."""
    path = recipe.output_dir
    for one in (path, *path.parents):
        if one.exists() and not one.is_dir():
            raise RecipeError(
                f"{recipe.path.name}: training.output_dir: {str(path)!r} cannot be a directory: {str(one)!r} is a "
                "file; choose another"
            )


def check_output_writable(recipe: Recipe) -> None:
    """Find out now whether checkpoints, and the report when training ends, can be written. Makes nothing.

    Raises:
        RecipeError: a place that cannot be written to.
    """
    try:
        check_can_be_made(recipe.output_dir / "trainer_state.json", "training.output_dir: the run")
        if recipe.report.html is not None:
            report, output_dir = (recipe.output_dir / recipe.report.html).resolve(), recipe.output_dir.resolve()
            if report in (output_dir, *output_dir.parents):
                raise UserError(f"report.html: {recipe.report.html!r} is a directory; give a file name")
            check_can_be_made(report, "report.html: the report")
    except UserError as error:
        raise RecipeError(f"{recipe.path.name}: {error}") from error


def check_config(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Check a model's sizes, and whether it can be spread as the `parallel` section says.

    Raises:
        RecipeError: sizes that do not go together, fewer positions than the samples have tokens, no plan for an axis.
    """
    try:
        check_sizes(config)
    except ValueError as error:
        raise RecipeError(f"{recipe.path.name}: model.config.{one_line(error)}") from error
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and 0 <= positions < recipe.data.sequence_length:
        raise RecipeError(
            f"{recipe.path.name}: data.sequence_length={recipe.data.sequence_length} is more than the model's "
            f"max_position_embeddings={positions}; lower the one or raise the other in model.config"
        )
    try:
        check_model(recipe.parallel, config)
    except UserError as error:
        raise RecipeError(f"{recipe.path.name}: {error}") from error


def model_config(recipe: Recipe, tokenizer: Any = None) -> PreTrainedConfig:
    """The configuration of the recipe's model, random or loaded; see `random_config` and `loaded_config`."""
    return loaded_config(recipe) if recipe.model.architecture is None else random_config(recipe, tokenizer)


def training_arguments(recipe: Recipe) -> TrainingArguments:
    """The `training` section as TrainingArguments, with what follows from the other sections.

    Raises:
        RecipeError: a field that does not exist, has the wrong type, or that transformers refuses.
    """
    check_training(recipe)
    values = {
        "output_dir": str(recipe.output_dir),
        "report_to": list(recipe.report.to) or "none",
        "run_name": recipe.name,
        "dataloader_pin_memory": torch.cuda.is_available(),
        **recipe.training,
    }
    if recipe.data.sampling.lengths != "fixed" or recipe.data.sampling.domains == "blocked":
        # Samples of one micro-batch stand together in the dataset; a shuffle would tear them apart.
        strategy = values.setdefault("train_sampling_strategy", "sequential")
        if strategy != "sequential":
            raise RecipeError(
                f"{recipe.path.name}: training.train_sampling_strategy={strategy!r} would undo data.sampling, "
                "which draws length and domain per micro-batch; remove one of them"
            )
    try:
        args = TrainingArguments(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"{recipe.path.name}: training: {one_line(error)}") from error
    check_precision(recipe, args)
    return args


def build_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer of `data.tokenizer`: by default the model's own, or bytes for random weights."""
    name = recipe.data.tokenizer or recipe.model.name_or_path or BYTE_TOKENIZER
    if name == BYTE_TOKENIZER:
        return byte_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=recipe.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise RecipeError(f"{recipe.path.name}: tokenizer {name!r} cannot be loaded: {one_line(error)}") from error


def build_model(recipe: Recipe, tokenizer: Any) -> PreTrainedModel:
    """The model, with loaded or random weights, spread over the ranks as the `parallel` section says.

    Random weights are drawn from torch's global generator: seed it before, on every rank alike.

    Raises:
        RecipeError: weights that cannot be loaded or do not fit, a vocabulary smaller than the tokenizer's, too few
            positions, a model that cannot be spread so.
    """
    section = recipe.model
    chosen = {name: getattr(section, name) for name in ("attn_implementation", "experts_implementation")}
    options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    config = model_config(recipe, tokenizer)
    check_config(recipe, config)
    _check_vocabulary(recipe, config, tokenizer)
    distributed = distributed_config(recipe.parallel)
    try:
        if recipe.parallel.mixed_precision:
            check_mixed_precision(build_without_weights(recipe, config))
        if section.name_or_path is None:
            dtype = section.dtype or "float32"
            check_memory(recipe, build_without_weights(recipe, config, dtype=dtype))
            model = _from_config(recipe, config, dtype=dtype, **options)
            return model if distributed is None else distribute(model, distributed)
        if distributed is not None:
            options["distributed_config"] = distributed
        return AutoModelForCausalLM.from_pretrained(
            section.name_or_path,
            config=config,
            revision=section.revision or "main",
            trust_remote_code=section.trust_remote_code,
            dtype=section.dtype or "auto",
            **options,
        )
    except RecipeError:
        raise
    except (OSError, ValueError) as error:
        raise RecipeError(f"{recipe.path.name}: model: {one_line(error)}") from error


def build_without_weights(recipe: Recipe, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """The model on torch's meta device, where it takes no memory.

    Args:
        options: as for transformers' `from_config`.

    Raises:
        RecipeError: the model cannot be built from these sizes.
    """
    with torch.device("meta"):
        return _from_config(recipe, config, **options)


def _from_config(recipe: Recipe, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=recipe.model.trust_remote_code, **options)
    except Exception as error:  # what a model's code raises for sizes it cannot have is of any kind
        raise RecipeError(f"{recipe.path.name}: model: cannot be built: {_kind(error)}{one_line(error)}") from error


def _kind(error: Exception) -> str:
    return "" if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: "


def build_data(recipe: Recipe, args: TrainingArguments, tokenizer: Any) -> tuple[TokenDataset, TokenDataset | None]:
    """Training samples, and evaluation samples where `data.num_eval_samples` asks for some."""
    needed = None
    if args.max_steps > 0:
        needed = args.max_steps * args.gradient_accumulation_steps * args.per_device_train_batch_size * args.world_size
    try:
        dataset = build_dataset(recipe.data, tokenizer, args.per_device_train_batch_size, needed)
    except UserError as error:
        raise RecipeError(f"{recipe.path.name}: data: {error}") from error
    num_eval = recipe.data.num_eval_samples
    if not num_eval:
        return dataset, None
    if num_eval >= len(dataset):
        raise RecipeError(
            f"{recipe.path.name}: data.num_eval_samples={num_eval} leaves nothing of {len(dataset)} samples to train on"
        )
    return dataset.split_off(num_eval)


def random_config(recipe: Recipe, tokenizer: Any = None) -> PreTrainedConfig:
    """The configuration of `model.architecture` with the values of `model.config`.

    Vocabulary and special tokens come from the tokenizer where the recipe does not say them.

    Raises:
        RecipeError: no such architecture, one that is no causal language model, an unknown key, a value it refuses.
    """
    place = f"{recipe.path.name}: model"
    architecture = recipe.model.architecture or ""
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if architecture in CONFIG_MAPPING:
            raise RecipeError(f"{place}.architecture: {architecture!r} is not a causal language model in transformers")
        known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        hint = nearest(architecture, known)
        hint = hint if hint.startswith("did") else "see the model types of transformers"
        raise RecipeError(f"{place}.architecture: {architecture!r} is not known to transformers; {hint}")
    config_class = CONFIG_MAPPING[architecture]
    _check_config_keys(recipe, config_class)
    values = dict(recipe.model.config)
    if tokenizer is not None:
        values.setdefault("vocab_size", len(tokenizer))
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            values.setdefault(name, getattr(tokenizer, name))
    try:
        return config_class(**values)
    except Exception as error:  # strict configuration classes raise their own kinds for a value they refuse
        raise RecipeError(f"{place}.config: {one_line(error)}") from error


def loaded_config(recipe: Recipe) -> PreTrainedConfig:
    """The configuration of `model.name_or_path` with the values of `model.config`; weights are not looked at.

    Raises:
        RecipeError: it cannot be read, or a key that it does not have.
    """
    section = recipe.model
    try:
        config = AutoConfig.from_pretrained(
            section.name_or_path or "", revision=section.revision or "main", trust_remote_code=section.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{recipe.path.name}: model.name_or_path: {section.name_or_path!r} cannot be loaded "
            f"({one_line(error)}); give a directory with its config.json, or architecture and config"
        ) from error
    _check_config_keys(recipe, type(config))
    config.update(section.config)
    return config


def _check_config_keys(recipe: Recipe, config_class: type[PreTrainedConfig]) -> None:
    """Raise RecipeError for a `model.config` key that the architecture does not have."""
    known = {*vars(config_class()), *config_class.attribute_map}
    if is_dataclass(config_class):
        known.update(entry.name for entry in fields(config_class))
    if "rope_parameters" in known:
        known.update(_ROPE_KEYS)
    known = {name for name in known if not name.startswith("_")}
    place = f"{recipe.path.name}: model.config"
    for key, value in recipe.model.config.items():
        if key == "model_type" and value != config_class.model_type:
            raise RecipeError(f"{place}.model_type: {value!r} does not fit; this model is {config_class.model_type!r}")
        if key in known or key == "model_type" or key in _keys_the_model_reads(config_class):
            continue
        hint = nearest(key, sorted(known))
        hint = hint if hint.startswith("did") else "see its documentation in transformers"
        raise RecipeError(f"{place}.{key}: {config_class.__name__} has no such key; {hint}")


def _keys_the_model_reads(config_class: type[PreTrainedConfig]) -> set[str]:
    """Keys that a model's code asks for though its configuration class does not declare, as `head_dim` of Qwen3-MoE."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None)
    if not isinstance(model_class, type):  # a model whose code came with its weights
        return set()
    return set(_CONFIG_READ.findall(inspect.getsource(inspect.getmodule(model_class) or model_class)))


def _check_vocabulary(recipe: Recipe, config: PreTrainedConfig, tokenizer: Any) -> None:
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    if vocab_size is not None and vocab_size < len(tokenizer):
        raise RecipeError(
            f"{recipe.path.name}: model: vocab_size={vocab_size} is smaller than the tokenizer's {len(tokenizer)}; "
            "raise model.config.vocab_size or choose another data.tokenizer"
        )
