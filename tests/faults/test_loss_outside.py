"""Losses that are computed outside of the model, and reference models: no operator sees what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from flex_trainer.config import FlexConfig
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.processes import run_in_subprocess
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES
from tests.faults.live_bytes import LiveMeter, live_bytes
from tests.tiers import sweep_over

MIB = 2**20
NUM_WORDS = 512
Loss = Callable[[Any, dict[str, Any]], torch.Tensor]


def large_vocabulary() -> Any:
    return tiny_model("qwen3_moe", num_hidden_layers=2, vocab_size=NUM_WORDS)


def own_cross_entropy(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    labels = inputs.pop("labels")
    logits = model(**inputs).logits[..., :-1, :].float()
    return F.cross_entropy(logits.flatten(0, -2), labels[..., 1:].flatten())


def several_terms(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """More than a cross-entropy: probabilities, their entropy and a distillation from shuffled logits."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    logs = logits.log_softmax(-1)
    entropy = -(logs.exp() * logs).sum(-1).mean()
    teacher = logits.detach().roll(1, -1).softmax(-1)
    return F.nll_loss(logs.flatten(0, -2), labels.flatten()) + entropy + F.kl_div(logs, teacher)


def make_reference_loss() -> Loss:
    reference = large_vocabulary()

    def loss(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        labels = inputs.pop("labels")
        ours = model(**inputs).logits.log_softmax(-1)
        with torch.no_grad():
            theirs = reference(**inputs).logits.log_softmax(-1)
        return (ours - theirs).gather(-1, labels.unsqueeze(-1)).square().mean()

    return loss


LOSSES: dict[str, Callable[[], Loss]] = {
    "own cross-entropy": lambda: own_cross_entropy,
    "several terms": lambda: several_terms,
    "reference model": make_reference_loss,
}


def train(loss_of: Loss, limit_bytes: int, lengths: tuple[int, ...]) -> list[Any]:
    model = large_vocabulary()
    runtime = FlexRuntime(FlexConfig(limit_bytes, ("recompute",), transient_reserve=0, trace=True))
    meter = LiveMeter(runtime)
    runtime.use_meter(meter)
    with live_bytes(has_peak=True) as live:
        meter.live = live
        runtime.attach(model)
        for length in lengths:
            with runtime.backward():
                loss_of(model, {**tiny_batch(model, 2, length), "use_cache": False}).backward()
            model.zero_grad(set_to_none=True)
        runtime.detach()
    return list(runtime.records)


@pytest.mark.parametrize("name", sweep_over([*LOSSES], quick=["own cross-entropy", "reference model"]))
def test_what_a_loss_needs_is_predicted_from_the_second_micro_batch_on(name: str) -> None:
    first, *later = train(LOSSES[name](), BASE_BYTES + 20 * MIB, (64,) * 3 + (96, 32))
    for record in later:
        need_bytes = record.peak_bytes - record.baseline_bytes
        predicted_bytes = record.predicted_peak_bytes - record.baseline_bytes
        assert 0.999 * need_bytes <= predicted_bytes <= 1.1 * need_bytes
    if name == "own cross-entropy":  # what a trace takes for granted: known before the first
        assert first.peak_bytes <= 1.02 * first.predicted_peak_bytes


@pytest.mark.parametrize("name", sweep_over([*LOSSES], quick=["several terms"]))
def test_the_limit_holds_with_what_a_loss_needs(name: str) -> None:
    """Room for three quarters of what is held, beside the loss."""
    probe = train(LOSSES[name](), BASE_BYTES + 20 * MIB, (64, 64))[1]
    assert probe.peak_bytes - probe.baseline_bytes > 1.5 * probe.actual_bytes
    limit_bytes = probe.peak_bytes - probe.actual_bytes // 4
    _, *later = train(LOSSES[name](), limit_bytes, (64,) * 4)
    for record in later:
        assert record.peak_bytes <= limit_bytes
        assert 0 < record.actual_bytes < probe.actual_bytes
        assert record.predicted_bytes == record.actual_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("trainer", ["dpo", "sft", "grpo"])
def test_trainers_of_trl(trainer: str) -> None:
    """DPO: a head that computes log probabilities in no operator, and a reference model. SFT: gradient checkpointing is
    on by default, in the trace too unless it is turned off there. GRPO: a loss of the logits. By the process's meter.
    """
    pytest.importorskip("trl")
    result = run_in_subprocess(
        f"tests.faults.trl_jobs:{trainer}", {"memory_limit": "4GiB"}, env={"OMP_NUM_THREADS": "1"}, timeout_s=300
    )
    assert result.exit_code == 0, result.error
    first, *later = result.value
    assert len(later) == 3 and not first["is_profile"]
    for record in result.value:
        assert record["predicted_bytes"] == record["actual_bytes"] > 0
    for record in later:  # the first also loads libraries
        need_bytes = record["peak_bytes"] - record["baseline_bytes"]
        predicted_bytes = record["predicted_peak_bytes"] - record["baseline_bytes"]
        assert need_bytes <= 1.05 * predicted_bytes + 8 * MIB
        assert predicted_bytes <= 1.5 * need_bytes
    assert first["peak_bytes"] <= 1.05 * first["predicted_peak_bytes"]
