"""Loads of layers, made few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.cost.load import Load, few_of

loads_by_layer = st.dictionaries(
    st.integers(0, 60), st.builds(Load, st.floats(0, 8), st.floats(0, 1)), min_size=1, max_size=60
)


@given(loads=loads_by_layer)
def test_few_loads_have_the_sum_of_many(loads: dict[int, Load]) -> None:
    few = few_of(loads)
    assert few.keys() == loads.keys()
    for what in ("pairs", "rows"):
        total = sum(getattr(load, what) for load in loads.values())
        assert sum(getattr(load, what) for load in few.values()) == pytest.approx(total)
    assert all(abs(few[layer].pairs - load.pairs) <= 0.25 + 1e-9 for layer, load in loads.items())
    assert max(load.pairs for load in few.values()) == max(load.pairs for load in loads.values())


def test_layers_that_are_nearly_alike_have_one_load() -> None:
    loads = {layer: Load(1 + layer / 100, 0.9) for layer in range(20)}
    few = few_of(loads)
    assert few[19] == loads[19]
    assert len(set(few.values())) == 3
    first = dict(list(loads.items())[:8])
    assert few_of(first) == first
