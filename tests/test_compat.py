"""What stands on private names of the libraries below does what the rest of the project takes it to do."""

from __future__ import annotations

from typing import Any

import torch

from flex_trainer.compat import is_in_backward


class Asks(torch.autograd.Function):
    """The identity; its backward notes whether it knows that it is one."""

    answers: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Asks.answers.append(is_in_backward())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Asks.answers.append(is_in_backward())
        return gradients[0]


def test_a_backward_is_told_from_a_forward() -> None:
    Asks.answers.clear()
    result: Any = Asks.apply(torch.ones(2, requires_grad=True))
    result.sum().backward()
    assert Asks.answers == [False, True] and not is_in_backward()
