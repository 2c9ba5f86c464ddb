"""Parts that torch's checkpoint runs again: turned off where there is a switch, else left alone, and said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import checkpoint

from flex_trainer.config import FlexConfig
from flex_trainer.models.discovery import discover
from flex_trainer.runtime import FlexRuntime
from flex_trainer.symbolic.forward import SymbolicModel
from flex_trainer.testing.steps import instrumented
from flex_trainer.testing.tiny import tiny_batch
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.faults.outcomes import STRATEGIES, assert_same, outcome
from tests.faults.small_models import one_step, small


def reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def not_reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


def on_cpu(function: Callable[..., Any], *args: Any) -> Any:
    with save_on_cpu():
        return function(*args)


def in_its_forward(model: Any, run: Callable[..., Any], part: str) -> None:
    """A user's class that checkpoints one of its parts."""
    parts = [layer.get_submodule(part) if part else layer for layer in model.model.layers]
    kind: Any = type(parts[0])

    class Checkpointed(kind):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return run(lambda x: kind.forward(self, x, *args, **kwargs), hidden_states)

    for inner in parts:
        inner.__class__ = Checkpointed


@pytest.mark.parametrize("run", [reentrant, not_reentrant, on_cpu])
@pytest.mark.parametrize("part", ["mlp", ""], ids=["block", "layer"])
def test_checkpoint_in_a_forward_is_left_alone(part: str, run: Callable[..., Any]) -> None:
    model = small("mixtral")
    in_its_forward(model, run, part)
    body = one_step(model)
    plain = outcome(model, body)
    with instrumented(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, choose in STRATEGIES.items():
            if name != "quantize":
                assert_same(outcome(model, body, choose), plain, name)


def test_what_is_left_alone_is_said_once(recwarn: pytest.WarningsRecorder) -> None:
    model = small("mixtral")
    in_its_forward(model, not_reentrant, "mlp")
    with instrumented(model):
        outcome(model, one_step(model), STRATEGIES["mixed"])
    said = [str(warning.message) for warning in recwarn if "not FlexTrainer's" in str(warning.message)]
    assert len(said) == 1 and "torch.utils.checkpoint" in said[0]
    assert said[0].startswith("Inside model.layers.0")


WRAPPERS = {
    "checkpoint": checkpoint_wrapper,
    "reentrant": lambda module: checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.REENTRANT),
    "offload": offload_wrapper,
}


def wrap(model: Any, name: str, part: str) -> None:
    layers = {module for module in model.modules() if module in set(model.model.layers)}
    parts = {layer.get_submodule(part) if part else layer for layer in layers}
    apply_activation_checkpointing(model, WRAPPERS[name], lambda module: module in parts)


@pytest.mark.parametrize(
    "part", [pytest.param("mlp", id="block", marks=pytest.mark.sweep), pytest.param("", id="layer")]
)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_off_while_the_model_is_managed(name: str, part: str) -> None:
    model, wrapped = small("mixtral"), small("mixtral")
    wrapped.load_state_dict(model.state_dict())
    wrap(wrapped, name, part)
    expected = [(operator.site.kind, operator.site.layer) for operator in discover(model).operators]
    assert [(operator.site.kind, operator.site.layer) for operator in discover(wrapped).operators] == expected
    batch = tiny_batch(model, 2, 10)
    model(**batch).loss.backward()

    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 700_000, strategies=("recompute",)))
    with_fake_meter(runtime)
    with pytest.warns(UserWarning, match="checkpointing is on"):
        runtime.attach(wrapped)
    for _ in range(2):
        wrapped.zero_grad()
        with runtime.backward():
            wrapped(**batch).loss.backward()
    records = runtime.records
    runtime.detach()

    assert not records[0].is_profile, "the model was traced, the wrappers as they are in the run"
    for record in records:
        assert record.predicted_bytes == record.actual_bytes > 0
    gradients = dict(wrapped.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        key = next(key for key in gradients if key.replace("_checkpoint_wrapped_module.", "") == parameter_name)
        assert torch.equal(gradients[key].grad, parameter.grad), parameter_name
    assert not any("forward" in vars(module) for module in wrapped.modules()), "given back as it was"
    assert any(isinstance(module, CheckpointWrapper) for module in wrapped.modules()) or name == "offload"


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_trace_sees_checkpointing_as_it_runs(is_reentrant: bool) -> None:
    """Off in a managed model, so off in its trace; on in any other."""
    model = small("llama")
    batch = tiny_batch(model, 2, 16)
    plain_bytes = SymbolicModel(model, torch.device("cpu"), False).trace((), batch).held_bytes
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    assert SymbolicModel(model, torch.device("cpu"), False).trace((), batch).held_bytes < plain_bytes / 2
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 50_000_000))
    with_fake_meter(runtime)
    with pytest.warns(UserWarning, match="checkpointing is on"):
        runtime.attach(model)
    with runtime.backward():
        model(**batch).loss.backward()
    runtime.detach()
    [record] = runtime.records
    assert record.predicted_bytes == record.actual_bytes == plain_bytes
    assert isinstance(model, nn.Module) and model.is_gradient_checkpointing
