"""What torch keeps for each thread, taken along to another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch


def in_state_of_this_thread(device: torch.device, function: Callable[[], None]) -> Callable[[], None]:
    """`function` under what torch keeps for each thread, as it is on this one now: autocast, device and stream."""
    kinds = [kind for kind in dict.fromkeys(("cpu", device.type)) if torch.is_autocast_enabled(kind)]
    states: list[Callable[[], AbstractContextManager[Any]]] = [_autocast(kind) for kind in kinds]
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        states += [lambda: torch.cuda.device(device), lambda: torch.cuda.stream(stream)]

    def run() -> None:
        with ExitStack() as stack:
            for state in states:
                stack.enter_context(state())
            function()

    return run


def _autocast(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype)
