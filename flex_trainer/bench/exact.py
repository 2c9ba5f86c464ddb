"""The exact optimum of a mitigation problem, as a mixed-integer linear programme for scipy's HiGHS.

It decides operator by operator, on the tables of `cost/compiled.py` and the timeline of `cost/timeline.py`, and knows
nothing of the planner's choices: what the planner finds is compared with it. It is slow, so only benchmarks and tests
use it.

Binary: what each operator does. The rest follows and is continuous in [0, 1]: each such variable is only bounded from
below, costs bytes or seconds, and so takes the value that the rules give it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from flex_trainer.cost.compiled import CODE_OF, CODES, OFFLOAD, QUANTIZE, RECOMPUTE, CompiledSegment
from flex_trainer.cost.graph import ActivationGraph, Segment
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.timeline import GradientBytes, with_gradients
from flex_trainer.errors import UserError
from flex_trainer.strategy import Strategy

_Terms = dict[int, float]
"""Variable -> coefficient; key -1 is the constant."""


@dataclass(frozen=True)
class Optimum:
    """What the solver found."""

    seconds: float | None
    """Added seconds of the best plan it found; None: none fits, or none was found in time."""
    bound_seconds: float
    """No plan adds less; infinite: none fits."""
    is_proven: bool
    strategies: dict[str, Strategy]


def solve(
    graph: ActivationGraph,
    allowed: Iterable[Strategy],
    rates: Rates,
    available_bytes: int,
    *,
    gradients: GradientBytes | None = None,
    transient_factor: float = 1.0,
    time_limit_s: float = 60.0,
) -> Optimum:
    """Least added seconds with the peak at most `available_bytes`.

    Raises:
        ValueError: scipy is not installed.
    """
    rates = replace(rates, transient_factor=transient_factor)
    model = _Model(with_gradients(graph, gradients), tuple(allowed), rates, available_bytes, gradients)
    return model.solve(time_limit_s)


class _Programme:
    """A linear programme that grows term by term. Bytes are in units of the limit, so that numbers are near 1."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.is_integer: list[int] = []
        self.rows: list[_Terms] = []

    def variable(self, *, is_binary: bool = False, upper: float = 1.0) -> int:
        self.cost.append(0.0)
        self.upper.append(upper)
        self.is_integer.append(int(is_binary))
        return len(self.cost) - 1

    def at_most_zero(self, *terms: tuple[_Terms, float]) -> None:
        """sum(terms * factor) <= 0."""
        row: _Terms = {}
        for part, factor in terms:
            for key, value in part.items():
                row[key] = row.get(key, 0.0) + factor * value
        self.rows.append(row)

    def at_least(self, variable: int, *terms: tuple[_Terms, float]) -> None:
        """variable >= sum(terms * factor)."""
        self.at_most_zero(({variable: 1.0}, -1.0), *terms)


