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
) -> None:
    """Measure, and compare with the stated bounds. A missed bound is reported; the exit code stays 0."""
    if json_file is not None:
        check_writable(json_file, "the benchmark result")  # now rather than after the measurement

    from rich.console import Console

    from flex_trainer import bench as benchmarks

    result = benchmarks.run(name, quick=quick)
    if json_file is not None:
        write_whole(json_file, json.dumps(result, indent=2) + "\n", "the benchmark result")
    console = Console()
    console.print(result_table(result))
    if json_file is not None:
        console.print(f"Written: {json_file}", highlight=False, soft_wrap=True)


def result_table(result: dict[str, Any]) -> Table:
    """Figures and bounds of a benchmark result, one row each, then which of the bounds are met."""
    from rich.table import Table

    table = Table(title=f"Benchmark {result['name']}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, value in result["figures"].items():
        table.add_row(key, _shown(value))
    table.add_section()
    for key, value in result["bounds"].items():
        table.add_row(f"bound: {key}", _shown(value))
    table.add_section()
    for number, is_met in result["meets"].items():
        table.add_row(f"requirement {number}", "met" if is_met else "missed", style="green" if is_met else "red")
    return table


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else json.dumps(value)
