"""Every architecture that is claimed builds, has sound weights, and trains one step on the CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from flex_trainer.testing.tiny import (
    FAMILIES,
    NOT_TRAINABLE_HERE,
    all_moe_architectures,
    tiny_batch,
    tiny_config,
    tiny_model,
)

DENSE = ("llama", "qwen3")
OTHERS = tuple(name for name in all_moe_architectures() if name not in FAMILIES)


@pytest.fixture(autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def experts_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Fused experts: whatever has the activation between its two products as a method of its own."""
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    layers = model.get_decoder().layers
    assert isinstance(layers, torch.nn.ModuleList)
    return layers


def assert_trains(architecture: str, padding: bool) -> PreTrainedModel:
    model = tiny_model(architecture)
    assert model.training
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert num_bytes < 5 * 2**20
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name
    for module in experts_modules(model):
        for name, parameter in module.named_parameters():
            if parameter.dim() == 3:
                assert 1e-4 < parameter.std() < 1, name

    loss = model(**tiny_batch(model, batch_size=2, sequence_length=16, padding=padding)).loss
    loss.backward()

    # Random weights know nothing: the loss is that of a uniform guess among 384 tokens.
    assert loss.item() == pytest.approx(torch.tensor(384.0).log().item(), abs=0.3)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    assert any(gradient.abs().sum() > 0 for gradient in gradients.values())
    for module in experts_modules(model):
        touched = [p.grad is not None and bool(p.grad.abs().sum() > 0) for p in module.parameters()]
        # Vision experts see nothing of a batch of text.
        assert all(touched) or not any(touched)
    return model


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_family_trains_with_experts_that_get_gradients(architecture: str, padding: bool) -> None:
    model = assert_trains(architecture, padding)
    trained = [m for m in experts_modules(model) if any(p.grad is not None for p in m.parameters())]
    assert len(trained) == 0 if architecture in DENSE else len(trained) in (2, 3)


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", OTHERS)
def test_every_other_moe_architecture_trains(architecture: str) -> None:
    model = assert_trains(architecture, padding=True)
    assert any(p.grad is not None for module in experts_modules(model) for p in module.parameters())


def test_discovery_finds_the_moe_families_and_no_dense_model() -> None:
    found = set(all_moe_architectures())
    # glm4v_moe and qwen3_5_moe carry the plan on their text part.
    assert set(FAMILIES) - set(DENSE) <= found
    assert found.isdisjoint(DENSE)
    assert found.isdisjoint(NOT_TRAINABLE_HERE)


def test_what_is_not_trainable_exists() -> None:
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert known >= NOT_TRAINABLE_HERE.keys()


def test_weights_depend_on_the_seed_alone_and_the_global_stream_stays() -> None:
    torch.manual_seed(5)
    expected_draw = torch.rand(3)
    torch.manual_seed(5)
    first = tiny_model("qwen3_moe", seed=1)
    assert torch.equal(torch.rand(3), expected_draw)
    second, other = tiny_model("qwen3_moe", seed=1), tiny_model("qwen3_moe", seed=2)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_first_layer_is_dense_where_the_family_allows_it() -> None:
    layers = decoder_layers(tiny_model("deepseek_v3"))
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [False, True, True]


@pytest.mark.parametrize("architecture", ["glm4_moe_lite", "qwen3_5_moe", "deepseek_v4"])
def test_layer_kinds_follow_the_number_of_layers(architecture: str) -> None:
    model = tiny_model(architecture, num_hidden_layers=5)
    assert len(decoder_layers(model)) == 5
    assert torch.isfinite(model(**tiny_batch(model, 1, 8)).loss)


def test_overrides_reach_the_text_part() -> None:
    config = tiny_config("glm4v_moe", n_routed_experts=4, n_group=1).get_text_config()
    assert (config.n_routed_experts, config.n_group, config.hidden_size) == (4, 1, 32)


def test_implementations_and_dtype_are_passed_on() -> None:
    grouped = tiny_model("mixtral", experts_implementation="grouped_mm", attn_implementation="eager")
    looped = tiny_model("mixtral", experts_implementation="eager", attn_implementation="sdpa")
    assert grouped.config._attn_implementation == "eager"
    assert looped.config._experts_implementation == "eager"
    batch = tiny_batch(grouped, 2, 12)
    assert torch.allclose(grouped(**batch).loss, looped(**batch).loss, atol=1e-5)
    half = tiny_model("mixtral", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_batch_without_padding_has_only_real_bytes() -> None:
    model = tiny_model("llama")
    batch = tiny_batch(model, 3, 10, seed=4)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (3, 10)
    assert batch["input_ids"].min() >= 3 and batch["input_ids"].max() < 259
    assert torch.equal(batch["input_ids"], tiny_batch(model, 3, 10, seed=4)["input_ids"])
    assert not torch.equal(batch["input_ids"], tiny_batch(model, 3, 10, seed=5)["input_ids"])


def test_padding_shortens_rows_to_half_and_is_ignored_by_the_loss() -> None:
    model = tiny_model("llama")
    batch = tiny_batch(model, 3, 8, padding=True)
    assert batch["attention_mask"].sum(dim=1).tolist() == [8, 6, 4]
    is_padding = batch["attention_mask"] == 0
    assert (batch["input_ids"][is_padding] == 0).all()
    assert (batch["labels"][is_padding] == -100).all()
    # Cutting the padding off the shortest row leaves its loss.
    row = {name: value[2:] for name, value in batch.items()}
    short = {name: value[:, :4] for name, value in row.items()}
    assert torch.allclose(model(**row).loss, model(**short).loss, atol=1e-6)


def test_unknown_architecture_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"architecture='deepseek_v9'.*deepseek_v3"):
        tiny_config("deepseek_v9")


def test_batch_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=0"):
        tiny_batch(tiny_model("llama"), 0, 8)
