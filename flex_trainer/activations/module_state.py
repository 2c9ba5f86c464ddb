"""The module behind an operator, as it was when the operator first ran: a replay must find it so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class ModuleState:
    """Training flags, which a replay restores, and parameters, which it can only check."""

    __slots__ = ("_flags", "_parameters")

    def __init__(self, module: nn.Module) -> None:
        self._flags = [(part, part.training) for part in module.modules()]
        self._parameters = _facts(module)

    @contextmanager
    def restored(self, name: str) -> Iterator[None]:
        """Run with the training flags of the first run.

        Raises:
            RuntimeError: a parameter was exchanged, written to, frozen or unfrozen since.
        """
        root = self._flags[0][0]
        if [fact[1:] for fact in _facts(root)] != [fact[1:] for fact in self._parameters]:
            raise RuntimeError(
                f"the parameters of {name} changed between forward and backward (an optimizer step, exchanged weights, "
                "functional_call, another adapter): what was dropped cannot be computed again. Run backward before the "
                "change, or leave 'recompute' out of strategies."
            )
        now = [(part, part.training) for part, _ in self._flags]
        try:
            for part, is_training in self._flags:
                part.training = is_training
            yield
        finally:
            for part, is_training in now:
                part.training = is_training


def _facts(module: nn.Module) -> list[tuple[torch.UntypedStorage, int, int, bool]]:
    """For every parameter: its storage (held, so that the address stays its own), the address, the version, and whether
    it is trained."""
    return [(storage := p.untyped_storage(), storage._cdata, p._version, p.requires_grad) for p in module.parameters()]
