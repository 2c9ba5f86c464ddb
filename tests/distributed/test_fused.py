"""A backward beside each forward: losses, gradients and weights are those of one after the other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flex_trainer.testing.ranks import RankPool
from tests.distributed.models import saved_model
from tests.distributed.recipes import DEEPSEEK
from tests.tiers import first_quick

pytestmark = pytest.mark.ranks

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_moe", "mixtral", "gpt_oss", "granitemoe")
JOB = "flex_trainer.bench.fused_equality_rank:steps"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def check(
    ranks: RankPool, path: Path, *, num_ranks: int = 2, num_steps: int = 2, accumulation: int = 2, **job: Any
) -> None:
    by_rank = ranks.run(
        JOB,
        path=str(path),
        fuse=(False, True),
        num_steps=num_steps,
        accumulation=accumulation,
        mesh=[2, num_ranks],
        **job,
    )
    for answers in by_rank:
        plain, fused = answers
        assert fused["losses"] == plain["losses"]
        assert (plain["num_pairs"], fused["num_pairs"] > 0) == (0, True)
        assert fused["num_records"] == num_steps * accumulation
    plain, fused = by_rank[0]
    for what in ("gradients", "weights"):
        assert fused[what].keys() == plain[what].keys()
        different = [name for name, tensor in plain[what].items() if not torch.equal(tensor, fused[what][name])]
        assert not different, (what, different)


@pytest.mark.parametrize("architecture", first_quick(FAMILIES, 1))
@pytest.mark.parametrize("choices", first_quick(("keep", "recomputed_dispatch", "recompute", "offload", "mixed")))
def test_under_every_strategy(two_ranks: RankPool, directory: Path, architecture: str, choices: str) -> None:
    check(two_ranks, saved_model(directory, architecture), choices=choices)


@pytest.mark.parametrize("accumulation", first_quick((3, 4, 8), 0))
def test_windows_of_several_lengths(two_ranks: RankPool, directory: Path, accumulation: int) -> None:
    check(two_ranks, saved_model(directory, "qwen3_moe"), choices="mixed", accumulation=accumulation)


@pytest.mark.parametrize("choices", first_quick(("recomputed_dispatch", "keep", "recompute")))
def test_random_numbers_are_those_of_one_after_the_other(two_ranks: RankPool, directory: Path, choices: str) -> None:
    """A recomputation in backward, which draws the numbers of its forward again, hands over to a forward that draws
    its own."""
    path = saved_model(directory / "deep", "qwen3_moe", num_hidden_layers=6)
    options = {"attention_dropout": 0.3, "attn_implementation": "eager"}
    check(two_ranks, path, choices=choices, accumulation=4, order_seed=1, options=options)


@pytest.mark.parametrize("seed", first_quick(tuple(range(6))))
def test_in_any_order(two_ranks: RankPool, directory: Path, seed: int) -> None:
    path = saved_model(directory / "deep", "deepseek_v3", num_hidden_layers=5)
    choices = ("mixed", "recomputed_dispatch")[seed % 2]
    check(two_ranks, path, choices=choices, accumulation=5, order_seed=seed)


@pytest.mark.parametrize("choices", first_quick(("mixed", "recomputed_dispatch")))
def test_under_autocast(two_ranks: RankPool, directory: Path, choices: str) -> None:
    check(two_ranks, saved_model(directory, "glm4_moe"), choices=choices, has_autocast=True)


@pytest.mark.parametrize("choices", first_quick(("recomputed_dispatch", "keep"), 0))
def test_uneven_lengths(two_ranks: RankPool, directory: Path, choices: str) -> None:
    check(two_ranks, saved_model(directory, "deepseek_v3"), choices=choices, is_uneven=True, accumulation=3)


@pytest.mark.parametrize("choices", first_quick(("mixed", "recomputed_dispatch")))
def test_a_rank_without_tokens(two_ranks: RankPool, directory: Path, choices: str) -> None:
    check(two_ranks, saved_model(directory, "mixtral"), choices=choices, is_skewed=True)


def test_a_root_with_weights_of_its_own(two_ranks: RankPool, directory: Path) -> None:
    """The forward is inside of FSDP2's root all the time, and the backward ends there."""
    check(two_ranks, saved_model(directory, "deepseek_v4"), choices="mixed", accumulation=3, order_seed=2)


