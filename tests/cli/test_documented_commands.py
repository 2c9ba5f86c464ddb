"""Commands in the README, the docs and the heads of recipes: known options, recipes that exist, overrides that fit.
Recipes in the docs: known keys, and models of a size for any machine.

Nothing is planned or trained here. The configuration of a model on a hub is not looked at, which would need a network.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from flex_trainer.cli import app
from flex_trainer.estimate.machine import find_hardware
from flex_trainer.launch.build import build_tokenizer, build_without_weights, check_recipe, random_config
from flex_trainer.launch.recipe import load_recipe
from flex_trainer.recipes import recipe_names, recipe_path

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMANDS = re.compile(r"(?:flex-trainer (plan|train|accelerate-config)|-m flex_trainer\.(train)) ([^)\n]+)")


def _blocks(*languages: str) -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for language, block in _FENCED.findall(path.read_text()):
            if language in languages:
                yield path.name, block


def _code() -> Iterator[tuple[str, str]]:
    """Shell code by where it stands."""
    yield from _blocks("", "bash")
    for name in recipe_names():
        head = recipe_path(name).read_text().split("\nmodel:")[0]
        lines = (line[1:] for line in head.splitlines() if line.startswith("#   "))
        # What follows a command there stands behind two blanks or more.
        yield f"{name}.yaml", "\n".join(re.sub(r"(?<=\S)  +", "  # ", line) for line in lines)


def _documented() -> Iterator[tuple[str, str, list[str]]]:
    for place, text in _code():
        for plain, module, words in _COMMANDS.findall(text.replace("\\\n", " ")):
            arguments = shlex.split(words, comments=True)
            if arguments[0] != "RECIPE":
                yield place, plain or module, arguments


DOCUMENTED = list(_documented())
RECIPES = [(place, block) for place, block in _blocks("yaml") if re.search("^model:", block, re.MULTILINE)]


def test_there_are_such_commands() -> None:
    found = {(place, command) for place, command, _ in DOCUMENTED}
    assert found >= {("README.md", "plan"), ("README.md", "train"), ("README.md", "accelerate-config")}
    assert found >= {("planning-a-run.md", "plan"), ("demo.yaml", "plan"), ("demo_2ranks.yaml", "train")}


@pytest.mark.parametrize(
    ("command", "arguments"),
    [entry[1:] for entry in DOCUMENTED],
    ids=[f"{place}: {command} {' '.join(arguments)}" for place, command, arguments in DOCUMENTED],
)
def test_documented_command_is_taken(command: str, arguments: list[str]) -> None:
    group = typer.main.get_command(app)
    params = group.commands[command].make_context(command, list(arguments)).params  # type: ignore[attr-defined]
    check_recipe(load_recipe(params["recipe"], params["overrides"] or ()))
    if params.get("hardware") not in (None, "machine"):
        find_hardware(params["hardware"])


def test_there_are_such_recipes() -> None:
    assert "configuration.md" in {place for place, _ in RECIPES}


@pytest.mark.parametrize(("place", "text"), RECIPES, ids=[place for place, _ in RECIPES])
def test_documented_recipe_is_taken_and_small(place: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "documented.yaml"
    path.write_text(text)
    recipe = load_recipe(str(path))
    check_recipe(recipe)
    if recipe.model.architecture is not None:
        model = build_without_weights(recipe, random_config(recipe, build_tokenizer(recipe)))
        assert sum(parameter.numel() for parameter in model.parameters()) < 50e6
