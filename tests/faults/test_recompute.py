"""Known faults of recomputations: routing decided again, collectives, other dtypes, shared modules."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer.activations.context import current_scope
from flex_trainer.config import FlexConfig
from flex_trainer.models.discovery import discover, find_experts
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.steps import instrumented
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.faults.outcomes import EXACT, STRATEGIES, Forward, Outcome, assert_same, outcome
from tests.faults.small_models import MOE_FAMILIES, one_step, small

RECOMPUTING = ("recompute operators", "recompute blocks")


def assert_close(got: Outcome, plain: Outcome, share: float) -> None:
    """Every gradient is within `share` of its own size: far from what another routing gives."""
    largest = max(float(gradient.norm()) for gradient in plain.gradients.values())
    for name, gradient in plain.gradients.items():
        size = max(float(gradient.norm()), 1e-2 * largest)
        assert float((got.gradients[name] - gradient).norm()) <= share * size, name


# 9, 10, 11: routing


class NoisyOnRecompute(nn.Module):
    """An operator whose second run differs from the first in the last bits, as kernels with atomic additions do."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.generator = torch.Generator().manual_seed(0)
        self.tally = SimpleNamespace(num_noisy=0)  # of a kind that recomputes do not take back

    @property
    def num_noisy(self) -> int:
        return self.tally.num_noisy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.inside(*args, **kwargs)
        if not torch.is_grad_enabled() or current_scope() is not None:
            return result
        self.tally.num_noisy += 1
        noise = 1e-5 * torch.randn(result.shape, generator=self.generator)
        return result + noise * result.detach().abs()


def tie_routers(model: nn.Module) -> int:
    """Make every router all but undecided: the scores of all experts differ in their last bits."""
    generator = torch.Generator().manual_seed(0)
    routers = [operator.module for operator in discover(model).operators if operator.site.kind == "router"]
    for router in routers:
        for parameter in router.parameters():
            if parameter.dim() == 2 and len(parameter) == 8:
                near_one = 1 + 1e-7 * torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(parameter.data[:1] * near_one)
            elif parameter.shape == (8,):
                parameter.data.fill_(0.5)
    return len(routers)


INDEX_NAMES = ("top_k_index", "router_indices", "topk_indices", "selected_experts")


def watch_routing(model: nn.Module) -> list[torch.Tensor]:
    """The top-k indices of every call of experts, first runs and recomputes alike."""
    seen: list[torch.Tensor] = []
    for experts in set(find_experts(model)):
        original = experts.forward
        names = list(inspect.signature(original).parameters)

        def forward(*args: Any, original: Any = original, names: list[str] = names, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            seen.append(next(given[name] for name in INDEX_NAMES if name in given).clone())
            return original(*args, **kwargs)

        experts.forward = forward
    return seen


@pytest.mark.parametrize("architecture", MOE_FAMILIES)
def test_near_tied_choices_are_those_of_forward_although_recomputes_are_noisy(architecture: str) -> None:
    """9, 11: scores all but equal and a kernel upstream that never gives the same bits: a choice made again would be
    another one. Experts and tokens of a recomputation are those of forward, and gradients differ by the noise alone."""
    model = small(architecture)
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    assert tie_routers(model) > 0
    noisy = []
    for layer in text.layers:
        # The norm whose output goes to router and experts.
        norm = next(n for n, m in reversed(list(layer.named_children())) if "norm" in n and "Norm" in type(m).__name__)
        noisy.append(NoisyOnRecompute(getattr(layer, norm)))
        setattr(layer, norm, noisy[-1])
    body = one_step(model)
    seen = watch_routing(model)
    with instrumented(model):
        kept = outcome(model, body, EXACT["keep"])
        in_forward = list(seen)
        assert in_forward and not any(module.num_noisy for module in noisy)
        for name in RECOMPUTING:
            del seen[:]
            got = outcome(model, body, EXACT[name])
            assert all(torch.equal(a, b) for a, b in zip(seen, in_forward, strict=False)), name
            for index in seen[len(in_forward) :]:  # of recomputations, in whatever order
                assert any(torch.equal(index, wanted) for wanted in in_forward), name
            assert_close(got, kept, 0.01)
        assert any(module.num_noisy for module in noisy)
    # The premise: had the routers been asked again with this noise, they would have said something else.
    del seen[:]
    model(**tiny_batch(model, 2, 10), use_cache=False)
    assert not all(torch.equal(a, b) for a, b in zip(seen, in_forward, strict=True))


def test_ties_in_the_dispatch_order_may_fall_otherwise_in_a_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """10: a sort that orders the rows of one expert differently each time. Order and counts are handed from the first
    run to each operator's recompute; only a recomputation of the whole block sorts again, and then uses one layout
    throughout."""
    model = small("qwen3_moe")
    body = one_step(model)
    plain = outcome(model, body)
    original, num_sorts = torch.sort, 0

    def unstable_sort(ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_sorts
        num_sorts += 1
        shuffled = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(num_sorts))
        values, order = original(ids[shuffled], *args, **kwargs)
        return values, shuffled[order]

    with instrumented(model):
        monkeypatch.setattr("flex_trainer.models.experts.torch.sort", unstable_sort)
        for name, per_forward in {"recompute operators": 1, "recompute blocks": 2}.items():
            num_sorts = 0
            got = outcome(model, body, EXACT[name])
            assert num_sorts == per_forward and got.num_recomputes > 0
            assert_close(got, plain, 1e-4)  # sums in another order, the same numbers


# 16: collectives


def test_recomputes_of_the_engine_run_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """16: two ranks may recompute in different orders, so nothing of the engine's own talks to other ranks: neither in
    forward, nor in planning, nor in a recomputation."""
    import torch.distributed as dist

    model = small("qwen3_moe")
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 360_000, ("recompute",)))
    with_fake_meter(runtime)
    talked: list[str] = []
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier", "all_to_all_single"):
            monkeypatch.setattr(dist, name, lambda *args, name=name, **kwargs: talked.append(name))
        runtime.attach(model)
        for seed in range(3):
            loss = model(**tiny_batch(model, 2, 20, seed=seed)).loss
            with runtime.backward():
                loss.backward()
        runtime.detach()
    finally:
        dist.destroy_process_group()
    assert runtime.records[0].freed_bytes["recompute"] > 0 and talked == []


