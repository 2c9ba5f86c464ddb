"""The runtime on spread models: sizes, agreement, zero rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from flex_trainer.testing.ranks import RankPool
from tests.distributed.models import saved_model

JOBS = "tests.distributed.runtime_jobs"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models"), "deepseek_v3")


def test_bytes_are_known_exactly_once_the_counts_have_arrived(two_ranks: RankPool, path: Path) -> None:
    by_rank = two_ranks.run(f"{JOBS}:predicted_and_held", path=str(path), num_steps=3, fsdp=2, ep=2)
    for steps in by_rank:
        assert not steps[0]["is_profile"]  # traced, so planned from the first one on
        assert len({step["held_bytes"] for step in steps}) == len(steps)  # loads differ, sizes follow
        for step in steps:
            assert step["predicted_bytes"] == pytest.approx(step["held_bytes"], rel=1e-3)
    assert by_rank[0][0]["loads"] != by_rank[1][0]["loads"]


def test_all_tokens_on_one_rank(two_ranks: RankPool, path: Path) -> None:
    crowded, empty = two_ranks.run(f"{JOBS}:skewed_steps", path=str(path), num_steps=3, fsdp=2, ep=2)
    for step in crowded:
        assert {load.pairs for load in step["loads"].values()} == {2.0}
    for step in empty:
        assert {load.pairs for load in step["loads"].values()} == {0.0}
    # The crowded rank mitigates, the empty one keeps everything.
    assert all(sum(step["freed"].values()) > 0 for step in crowded)
    assert not any(sum(step["freed"].values()) for step in empty)
    assert [step["loss"] for step in crowded] == pytest.approx([step["plain_loss"] for step in crowded], rel=1e-6)


def test_dispatch_is_replayed_only_where_all_ranks_want_it(two_ranks: RankPool, path: Path) -> None:
    for wishes in [(True, True), (True, False), (False, True), (False, False)]:
        by_rank = two_ranks.run(f"{JOBS}:agreement", path=str(path), wishes=wishes, fsdp=2, ep=2)
        for answer in by_rank:
            assert answer["agreed"] == (answer["moe_layers"] if all(wishes) else 0)
            assert answer["error"] <= 1e-5
        # Of each layer: rows and routing go out, rows come back, and the same in backward; a replay sends both again.
        for answer in by_rank:
            assert answer["exchanges"] == answer["moe_layers"] * (6 + 2 * all(wishes))


def test_plans_count_on_agreement_once_all_ranks_would_have_agreed(two_ranks: RankPool, path: Path) -> None:
    for is_tight, expected in [((True, True), [0, 2, 2]), ((True, False), [0, 0, 0])]:
        by_rank = two_ranks.run(
            f"{JOBS}:agreement_by_plans", path=str(path), is_tight=is_tight, num_steps=3, fsdp=2, ep=2
        )
        assert by_rank == [expected, expected]


@pytest.mark.parametrize("in_one_backward", [True, False])
def test_two_forwards_before_a_backward(two_ranks: RankPool, path: Path, in_one_backward: bool) -> None:
    """FSDP2 gives up all weights after the first of two backwards; the other's logits are computed again after that."""
    errors = two_ranks.run(f"{JOBS}:two_forwards", path=str(path), in_one_backward=in_one_backward, fsdp=2, ep=2)
    assert max(errors) <= 1e-5
