"""What a rank needs, from its parts; and advice that holds what it promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flex_trainer.cost.hardware import HARDWARE, Hardware
from flex_trainer.cost.profile import BatchShape, Profile
from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.estimate.advice import advise
from flex_trainer.estimate.estimator import Estimator
from flex_trainer.estimate.rank import CHECKPOINT, KEEP, OFFLOAD, PLAN
from flex_trainer.estimate.settings import Settings, settings_of
from flex_trainer.estimate.skeleton import Skeleton, build_skeleton
from flex_trainer.launch.recipe import load_recipe
from flex_trainer.planner.mitigation import MitigationPlanner
from flex_trainer.provision.gradients import Gradients
from flex_trainer.strategy import Strategy
from flex_trainer.symbolic.forward import SymbolicModel
from tests.estimate.recipes import write_recipe

DEVICE: Hardware = HARDWARE["h100"]


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Skeleton:
    return build_skeleton(load_recipe(write_recipe(tmp_path_factory.mktemp("recipe"))))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    recipe = load_recipe(write_recipe(tmp_path_factory.mktemp("recipe")))
    return settings_of(recipe, DEVICE, None, torch.float32)


@pytest.fixture(scope="module")
def estimator(skeleton: Skeleton) -> Estimator:
    return Estimator(skeleton, DEVICE)


def test_one_rank_is_what_profile_and_planner_say(estimator: Estimator, skeleton: Skeleton, settings: Settings) -> None:
    ids = torch.empty(2, 64, dtype=torch.long, device="meta")
    traced = SymbolicModel(skeleton.model, torch.device("cpu"), True).trace((), {"input_ids": ids, "labels": ids})
    profile, shape = Profile(), BatchShape(2, 64)
    profile.observe(shape, traced.trace, traced.routed_pairs)
    gradients = Gradients(skeleton.model, skeleton.map).now()
    planner = MitigationPlanner(profile.graph(shape), settings.strategies, DEVICE.rates())
    weights_bytes = 4 * skeleton.num_parameters
    kept = estimator.outcome(settings, 1.0, KEEP).worst
    assert kept.weights.parameters_bytes == kept.weights.gradients_bytes == weights_bytes
    assert kept.weights.optimizer_bytes == 2 * weights_bytes
    assert kept.micro_batch.held_bytes == traced.held_bytes
    expected = planner.plan(2**40, gradients)
    peaks = kept.micro_batch.forward_peak_bytes, kept.micro_batch.backward_peak_bytes
    assert max(peaks) == expected.peak_bytes
    assert kept.peak.num_bytes == 3 * weights_bytes + expected.peak_bytes
    # With a limit in between, the plan is one that the planner makes for what is left.
    tight = replace(settings, limit_bytes=3 * weights_bytes + int(0.8 * expected.peak_bytes), reserve_bytes=0)
    outcome = estimator.outcome(tight, 1.0, PLAN)
    assert outcome.fits
    assert set(outcome.worst.strategies.values()) == {Strategy.RECOMPUTE}
    assert outcome.worst.peak.num_bytes <= tight.limit_bytes < kept.peak.num_bytes


def test_the_ways_to_run(estimator: Estimator, settings: Settings) -> None:
    roomy = replace(settings, limit_bytes=2**40, reserve_bytes=0)
    plan, keep, checkpoint, offload = (estimator.outcome(roomy, 1.0, way) for way in (PLAN, KEEP, CHECKPOINT, OFFLOAD))
    assert plan.worst.strategies == {}
    assert plan.step_seconds == keep.step_seconds
    assert keep.step_seconds < checkpoint.step_seconds
    assert offload.worst.micro_batch.held_bytes < keep.worst.micro_batch.held_bytes
    # A checkpoint keeps a layer's input: hidden states of 2 x 64 tokens, for each of 4 layers; and the outside.
    hidden_bytes = 2 * 64 * 64 * 4
    graph = estimator.stage_graph(roomy, keep.stages[0].stage).graph
    outside = sum(value.num_bytes for value in graph.segments[-1].values if value.savers)
    shared = sum(graph.shared_bytes)
    held = checkpoint.worst.micro_batch.held_bytes
    assert 4 * hidden_bytes + outside <= held <= 4 * hidden_bytes + outside + shared
    assert checkpoint.worst.added_seconds > 0


def test_imbalance_needs_expert_parallelism(estimator: Estimator, settings: Settings) -> None:
    assert estimator.largest_imbalance(settings) == 1
    assert estimator.outcome(settings, 2.6).step_seconds == estimator.outcome(settings, 1.0).step_seconds
    spread = replace(settings, fsdp=4, ep=4, limit_bytes=2**40)
    assert estimator.largest_imbalance(spread) == 4
    alone = replace(settings, fsdp=8, ep=8)
    assert estimator.largest_imbalance(alone) == 4  # one expert a rank: a token's two choices go to two ranks
    balanced, skewed = (estimator.outcome(spread, imbalance, KEEP) for imbalance in (1.0, 2.6))
    assert skewed.worst.micro_batch.held_bytes > balanced.worst.micro_batch.held_bytes
    assert skewed.step_seconds > balanced.step_seconds
    # Rows that leave, 64 floats each: a rank with 2 of 8 experts gets a token unless both choices are of the other 6.
    assert balanced.worst.exchange_bytes == skewed.worst.exchange_bytes == round(4 * 128 * (1 - 15 / 28)) * 64 * 4
    # One for each expert, and those that arrive: 2 x 64 tokens to 2 experts each.
    native = replace(spread, dispatch="all_to_all")
    assert estimator.outcome(native, 1.0, KEEP).worst.exchange_bytes == 2 * 256 * 64 * 4
    assert estimator.outcome(native, 2.6, KEEP).worst.exchange_bytes == int(3.6 * 256 * 64 * 4)


def test_pipeline_ranks_share_the_limit_among_micro_batches(estimator: Estimator, settings: Settings) -> None:
    piped = replace(settings, pp=2, num_micro_batches=4, limit_bytes=2**40, reserve_bytes=0)
    kept = estimator.outcome(piped, 1.0, KEEP)
    assert [stage.num_in_flight for stage in kept.stages] == [2, 1]
    first = kept.stages[0]
    assert first.peak.others_bytes == first.micro_batch.held_bytes
    assert first.peak.num_bytes == first.peak.base_bytes + first.peak.others_bytes + first.peak.own_bytes
    assert first.peak.base_bytes == first.weights.constant_bytes + first.weights.gradients_bytes
    limit_bytes = first.peak.base_bytes + int(0.7 * (first.peak.num_bytes - first.peak.base_bytes))
    tight = replace(piped, limit_bytes=limit_bytes)
    planned = estimator.outcome(tight, 1.0).stages[0]
    assert planned.strategies
    assert planned.peak.num_bytes <= limit_bytes
    assert planned.added_seconds < estimator.outcome(tight, 1.0, CHECKPOINT).stages[0].added_seconds
    assert kept.iteration.seconds > 4 * (first.micro_batch.forward_seconds + first.micro_batch.backward_seconds)


def test_advice_makes_it_fit(estimator: Estimator, settings: Settings) -> None:
    weights_bytes = 3 * 4 * estimator.skeleton.num_parameters
    large = replace(settings, batch_size=4, sequence_length=256)
    least = estimator.outcome(replace(large, limit_bytes=0), 1.0).worst.needed_bytes
    tight = replace(large, limit_bytes=weights_bytes + int(0.7 * (least - weights_bytes)))
    assert not estimator.outcome(tight, 1.0).fits
    advice = {found.overrides[0].split("=")[0]: found for found in advise(estimator, tight, 1.0)}
    assert {"training.per_device_train_batch_size", "data.sequence_length", "flex.memory_limit"} <= set(advice)
    size = int(advice["training.per_device_train_batch_size"].overrides[0].split("=")[1])
    assert estimator.outcome(replace(tight, batch_size=size), 1.0).fits
    assert not estimator.outcome(replace(tight, batch_size=2 * size), 1.0).fits
    length = int(advice["data.sequence_length"].overrides[0].split("=")[1])
    assert estimator.outcome(replace(tight, sequence_length=length), 1.0).fits
    limit = advice["flex.memory_limit"].overrides[0]
    limit_bytes = int(limit.removeprefix("flex.memory_limit=").removesuffix("MiB")) * 2**20
    raised = replace(tight, limit_bytes=limit_bytes, reserve_bytes=int(0.015 * limit_bytes))
    assert estimator.outcome(raised, 1.0).fits
    assert advice["flex.memory_limit"].needed_bytes <= limit_bytes


def test_gradients_are_those_that_the_runtime_counts(
    estimator: Estimator, skeleton: Skeleton, settings: Settings
) -> None:
    expected: GradientBytes = Gradients(skeleton.model, skeleton.map).now()
    weights = estimator.outcome(settings, 1.0, KEEP).worst.weights
    assert weights.gradients.pending == expected.pending
    assert {layer: size for layer, size in expected.temporary.items() if size} == weights.gradients.temporary


def test_an_optimizer_that_is_not_known(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path), ["training.optim=adam"])
    with pytest.raises(ValueError, match="what it keeps per parameter is not known"):
        settings_of(recipe, DEVICE, None, torch.float32)


def test_limits_of_a_device(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    half = settings_of(load_recipe(path, ["flex.memory_limit=0.5"]), DEVICE, None, torch.float32)
    assert half.limit_bytes == DEVICE.memory_bytes // 2
    auto = settings_of(load_recipe(path, ["flex.memory_limit=auto"]), DEVICE, None, torch.float32)
    assert auto.limit_bytes == int(0.9 * DEVICE.memory_bytes)
    assert auto.reserve_bytes == int(0.015 * auto.limit_bytes)
