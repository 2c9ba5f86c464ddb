"""Puts the parts together: what every pipeline stage holds and how long a step takes, under a plan or a baseline."""

from __future__ import annotations

from dataclasses import dataclass

from flex_trainer.cost.hardware import Hardware
from flex_trainer.cost.iteration import IterationCost, iteration_cost
from flex_trainer.cost.schedules import one_forward_one_backward
from flex_trainer.estimate.links import exchange_bytes, sent_rows, stage_links
from flex_trainer.estimate.mesh import Mesh, Stage, cut_into_stages, make_mesh
from flex_trainer.estimate.optimizers import optimizer
from flex_trainer.estimate.rank import PLAN, Rank, RankParts, StageOutcome
from flex_trainer.estimate.settings import Settings
from flex_trainer.estimate.skeleton import Skeleton
from flex_trainer.estimate.stage import StageGraph, TracedStage, expand, trace_stage, traced_layers
from flex_trainer.estimate.weights import RankWeights, of_stage, rank_weights


@dataclass(frozen=True)
class Outcome:
    """All stages under one way to run."""

    way: str
    imbalance: float
    stages: tuple[StageOutcome, ...]
    iteration: IterationCost
    step_seconds: float
    optimizer_seconds: float
    reduction_seconds: float
    """Of gradients, at the end of the step: what waits for the last micro-batch."""
    limit_bytes: int
    """After what is kept free, and what the process holds before the model."""

    @property
    def worst(self) -> StageOutcome:
        return max(self.stages, key=lambda stage: stage.needed_bytes)

    @property
    def fits(self) -> bool:
        return self.worst.needed_bytes <= self.limit_bytes


