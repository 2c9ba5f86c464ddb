"""Plans made of choices that are known already: for another length, another room, or the rest of a micro-batch.

Algorithm 2 and the search for optimal choices leave behind, for every structure of a segment, choices that were worth
looking at with these strategies and at these rates (its *pool*). With new sizes all of them are evaluated at once, and
the planner only picks:

    1. at a price per byte, every class of equal segments takes the choice that costs least in seconds and priced bytes;
       from a low price to a high one, the plans need less and less memory
    2. between the last of those plans that is too large and the first that fits, segments change one after the other

for several ways to price (what comes on top of the stack counts not at all, a little, or in full) and several sets of
choices (without offload, recompute only, ...). Uniform plans are candidates too. Every candidate's peak is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flex_trainer.cost.arrays import Costs
from flex_trainer.cost.compiled import CODE_OF, KEEP, OFFLOAD, QUANTIZE, RECOMPUTE
from flex_trainer.cost.timeline import GradientBytes, peaks_of
from flex_trainer.planner.choice import Choice, codes_of
from flex_trainer.planner.graph_costs import GraphCosts
from flex_trainer.strategy import Strategy

_PRICES = np.concatenate([[0.0], np.geomspace(1e-13, 1e-6, 48)])
"""Seconds per byte: from memory bandwidth to a slow disk, and beyond on both sides."""
_COVERED = 1.03
"""A pool made for a room serves for one that is smaller by this factor."""
_NUM_REFINED = 4
_MAX_FILLS = 6
_NUM_TRIED = 12
_LEAST_SAVED = 1e-12
_EVERY = (1, 2, 3, 4)
"""Uniform plans mitigate every layer, every second one, ..."""
_FREE = 255


@dataclass(frozen=True)
class _Part:
    """The choices that segments of one class may take, with the same operators fixed."""

    choices: list[Choice]
    costs: Costs
    ways: np.ndarray
    """Ways x choices: the choice is of this way to mitigate."""


class PoolMethod:
    """Picks from the pools for one graph."""

    def __init__(self, costs: GraphCosts, allowed: tuple[Strategy, ...]) -> None:
        self._costs = costs
        self._codes = [CODE_OF[strategy] for strategy in allowed]
        self._parts: dict[tuple[int, bytes], _Part] = {}

    def covers(self, room_share: float) -> bool:
        """Whether every class has a pool that reaches down to this room, as a share of what keeping everything takes.
        Where earlier plans had more room, their choices do not free enough."""
        pools = [self._costs.passed(number) for number in range(len(self._costs.classes))]
        return all(one.choices and one.least_room_share <= room_share * _COVERED for one in pools)

    def choose(
        self, available_bytes: int, gradients: GradientBytes | None, fixed: Mapping[str, Strategy]
    ) -> list[Choice] | None:
        """Choices by segment: those that add least seconds of what is found; None where nothing fits."""
        return self._problem(available_bytes, gradients, fixed, with_pool=True).best()

    def uniform(
        self, available_bytes: int, gradients: GradientBytes | None, fixed: Mapping[str, Strategy]
    ) -> list[Choice] | None:
        """The best uniform plan: one strategy for all operators of all layers, or of every k-th; None: none fits."""
        return self._problem(available_bytes, gradients, fixed, with_pool=False).uniform()

    def _problem(
        self, available_bytes: int, gradients: GradientBytes | None, fixed: Mapping[str, Strategy], with_pool: bool
    ) -> _Problem:
        parts = self._parts_of(fixed, with_pool)
        num_uniform = 1 + len(self._codes) + (RECOMPUTE in self._codes)
        return _Problem(self._costs, parts, num_uniform, available_bytes, gradients)

    def _parts_of(self, fixed: Mapping[str, Strategy], with_pool: bool) -> list[_Part]:
        """By segment."""
        names = self._costs.names
        parts = []
        for number, own in zip(self._costs.class_of, names, strict=True):
            marks = bytes(CODE_OF[fixed[name]] if name in fixed else _FREE for name in own) if fixed else b""
            if not marks.strip(bytes((_FREE,))):
                marks = b""
            key = number, marks + bytes((with_pool,))
            if key not in self._parts:
                self._parts[key] = self._part(number, marks, with_pool)
            parts.append(self._parts[key])
        return parts

    def _part(self, number: int, marks: bytes, with_pool: bool) -> _Part:
        compiled = self._costs.compiled[number]
        structure = compiled.structure
        n = structure.num_operators
        # Uniform ones first: `_Problem.uniform` knows their places.
        uniform = [np.where(structure.allows[:, code], code, KEEP) for code in (KEEP, *self._codes)]
        if RECOMPUTE in self._codes:
            uniform.append(np.where(structure.allows_within[:, RECOMPUTE], RECOMPUTE, KEEP))
        codes = np.array(uniform, dtype=np.int64).reshape(len(uniform), n)
        passed = self._costs.passed(number).choices
        if with_pool and passed:
            codes = np.concatenate([codes, codes_of(list(passed))])
        if marks:
            fixed = np.frombuffer(marks, dtype=np.uint8).astype(np.int64)
            codes = np.where(fixed != _FREE, fixed, codes)
            if (fixed != _FREE).all():
                codes = codes[: len(uniform)]
        costs = compiled.evaluate(codes)
        free = codes if not marks else np.where(fixed != _FREE, KEEP, codes)
        has = {code: (free == code).any(axis=1) for code in (RECOMPUTE, OFFLOAD, QUANTIZE)}
        ways = [np.ones(len(codes), dtype=bool), ~has[OFFLOAD], ~(has[OFFLOAD] | has[QUANTIZE])]
        ways += [~(has[RECOMPUTE] | has[QUANTIZE]), ~costs.shared.any(axis=1)]
        ways = [way if way.any() else ways[0] for way in ways]
        return _Part([row.tobytes() for row in codes.astype(np.uint8)], costs, np.array(ways))


class _Problem:
    """One choice for every segment out of its part. Plans are rows of an array: a choice's number for every segment."""

    def __init__(
        self,
        costs: GraphCosts,
        parts: list[_Part],
        num_uniform: int,
        available_bytes: int,
        gradients: GradientBytes | None,
    ) -> None:
        """`num_uniform`: so many choices of each part come first, the same ones in all: keep, each mitigation, and
        recompute within layers."""
        self._num_uniform = num_uniform
        self._parts = list({id(part): part for part in parts}.values())
        numbers = {id(part): number for number, part in enumerate(self._parts)}
        self._part_of = np.array([numbers[id(part)] for part in parts], dtype=np.int64)
        self._available_bytes = available_bytes
        self._costs = costs
        self._gradients = costs.gradients_by_segment(gradients)
        self._pending_bytes = 0 if gradients is None else sum(gradients.pending.values())
        most = max(len(part.choices) for part in self._parts)
        self._held, self._seconds, self._on_top, self._offloaded = (
            np.array([_padded(getattr(part.costs, name), most) for part in self._parts])
            for name in ("held", "seconds", "on_top", "offloaded")
        )
        self._on_top = np.ceil(self._on_top - 1e-3)
        self._shared_bytes = np.array(costs.shared_bytes, dtype=np.float64)
        self._shared = np.zeros((len(self._parts), most, len(costs.shared_bytes)), dtype=bool)
        for number, part in enumerate(self._parts):
            self._shared[number, :, : part.costs.shared.shape[1]] = _padded(part.costs.shared, most)
        self._may = np.array([[_padded(way, most) for way in part.ways] for part in self._parts]).transpose(1, 0, 2)
        """Ways x parts x choices."""
        self._is_layer = np.array(costs.segments.positions.layers) >= 0

    def uniform(self) -> list[Choice] | None:
        """The best of those that do one thing in every k-th layer."""
        plans = self._uniform_plans()
        seconds = self._seconds_if_fits(plans)
        return self._choices(plans[seconds.argmin()]) if np.isfinite(seconds.min()) else None

    def best(self) -> list[Choice] | None:
        """The best plan found."""
        paths = self._paths()
        # Most prices lead to the same plans.
        by_part, at = np.unique(paths.reshape(-1, paths.shape[-1]), axis=0, return_inverse=True)
        uniform = self._uniform_plans()
        plans = np.concatenate([by_part[:, self._part_of], uniform])
        seconds = self._seconds_if_fits(plans)
        best, least = plans[seconds.argmin()], seconds.min()
        if not np.isfinite(least):
            return None
        at = at.reshape(paths.shape[:2])
        ends = seconds[at].argmin(axis=1)
        steps = {(int(path[end - 1]), int(path[end])) for path, end in zip(at, ends, strict=True) if end}
        for large, small in sorted(steps, key=lambda step: seconds[step[1]])[:_NUM_REFINED]:
            if np.isfinite(seconds[small]):
                between = self._between(plans[large], plans[small])
                found = self._seconds_if_fits(between)
                if found.min() < least:
                    best, least = between[found.argmin()], found.min()
        return self._choices(self._filled(best))

    def _filled(self, plan: np.ndarray) -> np.ndarray:
        """The plan with single changes that save time, as long as they fit into what it leaves of the room."""
        for _ in range(_MAX_FILLS):
            slack_bytes = self._available_bytes - self._peaks(plan[None])[0]
            # Equal segments with equal choices are alike; the last of them has most of the stack below it.
            _, last = np.unique(np.stack([self._part_of, plan])[:, ::-1], axis=1, return_index=True)
            at = len(plan) - 1 - last
            part, now = self._part_of[at][:, None], plan[at][:, None]
            saved = self._seconds[part, now] - self._seconds[part[:, 0]]
            added = self._held[part[:, 0]] - self._held[part, now]
            worth = np.where((added <= slack_bytes) & (saved > _LEAST_SAVED), saved, 0.0)
            tried = worth.ravel().argsort()[::-1][:_NUM_TRIED]
            tried = tried[worth.ravel()[tried] > 0]
            if not len(tried):
                break
            where, choice = np.unravel_index(tried, worth.shape)
            plans = np.repeat(plan[None], len(tried), axis=0)
            plans[np.arange(len(tried)), at[where]] = choice
            fits = np.flatnonzero(self._peaks(plans) <= self._available_bytes)
            if not len(fits):
                break
            plan = plans[fits[0]]
        return plan

    def _uniform_plans(self) -> np.ndarray:
        plans = []
        for way in range(self._num_uniform):
            for every in _EVERY:
                chosen = np.arange(len(self._part_of)) % every == every - 1
                plans.append(np.where(chosen | ~self._is_layer, way, 0))
                if way:
                    plans.append(np.where(chosen & self._is_layer, way, 0))  # with all outside of the layers kept
        return np.array(plans)

    def _paths(self) -> np.ndarray:
        """Ways x prices x parts."""
        num_segments = len(self._part_of)
        prices = _PRICES[:, None, None]
        paths = []
        for on_top_share in (0.0, 1.0 / max(num_segments - 1, 1), 1.0):
            priced = self._seconds + prices * (self._held + on_top_share * self._on_top)
            for way in range(len(self._parts[0].ways)):
                paths.append(np.where(self._may[way], priced, np.inf).argmin(axis=2))
        return np.array(paths)

    def _between(self, large: np.ndarray, small: np.ndarray) -> np.ndarray:
        """Plans between two: segments change one after the other, those that free a byte at the least cost first."""
        at = np.flatnonzero(large != small)
        part = self._part_of[at]
        freed = self._held[part, large[at]] - self._held[part, small[at]]
        added = self._seconds[part, small[at]] - self._seconds[part, large[at]]
        order = at[np.lexsort((at, added / np.maximum(freed, 1.0)))]
        rank = np.full(len(large), len(order))
        rank[order] = np.arange(len(order))
        return np.where(rank < np.arange(len(order) + 1)[:, None], small, large)

    def _seconds_if_fits(self, plans: np.ndarray) -> np.ndarray:
        """Added seconds of each plan; infinite where its peak does not fit."""
        seconds = self._seconds[self._part_of, plans].sum(axis=1)
        return np.where(self._peaks(plans) <= self._available_bytes, seconds, np.inf)

    def _peaks(self, plans: np.ndarray) -> np.ndarray:
        at = self._part_of, plans
        num_shared = len(self._costs.shared_bytes)
        shared = self._shared[at].any(axis=1) @ self._shared_bytes if num_shared else np.zeros(len(plans))
        return peaks_of(
            self._held[at],
            self._on_top[at],
            self._offloaded[at],
            shared,
            self._gradients,
            self._pending_bytes,
            self._costs.rates.in_flight_bytes,
        )

    def _choices(self, plan: np.ndarray) -> list[Choice]:
        pairs = zip(self._part_of.tolist(), plan.tolist(), strict=True)
        found = [(self._parts[number].choices, row) for number, row in pairs]
        return [choices[min(row, len(choices) - 1)] for choices, row in found]  # parts are padded with their last one


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    """Repeat the last entry."""
    return values[np.minimum(np.arange(length), len(values) - 1)]
