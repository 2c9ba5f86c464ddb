"""Budget and plan of each micro-batch: profile what is unknown, plan what is known, refuse what cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError
from flex_trainer.planner.plan import Plan
from flex_trainer.provision.correction import Correction
from flex_trainer.provision.device_books import MemoryLimitError
from flex_trainer.provision.part import ModelPart
from flex_trainer.provision.rates import LearntRates
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.runtime_steps import without_forecast


class Session:
    """A tiny model under a runtime with a fake meter."""

    def __init__(self, config: FlexConfig, family: str = "mixtral") -> None:
        self.model = tiny_model(family)
        self.runtime = FlexRuntime(config)
        with_fake_meter(self.runtime)
        self.runtime.attach(self.model)

    @property
    def part(self) -> ModelPart:
        return self.runtime.part()

    def step(self, length: int = 64, batch_size: int = 2, **options: Any) -> Any:
        loss = self.model(**tiny_batch(self.model, batch_size, length, **options)).loss
        with self.runtime.backward():
            loss.backward()
        self.model.zero_grad(set_to_none=False)
        return self.runtime.records[-1]


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Any:
    torch.set_num_threads(1)
    sessions: list[Session] = []

    def make(config: FlexConfig, family: str = "mixtral") -> Session:
        sessions.append(Session(config, family))
        return sessions[-1]

    yield make
    for one in sessions:
        one.runtime.detach()


AMPLE = FlexConfig(BASE_BYTES + 50_000_000)


def test_unknown_shapes_and_kinds_are_profiled_where_they_cannot_be_traced(session: Any) -> None:
    run = session(AMPLE)
    without_forecast(run.runtime)
    kinds = [
        run.step(64),  # never seen
        run.step(64),
        run.step(40),  # sizes not certain yet: perhaps something happened to divide
        run.step(90),  # now they are
        run.step(40, padding=True),  # another kind: other operators
        run.step(40, padding=True),
        run.step(40, batch_size=1),  # as well
    ]
    assert [record.is_profile for record in kinds] == [True, False, True, False, True, False, True]


def test_budget_is_what_the_limit_leaves_above_the_baseline_and_transients(session: Any) -> None:
    run = session(FlexConfig(BASE_BYTES + 1_600_000, transient_reserve=100_000))
    run.step()
    for record in (run.step(), run.step()):
        left_bytes = 1_600_000 - 100_000
        assert 0 < record.predicted_bytes <= record.budget_bytes < left_bytes
        assert record.is_spike


def test_reserve_leaves_that_much_free(session: Any) -> None:
    budgets = []
    for reserve in (0, 200_000):
        run = session(FlexConfig(BASE_BYTES + 10_000_000, transient_reserve=reserve))
        run.step()
        budgets.append(run.step().budget_bytes)
    assert budgets[0] - budgets[1] == 200_000


def test_plans_are_cached_by_shape_and_budget(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from flex_trainer.planner.mitigation import MitigationPlanner

    run = session(AMPLE)
    for length in (64, 40, 90):
        run.step(length)
    calls: list[int] = []
    original = MitigationPlanner.plan

    def counted(self: MitigationPlanner, available_bytes: int, *args: Any, **kwargs: Any) -> Plan:
        calls.append(available_bytes)
        return original(self, available_bytes, *args, **kwargs)

    monkeypatch.setattr(MitigationPlanner, "plan", counted)
    for length in (64, 40, 90):
        run.step(length)
    settled = len(calls)
    for length in (64, 40, 90, 40, 64):
        run.step(length)
    assert settled <= 3
    assert len(calls) == settled


def test_better_plans_take_over_once_they_pay(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LearntRates, "observe", lambda *_: None)  # other rates would have plans made anew as well
    run = session(FlexConfig(BASE_BYTES + 1_600_000))
    run.step()
    before = run.step()
    assert before.is_spike
    effort = run.part.plans._method_choice
    assert effort.method == "bandwidth"
    effort.note_run(1000.0)
    made = run.part.plans.num_made
    assert run.step().actual_bytes <= 1_600_000
    assert run.part.plans.num_made == made + 1  # the same shape and budget, planned anew
    run.step()
    assert run.part.plans.num_made == made + 1


def test_too_low_for_a_longer_batch_names_it(session: Any) -> None:
    run = session(FlexConfig(BASE_BYTES + 1_000_000, ("recompute",)))
    for length in (24, 40):
        run.step(length)
    with pytest.raises(
        MemoryLimitError, match=r"memory_limit=2000000 .* is too low for a micro-batch of 2 x 250 tokens.*"
    ):
        run.step(250)
    # The run is not spoilt by it.
    assert run.step(40).peak_bytes <= 2_000_000


def test_watching_alone_never_refuses_what_has_run(session: Any) -> None:
    run = session(FlexConfig(BASE_BYTES + 1_000_000, strategies=()))
    without_forecast(run.runtime)
    records = [run.step(64) for _ in range(3)]
    assert [record.is_profile for record in records] == [True, False, False]
    for record in records:
        assert record.is_over_limit and record.actual_bytes == record.demand_bytes


def test_watching_alone_never_refuses_to_start(session: Any) -> None:
    run = session(FlexConfig(BASE_BYTES // 2, strategies=()))
    assert all(run.step(64).is_over_limit for _ in range(2))


def test_too_low_for_everything_is_said_at_once_where_sizes_can_be_traced(session: Any) -> None:
    run = session(FlexConfig(BASE_BYTES + 100_000, ("recompute",)))
    with pytest.raises(MemoryLimitError, match=r"memory_limit=1100000 .* is too low for a micro-batch of 2 x 64"):
        run.step(64)
    assert run.runtime.records == [] and run.runtime.in_flight == []


def test_too_low_for_everything_is_said_at_the_second_micro_batch(session: Any) -> None:
    """The first one, of unknown sizes, has survived: its backward is not made to fail."""
    run = session(FlexConfig(BASE_BYTES + 100_000, ("recompute",)))
    without_forecast(run.runtime)
    assert run.step(64).is_over_limit
    with pytest.raises(
        MemoryLimitError, match=r"memory_limit=1100000 .* is too low for a micro-batch of 2 x 64 tokens"
    ):
        run.step(64)
    assert len(run.runtime.records) == 1 and run.runtime.in_flight == []


def test_a_seed_profile_that_could_not_be_written_is_refused_at_once(session: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "profile.json"
    with pytest.raises(UserError, match=r"^the seed profile cannot be written to '.*profile.json': .*; choose a path"):
        session(FlexConfig(BASE_BYTES + 10_000_000, seed_profile=str(path)))


def test_offload_that_failed_is_planned_no_more(session: Any) -> None:
    run = session(FlexConfig(BASE_BYTES + 2_000_000))
    run.step()
    assert [strategy.value for strategy in run.part.plans.strategies] == ["recompute", "offload"]
    run.runtime.books.offloading._store.failure = "the disk is full"
    assert [strategy.value for strategy in run.part.plans.strategies] == ["recompute"]
    record = run.step()
    assert record.freed_bytes["offload"] == 0 and not record.is_profile


def plan(peak_bytes: int, transient_bytes: int) -> Plan:
    return Plan(peak_bytes=peak_bytes, transient_bytes=transient_bytes)


def test_correction_learns_how_large_transients_are() -> None:
    correction = Correction()
    first = correction.factor
    assert first > 1  # careful before anything is known
    modelled = 1000
    on_top = int(first * modelled)
    correction.observe(plan(10_000 + on_top, on_top), 10_000 + 2 * modelled, is_exact=True)
    assert correction.factor == pytest.approx(2.0, abs=0.03)
    assert correction.factor >= 2.0 - 1e-9


def test_correction_keeps_the_worst_of_large_peaks_and_forgets() -> None:
    correction = Correction()

    def observe(held: int, ratio: float) -> None:
        on_top = int(1000 * correction.factor)
        correction.observe(plan(held + on_top, on_top), held + int(1000 * ratio), is_exact=True)

    observe(100_000, 3.0)
    observe(100_000, 1.0)
    assert correction.factor == pytest.approx(3.0, abs=0.05)
    observe(10, 7.0)  # a small batch: constant costs look large
    assert correction.factor == pytest.approx(3.0, abs=0.05)
    for _ in range(Correction._REMEMBERED):
        observe(100_000, 1.0)
    assert correction.factor == pytest.approx(1.0, abs=0.05)


def test_correction_is_bounded_and_survives_plans_without_transients() -> None:
    correction = Correction()
    correction.observe(plan(1000, 0), 5000, is_exact=True)
    assert correction.factor == Correction._FIRST_GUESS
    correction.observe(plan(2000, 1000), 10**9, is_exact=True)
    assert correction.factor <= Correction._HIGHEST
    low = Correction()
    low.observe(plan(2000, 1000), 0, is_exact=True)
    assert low.factor >= Correction._LOWEST


def test_a_peak_that_is_only_a_lower_bound_never_lowers_the_factor() -> None:
    def planned(factor: float) -> Plan:
        transient_bytes = int(1000 * factor)
        return Plan(peak_bytes=10_000 + transient_bytes, transient_bytes=transient_bytes)

    correction = Correction()
    first = correction.factor
    for _ in range(100):
        correction.observe(planned(correction.factor), 10_000, is_exact=False)
    assert correction.factor == first
    correction.observe(planned(correction.factor), 10_000 + 3000, is_exact=False)
    assert correction.factor == 3.0
