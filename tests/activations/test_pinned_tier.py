"""The pinned tier on fake streams: right in every order that its events allow, within its bound, and never waiting."""

from __future__ import annotations

import errno
import gc
from typing import Any

import pytest
import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadedValue, OffloadStore
from flex_trainer.activations.pinned_tier import PinnedTier
from tests.activations.fake_streams import FakeDevice, FakeStream, memory_of

CUDA = torch.device("cuda", 0)
SIZE = 64


def make_store(device: FakeDevice, *, max_bytes: int = 2**20, in_flight_bytes: int = 4 * SIZE) -> OffloadStore:
    return OffloadStore(PinnedTier(CUDA, max_bytes, device), in_flight_bytes)


def kernel_writes(device: FakeDevice, stream: FakeStream, number: int) -> torch.Tensor:
    """A value that a kernel of the stream makes: not there before the kernel has run."""
    value = torch.full((SIZE,), 77, dtype=torch.uint8)
    numbers = memory_of(value)
    stream.push(lambda: numbers.__setitem__(slice(None), number))
    return value


def kernel_reads(stream: FakeStream, value: torch.Tensor, results: list[torch.Tensor]) -> None:
    numbers = memory_of(value)
    stream.push(lambda: results.append(torch.from_numpy(numbers.copy())))


@pytest.mark.parametrize("seed", range(30))
def test_values_come_back_in_every_order(seed: int):
    """Forward saves, memory is given away as soon as it may be, backward reads most values and drops the others
    unread; several micro-batches, one pool."""
    device = FakeDevice(seed)
    store = make_store(device)
    results: list[torch.Tensor] = []
    ledger = Ledger()
    expected: list[int] = []
    for micro_batch in range(3):
        values: list[tuple[int, OffloadedValue]] = []
        for number in range(8):
            name = 10 * micro_batch + number
            value = store.put(kernel_writes(device, device.compute, name), ledger)
            assert value is not None
            values.append((name, value))
            device.run_some()
        store.poll()
        while values:
            name, value = values.pop()
            if (name + seed) % 4:
                kernel_reads(device.compute, value.read(), results)
                expected.append(name)
            del value
            device.run_some()
        store.forget_dead()
    assert device.num_host_waits == 0, "the host waited for the device"
    device.run_all()
    device.assert_others_are_unharmed()
    assert [int(result[0]) for result in results] == expected
    assert all(bool((result == result[0]).all()) for result in results)
    assert ledger.held_bytes == ledger.recovered_bytes == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_reader_on_another_stream(seed: int):
    device = FakeDevice(seed)
    side = device.stream("side")
    store = make_store(device, in_flight_bytes=SIZE)
    results: list[torch.Tensor] = []
    value = store.put(kernel_writes(device, device.compute, 7), Ledger())
    assert value is not None and value.end_write(is_forced=True)
    value.read()  # into memory of the computing stream
    with device.on(side):
        kernel_reads(side, value.read(), results)
    del value  # and that memory is given to others
    device.run_all()
    assert int(results[0][0]) == 7


@pytest.mark.parametrize("seed", range(10))
def test_streams_that_never_meet_share_a_buffer(seed: int):
    device = FakeDevice(seed)
    side = device.stream("side")
    tier = PinnedTier(CUDA, SIZE, device)
    place, copy = tier.write(kernel_writes(device, device.compute, 1))
    copy.release()
    target = torch.zeros(SIZE, dtype=torch.uint8)
    tier.read(place, target).release()
    tier.free(place)
    with device.on(side):
        tier.write(kernel_writes(device, side, 2))
    device.run_all()
    assert bool((target == 1).all())


@pytest.mark.parametrize("seed", range(10))
def test_a_read_comes_after_earlier_kernels_in_the_targets_memory(seed: int):
    device = FakeDevice(seed)
    tier = PinnedTier(CUDA, SIZE, device)
    place, copy = tier.write(torch.full((SIZE,), 3, dtype=torch.uint8))
    copy.release()
    device.run_all()
    target = kernel_writes(device, device.compute, 66)  # the former owner of this memory
    tier.read(place, target).wait()
    device.run_all()
    assert bool((target == 3).all())


def test_a_value_that_dies_on_its_way_gives_its_buffer_on_in_order():
    device = FakeDevice(0)
    tier = PinnedTier(CUDA, SIZE, device)  # room for one buffer
    store = OffloadStore(tier, 4 * SIZE)
    first = store.put(kernel_writes(device, device.compute, 1), Ledger())
    assert first is not None
    del first  # its copy has not run
    second = store.put(kernel_writes(device, device.compute, 2), Ledger())
    assert second is not None and tier.pinned_bytes == SIZE
    assert second.end_write(is_forced=True)
    results: list[torch.Tensor] = []
    kernel_reads(device.compute, second.read(), results)
    device.run_all()
    assert int(results[0][0]) == 2


@pytest.mark.parametrize("seed", range(10))
def test_a_buffer_is_written_again_only_after_its_last_read(seed: int):
    device = FakeDevice(seed)
    tier = PinnedTier(CUDA, SIZE, device)
    store = OffloadStore(tier, 4 * SIZE)
    results: list[torch.Tensor] = []
    for number in range(1, 6):
        value = store.put(kernel_writes(device, device.compute, number), Ledger())
        assert value is not None
        value.end_write(is_forced=True)
        kernel_reads(device.compute, value.read(), results)
        del value
    device.run_all()
    assert [int(result[0]) for result in results] == [1, 2, 3, 4, 5]
    assert tier.pinned_bytes == SIZE


