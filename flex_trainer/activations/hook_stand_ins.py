"""What stands in the place of modules' forward hooks while an operator runs, and does on each thread what its run asks.

A stand-in has the number of its hook, so a hook that is removed meanwhile is removed. It is there as long as any run
needs it; threads without a run call the hook itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

Hook = Callable[..., Any]
Call = Callable[[nn.Module, int, Hook, tuple[Any, ...], dict[str, Any]], Any]
"""What a run does in the place of a hook: (module, number, hook, its args, its kwargs)."""

_KINDS = ("_forward_pre_hooks", "_forward_hooks")
_lock = threading.Lock()
"""Held while stand-ins come and go, never while hooks run."""
_thread = threading.local()  # .runs: those that this thread is in, innermost last


@dataclass(frozen=True)
class HookTable:
    """The hooks of one kind on one module, and the numbers of those that take keyword arguments."""

    part: nn.Module
    kind: str
    hooks: dict[int, Hook]
    takes_kwargs: frozenset[int]

    def only(self, is_wanted: Callable[[nn.Module, int], bool]) -> HookTable:
        hooks = {number: hook for number, hook in self.hooks.items() if is_wanted(self.part, number)}
        return HookTable(self.part, self.kind, hooks, self.takes_kwargs & hooks.keys())


class StandIns:
    """A context in which `call` is asked for each hook of some modules on this thread.

    Args:
        parts: the modules.
        call: see `Call`.
        others: hooks that are called too, in their places, where they are not there any more.
    """

    def __init__(self, parts: list[nn.Module], call: Call, others: Iterable[HookTable] = ()) -> None:
        self.tables: list[HookTable] = []
        """The hooks that were there when the context began."""
        self._parts = parts
        self.call = call
        self._others = {(table.part, table.kind): table for table in others}
        self._used: list[_StandIn] = []

    def __enter__(self) -> StandIns:
        with _lock:
            for part in self._parts:
                for kind in _KINDS:
                    self._install(part, kind)
        if not hasattr(_thread, "runs"):
            _thread.runs = []
        _thread.runs.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _thread.runs.remove(self)
        with _lock:
            for stand_in in self._used:
                stand_in.leave()
            self._used.clear()

    def has(self, part: nn.Module) -> bool:
        return part in self._parts

    def hook_of(self, stand_in: _StandIn) -> Hook | None:
        """The hook in this run; None where it has none of this number."""
        other = self._others.get((stand_in.part, stand_in.kind))
        return stand_in.hook or (None if other is None else other.hooks.get(stand_in.number))

    def _install(self, part: nn.Module, kind: str) -> None:
        hooks: MutableMapping[int, Hook] = getattr(part, kind)
        flags: MutableMapping[int, bool] = getattr(part, f"{kind}_with_kwargs")
        there = {number: hook.hook if isinstance(hook, _StandIn) else hook for number, hook in hooks.items()}
        found = {number: hook for number, hook in there.items() if hook is not None}
        if found:
            self.tables.append(HookTable(part, kind, found, frozenset(flags.keys() & found.keys())))
        other = self._others.get((part, kind))
        missing = [] if other is None else [number for number in other.hooks if number not in hooks]
        if other is not None and missing:
            _put_in_order(hooks, {number: _StandIn(part, kind, number, None) for number in missing}, list(other.hooks))
            flags.update((number, True) for number in missing if number in other.takes_kwargs)
        for number, hook in list(hooks.items()):
            stand_in = hook if isinstance(hook, _StandIn) else _StandIn(part, kind, number, hook)
            stand_in.num_users += 1
            hooks[number] = stand_in
            self._used.append(stand_in)


class _StandIn:
    """In the place of one hook."""

    __slots__ = ("hook", "kind", "num_users", "number", "part")

    def __init__(self, part: nn.Module, kind: str, number: int, hook: Hook | None) -> None:
        self.part = part
        self.kind = kind
        self.number = number
        self.hook = hook
        """None for one that is there for the length of a recomputation only."""
        self.num_users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for run in reversed(getattr(_thread, "runs", ())):
            if run.has(self.part):
                hook = run.hook_of(self)
                return None if hook is None else run.call(self.part, self.number, hook, args, kwargs)
        return None if self.hook is None else self.hook(*args, **kwargs)

    def leave(self) -> None:
        """A run needs it no more."""
        self.num_users -= 1
        hooks: MutableMapping[int, Hook] = getattr(self.part, self.kind)
        if self.num_users or hooks.get(self.number) is not self:
            return
        if self.hook is not None:
            hooks[self.number] = self.hook
        else:
            del hooks[self.number]
            getattr(self.part, f"{self.kind}_with_kwargs").pop(self.number, None)


def _put_in_order(hooks: MutableMapping[int, Hook], more: dict[int, _StandIn], order: list[int]) -> None:
    """Add `more`, each before the next one in `order` that is there."""
    items = list(hooks.items())
    for number in reversed(order):
        if number in more:
            after = order[order.index(number) + 1 :]
            at = next((n for n, (key, _) in enumerate(items) if key in after), len(items))
            items.insert(at, (number, more[number]))
    hooks.clear()
    hooks.update(items)
