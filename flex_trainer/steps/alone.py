"""A forward or a backward that nothing runs beside: its stages are timed, to know whether a pair would be faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from flex_trainer.activations.aside import is_recomputing
from flex_trainer.compat import FsdpPassState
from flex_trainer.experts.handover import Exchange, WaitHere, Work
from flex_trainer.planner.fusion import Side
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.steps.stages import Place, RanStage, StageLog
from flex_trainer.steps.two_passes import watch_gathers


class Alone:
    """A forward or a backward by itself, whose stages are timed."""

    def __init__(
        self,
        micro_batch: MicroBatch,
        side: Side,
        log: StageLog,
        on_exchange: Callable[[MicroBatch, RanStage], None],
        passes: FsdpPassState | None,
    ) -> None:
        self._micro_batch = micro_batch
        self._side = side
        self._log = log
        self._on_exchange = on_exchange
        self._passes = passes

    @contextmanager
    def run(self) -> Iterator[None]:
        # Gathers are waited for apart only where they are timed, on the host.
        is_watching = self._log.times_on_host
        undo = watch_gathers(self._passes, self.wait) if self._passes is not None and is_watching else []
        self._log.begin(self._side)
        try:
            yield
        finally:
            for one in undo:
                one()
        self._log.end(self._side)

    def wait(self, works: Sequence[Work], exchange: Exchange, place: Place) -> None:
        stage = self._log.exchange_starts(self._side, exchange, works, place, is_repeated=is_recomputing())
        self._log.waits(stage)
        WaitHere().wait(works, exchange)
        self._log.resumes(stage)
        self._on_exchange(self._micro_batch, stage)
