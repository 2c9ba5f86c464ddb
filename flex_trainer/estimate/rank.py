"""One rank of a pipeline stage: its memory and time under a plan, or under one of the ways it is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from flex_trainer.cost.graph import ActivationGraph, Operator, Segment
from flex_trainer.cost.hardware import Hardware
from flex_trainer.cost.iteration import MicroBatchCost, RankBase, RankPeak, rank_peak
from flex_trainer.cost.micro_batch import MicroBatchModel, Profiled
from flex_trainer.cost.schedules import Schedule
from flex_trainer.estimate.links import LayerLinks, StageLinks
from flex_trainer.estimate.mesh import Stage
from flex_trainer.estimate.settings import Settings
from flex_trainer.estimate.stage import StageGraph
from flex_trainer.estimate.weights import RankWeights
from flex_trainer.planner.mitigation import MitigationPlanner
from flex_trainer.planner.plan import Plan
from flex_trainer.provision.policy import fill
from flex_trainer.strategy import EP_COMBINE, EP_DISPATCH, Strategy

_EXCHANGES, _EXPERTS = (EP_DISPATCH, EP_COMBINE), ("expert",)
"""Kinds of operators that have the buffers of an exchange in forward."""
_SEARCH_STEPS = 6
"""Most plans that are tried to fill the limit with several micro-batches in flight."""
_FULL_SHARE = 0.99
"""A limit that is filled this far is full."""

PLAN, KEEP, CHECKPOINT, OFFLOAD = "plan", "keep_all", "full_checkpointing", "offload_everything"
WAYS = (PLAN, KEEP, CHECKPOINT, OFFLOAD)
"""The plan and what it is compared with."""


@dataclass(frozen=True)
class StageOutcome:
    """One rank of a stage."""

    stage: Stage
    weights: RankWeights
    micro_batch: MicroBatchCost
    num_in_flight: int
    peak: RankPeak
    """Of the micro-batches; bytes of weights and all else included."""
    optimizer_step_bytes: int
    """The other high point: parameters, gradients, state and the step's temporary tensors."""
    exchange_bytes: int
    """Buffers of the experts' all-to-all, part of the transients in layers with experts."""
    strategies: Mapping[str, Strategy]
    added_seconds: float
    """Per micro-batch."""

    @property
    def needed_bytes(self) -> int:
        return max(self.peak.num_bytes, self.optimizer_step_bytes)


@dataclass(frozen=True)
class RankParts:
    """What is known of a rank before its plan."""

    stage: Stage
    graph: StageGraph
    weights: RankWeights
    links: StageLinks
    exchange_bytes: int
    row_share: float = 1.0
    """Rows that a balanced rank sends over the most it could."""


