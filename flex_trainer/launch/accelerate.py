"""The `accelerate` section: checked, then written to a file that `accelerate launch --config_file` reads.

accelerate refuses unknown keys at the top of its file but accepts any inside `fsdp_config` and the like, and some
settings it accepts start fewer processes than they say. Both are found here before a run starts.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

import flex_trainer.recipes as recipes
from flex_trainer.config import nearest
from flex_trainer.errors import UserError
from flex_trainer.files import write_whole
from flex_trainer.launch.deepspeed import deepspeed_problem
from flex_trainer.launch.recipe import Recipe
from flex_trainer.launch.yaml import RecipeError, read_yaml, refuse_boolean_word, refuse_quoted_booleans

# Used when a recipe has no accelerate section; the second, with another number, where ranks work together.
ONE_PROCESS, TWO_PROCESSES = "gpu_1proc", "cpu_2proc"

# Sections whose keys share a prefix, and whether accelerate lets one leave the prefix out.
_PREFIXED = {
    "fsdp_config": ("fsdp_", True),
    "fp8_config": ("fp8_", True),
    "dynamo_config": ("dynamo_", True),
    "parallelism_config": ("parallelism_config_", False),
    "megatron_lm_config": ("megatron_lm_", False),
}


def accelerate_settings(recipe: Recipe) -> dict[str, Any]:
    """The launch settings a recipe names or holds, as accelerate's keys.

    Raises:
        RecipeError: a file or shipped name that does not exist, or the first problem of `launch_problems`.
    """
    settings = read_settings(recipe)
    for problem in launch_problems(settings):
        raise RecipeError(f"{recipe.path.name}: accelerate.{problem}")
    return settings


def read_settings(recipe: Recipe) -> dict[str, Any]:
    """The same, not checked. Without an accelerate section: as many processes as the parallel section asks for.

    Raises:
        RecipeError: a file or shipped name that does not exist.
    """
    section = recipe.accelerate
    if section is None and recipe.parallel.is_used:
        return {**read_yaml(recipes.accelerate_path(TWO_PROCESSES)), "num_processes": recipe.parallel.num_ranks}
    section = ONE_PROCESS if section is None else section
    return dict(section) if isinstance(section, Mapping) else read_yaml(_find(section, recipe))


def render_accelerate_config(recipe: Recipe, output: Path | None = None) -> Path:
    """Write the recipe's launch settings to a file, whole or not at all, and return its absolute path.

    Args:
        output: the file; by default one in the user's cache directory, named after recipe and content.

    Raises:
        RecipeError: settings that cannot be used.
        ValueError: a file that cannot be written.
    """
    settings = accelerate_settings(recipe)
    for problem in parallel_problems(recipe, settings):
        raise RecipeError(f"{recipe.path.name}: accelerate.{problem}")
    text = yaml.safe_dump(settings, sort_keys=True)
    if output is None:
        digest = sha256(text.encode()).hexdigest()[:12]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        output = cache / "flex_trainer" / "accelerate" / f"{recipe.name}-{digest}.yaml"
    return write_whole(output, text, "the accelerate configuration").absolute()


def launch_command(recipe: Recipe) -> str:
    """How to start the recipe with as many processes as its accelerate section says."""
    arguments = shlex.join(recipe.arguments)
    return (
        f"accelerate launch --config_file $(flex-trainer accelerate-config {arguments}) "
        f"-m flex_trainer.train {arguments}"
    )


def launch_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with accelerate's settings, each as `key: what is wrong and what to do`."""
    keys = _launcher_keys()
    for key, value in settings.items():
        if key not in keys.top:
            yield f"{key}: accelerate has no such key; {nearest(str(key), sorted(keys.top))}"
        elif isinstance(value, Mapping):
            known = _section_keys(key, keys.launcher)
            for inner in value:
                if inner not in known:
                    yield f"{key}.{inner}: accelerate would ignore it; {nearest(str(inner), sorted(known))}"
        try:
            refuse_quoted_booleans(value, str(key))
            _refuse_boolean_words(key, value, keys.booleans)
        except UserError as error:
            yield str(error)
    yield from _process_problems(settings, keys.distributed_types)


