"""Forward hooks of others inside an operator: those that only look on run once, those that act run in replays too.

A load counter or a tracker of outputs must not count a replay. A hook that changes what it is given has to run again,
or the replay computes something else. Which is which shows in the first run: a hook *acts* when it returns something,
changes a tensor in place, sets an attribute of its module, draws random numbers, or computes something that autograd
saves.

Hooks of the operator's own module lie outside of what is replayed, and hooks of all modules (torch's
`register_module_forward_hook`) always run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.leaves import tensors_of
from flex_trainer.activations.model_tensors import modules_of

Hook = Callable[..., Any]


@dataclass(frozen=True)
class _Table:
    """The hooks of one kind on one module, and which of them take keyword arguments."""

    part: nn.Module
    kind: str
    hooks: MutableMapping[int, Hook]
    flags: MutableMapping[int, bool]


class InnerHooks:
    """The forward hooks of the modules inside one module, and which of them acted in the first run."""

    __slots__ = ("_acting", "_first", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._acting: set[tuple[nn.Module, int]] = set()
        self._first: dict[tuple[nn.Module, str], tuple[dict[int, Hook], dict[int, bool]]] = {}

    @contextmanager
    def first_run(self, num_saved: Callable[[], int]) -> Iterator[None]:
        """Run the operator inside and see which hooks act. `num_saved`: how many tensors autograd has saved so far."""
        tables = [table for table in self._tables() if table.hooks]
        # Hooks may be gone by the time of a replay (one that was put there for the length of a forward).
        self._first = {(table.part, table.kind): (dict(table.hooks), dict(table.flags)) for table in tables}
        for table in tables:
            for number, hook in list(table.hooks.items()):
                table.hooks[number] = self._watched(table.part, number, hook, num_saved)
        try:
            yield
        finally:
            for table in tables:
                first, _ = self._first[table.part, table.kind]
                table.hooks.update({number: hook for number, hook in first.items() if number in table.hooks})

    def are_none(self) -> bool:
        """Whether there are no such hooks now, and were none in the first run: then nothing has to be done."""
        return not self._first and not any(
            part._forward_hooks or part._forward_pre_hooks
            for part in modules_of(self._module)
            if part is not self._module
        )

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run the operator inside with the hooks of the first run that acted, and no others."""
        tables = self._tables()
        now = [(dict(table.hooks), dict(table.flags)) for table in tables]
        for table in tables:
            hooks, flags = self._first.get((table.part, table.kind), ({}, {}))
            acting = {number: hook for number, hook in hooks.items() if (table.part, number) in self._acting}
            _replace(table.hooks, acting)
            _replace(table.flags, {number: flag for number, flag in flags.items() if number in acting})
        try:
            yield
        finally:
            for table, (hooks, flags) in zip(tables, now, strict=True):
                _replace(table.hooks, hooks)
                _replace(table.flags, flags)

    def _tables(self) -> list[_Table]:
        return [
            _Table(part, kind, getattr(part, kind), getattr(part, f"{kind}_with_kwargs"))
            for part in self._module.modules()
            if part is not self._module
            for kind in ("_forward_pre_hooks", "_forward_hooks")
        ]

    def _watched(self, part: nn.Module, number: int, hook: Hook, num_saved: Callable[[], int]) -> Hook:
        def watched(*args: Any, **kwargs: Any) -> Any:
            tensors = [tensor for tensor in tensors_of(args[1:], kwargs) if not tensor.is_inference()]
            versions, names = [tensor._version for tensor in tensors], _bound(part)
            saved, stream = num_saved(), torch.get_rng_state()
            result = hook(*args, **kwargs)
            is_idle = (
                result is None
                and versions == [tensor._version for tensor in tensors]
                and saved == num_saved()
                and torch.equal(stream, torch.get_rng_state())
                and _is_same(names, _bound(part))
            )
            if not is_idle:
                self._acting.add((part, number))
            return result

        return watched


def _replace(table: MutableMapping[int, Any], items: dict[int, Any]) -> None:
    table.clear()
    table.update(items)


def _bound(part: nn.Module) -> dict[str, Any]:
    return {**vars(part), **part._buffers, **part._parameters}


def _is_same(names: dict[str, Any], now: dict[str, Any]) -> bool:
    return names.keys() == now.keys() and all(value is now[name] for name, value in names.items())
