"""Whatever happens to the activations, a training step stays the same: every family, every strategy, bit for bit."""

from __future__ import annotations

import gc

import pytest
import torch

from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import (
    Choose,
    assert_nothing_held,
    assert_same_step,
    instrumented,
    mixed,
    train_step,
)
from flex_trainer.testing.tiny import FAMILIES, all_moe_architectures, tiny_batch, tiny_model
from tests.tiers import sweep_over

KEEP, RECOMPUTE, OFFLOAD, QUANTIZE = Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE

KINDS = (
    "norm",
    "linear",
    "activation",
    "attention",
    "attention_core",
    "mlp",
    "shared_experts",
    "experts",
    "expert_permute",
    "expert_up",
    "expert_activation",
    "expert_down",
    "expert_unpermute",
    "lm_head",
    "loss",
)


def only(kind: str) -> Choose:
    return lambda site: RECOMPUTE if site.kind == kind else KEEP


CHOICES: dict[str, Choose] = {
    "keep": lambda site: KEEP,
    "recompute every operator": lambda site: KEEP if site.is_block else RECOMPUTE,
    "recompute blocks": lambda site: RECOMPUTE if site.is_block and site.kind != "layer" else KEEP,
    "recompute layers": lambda site: RECOMPUTE if site.kind == "layer" else KEEP,
    "recompute everything": lambda site: RECOMPUTE,
    "offload everything": lambda site: OFFLOAD,
    "mixed": mixed,
}
"""Exact ones: all but quantize."""


