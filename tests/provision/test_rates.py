"""What mitigations cost is learnt: it converges to what is true, stands disturbances, is bounded, and tries again."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch

from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.ledger import CopyTime, Ledger
from flex_trainer.config import FlexConfig
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.roofline import Rates, Roofline
from flex_trainer.cost.shape import BatchShape
from flex_trainer.memory import offloading
from flex_trainer.memory.offloading import OffloadService
from flex_trainer.planner.plan import Plan
from flex_trainer.provision import rates as rates_module
from flex_trainer.provision.rates import LearntCost, LearntRates, Used
from flex_trainer.provision.step_fit import StepFit
from flex_trainer.provision.step_times import Ran, StepTimes, learnt_rates
from flex_trainer.provision.stopwatch import Stopwatch
from flex_trainer.runtime import FlexRuntime
from flex_trainer.strategy import Strategy
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter

MIB = 2**20
PROBE = Rates(offload=Roofline(100e-6, 1e9), quantize=Roofline(50e-6, 2e9), recompute_overhead_seconds=60e-6)


def line(count: float, num_bytes: float, overhead_seconds: float = 400e-6, bytes_per_second: float = 0.25e9) -> float:
    return count * overhead_seconds + num_bytes / bytes_per_second


class TestLearntCost:
    def cost(self, start: float = 1.0) -> LearntCost:
        return LearntCost(100e-6, 1e-9, start)

    def test_starts_at_the_probe_times_a_first_guess(self) -> None:
        cost = self.cost(start=2.0)
        assert (cost.overhead_seconds, cost.seconds_per_unit, cost.factor) == (200e-6, 2e-9, 2.0)

    def test_converges_to_the_true_line(self) -> None:
        draw, cost = random.Random(0), self.cost()
        for _ in range(60):
            count, num_bytes = draw.randrange(1, 400), draw.randrange(1, 200) * MIB
            cost.observe(count, num_bytes, line(count, num_bytes) * draw.uniform(0.9, 1.1))
        for count, num_bytes, off in ((10, 100 * MIB, 0.06), (100, 100 * MIB, 0.06), (300, 20 * MIB, 0.15)):
            found = count * cost.overhead_seconds + num_bytes * cost.seconds_per_unit
            assert found == pytest.approx(line(count, num_bytes), rel=off)

    def test_one_mix_is_right_at_that_mix(self) -> None:
        """Where all micro-batches move the same values, overhead and bandwidth cannot be told apart, their sum can."""
        cost = self.cost()
        for _ in range(8):
            cost.observe(100, 50 * MIB, line(100, 50 * MIB))
        found = 100 * cost.overhead_seconds + 50 * MIB * cost.seconds_per_unit
        assert found == pytest.approx(line(100, 50 * MIB), rel=0.06)

    def test_an_outlier_moves_it_little(self) -> None:
        cost = self.cost()
        for _ in range(12):
            cost.observe(100, 50 * MIB, line(100, 50 * MIB))
        before = cost.factor
        cost.observe(100, 50 * MIB, 1000 * line(100, 50 * MIB))
        assert before < cost.factor < 1.15 * before
        for _ in range(8):
            cost.observe(100, 50 * MIB, line(100, 50 * MIB))
        assert cost.factor == pytest.approx(before, rel=0.15)

    def test_a_first_micro_batch_that_touches_memory_is_forgotten(self) -> None:
        cost = self.cost()
        cost.observe(100, 50 * MIB, 30 * line(100, 50 * MIB, 100e-6, 1e9))
        assert cost.factor > 5
        cost.observe(100, 50 * MIB, line(100, 50 * MIB, 100e-6, 1e9))
        assert cost.factor == pytest.approx(1.0, rel=0.01)

    @pytest.mark.parametrize("seconds", [0.0, -1.0, 1e12])
    def test_it_is_bounded(self, seconds: float) -> None:
        cost = self.cost()
        for _ in range(500):
            cost.observe(100, 50 * MIB, seconds)
        assert 1 / 50.001 <= cost.factor <= 1000.001
        assert cost.overhead_seconds > 0 and cost.seconds_per_unit > 0

    def test_it_follows_a_machine_that_changes(self) -> None:
        cost = self.cost()
        for _ in range(20):
            cost.observe(10, 50 * MIB, 5 * line(10, 50 * MIB, 100e-6, 1e9))
        for _ in range(20):
            cost.observe(10, 50 * MIB, line(10, 50 * MIB, 100e-6, 1e9))
        assert cost.factor == pytest.approx(1.0, rel=0.3)

    def test_what_is_not_used_fades_towards_the_probe_and_good_news_stays(self) -> None:
        bad, good = self.cost(), self.cost()
        for _ in range(10):
            bad.observe(10, 50 * MIB, 8 * line(10, 50 * MIB, 100e-6, 1e9))
            good.observe(10, 50 * MIB, line(10, 50 * MIB, 100e-6, 1e9) / 4)
        learnt_bad, learnt_good = bad.factor, good.factor
        for _ in range(32):
            bad.skip()
            good.skip()
        assert bad.factor == pytest.approx(learnt_bad**0.5, rel=0.01)
        assert good.factor == pytest.approx(learnt_good)
        for _ in range(400):
            bad.skip()
        assert bad.factor == pytest.approx(1.0, rel=0.01)

    def test_tries_are_few(self) -> None:
        """A mitigation that costs four times another one is tried about log2(n / 32) times in n micro-batches."""
        cost, num_tries = self.cost(), 0
        tries: list[int] = []
        for number in range(4000):
            if number < 3 or cost.factor < 1.5:  # cheaper than the other way, it seems
                cost.observe(10, 50 * MIB, 4 * line(10, 50 * MIB, 100e-6, 1e9))
                num_tries += 1
                tries.append(number)
            else:
                cost.skip()
        assert 3 + 2 <= num_tries <= 3 + 10
        assert all(later - earlier >= 1.9 * 32 for earlier, later in zip(tries[3:], tries[4:], strict=False))

    def test_a_try_that_finds_it_cheap_is_believed(self) -> None:
        cost = self.cost()
        for _ in range(20):
            cost.observe(10, 50 * MIB, 8 * line(10, 50 * MIB, 100e-6, 1e9))
        for _ in range(200):
            cost.skip()
        cost.observe(10, 50 * MIB, line(10, 50 * MIB, 100e-6, 1e9))
        assert cost.factor < 1.5


class TestLearntRates:
    def test_each_mitigation_has_its_own(self) -> None:
        learnt = LearntRates(PROBE)
        draw = random.Random(1)
        for _ in range(40):
            count, num_bytes, num, seconds = (
                draw.randrange(1, 99),
                draw.randrange(1, 99) * MIB,
                draw.randrange(9, 99),
                0.05,
            )
            learnt.observe(
                Used(
                    num_recomputed=num,
                    recomputed_seconds=seconds,
                    recompute_seconds=num * 900e-6 + 1.1 * seconds,
                    num_offloaded=count,
                    offloaded_bytes=num_bytes,
                    offload_seconds=line(count, num_bytes),
                    probed_quantize_seconds=0.1,
                    quantize_seconds=0.3,
                )
            )
        rates = learnt.rates
        recompute_seconds = 50 * rates.recompute_overhead_seconds + 0.05 * rates.recompute_factor
        assert recompute_seconds == pytest.approx(0.1, rel=0.2)
        assert rates.offload.seconds(50 * MIB) == pytest.approx(line(1, 50 * MIB), rel=0.2)
        assert rates.quantize.seconds(50 * MIB) == pytest.approx(3 * PROBE.quantize.seconds(50 * MIB), rel=0.2)

    def test_jitter_changes_no_plans(self) -> None:
        learnt, draw = LearntRates(PROBE), random.Random(2)
        published = set()
        for _ in range(300):
            learnt.observe(
                Used(num_offloaded=10, offloaded_bytes=50 * MIB, offload_seconds=0.05 * draw.uniform(0.8, 1.25))
            )
            published.add(learnt.rates)
        assert len(published) <= 3

    def test_a_machine_on_which_all_gets_slower_alike_changes_no_plans(self) -> None:
        learnt = LearntRates(PROBE, (Strategy.RECOMPUTE, Strategy.OFFLOAD))
        published = []
        for number in range(100):
            slower = 1 + 0.02 * number
            learnt.observe(
                Used(
                    num_recomputed=10,
                    recomputed_seconds=0.5,
                    recompute_seconds=0.5 * slower,
                    num_offloaded=10,
                    offloaded_bytes=50 * MIB,
                    offload_seconds=0.1 * slower,
                )
            )
            published.append(learnt.rates)
        assert len(set(published[20:])) <= 2
        planned_seconds = 10 * learnt.rates.recompute_overhead_seconds + 0.5 * learnt.rates.recompute_factor
        plan = Plan({"a": Strategy.RECOMPUTE}, added_seconds=planned_seconds, recompute_seconds=planned_seconds)
        assert learnt.added_seconds(plan) == pytest.approx(0.5 * slower, rel=0.15)  # what is predicted follows

    def test_added_time_is_as_of_now(self) -> None:
        learnt = LearntRates(PROBE)
        plan = Plan({"a": Strategy.OFFLOAD, "b": Strategy.RECOMPUTE}, added_seconds=0.3, recompute_seconds=0.1)
        assert learnt.added_seconds(plan) == pytest.approx(0.3)
        learnt.observe(
            Used(num_offloaded=10, offloaded_bytes=50 * MIB, offload_seconds=1.5 * line(10, 50 * MIB, 1e-4, 1e9))
        )
        assert learnt.rates == LearntRates(PROBE).rates  # too little, too early to plan anew
        assert 0.1 + 1.3 * 0.2 < learnt.added_seconds(plan) < 0.1 + 1.5 * 0.2


class TestStepFit:
    def shapes(self, num: int) -> list[BatchShape]:
        return [BatchShape(1, 64 * (number + 1)) for number in range(num)]

    @pytest.mark.parametrize("num_shapes", [1, 6])
    def test_finds_what_different_plans_add_in_spite_of_disturbances(self, num_shapes: int) -> None:
        draw, fit = random.Random(3), StepFit((1.0, 1.0))
        own = {shape: draw.uniform(0.9, 1.1) for shape in self.shapes(num_shapes)}
        for number in range(64):
            shape = draw.choice(self.shapes(num_shapes))
            work = shape.num_tokens / 100
            first, second = (work * draw.choice((0.0, 0.1, 0.4)) for _ in range(2))
            seconds = (3 * work * own[shape] + 1.5 * first + 0.3 * second) * draw.uniform(0.98, 1.02)
            fit.add(shape, work, seconds * (8 if number % 13 == 5 else 1), (first, second))
        assert fit.theta.tolist() == pytest.approx([1.5, 0.3], abs=0.25)
        for shape, factor in own.items():
            plain = fit.plain_seconds(shape, shape.num_tokens / 100)
            assert plain == pytest.approx(3 * factor * shape.num_tokens / 100, rel=0.06)

    def test_long_sequences_that_offload_do_not_make_offload_look_expensive(self) -> None:
        """They are slower per unit of work, and it is they that are mitigated, all alike."""
        fit = StepFit((1.0,))
        for number in range(40):
            is_long = number % 2 == 1
            work = 4.0 if is_long else 1.0
            fit.add(BatchShape(1, 4096 if is_long else 512), work, work * (3.9 if is_long else 3.0), (is_long * 0.8,))
        assert fit.theta[0] < 2.5  # the whole of the difference would make it 5.5

    def test_one_plan_all_the_time_leaves_the_prior(self) -> None:
        fit = StepFit((1.0,))
        for _ in range(40):
            fit.add(BatchShape(1, 64), 1.0, 3.4, (0.4,))
        assert fit.theta[0] == pytest.approx(1.0, abs=0.05)
        assert fit.plain_seconds(BatchShape(1, 64), 1.0) == pytest.approx(3.0, abs=0.05)

    def test_a_new_shape_is_scaled_by_its_work(self) -> None:
        fit = StepFit((1.0,))
        assert fit.plain_seconds(BatchShape(1, 64), 1.0) is None
        for number in range(10):
            fit.add(BatchShape(1, 64), 1.0, 30.0 if number == 0 else 3.0, (0.0,))
        assert fit.plain_seconds(BatchShape(1, 128), 2.5) == pytest.approx(7.5)

    def test_theta_is_bounded(self) -> None:
        fit = StepFit((1.0,))
        for number in range(64):
            fit.add(BatchShape(1, 64), 1.0, 3.0 + (1.4 if number % 2 else 0.0), (0.1 * (number % 2),))
        assert fit.theta[0] == 8.0


class FakeProfile(Profile):
    def forward_seconds(self, shape: BatchShape) -> float:
        return shape.num_tokens * 1e-3


class FakeStopwatch(Stopwatch):
    def __init__(self, seconds: float, is_read: bool = True) -> None:
        super().__init__(torch.device("cpu"))
        self._seconds, self.ready = seconds, is_read

    def is_read(self) -> bool:
        return self.ready

    def seconds(self) -> float:
        return self._seconds


def make_step_times() -> StepTimes:
    device = torch.device("cpu")
    return StepTimes(device, FakeProfile(), learnt_rates(device, PROBE))


def micro_batch(times: StepTimes, num_bytes: int, core_seconds: float, **changes: float) -> Ran:
    """One that offloads in 10 values; `seconds` long."""
    ledger = Ledger()
    ledger.freed("offload", num_bytes)
    ledger.num_offloaded = 10 if num_bytes else 0
    ledger.copies = [CopyTime(num_bytes // 10, core_seconds / 20, core_seconds / 20)] * 20 if num_bytes else []
    ledger.wait_seconds = changes.get("waited", 0.0)
    plan = Plan({"a": Strategy.OFFLOAD} if num_bytes else {}, added_seconds=0.1)
    return Ran(BatchShape(1, 1000), plan, times.rates, ledger, FakeStopwatch(changes["seconds"]))


class TestStepTimes:
    def test_what_counts_is_how_much_longer_the_step_gets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Copies take 0.4 s of cores; the step is 0.8 s longer with them. The probe said 0.1."""
        times = make_step_times()
        for number in range(40):
            is_mitigated = number % 3 > 0
            times.learn(
                micro_batch(times, 100 * MIB if is_mitigated else 0, 0.4, seconds=3.0 + (0.8 if is_mitigated else 0.0))
            )
        assert 10 * times.rates.offload.seconds(10 * MIB) == pytest.approx(0.8, rel=0.25)
        assert times.plain_seconds(BatchShape(1, 1000)) == pytest.approx(3.0, rel=0.05)
        assert times.plain_seconds(BatchShape(1, 500)) == pytest.approx(1.5, rel=0.05)

    def test_copies_that_hide_cost_little(self) -> None:
        times = make_step_times()
        for number in range(60):
            times.learn(micro_batch(times, 100 * MIB if number % 2 else 0, 0.4, seconds=3.0))
        assert 10 * times.rates.offload.seconds(10 * MIB) < 0.1

    def test_waiting_counts_whole(self) -> None:
        times = make_step_times()
        for _ in range(12):  # one plan all the time: nothing but waiting tells
            times.learn(micro_batch(times, 100 * MIB, 0.0, seconds=4.0, waited=1.0))
        assert 10 * times.rates.offload.seconds(10 * MIB) == pytest.approx(1.0, rel=0.25)
        assert times.plain_seconds(BatchShape(1, 1000)) == pytest.approx(3.0, rel=0.05)

    def test_nothing_is_read_before_the_device_is_done(self) -> None:
        times = make_step_times()
        waiting = FakeStopwatch(3.0, is_read=False)
        times.learn(replace(micro_batch(times, 0, 0.0, seconds=3.0), stopwatch=waiting))
        assert times.plain_seconds(BatchShape(1, 1000)) is None
        waiting.ready = True
        times.learn(micro_batch(times, 0, 0.0, seconds=3.0))
        assert times.plain_seconds(BatchShape(1, 1000)) == pytest.approx(3.0)

    def test_planning_inside_is_left_out(self) -> None:
        times = make_step_times()
        for _ in range(3):
            times.learn(replace(micro_batch(times, 0, 0.0, seconds=3.5), planned_seconds=0.5))
        assert times.plain_seconds(BatchShape(1, 1000)) == pytest.approx(3.0)


