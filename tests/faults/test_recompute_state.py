"""Known faults of recomputations: other random numbers, state made lazily, side effects that happen twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer.config import FlexConfig
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.steps import instrumented
from flex_trainer.testing.tiny import tiny_batch
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.faults.outcomes import EXACT, STRATEGIES, Forward, assert_same, outcome
from tests.faults.small_models import one_step, small

RECOMPUTING = ("recompute operators", "recompute blocks", "mixed")


# 12, 14: random numbers


class KeepsItsNoise(nn.Module):
    """Draws numbers at its first run and keeps them: lazily made state that takes from the random stream once."""

    def __init__(self, inside: nn.Module, as_buffer: bool) -> None:
        super().__init__()
        self.inside = inside
        self.as_buffer = as_buffer
        self.noise: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inside(x)
        if self.noise is None:
            noise = torch.rand(y.shape[-1])
            if self.as_buffer:
                del self.noise
                self.register_buffer("noise", noise)
            else:
                self.noise = noise
        return nn.functional.dropout(y * self.noise, 0.5)


@pytest.mark.parametrize("as_buffer", [False, True], ids=["attribute", "buffer"])
def test_state_made_lazily_is_as_the_first_run_found_it(as_buffer: bool) -> None:
    """14: a tensor drawn at the first call and kept. A recomputation that finds it there draws less than the first run
    did, so the dropout behind it would get other numbers."""

    def made() -> Any:
        model = small("qwen3_moe")
        attention = model.model.layers[1].self_attn
        attention.o_proj = KeepsItsNoise(attention.o_proj, as_buffer)
        return model

    plain_model = made()
    plain = outcome(plain_model, one_step(plain_model))
    for name, choose in EXACT.items():
        model = made()
        with instrumented(model):
            assert_same(outcome(model, one_step(model), choose), plain, name)


def test_a_cache_of_positions_made_lazily_is_right() -> None:
    """14: a table made for the longest sequence so far, made anew for a longer one, recomputed for the shorter one."""

    class Positions(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside
            self.table = torch.zeros(0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.table) < x.shape[1]:
                self.table = torch.arange(x.shape[1], dtype=torch.float32).div(10).cos()
            return self.inside(x) * self.table[: x.shape[1], None]

    model = small("qwen3_moe")
    attention = model.model.layers[0].self_attn
    attention.o_proj = Positions(attention.o_proj)

    def body(forward: Forward) -> list[torch.Tensor]:
        losses = [forward(**tiny_batch(model, 2, length), use_cache=False).loss for length in (6, 14)]
        sum(losses).backward()  # type: ignore[union-attr]
        return losses

    plain = outcome(model, body)
    with instrumented(model):
        for name, choose in EXACT.items():
            attention.o_proj.table = torch.zeros(0)
            assert_same(outcome(model, body, choose), plain, name)


class OwnStream(nn.Module):
    """Drops with numbers from somewhere else than torch's global stream."""

    def __init__(self, inside: nn.Module, source: str) -> None:
        super().__init__()
        self.inside = inside
        self.source = source
        self.restart()

    def restart(self) -> None:
        import random

        import numpy

        random.seed(0)
        numpy.random.seed(0)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import random

        import numpy

        y = self.inside(x)
        if self.source == "generator":
            mask = torch.rand(y.shape, generator=self.generator)
        elif self.source == "python":
            mask = torch.tensor([random.random() for _ in range(y.shape[-1])])
        else:
            mask = torch.from_numpy(numpy.random.rand(*y.shape)).float()
        return torch.exp(y * (mask < 0.5))


@pytest.mark.parametrize("source", ["generator", "python", "numpy"])
def test_random_numbers_from_other_streams_are_drawn_alike(source: str) -> None:
    """12: noise from a generator of the module's own, from Python's stream or numpy's: a recomputation draws what the
    first run drew, and the stream goes on as if there had been none."""
    model = small("qwen3_moe")
    dropping = OwnStream(model.model.layers[1].self_attn.o_proj, source)
    model.model.layers[1].self_attn.o_proj = dropping

    def body(forward: Forward) -> list[torch.Tensor]:
        dropping.restart()
        losses = [forward(**tiny_batch(model, 2, 10, seed=seed), use_cache=False).loss for seed in (0, 1)]
        sum(losses).backward()  # type: ignore[union-attr]
        losses.append(forward(**tiny_batch(model, 2, 10, seed=2), use_cache=False).loss)
        losses[-1].backward()
        return losses

    plain = outcome(model, body)
    with instrumented(model):
        for name, choose in EXACT.items():
            assert_same(outcome(model, body, choose), plain, name)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("mixtral", {"router_jitter_noise": 0.3, "attention_dropout": 0.3}),
        ("phimoe", {"router_jitter_noise": 0.3, "input_jitter_noise": 0.3, "attention_dropout": 0.3}),
        ("granitemoe", {"attention_dropout": 0.3, "output_router_logits": True}),
        ("gpt_oss", {"attention_dropout": 0.3}),
    ],
)
def test_jitter_and_dropout_are_drawn_again_alike(architecture: str, options: dict[str, Any]) -> None:
    """12: router jitter, attention dropout and a dropout between router and experts, over two micro-batches."""
    model = small(architecture, **options)
    experts = model.model.layers[1].mlp if hasattr(model.model.layers[1], "mlp") else None
    if experts is not None:
        experts.register_forward_pre_hook(lambda module, args: (nn.functional.dropout(args[0], 0.3), *args[1:]))

    def body(forward: Forward) -> list[torch.Tensor]:
        losses = []
        for seed in (0, 1):
            losses.append(forward(**tiny_batch(model, 2, 10, seed=seed), use_cache=False).loss)
            losses[-1].backward()
        return losses

    plain = outcome(model, body)
    assert not torch.equal(plain.values[0], outcome(model, body, seed=1).values[0])  # there is something to draw
    with instrumented(model):
        for name, choose in STRATEGIES.items():
            assert_same(outcome(model, body, choose), plain, name)


