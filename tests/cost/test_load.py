"""Loads of layers, made few; sizes seen under a load, as they would be under an even one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.activations.trace import CallTrace, Trace, ValueTrace
from flex_trainer.cost.load import EVEN, Load, at_even_load, merged
from flex_trainer.strategy import Site

loads_by_layer = st.dictionaries(
    st.integers(0, 60), st.builds(Load, st.floats(0, 8), st.floats(0, 1)), min_size=1, max_size=60
)


@given(loads=loads_by_layer)
def test_few_loads_have_the_sum_of_many(loads: dict[int, Load]) -> None:
    few = merged(loads)
    assert few.keys() == loads.keys()
    for what in ("pairs", "rows"):
        total = sum(getattr(load, what) for load in loads.values())
        assert sum(getattr(load, what) for load in few.values()) == pytest.approx(total)
    for layer, load in loads.items():
        assert load.pairs / 1.2 <= few[layer].pairs <= load.pairs * 1.2
    assert max(load.pairs for load in few.values()) == max(load.pairs for load in loads.values())


def test_layers_that_are_nearly_alike_have_one_load() -> None:
    loads = {layer: Load(1 + layer / 100, 0.9) for layer in range(20)}
    few = merged(loads)
    assert few[19] == loads[19]
    assert len(set(few.values())) == 3
    first = dict(list(loads.items())[:8])
    assert merged(first) == first


FOLLOWED = {
    "norm": None,
    "router": None,
    "ep_combine": None,
    "ep_block": "rows",
    "ep_dispatch": "rows",
    "experts": "rows",
    "expert_unpermute": "rows",
    "expert_permute": "pairs",
    "expert_up": "pairs",
}
"""By the kind of an operator: what of a load its sizes follow."""


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    kinds = st.sampled_from(sorted(FOLLOWED))
    calls = [
        CallTrace(
            Site(f"{number}", draw(kinds), draw(st.integers(-1, 2))),
            parent=-1,
            seconds=draw(st.floats(0, 10)),
            output_bytes=draw(st.integers(0, 2**30)),
        )
        for number in range(draw(st.integers(1, 8)))
    ]
    owners = st.integers(-1, len(calls) - 1)
    values = draw(st.lists(st.builds(ValueTrace, owners, st.integers(0, 2**30)), max_size=8))
    return Trace(calls, values)


positive_loads = st.builds(Load, st.floats(0.125, 8), st.floats(0.125, 1))


@given(trace=traces(), loads=st.dictionaries(st.integers(0, 2), positive_loads))
def test_sizes_at_an_even_load_times_the_load_are_those_seen(trace: Trace, loads: dict[int, Load]) -> None:
    def factor(site: Site) -> float:
        load, followed = loads.get(site.layer, EVEN), FOLLOWED[site.kind]
        return 1.0 if followed is None else getattr(load, followed)

    even = at_even_load(trace, loads)
    assert even is not None
    for call, seen in zip(even.calls, trace.calls, strict=True):
        times = factor(seen.site)
        assert call.site == seen.site
        assert call.seconds * times == pytest.approx(seen.seconds)
        assert call.output_bytes * times == pytest.approx(seen.output_bytes, abs=times / 2 + 1e-3)
    for value, seen in zip(even.values, trace.values, strict=True):
        times = factor(trace.calls[seen.owner].site) if seen.owner >= 0 else 1.0
        assert value.owner == seen.owner
        assert value.num_bytes * times == pytest.approx(seen.num_bytes, abs=times / 2 + 1e-3)


def test_a_layer_that_nothing_came_to_says_nothing_of_sizes() -> None:
    trace = Trace([CallTrace(Site("up", "expert_up", 0), -1, output_bytes=8)])
    assert at_even_load(trace, {0: Load(0.0, 0.0), 1: EVEN}) is None
    assert at_even_load(trace, {}) is trace
