"""`flex-trainer doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flex_trainer.errors import UserError


def doctor(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values to use instead of the recipe's, as YAML."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="A recipe whose launch to check: what it starts, and over what.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="An accelerate configuration to check (default: accelerate's own, if any)."),
    ] = None,
) -> None:
    """Show versions, device and memory limits, and look for launch settings that do not do what they say.

    Exits with 1 when something is wrong.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flex_trainer.launch.doctor import diagnose
    from flex_trainer.launch.recipe import load_recipe

    if overrides and recipe is None:
        raise UserError(f"{overrides[0]!r} changes a recipe: name it with --recipe")
    findings = diagnose(config, load_recipe(recipe, overrides or ()) if recipe is not None else None)
    table = Table(show_header=False, box=None, pad_edge=False)
    styles = {"info": "", "ok": "green", "note": "yellow", "problem": "bold red"}
    for finding in findings:
        table.add_row(finding.topic, Text(finding.text, style=styles[finding.level]))
    Console().print(table)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)
