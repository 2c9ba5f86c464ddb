"""The iteration level of the cost model: any pipeline schedule, given as data, to peak bytes and seconds.

A schedule is a sequence of actions for every rank (BaGuaLu-2, section IV-A, Figure 5c: warm-up, steady state and
cool-down follow from it). A *stage* is a part of the model: rank r of p holds the stages r, r + p, r + 2p, ... in the
order in which a micro-batch passes through them.

    cost = iteration_cost(one_forward_one_backward(4, 8), {stage: MicroBatchCost(...) for stage in range(4)}, base)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from flex_trainer.cost.schedules import Action, Kind, Schedule
from flex_trainer.errors import UserError


class Phase(Enum):
    """Where in the iteration an action stands, seen from its rank."""

    WARMUP = "warm-up"
    """Before the rank's first backward."""
    STEADY = "steady"
    COOLDOWN = "cool-down"
    """After the rank's last forward."""


@dataclass(frozen=True)
class MicroBatchCost:
    """What one micro-batch is on one stage. Bytes are on top of what was in use before it."""

    held_bytes: int
    """Held from the end of its forward to its backward."""
    forward_peak_bytes: int
    """The highest point of its forward, `held_bytes` or transients included."""
    backward_peak_bytes: int
    """The highest point of its backward: what is still held there, recovered values, gradients on their way, offload
    copies coming up."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """The whole backward; with a split one, its input part."""
    weight_seconds: float = 0.0
    """The weight part of a split backward."""
    kept_for_weights_bytes: int = 0
    """With a split backward: held between its two parts (inputs and output gradients of the products)."""
    forward_operator: str = ""
    """Where the highest point of forward is."""
    backward_operator: str = ""


@dataclass(frozen=True)
class RankBase:
    """What a rank holds besides activations."""

    constant_bytes: int = 0
    """Parameters, optimizer state, gathered weights."""
    gradient_bytes: int = 0
    """Gradients that stay from the first backward on: unsharded ones where their reduction waits for the last
    micro-batch."""


@dataclass(frozen=True)
class RankPeak:
    """The highest point of an iteration on one rank."""

    num_bytes: int
    rank: int
    position: int
    """Index of the action in the rank's sequence."""
    action: Action
    phase: Phase
    operator: str
    num_in_flight: int
    """Micro-batches between forward and backward, the running one included."""
    others_bytes: int
    """Held by the others in flight."""
    own_bytes: int
    """What the running action needs."""
    base_bytes: int


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank; the three parts add up to the iteration."""

    warmup_seconds: float
    """Until its first backward starts."""
    steady_seconds: float
    cooldown_seconds: float
    """From the end of its last forward to the end of the iteration."""
    idle_seconds: float


@dataclass(frozen=True)
class IterationCost:
    """An iteration without its optimizer step."""

    peaks: tuple[RankPeak, ...]
    """One per rank."""
    times: tuple[RankTimes, ...]
    seconds: float

    @property
    def peak(self) -> RankPeak:
        """The highest of all ranks."""
        return max(self.peaks, key=lambda peak: peak.num_bytes)


CostOf = Mapping[int, MicroBatchCost] | Mapping[tuple[int, int], MicroBatchCost]
"""Costs by stage, or by (micro-batch, stage) where micro-batches differ."""


def iteration_cost(schedule: Schedule, costs: CostOf, bases: Sequence[RankBase] | None = None) -> IterationCost:
    """Peak and time of a schedule.

    Args:
        schedule: actions of every rank.
        costs: of every stage, or of every micro-batch on every stage.
        bases: per rank; default: nothing.

    Raises:
        ValueError: a schedule that cannot run to its end, or that runs a backward before its forward.
    """
    bases = bases or [RankBase()] * len(schedule)
    peaks = tuple(rank_peak(rank, actions, costs, bases[rank]) for rank, actions in enumerate(schedule))
    times, seconds = _times(schedule, costs)
    return IterationCost(peaks, times, seconds)


def rank_peak(rank: int, actions: Sequence[Action], costs: CostOf, base: RankBase) -> RankPeak:
    """The highest point of one rank's actions.

    Raises:
        ValueError: a backward without its forward.
    """
    held: dict[tuple[int, int], int] = {}
    first_backward, last_forward = _turns(actions)
    has_gradients = False
    highest: RankPeak | None = None
    for position, action in enumerate(actions):
        key, cost = (action.micro_batch, action.stage), _cost(costs, action)
        if action.kind is Kind.FORWARD:
            own, operator = max(cost.forward_peak_bytes, cost.held_bytes), cost.forward_operator
        elif key not in held:
            raise UserError(f"rank {rank}: {action} comes before the forward of its micro-batch")
        elif action.kind is Kind.WEIGHT:
            own, operator = held[key], cost.backward_operator
        else:
            own, operator = cost.backward_peak_bytes, cost.backward_operator
        has_gradients = has_gradients or action.kind is not Kind.FORWARD
        others = sum(num_bytes for other, num_bytes in held.items() if other != key)
        base_bytes = base.constant_bytes + (base.gradient_bytes if has_gradients else 0)
        if highest is None or base_bytes + others + own > highest.num_bytes:
            phase = (
                Phase.WARMUP
                if position < first_backward
                else Phase.COOLDOWN
                if position > last_forward
                else Phase.STEADY
            )
            in_flight = len(held) + (key not in held)
            highest = RankPeak(
                base_bytes + others + own, rank, position, action, phase, operator, in_flight, others, own, base_bytes
            )
        if action.kind is Kind.FORWARD:
            held[key] = cost.held_bytes
        elif action.kind is Kind.INPUT:
            held[key] = cost.kept_for_weights_bytes
        else:
            del held[key]
    if highest is None:
        raise UserError(f"rank {rank} has no actions in this schedule; give every rank at least one micro-batch")
    return highest


def _times(schedule: Schedule, costs: CostOf) -> tuple[tuple[RankTimes, ...], float]:
    """Runs the schedule: an action starts when its rank is free and what it needs from other stages is there."""
    num_stages = 1 + max(action.stage for actions in schedule for action in actions)
    ended: dict[tuple[Kind, int, int], float] = {}
    free = [0.0] * len(schedule)
    busy = [0.0] * len(schedule)
    next_action = [0] * len(schedule)
    spans: list[list[tuple[float, float]]] = [[] for _ in schedule]
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, actions in enumerate(schedule):
            while next_action[rank] < len(actions):
                action = actions[next_action[rank]]
                ready = _ready(action, num_stages, ended)
                if ready is None:
                    break
                start = max(free[rank], ready)
                seconds = _seconds(action, _cost(costs, action))
                free[rank] = start + seconds
                busy[rank] += seconds
                spans[rank].append((start, free[rank]))
                ended[_gives(action), action.micro_batch, action.stage] = free[rank]
                next_action[rank] += 1
                has_moved = True
    for rank, actions in enumerate(schedule):
        if next_action[rank] < len(actions):
            raise UserError(f"the schedule cannot run to its end: rank {rank} waits at {actions[next_action[rank]]}")
    seconds = max(free)
    times = []
    for rank, actions in enumerate(schedule):
        first_backward, last_forward = _turns(actions)
        warmup = spans[rank][first_backward][0] if first_backward < len(actions) else seconds
        cooldown_start = max(spans[rank][last_forward][1], warmup)
        times.append(RankTimes(warmup, cooldown_start - warmup, seconds - cooldown_start, seconds - busy[rank]))
    return tuple(times), seconds


def _gives(action: Action) -> Kind:
    """The input part of a split backward gives what the whole one does."""
    return Kind.BACKWARD if action.kind is Kind.INPUT else action.kind


def _ready(action: Action, num_stages: int, ended: Mapping[tuple[Kind, int, int], float]) -> float | None:
    """When all is there that the action needs; None: not yet."""
    micro_batch, stage = action.micro_batch, action.stage
    if action.kind is Kind.FORWARD:
        needs = [(Kind.FORWARD, micro_batch, stage - 1)] if stage else []
    elif action.kind is Kind.WEIGHT:
        needs = [(Kind.BACKWARD, micro_batch, stage)]
    else:
        needs = [(Kind.FORWARD, micro_batch, stage)]
        needs += [(Kind.BACKWARD, micro_batch, stage + 1)] if stage + 1 < num_stages else []
    if any(need not in ended for need in needs):
        return None
    return max((ended[need] for need in needs), default=0.0)


def _seconds(action: Action, cost: MicroBatchCost) -> float:
    if action.kind is Kind.FORWARD:
        return cost.forward_seconds
    return cost.weight_seconds if action.kind is Kind.WEIGHT else cost.backward_seconds


def _turns(actions: Sequence[Action]) -> tuple[int, int]:
    """Positions of the first backward and of the last forward."""
    first_backward = next((i for i, action in enumerate(actions) if action.kind is not Kind.FORWARD), len(actions))
    last_forward = max((i for i, action in enumerate(actions) if action.kind is Kind.FORWARD), default=-1)
    return first_backward, last_forward


def _cost(costs: CostOf, action: Action) -> MicroBatchCost:
    by_any: Mapping[object, MicroBatchCost] = costs  # type: ignore[assignment]
    cost = by_any.get((action.micro_batch, action.stage))
    return by_any[action.stage] if cost is None else cost
