"""Equal means equal, and nothing stays attached after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel

from flex_trainer.testing.tiny import tiny_model
from tests.runtime_steps import detach_all


@pytest.fixture(autouse=True)
def detached(deterministic: None) -> Iterator[None]:
    yield
    detach_all()


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("mixtral")
