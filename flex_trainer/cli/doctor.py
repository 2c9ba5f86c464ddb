"""`flex-trainer doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def doctor(
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

    from flex_trainer.doctor import diagnose

    findings = diagnose(config)
    table = Table(show_header=False, box=None, pad_edge=False)
    styles = {"info": "", "ok": "green", "note": "yellow", "problem": "bold red"}
    for finding in findings:
        table.add_row(finding.topic, Text(finding.text, style=styles[finding.level]))
    Console().print(table)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)
