"""`ep_implementation="flex"` is known to transformers as soon as flex_trainer and transformers' models are imported, in
whichever order: `import flex_trainer` itself does not pay for torch and transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from flex_trainer.experts.dispatch import FlexEP

NAME = "flex"
_MODELS_MODULE = "transformers.modeling_utils"  # no model is loaded without it


def register() -> None:
    """Register "flex", now or when transformers' models are imported."""
    if _MODELS_MODULE in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport(_MODELS_MODULE, _register))


def _register() -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    EPImplementationInterface.register(NAME, _make)


def _make(experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> FlexEP:
    # Not before: what it needs of transformers may be half imported while `_register` runs.
    from flex_trainer.experts.dispatch import FlexEP

    return FlexEP(experts, ep_mesh, tp_mesh)


class _AfterImport(MetaPathFinder):
    """Calls `action` once the module of that name has been executed, and leaves the import system as it was."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._action)
        return spec


class _Loader(Loader):
    """A loader with something to do after it."""

    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action()
