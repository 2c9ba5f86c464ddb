"""What the tests of transactions run in processes of their own."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

import torch

from flex_trainer import FlexConfig, FlexTrainer
from flex_trainer.memory.enforce import return_freed_memory
from flex_trainer.memory.process import process_memory
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.trainer_runs import Batches, arguments

_SIZES: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def train_under_a_falling_limit() -> dict[str, Any]:
    """Train once without and once with FlexTrainer; there, RLIMIT_DATA falls when a micro-batch has been planned."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    return_freed_memory()
    directory = Path(tempfile.mkdtemp())
    states, trainers = [], []
    for is_flex in (False, True):
        model = tiny_model("llama", **_SIZES)
        options: dict[str, Any] = {
            "model": model,
            "args": arguments(directory, max_steps=2),
            "train_dataset": Batches(),
            "data_collator": lambda samples, model=model: tiny_batch(model, 4, 512, seed=samples[0]["number"]),
        }
        if is_flex:
            trainer: Any = FlexTrainer(flex=FlexConfig("auto", ("recompute",)), **options)
            _lower_the_limit(model.model.layers[1], trainer)
        else:
            from transformers import Trainer

            trainer = Trainer(**options)
        trainer.train()
        states.append(model.state_dict())
        trainers.append(trainer)
    flex = trainers[1].flex
    return {
        "is_equal": all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()),
        "num_retries": len(flex.retries),
        "operators": [retry.operator for retry in flex.retries],
        "num_records": len(flex.records),
    }


def _lower_the_limit(layer: torch.nn.Module, trainer: FlexTrainer) -> None:
    """Once, in the second step's second micro-batch: half of what it was going to hold is left."""

    def lower(*_: Any) -> None:
        records = trainer.flex.records
        if len(records) == 3 and not trainer.flex.retries:
            data_bytes = process_memory().data_bytes
            assert data_bytes is not None
            soft_bytes = data_bytes + records[-1].demand_bytes // 2
            resource.setrlimit(resource.RLIMIT_DATA, (soft_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))

    layer.register_forward_pre_hook(lower)
