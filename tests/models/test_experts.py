"""The five expert operators compute what transformers' grouped matmul computes, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.integrations.moe import grouped_mm_experts_forward

from flex_trainer.experts.operators import run_plainly
from flex_trainer.models.discovery import find_experts
from flex_trainer.models.experts import split_experts_forward
from flex_trainer.testing.tiny import tiny_model


def both(experts: Any, num_tokens: int, top_k_index: torch.Tensor) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weight = experts.gate_up_proj if experts.has_gate else experts.up_proj
    width = weight.shape[1 if experts.is_transposed else 2]
    hidden = torch.randn(num_tokens, width, generator=generator)
    weights = torch.rand(top_k_index.shape, generator=generator)
    results = []
    for function in (
        grouped_mm_experts_forward,
        lambda experts, *args: split_experts_forward(experts, run_plainly, *args),
    ):
        experts.zero_grad(set_to_none=True)
        inputs = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        output = function(experts, inputs[0], top_k_index, inputs[1])
        (output * output.detach().cos()).sum().backward()
        gradients = [tensor.grad for tensor in (*inputs, *experts.parameters())]
        results.append([output.detach(), *(gradient for gradient in gradients if gradient is not None)])
    return results


@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark", "aria_text", "deepseek_v4"]
)
@pytest.mark.parametrize("routing", ["random", "all to one", "one unused", "one token", "no tokens"])
def test_equal_to_the_undivided_forward(architecture: str, routing: str):
    experts: Any = next(iter(find_experts(tiny_model(architecture))))
    num_tokens = {"one token": 1, "no tokens": 0}.get(routing, 12)
    index = torch.randint(0, 8, (num_tokens, 2), generator=torch.Generator().manual_seed(1))
    if routing == "all to one":
        index.fill_(3)
    if routing == "one unused":
        index[index == 5] = 4
    undivided, divided = both(experts, num_tokens, index)
    assert len(undivided) == len(divided) >= 5
    assert all(torch.equal(a, b) for a, b in zip(undivided, divided, strict=True))


def test_operators_run_in_order_and_hold_no_input():
    """What a recomputation keeps of an operator must not keep the block's input alive: a producer may have dropped
    it."""
    experts = next(iter(find_experts(tiny_model("qwen3_moe"))))
    ran: list[str] = []
    functions: list[Callable[..., Any]] = []

    def run(name: str, function: Callable[..., Any], *args: Any) -> Any:
        ran.append(name)
        functions.append(function)
        return function(*args)

    hidden = torch.randn(4, 32)
    split_experts_forward(experts, run, hidden, torch.zeros(4, 2, dtype=torch.int64), torch.rand(4, 2))
    assert ran == ["permute", "up", "activation", "down", "unpermute"]

    def reached(function: Callable[..., Any]) -> list[Any]:
        inside = [cell.cell_contents for cell in function.__closure__ or ()]
        functions_inside = [value for value in inside if hasattr(value, "__closure__")]
        return inside + [deeper for value in functions_inside for deeper in reached(value)]

    for function in functions:
        assert all(value is not hidden for value in reached(function))