class Rank:
    """One stage at one imbalance."""

    def __init__(
        self,
        parts: RankParts,
        settings: Settings,
        hardware: Hardware,
        factor: float,
        schedule: Schedule,
        limit_bytes: int,
    ) -> None:
        self.stage, self.weights = parts.stage, parts.weights
        self._links, self._exchange_bytes = parts.links, parts.exchange_bytes
        self._settings = settings
        self._factor = factor
        self._schedule = schedule
        self._limit_bytes = limit_bytes
        self._graph = _with_buffers(parts.graph.with_imbalance(factor, parts.row_share), parts)
        self._seconds = parts.graph.seconds
        self._rates = hardware.rates(settings.in_flight_bytes)
        self._gradients = self.weights.gradients
        self._model = MicroBatchModel(self._graph, self._rates, self._gradients)
        # The gradients of a single micro-batch grow while its activations fall: they are part of its own peak.
        stay_bytes = self.weights.gradients_bytes if settings.num_micro_batches > 1 else 0
        self.base = RankBase(self.weights.constant_bytes, stay_bytes)

    def outcome(self, way: str) -> StageOutcome:
        """Memory and time under one of the `WAYS`."""
        strategies = self._strategies(way)
        if way == CHECKPOINT:
            profiled = self._model.under_full_checkpointing([forward for forward, _ in self._times()])
        else:
            profiled = self._model.under(strategies)
        cost = self._with_times(profiled)
        peak = self._peak(cost)
        weights = self.weights
        step_bytes = (
            weights.parameters_bytes + weights.gradients_bytes + weights.optimizer_bytes + weights.buckets_bytes
        )
        return StageOutcome(
            stage=self.stage,
            weights=weights,
            micro_batch=cost,
            num_in_flight=self._num_in_flight,
            peak=peak,
            optimizer_step_bytes=step_bytes + weights.step_bytes,
            exchange_bytes=self._exchange_bytes,
            strategies=strategies,
            added_seconds=profiled.added_seconds,
        )

    def late_seconds(self) -> float:
        """Reduction of gradients that no micro-batch hides: what waits for the last, and the replicas'."""
        waits = not self.weights.are_gradients_sharded
        late = sum(links.reduce_seconds for links in self._links.layers.values()) if waits else 0.0
        return late + self._links.replicas_seconds

    @property
    def _num_in_flight(self) -> int:
        return min(self._settings.num_micro_batches, len(self._schedule) - self.stage.index)

    def _peak(self, cost: MicroBatchCost) -> RankPeak:
        rank = self.stage.index
        return rank_peak(rank, self._schedule[rank], {rank: cost}, self.base)

    # The plan

    def _strategies(self, way: str) -> Mapping[str, Strategy]:
        if way == PLAN:
            return self._plan().strategies
        if way == OFFLOAD:
            return self._planner((Strategy.OFFLOAD,)).uniform(Strategy.OFFLOAD, self._gradients).strategies
        assert way in WAYS, way
        return {}

    def _planner(self, strategies: tuple[Strategy, ...]) -> MitigationPlanner:
        return MitigationPlanner(self._graph, strategies, self._rates, method=self._settings.method)

    def _plan(self) -> Plan:
        """The cheapest plan found with which as many micro-batches as the schedule holds fit; the minimum-memory one
        if none does. Every micro-batch gets the same, which is what Algorithm 1 comes to when all are alike."""
        planner = self._planner(self._settings.strategies)
        room_bytes = self._limit_bytes - self.base.constant_bytes - self.base.gradient_bytes
        plan = planner.plan(room_bytes, self._gradients)
        if self._num_in_flight == 1 or self._total(plan) <= self._limit_bytes or not self._settings.strategies:
            return plan
        uniform = [planner.uniform(strategy, self._gradients) for strategy in self._settings.strategies]
        fitting = [plan for plan in uniform if self._total(plan) <= self._limit_bytes]
        if not fitting:
            least = planner.plan(0, self._gradients)
            if self._total(least) > self._limit_bytes:
                return least
            fitting = [least]
        return self._fill(planner, min(fitting, key=self._total), plan, fitting)

    def _fill(self, planner: MitigationPlanner, low: Plan, high: Plan, fitting: list[Plan]) -> Plan:
        """The cheapest of what fits, with what fills the limit (`low` fits, `high` does not)."""
        filling = fill(
            lambda room_bytes: planner.plan(room_bytes, self._gradients),
            lambda plan: self._limit_bytes - self._total(plan),
            self._num_in_flight,
            low,
            high,
            full_bytes=int((1 - _FULL_SHARE) * self._limit_bytes),
            max_plans=_SEARCH_STEPS,
        )
        return min([*fitting, *filling], key=lambda plan: plan.added_seconds)

    def _total(self, plan: Plan) -> int:
        """Highest bytes of the rank with this plan for every micro-batch."""
        return self._peak(self._model.under(plan.strategies).cost).num_bytes

    # Times

    def _times(self) -> list[tuple[float, float]]:
        """Forward and backward of every segment with nothing mitigated: computing, and the experts' exchange, which
        nothing hides."""
        times = []
        for segment, seconds in zip(self._graph.segments, self._seconds, strict=True):
            # The rank that gets most rows also waits longest for them.
            exchange = self._links_of(segment).exchange_seconds * max(self._factor, 1.0)
            times.append((seconds.forward_at(self._factor) + exchange, seconds.backward_at(self._factor) + exchange))
        return times

    def _with_times(self, profiled: Profiled) -> MicroBatchCost:
        forward = backward = self._links.hand_over_seconds if len(self._schedule) > 1 else 0.0
        parts = zip(self._graph.segments, self._times(), profiled.segments, strict=True)
        for segment, (forward_seconds, backward_seconds), cost in parts:
            links = self._links_of(segment)
            reduce = links.reduce_seconds if self.weights.are_gradients_sharded else 0.0
            forward += max(forward_seconds, links.gather_seconds)
            backward += max(backward_seconds + cost.added_seconds, links.gather_seconds + reduce)
        return replace(profiled.cost, forward_seconds=forward, backward_seconds=backward)

    def _links_of(self, segment: Segment) -> LayerLinks:
        return self._links.layers.get(segment.layer, LayerLinks())


def _with_buffers(graph: ActivationGraph, parts: RankParts) -> ActivationGraph:
    """The graph with what the links need in the transients of its operators: buffers of the experts' exchange in layers
    that have experts, and of the reduction of gradients in backward."""
    segments = []
    for segment in graph.segments:
        exchange_bytes = parts.exchange_bytes if segment.layer in parts.graph.routed_layers else 0
        backward_bytes = parts.weights.reduction_bytes.get(segment.layer, 0) + exchange_bytes
        has_dispatch = any(operator.site.kind in _EXCHANGES for operator in segment.operators)
        kinds = _EXCHANGES if has_dispatch else _EXPERTS
        operators = tuple(
            _with_more(operator, exchange_bytes if operator.site.kind.startswith(kinds) else 0, backward_bytes)
            for operator in segment.operators
        )
        segments.append(replace(segment, operators=operators))
    return replace(graph, segments=tuple(segments))


def _with_more(operator: Operator, forward_bytes: int, backward_bytes: int) -> Operator:
    forward, backward = operator.forward_transient_bytes, operator.backward_transient_bytes
    return replace(
        operator,
        forward_transient_bytes=None if forward is None else forward + forward_bytes,
        backward_transient_bytes=None if backward is None else backward + backward_bytes,
    )
