"""Each change of what is trained or how it runs has another name, and a change back has the former one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from flex_trainer.models.run_state import RunState
from flex_trainer.testing.tiny import tiny_model


def freeze(model: PreTrainedModel, on: bool) -> None:
    model.get_input_embeddings().requires_grad_(not on)


def eager(model: PreTrainedModel, on: bool) -> None:
    model.set_attn_implementation("eager" if on else "sdpa")


def looped_experts(model: PreTrainedModel, on: bool) -> None:
    model.set_experts_implementation("eager" if on else "grouped_mm")


def attention_dropout(model: PreTrainedModel, on: bool) -> None:
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            setattr(module, "attention_dropout", 0.1 if on else 0.0)  # noqa: B010


def dropout_module(model: PreTrainedModel, on: bool) -> None:
    model.extra.p = 0.1 if on else 0.0  # type: ignore[union-attr]


def jitter(model: PreTrainedModel, on: bool) -> None:
    for module in model.modules():
        if hasattr(module, "jitter_noise"):
            setattr(module, "jitter_noise", 0.1 if on else 0.0)  # noqa: B010


def one_module_in_evaluation(model: PreTrainedModel, on: bool) -> None:
    model.model.layers[1].mlp.train(not on)


def router_logits(model: PreTrainedModel, on: bool) -> None:
    model.config.output_router_logits = on


def input_gradients(model: PreTrainedModel, on: bool) -> None:
    model.enable_input_require_grads() if on else model.disable_input_require_grads()


def kernels(model: PreTrainedModel, on: bool) -> None:
    torch.backends.cuda.enable_flash_sdp(not on)


CHANGES: list[Callable[[PreTrainedModel, bool], None]] = [
    freeze,
    eager,
    looped_experts,
    attention_dropout,
    dropout_module,
    jitter,
    one_module_in_evaluation,
    router_logits,
    input_gradients,
    kernels,
]


def model_with_dropout() -> PreTrainedModel:
    model = tiny_model("mixtral", attn_implementation="sdpa")
    model.config.router_jitter_noise = 0.0
    model.add_module("extra", nn.Dropout(0.0))
    return model


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen_and_a_change_back_is_recognized(change: Callable[[PreTrainedModel, bool], None]) -> None:
    model = model_with_dropout()
    change(model, False)
    state = RunState(model)
    before = state.name()
    assert state.name() == before
    change(model, True)
    during = state.name()
    change(model, False)
    assert during != before and state.name() == before


def test_equal_states_of_equal_models_have_equal_names() -> None:
    assert RunState(model_with_dropout()).name() == RunState(model_with_dropout()).name()


def test_weights_and_gradients_are_no_part_of_it() -> None:
    model = model_with_dropout()
    state = RunState(model)
    before = state.name()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.data.add_(1)
    assert state.name() == before
