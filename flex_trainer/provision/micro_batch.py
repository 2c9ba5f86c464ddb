"""One micro-batch in flight: the plan it runs under, what was counted, and the record it leaves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Choices, Scope
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.models.routing import Routing
from flex_trainer.planner.plan import Plan
from flex_trainer.provision.loads import Loads
from flex_trainer.provision.stopwatch import Stopwatch
from flex_trainer.records import MicroBatchRecord
from flex_trainer.strategy import EP_BLOCK, Site, Strategy


@dataclass
class MicroBatch:
    """Grows from `begin` to `record`; strategies may change for operators that have not run yet."""

    shape: BatchShape
    choices: Choices
    plan: Plan | None
    """None for a micro-batch that profiles operators never seen before."""
    baseline_bytes: int
    available_bytes: int
    """What the plan's peak may take above the baseline."""
    budget_bytes: int
    gradients: GradientBytes = field(default_factory=GradientBytes)
    plan_seconds: float = 0.0
    traced_seconds: float = 0.0
    number: int = 0
    step: int = 0
    started: float = 0.0
    num_replans: int = 0
    routed_pairs: dict[str, int] = field(default_factory=dict)
    loads: Loads = field(default_factory=Loads)
    excess_bytes: int = 0
    """Held beyond what was predicted, as of the last re-plan."""
    ledger: Ledger = field(default_factory=Ledger)
    is_covered: bool = False
    """Whether another micro-batch began while this one was in flight: the peak is then not its own."""
    plain_seconds: float | None = None
    """Predicted time of the micro-batch with everything kept; None: nothing is known yet."""
    added_seconds: float = 0.0
    """What the plan was predicted to add."""
    rates: Rates | None = None
    """What the plan's seconds are made of."""
    stopwatch: Stopwatch = field(default_factory=lambda: Stopwatch(torch.device("cpu")))
    """Forward is one lap, backward another."""
    replanned_seconds: float = 0.0
    """Time of planning inside of forward."""
    scope: Scope | None = None
    actual_bytes: int = 0
    _counts: list[tuple[torch.Tensor, float | None]] = field(default_factory=list)
    _worst: torch.Tensor | None = None
    _has_arrived: torch.cuda.Event | None = None

    def strategy(self, site: Site) -> Strategy:
        if site.kind == EP_BLOCK:  # what the ranks have agreed on holds, whatever plans say by now
            return Strategy.RECOMPUTE if site.layer in self.loads.agreed_layers else Strategy.KEEP
        return self.choices.strategy(site)

    def ran(self) -> dict[str, Strategy]:
        """The strategies of the operators that have run forward, by site name."""
        assert self.scope is not None, "until backward has ended"
        ran = {call.site: self.strategy(call.site) for call in self.scope.calls}
        return {site.name: strategy if site.allows(strategy) else Strategy.KEEP for site, strategy in ran.items()}

    def note_routing(self, site: Site, routing: Routing) -> None:
        """Count the tokens of each expert, on the device."""
        self.routed_pairs[site.name] = routing.num_pairs
        self.loads.note(site.layer, routing)
        counts = routing.count()
        if counts is not None:
            self._counts.append((counts, routing.mean_tokens))

    def begin_forward(self) -> None:
        """Time runs from here on."""
        self.replanned_seconds = -self.plan_seconds
        self.stopwatch.start()

    def end_forward(self) -> None:
        self.stopwatch.stop()
        self.replanned_seconds += self.plan_seconds
        self.actual_bytes = self.ledger.held_bytes
        if not self._counts:
            return
        ratios = [
            counts.max() / (counts.float().mean().clamp(min=1e-9) if mean is None else mean)
            for counts, mean in self._counts
        ]
        worst = torch.stack(ratios).max()
        if worst.is_cuda:
            # On its way while backward runs. Asked for afterwards, it would come when all of backward has.
            self._has_arrived = arrival = torch.cuda.Event()
            self._worst = worst.to("cpu", non_blocking=True)
            arrival.record(torch.cuda.current_stream(worst.device))
        else:
            self._worst = worst
        self._counts.clear()

    @property
    def is_backward_done(self) -> bool:
        return self.scope is not None and self.scope.was_used

    @property
    def is_abandoned(self) -> bool:
        """No backward came, and nothing is left for one."""
        return not self.is_backward_done and self.ledger.held_bytes == 0

    def record(self, limit_bytes: int, peak_bytes: int, ended: float) -> MicroBatchRecord:
        plan = self.plan
        demand_bytes = self.ledger.demand_bytes
        return MicroBatchRecord(
            step=self.step,
            micro_batch=self.number,
            num_tokens=self.shape.num_tokens,
            imbalance=self._imbalance(),
            budget_bytes=self.budget_bytes,
            predicted_bytes=plan.predicted_bytes if plan is not None else 0,
            actual_bytes=self.actual_bytes,
            freed_bytes=dict(self.ledger.freed_bytes),
            plan_ms=self.plan_seconds * 1e3,
            trace_ms=self.traced_seconds * 1e3,
            is_spike=demand_bytes > self.budget_bytes,
            demand_bytes=demand_bytes,
            limit_bytes=limit_bytes,
            baseline_bytes=self.baseline_bytes,
            predicted_peak_bytes=self.baseline_bytes + plan.peak_bytes if plan is not None else 0,
            peak_bytes=peak_bytes,
            step_ms=(ended - self.started) * 1e3,
            run_ms=self._run_seconds(ended) * 1e3,
            predicted_step_ms=self.predicted_seconds * 1e3,
            num_replans=self.num_replans,
            is_profile=plan is None,
            num_unmanaged=self.ledger.num_unmanaged,
        )

    def _run_seconds(self, ended: float) -> float:
        """Time of forward and backward on the host, planning left out."""
        if self.stopwatch.num_laps == 2 and self.stopwatch.is_on_host:
            return self.stopwatch.seconds() - self.replanned_seconds
        return max(ended - self.started - self.plan_seconds, 0.0)

    @property
    def predicted_seconds(self) -> float:
        """Of forward and backward under the plan; 0 where nothing was predicted."""
        if self.plan is None or self.plain_seconds is None:
            return 0.0
        return self.plain_seconds + self.added_seconds

    def _imbalance(self) -> float:
        """Largest over layers of most tokens of one expert / mean tokens; one transfer for all layers."""
        if self._worst is None:
            return 1.0
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        return float(self._worst)
