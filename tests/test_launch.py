"""The accelerate section: what is refused, and what the file that is written says."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig

from flex_trainer.launch import launch_problems, render_accelerate_config
from flex_trainer.recipe import load_recipe
from flex_trainer.recipe_yaml import RecipeError


@pytest.fixture
def recipe_with(tmp_path: Path):
    path = tmp_path / "r.yaml"
    path.write_text("model: {architecture: mixtral}\ndata: {name: stdlib}\n")
    return lambda *overrides: load_recipe(str(path), overrides)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            "{num_procs: 2}",
            "num_procs: accelerate has no such key; did you mean 'num_processes'?",
        ),
        (
            "{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_reshard_after_foward: true}}",
            "fsdp_config.fsdp_reshard_after_foward: accelerate would ignore it; did you mean "
            "'fsdp_reshard_after_forward'?",
        ),
        (
            "{distributed_type: FSDP, num_processes: 2, fsdp_config: {fsdp_offload_params: 'false'}}",
            "fsdp_config.fsdp_offload_params: the text 'false' is not a boolean; write false unquoted",
        ),
        ("{num_processes: 1}", "distributed_type: missing"),
        ("{distributed_type: MULTI_GPUS}", "distributed_type: 'MULTI_GPUS' is not known; did you mean 'MULTI_GPU'?"),
        ("{distributed_type: NO, num_processes: 2}", "num_processes: distributed_type 'NO' starts one process, not 2"),
        ("{distributed_type: MULTI_CPU, num_processes: 2}", "num_processes: distributed_type MULTI_CPU without mpirun"),
        ("{distributed_type: MULTI_GPU, num_processes: two}", "num_processes: 'two' must be a whole number"),
        (
            "{distributed_type: MULTI_GPU, num_processes: 2, fsdp_config: {fsdp_version: 2}}",
            "fsdp_config: has no effect with distributed_type MULTI_GPU",
        ),
    ],
)
def test_problems(recipe_with, tmp_path: Path, settings: str, problem: str) -> None:
    output = tmp_path / "launch.yaml"
    with pytest.raises(RecipeError) as caught:
        render_accelerate_config(recipe_with(f"accelerate={settings}"), output)
    assert f"accelerate.{problem}" in str(caught.value)
    assert not output.exists()


def test_keys_without_their_prefix_work_where_accelerate_lets_them() -> None:
    settings = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"version": 2, "offload_params": False}}
    assert list(launch_problems(settings)) == []
    parallelism = {"distributed_type": "FSDP", "num_processes": 2, "parallelism_config": {"dp_shard_size": 2}}
    assert "parallelism_config.dp_shard_size" in next(iter(launch_problems(parallelism)))


def test_a_mapping_is_written_as_accelerate_reads_it(recipe_with) -> None:
    path = render_accelerate_config(
        recipe_with("accelerate={distributed_type: MULTI_GPU, num_processes: 4, mixed_precision: no, use_cpu: false}")
    )
    assert path.is_absolute()
    settings = ClusterConfig.from_yaml_file(str(path))
    assert (settings.num_processes, settings.mixed_precision, settings.use_cpu) == (4, "no", False)


def test_a_file_is_taken_by_path(recipe_with, tmp_path: Path) -> None:
    source = tmp_path / "mine.yaml"
    source.write_text("distributed_type: NO\n")
    path = render_accelerate_config(recipe_with(f"accelerate={source}"), tmp_path / "out" / "launch.yaml")
    assert ClusterConfig.from_yaml_file(str(path)).distributed_type == "NO"
    with pytest.raises(RecipeError, match=r"file '.*none\.yaml' does not exist"):
        render_accelerate_config(recipe_with(f"accelerate={tmp_path / 'none.yaml'}"))
    with pytest.raises(RecipeError, match="did you mean 'cpu_2proc'"):
        render_accelerate_config(recipe_with("accelerate=cpu_2procs"))


def test_without_a_section_one_process(recipe_with) -> None:
    assert ClusterConfig.from_yaml_file(str(render_accelerate_config(recipe_with()))).num_processes == 1


def test_the_same_settings_give_the_same_file(recipe_with) -> None:
    first = render_accelerate_config(recipe_with("accelerate=cpu_1proc"))
    assert render_accelerate_config(recipe_with("accelerate=cpu_1proc")) == first
    assert render_accelerate_config(recipe_with("accelerate=gpu_1proc")) != first


def test_a_place_that_cannot_be_written(recipe_with, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="the accelerate configuration cannot be written"):
        render_accelerate_config(recipe_with(), tmp_path / "file" / "launch.yaml")
