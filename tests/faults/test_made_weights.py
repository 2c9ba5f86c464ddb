"""Weights that are made when they are read: adapters on fused experts, parametrizations, dequantized 4-bit weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from flex_trainer.models.discovery import discover
from flex_trainer.strategy import Strategy
from flex_trainer.testing.steps import Choose, instrumented
from flex_trainer.testing.tiny import tiny_batch
from tests.faults.outcomes import EXACT, Body, Forward, assert_same, outcome
from tests.faults.small_models import one_step, small
from tests.tiers import sweep_over

peft = pytest.importorskip("peft")

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(architecture: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = small(architecture).to(dtype)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=PARAMETERS, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return adapted


EXPERT_PARTS = ("expert_permute", "expert_up", "expert_activation", "expert_down", "expert_unpermute")
CHOICES: dict[str, Choose] = {
    **EXACT,
    "recompute the experts": lambda site: Strategy.RECOMPUTE if site.kind == "experts" else Strategy.KEEP,
    "recompute parts of experts": lambda site: Strategy.RECOMPUTE if site.kind in EXPERT_PARTS else Strategy.KEEP,
}


def assert_exact(make: Callable[[], Any], body_of: Callable[[Any], Body]) -> None:
    """Each strategy from the first micro-batch of a model on, and for two of them."""
    model = make()
    plain = [outcome(model, body_of(model)) for _ in range(2)]
    for name, choose in CHOICES.items():
        model = make()
        with instrumented(model):
            for expected in plain:
                assert_same(outcome(model, body_of(model), choose), expected, name)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        *((name, torch.float32) for name in ("gpt_oss", "qwen3_moe", "mixtral", "deepseek_v3")),
        ("gpt_oss", torch.bfloat16),
    ],
)
def test_adapters_on_fused_experts(architecture: str, dtype: torch.dtype) -> None:
    assert_exact(lambda: adapted(architecture, dtype), lambda model: one_step(model.get_base_model()))


def test_adapters_on_fused_experts_without_an_expert_parallel_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are made in the forward of PEFT's module, so parts of the experts cannot run without it."""

    def make() -> Any:
        model = adapted("mixtral")
        monkeypatch.setattr(model.get_base_model(), "_ep_plan", {})
        experts = [operator.site.name for operator in discover(model).experts]
        assert experts == [f"base_model.model.model.layers.{layer}.mlp.experts" for layer in range(2)]
        return model

    assert_exact(make, lambda model: one_step(model.get_base_model()))


class Scaled(nn.Module):
    """A weight that is computed from what is stored, with something for autograd to save."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        return (stored * self.gain).tanh()


class Halved(nn.Module):
    """Stands for weights of 4 bits: integers are stored, and numbers made of them at each access."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.codes = nn.Buffer((linear.weight.detach() * 64).round().to(torch.int8))
        self.scale = nn.Parameter(torch.tensor(1 / 64))

    @property
    def weight(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and "layers" in name]


def parametrized(model: Any) -> None:
    for module in [*model.modules()]:
        if hasattr(module, "gate_up_proj") and isinstance(module.gate_up_proj, nn.Parameter):
            parametrize.register_parametrization(module, "gate_up_proj", Scaled(module.gate_up_proj.shape[-1]))
    for linear in linears(model):
        parametrize.register_parametrization(linear, "weight", Scaled(linear.in_features))


def weight_norm(model: Any) -> None:
    for linear in linears(model):
        parametrizations.weight_norm(linear)


def weight_norm_by_hooks(model: Any) -> None:
    for linear in linears(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.utils.weight_norm(linear)


def spectral_norm_by_hooks(model: Any) -> None:
    """Its hook makes another weight in every forward."""
    for linear in linears(model):
        nn.utils.spectral_norm(linear)


def four_bits(model: Any) -> None:
    for parent in [*model.model.layers.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(parent, name, Halved(child))


@pytest.mark.parametrize(
    "cached",
    sweep_over(
        ["not cached", "cached forward", "cached forward and backward"],
        quick=["not cached", "cached forward and backward"],
    ),
)
@pytest.mark.parametrize(
    "change",
    [
        parametrized,
        pytest.param(weight_norm, marks=pytest.mark.sweep),
        weight_norm_by_hooks,
        pytest.param(spectral_norm_by_hooks, marks=pytest.mark.sweep),
        pytest.param(four_bits, marks=pytest.mark.sweep),
    ],
)
def test_weights_that_are_made_when_read(change: Callable[[Any], None], cached: str) -> None:
    def make() -> Any:
        model = small("mixtral")
        # One projection in both layers: the second finds the weight made.
        model.model.layers[1].self_attn.o_proj = model.model.layers[0].self_attn.o_proj
        torch.manual_seed(1)
        change(model)
        return model

    def body_of(model: Any) -> Body:
        inputs = {**tiny_batch(model, 2, 10), "use_cache": False}

        def body(forward: Forward) -> list[torch.Tensor]:
            with parametrize.cached() if "backward" in cached else nullcontext():
                losses = []
                for _ in range(2):  # both before the first backward
                    with parametrize.cached() if cached == "cached forward" else nullcontext():
                        losses.append(forward(**inputs).loss)
                (losses[0] * losses[1]).backward()
            return losses

        return body

    assert_exact(make, body_of)


def test_what_is_made_is_an_activation() -> None:
    model = small("mixtral")
    parametrized(model)
    with instrumented(model):
        got = outcome(model, one_step(model), EXACT["keep"])
    plain_model = small("mixtral")
    with instrumented(plain_model):
        plain = outcome(plain_model, one_step(plain_model), EXACT["keep"])
    made_bytes = sum(4 * parameter.numel() for name, parameter in model.named_parameters() if name.endswith("original"))
    more_bytes = got.ledgers[0].demand_bytes - plain.ledgers[0].demand_bytes
    # tanh saves its result, which is the weight.
    assert more_bytes == made_bytes
