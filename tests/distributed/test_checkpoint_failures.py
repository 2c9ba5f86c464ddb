"""A run that dies or runs out of disk while it saves does not hang, and goes on from the checkpoint before."""

from __future__ import annotations

from pathlib import Path

import pytest

from flex_trainer.testing.ranks import RankError, RankPool
from tests.distributed import checkpoint_jobs as jobs
from tests.distributed.checkpoint_jobs import EP2, JOBS

pytestmark = pytest.mark.ranks

MOST_SECONDS = 10.0


@pytest.fixture(scope="module")
def whole(two_ranks: RankPool, start: Path, tmp_path_factory: pytest.TempPathFactory) -> jobs.Run:
    output = tmp_path_factory.mktemp("whole")
    return two_ranks.run(JOBS + "train", start=start, output=output, sizes=EP2, settings={"save_strategy": "no"})[0]


@pytest.mark.sweep
@pytest.mark.parametrize(("failing_rank", "what"), [(1, "parameters and optimizer state"), (0, "the model")])
def test_a_rank_that_cannot_write(
    two_ranks: RankPool, start: Path, whole: jobs.Run, tmp_path: Path, failing_rank: int, what: str
) -> None:
    """Also with one checkpoint kept: it goes when the next one is complete, not before."""
    found = two_ranks.run(
        JOBS + "fail_to_save",
        start=start,
        output=tmp_path,
        sizes=EP2,
        failing_rank=failing_rank,
        settings={"save_total_limit": 1},
    )
    for kind, message, seconds in found:
        assert kind == "CheckpointWriteError"
        assert message.startswith(f"checkpoint-6 was not saved ({what}; rank {failing_rank}: ")
        assert "File too large" in message or "inline_container" in message
        assert f"The last complete one is {str(tmp_path / 'checkpoint-3')!r}" in message
        assert seconds < MOST_SECONDS
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    resumed = two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=EP2, resume=True)
    jobs.assert_same_run(resumed[0], whole)


def test_a_rank_that_is_killed(two_ranks: RankPool, start: Path, whole: jobs.Run, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1: ended with exit code -9"):
        two_ranks.run(
            JOBS + "fail_to_save",
            start=start,
            output=tmp_path,
            sizes=EP2,
            failing_rank=1,
            is_killed=True,
            timeout_s=60.0,
        )
    assert "checkpoint-6" not in {path.name for path in tmp_path.iterdir()}
    resumed = two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=EP2, resume=True)
    jobs.assert_same_run(resumed[0], whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]


def test_copies_of_a_model_on_two_ranks(two_ranks: RankPool, start: Path, tmp_path: Path) -> None:
    """Plain data parallelism: rank 1 writes its random streams only."""
    found = two_ranks.run(
        JOBS + "fail_to_save", start=start, output=tmp_path, sizes=None, failing_rank=1, settings={"save_steps": 6}
    )
    for _, message, seconds in found:
        assert message.startswith("checkpoint-6 was not saved (random streams; rank 1: ")
        assert "There is no earlier one" in message
        assert seconds < MOST_SECONDS
    assert list(tmp_path.iterdir()) == []
