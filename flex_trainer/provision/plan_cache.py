"""Plans of micro-batches, made when first asked for and remembered as long as what they rest on holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flex_trainer.config import FlexConfig
from flex_trainer.cost.expected import EXPECTED, Expected
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.memory.offloading import OffloadService
from flex_trainer.planner.mitigation import MitigationPlanner
from flex_trainer.planner.plan import Plan
from flex_trainer.planner.run import evaluate_run
from flex_trainer.provision.correction import Correction
from flex_trainer.provision.loads import Loads
from flex_trainer.provision.planning_method import MethodChoice
from flex_trainer.strategy import Strategy

_MAX_PLANS = 512
_MAX_PLANNERS = 8


class PlanCache:
    """Plans by shape, budget and gradients, made by the method that is worth its time.

    Args:
        config: names the strategies and the planner.
        profile: what is known of the operators.
        correction: how far off its transients are.
        offloading: says whether something can be offloaded, and at what rates.
    """

    def __init__(
        self, config: FlexConfig, profile: Profile, correction: Correction, offloading: OffloadService
    ) -> None:
        self._all_strategies = tuple(Strategy(name) for name in config.strategies)
        self._without_offload = tuple(one for one in self._all_strategies if one is not Strategy.OFFLOAD)
        self._profile = profile
        self._correction = correction
        self._offloading = offloading
        self._method_choice = MethodChoice(config.planner)
        self._is_auto = config.planner == "auto"
        self._plans: dict[tuple[object, ...], tuple[str, Plan]] = {}  # with the method that made it
        self._planners: dict[tuple[BatchShape, int, str, Expected], MitigationPlanner] = {}
        self._made_in: tuple[object, ...] = ()
        self.num_made = 0
        """Plans that were not found in the cache."""

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The mitigations that may be used now."""
        return self._all_strategies if self._offloading.is_available else self._without_offload

    def plan(
        self, shape: BatchShape, available_bytes: int, gradients: GradientBytes, expected: Expected = EXPECTED
    ) -> Plan:
        """The plan of a micro-batch of a shape that the profile knows."""
        state = (self.strategies, self._correction.factor, self._offloading.rates())
        if state != self._made_in:
            self._plans.clear()
            self._planners.clear()
            self._made_in = state
        version = self._profile.version_of(shape)
        key = (shape, version, available_bytes, gradients.key, expected)
        made_by, plan = self._plans.get(key, ("", None))
        method = self._method_choice.method
        # A plan of Algorithm 2 is made anew once better ones pay; one that adds no time cannot be bettered.
        is_outdated = plan is not None and method == "optimal" and made_by != method and plan.added_seconds > 0
        if plan is None or is_outdated:
            planner = self._planners.get((shape, version, method, expected))
            if planner is None:
                planner = self._planner(expected.graph(self._profile.graph(shape)), method)
                _put_bounded(self._planners, (shape, version, method, expected), planner, _MAX_PLANNERS)
            plan = self._make(planner, method, available_bytes, gradients, None)
            _put_bounded(self._plans, key, (method, plan), _MAX_PLANS)
        return plan

    def sizes(self, shape: BatchShape) -> ActivationGraph:
        """The graph of a micro-batch of this shape, under an even load; its times may be old."""
        return self._profile.sizes(shape)

    def note_run(self, plan: Plan) -> None:
        """A micro-batch was run under a plan."""
        self._method_choice.note_run(plan.added_seconds)

    def revised(
        self,
        graph: ActivationGraph,
        available_bytes: int,
        gradients: GradientBytes,
        ran: Mapping[str, Strategy],
    ) -> Plan:
        """The plan of a micro-batch that is not as was expected, and part of which has run already."""
        # In the middle of a forward there is no time for the optimal method.
        method = "bandwidth" if self._is_auto else self._method_choice.method
        return self._make(self._planner(graph, method), method, available_bytes, gradients, ran)

    def as_it_ran(
        self, shape: BatchShape, loads: Loads, strategies: Mapping[str, Strategy], gradients: GradientBytes
    ) -> Plan:
        """What strategies (by site name) came to in a micro-batch that has run under them, with the rows that arrived;
        without what keeping everything would have come to.

        Args:
            loads: what arrived.
        """
        graph, by_segment = loads.arrived(self._profile.sizes(shape))
        rates = replace(self._offloading.rates(), transient_factor=self._correction.factor)
        return evaluate_run(graph, by_segment, strategies, rates, gradients)

    def _planner(
        self, graph: ActivationGraph, method: str, strategies: tuple[Strategy, ...] | None = None
    ) -> MitigationPlanner:
        return MitigationPlanner(
            graph,
            self.strategies if strategies is None else strategies,
            self._offloading.rates(),
            method=method,
            transient_factor=self._correction.factor,
            reuses=self._is_auto and method != "optimal",
        )

    def _make(
        self,
        planner: MitigationPlanner,
        method: str,
        available_bytes: int,
        gradients: GradientBytes,
        ran: Mapping[str, Strategy] | None,
    ) -> Plan:
        started = time.perf_counter()
        plan = planner.plan(available_bytes, gradients, ran)
        if plan.strategies:  # else nothing had to be looked for
            self._method_choice.note_plan(method, time.perf_counter() - started)
        self.num_made += 1
        return plan


def _put_bounded(cache: dict[Any, Any], key: Any, item: Any, size: int) -> None:
    """Put an item into a cache that forgets its oldest entry when full."""
    if len(cache) >= size:
        cache.pop(next(iter(cache)))
    cache[key] = item
