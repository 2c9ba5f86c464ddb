"""The `accelerate` section: checked, then written to a file that `accelerate launch --config_file` reads.

accelerate refuses unknown keys at the top of its file but accepts any inside `fsdp_config` and the like, and some
settings it accepts start fewer processes than they say. Both are found here before a run starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from flex_trainer import recipes
from flex_trainer.config import nearest
from flex_trainer.errors import UserError
from flex_trainer.files import write_whole
from flex_trainer.recipe import Recipe
from flex_trainer.recipe_yaml import RecipeError, read_yaml, refuse_quoted_booleans

# Used when a recipe has no accelerate section.
ONE_PROCESS = "gpu_1proc"

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
    section = recipe.accelerate if recipe.accelerate is not None else ONE_PROCESS
    settings = dict(section) if isinstance(section, Mapping) else read_yaml(_find(section, recipe))
    for problem in launch_problems(settings):
        raise RecipeError(f"{recipe.path.name}: accelerate.{problem}")
    return settings


def render_accelerate_config(recipe: Recipe, output: Path | None = None) -> Path:
    """Write the recipe's launch settings to a file, whole or not at all, and return its absolute path.

    Args:
        output: the file; by default one in the user's cache directory, named after recipe and content.

    Raises:
        RecipeError: settings that cannot be used.
        ValueError: a file that cannot be written.
    """
    text = yaml.safe_dump(accelerate_settings(recipe), sort_keys=True)
    if output is None:
        digest = sha256(text.encode()).hexdigest()[:12]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        output = cache / "flex_trainer" / "accelerate" / f"{recipe.name}-{digest}.yaml"
    return write_whole(output, text, "the accelerate configuration").absolute()


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
        except UserError as error:
            yield str(error)
    yield from _process_problems(settings, keys.distributed_types)


def _process_problems(settings: Mapping[str, Any], known_types: list[str]) -> Iterator[str]:
    """Settings that do not start what they say."""
    kind = settings.get("distributed_type")
    num_processes = settings.get("num_processes", 1)
    if kind is None:
        yield "distributed_type: missing; write 'NO' for one process, MULTI_GPU or FSDP for several"
    elif kind is False:
        yield "distributed_type: an unquoted NO is read as false; write 'NO' in quotes"
    elif kind not in known_types:
        yield f"distributed_type: {kind!r} is not known; {nearest(str(kind), known_types)}"
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        yield f"num_processes: {num_processes!r} must be a whole number of at least 1"
        return
    if kind == "NO" and num_processes > 1:
        yield f"num_processes: distributed_type 'NO' starts one process, not {num_processes}; write MULTI_GPU or FSDP"
    if kind == "MULTI_CPU" and num_processes > 1 and not settings.get("mpirun_config"):
        yield (
            f"num_processes: distributed_type MULTI_CPU without mpirun starts one process, not {num_processes}; write "
            "MULTI_GPU with use_cpu: false here, and use_cpu: true in the training arguments"
        )
    if settings.get("fsdp_config") and kind not in ("FSDP", None):
        yield f"fsdp_config: has no effect with distributed_type {kind}; write FSDP, or remove fsdp_config"


class _LauncherKeys:
    """What the installed accelerate knows."""

    def __init__(self) -> None:
        from accelerate.commands.config.config_args import ClusterConfig
        from accelerate.commands.launch import launch_command_parser
        from accelerate.utils import DistributedType

        self.top = set(ClusterConfig.__dataclass_fields__)
        self.launcher = {action.dest for action in launch_command_parser()._actions}
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
