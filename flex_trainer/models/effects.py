"""Which code a trace would run that may do more than compute: anything that is not from a library known to be pure.

A trace runs the forward of a copy, so what a forward changes in its own module is changed in the copy. What it changes
elsewhere is changed for good: a list of recorded expert choices that are handed out by call order is one trace further
on, and training goes on with other choices. No run of a copy can show that this did not happen. So only code of
libraries is traced unasked: their modules, with the methods that they were written with.

A function belongs to the file whose globals it has: `functools.wraps` changes names, not that. What it wraps, closes
over or is bound to is looked at as well.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from flex_trainer.compat import active_torch_modes, hooks_of_all_modules

LIBRARIES = frozenset(
    {"torch", "transformers", "accelerate", "peft", "trl", "flex_trainer"}
    | {"bitsandbytes", "torchao", "kernels", "flash_attn", "liger_kernel", "fla", "mamba_ssm", "causal_conv1d"}
)
"""Packages whose modules compute and keep what they keep in themselves."""
_BELOW_THEM = frozenset(
    {"huggingface_hub", "numpy", "packaging", "safetensors", "tokenizers", "tqdm", "regex", "yaml", "requests", "httpx"}
    | {"einops", "triton", "typing_extensions", "sympy", "scipy", "PIL", "psutil", "filelock", "jinja2"}
)
_TRUSTED = LIBRARIES | _BELOW_THEM | sys.stdlib_module_names
_MEASURING = "flex_trainer.bench"
"""Benchmarks count what runs, and must not count a trace."""
_REGISTRIES = (
    ("_attn_implementation", ALL_ATTENTION_FUNCTIONS),
    ("_experts_implementation", ALL_EXPERTS_FUNCTIONS),
)


def foreign_code(model: nn.Module) -> str | None:
    """The first code in `model`'s forward that is of no known library, in words; None where there is none.

    Hooks on single modules do not count: a copy has none but those of libraries (twin.py).
    """
    search = _Search()
    return next(search.findings(model), None)


def is_of_library(function: Any) -> bool:
    """Whether a function, a bound method or another callable object is code of a known library, all the way down."""
    return _Search().foreign(function) is None


def forward_hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """The hooks that run in the forward of these modules."""
    tables = (table for module in modules for table in (module._forward_pre_hooks, module._forward_hooks) if table)
    return [hook for table in tables for hook in table.values()]


class _Search:
    """Looks at every class, function and file once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # ids stay theirs

    def findings(self, model: nn.Module) -> Iterator[str]:
        for name, module in model.named_modules():
            where = f"module {name!r}" if name else "the model"
            for kind in type(module).__mro__:
                found = self._class(kind)
                if found is not None:
                    yield f"{where} ({type(module).__name__}): {found}"
            for key, value in vars(module).items():
                found = self.foreign(value) if callable(value) and not isinstance(value, nn.Module) else None
                if found is not None:
                    yield f"{where} ({type(module).__name__}): its {key} was replaced by {found}"
            found = self.foreign(vars(module).get("_hf_hook"))
            if found is not None:
                yield f"{where}: its hook for accelerate is {found}"
            for parameter in module._parameters.values():
                if not _is_trusted(type(parameter).__module__):
                    yield f"{where}: a parameter is of class {_of_file(type(parameter).__name__, type(parameter))}"
            if isinstance(module, PreTrainedModel):
                for key, registry in _REGISTRIES:
                    chosen = getattr(module.config, key, None)
                    found = self.foreign(registry[chosen]) if chosen in registry.valid_keys() else None
                    if found is not None:
                        yield f"{where}: {chosen!r}, its {key.strip('_')}, is {found}"
        for hook in hooks_of_all_modules():
            found = self.foreign(hook)
            if found is not None:
                yield f"a hook for all modules: {found}"
        for mode in active_torch_modes():
            if not _is_trusted(type(mode).__module__):
                yield f"a torch mode around the forward: {_of_file(type(mode).__name__, type(mode))}"
        for name in ("torch", "torch.nn.functional"):
            found = self._file(name)
            if found is not None:
                yield found
        found = self._members(torch.Tensor)
        if found is not None:
            yield found

    def _class(self, kind: type) -> str | None:
        """What is foreign in a class; one of a user's that defines nothing that runs has nothing."""
        if kind is object or not self._is_new(kind):
            return None
        if not _is_trusted(kind.__module__):
            runs = [key for key, value in vars(kind).items() if _function_of(value) is not None and key != "__init__"]
            return f"{runs[0]} is defined by {_of_file(kind.__name__, kind)}" if runs else None
        return self._members(kind) or self._file(kind.__module__)

    def _members(self, kind: type) -> str | None:
        for key, value in vars(kind).items():
            found = self.foreign(_function_of(value))
            if found is not None:
                return f"{kind.__name__}.{key} was replaced by {found}"
        return None

    def _file(self, name: str) -> str | None:
        """What is foreign among the functions of a file, where one was exchanged."""
        module = sys.modules.get(name)
        if module is None or not self._is_new(module):
            return None
        for key, value in list(vars(module).items()):
            found = self.foreign(value) if isinstance(value, FunctionType) else None
            if found is not None:
                return f"{name}.{key} was replaced by {found}"
        return None

    def foreign(self, function: Any) -> str | None:
        """The first function that is of no library, among a callable and what it calls as far as can be seen."""
        if function is None or isinstance(function, (type, nn.Module)) or not self._is_new(function):
            return None
        if isinstance(function, FunctionType):
            if not _is_trusted(function.__globals__.get("__name__")):
                return _of_file(function.__qualname__, function.__globals__.get("__name__"))
            cells = (_content(cell) for cell in function.__closure__ or ())
            inner = [getattr(function, "__wrapped__", None), *filter(callable, cells)]
        elif isinstance(function, MethodType):
            inner = [function.__func__]
        elif isinstance(function, functools.partial):
            inner = [function.func, *filter(callable, (*function.args, *function.keywords.values()))]
        else:
            kind = type(function)
            if not _is_trusted(kind.__module__):
                return _of_file(kind.__qualname__, kind)
            inner = list(filter(callable, getattr(function, "__dict__", {}).values()))
        return next((found for each in inner if (found := self.foreign(each)) is not None), None)

    def _is_new(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        self._alive.append(thing)
        return True


def _function_of(member: Any) -> Any:
    """The function behind what a class has under a name; None where there is none."""
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    return member if callable(member) and not isinstance(member, (type, nn.Module)) else None


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _is_trusted(module_name: str | None) -> bool:
    if module_name is None or module_name.startswith(_MEASURING):
        return False
    return module_name.partition(".")[0] in _TRUSTED


def _of_file(name: str, of: Any) -> str:
    return f"{name} of {of if isinstance(of, str) else getattr(of, '__module__', None) or 'no file'}"
