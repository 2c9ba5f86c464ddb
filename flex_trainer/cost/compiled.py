"""What many choices cost at once: `evaluate` for arrays of choices, with the same rules and the same results.

Which values a choice holds and which regions it replays follows from who makes, takes and saves what; sizes and times
only weigh it. So a `SegmentStructure` works the first part out for many sets of recomputed operators ("patterns") as
0/1 matrices, which segments of every shape share; a `CompiledSegment` turns them into bytes and seconds by matrix
products.

Letters of the shapes: P patterns, C choices, n operators, m values, D levels of blocks around an operator, K the four
strategies in the order of `CODES`. Heights are 2n: over the operators in backward, then in forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter

import numpy as np

from flex_trainer.cost.evaluate import (
    SegmentCost,
    backward_transients,
    ceil_bytes,
    forward_transients,
    unpaid_operators,
)
from flex_trainer.cost.graph import Segment
from flex_trainer.cost.roofline import Rates
from flex_trainer.strategy import Strategy

CODES = (Strategy.KEEP, Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE)
KEEP, RECOMPUTE, OFFLOAD, QUANTIZE = range(4)
EPSILON_SECONDS = 1e-7
"""Added time below which mitigations are equally good to Algorithm 2, which divides by it."""
_MAX_STRUCTURES = 64
_MAX_PATTERNS = 20_000
"""Patterns remembered for one structure; beyond that it starts over."""

_operator_structure = attrgetter(
    "site.kind", "site.is_block", "site.is_replayable", "parent", "inputs", "shared_inputs"
)
_value_structure = attrgetter("owner", "savers", "element_bytes")


@dataclass
class Patterns:
    """Consequences of P sets of recomputed operators."""

    replayed: np.ndarray
    """P x n: the operator is a region that is replayed."""
    stops_early: np.ndarray
    """P x n: it is, and stops once all that was saved inside is there."""
    held: np.ndarray
    """P x m: the value is held, unless it is moved."""
    recovered: np.ndarray
    """P x Dm: the value is dropped, and brought back by the replay of its owner, of the block around that, ..."""
    shared: np.ndarray
    """P x number of shared values: some replay takes it."""

    def rows(self, index: np.ndarray) -> Patterns:
        """The patterns at some places."""
        return Patterns(*(array[index] for array in vars(self).values()))

    def joined(self, other: Patterns) -> Patterns:
        """These patterns, then the others."""
        return Patterns(*(np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class _Key:
    """What makes two segments alike; the segment itself only comes along."""

    is_outside: bool
    operators: tuple[object, ...]
    values: tuple[object, ...]
    segment: Segment = field(compare=False)


def structure_of(segment: Segment) -> SegmentStructure:
    """The structure of a segment, worked out when first seen."""
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
        self.is_replayable = np.array([operator.site.is_replayable for operator in operators], dtype=bool)
        self.allows = np.array([[op.site.allows(code) for code in CODES] for op in operators], dtype=bool).reshape(n, 4)
        self.owner = np.array([value.owner for value in values], dtype=np.int64)
        self.made = np.zeros((m, n))
        """m x n: the operator owns the value."""
        has_owner = np.flatnonzero(self.owner >= 0)
        self.made[has_owner, self.owner[has_owner]] = 1
        self._is_saved = np.array([bool(value.savers) for value in values], dtype=bool)
        self._element_bytes = np.array([value.element_bytes for value in values], dtype=np.int64)
        # For every pair of a value and one of its savers: the operators that enclose both. If one of those is the
        # region, the saver gets the value within the replay; else the value is needed outside.
        pairs = [(number, saver) for number, value in enumerate(values) for saver in value.savers]
        self._pair_values = np.zeros((len(pairs), m), dtype=np.float32)
        self._pair_regions = np.zeros((n, len(pairs)), dtype=np.float32)
        last_saver = np.full(n, -1)
        for number, (value, saver) in enumerate(pairs):
            self._pair_values[number, value] = 1
            if saver >= 0 and values[value].owner >= 0:
                both = self.encloses[:, saver] & self.encloses[:, values[value].owner]
                self._pair_regions[:, number] = both
                last_saver[both] = np.maximum(last_saver[both], saver)
        self._saves_inside = last_saver >= 0
        self._is_block = np.array([operator.site.is_block for operator in operators], dtype=bool)
        self.unpaid = np.zeros((n, n))
        """n x n: a replay of the row's block that stops early does not pay for the column's operator."""
        for index in np.flatnonzero(self._is_block & self._saves_inside):
            self.unpaid[index, unpaid_operators(operators, int(index), int(last_saver[index]))] = 1
        self._inputs = [np.array(operator.inputs, dtype=np.int64) for operator in operators]
        self._shared = [np.array(operator.shared_inputs, dtype=np.int64) for operator in operators]
        self.num_shared = max((value + 1 for operator in operators for value in operator.shared_inputs), default=0)
        made_or_taken = self.made.T > 0
        for index, taken in enumerate(self._inputs):
            made_or_taken[index, taken] = True
        touches = made_or_taken.astype(np.float32)
        self.linked = touches @ touches.T > 0
        """n x n: one makes a value that the other takes, or both take one."""
        self._owned = [np.flatnonzero(self.made @ self.encloses[index]) for index in range(n)]
        self._place(segment)
        self.pools: dict[tuple[bytes, bool], np.ndarray] = {}
        """Choices that a search in this structure found worth having, by what it was allowed."""
        self._rows: dict[bytes, int] = {}
        self._known: Patterns | None = None

    def _place(self, segment: Segment) -> None:
        """Where values are in memory, over the operators (see `cost/uses.py`): 0/1 matrices of m x 2n."""
        uses, n = segment.uses, self.num_operators
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
        self._levels = levels[:-1]
        replay_at = np.array(uses.replay_at, dtype=np.int64)
        there = []
        for level in self._levels:
            since = replay_at[level][:, None]
            there.append(np.concatenate([(np.minimum(first, since) <= at) & (at <= since), forward], axis=1))
        self.there_replayed = np.concatenate([np.zeros((0, 2 * n)), *there]).astype(np.float64)
        """Dm x 2n: there on top, where a replay of that level brings it back."""

    # Patterns

    def roots(self, recomputed: np.ndarray) -> np.ndarray:
        """C x n marks of recomputed operators -> the outermost ones of each chain, those that can be replayed."""
        marks = recomputed & self.is_replayable
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
        """The rules of `evaluate`, step 1, for all rows at once."""
        marks = roots.astype(np.float32)
        dropped = ((marks @ self.encloses) > 0) @ self.made.T > 0
        needed = (1 - marks @ self._pair_regions) @ self._pair_values > 0
        replayed = np.zeros_like(roots)
        stops_early = np.zeros_like(roots)
        shared = np.zeros((len(roots), self.num_shared), dtype=bool)
        # Last region first: a replay needs what earlier ones make.
        for index in range(self.num_operators - 1, -1, -1):
            rows = np.flatnonzero(roots[:, index])
            if not len(rows):
                continue
            is_asked = needed[np.ix_(rows, self._owned[index])].any(axis=1)
            if self._saves_inside[index]:
                stops_early[rows, index] = ~is_asked & self._is_block[index]
            else:
                rows = rows[is_asked]
            replayed[rows, index] = True
            needed[np.ix_(rows, self._inputs[index])] = True
            shared[np.ix_(rows, self._shared[index])] = True
        back = dropped & (needed | self._is_saved)
        by_level = [back & (level >= 0) & roots[:, level] for level in self._levels]
        recovered = np.concatenate([np.zeros((len(roots), 0), dtype=bool), *by_level], axis=1)
        return Patterns(replayed, stops_early, needed & ~dropped, recovered, shared)


class CompiledSegment:
    """One segment under one machine's rates: its structure with sizes and times, which turn patterns into bytes and
    seconds."""

    def __init__(self, segment: Segment, rates: Rates) -> None:
        self.structure = structure = structure_of(segment)
        self._bytes = np.array([value.num_bytes for value in segment.values], dtype=np.float64)
        seconds = rates.recompute_factor * np.array([one.seconds for one in segment.operators], dtype=np.float64)
        self._replay_seconds = rates.replay_overhead_seconds + seconds
        self._unpaid_seconds = np.minimum(structure.unpaid @ seconds, seconds)
        factor, sizes = rates.transient_factor, self._bytes[:, None]
        transients = [*backward_transients(segment), *forward_transients(segment)]
        self._on_top = factor * np.array([-np.inf if size is None else size for size in transients], dtype=np.float64)
        self._let_go = sizes * structure.gone
        self._brought_back = factor * np.tile(sizes, (len(structure.there_replayed) // max(len(sizes), 1), 1))
        self._brought_back = self._brought_back * structure.there_replayed
        columns, self._is_moved, heights = [], [], []
        for strategy, roofline in ((Strategy.OFFLOAD, rates.offload), (Strategy.QUANTIZE, rates.quantize)):
            is_moved = np.array([rates.moves(strategy, value) for value in segment.values], dtype=bool)
            left = np.array([rates.left_bytes(strategy, value) for value in segment.values], dtype=np.float64)
            freed = (self._bytes - left)[:, None]
            moved = is_moved[:, None] * structure.made
            columns += [moved * roofline.seconds(self._bytes)[:, None], moved * freed, moved * sizes]
            self._is_moved.append(is_moved & (structure.owner >= 0))
            heights.append(factor * sizes * structure.there_moved + freed * structure.gone)
        self._moves = np.concatenate(columns, axis=1)
        self._moved_heights = np.concatenate(heights)

    def tables(self, patterns: Patterns) -> Tables:
        """Bytes and seconds of P patterns, and what moving each operator's values would change."""
        num = len(patterns.held)
        held = patterns.held.astype(np.float64)
        moves = (held @ self._moves).reshape(num, 2, 3, self.structure.num_operators)
        changes = np.zeros((3, 4, num, self.structure.num_operators))
        changes[:, OFFLOAD:] = moves.transpose(2, 1, 0, 3)
        return Tables(
            held=held @ self._bytes,
            seconds=patterns.replayed @ self._replay_seconds - patterns.stops_early @ self._unpaid_seconds,
            heights=self._on_top + patterns.recovered @ self._brought_back - held @ self._let_go,
            is_held=patterns.held,
            added_seconds=changes[0],
            freed=changes[1],
            moved=changes[2],
            shared=patterns.shared,
            replayed=patterns.replayed,
        )

    def evaluate(self, codes: np.ndarray) -> Costs:
        """Costs of C x n choices, given as numbers into `CODES`."""
        roots = self.structure.roots(codes == RECOMPUTE)
        tables = self.tables(self.structure.patterns(roots))
        return self.costs(tables, np.arange(len(codes)), codes)

    def costs(self, tables: Tables, rows: np.ndarray, codes: np.ndarray) -> Costs:
        """Costs of C choices, each with the row of its pattern in the tables."""
        operators = np.arange(self.structure.num_operators)
        at = codes, rows[:, None], operators
        moved = tables.moved[at]
        does = codes[:, self.structure.owner] if self.structure.num_operators else np.zeros_like(tables.is_held[rows])
        is_held = tables.is_held[rows]
        ways = zip((OFFLOAD, QUANTIZE), self._is_moved, strict=True)
        is_moved = [is_held & may_move & (does == code) for code, may_move in ways]
        heights = tables.heights[rows] + np.concatenate(is_moved, axis=1) @ self._moved_heights
        num = self.structure.num_operators
        return Costs(
            held=tables.held[rows] - tables.freed[at].sum(axis=1),
            seconds=tables.seconds[rows] + tables.added_seconds[at].sum(axis=1),
            backward=heights[:, :num].max(axis=1, initial=0),
            forward=heights[:, num:].max(axis=1, initial=0),
            offloaded=(moved * (codes == OFFLOAD)).sum(axis=1),
            recompute_seconds=tables.seconds[rows],
            shared=tables.shared[rows],
        )


