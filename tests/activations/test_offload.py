"""When copies start and end, whatever the tier's speed and moods."""

from __future__ import annotations

import errno
import random
import threading
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.ledger import CopyTime, Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction


class FakeCopy:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    def release(self) -> None:
        self.wait()

    def time(self) -> CopyTime | None:
        return None


class FakeTier:
    """A tier in memory. Copies wait for `gate`, then for a random time; they fail after `room` writes."""

    def __init__(self, *, room: int | None = None, fails_at_start: bool = False, is_slow: bool = False) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.contents: dict[int, torch.Tensor] = {}
        self.num_writes = self.num_reads = self.bytes_in_flight = self.most_bytes_in_flight = 0
        self.freed: list[int] = []
        self.reads_started: list[int] = []
        self._room, self._fails_at_start, self._is_slow = room, fails_at_start, is_slow
        self._random = random.Random(0)
        self._pool = ThreadPoolExecutor(4)
        self._lock = threading.Lock()

    def write(self, source: torch.Tensor) -> tuple[int, FakeCopy]:
        self.num_writes += 1
        place = self.num_writes
        is_full = self._room is not None and place > self._room
        if is_full and self._fails_at_start:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._flies(source.numel())

        def copy() -> None:
            self._delay()
            self._flies(-source.numel())
            if is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.contents[place] = source.clone()

        return place, FakeCopy(self._pool.submit(copy))

    def read(self, place: int, target: torch.Tensor) -> FakeCopy:
        assert place in self.contents, "read before the write had ended"
        self.num_reads += 1
        self.reads_started.append(place)

        def copy() -> None:
            self._delay()
            target.copy_(self.contents[place])

        return FakeCopy(self._pool.submit(copy))

    def free(self, place: int) -> None:
        self.freed.append(place)
        self.contents.pop(place, None)

    def describe(self) -> str:
        return "a fake tier"

    def _delay(self) -> None:
        self.gate.wait(timeout=10)
        if self._is_slow:
            time.sleep(self._random.random() * 0.004)

    def _flies(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_in_flight += num_bytes
            self.most_bytes_in_flight = max(self.most_bytes_in_flight, self.bytes_in_flight)


def step(store: OffloadStore, *, num_operators: int = 8, settles: bool = True) -> tuple[torch.Tensor, Ledger]:
    """Gradient of a chain of offloaded operators, and the ledger after it."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    scope = Scope(
        ByFunction(lambda site: Strategy.OFFLOAD), Ledger(), parameters=(), store=lambda: store, min_mitigated_bytes=1
    )
    with scope.open():
        h = x
        for number in range(num_operators):
            h = scope.run(Site(f"op{number}", "linear", 0), torch.sin, h)
        loss = (h * h).sum()
        del h
    if settles:
        store.settle()
    loss.backward()
    assert x.grad is not None
    return x.grad, scope.ledger


def plain(num_operators: int = 8) -> torch.Tensor:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    h = x
    for _ in range(num_operators):
        h = h.sin()
    (h * h).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("settles", [True, False])
def test_random_delays(settles: bool):
    wanted = plain()
    tier = FakeTier(is_slow=True)
    store = OffloadStore(tier)
    for _ in range(10):
        gradient, ledger = step(store, settles=settles)
        assert torch.equal(gradient, wanted)
        assert ledger.held_bytes == ledger.recovered_bytes == 0
        store.forget_dead()
    assert tier.contents == {} and len(tier.freed) == len(set(tier.freed)) == tier.num_writes


def test_a_value_asked_for_before_its_copy_has_ended_is_still_there():
    tier = FakeTier()
    tier.gate.clear()
    store = OffloadStore(tier)
    x = torch.randn(32, 32)
    ledger = Ledger()
    value = store.put(x, ledger)
    assert value is not None
    assert ledger.held_bytes == x.numel() * 4 and ledger.freed_bytes["offload"] == 0
    assert value.read().data_ptr() == x.data_ptr()
    tier.gate.set()
    store.settle()
    assert ledger.held_bytes == 0 and ledger.freed_bytes["offload"] == x.numel() * 4
    assert torch.equal(value.read().view(torch.float32), x.view(-1))
    assert tier.num_reads == 1 and ledger.recovered_bytes == x.numel() * 4
    del value
    assert ledger.held_bytes == ledger.recovered_bytes == 0


def test_bytes_in_flight_are_bounded():
    tier = FakeTier(is_slow=True)
    bound = 2 * 32 * 32 * 4
    step(OffloadStore(tier, max_in_flight_bytes=bound))
    assert 0 < tier.most_bytes_in_flight <= bound


def test_one_value_larger_than_the_bound_still_goes():
    tier = FakeTier(is_slow=True)
    gradient, _ = step(OffloadStore(tier, max_in_flight_bytes=16))
    assert torch.equal(gradient, plain()) and tier.num_writes == 8


def test_reading_one_value_starts_those_that_backward_wants_next():
    tier = FakeTier()
    store = OffloadStore(tier)
    values = [store.put(torch.full((64,), float(number)), Ledger()) for number in range(5)]
    store.settle()
    assert all(value is not None for value in values)
    last = values[-1]
    assert last is not None
    last.read()
    assert tier.reads_started == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("fails_at_start", [True, False])
def test_a_full_tier_loses_nothing(fails_at_start: bool):
    """Refused at once, or only when the copy is under way: the values stay where they are, and a message says so."""
    tier = FakeTier(room=3, fails_at_start=fails_at_start)
    store = OffloadStore(tier)
    with pytest.warns(UserWarning, match="offload to a fake tier failed .*No space left.* stay on the device"):
        gradient, ledger = step(store)
    assert torch.equal(gradient, plain())
    assert ledger.held_bytes == ledger.recovered_bytes == 0
    assert ledger.freed_bytes["offload"] == 3 * 32 * 32 * 4
    num_writes = tier.num_writes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient, ledger = step(store)  # told once; from now on everything is kept
    assert torch.equal(gradient, plain())
    assert tier.num_writes == num_writes and ledger.freed_bytes["offload"] == 0 and ledger.held_bytes == 0


def test_a_failed_copy_without_a_wait():
    """The graph dies before anyone asked how the copy went."""
    tier = FakeTier(room=0)
    ledger = Ledger()
    value = OffloadStore(tier).put(torch.zeros(64), ledger)
    assert value is not None and ledger.held_bytes == 256
    del value
    assert ledger.held_bytes == ledger.recovered_bytes == 0
    assert tier.freed == [1]


def test_places_are_freed_only_after_their_copies():
    tier = FakeTier()
    tier.gate.clear()
    value = OffloadStore(tier).put(torch.zeros(64), Ledger())
    threading.Timer(0.02, tier.gate.set).start()
    del value  # waits: a place given away under a running copy would corrupt the next value
    assert tier.freed == [1] and tier.bytes_in_flight == 0


def test_two_readers_at_the_same_time():
    """Two micro-batches in backward, each prefetching what the other is reading."""
    tier = FakeTier(is_slow=True)
    store = OffloadStore(tier)
    values = [store.put(torch.full((64,), float(number)), Ledger()) for number in range(40)]
    store.settle()
    results: dict[int, bool] = {}

    def read(numbers: range) -> None:
        for number in numbers:
            value = values[number]
            assert value is not None
            results[number] = bool((value.read().view(torch.float32) == number).all())

    threads = [
        threading.Thread(target=read, args=(numbers,), daemon=True) for numbers in (range(39, -1, -1), range(40))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "deadlock"
    assert results == dict.fromkeys(range(40), True)
    assert tier.num_reads == 40


class SlowFileTier(FileTier):
    """The real file, with copies that take a random time and so end in any order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def _write(self, offset: int, source: torch.Tensor) -> None:
        time.sleep(self._random.random() * 0.003)
        super()._write(offset, source)

    def _read(self, offset: int, target: torch.Tensor) -> None:
        time.sleep(self._random.random() * 0.003)
        super()._read(offset, target)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("in_flight_values", [1, 3, 100])
def test_random_delays_of_a_file(seed: int, in_flight_values: int):
    """Places are used again by values of other sizes while copies are under way."""
    store = OffloadStore(SlowFileTier(seed), max_in_flight_bytes=in_flight_values * 32 * 32 * 4)
    for num_operators in (8, 3, 12):
        gradient, ledger = step(store, num_operators=num_operators, settles=seed % 2 == 0)
        assert torch.equal(gradient, plain(num_operators))
        assert ledger.held_bytes == ledger.recovered_bytes == 0
        store.forget_dead()


def test_polling_never_waits():
    tier = FakeTier()
    store = OffloadStore(tier)
    ledger = Ledger()
    first = store.put(torch.zeros(64), ledger)
    store.settle()
    tier.gate.clear()
    second = store.put(torch.zeros(64), ledger)
    assert first is not None and second is not None
    assert store.in_flight_bytes == 256 == ledger.held_bytes
    store.poll()
    assert second.is_in_flight and not first.is_in_flight
    tier.gate.set()
    deadline = time.monotonic() + 5
    while store.in_flight_bytes and time.monotonic() < deadline:
        store.poll()
    assert ledger.held_bytes == 0


def test_a_value_still_on_the_device_starts_those_before_it():
    """Backward's first values may not have left yet; what it wants after them has."""
    tier = FakeTier()
    store = OffloadStore(tier)
    values = [store.put(torch.full((64,), float(number)), Ledger()) for number in range(2)]
    store.settle()
    tier.gate.clear()
    last = store.put(torch.zeros(64), Ledger())
    assert last is not None and all(values)
    last.read()
    assert tier.reads_started == [2, 1]
    tier.gate.set()


def test_the_remedy_is_the_tiers_own():
    store = OffloadStore(FakeTier(room=0, fails_at_start=True), remedy="Use another host.")
    with pytest.warns(UserWarning, match=r"offload is off from now on\. Use another host\."):
        assert store.put(torch.zeros(64), Ledger()) is None


def test_copies_and_waiting_are_timed():
    """On a CPU's tier both copies of every value say what they took, and the ledger has them."""
    grad, ledger = step(OffloadStore(FileTier()), num_operators=6)
    assert torch.equal(grad, plain(6))
    assert ledger.num_offloaded > 0 and len(ledger.copies) == 2 * ledger.num_offloaded
    assert sum(copy.num_bytes for copy in ledger.copies) == 2 * ledger.freed_bytes["offload"]
    assert all(copy.seconds >= copy.core_seconds >= 0 and copy.seconds > 0 for copy in ledger.copies)


def test_waiting_for_a_slow_copy_is_counted():
    tier = FakeTier()
    store, ledger = OffloadStore(tier), Ledger()
    value = store.put(torch.ones(256, dtype=torch.uint8), ledger)
    tier.gate.clear()
    slow = store.put(torch.ones(256, dtype=torch.uint8), ledger)
    assert value is not None and slow is not None
    threading.Timer(0.05, tier.gate.set).start()
    store.settle()
    assert 0.04 < ledger.wait_seconds < 5.0 and ledger.num_offloaded == 2
    assert ledger.copies == []  # this tier does not tell


def test_recomputation_is_timed_once_and_without_its_waiting():
    ledger = Ledger()
    with ledger.recomputing():
        time.sleep(0.02)
        with ledger.recomputing(), ledger.waiting():  # what it takes was dropped too, and had been offloaded
            time.sleep(0.1)
    assert 0.1 <= ledger.wait_seconds < 2.0
    assert 0.02 <= ledger.recompute_seconds < 0.1
