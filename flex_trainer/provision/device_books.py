"""What belongs to a device, whatever parts of a model run on it: one meter, one limit, one set of books."""

from __future__ import annotations

import warnings

import torch

from flex_trainer.config import AUTO_RESERVE_SHARE, FlexConfig, amount_bytes
from flex_trainer.errors import UserError
from flex_trainer.memory.meter import MemoryMeter, limit_bytes
from flex_trainer.memory.offloading import OffloadService
from flex_trainer.provision.activity import Activities
from flex_trainer.provision.correction import Correction
from flex_trainer.provision.margin import SafetyMargin
from flex_trainer.provision.policy import BudgetBooks
from flex_trainer.provision.rates import LearntRates
from flex_trainer.provision.step_times import learnt_rates
from flex_trainer.strategy import Strategy
from flex_trainer.units import format_bytes

_BUDGET_STEPS = 256
"""Budgets are discretized (rounded down) to this many steps of the limit or more, so that plans are found in the cache.
"""


class MemoryLimitError(UserError, RuntimeError):
    """The memory limit is below what even the minimum-memory plan needs.

    Where a smaller batch may help, the message says "out of memory.": by a RuntimeError with these words accelerate's
    search for a batch size knows that it has to go on.
    """


class BudgetTakenError(MemoryLimitError):
    """An earlier micro-batch in flight took what this one needs: how many there would be was not known in advance."""


class DeviceBooks:
    """Memory of one device: its limit, what is in use and by whom, and what was learnt of it.

    Raises:
        ValueError: an offload directory that cannot be used.
    """

    def __init__(self, config: FlexConfig, device: torch.device, meter: MemoryMeter) -> None:
        self.config = config
        self.device = device
        self.meter = meter
        self.limit_bytes = limit_bytes(config, meter)
        self.offloading = OffloadService(config, device, self.limit_bytes)
        self.activities = Activities(meter)
        self.budgets = BudgetBooks()
        self.correction = Correction()
        self.margin = SafetyMargin()
        self._learnt: LearntRates | None = None
        self.gathered_bytes = 0
        """What FSDP2 needs at one time for all parts on this device."""
        self.nearest_bytes = self.limit_bytes
        self._attempt = 0
        self._warn_of_too_much()

    def start_at(self, transient_factor: float | None, margin_bytes: int) -> None:
        """Begin with what an earlier run has learnt, or (None, 0) with nothing."""
        scheduled = self.budgets
        self.budgets = BudgetBooks()
        self.budgets.follow_schedule(scheduled.scheduled)
        self.correction = Correction()
        self.correction.start_at(transient_factor)
        self.margin = SafetyMargin(margin_bytes)

    @property
    def learnt_rates(self) -> LearntRates:
        """What mitigations were seen to cost here. Made when the first plan is: that is when the machine is probed."""
        if self._learnt is None:
            strategies = [Strategy(name) for name in self.config.strategies]
            self._learnt = learnt_rates(self.device, self.offloading.probed_rates(), strategies)
        return self._learnt

    def check_start(self) -> None:
        """
        Raises:
            MemoryLimitError: the limit is below what is in use before the first micro-batch, and something is to be
                mitigated.
        """
        in_use_bytes = self.meter.in_use_bytes()
        if in_use_bytes >= self.limit_bytes and self.config.strategies:
            raise MemoryLimitError(
                f"{self.limit_text} is below the {format_bytes(in_use_bytes)} in use before the first micro-batch "
                "(weights and all else in the process). Raise memory_limit, or use a smaller model."
            )

    def _warn_of_too_much(self) -> None:
        """On CUDA a limit above the device is harmless: what other processes leave is read with every plan."""
        whole_bytes = self.meter.device_bytes()
        if self.device.type == "cpu" and self.limit_bytes > whole_bytes and self.config.strategies:
            warnings.warn(
                f"{self.limit_text} is more than the {format_bytes(whole_bytes)} of memory that this process can have: "
                "the machine (or its container) is full before the limit is reached, and the system may end the "
                "process without a message. Lower memory_limit, or leave it at 'auto'.",
                stacklevel=4,
            )

    @property
    def limit_text(self) -> str:
        return f"memory_limit={self.config.memory_limit!r} ({format_bytes(self.limit_bytes)})"

    def measure(self, expected_excess_bytes: int = 0) -> tuple[int, int]:
        """Bytes in use, and bytes that a plan may use beside them. Notes which limit is the nearest: something harder
        than memory_limit may be (a data limit, other processes on the device), and shares are then shares of that.

        Args:
            expected_excess_bytes: kept free for what is held beyond a plan, as experience has it.
        """
        in_use_bytes = self.meter.in_use_bytes()
        left_bytes = self.meter.left_bytes(self.limit_bytes)
        self.nearest_bytes = min(self.limit_bytes, in_use_bytes + max(left_bytes, 0))
        left_bytes -= self.gathered_bytes + self._reserve_bytes() + self.margin.num_bytes + expected_excess_bytes
        return in_use_bytes, left_bytes

    @property
    def budget_step_bytes(self) -> int:
        # A power of two: the nearest limit moves a little all the time, and plans are to be found in the cache.
        return 1 << max((self.nearest_bytes // _BUDGET_STEPS).bit_length() - 1, 0)

    @property
    def is_minimum(self) -> bool:
        """Whether micro-batches run under the minimum-memory plan for now."""
        return self._attempt > 1

    def tighten(self, attempt: int, requested_bytes: int) -> None:
        """An allocation failed and the step is retried.

        Args:
            attempt: 1: keep more free, now and for the micro-batches to come; 2: also run under the minimum-memory plan
                until `loosen`.
            requested_bytes: what the failed allocation asked for; 0 when not known.
        """
        self._attempt = attempt
        self.measure()
        self.margin.widen(requested_bytes, self.nearest_bytes)

    def loosen(self) -> None:
        """The step has been run."""
        self._attempt = 0

    def _reserve_bytes(self) -> int:
        reserve = self.config.transient_reserve
        if reserve == "auto":
            return int(AUTO_RESERVE_SHARE * self.nearest_bytes)
        return amount_bytes(reserve, self.limit_bytes)
