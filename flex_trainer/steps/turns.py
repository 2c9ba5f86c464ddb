"""Two threads that take turns: one runs, the other one waits, and which of them runs next is said by an order.

    turns.start(worker, backward)            the backward waits in the worker's thread for its first turn
    F: if turns.next_is_other():             the order says whose stage comes next
           turns.hand_over()                 returns when F's turn comes again
    turns.finish()                           the forward has ended: the backward runs to its end

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

_JOIN_SECONDS = 10.0


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
        self._has_started = False

    @property
    def running(self) -> Side:
        """Whose turn it is: of the thread that asks, since the other one waits."""
        return self._turn

    @property
    def is_alone(self) -> bool:
        """Whether the other side has ended, or there was none."""
        return other_side(self._turn) in self._ended

    def start(self, worker: Worker, backward: Callable[[], None]) -> None:
        """Called by the forward's thread: have the backward run beside it, from its first turn on.

        Raises:
            Ended: the backward has failed in its first turn.
        """
        worker.run(lambda: self._run_backward(backward))
        self._has_started = True
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
        if not self._has_started:
            return
        self._is_failed = self._is_failed or error is not None
        self._end(Side.FORWARD)
        interruption = self._until(lambda: Side.BACKWARD in self._ended)
        if self._error is not None and (error is None or isinstance(error, Ended)):
            raise self._error
        if interruption is not None:
            raise interruption

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
        interruption = self._until(lambda: self._turn is side or side is Side.FORWARD and Side.BACKWARD in self._ended)
        if interruption is not None:
            raise interruption
        if self._is_failed:
            raise Ended

    def _until(self, is_reached: Callable[[], bool]) -> BaseException | None:
        """Wait. An interruption from outside (Ctrl-C) ends the other side at its next turn, and is returned only then:
        two threads never run at a time. A second one is raised at once."""
        try:
            with self._changed:
                self._changed.wait_for(is_reached)
            return None
        except BaseException as interruption:
            self._is_failed = True
            with self._changed:
                self._changed.wait_for(lambda: Side.BACKWARD in self._ended)
            return interruption

    def _end(self, side: Side) -> None:
        with self._changed:
            self._ended.add(side)
            other = other_side(side)
            try:
                if self._turn is side and other not in self._ended:
                    self._on_switch(other)
            except BaseException as error:  # raised in the forward's thread, which must wake up for that
                self._error, self._is_failed = self._error or error, True
            finally:
                if self._turn is side and other not in self._ended:
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
            self._thread.join(_JOIN_SECONDS)  # after an error it may wait for a rank that is gone
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it holds lives no longer than it runs
