"""Peaks and times of pipeline schedules, counted by hand for small ones and by rule for random ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.cost.iteration import MicroBatchCost, Phase, RankBase, iteration_cost, rank_peak
from flex_trainer.cost.schedules import Action, Kind, gpipe, interleaved, one_forward_one_backward
from flex_trainer.errors import UserError

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741
UNIT = MicroBatchCost(10, 12, 15, forward_seconds=1.0, backward_seconds=2.0, backward_operator="down")


def _most_in_flight(actions) -> int:
    live, most = set(), 0
    for action in actions:
        key = (action.micro_batch, action.stage)
        if action.kind is F:
            live.add(key)
            most = max(most, len(live))
        else:
            live.remove(key)
    assert not live
    return most


def test_one_forward_one_backward_by_hand():
    assert one_forward_one_backward(2, 3) == (
        tuple(Action(kind, i, 0) for kind, i in ((F, 0), (F, 1), (B, 0), (F, 2), (B, 1), (B, 2))),
        tuple(Action(kind, i, 1) for kind, i in ((F, 0), (B, 0), (F, 1), (B, 1), (F, 2), (B, 2))),
    )


def test_gpipe_runs_the_last_micro_batch_backward_first():
    (actions,) = gpipe(1, 2)
    assert [(action.kind, action.micro_batch) for action in actions] == [(F, 0), (F, 1), (B, 1), (B, 0)]


def test_peak_of_two_stages_by_hand():
    cost = iteration_cost(one_forward_one_backward(2, 3), {0: UNIT, 1: UNIT}, [RankBase(100, 7), RankBase(200, 9)])
    # Rank 0: in the backward of the first, the second is held: 100 + 7 + 10 + 15.
    # Rank 1 has one in flight: 200 + 9 + 15.
    assert [peak.num_bytes for peak in cost.peaks] == [132, 224]
    first, second = cost.peaks
    assert (first.position, first.action, first.num_in_flight, first.phase) == (2, Action(B, 0, 0), 2, Phase.STEADY)
    assert (first.others_bytes, first.own_bytes, first.base_bytes, first.operator) == (10, 15, 107, "down")
    assert (second.position, second.num_in_flight) == (1, 1)
    assert cost.peak is second


def test_gradients_count_from_the_first_backward_on():
    heavy_forward = MicroBatchCost(10, 50, 15)
    peak = rank_peak(0, one_forward_one_backward(1, 1)[0], {0: heavy_forward}, RankBase(0, 20))
    assert (peak.num_bytes, peak.action.kind) == (50, F)  # backward: 20 + 15
    again = rank_peak(0, one_forward_one_backward(1, 2)[0], {0: heavy_forward}, RankBase(0, 20))
    assert (again.num_bytes, again.position) == (70, 2)  # the second forward has the gradients of the first beside it


def test_micro_batches_may_differ():
    light, heavy = MicroBatchCost(1, 1, 2), MicroBatchCost(30, 30, 40)
    costs = {(0, 0): light, (1, 0): heavy, (2, 0): light}
    peak = rank_peak(0, gpipe(1, 3)[0], costs, RankBase())
    assert (peak.num_bytes, peak.action) == (41, Action(B, 1, 0))  # micro-batch 0 is held, 2 has left


def test_a_split_backward_keeps_what_the_weights_need():
    actions = tuple(Action(kind, i) for kind, i in ((F, 0), (I, 0), (F, 1), (I, 1), (W, 0), (W, 1)))
    cost = MicroBatchCost(10, 10, 12, 1.0, 1.0, weight_seconds=0.5, kept_for_weights_bytes=4)
    result = iteration_cost((actions,), {0: cost})
    assert (result.peak.num_bytes, result.peak.position) == (16, 3)  # 4 of micro-batch 0, and 12
    assert result.seconds == pytest.approx(2 * 1.0 + 2 * 1.0 + 2 * 0.5)


def test_times_of_two_stages_by_hand():
    cost = iteration_cost(one_forward_one_backward(2, 2), {0: UNIT, 1: UNIT})
    # rank 0:  F0 F1 .. B0 B0 . B1 B1      rank 1:  . F0 B0 B0 F1 B1 B1 . .
    assert cost.seconds == pytest.approx(9.0)
    first, second = cost.times
    assert (first.warmup_seconds, first.steady_seconds, first.cooldown_seconds) == pytest.approx((4.0, 0.0, 5.0))
    assert second.warmup_seconds == pytest.approx(2.0)
    assert first.idle_seconds == pytest.approx(3.0)


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_holds_what_the_position_says(num_stages: int, num_micro_batches: int):
    schedule = one_forward_one_backward(num_stages, num_micro_batches)
    for rank, actions in enumerate(schedule):
        assert _most_in_flight(actions) == min(num_micro_batches, num_stages - rank)
    cost = iteration_cost(schedule, dict.fromkeys(range(num_stages), UNIT))
    # The known length: every rank works m (f + b), and p - 1 micro-batches long a rank waits.
    assert cost.seconds == pytest.approx((num_micro_batches + num_stages - 1) * 3.0)
    for rank, times in enumerate(cost.times):
        assert times.warmup_seconds + times.steady_seconds + times.cooldown_seconds == pytest.approx(cost.seconds)
        assert cost.peaks[rank].num_bytes == (min(num_micro_batches, num_stages - rank) - 1) * 10 + 15


@given(st.integers(1, 6), st.integers(1, 12))
def test_gpipe_holds_all(num_stages: int, num_micro_batches: int):
    cost = iteration_cost(gpipe(num_stages, num_micro_batches), dict.fromkeys(range(num_stages), UNIT))
    assert {peak.num_bytes for peak in cost.peaks} == {(num_micro_batches - 1) * 10 + 15}


@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 3))
def test_interleaving_shortens_the_bubble(num_ranks: int, num_groups: int, num_virtual_stages: int):
    num_micro_batches = num_ranks * num_groups
    schedule = interleaved(num_ranks, num_micro_batches, num_virtual_stages)
    for rank, actions in enumerate(schedule):
        expected = {(i, c * num_ranks + rank) for i in range(num_micro_batches) for c in range(num_virtual_stages)}
        assert {(a.micro_batch, a.stage) for a in actions if a.kind is F} == expected
        ahead = min(
            2 * (num_ranks - rank - 1) + (num_virtual_stages - 1) * num_ranks, num_micro_batches * num_virtual_stages
        )
        assert _most_in_flight(actions) == min(ahead + 1, num_micro_batches * num_virtual_stages)
    part = MicroBatchCost(10, 10, 10, 1.0 / num_virtual_stages, 2.0 / num_virtual_stages)
    cost = iteration_cost(schedule, dict.fromkeys(range(num_ranks * num_virtual_stages), part))
    plain = (num_micro_batches + num_ranks - 1) * 3.0
    ideal = num_micro_batches * 3.0 + (num_ranks - 1) * 3.0 / num_virtual_stages
    assert ideal - 1e-9 <= cost.seconds < plain


def test_mistakes_are_said():
    with pytest.raises(UserError, match="no multiple of 4 ranks"):
        interleaved(4, 6, 2)
    with pytest.raises(UserError, match="before the forward"):
        rank_peak(0, (Action(B, 0),), {0: UNIT}, RankBase())
    with pytest.raises(UserError, match="waits at F0 of stage 1"):
        iteration_cost(((Action(F, 0, 1),),), {0: UNIT, 1: UNIT})
    with pytest.raises(UserError, match="both must be at least 1"):
        gpipe(0, 3)
