"""Biases of routers: found wherever models keep them, moved by the rule, counted once, never cast down."""

from __future__ import annotations

import copy
import pickle
from threading import Lock
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from flex_trainer import FlexConfig, FlexRuntime
from flex_trainer.models.router_bias import RouterBiasBalancer, find_biased_routers
from flex_trainer.testing.tiny import tiny_batch, tiny_model

WHERE = {
    "deepseek_v3": "model.layers.1.mlp.gate.e_score_correction_bias",
    "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias",
    "ernie4_5_moe": "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias",  # a parameter of (1, E)
    "hy_v3": "model.layers.1.mlp.e_score_correction_bias",  # beside the router
    "afmoe": "model.layers.1.mlp.expert_bias",  # a parameter beside the router
    "lfm2_moe": "model.layers.1.feed_forward.expert_bias",
    "nemotron_h": None,
}


def count(model: PreTrainedModel, balancer: RouterBiasBalancer, seed: int = 0) -> list[torch.Tensor]:
    model(**tiny_batch(model, 2, 16, seed=seed))
    return [one for one in balancer._counts if one is not None]


@pytest.mark.parametrize("family", WHERE)
def test_biases_are_found_and_all_tokens_are_counted(family: str) -> None:
    model = tiny_model(family)
    balancer = RouterBiasBalancer(model)
    names = [router.name for router in balancer.routers]
    assert WHERE[family] is None or WHERE[family] in names
    counts = count(model, balancer)
    top_k = model.config.get_text_config().num_experts_per_tok
    assert [int(one.sum()) for one in counts] == [2 * 16 * top_k] * len(names)


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_a_model_without_a_bias_is_refused(family: str) -> None:
    assert find_biased_routers(tiny_model(family)) == []
    with pytest.raises(ValueError, match=r"no router of \w+ chooses experts with a bias.*leave router_bias_upd"):
        RouterBiasBalancer(tiny_model(family))


def test_a_rate_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match=r"update_rate=0 must be above 0"):
        RouterBiasBalancer(tiny_model("deepseek_v3"), 0)


def test_the_rule() -> None:
    """Experts with more than the mean are lowered by the rate, those with less are raised, the others stay."""
    balancer = RouterBiasBalancer(tiny_model("deepseek_v3"), 0.25)
    first, second = (router.bias for router in balancer.routers)
    first.copy_(torch.arange(8.0))
    balancer._counts = [torch.tensor([8, 0, 4, 4, 4, 5, 3, 4]), None]
    balancer.step()
    expected = torch.arange(8.0) + 0.25 * torch.tensor([-1.0, 1, 0, 0, 0, -1, 1, 0])
    assert torch.equal(first, expected)
    assert torch.equal(second, torch.zeros(8)), "nothing was counted"
    balancer.step()
    assert torch.equal(first, expected), "counts begin anew after each step"


def test_micro_batches_of_a_step_add_up() -> None:
    model = tiny_model("deepseek_v3")
    balancer = RouterBiasBalancer(model)
    one = [each.clone() for each in count(model, balancer, seed=0)]
    balancer.step()
    for router in balancer.routers:
        router.bias.zero_()
    other = count(model, balancer, seed=1)
    both = count(model, balancer, seed=0)
    assert all(torch.equal(a + b, c) for a, b, c in zip(one, other, both, strict=True))


def test_what_is_no_training_is_not_counted() -> None:
    model = tiny_model("deepseek_v3")
    balancer = RouterBiasBalancer(model)
    with torch.no_grad():
        assert count(model, balancer) == []
    model.eval()
    assert count(model, balancer) == []


def test_recomputation_is_not_counted_again() -> None:
    model = tiny_model("deepseek_v3")
    model.activation_checkpointing_enable()
    balancer = RouterBiasBalancer(model)
    model(**tiny_batch(model, 2, 16)).loss.backward()
    assert [int(one.sum()) for one in balancer._counts if one is not None] == [64, 64]


