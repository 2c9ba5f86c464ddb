"""What choices of strategies cost in one segment: bytes held, seconds added, bytes on top in forward and backward.

This is where the cost rules stand. They are those of the engine (activations/packing.py), applied to data instead of
tensors:
- a value is governed by the operator that made it;
- a recomputed operator or block drops what it made and holds its inputs instead, if anything of it is needed at all;
- what one recomputed operator needs from another is recovered by a chain of recomputations, each of which costs an
  overhead and its operator's own forward time, once; a block that only has to bring back what was saved inside stops
  early;
- a recomputed layer holds what others need of its outputs, and any recomputed block holds what its routers decided.

Which values a choice holds and which regions it recomputes follows from who makes, takes and saves what; sizes and
times only turn it into amounts. So a `SegmentStructure` works the first part out for many sets of recomputed operators
("patterns") as 0/1 matrices, which segments of every shape share; a `CompiledSegment` turns them into bytes and seconds
by matrix products.

Letters of the shapes: P patterns, C choices, n operators, m values, D levels of blocks around an operator, K the four
strategies in the order of `CODES`. Heights are 2n: over the operators in backward, then in forward.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

import numpy as np

from flex_trainer.cost.arrays import Costs, Tables
from flex_trainer.cost.graph import Segment
from flex_trainer.cost.load import Load, follows
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.segment_cost import (
    backward_transients,
    forward_transients,
    unpaid_operators,
)
from flex_trainer.cost.uses import find_uses
from flex_trainer.strategy import WORTHWHILE, Strategy

CODES = (Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE)
KEEP, RECOMPUTE, OFFLOAD, QUANTIZE = range(4)
CODE_OF = {strategy: code for code, strategy in enumerate(CODES)}
EPSILON_SECONDS = 1e-7
"""Added time below which mitigations are equally good to Algorithm 2, which divides by it."""
_MAX_STRUCTURES = 64
_MAX_PASSED = 128
_MAX_QUESTIONS = 8
_MAX_PATTERNS = 20_000
"""Patterns remembered for one structure; beyond that it starts over."""

_operator_structure = attrgetter(
    "site.kind", "site.is_block", "site.is_recomputable", "parent", "inputs", "shared_inputs"
)
_value_structure = attrgetter("owner", "savers", "element_bytes", "is_decision")


@dataclass
class Patterns:
    """Consequences of P sets of recomputed operators."""

    recomputed: np.ndarray
    """P x n: the operator is a region that is recomputed."""
    stops_early: np.ndarray
    """P x n: it is, and stops once all that was saved inside is there."""
    held: np.ndarray
    """P x m: the value is held, unless it is moved."""
    recovered: np.ndarray
    """P x Dm: the value is dropped, and brought back by the recomputation of its owner, of the block around that,
    ..."""
    shared: np.ndarray
    """P x number of shared values: some recompute takes it."""

    def rows(self, index: np.ndarray) -> Patterns:
        """The patterns at some places."""
        return Patterns(*(array[index] for array in vars(self).values()))

    def joined(self, other: Patterns) -> Patterns:
        """These patterns, then the others."""
        return Patterns(*(np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class Passed:
    """Choices that earlier plans passed through."""

    choices: dict[bytes, None] = field(default_factory=dict)
    """The latest last."""
    least_room_share: float = math.inf
    """The least room that they were made for, as a share of what keeping everything takes."""

    def add(self, choice: bytes) -> None:
        """Put a choice in; the oldest one goes where there are too many."""
        self.choices.pop(choice, None)
        self.choices[choice] = None
        if len(self.choices) > _MAX_PASSED:
            del self.choices[next(iter(self.choices))]


@dataclass(frozen=True)
class _Key:
    """What makes two segments alike; the segment itself only comes along."""

    is_outside: bool
    operators: tuple[object, ...]
    values: tuple[object, ...]
    segment: Segment = field(compare=False)


def structure_of(segment: Segment) -> SegmentStructure:
    """The structure of a segment, worked out when first seen."""
    found = vars(segment).get("structure")
    if found is None:
        found = vars(segment)["structure"] = _find_structure(segment)
    return found


def _find_structure(segment: Segment) -> SegmentStructure:
    operators, values = map(_operator_structure, segment.operators), map(_value_structure, segment.values)
    return _compile(_Key(segment.layer < 0, tuple(operators), tuple(values), segment))


@lru_cache(maxsize=_MAX_STRUCTURES)
def _compile(key: _Key) -> SegmentStructure:
    return SegmentStructure(key.segment)


def forget_structures() -> None:
    """As at the start of the process: for measurements."""
    _compile.cache_clear()


class SegmentStructure:
    """Who makes, takes and saves what in a segment, whatever the sizes."""

    def __init__(self, segment: Segment) -> None:
        operators, values = segment.operators, segment.values
        self.num_operators, self.num_values = len(operators), len(values)
        n, m = self.num_operators, self.num_values
        self.parents = np.array([operator.parent for operator in operators], dtype=np.int64)
        self.encloses = np.eye(n, dtype=bool)
        """n x n: the row's operator is the column's, or encloses it."""
        for index, operator in enumerate(operators):
            if operator.parent >= 0:
                self.encloses[:, index] |= self.encloses[:, operator.parent]
        self.inside = self.encloses & ~np.eye(n, dtype=bool)
        """The same without the operator itself."""
        self.is_recomputable = np.array([operator.site.is_recomputable for operator in operators], dtype=bool)
        self.allows = np.array([[op.site.allows(code) for code in CODES] for op in operators], dtype=bool).reshape(n, 4)
        self.owner = np.array([value.owner for value in values], dtype=np.int64)
        self.made = np.zeros((m, n))
        """m x n: the operator owns the value."""
        has_owner = np.flatnonzero(self.owner >= 0)
        self.made[has_owner, self.owner[has_owner]] = 1
        self._kinds = [operator.site.kind for operator in operators]
        self.keeps_outputs = np.array([operator.site.keeps_outputs for operator in operators], dtype=bool)
        self.is_decision = np.array([value.is_decision and value.owner >= 0 for value in values], dtype=bool)
        self.allows_within = self.allows.copy()
        """n x 4: as `allows`, where no layer is recomputed as a whole."""
        self.allows_within[self.keeps_outputs, RECOMPUTE] = False
        self._dropped = self.made * ~self.is_decision[:, None]
        """m x n: a block around the operator drops the value, if it is recomputed."""
        self.is_saved = np.array([bool(value.savers) for value in values], dtype=bool)
        self._element_bytes = np.array([value.element_bytes for value in values], dtype=np.int64)
        # For every pair of a value and one of its savers: the operators that enclose both. If one of those is the
        # region, the saver gets the value within the recomputation; else the value is needed outside.
        self.pairs = pairs = [(number, saver) for number, value in enumerate(values) for saver in value.savers]
        self._pair_values = np.zeros((len(pairs), m), dtype=np.float32)
        self.pair_regions = np.zeros((n, len(pairs)), dtype=np.float32)
        last_saver = np.full(n, -1)
        for number, (value, saver) in enumerate(pairs):
            self._pair_values[number, value] = 1
            if saver >= 0 and values[value].owner >= 0 and not self.is_decision[value]:
                both = self.encloses[:, saver] & self.encloses[:, values[value].owner]
                self.pair_regions[:, number] = both
                last_saver[both] = np.maximum(last_saver[both], saver)
        self.saves_inside = last_saver >= 0
        self._is_block = np.array([operator.site.is_block for operator in operators], dtype=bool)
        self.unpaid = np.zeros((n, n))
        """n x n: a recomputation of the row's block that stops early does not pay for the column's operator."""
        for index in np.flatnonzero(self._is_block & self.saves_inside):
            self.unpaid[index, unpaid_operators(operators, int(index), int(last_saver[index]))] = 1
        self.inputs = [np.array(operator.inputs, dtype=np.int64) for operator in operators]
        self.shared_inputs = [np.array(operator.shared_inputs, dtype=np.int64) for operator in operators]
        self.num_shared = max((value + 1 for operator in operators for value in operator.shared_inputs), default=0)
        made_or_taken = self.made.T > 0
        for index, taken in enumerate(self.inputs):
            made_or_taken[index, taken] = True
        touches = made_or_taken.astype(np.float32)
        self.linked = touches @ touches.T > 0
        """n x n: one makes a value that the other takes, or both take one."""
        self.owned = [np.flatnonzero(self._dropped @ self.encloses[index]) for index in range(n)]
        self.decisions = [np.flatnonzero(self.is_decision * (self.made @ self.inside[index])) for index in range(n)]
        """By operator: what the routers inside decide."""
        self._place(segment)
        self.pools: dict[tuple[bytes, bool], np.ndarray] = {}
        """Choices that a search in this structure found worth having, by what it was allowed."""
        self._uniform: dict[int, bytes] = {}
        self._passed: dict[Hashable, Passed] = {}
        self._rows: dict[bytes, int] = {}
        self._known: Patterns | None = None

    def _place(self, segment: Segment) -> None:
        """Where values are in memory, over the operators (see `cost/uses.py`): 0/1 matrices of m x 2n."""
        n = self.num_operators
        self.uses = uses = find_uses(segment)
        at, owner = np.arange(n), self.owner[:, None]
        first, last, last_forward = (
            np.array(column, dtype=np.int64)[:, None] for column in (uses.first, uses.last, uses.last_forward)
        )
        forward = (owner >= 0) & (owner <= at) & (at <= last_forward)
        self.gone = np.concatenate([at < first, at < owner], axis=1).astype(np.float64)
        """Not there yet, or let go of, where it is held."""
        moved = (np.minimum(first, last) <= at) & (at <= last)
        self.there_moved = np.concatenate([moved, forward], axis=1).astype(np.float64)
        """There on top, where it is moved."""
        # The owner, the block around it, the block around that, ...; -1 where there is none.
        levels = [self.owner]
        while (levels[-1] >= 0).any():
            levels.append(np.where(levels[-1] >= 0, self.parents[levels[-1]] if n else -1, -1))
        self.levels = levels[:-1]
        self.num_levels = len(self.levels)
        recompute_at = np.array(uses.recompute_at, dtype=np.int64)
        there = []
        for level in self.levels:
            since = recompute_at[level][:, None]
            there.append(np.concatenate([(np.minimum(first, since) <= at) & (at <= since), forward], axis=1))
        self.there_recomputed = np.concatenate([np.zeros((0, 2 * n)), *there]).astype(np.float64)
        """Dm x 2n: there on top, where a recomputation of that level brings it back."""

    def uniform(self, code: int) -> bytes:
        """One strategy for all operators that allow it, as a choice."""
        if code not in self._uniform:
            self._uniform[code] = np.where(self.allows[:, code], code, KEEP).astype(np.uint8).tobytes()
        return self._uniform[code]

    def passed(self, question: Hashable) -> Passed:
        """What earlier plans passed through that asked the same: with these strategies at these rates."""
        found = self._passed.pop(question, None) or Passed()
        self._passed[question] = found
        if len(self._passed) > _MAX_QUESTIONS:
            del self._passed[next(iter(self._passed))]
        return found

    def load_factors(self, loads: Sequence[Load]) -> np.ndarray:
        """Loads x n: by what each operator's sizes and times are larger than under an even load."""
        by = {None: np.ones(len(loads)), "pairs": [load.pairs for load in loads], "rows": [load.rows for load in loads]}
        return np.array([by[follows(kind)] for kind in self._kinds], dtype=np.float64).reshape(-1, len(loads)).T

    # Patterns

    def roots(self, recomputed: np.ndarray) -> np.ndarray:
        """C x n marks of recomputed operators -> the outermost ones of each chain, those that can be recomputed."""
        marks = recomputed & self.is_recomputable
        inside = (marks.astype(np.float32) @ self.inside) > 0
        return marks & ~inside

    def patterns(self, roots: np.ndarray) -> Patterns:
        """Consequences of P x n sets of outermost recomputed operators; those seen before are looked up."""
        keys = [row.tobytes() for row in np.packbits(roots, axis=1)]
        if len(self._rows) > _MAX_PATTERNS:
            self._rows, self._known = {}, None
        fresh = {key: number for number, key in enumerate(keys) if key not in self._rows}
        if fresh or self._known is None:
            made = self._consequences(roots[list(fresh.values())])
            start = len(self._rows)
            self._rows.update({key: start + number for number, key in enumerate(fresh)})
            self._known = made if self._known is None else self._known.joined(made)
        return self._known.rows(np.array([self._rows[key] for key in keys], dtype=np.int64))

    def _consequences(self, roots: np.ndarray) -> Patterns:
        """What is recomputed, and which values must be there in backward, for all rows at once."""
        marks = roots.astype(np.float32)
        dropped = ((marks @ self.encloses) > 0) @ self._dropped.T > 0
        needed = (1 - marks @ self.pair_regions) @ self._pair_values > 0
        needed, by_operator = np.ascontiguousarray(needed.T), np.ascontiguousarray(roots.T)
        recomputed, stops_early = np.zeros_like(by_operator), np.zeros_like(by_operator)
        shared = np.zeros((self.num_shared, len(roots)), dtype=bool)
        # Last region first: a recomputation needs what earlier ones make.
        for index in np.flatnonzero(by_operator.any(axis=1))[::-1].tolist():
            live = by_operator[index]
            if self.keeps_outputs[index]:
                is_asked = np.zeros_like(live)
            else:
                is_asked = live & needed[self.owned[index]].any(axis=0)
            if not self.saves_inside[index]:
                live = is_asked
            elif self._is_block[index]:
                stops_early[index] = live & ~is_asked
            recomputed[index] = live
            needed[self.inputs[index]] |= live
            needed[self.decisions[index]] |= live
            if len(self.shared_inputs[index]):
                shared[self.shared_inputs[index]] |= live
        needed, recomputed, stops_early, shared = (array.T for array in (needed, recomputed, stops_early, shared))
        in_layers = (marks * self.keeps_outputs) @ self.encloses @ self.made.T > 0
        dropped &= ~(needed & in_layers)
        back = dropped & (needed | self.is_saved)
        by_level = [back & (level >= 0) & roots[:, level] for level in self.levels]
        recovered = np.concatenate([np.zeros((len(roots), 0), dtype=bool), *by_level], axis=1)
        return Patterns(recomputed, stops_early, needed & ~dropped, recovered, shared)


