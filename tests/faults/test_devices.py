"""Tensors of another device inside a model: they stay as they are, under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer.testing.steps import instrumented
from tests.faults.outcomes import STRATEGIES, assert_same, outcome
from tests.faults.small_models import one_step, small


class Elsewhere(torch.autograd.Function):
    """Needs sizes only in backward, and keeps them in a tensor without data."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, sizes)
        return x * (sizes.dim() / 4)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, sizes = ctx.saved_tensors
        assert sizes.device.type == "meta" and x.shape == sizes.shape
        return gradients[0] * (sizes.dim() / 4), None


class Norm(nn.Module):
    """Saves one such tensor that it makes, and one that it is given, which it also hands on."""

    def __init__(self, inner: nn.Module, given: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.given = given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty(x.shape, device="meta")
        x = Elsewhere.apply(x, made)  # pyright: ignore[reportAssignmentType]
        return self.inner(Elsewhere.apply(x, self.given)).sin()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_tensor_without_data_inside_an_operator(name: str) -> None:
    model = small("llama")
    for layer in model.model.layers:
        given = torch.empty(2, 10, model.config.hidden_size, device="meta")
        layer.input_layernorm = Norm(layer.input_layernorm, given)
        layer.mlp.act_fn = Norm(layer.mlp.act_fn, torch.empty(2, 10, model.config.intermediate_size, device="meta"))
    body = one_step(model)
    plain = outcome(model, body)
    with instrumented(model):
        assert_same(outcome(model, body, STRATEGIES[name]), plain, name)
