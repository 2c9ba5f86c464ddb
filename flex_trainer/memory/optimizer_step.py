"""What to say of an allocation that failed in an optimizer's step: nothing is rolled back and retried there."""

from __future__ import annotations

import traceback
from types import TracebackType

import torch

from flex_trainer.memory.failed_allocation import is_out_of_memory
from flex_trainer.units import format_bytes


def note_optimizer_step(error: BaseException, memory_limit: object, limit_bytes: int) -> None:
    """Add a note to an error that came from a failed allocation in `Optimizer.step`; leave all others alone.

    Args:
        memory_limit: as the user has written it.
        limit_bytes: the same in bytes.
    """
    optimizer = _stepping(error.__traceback__) if is_out_of_memory(error) else None
    if optimizer is None:
        return
    error.add_note(
        f"FlexTrainer: memory ran out in the step of the optimizer ({type(optimizer).__name__}), which in the first "
        "step allocates its state beside weights and gradients. That is not activations, so nothing could be mitigated "
        f"or retried. memory_limit={memory_limit!r} is {format_bytes(limit_bytes)}: raise it (flex.memory_limit in a "
        "recipe), take an optimizer with less state, or shard (docs/out-of-memory.md)."
    )


def _stepping(trace: TracebackType | None) -> torch.optim.Optimizer | None:
    """The innermost optimizer whose step an error passed through."""
    found = None
    for frame, _ in traceback.walk_tb(trace):
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        found = owner if isinstance(owner, torch.optim.Optimizer) else found
    return found
