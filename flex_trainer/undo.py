"""Replacing an attribute of an object so that it can be given back exactly as it was."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

_ABSENT = object()
_KEY = "_flex_replaced"


class _Table(dict[str, list["_Replacement"]]):
    """What was replaced on one object. A copy of that object has nothing replaced."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Table:
        return _Table()


class _Method:
    """Stands in for a method of one instance. A deep copy of the instance gets its class's method, not this."""

    def __init__(self, owner: Any, name: str, function: Callable[..., Any], earlier: Any) -> None:
        functools.update_wrapper(self, function)
        self._owner = weakref.ref(owner)
        self._name = name
        self._function = function
        self._earlier = earlier

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = self._owner()
        copied = memo.get(id(owner))
        if self._earlier is not _ABSENT:
            return copy.deepcopy(self._earlier, memo)
        return self if copied is None else getattr(type(owner), self._name).__get__(copied)


@dataclass(eq=False)
class _Replacement:
    new: Any
    earlier: Any
    """What the object itself held, or `_ABSENT` where its class (or nothing) supplied the attribute."""


def replace_attribute(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Set an attribute on an instance, and return the function that undoes it.

    Undoing gives back an attribute of the instance, or uncovers the one of the class. It may be done in any order: what
    was put on top later stays, and when that is undone in turn, the one that has gone is not brought back. A function
    that calls what it replaced may thus be called after its own undo, by the one on top; it should then only hand on.
    Calling the undo a second time does nothing.

    Args:
        owner: an instance with a `__dict__`.
        name: an attribute of it, or of its class, or none yet; not a property, which would win over the instance.
        new: the value.
    """
    space = vars(owner)
    replacements: _Table = space.setdefault(_KEY, _Table())
    earlier = space.get(name, _ABSENT)
    if isinstance(new, FunctionType) and hasattr(type(owner), name):
        new = _Method(owner, name, new, earlier)
    mine = _Replacement(new, earlier)
    replacements.setdefault(name, []).append(mine)
    # Into the instance's own namespace: nn.Module's setattr would file a module among its children.
    space[name] = new

    def undo() -> None:
        of_name = replacements.get(name, [])
        if mine not in of_name:
            return
        of_name.remove(mine)
        above = next((other for other in of_name if other.earlier is new), None)
        if above is not None:
            above.earlier = mine.earlier
        elif space.get(name, _ABSENT) is new:
            if mine.earlier is _ABSENT:
                del space[name]
            else:
                space[name] = mine.earlier
        if not of_name:
            del replacements[name]
        if not replacements:
            space.pop(_KEY, None)

    return undo


def take_off_copy(original: Any, copied: Any) -> None:
    """Give a deep copy of an object what the object had before anything was replaced on it.

    A copy finds its own methods by itself; a function under a name that the class does not have is copied as it is.
    """
    space = vars(copied)
    for name, replacements in vars(original).get(_KEY, {}).items():
        first = replacements[0]
        if space.get(name, _ABSENT) is not vars(original).get(name, _ABSENT):
            continue
        if first.earlier is _ABSENT:
            del space[name]
        else:
            space[name] = first.earlier
