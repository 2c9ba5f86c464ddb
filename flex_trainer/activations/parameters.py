"""How a saved parameter comes back to a backward that looks for more on it than numbers.

Some kernels find their place to write on the parameter itself (`weight.main_grad`), and leave marks there. A frozen
parameter comes back as the very object. For a trained one autograd makes a new tensor of what a hook for saved tensors
returns, and drops Python attributes and class. It asks the returned tensor to do so, though: a `_Carrier` answers with
an alias that is a Parameter and has the attributes of the original, to read and to write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_OF_LIBRARIES = frozenset({"_is_hf_initialized"})
"""Marks on most parameters that no backward looks for."""


def for_backward(parameter: nn.Parameter) -> torch.Tensor:
    """What a hook has to return for a saved parameter."""
    if not parameter.requires_grad or vars(parameter).keys() <= _OF_LIBRARIES:
        return parameter
    return _Carrier(parameter)


class _Carrier(torch.Tensor):
    """Stands for a parameter until autograd makes its own tensor of it."""

    _parameter: nn.Parameter

    @staticmethod
    def __new__(cls, parameter: nn.Parameter) -> _Carrier:
        carrier = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.size(),
            strides=parameter.stride(),
            storage_offset=parameter.storage_offset(),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        carrier._parameter = parameter
        return carrier

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        assert func is torch.ops.aten.detach.default, f"autograd calls {func} on what a hook returns"
        parameter = args[0]._parameter
        alias = torch.Tensor._make_subclass(nn.Parameter, parameter.detach(), False)
        vars(alias)  # makes its dictionary, which is exchanged
        alias.__dict__ = parameter.__dict__  # pyright: ignore[reportAttributeAccessIssue]
        return alias
