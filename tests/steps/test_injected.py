"""Allocations that fail at chosen points of forward, backward, recovery and offload: the run ends as if none had."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from flex_trainer import FlexConfig, FlexTrainerMixin
from flex_trainer.memory.failed_allocation import is_out_of_memory
from flex_trainer.provision.device_books import MemoryLimitError
from flex_trainer.testing.failures import ASKED_BYTES, PLACES, FailingAllocations
from flex_trainer.testing.fake_meter import FakeMeter
from tests.runtime_steps import with_steady_rates
from tests.tiers import sweep_over
from tests.trainer_runs import LIMIT_BYTES, assert_same_run, make

NUM_STEPS = 2


@pytest.fixture(autouse=True)
def small_in_flight(deterministic: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Copies on their way may hold 16 MiB or more, all of this model; make it a part of it, as it is elsewhere.
    monkeypatch.setattr("flex_trainer.config._LEAST_IN_FLIGHT_BYTES", 2**17)
    with_steady_rates(monkeypatch)  # with others come other plans, of which some have fewer points to fail at


class Counting(Trainer):
    """Counts in its loss, as TRL's trainers do, and draws random numbers there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_losses = 0
        self.metrics: dict[str, list[float]] = {"drawn": []}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_losses += 1
        self.metrics["drawn"].append(float(torch.rand(())) + random.random())
        inputs["labels"] = inputs.pop("labels")
        return super().compute_loss(model, inputs, *args, **kwargs)


class Armed(Counting):
    """Fails in a training step where it is told to."""

    failing: FailingAllocations | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.failing is None:
            return super().training_step(*args, **kwargs)
        with self.failing:
            return super().training_step(*args, **kwargs)


class FlexArmed(FlexTrainerMixin, Armed):
    pass


def config(where: str, directory: Path) -> FlexConfig:
    # The profile: so that runs after the first need not find out sizes again. The planner: one that does not look at
    # measured times, so that runs have the same points.
    options: dict[str, Any] = {"seed_profile": str(directory / "profile.json"), "planner": "largest_first"}
    return FlexConfig(LIMIT_BYTES, ("offload" if where == "offload" else "recompute",), **options)


def run(directory: Path, where: str, numbers: Collection[int] = (), **options: Any) -> FlexArmed:
    trainer = make(directory, config(where, directory), trainer_class=FlexArmed, max_steps=NUM_STEPS, **options)
    trainer.failing = FailingAllocations(trainer.flex, where, numbers)
    random.seed(0)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Counting:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    trainer = make(tmp_path_factory.mktemp("plain"), None, trainer_class=Counting, max_steps=NUM_STEPS)
    random.seed(0)
    trainer.train()
    return trainer


@pytest.mark.parametrize("where", sweep_over(PLACES, quick=["backward", "offload"]))
def test_a_run_with_failures_ends_as_one_without(
    tmp_path: Path, plain: Counting, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, where)  # what it learns changes the plans of the next ones
    undisturbed = run(tmp_path, where)
    assert undisturbed.failing is not None
    num_points = undisturbed.failing.num_seen
    assert num_points > 10 and not undisturbed.flex.retries
    assert any(sum(record.freed_bytes.values()) for record in undisturbed.flex.records)
    generator = random.Random(where)
    # What runs have learnt changes the plans of the next ones a little: not the very last points.
    points = [int(0.6 * num_points), generator.randrange(int(0.6 * num_points))]
    for point in points:
        caplog.clear()
        trainer = run(tmp_path, where, {point})
        assert_same_run(trainer, plain)
        assert trainer.failing is not None and trainer.failing.num_failed == 1
        (retry,) = trainer.flex.retries
        assert retry.attempt == 1 and retry.requested_bytes == ASKED_BYTES
        assert retry.phase == where or where == "offload"
        assert retry.margin_bytes > 0
        assert sum("This step is rolled back and retried" in message for message in caplog.messages) == 1
        # Nothing was counted twice, and no micro-batch is missing.
        assert [record.micro_batch for record in trainer.flex.records] == list(range(2 * NUM_STEPS))
        assert [record.step for record in trainer.flex.records] == [i // 2 for i in range(2 * NUM_STEPS)]
        assert trainer.num_losses == plain.num_losses == 2 * NUM_STEPS
        assert trainer.metrics == plain.metrics
        assert trainer.state.num_input_tokens_seen == plain.state.num_input_tokens_seen
        assert trainer.state.total_flos == plain.state.total_flos
        assert trainer.flex.summary().num_retries == 1


def test_both_retries_are_used(tmp_path: Path, plain: Counting) -> None:
    trainer = run(tmp_path, "recovery", {10, 11})
    assert_same_run(trainer, plain)
    assert [retry.attempt for retry in trainer.flex.retries] == [1, 2]
    assert trainer.metrics == plain.metrics


def test_the_last_failure_says_where_how_much_and_what_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMeter, "shortage", lambda self, wanted_bytes: f"full: {wanted_bytes} are too many")
    with pytest.raises(MemoryLimitError) as caught:
        run(tmp_path, "forward", range(300, 10**6))
    text = str(caught.value)
    assert text.startswith("an allocation of 97.66 KiB failed in forward of model.layers.")
    assert "even under the minimum-memory plan" in text
    assert "What it ran into is the " in text and "left), full: 100000 are too many; memory_limit=2450000" in text
    assert "smaller per-device batch" in text
    assert caught.value.__cause__ is not None and is_out_of_memory(caught.value.__cause__)
