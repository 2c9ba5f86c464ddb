"""Segments of equal shape: planned as one class, with the mean of their measured times.

Layers of the same shape do the same work, so where their measured times differ that is noise. With each layer's own
times a plan would pick the layers that happened to be measured fast, and promise more than it gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from flex_trainer.cost.graph import Segment


@dataclass(frozen=True)
class Classes:
    """Which segments are equal, and one segment for each class."""

    of: tuple[int, ...]
    segments: tuple[Segment, ...]


def classes_of(segments: Sequence[Segment]) -> Classes:
    """Group segments that differ in nothing but names and times."""
    members: dict[object, list[Segment]] = {}
    keys = []
    for segment in segments:
        key = segment.shape_key
        members.setdefault(key, []).append(segment)
        keys.append(key)
    numbers = {key: number for number, key in enumerate(members)}
    return Classes(tuple(numbers[key] for key in keys), tuple(_mean(group) for group in members.values()))


def _mean(segments: list[Segment]) -> Segment:
    if len(segments) == 1:
        return segments[0]
    seconds = np.mean([[operator.seconds for operator in segment.operators] for segment in segments], axis=0)
    operators = zip(segments[0].operators, seconds.tolist(), strict=True)
    return replace(segments[0], operators=tuple(replace(operator, seconds=mean) for operator, mean in operators))
