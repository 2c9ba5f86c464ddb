"""Equal means equal, and nothing stays attached after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.runtime_steps import detach_all


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    yield
    detach_all()
    torch.use_deterministic_algorithms(False)
