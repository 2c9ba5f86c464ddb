"""All-to-all as receives and sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flex_trainer.experts.pairwise import PairwiseWork
from flex_trainer.testing.ranks import RankPool

pytestmark = pytest.mark.ranks


def test_it_brings_what_all_to_all_brings(two_ranks: RankPool) -> None:
    assert two_ranks.run("tests.distributed.pairwise_jobs:exchange", num_times=12) == [True, True]


def test_of_four_ranks(four_ranks: RankPool) -> None:
    assert four_ranks.run("tests.distributed.pairwise_jobs:exchange", num_times=12) == [True] * 4


def test_its_end_is_known_before_it_is_waited_for(two_ranks: RankPool) -> None:
    first, second = two_ranks.run("tests.distributed.pairwise_jobs:watch")
    assert not first["was_completed"]  # the other rank comes later
    for found in (first, second):
        assert found["is_completed"] and found["num_told"] == 1 and found["sum"] == 9.0


class _Failing:
    def wait(self) -> None:
        raise dist.DistBackendError("connection reset by peer")


@pytest.mark.parametrize("is_watched", [False, True])
def test_an_error_is_raised_where_it_is_waited_for(is_watched: bool) -> None:
    work = PairwiseWork([_Failing()], (torch.empty(0),))
    if is_watched:
        work.get_future()
    with pytest.raises(dist.DistBackendError, match="reset by peer"):
        work.wait()
