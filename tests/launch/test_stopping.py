"""A stop from outside is not lost, wherever it arrives."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest

from flex_trainer.launch.stopping import Terminated, terminated_as_exception


class Finalised:
    """Is sent a signal in the middle of its end, where Python drops what is raised."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        for _ in range(1000):  # the handler runs in here
            pass


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_stop_that_arrives_while_an_object_is_finalised(number: int, error: type[BaseException]) -> None:
    earlier = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    with pytest.raises(error) as raised, terminated_as_exception():
        one: Any = Finalised(number)
        del one
        for _ in range(500):
            time.sleep(0.01)
    assert raised.type is error
    assert (signal.getsignal(signal.SIGTERM), sys.unraisablehook) == earlier


def test_other_errors_that_are_dropped_go_where_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))

    class Failing:
        def __del__(self) -> None:
            raise ValueError

    with terminated_as_exception():
        Failing()
    assert seen == [ValueError]
