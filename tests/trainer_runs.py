"""Runs of the Trainer and of FlexTrainer on tiny models, for the tests of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from flex_trainer import FlexConfig, FlexTrainer
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter

LENGTHS = (48, 64, 40, 56, 64, 48, 32, 64, 40, 48, 64, 56)
LIMIT_BYTES = BASE_BYTES + 1_450_000
"""Keeping everything of 2 x 64 tokens of mixtral takes 1.7 MB, with what comes on top while it runs about 2.2 MB."""


class Batches(Dataset):
    """Numbers of micro-batches; the collator makes the micro-batch of each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"number": number}


def collate_for(model: PreTrainedModel):
    def collate(samples: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        number = samples[0]["number"]
        return tiny_batch(model, 2, LENGTHS[number % len(LENGTHS)], seed=number)

    return collate


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "output_dir": str(directory),
        "max_steps": 6,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**(defaults | options))


def make(
    directory: Path,
    flex: FlexConfig | None,
    family: str = "mixtral",
    trainer_class: Any = None,
    fake: bool = True,
    options: dict[str, Any] | None = None,
    arguments_options: dict[str, Any] | None = None,
    **more: Any,
) -> Any:
    """A trainer on a fresh tiny model: Trainer when `flex` is None."""
    model = tiny_model(family)
    options = {"model": model, "train_dataset": Batches(), "data_collator": collate_for(model), **(options or {})}
    args = arguments(directory, **(arguments_options or {}), **more)
    if flex is None:
        return (trainer_class or Trainer)(args=args, **options)
    trainer = (trainer_class or FlexTrainer)(args=args, flex=flex, **options)
    if fake:
        with_fake_meter(trainer.flex)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def assert_same_run(trainer: Trainer, reference: Trainer) -> None:
    assert losses(trainer) == losses(reference)
    assert trainer.model is not None and reference.model is not None
    ours, theirs = trainer.model.state_dict(), reference.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
