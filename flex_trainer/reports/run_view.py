"""What others read of a run: summary and report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flex_trainer.config import FlexConfig, check_is_config
from flex_trainer.records import PairTimeline, RunRecords, StepRetry
from flex_trainer.units import format_bytes

if TYPE_CHECKING:
    from flex_trainer.reports.ranks import RankSummary
    from flex_trainer.reports.summary import RunSummary


class RunView(ABC):
    """The part of a runtime that callbacks, reports and users read.

    Args:
        config: the settings of the run.

    Raises:
        ValueError: something else than a FlexConfig.
    """

    def __init__(self, config: FlexConfig) -> None:
        check_is_config("config", config)
        self.config = config
        self.records = RunRecords()
        """One record per micro-batch (and part of the model): the newest ones, and sums over all."""
        self.retries: list[StepRetry] = []
        """Steps that were rolled back and retried."""
        self.last_pair: PairTimeline | None = None
        """Of the latest forward that a backward ran beside and whose exchanges were timed, if any."""
        self.model_name = ""
        self.device_name = ""

    @property
    @abstractmethod
    def limit_bytes(self) -> int:
        """The memory limit in bytes; 0 before the first `attach`."""

    def summary(self) -> RunSummary:
        """The run so far in a few figures."""
        from flex_trainer.reports.summary import summarize

        return summarize(self.records, self.limit_bytes, self.retries)

    def report(self, path: str | Path, ranks: Sequence[RankSummary] = ()) -> Path:
        """Write the self-contained HTML report of all micro-batches so far and return its path.

        Args:
            ranks: with several processes, what `reports.ranks.gather_ranks` returns: the summary is then of all ranks.

        Raises:
            ValueError: the path cannot be written.
        """
        from flex_trainer.reports.html import write_report

        info = {
            "Model": self.model_name,
            "Device": self.device_name,
            "Strategies": ", ".join(self.config.strategies) or "none",
            "Memory limit": format_bytes(self.limit_bytes),
        }
        write_report(Path(path), self.records, self.limit_bytes, info, self.retries, ranks, self.last_pair)
        return Path(path)
