"""Every shipped recipe is read, checked as far as that goes without weights, and its launch file rendered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from flex_trainer import recipes
from flex_trainer.build import check_recipe
from flex_trainer.launch import launch_problems, render_accelerate_config
from flex_trainer.recipe import load_recipe
from flex_trainer.recipe_yaml import read_yaml


def test_what_ships() -> None:
    assert set(recipes.recipe_names()) >= {"demo", "glm4_moe_twin", "qwen3_30b_a3b_8gpu", "deepseek_v2_lite"}
    assert set(recipes.recipe_names()) >= {"deepseek_v3_256gpu", "glm4_5_256gpu"}
    assert set(recipes.accelerate_names()) >= {"cpu_1proc", "cpu_2proc", "gpu_1proc", "gpu_8proc", "gpu_8proc_fsdp2"}


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_recipe_is_valid_and_renders(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    check_recipe(recipe)
    path = render_accelerate_config(recipe, tmp_path / "launch.yaml")
    settings = ClusterConfig.from_yaml_file(str(path))
    num_gpus = re.search(r"_(\d+)gpu$", name)
    assert settings.num_processes == (int(num_gpus.group(1)) if num_gpus else 1)
    # The comments at the top say how to start it.
    head = recipe.path.read_text().split("\nmodel:")[0]
    commands = ("flex_trainer.train", "flex-trainer train", "flex-trainer plan")
    assert any(f"{command} {name}" in head for command in commands)
    assert all(line.startswith("#") for line in head.splitlines() if line)


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_section_is_shown(name: str) -> None:
    sections = ["model", "data", "training", "flex", "parallel", "accelerate", "report"]
    assert list(read_yaml(recipes.recipe_path(name))) == sections


@pytest.mark.parametrize("name", recipes.accelerate_names())
def test_accelerate_configuration_is_right(name: str) -> None:
    path = recipes.accelerate_path(name)
    assert list(launch_problems(read_yaml(path))) == []
    # Plain YAML 1.1, as accelerate reads it, must say the same.
    assert yaml.safe_load(path.read_text()) == read_yaml(path)
    num_processes = int(name.split("_")[1].removesuffix("proc"))
    assert ClusterConfig.from_yaml_file(str(path)).num_processes == num_processes
