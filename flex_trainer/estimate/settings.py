"""What a plan needs to know of a recipe, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flex_trainer.config import AUTO_LIMIT_SHARE, AUTO_RESERVE_SHARE, amount_bytes, in_flight_bound_bytes
from flex_trainer.cost.hardware import Hardware
from flex_trainer.errors import UserError
from flex_trainer.estimate.optimizers import DEFAULT, optimizer
from flex_trainer.estimate.stage import Precision
from flex_trainer.launch.recipe import Recipe
from flex_trainer.strategy import Strategy
from flex_trainer.units import format_bytes


@dataclass(frozen=True)
class Settings:
    """One way to run: a recipe's values, or those of a change that is tried."""

    batch_size: int
    """Samples per device in a micro-batch."""
    sequence_length: int
    num_micro_batches: int
    """gradient_accumulation_steps."""
    fsdp: int
    ep: int
    pp: int
    num_ranks: int | None
    dispatch: str
    """How tokens reach the experts of other ranks: flex or all_to_all."""
    precision: Precision
    optim: str
    strategies: tuple[Strategy, ...]
    method: str
    """The planner's."""
    limit_bytes: int
    reserve_bytes: int

    @property
    def in_flight_bytes(self) -> int:
        """Most that offload copies may hold."""
        if Strategy.OFFLOAD not in self.strategies:
            return 0
        return in_flight_bound_bytes(self.limit_bytes)


def settings_of(recipe: Recipe, hardware: Hardware, num_ranks: int | None, compute_dtype: torch.dtype) -> Settings:
    """Read a checked recipe's sections.

    Args:
        num_ranks: ranks in all; None: replicate x fsdp x pp.
        compute_dtype: of the model's weights where they are used.

    Raises:
        ValueError: a limit above the device's memory, an optimizer whose state is not known.
    """
    training: dict[str, Any] = recipe.training
    optim = str(training.get("optim", DEFAULT))
    optimizer(optim)
    if num_ranks is not None and num_ranks < 1:
        raise UserError(f"--ranks {num_ranks} must be at least 1")
    limit_bytes = recipe.flex.limit_bytes(hardware.memory_bytes, int(AUTO_LIMIT_SHARE * hardware.memory_bytes))
    if limit_bytes > hardware.memory_bytes:
        raise UserError(
            f"flex.memory_limit={recipe.flex.memory_limit!r} is {format_bytes(limit_bytes)}, more than the "
            f"{format_bytes(hardware.memory_bytes)} of {hardware.title}; lower it, or choose another --hardware"
        )
    reserve = recipe.flex.transient_reserve
    reserve_bytes = int(AUTO_RESERVE_SHARE * limit_bytes) if reserve == "auto" else amount_bytes(reserve, limit_bytes)
    return Settings(
        batch_size=training.get("per_device_train_batch_size", 8),
        sequence_length=recipe.data.sequence_length,
        num_micro_batches=training.get("gradient_accumulation_steps", 1),
        fsdp=recipe.parallel.fsdp,
        ep=recipe.parallel.ep,
        pp=recipe.parallel.pp,
        num_ranks=num_ranks or (recipe.parallel.num_ranks if recipe.parallel.replicate > 1 else None),
        dispatch=recipe.parallel.dispatch,
        precision=_precision(training, compute_dtype),
        optim=optim,
        strategies=tuple(Strategy(name) for name in recipe.flex.strategies),
        method="optimal" if recipe.flex.planner == "auto" else recipe.flex.planner,
        limit_bytes=limit_bytes,
        reserve_bytes=reserve_bytes,
    )


def _precision(training: dict[str, object], compute_dtype: torch.dtype) -> Precision:
    autocast = torch.bfloat16 if training.get("bf16") else torch.float16 if training.get("fp16") else None
    if autocast is not None or compute_dtype in (torch.bfloat16, torch.float16):
        return Precision(autocast, "bfloat16")  # float16 runs as fast
    return Precision(None, "tf32" if training.get("tf32") else "float32")
