"""The search for choices worth having in one structure: made once, in the first shape.

Given which operators are recomputed, what moving (offload, quantize) each other operator's values costs and frees does
not depend on the rest: at a price per byte held, the best move of each is read off. So the search goes over recomputed
sets only. It starts from the plain ones (none, all, each alone) and from those that Algorithm 2 would pass through, and
changes what it has, once: around the best set at each price by one operator and by pairs, around every set that is
worth having by one. The prices are the slopes of the lower hull of seconds over bytes found so far, so they follow the
choices wherever those matter.

What ties segments together (copies in flight, values that recomputations share, the peak in the last layers) may make
it right to do without offload, without recomputations that take shared values, or with less on top, so the best ones of
those are looked for as well.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from flex_trainer.cost.arrays import Costs
from flex_trainer.cost.compiled import CODES, EPSILON_SECONDS, KEEP, RECOMPUTE, CompiledSegment
from flex_trainer.planner.frontier import Choices, Freedom, Moves, above, hull_slopes, thinned, undominated

_FIRST_PRICES = np.geomspace(1e-13, 1e-6, 8)
"""Seconds per byte: from memory bandwidth to a slow disk, and beyond on both sides."""
_MAX_PRICES = 6
_PRICE_STEPS = 2
_RUNNERS_UP = 4
"""Recomputed sets carried on at each price."""
_NUM_CAPS = 2
_NUM_GAP_PRICES = 1
_MAX_POOL = 100
_MAX_LISTED = 4096
"""Where no more choices than this exist, all are looked at."""
_STEPS = (0.005, 0.01, 0.02, 0.04, 0.08)
"""Where there are too many choices: how much an added second must change what is freed, held or needed on
top."""


def search(compiled: CompiledSegment, freedom: Freedom) -> np.ndarray:
    """Choices worth having in this structure, as K x n numbers into `CODES`."""
    moves = Moves(compiled, freedom.anywhere())
    every = _every_choice(moves)
    if every is not None:
        return every[undominated(compiled.evaluate(every), num_levels=max(len(every), 2))]
    return _Search(compiled, moves).run()


def _every_choice(moves: Moves) -> np.ndarray | None:
    """All choices there are; None where they are too many."""
    structure = moves.structure
    may = structure.allows & np.isin(np.arange(len(CODES)), [KEEP, RECOMPUTE, *moves.ways[0]])
    if not moves.may_recompute.any():
        may[:, RECOMPUTE] = False
    if np.log2(may.sum(axis=1)).sum() > np.log2(_MAX_LISTED):
        return None
    listed = list(product(*(np.flatnonzero(row).tolist() for row in may)))
    return np.array(listed, dtype=np.int64).reshape(len(listed), structure.num_operators)


class _Search:
    """One search: the recomputed sets looked at so far (`roots`), what they cost (`tables`), and the prices that rank
    them."""

    def __init__(self, compiled: CompiledSegment, moves: Moves) -> None:
        self.compiled, self.structure = compiled, compiled.structure
        self.moves = moves
        self.free = np.flatnonzero(self.moves.may_recompute)
        self.prices = [_FIRST_PRICES for _ in self.moves.ways]
        self.seen: set[bytes] = set()
        self.greedy = np.concatenate([self._greedy(moves, by_size) for moves in self.moves.ways for by_size in (0, 1)])
        self.roots = self._fresh(np.concatenate([self._plain(), self.greedy == RECOMPUTE]))
        self.tables = compiled.tables(self.structure.patterns(self.roots))

    def run(self) -> np.ndarray:
        # One round: on recorded problems, more of them took longer and led to no better plans.
        self._narrow()
        best = np.unique(np.concatenate([ranking.argmin(axis=1) for ranking in self._every_ranking()]))
        worth = np.unique(self._worth_having()[0])
        marks = [self._by_pairs(self.roots[number]) for number in best]
        marks += [self._by_one(self.roots[number]) for number in np.union1d(best, worth)]
        fresh = self._fresh(np.concatenate(marks))
        self.tables = self.tables.joined(self.compiled.tables(self.structure.patterns(fresh)))
        self.roots = np.concatenate([self.roots, fresh])
        self._narrow()
        return self._result()

    def _narrow(self) -> None:
        """Bring the prices to where the choices change, and forget all sets but the best at those."""
        self._move_prices()
        self._forget_all_but_the_best()

    # Sets of recomputed operators

    def _plain(self) -> np.ndarray:
        """None, all, all but whole layers, all operators but no block, and these with one operator more or less."""
        n, may = self.structure.num_operators, self.moves.may_recompute
        within = may & self.structure.allows_within[:, RECOMPUTE]
        leaves = may & ~(self.structure.inside & may).any(axis=1)
        alone = np.eye(n, dtype=bool)[self.free]
        sets = np.array([np.zeros(n, dtype=bool), may, within, leaves])
        return np.concatenate([sets, alone, within & ~alone, leaves & ~alone])

    def _greedy(self, moves: list[int], by_size: int) -> np.ndarray:
        """What Algorithm 2 passes through in this segment, as codes."""
        n = self.structure.num_operators
        current = np.full((1, n), KEEP)
        steps = [current]
        options = [(operator, code) for code in moves for operator in self.moves.movable]
        options += [(operator, RECOMPUTE) for operator in self.free]
        options = [(int(o), c) for o, c in options if self.structure.allows[o, c]]
        while options:
            tried = np.repeat(current, len(options), axis=0)
            for number, (operator, code) in enumerate(options):
                if current[0, operator] != RECOMPUTE:
                    tried[number, operator] = code
            costs = self.compiled.evaluate(np.concatenate([current, tried]))
            freed = costs.held[0] - costs.held[1:]
            worth = freed if by_size else freed / np.maximum(costs.seconds[1:] - costs.seconds[0], EPSILON_SECONDS)
            worth[freed <= 0] = -np.inf
            best = int(worth.argmax())
            if not np.isfinite(worth[best]):
                break
            current = tried[best : best + 1]
            steps.append(current)
        return np.concatenate(steps)

    def _by_one(self, center: np.ndarray) -> np.ndarray:
        """A set with one operator more or less, or with one of its blocks opened."""
        inside = self.structure.inside & self.moves.may_recompute
        blocks = np.flatnonzero(center & inside.any(axis=1))
        opened = (center & ~self.structure.encloses[blocks]) | inside[blocks]
        return np.concatenate([center ^ np.eye(len(center), dtype=bool)[self.free], opened])

    def _by_pairs(self, center: np.ndarray) -> np.ndarray:
        first, second = np.triu_indices(len(self.free), 1)
        doubles = np.repeat(center[None], len(first), axis=0)
        number = np.arange(len(first))
        doubles[number, self.free[first]] ^= True
        doubles[number, self.free[second]] ^= True
        return doubles

    def _fresh(self, marks: np.ndarray) -> np.ndarray:
        """The outermost operators of the sets that were not seen before; they are now."""
        roots = self.structure.roots(marks & self.moves.may_recompute)
        fresh = []
        for row, key in enumerate(map(bytes, np.packbits(roots, axis=1))):
            if key not in self.seen:
                self.seen.add(key)
                fresh.append(row)
        return roots[fresh]

    def _forget_all_but_the_best(self) -> None:
        kept = [
            ranking.argpartition(_RUNNERS_UP, axis=1)[:, :_RUNNERS_UP].ravel()
            for ranking in self._every_ranking()
            if ranking.shape[1] > _RUNNERS_UP
        ]
        # Also those that are best at no price, but fill a gap between two that are.
        every = np.arange(len(self.roots))
        for way, prices in enumerate(self.prices):
            some = np.array([0.0, *thinned(prices.tolist(), _NUM_GAP_PRICES)]) if self.moves.ways[way] else np.zeros(1)
            at, found = self.moves.choices(way, some, self.tables, every)
            kept.append(at[undominated(found.costs)])
        index = np.unique(np.concatenate(kept))
        self.roots, self.tables = self.roots[index], self.tables.rows(index)

    # Prices

    def _move_prices(self) -> None:
        """Bring the prices to where the choices change."""
        for way in range(len(self.moves.ways)):
            for _ in range(_PRICE_STEPS):
                slopes: set[float] = set()
                for ranking in self._rankings(way)[:2]:  # those without a cap on top
                    rows = np.unique(ranking.argmin(axis=1))
                    _, found = self.moves.choices(way, self.prices[way], self.tables, rows)
                    slopes.update(hull_slopes(found.costs.held, found.costs.seconds))
                if not slopes:
                    break
                ordered = thinned(sorted(slopes), _MAX_PRICES)
                self.prices[way] = np.array([ordered[0] * 0.5, *above(ordered), ordered[-1] * 8])

    def _every_ranking(self) -> list[np.ndarray]:
        return [ranking for way in range(len(self.moves.ways)) for ranking in self._rankings(way)]

    def _rankings(self, way: int) -> list[np.ndarray]:
        """What each set costs at each price: of all, of those that take no shared values, and of those that need less
        on top than some of the best ones do."""
        at_price = self.moves.at(way, self.prices[way], self.tables)
        takes_shared = self.tables.shared.any(axis=1)
        rankings = [at_price, at_price if takes_shared.all() else np.where(takes_shared, np.inf, at_price)]
        on_top = self.tables.heights.max(axis=1, initial=0)  # with nothing moved
        highest = np.unique(on_top[np.unique(at_price.argmin(axis=1))])
        for number in np.unique(np.linspace(0, len(highest) - 1, _NUM_CAPS).astype(int)):
            is_low = on_top < highest[number]
            if is_low.any():
                rankings.append(np.where(is_low, at_price, np.inf))
        return rankings

    # Results

    def _worth_having(self) -> tuple[np.ndarray, Choices]:
        """All sets with their best moves at each price: the ones not dominated, with the row of each."""
        every_at, every = [], []
        for way, prices in enumerate(self.prices):
            between = np.sqrt(prices[:-1] * prices[1:])
            more = np.concatenate([[0.0], prices, between, prices[-1] * np.array([8.0, 64.0])])
            at, found = self.moves.choices(way, more, self.tables, np.arange(len(self.roots)))
            index = undominated(found.costs)
            every_at.append(at[index])
            every.append(found.rows(index))
        at, found = np.concatenate(every_at), every[0]
        for more_choices in every[1:]:
            found = found.joined(more_choices)
        index = undominated(found.costs)
        return at[index], found.rows(index)

    def _result(self) -> np.ndarray:
        """Also with one move changed, each: what no price would choose, but a gap in the budget may."""
        _, found = self._worth_having()
        variants = [found.codes, self.greedy]
        for code in (KEEP, *self.moves.ways[0]):
            for operator in self.moves.movable[np.isfinite(self.moves.never[code])]:
                changed = found.codes[
                    (found.codes[:, operator] != code) & (found.codes[:, operator] != RECOMPUTE)
                ].copy()
                changed[:, operator] = code
                variants.append(changed)
        codes = np.unique(np.concatenate(variants), axis=0)
        costs = self.compiled.evaluate(codes)
        index = undominated(costs)
        for step in _STEPS:
            if len(index) <= _MAX_POOL:
                break
            index = _spaced(costs, index, step)
        return np.concatenate([codes[index], self._uniform()])

    def _uniform(self) -> np.ndarray:
        """Keep everywhere, and each mitigation wherever it may be, with each other one elsewhere."""
        codes = [KEEP, RECOMPUTE, *self.moves.ways[0]]
        if not self.moves.may_recompute.any():
            codes.remove(RECOMPUTE)
        rows = [
            np.where(may[:, first], first, np.where(may[:, second], second, KEEP))
            for may in (self.structure.allows, self.structure.allows_within)
            for first in codes
            for second in codes
        ]
        return np.unique(np.array(rows), axis=0)


def _spaced(costs: Costs, index: np.ndarray, step: float) -> np.ndarray:
    """The undominated choices without those that hardly differ from a cheaper one."""
    most_held = costs.held.max()
    on_top, held = costs.on_top, costs.held
    groups = costs.groups
    kept: list[int] = []
    for one in index.tolist():
        other = np.array(kept, dtype=np.int64)
        is_close = (
            (groups[other] == groups[one])
            & ((most_held - held[other]) * (1 + step) >= most_held - held[one])
            & (held[other] <= held[one] * (1 + step))
            & (on_top[other] <= on_top[one] * (1 + step))
        )
        if not is_close.any():
            kept.append(one)
    return np.array(kept, dtype=np.int64)
