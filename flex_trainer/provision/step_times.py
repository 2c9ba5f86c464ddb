"""Time of a micro-batch: predicted before it runs, and learnt from when it has run.

    predicted seconds  =  plain time of the shape  +  what the plan adds, at the rates learnt so far

How what mitigations add is seen:

- *Recompute* and *waiting for a copy* happen on the host's thread on a CPU, and are simply measured there.
- *A copy beside compute* costs what it takes from compute: cores, page faults, memory. Not the copy's own duration
  counts but how much longer the step gets. On a CPU the threads that copy say how long they were on a core. Where the
  threads that compute need all cores, each such second is taken to make the step a second longer, until steps with
  different plans say something else (`step_fit.py`).
- *On CUDA* the host sees none of this. There the model's own seconds of each mitigation are the features of the same
  regression, over the device's time of forward and backward.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.shape import BatchShape
from flex_trainer.planner.plan import Plan
from flex_trainer.provision.rates import MITIGATIONS, LearntRates, Used
from flex_trainer.provision.step_fit import StepFit
from flex_trainer.provision.stopwatch import Stopwatch
from flex_trainer.strategy import Strategy

_BUSY_OFFLOAD_START = 2.0
"""Copies to a file beside compute that needs all cores, over what the idle machine's probe says: a first guess."""
_SPARE_CORE_COST = 0.1
"""What a second of a copying thread adds to the step where there are cores that do not compute."""
_MOST_PENDING = 8
_MOST_WORKS = 512


@dataclass(frozen=True)
class Ran:
    """A micro-batch that has run forward and backward by itself."""

    shape: BatchShape
    plan: Plan
    """As it came to run."""
    rates: Rates
    """What its seconds are made of."""
    ledger: Ledger
    stopwatch: Stopwatch
    planned_seconds: float = 0.0
    """Time of planning inside of what the stopwatch saw."""


def learnt_rates(device: torch.device, probe: Rates, strategies: Iterable[Strategy] = MITIGATIONS) -> LearntRates:
    """What mitigations cost on a device, before anything was seen.

    Args:
        probe: on the idle machine.
        strategies: those that may be used.
    """
    return LearntRates(probe, strategies, _BUSY_OFFLOAD_START if _copies_take_cores(device) else 1.0)


def _copies_take_cores(device: torch.device) -> bool:
    """Whether the threads that compute need all cores, so that those that copy take some away."""
    return device.type != "cuda" and torch.get_num_threads() + 1 > (os.cpu_count() or 1)


class StepTimes:
    """Predicts micro-batches of one part of a model, and learns from them.

    Args:
        device: where they run.
        profile: knows the operators' times.
        learnt: what mitigations cost on the device; shared with its other parts.
    """

    def __init__(self, device: torch.device, profile: Profile, learnt: LearntRates) -> None:
        self._profile = profile
        self._is_host = device.type != "cuda"
        is_busy = _copies_take_cores(device)
        self._learnt = learnt
        # Recompute, offload, quantize. On the host, the first is measured.
        self._fit = StepFit((1.0, 1.0 if is_busy or not self._is_host else _SPARE_CORE_COST, 1.0))
        self._pending: list[Ran] = []
        self._works: dict[BatchShape, float] = {}

    @property
    def rates(self) -> Rates:
        """What plans are made with now."""
        return self._learnt.rates

    def plain_seconds(self, shape: BatchShape) -> float | None:
        """Predicted time of a micro-batch of which everything is kept; None before any has run."""
        work = self._work(shape) if self._works else 0.0
        return self._fit.plain_seconds(shape, work) if work > 0 else None

    def added_seconds(self, plan: Plan) -> float:
        """What the mitigations of a plan made at `rates` add, as far as is known by now."""
        return self._learnt.added_seconds(plan)

    def learn(self, ran: Ran) -> None:
        """Learn from a micro-batch; on CUDA once the device is done with it, at a later call."""
        self._pending.append(ran)
        while self._pending and (len(self._pending) > _MOST_PENDING or self._pending[0].stopwatch.is_read()):
            self._learn(self._pending.pop(0))

    def _learn(self, ran: Ran) -> None:
        work = self._work(ran.shape)
        seconds = ran.stopwatch.seconds() - ran.planned_seconds
        if work <= 0 or seconds <= 0:
            return
        ledger, probe = ran.ledger, self._learnt.probe
        num_bytes = ledger.freed_bytes["offload"]
        num_recomputed, recomputed_seconds = _recomputed(ran)
        quantize_seconds = _probed_quantize_seconds(ran, probe)
        waited_seconds = measured_seconds = 0.0
        if self._is_host:
            waited_seconds, measured_seconds = ledger.wait_seconds, ledger.recompute_seconds
            copying_seconds = max(sum(copy.core_seconds for copy in ledger.copies) - waited_seconds, 0.0)
            features = (0.0, copying_seconds, quantize_seconds)
        else:
            recompute_seconds = (
                num_recomputed * probe.recompute_overhead_seconds + probe.recompute_factor * recomputed_seconds
            )
            copying_seconds = (
                ledger.num_offloaded * probe.offload.overhead_seconds + num_bytes / probe.offload.bytes_per_second
            )
            features = (recompute_seconds, copying_seconds, quantize_seconds)
        self._fit.add(ran.shape, work, seconds - waited_seconds - measured_seconds, features)
        recompute, offload, quantize = (self._fit.theta * features).tolist()
        self._learnt.observe(
            Used(
                num_recomputed=num_recomputed,
                recomputed_seconds=recomputed_seconds,
                recompute_seconds=measured_seconds + recompute,
                num_offloaded=ledger.num_offloaded,
                offloaded_bytes=num_bytes,
                offload_seconds=waited_seconds + offload,
                probed_quantize_seconds=quantize_seconds,
                quantize_seconds=quantize,
            )
        )

    def _work(self, shape: BatchShape) -> float:
        """Forward time of a shape's operators, for all shapes as of one moment: operators' times drift with the load of
        the machine, and with them would the time that a shape takes over its work."""
        found = self._works.get(shape)
        if found is None:
            found = self._profile.forward_seconds(shape)
            if self._works and found > 0:
                other = next(reversed(self._works))
                then, now = self._works[other], self._profile.forward_seconds(other)
                found *= then / now if now > 0 else 1.0
            if found > 0:
                if len(self._works) >= _MOST_WORKS:
                    self._works.pop(next(iter(self._works)))
                self._works[shape] = found
        return found


def _recomputed(ran: Ran) -> tuple[int, float]:
    """Regions recomputed, and the forward time of what they run."""
    num, rates = ran.ledger.num_recomputes, ran.rates
    seconds = (ran.plan.recompute_seconds - num * rates.recompute_overhead_seconds) / rates.recompute_factor
    return num, max(seconds, 0.0)


def _probed_quantize_seconds(ran: Ran, probe: Rates) -> float:
    if not ran.ledger.freed_bytes["quantize"]:
        return 0.0
    offload, rates = ran.rates.offload, ran.rates
    offload_seconds = (
        ran.ledger.num_offloaded * offload.overhead_seconds
        + ran.ledger.freed_bytes["offload"] / offload.bytes_per_second
    )
    seconds = ran.plan.added_seconds - ran.plan.recompute_seconds - offload_seconds
    return max(seconds, 0.0) * rates.quantize.bytes_per_second / probe.quantize.bytes_per_second
