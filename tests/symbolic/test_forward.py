"""A trace on shapes alone equals the trace of the real run: same operators, same values, same bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.activations.trace import Trace, Work
from flex_trainer.models.discovery import discover
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.planner.plan import Uniform
from flex_trainer.strategy import Strategy
from flex_trainer.symbolic.counter import NotSymbolic, OperationCounter
from flex_trainer.symbolic.forward import SymbolicForward, SymbolicModel
from flex_trainer.testing.tiny import FAMILIES, tiny_batch, tiny_model
from tests.tiers import STRUCTURES

CPU = torch.device("cpu")


def real(model: nn.Module, batch: dict[str, Any]) -> tuple[Trace, int]:
    """Trace and saved bytes of a real forward, everything kept."""
    ledger = Ledger()
    scope = Scope(Uniform(Strategy.KEEP), ledger, parameters=[*model.parameters(), *model.buffers()])
    instrumentation = Instrumentation(model, discover(model))
    try:
        with scope.open():
            output = model(**batch)
        held_bytes = ledger.held_bytes
        output.loss.backward()
    finally:
        instrumentation.remove()
    return scope.trace, held_bytes


def symbolic(model: nn.Module, batch: dict[str, Any], has_padding: bool = False) -> SymbolicForward:
    return SymbolicModel(model, CPU, has_fused_attention=False).trace((), batch, has_padding=has_padding)


def assert_equal(forward: SymbolicForward, trace: Trace, held_bytes: int) -> None:
    assert [(c.site, c.parent, c.inputs, c.output_bytes) for c in forward.trace.calls] == [
        (c.site, c.parent, c.inputs, c.output_bytes) for c in trace.calls
    ]
    assert [(v.owner, v.num_bytes, v.element_bytes, v.savers) for v in forward.trace.values] == [
        (v.owner, v.num_bytes, v.element_bytes, v.savers) for v in trace.values
    ]
    assert forward.held_bytes == held_bytes


# One of each kind of attention, router and experts.
LOW_PRECISION_FAMILIES = ("deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "qwen3_5_moe_text")


@pytest.mark.parametrize(
    ("family", "dtype", "has_padding"),
    [
        *(
            pytest.param(family, torch.float32, True, marks=[] if family in STRUCTURES else pytest.mark.sweep)
            for family in FAMILIES
        ),
        *(
            pytest.param(family, torch.bfloat16, False, marks=[] if family in STRUCTURES else pytest.mark.sweep)
            for family in LOW_PRECISION_FAMILIES
        ),
    ],
)
def test_every_family_is_traced_as_it_runs(family: str, dtype: torch.dtype, has_padding: bool) -> None:
    model: Any = tiny_model(family)
    model = model.to(dtype)
    batch = tiny_batch(model, batch_size=2, sequence_length=24)
    batch["attention_mask"] = torch.ones(2, 24, dtype=torch.long)
    batch["attention_mask"][0, :5] = int(not has_padding)

    forward = symbolic(model, batch, has_padding)

    assert_equal(forward, *real(model, batch))


def test_autocast_copies_are_seen() -> None:
    model = tiny_model("qwen3_moe")
    batch = tiny_batch(model, batch_size=2, sequence_length=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        forward = symbolic(model, batch)
        trace, held_bytes = real(model, batch)
    assert_equal(forward, trace, held_bytes)
    assert held_bytes != real(model, batch)[1]


def test_frozen_model_with_adapters_is_traced_as_it_runs() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("mixtral")
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    batch = tiny_batch(model.get_base_model(), batch_size=2, sequence_length=16)
    assert_equal(symbolic(model, batch), *real(model, batch))


def test_neither_model_nor_random_stream_nor_a_users_hook_notices() -> None:
    model: Any = tiny_model("deepseek_v3", attention_dropout=0.1)
    calls: list[nn.Module] = []
    model.model.layers[1].register_forward_hook(lambda module, *_: calls.append(module))
    model.counter = [0]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)

    symbolic(model, tiny_batch(model, batch_size=2, sequence_length=16))

    assert calls == []
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.rand(3), expected)


def test_model_without_weights_is_enough() -> None:
    real_model = tiny_model("glm4_moe")
    with torch.device("meta"):
        model = type(real_model)(real_model.config).train()
    batch = tiny_batch(real_model, batch_size=2, sequence_length=16)
    assert_equal(symbolic(model, batch), *real(real_model, batch))


def test_forward_that_looks_at_data_is_refused() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0]
    original = layer.forward

    class Looks(nn.Module):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            scale = 2.0 if float(hidden_states.sum()) > 0 else 1.0
            return original(hidden_states * scale, *args, **kwargs)

    layer.forward = Looks().forward
    with pytest.raises(NotSymbolic, match="asks for a value .* not known before"):
        symbolic(model, tiny_batch(model, batch_size=2, sequence_length=16))


def test_function_that_reaches_the_real_model_is_refused() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[0]
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)
    with pytest.raises(NotSymbolic, match="reaches parameters outside of the copy"):
        symbolic(model, tiny_batch(model, batch_size=2, sequence_length=16))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_work_of_a_linear_is_counted() -> None:
    model = tiny_model("llama")
    batch = tiny_batch(model, batch_size=2, sequence_length=16)
    forward = symbolic(model, batch)
    call = next(call for call in forward.trace.calls if call.site.name.endswith("gate_proj"))
    tokens, d_in = 32, model.config.hidden_size
    d_out = model.config.intermediate_size
    assert call.work is not None
    assert call.work.flops == 2 * tokens * d_in * d_out
    assert call.work.backward_flops == 2 * call.work.flops
    assert call.work.moved_bytes == 4 * (tokens * d_in + d_in * d_out + tokens * d_out)


def test_experts_do_the_work_of_the_rows_they_get() -> None:
    model = tiny_model("mixtral")
    batch = tiny_batch(model, batch_size=2, sequence_length=16)
    forward = symbolic(model, batch)
    call = next(call for call in forward.trace.calls if call.site.kind == "expert_down")
    config = model.config
    rows = 32 * config.num_experts_per_tok
    assert set(forward.routed_pairs.values()) == {rows}
    assert call.work is not None
    assert call.work.flops == 2 * rows * config.hidden_size * config.intermediate_size
    assert call.work.backward_flops == 2 * call.work.flops


def test_fused_attention_holds_no_matrix_of_length_times_length() -> None:
    # Queries and values differ in size: plain products on a CPU.
    model = tiny_model("deepseek_v3", num_hidden_layers=1)
    length = 256
    batch = tiny_batch(model, batch_size=1, sequence_length=length)
    plain = SymbolicModel(model, CPU, has_fused_attention=False).trace((), batch)
    fused = SymbolicModel(model, CPU, has_fused_attention=True).trace((), batch)
    heads = model.config.num_attention_heads

    def largest(forward: SymbolicForward) -> int:
        cores = {index for index, call in enumerate(forward.trace.calls) if call.site.kind == "attention_core"}
        return max(value.num_bytes for value in forward.trace.values if value.owner in cores)

    assert largest(plain) == 4 * heads * length * length
    assert largest(fused) < 4 * heads * length * length / 8
    core = next(call for call in fused.trace.calls if call.site.kind == "attention_core")
    config = model.config
    head_dims = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    assert core.work is not None
    assert core.work.flops == pytest.approx(0.5 * 2 * heads * length * length * head_dims)


def test_transients_are_what_is_alive_on_top() -> None:
    """The gradient of a linear's output and of its input are alive in its backward, and the weight's on its way."""
    model = tiny_model("llama")
    batch = tiny_batch(model, batch_size=2, sequence_length=16)
    forward = symbolic(model, batch)
    call = next(call for call in forward.trace.calls if call.site.name.endswith("down_proj"))
    d_in, d_out = model.config.intermediate_size, model.config.hidden_size
    assert call.work is not None
    # Around it, the residual stream's gradient is alive too.
    least = 4 * (32 * d_out + 32 * d_in + d_in * d_out)
    assert least <= call.work.backward_transient_bytes <= least + 4 * 32 * d_out * 2


@pytest.mark.parametrize(
    ("make", "holds_infinity"),
    [
        (lambda x: torch.full((4, 4), -torch.inf).triu(1) + x, True),
        (lambda x: x.masked_fill(x > 0, -torch.inf) * 0.5, True),
        (lambda x: torch.where(x > 0, x, torch.inf).to(torch.bfloat16), True),
        (lambda x: x.masked_fill(x > 0, -torch.inf).softmax(-1), False),
        (lambda x: x.clamp(max=torch.inf), False),
        (lambda x: x.nan_to_num(posinf=torch.inf), False),
        (lambda x: x * x.norm(torch.inf), False),
        (lambda x: x + 1.0, False),
    ],
)
def test_infinities_are_followed_from_where_they_are_written(make: Any, holds_infinity: bool) -> None:
    work = Work()
    counter = OperationCounter(lambda: work, lambda: False, lambda: 0, has_padding=False)
    with FakeTensorMode(), counter:
        assert counter.holds_infinity(make(torch.empty(4, 4))) is holds_infinity