class CompiledSegment:
    """One segment under one machine's rates: its structure with sizes and times, which turn patterns into bytes and
    seconds.

    Sizes have a first axis A: of length 1, or, with several loads, one entry for each of the choices that are evaluated
    (A = P = C).

    Args:
        segment: with sizes under an even load.
        rates: what mitigations cost.
        loads: on its experts; default: even.
        gradient_bytes: n: parameter gradients that are there in each operator's backward, on top of its transient.
    """

    def __init__(
        self,
        segment: Segment,
        rates: Rates,
        loads: Sequence[Load] | None = None,
        gradient_bytes: np.ndarray | None = None,
    ) -> None:
        self.structure = structure = structure_of(segment)
        self._rates = rates
        values, num = segment.values, structure.num_operators
        num_bytes = np.array([[value.num_bytes for value in values]], dtype=np.float64)
        num_rows = np.array([[value.num_rows for value in values]], dtype=np.float64)
        seconds = rates.recompute_factor * np.array([[one.seconds for one in segment.operators]], dtype=np.float64)
        transients = [*backward_transients(segment), *forward_transients(segment)]
        on_top = np.array([[-np.inf if size is None else size for size in transients]], dtype=np.float64)
        if loads is not None:
            factors = structure.load_factors(loads)
            is_routed = np.array([value.is_routed and value.owner >= 0 for value in values], dtype=bool)
            by_value = np.ones((len(loads), len(values)))
            if num:
                by_value = np.where(is_routed, factors[:, structure.owner], 1.0)
            num_bytes, num_rows = np.rint(num_bytes * by_value), np.rint(num_rows * by_value)
            seconds = seconds * factors
            on_top = np.where(np.isfinite(on_top), np.rint(np.maximum(on_top, 0) * np.tile(factors, 2)), -np.inf)
        if gradient_bytes is not None:
            on_top = on_top + np.concatenate([gradient_bytes, np.zeros(num)])
        self.bytes, self.on_top = num_bytes, rates.transient_factor * on_top
        self.recompute_seconds = rates.recompute_overhead_seconds + seconds
        self.unpaid_seconds = np.minimum(seconds @ structure.unpaid.T, seconds)
        element_bytes = np.array([value.element_bytes for value in values], dtype=np.float64)
        quantized = num_bytes // element_bytes + 4 * num_rows
        is_large = (num_bytes >= rates.smallest_moved_bytes) & (structure.owner >= 0)
        may_quantize = is_large & (num_rows > 0) & (quantized <= WORTHWHILE * num_bytes)
        # By strategy that moves: whether it moves the value at all, what that takes, and what it frees.
        self.is_moved = is_large, may_quantize
        self.moved_seconds = tuple(
            roofline.seconds(num_bytes) * moved
            for roofline, moved in zip((rates.offload, rates.quantize), self.is_moved, strict=True)
        )
        self.freed = num_bytes * is_large, (num_bytes - quantized) * may_quantize

    def freeing(self, code: int) -> tuple[float, float]:
        """Of one strategy alone, under one load: bounds of the bytes that it frees, and of the seconds for a byte (none
        takes fewer)."""
        if code == RECOMPUTE:
            # A region frees no more than what is made in it. One that is not recomputed frees nothing.
            num_bytes = (
                self.structure.encloses @ (self.structure.made.T @ self.bytes[0]) * self.structure.is_recomputable
            )
            seconds = self.recompute_seconds[0] - self.unpaid_seconds[0]
            total_bytes = float(self.bytes.sum())
        else:
            num_bytes, seconds = self.freed[code - OFFLOAD][0], self.moved_seconds[code - OFFLOAD][0]
            total_bytes = float(num_bytes.sum())
        at = num_bytes > 0
        return total_bytes, float((seconds[at] / num_bytes[at]).min(initial=np.inf))

    def tables(self, patterns: Patterns) -> Tables:
        """Bytes and seconds of P patterns, and what moving each operator's values would change."""
        structure, num = self.structure, len(patterns.held)
        held = patterns.held * self.bytes
        changes = np.zeros((3, 4, num, structure.num_operators))
        for way, code in enumerate((OFFLOAD, QUANTIZE)):
            changes[0, code] = (patterns.held * self.moved_seconds[way]) @ structure.made
            changes[1, code] = (patterns.held * self.freed[way]) @ structure.made
            changes[2, code] = (held * self.is_moved[way]) @ structure.made
        brought_back = patterns.recovered * np.tile(self.bytes, (1, structure.num_levels))
        seconds = (patterns.recomputed * self.recompute_seconds).sum(axis=1)
        return Tables(
            held=held.sum(axis=1),
            seconds=seconds - (patterns.stops_early * self.unpaid_seconds).sum(axis=1),
            heights=self.on_top
            + self._rates.transient_factor * (brought_back @ structure.there_recomputed)
            - held @ structure.gone,
            is_held=patterns.held,
            added_seconds=changes[0],
            freed=changes[1],
            moved=changes[2],
            shared=patterns.shared,
            recomputed=patterns.recomputed,
        )

    def evaluate(self, codes: np.ndarray) -> Costs:
        """Costs of C x n choices, given as numbers into `CODES`."""
        roots = self.structure.roots(codes == RECOMPUTE)
        tables = self.tables(self.structure.patterns(roots))
        return self.costs(tables, np.arange(len(codes)), codes)

    def costs(self, tables: Tables, rows: np.ndarray, codes: np.ndarray) -> Costs:
        """Costs of C choices, each with the row of its pattern in the tables."""
        structure, num = self.structure, self.structure.num_operators
        at = codes, rows[:, None], np.arange(num)
        moved = tables.moved[at]
        heights, let_go = tables.heights[rows], None
        if (codes > RECOMPUTE).any():
            does = codes[:, structure.owner]
            is_held = tables.is_held[rows]
            is_moved = [
                is_held & may & (does == code) for code, may in zip((OFFLOAD, QUANTIZE), self.is_moved, strict=True)
            ]
            comes_back = (is_moved[0] | is_moved[1]) * self.bytes
            let_go = is_moved[0] * self.freed[0] + is_moved[1] * self.freed[1]
            heights = (
                heights + self._rates.transient_factor * (comes_back @ structure.there_moved) + let_go @ structure.gone
            )
        return Costs(
            held=tables.held[rows] - tables.freed[at].sum(axis=1),
            seconds=tables.seconds[rows] + tables.added_seconds[at].sum(axis=1),
            backward=heights[:, :num].max(axis=1, initial=0),
            forward=heights[:, num:].max(axis=1, initial=0),
            offloaded=(moved * (codes == OFFLOAD)).sum(axis=1),
            recompute_seconds=tables.seconds[rows],
            shared=tables.shared[rows],
        )

    def transient_bytes(self, codes: np.ndarray) -> np.ndarray:
        """The part of what comes on top that is an estimate (`Rates.transient_factor` is in it), at the highest point
        of C x n choices."""
        if not self.structure.num_operators:
            return np.zeros(len(codes), dtype=np.int64)
        structure = self.structure
        tables = self.tables(structure.patterns(structure.roots(codes == RECOMPUTE)))
        does = codes[:, structure.owner]
        comes_back = tables.heights + (tables.is_held * self.bytes) @ structure.gone
        heights = tables.heights
        for code, may, freed in zip((OFFLOAD, QUANTIZE), self.is_moved, self.freed, strict=True):
            is_moved = tables.is_held & may & (does == code)
            there = self._rates.transient_factor * ((is_moved * self.bytes) @ structure.there_moved)
            comes_back, heights = comes_back + there, heights + there + (is_moved * freed) @ structure.gone
        heights = np.where(np.isfinite(heights), np.ceil(heights - 1e-3), -1)
        highest = heights.argmax(axis=1)
        at = np.arange(len(codes)), highest
        return np.where(heights[at] > 0, np.ceil(comes_back[at] - 1e-3), 0).astype(np.int64)
