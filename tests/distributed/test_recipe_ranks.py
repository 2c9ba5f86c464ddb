"""Recipes with a `parallel` section: the model is that of one process, and so are the losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flex_trainer.meter import ProcessMeter
from flex_trainer.recipe import load_recipe
from flex_trainer.testing.ranks import RankError, RankPool
from flex_trainer.testing.tiny import tiny_model
from flex_trainer.train import run

DEEPSEEK = """
model:
  architecture: deepseek_v3
  config: {hidden_size: 32, num_hidden_layers: 2, first_k_dense_replace: 1, num_attention_heads: 2,
           intermediate_size: 32, num_key_value_heads: 2, q_lora_rank: 16, kv_lora_rank: 16,
           qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 16,
           n_group: 2, topk_group: 1, n_routed_experts: 8, num_experts_per_tok: 2,
           moe_intermediate_size: 16}
data: {name: stdlib, sequence_length: 64, domains: [data], sampling: {lengths: fixed}}
training: {max_steps: 3, per_device_train_batch_size: 2, gradient_accumulation_steps: 2, use_cpu: true,
           save_strategy: no, logging_steps: 1, disable_tqdm: true, learning_rate: 1.0e-3}
"""
QWEN = """
model:
  architecture: qwen3_moe
  config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16,
           moe_intermediate_size: 16, intermediate_size: 32, num_experts: 4, num_experts_per_tok: 2}
data: {name: stdlib, sequence_length: 64, domains: [data]}
training: {use_cpu: true}
"""
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


def test_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = ProcessMeter()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole_bytes, auto_bytes = meter.device_bytes(), meter.auto_bytes()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert meter.device_bytes() == whole_bytes // 4
    in_use_bytes = meter.in_use_bytes()
    quarter_bytes = (auto_bytes - in_use_bytes) / 4
    # Other processes of this machine come and go between the two readings.
    assert meter.auto_bytes() - in_use_bytes == pytest.approx(quarter_bytes, rel=0.2)


def test_a_mistake_on_the_ranks_is_told_before_anything_is_built(two_ranks: RankPool, recipe_file, output) -> None:
    with pytest.raises(RankError, match="parallel: replicate=2 x fsdp=2 is 4 processes, and there are 2"):
        two_ranks.run(f"{JOBS}:train", path=recipe_file(QWEN), overrides=["parallel={replicate: 2, fsdp: 2}", output])
