"""Pipeline schedules as data: for every rank the sequence of its actions.

one_forward_one_backward(2, 3)
rank 0:  F0 F1 B0 F2 B1 B2
rank 1:  F0 B0 F1 B1 F2 B2
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from flex_trainer.errors import UserError


class Kind(Enum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """The part of a split backward that the stage before waits for: gradients of activations."""
    WEIGHT = "W"
    """The other part: gradients of weights."""


@dataclass(frozen=True)
class Action:
    """One micro-batch going through one stage."""

    kind: Kind
    micro_batch: int
    stage: int = 0
    """The part of the model, counted along the way of a micro-batch; on rank `stage % p`."""

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch} of stage {self.stage}"


Schedule = tuple[tuple[Action, ...], ...]
"""Actions by rank."""


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards, the last micro-batch first (GPipe, Huang et al. 2019)."""
    _check(num_stages, num_micro_batches)
    return tuple(
        tuple(Action(Kind.FORWARD, i, rank) for i in range(num_micro_batches))
        + tuple(Action(Kind.BACKWARD, i, rank) for i in reversed(range(num_micro_batches)))
        for rank in range(num_stages)
    )


def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B: rank r runs p - r - 1 forwards ahead, then one forward and one backward in turn (PipeDream-Flush,
    Narayanan et al. 2021). It holds min(m, p - r) micro-batches at most. With one stage it is plain accumulation."""
    _check(num_stages, num_micro_batches)
    ranks = []
    for rank in range(num_stages):
        num_ahead = min(num_stages - rank - 1, num_micro_batches)
        actions = [Action(Kind.FORWARD, i, rank) for i in range(num_ahead)]
        for i in range(num_micro_batches - num_ahead):
            actions += [Action(Kind.FORWARD, num_ahead + i, rank), Action(Kind.BACKWARD, i, rank)]
        actions += [Action(Kind.BACKWARD, i, rank) for i in range(num_micro_batches - num_ahead, num_micro_batches)]
        ranks.append(tuple(actions))
    return tuple(ranks)


def interleaved(num_ranks: int, num_micro_batches: int, num_virtual_stages: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2): rank r of p holds `num_virtual_stages` stages, r, p + r,
    2p + r, ..., and goes through groups of p micro-batches, stage by stage.

    Raises:
        ValueError: the micro-batches are no multiple of the ranks.
    """
    _check(num_ranks, num_micro_batches)
    if num_virtual_stages < 1:
        raise UserError(f"num_virtual_stages={num_virtual_stages} must be at least 1")
    if num_virtual_stages == 1:
        return one_forward_one_backward(num_ranks, num_micro_batches)
    if num_micro_batches % num_ranks:
        raise UserError(
            f"{num_micro_batches} micro-batches are no multiple of {num_ranks} ranks, which the interleaved schedule "
            "needs; change gradient_accumulation_steps"
        )
    total = num_micro_batches * num_virtual_stages
    ranks = []
    for rank in range(num_ranks):
        forward, backward = (
            [_in_groups(kind, number, rank, num_ranks, num_virtual_stages) for number in range(total)]
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        num_ahead = min(2 * (num_ranks - rank - 1) + (num_virtual_stages - 1) * num_ranks, total)
        num_turns = total - num_ahead
        actions = forward[:num_ahead]
        for turn in zip(forward[num_ahead:], backward[:num_turns], strict=True):
            actions += turn
        ranks.append((*actions, *backward[num_turns:]))
    return tuple(ranks)


def _in_groups(kind: Kind, number: int, rank: int, num_ranks: int, num_virtual_stages: int) -> Action:
    """A rank's forward or backward number `number`: p micro-batches go through a stage, then through the next one."""
    group, within = divmod(number, num_ranks * num_virtual_stages)
    own_stage = within // num_ranks
    if kind is Kind.BACKWARD:
        own_stage = num_virtual_stages - 1 - own_stage
    return Action(kind, group * num_ranks + within % num_ranks, own_stage * num_ranks + rank)


def _check(num_stages: int, num_micro_batches: int) -> None:
    if num_stages < 1 or num_micro_batches < 1:
        raise UserError(
            f"a schedule of {num_stages} stages and {num_micro_batches} micro-batches is empty; both must be at least 1"
        )
