"""Which tier a run has, and how much of the host it may pin."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest
import torch

from flex_trainer.activations import pinned_tier
from flex_trainer.activations.ledger import Ledger
from flex_trainer.config import FlexConfig
from flex_trainer.memory import offloading
from flex_trainer.memory.offloading import OffloadService
from tests.activations.fake_streams import FakeDevice

GIB = 2**30
CUDA = torch.device("cuda", 0)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A host with 16 GiB free, and a device whose streams are fakes."""
    device = FakeDevice(0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GIB))
    monkeypatch.setattr(offloading, "cgroup_free_bytes", list)
    monkeypatch.setattr(pinned_tier, "CopyStreams", lambda _: device)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return device


def test_the_pool_is_this_processes_part_of_the_host(host: FakeDevice, monkeypatch: pytest.MonkeyPatch):
    assert offloading._pinned_bound_bytes() == 8 * GIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert offloading._pinned_bound_bytes() == 2 * GIB
    monkeypatch.setattr(offloading, "cgroup_free_bytes", lambda: [4 * GIB])
    assert offloading._pinned_bound_bytes() == GIB // 2


def test_on_cuda_the_end_of_forward_does_not_wait(host: FakeDevice):
    service = OffloadService(FlexConfig(strategies=("offload",)), CUDA, GIB)
    assert service.store().max_in_flight_bytes == int(0.02 * GIB)
    ledger = Ledger()
    value = service.store().put(torch.zeros(2**20, dtype=torch.uint8), ledger)
    service.settle()
    assert value is not None and host.num_host_waits == 0
    assert service.in_flight_bytes in (0, 2**20) and ledger.held_bytes == service.in_flight_bytes
    host.run_all()
    service.settle()
    assert service.in_flight_bytes == ledger.held_bytes == 0


def test_a_full_pool_turns_to_the_other_strategies(host: FakeDevice):
    host.system_bytes = 0
    service = OffloadService(FlexConfig(), CUDA, GIB)
    with pytest.warns(UserWarning, match=r"pinned host memory .* does not pin .* leave 'offload' out of strategies"):
        assert service.store().put(torch.zeros(2**20, dtype=torch.uint8), Ledger()) is None
    assert not service.is_available


def test_a_directory_is_for_cpu_devices(host: FakeDevice):
    with pytest.raises(ValueError, match="only a CPU device can offload to"):
        OffloadService(FlexConfig(offload_to="/tmp"), CUDA, GIB)
