"""Loss and gradients on several ranks against one process: the work of one rank.

Each rank has rows of its own; the process that it is compared with has those of all. Both hold float32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from flex_trainer.activations.choices import Choices
from flex_trainer.bench.ep_model import FLEX, MeshSizes, load_model
from flex_trainer.config import FlexConfig
from flex_trainer.models.sharding import gathered_bytes
from flex_trainer.planner.plan import Uniform
from flex_trainer.runtime import FlexRuntime
from flex_trainer.strategy import Strategy
from flex_trainer.testing.fake_meter import BASE_BYTES, with_fake_meter
from flex_trainer.testing.forced import ForcedRuntime, MixedChoices, relative_error, whole
from flex_trainer.testing.tiny import tiny_batch

UNIFORM = {strategy.value: strategy for strategy in Strategy}
CASES = ("plain", *UNIFORM, "mixed", "differ", "auto")
"""
plain     dispatch and combine alone, activations are not managed
keep, recompute, offload, quantize: that, for every operator on every rank
mixed     each operator of each rank draws one of keep, recompute, offload
differ    rank 0 recomputes all it can, rank 1 keeps all, rank 2 offloads all, rank 3 mixes
auto      plans under a limit on each rank that keeping everything would pass
"""
AUTO_SHARE = 0.4
"""Where the limit of the case "auto" lies between the predicted peaks of the least plan (0) and of keeping all (1)."""
_BATCH_SIZE, _SEQUENCE_LENGTH = 2, 64
_AMPLE_BYTES = 10**9
_NUM_AUTO_STEPS = 3
_STRATEGIES = ("recompute", "offload")


def compare(*, path: str, mesh: Sequence[int], cases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """On a rank: train one step in each of the cases, and compare with one process.

    Args:
        path: a directory with a tiny model.
        mesh: the fields of a `MeshSizes`.

    Returns:
        By case: `loss_error` and `gradient_error` (relative; of all ranks and parameters the largest),
        `worst_parameter`, and `freed_bytes` of this rank.
    """
    _be_quiet()
    sizes = MeshSizes(*mesh)
    rank = torch.distributed.get_rank()
    reference = load_model(path)
    batch = {**tiny_batch(reference, _BATCH_SIZE * sizes.num_ranks, _SEQUENCE_LENGTH), "use_cache": False}
    expected_loss, expected = _step(reference, batch)
    model = load_model(path, sizes, FLEX)
    rows = slice(rank * _BATCH_SIZE, (rank + 1) * _BATCH_SIZE)
    own_batch = {key: value[rows] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        results = _run(case, model, own_batch, rank)
        errors = [_error(loss, gradients, expected_loss, expected) for loss, gradients in results.steps]
        worst = max(errors, key=lambda error: error["gradient_error"])
        found[case] = {
            **worst,
            "loss_error": max(error["loss_error"] for error in errors),
            "freed_bytes": results.freed_bytes,
        }
    return found


def _be_quiet() -> None:
    """Leave out what would be said once for each rank, model and parameter."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # The order of the gathers that put a gradient together is no matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


class _Results:
    """Loss and whole gradients of steps that are all to be equal, and what the plans gave back."""

    def __init__(self) -> None:
        self.steps: list[tuple[torch.Tensor, Mapping[str, torch.Tensor]]] = []
        self.freed_bytes = 0


def _run(case: str, model: PreTrainedModel, batch: Mapping[str, Any], rank: int) -> _Results:
    results = _Results()
    if case == "plain":
        results.steps.append(_step(model, batch))
        return results
    if case == "auto":
        limit_bytes = _pressing_limit_bytes(model, batch)
        runtime = FlexRuntime(FlexConfig(limit_bytes, _STRATEGIES, transient_reserve=0))
        _managed(runtime, model, batch, _NUM_AUTO_STEPS, results)
        return results
    _managed(ForcedRuntime(_choices(case, rank)), model, batch, 1, results)
    return results


def _managed(
    runtime: FlexRuntime, model: PreTrainedModel, batch: Mapping[str, Any], num_steps: int, results: _Results
) -> None:
    """Steps under a runtime."""
    with_fake_meter(runtime)
    runtime.attach(model)
    results.steps += [_step(model, batch, runtime) for _ in range(num_steps)]
    runtime.detach()
    results.freed_bytes = sum(sum(record.freed_bytes.values()) for record in runtime.records)


def _pressing_limit_bytes(model: PreTrainedModel, batch: Mapping[str, Any]) -> int:
    """A limit on this rank that a plan can keep, and keeping everything cannot."""
    runtime = FlexRuntime(FlexConfig(_AMPLE_BYTES, _STRATEGIES))
    with_fake_meter(runtime)
    runtime.attach(model)
    for _ in range(2):  # the second one knows what arrives
        _step(model, batch, runtime)
    record = runtime.records[-1]
    assert not record.is_profile
    least = runtime.part().minimum_plan(runtime.part().inputs.shape_of((), dict(batch)))
    runtime.detach()
    most_bytes = record.predicted_peak_bytes - record.baseline_bytes
    above_bytes = least.peak_bytes + int(AUTO_SHARE * (most_bytes - least.peak_bytes))
    return BASE_BYTES + gathered_bytes(model) + above_bytes


def _choices(case: str, rank: int) -> Choices:
    if case in UNIFORM:
        return Uniform(UNIFORM[case])
    if case == "differ" and rank < 3:
        return Uniform((Strategy.RECOMPUTE, Strategy.KEEP, Strategy.OFFLOAD)[rank])
    assert case in ("differ", "mixed"), case
    return MixedChoices(rank)


def _step(
    model: PreTrainedModel, batch: Mapping[str, Any], runtime: FlexRuntime | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of all ranks' rows, and whole gradients by parameter."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    if runtime is None:
        loss.backward()
    else:
        with runtime.backward():
            loss.backward()
    loss = loss.detach().double()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        torch.distributed.all_reduce(loss)
        loss /= torch.distributed.get_world_size()  # all ranks have as many tokens
    return loss, gradients


def _error(
    loss: torch.Tensor,
    gradients: Mapping[str, torch.Tensor],
    expected_loss: torch.Tensor,
    expected: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    if gradients.keys() != expected.keys():
        raise RuntimeError(f"gradients on one side only: {sorted(gradients.keys() ^ expected.keys())[:4]}")
    errors = {name: relative_error(gradients[name], gradient) for name, gradient in expected.items()}
    worst = max(errors, key=errors.__getitem__)
    return {
        "loss_error": float((loss - expected_loss).abs() / expected_loss.abs()),
        "gradient_error": errors[worst],
        "worst_parameter": worst,
    }
