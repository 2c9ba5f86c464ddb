"""The accelerate section: what is refused, and what the file that is written says."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig

from flex_trainer.launch.accelerate import launch_command, launch_problems, render_accelerate_config
from flex_trainer.launch.distribute import check_ranks
from flex_trainer.launch.recipe import load_recipe
from flex_trainer.launch.yaml import RecipeError


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
        (
            "{distributed_type: MULTI_GPU, num_processes: 2, use_cpu: true}",
            "use_cpu: has no effect with distributed_type MULTI_GPU: where there are GPUs the processes take them",
        ),
        (
            "{distributed_type: FSDP, num_processes: 2}",
            "fsdp_config.fsdp_version: 1 flattens weights, which FlexTrainer cannot manage; write fsdp_version: 2",
        ),
        (
            "{distributed_type: MULTI_GPU, num_processes: 15, num_machines: 2}",
            "num_processes: 15 does not divide over num_machines: 2; accelerate would start 7 on each",
        ),
        ("{distributed_type: MULTI_GPU, num_machines: 0}", "num_machines: 0 must be a whole number of at least 1"),
        (
            "{distributed_type: MULTI_GPU, num_processes: 4, num_machines: 2, machine_rank: 2}",
            "machine_rank: 2 must be from 0 to 1: num_machines is 2",
        ),
        (
            "{distributed_type: MULTI_GPU, num_processes: 4, gpu_ids: '0,1,2'}",
            "gpu_ids: '0,1,2' names 3 GPUs for 4 processes of a machine",
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


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["parallel={fsdp: 2, replicate: 2}", "accelerate=cpu_2proc"],
            "num_processes: 2 does not fit parallel: replicate=2 x fsdp=2 x pp=1 is 4 processes",
        ),
        (
            ["parallel.fsdp=8", "accelerate=gpu_8proc_fsdp2"],
            "distributed_type: FSDP would shard the model a second time",
        ),
        (
            ["parallel.fsdp=2", "accelerate=cpu_2proc", "training={use_cpu: true, ddp_backend: nccl}"],
            "num_processes: training.ddp_backend='nccl' does not carry tensors of a CPU; remove it, which gives gloo",
        ),
        (
            ["parallel.fsdp=2", "accelerate=cpu_2proc", "training.ddp_backend=gloo"],
            "num_processes: training.ddp_backend='gloo' does not carry tensors of a GPU; remove it, which gives nccl",
        ),
    ],
)
def test_what_does_not_go_together_with_parallel(
    recipe_with, tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        render_accelerate_config(recipe_with(*overrides), tmp_path / "launch.yaml")
    assert f"r.yaml: accelerate.{problem}" in str(caught.value)


def test_without_a_section_as_many_processes_as_parallel_asks_for(recipe_with) -> None:
    recipe = recipe_with("parallel={fsdp: 4, ep: 2, replicate: 2}")
    settings = ClusterConfig.from_yaml_file(str(render_accelerate_config(recipe)))
    assert (settings.distributed_type, settings.num_processes) == ("MULTI_GPU", 8)


def test_the_command_has_the_overrides(recipe_with) -> None:
    recipe = recipe_with("data.domains=[code, prose]")
    arguments = f"{recipe.path} 'data.domains=[code, prose]'"
    assert launch_command(recipe) == (
        f"accelerate launch --config_file $(flex-trainer accelerate-config {arguments}) "
        f"-m flex_trainer.train {arguments}"
    )
    assert launch_command(load_recipe("demo")).endswith(" -m flex_trainer.train demo")


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        (["accelerate={distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: {zero_stage: 3}}"],
         "accelerate.distributed_type: DeepSpeed ZeRO stage 3"),
        (["accelerate={distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: {deepspeed_config_file: z.json}}"],  # noqa: E501
         "accelerate.distributed_type: DeepSpeed ZeRO stage 3"),
        (["accelerate=gpu_8proc", "training.deepspeed={zero_optimization: {stage: 3}}"],
         "accelerate.training.deepspeed: DeepSpeed ZeRO stage 3"),
        (["accelerate=gpu_8proc", "training.deepspeed=z.json"], "training.deepspeed: DeepSpeed ZeRO stage 3"),
        (["parallel.fsdp=2", "accelerate={distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: {zero_stage: 2}}"],  # noqa: E501
         "accelerate.distributed_type: DeepSpeed would shard a second time what the parallel section shards"),
    ],
)  # fmt: skip
def test_zero_3_is_refused_with_the_way_out(
    recipe_with, tmp_path: Path, overrides: list[str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("z.json").write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(RecipeError) as caught:
        render_accelerate_config(recipe_with(*overrides), tmp_path / "launch.yaml")
    assert place in str(caught.value)
    assert "parallel: {fsdp: N, ep: N}" in str(caught.value) and "qwen3_30b_a3b_8gpu" in str(caught.value)


def test_zero_2_is_left_to_deepspeed(recipe_with) -> None:
    settings = "{distributed_type: DEEPSPEED, num_processes: 2, deepspeed_config: {zero_stage: 2}}"
    render_accelerate_config(recipe_with(f"accelerate={settings}"))


@pytest.mark.parametrize(("stage", "is_refused"), [("3", True), ("2", False)])
def test_a_process_that_was_launched_for_zero_3(
    recipe_with, stage: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
    with pytest.raises(ValueError, match="ZeRO stage 3") if is_refused else nullcontext():
        check_ranks(recipe_with())


@pytest.mark.parametrize("value", ["yes", "1", "on"])
def test_only_true_and_false_are_booleans_of_accelerate(recipe_with, value: str) -> None:
    for settings in (f"use_cpu: {value}", f"fsdp_config: {{fsdp_version: 2, fsdp_offload_params: {value}}}"):
        recipe = recipe_with(f"accelerate={{distributed_type: FSDP, num_processes: 2, {settings}}}")
        with pytest.raises(RecipeError, match=r"is not a boolean; write true"):
            render_accelerate_config(recipe)
