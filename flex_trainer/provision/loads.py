"""What this rank's experts are expected to get, from what they got recently, and what they do get.

Nothing here changes for a model whose experts are all on one rank, but that more rows than planned make their layers
larger.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from dataclasses import dataclass, field, replace

from flex_trainer.cost.expected import EXPECTED, Expected, ep_block, without_agreement
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.load import EVEN, Load, merged
from flex_trainer.models.routing import Routing
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Site, Strategy

_REMEMBERED = 8
_MUCH_LESS = 0.75


class RecentLoads:
    """Loads of recent micro-batches on this rank's experts, from which the next one's are expected."""

    def __init__(self) -> None:
        self._recent: deque[Load] = deque(maxlen=_REMEMBERED)
        self._agreed_layers: frozenset[int] = frozenset()

    @property
    def expected(self) -> Expected:
        """Of every layer of the next micro-batch: the most that any got lately, if all ranks have as many tokens as
        this one."""
        if not self._recent:
            return EXPECTED
        load = functools.reduce(Load.maximum, self._recent)
        return Expected(load.rounded_up(), self._agreed_layers)

    def learn(self, loads: Loads) -> None:
        """A micro-batch has run."""
        if not loads.by_layer or loads.tokens_ratio == 0:
            return
        # Relative to the mean rank: how long this rank's own sequences were says nothing of what it will get.
        worst = functools.reduce(Load.maximum, loads.by_layer.values()).scaled(1 / loads.tokens_ratio)
        self._recent.append(worst)
        self._agreed_layers = frozenset(loads.acceptable_layers)


@dataclass
class Loads:
    """What is known of the loads in one micro-batch: what is expected, then layer by layer what has come."""

    expected: Expected = EXPECTED
    by_layer: dict[int, Load] = field(default_factory=dict)
    """What has come, where experts are on several ranks."""
    agreed_layers: set[int] = field(default_factory=set)
    """Layers whose dispatch all ranks recompute in backward."""
    acceptable_layers: set[int] = field(default_factory=set)
    """Layers in which all ranks would have agreed, had they planned for it."""
    tokens_ratio: float = 1.0
    """Tokens of the mean rank over those of this one."""
    _is_tokens_ratio_planned: bool = False
    _planned: Load = field(init=False)
    """What the plan in force assumes."""
    _growth_here: float = 1.0
    """Most pairs in a layer over those planned for, where all experts are on one rank."""
    _heavier: dict[int, Load] = field(default_factory=dict)
    """Layers that got more than planned, where all experts are on one rank."""

    def __post_init__(self) -> None:
        self._planned = self.expected.load

    @property
    def growth(self) -> float:
        """What anything may be now, over what the plan in force took it to be, at most."""
        now, planned = self.expected.load, self._planned
        return max(1.0, self._growth_here, _ratio(now.pairs, planned.pairs), _ratio(now.rows, planned.rows))

    def note_plan(self) -> None:
        """A plan has been made with what is known now."""
        self._planned, self._growth_here = self.expected.load, 1.0

    def note(self, layer: int, routing: Routing) -> None:
        """A layer's router has spoken."""
        if routing.load is None:
            return
        self.by_layer[layer] = routing.load
        self.tokens_ratio = routing.tokens_ratio
        if routing.is_recompute_acceptable:
            self.acceptable_layers.add(layer)
        if routing.is_recompute_agreed:
            self.agreed_layers.add(layer)

    def needs_replan(self, experts: Site, routing: Routing, plan: Plan, planned_pairs: int | None) -> bool:
        """After `note`: whether the rest has to be planned again. It has to where more has come than was expected,
        where the ranks did not agree to a recomputation that was planned, and where there are far fewer tokens than a
        plan that mitigates has assumed.

        Args:
            planned_pairs: (token, expert) pairs that were planned for, where all experts are on one rank.
        """
        if routing.load is None:
            if planned_pairs is None or routing.num_pairs <= planned_pairs:
                return False
            factor = _ratio(routing.num_pairs, planned_pairs)
            self._growth_here = max(self._growth_here, factor)
            if planned_pairs:
                self._heavier[experts.layer] = Load(factor, factor)
            return True
        is_other = False
        if not self._is_tokens_ratio_planned:  # the first counts also say how many tokens there are in all
            self._is_tokens_ratio_planned = True
            load = self.expected.load.scaled(routing.tokens_ratio).rounded_up()
            is_much_less = load.pairs < _MUCH_LESS * self.expected.load.pairs and plan.added_seconds > 0
            if load.exceeds(self.expected.load) or is_much_less:
                is_other = True
                self.expected = replace(self.expected, load=load)
        if routing.load.exceeds(self.expected.load):
            is_other = True
            # A skew that one layer shows is expected of those to come.
            self.expected = replace(self.expected, load=self.expected.load.maximum(routing.load))
        is_refused = not routing.is_recompute_agreed and plan.strategy(ep_block(experts)) is Strategy.RECOMPUTE
        return is_other or is_refused

    def arrived(self, even: ActivationGraph) -> tuple[ActivationGraph, list[Load]]:
        """When all routers have spoken: the graph under an even load, with the dispatches that are recomputed, and the
        load of each segment.

        Args:
            even: the graph under an even load.
        """
        layers = even.repeated.positions.layers
        if not self.by_layer:
            return even, [self._heavier.get(layer, EVEN) for layer in layers]
        others = self.expected.load
        return without_agreement(even, self.agreed_layers), [self.by_layer.get(layer, others) for layer in layers]

    def graph(self, even: ActivationGraph, up_to_layer: int | None = None) -> ActivationGraph:
        """The graph of the micro-batch, when the routers have spoken up to a layer, or all of them.

        Args:
            even: the graph under an even load.
        """
        if not self.by_layer:
            return even.with_loads(self._heavier)
        agreed = self.expected.agreed_layers
        still_expected = {layer for layer in agreed if up_to_layer is not None and layer > up_to_layer}
        graph = even.with_loads(merged(self.by_layer), self.expected.load)
        return without_agreement(graph, self.agreed_layers | still_expected)


def _ratio(now: float, planned: float) -> float:
    if planned:
        return now / planned
    return math.inf if now else 1.0