def _refuse_boolean_words(key: str, value: Any, booleans: set[str]) -> None:
    """Raise ValueError for yes, on, 1, 0 and their like where accelerate needs a boolean."""
    entries = value.items() if isinstance(value, Mapping) else [(key, value)]
    prefix, _ = _PREFIXED.get(key, ("", False))
    for name, one in entries:
        if (name in booleans or f"{prefix}{name}" in booleans) and not isinstance(one, bool):
            refuse_boolean_word(name if one is value else f"{key}.{name}", one)


def parallel_problems(recipe: Recipe, settings: Mapping[str, Any]) -> Iterator[str]:
    """What does not go together in a recipe's `accelerate` and `parallel` sections, as in `launch_problems`."""
    section = recipe.parallel
    deepspeed = deepspeed_problem(settings, recipe.training, section.is_used)
    if deepspeed is not None:
        yield deepspeed
    num_processes = settings.get("num_processes", 1)
    if section.is_used and num_processes != section.num_ranks:
        sizes = " x ".join(f"{axis}={section.sizes[axis]}" for axis in ("replicate", "fsdp", "pp"))
        yield f"num_processes: {num_processes} does not fit parallel: {sizes} is {section.num_ranks} processes"
    if section.is_used and settings.get("distributed_type") == "FSDP":
        yield (
            "distributed_type: FSDP would shard the model a second time, since the parallel section does so; write "
            "MULTI_GPU, or set all sizes of parallel to 1"
        )
    backend = recipe.training.get("ddp_backend")
    uses_cpu = recipe.training.get("use_cpu") is True
    if (backend == "nccl" and uses_cpu) or (backend == "gloo" and not uses_cpu and section.is_used):
        there, fitting = ("CPU", "gloo") if uses_cpu else ("GPU", "nccl")
        yield (
            f"num_processes: training.ddp_backend={backend!r} does not carry tensors of a {there}; remove it, which "
            f"gives {fitting}" + ("" if uses_cpu else ", or set training.use_cpu: true")
        )


def fsdp_on_cpu(kind: str) -> str:
    """What is said where FSDP was asked for on CPU processes.

    Args:
        kind: what asks for it.
    """
    return (
        f"{kind} does not shard on CPU processes: accelerate shards on GPUs only, so every process holds the whole "
        "model (DDP); to shard on CPUs, use parallel: {fsdp: N} with distributed_type: MULTI_GPU"
    )


def _process_problems(settings: Mapping[str, Any], known_types: list[str]) -> Iterator[str]:
    """Settings that do not start what they say."""
    kind = settings.get("distributed_type")
    if kind is None:
        yield "distributed_type: missing; write 'NO' for one process, MULTI_GPU or FSDP for several"
    elif kind is False:
        yield "distributed_type: an unquoted NO is read as false; write 'NO' in quotes"
    elif kind not in known_types:
        yield f"distributed_type: {kind!r} is not known; {nearest(str(kind), known_types)}"
    if settings.get("fsdp_config") and kind not in ("FSDP", None):
        yield f"fsdp_config: has no effect with distributed_type {kind}; write FSDP, or remove fsdp_config"
    if kind == "FSDP":
        yield from _fsdp_problems(settings.get("fsdp_config") or {})
    counts = {name: settings.get(name, 1) for name in ("num_processes", "num_machines")}
    wrong = [name for name, count in counts.items() if type(count) is not int or count < 1]
    if wrong:
        yield from (f"{name}: {counts[name]!r} must be a whole number of at least 1" for name in wrong)
    else:
        yield from _count_problems(settings, counts["num_processes"], counts["num_machines"])


def _fsdp_problems(section: Any) -> Iterator[str]:
    version = section.get("fsdp_version", section.get("version", 1)) if isinstance(section, Mapping) else 1
    if version != 2:
        yield (
            f"fsdp_config.fsdp_version: {version} flattens weights, which FlexTrainer cannot manage; write "
            "fsdp_version: 2 (accelerate's default is 1)"
        )


