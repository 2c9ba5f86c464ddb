"""Ranks shared by all multi-process tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flex_trainer.testing.ranks import RankPool
from tests.distributed import checkpoint_jobs


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More time for each: the first one pays for the start of the ranks. What takes four ranks is a sweep: it needs
    ranks of its own, on the cores of two."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))
            if "four_ranks" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.sweep)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to train and to save; nothing is written into its directory."""
    directory = tmp_path_factory.mktemp("start")
    checkpoint_jobs.save_tiny(directory)
    return directory
