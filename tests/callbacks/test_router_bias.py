"""LossFreeBalancing in Trainer and FlexTrainer: once per step, also where a step is run again; saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flex_trainer import FlexConfig
from flex_trainer.callbacks import LossFreeBalancing
from flex_trainer.models.router_bias import find_biased_routers
from flex_trainer.testing.failures import FailingAllocations
from flex_trainer.testing.tiny import tiny_model
from tests.fake_meter import BASE_BYTES
from tests.tiers import first_quick
from tests.trainer_runs import make

RATE = 0.01
CONFIG = FlexConfig(BASE_BYTES + 1_700_000, router_bias_update_rate=RATE)


def biases(model: Any) -> list[torch.Tensor]:
    return [router.bias.clone() for router in find_biased_routers(model)]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def trained(directory: Path, flex: FlexConfig | None, **options: Any) -> Any:
    trainer = make(directory, flex, "deepseek_v3", **options)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """The biases after six steps of two micro-batches of transformers' Trainer with the callback."""
    trainer = trained(tmp_path_factory.mktemp("plain"), None, options={"callbacks": [LossFreeBalancing(RATE)]})
    found = biases(trainer.model)
    steps = torch.cat(found) / RATE
    assert 2 <= float(steps.abs().max()) <= 6 and torch.allclose(steps, steps.round(), atol=1e-3)
    return found


def test_a_setting_balances_as_the_callback_does_and_leaves_nothing(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    trainer = trained(tmp_path, CONFIG)
    assert equal(biases(trainer.model), plain)
    assert sum(sum(record.freed_bytes.values()) for record in trainer.flex.records) > 0
    assert not any(router.experts._forward_pre_hooks for router in find_biased_routers(trainer.model))


def test_without_the_setting_biases_stay(tmp_path: Path) -> None:
    trainer = trained(tmp_path, FlexConfig(CONFIG.memory_limit), max_steps=2)
    assert all(not bias.any() for bias in biases(trainer.model))


def test_evaluation_is_not_counted(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    from tests.trainer_runs import Batches

    class Few(Batches):
        def __len__(self) -> int:
            return 2

    trainer = trained(tmp_path, CONFIG, options={"eval_dataset": Few()}, eval_strategy="steps", eval_steps=1)
    assert any("eval_loss" in row for row in trainer.state.log_history)
    assert equal(biases(trainer.model), plain)


@pytest.mark.parametrize("where", first_quick(["backward", "forward"]))
def test_a_step_that_is_run_again_counts_once(tmp_path: Path, plain: list[torch.Tensor], where: str) -> None:
    trainer = make(tmp_path, CONFIG, "deepseek_v3")
    failing = FailingAllocations(trainer.flex, where, {1200, 2600})
    with failing:
        trainer.train()
    assert failing.num_failed == 2 and len(trainer.flex.retries) == 2
    assert equal(biases(trainer.model), plain)


def test_a_run_goes_on_with_its_biases(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    trained(tmp_path, CONFIG, save_strategy="steps", save_steps=3)
    resumed = make(tmp_path, CONFIG, "deepseek_v3")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert equal(biases(resumed.model), plain)


@pytest.mark.sweep
def test_a_run_of_half_precision_goes_on_in_float32(tmp_path: Path) -> None:
    def run(**more: Any) -> Any:
        model = tiny_model("minimax_m2", dtype=torch.bfloat16).bfloat16()
        return make(
            tmp_path, FlexConfig(CONFIG.memory_limit, router_bias_update_rate=0.001), options={"model": model}, **more
        )

    whole = run(save_strategy="steps", save_steps=2, max_steps=4)
    whole.train()
    resumed = run(max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert {bias.dtype for bias in biases(resumed.model)} == {torch.float32}
    assert equal(biases(resumed.model), biases(whole.model))


def test_a_model_without_such_biases_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no router of MixtralForCausalLM chooses experts with a bias"):
        make(tmp_path, CONFIG, "mixtral")


@pytest.mark.parametrize("rate", [-0.1, 1, True, "fast", None])
def test_rates_that_make_no_sense_are_refused(rate: Any) -> None:
    with pytest.raises(ValueError, match=r"router_bias_update_rate=.* must be a number in \[0, 1\)"):
        FlexConfig(router_bias_update_rate=rate)
