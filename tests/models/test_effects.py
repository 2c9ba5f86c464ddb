"""What is traced unasked: libraries as they are. Everything else may have effects that a trace would have too."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral import modeling_mixtral

from flex_trainer.config import FlexConfig
from flex_trainer.models.effects import foreign_code
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.steps import instrumented
from flex_trainer.testing.tiny import FAMILIES, tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter

peft = pytest.importorskip("peft")


def in_disguise(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that has the names of what it wraps."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers_are_known(family: str) -> None:
    model = tiny_model(family)
    assert foreign_code(model) is None
    with instrumented(model):
        assert foreign_code(model) is None, "what manages the model is not foreign to it"


def test_what_libraries_put_around_a_model_is_known() -> None:
    model: Any = tiny_model("mixtral")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], task_type="CAUSAL_LM"
    )
    model.enable_input_require_grads()
    adapted = peft.get_peft_model(model, config)
    adapted.gradient_checkpointing_enable()
    AcceleratorState._reset_state()  # another test of this process may have chosen another precision
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(adapted)
    AcceleratorState._reset_state()
    assert "forward" in vars(prepared)
    with instrumented(prepared):
        assert foreign_code(prepared) is None
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.o_proj)
    assert foreign_code(adapted) is None


class OnlyData(LlamaForCausalLM):
    _keys_to_ignore_on_save = ["nothing"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)


def test_a_class_of_ones_own_that_runs_nothing_is_known() -> None:
    assert foreign_code(OnlyData(tiny_model("llama").config)) is None


def replaced_method(model: Any, patch: pytest.MonkeyPatch) -> str:
    kind = modeling_mixtral.MixtralTopKRouter
    patch.setattr(kind, "forward", in_disguise(kind.forward))
    return r"MixtralTopKRouter.forward was replaced by .* of tests"


def replaced_forward(model: Any, patch: pytest.MonkeyPatch) -> str:
    gate = model.model.layers[1].mlp.gate
    gate.forward = in_disguise(gate.forward)
    return r"'model.layers.1.mlp.gate' .*its forward was replaced by .* of tests"


def replaced_forward_that_libraries_wrap(model: Any, patch: pytest.MonkeyPatch) -> str:
    gate = model.model.layers[1].mlp.gate
    gate.forward = torch.no_grad()(in_disguise(gate.forward))
    return r"its forward was replaced by .* of tests"


def forward_that_a_library_wraps(model: Any, patch: pytest.MonkeyPatch) -> str:
    mlp = model.model.layers[0].mlp
    mlp.forward = functools.partial(functools.partial(in_disguise(mlp.forward)))
    return r"its forward was replaced by .* of tests"


def class_of_ones_own(model: Any, patch: pytest.MonkeyPatch) -> str:
    norm = model.model.layers[1].input_layernorm

    class Norm(type(norm)):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states)

    norm.__class__ = Norm
    return r"'model.layers.1.input_layernorm' \(Norm\): forward is defined by Norm of tests"


def property_of_ones_own(model: Any, patch: pytest.MonkeyPatch) -> str:
    norm = model.model.norm
    norm.__class__ = type("Norm", (type(norm),), {"variance_epsilon": property(lambda self: 1e-6)})
    return r"'model.norm' \(Norm\): variance_epsilon is defined by Norm of tests"


def function_of_a_file(model: Any, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(modeling_mixtral, "apply_rotary_pos_emb", in_disguise(modeling_mixtral.apply_rotary_pos_emb))
    return r"modeling_mixtral.apply_rotary_pos_emb was replaced by"


def function_of_torch(model: Any, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(torch, "topk", in_disguise(torch.topk))
    return r"torch.topk was replaced by"


def function_in_a_registry(model: Any, patch: pytest.MonkeyPatch) -> str:
    ALL_ATTENTION_FUNCTIONS.register("mine", in_disguise(ALL_ATTENTION_FUNCTIONS["sdpa"]))
    model.config._attn_implementation = "mine"
    return r"'mine', its attn_implementation, is .* of tests"


def loss_of_ones_own(model: Any, patch: pytest.MonkeyPatch) -> str:
    model.loss_function = in_disguise(model.loss_function)
    return r"the model .*its _loss_function was replaced by"


def hook_for_all_modules(model: Any, patch: pytest.MonkeyPatch) -> str:
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    patch.setattr(model, "remove", handle.remove, raising=False)
    return "a hook for all modules: .* of tests"


def hook_of_accelerate(model: Any, patch: pytest.MonkeyPatch) -> str:
    class Mine(ModelHook):
        pass

    add_hook_to_module(model.model.norm, Mine())
    return "module 'model.norm': its hook for accelerate is .*Mine of tests"


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "change",
    [
        replaced_method,
        replaced_forward,
        replaced_forward_that_libraries_wrap,
        forward_that_a_library_wraps,
        class_of_ones_own,
        property_of_ones_own,
        function_of_a_file,
        function_of_torch,
        function_in_a_registry,
        loss_of_ones_own,
        hook_for_all_modules,
        hook_of_accelerate,
    ],
)
def test_what_is_of_no_library_is_found(change: Callable[[Any, Any], str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral", num_hidden_layers=2)
    expected = change(model, monkeypatch)
    try:
        found = foreign_code(model)
        assert found is not None and re.search(expected, found), found
        with instrumented(model):
            assert foreign_code(model) == found
    finally:
        vars(model).get("remove", lambda: None)()
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop("mine", None)


def test_a_mode_of_ones_own_is_found() -> None:
    with Mode():
        found = foreign_code(tiny_model("llama"))
    assert found is not None and found.startswith("a torch mode around the forward: Mode of tests")


def test_recorded_choices_are_handed_out_once(caplog: pytest.LogCaptureFixture) -> None:
    """Router recompute: choices that were recorded elsewhere come in the order of calls, one for each call."""

    def weights(*, is_managed: bool, patch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
        model: Any = tiny_model("mixtral", num_hidden_layers=2)
        generator = torch.Generator().manual_seed(0)
        recorded = [torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(32)]) for _ in range(6)]
        choices = iter(recorded)
        kind, original = modeling_mixtral.MixtralTopKRouter, modeling_mixtral.MixtralTopKRouter.forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            logits, scores, _ = original(self, *args, **kwargs)
            index = next(choices)
            return logits, logits.softmax(-1).gather(1, index).to(scores.dtype), index

        patch.setattr(kind, "forward", forward)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        runtime = FlexRuntime(FlexConfig(BASE_BYTES + 50_000_000))
        with_fake_meter(runtime)
        if is_managed:
            runtime.attach(model)
        for step in range(3):
            loss = model(**tiny_batch(model, 2, 16, seed=step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime.detach()
        patch.undo()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    with pytest.MonkeyPatch.context() as patch:
        plain = weights(is_managed=False, patch=patch)
        managed = weights(is_managed=True, patch=patch)
    assert all(torch.equal(managed[name], weight) for name, weight in plain.items())
    assert "MixtralTopKRouter.forward was replaced by" in caplog.text and "set trace=True" in caplog.text
