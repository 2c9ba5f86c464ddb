"""`flex-trainer bench NAME`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flex_trainer.bench import BENCHMARKS
from flex_trainer.files import check_writable, write_whole

if TYPE_CHECKING:
    from rich.table import Table


def bench(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"The benchmark: {', '.join(BENCHMARKS)}.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the result to this file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small and fast: shows that it runs.")] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="Of ep and fused: one of their parts; may be repeated. All when left out.",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Of ep's equality: only meshes of so many ranks (2 or 4).")
    ] = None,
) -> None:
    """Measure, and compare with the stated bounds. A missed bound is reported; the exit code stays 0."""
    if json_file is not None:
        check_writable(json_file, "the benchmark result")  # now rather than after the measurement

    from rich.console import Console

    from flex_trainer import bench as benchmarks

    choices: dict[str, Any] = {}
    if part and part != ["all"]:
        choices["parts"] = part
    if ranks is not None:
        choices["num_ranks"] = ranks
    result = benchmarks.run(name, quick=quick, **choices)
    if json_file is not None:
        write_whole(json_file, json.dumps(result, indent=2) + "\n", "the benchmark result")
    console = Console()
    console.print(result_table(result))
    if json_file is not None:
        console.print(f"Written: {json_file}", highlight=False, soft_wrap=True)


def result_table(result: dict[str, Any]) -> Table:
    """Figures and bounds of a benchmark result, one row each, then which of the bounds are met.

    Figures that are tables themselves are in the file alone.
    """
    from rich.table import Table

    table = Table(title=f"Benchmark {result['name']}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, value in result["figures"].items():
        for name, figure in _rows(key, value):
            table.add_row(name, _shown(figure))
    table.add_section()
    for key, value in result["bounds"].items():
        table.add_row(f"bound: {key}", _shown(value))
    table.add_section()
    for number, is_met in result["meets"].items():
        table.add_row(f"requirement {number}", "met" if is_met else "missed", style="green" if is_met else "red")
    return table


def _rows(key: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(key, value)]
    return [(f"{key}/{name}", figure) for name, figure in value.items() if not isinstance(figure, (dict, list))]


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else json.dumps(value)
