"""Checksums of tensors, whole and in parts. On real ranks: tests/distributed/test_checkpoint_loaded.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from flex_trainer.models import checksums as module
from flex_trainer.models.checksums import checksum, differing

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    return (numbers > 0.5) if dtype is torch.bool else (100 * numbers).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_shape(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((), (5,), (4, 6), (3, 4, 5)):
        tensor = _numbers(*shape, dtype=dtype)
        whole = checksum(tensor)
        assert whole == checksum(tensor.clone())
        with monkeypatch.context() as patch:
            patch.setattr(module, "_PIECE_ELEMENTS", 7)
            assert checksum(tensor) == whole
    assert checksum(torch.empty(0, 3, dtype=dtype)) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[[1, 0, 2, 3]],
        lambda t: t[:, [1, 0, 2, 3]],
        lambda t: t[:, :, [0, 2, 1, 3]],
        lambda t: t.transpose(0, 1),
        lambda t: t.roll(1),
        lambda t: -t,
        lambda t: t.index_fill(0, torch.tensor([3]), 0.0),
    ],
)
def test_values_that_changed_or_changed_places(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = _numbers(4, 4, 4)
    assert checksum(change(tensor).contiguous()) != checksum(tensor)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Replicate()),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(1), _StridedShard(2, split_factor=3)),
        (Replicate(), Replicate()),
    ],
)
def test_parts_add_up_to_the_whole(placements: tuple[Placement, Placement]) -> None:
    """Uneven ones too. A process group of four ranks in which nothing is sent."""
    tensor = _numbers(10, 5, 9)
    parts = []
    num_elements = 0
    for rank in range(4):
        torch.distributed.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            spread = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
            num_elements += spread.to_local().numel()
            parts.append(checksum(spread))
        finally:
            torch.distributed.destroy_process_group()
    num_copies = num_elements // tensor.numel()
    assert num_copies == 2 ** sum(isinstance(placement, Replicate) for placement in placements)
    assert (sum(parts) - num_copies * checksum(tensor)) % (1 << 64) == 0


def test_one_process() -> None:
    tensors = {"a": _numbers(3, 4), "b": _numbers(5), "c": _numbers(2)}
    expected = {"a": checksum(tensors["a"]), "b": checksum(tensors["a"])}
    assert differing(tensors, expected) == ["b"]  # of c nothing is known
    assert differing({}, {}) == []
