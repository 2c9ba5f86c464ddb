"""A recipe: one YAML file with all a training run needs, read and checked before anything heavy is imported.

Sections: model, data, training, flex, parallel, accelerate, report. A key that is not known is refused together with
the place and the nearest known key. What needs transformers to be checked (names of TrainingArguments fields, keys of a
model's config) is checked in `flex_trainer.launch.build`; what needs accelerate, in `flex_trainer.launch.accelerate`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

import flex_trainer.recipes as recipes
from flex_trainer.config import FlexConfig, nearest
from flex_trainer.data.config import DataConfig
from flex_trainer.errors import UserError
from flex_trainer.launch.yaml import RecipeError, apply_override, read_yaml, refuse_quoted_booleans


@dataclass(frozen=True)
class ModelSection:
    """Which model: weights from a hub or a directory (`name_or_path`), or random ones (`architecture` and `config`)."""

    name_or_path: str | None = None
    architecture: str | None = None
    """A `model_type` of transformers, such as deepseek_v3 or mixtral."""
    config: dict[str, Any] = field(default_factory=dict)
    """Values of the model's configuration; with `name_or_path`, values to change in the loaded one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Type of the weights. Default: float32 for random weights, as stored (auto) for loaded ones."""
    attn_implementation: str | None = None
    experts_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if (self.name_or_path is None) == (self.architecture is None):
            raise UserError(
                "needs exactly one of name_or_path (load weights) and architecture (random weights); "
                f"found name_or_path={self.name_or_path!r}, architecture={self.architecture!r}"
            )
        if self.architecture is not None and self.revision is not None:
            raise UserError(f"revision={self.revision!r} only applies to name_or_path")


@dataclass(frozen=True)
class ParallelSection:
    """Ranks along each axis of the device mesh, and how they work together. Launch replicate x fsdp x pp processes.

    `flex-trainer plan` takes any sizes; training takes pp: 1 only (`flex_trainer.launch.distribute` refuses others).
    """

    replicate: int = 1
    """Copies of the sharded model (HSDP): weights are gathered inside a copy, gradients are summed over copies."""
    fsdp: int = 1
    """Ranks that share one copy of the weights, gradients and optimizer state. Each has batches of its own."""
    ep: int = 1
    """Ranks that share one copy of every layer's experts: neighbours among the fsdp ranks, so it divides fsdp."""
    pp: int = 1
    dispatch: Literal["flex", "all_to_all"] = "flex"
    """How tokens reach the experts of other ranks: FlexTrainer's way, or transformers' own to compare with."""
    mixed_precision: bool = False
    """Whether FSDP gathers float32 weights as bfloat16 and computes in it; gradients are reduced in float32."""

    def __post_init__(self) -> None:
        for axis, value in self.sizes.items():
            if value < 1:
                raise UserError(f"{axis}={value} must be at least 1: 1 means that this axis is not used")

    @property
    def sizes(self) -> dict[str, int]:
        """By the name of the axis."""
        return {"replicate": self.replicate, "fsdp": self.fsdp, "ep": self.ep, "pp": self.pp}

    @property
    def num_ranks(self) -> int:
        """Processes that the sizes ask for."""
        return self.replicate * self.fsdp * self.pp

    @property
    def is_used(self) -> bool:
        """Whether any axis has more than one rank. Otherwise any number of processes is data parallel."""
        return any(size > 1 for size in self.sizes.values())


@dataclass(frozen=True)
class ReportSection:
    """What is left after a run."""

    html: str | None = None
    """File of the self-contained report page, relative to `training.output_dir`."""
    to: tuple[str, ...] = ()
    """Trackers, as TrainingArguments' `report_to`: wandb, tensorboard, ..."""


