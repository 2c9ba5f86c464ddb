"""Equal means equal, and nothing stays attached after a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime_steps import detach_all


@pytest.fixture(autouse=True)
def detached(deterministic: None) -> Iterator[None]:
    yield
    detach_all()
