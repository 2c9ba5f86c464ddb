"""The global random streams of Python and numpy, which operators may draw from as well.

Reading both takes 0.15 ms, more than all else that a recomputed region costs. But they hardly ever move, and that shows
in their raw memory, which is compared for the price of a copy of 5 KB: they are read once, and again after a draw.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import threading
from functools import cache
from typing import Any

import numpy as np

_NUM_WORDS = 625
"""Of a Mersenne twister: 624 words of state and a position."""
_NUM_BYTES = 4 * _NUM_WORDS
_HEADER_BYTES = object.__basicsize__
"""A reference count, which changes all the time, and the type."""

_PYTHON: Any = getattr(random.getstate, "__self__", None)
_NUMPY: Any = getattr(np.random.get_state, "__self__", None)
_NUMPY_CACHE, _NUMPY_CACHE_BYTES = id(_NUMPY) + _HEADER_BYTES, type(_NUMPY).__basicsize__ - _HEADER_BYTES
"""What numpy's stream keeps beside its generator: normal numbers drawn in advance."""
_bytes_at = ctypes.string_at
_thread = threading.local()


class HostRandom:
    """Both streams at one point."""

    __slots__ = ("_numpy", "_python", "_raw")

    def __init__(self, raw: tuple[Any, ...]) -> None:
        self._raw = raw
        self._python: Any = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=False)

    @classmethod
    def capture(cls) -> HostRandom:
        """The streams as they are now. One object serves all operators between two draws."""
        last: HostRandom | None = getattr(_thread, "last", None)
        raw = _raw()
        if last is None or last._raw != raw:
            last = _thread.last = cls(raw)
        return last

    def put_back(self) -> None:
        """Have the streams go on from here; nothing is done where they have not moved."""
        if _raw() != self._raw:
            random.setstate(self._python)
            np.random.set_state(self._numpy)


def _raw() -> tuple[Any, ...]:
    """Both streams' states in a form that compares: equal only where the streams are."""
    # numpy's generator may be exchanged (`set_bit_generator`).
    python, numpy = _python_address(), _numpy_address(np.random.mtrand.get_bit_generator())
    return (
        pickle.dumps(random.getstate()) if python is None else _bytes_at(python, _NUM_BYTES),
        None if python is None else _PYTHON.gauss_next,  # every second normal number is drawn in advance
        pickle.dumps(np.random.get_state(legacy=False)) if numpy is None else _bytes_at(numpy, _NUM_BYTES),
        _bytes_at(_NUMPY_CACHE, _NUMPY_CACHE_BYTES),
    )


@cache
def _python_address() -> int | None:
    """Of the state of the stream behind the module's functions: in CPython a position and 624 words after the object's
    header, which is checked. None where it is not."""
    if type(_PYTHON) is not random.Random or type(_PYTHON).__basicsize__ < _HEADER_BYTES + _NUM_BYTES:
        return None
    address = id(_PYTHON) + _HEADER_BYTES
    position, *words = struct.unpack(f"{_NUM_WORDS}I", ctypes.string_at(address, _NUM_BYTES))
    return address if (*words, position) == random.getstate()[1] else None


@cache
def _numpy_address(generator: Any) -> int | None:
    """Of a bit generator's state, as numpy's `ctypes` interface says; checked to be a Mersenne twister's words and
    position. None for generators of other kinds."""
    state = generator.state
    if state.get("bit_generator") != "MT19937":
        return None
    address = int(generator.ctypes.state_address)
    *words, position = struct.unpack(f"{_NUM_WORDS}I", ctypes.string_at(address, _NUM_BYTES))
    is_there = position == state["state"]["pos"] and words == state["state"]["key"].tolist()
    return address if is_there else None