@dataclass(frozen=True)
class _Sections:
    """The file as it is written. The rules of reading hold for the sections inside as well."""

    # No unknown key, and no silent change of type ("4" is not 4).
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    model: ModelSection
    data: DataConfig
    training: dict[str, Any] = field(default_factory=dict)
    flex: dict[str, Any] = field(default_factory=dict)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    accelerate: str | dict[str, Any] | None = None
    report: ReportSection = field(default_factory=ReportSection)


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    path: Path
    model: ModelSection
    data: DataConfig
    training: dict[str, Any]
    """TrainingArguments fields."""
    flex: FlexConfig
    enforce_limit: bool
    """Whether the operating system (CPU) or the allocator (CUDA) refuses memory beyond `flex.memory_limit`."""
    parallel: ParallelSection
    accelerate: str | dict[str, Any] | None
    """A shipped configuration's name, the path of a file, or the configuration itself."""
    report: ReportSection
    overrides: tuple[str, ...] = ()
    """The `section.key=value` changes that are part of it."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def arguments(self) -> list[str]:
        """What a command line says to mean this recipe."""
        is_shipped = self.path == recipes.recipe_path(self.name)
        return [self.name if is_shipped else str(self.path), *self.overrides]

    @property
    def output_dir(self) -> Path:
        """Where the run writes: `training.output_dir`, or runs/NAME."""
        return Path(self.training.get("output_dir") or Path("runs") / self.name)


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe given by path, or by the name of a shipped one.

    Raises:
        RecipeError: no such file, no such name.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if not path.is_file():
            raise RecipeError(f"recipe file {name_or_path!r} does not exist")
        return path
    known = recipes.recipe_names()
    if name_or_path not in known:
        raise RecipeError(f"no shipped recipe is called {name_or_path!r}; {nearest(name_or_path, known)}")
    return recipes.recipe_path(name_or_path)


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, change it by `section.key=value` overrides, and check it.

    Raises:
        RecipeError: anything wrong in it; the message has the file, the key's path, and what to change.
    """
    path = find_recipe(name_or_path)
    content = read_yaml(path)
    for override in overrides:
        apply_override(content, override)
    # A section with nothing under it is an empty section.
    content = {key: value for key, value in content.items() if value is not None}
    try:
        refuse_quoted_booleans(content)
        return _checked(path, content, tuple(overrides))
    except UserError as error:
        raise RecipeError(f"{path.name}: {error}") from error


def _checked(path: Path, content: dict[str, Any], overrides: tuple[str, ...]) -> Recipe:
    """Raises ValueError, the path of the key first."""
    try:
        # Going through JSON lets the strict reader take a YAML list for a tuple while it still refuses "4" for 4.
        sections = TypeAdapter(_Sections).validate_json(json.dumps(content, default=str), strict=True)
    except ValidationError as error:
        raise UserError(_describe(error)) from error
    flex = dict(sections.flex)
    enforce_limit = flex.pop("enforce_limit", False)
    if not isinstance(enforce_limit, bool):
        raise UserError(f"flex.enforce_limit: {enforce_limit!r} must be true or false")
    known = [*(entry.name for entry in fields(FlexConfig)), "enforce_limit"]
    for key in flex:
        if key not in known:
            raise UserError(f"flex.{key}: unknown key; {nearest(key, known)}")
    try:
        config = FlexConfig.from_mapping(flex)
    except (UserError, TypeError) as error:
        raise UserError(f"flex: {error}") from error
    if enforce_limit and config.memory_limit == "auto":
        raise UserError("flex.enforce_limit: true needs a memory_limit other than 'auto'")
    if sections.report.to and "report_to" in sections.training:
        raise UserError("training.report_to: also set as report.to; keep one of them")
    return Recipe(
        path=path,
        model=sections.model,
        data=sections.data,
        training=sections.training,
        flex=config,
        enforce_limit=enforce_limit,
        parallel=sections.parallel,
        accelerate=sections.accelerate,
        report=sections.report,
        overrides=overrides,
    )


def _describe(error: ValidationError) -> str:
    """The first error as `section.key: what is wrong`."""
    first = error.errors(include_url=False)[0]
    *parents, key = [str(part) for part in first["loc"]] or [""]
    place = ".".join([*parents, key])
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{place}: unknown key; {nearest(key, _keys_below(parents))}"
    if first["type"] in ("missing", "missing_argument"):
        return f"{place}: missing; every recipe needs it"
    if first["type"] == "value_error" and "ctx" in first:
        return f"{place}: {first['ctx']['error']}"
    expected = first["msg"].lower().replace("valid array", "list").replace("an object", "a section with keys")
    return f"{place}: {expected}, found {first['input']!r}"


def _keys_below(parents: Sequence[str]) -> list[str]:
    """Known keys of the section at the path `parents`."""
    section: Any = _Sections
    for name in parents:
        hint = get_type_hints(section)[name]
        section = next((kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)), section)
    return [entry.name for entry in fields(section)]
