"""Recipes with a `parallel` section: the model is that of one process, and so are the losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flex_trainer.launch.recipe import load_recipe
from flex_trainer.testing.ranks import RankError, RankPool
from flex_trainer.testing.tiny import tiny_model
from flex_trainer.train import run
from tests.distributed.recipes import DEEPSEEK, QWEN

pytestmark = pytest.mark.ranks

JOBS = "tests.distributed.recipe_jobs"


@pytest.fixture
def recipe_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "r.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def output(tmp_path: Path) -> str:
    return f"training.output_dir={tmp_path / 'out'}"


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        # float32 routers beside bfloat16 weights: groups of their own; the router's bias is a buffer.
        (DEEPSEEK, ["parallel={fsdp: 2, ep: 2}", "model.dtype=bfloat16"]),
        (QWEN, ["parallel={fsdp: 2, ep: 2}", "model.config.tie_word_embeddings=true"]),
        (QWEN, ["parallel={replicate: 2}", "model.config.tie_word_embeddings=true"]),
    ],
    ids=["fp32 routers", "tied", "tied, replicated"],
)
def test_random_weights_are_those_of_one_process(two_ranks: RankPool, recipe_file, output, text, overrides) -> None:
    path = recipe_file(text)
    assert two_ranks.run(f"{JOBS}:differences_from_one_process", path=path, overrides=[*overrides, output]) == [[], []]


def test_random_weights_on_two_replicas(four_ranks: RankPool, recipe_file, output) -> None:
    overrides = ["parallel={replicate: 2, fsdp: 2, ep: 2}", output]
    found = four_ranks.run(f"{JOBS}:differences_from_one_process", path=recipe_file(DEEPSEEK), overrides=overrides)
    assert found == [[]] * 4


def test_loaded_weights_are_those_of_one_process(two_ranks: RankPool, recipe_file, output, tmp_path: Path) -> None:
    tiny_model("deepseek_v3", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16
    text = (
        f"model: {{name_or_path: {tmp_path / 'model'}}}\ndata: {{name: stdlib, sequence_length: 64, tokenizer: byt5}}\n"
    )
    overrides = ["parallel={fsdp: 2, ep: 2}", "training.use_cpu=true", output]
    path = recipe_file(text)
    assert two_ranks.run(f"{JOBS}:differences_from_one_process", path=path, overrides=overrides) == [[], []]


@pytest.mark.parametrize("dispatch", ["flex", "all_to_all"])
def test_two_ranks_have_the_losses_of_one_process(two_ranks: RankPool, recipe_file, output, dispatch: str) -> None:
    path = recipe_file(DEEPSEEK)
    overrides = [output, f"parallel={{fsdp: 2, ep: 2, dispatch: {dispatch}}}", "data.num_eval_samples=4"]
    overrides += ["training.eval_strategy=steps", "training.eval_steps=2", "flex.memory_limit=8GiB"]
    first, second = two_ranks.run(f"{JOBS}:train", path=path, overrides=overrides)
    both = [*overrides, "parallel=null", "training.per_device_train_batch_size=4"]
    rows = run(load_recipe(path, both)).state.log_history
    for key, name in (("loss", "losses"), ("grad_norm", "grad_norms"), ("eval_loss", "eval_losses")):
        expected = [row[key] for row in rows if key in row]
        assert first[name] == second[name]
        assert first[name] == pytest.approx(expected, rel=1e-5)
    # The values of a row are those of both ranks, on both.
    assert len(first["num_tokens"]) == len(second["num_tokens"]) == 6
    for ours, theirs in zip(first["rows"], second["rows"], strict=True):
        assert {name: value for name, value in ours.items() if name.startswith("flex/")} == {
            name: value for name, value in theirs.items() if name.startswith("flex/")
        }
        assert {ours["flex/memory/peak_rank"], ours["flex/imbalance/max_rank"]} <= {0, 1}


def test_lengths_differ_between_ranks(two_ranks: RankPool, recipe_file, output) -> None:
    overrides = [output, "parallel={fsdp: 2, ep: 2}", "data.sampling.lengths=skewed", "training.max_steps=4"]
    first, second = two_ranks.run(f"{JOBS}:train", path=recipe_file(DEEPSEEK), overrides=overrides)
    assert first["num_tokens"] != second["num_tokens"]
    assert first["losses"] == second["losses"] and len(first["losses"]) == 4


def test_a_mistake_on_the_ranks_is_told_before_anything_is_built(two_ranks: RankPool, recipe_file, output) -> None:
    with pytest.raises(RankError, match="parallel: replicate=2 x fsdp=2 is 4 processes, and there are 2"):
        two_ranks.run(f"{JOBS}:train", path=recipe_file(QWEN), overrides=["parallel={replicate: 2, fsdp: 2}", output])
