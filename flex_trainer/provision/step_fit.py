"""What a micro-batch takes without its mitigations, and what those of which only the whole step tells add to it.

A robust regression over the last 64 micro-batches, in shares of a shape's work w (its forward time in units of one
moment, so that long and short micro-batches count alike):

    seconds / w  =  a + a_shape + sum over mitigations of theta x (model's seconds / w)

- a_shape is what work does not say of a shape. It is a random effect: the more micro-batches of a shape there are, the
  more of what sets it apart from others is left to it. So long micro-batches, which are slower per token and offload
  more, do not make offload look expensive.
- Huber's weights: a residual counts in proportion up to 1.345 deviations (from the median absolute one), beyond that
  as much as one there. Newer samples count more (0.97 per micro-batch).
- The priors of theta count as two samples in which the mitigation adds a tenth. So where all micro-batches run under
  one plan, which tells nothing of what it costs, they stand.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from flex_trainer.cost.shape import BatchShape

_MOST_SAMPLES = 64
_MOST_SHAPES = 512
_OF_SHAPE = 5
"""Samples of one shape that its own time is the median of."""
_FORGETTING = 0.97
_SHAPE_SPREAD = 4.0
"""Variance of a_shape over that of a residual."""
_PRIOR_SAMPLES, _PRIOR_SHARE = 2.0, 0.1
_LOWEST, _HIGHEST = 0.02, 8.0
_HUBER = 1.345
_GROSS = 0.5
_LEAST_DEVIATION = 0.005
_NUM_ITERATIONS = 4
_EVERY = ((16, 1), (64, 4), (math.inf, 16))
"""Up to so many micro-batches, theta is worked out anew with every one, with every fourth, ..."""


@dataclass(frozen=True)
class _Sample:
    shape: BatchShape
    work: float
    seconds: float
    features: np.ndarray


class StepFit:
    """Learns from micro-batches; see above.

    Args:
        prior: theta of each mitigation before anything was seen.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = np.array(prior, dtype=np.float64)
        self.theta = self._prior.copy()
        self._samples: deque[_Sample] = deque(maxlen=_MOST_SAMPLES)
        self._plain: deque[float] = deque(maxlen=_MOST_SAMPLES)
        """What the samples took without mitigations, as shares of their work."""
        self._by_shape: dict[BatchShape, deque[_Sample]] = {}
        self._num_seen = 0

    def add(self, shape: BatchShape, work: float, seconds: float, features: Sequence[float]) -> None:
        """One micro-batch: its time, and the seconds that the model says of each mitigation."""
        sample = _Sample(shape, work, seconds, np.array(features, dtype=np.float64))
        self._num_seen += 1
        if self._num_seen == 2:
            # The first micro-batch of a run loads libraries and touches memory for the first time.
            self._samples.clear()
            self._plain.clear()
            self._by_shape.clear()
        self._samples.append(sample)
        if shape not in self._by_shape and len(self._by_shape) >= _MOST_SHAPES:
            self._by_shape.pop(next(iter(self._by_shape)))
        self._by_shape.setdefault(shape, deque(maxlen=_OF_SHAPE)).append(sample)
        every = next(every for until, every in _EVERY if self._num_seen <= until)
        theta = self._fitted() if self._num_seen % every == 0 else self.theta
        if (theta == self.theta).all():
            self._plain.append(self._plain_share(sample))
        else:
            self.theta = theta
            self._plain.clear()
            self._plain.extend(map(self._plain_share, self._samples))

    def plain_seconds(self, shape: BatchShape, work: float) -> float | None:
        """Time of a micro-batch of this shape without those mitigations; None before any was seen."""
        if not self._samples:
            return None
        anywhere = median(self._plain)
        own = self._by_shape.get(shape, ())
        if not own:
            return anywhere * work
        share = median(map(self._plain_share, own))
        # A single sample of a shape may have been disturbed; several of them are the better witness.
        return (len(own) * share + 0.5 * anywhere) / (len(own) + 0.5) * work

    def _plain_share(self, sample: _Sample) -> float:
        return (sample.seconds - float(self.theta @ sample.features)) / sample.work

    def _fitted(self) -> np.ndarray:
        features = np.array([sample.features / sample.work for sample in self._samples])
        used = features.any(axis=0)
        theta = self._prior.copy()
        if not used.any() or len(self._samples) < 3:
            return theta
        shares = np.array([sample.seconds / sample.work for sample in self._samples])
        groups: dict[BatchShape, list[int]] = {}
        for index, sample in enumerate(self._samples):
            groups.setdefault(sample.shape, []).append(index)
        table = np.column_stack([shares, np.ones(len(shares)), features[:, used]])
        typical = float(np.median(shares))
        off = shares.copy()
        for members in groups.values():
            off[members] -= np.median(shares[members])
        scale = _GROSS * typical  # what a plan may add is no disturbance
        recent = _FORGETTING ** np.arange(len(shares) - 1, -1, -1)
        prior = self._prior[used]
        ridge = np.diag([0.0, *[_PRIOR_SAMPLES * _PRIOR_SHARE**2] * len(prior)])
        found = np.zeros(1 + len(prior))
        for _ in range(_NUM_ITERATIONS):
            huber = np.minimum(1.0, scale / np.maximum(np.abs(off), 1e-12))
            left = table.copy()
            for members in groups.values():  # quasi-demeaning: the random effect in closed form
                weights = huber[members]
                part = 1 - 1 / np.sqrt(1 + _SHAPE_SPREAD * weights.sum())
                left[members] -= part * (weights @ table[members]) / weights.sum()
            weighted = left[:, 1:] * (recent * huber)[:, None]
            found = np.linalg.solve(
                weighted.T @ left[:, 1:] + ridge, weighted.T @ left[:, 0] + ridge @ np.array([0.0, *prior])
            )
            off = left[:, 0] - left[:, 1:] @ found
            scale = _HUBER * max(1.4826 * float(np.median(np.abs(off))), _LEAST_DEVIATION * typical)
        theta[used] = np.clip(found[1:], _LOWEST, _HIGHEST)
        return theta
