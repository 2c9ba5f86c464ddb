"""What a mitigation adds to a step, learnt from what happens.

Each kind of mitigation has a `LearntCost`: a straight line of seconds over a count (values moved, regions recomputed)
and an amount (bytes moved, forward seconds recomputed). It starts from a probe of the idle machine, and each
micro-batch that uses the mitigation is one observation.

How it is smoothed: least squares with exponential forgetting. In units of what the probe says, an observation is

    measured seconds / probed seconds  =  u x (share of the count)  +  v x (share of the amount)

- An observation that was n uses ago counts 0.85^n. The first one counts only until there is a second: it touches memory
  for the first time. The prior (u = v = `start`) counts as a tenth of an observation for ever.
- One that is more than 1.5 times off what is known by then counts as 1.5 times off, unless the one before was as far
  off: a disturbance changes little, and a change is believed when it is seen twice.
- u and v are bounded (`_LEAST_FACTOR`, `_MOST_FACTOR`).
- Of recompute, v is known to be near 1 (the same kernels run again), while u, Python's time, is not: the prior of v is
  stronger and its bounds are narrower.

How it is explored: while a mitigation is not used, what was learnt fades towards the probe, so that it is tried again
where it may pay. The first half-life is 32 micro-batches; each try that finds it as bad as before doubles it, so over n
micro-batches there are about log2(n / 32) tries, of two micro-batches or so each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from flex_trainer.cost.roofline import Rates, Roofline
from flex_trainer.planner.plan import Plan
from flex_trainer.strategy import Strategy

MITIGATIONS = (Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE)

_FORGETTING = 0.85
_PRIOR_WEIGHT = 0.1
_RECOMPUTE_PRIOR_WEIGHTS = 0.02, 0.5
_MOST_OFF = 1.5
_LEAST_FACTOR, _MOST_FACTOR = 1 / 50, 1000.0
_MOST_RECOMPUTE_FACTORS = 100.0, 4.0
_HALF_LIFE = 32.0
_LONGEST_HALF_LIFE = 4096.0
_CONFIRMED = 1.15
"""A try confirms that a mitigation is costly where it costs more than this times what the faded rate said."""
_FEW = 3
"""Observations from which on one may be called off."""

_CHANGES = ((16, 1.25), (4, 1.5), (2, 2.0))
"""Plans made at other rates are made anew, which takes time: so many micro-batches after the last change, a change by
such a factor matters."""
_MOST_PATIENCE = 8
"""After each change it takes twice as many micro-batches until the next one, up to so many times: rates that go up and
down do not have plans made anew every few micro-batches."""
_SUDDEN_CHANGE = 2, 4.0
"""So large a change is not waited for any longer."""
_OVERHEAD_CHANGE = 4.0
"""Of recompute, by how much more its overhead has to change than its slope."""


class LearntCost:
    """Seconds of one mitigation.

    Args:
        overhead_seconds, seconds_per_unit: what the probe says of one more, and of one unit of the amount more.
        start: what the probe is multiplied by before anything was seen. Over 1: the machine was idle when it ran.
        prior_weights: of u and v, in observations.
        most_factors: bounds of u and v, and of what they are parts of.
    """

    def __init__(
        self,
        overhead_seconds: float,
        seconds_per_unit: float,
        start: float = 1.0,
        prior_weights: tuple[float, float] = (_PRIOR_WEIGHT, _PRIOR_WEIGHT),
        most_factors: tuple[float, float] = (_MOST_FACTOR, _MOST_FACTOR),
    ) -> None:
        # Plain numbers: this is worked out several times for every micro-batch, where arrays of two are slow.
        self._probe = overhead_seconds, seconds_per_unit
        self._prior = prior_weights
        self._most = most_factors
        self._start = start
        self._mix = 0.5, 0.5
        self._squares = 0.0, 0.0, 0.0  # of shares: count x count, count x amount, amount x amount
        self._products = 0.0, 0.0
        self._num_seen = 0
        self._last_off = 1.0
        self._num_unused = 0
        self._half_life = _HALF_LIFE

    @property
    def overhead_seconds(self) -> float:
        return self._now()[0] * self._probe[0]

    @property
    def seconds_per_unit(self) -> float:
        return self._now()[1] * self._probe[1]

    @property
    def factor(self) -> float:
        """What it costs now over what the probe says, at the mix of count and amount last seen."""
        return _dot(self._now(), self._mix)

    @property
    def steepness(self) -> float:
        """u over v."""
        u, v = self._now()
        return u / v

    def observe(self, count: float, amount: float, seconds: float) -> None:
        """A micro-batch used it: `count` times, on `amount` in all, and that added `seconds`."""
        by_count, by_amount = self._probe[0] * count, self._probe[1] * amount
        probed = by_count + by_amount
        if probed <= 0:
            return
        shares = by_count / probed, by_amount / probed
        measured = max(seconds, 0.0) / probed
        if self._num_unused:
            self._end_break(measured, shares)
        if self._num_seen == 1:
            self._forget(0.0)
        known = _dot(self._fitted(), shares)
        if self._num_seen >= _FEW:
            lowest, highest = min(1 / _MOST_OFF, self._last_off), max(_MOST_OFF, self._last_off)
            self._last_off = measured / known
            measured = known * min(max(measured / known, lowest), highest)
        self._forget(_FORGETTING)
        one, other = shares
        new = one * one, one * other, other * other
        self._squares = self._squares[0] + new[0], self._squares[1] + new[1], self._squares[2] + new[2]
        self._products = self._products[0] + measured * one, self._products[1] + measured * other
        self._mix = shares
        self._num_seen += 1

    def skip(self) -> None:
        """A micro-batch was mitigated without it."""
        self._num_unused += 1

    def _forget(self, kept_share: float) -> None:
        first, mixed, last = self._squares
        self._squares = kept_share * first, kept_share * mixed, kept_share * last
        self._products = kept_share * self._products[0], kept_share * self._products[1]

    def _end_break(self, measured: float, shares: tuple[float, float]) -> None:
        is_confirmed = measured > _CONFIRMED * _dot(self._now(), shares)
        faded = self._faded_share()
        # What was learnt long ago counts for less now: the machine may have become another one.
        self._forget(1 - faded)
        self._half_life = min(2 * self._half_life, _LONGEST_HALF_LIFE) if is_confirmed else _HALF_LIFE
        self._num_unused = 0
        if faded > 0.5:
            self._num_seen = 0

    def _faded_share(self) -> float:
        return 1 - 0.5 ** (self._num_unused / self._half_life)

    def _fitted(self) -> tuple[float, float]:
        """u and v: the solution of two equations."""
        first, mixed, last = self._squares[0] + self._prior[0], self._squares[1], self._squares[2] + self._prior[1]
        one = self._products[0] + self._prior[0] * self._start
        other = self._products[1] + self._prior[1] * self._start
        determinant = first * last - mixed * mixed
        return (
            _bounded((last * one - mixed * other) / determinant, self._most[0]),
            _bounded((first * other - mixed * one) / determinant, self._most[1]),
        )

    def _now(self) -> tuple[float, float]:
        u, v = self._fitted()
        if not self._num_unused:
            return u, v
        # Good news does not fade: what costs less than the probe said is used anyway.
        left = 1 - self._faded_share()
        return u**left if u > 1 else u, v**left if v > 1 else v


def _dot(one: tuple[float, float], other: tuple[float, float]) -> float:
    return one[0] * other[0] + one[1] * other[1]


def _bounded(factor: float, most: float) -> float:
    return min(max(factor, 1 / most, _LEAST_FACTOR), most)


@dataclass(frozen=True)
class Used:
    """What one micro-batch used of its mitigations, and what that added to it."""

    num_recomputed: int = 0
    recomputed_seconds: float = 0.0
    """Forward time of what was recomputed."""
    recompute_seconds: float = 0.0
    """What it added."""
    num_offloaded: int = 0
    offloaded_bytes: int = 0
    offload_seconds: float = 0.0
    """What it added."""
    probed_quantize_seconds: float = 0.0
    """What the probe says of its casts."""
    quantize_seconds: float = 0.0
    """What they added."""

    @property
    def is_any(self) -> bool:
        return self.num_recomputed + self.num_offloaded > 0 or self.probed_quantize_seconds > 0


class LearntRates:
    """The rates that plans are made with.

    Args:
        probe: of the idle machine.
        strategies: those that may be used.
        offload_start: see `LearntCost`.
    """

    def __init__(self, probe: Rates, strategies: Iterable[Strategy] = MITIGATIONS, offload_start: float = 1.0) -> None:
        self.probe = probe
        self._is_allowed = [strategy in set(strategies) for strategy in MITIGATIONS]
        self._recompute = LearntCost(
            probe.recompute_overhead_seconds,
            probe.recompute_factor,
            prior_weights=_RECOMPUTE_PRIOR_WEIGHTS,
            most_factors=_MOST_RECOMPUTE_FACTORS,
        )
        self._offload = LearntCost(probe.offload.overhead_seconds, 1 / probe.offload.bytes_per_second, offload_start)
        self._quantize = LearntCost(0.0, 1.0)
        self._num_since_change = 0
        self._patience = 1
        self.rates = self._now()
        """As of the last change that mattered. Which plan is the best one depends on what mitigations cost over one
        another: where all get slower alike, as on a machine with other work, plans stay."""
        self._factors = self._all_factors()
        self._steepness = self._recompute.steepness

    def observe(self, used: Used) -> None:
        """Learn from one micro-batch that ran under a plan."""
        pairs = (
            (self._recompute, used.num_recomputed, used.recomputed_seconds, used.recompute_seconds),
            (self._offload, used.num_offloaded, float(used.offloaded_bytes), used.offload_seconds),
            (self._quantize, 0, used.probed_quantize_seconds, used.quantize_seconds),
        )
        for cost, count, amount, seconds in pairs:
            if count or amount:
                cost.observe(count, amount, seconds)
            elif used.is_any:
                cost.skip()
        self._num_since_change += 1
        factors = self._all_factors()
        triples = zip(factors, self._factors, self._is_allowed, strict=True)
        changes = [math.log(new / old) for new, old, is_allowed in triples if is_allowed]
        most = max(changes, default=0.0) - min(changes, default=0.0)
        if self._is_allowed[0]:
            within = abs(math.log(self._recompute.steepness / self._steepness))
            most = max(most, within - math.log(_OVERHEAD_CHANGE))
        changes_that_matter = [_SUDDEN_CHANGE, *((num * self._patience, change) for num, change in _CHANGES)]
        if any(self._num_since_change >= num and most > math.log(change) for num, change in changes_that_matter):
            self.rates, self._factors, self._num_since_change = self._now(), factors, 0
            self._patience = min(2 * self._patience, _MOST_PATIENCE)
            self._steepness = self._recompute.steepness

    def added_seconds(self, plan: Plan) -> float:
        """What a plan made at `rates` adds, at what is known by now."""
        recompute, offload, quantize = (new / old for new, old in zip(self._all_factors(), self._factors, strict=True))
        moves = offload if Strategy.OFFLOAD in plan.strategies.values() else quantize
        return recompute * plan.recompute_seconds + moves * (plan.added_seconds - plan.recompute_seconds)

    def _all_factors(self) -> tuple[float, ...]:
        return tuple(cost.factor for cost in (self._recompute, self._offload, self._quantize))

    def _now(self) -> Rates:
        quantize = self.probe.quantize
        factor = self._quantize.seconds_per_unit
        return replace(
            self.probe,
            offload=Roofline(self._offload.overhead_seconds, 1 / self._offload.seconds_per_unit),
            quantize=Roofline(quantize.overhead_seconds * factor, quantize.bytes_per_second / factor),
            recompute_overhead_seconds=self._recompute.overhead_seconds,
            recompute_factor=self._recompute.seconds_per_unit,
        )
