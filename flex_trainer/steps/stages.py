"""What the stages of a forward and a backward took, and the exchanges between ranks that they ended with."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from flex_trainer.experts.handover import Exchange, Work
from flex_trainer.planner.fusion import Side
from flex_trainer.records import PairTimeline, Span
from flex_trainer.strategy import Site

Place = Site | int
"""Where an exchange happens: the experts whose rows are exchanged, or the number of FSDP2's group of parameters."""


class StageKey(NamedTuple):
    """Names a stage of a pass. Those of all ranks are equal where they run the same exchanges."""

    side: Side
    exchange: Exchange | None
    """None: the last stage of its side."""
    is_repeated: bool
    """Whether a recomputation exchanges once more what the forward has exchanged."""
    place: Place | None
    """Of the model."""
    number: int
    """Among those that are equal in all else, from 0."""

    @property
    def code(self) -> str:
        """Side and exchange in short."""
        name = "end" if self.exchange is None else self.exchange.value
        return f"{self.side.value} {'repeated ' if self.is_repeated else ''}{name}"


@dataclass
class RanStage:
    """What one side has computed up to an exchange, and that exchange. Times in seconds; see `StageLog.read`."""

    key: StageKey
    began: float
    started: float
    """When it had computed, and its exchange was started."""
    waited: float = 0.0
    """From when on its side did nothing but wait for it."""
    resumed: float = 0.0
    """When its side went on."""
    has_works: bool = True
    """Whether there was something to wait for."""
    arrivals: list[float] = field(default_factory=list)
    """When its works ended, where that was listened for."""

    @property
    def side(self) -> Side:
        return self.key.side

    @property
    def exchange(self) -> Exchange | None:
        return self.key.exchange

    @property
    def seconds(self) -> float:
        """Of computing."""
        return self.started - self.began

    @property
    def exposed_seconds(self) -> float:
        """In which nothing was computed because of its exchange."""
        return self.resumed - self.waited

    @property
    def arrived(self) -> float:
        """When its exchange had ended; where that was not listened for, and it was there before it was waited for, at
        the latest."""
        return min(max(self.arrivals), self.resumed) if self.arrivals else self.resumed

    @property
    def exchange_seconds(self) -> float:
        """From the start of its exchange to the end."""
        return max(self.arrived - self.started, 0.0)


class StageLog:
    """The stages of a forward and a backward, in the order in which they ended.

    Times are those of the host's clock. Of a GPU these say little, so where it listens, points of the computing stream
    are noted, to be read at the end.

    Args:
        device: which computes.
        listens: whether to time stages and exchanges exactly. On a CPU the communication library calls back for that,
            which takes about 0.1 ms each time; on a GPU, reading waits for the device.
    """

    def __init__(self, device: torch.device, *, listens: bool = False) -> None:
        self.stages: list[RanStage] = []
        self.listens = listens
        self._has_streams = device.type == "cuda"
        self._began: dict[Side, Any] = {}
        self._numbers: Counter[tuple[Side, Exchange | None, bool, Place | None]] = Counter()

    @property
    def times_on_host(self) -> bool:
        """Whether the ends of exchanges are listened for."""
        return self.listens and not self._has_streams

    def begin(self, side: Side) -> None:
        """A side computes from now on."""
        self._began[side] = self._now()

    def exchange_starts(
        self, side: Side, exchange: Exchange, works: Sequence[Work], place: Place, *, is_repeated: bool
    ) -> RanStage:
        """It has started an exchange."""
        stage = self._ended(side, exchange, is_repeated, place)
        stage.has_works = bool(works)
        if self.times_on_host:
            for work in works:
                _listen(work, stage.arrivals)
        return stage

    def waits(self, stage: RanStage) -> None:
        """Its side has nothing else to do, from now on."""
        stage.waited = self._now()

    def resumes(self, stage: RanStage) -> None:
        """The exchange has ended, and the side computes on."""
        stage.resumed = self._began[stage.side] = self._now()

    def end(self, side: Side) -> None:
        """The last stage of a side has ended."""
        stage = self._ended(side, None, is_repeated=False, place=None)
        stage.has_works = False
        stage.waited = stage.resumed = stage.started

    def own_exchange_seconds(self) -> dict[StageKey, float]:
        """By the keys of stages: what their exchanges took, without the time in which one of the other side was under
        way, which the network serves first."""
        found, free = dict.fromkeys((stage.key for stage in self.stages), 0.0), 0.0
        for stage in sorted((one for one in self.stages if one.has_works), key=lambda one: one.started):
            found[stage.key] = max(stage.arrived - max(stage.started, free), 0.0)
            free = max(free, stage.arrived)
        return found

    def of(self, side: Side) -> list[RanStage]:
        return [stage for stage in self.stages if stage.side is side]

    def read(self) -> None:
        """All has run: have numbers in the place of points of a stream. Waits for the device where there are any."""
        if not (self._has_streams and self.listens) or not self.stages:
            return
        first: Any = self.stages[0].began
        for stage in self.stages:
            for name in ("began", "started", "waited", "resumed"):
                mark: Any = getattr(stage, name)
                mark.synchronize()
                setattr(stage, name, first.elapsed_time(mark) / 1e3)

    def _now(self) -> Any:
        if not (self._has_streams and self.listens):
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ended(self, side: Side, exchange: Exchange | None, is_repeated: bool, place: Place | None) -> RanStage:
        now, kind = self._now(), (side, exchange, is_repeated, place)
        began = self._began.get(side, now)
        stage = RanStage(StageKey(*kind, self._numbers[kind]), began, now)
        self._numbers[kind] += 1
        self.stages.append(stage)
        return stage


def timeline(log: StageLog, step: int, micro_batch: int) -> PairTimeline:
    """What ran when, of a log that listened and was read.

    Args:
        step, micro_batch: of the forward.
    """
    origin = min(stage.began for stage in log.stages)
    spans = []
    for stage in log.stages:
        lane = "forward" if stage.side is Side.FORWARD else "backward"
        name = "end" if stage.exchange is None else stage.exchange.value
        spans.append(Span(lane, name, (stage.began - origin) * 1e3, (stage.started - origin) * 1e3))
        if stage.exchange is not None:
            end = stage.started + stage.exchange_seconds
            spans.append(Span(f"{lane} exchange", name, (stage.started - origin) * 1e3, (end - origin) * 1e3))
    end_ms = max(span.end_ms for span in spans)
    return PairTimeline(step, micro_batch, end_ms, tuple(spans))


def _listen(work: Any, arrivals: list[float]) -> None:
    work.get_future().add_done_callback(lambda _: arrivals.append(time.perf_counter()))