def _count_problems(settings: Mapping[str, Any], num_processes: int, num_machines: int) -> Iterator[str]:
    kind = settings.get("distributed_type")
    if kind == "NO" and num_processes > 1:
        yield f"num_processes: distributed_type 'NO' starts one process, not {num_processes}; write MULTI_GPU or FSDP"
    if kind == "MULTI_CPU" and num_processes > 1 and not settings.get("mpirun_config"):
        yield (
            f"num_processes: distributed_type MULTI_CPU without mpirun starts one process, not {num_processes}; write "
            "MULTI_GPU with use_cpu: false here, and use_cpu: true in the training arguments"
        )
    if kind in ("MULTI_GPU", "FSDP") and num_processes > 1 and settings.get("use_cpu") is True:
        yield (
            f"use_cpu: has no effect with distributed_type {kind}: where there are GPUs the processes take them; write "
            "use_cpu: false here, and use_cpu: true in the training arguments"
        )
    if num_processes % num_machines:
        yield (
            f"num_processes: {num_processes} does not divide over num_machines: {num_machines}; accelerate would start "
            f"{num_processes // num_machines} on each"
        )
    machine_rank = settings.get("machine_rank", 0)
    if type(machine_rank) is int and not 0 <= machine_rank < num_machines:
        yield f"machine_rank: {machine_rank} must be from 0 to {num_machines - 1}: num_machines is {num_machines}"
    gpu_ids = str(settings.get("gpu_ids", "all") or "all")
    num_gpus = len(gpu_ids.split(","))
    if gpu_ids != "all" and kind in ("MULTI_GPU", "FSDP") and num_gpus < num_processes // num_machines:
        yield (
            f"gpu_ids: {gpu_ids!r} names {num_gpus} GPUs for {num_processes // num_machines} processes of a machine; "
            "name one for each, or write all"
        )


class _LauncherKeys:
    """What the installed accelerate knows."""

    def __init__(self) -> None:
        from accelerate.commands.config.config_args import ClusterConfig
        from accelerate.commands.launch import launch_command_parser
        from accelerate.utils import DistributedType

        self.top = set(ClusterConfig.__dataclass_fields__)
        actions = launch_command_parser()._actions
        self.launcher = {action.dest for action in actions}
        # accelerate itself writes downcast_bf16: 'no' into its files.
        self.booleans = {action.dest for action in actions if str(action.default).lower() in ("true", "false")}
        self.booleans |= {name for name, entry in ClusterConfig.__dataclass_fields__.items() if entry.type is bool}
        self.booleans -= {"downcast_bf16"}
        self.distributed_types = [kind.value for kind in DistributedType]


@lru_cache(maxsize=1)
def _launcher_keys() -> _LauncherKeys:
    return _LauncherKeys()


def _section_keys(section: str, launcher: set[str]) -> set[str]:
    """Keys that have an effect inside a nested section: those of the launcher's options."""
    if section not in _PREFIXED:
        return launcher
    prefix, may_be_left_out = _PREFIXED[section]
    known = {key for key in launcher if key.startswith(prefix)}
    return known | {key.removeprefix(prefix) for key in known} if may_be_left_out else known


def _find(name_or_path: str, recipe: Recipe) -> Path:
    path = Path(name_or_path).expanduser()
    if path.suffix in (".yaml", ".yml", ".json") or len(path.parts) > 1:
        if not path.is_file():
            raise RecipeError(f"{recipe.path.name}: accelerate: file {name_or_path!r} does not exist")
        return path
    known = recipes.accelerate_names()
    if name_or_path not in known:
        raise RecipeError(
            f"{recipe.path.name}: accelerate: no shipped configuration is called {name_or_path!r}; "
            f"{nearest(name_or_path, known)}"
        )
    return recipes.accelerate_path(name_or_path)
