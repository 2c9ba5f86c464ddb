"""The engine goes in and comes out without a trace, and leaves to others what is theirs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.models.discovery import discover
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.models.routing import NoListener, Routing
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction, assert_same_step, instrumented, mixed, train_step
from flex_trainer.testing.tiny import tiny_batch, tiny_model

KEEP, RECOMPUTE, OFFLOAD = Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD


def everything(site: Site) -> Strategy:
    return RECOMPUTE


def operators_only(site: Site) -> Strategy:
    return KEEP if site.is_block else RECOMPUTE


CHOICES = (lambda site: KEEP, everything, operators_only, lambda site: OFFLOAD, mixed)


def batch_for(model: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    return {**tiny_batch(model, batch_size=2, sequence_length=8), "use_cache": False, **changes}


def traces_of(model: nn.Module) -> list[str]:
    """Everything that instrumentation may leave."""
    found = [f"{name}.forward" for name, module in model.named_modules() if "forward" in vars(module)]
    found += [f"{name}._loss_function" for name, module in model.named_modules() if "_loss_function" in vars(module)]
    found += ["attention"] if "get_interface" in vars(ALL_ATTENTION_FUNCTIONS) else []
    found += ["experts"] if "get_interface" in vars(ALL_EXPERTS_FUNCTIONS) else []
    return found


def test_remove_restores_everything():
    model = tiny_model("deepseek_v3")
    before = traces_of(model)
    loss_function = model.loss_function
    instrumentation = Instrumentation(model, discover(model))
    during = traces_of(model)
    assert {"attention", "experts", "._loss_function", "model.layers.1.mlp.experts.forward"} <= set(during)
    instrumentation.remove()
    assert traces_of(model) == before == []
    assert model.loss_function is loss_function
    instrumentation.remove()  # twice is as good as once
    assert traces_of(model) == []


def test_what_was_replaced_before_is_called_and_given_back():
    """Expert parallelism, quantization and others replace `forward` on the instance as well."""
    model = tiny_model("qwen3_moe")
    batch = batch_for(model)
    plain = train_step(model, batch)
    experts = model.model.layers[1].mlp.experts
    original, num_calls = experts.forward, 0

    def earlier(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return original(*args, **kwargs)

    def own_loss(*args: Any, **kwargs: Any) -> Any:
        return default_loss(*args, **kwargs)

    default_loss = model.loss_function
    experts.forward = earlier
    model.loss_function = own_loss
    with instrumented(model):
        assert_same_step(train_step(model, batch, lambda site: KEEP), plain)
        assert num_calls == 1
        assert_same_step(train_step(model, batch, everything), plain)
        assert num_calls == 3
    assert vars(experts)["forward"] is earlier and model.loss_function is own_loss


def test_two_models_at_once():
    first, second = tiny_model("qwen3_moe"), tiny_model("mixtral", seed=1)
    third = tiny_model("qwen3_moe", seed=2)  # never instrumented: the shared registries must not touch it
    models = (first, second, third)
    plain = [train_step(model, batch_for(model)) for model in models]
    with instrumented(first):
        with instrumented(second):
            for model, wanted in zip(models[:2], plain[:2], strict=True):
                assert_same_step(train_step(model, batch_for(model), everything), wanted)
            assert_same_step(train_step(third, batch_for(third)), plain[2])
        assert_same_step(train_step(second, batch_for(second)), plain[1])
        step = train_step(first, batch_for(first), everything)
        assert_same_step(step, plain[0])
        assert {"attention_core", "expert_up"} <= {
            call.site.kind for call in step.trace.calls
        } or step.ledger.num_recomputes
    assert traces_of(first) == traces_of(second) == traces_of(third) == []


def test_an_instrumented_model_without_a_scope_runs_plainly():
    model: Any = tiny_model("deepseek_v3")
    batch = batch_for(model)
    plain = train_step(model, batch)
    with torch.no_grad():
        logits = model.eval()(**batch).logits
        generated = model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False)
    model.train()
    with instrumented(model):
        assert_same_step(train_step(model, batch), plain)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, logits)
            assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False), generated)


def test_hooks_of_others_on_routers_run_once_and_routing_is_told_once_a_layer():
    model = tiny_model("qwen3_moe")
    fired: Counter[str] = Counter()
    told: list[tuple[str, int, int]] = []
    model_map = discover(model)
    for operator in model_map.operators:
        if operator.site.kind == "router":
            operator.module.register_forward_hook(lambda *_, name=operator.site.name: fired.update([name]))

    class Listener(NoListener):
        def on_routed(self, experts: Site, routing: Routing) -> None:
            counts = routing.count()
            assert counts is not None and counts.sum() == routing.num_pairs
            told.append((experts.name, routing.num_pairs, len(counts)))

    instrumentation = Instrumentation(model, model_map, Listener())
    try:
        train_step(model, batch_for(model), everything)
    finally:
        instrumentation.remove()
    assert fired == {"model.layers.1.mlp.gate": 1, "model.layers.2.mlp.gate": 1}
    assert told == [(f"model.layers.{number}.mlp.experts", 32, 8) for number in (1, 2)]


def test_router_logits_and_the_auxiliary_loss():
    model = tiny_model("qwen3_moe", output_router_logits=True)
    batch = batch_for(model, output_router_logits=True)
    plain = train_step(model, batch)
    assert not torch.equal(plain.loss, train_step(model, batch_for(model, output_router_logits=False)).loss)
    with instrumented(model):
        for choose in CHOICES:
            assert_same_step(train_step(model, batch, choose), plain)


def test_router_jitter_draws_once():
    """Noise multiplied into the hidden states in place, before the router."""
    model = tiny_model("mixtral", router_jitter_noise=0.2)
    batch = batch_for(model)
    plain = train_step(model, batch)
    assert not torch.equal(plain.loss, train_step(model, batch, seed=1).loss)
    with instrumented(model):
        for choose in CHOICES:
            assert_same_step(train_step(model, batch, choose), plain)


@pytest.mark.parametrize("experts_implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_experts_implementations(architecture: str, experts_implementation: str):
    model = tiny_model(architecture, experts_implementation=experts_implementation)
    batch = batch_for(model)
    plain = train_step(model, batch)
    with instrumented(model):
        for choose in CHOICES:
            assert_same_step(train_step(model, batch, choose), plain)
        kinds = {call.site.kind for call in train_step(model, batch, lambda site: KEEP).trace.calls}
    assert ("expert_up" in kinds) is (experts_implementation == "grouped_mm")


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_attention_implementations(attn_implementation: str):
    model = tiny_model("qwen3_moe", attn_implementation=attn_implementation, attention_dropout=0.3)
    batch = batch_for(model)
    plain = train_step(model, batch)
    assert not torch.equal(plain.loss, train_step(model, batch, seed=1).loss)  # dropout is at work
    with instrumented(model):
        for choose in CHOICES:
            assert_same_step(train_step(model, batch, choose), plain)


def test_keys_and_values_shared_between_layers_in_a_dictionary():
    kinds = ["sliding_attention", "full_attention"] * 2
    model = tiny_model("gemma4_text", num_hidden_layers=4, num_kv_shared_layers=2, layer_types=kinds)
    batch = batch_for(model)
    plain = train_step(model, batch)
    with instrumented(model):
        for choose in CHOICES:
            assert_same_step(train_step(model, batch, choose), plain)


def test_a_block_that_fills_a_cache_is_kept():
    model = tiny_model("qwen3_moe")
    batch = batch_for(model, use_cache=True)
    plain = train_step(model, batch)
    with instrumented(model):
        step = train_step(model, batch, lambda site: RECOMPUTE if site.kind == "attention" else KEEP)
        assert_same_step(step, plain)
        assert step.ledger.num_recomputes == 0
        batch["use_cache"] = False
        assert (
            train_step(model, batch, lambda site: RECOMPUTE if site.kind == "attention" else KEEP).ledger.num_recomputes
            == 3
        )


class Counting(nn.Linear):
    """Keeps how often it ran in a buffer, and lets it matter."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__(inside.in_features, inside.out_features, bias=False)
        self.weight = inside.weight
        self.register_buffer("num_runs", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        return super().forward(x) * self.num_runs


def test_modules_that_change_their_buffers_are_kept():
    model = tiny_model("qwen3_moe")
    attention = model.model.layers[1].self_attn
    attention.o_proj = Counting(attention.o_proj)
    batch = batch_for(model)

    def steps(choose: Any) -> list[Any]:
        attention.o_proj.num_runs.zero_()
        return [train_step(model, batch, choose) for _ in range(3)]

    plain = steps(None)
    assert not torch.equal(plain[0].loss, plain[1].loss)
    with instrumented(model):
        for choose in CHOICES:
            for step, wanted in zip(steps(choose), plain, strict=True):
                assert_same_step(step, wanted)
            assert attention.o_proj.num_runs == 3


def test_buffers_that_stay_as_they_are_cost_one_forward():
    model = tiny_model("minimax")
    batch = batch_for(model)
    plain = train_step(model, batch)
    with instrumented(model):
        first, second = (train_step(model, batch, everything) for _ in range(2))
    assert_same_step(first, plain)
    assert_same_step(second, plain)
    for step, is_recomputable in ((first, False), (second, True)):
        # Layer 1 has linear attention, with decays in buffers; the others have none.
        sites = {call.site.layer: call.site for call in step.trace.calls if call.site.kind == "attention"}
        assert {layer: site.is_recomputable for layer, site in sites.items()} == {0: True, 1: is_recomputable, 2: True}


@pytest.mark.parametrize("choose", CHOICES)
def test_an_error_in_forward_leaves_a_model_that_works(choose: Any):
    model = tiny_model("qwen3_moe")
    batch = batch_for(model)
    plain = train_step(model, batch)
    down = model.model.layers[2].mlp.experts
    with instrumented(model):
        inside = down.forward
        down.forward = lambda *args, **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            train_step(model, batch, choose)
        down.forward = inside
        assert_same_step(train_step(model, batch, choose), plain)
    assert traces_of(model) == []


# Adapters


def with_adapters(model: PreTrainedModel, **choices: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **choices))


ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"], "lora_dropout": 0.1},
    "late layer": {"target_modules": ["q_proj"], "layers_to_transform": [2]},
    "router": {"target_modules": ["gate", "q_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    "both": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
}


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_adapters(architecture: str, adapters: str):
    """Every adapter gets the gradient of the plain step, although nothing below the first one needs any."""
    if architecture == "deepseek_v3" and adapters in ("attention", "late layer", "router", "both"):
        choices = {**ADAPTERS[adapters], "target_modules": ["kv_b_proj", "o_proj"]}
    else:
        choices = ADAPTERS[adapters]
    base = tiny_model(architecture)
    model = with_adapters(base, **choices)
    batch = batch_for(base)
    plain = train_step(model, batch)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert plain.gradients.keys() == trainable and all(gradient.any() for gradient in plain.gradients.values())
    with instrumented(model) as model_map:
        assert len(model_map.experts) == 2
        for choose in CHOICES:
            assert_same_step(train_step(model, batch, choose), plain)
    assert traces_of(model) == []


def test_frozen_model_with_a_gradient_for_its_inputs():
    """Prompt tuning: only the embeddings that go in need a gradient."""
    model = tiny_model("deepseek_v3").requires_grad_(False)
    labels = tiny_batch(model, 2, 8)["labels"]
    embeddings = torch.randn(2, 8, model.config.hidden_size, generator=torch.Generator().manual_seed(0))

    def gradient(choose: Any) -> torch.Tensor:
        inputs = embeddings.clone().requires_grad_()
        if choose is None:
            loss = model(inputs_embeds=inputs, labels=labels, use_cache=False).loss
        else:
            choices = ByFunction(choose)
            scope = Scope(choices, Ledger(), parameters=model.parameters(), min_mitigated_bytes=1)
            with scope.open():
                loss = model(inputs_embeds=inputs, labels=labels, use_cache=False).loss
        loss.backward()
        assert inputs.grad is not None
        return inputs.grad

    wanted = gradient(None)
    with instrumented(model):
        for choose in (lambda site: KEEP, everything, operators_only):
            assert torch.equal(gradient(choose), wanted)
