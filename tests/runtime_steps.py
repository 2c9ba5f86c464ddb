"""Steps of a tiny model under a runtime whose meter counts only the engine's bytes, for the tests of the runtime."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from flex_trainer.activations.trace import Trace
from flex_trainer.config import FlexConfig
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.structure import Structure
from flex_trainer.memory.offloading import OffloadService
from flex_trainer.provision.forecast import Forecast
from flex_trainer.provision.rates import LearntRates
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter

LIMIT_BYTES = BASE_BYTES + 1_450_000


_attached: list[FlexRuntime] = []


def attached(model: PreTrainedModel, config: FlexConfig | None = None) -> FlexRuntime:
    runtime = FlexRuntime(config or FlexConfig(LIMIT_BYTES))
    with_fake_meter(runtime)
    _attached.append(runtime)
    runtime.attach(model)
    return runtime


def without_forecast(runtime: FlexRuntime) -> None:
    """Let sizes be learnt from real micro-batches, as for a model that cannot be traced on shapes alone."""
    runtime.part().forecast.refusal = "switched off by the test"


def detach_all() -> None:
    """Give back what a test has attached, also one that failed."""
    while _attached:
        _attached.pop().detach()


def loss_of(model: PreTrainedModel, seed: int = 0, length: int = 64) -> torch.Tensor:
    return model(**tiny_batch(model, 2, length, seed=seed)).loss


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert torch.equal(gradient, theirs[name]), name


def plain_gradients(*seeds: int) -> dict[str, torch.Tensor]:
    reference = tiny_model("mixtral")
    sum(loss_of(reference, seed) for seed in seeds).backward()  # type: ignore[union-attr]
    return gradients(reference)


def step(runtime: FlexRuntime, model: PreTrainedModel, seed: int = 0) -> dict[str, torch.Tensor]:
    loss = loss_of(model, seed)
    with runtime.backward():
        loss.backward()
    return gradients(model)


def with_steady_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are then made anew for other reasons than what mitigations cost."""
    monkeypatch.setattr(OffloadService, "_recompute_overhead_seconds", lambda _: 60e-6)
    monkeypatch.setattr(LearntRates, "observe", lambda *_: None)


def with_steady_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of operators follow from what they do, and mitigations have steady rates: plans are the same in every run,
    whatever else the machine does."""
    with_steady_rates(monkeypatch)
    learn = Structure._time

    def learn_from_traces(self: Structure, shape: BatchShape, trace: Trace) -> None:
        if trace.is_symbolic:
            learn(self, shape, trace)

    monkeypatch.setattr(Structure, "_time", learn_from_traces)
    monkeypatch.setattr(Forecast, "_seconds_of", lambda _, work: work.flops / 1e10 + work.moved_bytes / 1e10 + 5e-6)
