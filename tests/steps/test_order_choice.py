"""Times of stages, and the orders and decisions that follow from them."""

from __future__ import annotations

import logging

import pytest
import torch

from flex_trainer.experts.handover import Exchange
from flex_trainer.planner.fusion import Side
from flex_trainer.steps.order_choice import OrderChoice
from flex_trainer.steps.stages import RanStage, StageKey, StageLog, timeline

CPU = torch.device("cpu")


def log_of(compute: float, exchange: float, num_layers: int = 6, extra: float = 0.0) -> StageLog:
    """Of a forward and a backward one after the other.

    Args:
        compute, exchange: seconds of every stage.
        extra: more of every stage of the backward.
    """
    log, now = StageLog(CPU, listens=True), 0.0
    for side in (Side.FORWARD, Side.BACKWARD):
        numbers = dict.fromkeys(Exchange, 0)
        for _ in range(num_layers):
            for kind in (Exchange.DISPATCH, Exchange.COMBINE):
                end = now + compute + (extra if side is Side.BACKWARD else 0.0)
                ends = end + exchange
                stage = RanStage(StageKey(side, kind, False, 0, numbers[kind]), now, end, end, ends, arrivals=[ends])
                log.stages.append(stage)
                numbers[kind] += 1
                now = end + exchange
        end = now + compute
        log.stages.append(RanStage(StageKey(side, None, False, None, 0), now, end, end, end))
        now += compute
    return log


def choose(choice: OrderChoice, log: StageLog, num_micro_batches: int) -> None:
    for _ in range(num_micro_batches):
        choice.learn(log)
        choice.choose()


def test_what_pays_is_turned_on_and_said(caplog: pytest.LogCaptureFixture) -> None:
    choice = OrderChoice("auto", CPU)
    with caplog.at_level(logging.WARNING):
        choose(choice, log_of(5e-3, 5e-3), 3)
        assert not choice.is_on and not caplog.records  # it is still looking
        choose(choice, log_of(5e-3, 5e-3), 1)
    assert choice.is_on
    assert "together from now on" in caplog.text
    assert choice.pair_seconds < 0.75 * choice.sequential_seconds
    assert choice.sequential_seconds == pytest.approx(26 * 5e-3 + 24 * 5e-3, rel=0.01)
    assert sorted(side.value for side in choice.order) == ["B"] * 13 + ["F"] * 13


def test_what_does_not_pay_stays_off(caplog: pytest.LogCaptureFixture) -> None:
    choice = OrderChoice("auto", CPU)
    with caplog.at_level(logging.WARNING):
        choose(choice, log_of(5e-3, 1e-5), 8)
    assert not choice.is_on
    assert caplog.text.count("one after the other") >= 1


def test_hand_overs_cost_time_too() -> None:
    """Exchanges as short as the host's own work between two threads are not worth it."""
    choice = OrderChoice("auto", CPU)
    choose(choice, log_of(2e-4, 8e-5), 4)
    assert not choice.is_on


def test_it_looks_again() -> None:
    choice = OrderChoice("auto", CPU)
    choose(choice, log_of(5e-3, 1e-5), 4)
    assert not choice.is_on
    choose(choice, log_of(5e-3, 5e-3), 12)
    assert choice.is_on


def test_true_does_not_ask_and_plans_all_the_same() -> None:
    choice = OrderChoice(True, CPU)
    assert choice.is_on and choice.order == ()
    choose(choice, log_of(5e-3, 1e-5), 1)
    assert choice.is_on and len(choice.order) == 26


def test_a_fixed_order_stays() -> None:
    choice = OrderChoice("auto", CPU)
    choice.fix((Side.BACKWARD, Side.FORWARD))
    choose(choice, log_of(5e-3, 5e-3), 4)
    assert choice.is_on and choice.order == (Side.BACKWARD, Side.FORWARD)


def test_an_exchange_that_queued_behind_another_one_is_not_longer() -> None:
    log = StageLog(CPU, listens=True)
    log.stages = [
        RanStage(StageKey(Side.FORWARD, Exchange.DISPATCH, False, 0, 0), 0.0, 1.0, 5.0, 5.0, arrivals=[4.0]),
        RanStage(StageKey(Side.BACKWARD, Exchange.DISPATCH, False, 0, 0), 1.0, 2.0, 6.0, 7.0, arrivals=[7.0]),
    ]
    assert list(log.own_exchange_seconds().values()) == [3.0, 3.0]
    assert [stage.exchange_seconds for stage in log.stages] == [3.0, 5.0]
    assert [stage.exposed_seconds for stage in log.stages] == [0.0, 1.0]


def test_the_timeline_has_both_sides_and_their_exchanges() -> None:
    found = timeline(log_of(5e-3, 2e-3, num_layers=1), 3, 17)
    assert (found.step, found.micro_batch) == (3, 17)
    lanes = [span.lane for span in found.spans]
    assert lanes.count("forward") == lanes.count("backward") == 3
    assert lanes.count("forward exchange") == lanes.count("backward exchange") == 2
    assert found.total_ms == pytest.approx(6 * 5 + 4 * 2)
    assert all(0 <= span.start_ms <= span.end_ms <= found.total_ms for span in found.spans)