class Estimator:
    """Estimates of one model on one device. Traces are made once per stage and shape."""

    def __init__(self, skeleton: Skeleton, hardware: Hardware) -> None:
        self.skeleton = skeleton
        self.hardware = hardware
        self._weights = skeleton.weights()
        self._traced: dict[object, TracedStage] = {}
        self._last_ranks: tuple[tuple[Settings, float], list[Rank]] | None = None

    def mesh(self, settings: Settings) -> Mesh:
        """How the ranks are divided.

        Raises:
            ValueError: sizes that do not fit together.
        """
        skeleton = self.skeleton
        sizes = settings.fsdp, settings.ep, settings.pp
        return make_mesh(*sizes, settings.num_ranks, skeleton.num_experts, skeleton.num_layers)

    def largest_imbalance(self, settings: Settings) -> float:
        """What the busiest rank can get at most, over the mean: all tokens of its expert group, each as often as it has
        experts for it. 1 where there is no such group: a rank that has all experts always gets all its rows."""
        chosen, own = self.skeleton.num_chosen_experts, self.skeleton.num_experts // settings.ep
        return settings.ep * min(1.0, own / chosen) if chosen and own else float(settings.ep)

    def outcome(self, settings: Settings, imbalance: float, way: str = PLAN) -> Outcome:
        """All stages under a plan, or under one of the other `WAYS`.

        Args:
            imbalance: rows that the experts of the rank get, over the mean; in every layer.
        """
        mesh = self.mesh(settings)
        schedule = one_forward_one_backward(mesh.pp, settings.num_micro_batches)
        ranks = self._ranks(settings, mesh, imbalance)
        outcomes = [rank.outcome(way) for rank in ranks]
        costs = {outcome.stage.index: outcome.micro_batch for outcome in outcomes}
        iteration = iteration_cost(schedule, costs, [rank.base for rank in ranks])
        reduction = max(rank.late_seconds() for rank in ranks)
        step = max(self.hardware.memory_seconds(_step_traffic(rank.weights)) for rank in ranks)
        return Outcome(
            way=way,
            imbalance=imbalance,
            stages=tuple(outcomes),
            iteration=iteration,
            step_seconds=iteration.seconds + reduction + step,
            optimizer_seconds=step,
            reduction_seconds=reduction,
            limit_bytes=self.available_bytes(settings),
        )

    def fixed_bytes(self, settings: Settings) -> int:
        """What the fullest rank holds whatever its activations are. Needs no trace."""
        mesh = self.mesh(settings)
        stages = cut_into_stages(self.skeleton.num_layers, mesh.pp)
        ranks = [self.weights_of(stage, mesh, settings) for stage in stages]
        return max(weights.constant_bytes + weights.gradients_bytes for weights in ranks)

    def available_bytes(self, settings: Settings) -> int:
        """What is left of the limit for the model and all that comes with it."""
        return settings.limit_bytes - settings.reserve_bytes - self.hardware.runtime_bytes

    def stage_graph(self, settings: Settings, stage: Stage) -> StageGraph:
        """The stage's micro-batch with balanced routing; stages with the same kinds of layers share one trace."""
        kinds = tuple(self.skeleton.kinds[layer] for layer in traced_layers(self.skeleton, stage))
        shape = settings.batch_size, settings.sequence_length
        key = (kinds, stage.has_embedding, stage.has_head, shape, settings.precision, settings.ep, settings.dispatch)
        traced = self._traced.get(key)
        if traced is None:
            exchange_seconds = self._exchange_seconds(settings)
            traced = trace_stage(
                self.skeleton,
                stage,
                *shape,
                settings.precision,
                self.hardware,
                settings.ep,
                settings.dispatch,
                exchange_seconds,
            )
            self._traced[key] = traced
        return expand(self.skeleton, stage, traced)

    def weights_of(self, stage: Stage, mesh: Mesh, settings: Settings) -> RankWeights:
        """Bytes of weights and what belongs to them on a rank of the stage."""
        own = of_stage(self._weights, stage)
        return rank_weights(own, mesh, optimizer(settings.optim), settings.num_micro_batches)

    def _ranks(self, settings: Settings, mesh: Mesh, imbalance: float) -> list[Rank]:
        """One rank of every stage. The last ones made are kept: the ways to run are compared on them."""
        key = settings, imbalance
        if self._last_ranks is None or self._last_ranks[0] != key:
            factor = min(imbalance, self.largest_imbalance(settings))
            schedule = one_forward_one_backward(mesh.pp, settings.num_micro_batches)
            ranks = [
                Rank(
                    self._parts(stage, settings, mesh, factor),
                    settings,
                    self.hardware,
                    factor,
                    schedule,
                    self.available_bytes(settings),
                )
                for stage in cut_into_stages(self.skeleton.num_layers, mesh.pp)
            ]
            self._last_ranks = key, ranks
        return self._last_ranks[1]

    def _parts(self, stage: Stage, settings: Settings, mesh: Mesh, factor: float) -> RankParts:
        graph = self.stage_graph(settings, stage)
        row_bytes, num_rows = self._row_bytes(settings), self._sent_rows(settings)
        links = stage_links(
            of_stage(self._weights, stage),
            mesh,
            self.hardware,
            graph.routed_layers,
            num_rows=num_rows,
            row_bytes=row_bytes,
            hidden_bytes=settings.batch_size * settings.sequence_length * row_bytes,
        )
        buffers = exchange_bytes(num_rows, row_bytes, mesh, factor, settings.dispatch)
        most_rows = settings.batch_size * settings.sequence_length * min(settings.ep, self.skeleton.num_chosen_experts)
        is_spread = settings.ep > 1 and settings.dispatch == "flex" and most_rows > 0
        row_share = num_rows / most_rows if is_spread else 1.0
        return RankParts(stage, graph, self.weights_of(stage, mesh, settings), links, buffers, row_share)

    def _row_bytes(self, settings: Settings) -> int:
        """One token's hidden state as it is sent."""
        return self.skeleton.hidden_size * _activation_bytes(settings, self.skeleton.compute_dtype.itemsize)

    def _sent_rows(self, settings: Settings) -> int:
        skeleton, num_tokens = self.skeleton, settings.batch_size * settings.sequence_length
        return sent_rows(num_tokens, skeleton.num_chosen_experts, skeleton.num_experts, settings.ep, settings.dispatch)

    def _exchange_seconds(self, settings: Settings) -> float:
        """One way, of one layer, with balanced routing."""
        num_bytes = self._sent_rows(settings) * self._row_bytes(settings)
        return self.hardware.all_to_all_seconds(num_bytes, settings.ep, self.hardware.devices_per_node)


def _step_traffic(weights: RankWeights) -> int:
    """Bytes that an optimizer step reads and writes: parameters and state both, gradients once."""
    return 2 * weights.parameters_bytes + 2 * weights.optimizer_bytes + weights.gradients_bytes


def _activation_bytes(settings: Settings, element_bytes: int) -> int:
    return 2 if settings.precision.autocast is not None else element_bytes
