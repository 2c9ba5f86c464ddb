"""Tensors of files, converted a few at a time. On ranks: tests/distributed/test_checkpoint_loaded.py."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from flex_trainer.checkpoint import loaded
from flex_trainer.checkpoint.loaded import check_loaded_weights
from flex_trainer.compat import convert_into, names_in_model, weight_conversions
from flex_trainer.errors import UserError
from flex_trainer.testing.tiny import tiny_model


@pytest.mark.parametrize("architecture", ["deepseek_v3", "kimi_linear", "gpt_oss"])
def test_one_tensor_at_a_time_is_what_from_pretrained_loads(tmp_path: Path, architecture: str) -> None:
    tiny_model(architecture).save_pretrained(tmp_path)
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = type(whole)(copy.deepcopy(whole.config))
    conversions = weight_conversions(model)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        targets = names_in_model(list(file.keys()), model, conversions)
        assert targets.keys() == set(file.keys())
        assert set(targets.values()) <= model.state_dict().keys()
        assert names_in_model(["model.nothing.weight"], model, conversions) == {}
        for target in set(targets.values()):
            names = [name for name, of in targets.items() if of == target]
            convert_into(model, {name: file.get_slice(name) for name in names}, conversions)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name


def test_a_model_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several batches, each of which is given up again."""
    monkeypatch.setattr(loaded, "_BATCH_ELEMENTS", 1000)
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    check_loaded_weights(model)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[3, 2, 1] += 1
    with pytest.raises(UserError, match=r"1 of its \d+ tensors are not those.*: model.layers.1.mlp.experts.gate_up_pr"):
        check_loaded_weights(model)


def test_in_another_dtype(tmp_path: Path) -> None:
    """As it was loaded, not as it is in the files; the router keeps float32."""
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16, torch.float32}
    check_loaded_weights(model)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = copy.deepcopy(model)  # not mapped from the file
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "other.safetensors").write_bytes(content)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"cannot be compared with .* \(rank 0: Safetensor"):
        check_loaded_weights(model)
