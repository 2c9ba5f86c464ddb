"""Parameters that have changed since an operator's first run: its recomputation may run, unless it reads them.

Others may have changed: an optimizer that runs in backward writes each weight once its gradient is there, and an
operator may be a part of a module.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Guard:
    """Raises when one of a module's changed parameters is read.

    Args:
        changed: names in the module, and from the operator's module on.
    """

    def __init__(self, module: nn.Module, changed: dict[str, str], operator: str) -> None:
        self._module = module
        self._parameters = module._parameters
        self._guarded = _GuardedParameters(module._parameters)
        self._guarded.changed, self._guarded.operator = changed, operator

    def install(self) -> None:
        vars(self._module)["_parameters"] = self._guarded

    def remove(self) -> None:
        vars(self._module)["_parameters"] = self._parameters


class _GuardedParameters(dict[str, Any]):
    """A module's parameters, some of which must not be read."""

    changed: dict[str, str]
    operator: str

    def __getitem__(self, name: str) -> Any:
        if name in self.changed:
            raise parameters_changed(f"parameter {self.changed[name]} of {self.operator}")
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - this is get

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


def parameters_changed(what: str) -> RuntimeError:
    """The error of a recomputation that does not find the parameters of the first run."""
    return RuntimeError(
        f"{what} changed between forward and backward (an optimizer step, exchanged weights, functional_call, another "
        "adapter): what was dropped cannot be computed again. Run backward before the change, or leave 'recompute' out "
        "of strategies."
    )