# 17: dtypes


def test_an_adapter_on_the_router_keeps_its_dtypes_under_autocast() -> None:
    """17: bf16 weights, an fp32 adapter on the router and its router in fp32, all under bf16 autocast: a recomputation
    computes in the same dtypes, so gradients are equal to the bit and of the same dtype."""
    peft = pytest.importorskip("peft")
    base = small("qwen3_moe", dtype=torch.bfloat16)
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["gate", "q_proj", "o_proj"])
    model = peft.get_peft_model(base, config)
    adapters = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    assert any(".gate." in name for name in adapters) and set(adapters.values()) == {torch.float32}
    base.model.layers[1].mlp.gate.float()
    inputs = {**tiny_batch(base, 2, 10), "use_cache": False}

    def body(forward: Forward) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(**inputs).loss
        loss.backward()  # outside of autocast, as accelerate does
        return [loss]

    plain = outcome(model, body)
    with instrumented(model):
        for name, choose in EXACT.items():
            got = outcome(model, body, choose)
            assert_same(got, plain, name)
            assert {key: gradient.dtype for key, gradient in got.gradients.items()} == adapters


@pytest.mark.parametrize("is_router_fp32", [False, True])
def test_autocast_inside_the_model_is_recomputed(is_router_fp32: bool) -> None:
    """17: code that switches autocast off around some of its products, as routers do, within an outer autocast."""

    class Own(nn.Module):
        def __init__(self, inside: nn.Linear) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=not is_router_fp32):
                return self.inside(x.float() if is_router_fp32 else x).to(x.dtype)

    model = small("deepseek_v3")
    model.model.layers[1].self_attn.o_proj = Own(model.model.layers[1].self_attn.o_proj)
    inputs = {**tiny_batch(model, 2, 10), "use_cache": False}

    def body(forward: Forward) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(**inputs).loss
        loss.backward()
        return [loss]

    plain = outcome(model, body)
    with instrumented(model):
        for name, choose in EXACT.items():
            assert_same(outcome(model, body, choose), plain, name)


# 18: shared modules


def share_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm


def share_experts(model: Any) -> None:
    model.model.layers[2].mlp.experts = model.model.layers[1].mlp.experts


def share_block(model: Any) -> None:
    model.model.layers[2].mlp = model.model.layers[1].mlp


def share_layer(model: Any) -> None:
    model.model.layers[2] = model.model.layers[1]


SHARES = (share_norm, share_experts, share_block, share_layer)


@pytest.mark.parametrize("share", SHARES, ids=lambda share: share.__name__)
def test_a_shared_module_runs_twice_in_one_forward(share: Any) -> None:
    """18: one norm, expert block or whole layer used at two depths: each run is a region of its own."""
    model = tiny_model("qwen3_moe")
    share(model)
    body = one_step(model)
    plain = outcome(model, body)
    with instrumented(model):
        for name, choose in STRATEGIES.items():
            assert_same(outcome(model, body, choose), plain, name)


@pytest.mark.parametrize("share", [share_experts, share_layer], ids=lambda share: share.__name__)
def test_a_shared_module_is_planned_and_stays_inside_the_limit(share: Any) -> None:
    """18: the planner knows both runs too: predicted bytes cover the real ones, under a limit that needs mitigation."""
    model, reference = tiny_model("qwen3_moe"), tiny_model("qwen3_moe")
    share(model)
    share(reference)
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 560_000, ("recompute",)))
    with_fake_meter(runtime)
    runtime.attach(model)
    try:
        for seed in range(3):
            loss, expected = (m(**tiny_batch(m, 2, 24, seed=seed)).loss for m in (model, reference))
            with runtime.backward():
                loss.backward()
            expected.backward()
            assert torch.equal(loss, expected)
            for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert (ours.grad is None) == (theirs.grad is None)
                assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad), name
    finally:
        runtime.detach()
    for record in runtime.records[1:]:
        assert 0.99 * record.actual_bytes <= record.predicted_bytes <= 1.1 * record.actual_bytes
        assert record.peak_bytes <= record.limit_bytes and record.freed_bytes["recompute"] > 0