def test_recompute_is_measured_on_the_host() -> None:
    """A plan whose recomputation is said to take 0.1 s, and takes 0.2."""
    times = make_step_times()
    for _ in range(10):
        ledger = Ledger()
        ledger.num_recomputes, ledger.recompute_seconds = 20, 0.2
        rates = times.rates
        seconds = 20 * rates.recompute_overhead_seconds + rates.recompute_factor * 0.0988
        plan = Plan({"a": Strategy.RECOMPUTE}, added_seconds=seconds, recompute_seconds=seconds)
        times.learn(Ran(BatchShape(1, 1000), plan, rates, ledger, FakeStopwatch(3.2)))
    found = 20 * times.rates.recompute_overhead_seconds + times.rates.recompute_factor * 0.0988
    assert found == pytest.approx(0.2, rel=0.15)
    assert times.plain_seconds(BatchShape(1, 1000)) == pytest.approx(3.0, rel=0.02)


class SlowTier(FileTier):
    """A file whose copies take so long."""

    delay_seconds = 0.0

    def _write(self, offset: int, source: torch.Tensor) -> None:
        time.sleep(self.delay_seconds)
        super()._write(offset, source)

    def _read(self, offset: int, target: torch.Tensor) -> None:
        time.sleep(self.delay_seconds)
        super()._read(offset, target)


