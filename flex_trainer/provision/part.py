"""What belongs to one part of a model on a device: what is known of its operators, its plans, its expert loads.

What a micro-batch holds is known exactly. What comes on top while operators run is known from a trace, up to what
kernels need inside and how allocators round: a factor on those transients is learnt from measured peaks.

The memory itself is the device's: device_books.py. How it is shared out is policy.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flex_trainer.activations.scope import Scope
from flex_trainer.config import FlexConfig
from flex_trainer.cost.expected import NOTHING_COMES, ep_block
from flex_trainer.cost.load import at_even_load
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.timeline import GradientBytes
from flex_trainer.errors import UserError
from flex_trainer.files import check_writable
from flex_trainer.models.inputs import Inputs
from flex_trainer.models.routing import Routing
from flex_trainer.planner.plan import Plan, Uniform
from flex_trainer.provision.device_books import BudgetTakenError, DeviceBooks, MemoryLimitError
from flex_trainer.provision.forecast import Forecast
from flex_trainer.provision.held_errors import HeldErrors
from flex_trainer.provision.loads import Loads, RecentLoads
from flex_trainer.provision.loss_memory import LossMemory
from flex_trainer.provision.managed_model import ManagedModel
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.provision.plan_cache import PlanCache
from flex_trainer.provision.policy import Provision, provide, revise_beside
from flex_trainer.provision.step_times import Ran, StepTimes
from flex_trainer.provision.watching import Watching
from flex_trainer.ranks import this_rank
from flex_trainer.strategy import Site, Strategy
from flex_trainer.units import format_bytes

logger = logging.getLogger(__name__)

_TOLERANCE = 1.05
"""A micro-batch whose least predicted peak is over the limit by less than this still runs: the model may be wrong."""
_REPLAN_SHARE = 0.005
"""More held than predicted by this share of the limit: time to re-plan."""
_MAX_MEASUREMENTS = 3
"""Times that memory is measured for one budget: making a plan takes memory itself."""
_LAPS = 2
"""Forward, and one backward or more."""
_BY_EFFECT = [Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE]


class ModelPart:
    """Decides what a micro-batch may hold in one part of the model, and how.

    Args:
        managed: the part.
        books: of the device; shared with its other parts.
        is_alone: whether there is no other part on the device: then what an earlier run has learnt of it counts.
        earlier: managed a part of this name before; what it has learnt stays valid if that was the same kind of model.
        resumed_profile: of the checkpoint from which training goes on; takes the place of the seed profile.

    Raises:
        ValueError: a seed profile that cannot be read or written, or of another model.
    """

    def __init__(
        self,
        managed: ManagedModel,
        books: DeviceBooks,
        *,
        is_alone: bool = True,
        earlier: ModelPart | None = None,
        resumed_profile: Path | None = None,
    ) -> None:
        self.managed = managed
        self._books = books
        self._config: FlexConfig = books.config
        is_known = earlier is not None and earlier.managed.fingerprint == managed.fingerprint
        if is_known and earlier is not None:
            self.profile, self.recent_loads = earlier.profile, earlier.recent_loads
            self.held_errors, self.loss = earlier.held_errors, earlier.loss
            self._times = earlier._times if earlier._books is books else None
        else:
            self._times = None
            self.profile = self._seed_profile(resumed_profile)
            self.recent_loads = RecentLoads()
            self.held_errors, self.loss = HeldErrors(), LossMemory()
        if is_alone and not (is_known and earlier is not None and earlier._books is books):
            books.start_at(self.profile.transient_factor, self.profile.margin_bytes)
        self.inputs = Inputs(managed.module)
        self.forecast = Forecast(managed.module, managed.map, managed.device, self._config.trace, self.loss)
        self.watching = Watching()
        self.plans = PlanCache(self._config, self.profile, books.correction, books.offloading)
        self.next_number = 0 if earlier is None else earlier.next_number
        """Of the next micro-batch, unless a schedule gives it one."""

    @property
    def name(self) -> str:
        return self.managed.name

    # The life of a micro-batch

    def prepare(
        self, shape: BatchShape, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_refused: bool = False
    ) -> float:
        """Learn the sizes of a micro-batch that is not known yet, before it runs. Returns the seconds it took.

        Args:
            is_refused: it was refused by what is known: look at it itself, unless that was done.
        """
        seconds = self.forecast.teach(self.profile, shape, args, kwargs, is_refused=is_refused)
        if self.forecast.has_traced:
            self._books.correction.trust_trace()
        return seconds

    def begin(self, shape: BatchShape, *, can_roll_back: bool = False) -> MicroBatch:
        """Budget and plan of the next micro-batch.

        Args:
            can_roll_back: whether the step would be retried, were the micro-batch refused.

        Raises:
            BudgetTakenError: as below, while more micro-batches are in flight than there were before, and the step can
                be retried; if it cannot, the micro-batch runs under the minimum-memory plan.
            MemoryLimitError: the sizes are known, and even the minimum-memory plan would be over the limit. Never
                where there are no strategies: then the run is watched, and its records say what was over.
        """
        started = time.perf_counter()
        books = self._books
        expected_excess_bytes = self.held_errors.expected_bytes(shape)
        in_use_bytes, left_bytes = books.measure(expected_excess_bytes)
        gradients = self.managed.gradients.now(shape.kind)  # with the state of the model in it
        books.budgets.begin()
        is_known = self.profile.knows(shape)
        if is_known:
            for _ in range(_MAX_MEASUREMENTS):
                num_made = self.plans.num_made
                provision = self._provide(shape, left_bytes, gradients)
                if self.plans.num_made == num_made:
                    break
                # The first plan of a structure leaves something behind (its tables, buffers of the libraries it uses),
                # which on a CPU comes out of the same memory.
                earlier_bytes = left_bytes
                in_use_bytes, left_bytes = books.measure(expected_excess_bytes)
                if earlier_bytes - left_bytes <= books.budget_step_bytes:
                    break
            plan = provision.plan
            if not plan.fits and self._config.strategies:
                # Where experts are on several ranks, what will come is a guess: only what comes anyhow is a reason to
                # refuse. If more comes than fits, it runs under the minimum-memory plan.
                available_bytes = provision.available_bytes
                is_guess = self.managed.is_spread
                least = self.plans.plan(shape, available_bytes, gradients, NOTHING_COMES) if is_guess else plan
                all_left_bytes = left_bytes + books.margin.num_bytes + expected_excess_bytes
                self._check_least(shape, least, in_use_bytes, all_left_bytes, can_roll_back)
            micro_batch = MicroBatch(
                shape, plan, plan, in_use_bytes, provision.available_bytes, provision.budget_bytes, gradients
            )
            micro_batch.is_bounded = provision.fits
            micro_batch.beside, micro_batch.all_bytes = books.budgets.beside, provision.all_bytes
            micro_batch.loads = Loads(self.recent_loads.expected)
            micro_batch.plain_seconds = self.times.plain_seconds(shape)
            self._note_rates(micro_batch, plan)
            micro_batch.expected_excess_bytes = expected_excess_bytes
            micro_batch.loss_bytes = self.loss.expected_bytes(shape)
            micro_batch.planned_pairs = self.profile.planned_pairs(shape)
        else:
            unknown = Uniform(self._most_effective())
            micro_batch = MicroBatch(shape, unknown, None, in_use_bytes, left_bytes, max(left_bytes, 0), gradients)
        micro_batch.part = self.name
        micro_batch.plan_seconds = time.perf_counter() - started
        return micro_batch

    def revise(self, micro_batch: MicroBatch, site: Site, routing: Routing) -> None:
        """After a router: re-plan what has not run yet if this layer gets more than planned, or if more is held by now
        than was predicted. This layer's experts come first: recomputing their whole block is always possible."""
        started = time.perf_counter()
        plan = micro_batch.plan
        if plan is None or micro_batch.scope is None:
            return
        if not self._is_as_planned(micro_batch, plan, site, routing):
            self._revise(micro_batch, plan, micro_batch.scope, site, routing)
        micro_batch.plan_seconds += time.perf_counter() - started

    def _revise(self, micro_batch: MicroBatch, plan: Plan, scope: Scope, site: Site, routing: Routing) -> None:
        planned_pairs = micro_batch.planned_pairs.get(site.name)
        # Copies on their way down still hold their sources, which the plan does not count: they end by themselves.
        held_bytes = micro_batch.ledger.held_bytes - self._books.offloading.in_flight_bytes
        excess_bytes = held_bytes - plan.held_until(site.layer) - micro_batch.expected_excess_bytes
        beside = micro_batch.beside
        if beside is not None:
            # What this layer is still to take makes up for nothing that the other one has not given back.
            excess_bytes = max(excess_bytes, 0) + beside.late_bytes(site.layer)
        has_other_load = micro_batch.loads.needs_replan(site, routing, plan, planned_pairs)
        has_more = excess_bytes - micro_batch.excess_bytes > _REPLAN_SHARE * self._books.limit_bytes
        if not has_other_load and not has_more or self._keeps_all_anyway(micro_batch, plan, excess_bytes):
            return
        ran = micro_batch.ran()
        if routing.is_recompute_agreed:
            ran[ep_block(site).name] = Strategy.RECOMPUTE
        graph = micro_batch.loads.graph(self.plans.sizes(micro_batch.shape), site.layer)
        micro_batch.excess_bytes = max(excess_bytes, 0)
        available_bytes = micro_batch.available_bytes - micro_batch.excess_bytes

        def plan_for(available_bytes: int) -> Plan:
            return self.plans.revised(graph, available_bytes, micro_batch.gradients, ran)

        if beside is None:
            revised = plan_for(available_bytes)
        else:
            revised = revise_beside(
                plan_for,
                available_bytes,
                self._books.budgets,
                beside,
                site.layer,
                all_bytes=micro_batch.all_bytes,
                step_bytes=self._books.budget_step_bytes,
                loss_bytes=micro_batch.loss_bytes,
            )
        micro_batch.plan = micro_batch.choices = revised
        if revised.strategies:
            scope.watch()
        self._note_rates(micro_batch, revised)
        micro_batch.loads.note_plan()
        micro_batch.num_replans += 1

    def _is_as_planned(self, micro_batch: MicroBatch, plan: Plan, site: Site, routing: Routing) -> bool:
        """The quick answer for experts that are all on this rank: no more rows than planned, and no more held."""
        planned_pairs = micro_batch.planned_pairs.get(site.name)
        if routing.load is not None or (planned_pairs is not None and routing.num_pairs > planned_pairs):
            return False
        expected_bytes = plan.held_until(site.layer) + micro_batch.expected_excess_bytes + micro_batch.excess_bytes
        return micro_batch.ledger.held_bytes - expected_bytes <= _REPLAN_SHARE * self._books.limit_bytes

    def _keeps_all_anyway(self, micro_batch: MicroBatch, plan: Plan, excess_bytes: int) -> bool:
        """Whether everything is kept, and may be although it is more than was planned: there is room for all of it to
        grow by as much as anything has."""
        most_bytes = plan.peak_bytes * micro_batch.loads.growth + max(excess_bytes, 0)
        is_alone = not self._books.budgets.is_shared
        return is_alone and not plan.strategies and most_bytes <= micro_batch.available_bytes

    def commit(self, micro_batch: MicroBatch) -> None:
        """Forward has ended: the bytes really held replace the budget in the books."""
        plan = micro_batch.plan
        on_top_bytes = 0 if plan is None else max(plan.on_top_bytes, micro_batch.loss_bytes)
        self._books.budgets.commit(micro_batch.key, micro_batch.actual_bytes, on_top_bytes)
        if plan is not None:
            self.plans.note_run(plan)

    def learn(self, micro_batch: MicroBatch) -> None:
        """Backward has ended: learn sizes, times, and how far off the predicted peak was. The plan is then what it came
        to with the rows that arrived.

        A first micro-batch that was over the limit and survived is no error: with its sizes known, `begin` refuses the
        next one if no plan can help.
        """
        assert micro_batch.scope is not None
        self.release(micro_batch)
        self._books.margin.relax(self._books.nearest_bytes)
        with micro_batch.planning():
            self.recent_loads.learn(micro_batch.loads)
            shape, loads, scope = micro_batch.shape, micro_batch.loads.by_layer, micro_batch.scope
            if micro_batch.plan is not None and loads and self.profile.knows(shape):
                # With the rows that have arrived: where they are fewer than was expected, transients would seem
                # smaller.
                micro_batch.plan = self._as_it_ran(micro_batch)
                micro_batch.rates = self._books.offloading.rates()
                if not scope.is_traced:
                    micro_batch.actual_bytes = micro_batch.plan.predicted_bytes  # not counted, and rows are known now
            self.watching.note(micro_batch)
            if scope.is_traced:
                if micro_batch.plan is not None:
                    self.held_errors.observe(shape, micro_batch.plan.predicted_bytes, micro_batch.actual_bytes)
                if not shape.is_told:
                    return  # it could not be told how long it was: no sizes are known
                if not self.profile.is_as_expected(
                    shape, scope.num_traced, micro_batch.ledger.demand_bytes, loads, micro_batch.routed_pairs
                ):
                    trace = at_even_load(scope.trace, loads)
                    if trace is None:
                        return  # nothing arrived in some layer, so its sizes are not known
                    self.profile.observe(shape, trace, micro_batch.routed_pairs)
            self._learn_times(micro_batch)
            if micro_batch.is_paired:
                return
            if micro_batch.above_held is not None:
                after_bytes, is_exact = micro_batch.above_held
                self.loss.observe(
                    shape,
                    micro_batch.own_peak_bytes - micro_batch.actual_bytes,
                    after_bytes - self.managed.gathered_bytes,
                    is_exact and micro_batch.is_own_peak_exact,
                    self._books.nearest_bytes,
                )
            # With sizes known by now, see what the model would have said of a run that was there to measure them.
            plan = micro_batch.plan or self._as_it_ran(micro_batch)
            # More held than predicted (values that were not finite are not quantized, say) is no transient.
            excess_bytes = max(micro_batch.actual_bytes - plan.predicted_bytes, 0)
            above_bytes = micro_batch.own_peak_bytes - self.managed.gathered_bytes - excess_bytes
            self._books.correction.observe(
                plan, above_bytes, micro_batch.is_own_peak_exact, micro_batch.available_bytes
            )

    # Times

    @property
    def times(self) -> StepTimes:
        """Made when the first plan is: that is when the machine is probed."""
        if self._times is None:
            self._times = StepTimes(self.managed.device, self.profile, self._books.learnt_rates)
        return self._times

    def _note_rates(self, micro_batch: MicroBatch, plan: Plan) -> None:
        """What a plan's seconds are made of, and what it is predicted to add by what is known now."""
        micro_batch.rates = self._books.offloading.rates()
        micro_batch.added_seconds = self.times.added_seconds(plan)

    def _learn_times(self, micro_batch: MicroBatch) -> None:
        """From a micro-batch that had the device for itself while it ran."""
        activity = micro_batch.activity
        if micro_batch.plan is None or micro_batch.rates is None:
            return
        # Two that took turns have timed their own turns.
        if not (activity.is_time_own or micro_batch.is_paired) or activity.stopwatch.num_laps < _LAPS:
            return
        self.times.learn(
            Ran(
                shape=micro_batch.shape,
                plan=micro_batch.plan,
                rates=micro_batch.rates,
                ledger=micro_batch.ledger,
                stopwatch=activity.stopwatch,
                planned_seconds=micro_batch.replanned_seconds,
            )
        )
        self._books.offloading.learnt_rates = self.times.rates

    def _as_it_ran(self, micro_batch: MicroBatch) -> Plan:
        return self.plans.as_it_ran(micro_batch.shape, micro_batch.loads, micro_batch.ran(), micro_batch.gradients)

    def release(self, micro_batch: MicroBatch) -> None:
        """The values of a micro-batch are gone: its backward has ended, or will never come."""
        self._books.budgets.release(micro_batch.key)

    # What was learnt, in a file

    def save_profile(self) -> None:
        """Write the seed profile on the main process, where one is configured and anything was learnt."""
        has_learnt = self.profile.version > 0 or self.profile.margin_bytes != self._books.margin.num_bytes
        path = self._seed_path
        if path is not None and has_learnt and this_rank() == 0:  # one file for the run
            self.write_profile(path)

    def write_profile(self, path: Path) -> None:
        """Write what was learnt so far.

        Raises:
            ValueError: the file cannot be written.
        """
        self.profile.transient_factor = self._books.correction.factor
        self.profile.margin_bytes = self._books.margin.num_bytes
        self.profile.save(path, self.managed.fingerprint)

    @property
    def _seed_path(self) -> Path | None:
        path = self._config.seed_profile
        return None if path is None else path_of_part(Path(path), self.name)

    def _seed_profile(self, resumed: Path | None) -> Profile:
        path = self._seed_path
        if path is not None and this_rank() == 0:
            check_writable(path, "the seed profile")  # now rather than when training has ended
        if resumed is not None:
            return self._resumed(resumed)
        return Profile.load(path, self.managed.fingerprint) if path is not None and path.exists() else Profile()

    def _resumed(self, path: Path) -> Profile:
        """What a checkpoint has; nothing, where it is not of this model on this number of ranks (sizes are others) or
        cannot be read: it only helps."""
        try:
            if Profile.fingerprint_of(path) in (None, self.managed.fingerprint):
                return Profile.load(path, self.managed.fingerprint)
            logger.info("Sizes of operators in %s were measured on other ranks; they are learnt anew", path)
        except UserError as error:
            logger.warning("Sizes of operators are learnt anew: %s", error)
        return Profile()

    # Plans

    def minimum_plan(self, shape: BatchShape) -> Plan:
        """The minimum-memory plan of a micro-batch of a shape that is known, with the gradients there are now."""
        return self.plans.plan(shape, 0, self.managed.gradients.now(), self.recent_loads.expected)

    def _provide(self, shape: BatchShape, left_bytes: int, gradients: GradientBytes) -> Provision:
        books, expected = self._books, self.recent_loads.expected
        return provide(
            lambda available_bytes: self.plans.plan(shape, available_bytes, gradients, expected),
            left_bytes,
            books.budgets,
            step_bytes=books.budget_step_bytes,
            is_minimum=books.is_minimum,
            loss_bytes=self.loss.expected_bytes(shape),
        )

    def _most_effective(self) -> Strategy:
        """The allowed strategy that frees most: for a micro-batch nothing is known about."""
        return min(self.plans.strategies, key=_BY_EFFECT.index, default=Strategy.KEEP)

    def _check_least(
        self, shape: BatchShape, plan: Plan, in_use_bytes: int, left_bytes: int, can_roll_back: bool
    ) -> None:
        needed_bytes = max(plan.peak_bytes, plan.predicted_bytes + self.loss.sure_bytes(shape))
        if needed_bytes <= _TOLERANCE * max(left_bytes, 1):
            return
        is_taken = self._books.budgets.num_in_flight >= self._books.budgets.num_expected
        if is_taken and not can_roll_back:
            return  # run it in as little as there is: the room cannot be shared out anew
        raise (BudgetTakenError if is_taken else MemoryLimitError)(
            f"{self._books.limit_text} is too low for a micro-batch of {shape.batch_size} x {shape.sequence_length} "
            f"tokens: with strategies {', '.join(self._config.strategies) or 'none'} it needs about "
            f"{format_bytes(needed_bytes)} more than the {format_bytes(in_use_bytes)} in use before it, and "
            f"{format_bytes(max(left_bytes, 0))} are left under the limit, the reserve and the system's own limits:"
            " it would run out of memory. Raise memory_limit, allow more strategies, or use a smaller per-device batch "
            "or shorter sequences."
        )


def path_of_part(path: Path, name: str) -> Path:
    """The file of a part of the model, beside that of the whole."""
    return path.with_stem(f"{path.stem}-{name}") if name else path
