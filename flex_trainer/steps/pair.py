"""A forward and the backward of the micro-batch before it, in turns: each hands over where it waits for other ranks.

    F: attention, router | counts started ->        B: ... experts' backward | rows started ->
    F: <- counts are there; rows started ->         B: <- rows are there; attention's backward ...

An exchange is started, then the other side runs; when the turn comes back, the exchange has had that long. On CUDA one
computing stream is enough: collectives run on streams of their own, and waiting for one only orders streams. On a CPU
gloo works in the background.

What both sides touch is each one's own while it runs: what FSDP2 notes of a pass (compat.FsdpPassState), what a
recomputation changes (activations/aside.py), clocks. A unit of FSDP2 stays gathered while either side is inside of it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence

from flex_trainer.activations.aside import changes_aside, is_recomputing, may_hand_over
from flex_trainer.compat import FsdpPassState
from flex_trainer.experts.handover import Exchange, WaitHere, Work
from flex_trainer.planner.fusion import Side
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.steps.stages import Place, RanStage, StageLog
from flex_trainer.steps.turns import Turns, Worker
from flex_trainer.steps.two_passes import TwoPasses
from flex_trainer.strategy import Site


class Pair:
    """Forward of one micro-batch and backward of another one.

    Args:
        forward, backward: the micro-batches.
        order: see Turns.
        log: its stages are noted there.
        passes: of the model, where its weights are sharded, once the forward has entered the root.
        gradient_flags: of the backward (`FsdpPassState.gradient_flags`).
        on_switch: hears which micro-batch runs next.
        on_exchange: hears of each exchange that has ended, and whose it was.
        room_bytes: what is free now, of which values that are recomputed ahead may take half.
    """

    def __init__(
        self,
        forward: MicroBatch,
        backward: MicroBatch,
        order: Iterable[Side],
        log: StageLog,
        passes: FsdpPassState | None = None,
        gradient_flags: list[tuple[bool, bool]] | None = None,
        on_switch: Callable[[MicroBatch], None] = lambda micro_batch: None,
        on_exchange: Callable[[MicroBatch, RanStage], None] = lambda micro_batch, stage: None,
        room_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._micro_batches = {Side.FORWARD: forward, Side.BACKWARD: backward}
        self.turns = Turns(order, self._switched)
        self.log = log
        self._on_switch = on_switch
        self._on_exchange = on_exchange
        self._room_bytes = room_bytes
        self._sharding = None if passes is None else TwoPasses(passes, gradient_flags or [], self.wait)
        self._sequence = 0

    def start(self, worker: Worker, backward: Callable[[], None]) -> None:
        """The forward begins now, in this thread."""
        if self._sharding is not None:
            self._sharding.begin()
        self.log.begin(Side.FORWARD)

        def run() -> None:
            backward()
            self.log.end(Side.BACKWARD)

        self.turns.start(worker, run)

    def finish(self, error: BaseException | None = None) -> None:
        """The forward has ended: run the backward to its end. See `Turns.finish`."""
        self.log.end(Side.FORWARD)
        try:
            self.turns.finish(error)
        finally:
            if self._sharding is not None:
                self._sharding.end()

    def sequence(self) -> int:
        """See `Waiting.sequence`."""
        return self._sequence

    def wait(self, works: Sequence[Work], exchange: Exchange, place: Place) -> None:
        """A stage of the side that runs has ended with an exchange, which was started: hand over if the order says so,
        then wait for it. A backward that would wait recomputes meanwhile what its layer asks for next.
        """
        side = self.turns.running
        is_repeated = is_recomputing()
        stage = self.log.exchange_starts(side, exchange, works, place, is_repeated=is_repeated)
        self._sequence = zlib.crc32(stage.key.code.encode(), self._sequence)
        is_others = self.turns.next_is_other()
        if is_others and may_hand_over():
            self._hand_over(side)
        if isinstance(place, Site) and side is Side.BACKWARD and not is_repeated:
            self._recompute_ahead(works, place)
        self.log.waits(stage)
        WaitHere().wait(works, exchange)
        self.log.resumes(stage)
        self._on_exchange(self._micro_batches[side], stage)

    def _recompute_ahead(self, works: Sequence[Work], experts: Site) -> None:
        """Until the works are done, or there is nothing to recompute. It has to be done anyhow, so time is not lost."""
        scope = self._micro_batches[Side.BACKWARD].scope
        while scope is not None and not all(work.is_completed() for work in works):
            if not scope.recompute_ahead(experts.layer, experts.name, self._room_ahead()):
                return

    def _room_ahead(self) -> int:
        """Half of what is free beyond what the forward may still take by its plan."""
        forward = self._micro_batches[Side.FORWARD]
        planned_bytes = 0 if forward.plan is None else forward.plan.peak_bytes - forward.ledger.held_bytes
        return max(self._room_bytes() - max(planned_bytes, 0), 0) // 2

    def _hand_over(self, side: Side) -> None:
        micro_batch = self._micro_batches[side]
        scope, stopwatch = micro_batch.scope, micro_batch.activity.stopwatch
        clock = None if scope is None else scope.clock
        mark = None if clock is None else clock.mark()
        is_timed = stopwatch.pause()
        left = time.perf_counter()
        with changes_aside():
            self.turns.hand_over()
        away_seconds = time.perf_counter() - left
        micro_batch.activity.leave_out(away_seconds)
        micro_batch.ledger.leave_out(away_seconds)
        if is_timed:
            stopwatch.start()
        if clock is not None:
            clock.pause(mark)

    def _switched(self, to: Side) -> None:
        if self._sharding is not None:
            self._sharding.switch(to)
        self.log.begin(to)
        self._on_switch(self._micro_batches[to])
