"""A run that is stopped from outside, by Ctrl-C or by the system's request to end, still says how far it came."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from flex_trainer.ranks import num_launched

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
_AGAIN_SECONDS = 0.02


class Terminated(KeyboardInterrupt):
    """SIGTERM has arrived: what schedulers and launchers send before they end a process."""


@contextmanager
def terminated_as_exception() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated where it would end the process at once. Outside of the main thread, which alone
    gets signals, nothing changes.

    Python prints and drops what is raised while an object is finalised, and a training step finalises thousands. A stop
    that is dropped so, by SIGTERM or Ctrl-C, is asked for again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier, earlier_hook = signal.signal(signal.SIGTERM, _raise), sys.unraisablehook

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            earlier_hook(unraisable)
            return
        number = signal.SIGTERM if issubclass(unraisable.exc_type, Terminated) else signal.SIGINT
        # Not at once: it would be raised, and dropped, in here.
        again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = earlier_hook
        signal.signal(signal.SIGTERM, earlier)


@contextmanager
def not_stopped_again() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM are ignored: a terminal sends one to every process, and launchers the other after
    it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, signal.SIG_IGN) for number in _EXIT_CODES}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def stop_as_exit_code() -> Iterator[None]:
    """End with the exit code of the signal that stopped what is inside, and no traceback."""
    try:
        yield
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        print(f"Stopped by {number.name}.", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        if num_launched() > 1:
            os._exit(_EXIT_CODES[number])  # destroying the process group would wait for the other ranks
        sys.exit(_EXIT_CODES[number])


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated
