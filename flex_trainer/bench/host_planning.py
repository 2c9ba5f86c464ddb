"""What planning costs the host, all of it: every call of the provisioner in a micro-batch (`bench host`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from flex_trainer.config import FlexConfig
from flex_trainer.cost.load import Load
from flex_trainer.models.routing import Routing
from flex_trainer.runtime import FlexRuntime
from flex_trainer.strategy import Site
from flex_trainer.testing.fake_meter import BASE_BYTES, with_fake_meter
from flex_trainer.testing.tiny import tiny_batch, tiny_model

_STAGES = ("prepare", "begin", "revise", "commit", "learn")
"""Methods of the provisioner that a micro-batch goes through. A trace of an unknown kind (prepare) is not planning."""
_ARCHITECTURE = "deepseek_v3"
_REPEATS = 8
_LENGTHS = [64, 32, 40, 48]
_SHARE = 0.7
"""Of the peak with everything kept: the limit."""
_AMPLE_BYTES = 10**9


class _Watched(FlexRuntime):
    """Counts the CPU time in the provisioner; puts loads on the experts where it is told to."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(FlexConfig(memory_limit=limit_bytes, strategies=("recompute", "offload")))
        self.seconds = 0.0
        self.milliseconds: list[float] = []
        self.replan_seconds: list[float] = []
        self.load: Load | None = None

    def watch(self) -> None:
        """Begin to count, after `attach`."""
        for name in _STAGES:
            setattr(self._provisioner, name, self._timed(name, getattr(self._provisioner, name)))

    def on_routed(self, experts: Site, routing: Routing) -> None:
        super().on_routed(experts, routing if self.load is None else replace(routing, load=self.load))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            num_replans = args[0].num_replans if name == "revise" else 0
            start = time.process_time()
            result = method(*args)
            seconds = time.process_time() - start
            if name == "prepare" and result > 0:  # a trace, which records have a time of its own for
                return result
            self.seconds += seconds
            if name == "revise" and args[0].num_replans > num_replans:
                self.replan_seconds.append(seconds)
            return result

        return timed


def planning(num_layers: int) -> dict[str, float]:
    """Milliseconds of planning in a micro-batch, under a limit at which part of it has to be mitigated.

    Shape and room known (median), a new length of a known kind (median), the first plan of a kind (its trace, which is
    reported apart, left out), and one replan after a router whose experts get more than planned (median).
    """
    model = tiny_model(_ARCHITECTURE, num_hidden_layers=num_layers)
    ample = _run(model, _Watched(_AMPLE_BYTES), [_LENGTHS[0]] * 2)
    ample.detach()
    peak_bytes = ample.records[-1].peak_bytes - BASE_BYTES
    runtime = _Watched(BASE_BYTES + int(_SHARE * peak_bytes))
    cold_ms = _run(model, runtime, _LENGTHS[:1]).milliseconds[0]
    _run(model, runtime, [*_LENGTHS[1:], *_LENGTHS[:1] * 4])  # sizes and times settle
    hits = _run(model, runtime, _LENGTHS[:1] * _REPEATS).milliseconds[-_REPEATS:]
    reported_ms = statistics.median(record.plan_ms for record in runtime.records[-_REPEATS:])
    new = _run(model, runtime, [_LENGTHS[0] - 1 - number for number in range(_REPEATS)]).milliseconds[-_REPEATS:]
    for number in range(_REPEATS):
        runtime.load = Load(1.5 + 0.5 * number, 1.0 + 0.25 * number)
        _run(model, runtime, _LENGTHS[:1])
    runtime.detach()
    return {
        "hit_ms": statistics.median(hits),
        "reported_hit_ms": reported_ms,
        "new_length_ms": statistics.median(new),
        "cold_ms": cold_ms,
        "trace_ms": runtime.records[0].trace_ms,
        "replan_ms": statistics.median(runtime.replan_seconds) * 1e3 if runtime.replan_seconds else 0.0,
        "replans": len(runtime.replan_seconds),
    }


def _run(model: PreTrainedModel, runtime: _Watched, lengths: list[int]) -> _Watched:
    """Micro-batches of these lengths."""
    if not runtime.is_attached:
        with_fake_meter(runtime)
        runtime.attach(model)
        runtime.watch()
    for length in lengths:
        runtime.seconds = 0.0
        model.zero_grad(set_to_none=True)
        loss = model(**tiny_batch(model, 1, length)).loss
        with runtime.backward():
            loss.backward()
        runtime.milliseconds.append(runtime.seconds * 1e3)
    return runtime
