"""Biases moved on two ranks are those of one process that has seen the tokens of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flex_trainer.testing.ranks import RankPool
from tests.distributed.models import all_ids, saved_model, whole_model
from tests.distributed.router_bias_jobs import RATE, steps

pytestmark = pytest.mark.ranks

JOBS = "tests.distributed.router_bias_jobs"


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("deepseek_v3", {"fsdp": 2, "ep": 2}),
        pytest.param("deepseek_v3", {"fsdp": 2, "ep": 2, "implementation": "all_to_all"}, marks=pytest.mark.sweep),
        ("ernie4_5_moe", {"fsdp": 2, "ep": 1}),  # the bias is a parameter, and sharded
    ],
)
def test_biases_are_those_of_one_process(
    two_ranks: RankPool, tmp_path: Path, family: str, parallel: dict[str, Any]
) -> None:
    path = saved_model(tmp_path, family)
    model = whole_model(path)

    def micro_batch(seed: int) -> None:
        ids = all_ids(model, seed=seed)
        model(input_ids=ids, labels=ids).loss.backward()

    expected = steps(model, micro_batch)
    assert max(float(bias.abs().max()) for bias in expected) >= RATE
    for found in two_ranks.run(f"{JOBS}:balanced", path=str(path), **parallel):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == torch.float32 and torch.equal(ours.view(theirs.shape), theirs)


@pytest.mark.parametrize("ep", [1, 2])
def test_a_spread_model_is_traced_while_its_routers_are_balanced(two_ranks: RankPool, tmp_path: Path, ep: int) -> None:
    path = saved_model(tmp_path, "deepseek_v3")
    config = whole_model(path).config
    num_layers = config.num_hidden_layers - config.first_k_dense_replace
    results = two_ranks.run(f"{JOBS}:traced", path=str(path), fsdp=2, ep=ep)
    for has_traced, refusal, counted in results:
        assert (has_traced, refusal) == (True, None)
        assert counted == [config.num_experts_per_tok] * num_layers, "once, and not in the trace"
