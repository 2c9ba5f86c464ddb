"""Equal means equal: deterministic sums on one thread; and nothing stays attached after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from flex_trainer.testing.tiny import tiny_model
from tests.runtime_steps import detach_all


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("mixtral")


@pytest.fixture(autouse=True)
def detached() -> Iterator[None]:
    yield
    detach_all()
