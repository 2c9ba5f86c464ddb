"""In which order the stages of a pair run, and whether it pays to run pairs at all: decided alike on all ranks.

Stages are timed while they run. Now and then the ranks tell each other their times, and each plans the order from the
same numbers (planner/fusion_order.py): the slowest rank's compute, and of an exchange the time of the rank that came
last, since the others' has their waiting in it.
"""

from __future__ import annotations

import logging
import statistics
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from flex_trainer.planner.fusion import Order, Side, Stage, Window, sequential
from flex_trainer.planner.fusion_cache import OrderCache
from flex_trainer.planner.fusion_cost import simulate
from flex_trainer.ranks import this_rank
from flex_trainer.steps.agreement import agree
from flex_trainer.steps.progress import layers_reached
from flex_trainer.steps.stages import RanStage, StageKey, StageLog

logger = logging.getLogger(__name__)

_NUM_REMEMBERED = 5
"""Of the latest times of a stage the median is expected: single ones scatter, and the first ones warm up."""
_WAITED_SECONDS = 50e-6
"""Waiting less than that is none."""
_HAND_OVER_SECONDS = 100e-6
"""What the host needs to put one side aside and take up the other one."""
_LEAST_GAIN = 0.05
"""Share of the time that a pair must save to be worth it."""
_FIRST_CHOICE = 4
"""Micro-batches before the first choice: the first ones warm up."""
_MOST_BETWEEN = 64
"""Micro-batches between two choices at most: 4, 8, 16, 32, 64, 128, 192 ..."""


class _Times:
    """The latest ones of one stage, in seconds."""

    def __init__(self) -> None:
        self._compute: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._exchange: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    @property
    def compute(self) -> float:
        return statistics.median(self._compute)

    @property
    def exchange(self) -> float:
        return statistics.median(self._exchange) if self._exchange else 0.0

    def add(self, stage: RanStage, exchange: float) -> None:
        """It has run once more. `exchange`: seconds, without the time in which it queued."""
        self._compute.append(stage.seconds)
        # Of an exchange that was there before it was waited for, only a callback tells how long it took.
        is_known = bool(stage.arrivals) or stage.exposed_seconds > _WAITED_SECONDS
        if stage.has_works and (is_known or not self._exchange):
            self._exchange.append(exchange)


