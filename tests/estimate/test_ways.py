"""What is printed beside a plan is weighed by the plan's own rules: no plan is slower than a printed way that fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from flex_trainer.cost.hardware import HARDWARE
from flex_trainer.estimate.estimator import Estimator
from flex_trainer.estimate.links import sent_rows
from flex_trainer.estimate.mesh import cut_into_stages
from flex_trainer.estimate.rank import CHECKPOINT, KEEP, OFFLOAD, PLAN
from flex_trainer.estimate.settings import settings_of
from flex_trainer.estimate.skeleton import build_skeleton
from flex_trainer.launch.recipe import Recipe, load_recipe
from flex_trainer.recipes import recipe_path
from flex_trainer.strategy import EP_DISPATCH
from tests.estimate.recipes import write_recipe

QWEN = {
    "architecture": "qwen3_moe",
    "config": {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Qwen3-30B-A3B's published sizes, so that no network is needed."""


def shipped(name: str, directory: Path, *overrides: str) -> Recipe:
    content = yaml.safe_load(recipe_path(name).read_text())
    if "name_or_path" in content["model"]:
        content["model"] = {**QWEN, "dtype": "bfloat16"}
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(str(path), overrides)


@pytest.mark.parametrize(
    ("name", "overrides", "batch_sizes"),
    [
        ("qwen3_30b_a3b_8gpu", (), (4,)),
        pytest.param("qwen3_30b_a3b_8gpu", ("parallel.ep=1",), (4,), marks=pytest.mark.sweep),
        pytest.param("qwen3_30b_a3b_8gpu", ("parallel.dispatch=all_to_all",), (4,), marks=pytest.mark.sweep),
        ("demo", ("flex.memory_limit=0.9",), (512,)),
    ],
)
def test_no_plan_is_slower_than_a_way_that_fits(
    name: str, overrides: tuple[str, ...], batch_sizes: tuple[int, ...], tmp_path: Path
) -> None:
    recipe = shipped(name, tmp_path, *overrides)
    skeleton = build_skeleton(recipe)
    num_compared = 0
    for device in ("h100",):
        estimator = Estimator(skeleton, HARDWARE[device])
        settings = settings_of(recipe, HARDWARE[device], None, torch.bfloat16)
        for batch_size in batch_sizes:
            changed = replace(settings, batch_size=batch_size, num_micro_batches=1)
            for imbalance in (1.0, 2.6):
                plan = estimator.outcome(changed, imbalance, PLAN)
                for way in (KEEP, CHECKPOINT, OFFLOAD):
                    other = estimator.outcome(changed, imbalance, way)
                    if other.fits:
                        num_compared += 1
                        assert plan.fits and plan.step_seconds <= other.step_seconds, (device, batch_size, way)
    assert num_compared > 0


def test_a_cache_is_off_as_in_training(tmp_path: Path) -> None:
    """With a cache no attention block is recomputed as a whole; Trainer turns it off unless it is asked for."""
    skeleton = build_skeleton(load_recipe(write_recipe(tmp_path)))
    assert skeleton.model.config.use_cache is False
    asked = build_skeleton(load_recipe(write_recipe(tmp_path), ["training.use_cache=true"]))
    assert asked.model.config.use_cache is True


def test_checkpointing_pays_for_the_rows_of_the_busiest_rank(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path), ["parallel={fsdp: 4, ep: 4}", "flex.memory_limit=0.9"])
    estimator = Estimator(build_skeleton(recipe), HARDWARE["h100"])
    settings = replace(settings_of(recipe, HARDWARE["h100"], None, torch.float32), batch_size=64)
    kept, whole = (
        [estimator.outcome(settings, imbalance, way).worst for imbalance in (1.0, 3.0)] for way in (KEEP, CHECKPOINT)
    )
    grown = [high.micro_batch.forward_seconds - low.micro_batch.forward_seconds for low, high in (kept, whole)]
    assert grown[0] == grown[1] > 0
    # All that is slower in the layers' forward is slower once more in backward.
    assert whole[1].added_seconds - whole[0].added_seconds == pytest.approx(grown[0])


def test_an_expert_parallel_graph_has_the_operators_of_the_dispatch(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path), ["parallel={fsdp: 4, ep: 4}"])
    estimator = Estimator(build_skeleton(recipe), HARDWARE["h100"])
    settings = settings_of(recipe, HARDWARE["h100"], None, torch.float32)
    stage = cut_into_stages(4, 1)[0]
    flex = estimator.stage_graph(settings, stage).graph
    native = estimator.stage_graph(replace(settings, dispatch="all_to_all"), stage).graph
    kinds = [{operator.site.kind for operator in graph.segments[1].operators} for graph in (flex, native)]
    assert kinds[0] - kinds[1] == {"ep_block", "ep_dispatch", "ep_combine"}
    dispatch = next(op for op in flex.segments[1].operators if op.site.kind == EP_DISPATCH)
    row_bytes = 64 * 4
    exchange_seconds = HARDWARE["h100"].all_to_all_seconds(estimator._sent_rows(settings) * row_bytes, 4, 8)
    assert dispatch.seconds > exchange_seconds > 0
    # Collectives that are no operators of the engine are not run again.
    experts = next(op for op in native.segments[1].operators if op.site.kind == "experts")
    assert not experts.site.is_recomputable
    assert all(op.site.is_recomputable for op in flex.segments[1].operators if op.site.kind == "experts")


def test_rows_by_dispatch() -> None:
    # Two ranks with 8 of 16 experts, 4 per token: a token misses one of them with a chance of 70 / 1820.
    assert sent_rows(1820, 4, 16, 2, "flex") == round(1820 * 2 * (1 - 70 / 1820)) == 3500
    assert sent_rows(1820, 4, 16, 2, "all_to_all") == 4 * 1820
    assert sent_rows(100, 2, 8, 8, "flex") == 200  # one expert a rank
    assert sent_rows(100, 0, 0, 1, "flex") == 0
