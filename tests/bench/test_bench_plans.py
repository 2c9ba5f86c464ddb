"""Figures of a plan that is made in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from flex_trainer.bench.plans import LARGE_RECIPES, estimate_figures
from flex_trainer.launch.recipe import load_recipe
from tests.estimate.recipes import write_recipe


@pytest.mark.sweep
def test_figures_of_a_small_recipe(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    (found,) = estimate_figures((path,)).values()
    assert found["fits"] is True
    assert found["cpu_seconds"] > 0
    assert found["wall_seconds"] > 0
    assert 50 * 2**20 < found["peak_rss_bytes"] < 3 * 2**30
    assert set(found["ratios"]) == {"keep_all", "full_checkpointing", "offload_everything"}
    assert found["ratios"]["full_checkpointing"] > 1


def test_the_large_recipes_are_for_256_ranks() -> None:
    for name in LARGE_RECIPES:
        parallel = load_recipe(name).parallel
        assert parallel.fsdp * parallel.pp == 256
        assert parallel.fsdp % parallel.ep == 0