@pytest.fixture(autouse=True)
def steady():
    """One thread, for equal sums; no cyclic collector, so that only what is really let go of is freed."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(num_threads)


def relative_errors(gradients: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> dict[str, float]:
    largest = max(float(gradient.norm()) for gradient in plain.values())
    # A gradient that is all but zero has no direction to be wrong about.
    return {
        name: float((gradients[name] - gradient).norm() / max(float(gradient.norm()), 1e-3 * largest))
        for name, gradient in plain.items()
    }


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_strategy_gives_the_plain_step(architecture: str):
    model = tiny_model(architecture)
    batch = tiny_batch(model, batch_size=2, sequence_length=12, padding=True)
    batch_without_cache = {**batch, "use_cache": False}
    plain = train_step(model, batch_without_cache)
    with instrumented(model) as model_map:
        for name, choose in CHOICES.items():
            step = train_step(model, batch_without_cache, choose)
            assert_same_step(step, plain)
            freed = {strategy for strategy, num_bytes in step.ledger.freed_bytes.items() if num_bytes > 0}
            expected = {"mixed": {"recompute", "offload"}, "keep": set(), "offload everything": {"offload"}}
            assert freed == expected.get(name, {"recompute"}), name
            assert step.ledger.num_unmanaged == 0
        routers = {operator.module for operator in model_map.operators if operator.site.kind == "router"}
        assert len(routers) == len(model_map.experts)
    assert_same_step(train_step(model, batch_without_cache), plain)


@pytest.mark.parametrize("architecture", sweep_over(FAMILIES))
def test_each_kind_of_operator_alone(architecture: str):
    model = tiny_model(architecture)
    batch = {**tiny_batch(model, batch_size=1, sequence_length=6), "use_cache": False}
    plain = train_step(model, batch)
    with instrumented(model):
        kept = train_step(model, batch, CHOICES["keep"])
        present = {call.site.kind for call in kept.trace.calls}
        assert present >= {"norm", "linear", "attention", "attention_core", "lm_head", "loss"}
        for kind in sorted(present - {"router", "layer"}):
            assert kind in {*KINDS, "final_norm"}
            step = train_step(model, batch, only(kind))
            assert_same_step(step, plain)
            assert step.forward_held_bytes <= kept.forward_held_bytes * 1.5, kind


@pytest.mark.parametrize("architecture", FAMILIES)
def test_quantized_activations_move_gradients_little(architecture: str):
    """8 bits a value: relative error of each gradient under 5%, loss untouched."""
    model = tiny_model(architecture)
    batch = {**tiny_batch(model, batch_size=2, sequence_length=12), "use_cache": False}
    plain = train_step(model, batch)
    with instrumented(model):
        step = train_step(model, batch, lambda site: QUANTIZE)
    assert torch.equal(step.loss, plain.loss)
    assert step.ledger.freed_bytes["quantize"] > 0
    assert step.gradients.keys() == plain.gradients.keys()
    errors = relative_errors(step.gradients, plain.gradients)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < 0.05, (worst, errors[worst])
    assert_nothing_held(step)


@pytest.mark.parametrize("architecture", sweep_over(FAMILIES))
def test_dropout_and_caches(architecture: str):
    """Random numbers in operators are drawn again alike; a block that fills a cache is not run twice."""
    model = tiny_model(architecture, attention_dropout=0.1)
    model.config.use_cache = True
    batch = tiny_batch(model, batch_size=2, sequence_length=8)
    plain = train_step(model, batch)
    with instrumented(model):
        for choose in (CHOICES["recompute blocks"], CHOICES["recompute every operator"], mixed):
            assert_same_step(train_step(model, batch, choose), plain)
        batch = {**batch, "use_cache": False}
        plain = train_step(model, batch)
        assert_same_step(train_step(model, batch, CHOICES["recompute layers"]), plain)


@pytest.mark.parametrize("architecture", sweep_over(FAMILIES))
def test_low_precision(architecture: str):
    """Weights in bf16, and fp32 weights under bf16 autocast."""
    for dtype, autocast in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        model = tiny_model(architecture, dtype=dtype)
        batch = {**tiny_batch(model, batch_size=2, sequence_length=8), "use_cache": False}
        plain = train_step(model, batch, autocast=autocast)
        with instrumented(model):
            for name in ("recompute blocks", "recompute layers", "recompute every operator", "mixed"):
                assert_same_step(train_step(model, batch, CHOICES[name], autocast=autocast), plain)


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name not in ("llama", "qwen3")])
def test_routing_is_decided_once(architecture: str):
    model = tiny_model(architecture)
    batch = {**tiny_batch(model, batch_size=2, sequence_length=8), "use_cache": False}
    num_calls: dict[str, int] = {}

    def count(name: str):
        def hook(module: torch.nn.Module, args: object, output: object) -> None:
            num_calls[name] = num_calls.get(name, 0) + 1

        return hook

    with instrumented(model) as model_map:
        routers = [operator for operator in model_map.operators if operator.site.kind == "router"]
        assert routers
        for operator in routers:
            assert not operator.site.is_recomputable
            for part in operator.module.modules():
                part.register_forward_hook(count(operator.site.name))
        num_parts = {operator.site.name: len(list(operator.module.modules())) for operator in routers}
        train_step(model, batch, CHOICES["keep"])
        kept = dict(num_calls)
        num_calls.clear()
        train_step(model, batch, CHOICES["recompute everything"])
    assert num_calls == kept
    assert all(1 <= num_calls[name] <= num_parts[name] for name in num_parts)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", [name for name in all_moe_architectures() if name not in FAMILIES])
def test_every_other_architecture(architecture: str):
    model = tiny_model(architecture)
    batch = {**tiny_batch(model, batch_size=2, sequence_length=8), "use_cache": False}
    plain = train_step(model, batch)
    with instrumented(model):
        blocks = train_step(model, batch, CHOICES["recompute blocks"])
        layers = train_step(model, batch, CHOICES["recompute layers"])
        mixed_step = train_step(model, batch, mixed)
    for step in (blocks, layers, mixed_step):
        assert_same_step(step, plain)
    assert blocks.ledger.num_recomputes > 0


def test_strategies_may_change_while_forward_runs():
    """A plan is revised after a router: the choices of later layers change, of this one's experts too."""
    model = tiny_model("qwen3_moe")
    batch = {**tiny_batch(model, batch_size=2, sequence_length=8), "use_cache": False}
    plain = train_step(model, batch)
    num_asked = 0

    def choose(site: Site) -> Strategy:
        nonlocal num_asked
        num_asked += 1
        return (KEEP, RECOMPUTE, OFFLOAD)[num_asked // 20 % 3]

    with instrumented(model):
        assert_same_step(train_step(model, batch, choose), plain)


def test_micro_batches_in_flight_together():
    """Two forwards, then their backwards in either order."""
    model = tiny_model("deepseek_v3")
    batches = [{**tiny_batch(model, 1, 6, seed=seed), "use_cache": False} for seed in (0, 1)]

    def losses_of(choose: Choose | None) -> list[torch.Tensor]:
        from flex_trainer.activations.file_tier import FileTier
        from flex_trainer.activations.ledger import Ledger
        from flex_trainer.activations.offload import OffloadStore
        from flex_trainer.activations.scope import Scope
        from flex_trainer.testing.steps import ByFunction

        losses = []
        store = OffloadStore(FileTier())
        for batch in batches:
            if choose is None:
                losses.append(model(**batch).loss)
                continue
            parameters = list(model.parameters())
            scope = Scope(
                ByFunction(choose), Ledger(), parameters=parameters, store=lambda: store, min_mitigated_bytes=1
            )
            with scope.open():
                losses.append(model(**batch).loss)
        return losses

    def gradients(choose: Choose | None, order: tuple[int, int]) -> dict[str, torch.Tensor]:
        model.zero_grad(set_to_none=True)
        losses = losses_of(choose)
        for index in order:
            losses[index].backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    for order in ((0, 1), (1, 0)):
        plain = gradients(None, order)
        with instrumented(model):
            for choose in (CHOICES["recompute everything"], mixed):
                got = gradients(choose, order)
                assert all(torch.equal(got[name], plain[name]) for name in plain)