def test_slow_copies_turn_the_plan_to_recompute_and_fast_ones_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit, with a probe that promises copies for nothing. Losses and gradients are those of the plain run."""
    torch.set_num_threads(1)
    monkeypatch.setattr(OffloadService, "_measure_offload", lambda _: Roofline(20e-6, 5e9))
    monkeypatch.setattr(offloading, "in_flight_bound_bytes", lambda _: 2**18)  # small, as the model is
    monkeypatch.setattr(rates_module, "_HALF_LIFE", 4.0)
    model, reference = tiny_model("mixtral"), tiny_model("mixtral")
    batch = tiny_batch(model, 2, 256, seed=0)
    loss = reference(**batch).loss
    loss.backward()
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 5_600_000, strategies=("recompute", "offload")))
    with_fake_meter(runtime)
    runtime.attach(model)
    tier = runtime.books.offloading.store().tier = SlowTier()

    def offloaded_kib() -> int:
        ours = model(**batch).loss
        with runtime.backward():
            ours.backward()
        assert torch.equal(ours, loss)
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            assert parameter.grad is None or other.grad is None or torch.equal(parameter.grad, other.grad)
        model.zero_grad(set_to_none=True)
        return runtime.records[-1].freed_bytes["offload"] // 1024

    try:
        fast = [offloaded_kib() for _ in range(3)]
        tier.delay_seconds = 0.01
        slow = [offloaded_kib() for _ in range(8)]
        tier.delay_seconds = 0.0
        again = [offloaded_kib()]
        while max(again) == 0 and len(again) < 40:
            again.append(offloaded_kib())
    finally:
        runtime.detach()
    assert min(fast) > 500, "what costs nothing is used"
    assert max(slow[:2]) > 500 and min(slow) == 0, "copies that the step waits for are given up"
    assert slow.count(0) >= 3, "and are tried again only now and then"
    assert max(again) > 500, "so that it is seen when they are fast"