class OrderChoice:
    """Times of stages, and the order that follows from them.

    Args:
        fuse: as in `FlexConfig`.
        device: where the ranks' collectives work.
    """

    def __init__(self, fuse: str | bool, device: torch.device) -> None:
        self.is_on = fuse is True
        """Whether pairs are run."""
        self.order: Order = ()
        """Of the next pair; empty: sides alternate."""
        self.window: Window | None = None
        """What the order was planned for."""
        self.pair_seconds = 0.0
        """Predicted time of the next pair; 0 where no order was planned yet."""
        self.sequential_seconds = 0.0
        """The same, one after the other."""
        self.seconds = 0.0
        """Spent on choices so far, talking to the other ranks included."""
        self._is_auto = fuse == "auto"
        self._device = device
        self._orders = OrderCache(step_bytes=1)
        self._fixed: Order | None = None
        self._times: defaultdict[StageKey, _Times] = defaultdict(_Times)
        self._keys: dict[Side, tuple[StageKey, ...]] = {}
        self._keys_of_order: dict[Side, tuple[StageKey, ...]] = {}
        self._num_seen = 0
        self._next_choice = _FIRST_CHOICE if self._is_auto else 1

    @property
    def listens(self) -> bool:
        """Whether the exchanges of the next micro-batch are to be timed to their end: a choice is near."""
        return self._next_choice - self._num_seen <= 2

    def exchange_seconds(self, key: StageKey) -> float:
        """What the exchange of a stage is known to take; 0 where it is not."""
        return self._times[key].exchange if key in self._times else 0.0

    def reached(self, num_layers: int) -> tuple[int, ...]:
        """See `layers_reached`: of the next pair, as far as it is known."""
        keys = self._keys_of_order
        return layers_reached(self.order, keys.get(Side.FORWARD, ()), keys.get(Side.BACKWARD, ()), num_layers)

    def fix(self, order: Order) -> None:
        """Run pairs in this order, and plan no other; where it ends, sides alternate."""
        self._fixed = order
        self.order, self.is_on, self._is_auto = order, True, False

    def learn(self, log: StageLog) -> None:
        """Stages have run."""
        if not log.listens:
            return
        log.read()
        exchanges = log.own_exchange_seconds()
        for side in (Side.FORWARD, Side.BACKWARD):
            stages = log.of(side)
            self._keys[side] = tuple(stage.key for stage in stages)
            for stage in stages:
                self._times[stage.key].add(stage, exchanges[stage.key])

    def choose(self) -> None:
        """A micro-batch has ended that another one may run beside. All ranks call this alike."""
        self._num_seen += 1
        if self._num_seen < self._next_choice:
            return
        self._next_choice += min(max(self._num_seen, 1), _MOST_BETWEEN)
        started = time.perf_counter()
        self._choose()
        self.seconds += time.perf_counter() - started

    def _choose(self) -> None:
        keys = [*self._keys.get(Side.FORWARD, ()), *self._keys.get(Side.BACKWARD, ())]
        signature = zlib.crc32(repr(keys).encode())
        if len({tuple(row) for row in agree([len(keys), signature], self._device)}) > 1 or not keys:
            return  # the ranks have run other stages, such as a recomputation; next time
        mine = [
            round(seconds * 1e6) for key in keys for seconds in (self._times[key].compute, self._times[key].exchange)
        ]
        everyones = agree(mine, self._device)
        window = self._window([max(column) for column in zip(*everyones, strict=True)], everyones)
        self._decide(window)

    def _window(self, slowest: Sequence[int], everyones: Sequence[Sequence[int]]) -> Window:
        sides: dict[Side, list[Stage]] = {Side.FORWARD: [], Side.BACKWARD: []}
        keys = [(side, key) for side in sides for key in self._keys[side]]
        for number, (side, key) in enumerate(keys):
            exchange = min(row[2 * number + 1] for row in everyones)
            sides[side].append(Stage(key.code, slowest[2 * number] * 1e-6, exchange * 1e-6))
        return Window(tuple(sides[Side.FORWARD]), tuple(sides[Side.BACKWARD]))

    def _decide(self, window: Window) -> None:
        self.window, self._keys_of_order = window, dict(self._keys)
        if self._fixed is not None:
            return
        structure = tuple((stage.name, stage.seconds, stage.exchange_seconds) for stage in _stages(window))
        planned = self._orders.find(structure, None, lambda: window)
        assert planned is not None, "without a limit any order fits"
        one_after_the_other = simulate(window, sequential(window)).seconds
        overhead = _HAND_OVER_SECONDS * _num_switches(planned.order)
        self.order, self.pair_seconds = planned.order, planned.cost.seconds + overhead
        self.sequential_seconds = one_after_the_other
        if not self._is_auto:
            return
        gain = 1 - self.pair_seconds / max(one_after_the_other, 1e-9)
        was_on, self.is_on = self.is_on, gain >= _LEAST_GAIN
        if this_rank() == 0 and (self.is_on != was_on or self._num_seen == _FIRST_CHOICE):
            logger.warning(
                "fuse=auto: forward and backward of neighbouring micro-batches run %s: %.0f ms together, %.0f ms one "
                "after the other, of which %.0f ms wait for other ranks.",
                "together from now on" if self.is_on else "one after the other",
                self.pair_seconds * 1e3,
                one_after_the_other * 1e3,
                sum(stage.exchange_seconds for stage in _stages(window)) * 1e3,
            )


def _stages(window: Window) -> tuple[Stage, ...]:
    return (*window.forward, *window.backward)


def _num_switches(order: Order) -> int:
    return sum(first is not second for first, second in zip(order, order[1:], strict=False))
