"""What `flex-trainer doctor` says of launch settings: what they start here, and what would go wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flex_trainer.launch.accelerate import (
    fsdp_on_cpu,
    launch_command,
    launch_problems,
    parallel_problems,
    read_settings,
)
from flex_trainer.launch.deepspeed import deepspeed_problem
from flex_trainer.launch.recipe import Recipe
from flex_trainer.launch.yaml import RecipeError, read_yaml

DEFAULT_PORT = 29500
"""Where accelerate's processes meet unless told otherwise."""
_LEFT_OVER = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    topic: str
    text: str
    level: Literal["info", "ok", "note", "problem"] = "info"


def environment_findings() -> Iterator[Finding]:
    """Variables that change a launch without being in any file."""
    for name in sorted(os.environ):
        if name.startswith("ACCELERATE_"):
            yield Finding("environment", f"{name}={os.environ[name]} overrides what a recipe or its file says", "note")
    left_over = [f"{name}={os.environ[name]}" for name in _LEFT_OVER if name in os.environ]
    if left_over:
        names = " ".join(name for name in _LEFT_OVER if name in os.environ)
        yield Finding(
            "environment",
            f"{', '.join(left_over)} left over from a launcher: a process started without one would wait for the "
            f"other ranks; unset {names}",
            "problem",
        )


def file_findings(config: Path | None) -> Iterator[Finding]:
    """An accelerate configuration, by default accelerate's own.

    Raises:
        RecipeError: `config` does not exist or is not YAML.
    """
    from accelerate.commands.config.config_args import default_config_file

    path = config or Path(default_config_file)
    if config is None and not path.is_file():
        yield Finding("accelerate", f"no default configuration at {path}; recipes bring their own", "ok")
        return
    if not path.is_file():
        raise RecipeError(f"accelerate configuration {str(path)!r} does not exist")
    settings = read_yaml(path)
    problems = list(launch_problems(settings))
    deepspeed = deepspeed_problem(settings, {}, is_sharded=False)
    problems += [deepspeed] if deepspeed is not None else []
    yield Finding("accelerate", str(path), "info" if problems else "ok")
    for problem in problems:
        yield Finding("", problem, "problem")
    if not problems:
        yield from _place_findings(settings, uses_cpu=False)


def recipe_findings(recipe: Recipe) -> Iterator[Finding]:
    """What a recipe starts, on which ranks its model lies, and over what they talk.

    Raises:
        RecipeError: an accelerate section that names a file or configuration that does not exist, and all that can be
            wrong in a recipe before its model is there.
    """
    from flex_trainer.launch.build import check_output_writable, check_recipe
    from flex_trainer.launch.training_fields import check_trackers_installed

    check_recipe(recipe)
    check_output_writable(recipe)
    check_trackers_installed(recipe)
    settings = read_settings(recipe)
    problems = [*launch_problems(settings), *parallel_problems(recipe, settings)]
    if recipe.parallel.pp > 1:
        problems.append(f"parallel.pp={recipe.parallel.pp}: stages can be planned, not trained, in this version")
    yield Finding("recipe", f"{recipe.name}: {_starts(recipe, settings)}", "info" if problems else "ok")
    for problem in problems:
        yield Finding("", problem, "problem")
    if problems:
        return
    if recipe.parallel.is_used:
        section = recipe.parallel
        yield Finding(
            "model",
            f"weights over {section.fsdp} ranks, experts over {section.ep}, {section.replicate} "
            f"{'copy' if section.replicate == 1 else 'copies'}; experts get their tokens by {section.dispatch}",
        )
    if settings.get("distributed_type") == "FSDP" and recipe.training.get("use_cpu") is True:
        yield Finding("sharding", fsdp_on_cpu("distributed_type: FSDP"), "note")
    yield from _place_findings(settings, uses_cpu=recipe.training.get("use_cpu") is True)
    yield Finding("start", _start(recipe, settings))


def _starts(recipe: Recipe, settings: Mapping[str, Any]) -> str:
    num_processes, num_machines = settings.get("num_processes", 1), settings.get("num_machines", 1)
    processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
    return processes if num_machines == 1 else f"{processes} on {num_machines} machines"


def _start(recipe: Recipe, settings: Mapping[str, Any]) -> str:
    command = launch_command(recipe)
    if settings.get("num_machines", 1) == 1:
        return command
    where = "" if settings.get("main_process_ip") else " --main_process_ip ADDRESS_OF_MACHINE_0"
    return "on each machine: " + command.replace(" -m ", f" --machine_rank N{where} -m ", 1)


def _place_findings(settings: Mapping[str, Any], uses_cpu: bool) -> Iterator[Finding]:
    """Devices and ports of this machine, against what several processes need."""
    import torch

    num_processes, num_machines = settings.get("num_processes", 1), settings.get("num_machines", 1)
    if num_processes < 2:
        return
    here = num_processes // num_machines
    num_gpus = torch.cuda.device_count()
    uses_cpu = uses_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    if uses_cpu:
        yield Finding("ranks", f"{here} on the CPU of a machine, over gloo")
    elif num_gpus == 0:
        text = f"no GPU here: {here} processes would share the CPU and talk over gloo, not NCCL"
        yield Finding("ranks", text, "note")
    elif num_gpus < here:
        yield Finding(
            "ranks",
            f"{here} processes for {num_gpus} GPUs of this machine: the others would find none; lower num_processes, "
            "or set training.use_cpu: true",
            "problem",
        )
    else:
        yield Finding("ranks", f"{here} on the {num_gpus} GPUs of a machine, over NCCL")
        if not torch.distributed.is_nccl_available():
            yield Finding("ranks", "this torch has no NCCL: install a CUDA build", "problem")
    yield from _port_findings(settings, num_machines)


def _port_findings(settings: Mapping[str, Any], num_machines: int) -> Iterator[Finding]:
    port = settings.get("main_process_port")
    if num_machines > 1 and not settings.get("main_process_ip"):
        yield Finding("address", "main_process_ip is not in the settings: give --main_process_ip at launch", "note")
    if num_machines > 1 and port is None:
        yield Finding("port", f"main_process_port is missing: all machines take {DEFAULT_PORT}", "note")
    port = DEFAULT_PORT if port is None else port
    if port and settings.get("machine_rank", 0) == 0 and _is_taken(port):
        is_alone = num_machines == 1
        then = "accelerate takes another" if is_alone else "accelerate refuses to start; write another on all machines"
        yield Finding("port", f"{port} is taken by another process here: {then}", "note" if is_alone else "problem")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0
