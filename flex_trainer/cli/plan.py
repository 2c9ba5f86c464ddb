"""`flex-trainer plan RECIPE [section.key=value ...]`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flex_trainer.errors import UserError
from flex_trainer.files import check_writable, write_whole

_PLOT_KINDS = (".svg", ".png")


def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or a shipped recipe such as demo.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Values to use instead of the recipe's, as YAML."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="A device of the table (h100, h200, b200, a100, mi300x, 64gb-480tflops), machine for this one as "
            "flex-trainer profile measured it, or such a file. Default: this machine's GPU, or else h100.",
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks in all (default: replicate x fsdp x pp).")] = None,
    imbalance: Annotated[
        str, typer.Option("--imbalance", help="Rows of the busiest rank's experts over the mean, one plan for each.")
    ] = "1.0,1.2,2.6",
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the memory of a rank to this .svg or .png (extra: plot).")
    ] = None,
) -> None:
    """Say before a launch what each rank will hold, which plan will be used and how long a step will take.

    Needs no weights, no GPU and, for random models, no network.
    """
    from flex_trainer.launch.recipe import load_recipe

    # What can be wrong is found before torch and transformers take seconds to import.
    loaded = load_recipe(recipe, overrides or ())
    imbalances = _numbers(imbalance)
    if plot is not None and plot.suffix not in _PLOT_KINDS:
        raise UserError(f"--plot {str(plot)!r}: the name must end in {' or '.join(_PLOT_KINDS)}")
    if plot is not None and find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib, which is not installed: pip install matplotlib, or the extra 'plot'")
    for path, what in ((json_file, "the plan"), (plot, "the plot")):
        if path is not None:
            check_writable(path, what)

    from rich.console import Console

    from flex_trainer.estimate import estimate_recipe
    from flex_trainer.estimate.machine import find_hardware, gpu_here
    from flex_trainer.reports.plan_tables import plan_tables

    device = find_hardware(hardware)
    result = estimate_recipe(loaded, device, ranks, imbalances)
    console = Console()
    for part in plan_tables(result):
        console.print(part)
    if hardware is None and gpu_here() is None:
        console.print(
            f"Planned for {device.title}, since none of the known GPUs was found here. For this machine: flex-trainer "
            "profile, then --hardware machine.",
            highlight=False,
            style="yellow",
        )
    if json_file is not None:
        write_whole(json_file, json.dumps(result, indent=2) + "\n", "the plan")
        console.print(f"Written: {json_file}", highlight=False, soft_wrap=True)
    if plot is not None:
        from flex_trainer.reports.plan_plot import write_plan_plot

        write_plan_plot(result, plot)
        console.print(f"Written: {plot}", highlight=False, soft_wrap=True)


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--imbalance {text!r} must be numbers with commas between them, such as 1.0,1.2,2.6") from None
