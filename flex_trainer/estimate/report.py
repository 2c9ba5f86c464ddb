"""The estimate of a recipe, as plain data for tools (`flex-trainer plan --json`) and for the tables made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flex_trainer.cost.hardware import Hardware
from flex_trainer.errors import UserError
from flex_trainer.estimate.advice import advise
from flex_trainer.estimate.estimator import Estimator, Outcome
from flex_trainer.estimate.mesh import Mesh, cut_into_stages
from flex_trainer.estimate.rank import PLAN, WAYS, StageOutcome
from flex_trainer.estimate.settings import Settings, settings_of
from flex_trainer.estimate.skeleton import build_skeleton
from flex_trainer.estimate.stage import held_by_kind
from flex_trainer.launch.build import check_recipe
from flex_trainer.launch.recipe import Recipe

IMBALANCES = (1.0, 1.2, 2.6)
"""Balanced; a trained router's everyday; a spike."""

MEANING = {
    "parameters": "this rank's shards of the stage's weights, as stored; in float32 they are the master weights too",
    "gradients": "from the first backward to the optimizer step; whole where their reduction waits for the last "
    "micro-batch, in shards otherwise",
    "optimizer": "state of training.optim for this rank's shards",
    "gathered": "whole weights while they are used: the running layer, the next one, and norm and head",
    "activations": "saved bytes at the end of forward, of all micro-batches in flight",
    "transients": "on top at the highest point: recovered values, gradients on their way, workspace, buffers of the "
    "experts' all-to-all, offload copies; with a single micro-batch also the gradients so far",
    "imbalance": "rows that this rank's experts get over the mean, in every layer: the busiest rank",
    "step": "roofline of every operator, pipeline and gradient reduction, all-to-all in full, weight gathering behind "
    "computing, offload copies in full (a run hides part of them), optimizer step; no data loading",
}
"""What each number stands for, one line each."""


def estimate_recipe(
    recipe: Recipe, hardware: Hardware, num_ranks: int | None = None, imbalances: Sequence[float] = IMBALANCES
) -> dict[str, Any]:
    """Everything `flex-trainer plan` says.

    Args:
        num_ranks: ranks in all; None: replicate x fsdp x pp.
        imbalances: rows of the busiest rank over the mean.

    Raises:
        ValueError: sizes that do not fit together, a model that cannot be built or traced, an imbalance below 1.
    """
    for imbalance in imbalances:
        if imbalance < 1:
            raise UserError(f"--imbalance {imbalance:g} must be at least 1: no rank can be busier than the busiest one")
    if not imbalances:
        raise UserError("--imbalance needs at least one number, such as 1.0,1.2,2.6")
    check_recipe(recipe)
    skeleton = build_skeleton(recipe)
    settings = settings_of(recipe, hardware, num_ranks, skeleton.compute_dtype)
    estimator = Estimator(skeleton, hardware)
    mesh = estimator.mesh(settings)
    rows = []
    for imbalance in imbalances:
        outcomes = {way: estimator.outcome(settings, imbalance, way) for way in WAYS}
        rows.append(
            {
                "imbalance": imbalance,
                "applied_imbalance": min(imbalance, estimator.largest_imbalance(settings)),
                **{way: _way(outcome, settings, mesh) for way, outcome in outcomes.items()},
            }
        )
    fits = all(row["plan"]["fits"] for row in rows)
    advice = [] if fits else advise(estimator, settings, max(imbalances))
    return {
        "recipe": recipe.name,
        "model": {
            "name": recipe.model.architecture or recipe.model.name_or_path,
            "num_parameters": skeleton.num_parameters,
            "num_layers": skeleton.num_layers,
            "num_experts": skeleton.num_experts,
            "weights_dtype": str(skeleton.kept_dtype).removeprefix("torch."),
            "compute_dtype": str(skeleton.compute_dtype).removeprefix("torch."),
        },
        "hardware": {"name": hardware.name, "title": hardware.title, "memory_bytes": hardware.memory_bytes},
        "mesh": _mesh(mesh),
        "settings": {
            "per_device_train_batch_size": settings.batch_size,
            "sequence_length": settings.sequence_length,
            "gradient_accumulation_steps": settings.num_micro_batches,
            "optim": settings.optim,
            "strategies": [strategy.value for strategy in settings.strategies],
            "memory_limit_bytes": settings.limit_bytes,
            "reserve_bytes": settings.reserve_bytes,
            "runtime_bytes": hardware.runtime_bytes,
            "schedule": "1f1b",
        },
        "imbalances": rows,
        "fits": fits,
        "advice": [{**vars(found), "overrides": list(found.overrides)} for found in advice],
        "activations_by_kind": _by_kind(estimator, settings, rows[0]["plan"]["worst_stage"], mesh),
        "meaning": MEANING,
    }