def test_gradients_are_whole_for_clipping_and_the_optimizer(two_ranks: RankPool, directory: Path) -> None:
    path = str(saved_model(directory, "qwen3_moe"))
    job = "tests.distributed.plugin_jobs:whole_when_asked"
    assert two_ranks.run(job, path=path, fsdp=2, ep=2) == [[(True, False)] * 2] * 2


@pytest.mark.sweep
def test_planned(two_ranks: RankPool, directory: Path) -> None:
    check(two_ranks, saved_model(directory, "deepseek_v3"), num_steps=3, accumulation=3)


TRAINER = ["training.gradient_accumulation_steps=3", "training.max_steps=4", "training.logging_steps=1"]


def trained(ranks: RankPool, path: Path, fuse: str, output: Path, *changes: str, num_ranks: int = 2) -> dict[str, Any]:
    parallel = f"parallel={{fsdp: {num_ranks}, ep: 2}}"
    overrides = [*TRAINER, parallel, f"flex.fuse={fuse}", f"training.output_dir={output}", *changes]
    by_rank = ranks.run("tests.distributed.recipe_jobs:train", path=str(path), overrides=overrides)
    return by_rank[0]


def test_a_trainer_sees_nothing_of_it(two_ranks: RankPool, tmp_path: Path) -> None:
    """Losses, gradient norms after clipping, evaluation between steps, a checkpoint and going on from it."""
    (tmp_path / "r.yaml").write_text(DEEPSEEK + "flex: {memory_limit: 3GiB}\n")
    evaluation = ("training.eval_strategy=steps", "training.eval_steps=2", "data.num_eval_samples=4")
    saving = ("training.save_strategy=steps", "training.save_steps=2", "training.max_grad_norm=0.05")
    answers = {}
    for fuse in ("false", "true"):
        out = tmp_path / fuse
        whole = trained(two_ranks, tmp_path / "r.yaml", fuse, out, *evaluation, *saving)
        resumed = trained(
            two_ranks,
            tmp_path / "r.yaml",
            fuse,
            tmp_path / f"{fuse}-resumed",
            *evaluation,
            *saving,
            f"training.resume_from_checkpoint={out / 'checkpoint-2'}",
        )
        answers[fuse] = whole, resumed
    for plain, fused in zip(*answers.values(), strict=True):
        assert (plain["num_pairs"], fused["num_pairs"] > 0) == (0, True)
        for what in ("losses", "grad_norms", "eval_losses"):
            assert fused[what] == plain[what], what
        assert len(plain["eval_losses"]) > 0
    assert answers["true"][1]["losses"][-2:] == answers["true"][0]["losses"][-2:]


@pytest.mark.sweep
def test_auto_changes_no_loss(two_ranks: RankPool, tmp_path: Path) -> None:
    """Whatever it decides on; how it does is in tests/steps/test_order_choice.py."""
    (tmp_path / "r.yaml").write_text(DEEPSEEK + "flex: {memory_limit: 3GiB}\n")
    plain, auto = (trained(two_ranks, tmp_path / "r.yaml", fuse, tmp_path / fuse) for fuse in ("false", "auto"))
    assert auto["losses"] == plain["losses"]


def test_gradients_that_are_reduced_in_each_micro_batch(four_ranks: RankPool, tmp_path: Path) -> None:
    """Over replicas, Trainer puts off only the sum over them: each backward reduces over shards, inside of the pair."""
    (tmp_path / "r.yaml").write_text(DEEPSEEK + "flex: {memory_limit: 3GiB}\n")
    replicas = "parallel.replicate=2"
    plain, fused = (
        trained(four_ranks, tmp_path / "r.yaml", fuse, tmp_path / fuse, replicas) for fuse in ("false", "true")
    )
    assert fused["num_pairs"] > 0
    assert fused["losses"] == plain["losses"] and fused["grad_norms"] == plain["grad_norms"]


@pytest.mark.parametrize("choices", ["mixed", "recomputed_dispatch"])
def test_experts_in_shards(four_ranks: RankPool, directory: Path, choices: str) -> None:
    check(four_ranks, saved_model(directory, "deepseek_v3"), num_ranks=4, choices=choices, accumulation=3)