class _Model:
    """The programme of one graph: its segments, and the peaks that tie them together."""

    def __init__(
        self,
        graph: ActivationGraph,
        allowed: tuple[Strategy, ...],
        rates: Rates,
        available_bytes: int,
        gradients: GradientBytes | None,
    ) -> None:
        self.graph, self.allowed, self.rates = graph, allowed, rates
        self.limit_bytes = max(available_bytes, 1)
        self.programme = _Programme()
        self.choices: dict[tuple[int, int], dict[int, int]] = {}
        self.shared = [self.programme.variable() for _ in graph.shared_bytes]
        parts = [_SegmentPart(self, number, segment) for number, segment in enumerate(graph.segments)]
        self._peaks(parts, gradients or GradientBytes(), available_bytes)

    def scaled(self, num_bytes: float) -> float:
        """Bytes in units of the limit."""
        return num_bytes / self.limit_bytes

    def _peaks(
        self,
        parts: Sequence[_SegmentPart],
        gradients: GradientBytes,
        available_bytes: int,
    ) -> None:
        programme, rates = self.programme, self.rates
        heights = gradients.by_segment(self.graph.segments)
        shared = {use: self.scaled(size) for use, size in zip(self.shared, self.graph.shared_bytes, strict=True)}
        total = sum(value.num_bytes for segment in self.graph.segments for value in segment.values)
        in_flight_bytes = min(rates.in_flight_bytes, total)
        for number, part in enumerate(parts):
            below = [(one.held, 1.0) for one in parts[:number]]
            if number < len(parts) - 1:
                below.append((parts[-1].held, 1.0))
            # min(offloaded up to here, bound): either of the two, whichever the solver likes.
            offloaded = [(one.offloaded, 1.0) for one in parts[: number + 1] if one.offloaded]
            in_flight = programme.variable(upper=self.scaled(in_flight_bytes))
            if offloaded and in_flight_bytes:
                is_full = programme.variable(is_binary=True)
                programme.at_least(in_flight, *offloaded, ({is_full: -self.scaled(total)}, 1.0))
                programme.at_least(in_flight, ({is_full: self.scaled(in_flight_bytes)}, 1.0))
            beside = ({in_flight: 1.0, -1: self.scaled(float(heights[number]) - available_bytes)}, 1.0)
            for point in ([(part.held, 1.0)], *part.points):
                programme.at_most_zero(*below, (shared, 1.0), beside, *point)
        end_bytes = sum(gradients.pending.values()) - available_bytes
        programme.at_most_zero((parts[-1].held, 1.0), ({-1: self.scaled(end_bytes)}, 1.0))

    def solve(self, time_limit_s: float) -> Optimum:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError:
            raise UserError("the exact optimum needs scipy: pip install 'flex-trainer[bench]'") from None
        programme = self.programme
        scale = max(max(programme.cost, default=0.0), 1e-12)
        row, column, value = [], [], []
        upper = np.zeros(len(programme.rows))
        for number, terms in enumerate(programme.rows):
            for key, coefficient in terms.items():
                if key < 0:
                    upper[number] = -coefficient
                elif coefficient:
                    row.append(number)
                    column.append(key)
                    value.append(coefficient)
        matrix = csr_array((value, (row, column)), shape=(len(programme.rows), len(programme.cost)))
        result = milp(
            np.array(programme.cost) / scale,
            integrality=np.array(programme.is_integer),
            bounds=Bounds(0, np.array(programme.upper)),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(matrix, -np.inf, upper),  # pyright: ignore[reportArgumentType]
            options={"time_limit": time_limit_s, "mip_rel_gap": 1e-6},
        )
        if result.status == 2:
            return Optimum(None, np.inf, True, {})
        bound = getattr(result, "mip_dual_bound", None)
        bound_seconds = 0.0 if bound is None else max(float(bound) * scale, 0.0)
        if result.x is None:
            return Optimum(None, bound_seconds, False, {})
        strategies = {
            self.graph.segments[segment].operators[operator].site.name: CODES[code]
            for (segment, operator), codes in self.choices.items()
            for code, variable in codes.items()
            if result.x[variable] > 0.5
        }
        return Optimum(float(result.fun) * scale, bound_seconds, result.status == 0, strategies)


