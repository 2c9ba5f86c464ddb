"""Experts and weights spread over ranks: losses and gradients are those of one process, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flex_trainer.testing.forced import relative_error
from flex_trainer.testing.ranks import RankPool
from tests.distributed.equality_jobs import STRATEGIES, odd_ids
from tests.distributed.models import all_ids, gradients_of, saved_model, skew, whole_model
from tests.tiers import sweep_over

pytestmark = pytest.mark.ranks

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_moe", "mixtral", "gpt_oss", "granitemoe")
EXACT = 1e-5
"""Largest relative error of a gradient: sums are made in another order."""
QUANTIZED = 0.05


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


_plain: dict[tuple[Path, bool], tuple[float, dict[str, torch.Tensor]]] = {}


def one_process(path: Path, is_skewed: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the whole model on all tokens."""
    if (path, is_skewed) not in _plain:
        model = whole_model(path)
        if is_skewed:
            skew(model)
        ids = all_ids(model)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        _plain[path, is_skewed] = float(loss.detach()), gradients_of(model)
    return _plain[path, is_skewed]


def assert_equal(answer: dict, expected: tuple[float, dict[str, torch.Tensor]], bound: float) -> None:
    loss, gradients = expected
    assert answer["loss"] == pytest.approx(loss, rel=bound)
    assert answer["gradients"].keys() == gradients.keys()
    errors = {name: relative_error(answer["gradients"][name], expected) for name, expected in gradients.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= bound, f"{worst}: {errors[worst]}"


def assert_used(strategy: str, answer: dict) -> None:
    """The strategy did what it is for, and nothing is left of it."""
    freed = answer["freed"]
    assert answer["held"] == 0
    if strategy == "keep":
        assert not any(freed.values())
    elif strategy in ("mixed", "differs_by_rank"):
        assert freed["recompute"] > 0 and freed["offload"] > 0
    else:
        assert freed["recompute" if strategy == "recomputed_dispatch" else strategy] > 0


def check(
    ranks: RankPool, path: Path, strategies: tuple[str | None, ...], is_skewed: bool = False, **parallel: Any
) -> None:
    """Against one process within rounding; and under exact strategies, bit for bit what the first one gave."""
    job = "tests.distributed.equality_jobs:steps"
    by_rank = ranks.run(job, path=str(path), strategies=strategies, is_skewed=is_skewed, **parallel)
    expected = one_process(path, is_skewed)
    first = by_rank[0][0]["gradients"]
    for number, strategy in enumerate(strategies):
        answer = by_rank[0][number]
        assert_equal(answer, expected, QUANTIZED if strategy == "quantize" else EXACT)
        if strategy != "quantize":
            assert all(torch.equal(gradient, first[name]) for name, gradient in answer["gradients"].items()), strategy
        if strategy is not None:
            for answers in by_rank:
                assert_used(strategy, answers[number])


@pytest.mark.parametrize("architecture", sweep_over(FAMILIES))
def test_expert_parallel_under_every_strategy(two_ranks: RankPool, directory: Path, architecture: str) -> None:
    check(two_ranks, saved_model(directory, architecture), (None, *STRATEGIES), fsdp=2, ep=2)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_experts_that_are_not_cut_into_operators(two_ranks: RankPool, directory: Path, implementation: str) -> None:
    path = saved_model(directory, "qwen3_moe")
    strategies = (None, "recompute", "recomputed_dispatch")
    check(two_ranks, path, strategies, fsdp=2, ep=2, experts_implementation=implementation)


def test_experts_outside_of_the_experts_interface(two_ranks: RankPool, directory: Path) -> None:
    check(two_ranks, saved_model(directory, "step3p7"), (None, "recompute", "offload"), fsdp=2, ep=2)


def test_native_dispatch_is_managed_too(two_ranks: RankPool, directory: Path) -> None:
    path = saved_model(directory, "glm4_moe")
    check(two_ranks, path, ("keep", "recompute", "mixed"), fsdp=2, ep=2, implementation="all_to_all")


def test_fsdp_alone(two_ranks: RankPool, directory: Path) -> None:
    strategies = ("keep", "recompute", "offload", "mixed", "differs_by_rank")
    check(two_ranks, saved_model(directory, "deepseek_v3"), strategies, fsdp=2, ep=1)


@pytest.mark.parametrize(
    ("fsdp", "ep", "replicate"),
    [(4, 2, 1), pytest.param(4, 4, 1, marks=pytest.mark.sweep), pytest.param(2, 2, 2, marks=pytest.mark.sweep)],
)
def test_four_ranks(four_ranks: RankPool, directory: Path, fsdp: int, ep: int, replicate: int) -> None:
    path = saved_model(directory, "deepseek_v3")
    check(four_ranks, path, (None, *STRATEGIES), fsdp=fsdp, ep=ep, replicate=replicate)


def test_ranks_of_a_tensor_parallel_group_send_a_share_each(two_ranks: RankPool, directory: Path) -> None:
    """They hold the same tokens. The runtime does not manage such models; the dispatch works without it."""
    path = saved_model(directory, "qwen3_moe")
    model = whole_model(path)
    ids = odd_ids(model)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    for answer in two_ranks.run("tests.distributed.equality_jobs:tensor_parallel_step", path=str(path)):
        assert_equal(answer, (float(loss.detach()), gradients_of(model)), EXACT)


def test_all_tokens_on_one_rank_and_none_on_the_other(two_ranks: RankPool, directory: Path) -> None:
    """Ranks without a row run the same operators and collectives; their experts get gradients of zero."""
    strategies = (None, "recompute", "offload", "recomputed_dispatch", "differs_by_rank")
    check(two_ranks, saved_model(directory, "qwen3_moe"), strategies, is_skewed=True, fsdp=2, ep=2)
