"""A backward beside each forward: losses, gradients and weights are those of one after the other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flex_trainer.testing.ranks import RankPool
from tests.distributed.models import saved_model
from tests.tiers import first_quick

pytestmark = pytest.mark.ranks

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_moe", "mixtral", "gpt_oss", "granitemoe")
JOB = "tests.distributed.fused_jobs:steps"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def check(
    ranks: RankPool, path: Path, *, num_ranks: int = 2, num_steps: int = 2, accumulation: int = 2, **job: Any
) -> None:
    by_rank = ranks.run(
        JOB,
        path=str(path),
        fuse=(False, True),
        num_steps=num_steps,
        accumulation=accumulation,
        fsdp=num_ranks,
        ep=2,
        **job,
    )
    for answers in by_rank:
        plain, fused = answers
        assert fused["losses"] == plain["losses"]
        assert (plain["num_pairs"], fused["num_pairs"] > 0) == (0, True)
        assert fused["num_records"] == num_steps * accumulation
    plain, fused = by_rank[0]
    for what in ("gradients", "weights"):
        assert fused[what].keys() == plain[what].keys()
        different = [name for name, tensor in plain[what].items() if not torch.equal(tensor, fused[what][name])]
        assert not different, (what, different)


@pytest.mark.parametrize("architecture", first_quick(FAMILIES, 1))
@pytest.mark.parametrize("strategy", ["keep", "recompute", "offload", "mixed", "recomputed_dispatch"])
def test_under_every_strategy(two_ranks: RankPool, directory: Path, architecture: str, strategy: str) -> None:
    check(two_ranks, saved_model(directory, architecture), strategy=strategy)


@pytest.mark.parametrize("accumulation", first_quick((3, 4, 8)))
def test_windows_of_several_lengths(two_ranks: RankPool, directory: Path, accumulation: int) -> None:
    check(two_ranks, saved_model(directory, "qwen3_moe"), strategy="mixed", accumulation=accumulation)


@pytest.mark.parametrize("strategy", first_quick(("recomputed_dispatch", "keep", "recompute")))
def test_random_numbers_are_those_of_one_after_the_other(two_ranks: RankPool, directory: Path, strategy: str) -> None:
    """A recomputation in backward, which draws the numbers of its forward again, hands over to a forward that draws
    its own."""
    path = saved_model(directory / "deep", "qwen3_moe", num_hidden_layers=6)
    options = {"attention_dropout": 0.3, "attn_implementation": "eager"}
    check(two_ranks, path, strategy=strategy, accumulation=4, order_seed=1, options=options)


@pytest.mark.parametrize("seed", first_quick(tuple(range(6)), 2))
def test_in_any_order(two_ranks: RankPool, directory: Path, seed: int) -> None:
    path = saved_model(directory / "deep", "deepseek_v3", num_hidden_layers=5)
    strategy = ("mixed", "recomputed_dispatch")[seed % 2]
    check(two_ranks, path, strategy=strategy, accumulation=5, order_seed=seed)


@pytest.mark.parametrize("strategy", first_quick(("mixed", "recomputed_dispatch")))
def test_under_autocast(two_ranks: RankPool, directory: Path, strategy: str) -> None:
    check(two_ranks, saved_model(directory, "glm4_moe"), strategy=strategy, has_autocast=True)


@pytest.mark.parametrize("strategy", first_quick(("recomputed_dispatch", "keep")))
def test_uneven_lengths(two_ranks: RankPool, directory: Path, strategy: str) -> None:
    check(two_ranks, saved_model(directory, "deepseek_v3"), strategy=strategy, is_uneven=True, accumulation=3)


@pytest.mark.parametrize("strategy", first_quick(("mixed", "recomputed_dispatch")))
def test_a_rank_without_tokens(two_ranks: RankPool, directory: Path, strategy: str) -> None:
    check(two_ranks, saved_model(directory, "mixtral"), strategy=strategy, is_skewed=True)


def test_planned(two_ranks: RankPool, directory: Path) -> None:
    check(two_ranks, saved_model(directory, "deepseek_v3"), num_steps=3, accumulation=3)


@pytest.mark.parametrize("strategy", ["mixed", "recomputed_dispatch"])
def test_experts_in_shards(four_ranks: RankPool, directory: Path, strategy: str) -> None:
    check(four_ranks, saved_model(directory, "deepseek_v3"), num_ranks=4, strategy=strategy, accumulation=3)
