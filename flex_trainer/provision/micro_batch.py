"""One micro-batch in flight in one part of the model: the plan it runs under, what was counted, and its record."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from flex_trainer.activations.choices import Choices
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.place import Whereabouts
from flex_trainer.activations.scope import Scope
from flex_trainer.compat import current_backward
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.models.routing import Routing
from flex_trainer.planner.plan import Plan
from flex_trainer.provision.activity import Activity
from flex_trainer.provision.beside import Beside
from flex_trainer.provision.loads import Loads
from flex_trainer.records import MicroBatchRecord
from flex_trainer.strategy import EP_BLOCK, Site, Strategy

_REST_SHARE = 1 / 8
"""After a backward that keeps nothing, a rest this small hangs on outputs that the loss does not depend on (a router's
unused scores): it is there as long as the caller has them, and no backward will come for it."""


@dataclass(eq=False)
class MicroBatch:
    """Strategies may change for operators that have not run yet."""

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
    part: str = ""
    number: int = 0
    whereabouts: Whereabouts = field(default_factory=Whereabouts)
    step: int = 0
    num_replans: int = 0
    planned_pairs: Mapping[str, int] = field(default_factory=dict)
    """(Token, expert) pairs that each experts block is planned to get."""
    routed_pairs: dict[str, int] = field(default_factory=dict)
    loads: Loads = field(default_factory=Loads)
    expected_excess_bytes: int = 0
    """Held beyond what the plan says, as experience with this kind of batch has it."""
    excess_bytes: int = 0
    """Held beyond what was predicted, as of the last re-plan."""
    ledger: Ledger = field(default_factory=Ledger)
    activity: Activity = field(default_factory=Activity)
    """Its time and peak."""
    plain_seconds: float | None = None
    """Predicted time of the micro-batch with everything kept; None: nothing is known yet."""
    added_seconds: float = 0.0
    """What the plan was predicted to add."""
    rates: Rates | None = None
    """What the plan's seconds are made of."""
    replanned_seconds: float = 0.0
    """Time of planning inside of forward."""
    scope: Scope | None = None
    """None once it has ended: then neither it nor its scope keeps the other alive."""
    entered: set[str] | None = None
    """Where the model was entered by another door than its forward: names of the operators that were entered so."""
    is_bounded: bool = False
    """Whether its peak is known and fits, so that another one may run beside it."""
    beside: Beside | None = None
    """What runs beside its forward, as it was planned."""
    all_bytes: int = 0
    """What it and the micro-batches in flight when it began may take together."""
    is_paired: bool = False
    """Whether another one took turns with it: then peaks are those of both."""
    exchange_seconds: float = 0.0
    """In which its exchanges between ranks were under way."""
    exposed_seconds: float = 0.0
    """Of these, the time in which nothing was computed."""
    pair_seconds: float = 0.0
    """Where a backward ran beside its forward: the time of both."""
    predicted_pair_seconds: float = 0.0
    is_forward_done: bool = False
    is_covered: bool = False
    """Whether another micro-batch began while this one waited for its backward."""
    has_backward_begun: bool = False
    backwards: set[int] = field(default_factory=set)
    """Numbers of the backwards that ask for its values now."""
    keeps_graph: bool = False
    """Whether the latest of them keeps the values for another one."""
    loss_bytes: int = 0
    """Expected on top of what it holds, between forward and backward."""
    forward_peak: tuple[int, bool] = (0, True)
    """Peak in its forward, and whether that is exact."""
    loss_peak: tuple[int, bool] | None = None
    """The same between its forward and its backward; None where other micro-batches came in between."""
    backward_base_bytes: int = 0
    """Where it is covered: what was in use when its backward began."""
    actual_bytes: int = 0
    _planned_seconds: float = 0.0
    """Time of planning up to the end of forward."""
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
        ran = {site: self.strategy(site) for site in self.scope.sites}
        return {site.name: strategy if site.allows(strategy) else Strategy.KEEP for site, strategy in ran.items()}

    def note_routing(self, site: Site, routing: Routing) -> None:
        """Count the tokens of each expert, on the device."""
        self.routed_pairs[site.name] = routing.num_pairs
        self.loads.note(site.layer, routing)
        counts = routing.count()
        if counts is not None:
            self._counts.append((counts, routing.mean_tokens))

    @property
    def room_bytes(self) -> int:
        """What its peak may take beside all that others held when it began."""
        return self.available_bytes - (0 if self.beside is None else self.beside.held_bytes)

    @property
    def key(self) -> tuple[str, int]:
        """What it is in the books of the device."""
        return self.part, self.number

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Count the time inside as planning."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.plan_seconds += time.perf_counter() - started

    def begin_forward(self) -> None:
        """Time runs from here on."""
        self.replanned_seconds = -self.plan_seconds
        self.activity.stopwatch.start()

    def end_forward(self) -> None:
        self.is_forward_done = True
        if self.entered is not None and self.scope is not None:
            self.scope.close()
        self.activity.stopwatch.stop()
        self._planned_seconds = self.plan_seconds
        self.replanned_seconds += self.plan_seconds
        self.actual_bytes = self.ledger.held_bytes
        if not self._counts:
            return
        worst = _worst_imbalance(self._counts)
        if worst.is_cuda:
            # On its way while backward runs. Asked for afterwards, it would come when all of backward has.
            self._has_arrived = arrival = torch.cuda.Event()
            self._worst = worst.to("cpu", non_blocking=True)
            arrival.record(torch.cuda.current_stream(worst.device))
        else:
            self._worst = worst
        self._counts.clear()

    @property
    def is_over(self) -> bool:
        """Whether its backward has ended and none will come any more. Begun is not ended: a backward may be of a part
        of the values only (`inputs=`), may keep the graph for another one, or be half way while this is asked."""
        if self.scope is None or not self.has_backward_begun:
            return False
        if not self.scope.holds_values:
            return current_backward() not in self.backwards
        rest_bytes = self.ledger.held_bytes
        return not self.backwards and not self.keeps_graph and rest_bytes <= _REST_SHARE * self.actual_bytes

    @property
    def is_abandoned(self) -> bool:
        """No backward came, and nothing is left for one."""
        is_waiting = self.is_forward_done and not self.has_backward_begun
        return is_waiting and (self.scope is None or not self.scope.holds_values)

    @property
    def own_peak_bytes(self) -> int:
        """Its measured peak above what was in use before it, in its forward and its backward: without what others held
        in its backward, and without what came between the two (`above_held`)."""
        if not self.is_covered:
            return max(self.forward_peak[0], self.activity.latest_peak_bytes) - self.baseline_bytes
        in_backward_bytes = self.actual_bytes + self.activity.latest_peak_bytes - self.backward_base_bytes
        return max(self.forward_peak[0] - self.baseline_bytes, in_backward_bytes)

    @property
    def is_own_peak_exact(self) -> bool:
        """Whether that is its peak, and not only a lower bound: gradients that were to come when it was planned may be
        there by the time of its backward, where others ran in between."""
        may_have_come = self.is_covered and any(self.gradients.pending.values())
        is_exact = self.activity.is_peak_exact
        if not self.is_covered and self.forward_peak[0] > self.activity.latest_peak_bytes:
            is_exact = self.forward_peak[1]
        return is_exact and not may_have_come

    @property
    def above_held(self) -> tuple[int, bool] | None:
        """Most bytes in use between its forward and its backward beyond the baseline and what it held, and whether that
        is exact; None where it was not alone then."""
        if self.loss_peak is None or self.is_covered:
            return None
        return self.loss_peak[0] - self.baseline_bytes - self.actual_bytes, self.loss_peak[1]

    def predicted_peak_bytes(self) -> int:
        """Predicted peak of memory in use; 0 where nothing was predicted."""
        if self.plan is None:
            return 0
        others_bytes = self.backward_base_bytes - self.actual_bytes if self.is_covered else 0
        own_bytes = max(self.plan.peak_bytes, self.plan.predicted_bytes + self.loss_bytes)
        peak_bytes = max(self.baseline_bytes, others_bytes) + own_bytes
        if self.beside is not None:
            both_bytes = self.beside.most_bytes(self.plan) + self.plan.on_top_bytes + self.beside.on_top_bytes
            alone_bytes = self.baseline_bytes - self.beside.held_bytes
            peak_bytes = max(alone_bytes + max(own_bytes, both_bytes), others_bytes + own_bytes)
        return peak_bytes + self.expected_excess_bytes

    def record(self, limit_bytes: int) -> MicroBatchRecord:
        """What is remembered of it, once its backward has ended."""
        plan = self.plan
        demand_bytes = self.ledger.demand_bytes
        return MicroBatchRecord(
            step=self.step,
            micro_batch=self.number,
            num_tokens=self.shape.num_tokens,
            imbalance=self._imbalance(),
            budget_bytes=self.budget_bytes,
            predicted_bytes=plan.predicted_bytes + self.expected_excess_bytes if plan is not None else 0,
            actual_bytes=self.actual_bytes,
            freed_bytes=dict(self.ledger.freed_bytes),
            plan_ms=self.plan_seconds * 1e3,
            trace_ms=self.traced_seconds * 1e3,
            is_spike=demand_bytes > self.budget_bytes,
            demand_bytes=demand_bytes,
            limit_bytes=limit_bytes,
            baseline_bytes=self.baseline_bytes,
            predicted_peak_bytes=self.predicted_peak_bytes(),
            peak_bytes=self.activity.peak_bytes,
            step_ms=self.activity.seconds * 1e3,
            run_ms=self._run_seconds() * 1e3,
            predicted_step_ms=self.predicted_seconds * 1e3,
            num_replans=self.num_replans,
            is_profile=plan is None,
            num_unmanaged=self.ledger.num_unmanaged,
            part=self.part,
            exchange_ms=self.exchange_seconds * 1e3,
            exposed_ms=self.exposed_seconds * 1e3,
            pair_ms=self.pair_seconds * 1e3,
            predicted_pair_ms=self.predicted_pair_seconds * 1e3,
        )

    def _run_seconds(self) -> float:
        """Time of forward and backward on the host, planning left out."""
        stopwatch = self.activity.stopwatch
        if stopwatch.num_laps >= 2 and stopwatch.is_on_host:
            return stopwatch.seconds() - self.replanned_seconds
        return max(self.activity.seconds - self._planned_seconds, 0.0)

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


def _worst_imbalance(counts: list[tuple[torch.Tensor, float | None]]) -> torch.Tensor:
    """Largest over layers of most tokens of one expert / mean tokens, in a few kernels for all layers together."""
    by_size: dict[int, list[tuple[torch.Tensor, float | None]]] = {}
    for layer in counts:
        by_size.setdefault(layer[0].numel(), []).append(layer)
    worst = []
    for layers in by_size.values():
        tokens = torch.stack([count for count, _ in layers]).float()
        means = [mean for _, mean in layers]
        if all(mean is None for mean in means):
            ratios = tokens.amax(dim=1) / tokens.mean(dim=1).clamp_(min=1e-9)
        else:
            # Of all ranks, so known on the host: a tensor of them is copied without a wait.
            pinned = torch.tensor([math.inf if mean is None else mean for mean in means], dtype=torch.float32)
            ratios = tokens.amax(dim=1) / pinned.to(tokens.device, non_blocking=True)
        worst.append(ratios.amax())
    return worst[0] if len(worst) == 1 else torch.stack(worst).amax()
