"""One choice for every segment: least added seconds with every layer's peak under its cap.

    outside.held + sum(held[0..i]) + on_top[i] <= cap[i]   for every layer i, and for the outside after the last one

What lies outside of the layers is in memory first, so its choice is made first (there are few). Then a dynamic
programme runs over the layers from the last to the first. A *label* is one way to do the layers from i on: `room`, the
most bytes that may be held when layer i starts, and the seconds it adds. A label that has less room and takes more time
than another is dropped. Bytes stay exact: nothing is rounded to a grid.

A price per byte (the best multiplier of the memory constraint, from the linear relaxation) does two things. It bounds
what the layers before i must still add: labels that cannot beat a plan already known go, and beyond `max_labels` the
ones with the best bound stay (and always the one with the most room, so that a plan is found whenever there is one).
And in deep models it settles most layers beforehand: at the best price all but one class have one best choice, and that
class is split between two; the programme then only chooses freely in the last `num_free` layers, where the peak is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flex_trainer.planner.frontier import hull_slopes, steps_down

_TOLERANCE = 1e-12
_NUM_OPEN = 2
"""Last layers for which all choices are looked at."""


@dataclass(frozen=True)
class Options:
    """The choices of one class: bytes held, seconds added, bytes on top. One array each."""

    held: np.ndarray
    seconds: np.ndarray
    on_top: np.ndarray

    def rows(self, index: np.ndarray) -> Options:
        """The choices at some places."""
        return Options(self.held[index], self.seconds[index], self.on_top[index])


@dataclass(frozen=True)
class Assignment:
    """A choice for every layer, then the one for the outside."""

    choices: tuple[int, ...]
    seconds: float


class AssignmentProblem:
    """Which of its class's choices each segment takes."""

    def __init__(self, classes: list[Options], class_of: list[int], caps: np.ndarray) -> None:
        """
        Args:
            classes: choices by class.
            class_of: the class of each layer, then that of the outside.
            caps: per layer, then for the outside: most bytes of stack and transients together.
        """
        self.classes, self.class_of, self.caps = classes, class_of[:-1], caps
        self.outside = classes[class_of[-1]]
        self.num_layers = len(self.class_of)
        used = sorted(set(self.class_of))
        slopes = sorted(
            {slope for number in used for slope in hull_slopes(classes[number].held, classes[number].seconds)}
        )
        self.prices = np.array([0.0, *slopes])
        counts = {number: np.cumsum([of == number for of in self.class_of]) for number in used}
        self.before = np.zeros((self.num_layers + 1, len(self.prices)))
        """Row i: at each price, the least that the layers before i add in seconds and priced bytes."""
        self.least_before = np.zeros(self.num_layers + 1)
        for number in used:
            options = classes[number]
            at_price = (options.seconds + self.prices[:, None] * options.held).min(axis=1)
            self.before[1:] += counts[number][:, None] * at_price
            self.least_before[1:] += counts[number] * options.held.min()
        # Most bytes held when all layers have run, by the choice for the outside.
        self.end = caps[-1] - self.outside.on_top
        if used:
            self.end = np.minimum(self.end, caps[-2] - classes[self.class_of[-1]].on_top.min())
        relaxed = self.before[-1] - self.prices * (self.end - self.outside.held)[:, None]
        self.best_price = relaxed.argmax(axis=1)
        self.bounds = self.outside.seconds + relaxed.max(axis=1)
        """By the choice for the outside: no plan with it adds less."""
        self.bounds[self.least_before[-1] > self.end - self.outside.held] = np.inf

    def least(self) -> Assignment:
        """The plan that is least over its caps, or farthest below them."""
        rooms = [self.caps[-1] - self.outside.on_top]
        for layer in range(self.num_layers - 1, -1, -1):
            rooms.append(self._room(layer, rooms[-1]).max(axis=0))
        number = int((rooms[-1] - self.outside.held).argmax())
        after = reversed(rooms[:-1])
        choices = [int(self._room(layer, room[[number]]).argmax()) for layer, room in enumerate(after)]
        seconds = sum(self.classes[of].seconds[one] for of, one in zip(self.class_of, choices, strict=True))
        return Assignment((*choices, number), float(seconds + self.outside.seconds[number]))

    def _room(self, layer: int, after: np.ndarray) -> np.ndarray:
        options = self.classes[self.class_of[layer]]
        return np.minimum((self.caps[layer] - options.on_top)[:, None], after) - options.held[:, None]

    def solve(
        self, outside: int, max_labels: int, num_choices: int, num_free: int, best_seconds: float
    ) -> Assignment | None:
        """The best plan found with one choice for the outside, if it is better than `best_seconds`.

        Args:
            outside: the choice for the outside.
            max_labels: most labels kept at a layer.
            num_choices: most choices of a layer: those that cost least above the best at the best price.
            num_free: layers that choose freely; the others are settled by the price.
            best_seconds: of a plan already known.
        """
        near = self._near_best(outside, num_choices)
        if self.num_layers > num_free:
            found = self._solve(outside, self._settled(outside, near, num_free), max_labels, best_seconds)
            if found is not None or np.isfinite(best_seconds):
                return found
            # No plan is known yet: caps of earlier layers stand in the way, so let all layers choose.
        return self._solve(outside, near, max_labels, best_seconds)

    def _solve(self, outside: int, picks: list[np.ndarray], max_labels: int, best_seconds: float) -> Assignment | None:
        start = float(self.outside.held[outside])
        near = np.unique(np.clip(self.best_price[outside] + np.array([-2, 0, 2]), 0, len(self.prices) - 1))
        prices, before = self.prices[near], self.before[:, near]
        room = np.array([self.caps[-1] - self.outside.on_top[outside]], dtype=np.float64)
        seconds = np.array([self.outside.seconds[outside]], dtype=np.float64)
        steps: list[tuple[np.ndarray | int, np.ndarray | None]] = []
        for layer in range(self.num_layers - 1, -1, -1):
            pick = picks[layer]
            options = self.classes[self.class_of[layer]]
            if len(pick) == 1:
                one = int(pick[0])
                room = np.minimum(room, self.caps[layer] - options.on_top[one]) - options.held[one]
                seconds = seconds + options.seconds[one]
                steps.append((one, None))
                if room[-1] < start + self.least_before[layer]:
                    return None
                continue
            options = options.rows(pick)
            num = len(room)
            rooms = np.minimum(room, (self.caps[layer] - options.on_top)[:, None]) - options.held[:, None]
            rooms, totals = rooms.ravel(), (seconds + options.seconds[:, None]).ravel()
            # What the layers before must still add, at least.
            bounds = before[layer][0] - prices[0] * (rooms - start)
            for number in range(1, len(prices)):
                np.maximum(bounds, before[layer][number] - prices[number] * (rooms - start), out=bounds)
            bounds += totals
            index = np.flatnonzero((rooms >= start + self.least_before[layer]) & (bounds < best_seconds - _TOLERANCE))
            if not len(index):
                return None
            index = index[np.lexsort((-rooms[index], totals[index]))]
            ahead = np.maximum.accumulate(rooms[index])
            index = index[np.concatenate([[True], ahead[1:] > ahead[:-1]])]
            if len(index) > max_labels:
                most = index[-1]
                kept = np.sort(np.argpartition(bounds[index], max_labels)[:max_labels])
                index = index[kept] if kept[-1] == len(index) - 1 else np.append(index[kept], most)
            room, seconds = rooms[index], totals[index]
            steps.append((pick[index // num], index % num))
        enough = np.flatnonzero(room >= start)
        if not len(enough) or seconds[enough].min() >= best_seconds - _TOLERANCE:
            return None
        final = at = int(enough[seconds[enough].argmin()])
        choices = []
        for choice, parent in reversed(steps):
            if isinstance(choice, int):
                choices.append(choice)
            else:
                choices.append(int(choice[at]))
                assert parent is not None
                at = int(parent[at])
        return Assignment((*choices, outside), float(seconds[final]))

    def _near_best(self, outside: int, num_choices: int) -> list[np.ndarray]:
        """For each layer the choices that cost least above the best at the best price, and the minimum-memory one."""
        price = self.prices[self.best_price[outside]]
        picks = {}
        for number in set(self.class_of):
            options = self.classes[number]
            order = steps_down(options.held, options.seconds)
            cost = options.seconds[order] + price * options.held[order]
            order = order[cost.argsort(kind="stable")]
            least = int((options.held + options.on_top).argmin())
            picks[number] = np.unique([*order[:num_choices], least])
        near = [picks[number] for number in self.class_of]
        # In the last layers, where the stack is high, what comes on top may count for more than the price says.
        for layer in range(max(self.num_layers - _NUM_OPEN, 0), self.num_layers):
            near[layer] = np.arange(len(self.classes[self.class_of[layer]].held))
        return near

    def _settled(self, outside: int, near: list[np.ndarray], num_free: int) -> list[np.ndarray]:
        """The same for the last layers, with the others settled at the best price."""
        price = self.prices[self.best_price[outside]]
        picks = list(near)
        fewest, most = {}, {}
        for number in set(self.class_of):
            options = self.classes[number]
            cost = options.seconds + price * options.held
            ties = np.flatnonzero(cost <= cost.min() + max(1e-9 * abs(cost.min()), _TOLERANCE))
            fewest[number] = int(ties[options.held[ties].argmin()])
            most[number] = int(ties[options.held[ties].argmax()])
        held = [(self.classes[of].held[fewest[of]], self.classes[of].held[most[of]]) for of in self.class_of]
        low, high = np.array(held).T
        spare = self.end[outside] - self.outside.held[outside] - low.sum()
        share = float(np.clip(spare / max((high - low).sum(), 1.0), 0, 1))
        # The same share of the layers keeps more; the free ones make up for what does not come out even.
        credit = 0.0
        for layer, number in enumerate(self.class_of[: self.num_layers - num_free]):
            credit += share
            if credit >= 1 and fewest[number] != most[number]:
                picks[layer] = np.array([most[number]])
                credit -= 1
            else:
                picks[layer] = np.array([fewest[number]])
        return picks
