"""A sharded run that stops and goes on is the run that does not stop, on the same meshes and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flex_trainer.testing.ranks import RankPool
from tests.distributed import checkpoint_jobs as jobs
from tests.distributed.checkpoint_jobs import EP2, JOBS, assert_same_run, assert_same_state, assert_same_tensors

pytestmark = pytest.mark.ranks

FSDP2 = {"fsdp_size": 2}
EP2_OF_4 = {"fsdp_size": 4, "ep_size": 2}
REPLICATED = {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}


@pytest.fixture(scope="session")
def two_rank_run(two_ranks: RankPool, start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with FSDP 2 x EP 2 on two ranks, that saved after three and after six."""
    output = tmp_path_factory.mktemp("two_ranks")
    _write(output, two_ranks.run(JOBS + "train", start=start, output=output, sizes=EP2))
    return output


@pytest.fixture(scope="session")
def four_rank_run(four_ranks: RankPool, start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("four_ranks")
    _write(output, four_ranks.run(JOBS + "train", start=start, output=output, sizes=EP2_OF_4))
    return output


def _write(output: Path, runs: list[jobs.Run]) -> None:
    torch.save(runs, output / "runs.pt")


def _runs(output: Path) -> list[jobs.Run]:
    return torch.load(output / "runs.pt", weights_only=False)


def _assert_experts_on_their_ranks(runs: list[jobs.Run], expected: dict[str, torch.Tensor], owners: list[int]) -> None:
    """Expert by expert. `owners`: for each part of the experts, in their order, the rank that has it."""
    for name, own in runs[0].own_experts.items():
        assert own.shape[0] == jobs.NUM_EXPERTS // len(owners)
        parts = expected[name].chunk(len(owners))
        for rank, part in zip(owners, parts, strict=True):
            assert torch.equal(runs[rank].own_experts[name], part), (name, rank)


def test_two_ranks_go_on_as_if_they_had_not_stopped(
    two_ranks: RankPool, start: Path, two_rank_run: Path, tmp_path: Path
) -> None:
    two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=EP2, settings={"max_steps": 3})
    resumed = two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=EP2, resume=True)
    for run, whole in zip(resumed, _runs(two_rank_run), strict=True):
        assert_same_run(run, whole)
        assert len(run.losses) == 6
        assert max(run.grad_norms) > 0.5  # clipped over both meshes
    _assert_experts_on_their_ranks(resumed, _runs(two_rank_run)[0].parameters, owners=[0, 1])


