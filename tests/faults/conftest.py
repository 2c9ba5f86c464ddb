"""One thread and deterministic sums, so that equal means equal; no cyclic collector, so that what leaks is seen."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def steady() -> Iterator[None]:
    num_threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    filling: Any = torch.utils.deterministic
    filling.fill_uninitialized_memory = False
    gc.disable()
    yield
    gc.enable()
    torch.use_deterministic_algorithms(is_deterministic)
    torch.set_num_threads(num_threads)
