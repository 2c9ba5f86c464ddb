"""What must hold between the axes of the device mesh, for planning and for training."""

from __future__ import annotations

from flex_trainer.errors import UserError


def check_expert_ranks(fsdp: int, ep: int, num_experts: int | None) -> None:
    """Refuse expert groups that cannot be made.

    Args:
        fsdp: ranks that share one copy of the weights.
        ep: ranks that share one copy of the experts.
        num_experts: routed experts of a layer, 0 for a dense model, None where the model is not known yet.

    Raises:
        ValueError: sizes that do not divide each other, or experts where there are none; with what to change.
    """
    if fsdp % ep:
        raise UserError(
            f"parallel.ep={ep} does not divide fsdp={fsdp}: the ranks of an expert group hold different batches, so "
            f"they are part of the fsdp ranks; use an ep that divides {fsdp}, or a larger fsdp"
        )
    if ep == 1 or num_experts is None:
        return
    if num_experts == 0:
        raise UserError(f"parallel.ep={ep}: this model has no routed experts to spread; set ep to 1")
    if num_experts % ep:
        raise UserError(
            f"parallel.ep={ep} does not divide the {num_experts} experts of a layer; use a divisor of {num_experts}"
        )
