"""FlexPlugin on spread models: clipping, accumulation, accelerate's own FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from flex_trainer.testing.forced import relative_error
from flex_trainer.testing.ranks import RankPool
from tests.distributed.models import all_ids, saved_model, whole_model

pytestmark = pytest.mark.ranks

JOBS = "tests.distributed.plugin_jobs"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("models"), "glm4_moe")


@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.01, 2.0), (1e9, 2.0), (0.01, 1.0)])
def test_clipping_over_two_meshes_is_that_of_one_process(
    two_ranks: RankPool, path: Path, max_norm: float, norm_type: float
) -> None:
    """Fault 39: crashes or counts twice over two meshes."""
    model = whole_model(path)
    ids = all_ids(model)
    model(input_ids=ids, labels=ids).loss.backward()
    expected = float(clip_grad_norm_(model.parameters(), max_norm, norm_type))
    by_rank = two_ranks.run(f"{JOBS}:clipped", path=str(path), max_norm=max_norm, norm_type=norm_type, fsdp=2, ep=2)
    assert [answer["norm"] for answer in by_rank] == pytest.approx([expected, expected], rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert relative_error(by_rank[0]["gradients"][name], parameter.grad) <= 1e-4, name


def test_gradients_that_are_not_reduced_yet_are_in_the_budget(two_ranks: RankPool, path: Path) -> None:
    """Fault 7: accumulation with synchronization off keeps whole gradients."""
    for answer in two_ranks.run(f"{JOBS}:accumulated", path=str(path), fsdp=2, ep=2):
        reduced, deferred = answer["reduced"], answer["deferred"]
        # Reduced at once: this rank's part in the first micro-batch, nothing new in the second.
        assert reduced["pending_bytes"] == [answer["local_bytes"], 0]
        # Deferred: all of the weights that it gathers, but only its own experts; then its part, once.
        assert answer["local_bytes"] < deferred["pending_bytes"][0] < answer["whole_bytes"]
        assert deferred["pending_bytes"][1] == answer["local_bytes"]
        for name, gradient in reduced["gradients"].items():
            assert relative_error(deferred["gradients"][name], gradient) <= 1e-5, name


def test_attach_after_an_evaluation(two_ranks: RankPool, path: Path) -> None:
    assert two_ranks.run(f"{JOBS}:attached_after_evaluation", path=str(path), fsdp=2, ep=2) == [True, True]


def test_a_model_sharded_by_accelerate(two_ranks: RankPool, path: Path) -> None:
    model = whole_model(path)
    ids = all_ids(model)
    model(input_ids=ids, labels=ids).loss.backward()
    strategies = ("keep", "recompute", "mixed")
    answers = two_ranks.run(f"{JOBS}:fsdp_plugin_step", path=str(path), strategies=strategies)[0]
    assert answers["recompute"]["freed"]["recompute"] > 0 and not any(answers["keep"]["freed"].values())
    for strategy in strategies:
        gradients = answers[strategy]["gradients"]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert relative_error(gradients[name], parameter.grad) <= 1e-5, (strategy, name)
                assert torch.equal(gradients[name], answers["keep"]["gradients"][name])
