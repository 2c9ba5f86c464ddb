"""What is found in unmodified models, by structure and not by name of family."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from flex_trainer.models.discovery import ModelMap, discover, find_experts
from flex_trainer.testing.tiny import FAMILIES, all_moe_architectures, tiny_model

DENSE = ("llama", "qwen3")
NUM_LAYERS = 3
FIRST_LAYER_IS_DENSE = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4v_moe",
    "qwen2_moe",
    "qwen3_moe",
)
WITH_SHARED_EXPERTS = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4v_moe",
    "hunyuan_v1_moe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)


def kinds_of(model_map: ModelMap) -> Counter[str]:
    """Of the text layers: a vision tower's layers have no experts beside them and names of their own."""
    return Counter(operator.site.kind for operator in model_map.operators if "visual" not in operator.site.name)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_counts(architecture: str):
    model = tiny_model(architecture)
    model_map = discover(model)
    kinds = kinds_of(model_map)
    num_moe = 0 if architecture in DENSE else NUM_LAYERS - (architecture in FIRST_LAYER_IS_DENSE)
    assert kinds["layer"] == NUM_LAYERS
    assert kinds["experts"] == kinds["router"] == len(model_map.experts) == num_moe
    assert kinds["attention"] == NUM_LAYERS
    assert kinds["mlp"] == NUM_LAYERS - num_moe
    assert kinds["shared_experts"] == (num_moe if architecture in WITH_SHARED_EXPERTS else 0)
    assert kinds["norm"] >= 2 * NUM_LAYERS
    assert kinds["final_norm"] == kinds["lm_head"] == 1
    for operator in model_map.experts:
        assert operator.module.num_experts == 8


@pytest.mark.parametrize("architecture", all_moe_architectures())
def test_every_architecture_has_experts_and_routers_that_are_not_recomputed(architecture: str):
    with torch.device("meta"):
        model_map = discover(tiny_model(architecture))
    kinds = kinds_of(model_map)
    experts = {operator.module for operator in model_map.experts}
    assert experts
    assert kinds["router"] == kinds["experts"]
    assert kinds["norm"] > 0 or architecture.startswith("qwen4_exp")
    names = [operator.site.name for operator in model_map.operators]
    assert len(set(names)) == len(names)
    assert len({operator.module for operator in model_map.operators}) == len(names)
    for operator in model_map.operators:
        inside = {part for part in operator.module.modules() if part is not operator.module}
        routers = {other.module for other in model_map.operators if other.site.kind == "router"}
        if operator.site.is_recomputable and operator.site.kind != "layer":  # what a layer's routers give is kept
            assert operator.site.kind != "router" and not inside & routers, operator.site.name
        if operator.site.kind == "layer":
            assert operator.site.is_recomputable == (not inside & experts or bool(inside & routers))


def test_router_and_experts_in_the_layer_itself():
    model_map = discover(tiny_model("gemma4_text"))
    routers = [operator.site for operator in model_map.operators if operator.site.kind == "router"]
    assert [site.name for site in routers] == [f"model.layers.{number}.router" for number in range(NUM_LAYERS)]
    assert not any(site.is_recomputable for site in routers)


@pytest.mark.parametrize("architecture", ["llama4_text", "jetmoe", "longcat_flash"])
def test_mixtures_without_a_plan_keep_their_routing(architecture: str):
    """Experts that neither a plan nor an interface names: the block that holds the router is not recomputed. A whole
    layer is, and what its router gives is kept."""
    with torch.device("meta"):
        model = tiny_model(architecture)
    assert not list(find_experts(model))
    operators = discover(model).operators
    routers = [operator for operator in operators if operator.site.kind == "router"]
    assert routers and not any(operator.site.is_recomputable for operator in routers)
    for operator in operators:
        if operator.site.kind != "layer" and any("router" in name for name, _ in operator.module.named_modules()):
            assert not operator.site.is_recomputable, operator.site.name


def test_norms_in_a_list_are_norms():
    with torch.device("meta"):
        operators = discover(tiny_model("longcat_flash")).operators
    assert {operator.site.kind for operator in operators if "layernorm" in operator.site.name} == {"norm"}
    assert not any(isinstance(operator.module, nn.ModuleList) for operator in operators)


def test_layers_come_before_what_they_hold():
    sites = [operator.site for operator in discover(tiny_model("qwen3_moe")).operators]
    for number, site in enumerate(sites):
        for later in sites[number + 1 :]:
            assert not site.name.startswith(later.name + "."), (site.name, later.name)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="Sequential has no decoder layers.*use transformers' Trainer for this model"):
        discover(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def test_layers_by_the_names_of_placement_units():
    """Models outside of transformers say what their layers are in `_no_split_modules`."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    class Model(nn.Module):
        _no_split_modules = ["Layer"]

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])
            self.norm = nn.LayerNorm(4)

    operators = discover(Model()).operators
    kinds = Counter(operator.site.kind for operator in operators)
    assert kinds == {"layer": 2, "norm": 2, "mlp": 2, "linear": 2, "final_norm": 1}
