"""The order search: a dynamic programme over prefixes, with labels.

A prefix is how many stages of each class have run: (i, j, k, l), as in BaGuaLu-2, section V-B. What it costs to go on
from a prefix is not one number. It depends on when the compute lane is free, when the last exchange of each class ends,
when the network and the copy lane are free, and when the copies end that backward still waits for. A *label* of a
prefix is one such list of times. Of two labels of one prefix, one that is no later in any time drops the other. That
loses nothing: every time that a further stage makes is a maximum of times plus a constant, hence no later either, and
memory depends on the prefix alone. Times before the compute lane is free count as that time, since nothing begins
earlier.

All labels with n stages run are extended by one stage at once (they are columns of one array). A label goes where a
bound says that it cannot end before an order that is known already:

    compute    what is left of it, and the last exchange of one class after it
    a class    what is left of its stages and exchanges, one after the other
    network    its exchanges left; before them the compute up to one, after them the compute that follows a class's last
    copy       its copies left

Of more than `max_labels` labels, those with the best bounds stay. The least bound of what was let go says how far from
the best order the result may be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flex_trainer.planner.fusion import BACKWARD, OFFLOAD, RECOVER, SIDES, Order, Window
from flex_trainer.planner.fusion_cost import nanoseconds

_NOW, _READY, _NETWORK, _COPY, _COPIED = 0, 1, 5, 6, 7
"""Rows of a label: the compute lane is free; by class, its last exchange ends; network and copy lane are free; copies
that backward stages wait for end."""
_FAR = 1 << 60
_COMPARED = 12
"""Labels of one prefix are compared with up to so many that end earlier."""


@dataclass(frozen=True)
class Found:
    """What a search has found. Times in nanoseconds."""

    order: Order | None
    """None: nothing better than the order known before."""
    bound: int
    """No order ends before this: the least bound of what was let go, or the end of the order found or known before."""


class _Class:
    """The stages of one class as arrays, by number of stages that have run, and sums over those left."""

    def __init__(self, window: Window, side: int) -> None:
        stages = window.stages[side]
        self.num = len(stages)

        def padded(values: list[int]) -> np.ndarray:
            return np.array([*values, 0], dtype=np.int64)

        self.seconds = padded([nanoseconds(stage.seconds) for stage in stages])
        self.exchange = padded([nanoseconds(stage.exchange_seconds) for stage in stages])
        self.copy = padded([nanoseconds(stage.copy_seconds) for stage in stages])
        self.change = padded([stage.held_bytes for stage in stages])
        self.top = padded([max(stage.peak_bytes, stage.held_bytes) for stage in stages])
        self.held = np.concatenate([[0], np.cumsum(self.change)[:-1]])
        """Change of what is held by the stages that have run."""
        self.compute_left, self.exchange_left, self.copy_left = (
            np.cumsum(values[::-1])[::-1] for values in (self.seconds, self.exchange, self.copy)
        )
        self.chain = self.compute_left + self.exchange_left
        is_left = np.arange(self.num + 1) < self.num
        self.last_exchange = np.where(is_left, self.exchange[self.num - 1], _FAR)
        """After its last stage; far where none is left."""
        self.chain[-1] = -_FAR
        self.head = np.full(self.num + 1, _FAR)
        """Compute up to the next exchange; far where there is none."""
        for number in range(self.num - 1, -1, -1):
            after = 0 if self.exchange[number] else self.head[number + 1]
            self.head[number] = min(self.seconds[number] + after, _FAR)
        places = np.flatnonzero(self.exchange)
        after_last = self.compute_left[places[-1] + 1] if len(places) else 0
        self.tail = np.where(self.exchange_left > 0, after_last, _FAR)
        """Compute after the last exchange; far where none is left."""


class OrderSearch:
    """The search for one window: labels are columns, `times` their rows and `done` the stages run by class."""

    def __init__(self, window: Window, limit_bytes: int | None) -> None:
        self._window = window
        self._limit = _FAR if limit_bytes is None else limit_bytes - window.start_bytes
        self._classes = [_Class(window, side) for side in range(len(SIDES))]
        self._used = [side for side, one in enumerate(self._classes) if one.num]
        sizes = [one.num + 1 for one in self._classes]
        self._strides = np.cumprod([1, *sizes[:0:-1]])[::-1]
        self._forward_before = np.array([*window.forward_before, 0], dtype=np.int64)
        self._recoveries_before = np.array([*window.recoveries_before, 0], dtype=np.int64)
        copying = np.flatnonzero(self._classes[RECOVER].copy)
        # By backward stage: how many recoveries with copies must have run before. It waits for the last one.
        waited = np.searchsorted(copying, self._recoveries_before)
        slots = np.unique(waited[:-1])
        slots = slots[slots > 0]
        rows = np.zeros(len(copying) + 1, dtype=np.int64)
        rows[slots] = _COPIED + np.arange(len(slots))
        self._waits_for = rows[waited]
        """By backward stage: the row of the copy it waits for, or `_NOW`."""
        self._copied = np.zeros(len(window.recoveries) + 1, dtype=np.int64)
        self._copied[copying] = rows[1:]
        """By recovery: the row where the end of its copy is noted, or `_NOW`."""
        self._num_rows = _COPIED + len(slots)

    def run(self, best: int, max_labels: int) -> Found:
        """Search for an order that ends before `best` (nanoseconds), with at most so many labels at a time."""
        let_go = _FAR

        def choose(times: np.ndarray, done: np.ndarray) -> np.ndarray:
            nonlocal let_go
            bounds = self._bounds(times, done)
            index = np.flatnonzero(bounds < best)
            index = index[self._undominated(times[:, index], done[:, index])]
            if len(index) <= max_labels:
                return index
            index = index[self._best_first(times[:, index], done[:, index], bounds[index])]
            let_go = min(let_go, int(bounds[index[max_labels]]))
            return index[:max_labels]

        found = self._by_stage(choose)
        if found is None:
            return Found(None, min(let_go, best))
        order, end = found
        return Found(order, min(let_go, end))

    def fitting(self, max_prefixes: int) -> Order | None:
        """Any order within the memory limit. Of more than so many prefixes at a time those that hold least stay; where
        there never are more, None says that no order fits."""

        def choose(_: np.ndarray, done: np.ndarray) -> np.ndarray:
            index = np.unique(self._strides @ done, return_index=True)[1]
            return index[np.argsort(self._held(done[:, index]), kind="stable")[:max_prefixes]]

        found = self._by_stage(choose)
        return found[0] if found else None

    def _by_stage(self, choose: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> tuple[Order, int] | None:
        """Extend labels stage by stage; `choose` says which stay, from times and stages run. The order that ends first,
        and when."""
        times = np.zeros((self._num_rows, 1), dtype=np.int64)
        done = np.zeros((len(SIDES), 1), dtype=np.int64)
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for _ in range(self._window.num_stages):
            times, done, sides, parents = self._extended(times, done)
            index = choose(times, done)
            if not len(index):
                return None
            times, done = times[:, index], done[:, index]
            steps.append((sides[index], parents[index]))
        ends = times[[_NOW, _NETWORK, _COPY]].max(axis=0)
        at = int(ends.argmin())
        end = int(ends[at])
        order = []
        for of, parent in reversed(steps):
            order.append(SIDES[int(of[at])])
            at = int(parent[at])
        return tuple(reversed(order)), end

    def lower_bound(self) -> int:
        """No order ends before this."""
        times = np.zeros((self._num_rows, 1), dtype=np.int64)
        return int(self._bounds(times, np.zeros((len(SIDES), 1), dtype=np.int64))[0])

    def _extended(self, times: np.ndarray, done: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Every label with one more stage of every class that may be next: times, stages run, class, parent."""
        held = self._held(done)
        all_times, all_done, all_sides, all_parents = [], [], [], []
        for side in self._used:
            one = self._classes[side]
            number = done[side]
            may_run = (number < one.num) & (held + one.top[number] <= self._limit)
            if side == OFFLOAD:
                may_run &= self._forward_before[number] <= done[0]
            if side == BACKWARD:
                may_run &= self._recoveries_before[number] <= done[RECOVER]
            index = np.flatnonzero(may_run)
            if not len(index):
                continue
            number = number[index]
            new = times[:, index]
            start = np.maximum(new[_NOW], new[_READY + side])
            if side == BACKWARD and self._num_rows > _COPIED:
                start = np.maximum(start, new[self._waits_for[number], np.arange(len(index))])
            copy = one.copy[number]
            if copy.any():
                ends = np.maximum(start, new[_COPY]) + copy
                new[_COPY] = np.where(copy > 0, ends, new[_COPY])
                if side == RECOVER:
                    rows = self._copied[number]
                    noted = np.flatnonzero(rows)
                    new[rows[noted], noted] = ends[noted]
            now = start + one.seconds[number]
            np.maximum(new, now, out=new)
            exchange = one.exchange[number]
            ends = np.where(exchange > 0, new[_NETWORK] + exchange, new[_NETWORK])
            new[_READY + side] = np.where((exchange > 0) & (number + 1 < one.num), ends, now)
            new[_NETWORK] = ends
            further = done[:, index]
            further[side] += 1
            all_times.append(new)
            all_done.append(further)
            all_sides.append(np.full(len(index), side, dtype=np.int8))
            all_parents.append(index)
        if not all_times:
            return times[:, :0], done[:, :0], np.zeros(0, np.int8), np.zeros(0, np.int64)
        return (
            np.concatenate(all_times, axis=1),
            np.concatenate(all_done, axis=1),
            np.concatenate(all_sides),
            np.concatenate(all_parents),
        )

    def _bounds(self, times: np.ndarray, done: np.ndarray) -> np.ndarray:
        """No order that goes on from a label ends before this."""
        compute = times[_NOW].copy()
        exchange, copy = np.zeros_like(compute), np.zeros_like(compute)
        last = np.full_like(compute, _FAR)
        head, tail = last.copy(), last.copy()
        bounds = times[_NETWORK].copy()
        for side in self._used:
            one, number, ready = self._classes[side], done[side], times[_READY + side]
            compute += one.compute_left[number]
            exchange += one.exchange_left[number]
            copy += one.copy_left[number]
            np.minimum(last, one.last_exchange[number], out=last)
            np.maximum(bounds, ready + one.chain[number], out=bounds)
            np.minimum(head, ready + one.head[number], out=head)
            np.minimum(tail, one.tail[number], out=tail)
        np.maximum(bounds, compute + np.where(last < _FAR, last, 0), out=bounds)
        network = np.maximum(times[_NETWORK], head) + exchange + tail
        np.maximum(bounds, np.where(exchange > 0, network, 0), out=bounds)
        return np.maximum(bounds, times[_COPY] + copy)

    def _held(self, done: np.ndarray) -> np.ndarray:
        """Bytes held above the start."""
        held = np.zeros(done.shape[1], dtype=np.int64)
        for side in self._used:
            held += self._classes[side].held[done[side]]
        return held

    def _best_first(self, times: np.ndarray, done: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """Labels by bound, then by what the classes with exchanges still need one after the other."""
        rest = np.zeros_like(bounds)
        for side in self._used:
            if self._classes[side].exchange_left[0]:
                left = times[_READY + side] + self._classes[side].chain[done[side]]
                rest += np.maximum(left, times[_NOW])
        return np.lexsort((rest, bounds))

    def _undominated(self, times: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Labels left when others of the same prefix that are no later in any time have dropped theirs."""
        prefixes = self._strides @ done
        index = np.lexsort((times.sum(axis=0), times[_NOW], prefixes))
        is_later = (times > times[_NOW]).any(axis=1)
        is_later[_NOW] = True
        prefixes, times = prefixes[index], times[np.ix_(is_later, index)]
        is_dropped = np.zeros(len(index), dtype=bool)
        for distance in range(1, min(_COMPARED, len(index) - 1) + 1):
            same = np.flatnonzero(prefixes[distance:] == prefixes[:-distance])
            if not len(same):
                break
            is_dropped[same + distance] |= (times[:, same + distance] >= times[:, same]).all(axis=0)
        return index[~is_dropped]
