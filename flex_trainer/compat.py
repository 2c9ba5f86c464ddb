"""All that depends on a version of torch, transformers or accelerate. Each entry says when it can go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Puts the local parts in place of a module's sharded parameters for as long as a context lasts. Private in transformers
# 5.24; goes when torch modules take local parameters by themselves.
from transformers.distributed.parallel_utils import _use_local_dtensor_params as local_parameters

# The grouped product with bias and layout handled. Private in transformers 5.24; goes when it is exported.
from transformers.integrations.moe import _grouped_linear as grouped_linear

# What transformers makes of every decoder layer. Public in the module it stands in, not at the top; goes when it is.
from transformers.modeling_layers import GradientCheckpointingLayer as DecoderLayer
from transformers.utils import import_utils

__all__ = [
    "DecoderLayer",
    "active_torch_modes",
    "as_if_real",
    "grouped_linear",
    "hooks_of_all_modules",
    "local_parameters",
    "made_parametrizations",
    "parametrizations_are_made",
    "release_pinned_cache",
    "top_pack_hook",
]


@contextmanager
def as_if_real() -> Iterator[None]:
    """Let transformers treat fake tensors as real ones: it then skips masks that mask nothing, as in a real run.

    transformers 5.24 takes other paths for fake tensors, which it meets in torch.export only; goes when that can be
    asked for.
    """
    original = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = original


def release_pinned_cache() -> None:
    """Give pinned host memory that torch caches and nobody uses back to the system.

    torch.cuda.empty_cache leaves the host's side alone; goes when torch 2.13's private function is public.
    """
    torch._C._host_emptyCache()


def hooks_of_all_modules() -> list[Callable[..., object]]:
    """The forward hooks that torch runs for every module. Private in torch 2.13; goes when they can be listed."""
    return [*torch_module._global_forward_pre_hooks.values(), *torch_module._global_forward_hooks.values()]


def active_torch_modes() -> list[object]:
    """The modes that see every torch function or operation on this thread now.

    Private in torch 2.13; goes when they can be listed.
    """
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def top_pack_hook() -> Callable[[torch.Tensor], object] | None:
    """The hook that autograd gives tensors to now when it saves them; None where there is none.

    Private in torch 2.13; goes when it can be asked for.
    """
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else hooks[0]


def made_parametrizations() -> tuple[int, dict[tuple[int, str], torch.Tensor | None]]:
    """How many `parametrize.cached()` are open, and what they hold, by the id of the module and the parameter's name.

    Private in torch 2.13; goes when it can be asked for.
    """
    return parametrize._cache_enabled, parametrize._cache


@contextmanager
def parametrizations_are_made(num_caching: int, made: dict[tuple[int, str], torch.Tensor]) -> Iterator[None]:
    """Have `num_caching` contexts `parametrize.cached()` open that hold `made`, whatever is open outside."""
    earlier = made_parametrizations()
    parametrize._cache_enabled, parametrize._cache = num_caching, dict(made)
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = earlier
