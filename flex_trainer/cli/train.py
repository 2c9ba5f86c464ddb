"""`flex-trainer train RECIPE [section.key=value ...]`."""

from __future__ import annotations

from typing import Annotated

import typer


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or a shipped recipe such as demo.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values to use instead of the recipe's, as YAML."),
    ] = None,
) -> None:
    """Train as a recipe says, and end with a summary.

    For several processes: accelerate launch --config_file $(flex-trainer accelerate-config RECIPE)
    -m flex_trainer.train RECIPE
    """
    from flex_trainer.launch.recipe import load_recipe

    # The recipe is read first: a mistake in it is told before torch and transformers take seconds to import.
    loaded = load_recipe(recipe, overrides or ())

    from flex_trainer.launch.stopping import stop_as_exit_code
    from flex_trainer.train import run

    with stop_as_exit_code():
        run(loaded)
