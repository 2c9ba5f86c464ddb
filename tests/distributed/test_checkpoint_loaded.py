"""Models that were sharded while they were loaded, against their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from flex_trainer.testing.ranks import RankPool
from flex_trainer.testing.tiny import tiny_model
from tests.distributed import checkpoint_jobs as jobs
from tests.distributed.checkpoint_jobs import EP2, JOBS

pytestmark = pytest.mark.ranks

WRONG_BELOW_US = {
    "bailing_hybrid": "self_attn.conv1d.weight",
    "glm5_next": "self_attn.conv1d.weight",
    "kimi_k25": "_proj.weight",
    "kimi_linear": "self_attn.conv1d.weight",
    "minimax_m3_vl": "gate_up_proj.weight",
}
"""Architectures that transformers 5.24 loads wrongly in shards, with the tensors. When one of them is right,
docs/models.md is to change."""


@pytest.mark.parametrize("architecture", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_weights_that_are_right(two_ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    """Experts that are stored one by one or fused, with biases, in files of several parts."""
    tiny_model(architecture).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert two_ranks.run(JOBS + "check_loaded", start=tmp_path, sizes=EP2) == ["", ""]


@pytest.mark.parametrize("architecture", WRONG_BELOW_US)
def test_weights_that_are_wrong(two_ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    tiny_model(architecture).save_pretrained(tmp_path)
    first, second = two_ranks.run(JOBS + "check_loaded", start=tmp_path, sizes=EP2)
    assert first == second
    assert f"are not those of {str(tmp_path)!r}" in first
    named = first.split(f"{str(tmp_path)!r}: ")[1].split(". Load it")[0].split(" and ")[0].split(", ")
    assert named and all(name.endswith(WRONG_BELOW_US[architecture]) for name in named)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.down_proj", "model.norm.weight", "lm_head.weight"])
def test_one_element_on_one_rank(two_ranks: RankPool, start: Path, name: str) -> None:
    found = two_ranks.run(JOBS + "check_loaded", start=start, sizes=EP2, change=name)
    assert found[0] == found[1]
    assert f"1 of its 47 tensors are not those of {str(start)!r}: {name}. " in found[0]


@pytest.mark.sweep
def test_four_ranks_with_copies(four_ranks: RankPool, start: Path) -> None:
    """Each of two copies, spread over two ranks each, is compared."""
    sizes = {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}
    assert four_ranks.run(JOBS + "check_loaded", start=start, sizes=sizes) == [""] * 4
    name = "model.embed_tokens.weight"
    for message in four_ranks.run(JOBS + "check_loaded", start=start, sizes=sizes, change=name):
        assert f": {name}. " in message


def test_a_trainer_refuses_before_the_first_step(two_ranks: RankPool, tmp_path: Path) -> None:
    jobs.save_tiny(tmp_path / "start", "kimi_linear")
    job, arguments = JOBS + "train_wrongly_loaded", {"start": tmp_path / "start", "output": tmp_path, "sizes": EP2}
    for message, num_steps in two_ranks.run(job, **arguments, is_checked=True):
        assert "KimiLinearForCausalLM was sharded while it was loaded" in message
        assert "model.layers.0.self_attn.conv1d.weight" in message and num_steps == 0
    assert two_ranks.run(job, **arguments, is_checked=False) == [("", 1), ("", 1)]


def test_what_there_is_to_compare_with(two_ranks: RankPool, tmp_path: Path) -> None:
    jobs.save_tiny(tmp_path, "qwen3_moe")
    for said in two_ranks.run(JOBS + "load_another", start=tmp_path, sizes=EP2):
        assert "lm_head.weight" in said.pop("changed")
        assert said == {"spread after it was loaded": "", "without files": "", "drawn": ""}


def test_random_weights_are_the_same_on_all_ranks(two_ranks: RankPool) -> None:
    assert two_ranks.run(JOBS + "draw_and_distribute", sizes=EP2, seeds=[3, 3]) == ["", ""]
    for message in two_ranks.run(JOBS + "draw_and_distribute", sizes=EP2, seeds=[3, 4]):
        assert "the weights of Qwen3MoeForCausalLM are not the same on all ranks" in message
        assert "model.embed_tokens.weight" in message and "set_seed" in message
