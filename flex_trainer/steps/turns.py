"""Two threads that take turns: one runs, the other one waits, and which of them runs next is said by an order.

    turns = Turns(order)                     turns.run_beside(backward)      in the other thread, when its turn comes
    F: turns.next()                          hands over if the order says so; returns when F's turn comes again
    B: turns.next()                          the same, from the other side
    F: turns.finish()                        the forward has ended: the backward runs to its end

Never more than one thread runs, so nothing that both touch needs a lock. When one side ends, the other one goes on by
itself. Where a side fails, the other one is ended at its next turn, and the error is raised in the main thread with its
own traceback.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

from flex_trainer.planner.fusion import Side


def other_side(side: Side) -> Side:
    return Side.BACKWARD if side is Side.FORWARD else Side.FORWARD


class Ended(BaseException):
    """Raised in one side because the other one has failed. No `except Exception` of a model's code holds it up."""


class Turns:
    """One forward in the calling thread and one backward in another, in turns.

    Args:
        order: whose stage comes next (forward or backward), stage by stage, from the first on. Where it ends, sides
            alternate.
        on_switch: called by the side that hands over, with the side that is to run next.
    """

    def __init__(self, order: Iterable[Side], on_switch: Callable[[Side], None] = lambda side: None) -> None:
        self._order: Iterator[Side] = iter(order)
        self._on_switch = on_switch
        self._turn = Side.FORWARD
        self._changed = threading.Condition()
        self._ended: set[Side] = set()
        self._error: BaseException | None = None  # of the backward
        self._is_failed = False

    @property
    def running(self) -> Side:
        """Whose turn it is: of the thread that asks, since the other one waits."""
        return self._turn

    @property
    def is_alone(self) -> bool:
        """Whether the other side has ended, or there was none."""
        return other_side(self._turn) in self._ended

    def start(self, worker: Worker, backward: Callable[[], None]) -> None:
        """Called by the forward's thread: have the backward run beside it, from its first turn on."""
        worker.run(lambda: self._run_backward(backward))
        if next(self._order, Side.FORWARD) is Side.BACKWARD:
            self._switch(Side.BACKWARD)

    def next_is_other(self) -> bool:
        """A stage of the running side has ended: whether the order gives the next turn to the other one.

        Raises:
            Ended: the other side has failed.
        """
        if self._is_failed:
            raise Ended
        if self.is_alone:
            return False
        return next(self._order, other_side(self._turn)) is not self._turn

    def hand_over(self) -> None:
        """Let the other side run, and return when it is this one's turn again.

        Raises:
            Ended: the other side has failed.
        """
        self._switch(other_side(self._turn))

    def finish(self, error: BaseException | None = None) -> None:
        """Called by the forward's thread when it has ended: returns when the backward has, too.

        Args:
            error: what the forward has failed with: then the backward is ended at its next turn.

        Raises:
            BaseException: what the backward has failed with.
        """
        self._is_failed = self._is_failed or error is not None
        self._end(Side.FORWARD)
        with self._changed:
            while Side.BACKWARD not in self._ended:
                self._changed.wait()
        if self._error is not None and (error is None or isinstance(error, Ended)):
            raise self._error

    def _run_backward(self, backward: Callable[[], None]) -> None:
        try:
            self._wait_for(Side.BACKWARD)
            backward()
        except BaseException as error:  # raised in the forward's thread
            if not isinstance(error, Ended):
                self._error = error
            self._is_failed = True
        finally:
            self._end(Side.BACKWARD)

    def _switch(self, to: Side) -> None:
        me = self._turn
        self._on_switch(to)
        with self._changed:
            self._turn = to
            self._changed.notify_all()
        self._wait_for(me)

    def _wait_for(self, side: Side) -> None:
        with self._changed:
            while self._turn is not side:
                self._changed.wait()
        if self._is_failed:
            raise Ended

    def _end(self, side: Side) -> None:
        with self._changed:
            self._ended.add(side)
            other = other_side(side)
            if self._turn is side and other not in self._ended:
                self._on_switch(other)
                self._turn = other
            self._changed.notify_all()


class Worker:
    """A thread that runs one function after the other. Threads of compute libraries hang on it, so it is kept."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[[], object]) -> None:
        """Have it run, in the context variables of the calling thread. It must not raise."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="flex-backward", daemon=True)
            self._thread.start()
        context = contextvars.copy_context()
        self._jobs.put(lambda: context.run(job))

    def stop(self) -> None:
        """End the thread once its jobs are done."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it holds lives no longer than it runs