def _mesh(mesh: Mesh) -> dict[str, int]:
    return {
        "ranks": mesh.num_ranks,
        "pp": mesh.pp,
        "dp_replicate": mesh.dp_replicate,
        "fsdp": mesh.fsdp,
        "ep": mesh.ep,
        "efsdp": mesh.efsdp,
    }


def _way(outcome: Outcome, settings: Settings, mesh: Mesh) -> dict[str, Any]:
    worst = outcome.worst
    tokens = settings.batch_size * settings.sequence_length * settings.num_micro_batches * mesh.num_batches
    times = outcome.iteration.times[worst.stage.index]
    return {
        "fits": outcome.fits,
        "needed_bytes": worst.needed_bytes,
        "available_bytes": outcome.limit_bytes,
        "step_seconds": outcome.step_seconds,
        "tokens_per_second": tokens / outcome.step_seconds,
        "optimizer_seconds": outcome.optimizer_seconds,
        "reduction_seconds": outcome.reduction_seconds,
        "warmup_seconds": times.warmup_seconds,
        "steady_seconds": times.steady_seconds,
        "cooldown_seconds": times.cooldown_seconds,
        "idle_seconds": times.idle_seconds,
        "worst_stage": worst.stage.index,
        "stages": [_stage(stage, has_plan=outcome.way == PLAN) for stage in outcome.stages],
    }


def _stage(outcome: StageOutcome, has_plan: bool) -> dict[str, Any]:
    weights, peak, micro_batch = outcome.weights, outcome.peak, outcome.micro_batch
    own_held_bytes = min(peak.own_bytes, micro_batch.held_bytes)
    layers = outcome.stage.layers
    return {
        "stage": outcome.stage.index,
        "first_layer": layers[0],
        "last_layer": layers[-1],
        "num_parameters": weights.num_parameters,
        "parameters_bytes": weights.parameters_bytes,
        "gradients_bytes": weights.gradients_bytes,
        "are_gradients_sharded": weights.are_gradients_sharded,
        "optimizer_bytes": weights.optimizer_bytes,
        "gathered_bytes": weights.gathered_bytes,
        "buckets_bytes": weights.buckets_bytes,
        "exchange_bytes": outcome.exchange_bytes,
        "num_in_flight": outcome.num_in_flight,
        "held_per_micro_batch_bytes": micro_batch.held_bytes,
        "activations_bytes": peak.others_bytes + own_held_bytes,
        "transients_bytes": peak.own_bytes - own_held_bytes,
        "base_bytes": peak.base_bytes,
        "peak_bytes": peak.num_bytes,
        "peak_at": {
            "action": str(peak.action),
            "phase": peak.phase.value,
            "operator": peak.operator,
            "num_in_flight": peak.num_in_flight,
        },
        "optimizer_step_bytes": outcome.optimizer_step_bytes,
        "needed_bytes": outcome.needed_bytes,
        "forward_seconds": micro_batch.forward_seconds,
        "backward_seconds": micro_batch.backward_seconds,
        "added_seconds": outcome.added_seconds,
        "strategies": dict(Counter(strategy.value for strategy in outcome.strategies.values())),
        **({"plan": {site: strategy.value for site, strategy in outcome.strategies.items()}} if has_plan else {}),
    }


def _by_kind(estimator: Estimator, settings: Settings, stage: int, mesh: Mesh) -> dict[str, int]:
    """Saved bytes of one balanced micro-batch that keeps everything, on the fullest stage."""
    stages = cut_into_stages(estimator.skeleton.num_layers, mesh.pp)
    return dict(held_by_kind(estimator.stage_graph(settings, stages[stage]).graph))
