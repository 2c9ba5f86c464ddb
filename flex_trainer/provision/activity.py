"""Peak of memory and time of each micro-batch, also where several are in flight.

    F a   F b   B b   B a          a is at work in the first and the last, and waits in between: what b needs then is
    |-a-| |-------b-------| |-a-|  no peak of a's, and takes no time of a's

A micro-batch that no other comes in between is at work from its forward to the end of its backward.
"""

from __future__ import annotations

import time

import torch

from flex_trainer.memory.meter import MemoryMeter
from flex_trainer.provision.stopwatch import Stopwatch


class Activity:
    """One micro-batch's share of a device's time line.

    Args:
        device: where it runs.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.peak_bytes = 0
        """Highest memory in use while it was at work."""
        self.latest_peak_bytes = 0
        """The same, since it was last taken up or has turned to something else."""
        self.is_peak_exact = True
        """Whether that peak is known, and not only a lower bound."""
        self.seconds = 0.0
        """Time in which it was at work, up to when it was last put down."""
        self.stopwatch = Stopwatch(device or torch.device("cpu"))
        """Forward is a lap, and each backward: begun when planning is done, ended when it is put down or earlier."""
        self.is_time_own = True
        """Whether no other one was at work beside it."""
        self._since = 0.0

    def leave_out(self, seconds: float) -> None:
        """Another one has run for so long, in its turn."""
        self.seconds -= seconds

    def _note(self, peak_bytes: int, is_exact: bool) -> None:
        if peak_bytes > self.peak_bytes:
            self.peak_bytes = peak_bytes
        if peak_bytes > self.latest_peak_bytes:
            self.latest_peak_bytes, self.is_peak_exact = peak_bytes, is_exact


class Activities:
    """Which micro-batches are at work. The meter's window is open while any is.

    Args:
        meter: of the device.
    """

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._at_work: list[Activity] = []

    @property
    def is_any_at_work(self) -> bool:
        return bool(self._at_work)

    def is_at_work(self, one: Activity) -> bool:
        return one in self._at_work

    def take_up(self, one: Activity) -> None:
        """From now on memory and time are (also) this one's."""
        self._note()  # what came before is only that of those at work before
        self._meter.start_window()
        one.latest_peak_bytes = 0
        one._since = time.perf_counter()
        self._at_work.append(one)
        if len(self._at_work) > 1:
            for each in self._at_work:
                each.is_time_own = False

    def put_down(self, one: Activity) -> None:
        """It waits, or has ended. Nothing happens to one that is not at work."""
        if one not in self._at_work:
            return
        one.stopwatch.stop()
        self._note()
        one.seconds += time.perf_counter() - one._since
        self._at_work.remove(one)
        if not self._at_work:
            self._meter.end_window()

    def turn(self, one: Activity) -> tuple[int, bool]:
        """One that is at work begins with something else: gives the peak since it was taken up, or has turned last, and
        whether that is known exactly."""
        self._note()
        peak = one.latest_peak_bytes, one.is_peak_exact
        self._meter.start_window()
        one.latest_peak_bytes = 0
        return peak

    def put_down_all(self) -> None:
        for one in list(self._at_work):
            self.put_down(one)

    def _note(self) -> None:
        if self._at_work:
            peak_bytes, is_exact = self._meter.peak_bytes(), self._meter.is_peak_exact()
            for one in self._at_work:
                one._note(peak_bytes, is_exact)