class _SegmentPart:
    """One segment in the programme."""

    def __init__(self, model: _Model, number: int, segment: Segment) -> None:
        self.model, self.programme = model, model.programme
        self.compiled = CompiledSegment(segment, model.rates)
        self.structure = self.compiled.structure
        self.held: _Terms = {}
        self.offloaded: _Terms = {}
        self.does: list[dict[int, int]] = []
        """By operator: the variable of each code."""
        for index in range(self.structure.num_operators):
            may = [CODE_OF[one] for one in model.allowed if self.structure.allows[index, CODE_OF[one]]]
            codes = {code: self.programme.variable(is_binary=True) for code in may}
            self.does.append(codes)
            model.choices[number, index] = codes
            self.programme.at_most_zero((dict.fromkeys(codes.values(), 1.0), 1.0), ({-1: -1.0}, 1.0))
        for index, codes in enumerate(self.does):
            if segment.operators[index].site.is_router:
                continue
            for outer in np.flatnonzero(self.structure.inside[:, index]):
                recompute = self.does[outer].get(RECOMPUTE)  # inside of a recomputed block, nothing else is decided
                if recompute is not None and codes:
                    self.programme.at_most_zero(
                        (dict.fromkeys(codes.values(), 1.0), 1.0), ({recompute: 1.0, -1: -1.0}, 1.0)
                    )
        self.needed = [self.programme.variable() for _ in range(self.structure.num_values)]
        """Something outside of the region that makes the value saves it, or takes it in a recomputation."""
        for pair, (value, _) in enumerate(self.structure.pairs):
            both = np.flatnonzero(self.structure.pair_regions[:, pair])
            self.programme.at_least(self.needed[value], ({-1: 1.0}, 1.0), (self._is_region(both), -1.0))
        self._recomputes()
        self.points: list[list[tuple[_Terms, float]]] = self._bytes()
        """What is there of this segment at each of its operators, in backward and in forward."""

    def _is_region(self, operators: Iterable[int]) -> _Terms:
        """1 if one of the operators is the region, that is, recomputed."""
        found = (self.does[index].get(RECOMPUTE) for index in operators)
        return {variable: 1.0 for variable in found if variable is not None}

    def _recomputes(self) -> None:
        programme, structure, compiled = self.programme, self.structure, self.compiled
        for index, codes in enumerate(self.does):
            recompute = codes.get(RECOMPUTE)
            if recompute is None:
                continue
            output, live = programme.variable(), programme.variable()
            for value in () if structure.keeps_outputs[index] else structure.owned[index]:
                programme.at_least(output, ({self.needed[value]: 1.0, recompute: 1.0, -1: -1.0}, 1.0))
            programme.at_least(live, ({output: 1.0}, 1.0))
            if structure.saves_inside[index]:
                programme.at_least(live, ({recompute: 1.0}, 1.0))
            unpaid = float(compiled.unpaid_seconds[0, index])
            programme.cost[live] += float(compiled.recompute_seconds[0, index]) - unpaid
            programme.cost[output] += unpaid
            for value in (*structure.inputs[index], *structure.decisions[index]):
                programme.at_least(self.needed[value], ({live: 1.0}, 1.0))
            for value in structure.shared_inputs[index]:
                programme.at_least(self.model.shared[value], ({live: 1.0}, 1.0))

    def _bytes(self) -> list[list[tuple[_Terms, float]]]:
        programme, model, structure, compiled = self.programme, self.model, self.structure, self.compiled
        factor = model.rates.transient_factor
        points = [[({-1: model.scaled(size)}, 1.0)] for size in compiled.on_top[0].tolist()]

        def there(when: np.ndarray, terms: _Terms, times: float) -> None:
            for point in np.flatnonzero(when):
                points[point].append((terms, times))

        for index, needed in enumerate(self.needed):
            size, owner = model.scaled(float(compiled.bytes[0, index])), int(structure.owner[index])
            drops = ~structure.keeps_outputs & (not structure.is_decision[index])
            enclosing = np.flatnonzero(structure.encloses[:, owner] & drops) if owner >= 0 else []
            stays = programme.variable()  # needed, and not dropped
            programme.at_least(stays, ({needed: 1.0}, 1.0), (self._is_region(enclosing), -1.0))
            held = programme.variable(upper=size)
            kept: list[tuple[_Terms, float]] = [({stays: size}, 1.0)]
            for way, code in enumerate((OFFLOAD, QUANTIZE)):
                variable = self.does[owner].get(code) if owner >= 0 else None
                if variable is None or not compiled.is_moved[way][0, index]:
                    continue
                kept.append(({variable: -model.scaled(float(compiled.freed[way][0, index]))}, 1.0))
                moved = programme.variable()
                programme.at_least(moved, ({stays: 1.0, variable: 1.0, -1: -1.0}, 1.0))
                programme.cost[moved] += float(compiled.moved_seconds[way][0, index])
                there(structure.there_moved[index], {moved: size}, factor)
                if code == OFFLOAD:
                    self.offloaded[moved] = size
            programme.at_least(held, *kept)
            self.held[held] = 1.0
            there(1 - structure.gone[index], {held: 1.0}, 1.0)
            for level, regions in enumerate(structure.levels):
                recompute = self.does[regions[index]].get(RECOMPUTE) if regions[index] >= 0 else None
                if recompute is None or structure.is_decision[index]:
                    continue
                comes_back = programme.variable()
                if structure.keeps_outputs[regions[index]]:  # what is needed outside is held
                    if structure.is_saved[index]:
                        programme.at_least(comes_back, ({recompute: 1.0}, 1.0), ({needed: 1.0}, -1.0))
                elif structure.is_saved[index]:
                    programme.at_least(comes_back, ({recompute: 1.0}, 1.0))
                else:
                    programme.at_least(comes_back, ({needed: 1.0, recompute: 1.0, -1: -1.0}, 1.0))
                when = structure.there_recomputed[level * structure.num_values + index]
                there(when, {comes_back: size}, factor)
        is_known = np.isfinite(compiled.on_top[0])
        return [point for point, known in zip(points, is_known, strict=True) if known]
