"""FlexTrainer says clearly what it cannot do, and why a run has ended."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer import FlexConfig, FlexPlugin, FlexRuntime, FlexTrainer
from flex_trainer.errors import UserError
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from flex_trainer.trainer import _refuse_arguments
from tests.fake_meter import BASE_BYTES
from tests.trainer_runs import LIMIT_BYTES, collate_for, make


def test_compile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"torch_compile=True does not go together with FlexTrainer.*torch_compile=False"
    ):
        make(tmp_path, FlexConfig(LIMIT_BYTES), torch_compile=True)


def test_several_gpus_for_one_process_are_refused() -> None:
    args = SimpleNamespace(torch_compile=False, n_gpu=4)
    with pytest.raises(ValueError, match=r"sees 4 GPUs.*DataParallel.*accelerate launch.*CUDA_VISIBLE_DEVICES=0"):
        _refuse_arguments(args)  # type: ignore[arg-type]
    for num_gpus in (0, 1):
        _refuse_arguments(SimpleNamespace(torch_compile=False, n_gpu=num_gpus))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flex", "message"),
    [
        ({"memory_limit": "2GiB"}, "flex must be a FlexConfig, found dict; write FlexConfig(memory_limit='2GiB')"),
        ("3GiB", "flex must be a FlexConfig, found str; write FlexConfig(memory_limit='3GiB')"),
        ({"memory": 1}, "flex must be a FlexConfig, found dict; write FlexConfig(memory_limit='2GiB')"),
        (FlexConfig, "flex must be a FlexConfig, found type; write FlexConfig(memory_limit='2GiB')"),
    ],
)
def test_other_settings_than_a_config_are_refused(tmp_path: Path, flex: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make(tmp_path, flex)
    assert str(caught.value) == message
    for made in (FlexPlugin, FlexRuntime):
        with pytest.raises(UserError) as caught:
            made(flex)
        assert str(caught.value) == message.replace("flex must", "config must")


class Hungry(torch.optim.SGD):
    """Finds no memory for its state in the second step."""

    num_steps = 0
    error: Exception = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 196608 bytes.")

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if self.num_steps == 2:
            raise self.error
        return super().step(closure)


class OutOfPatience(Hungry):
    error = RuntimeError("the learning rate is cursed")


@pytest.mark.parametrize("kind", [Hungry, OutOfPatience])
def test_out_of_memory_in_the_optimizer_is_named(tmp_path: Path, kind: type[Hungry]) -> None:
    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES))
    trainer.optimizer = kind(trainer.model.parameters(), lr=0.1)
    error = type(kind.error)(*kind.error.args)
    kind.error = error
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    notes = getattr(caught.value, "__notes__", [])
    if kind is OutOfPatience:
        assert notes == []
        return
    (note,) = notes
    assert "memory ran out in the step of the optimizer (Hungry)" in note
    assert f"memory_limit={LIMIT_BYTES} is 2.34 MiB: raise it (flex.memory_limit" in note
    assert "docs/out-of-memory.md" in note


def test_what_is_said_of_a_failure_begins_a_line_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES), disable_tqdm=False)
    trainer.optimizer = OutOfPatience(trainer.model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError):
        trainer.train()
    error = capfd.readouterr().err
    assert "1/6" in error and error.endswith("\n")
    del trainer
    gc.collect()
    assert capfd.readouterr().err == "", "the bar has ended already"


def test_trouble_in_detaching_does_not_hide_why_training_ended(tmp_path: Path) -> None:
    class Failing(FlexTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss: Any = super().compute_loss(model, inputs, *args, **kwargs)
            loss.backward()
            (profiles / "profile.json").unlink(missing_ok=True)
            profiles.rmdir()
            profiles.write_text("no directory any more")
            raise ArithmeticError("the loss is cursed")

    profiles = tmp_path / "profiles"
    profiles.mkdir()
    flex = FlexConfig(LIMIT_BYTES, seed_profile=str(profiles / "profile.json"))
    trainer = make(tmp_path, flex, trainer_class=Failing)
    with pytest.raises(ArithmeticError, match="cursed") as caught:
        trainer.train()
    assert "the seed profile cannot be written" in caught.value.__notes__[0]
    assert not trainer.flex.is_attached


def test_limit_below_what_is_in_use(tmp_path: Path) -> None:
    trainer = make(tmp_path, FlexConfig("50MiB"), fake=False)
    with pytest.raises(
        ValueError, match=r"memory_limit='50MiB' \(50.*is below the .* in use before.*Raise memory_limit"
    ):
        trainer.train()


def test_limit_below_what_recomputing_everything_needs(tmp_path: Path) -> None:
    collate = collate_for(tiny_model("mixtral"))
    options = {"data_collator": lambda _: collate([{"number": 1}])}
    trainer = make(tmp_path, FlexConfig(BASE_BYTES + 100_000), options=options)
    with pytest.raises(ValueError, match=r"memory_limit=1100000 .* is too low for a micro-batch of 2 x 64.*Raise"):
        trainer.train()
    assert trainer.flex.records == []  # it was refused before it ran


def test_offload_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    trainer = make(tmp_path / "run", FlexConfig(LIMIT_BYTES, offload_to=str(tmp_path / "file" / "below")))
    with pytest.raises(ValueError, match=r"offload_to='.*below'"):
        trainer.train()


def test_model_without_decoder_layers(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.linear(x).sum()}

    options = {"model": Flat(), "data_collator": lambda samples: {"x": torch.ones(2, 4)}}
    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES), options=options)
    with pytest.raises(ValueError, match=r"Flat has no decoder layers: .*use transformers' Trainer"):
        trainer.train()


def test_the_search_for_a_batch_size_goes_on_where_memory_runs_out(tmp_path: Path) -> None:
    """As Trainer's does; what follows equals a run that has that batch size from the start."""
    model = tiny_model("mixtral")

    def collate(samples: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        return tiny_batch(model, len(samples), 64, seed=samples[0]["number"])

    def losses(trainer: FlexTrainer) -> list[float]:
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    flex, options = FlexConfig(BASE_BYTES + 4_000_000, strategies=("recompute",)), {"data_collator": collate}
    sizes: dict[str, Any] = {"max_steps": 2, "seed": 0}
    found = make(
        tmp_path, flex, options=options, auto_find_batch_size=True, per_device_train_batch_size=12, **sizes
    )  # 12 x 64 tokens never fit
    found_losses = losses(found)
    size = found.state.train_batch_size
    assert size is not None and size == 9
    assert {record.num_tokens for record in found.flex.records} == {64 * size}
    assert not found.flex.is_attached
    direct = make(tmp_path, flex, options=options, per_device_train_batch_size=size, **sizes)
    assert losses(direct) == found_losses


def test_a_limit_that_no_batch_size_meets_ends_the_search_at_once(tmp_path: Path) -> None:
    trainer = make(tmp_path, FlexConfig("50MiB"), fake=False, auto_find_batch_size=True)
    with pytest.raises(ValueError, match="in use before the first micro-batch"):
        trainer.train()
