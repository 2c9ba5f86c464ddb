"""Checkpointing of transformers goes off and comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from flex_trainer.models.checkpointing import is_checkpointing, stop_checkpointing
from flex_trainer.testing.tiny import tiny_model


def state_of(model: nn.Module) -> list[tuple[Any, ...]]:
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    return [tuple(vars(module).get(name) for name in names) for module in model.modules()]


@pytest.mark.parametrize("every_n_layers", [1, 2])
def test_flags_and_arguments_come_back(every_n_layers: int) -> None:
    model = tiny_model("mixtral")
    never = state_of(model)
    model.activation_checkpointing_enable({"use_reentrant": True}, every_n_layers=every_n_layers)
    before = state_of(model)
    assert before != never and is_checkpointing(model)
    restore = stop_checkpointing(model)
    assert not is_checkpointing(model) and not model.is_activation_checkpointing
    restore()
    assert state_of(model) == before
    assert model.is_activation_checkpointing
    restore()
    assert state_of(model) == before


def test_without_checkpointing_nothing_is_touched() -> None:
    model = tiny_model("mixtral")
    before = state_of(model)
    assert not is_checkpointing(model)
    restore = stop_checkpointing(model)
    assert state_of(model) == before
    restore()
    assert state_of(model) == before
