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
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.leaves import tensors_of

Hook = Callable[..., Any]


class InnerHooks:
    """The forward hooks of the modules inside one module, and which of them acted in the first run."""

    __slots__ = ("_acting", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._acting: set[tuple[nn.Module, int]] = set()

    @contextmanager
    def first_run(self, num_saved: Callable[[], int]) -> Iterator[None]:
        """Run the operator inside and see which hooks act. `num_saved`: how many tensors autograd has saved so far."""
        tables = self._tables()
        originals = [dict(table) for _, table in tables]
        for part, table in tables:
            for number, hook in table.items():
                table[number] = self._watched(part, number, hook, num_saved)
        try:
            yield
        finally:
            for (_, table), original in zip(tables, originals, strict=True):
                table.update({number: hook for number, hook in original.items() if number in table})

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Run the operator inside with the hooks that acted, and no others."""
        tables = self._tables()
        originals = [dict(table) for _, table in tables]
        for part, table in tables:
            for number in list(table):
                if (part, number) not in self._acting:
                    del table[number]
        try:
            yield
        finally:
            for (_, table), original in zip(tables, originals, strict=True):
                table.clear()
                table.update(original)

    def _tables(self) -> list[tuple[nn.Module, MutableMapping[int, Hook]]]:
        return [
            (part, table)
            for part in self._module.modules()
            if part is not self._module
            for table in (part._forward_pre_hooks, part._forward_hooks)
            if table
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


def _bound(part: nn.Module) -> dict[str, Any]:
    return {**vars(part), **part._buffers, **part._parameters}


def _is_same(names: dict[str, Any], now: dict[str, Any]) -> bool:
    return names.keys() == now.keys() and all(value is now[name] for name, value in names.items())
