"""What an optimizer keeps per parameter, by the name in `training.optim`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from flex_trainer.config import nearest
from flex_trainer.errors import UserError

_FLOAT32 = 4
_SMALLEST_8BIT = 4096
"""bitsandbytes keeps the state of smaller tensors in 32 bits."""
_BLOCK_8BIT = 256
"""Elements that share one float32 scale in an 8-bit state."""


@dataclass(frozen=True)
class Optimizer:
    """State tensors per parameter tensor."""

    num_states: int = 0
    """Tensors of the parameter's shape."""
    bits: int = 0
    """Of an element of these; 0: as the parameter."""
    is_factored: bool = False
    """Adafactor: a row and a column of float32 instead, for what has two dimensions or more."""
    copies_in_step: int = 0
    """Temporary tensors of the parameter's shape that exist for all parameters at once during the step: those of
    torch's multi-tensor implementations."""

    def state_bytes(self, shape: Sequence[int], element_bytes: int) -> int:
        """Bytes for one parameter shard of this shape."""
        num_elements = prod(shape)
        if self.is_factored:
            if len(shape) < 2:
                return num_elements * _FLOAT32
            return (prod(shape[:-1]) + prod(shape[:-2]) * shape[-1]) * _FLOAT32
        if self.bits == 8 and num_elements >= _SMALLEST_8BIT:
            num_blocks = -(-num_elements // _BLOCK_8BIT)
            return self.num_states * (num_elements + num_blocks * _FLOAT32)
        if self.bits:
            return self.num_states * num_elements * _FLOAT32
        return self.num_states * num_elements * element_bytes


_ADAM, _ADAM_8, _ADAM_32 = Optimizer(2), Optimizer(2, 8), Optimizer(2, 32)
_LION_8, _LION_32 = Optimizer(1, 8), Optimizer(1, 32)

OPTIMIZERS = {
    "adamw_torch_fused": _ADAM,
    "adamw_torch": Optimizer(2, copies_in_step=1),
    "adamw_bnb_8bit": _ADAM_8,
    "adamw_8bit": _ADAM_8,
    "paged_adamw_8bit": _ADAM_8,
    "paged_adamw_32bit": _ADAM_32,
    "paged_adamw": _ADAM_32,
    "adafactor": Optimizer(is_factored=True),
    "sgd": Optimizer(),
    "adagrad": Optimizer(1),
    "rmsprop": Optimizer(1, copies_in_step=1),
    "lion_8bit": _LION_8,
    "lion_32bit": _LION_32,
    "lion": _LION_32,
    "paged_lion_8bit": _LION_8,
    "paged_lion_32bit": _LION_32,
}
"""By name. State that is paged counts as if it were on the device."""

DEFAULT = "adamw_torch_fused"
"""Of transformers' TrainingArguments."""


def optimizer(name: str) -> Optimizer:
    """The optimizer called `name`.

    Raises:
        ValueError: what it keeps is not known here.
    """
    if name not in OPTIMIZERS:
        raise UserError(
            f"training.optim={name!r}: what it keeps per parameter is not known to the plan; "
            f"{nearest(name, sorted(OPTIMIZERS))}"
        )
    return OPTIMIZERS[name]
