"""Which lower tier this run has, made when the first value is offloaded."""

from __future__ import annotations

import time

import psutil
import torch

from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.offload import OffloadStore, Tier, flat_bytes
from flex_trainer.activations.overhead import recompute_overhead_seconds
from flex_trainer.activations.pinned_tier import PinnedTier
from flex_trainer.activations.quantize import dequantize_rows, quantize_rows
from flex_trainer.config import FlexConfig, in_flight_bound_bytes
from flex_trainer.cost.roofline import Rates, Roofline
from flex_trainer.errors import UserError
from flex_trainer.memory.allocator import with_index
from flex_trainer.memory.process import cgroup_free_bytes
from flex_trainer.ranks import num_ranks_here

_HOST_SHARE = 0.5
"""Share of the host memory free at the start that the pinned buffers of all processes on this host may take."""
_PINNED_REMEDY = (
    "What is offloaded goes to pinned host memory: free some on this host, start fewer processes there, or leave "
    "'offload' out of strategies; the others go on."
)
_LEAST_OVERHEAD_SECONDS = 10e-6
_PROBE_BYTES = 2**20, 2**23


class OffloadService:
    """Makes the tier and measures what moving bytes costs here.

    Raises:
        ValueError: the offload directory cannot be used (checked at once, not at the first spike).
    """

    def __init__(self, config: FlexConfig, device: torch.device, limit_bytes: int) -> None:
        self._config = config
        self._device = device
        self._store: OffloadStore | None = None
        self._rates: Rates | None = None
        self.learnt_rates: Rates | None = None
        """What mitigations were seen to cost; None: nothing was seen yet."""
        if "offload" in config.strategies:
            in_flight_bytes = in_flight_bound_bytes(limit_bytes)
            tier = self._make_tier()
            if isinstance(tier, PinnedTier):
                self._store = OffloadStore(tier, in_flight_bytes, remedy=_PINNED_REMEDY)
            else:
                self._store = OffloadStore(tier, in_flight_bytes)

    @property
    def is_available(self) -> bool:
        return self._store is not None and self._store.failure is None

    def store(self) -> OffloadStore:
        assert self._store is not None, "only runs with the strategy offload ask for the store"
        return self._store

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of values on their way down that the device still holds: they count as held, and will not be."""
        return 0 if self._store is None else self._store.in_flight_bytes

    def settle(self) -> None:
        """Forward has ended: let go of what was copied, forget values that died.

        On a CPU this waits for the copies in flight, so that what was freed really is. On CUDA there is no wait: the
        values still on their way are those that backward wants first, and their bytes are in the budget.
        """
        if self._store is None:
            return
        if isinstance(self._store.tier, PinnedTier):
            self._store.poll()
            self._store.tier.trim()
        else:
            self._store.settle()
        self._store.forget_dead()

    def rates(self) -> Rates:
        """What this machine's mitigations cost, as learnt so far."""
        return self.learnt_rates or self.probed_rates()

    def probed_rates(self) -> Rates:
        """What they cost on the idle machine, measured once (two sizes each, a few tens of milliseconds)."""
        if self._rates is None:
            offload = self._measure_offload() if self.is_available else Rates().offload
            quantize = _fit(self._time_quantize) if "quantize" in self._config.strategies else Rates().quantize
            in_flight_bytes = self._store.max_in_flight_bytes if self._store is not None else 0
            self._rates = Rates(
                offload=offload,
                quantize=quantize,
                in_flight_bytes=in_flight_bytes,
                recompute_overhead_seconds=self._recompute_overhead_seconds(),
            )
        return self._rates

    def _make_tier(self) -> Tier:
        directory = self._config.offload_directory
        if self._device.type == "cuda" and directory is None:
            return PinnedTier(with_index(self._device), _pinned_bound_bytes())
        if self._device.type == "cuda":
            raise UserError(
                f"offload_to={self._config.offload_to!r} is a directory, which only a CPU device can offload to; "
                "use offload_to='host' on CUDA"
            )
        return FileTier(directory)

    def _measure_offload(self) -> Roofline:
        try:
            return _fit(self._time_offload)
        except OSError as error:  # the tier is full already: said once, and then everything is kept
            self.store().fail(error)
            return Rates().offload

    def _recompute_overhead_seconds(self) -> float:
        """What a recomputed region costs on top of its kernels: a first guess, since it is learnt from what runs."""
        if "recompute" not in self._config.strategies:
            return Rates().recompute_overhead_seconds
        return max(recompute_overhead_seconds(self._device), _LEAST_OVERHEAD_SECONDS)

    def _time_offload(self, num_bytes: int) -> float:
        tier = self.store().tier
        source = torch.ones(num_bytes // 4, device=self._device)
        start = time.perf_counter()
        place, copy = tier.write(flat_bytes(source.untyped_storage(), source.device))
        try:
            copy.wait()
            back = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            tier.read(place, back).wait()
            self._synchronize()
            return time.perf_counter() - start
        finally:
            tier.free(place)

    def _time_quantize(self, num_bytes: int) -> float:
        rows = torch.ones(num_bytes // 4 // 256, 256, device=self._device)
        start = time.perf_counter()
        dequantize_rows(*quantize_rows(rows, getattr(torch, self._config.quantize_dtype)))
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _pinned_bound_bytes() -> int:
    """This process's part of what may be pinned. Launchers say how many processes share the host."""
    free_bytes = min([psutil.virtual_memory().available, *cgroup_free_bytes()])
    return int(_HOST_SHARE * free_bytes) // num_ranks_here()


def _fit(seconds_for) -> Roofline:
    """Overhead and bandwidth from the best of three times at two sizes."""
    small, large = _PROBE_BYTES
    seconds_for(small)  # the first use of a path is never typical
    small_seconds, large_seconds = (min(seconds_for(size) for _ in range(3)) for size in (small, large))
    bandwidth = (large - small) / max(large_seconds - small_seconds, 1e-6)
    return Roofline(max(small_seconds - small / bandwidth, 20e-6), bandwidth)
