"""The mitigation planner: which operator of which layer gives its activations up, and how.

Three methods: "optimal" (planner/optimal.py: least added time; Algorithm 2 is asked beside it, so its plans are never
worse), and Algorithm 2 of BaGuaLu-2 (planner/greedy.py) in two orders, "bandwidth" and "largest_first". All obey the
same cost rules (cost/compiled.py) and the same memory timeline (cost/timeline.py), and what they return is checked on
those.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flex_trainer.config import METHODS
from flex_trainer.cost.compiled import CODE_OF, structure_of
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes, Peak, Timeline, with_gradients
from flex_trainer.planner.choice import Choice, choice_of, mitigated
from flex_trainer.planner.graph_costs import GraphCosts
from flex_trainer.planner.greedy import GreedyMethod
from flex_trainer.planner.optimal import OptimalMethod
from flex_trainer.planner.plan import Plan
from flex_trainer.planner.pool import PoolMethod
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
        reuses: bool = False,
    ) -> None:
        """
        Args:
            graph: the micro-batch.
            allowed: the mitigations that may be used.
            rates: what they cost on this machine.
            method: one of `METHODS`.
            transient_factor: what transients really are, over what the costs say.
            reuses: pick from choices that earlier plans of these structures passed through, where there are any
                (planner/pool.py); the method comes in where that finds nothing that fits.
        """
        assert method in METHODS, method
        self._graph = graph
        self._allowed = tuple(allowed)
        self._rates = replace(rates, transient_factor=transient_factor)
        self._method = method
        self._reuses = reuses
        # Gradients that do not exist yet are part of what operators need in backward: all of them in the first
        # micro-batch of a step, none in the others.
        self._tables: dict[tuple[float, ...], _Tables] = {}

    def plan(
        self,
        available_bytes: int,
        gradients: GradientBytes | None = None,
        fixed: Mapping[str, Strategy] | None = None,
    ) -> Plan:
        """The cheapest plan found whose peak is at most `available_bytes`; the minimum-memory one if none is.

        Args:
            available_bytes: what the limit leaves above what is in use.
            gradients: parameter gradients that backward will allocate.
            fixed: sites that have run already, with the strategy they ran under.
        """
        fixed = fixed or {}
        tables = self._tables_for(gradients)
        costs = tables.costs
        kept = tables.kept
        start = [choice_of(names, fixed) for names in costs.names] if fixed else kept
        best = _Candidate.of(tables, start, gradients)
        if best.peak.num_bytes > available_bytes and self._allowed:
            best = self._best(tables, start, available_bytes, gradients, fixed)
        return best.plan(tables, available_bytes, costs.timeline(kept, gradients).peak())

    def _best(
        self,
        tables: _Tables,
        start: Sequence[Choice],
        available_bytes: int,
        gradients: GradientBytes | None,
        fixed: Mapping[str, Strategy],
    ) -> _Candidate:
        demand_bytes = tables.costs.timeline(tables.kept, gradients).peak().num_bytes
        room_share = max(available_bytes, 0) / max(demand_bytes, 1)
        # Once Algorithm 2 has run on this graph its steps are known, and another room is found among them.
        if self._reuses and not tables.was_searched and tables.pool.covers(room_share):
            chosen = tables.pool.choose(available_bytes, gradients, fixed)
            candidate = None if chosen is None else _Candidate.of(tables, chosen, gradients)
            if candidate is not None and candidate.peak.num_bytes <= available_bytes:
                return candidate
        tables.was_searched = True
        found: list[list[Choice]] = []
        if self._method == "optimal":
            found.append(tables.optimal.choose(available_bytes, gradients, fixed))
        # The optimal method looks at choices worth having, layer by layer, and may miss one that matters for the whole:
        # so Algorithm 2 is asked too, and its plan taken where it is better. Uniform plans are what anyone would try.
        found += tables.greedy.choose(start, available_bytes, gradients, fixed)
        uniform = tables.pool.uniform(available_bytes, gradients, fixed)
        if uniform is not None:
            found.append(uniform)
        tables.costs.fill_pools(found, room_share)
        candidates = [_Candidate.of(tables, choices, gradients) for choices in found]
        return min(candidates, key=lambda one: one.rank(available_bytes))

    def uniform(self, everywhere: Strategy, gradients: GradientBytes | None = None) -> Plan:
        """What one strategy for everything costs."""
        segments = self._graph.repeated
        choices = [structure_of(segment).uniform(CODE_OF[everywhere]) for segment in segments.classes]
        return self._with_costs([choices[number] for number in segments.class_of], gradients)

    def evaluated(self, strategies: Mapping[str, Strategy], gradients: GradientBytes | None = None) -> Plan:
        """What given strategies cost, by site name (absent: keep): the plan of a micro-batch that has run."""
        names = self._graph.repeated.positions.names
        return self._with_costs([choice_of(one, strategies) for one in names], gradients)

    def _with_costs(self, choices: Sequence[Choice], gradients: GradientBytes | None) -> Plan:
        tables = self._tables_for(gradients)
        candidate = _Candidate.of(tables, choices, gradients)
        return candidate.plan(tables, candidate.peak.num_bytes, tables.costs.timeline(tables.kept, gradients).peak())

    def _tables_for(self, gradients: GradientBytes | None) -> _Tables:
        key = () if gradients is None else gradients.shares(self._graph.repeated)
        tables = self._tables.get(key)
        if tables is None:
            costs = GraphCosts(with_gradients(self._graph, gradients), self._rates, self._allowed)
            tables = self._tables[key] = _Tables(costs, self._allowed, self._method == "largest_first")
        return tables


@dataclass(frozen=True)
class _Candidate:
    """Choices by segment, with what they cost."""

    choices: Sequence[Choice]
    timeline: Timeline
    peak: Peak
    added_seconds: float

    @classmethod
    def of(cls, tables: _Tables, choices: Sequence[Choice], gradients: GradientBytes | None) -> _Candidate:
        costs = tables.costs
        if tables.has_repeats:
            # A module that runs twice has one strategy: what it costs is what that one costs in both places.
            strategies = _by_site(costs.names, choices)
            choices = [choice_of(names, strategies) for names in costs.names]
        timeline = costs.timeline(choices, gradients)
        return cls(choices, timeline, timeline.peak(), costs.added_seconds(choices))

    def rank(self, available_bytes: int) -> tuple[bool, float]:
        """Lower is better: the cheapest of those that fit, else the minimum-memory one."""
        fits = self.peak.num_bytes <= available_bytes
        return not fits, self.added_seconds if fits else self.peak.num_bytes

    def plan(self, tables: _Tables, available_bytes: int, demand: Peak) -> Plan:
        """As a plan; `demand` is the peak with everything kept."""
        costs, segment = tables.costs, self.peak.segment
        return Plan(
            strategies=_by_site(costs.names, self.choices),
            predicted_bytes=self.peak.held_bytes,
            peak_bytes=self.peak.num_bytes,
            transient_bytes=costs.transient_bytes(segment, self.choices[segment]) if self.choices else 0,
            demand_bytes=demand.held_bytes,
            demand_peak_bytes=demand.num_bytes,
            added_seconds=self.added_seconds,
            recompute_seconds=costs.recompute_seconds(self.choices),
            minimum_bytes=tables.minimum_bytes,
            held_by_layer=tuple(self.timeline.stacked().tolist()),
            fits=self.peak.num_bytes <= available_bytes,
        )


def _by_site(names: Sequence[Sequence[str]], choices: Sequence[Choice]) -> dict[str, Strategy]:
    """The mitigations, by site name."""
    of = {choice: mitigated(choice) for choice in set(choices)}
    return {own[index]: strategy for own, choice in zip(names, choices, strict=True) for index, strategy in of[choice]}


class _Tables:
    """What is worked out once for one graph."""

    def __init__(self, costs: GraphCosts, allowed: tuple[Strategy, ...], largest_first: bool) -> None:
        self.costs = costs
        self._allowed = allowed
        self._largest_first = largest_first
        self.was_searched = False
        self.has_repeats = costs.segments.positions.has_repeats
        kept = [bytes(len(segment.operators)) for segment in costs.classes]
        self.kept = [kept[number] for number in costs.class_of]
        """Keep for everything."""

    @functools.cached_property
    def optimal(self) -> OptimalMethod:
        return OptimalMethod(self.costs, self._allowed)

    @functools.cached_property
    def pool(self) -> PoolMethod:
        return PoolMethod(self.costs, self._allowed)

    @functools.cached_property
    def greedy(self) -> GreedyMethod:
        return GreedyMethod(self.costs, self._allowed, self._largest_first)

    @functools.cached_property
    def minimum_bytes(self) -> int:
        """M0: the least that one strategy for everything, segment by segment, holds at the end of forward."""
        return sum(self.costs.least_held[number] for number in self.costs.class_of)
