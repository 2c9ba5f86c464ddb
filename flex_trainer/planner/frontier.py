"""The choices worth having for one class of equal segments: none holds, takes or adds less in every respect.

A search (planner/search.py) is made once for a structure, in the first shape it is seen in. Its result, the pool, is
evaluated anew for every other shape. Moves (offload, quantize) depend on sizes more than recomputation does, so for the
sets of recomputed operators that are still among the best they are also chosen anew.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flex_trainer.cost.arrays import Costs, Tables
from flex_trainer.cost.compiled import KEEP, OFFLOAD, QUANTIZE, RECOMPUTE, CompiledSegment

_MAX_PRICES = 4
_ON_TOP_LEVELS = 24
_MAX_PAIRED = 768
"""Up to so many choices are compared each with each."""


@dataclass
class Choices:
    """K choices of one class, sorted by added seconds."""

    codes: np.ndarray
    """K x n: numbers into `CODES`."""
    costs: Costs

    def rows(self, index: np.ndarray) -> Choices:
        """The choices at some places."""
        return Choices(self.codes[index], self.costs.rows(index))

    def joined(self, other: Choices) -> Choices:
        """These choices, then the others."""
        return Choices(np.concatenate([self.codes, other.codes]), self.costs.joined(other.costs))

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True)
class Freedom:
    """What may be chosen in a segment.

    Args:
        allowed: marks over `CODES`.
        fixed: n numbers into `CODES`, -1 where the choice is free.
        has_free_offload: nothing is in flight on top of what is held, so there is no reason to do without offload.
    """

    allowed: np.ndarray
    fixed: np.ndarray
    has_free_offload: bool

    def anywhere(self) -> Freedom:
        """The same with nothing fixed."""
        return Freedom(self.allowed, np.full_like(self.fixed, -1), self.has_free_offload)


class Moves:
    """The best moves of operators, for given sets of recomputed ones: what does not depend on the rest is read off."""

    def __init__(self, compiled: CompiledSegment, freedom: Freedom) -> None:
        self.compiled, self.structure = compiled, compiled.structure
        self.fixed = fixed = freedom.fixed
        is_free = fixed < 0
        may = self.structure.allows & freedom.allowed & is_free[:, None]
        self.may_recompute = may[:, RECOMPUTE] & self.structure.is_recomputable
        self.is_forced = (fixed == RECOMPUTE) & self.structure.is_recomputable
        # 0 where a code may be, else infinite. Where the choice is fixed, only that one is.
        may[:, KEEP] = is_free
        may[~is_free, fixed[~is_free]] = True
        never = np.where(may, 0.0, np.inf).T
        never[KEEP] = np.minimum(never[KEEP], never[RECOMPUTE])  # recomputing moves nothing
        moves = [code for code in (OFFLOAD, QUANTIZE) if may[:, code].any()]
        self.movable = np.flatnonzero(may[:, moves].any(axis=1)) if moves else np.zeros(0, dtype=np.int64)
        self.never = never[:, self.movable]
        without = [code for code in moves if code != OFFLOAD or (fixed == OFFLOAD).any()]
        self.ways = [moves] if freedom.has_free_offload or without == moves else [moves, without]
        """Codes of the moves that are used, in each way to look for choices."""

    def at(self, way: int, prices: np.ndarray, tables: Tables) -> np.ndarray:
        """What each set of recomputed operators costs with its best moves, at each price per byte held."""
        least = np.broadcast_to(self.never[KEEP], (len(prices), len(tables.held), len(self.movable)))
        for code in self.ways[way]:
            added, freed = tables.added_seconds[code][:, self.movable], tables.freed[code][:, self.movable]
            least = np.minimum(least, added - prices[:, None, None] * freed + self.never[code])
        return tables.seconds + prices[:, None] * tables.held + least.sum(axis=2)

    def choices(self, way: int, prices: np.ndarray, tables: Tables, rows: np.ndarray) -> tuple[np.ndarray, Choices]:
        """Some sets with their best moves at each price, with the row of each."""
        codes = np.full((len(prices), len(rows), self.structure.num_operators), KEEP)
        least = np.broadcast_to(self.never[KEEP], (len(prices), len(rows), len(self.movable)))
        moved = np.full(least.shape, KEEP)
        for code in self.ways[way]:
            added = tables.added_seconds[code][np.ix_(rows, self.movable)]
            freed = tables.freed[code][np.ix_(rows, self.movable)]
            cost = added - prices[:, None, None] * freed + self.never[code]
            moved = np.where(cost < least, code, moved)
            least = np.minimum(least, cost)
        codes[:, :, self.movable] = moved
        codes = np.where(tables.recomputed[rows], RECOMPUTE, codes)
        num = len(prices) * len(rows)
        codes = np.where(self.fixed >= 0, self.fixed, codes).reshape(num, self.structure.num_operators)
        at = np.tile(rows, len(prices))
        return at, Choices(codes, self.compiled.costs(tables, at, codes))

    def roots(self, marks: np.ndarray) -> np.ndarray:
        """The outermost recomputed operators of some sets, the fixed ones among them."""
        return self.structure.roots((marks & self.may_recompute) | self.is_forced)


def choices_of(compiled: CompiledSegment, freedom: Freedom, pool: np.ndarray) -> Choices:
    """Choices worth having, sorted by added seconds.

    Args:
        compiled: the class.
        freedom: what may be chosen.
        pool: choices that a search in this structure found worth having, as codes.
    """
    moves = Moves(compiled, freedom)
    codes = np.where(freedom.fixed >= 0, freedom.fixed, pool)
    roots = moves.roots(codes == RECOMPUTE)
    sets, rows = np.unique(roots, axis=0, return_inverse=True)
    rows = rows.reshape(-1)
    tables = compiled.tables(compiled.structure.patterns(sets))
    costs = compiled.costs(tables, rows, codes)
    found = Choices(codes, costs)
    index = undominated(costs)
    found = found.rows(index)
    best = np.unique(rows[index])
    for way in range(len(moves.ways)):
        slopes = thinned(hull_slopes(found.costs.held, found.costs.seconds), _MAX_PRICES)
        if moves.ways[way] and slopes:
            prices = np.array([*above(slopes), slopes[-1] * 8])
            found = found.joined(moves.choices(way, prices, tables, best)[1])
    return found.rows(undominated(found.costs))


def with_neighbours(compiled: CompiledSegment, freedom: Freedom, choices: Choices, rows: np.ndarray) -> Choices:
    """The choices, and what is worth having of those that differ from some of them in one operator, or in whether two
    that touch the same value are recomputed."""
    structure, moves = compiled.structure, Moves(compiled, freedom)
    is_free = freedom.fixed < 0
    variants = [choices.codes]
    for code in (KEEP, RECOMPUTE, OFFLOAD, QUANTIZE):
        may = is_free & structure.allows[:, code] & (freedom.allowed[code] or code == KEEP)
        if code == RECOMPUTE:
            may &= moves.may_recompute
        for operator in np.flatnonzero(may):
            changed = choices.codes[rows].copy()
            changed[:, operator] = code
            variants.append(changed)
    first, second = np.nonzero(np.triu(structure.linked & moves.may_recompute & moves.may_recompute[:, None], 1))
    for pair in np.stack([first, second], axis=1):
        changed = choices.codes[rows].copy()
        changed[:, pair] = np.where(changed[:, pair] == RECOMPUTE, KEEP, RECOMPUTE)
        variants.append(changed)
    codes = np.unique(np.concatenate(variants), axis=0)
    costs = compiled.evaluate(codes)
    index = undominated(costs)
    return Choices(codes[index], costs.rows(index))


def thinned(ordered: list[float], most: int) -> list[float]:
    """At most that many of them, evenly spread by rank."""
    if len(ordered) <= most:
        return ordered
    return [ordered[int(index)] for index in np.linspace(0, len(ordered) - 1, most)]


def hull_slopes(held: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Seconds per byte along the lower hull: the prices at which the best choice changes, in rising order."""
    order = steps_down(held, seconds)[::-1]  # the others are not on the hull
    hull: list[tuple[float, float]] = []
    for x, y in zip(held[order].tolist(), seconds[order].tolist(), strict=True):
        while len(hull) >= 2 and (
            (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (hull[-1][0] - hull[-2][0])
        ):
            hull.pop()
        hull.append((x, y))
    pairs = zip(hull, hull[1:], strict=False)
    return sorted((a[1] - b[1]) / (b[0] - a[0]) for a, b in pairs)


def above(slopes: list[float]) -> list[float]:
    """Prices just above the slopes: there the choice that holds less is the best one."""
    return [slope * 1.0001 for slope in slopes]


def steps_down(held: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The choices that no other beats in bytes held and seconds, from the fastest to the one that holds least."""
    order = np.lexsort((held, seconds))
    ordered = held[order]
    return order[np.concatenate([[True], ordered[1:] < np.minimum.accumulate(ordered)[:-1]])]


def undominated(costs: Costs, num_levels: int = _ON_TOP_LEVELS) -> np.ndarray:
    """Choices that no other beats in bytes and seconds, among those at most as high on top, for some levels of that;
    apart for those that offload and those that take shared values."""
    on_top = costs.on_top
    order = np.lexsort((on_top, costs.held, costs.seconds))
    groups = costs.groups
    tops = np.unique(on_top)
    levels = tops if len(tops) <= num_levels else tops[np.linspace(0, len(tops) - 1, num_levels).astype(int)]
    if len(order) <= _MAX_PAIRED:
        held, groups, on_top = costs.held[order], groups[order], on_top[order]
        level = levels[np.searchsorted(levels, on_top)]
        # Row i beats column j: it comes first, and may be taken wherever j may.
        beats = (held[:, None] <= held) & (on_top[:, None] <= level) & ((groups[:, None] & ~groups) == 0)
        return order[~np.triu(beats, 1).any(axis=0)]
    # The same in less memory.
    chosen = np.zeros(len(order), dtype=bool)
    for group in np.unique(groups):
        # A member of a group may be beaten by those that need less: no offload, no shared value.
        members = order[(groups[order] & ~group) == 0]
        for level in levels:
            inside = members[on_top[members] <= level]
            if len(inside):
                held = costs.held[inside]
                before = np.concatenate([[np.inf], np.minimum.accumulate(held)[:-1]])
                chosen[inside[held < before]] = True
    return order[chosen[order]]
