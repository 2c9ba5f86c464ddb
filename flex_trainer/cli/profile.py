"""`flex-trainer profile`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def profile(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (default: machine.json in the cache).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, once each: shows that it runs.")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or cuda (default: the GPU if there is one).")
    ] = None,
    offload_to: Annotated[
        str, typer.Option("--offload-to", help="As flex.offload_to: host, or a directory for the file (CPU device).")
    ] = "host",
) -> None:
    """Measure this machine: matrix products, memory, and what each mitigation costs. Kept for flex-trainer plan."""
    from rich.console import Console

    from flex_trainer.estimate.machine import machine_file, save_machine
    from flex_trainer.estimate.measure import measure_machine
    from flex_trainer.reports.plan_tables import machine_tables

    measured = measure_machine(device, offload_to, quick=quick)
    path = save_machine(measured, output or machine_file())
    console = Console()
    for part in machine_tables(measured):
        console.print(part)
    console.print(f"Written: {path}", highlight=False, soft_wrap=True)
    name = "machine" if output is None else shlex.quote(str(output))
    console.print(f"Use it with: flex-trainer plan RECIPE --hardware {name}", highlight=False, soft_wrap=True)