# 13, 15: side effects


class CountsInPython(nn.Module):
    """Keeps how often it ran, and what it saw, in plain attributes."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.num_runs = 0
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        self.seen.append(float(x.detach().sum()))
        return self.inside(x) * self.num_runs


def test_counters_in_python_attributes_count_once() -> None:
    """13: a counter and a list that a module keeps as plain attributes grow once per micro-batch, and the counter's
    value is the first run's during the recomputation."""
    model = small("qwen3_moe")
    attention = model.model.layers[1].self_attn
    counting = attention.o_proj = CountsInPython(attention.o_proj)

    def body(forward: Forward) -> list[torch.Tensor]:
        counting.num_runs, counting.seen = 0, []
        losses = []
        for seed in (0, 1):
            losses.append(forward(**tiny_batch(model, 2, 10, seed=seed), use_cache=False).loss)
            losses[-1].backward()
        return [*losses, torch.tensor(float(counting.num_runs)), torch.tensor(counting.seen)]

    plain = outcome(model, body)
    with instrumented(model):
        for name, choose in EXACT.items():
            assert_same(outcome(model, body, choose), plain, name)


@pytest.mark.parametrize("where", ["router", "experts", "block", "operator"])
def test_hooks_of_others_run_once(where: str) -> None:
    """13: load counters and trackers of the auxiliary loss are forward hooks: once per micro-batch, whatever is
    recomputed."""
    model = small("qwen3_moe")
    layer = model.model.layers[1]
    modules = {"router": layer.mlp.gate, "experts": layer.mlp.experts, "block": layer.mlp, "operator": layer.self_attn}
    fired: Counter[str] = Counter()
    modules[where].register_forward_hook(lambda *_: fired.update(["after"]))
    modules[where].register_forward_pre_hook(lambda *_: fired.update(["before"]))
    with instrumented(model):
        for name, choose in STRATEGIES.items():
            fired.clear()
            outcome(model, one_step(model), choose)
            assert fired == {"before": 1, "after": 1}, name


def test_hooks_inside_a_recomputed_block_run_once() -> None:
    """13: a hook on a part of a block that is recomputed as a whole."""
    model = small("qwen3_moe")
    fired: Counter[str] = Counter()
    model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda *_: fired.update(["after"]))
    with instrumented(model):
        for name, choose in EXACT.items():
            fired.clear()
            outcome(model, one_step(model), choose)
            assert fired == {"after": 1}, name


def test_a_bias_that_balances_the_load_is_updated_once() -> None:
    """13: a correction bias moved by a hook after each routing, as training codes do: the same bias as in a plain run,
    and the next micro-batch routes by it."""
    model = small("deepseek_v3")
    gate = model.model.layers[1].mlp.gate
    start = gate.e_score_correction_bias.clone()

    def balance(module: Any, args: Any, output: Any) -> None:
        index = next(t for t in output if not t.is_floating_point()) if isinstance(output, tuple) else None
        load = torch.bincount(index.flatten(), minlength=8).float() if index is not None else torch.arange(8.0)
        module.e_score_correction_bias.add_(0.05 * (load.mean() - load).sign())

    gate.register_forward_hook(balance)

    def body(forward: Forward) -> list[torch.Tensor]:
        gate.e_score_correction_bias.copy_(start)
        losses = []
        for seed in range(3):
            losses.append(forward(**tiny_batch(model, 2, 10, seed=seed), use_cache=False).loss)
            losses[-1].backward()
        return [*losses, gate.e_score_correction_bias]

    plain = outcome(model, body)
    assert not torch.equal(plain.values[-1], start)
    with instrumented(model):
        for name, choose in STRATEGIES.items():
            assert_same(outcome(model, body, choose), plain, name)


@pytest.mark.parametrize("kind", ["no_grad", "inference_mode", "generate"])
def test_evaluation_never_counts_plans_or_learns(kind: str) -> None:
    """15: passes without gradients, before training and in the middle of it, change nothing the runtime knows."""
    model = small("qwen3_moe")
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 1_200_000))
    with_fake_meter(runtime)
    runtime.attach(model)

    def knowledge() -> tuple[Any, ...]:
        in_flight_bytes = runtime.books.budgets.in_flight_bytes
        return (
            len(runtime.records),
            runtime.mark().num_micro_batches,
            len(runtime.in_flight),
            runtime.part().profile.version,
            in_flight_bytes,
        )

    def evaluate(seed: int) -> None:
        inputs = tiny_batch(model, 2, 20, seed=seed)
        model.eval()
        if kind == "generate":
            model.generate(inputs["input_ids"][:, :5], max_new_tokens=2, do_sample=False, pad_token_id=0)
        else:
            with torch.no_grad() if kind == "no_grad" else torch.inference_mode():
                model(**inputs)
        model.train()

    try:
        before = knowledge()
        evaluate(0)
        assert knowledge() == before
        for step in range(3):
            loss = model(**tiny_batch(model, 2, 10, seed=step)).loss
            during = knowledge()
            evaluate(step)
            assert knowledge() == during
            with runtime.backward():
                loss.backward()
            after = knowledge()
            evaluate(step)
            assert knowledge() == after and after[0] == step + 1
    finally:
        runtime.detach()
