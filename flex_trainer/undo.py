"""Replacing an attribute of an object so that it can be given back exactly as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ABSENT = object()
_KEY = "_flex_replaced"


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
    replacements: dict[str, list[_Replacement]] = space.setdefault(_KEY, {})
    mine = _Replacement(new, space.get(name, _ABSENT))
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
