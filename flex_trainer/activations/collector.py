"""Python's cyclic collector, held off for a while."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses: list[bool] = []
"""Of each pause that lasts: whether the collector was on when the first of them began."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Leave the cyclic collector off inside; pauses of several threads may overlap. It is turned on again only where it
    was on, and only by the last."""
    with _lock:
        _pauses.append(_pauses[0] if _pauses else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            was_on = _pauses.pop()
            if was_on and not _pauses:
                gc.enable()
