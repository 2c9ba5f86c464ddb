"""The CUDA meter on made-up readings: what counts as left, which names mean what, and when fragmentation is told."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

from flex_trainer.memory.allocator import SEGMENT_BYTES, AllocatorState, read_allocator
from flex_trainer.memory.cuda_meter import CudaMeter
from flex_trainer.memory.failed_allocation import nearest_limit
from flex_trainer.memory.meter import meter_for
from tests.fake_cuda import GIB, FakeCuda, cuda  # noqa: F401 - a fixture

MIB = 2**20
DEVICE = torch.device("cuda", 1)


@pytest.fixture
def meter(cuda: FakeCuda) -> CudaMeter:  # noqa: F811
    return CudaMeter(DEVICE)


def test_a_device_without_an_index_is_the_current_one(cuda: FakeCuda):  # noqa: F811
    meter = meter_for(torch.device("cuda"))
    assert isinstance(meter, CudaMeter)
    assert meter.in_use_bytes() == 10 * GIB  # the fake answers for device 1 only


def test_three_names_for_three_things(meter: CudaMeter):
    assert meter.now() == {"allocated": 10 * GIB, "reserved": 12 * GIB, "device": 20 * GIB}


def test_left_is_what_the_limit_leaves(meter: CudaMeter):
    assert meter.left_bytes(30 * GIB) == 20 * GIB
    assert meter.left_bytes(9 * GIB) == -GIB


def test_left_is_less_where_others_use_the_device(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    cuda.free = 3 * GIB + SEGMENT_BYTES - 1
    assert meter.left_bytes(70 * GIB) == 3 * GIB + 2 * GIB, "whole segments that are free, and reserved blocks"


def test_left_is_less_by_what_is_in_pieces_or_pending(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    cuda.free = 3 * GIB
    cuda.split = GIB
    assert meter.left_bytes(70 * GIB) == 4 * GIB
    cuda.active += GIB // 2  # freed, but another stream may still use it
    assert meter.left_bytes(70 * GIB) == 3.5 * GIB


def test_a_memory_fraction_is_a_limit_too(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    cuda.fraction = 0.2  # 16 GiB
    assert meter.left_bytes(70 * GIB) == 4 * GIB + 2 * GIB
    assert 12 * GIB < meter.auto_bytes() < 16 * GIB
    cuda.fraction = 0.1  # less than is reserved already
    assert meter.left_bytes(70 * GIB) == 2 * GIB
    assert meter.auto_bytes() == 12 * GIB


def test_auto_leaves_room_outside_of_tensors(meter: CudaMeter):
    assert meter.auto_bytes() == 12 * GIB + int(0.9 * 60 * GIB)


def test_windows_never_reset_the_counter_and_do_not_see_earlier_peaks(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    cuda.peak = 50 * GIB  # of an evaluation before, or of another measurement
    meter.start_window()
    cuda.allocated = 14 * GIB
    meter.sample()
    cuda.allocated = 12 * GIB
    assert meter.peak_bytes() == 14 * GIB and not meter.is_peak_exact()
    cuda.allocated = 51 * GIB
    assert meter.peak_bytes() == 51 * GIB and meter.is_peak_exact()
    cuda.allocated = 10 * GIB
    assert meter.peak_bytes() == 51 * GIB, "a peak between two samples is in the counter"
    meter.end_window()
    meter.start_window()
    assert meter.peak_bytes() == 10 * GIB
    assert cuda.peak == 51 * GIB


def test_samples_are_rare(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    meter.start_window()
    before = cuda.num_reads
    started = time.monotonic()
    for _ in range(1000):
        meter.sample()
    assert cuda.num_reads - before <= 1 + (time.monotonic() - started) / 0.001


def test_rounding_is_learnt_from_what_a_window_allocated(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    meter.start_window()
    cuda.allocated += 110 * MIB
    cuda.requested += 100 * MIB
    meter.peak_bytes()
    cuda.allocated, cuda.requested = 10 * GIB, 10 * GIB
    meter.end_window()
    assert meter.left_bytes(21 * GIB) == pytest.approx(10 * GIB, rel=1e-6)
    meter.start_window()  # too small to tell anything
    cuda.allocated += 3 * MIB
    cuda.requested += MIB
    meter.peak_bytes()
    meter.end_window()
    cuda.allocated = 10 * GIB
    assert meter.left_bytes(21 * GIB) == pytest.approx(10 * GIB, rel=1e-6)


def test_a_captured_forward_is_refused(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    cuda.is_capturing = True
    with pytest.raises(ValueError, match="captured into a CUDA graph"):
        meter.start_window()


def run_window(meter: CudaMeter, cuda: FakeCuda, num_retries: int) -> None:  # noqa: F811
    meter.start_window()
    cuda.retries += num_retries
    meter.end_window()


def test_fragmentation_is_told_once_with_the_advice(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    cuda.split = 2 * GIB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_window(meter, cuda, 0)  # in pieces, but nothing was refused
    with pytest.warns(UserWarning, match=r"cuda:1 is fragmented: 2.00 GiB of 12.00 GiB .*expandable_segments:True"):
        run_window(meter, cuda, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_window(meter, cuda, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"split": GIB},  # full, not fragmented
        {"settings": "max_split_size_mb:64, expandable_segments:True"},
        {"backend": "cudaMallocAsync"},
    ],
)
def test_no_advice_where_it_does_not_apply(meter: CudaMeter, cuda: FakeCuda, changes: dict):  # noqa: F811
    cuda.split = 2 * GIB
    for name, value in changes.items():
        setattr(cuda, name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_window(meter, cuda, 1)


def test_a_failed_allocation_is_explained(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    cuda.free, cuda.split, cuda.allocated, cuda.active = 0, 5 * GIB, 6 * GIB, 6 * GIB
    cuda.snapshot = [
        {"device": 0, "blocks": [{"size": 9 * GIB, "state": "inactive"}]},
        {"device": 1, "blocks": [{"size": GIB, "state": "inactive"}, {"size": 4 * GIB, "state": "active_allocated"}]},
    ]
    text = meter.shortage(2 * GIB)
    assert text.startswith("fragmented, not full: 5.00 GiB of 12.00 GiB") and "largest free block: 1.00 GiB" in text
    assert "expandable_segments:True" in text
    cuda.settings = "expandable_segments:True"
    assert "expandable_segments" not in meter.shortage(2 * GIB)
    assert meter.shortage(20 * GIB).startswith("full: 6.00 GiB allocated, 6.00 GiB reserved and free, 0 B left")


def test_who_else_is_in_the_way(cuda: FakeCuda):  # noqa: F811
    cuda.free, cuda.reserved = 0, 12 * GIB
    assert "68.00 GiB of the device are used outside of this allocator" in read_allocator(DEVICE).shortage(4 * GIB)
    cuda.fraction = 0.15
    assert "this process may reserve 12.00 GiB (memory fraction)" in read_allocator(DEVICE).shortage(4 * GIB)
    cuda.active += 2 * GIB
    cuda.allocated -= GIB
    assert "3.00 GiB freed but not released by other streams" in read_allocator(DEVICE).shortage(4 * GIB)


def test_every_byte_is_in_one_place(cuda: FakeCuda):  # noqa: F811
    cuda.active, cuda.split = 10 * GIB + MIB, 300 * MIB
    state = read_allocator(DEVICE)
    assert isinstance(state, AllocatorState)
    parts = state.allocated_bytes + state.pending_bytes + state.split_bytes + state.whole_bytes
    assert parts == state.reserved_bytes
    assert state.elsewhere_bytes + state.reserved_bytes + state.free_bytes == state.total_bytes


def test_the_asynchronous_backend_leaves_statistics_out(meter: CudaMeter, cuda: FakeCuda):  # noqa: F811
    stats = cuda.stats

    def few(device: torch.device) -> dict:
        return {name: value for name, value in stats(device).items() if name not in ("requested_bytes", "active_bytes")}

    torch.cuda.memory_stats_as_nested_dict = few  # undone with the fixture's own replacement
    meter.start_window()
    cuda.allocated += GIB
    meter.peak_bytes()
    meter.end_window()
    assert meter.left_bytes(21 * GIB) == 10 * GIB


def test_the_nearest_limit_is_what_may_be_reserved(cuda: FakeCuda):  # noqa: F811
    cuda.fraction = 0.2  # 16 GiB, 12 of which are reserved
    limit = nearest_limit(torch.device("cuda"))
    assert (limit.num_bytes, limit.left_bytes) == (16 * GIB, 6 * GIB)
