"""Fixtures of the tests of starting and stopping."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def in_the_foreground() -> Iterator[None]:
    """An interrupt raises, also where the tests run in the background of a shell, which has it ignored there."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)
