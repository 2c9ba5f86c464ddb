"""Sharded models are refused by name; whole ones pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from flex_trainer.models.sharding import refuse_unmanaged
from flex_trainer.testing.tiny import tiny_model


@pytest.fixture
def process_group() -> Iterator[None]:
    """One rank: enough for a parameter to be a DTensor."""
    store = torch.distributed.HashStore()  # type: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_whole_models_pass() -> None:
    refuse_unmanaged(tiny_model("mixtral"))


def test_a_dtensor_is_named(process_group: None) -> None:
    model = tiny_model("mixtral")
    mesh = init_device_mesh("cpu", (1,))
    norm = model.model.norm
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"Mixtral.* is sharded .*'model.norm.weight' is a DTensor.* tp_size=1"):
        refuse_unmanaged(model)


def test_fsdp1_is_named(process_group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    with pytest.raises(ValueError, match=r"module '0' is wrapped by FullyShardedDataParallel.*fsdp_version: 2"):
        refuse_unmanaged(model)
