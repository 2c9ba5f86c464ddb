"""Forward hooks of others inside an operator: those that only look on run once, those that act run in recomputations
too.

A load counter or a tracker of outputs must not count a recomputation. A hook that changes what it is given has to run
again, or the recomputation computes something else. Which is which shows in the first run: a hook *acts* when it
returns something, changes a tensor in place, sets an attribute of its module, draws random numbers, or computes
something that autograd saves.

Hooks of the operator's own module lie outside of what is recomputed, and hooks of all modules (torch's
`register_module_forward_hook`) always run.

Two threads may run one module at a time: the forward of a micro-batch, and a recomputation for another. What stands in
the place of a hook meanwhile (hook_stand_ins.py) asks which run its thread is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.hook_stand_ins import Hook, HookTable, StandIns
from flex_trainer.activations.leaves import tensors_of
from flex_trainer.activations.model_tensors import modules_of


class InnerHooks:
    """The forward hooks of the modules inside one module, and which of them acted in the first run."""

    __slots__ = ("_acting", "_first", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._acting: set[tuple[nn.Module, int]] = set()
        # Hooks may be gone by the time of a recomputation (one that was put there for the length of a forward).
        self._first: list[HookTable] = []

    @contextmanager
    def first_run(self, num_saved: Callable[[], int]) -> Iterator[None]:
        """Run the operator inside and see which hooks act. `num_saved`: how many tensors autograd has saved so far."""

        def call(part: nn.Module, number: int, hook: Hook, args: Any, kwargs: Any) -> Any:
            return self._watched(part, number, hook, num_saved, args, kwargs)

        with StandIns(self._parts(), call) as stand_ins:
            self._first = stand_ins.tables
            yield

    def are_none(self) -> bool:
        """Whether there are no such hooks now, and were none in the first run: then nothing has to be done."""
        return not self._first and not any(part._forward_hooks or part._forward_pre_hooks for part in self._parts())

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Run the operator inside with the hooks of the first run that acted, and no others."""

        def call(part: nn.Module, number: int, hook: Hook, args: Any, kwargs: Any) -> Any:
            return hook(*args, **kwargs) if (part, number) in self._acting else None

        acting = [table.only(lambda part, number: (part, number) in self._acting) for table in self._first]
        with StandIns(self._parts(), call, acting):
            yield

    def _parts(self) -> list[nn.Module]:
        return [part for part in modules_of(self._module) if part is not self._module]

    def _watched(
        self, part: nn.Module, number: int, hook: Hook, num_saved: Callable[[], int], args: Any, kwargs: Any
    ) -> Any:
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


def _bound(part: nn.Module) -> dict[str, Any]:
    return {**vars(part), **part._buffers, **part._parameters}


def _is_same(names: dict[str, Any], now: dict[str, Any]) -> bool:
    return names.keys() == now.keys() and all(value is now[name] for name, value in names.items())
