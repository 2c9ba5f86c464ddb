"""The runtime on spread models: sizes, agreement, zero rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from flex_trainer.testing.ranks import RankPool
from tests.distributed.models import saved_model
from tests.tiers import first_quick

pytestmark = pytest.mark.ranks

JOBS = "tests.distributed.runtime_jobs"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def path(directory: Path) -> Path:
    return saved_model(directory, "deepseek_v3")


@pytest.mark.parametrize(
    ("extra_bytes", "is_tight", "error"), [(10**9, False, 1e-3), (8_150_000, True, 0.01)], ids=["ample", "tight"]
)
def test_bytes_are_known_once_the_counts_have_arrived(
    two_ranks: RankPool, path: Path, extra_bytes: int, is_tight: bool, error: float
) -> None:
    """Also where fewer rows come than were expected, after a crowd that has gone: what is learnt from the peak would
    be wrong by the difference."""
    settings = {"num_steps": 4, "num_crowded": 1, "extra_bytes": extra_bytes}
    (crowded, compared), (empty, _) = two_ranks.run(
        f"{JOBS}:predicted_and_held", path=str(path), **settings, fsdp=2, ep=2
    )
    for step in crowded:
        assert not step["is_profile"]  # traced, so planned from the first one on
        assert step["predicted_bytes"] == pytest.approx(step["held_bytes"], rel=error)
    assert compared == [step["predicted_bytes"] for step in crowded]
    assert (crowded[0]["freed_bytes"] > 0) is is_tight
    assert {load.pairs for load in crowded[0]["loads"].values()} == {2.0}
    # Then loads differ, from layer to layer, step to step and rank to rank; sizes follow.
    assert len({step["held_bytes"] for step in crowded}) == 4
    assert len({load for step in crowded[1:] for load in step["loads"].values()}) > 3
    for step in empty[1:]:  # of a rank that nothing came to sizes are learnt later
        assert step["predicted_bytes"] == pytest.approx(step["held_bytes"], rel=error)


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


def test_what_may_come_is_no_reason_to_refuse(two_ranks: RankPool, directory: Path) -> None:
    """Refused is only what does not fit even if no token comes; the rest runs under the minimum-memory plan."""
    path = saved_model(directory, "qwen3_moe", num_hidden_layers=6, mlp_only_layers=[])
    job = f"{JOBS}:steps_under_less_than_is_expected"
    crowded, other = two_ranks.run(job, path=str(path), num_steps=3, fsdp=2, ep=2)
    assert len(crowded) == 3 and all(num_bytes > 0 for num_bytes in crowded)
    assert other == [0, 0, 0]


@pytest.mark.sweep
def test_sizes_are_learnt_once_in_half_precision(two_ranks: RankPool, directory: Path) -> None:
    path = saved_model(directory, "qwen3_moe")  # whose routing weights are in half precision too
    for versions in two_ranks.run(f"{JOBS}:news", path=str(path), num_steps=8, fsdp=2, ep=2):
        assert versions[3] == versions[-1], versions


def test_dispatch_is_recomputed_only_where_all_ranks_want_it(two_ranks: RankPool, path: Path) -> None:
    for wishes in [(True, True), (True, False), (False, True), (False, False)]:
        by_rank = two_ranks.run(f"{JOBS}:agreement", path=str(path), wishes=wishes, fsdp=2, ep=2)
        for answer in by_rank:
            assert answer["agreed"] == (answer["moe_layers"] if all(wishes) else 0)
            assert answer["error"] <= 1e-5
        # Of each layer: counts, rows and routing go out, rows come back, and in backward all but the counts the other
        # way; a recomputation sends rows and routing again.
        for answer in by_rank:
            assert answer["exchanges"] == answer["moe_layers"] * (7 + 2 * all(wishes))


def test_plans_count_on_agreement_once_all_ranks_would_have_agreed(two_ranks: RankPool, path: Path) -> None:
    """In both layers that have experts, where both ranks run under the minimum-memory plan."""
    for is_tight, expected in [((True, True), [0, 2, 2]), ((True, False), [0, 0, 0])]:
        by_rank = two_ranks.run(
            f"{JOBS}:agreement_by_plans", path=str(path), is_tight=is_tight, num_steps=3, fsdp=2, ep=2
        )
        assert by_rank == [expected, expected]


@pytest.mark.parametrize("in_one_backward", first_quick([True, False]))
def test_two_forwards_before_a_backward(two_ranks: RankPool, path: Path, in_one_backward: bool) -> None:
    """FSDP2 gives up all weights after the first of two backwards; the other's logits are computed again after that."""
    errors = two_ranks.run(f"{JOBS}:two_forwards", path=str(path), in_one_backward=in_one_backward, fsdp=2, ep=2)
    assert max(errors) <= 1e-5