def test_random_streams_are_a_part_of_it(two_ranks: RankPool, start: Path, two_rank_run: Path, tmp_path: Path) -> None:
    """With another stream a rank's dropout draws other numbers: what the test above compares does depend on it."""
    two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=EP2, settings={"max_steps": 3})
    checkpoint = tmp_path / "checkpoint-3"
    streams = torch.load(checkpoint / "rng_state_1.pth", weights_only=False)
    torch.save({**streams, "cpu": torch.Generator().manual_seed(1).get_state()}, checkpoint / "rng_state_1.pth")
    (checkpoint / "flex_manifest.json").unlink()  # it would tell
    resumed = two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=EP2, resume=True)
    assert resumed[0].losses[:3] == _runs(two_rank_run)[0].losses[:3]
    assert resumed[0].losses[4:] != _runs(two_rank_run)[0].losses[4:]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(EP2_OF_4, id="two shards of each expert group", marks=pytest.mark.sweep),
        pytest.param(REPLICATED, id="two replicas", marks=pytest.mark.sweep),
    ],
)
def test_four_ranks_go_on_as_if_they_had_not_stopped(
    four_ranks: RankPool, start: Path, tmp_path: Path, sizes: dict[str, Any]
) -> None:
    whole = four_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=sizes)
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed = four_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=sizes, resume=checkpoint)
    for run, other in zip(resumed, whole, strict=True):
        assert_same_run(run, other)
    # Four ranks are (efsdp, ep): the first quarter of the experts is on rank 0, the second on rank 2.
    owners = [0, 2, 1, 3] if sizes is EP2_OF_4 else [0, 1]
    _assert_experts_on_their_ranks(resumed, whole[0].parameters, owners)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_other_families(two_ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    """Experts stored as one tensor, with biases; tied embeddings."""
    jobs.save_tiny(tmp_path / "start", architecture, tie_word_embeddings=True)
    whole = two_ranks.run(JOBS + "train", start=tmp_path / "start", output=tmp_path / "run", sizes=EP2)
    resumed = two_ranks.run(
        JOBS + "train",
        start=tmp_path / "start",
        output=tmp_path / "run",
        sizes=EP2,
        resume=str(tmp_path / "run" / "checkpoint-3"),
    )
    for run, other in zip(resumed, whole, strict=True):
        assert_same_run(run, other)
    alone = jobs.restore(tmp_path / "start", tmp_path / "run" / "checkpoint-6", tmp_path / "alone")
    assert_same_state(alone, whole[0])


@pytest.mark.sweep
def test_fewer_experts_than_ranks(four_ranks: RankPool, tmp_path: Path) -> None:
    """Two experts over EP 2 and two shards each: half of the ranks have none (fault 47)."""
    start, output = tmp_path / "start", tmp_path / "run"
    jobs.save_tiny(start, n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1)
    sizes = {**EP2_OF_4, "is_whole": True}  # from_pretrained cannot load no rows of a tensor
    whole = four_ranks.run(JOBS + "train", start=start, output=output, sizes=sizes)
    assert sorted(len(next(iter(run.own_experts.values()))) for run in whole) == [0, 0, 1, 1]
    checkpoint = output / "checkpoint-3"
    resumed = four_ranks.run(JOBS + "train", start=start, output=output, sizes=sizes, resume=str(checkpoint))
    for run, other in zip(resumed, whole, strict=True):
        assert_same_run(run, other)
        assert_same_tensors(run.own_experts, other.own_experts)
    alone = jobs.restore(start, output / "checkpoint-6", tmp_path / "alone")
    assert_same_state(alone, resumed[0])


# On other meshes


def _assert_loads_on(
    ranks: RankPool, sizes: dict[str, int], owners: list[int], start: Path, run: Path, output: Path
) -> None:
    """What `run` saved last is there on other ranks, expert by expert and moment by moment."""
    saved = _runs(run)[0]
    loaded = ranks.run(JOBS + "restore", start=start, checkpoint=run / "checkpoint-6", output=output, sizes=sizes)
    for one in loaded:
        assert_same_state(one, saved)
    _assert_experts_on_their_ranks(loaded, saved.parameters, owners=owners)


def test_two_ranks_without_ep(two_ranks: RankPool, start: Path, two_rank_run: Path, tmp_path: Path) -> None:
    _assert_loads_on(two_ranks, FSDP2, [0, 1], start, two_rank_run, tmp_path)


def test_four_ranks_to_two(two_ranks: RankPool, start: Path, four_rank_run: Path, tmp_path: Path) -> None:
    _assert_loads_on(two_ranks, EP2, [0, 1], start, four_rank_run, tmp_path)


def test_two_ranks_to_four(four_ranks: RankPool, start: Path, two_rank_run: Path, tmp_path: Path) -> None:
    _assert_loads_on(four_ranks, EP2_OF_4, [0, 2, 1, 3], start, two_rank_run, tmp_path)


def test_one_process(start: Path, four_rank_run: Path, tmp_path: Path) -> None:
    alone = jobs.restore(start, four_rank_run / "checkpoint-6", tmp_path)
    assert_same_state(alone, _runs(four_rank_run)[0])


def test_training_goes_on_on_other_meshes(two_ranks: RankPool, start: Path, two_rank_run: Path, tmp_path: Path) -> None:
    """The same batches and the same schedule for every group of parameters, of which there is another number."""
    checkpoint = str(two_rank_run / "checkpoint-3")
    whole = _runs(two_rank_run)[0]
    resumed = two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=FSDP2, resume=checkpoint)
    assert resumed[0].losses == pytest.approx(whole.losses, rel=1e-5)
    assert resumed[0].grad_norms == pytest.approx(whole.grad_norms, rel=1e-4)
    for name, parameter in whole.parameters.items():
        torch.testing.assert_close(resumed[0].parameters[name], parameter, rtol=1e-3, atol=1e-4)


def test_training_goes_on_in_one_process(start: Path, two_rank_run: Path, tmp_path: Path) -> None:
    """Twice the rows instead of two ranks: the same batches in each step. Dropout draws otherwise."""
    checkpoint = str(two_rank_run / "checkpoint-3")
    settings = {"per_device_train_batch_size": 2}
    resumed = jobs.train(start, tmp_path, resume=checkpoint, settings=settings)
    assert resumed.losses == pytest.approx(_runs(two_rank_run)[0].losses, rel=1e-2)
    assert (tmp_path / "checkpoint-6").is_dir()


# What else a checkpoint is


def test_a_checkpoint_is_an_ordinary_model(start: Path, four_rank_run: Path) -> None:
    loaded = jobs.load(four_rank_run / "checkpoint-6", None)
    saved = _runs(four_rank_run)[0]
    assert_same_tensors({name: p.detach() for name, p in loaded.named_parameters()}, saved.parameters)
    assert getattr(loaded.config, "distributed_config", None) is None


def test_experts_on_the_wrong_rank_are_found(two_rank_run: Path) -> None:
    """What the tests above compare fails if two ranks' experts are exchanged (fault 38)."""
    runs = _runs(two_rank_run)
    first, second = runs
    first.own_experts, second.own_experts = second.own_experts, first.own_experts
    with pytest.raises(AssertionError, match="experts"):
        _assert_experts_on_their_ranks(runs, first.parameters, owners=[0, 1])


def test_saving_right_after_an_evaluation(two_ranks: RankPool, start: Path, tmp_path: Path) -> None:
    """An evaluation leaves whole weights in the place of shards; the best model is loaded at the end."""
    runs = two_ranks.run(JOBS + "train", start=start, output=tmp_path, sizes=EP2, settings=jobs.KEEP_THE_WORST)
    best = jobs.load(tmp_path / "checkpoint-3", None)
    for run in runs:
        assert_same_tensors(run.parameters, {name: p.detach() for name, p in best.named_parameters()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]
    assert (
        f'"best_model_checkpoint": "{tmp_path / "checkpoint-3"}"'
        in (tmp_path / "checkpoint-6" / "trainer_state.json").read_text()
    )
