"""`flex-trainer accelerate-config RECIPE`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def accelerate_config(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or a shipped recipe such as demo.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values to use instead of the recipe's, as YAML."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (default: one in the cache directory).")
    ] = None,
) -> None:
    """Write the recipe's accelerate section to a file, checked, and print the file's path.

    Use it as: accelerate launch --config_file $(flex-trainer accelerate-config RECIPE) -m flex_trainer.train RECIPE
    """
    from flex_trainer.launch.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())

    from flex_trainer.launch.accelerate import render_accelerate_config

    typer.echo(render_accelerate_config(loaded, output))
