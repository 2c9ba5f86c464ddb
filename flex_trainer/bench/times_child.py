"""One model in a process of its own, under several ways to keep the same limit, in turns.

The ways share the model: a turn attaches a way's runtime, runs a few micro-batches and detaches it. What a runtime has
learnt stays with it. So weights, allocator and whatever else the machine does are the same for all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, set_seed

from flex_trainer.bench.child import ByteText
from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError
from flex_trainer.memory.enforce import return_freed_memory
from flex_trainer.runtime import FlexRuntime

PLAN, ALTERNATIVES = "plan", ("recompute", "offload", "both")
_WAYS: dict[str, dict[str, Any]] = {
    PLAN: {},
    "recompute": {"strategies": ("recompute",), "planner": "bandwidth"},
    "offload": {"strategies": ("offload",), "planner": "bandwidth"},
    "both": {"strategies": ("recompute", "offload"), "planner": "bandwidth"},
}
_SHARE_STEP, _HIGHEST_SHARE = 0.1, 0.95
"""Where a limit leaves no choice, a higher one is tried."""
_LEAST_TURNS = 2
_WARM_UP_TURNS = 2
"""Turns left out: first touches, traces, first plans, and the rates that are learnt from them."""


@dataclass
class _Way:
    runtime: FlexRuntime
    turns: list[list[tuple[float, float]]] = field(default_factory=list)
    """Predicted and measured milliseconds of each micro-batch, by turn."""
    refusal: str = ""


def compare(
    *,
    architecture: str,
    config: dict[str, Any],
    batch_size: int,
    sequence_length: int,
    shares: list[float],
    budget_seconds: float,
    num_micro_batches: int,
    most_turns: int,
) -> list[dict[str, Any]]:
    """Turns of all ways at each limit, until `most_turns` or the seconds of one limit are used up.

    Args:
        shares: limits, as shares of what keeping everything takes above the start.
        num_micro_batches: of one turn.

    Raises:
        RuntimeError: a way has another loss than the plain run.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return_freed_memory()
    set_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**config)).train()
    text = ByteText([sequence_length] * batch_size)
    batch = {key: torch.stack([text[i][key] for i in range(batch_size)]) for key in text[0]}
    loss = _step(model, batch, None)
    kept = _Way(FlexRuntime(FlexConfig(memory_limit="auto")))
    for _ in range(_WARM_UP_TURNS + _LEAST_TURNS):
        _turn(kept, model, batch, num_micro_batches, loss)
    records = kept.runtime.records[num_micro_batches:]
    lowest_bytes = max(record.baseline_bytes for record in records)
    highest_bytes = max(record.peak_bytes for record in records)
    cases: list[dict[str, Any]] = [{"share": 1.0, "turns": {"keep": kept.turns[_WARM_UP_TURNS:]}, "refused": {}}]

    def ways_at(share: float) -> dict[str, _Way]:
        limit_bytes = int(lowest_bytes + share * (highest_bytes - lowest_bytes))
        ways = {
            name: _Way(FlexRuntime(FlexConfig(memory_limit=limit_bytes, transient_reserve=0, **way)))
            for name, way in _WAYS.items()
        }
        _take_turns(ways, model, batch, num_micro_batches, loss, most_turns, budget_seconds)
        return ways

    for wanted_share in shares:
        share, ways = first_share_with_a_choice(wanted_share, ways_at)
        if share in [case["share"] for case in cases]:
            continue
        cases.append(
            {
                "share": share,
                "turns": {name: way.turns[_WARM_UP_TURNS:] for name, way in ways.items() if not way.refusal},
                "refused": {name: way.refusal for name, way in ways.items() if way.refusal},
            }
        )
    return cases


def first_share_with_a_choice(
    share: float, ways_at: Callable[[float], dict[str, _Way]]
) -> tuple[float, dict[str, _Way]]:
    """The lowest limit from `share` on at which the plan and one other way ran, with all ways there.

    Where a limit is too low for all of them it is seen at once, and costs next to no time.
    """
    while True:
        ways = ways_at(share)
        others_ran = any(not ways[name].refusal for name in ALTERNATIVES)
        if (others_ran and not ways[PLAN].refusal) or share + _SHARE_STEP > _HIGHEST_SHARE:
            return share, ways
        share = round(share + _SHARE_STEP, 3)


def _take_turns(
    ways: dict[str, _Way],
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    num_micro_batches: int,
    loss: float,
    most_turns: int,
    budget_seconds: float,
) -> None:
    ends = time.monotonic() + budget_seconds
    names = list(ways)
    for turn in range(_WARM_UP_TURNS + most_turns):
        if turn >= _WARM_UP_TURNS + _LEAST_TURNS and time.monotonic() > ends:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:  # a different one is first each time
            way = ways[name]
            if not way.refusal:
                try:
                    _turn(way, model, batch, num_micro_batches, loss)
                except UserError as error:  # this way cannot keep the limit
                    way.refusal = str(error)


def _turn(way: _Way, model: nn.Module, batch: dict[str, torch.Tensor], num_micro_batches: int, loss: float) -> None:
    runtime = way.runtime
    runtime.attach(model)
    try:
        start = len(runtime.records)
        for _ in range(num_micro_batches):
            found = _step(model, batch, runtime)
            if found != loss:
                raise RuntimeError(f"the loss is {found} under a plan and {loss} in the plain run")
        records = runtime.records[start:]
        way.turns.append([(record.predicted_step_ms, record.run_ms) for record in records])
    finally:
        runtime.detach()


def _step(model: nn.Module, batch: dict[str, torch.Tensor], runtime: FlexRuntime | None) -> float:
    model.zero_grad(set_to_none=False)  # gradients stay: what a limit leaves is for activations
    loss = model(**batch).loss
    with contextlib.nullcontext() if runtime is None else runtime.backward():
        loss.backward()
    return float(loss.detach())
