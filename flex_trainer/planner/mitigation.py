"""The mitigation planner: which operator of which layer gives its activations up, and how.

Three methods: "optimal" (planner/optimal.py: least added time; Algorithm 2 is asked beside it, so its plans are never
worse), and Algorithm 2 of BaGuaLu-2 (planner/greedy.py) in two orders, "bandwidth" and "largest_first". All obey the
same cost rules (cost/evaluate.py) and the same memory timeline (cost/timeline.py), and what they return is checked on
those.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flex_trainer.config import METHODS
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes, Peak, with_gradients
from flex_trainer.planner.choice import Choice, choice_of, strategies_of, uniform_choice
from flex_trainer.planner.graph_costs import GraphCosts
from flex_trainer.planner.greedy import GreedyMethod
from flex_trainer.planner.optimal import OptimalMethod
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Strategy


class MitigationPlanner:
    """Plans one graph; segments of the same shape share their evaluations."""

    def __init__(
        self,
        graph: ActivationGraph,
        allowed: Iterable[Strategy],
        rates: Rates,
        *,
        method: str = "optimal",
        transient_factor: float = 1.0,
    ) -> None:
        """
        Args:
            graph: the micro-batch.
            allowed: the mitigations that may be used.
            rates: what they cost on this machine.
            method: one of `METHODS`.
            transient_factor: what transients really are, over what the costs say.
        """
        assert method in METHODS, method
        self._graph = graph
        self._allowed = tuple(allowed)
        self._rates = replace(rates, transient_factor=transient_factor)
        self._method = method
        # Gradients that do not exist yet are part of what operators need in backward: all of them in the first
        # micro-batch of a step, none in the others.
        self._tables: dict[tuple[float, ...], _Tables] = {}

    def plan(
        self,
        available_bytes: int,
        gradients: GradientBytes | None = None,
        fixed: Mapping[str, Strategy] | None = None,
    ) -> Plan:
        """The cheapest plan found whose peak is at most `available_bytes`; the least demanding one if none is.

        Args:
            available_bytes: what the limit leaves above what is in use.
            gradients: parameter gradients that backward will allocate.
            fixed: sites that have run already, with the strategy they ran under.
        """
        fixed = fixed or {}
        tables = self._tables_for(gradients)
        costs = tables.costs
        kept = [bytes(len(segment.operators)) for segment in costs.segments]
        start = [choice_of(segment, fixed) for segment in costs.segments] if fixed else kept
        demand = costs.timeline(kept, gradients).peak()
        started = self._plan(tables, start, available_bytes, gradients, demand)
        if started.fits or not self._allowed:
            return started
        plans: list[Plan] = []
        if self._method == "optimal":
            chosen = tables.optimal.choose(available_bytes, gradients, fixed)
            plans.append(self._plan(tables, chosen, available_bytes, gradients, demand))
        # The optimal method looks at choices worth having, layer by layer, and may miss one that matters for the whole:
        # so Algorithm 2 is asked too, and its plan taken where it is better.
        for chosen in tables.greedy.choose(start, available_bytes, gradients, fixed):
            plans.append(self._plan(tables, chosen, available_bytes, gradients, demand))
        return min(plans, key=lambda plan: (not plan.fits, plan.added_seconds if plan.fits else plan.peak_bytes))

    def uniform(self, everywhere: Strategy, gradients: GradientBytes | None = None) -> Plan:
        """What one strategy for everything costs: the plan of a micro-batch that is run to measure."""
        tables = self._tables_for(gradients)
        costs = tables.costs
        chosen = [uniform_choice(segment, everywhere) for segment in costs.segments]
        demand = costs.timeline([bytes(len(choice)) for choice in chosen], gradients).peak()
        return self._plan(tables, chosen, costs.timeline(chosen, gradients).peak().num_bytes, gradients, demand)

    def _tables_for(self, gradients: GradientBytes | None) -> _Tables:
        key = () if gradients is None else tuple(gradients.share(segment) for segment in self._graph.segments)
        tables = self._tables.get(key)
        if tables is None:
            costs = GraphCosts(with_gradients(self._graph, gradients), self._rates, self._allowed)
            tables = self._tables[key] = _Tables(costs, self._allowed, self._method == "largest_first")
        return tables

    def _plan(
        self,
        tables: _Tables,
        chosen: Sequence[Choice],
        available_bytes: int,
        gradients: GradientBytes | None,
        demand: Peak,
    ) -> Plan:
        costs = tables.costs
        strategies = {
            costs.segments[index].operators[operator].site.name: strategy
            for index, choice in enumerate(chosen)
            for operator, strategy in strategies_of(choice).items()
        }
        if tables.has_repeats:
            # A module that runs twice has one strategy: what it costs is what that one costs in both places.
            chosen = [choice_of(segment, strategies) for segment in costs.segments]
        timeline = costs.timeline(chosen, gradients)
        peak = timeline.peak()
        return Plan(
            strategies=strategies,
            predicted_bytes=peak.held_bytes,
            peak_bytes=peak.num_bytes,
            transient_bytes=costs.transient_bytes(peak.segment, chosen[peak.segment]) if chosen else 0,
            demand_bytes=demand.held_bytes,
            demand_peak_bytes=demand.num_bytes,
            added_seconds=costs.added_seconds(chosen),
            minimum_bytes=tables.minimum_bytes,
            held_by_layer=tuple(timeline.stacked().tolist()),
            fits=peak.num_bytes <= available_bytes,
        )


class _Tables:
    """What is worked out once for one graph."""

    def __init__(self, costs: GraphCosts, allowed: tuple[Strategy, ...], largest_first: bool) -> None:
        self.costs = costs
        self._allowed = allowed
        self._largest_first = largest_first
        names = [operator.site.name for segment in costs.segments for operator in segment.operators]
        self.has_repeats = len(set(names)) < len(names)

    @functools.cached_property
    def optimal(self) -> OptimalMethod:
        return OptimalMethod(self.costs, self._allowed)

    @functools.cached_property
    def greedy(self) -> GreedyMethod:
        return GreedyMethod(self.costs, self._allowed, self._largest_first)

    @functools.cached_property
    def minimum_bytes(self) -> int:
        """M0: the least that one strategy for everything, segment by segment, holds at the end of forward."""
        costs = self.costs
        members = {number: index for index, number in enumerate(costs.classes.of)}
        least = {
            number: min(
                costs.cost(index, uniform_choice(costs.segments[index], strategy)).held_bytes
                for strategy in (*self._allowed, Strategy.KEEP)
            )
            for number, index in members.items()
        }
        return sum(least[number] for number in costs.classes.of)
