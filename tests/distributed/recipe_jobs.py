"""Recipes on the ranks of a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import set_seed

from flex_trainer.launch.build import build_model, build_tokenizer, training_arguments
from flex_trainer.launch.recipe import ParallelSection, Recipe, load_recipe
from flex_trainer.train import run
from tests import process_wide

process_wide.share()


def differences_from_one_process(path: str, overrides: list[str]) -> list[str]:
    """What of the model that the recipe builds here is not as one process builds it."""
    recipe = load_recipe(path, overrides)
    training_arguments(recipe)
    spread = _built(recipe)
    whole = _built(replace(recipe, parallel=ParallelSection()))
    wrong = []
    parameters = dict(spread.named_parameters())
    for name, expected in whole.named_parameters():
        found = parameters.pop(name, None)
        if not isinstance(found, DTensor):
            wrong.append(f"{name} is {type(found).__name__}")
        elif found.dtype != expected.dtype or not torch.equal(found.full_tensor(), expected):
            wrong.append(name)
    wrong += [f"{name} is not in one process" for name in parameters]
    buffers = dict(spread.named_buffers())
    for name, expected in whole.named_buffers():
        found = buffers[name]
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            wrong.append(name)
    if _is_tied(spread) != _is_tied(whole):
        wrong.append("embedding and head are not tied as they were")
    return wrong


def train(path: str, overrides: list[str]) -> dict[str, Any]:
    """A whole run: the series of losses and gradient norms, and what this rank saw."""
    trainer = run(load_recipe(path, overrides))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
        "rows": rows,
        "num_tokens": [record.num_tokens for record in trainer.flex.records],
        "limit_bytes": trainer.flex.limit_bytes,
        "num_pairs": sum(record.pair_ms > 0 for record in trainer.flex.records),
        "eval_losses": [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
    }


def _built(recipe: Recipe) -> nn.Module:
    set_seed(3)
    return build_model(recipe, build_tokenizer(recipe))


def _is_tied(model: Any) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight
