"""Settings of every test: no network, no tracker account, one thread (tests run in parallel processes)."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import gc
from collections.abc import Iterator

import pytest
import torch

from tests import process_wide


def pytest_collection_finish() -> None:
    process_wide.share()


@pytest.fixture
def all_collected() -> Iterator[None]:
    """For tests of what the collector finds: it also looks at what was imported."""
    gc.unfreeze()
    yield
    process_wide.keep_libraries_out_of_collections()


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing a test writes by default lands in the user's home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.delenv("FLEX_TRACEBACK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Equal means equal: deterministic sums on one thread."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