def test_bytes_in_flight_are_bounded_and_counted():
    device = FakeDevice(0)
    ledger = Ledger()
    store = make_store(device, in_flight_bytes=3 * SIZE)
    values = []
    for number in range(10):
        values.append(store.put(kernel_writes(device, device.compute, number), ledger))
        assert store.in_flight_bytes <= 3 * SIZE
        assert ledger.held_bytes == store.in_flight_bytes
    device.run_all()
    store.poll()
    assert store.in_flight_bytes == ledger.held_bytes == 0
    last = values[-1]
    assert last is not None
    last.read()
    # The value itself, and as much ahead of need as the bound allows.
    assert ledger.recovered_bytes == 4 * SIZE


def test_the_pool_is_bounded_and_says_so():
    device = FakeDevice(0)
    store = make_store(device, max_bytes=2 * SIZE)
    values = [store.put(torch.zeros(SIZE, dtype=torch.uint8), Ledger()) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"pinned host memory \(128 B of 128 B taken\) failed .*no room for 64 B more"):
        assert store.put(torch.zeros(SIZE, dtype=torch.uint8), Ledger()) is None
    assert sum(device.pinned.values()) == 2 * SIZE
    assert all(values)


def test_memory_that_the_system_does_not_pin_is_a_full_tier():
    device = FakeDevice(0, system_bytes=SIZE)
    tier = PinnedTier(CUDA, 2**20, device)
    tier.write(torch.zeros(SIZE, dtype=torch.uint8))
    with pytest.raises(OSError, match="does not pin 64 B more of host memory: CUDA error: out of memory") as caught:
        tier.write(torch.zeros(SIZE, dtype=torch.uint8))
    assert caught.value.errno == errno.ENOMEM
    assert tier.pinned_bytes == SIZE


def test_idle_buffers_of_other_sizes_make_room_and_really_go():
    device = FakeDevice(0, system_bytes=4 * SIZE)
    tier = PinnedTier(CUDA, 4 * SIZE, device)
    for _ in range(2):
        place, copy = tier.write(torch.zeros(SIZE, dtype=torch.uint8))
        copy.release()
        tier.free(place)
    assert tier.pinned_bytes == SIZE, "the same buffer serves again"
    del place, copy
    place, _ = tier.write(torch.zeros(4 * SIZE, dtype=torch.uint8))
    assert place.num_bytes == tier.pinned_bytes == 4 * SIZE
    assert sum(device.pinned.values()) + device.cached_bytes == 4 * SIZE


def test_a_larger_idle_buffer_serves_where_nothing_more_may_be_pinned():
    device = FakeDevice(0)
    tier = PinnedTier(CUDA, 4 * SIZE, device)
    place, copy = tier.write(torch.zeros(4 * SIZE, dtype=torch.uint8))
    copy.release()
    tier.free(place)
    place, _ = tier.write(torch.full((SIZE,), 5, dtype=torch.uint8))
    assert place.num_bytes == 4 * SIZE and tier.pinned_bytes == 4 * SIZE
    target = torch.zeros(SIZE, dtype=torch.uint8)
    tier.read(place, target)
    device.run_all()
    assert bool((target == 5).all())


def test_the_pool_shrinks_when_less_is_needed():
    device = FakeDevice(0)
    tier = PinnedTier(CUDA, 2**20, device)

    def micro_batch(num_values: int) -> None:
        written = [tier.write(torch.zeros(SIZE, dtype=torch.uint8)) for _ in range(num_values)]
        while written:
            place, copy = written.pop()
            copy.release()
            tier.free(place)
            del place, copy
        tier.trim()

    micro_batch(16)
    assert tier.pinned_bytes == 16 * SIZE
    for _ in range(127):
        micro_batch(2)
    gc.collect()
    assert tier.pinned_bytes == 3 * SIZE
    assert sum(device.pinned.values()) + device.cached_bytes == 3 * SIZE
    assert device.num_host_waits == 0


def test_a_read_that_cannot_start_leaves_no_garbage():
    """The stream refuses once; the next reader gets the value, not uninitialised memory."""
    device = FakeDevice(0)
    store = make_store(device)
    ledger = Ledger()
    value = store.put(torch.full((SIZE,), 3, dtype=torch.uint8), ledger)
    assert value is not None
    value.end_write(is_forced=True)
    copy = device.copy

    def refuse(*arguments: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    device.copy = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        value.read()
    assert ledger.recovered_bytes == 0
    device.copy = copy  # type: ignore[method-assign]
    back = value.read()
    device.run_all()
    assert bool((back == 3).all()) and ledger.recovered_bytes == SIZE


def test_reading_ahead_stops_where_the_device_is_full(monkeypatch: pytest.MonkeyPatch):
    device = FakeDevice(0)
    store = make_store(device, in_flight_bytes=SIZE)
    ledger = Ledger()
    values = [store.put(torch.full((SIZE,), number, dtype=torch.uint8), ledger) for number in range(3)]
    device.run_all()
    store.poll()
    empty, num_calls = torch.empty, 0

    def empty_once(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*arguments, **options)

    last = values[2]
    assert last is not None
    monkeypatch.setattr(torch, "empty", empty_once)
    back = last.read()
    monkeypatch.undo()
    device.run_all()
    assert num_calls == 2 and bool((back == 2).all()) and ledger.recovered_bytes == SIZE
