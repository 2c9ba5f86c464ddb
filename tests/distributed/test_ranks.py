from __future__ import annotations

import pytest

from flex_trainer.testing.ranks import RankError, RankPool

pytestmark = pytest.mark.ranks


def test_jobs_share_a_group_and_return_one_result_per_rank(two_ranks: RankPool) -> None:
    assert two_ranks.run("tests.distributed.jobs:add_ranks") == [1, 1]


@pytest.mark.sweep  # all jobs after it pay for new ranks
def test_a_failure_names_its_rank_and_the_pool_goes_on(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 has had enough") as caught:
        two_ranks.run("tests.distributed.jobs:fail_on", rank=1)
    assert 1 in caught.value.failures
    assert two_ranks.run("tests.distributed.jobs:add_ranks") == [1, 1]
