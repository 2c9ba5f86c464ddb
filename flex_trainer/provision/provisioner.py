"""Budget and plan of each micro-batch, from what the profile knows and what was measured.

What a micro-batch holds is known exactly. What comes on top while operators run is known from a trace, up to what
kernels need inside and how allocators round: a factor on those transients is learnt from measured peaks.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flex_trainer.config import AUTO_RESERVE_SHARE, FlexConfig, amount_bytes
from flex_trainer.cost.expected import NOTHING_COMES, ep_block
from flex_trainer.cost.load import at_even_load
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.errors import UserError
from flex_trainer.experts.dispatch import dispatcher_of
from flex_trainer.files import check_writable
from flex_trainer.memory.meter import MemoryMeter
from flex_trainer.memory.offloading import OffloadService
from flex_trainer.models.discovery import ModelMap
from flex_trainer.models.routing import Routing
from flex_trainer.models.sharding import gathered_bytes, original_class, units_of
from flex_trainer.planner.budget import BudgetAllocator
from flex_trainer.planner.plan import Plan, Uniform
from flex_trainer.provision.correction import Correction
from flex_trainer.provision.forecast import Forecast
from flex_trainer.provision.gradients import Gradients
from flex_trainer.provision.loads import Loads, RecentLoads
from flex_trainer.provision.margin import SafetyMargin
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.provision.plan_cache import PlanCache
from flex_trainer.provision.step_times import Ran, StepTimes
from flex_trainer.ranks import this_rank
from flex_trainer.strategy import Site, Strategy
from flex_trainer.units import format_bytes

logger = logging.getLogger(__name__)

_BUDGET_STEPS = 256
"""Budgets are discretised (rounded down) to this many steps of the limit or more, so that plans are found in the cache.
"""
_TOLERANCE = 1.05
"""A micro-batch whose least predicted peak is over the limit by less than this still runs: the model may be wrong."""
_REPLAN_SHARE = 0.005
"""More held than predicted by this share of the limit: time to re-plan."""
_IN_FLIGHT_REMEMBERED = 16
"""Rounds (first forward to last backward) over which the most micro-batches in flight are expected again."""
_MAX_MEASUREMENTS = 3
"""Times that memory is measured for one budget: making a plan takes memory itself."""
_MAX_TRIED_PLANS = 8
"""Plans tried until one holds no more than its budget."""
_BY_EFFECT = [Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE]


class MemoryLimitError(UserError):
    """The memory limit is below what the least demanding way to run needs."""


class BudgetTakenError(MemoryLimitError):
    """An earlier micro-batch in flight took what this one needs: nobody knew that there would be another."""


class Provisioner:
    """Decides what a micro-batch may hold, and how."""

    def __init__(
        self,
        config: FlexConfig,
        limit_bytes: int,
        meter: MemoryMeter,
        offloading: OffloadService,
        model: nn.Module,
        model_map: ModelMap,
        earlier: Provisioner | None = None,
        resumed_profile: Path | None = None,
    ) -> None:
        """`earlier` managed a model before; what it has learnt stays valid if that was the same kind of model. Else
        `resumed_profile`, of the checkpoint from which training goes on, takes the place of the seed profile.

        Raises:
            MemoryLimitError: the limit is below what is in use before the first micro-batch, and something is to be
                mitigated.
            ValueError: a seed profile that cannot be read or written, or of another model.
        """
        self._config = config
        self._meter = meter
        self._offloading = offloading
        self.limit_bytes = limit_bytes
        self._nearest_bytes = limit_bytes
        self._in_flight: dict[int, int] = {}  # micro-batches between forward and backward: bytes on top in backward
        self._most_in_flight = 0  # in this round
        self._rounds: deque[int] = deque([1], maxlen=_IN_FLIGHT_REMEMBERED)
        self._allocator = BudgetAllocator()
        self._correction = Correction()
        self._times: StepTimes | None = None
        self._attempt = 0
        self.can_step_back = False
        """Whether somebody would run the step again, were a micro-batch refused."""
        self._fingerprint = _fingerprint(model, model_map)
        self._is_spread = any(dispatcher_of(operator.module) is not None for operator in model_map.experts)
        if earlier is not None and earlier._fingerprint == self._fingerprint:
            self._profile, self._correction = earlier._profile, earlier._correction
            self._margin, self._rounds, self._loads = earlier._margin, earlier._rounds, earlier._loads
            self._times = earlier._times
            self._allocator = BudgetAllocator(self.num_expected_in_flight)
        else:
            self._profile = self._seed_profile(resumed_profile)
            self._correction.start_at(self._profile.transient_factor)
            self._loads = RecentLoads()
            self._margin = SafetyMargin(self._profile.margin_bytes)
        self._device = next(model.parameters()).device
        self._forecast = Forecast(model, model_map, self._device, config.trace)
        self._gradients = Gradients(model, model_map)
        self._gathered_bytes = gathered_bytes(model) if units_of(model) else 0
        self._plans = PlanCache(config, self._profile, self._correction, offloading)
        self._check_start()

    @property
    def margin_bytes(self) -> int:
        """Bytes kept free since an allocation failed."""
        return self._margin.num_bytes

    @property
    def num_expected_in_flight(self) -> int:
        """W of Algorithm 1: how many forwards come before the first backward, as of late."""
        return max(self._rounds)

    # The life of a micro-batch

    def prepare(self, shape: BatchShape, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """Learn the sizes of a micro-batch that is not known yet, before it runs. Returns the seconds it took."""
        seconds = self._forecast.teach(self._profile, shape, args, kwargs)
        if self._forecast.has_traced:
            self._correction.trust_trace()
        return seconds

    def begin(self, shape: BatchShape) -> MicroBatch:
        """Budget and plan of the next micro-batch.

        Raises:
            BudgetTakenError: as below, while more micro-batches are in flight than there were before, and the step can
                be run again; if it cannot, the micro-batch runs under the least demanding plan.
            MemoryLimitError: the sizes are known, and even the least demanding plan would be over the limit. Never
                where there are no strategies: then the run is watched, and its records say what was over.
        """
        started = time.perf_counter()
        in_use_bytes, left_bytes = self._measure()
        gradients = self._gradients.now()
        self._most_in_flight = max(self._most_in_flight, len(self._in_flight) + 1)
        if self._profile.knows(shape):
            for _ in range(_MAX_MEASUREMENTS):
                num_made = self._plans.num_made
                plan, available_bytes, budget_bytes = self._provide(shape, left_bytes, gradients)
                if self._plans.num_made == num_made:
                    break
                # The first plan of a structure leaves something behind (its tables, buffers of the libraries it uses),
                # which on a CPU comes out of the same memory.
                earlier_bytes = left_bytes
                in_use_bytes, left_bytes = self._measure()
                if earlier_bytes - left_bytes <= self._budget_step:
                    break
            if not plan.fits and self._config.strategies:
                # Where experts are on several ranks, what will come is a guess: only what comes anyhow is a reason to
                # refuse. If more comes than fits, it runs under the least demanding plan.
                least = self._plans.plan(shape, available_bytes, gradients, NOTHING_COMES) if self._is_spread else plan
                self._check_least(shape, least, in_use_bytes, left_bytes + self.margin_bytes)
            micro_batch = MicroBatch(shape, plan, plan, in_use_bytes, available_bytes, budget_bytes, gradients)
            micro_batch.loads = Loads(self._loads.expected)
            micro_batch.plain_seconds = self._step_times.plain_seconds(shape)
            micro_batch.rates = self._offloading.rates()
            micro_batch.added_seconds = self._step_times.added_seconds(plan)
        else:
            unknown = Uniform(self._most_effective())
            micro_batch = MicroBatch(shape, unknown, None, in_use_bytes, left_bytes, max(left_bytes, 0), gradients)
        micro_batch.plan_seconds = time.perf_counter() - started
        return micro_batch

    def revise(self, micro_batch: MicroBatch, site: Site, routing: Routing) -> None:
        """After a router: re-plan what has not run yet if this layer gets more than planned, or if more is held by now
        than was predicted. This layer's experts come first: recomputing their whole block is always possible."""
        plan = micro_batch.plan
        if plan is None or micro_batch.scope is None or not self._profile.knows(micro_batch.shape):
            return
        started = time.perf_counter()
        planned_pairs = self._profile.pairs(micro_batch.shape, site.name)
        # Copies on their way down still hold their sources, which the plan does not count: they end by themselves.
        held_bytes = micro_batch.ledger.held_bytes - self._offloading.in_flight_bytes
        excess_bytes = held_bytes - plan.held_until(site.layer)
        has_other_load = micro_batch.loads.needs_replan(site, routing, plan, planned_pairs)
        has_more = excess_bytes - micro_batch.excess_bytes > _REPLAN_SHARE * self.limit_bytes
        if (has_other_load or has_more) and not self._keeps_all_anyway(micro_batch, plan, excess_bytes):
            ran = micro_batch.ran()
            if routing.is_replay_agreed:
                ran[ep_block(site).name] = Strategy.RECOMPUTE
            graph = micro_batch.loads.graph(self._profile.graph(micro_batch.shape), site.layer)
            micro_batch.excess_bytes = max(excess_bytes, 0)
            available_bytes = micro_batch.available_bytes - micro_batch.excess_bytes
            revised = self._plans.revised(graph, available_bytes, micro_batch.gradients, ran)
            micro_batch.plan = micro_batch.choices = revised
            micro_batch.added_seconds = self._step_times.added_seconds(revised)
            micro_batch.loads.note_plan()
            micro_batch.num_replans += 1
        micro_batch.plan_seconds += time.perf_counter() - started

    def _keeps_all_anyway(self, micro_batch: MicroBatch, plan: Plan, excess_bytes: int) -> bool:
        """Whether everything is kept, and may be although it is more than was planned: there is room for all of it to
        grow by as much as anything has."""
        is_alone = not self._in_flight and self.num_expected_in_flight == 1
        most_bytes = plan.peak_bytes * micro_batch.loads.growth + max(excess_bytes, 0)
        return is_alone and not plan.strategies and most_bytes <= micro_batch.available_bytes

    def commit(self, micro_batch: MicroBatch) -> None:
        """Forward has ended: the bytes really held replace the budget in the books."""
        self._allocator.commit(micro_batch.number, micro_batch.actual_bytes)
        self._in_flight[micro_batch.number] = 0 if micro_batch.plan is None else _on_top_bytes(micro_batch.plan)
        if micro_batch.plan is not None:
            self._plans.note_run(micro_batch.plan)

    def learn(self, micro_batch: MicroBatch, peak_bytes: int, is_peak_exact: bool) -> None:
        """Backward has ended: learn sizes, times, and how far off the predicted peak was. The plan is then what it came
        to with the rows that arrived.

        A first micro-batch that was over the limit and survived is no error: with its sizes known, `begin` refuses the
        next one if no plan can help.
        """
        assert micro_batch.scope is not None
        self.release(micro_batch)
        self._margin.relax(self._nearest_bytes)
        self._loads.learn(micro_batch.loads)
        if micro_batch.plan is not None and micro_batch.loads.by_layer and self._profile.knows(micro_batch.shape):
            # With the rows that have arrived: where they are fewer than was expected, transients would seem smaller.
            started = time.perf_counter()
            micro_batch.plan = self._as_it_ran(micro_batch)
            micro_batch.plan_seconds += time.perf_counter() - started
        trace = at_even_load(micro_batch.scope.trace, micro_batch.loads.by_layer)
        if trace is None:
            return  # nothing arrived in some layer, so its sizes are not known
        self._profile.observe(micro_batch.shape, trace, micro_batch.routed_pairs)
        if micro_batch.is_covered:
            return  # the peak and the time have other micro-batches in them
        self._learn_times(micro_batch)
        above_bytes = peak_bytes - micro_batch.baseline_bytes - self._gathered_bytes
        # With sizes known by now, see what the model would have said of a run that was there to measure them.
        plan = micro_batch.plan or self._as_it_ran(micro_batch)
        # More held than predicted (values that were not finite are not quantised, say) is no transient.
        excess_bytes = max(micro_batch.actual_bytes - plan.predicted_bytes, 0)
        self._correction.observe(plan, above_bytes - excess_bytes, is_peak_exact, micro_batch.available_bytes)

    @property
    def _step_times(self) -> StepTimes:
        """Made when the first plan is, since that is when the machine is probed."""
        if self._times is None:
            self._times = StepTimes(
                self._device,
                self._profile,
                self._offloading.probed_rates(),
                [Strategy(name) for name in self._config.strategies],
            )
        return self._times

    def _learn_times(self, micro_batch: MicroBatch) -> None:
        if micro_batch.plan is None or micro_batch.rates is None or micro_batch.stopwatch.num_laps != 2:
            return
        started = time.perf_counter()
        self._step_times.learn(
            Ran(
                shape=micro_batch.shape,
                plan=micro_batch.plan,
                rates=micro_batch.rates,
                ledger=micro_batch.ledger,
                stopwatch=micro_batch.stopwatch,
                planned_seconds=micro_batch.replanned_seconds,
            )
        )
        self._offloading.learnt_rates = self._step_times.rates
        micro_batch.plan_seconds += time.perf_counter() - started

    def _as_it_ran(self, micro_batch: MicroBatch) -> Plan:
        graph = micro_batch.loads.graph(self._plans.sizes(micro_batch.shape))
        return self._plans.weighed(graph, micro_batch.ran(), micro_batch.gradients)

    def release(self, micro_batch: MicroBatch) -> None:
        """The values of a micro-batch are gone: its backward has ended, or will never come."""
        self._allocator.release(micro_batch.number)
        self._in_flight.pop(micro_batch.number, None)
        if not self._in_flight and self._most_in_flight:
            self._rounds.append(self._most_in_flight)
            self._most_in_flight = 0
            self._allocator = BudgetAllocator(self.num_expected_in_flight)

    # After an allocation has failed

    def tighten(self, attempt: int, requested_bytes: int) -> None:
        """An allocation failed and the step is run again.

        Args:
            attempt: 1: keep more free, now and for the micro-batches to come; 2: also run under the least demanding
                plan until `loosen`.
            requested_bytes: what the failed allocation asked for; 0 when not known.
        """
        self._attempt = attempt
        self._measure()
        self._margin.widen(requested_bytes, self._nearest_bytes)

    def loosen(self) -> None:
        """The step has been run."""
        self._attempt = 0

    def save_profile(self) -> None:
        """Write the seed profile on the main process, where one is configured and anything was learnt."""
        has_learnt = self._profile.version > 0 or self._profile.margin_bytes != self.margin_bytes
        if self._config.seed_profile is not None and has_learnt and this_rank() == 0:  # one file for the run
            self.write_profile(Path(self._config.seed_profile))

    def write_profile(self, path: Path) -> None:
        """Write what was learnt so far.

        Raises:
            ValueError: the file cannot be written.
        """
        self._profile.transient_factor = self._correction.factor
        self._profile.margin_bytes = self.margin_bytes
        self._profile.save(path, self._fingerprint)

    # Plans

    def _provide(self, shape: BatchShape, left_bytes: int, gradients: GradientBytes) -> tuple[Plan, int, int]:
        """Plan, what its peak may take, and its budget (Algorithm 1)."""
        is_least = self._attempt > 1
        available_bytes = 0 if is_least else left_bytes
        plan = self._plan(shape, available_bytes, gradients)
        # The peak comes in the backward of whichever micro-batch in flight has most on top.
        on_top_bytes = max([_on_top_bytes(plan), *self._in_flight.values()])
        # What is left was measured with the micro-batches in flight; the allocator takes them off itself.
        limit_bytes = left_bytes + self._allocator.in_flight_bytes
        budget_bytes = self._allocator.next(limit_bytes, on_top_bytes, plan.minimum_bytes)
        if self._in_flight or self.num_expected_in_flight > 1:
            # A plan bounds its own peak. What it holds beyond that, while others run, is bounded here.
            for _ in range(_MAX_TRIED_PLANS):
                excess_bytes = plan.predicted_bytes - budget_bytes
                if excess_bytes <= 0 or not plan.fits:
                    break
                available_bytes = min(available_bytes, plan.peak_bytes) - max(excess_bytes, self._budget_step)
                plan = self._plan(shape, available_bytes, gradients)
        return plan, available_bytes, budget_bytes

    def _measure(self) -> tuple[int, int]:
        """Bytes in use, and bytes that a plan may use beside them. Notes which limit is the nearest: something harder
        than memory_limit may be (a data limit, other processes on the device), and shares are then shares of that."""
        in_use_bytes = self._meter.in_use_bytes()
        left_bytes = self._meter.left_bytes(self.limit_bytes)
        self._nearest_bytes = min(self.limit_bytes, in_use_bytes + max(left_bytes, 0))
        return in_use_bytes, left_bytes - self._gathered_bytes - self._reserve_bytes() - self.margin_bytes

    @property
    def _budget_step(self) -> int:
        # A power of two: the nearest limit moves a little all the time, and plans are to be found in the cache.
        return 1 << max((self._nearest_bytes // _BUDGET_STEPS).bit_length() - 1, 0)

    def _plan(self, shape: BatchShape, available_bytes: int, gradients: GradientBytes) -> Plan:
        available_bytes = available_bytes // self._budget_step * self._budget_step
        return self._plans.plan(shape, available_bytes, gradients, self._loads.expected)

    def _most_effective(self) -> Strategy:
        """The allowed strategy that frees most: for a micro-batch nothing is known about."""
        return min(self._plans.strategies, key=_BY_EFFECT.index, default=Strategy.KEEP)

    def _reserve_bytes(self) -> int:
        reserve = self._config.transient_reserve
        if reserve == "auto":
            return int(AUTO_RESERVE_SHARE * self._nearest_bytes)
        return amount_bytes(reserve, self.limit_bytes)

    def _seed_profile(self, resumed: Path | None) -> Profile:
        path = None if self._config.seed_profile is None else Path(self._config.seed_profile)
        if path is not None and this_rank() == 0:
            check_writable(path, "the seed profile")  # now rather than when training has ended
        if resumed is not None:
            return self._resumed(resumed)
        return Profile.load(path, self._fingerprint) if path is not None and path.exists() else Profile()

    def _resumed(self, path: Path) -> Profile:
        """What a checkpoint has; nothing, where it is not of this model on this number of ranks: sizes are others."""
        if Profile.fingerprint_of(path) in (None, self._fingerprint):
            return Profile.load(path, self._fingerprint)
        logger.info("Sizes of operators in %s were measured on other ranks; they are learnt anew", path)
        return Profile()

    # Limits that cannot be met

    def _limit_text(self) -> str:
        return f"memory_limit={self._config.memory_limit!r} ({format_bytes(self.limit_bytes)})"

    def _check_start(self) -> None:
        in_use_bytes = self._meter.in_use_bytes()
        if in_use_bytes >= self.limit_bytes and self._config.strategies:
            raise MemoryLimitError(
                f"{self._limit_text()} is below the {format_bytes(in_use_bytes)} in use before the first micro-batch "
                "(weights and all else in the process). Raise memory_limit, or use a smaller model."
            )

    def _check_least(self, shape: BatchShape, plan: Plan, in_use_bytes: int, left_bytes: int) -> None:
        if plan.peak_bytes > _TOLERANCE * max(left_bytes, 1):
            is_taken = len(self._in_flight) >= self.num_expected_in_flight
            if is_taken and not self.can_step_back:
                return  # run it in as little as there is: nobody could share the room out anew
            raise (BudgetTakenError if is_taken else MemoryLimitError)(
                f"{self._limit_text()} is too low for a micro-batch of {shape.batch_size} x {shape.sequence_length} "
                f"tokens: with strategies {', '.join(self._config.strategies) or 'none'} it needs about "
                f"{format_bytes(plan.peak_bytes)} more than the {format_bytes(in_use_bytes)} in use before it, and "
                f"{format_bytes(max(left_bytes, 0))} are left under the limit, the reserve and the system's own limits."
                " Raise memory_limit, allow more strategies, or use a smaller per-device batch or shorter sequences."
            )


def _on_top_bytes(plan: Plan) -> int:
    """What comes on top of what is held when memory is highest: transients and gradients."""
    return plan.peak_bytes - plan.predicted_bytes


def _fingerprint(model: nn.Module, model_map: ModelMap) -> str:
    """Says whether a profile belongs to this model: classes, sites and parameter shapes."""
    facts = [original_class(model).__name__, *(operator.site.name for operator in model_map.operators)]
    # What a rank's experts get, and which operators they have, follows the number of ranks.
    dispatchers = (dispatcher_of(operator.module) for operator in model_map.experts)
    facts += [f"experts on {one.num_ranks} ranks" for one in dispatchers if one is not None]
    facts += [f"{name}:{tuple(parameter.shape)}:{parameter.dtype}" for name, parameter in model.named_parameters()]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
