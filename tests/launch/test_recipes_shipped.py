"""Every shipped recipe is read, checked as far as that goes without weights, and its launch file rendered."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

import flex_trainer.recipes as recipes
from flex_trainer.launch.accelerate import launch_problems, render_accelerate_config
from flex_trainer.launch.build import check_recipe
from flex_trainer.launch.findings import recipe_findings
from flex_trainer.launch.recipe import load_recipe
from flex_trainer.launch.yaml import read_yaml


def test_what_ships() -> None:
    assert set(recipes.recipe_names()) >= {"demo", "glm4_moe_twin", "qwen3_30b_a3b_8gpu", "deepseek_v2_lite"}
    assert set(recipes.recipe_names()) >= {"deepseek_v3_256gpu", "glm4_5_256gpu", "demo_2ranks", "qwen3_30b_a3b_16gpu"}
    assert set(recipes.accelerate_names()) >= {"cpu_1proc", "cpu_2proc", "gpu_1proc", "gpu_8proc", "gpu_8proc_fsdp2"}
    assert "gpu_16proc_2machines" in recipes.accelerate_names()


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_recipe_is_valid_and_renders(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    check_recipe(recipe)
    path = render_accelerate_config(recipe, tmp_path / "launch.yaml")
    settings = ClusterConfig.from_yaml_file(str(path))
    num_ranks = re.search(r"_(\d+)(gpu|ranks)$", name)
    assert settings.num_processes == (int(num_ranks.group(1)) if num_ranks else 1)
    assert settings.num_processes == recipe.parallel.num_ranks
    # The comments at the top say how to start it.
    head = recipe.path.read_text().split("\nmodel:")[0]
    commands = ("flex_trainer.train", "flex-trainer train", "flex-trainer plan")
    assert any(f"{command} {name}" in head for command in commands)
    assert all(line.startswith("#") for line in head.splitlines() if line)


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_section_is_shown(name: str) -> None:
    sections = ["model", "data", "training", "flex", "parallel", "accelerate", "report"]
    assert list(read_yaml(recipes.recipe_path(name))) == sections


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_its_trackers_come_with_the_package(name: str) -> None:
    requirements = [line for line in requires("flex-trainer") or () if "extra ==" not in line]
    installed = {re.split(r"[^\w-]", line)[0] for line in requirements}
    assert set(load_recipe(name).report.to) <= installed


@pytest.mark.parametrize("name", recipes.accelerate_names())
def test_accelerate_configuration_is_right(name: str) -> None:
    path = recipes.accelerate_path(name)
    assert list(launch_problems(read_yaml(path))) == []
    # Plain YAML 1.1, as accelerate reads it, must say the same.
    assert yaml.safe_load(path.read_text()) == read_yaml(path)
    num_processes = int(name.split("_")[1].removesuffix("proc"))
    num_machines = int(name.split("_")[2].removesuffix("machines")) if name.endswith("machines") else 1
    settings = ClusterConfig.from_yaml_file(str(path))
    assert (settings.num_processes, settings.num_machines) == (num_processes, num_machines)


def test_what_the_recipes_for_several_ranks_spread() -> None:
    sizes = {name: load_recipe(name).parallel.sizes for name in recipes.recipe_names()}
    assert sizes["demo_2ranks"] == {"replicate": 1, "fsdp": 2, "ep": 2, "pp": 1}
    assert sizes["qwen3_30b_a3b_8gpu"] == {"replicate": 1, "fsdp": 8, "ep": 8, "pp": 1}
    assert sizes["qwen3_30b_a3b_16gpu"] == {"replicate": 2, "fsdp": 8, "ep": 8, "pp": 1}


@pytest.mark.parametrize("name", [name for name in recipes.recipe_names() if load_recipe(name).parallel.is_used])
def test_recipes_for_several_ranks_say_how_to_start_them(name: str) -> None:
    recipe = load_recipe(name)
    problems = [finding.text for finding in recipe_findings(recipe) if finding.level == "problem"]
    if recipe.parallel.pp > 1:
        assert problems == [f"parallel.pp={recipe.parallel.pp}: stages can be planned, not trained, in this version"]
        return
    # This machine may have fewer GPUs than the recipe wants; nothing else may be wrong.
    assert all("processes for" in problem for problem in problems)
    head = " ".join(line.strip("# \\") for line in recipe.path.read_text().split("\nmodel:")[0].splitlines())
    where = " --machine_rank N --main_process_ip ADDRESS_OF_MACHINE_0" if "machines" in str(recipe.accelerate) else ""
    where = where or (" --machine_rank N --main_process_ip ADDRESS_OF_MACHINE_0" if name.endswith("256gpu") else "")
    command = (
        f"accelerate launch --config_file $(flex-trainer accelerate-config {name}){where} -m flex_trainer.train {name}"
    )
    assert command in " ".join(head.split())
