"""Whole steps under the runtime's own plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flex_trainer import FlexConfig, FlexRuntime
from flex_trainer.bench.ep_wire import CountExchanges
from flex_trainer.cost.compiled import forget_structures
from flex_trainer.experts.dispatch import dispatcher_of
from flex_trainer.models.sharding import gathered_bytes
from flex_trainer.testing.forced import ForcedRuntime, relative_error
from tests.distributed.equality_jobs import Forced
from tests.distributed.models import all_ids, gradients_of, my_part, skew, spread_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.runtime_steps import with_steady_times


def predicted_and_held(
    path: str, num_steps: int, num_crowded: int, extra_bytes: int, **parallel: Any
) -> tuple[list[dict[str, Any]], list[int]]:
    """For every step: what its record says was predicted, and what was held; and the predictions that peaks were
    compared with. All tokens go to rank 0 in the first steps, and expectations stay at that for a while.

    Args:
        num_crowded: steps of that kind.
        extra_bytes: of memory, beyond what is in use before.
    """
    model = spread_model(Path(path), **parallel)
    undo = skew(model)
    runtime = FlexRuntime(FlexConfig(memory_limit=BASE_BYTES + extra_bytes))
    with_fake_meter(runtime)
    runtime.attach(model)
    correction: Any = runtime.books.correction
    compared: list[int] = []
    observe = correction.observe

    def observed(plan: Any, *args: Any) -> None:
        compared.append(plan.predicted_bytes)
        observe(plan, *args)

    correction.observe = observed
    loads = []
    for number in range(num_steps):
        if number == num_crowded:
            undo()
        with runtime.backward():
            loss = _loss(model, number)
            loads.append(runtime.in_flight[0].loads.by_layer)
            loss.backward()
        model.zero_grad()
    runtime.detach()
    steps = [
        {
            "is_profile": record.is_profile,
            "predicted_bytes": record.predicted_bytes,
            "held_bytes": record.actual_bytes,
            "freed_bytes": sum(record.freed_bytes.values()),
            "loads": of_step,
        }
        for record, of_step in zip(runtime.records, loads, strict=True)
    ]
    return steps, compared


def steps_under_less_than_is_expected(path: str, num_steps: int, **parallel: Any) -> list[int]:
    """One layer sends all tokens to rank 0, so as much is expected of all layers from the second step on. Bytes that
    were recomputed in each step, on a rank 0 that has less than the minimum-memory plan would need for that."""
    model = spread_model(Path(path), **parallel)
    skew(model, num_layers=1)
    room_bytes = 10**9
    recomputed: list[int] = []
    for is_tight in (False, True):
        limit_bytes = BASE_BYTES + gathered_bytes(model) + room_bytes
        runtime = FlexRuntime(FlexConfig(limit_bytes, strategies=("recompute",), transient_reserve=0))
        with_fake_meter(runtime)
        runtime.attach(model)
        part = runtime.part()
        for number in range(num_steps):
            with runtime.backward():
                loss = _loss(model, number)
                shape, gradients = runtime.in_flight[0].shape, runtime.in_flight[0].gradients
                loss.backward()
            model.zero_grad()
        if dist.get_rank() == 0 and not is_tight:
            least = part.plans.plan(shape, 0, gradients, part.recent_loads.expected)
            room_bytes = int(least.peak_bytes / 1.06)
        runtime.detach()
        recomputed = [record.freed_bytes["recompute"] for record in runtime.records]
    return recomputed


def news(path: str, num_steps: int, **parallel: Any) -> list[int]:
    """How often sizes were news by the end of each step, in bfloat16 and with other loads in each."""
    model = spread_model(Path(path), dtype=torch.bfloat16, **parallel)
    runtime = FlexRuntime(FlexConfig(memory_limit=BASE_BYTES + 10**9))
    with_fake_meter(runtime)
    runtime.attach(model)
    profile = runtime.part().profile
    versions = []
    for number in range(num_steps):
        with runtime.backward():
            _loss(model, number).backward()
        model.zero_grad()
        versions.append(profile.version)
    runtime.detach()
    return versions


def skewed_steps(path: str, num_steps: int, **parallel: Any) -> list[dict[str, Any]]:
    """Steps in which every token goes to experts of rank 0, under a limit that they do not fit in there."""
    model = spread_model(Path(path), **parallel)
    skew(model)
    plain = [float(_loss(model, number).detach()) for number in range(num_steps)]
    steps: list[dict[str, Any]] = []
    runtime = FlexRuntime(FlexConfig(memory_limit=BASE_BYTES + 8_150_000, strategies=("recompute",)))
    with_fake_meter(runtime)
    runtime.attach(model)
    for number in range(num_steps):
        with runtime.backward():
            loss = _loss(model, number)
            loads = runtime.in_flight[0].loads.by_layer
            loss.backward()
        steps.append({"plain_loss": plain[number], "loss": float(loss.detach()), "loads": loads})
        model.zero_grad()
    runtime.detach()
    return [{**step, "freed": record.freed_bytes} for step, record in zip(steps, runtime.records, strict=True)]


def _loss(model: Any, number: int) -> torch.Tensor:
    ids = my_part(all_ids(model, seed=number))
    return model(input_ids=ids, labels=ids).loss


def agreement(path: str, wishes: tuple[bool, ...], **parallel: Any) -> dict[str, Any]:
    """One step in which each rank has a wish of its own; the gradients against those of a step without a runtime."""
    model = spread_model(Path(path), **parallel)
    _loss(model, 0).backward()
    expected = gradients_of(model)
    model.zero_grad()
    runtime = ForcedRuntime(Forced("recomputed_dispatch" if wishes[dist.get_rank()] else "keep"))
    runtime.attach(model)
    with CountExchanges() as count, runtime.backward():
        loss = _loss(model, 0)
        agreed = len(runtime.in_flight[0].loads.agreed_layers)
        loss.backward()
    runtime.detach()
    actual = gradients_of(model)
    return {
        "agreed": agreed,
        "moe_layers": sum(dispatcher_of(module) is not None for module in model.modules()),
        "exchanges": count.num_calls,
        "error": max(relative_error(actual[name], gradient) for name, gradient in expected.items()),
    }


def agreement_by_plans(path: str, is_tight: tuple[bool, ...], num_steps: int, **parallel: Any) -> list[int]:
    """Layers whose dispatch is recomputed, by step, where some ranks run under the minimum-memory plan."""
    model = spread_model(Path(path), **parallel)
    forget_structures()  # choices that other tests in this process found worth having would be tried here too
    runtime = FlexRuntime(FlexConfig(memory_limit="20GiB", strategies=("recompute",)))
    with_fake_meter(runtime)
    agreed = []
    with pytest.MonkeyPatch.context() as patch:
        with_steady_times(patch)  # with others another plan may be the one that takes the least time
        runtime.attach(model)
        if is_tight[dist.get_rank()]:
            runtime.books.tighten(2, 0)
        for number in range(num_steps):
            with runtime.backward():
                loss = _loss(model, number)
                agreed.append(len(runtime.in_flight[0].loads.agreed_layers))
                loss.backward()
        runtime.detach()
    return agreed


def two_forwards(path: str, in_one_backward: bool, **parallel: Any) -> float:
    """Largest error of gradients where two micro-batches run forward before the first backward, all recomputed."""
    model = spread_model(Path(path), **parallel)
    (_loss(model, 0) + _loss(model, 1)).backward()
    expected = gradients_of(model)
    model.zero_grad()
    runtime = ForcedRuntime(Forced("recompute"))
    runtime.attach(model)
    losses = [_loss(model, number) for number in (0, 1)]
    with runtime.backward():
        if in_one_backward:
            torch.stack(losses).sum().backward()
        else:
            for loss in losses:
                loss.backward()
    runtime.detach()
    actual = gradients_of(model)
    return max(relative_error(actual[name], gradient) for name, gradient in expected.items())
