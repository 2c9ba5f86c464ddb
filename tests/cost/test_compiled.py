"""The vectorized costs equal the scalar reference, on random graphs, random sizes and random choices."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.cost.compiled import CODES, CompiledSegment, structure_of
from flex_trainer.cost.graph import ActivationGraph, Operator, Segment, Value
from flex_trainer.cost.roofline import Rates
from flex_trainer.strategy import Site
from flex_trainer.testing.cost_rules import evaluate
from tests.planner.graphs import graphs
from tests.tiers import examples

NUM_CHOICES = 40


def reshaped(segment: Segment, draw: random.Random) -> Segment:
    """The same structure with other sizes and times, some transients known, shared values taken."""
    return replace(
        segment,
        operators=tuple(
            replace(
                operator,
                seconds=draw.random() * 1e-3,
                input_bytes=draw.randrange(10**6),
                output_bytes=draw.randrange(10**6),
                forward_transient_bytes=draw.choice((None, draw.randrange(10**6))),
                backward_transient_bytes=draw.choice((None, draw.randrange(10**6))),
            )
            for operator in segment.operators
        ),
        values=tuple(
            replace(value, num_bytes=draw.randrange(1, 10**5), num_rows=draw.choice((0, 40, 4000)))
            for value in segment.values
        ),
    )


def assert_equals_the_reference(segment: Segment, draw: random.Random, rates: Rates) -> None:
    codes = np.array([[draw.randrange(4) for _ in segment.operators] for _ in range(NUM_CHOICES)], dtype=np.int64)
    codes = codes.reshape(NUM_CHOICES, len(segment.operators))
    compiled = CompiledSegment(segment, rates)
    costs, transients = compiled.evaluate(codes), compiled.transient_bytes(codes)
    for number, row in enumerate(codes):
        expected = evaluate(segment, {index: CODES[code] for index, code in enumerate(row)}, rates)
        found = costs.one(number)
        assert found.added_seconds == pytest.approx(expected.added_seconds, abs=1e-12)
        assert found.recompute_seconds == pytest.approx(expected.recompute_seconds, abs=1e-12)
        assert abs(transients[number] - expected.transient_bytes) <= 1  # rounded up from sums in another order
        same = {"added_seconds": 0.0, "recompute_seconds": 0.0, "transient_bytes": 0}
        assert replace(found, **same) == replace(expected, **same)


@examples(150)
@given(graph=graphs(), seed=st.integers(0, 2**32))
def test_equals_the_scalar_reference(graph: ActivationGraph, seed: int) -> None:
    draw = random.Random(seed)
    for segment in graph.segments:
        shared = tuple(
            replace(operator, shared_inputs=tuple(draw.sample(range(3), draw.randrange(3))))
            for operator in segment.operators
        )
        segment = replace(segment, operators=shared)
        # The second time, the structure and most patterns are known already.
        assert_equals_the_reference(segment, draw, Rates())
        rates = Rates(
            smallest_moved_bytes=20_000,
            recompute_factor=draw.choice((0.5, 1.0, 2.0)),
            transient_factor=draw.choice((0.75, 1.0, 1.5)),
        )
        assert_equals_the_reference(reshaped(segment, draw), draw, rates)


def test_structures_are_shared_by_shapes() -> None:
    draw = random.Random(0)
    made = Operator(Site("a", "norm", 0), -1, (), 1.0, 10, 10)
    segment = Segment(0, (made,), (Value(0, 1000, (0,)),))
    assert structure_of(segment) is structure_of(reshaped(segment, draw))
    other = replace(segment, values=(Value(0, 1000, (-1,)),))
    assert structure_of(segment) is not structure_of(other)
