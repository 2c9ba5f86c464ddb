"""Sizes before the first run: what a trace must not leave behind, and how it is turned off."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flex_trainer.config import FlexConfig
from flex_trainer.runtime import FlexRuntime
from flex_trainer.symbolic.leftovers import TraceLeftBehindError
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter

KEPT: list[torch.Tensor] = []


def run(
    *,
    trace: bool | str,
    leaks: bool,
    looks_at_data: bool = False,
    autocast: bool = False,
    keep: Callable[[torch.Tensor], None] = KEPT.append,
) -> FlexRuntime:
    """Two steps of a model that may keep its hidden states in a list of this file, and may look at them."""
    model: Any = tiny_model("llama", num_hidden_layers=1)
    layer = model.model.layers[0].mlp
    if leaks:
        kind = type(layer)

        class Keeping(kind):
            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                keep(hidden_states.detach())
                if looks_at_data and float(hidden_states.detach().sum()) > 1e30:
                    hidden_states = hidden_states * 2
                return super().forward(hidden_states)

        layer.__class__ = Keeping
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 50_000_000, trace=trace))
    with_fake_meter(runtime)
    runtime.attach(model)
    try:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**tiny_batch(model, 2, 24)).loss
            with runtime.backward():
                loss.backward()
    finally:
        runtime.detach()
    return runtime


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    KEPT.clear()


@pytest.mark.usefixtures("all_collected")
@pytest.mark.parametrize("looks_at_data", [False, True], ids=["traced", "refused in the middle"])
def test_tensors_of_a_trace_are_taken_out_of_where_a_forward_put_them(
    looks_at_data: bool, caplog: pytest.LogCaptureFixture
) -> None:
    records = run(trace=True, leaks=True, looks_at_data=looks_at_data).records
    assert [record.is_profile for record in records] == [looks_at_data, False]
    assert KEPT and all(type(tensor) is torch.Tensor for tensor in KEPT)
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(messages) == 1
    if not looks_at_data:
        assert "1 of shapes (2, 24, " in messages[0] and "were taken out again. Set trace=false" in messages[0]


@pytest.mark.sweep
@pytest.mark.usefixtures("all_collected")
def test_tensors_of_a_trace_in_other_containers_are_taken_out() -> None:
    places: list[Any] = [deque(), {}, {0: None}, set()]

    def keep(hidden_states: torch.Tensor) -> None:
        places[0].append((hidden_states, [1]))
        places[1].setdefault("all", []).append(hidden_states)
        places[2][len(places[2])] = hidden_states
        places[3].add(hidden_states)

    run(trace=True, leaks=True, keep=keep)
    assert [len(places[0]), len(places[1]["all"]), len(places[2]), len(places[3])] == [2, 2, 3, 2]
    assert all(type(tensor) is torch.Tensor for tensor in places[1]["all"])


class Last:
    hidden_states: torch.Tensor | None = None


@pytest.mark.usefixtures("all_collected")
def test_tensors_of_a_trace_under_a_name_are_an_error_that_says_what_to_do() -> None:
    """What the name had before is not known."""
    with pytest.raises(TraceLeftBehindError, match=r"keeps tensors outside of its module.* of shapes \(2, 24, .*trace"):
        run(trace=True, leaks=True, keep=lambda hidden_states: setattr(Last, "hidden_states", hidden_states))
    Last.hidden_states = None


def test_code_of_ones_own_is_not_traced_unasked(caplog: pytest.LogCaptureFixture) -> None:
    records = run(trace="auto", leaks=True).records
    assert [record.is_profile for record in records] == [True, False]
    assert all(type(tensor) is torch.Tensor for tensor in KEPT)
    messages = [record.message for record in caplog.records if "learnt from real" in record.message]
    assert len(messages) == 1
    assert "module 'model.layers.0.mlp' (Keeping): forward is defined by Keeping of tests.provision" in messages[0]


def test_copies_of_weights_that_an_outer_autocast_keeps_are_no_such_thing() -> None:
    assert [record.is_profile for record in run(trace=True, leaks=False, autocast=True).records] == [False, False]


def test_what_hangs_on_the_copy_itself_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = tiny_model("llama", num_hidden_layers=1)
    layer = model.model.layers[0].mlp

    class Caching(type(layer)):
        @functools.lru_cache  # noqa: B019 - keeps every module it was asked for, as users write it
        def scale(self, size: int) -> torch.Tensor:
            return torch.ones(size)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states * self.scale(hidden_states.shape[-1]))

    layer.__class__ = Caching
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 50_000_000, trace=True))
    with_fake_meter(runtime)
    runtime.attach(model)
    model(**tiny_batch(model, 2, 24)).loss.backward()
    runtime.detach()
    assert "left some of them behind" in caplog.text
    Caching.scale.cache_clear()


def test_without_traces_such_a_model_trains() -> None:
    records = run(trace=False, leaks=True).records
    assert [record.is_profile for record in records] == [True, False]
    assert KEPT and all(type(tensor) is torch.Tensor for tensor in KEPT)


def test_a_model_that_keeps_to_itself_is_planned_from_its_first_micro_batch() -> None:
    assert [record.is_profile for record in run(trace=True, leaks=False).records] == [False, False]


def test_what_was_traced_is_what_runs() -> None:
    """A copy of a managed model must not have the manager's wrappers: the run would have another structure, and all
    that only a trace knows would be lost after the first micro-batch."""
    model = tiny_model("mixtral")
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 500_000_000))
    with_fake_meter(runtime)
    runtime.attach(model)
    for _ in range(2):
        with runtime.backward():
            model(**tiny_batch(model, 2, 24)).loss.backward()
    [[structure]] = runtime.part().profile._structures.values()
    assert structure.is_traced
    runtime.detach()