def test_counts_are_put_back_for_a_step_that_is_run_again() -> None:
    model = tiny_model("deepseek_v3")
    balancer = RouterBiasBalancer(model)
    first = [one.clone() for one in count(model, balancer)]
    before = balancer.remember()
    for _ in range(2):
        count(model, balancer, seed=1)
        before.restore()
        assert all(b is not None and torch.equal(a, b) for a, b in zip(first, balancer._counts, strict=True))


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2", "ernie4_5_moe", "lfm2_moe"])
def test_biases_are_float32_in_a_model_of_half_precision(family: str) -> None:
    model = tiny_model(family, dtype=torch.bfloat16).bfloat16()
    assert {router.bias.dtype for router in find_biased_routers(model)} == {torch.bfloat16}
    balancer = RouterBiasBalancer(model, 1e-3)
    for step in range(3):
        loss = model(**tiny_batch(model, 2, 16, seed=step)).loss
        loss.backward()
        balancer.step()
    assert torch.isfinite(loss)
    moved = [router.bias for router in balancer.routers]
    assert {bias.dtype for bias in moved} == {torch.float32}
    # Sums of three steps of 0.001 up or down, which bfloat16 does not hold.
    steps = torch.cat([bias.flatten() for bias in moved]) / 1e-3
    assert torch.allclose(steps, steps.round(), atol=1e-3) and float(steps.abs().max()) <= 3
    assert float(steps.abs().max()) > 0
    saved = {name: value for name, value in model.state_dict().items() if "bias" in name}
    assert all(saved[router.name].dtype == torch.float32 for router in balancer.routers)


def test_hooks_are_taken_off() -> None:
    model = tiny_model("deepseek_v3")
    before = [len(module._forward_pre_hooks) for module in model.modules()]
    balancer = RouterBiasBalancer(model)
    assert [len(module._forward_pre_hooks) for module in model.modules()] != before
    balancer.remove()
    assert [len(module._forward_pre_hooks) for module in model.modules()] == before
    assert count(model, balancer) == []


def test_a_collapsed_router_is_spread_again() -> None:
    """All tokens go to the same experts, whose biases are far too high; the rule takes them down."""
    model = tiny_model("deepseek_v3")
    balancer = RouterBiasBalancer(model, 0.02)
    for router in balancer.routers:
        router.bias[:2] = 1
        router.owner.weight.data.mul_(30)  # type: ignore[operator] - tokens differ in what they would choose

    def worst() -> float:
        return max(float(one.max() / one.float().mean()) for one in count(model, balancer, seed=3))

    before: Any = worst()
    for _ in range(80):
        balancer.step()
        after = worst()
    assert before == 4.0, "8 experts, of which the same 2 are chosen"
    assert after < 2.0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_counts_nothing(copied: Any) -> None:
    model = tiny_model("deepseek_v3")
    balancer = RouterBiasBalancer(model)
    balancer.cannot_be_copied = Lock()  # type: ignore[attr-defined]  # as FSDP's state and process groups
    other = copied(model)
    other(**tiny_batch(other, 2, 16))
    assert balancer._counts == [None] * len(balancer.routers)
    counts = count(model, balancer)
    assert sum(int(one.sum()) for one in counts) == 2 * 16 * model.config.num_experts_per_tok * len(counts)


def test_a_model_whose_routers_are_balanced_is_traced() -> None:
    model = tiny_model("deepseek_v3")
    balancer = RouterBiasBalancer(model)
    balancer.cannot_be_copied = Lock()  # type: ignore[attr-defined]
    runtime = FlexRuntime(FlexConfig(memory_limit="20GiB", trace="auto"))
    runtime.attach(model)
    with runtime.backward():
        model(**tiny_batch(model, 2, 16)).loss.backward()
    forecast = runtime.part().forecast
    assert (forecast.has_traced, forecast.refusal) == (True, None)
    chosen = 2 * 16 * model.config.num_experts_per_tok
    assert [int(one.sum()) for one in balancer._counts if one is not None] == [chosen] * len(balancer.routers)
    runtime.detach()
