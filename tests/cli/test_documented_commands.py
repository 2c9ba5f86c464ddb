"""Commands in the README, the docs and the heads of recipes: known options, recipes that exist, overrides that are taken.

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
from flex_trainer.launch.build import check_recipe
from flex_trainer.launch.recipe import load_recipe
from flex_trainer.recipes import recipe_names, recipe_path

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMANDS = re.compile(r"(?:flex-trainer (plan|train|accelerate-config)|-m flex_trainer\.(train)) ([^)\n]+)")


def _code() -> Iterator[tuple[str, str]]:
    """Shell code by where it stands."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for language, block in _FENCED.findall(path.read_text()):
            if language in ("", "bash"):
                yield path.name, block
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
