"""Two threads in turns: the order is kept, errors come out where they belong, and nobody waits for ever."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator

import pytest

from flex_trainer.planner.fusion import Side
from flex_trainer.steps.turns import Ended, Turns, Worker

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.stop()


def sides(letters: str) -> list[Side]:
    return [Side(letter) for letter in letters]


def stages(turns: Turns, name: str, count: int, seen: list[str]) -> None:
    """So many stages, each of which ends with an exchange."""
    for number in range(count):
        seen.append(f"{name}{number}")
        if turns.next_is_other():
            turns.hand_over()
    seen.append(f"{name} ends")


def run(worker: Worker, order: str, num_forward: int, num_backward: int) -> list[str]:
    seen: list[str] = []
    turns = Turns(sides(order))
    turns.start(worker, lambda: stages(turns, "b", num_backward, seen))
    stages(turns, "f", num_forward, seen)
    turns.finish()
    return seen


def test_without_an_order_sides_alternate(worker: Worker) -> None:
    assert run(worker, "", 2, 2) == ["f0", "b0", "f1", "b1", "f ends", "b ends"]


def test_the_order_is_kept(worker: Worker) -> None:
    assert run(worker, "BBFFB", 2, 2) == ["b0", "b1", "f0", "f1", "b ends", "f ends"]
    assert run(worker, "FFFFF", 2, 1) == ["f0", "f1", "f ends", "b0", "b ends"]


def test_when_one_side_ends_the_other_goes_on(worker: Worker) -> None:
    assert run(worker, "", 0, 3) == ["f ends", "b0", "b1", "b2", "b ends"]
    assert run(worker, "", 3, 0) == ["f0", "b ends", "f1", "f2", "f ends"]


def test_one_runs_at_a_time(worker: Worker) -> None:
    running: list[int] = []
    turns = Turns(sides("FBBFBFFB" * 20))

    def busy() -> None:
        for _ in range(40):
            running.append(1)
            assert len(running) == 1
            running.pop()
            if turns.next_is_other():
                turns.hand_over()

    turns.start(worker, busy)
    busy()
    turns.finish()


def failing_stages(turns: Turns) -> None:
    if turns.next_is_other():
        turns.hand_over()
    raise LookupError("in the backward")


def test_an_error_of_the_backward_is_raised_with_its_own_traceback(worker: Worker) -> None:
    turns = Turns([])
    turns.start(worker, lambda: failing_stages(turns))
    ended: BaseException | None = None
    try:
        stages(turns, "f", 5, [])
    except BaseException as error:
        ended = error
    assert isinstance(ended, Ended)
    with pytest.raises(LookupError, match="in the backward") as caught:
        turns.finish(ended)
    assert "failing_stages" in "".join(traceback.format_exception(caught.value))


def test_an_error_of_the_backward_after_the_forward(worker: Worker) -> None:
    turns = Turns(sides("F" * 5))
    turns.start(worker, lambda: failing_stages(turns))
    stages(turns, "f", 2, [])
    with pytest.raises(LookupError, match="in the backward"):
        turns.finish()


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_an_error_of_the_forward_ends_the_backward(worker: Worker, num_before: int) -> None:
    seen: list[str] = []
    turns = Turns([])
    turns.start(worker, lambda: stages(turns, "b", 5, seen))
    stages(turns, "f", num_before, [])
    turns.finish(LookupError("in the forward"))  # which the caller raises
    assert "b ends" not in seen
    assert worker_is_free(worker)


def worker_is_free(worker: Worker) -> bool:
    """Whether it takes another job."""
    done = threading.Event()
    worker.run(done.set)
    return done.wait(5)


def test_the_side_that_hands_over_says_who_comes(worker: Worker) -> None:
    switches: list[Side] = []
    turns = Turns([], switches.append)
    turns.start(worker, lambda: stages(turns, "b", 1, []))
    stages(turns, "f", 2, [])
    turns.finish()
    assert switches == sides("BFBF")[: len(switches)] and len(switches) >= 2


def test_context_variables_go_along(worker: Worker) -> None:
    import contextvars

    name = contextvars.ContextVar("name", default="")
    name.set("mine")
    found: list[str] = []
    done = threading.Event()

    def look() -> None:
        found.append(name.get())
        done.set()

    worker.run(look)
    assert done.wait(5) and found == ["mine"]


def test_a_worker_that_was_stopped_starts_again(worker: Worker) -> None:
    assert worker_is_free(worker)
    worker.stop()
    assert worker_is_free(worker)


def test_where_the_backward_cannot_be_started_nobody_waits(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: object) -> None:
        raise RuntimeError("can't start new thread")

    turns = Turns([])
    monkeypatch.setattr(worker, "run", refuse)
    with pytest.raises(RuntimeError, match="new thread") as caught:
        turns.start(worker, lambda: None)
    turns.finish(caught.value)
    monkeypatch.undo()


def test_a_switch_that_fails_wakes_the_forward(worker: Worker) -> None:
    """What is called at a switch may meet a broken device."""
    num_switches = 0

    def switch(side: Side) -> None:
        nonlocal num_switches
        num_switches += 1
        if num_switches == 2:
            raise ArithmeticError("a broken device")

    turns = Turns([], switch)
    turns.start(worker, lambda: None)
    with pytest.raises(Ended):
        stages(turns, "f", 2, [])
    with pytest.raises(ArithmeticError, match="a broken device"):
        turns.finish(Ended())


def test_an_interruption_waits_until_the_backward_has_stopped(worker: Worker) -> None:
    """Ctrl-C reaches the main thread while the backward runs: two threads never run at a time."""
    seen: list[str] = []
    turns = Turns([])
    waiting = turns._changed.wait_for

    def backward() -> None:
        if turns.next_is_other():
            turns.hand_over()
        seen.append("never")

    def interrupted(*args: object, **kwargs: object) -> bool:
        if threading.current_thread() is threading.main_thread() and not seen:
            seen.append("interrupted")
            raise KeyboardInterrupt
        return waiting(*args, **kwargs)  # type: ignore[arg-type]

    turns._changed.wait_for = interrupted  # type: ignore[method-assign, assignment]
    turns.start(worker, backward)
    with pytest.raises(KeyboardInterrupt) as caught:
        stages(turns, "f", 3, [])
    turns.finish(caught.value)
    assert seen == ["interrupted"]
    assert worker_is_free(worker)