@dataclass
class Tables:
    """Weighed patterns. `K` is the strategy of an operator whose own values are not dropped."""

    held: np.ndarray
    """P: with nothing moved."""
    seconds: np.ndarray
    """P: with nothing moved."""
    heights: np.ndarray
    """P x 2n: on top of what is held, with nothing moved."""
    is_held: np.ndarray
    """P x m: the value is held, unless it is moved."""
    added_seconds: np.ndarray
    """K x P x n."""
    freed: np.ndarray
    """K x P x n: bytes that moving takes off what is held."""
    moved: np.ndarray
    """K x P x n: bytes that come back in backward."""
    shared: np.ndarray
    replayed: np.ndarray

    def joined(self, other: Tables) -> Tables:
        """These patterns, then the others."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Tables(*(np.concatenate(pair, axis=1 if pair[0].ndim == 3 else 0) for pair in pairs))

    def rows(self, index: np.ndarray) -> Tables:
        """The patterns at some places."""
        return Tables(*(array[:, index] if array.ndim == 3 else array[index] for array in vars(self).values()))


@dataclass
class Costs:
    """`SegmentCost` of C choices."""

    held: np.ndarray
    seconds: np.ndarray
    backward: np.ndarray
    forward: np.ndarray
    offloaded: np.ndarray
    recompute_seconds: np.ndarray
    shared: np.ndarray
    """C x number of shared values."""

    @property
    def on_top(self) -> np.ndarray:
        """Bytes on top of what is held, forward or backward."""
        return np.maximum(self.backward, self.forward)

    @property
    def groups(self) -> np.ndarray:
        """Bit 0: something is offloaded; bit 1: some replay takes a shared value."""
        return (self.offloaded > 0) * 1 + 2 * self.shared.any(axis=1)

    def one(self, number: int) -> SegmentCost:
        """One of the choices as `evaluate` gives it, but for `transient_bytes`."""
        return SegmentCost(
            held_bytes=int(self.held[number]),
            added_seconds=float(self.seconds[number]),
            backward_bytes=ceil_bytes(self.backward[number]),
            forward_bytes=ceil_bytes(self.forward[number]),
            offloaded_bytes=int(self.offloaded[number]),
            recompute_seconds=float(self.recompute_seconds[number]),
            shared=frozenset(np.flatnonzero(self.shared[number]).tolist()),
        )

    def joined(self, other: Costs) -> Costs:
        """These choices, then the others."""
        return Costs(*(np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def rows(self, index: np.ndarray) -> Costs:
        """The choices at some places."""
        return Costs(*(array[index] for array in vars(self).values()))
