"""Which micro-batches are looked at saved tensor by saved tensor, and which run without.

Where everything is kept and there is room to spare, sizes that were right before are right again, and the look costs
more than it tells. It is taken all the same now and then, and whenever something else is trained or run (which is part
of a batch's kind): what is saved may change while shapes stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from flex_trainer.activations.known import KnownForward
from flex_trainer.provision.micro_batch import MicroBatch

_ROOM_SHARE = 0.75
"""Of what a plan may take: with a predicted peak above this, sizes have to be right, and every micro-batch is watched.
"""
_TOLERANCE = 0.01
"""Held over predicted up to which sizes count as right."""
_MIN_RIGHT = 2
_MAX_INTERVAL = 64
_MAX_KINDS = 64


@dataclass
class _History:
    """Micro-batches of one kind."""

    num_right: int = 0
    """Watched ones in a row that held what was predicted."""
    num_unwatched: int = 0
    """Since the last watched one."""
    longest: int = 0
    """Sequence that was watched and held what was predicted."""
    most_rows: int = 0


class Watching:
    """Decides for each micro-batch of a part of a model."""

    def __init__(self) -> None:
        self._histories: dict[tuple[str, bool, bool], _History] = {}

    def known(self, micro_batch: MicroBatch) -> KnownForward | None:
        """What a micro-batch will hold, if it may run without a look at each saved tensor; None if not."""
        plan, shape = micro_batch.plan, micro_batch.shape
        history = self._history(micro_batch)
        may_run = (
            plan is not None
            and not plan.strategies
            and plan.peak_bytes <= _ROOM_SHARE * micro_batch.room_bytes
            and history.num_right >= _MIN_RIGHT
            and history.num_unwatched < min(2 ** (history.num_right - _MIN_RIGHT), _MAX_INTERVAL)
            and shape.sequence_length <= history.longest
            and shape.batch_size <= history.most_rows
        )
        if plan is None or not may_run:
            history.num_unwatched = 0
            return None
        history.num_unwatched += 1
        return KnownForward(plan.predicted_bytes, plan.held_until)

    def note(self, micro_batch: MicroBatch) -> None:
        """Backward has ended; the plan is what it came to with the rows that arrived."""
        assert micro_batch.scope is not None
        plan, history, shape = micro_batch.plan, self._history(micro_batch), micro_batch.shape
        if plan is None or plan.strategies:
            return
        if not micro_batch.scope.is_traced:
            if micro_batch.own_peak_bytes > micro_batch.room_bytes:
                history.num_right = 0  # it was to stay far below
            return
        if abs(micro_batch.actual_bytes - plan.predicted_bytes) > _TOLERANCE * plan.predicted_bytes:
            history.num_right = 0
            return
        history.num_right += 1
        history.longest = max(history.longest, shape.sequence_length)
        history.most_rows = max(history.most_rows, shape.batch_size)

    def _history(self, micro_batch: MicroBatch) -> _History:
        shape = micro_batch.shape
        # Batches of one row run other operators in some models.
        key = shape.kind, shape.has_padding, shape.batch_size == 1
        if key not in self._histories and len(self._histories) >= _MAX_KINDS:
            del self._histories[next(iter(self._histories))]
        return self._histories.setdefault(key, _History())
