"""What the stages of a fused forward and backward took, and when their exchanges were under way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flex_trainer.experts.handover import Exchange, Work
from flex_trainer.steps.turns import Side


@dataclass
class Stage:
    """What one side computes up to an exchange, and that exchange. Times in seconds of the host's clock."""

    side: Side
    exchange: Exchange | None
    """None: the last stage of its side."""
    is_repeated: bool
    """Whether a recomputation exchanges once more what the forward has exchanged."""
    computes: list[tuple[float, float]]
    """From when to when it has computed. Where it waits in between without handing over, all one stage."""
    started: float = 0.0
    """When the exchange was started."""
    waited: float = 0.0
    """From when on the side did nothing but wait for it."""
    arrived: float = 0.0
    """When it was first seen to have ended."""
    works: list[Any] = field(default_factory=list)

    @property
    def code(self) -> str:
        """Side and exchange in short."""
        name = "end" if self.exchange is None else self.exchange.value
        return f"{self.side.value} {'repeated ' if self.is_repeated else ''}{name}"

    @property
    def seconds(self) -> float:
        """Of computing."""
        return sum(end - start for start, end in self.computes)

    @property
    def exchange_seconds(self) -> float:
        return self.arrived - self.started

    @property
    def exposed_seconds(self) -> float:
        """In which nobody computed because of it."""
        return max(self.arrived - self.waited, 0.0) if self.exchange is not None else 0.0


class StageLog:
    """The stages of one pair, in the order in which they ended."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._began: dict[Side, float] = {}
        self._under_way: list[Stage] = []

    def begin(self, side: Side) -> None:
        """A side computes from now on."""
        self._began[side] = time.perf_counter()

    def exchange_starts(self, side: Side, exchange: Exchange, *, is_repeated: bool, works: Sequence[Work]) -> Stage:
        """It has started an exchange."""
        now = time.perf_counter()
        self.look(now)
        stage = Stage(side, exchange, is_repeated, [(self._began[side], now)], started=now, works=list(works))
        self.stages.append(stage)
        self._under_way.append(stage)
        return stage

    def waits(self, stage: Stage) -> None:
        """Its side has nothing else to do, from now on."""
        stage.waited = time.perf_counter()
        self.look(stage.waited)

    def resumes(self, stage: Stage) -> None:
        """The exchange has ended, and the side computes on."""
        now = time.perf_counter()
        if stage in self._under_way:
            self._under_way.remove(stage)
            stage.arrived = now
            stage.works.clear()
        self.look(now)
        self._began[stage.side] = now

    def end(self, side: Side) -> None:
        """The last stage of a side has ended."""
        now = time.perf_counter()
        self.stages.append(Stage(side, None, False, [(self._began.get(side, now), now)], now, now, now))

    def look(self, now: float) -> None:
        """Note which exchanges have ended by now."""
        for stage in list(self._under_way):
            if all(work.is_completed() for work in stage.works):
                stage.arrived = now
                stage.works.clear()
                self._under_way.remove(stage)
